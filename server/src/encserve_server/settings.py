"""Every setting of the server: one frozen dataclass, validated when it is built.

Flag > environment variable > default. A bad value stops the start-up. `__main__` makes the flags from these fields, so
that a setting is declared once: the flag of `max_batch_tokens` is `--max-batch-tokens`, its environment variable
`ENCSERVE_MAX_BATCH_TOKENS`, its help the text here.
"""

import dataclasses
import math
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MIB = 1024 * 1024


def _setting(
    default: Any,
    text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    is_secret: bool = False,
) -> Any:
    """A field with its help text and bounds; one that is secret has no flag, and is shown nowhere."""
    metadata = {"help": text, "minimum": minimum, "maximum": maximum, "is_secret": is_secret}
    return dataclasses.field(default=default, metadata=metadata, repr=not is_secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The server's settings; see each one's text for what it trades off."""

    model_repository: Path = dataclasses.field(
        metadata={"help": "Directory of model bundles, NAME/VERSION/ in it, as encserve-export writes them."}
    )
    model: tuple[str, ...] = _setting(
        (),
        "Model to serve, NAME for its newest version or NAME@VERSION; may be given several times, the first is the "
        "default one. Without it every model in the repository is served.",
    )
    cache_dir: Path | None = _setting(  # noqa: RUF009 - a field, as all of them
        None,
        "Folder of weights as ONNX Runtime's CPU kernels take them, which all sessions and all processes of this user "
        "map, so that they are in memory once. It takes about 1.8 times the weights on the disk for each graph and "
        "must not be in memory (tmpfs). Where it cannot be used, as when another user may write to it, the log says so "
        "and every session has its own copy; off asks for that. Default: $XDG_CACHE_HOME/encserve or "
        "~/.cache/encserve.",
    )
    latest_versions: int = _setting(
        1,
        "How many of a model's newest versions are served where --model names none; the newest is the default. With "
        "more, callers who name a version can go on with it after the next one has come; each takes memory.",
        minimum=1,
    )
    model_poll_seconds: float = _setting(
        10.0,
        "How often to look for new versions in the model repository. One that is new, and the same at two looks in a "
        "row, is loaded beside what is served and takes over. 0 looks only at SIGHUP, which always loads at once.",
        minimum=0,
    )
    device: Literal["auto", "cpu", "cuda"] = _setting(
        "auto",
        "Where models run. cuda fails at start if CUDA does not really load; auto takes the CPU then and says so in "
        "the log and in encserve_model_info.",
    )
    engine: Literal["onnxruntime", "openvino"] = _setting(
        "onnxruntime",
        "What runs models. openvino is for the CPU only and needs encserve-server[openvino].",
    )
    precision: Literal["model", "float32", "bfloat16"] = _setting(
        "model",
        "What models compute in. model is what the bundle has. bfloat16 needs --engine openvino and a CPU with "
        "AVX512-BF16 or AMX; rows then differ from float32 by about 1 % of their norm. What cannot be had stops the "
        "start.",
    )
    host: str = _setting(
        "127.0.0.1",
        "Address for gRPC, HTTP and metrics. Loopback by default, because none is authenticated; 0.0.0.0 in a "
        "container.",
    )
    grpc_port: int = _setting(50051, "Port for gRPC; 0 takes a free one.", minimum=0, maximum=65535)
    metrics_port: int = _setting(
        9464, "Port for /metrics and /healthz over HTTP; 0 takes a free one.", minimum=0, maximum=65535
    )
    http_port: int | None = _setting(
        None,
        "Port for embeddings over HTTP, as OpenAI and text-embeddings-inference have them (docs/http.md); 0 takes a "
        "free one. Needs encserve-server[http]. Default: no HTTP.",
        minimum=0,
        maximum=65535,
    )
    tls_cert_file: Path | None = _setting(  # noqa: RUF009 - a field, as all of them
        None,
        "PEM file of the server's certificate and the intermediate certificates: gRPC, HTTP and the metrics "
        "page then speak TLS 1.2 or later, and nothing else (docs/security.md). Read again when it changes. Needs "
        "encserve-server[tls]. Default: plaintext.",
    )
    tls_key_file: Path | None = _setting(  # noqa: RUF009
        None, "PEM file of the private key of --tls-cert-file, without a password."
    )
    tls_client_ca_file: Path | None = _setting(  # noqa: RUF009 - a field, as all of them
        None,
        "PEM file of the authorities of callers' certificates: gRPC, HTTP and /metrics then need a certificate of one "
        "of these; /healthz never does. Default: callers need no certificate.",
    )
    max_batch_tokens: int | None = _setting(
        None,
        "Most padded tokens (longest x count) in a batch. More fills the device better until activations leave its "
        "cache, and lengthens the wait of the next caller. Default: measured when the model is loaded for the first "
        "time, and remembered beside its bundle; with --no-tune-batches 512 on the CPU, 16384 on CUDA.",
        minimum=1,
    )
    tune_batches: bool = _setting(
        True,
        "Whether to measure the best --max-batch-tokens when a model is loaded for the first time on a machine, which "
        "takes a few seconds. Where the machine is too busy to tell, the default for the device is taken.",
    )
    max_batch_sequences: int = _setting(256, "Most sequences in a batch, whatever their length.", minimum=1)
    max_padding_fraction: float | None = _setting(
        None,
        "Greatest share of padding in a batch. Low saves compute, high saves runs. Default: 0.25 on the CPU, 0.5 "
        "on CUDA.",
        minimum=0,
        maximum=1,
    )
    max_queue_tokens: int = _setting(
        65536,
        "Most tokens waiting, per model; more are refused with RESOURCE_EXHAUSTED, and then everything until a quarter "
        "of the queue is free, so that short calls do not keep long ones out. It bounds the wait; too low refuses "
        "bursts that could have been served.",
        minimum=1,
    )
    max_request_sequences: int = _setting(
        256, "Most inputs of one request; over HTTP, see --max-http-inputs.", minimum=1
    )
    max_http_inputs: int = _setting(
        2048,
        "Most inputs of one request over HTTP, on the routes of OpenAI, text-embeddings-inference and Cohere. They are "
        "worked on in parts of at most a quarter of the queue.",
        minimum=1,
    )
    max_text_bytes: int = _setting(256 * 1024, "Longest text, in bytes of UTF-8.", minimum=1)
    max_queue_text_mib: int = _setting(
        16,
        "Most text waiting to be tokenized, per model, in MiB; more is refused with RESOURCE_EXHAUSTED.",
        minimum=1,
    )
    max_vocabulary_mib: int = _setting(
        512,
        "Most memory, per model, that OUTPUT_KIND_SPARSE takes beside its weights, in MiB: before they are pooled, "
        "every token has a number for every word of the vocabulary. Batches that run at once share it; less means more "
        "and smaller parts.",
        minimum=1,
    )
    max_request_mib: int = _setting(
        4,
        "Largest request over gRPC, in MiB. It bounds how long parsing one holds up the others.",
        minimum=1,
        maximum=1024,
    )
    max_http_request_mib: int = _setting(8, "Largest body of a request over HTTP, in MiB.", minimum=1, maximum=1024)
    max_response_mib: int = _setting(
        64,
        "Largest reply, in MiB. A larger one is refused, before any compute if its size is known by then. Callers need "
        "the same receive limit; the Python client has it.",
        minimum=1,
        maximum=1024,
    )
    max_in_flight_mib: int | None = _setting(
        None,
        "Most memory for requests and replies together, over all protocols, in MiB; a reply counts until it has been "
        "sent. Beyond that calls are refused with RESOURCE_EXHAUSTED, over HTTP 429. Default: a quarter of the memory "
        "that this process may use, at most 1024, and room for one request and one reply of the largest size.",
        minimum=1,
    )
    max_connections: int = _setting(
        1000,
        "Most open connections of the gRPC port, and of the HTTP port. A further one closes an idle one.",
        minimum=1,
    )
    max_stream_in_flight: int = _setting(
        64, "Requests of one stream that are read ahead and worked on at a time.", minimum=1
    )
    inspect: bool = _setting(
        True,
        "Whether to answer Inspect. Its graph is loaded when it is first asked for and takes about as much memory as "
        "the model; it runs in a thread of its own.",
    )
    max_inspect_tokens: int = _setting(
        256,
        "Longest sequence that Inspect takes, in tokens. Attention weights grow with its square: for 12 layers of 12 "
        "heads 256 tokens give 38 MB, 512 give 151 MB.",
        minimum=1,
    )
    max_inspections: int = _setting(
        4,
        "Most inspections waiting, running, or being sent, per model; more are refused with RESOURCE_EXHAUSTED.",
        minimum=1,
    )
    intra_op_threads: int | None = _setting(
        None, "Threads that run batches on the CPU. Default: the CPUs this process may use.", minimum=1
    )
    parallel_batches: int | None = _setting(
        None,
        "Batches that run at once. On the CPU each has its share of --intra-op-threads then, and a batch that "
        "runs alone has them all. More makes better use of the CPU when much is waiting; above 1 the weights are held "
        "in memory twice where --cache-dir is off. Default: a batch for each thread, at most 8; on CUDA 2.",
        minimum=1,
    )
    tokenizer_threads: int = _setting(1, "Threads that tokenize; a text is tokenized by one.", minimum=1)
    grace_seconds: float = _setting(
        25.0,
        "After SIGTERM, how long requests in flight may take to finish. Keep it under the orchestrator's kill timeout.",
        minimum=0,
    )
    drain_delay_seconds: float = _setting(
        0.0,
        "After SIGTERM, how long to go on accepting while health already says NOT_SERVING, so that load balancers "
        "notice first. It is not part of --grace-seconds.",
        minimum=0,
    )
    max_connection_age_seconds: float | None = _setting(
        None,
        "How long a caller may keep one connection, give or take a tenth; then it is asked to make a new one, which no "
        "call notices. Clients that take turns among the addresses of a DNS name look for new servers only then. "
        "Default: for ever.",
        minimum=1,
    )
    http_idle_seconds: float = _setting(
        620.0,
        "Seconds after which an idle HTTP connection is closed. Set it higher than the same time of every proxy in "
        "front of the server, because a request that a proxy sends while the server closes is lost.",
        minimum=1,
    )
    stall_seconds: float = _setting(
        60.0,
        "How long one batch may run before health says NOT_SERVING. Time in which the whole process stands still, such "
        "as after SIGSTOP, does not count.",
        minimum=0.1,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "Least severe log lines to write.")
    log_format: Literal["json", "text"] = _setting("json", "One JSON object a line, or text for people.")
    trace_endpoint: str | None = _setting(
        None,
        "Where traces are sent by OTLP over gRPC: http://HOST:PORT, or https:// for TLS. Needs "
        "encserve-server[tracing]. Default: no tracing.",
    )
    trace_sample_ratio: float = _setting(
        1.0,
        "How many requests are traced, from 0 to 1, of those whose callers do not say. A caller's own decision, in its "
        "traceparent, is kept.",
        minimum=0,
        maximum=1,
    )
    http_truncate: bool = _setting(
        True,
        "Whether texts that are too long are cut over HTTP where a request does not say; otherwise they are refused.",
    )
    strict_http: bool = _setting(
        False,
        "Whether fields that a route over HTTP does not know are refused. Otherwise they are ignored, with one warning "
        "in the log for each name.",
    )
    served_model_name: tuple[str, ...] = _setting(
        (),
        "Another name of a model, as ALIAS=NAME or ALIAS=NAME@VERSION; may be given several times. The id on the hub "
        "that a model was exported from is a name without this.",
    )
    accept_any_model_name: bool = _setting(
        False, "Whether any model name is taken, if one model is served: for tools whose model name cannot be set."
    )
    cors_allow_origin: tuple[str, ...] = _setting(
        (),
        "Origin whose web pages may call the HTTP port from a browser, as https://example.org, or * for all; may be "
        "given several times. Default: none.",
    )
    open_inference: bool = _setting(
        True,
        "Whether to serve the Open Inference Protocol v2 too, on the gRPC port and on that of HTTP, for the clients of "
        "KServe, Triton and MLServer.",
    )
    reflection: bool = _setting(True, "Whether to serve gRPC reflection, so that grpcurl and its kind need no .proto.")
    api_key: str | None = _setting(
        None,
        "The key that every call must present, as `authorization: Bearer`, `api-key` or `x-api-key` (docs/callers.md). "
        "Default: everybody may call.",
        is_secret=True,
    )
    api_key_file: Path | None = _setting(  # noqa: RUF009 - a dataclasses.field
        None,
        "File of the key that every call must present, or of several keys, one on each line. It is read again when it "
        "changes. In place of ENCSERVE_API_KEY.",
    )
    callers: Path | None = _setting(  # noqa: RUF009 - as above
        None,
        "TOML file of callers, each with its keys, certificates, models and rate (docs/callers.md). It is read again "
        "when it changes. In place of a single key.",
    )
    public_listing: bool = _setting(
        False,
        "Whether everybody may list what is served, without a key: reflection, ListModels, GetModel, /v1/models, "
        "/info, /docs, and the metadata of the Open Inference Protocol. Health is always open.",
    )
    trust_fairness_id: bool = _setting(
        False,
        "Whether the header x-gateway-inference-fairness-id names the caller, in metrics, logs and shares, at most 128 "
        "names. With --callers it is taken from callers with proxy = true; otherwise from everybody, so use it only "
        "where every call comes through a proxy that sets it.",
    )
    access_log: bool = _setting(
        False,
        "Whether to write one JSON object a line to standard output for each call. Otherwise only refused and failed "
        "calls are logged, at most one line a second for each caller and reason.",
    )

    def __post_init__(self) -> None:
        """Raises ValueError with the setting, its bounds and the value."""
        for field in dataclasses.fields(self):
            value, minimum, maximum = (
                getattr(self, field.name),
                field.metadata.get("minimum"),
                field.metadata.get("maximum"),
            )
            if value is None:
                continue
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{field.name} must be finite; was {value}")
            if minimum is not None and value < minimum:
                raise ValueError(f"{field.name} must be >= {minimum:g}; was {value}")
            if maximum is not None and value > maximum:
                raise ValueError(f"{field.name} must be <= {maximum:g}; was {value}")
        if self.precision == "bfloat16" and self.engine != "openvino":
            raise ValueError("precision bfloat16 needs engine openvino; onnxruntime computes in what the bundle has")
        if self.device == "cuda" and self.engine == "openvino":
            raise ValueError("device cuda needs engine onnxruntime; openvino runs on the CPU only")
        if self.max_in_flight_mib is not None and self.max_in_flight_mib < self._least_in_flight_mib:
            request = (
                "max_request_mib" if self.http_port is None else "the larger of max_request_mib, max_http_request_mib"
            )
            least = f"{self._least_in_flight_mib}, max_response_mib + {request}"
            raise ValueError(f"max_in_flight_mib must be >= {least}; was {self.max_in_flight_mib}")
        self._check_cache_dir()
        self._check_trace_endpoint()
        self._check_names()
        self._check_tls()
        self._check_keys()
        if not self.host:
            raise ValueError("host must not be empty; 0.0.0.0 is every address")
        self._check_ports()

    def _check_cache_dir(self) -> None:
        if self.cache_dir == Path():
            raise ValueError("cache_dir must name a folder, or be off; was empty or the working directory")

    def _check_names(self) -> None:
        seen = set()
        for its in self.served_model_name:
            alias, _, name = its.partition("=")
            if not alias or not name or "@" in alias or alias in seen:
                raise ValueError(f"served_model_name must be ALIAS=NAME, each alias once and without @; was {its!r}")
            seen.add(alias)
        for origin in self.cors_allow_origin:
            if origin != "*" and not re.fullmatch(r"[\w.+-]+://[^/\s]+", origin):
                raise ValueError(f"cors_allow_origin must be SCHEME://HOST, SCHEME://HOST:PORT or *; was {origin!r}")

    def _check_tls(self) -> None:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError(
                f"tls_cert_file and tls_key_file go together; were {self.tls_cert_file} and {self.tls_key_file}"
            )
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file needs tls_cert_file and tls_key_file")

    def _check_keys(self) -> None:
        given = {"ENCSERVE_API_KEY": self.api_key, "api_key_file": self.api_key_file, "callers": self.callers}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} must not be given together; callers takes any number of keys")

    def in_force(self) -> dict[str, Any]:
        """The settings, for a log line: secrets are left out, and so is who a URL logs in as."""
        shown = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("is_secret"):
                value = None if value is None else "(secret)"
            elif isinstance(value, Path):
                value = str(value)
            elif isinstance(value, str):
                value = re.sub(r"(?<=://)[^/@]*@", "", value)
            shown[field.name] = value
        return shown

    def _check_ports(self) -> None:
        ports: dict[int, str] = {}
        for name in ("grpc_port", "metrics_port", "http_port"):
            port = getattr(self, name)
            if port and port in ports:
                raise ValueError(f"{ports[port]} and {name} must differ; both were {port}")
            ports[port] = name

    def _check_trace_endpoint(self) -> None:
        if not self.trace_endpoint:
            return
        url = urllib.parse.urlsplit(self.trace_endpoint)
        if url.scheme not in ("http", "https") or not url.netloc or url.path.strip("/"):
            raise ValueError(
                f"trace_endpoint must be http://HOST:PORT or https://HOST:PORT; was {self.trace_endpoint!r}"
            )

    @property
    def aliases(self) -> dict[str, str]:
        """The models that other names stand for, by those names."""
        return {alias: name for alias, _, name in (its.partition("=") for its in self.served_model_name)}

    @property
    def _least_in_flight_mib(self) -> int:
        """One request and one reply of the largest size."""
        http_mib = 0 if self.http_port is None else self.max_http_request_mib
        return max(self.max_request_mib, http_mib) + self.max_response_mib

    def batch_tokens_for(self, device: str) -> int:
        """The budget of padded tokens on "cpu" or "cuda"."""
        return self.max_batch_tokens or {"cpu": 512, "cuda": 16384}[device]

    def in_flight_bytes_for(self, usable_bytes: int) -> int:
        """The budget for the bytes of requests and replies, where the process may use so much memory."""
        if self.max_in_flight_mib is not None:
            return self.max_in_flight_mib * MIB
        return max(min(usable_bytes // 4, 1024 * MIB), self._least_in_flight_mib * MIB)

    def padding_fraction_for(self, device: str) -> float:
        """The greatest share of padding on "cpu" or "cuda"."""
        default = {"cpu": 0.25, "cuda": 0.5}[device]
        return default if self.max_padding_fraction is None else self.max_padding_fraction
