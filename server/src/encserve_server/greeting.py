"""What a server tells a person when it serves: its addresses, and a command that tries it."""

import importlib.util
import json
from collections.abc import Sequence

from encserve.extras import install_line
from encserve_server.models.served import ServedModel
from encserve_server.protocols.http_json.kinds import EMBEDDING, MULTI_VECTOR, SCORES, SPARSE, routes_of
from encserve_server.settings import Settings
from encserve_server.system.cpus import cpu_features

_BFLOAT16_FEATURES = {"avx512_bf16", "amx_bf16"}
_TEXT = "one text"
_OTHER_TEXT = "another text"
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - no socket listens on it here


def greeting(
    settings: Settings, models: Sequence[ServedModel], *, grpc_port: int, http_port: int | None, metrics_port: int
) -> list[str]:
    """Return the lines.

    Args:
        settings: The settings of the server.
        models: The served models, the default model first.
        grpc_port: The port of gRPC.
        http_port: The port of HTTP; None without HTTP.
        metrics_port: The port of the metrics page.
    """
    host = _ANY_ADDRESS.get(settings.host, f"[{settings.host}]" if ":" in settings.host else settings.host)
    scheme = "http" if settings.tls_cert_file is None else "https"
    names = ", ".join(model.bundle.name for model in models)
    lines = [f"Serving {names}", f"  gRPC     {host}:{grpc_port}"]
    if http_port is not None:
        lines.append(f"  HTTP     {scheme}://{host}:{http_port}/docs")
    lines.append(f"  metrics  {scheme}://{host}:{metrics_port}/metrics")
    url = None if http_port is None else f"{scheme}://{host}:{http_port}"
    lines += ["Try it:", f"  {_command(settings, models[0], f'{host}:{grpc_port}', url)}"]
    return lines + _advice(settings, models)


def _command(settings: Settings, model: ServedModel, target: str, url: str | None) -> str:
    """Return a command that asks the default model."""
    takes_vectors = model.bundle.graph.takes_vectors
    needs_certificate = settings.tls_client_ca_file is not None
    if url is None or takes_vectors or needs_certificate:
        # With TLS and keys, the command needs files that only the user knows.
        return f"encserve {_verb(model)} --target {target}"
    route, body = _request(model)
    command = ["curl", f"{url}{route}"]
    if settings.tls_cert_file is not None:
        command.append(f"--cacert {settings.tls_cert_file}")
    if settings.api_key is not None:
        command.append('-H "authorization: Bearer $ENCSERVE_API_KEY"')
    elif settings.api_key_file is not None or settings.callers is not None:
        command.append('-H "authorization: Bearer $KEY"')
    return " ".join([*command, f"-d '{json.dumps(body)}'"])


def _verb(model: ServedModel) -> str:
    """Return the command of `encserve`, with its arguments, for the output that the model was trained for."""
    scores = model.bundle.scores
    if model.bundle.graph.takes_vectors or (scores is not None and len(scores.labels) > 1):
        return "models"
    if scores is not None:
        return f'rank "{_TEXT}" "{_OTHER_TEXT}"'
    return f'embed "{_TEXT}"' if model.tokenizer is not None else "embed --ids 1,2,3"


def _request(model: ServedModel) -> tuple[str, dict[str, object]]:
    """Return a route for the output that the model was trained for, and the body of a request."""
    routes = routes_of(model.bundle)
    if SCORES in routes:
        route = routes[SCORES][0]
        if route == "/rerank":
            return route, {"query": _TEXT, "documents": [_TEXT, _OTHER_TEXT]}
        template = model.bundle.template
        if template is not None and template.between is not None:  # the model takes pairs only
            return "/predict", {"inputs": [[_TEXT, _OTHER_TEXT]]}
        return route, {"input": _TEXT}
    value = _TEXT if model.tokenizer is not None else [[1, 2, 3]]
    for output, field in ((EMBEDDING, "input"), (SPARSE, "inputs"), (MULTI_VECTOR, "input")):
        if output in routes:
            task = {"task": "token_embed"} if output == MULTI_VECTOR else {}
            return routes[output][0], {field: value, **task}
    return "/embed_all", {"inputs": value}


def _advice(settings: Settings, models: Sequence[ServedModel]) -> list[str]:
    """Return a faster setting for this machine, or nothing."""
    can_bfloat16 = bool(_BFLOAT16_FEATURES & set(cpu_features().split()))
    runs_float32 = all(it.engine_info.device == "cpu" and it.engine_info.precision == "float32" for it in models)
    if not can_bfloat16 or not runs_float32 or settings.precision != "model":
        return []
    install = "" if importlib.util.find_spec("openvino") else f" ({install_line('openvino')})"
    return [
        "This CPU computes bfloat16, with about 1.5 times as many texts per second: --engine openvino --precision "
        f"bfloat16{install}. Vectors then differ by about 1 %"
    ]
