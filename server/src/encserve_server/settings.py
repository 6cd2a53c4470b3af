"""All settings of the server: a frozen dataclass that validates its values.

A flag overrides its environment variable, and the variable overrides the default. If a value is invalid, the server
does not start. `__main__` creates the flags from these fields. For example, `max_batch_tokens` has the flag
`--max-batch-tokens` and the environment variable `ENCSERVE_MAX_BATCH_TOKENS`.
"""

import dataclasses
import math
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MIB = 1024 * 1024

# The headings of the help, in order.
SECTIONS = (
    "Options",
    "Models",
    "Callers and encryption",
    "Batches and threads",
    "Limits",
    "HTTP and other protocols",
    "Inspections",
    "Restarts and shutdown",
    "Logs and traces",
)


def _setting(
    default: Any,
    text: str,
    *,
    section: str,
    minimum: float | None = None,
    maximum: float | None = None,
    is_secret: bool = False,
) -> Any:
    """Return a dataclass field with its help text, the heading of the help, and bounds.

    A secret has no flag and is never printed.
    """
    metadata = {"help": text, "section": section, "minimum": minimum, "maximum": maximum, "is_secret": is_secret}
    return dataclasses.field(default=default, metadata=metadata, repr=not is_secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of the server. Each field has its help text in the code."""

    model_repository: Path = dataclasses.field(
        metadata={
            "help": "Directory of model bundles, in folders NAME/VERSION. encserve-export writes these folders.",
            "section": "Options",
        }
    )
    model: tuple[str, ...] = _setting(
        (),
        "Model to serve: NAME for the newest version of the model, or NAME@VERSION. May be given several times; the "
        "first model is the default. Without this setting, all models in the repository are served.",
        section="Options",
    )
    cache_dir: Path | None = _setting(  # noqa: RUF009 - a dataclass field
        None,
        "Folder for weights in the layout of ONNX Runtime's CPU kernels. All sessions and all processes of this user "
        "map these files, so the weights are in memory only once. For each graph, the files take about 1.8 times the "
        "disk space of the weights. The folder must not be in memory (tmpfs). The folder is not usable if, for "
        "example, another user may write to it. The server then logs this, and each session has its own copy of the "
        "weights. off disables the folder. Default: $XDG_CACHE_HOME/encserve or ~/.cache/encserve.",
        section="Models",
    )
    latest_versions: int = _setting(
        1,
        "Number of versions to serve of each model, unless --model names a version. The newest versions are served, "
        "and the newest is the default. With more than 1, callers can still use an older version after a new version "
        "is added. Each version takes memory.",
        minimum=1,
        section="Models",
    )
    model_poll_seconds: float = _setting(
        10.0,
        "Seconds between checks of the model repository for new versions. The server loads a new version when two "
        "checks in a row find the same files. It serves the old version until the new version is ready. With 0, the "
        "server checks only at SIGHUP. SIGHUP always loads at once.",
        minimum=0,
        section="Models",
    )
    device: Literal["auto", "cpu", "cuda"] = _setting(
        "auto",
        "Device for the models. With cuda, the server does not start if CUDA cannot be loaded. If CUDA cannot be "
        "loaded, auto uses the CPU. The log and the metric encserve_model_info show the device.",
        section="Options",
    )
    engine: Literal["onnxruntime", "openvino"] = _setting(
        "onnxruntime",
        "Library that runs the models. openvino runs only on the CPU and needs encserve[openvino].",
        section="Options",
    )
    precision: Literal["model", "float32", "bfloat16"] = _setting(
        "model",
        "Number type in which the models compute. model means the number type of the bundle. bfloat16 needs --engine "
        "openvino and a CPU with AVX512-BF16 or AMX; vectors then differ from float32 by about 1 % of their norm. If "
        "the precision is not available, the server does not start.",
        section="Models",
    )
    host: str = _setting(
        "127.0.0.1",
        "Address for gRPC, HTTP and metrics. The default is loopback, because by default callers are not "
        "authenticated. Use 0.0.0.0 in a container.",
        section="Options",
    )
    grpc_port: int = _setting(50051, "Port for gRPC; 0 means a free port.", minimum=0, maximum=65535, section="Options")
    metrics_port: int = _setting(
        9464,
        "Port for /metrics and /healthz over HTTP; 0 means a free port.",
        minimum=0,
        maximum=65535,
        section="Options",
    )
    http_port: int | None = _setting(
        None,
        "Port for embeddings over HTTP, for example with the API of OpenAI or text-embeddings-inference "
        "(docs/reference/http.md); 0 means a free port. Needs encserve[http]. encserve-server has no HTTP port by "
        "default.",
        minimum=0,
        maximum=65535,
        section="Options",
    )
    tls_cert_file: Path | None = _setting(  # noqa: RUF009 - a dataclass field
        None,
        "PEM file with the certificate of the server and the intermediate certificates. If this file is set, gRPC, "
        "HTTP and the metrics page accept only TLS 1.2 or later (docs/how-to/tls.md). The file is reloaded when it "
        "changes. Needs encserve[tls]. Default: plaintext.",
        section="Callers and encryption",
    )
    tls_key_file: Path | None = _setting(  # noqa: RUF009 - a dataclass field
        None,
        "PEM file with the private key for --tls-cert-file, without a password.",
        section="Callers and encryption",
    )
    tls_client_ca_file: Path | None = _setting(  # noqa: RUF009 - a dataclass field
        None,
        "PEM file with the certificate authorities of the callers. If this file is set, callers of gRPC, HTTP and "
        "/metrics need a certificate from one of these authorities. /healthz needs no certificate. Default: callers "
        "need no certificate.",
        section="Callers and encryption",
    )
    max_batch_tokens: int | None = _setting(
        None,
        "Maximum number of tokens in a batch, padding included (longest sequence x number of sequences). Larger "
        "batches use the device better, until the activations no longer fit into the cache of the device. With larger "
        "batches, the next caller waits longer. By default, the server measures the value when it first loads the "
        "model, and stores the value next to the bundle. With --no-tune-batches: 512 on the CPU, 16384 on CUDA.",
        minimum=1,
        section="Batches and threads",
    )
    tune_batches: bool = _setting(
        True,
        "Whether to measure the best --max-batch-tokens when a model is loaded for the first time on a machine. This "
        "takes a few seconds. If the machine is too busy for the measurement, the default of --no-tune-batches is "
        "used.",
        section="Batches and threads",
    )
    max_batch_sequences: int = _setting(
        256, "Maximum number of sequences in a batch, of any length.", minimum=1, section="Batches and threads"
    )
    max_padding_fraction: float | None = _setting(
        None,
        "Maximum fraction of padding in a batch. A low value computes less padding, a high value needs fewer batches. "
        "Default: 0.25 on the CPU, 0.5 on CUDA.",
        minimum=0,
        maximum=1,
        section="Batches and threads",
    )
    max_queue_tokens: int = _setting(
        65536,
        "Maximum number of waiting tokens, per model. A request beyond the limit is refused with RESOURCE_EXHAUSTED. "
        "Then all requests are refused until a quarter of the queue is free, so that short requests do not keep out "
        "long ones. The setting limits the waiting time; a low value refuses bursts that the server could serve.",
        minimum=1,
        section="Limits",
    )
    max_request_sequences: int = _setting(
        2048,
        "Maximum number of inputs in one request. A request with many inputs or long inputs runs in parts, and takes "
        "at most a quarter of the queue.",
        minimum=1,
        section="Limits",
    )
    max_text_bytes: int = _setting(
        256 * 1024, "Maximum length of a text, in bytes of UTF-8.", minimum=1, section="Limits"
    )
    max_queue_text_mib: int = _setting(
        16,
        "Maximum size of the texts that wait for the tokenizer, per model, in MiB. More texts are refused with "
        "RESOURCE_EXHAUSTED.",
        minimum=1,
        section="Limits",
    )
    max_vocabulary_mib: int = _setting(
        512,
        "Maximum memory for computing OUTPUT_KIND_SPARSE, per model, in MiB, without the weights. Before pooling, each "
        "token has a number for each entry of the vocabulary. Concurrent batches share this memory. A low value splits "
        "batches into more and smaller parts.",
        minimum=1,
        section="Limits",
    )
    max_request_mib: int = _setting(
        4,
        "Maximum size of a request over gRPC, in MiB. Other calls wait while a request is parsed, so the setting "
        "limits this wait.",
        minimum=1,
        maximum=1024,
        section="Limits",
    )
    max_http_request_mib: int = _setting(
        8, "Maximum size of an HTTP request body, in MiB.", minimum=1, maximum=1024, section="Limits"
    )
    max_response_mib: int = _setting(
        64,
        "Maximum size of a reply, in MiB. A request with a larger reply is refused, if possible before the model runs. "
        "gRPC clients must accept messages of this size; the Python client does.",
        minimum=1,
        maximum=1024,
        section="Limits",
    )
    max_in_flight_mib: int | None = _setting(
        None,
        "Maximum memory for requests and replies of all protocols together, in MiB. A reply counts until it is sent. "
        "Calls beyond the limit are refused with RESOURCE_EXHAUSTED, over HTTP with 429. Default: a quarter of the "
        "memory that this process may use, at most 1024. But the default is never less than the largest request and "
        "the largest reply together.",
        minimum=1,
        section="Limits",
    )
    max_connections: int = _setting(
        1000,
        "Maximum number of open connections on each port, gRPC and HTTP. A new connection beyond the limit closes an "
        "idle connection.",
        minimum=1,
        section="Limits",
    )
    max_stream_in_flight: int = _setting(
        64,
        "Maximum number of requests of one stream that are read and not yet answered.",
        minimum=1,
        section="Limits",
    )
    inspect: bool = _setting(
        True,
        "Whether to answer Inspect. The first call loads a second graph, which takes about as much memory as the "
        "model. The second graph runs in a separate thread.",
        section="Inspections",
    )
    max_inspect_tokens: int = _setting(
        256,
        "Maximum length of a sequence for Inspect, in tokens. Attention weights grow with the square of the length. "
        "Example with 12 layers of 12 heads: 38 MB for 256 tokens, 151 MB for 512.",
        minimum=1,
        section="Inspections",
    )
    max_inspections: int = _setting(
        4,
        "Maximum number of open inspections, per model. An inspection is open while it waits, runs or sends its reply. "
        "More inspections are refused with RESOURCE_EXHAUSTED.",
        minimum=1,
        section="Inspections",
    )
    intra_op_threads: int | None = _setting(
        None,
        "Threads that run batches on the CPU. Default: one for each CPU that this process may use.",
        minimum=1,
        section="Batches and threads",
    )
    parallel_batches: int | None = _setting(
        None,
        "Maximum number of batches that run at the same time. On the CPU, the batches divide --intra-op-threads among "
        "them, and a single batch uses all threads. A higher value uses the CPU better if many requests wait. Above 1, "
        "the weights are in memory twice if --cache-dir is off. Default on the CPU: one for each thread, at most 8. "
        "Default on CUDA: 2.",
        minimum=1,
        section="Batches and threads",
    )
    tokenizer_threads: int = _setting(
        1, "Threads that tokenize. Each text is tokenized by one thread.", minimum=1, section="Batches and threads"
    )
    grace_seconds: float = _setting(
        25.0,
        "Seconds after SIGTERM in which open requests can finish. Use less than the orchestrator's kill timeout.",
        minimum=0,
        section="Restarts and shutdown",
    )
    drain_delay_seconds: float = _setting(
        0.0,
        "Seconds after SIGTERM in which the server still accepts requests. Health already reports NOT_SERVING, so that "
        "load balancers can stop sending requests. --grace-seconds begin after this delay.",
        minimum=0,
        section="Restarts and shutdown",
    )
    max_connection_age_seconds: float | None = _setting(
        None,
        "Seconds after which the server asks a caller to open a new gRPC connection, plus or minus a tenth. Open calls "
        "finish on the old connection. Some clients balance over the addresses of a DNS name. These clients find new "
        "servers only when they connect. Default: no limit.",
        minimum=1,
        section="Restarts and shutdown",
    )
    http_idle_seconds: float = _setting(
        620.0,
        "Seconds after which an idle HTTP connection is closed. Use a higher value than the idle timeout of every "
        "proxy in front of the server. Otherwise a proxy may send a request just when the server closes the "
        "connection, and the request is lost.",
        minimum=1,
        section="HTTP and other protocols",
    )
    stall_seconds: float = _setting(
        60.0,
        "Seconds that one batch may run before health reports NOT_SERVING. Time in which the whole process is "
        "suspended, such as after SIGSTOP, does not count.",
        minimum=0.1,
        section="Restarts and shutdown",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "Minimum level of log lines to write.", section="Options"
    )
    log_format: Literal["json", "text"] = _setting(
        "json",
        "Format of log lines: one JSON object for each line, or text for people.",
        section="Logs and traces",
    )
    trace_endpoint: str | None = _setting(
        None,
        "Address to which traces are sent by OTLP over gRPC: http://HOST:PORT, or https:// for TLS. Needs "
        "encserve[tracing]. Default: no tracing.",
        section="Logs and traces",
    )
    trace_sample_ratio: float = _setting(
        1.0,
        "Fraction of requests to trace, from 0 to 1. If a caller sends a traceparent, its sampled flag decides.",
        minimum=0,
        maximum=1,
        section="Logs and traces",
    )
    http_truncate: bool = _setting(
        True,
        "Whether HTTP truncates texts that are too long, or refuses them. A request can override the setting.",
        section="HTTP and other protocols",
    )
    strict_http: bool = _setting(
        False,
        "Whether HTTP refuses fields that the route does not know. Otherwise HTTP ignores these fields, with one "
        "warning in the log for each field name.",
        section="HTTP and other protocols",
    )
    served_model_name: tuple[str, ...] = _setting(
        (),
        "Another name for a model, as ALIAS=NAME or ALIAS=NAME@VERSION; may be given several times. If a model was "
        "exported from the Hugging Face hub, its hub id is always a name.",
        section="Models",
    )
    accept_any_model_name: bool = _setting(
        False,
        "Whether any model name is accepted if only one model is served. For tools with a fixed model name.",
        section="Models",
    )
    cors_allow_origin: tuple[str, ...] = _setting(
        (),
        "Origin of web pages that may call the HTTP port from a browser, such as https://example.org, or * for all; "
        "may be given several times. Default: none.",
        section="HTTP and other protocols",
    )
    open_inference: bool = _setting(
        True,
        "Whether to serve the Open Inference Protocol v2 on the gRPC port and on the HTTP port, for the clients of "
        "KServe, Triton and MLServer.",
        section="HTTP and other protocols",
    )
    reflection: bool = _setting(
        True,
        "Whether to serve gRPC reflection, so that tools such as grpcurl need no .proto file.",
        section="HTTP and other protocols",
    )
    api_key: str | None = _setting(
        None,
        "The key that every call must present, as `authorization: Bearer`, `api-key` or `x-api-key` "
        "(docs/how-to/keys-and-shares.md). Default: no key is needed.",
        is_secret=True,
        section="Callers and encryption",
    )
    api_key_file: Path | None = _setting(  # noqa: RUF009 - a dataclass field
        None,
        "File with the key that every call must present, or with several keys, one on each line. The file is reloaded "
        "when it changes. Use this setting or ENCSERVE_API_KEY, not both.",
        section="Options",
    )
    callers: Path | None = _setting(  # noqa: RUF009 - a dataclass field
        None,
        "TOML file of callers, with the keys, certificates, models and rate of each caller "
        "(docs/how-to/keys-and-shares.md). The file is reloaded when it changes. Use this setting or a single key, not "
        "both.",
        section="Callers and encryption",
    )
    public_listing: bool = _setting(
        False,
        "Whether callers may list models and services without a key: reflection, ListModels, GetModel, /v1/models, "
        "/info, /docs, and the metadata of the Open Inference Protocol. Health never needs a key.",
        section="Callers and encryption",
    )
    trust_fairness_id: bool = _setting(
        False,
        "Whether the header x-gateway-inference-fairness-id names the caller in metrics, in logs and in fair sharing "
        "(docs/how-to/keys-and-shares.md). At most 128 names. With --callers, the server accepts the header only from "
        "callers with proxy = true. Without --callers, the server accepts the header from all callers. In this case, "
        "use the setting only if all calls come through a proxy that sets the header.",
        section="Callers and encryption",
    )
    access_log: bool = _setting(
        False,
        "Whether to write a line with a JSON object to standard output for each call. Otherwise only refused and "
        "failed calls are logged, at most one line per second for each caller and reason.",
        section="Logs and traces",
    )

    def __post_init__(self) -> None:
        """Validate the settings.

        Raises:
            ValueError: A value is invalid. The text names the setting, its bounds and the value.
        """
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
            raise ValueError("precision bfloat16 needs engine openvino; onnxruntime uses the precision of the bundle")
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
            raise ValueError("host must not be empty; 0.0.0.0 means all addresses")
        self._check_ports()

    def _check_cache_dir(self) -> None:
        if self.cache_dir == Path():
            raise ValueError("cache_dir must name a folder, or be off; was empty or the working directory")

    def _check_names(self) -> None:
        aliases = set()
        for entry in self.served_model_name:
            alias, _, name = entry.partition("=")
            if not alias or not name or "@" in alias or alias in aliases:
                raise ValueError(f"served_model_name must be ALIAS=NAME, each alias once and without @; was {entry!r}")
            aliases.add(alias)
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
            raise ValueError(f"{' and '.join(names)} must not be set together; callers may contain any number of keys")

    def in_force(self) -> dict[str, Any]:
        """Return the settings for a log line, without secrets and without user names in URLs."""
        values = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("is_secret"):
                value = None if value is None else "(secret)"
            elif isinstance(value, Path):
                value = str(value)
            elif isinstance(value, str):
                value = re.sub(r"(?<=://)[^/@]*@", "", value)
            values[field.name] = value
        return values

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
        """The aliases in `served_model_name`, each with its NAME or NAME@VERSION."""
        return {alias: name for alias, _, name in (entry.partition("=") for entry in self.served_model_name)}

    @property
    def _least_in_flight_mib(self) -> int:
        """The size of the largest request plus the size of the largest reply, in MiB."""
        http_mib = 0 if self.http_port is None else self.max_http_request_mib
        return max(self.max_request_mib, http_mib) + self.max_response_mib

    def batch_tokens_for(self, device: str) -> int:
        """Return the maximum number of tokens in a batch, padding included, on "cpu" or "cuda"."""
        return self.max_batch_tokens or {"cpu": 512, "cuda": 16384}[device]

    def in_flight_bytes_for(self, usable_bytes: int) -> int:
        """Return the maximum size of requests and replies in bytes, if the process may use `usable_bytes` of memory."""
        if self.max_in_flight_mib is not None:
            return self.max_in_flight_mib * MIB
        return max(min(usable_bytes // 4, 1024 * MIB), self._least_in_flight_mib * MIB)

    def padding_fraction_for(self, device: str) -> float:
        """Return the maximum fraction of padding in a batch on "cpu" or "cuda"."""
        default = {"cpu": 0.25, "cuda": 0.5}[device]
        return default if self.max_padding_fraction is None else self.max_padding_fraction
