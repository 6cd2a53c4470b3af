"""The server's metrics. Each metric is one row of the table `Metrics`.

An observer looks up its labelled children only once, so an observation takes only a microsecond or two. The scheduler
observes once per batch or per sequence, never per token. Label values do not come from requests, except the names of
callers from a trusted proxy. The number of these names is limited.

`make docs` writes docs/reference/metrics.md from the table.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from encserve import __version__
from encserve_server.types.callers import Priority
from encserve_server.types.sequences import Batch, ClosedBy

# 0.5 ms (one short sequence on a GPU) to 10 s (a full queue on a small CPU).
SECONDS_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
SEQUENCES_BUCKETS = tuple(2**i for i in range(11))  # 1 … 1,024
TOKENS_BUCKETS = tuple(2**i for i in range(17))  # 1 … 65,536
BYTES_BUCKETS = tuple(4**i for i in range(4, 14))  # 256 B … 64 MiB
LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STAGES = ("tokenize", "queue", "collate", "compute", "split", "encode", "inspect")
_MODEL = ("model", "version")
_METHOD = ("grpc_type", "grpc_service", "grpc_method")
_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


class LoadOutcome(StrEnum):
    """The outcome of loading a bundle or a file."""

    LOADED = "loaded"
    REFUSED = "refused"  # the bundle or file is altered, incomplete or not usable


@dataclass(frozen=True, eq=False)
class _Row(Generic[_Metric]):
    """One row of the table. In each instance of `Metrics`, the registered metric replaces the row.

    Attributes:
        kind: The class of the metric.
        name: The name. The page adds `_total` to the name of a counter.
        help: The meaning, for the page and docs/reference/metrics.md.
        labels: The names of the labels.
        buckets: The upper bounds of a histogram.
        values: For a metric with one label: the label values that exist from the start.
    """

    kind: type[_Metric]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: Iterable[str] = ()

    def __get__(self, metrics: "Metrics", owner: type["Metrics"]) -> _Metric:
        """Declare the type of the attribute. Never called, because each instance has an attribute of the same name."""
        raise AttributeError(self.name)

    def register(self, registry: CollectorRegistry) -> _Metric:
        """Return the metric, registered on `registry`."""
        options: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
        metric = self.kind(self.name, self.help, self.labels, registry=registry, **options)
        for value in self.values:
            metric.labels(value)
        return metric


class Metrics:
    """The server's metrics. The gRPC metrics have the names and labels of go-grpc-middleware, for its dashboards.

    Attributes:
        answer_times: The child of `answer_seconds` for each priority.
        registry: The registry of the metrics.
    """

    started = _Row(
        Counter, "grpc_server_started", "RPCs started. Health checks and reflection are not counted.", _METHOD
    )
    handled = _Row(
        Counter,
        "grpc_server_handled",
        "RPCs ended, by status code. Each failed request of a stream counts too.",
        (*_METHOD, "grpc_code"),
    )
    handling_seconds = _Row(
        Histogram,
        "grpc_server_handling_seconds",
        "Time from a complete request to its reply. For a stream: the time that the stream was open.",
        _METHOD,
        SECONDS_BUCKETS,
    )
    http_requests = _Row(
        Counter,
        "encserve_http_requests",
        "HTTP requests answered, by route and status. Status 499: the caller disconnected before the reply. Health "
        "checks and unknown paths are not counted.",
        ("route", "status"),
    )
    http_request_seconds = _Row(
        Histogram,
        "encserve_http_request_seconds",
        "Time from the head of an HTTP request to its reply.",
        ("route",),
        SECONDS_BUCKETS,
    )
    answer_seconds = _Row(
        Histogram,
        "encserve_answer_seconds",
        "Duration of encode calls by priority (interactive or bulk), all protocols. Streams are not counted. Calls "
        "refused before full validation are not counted.",
        ("priority",),
        SECONDS_BUCKETS,
    )
    in_flight = _Row(Gauge, "encserve_in_flight_requests", "Calls in progress, all protocols. A stream is one call.")
    in_flight_bytes = _Row(Gauge, "encserve_in_flight_bytes", "Bytes of requests and replies in memory, all protocols.")
    in_flight_limit_bytes = _Row(
        Gauge, "encserve_in_flight_limit_bytes", "Limit for encserve_in_flight_bytes (--max-in-flight-mib)."
    )
    refused = _Row(
        Counter,
        "encserve_refused",
        "Requests answered with an error, by reason (docs/reference/errors.md).",
        ("reason",),
    )
    caller_calls = _Row(
        Counter,
        "encserve_caller_calls",
        "Calls by caller and outcome: OK, CANCELLED, DEADLINE_EXCEEDED, or the reason of an error "
        "(docs/reference/errors.md). Counted only if the server has keys or named callers. The label caller is empty "
        "for a refused caller, and if the server has a single key.",
        ("caller", "outcome"),
    )
    caller_tokens = _Row(Counter, "encserve_caller_tokens", "Tokens of answered calls, by caller.", ("caller",))
    callers_reads = _Row(
        Counter,
        "encserve_callers_reads",
        "Changes of the file of --callers or --api-key-file, by outcome: loaded, or refused (the file is not valid; "
        "the last valid content stays in use).",
        ("outcome",),
        values=LoadOutcome,
    )
    callers_file_refused = _Row(
        Gauge, "encserve_callers_file_refused", "1 while the file of --callers or --api-key-file is not valid, else 0."
    )
    response_bytes = _Row(
        Histogram,
        "encserve_response_bytes",
        "Serialized size of each reply with rows or tokens. Replies of Inspect are not counted.",
        _MODEL,
        BYTES_BUCKETS,
    )
    stage_seconds = _Row(
        Histogram,
        "encserve_stage_seconds",
        "Time by stage. tokenize: the texts of a request. queue: the wait of a sequence for its batch. collate: "
        "padding a batch. compute: running the model. split: checking and pooling the rows. encode: building a reply. "
        "inspect: running an inspection.",
        (*_MODEL, "stage"),
        SECONDS_BUCKETS,
    )

    queue_requests = _Row(Gauge, "encserve_queue_requests", "Requests with sequences in the queue.", _MODEL)
    queue_sequences = _Row(Gauge, "encserve_queue_sequences", "Sequences in the queue.", _MODEL)
    queue_tokens = _Row(
        Gauge,
        "encserve_queue_tokens",
        "Tokens in the queue, plus the extra cost of outputs, converted to tokens.",
        _MODEL,
    )
    queue_bulk_tokens = _Row(
        Gauge,
        "encserve_queue_bulk_tokens",
        "The bulk part of encserve_queue_tokens. Do not use it for autoscaling.",
        _MODEL,
    )
    queue_limit_tokens = _Row(
        Gauge, "encserve_queue_limit_tokens", "Limit for encserve_queue_tokens (--max-queue-tokens).", _MODEL
    )
    queue_text_bytes = _Row(
        Gauge, "encserve_queue_text_bytes", "Bytes of text in the tokenizer and in its queue, as UTF-8.", _MODEL
    )
    queue_limit_text_bytes = _Row(
        Gauge, "encserve_queue_limit_text_bytes", "Limit for encserve_queue_text_bytes (--max-queue-text-mib).", _MODEL
    )
    cancelled = _Row(
        Counter,
        "encserve_cancelled",
        "Sequences of callers that disconnected, by stage: queued or running.",
        (*_MODEL, "stage"),
    )
    expired = _Row(
        Counter, "encserve_expired", "Sequences dropped from the queue because their deadline passed.", _MODEL
    )

    batches = _Row(
        Counter,
        "encserve_batches",
        "Batches run, by the reason why the batch was closed: drained (the queue was empty), or a further sequence "
        "would have exceeded tokens (--max-batch-tokens), sequences (--max-batch-sequences) or padding "
        "(--max-padding-fraction).",
        (*_MODEL, "closed_by"),
    )
    batch_sequences = _Row(Histogram, "encserve_batch_sequences", "Sequences in a batch.", _MODEL, SEQUENCES_BUCKETS)
    batch_tokens = _Row(
        Histogram, "encserve_batch_tokens", "Tokens in a batch, without padding.", _MODEL, TOKENS_BUCKETS
    )
    batch_limit_tokens = _Row(
        Gauge,
        "encserve_batch_limit_tokens",
        "Limit for the tokens in a batch, padding included: --max-batch-tokens, or a measured size.",
        _MODEL,
    )
    tokens = _Row(Counter, "encserve_tokens", "Tokens run, without padding.", _MODEL)
    padding_tokens = _Row(Counter, "encserve_padding_tokens", "Padding tokens run.", _MODEL)
    failed_batches = _Row(
        Counter, "encserve_failed_batches", "Failed runs of the engine. The batch runs again in halves.", _MODEL
    )
    busy_seconds = _Row(
        Counter,
        "encserve_device_busy_seconds",
        "Time in which at least one batch ran. Parallel batches count once.",
        _MODEL,
    )

    inspections = _Row(Gauge, "encserve_inspections", "Inspections that wait, run, or are being sent.", _MODEL)
    inspections_limit = _Row(
        Gauge, "encserve_inspections_limit", "Limit for encserve_inspections (--max-inspections).", _MODEL
    )

    ready = _Row(Gauge, "encserve_ready", "1 while the version answers requests, else 0.", _MODEL)
    model_default = _Row(Gauge, "encserve_model_default", "1 for the default version of the model, else 0.", _MODEL)
    model_info = _Row(
        Gauge,
        "encserve_model_info",
        "Always 1. The labels give the provider and device in use, and the value of --device (requested_device).",
        (*_MODEL, "fingerprint", "precision", "provider", "device", "requested_device", "runtime"),
    )
    load_seconds = _Row(Gauge, "encserve_model_load_seconds", "Time to verify and load the version.", _MODEL)
    warmup_seconds = _Row(
        Gauge, "encserve_model_warmup_seconds", "Time to warm up, and to measure the best batch size.", _MODEL
    )
    model_loads = _Row(
        Counter,
        "encserve_model_loads",
        "Loads of bundles, by outcome: loaded, or refused (altered, incomplete, or not usable).",
        ("model", "outcome"),
    )
    refused_versions = _Row(
        Gauge, "encserve_refused_versions", "Versions in the repository that failed to load.", ("model",)
    )
    repository_overdue_seconds = _Row(
        Gauge,
        "encserve_repository_overdue_seconds",
        "Time by which a complete check of the model repository is overdue. Above 0 while a load takes long or a "
        "wanted version cannot be read. Always 0 with --model-poll-seconds 0.",
    )

    event_loop_lag_seconds = _Row(
        Histogram,
        "encserve_event_loop_lag_seconds",
        "Delay of the event loop, sampled 10 times a second.",
        buckets=LAG_BUCKETS,
    )
    log_lines_lost = _Row(
        Counter,
        "encserve_log_lines_lost",
        "Log lines lost because standard error (server) or standard output (access) is closed or read too slowly.",
        ("log",),
        values=("server", "access"),
    )
    trace_spans = _Row(
        Counter,
        "encserve_trace_spans",
        "Spans by outcome: exported, failed (not accepted by the receiver), or dropped (the queue was full).",
        ("outcome",),
        values=("exported", "failed", "dropped"),
    )
    tls_expiry = _Row(
        Gauge,
        "encserve_tls_certificate_expiry_timestamp_seconds",
        "Expiry time in seconds since 1970: the earliest of the certificates in --tls-cert-file, and the latest of "
        "the authorities in --tls-client-ca-file. Absent without TLS.",
        ("file",),
    )
    tls_reloads = _Row(
        Counter,
        "encserve_tls_reloads",
        "Changes of the TLS files, by outcome: loaded, or refused (incomplete, expired, or the key does not match the "
        "certificate; the last valid files stay in use). Absent without TLS.",
        ("outcome",),
    )
    tls_files_refused = _Row(Gauge, "encserve_tls_files_refused", "1 while the TLS files are not valid, else 0.")
    gpu_memory_used_bytes = _Row(
        Gauge, "encserve_gpu_memory_used_bytes", "GPU memory in use by all processes. Absent without a GPU.", ("gpu",)
    )
    gpu_memory_total_bytes = _Row(
        Gauge, "encserve_gpu_memory_total_bytes", "Total GPU memory. Absent without a GPU.", ("gpu",)
    )
    build_info = _Row(Gauge, "encserve_build_info", "Always 1. The label is the server's version.", ("version",))

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register all metrics on `registry`."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # otherwise each child has one more series, `_created`
        self.registry = registry
        for attribute, row in vars(Metrics).items():
            if isinstance(row, _Row):
                setattr(self, attribute, row.register(registry))
        self.answer_times = {it: self.answer_seconds.labels(it.name.lower()) for it in Priority}
        self.build_info.labels(__version__).set(1)
        self._models: dict[tuple[str, str], ModelMetrics] = {}

    def callers_read(self, taken: bool) -> None:
        """Count a change of the callers file. If `taken`, the changed file is in use now; otherwise it was refused."""
        self.callers_reads.labels((LoadOutcome.LOADED if taken else LoadOutcome.REFUSED).value).inc()
        self.callers_file_refused.set(not taken)

    def zero(self, methods: Iterable[tuple[str, str, str]], codes: Iterable[str], reasons: Iterable[str]) -> None:
        """Create every label set of the RPC metrics at zero. Otherwise `rate` in Prometheus misses the first error."""
        codes = list(codes)
        for method in methods:
            self.started.labels(*method)
            self.handling_seconds.labels(*method)
            for code in codes:
                self.handled.labels(*method, code)
        for reason in reasons:
            self.refused.labels(reason)

    def certificates_loaded(self, expires: float, client_ca_expires: float | None) -> None:
        """See `certificates.CertificateObserver`."""
        self.tls_reloads.labels("refused")
        self.tls_reloads.labels("loaded").inc()
        self.tls_files_refused.set(0)
        self.tls_expiry.labels("tls_cert_file").set(expires)
        if client_ca_expires is not None:
            self.tls_expiry.labels("tls_client_ca_file").set(client_ca_expires)

    def certificates_refused(self) -> None:
        """See `certificates.CertificateObserver`."""
        self.tls_reloads.labels("refused").inc()
        self.tls_files_refused.set(1)

    def certificates_as_before(self) -> None:
        """See `certificates.CertificateObserver`."""
        self.tls_files_refused.set(0)

    def zero_loads(self, model: str) -> None:
        """Create the counts of a model's loads at zero. Called before the first load begins."""
        for outcome in LoadOutcome:
            self.model_loads.labels(model, outcome.value)
        self.refused_versions.labels(model)

    def for_model(self, model: str, version: str) -> "ModelMetrics":
        """Return the metrics of one version of a model, created at zero if they do not exist."""
        self.zero_loads(model)
        key = model, version
        if key not in self._models:
            self._models[key] = ModelMetrics(self, model, version)
        return self._models[key]

    def forget_model(self, model: str, version: str) -> None:
        """Remove the series of a version, except the counts of its loads. Observations after this have no effect."""
        if (gone := self._models.pop((model, version), None)) is not None:
            gone.remove()


class CallerMetrics:
    """Counts the calls of each caller; see `calls.CallerObserver`. Only the names of `set_names` are counted."""

    def __init__(self, metrics: Metrics) -> None:
        """Start without callers."""
        self._metrics = metrics
        self._calls: dict[tuple[str, str], Counter] = {}
        self._tokens: dict[str, Counter] = {}
        self._listed: frozenset[str] = frozenset()

    def ended(self, caller: str, outcome: str, tokens: int) -> None:
        """Count a call that has ended."""
        if caller and caller not in self._listed:
            return
        if (calls := self._calls.get((caller, outcome))) is None:
            calls = self._calls[caller, outcome] = self._metrics.caller_calls.labels(caller, outcome)
        calls.inc()
        if tokens:
            if (counted := self._tokens.get(caller)) is None:
                counted = self._tokens[caller] = self._metrics.caller_tokens.labels(caller)
            counted.inc(tokens)

    def set_names(self, names: Collection[str]) -> None:
        """Replace the list of callers. Create counts at zero for new callers, and remove the counts of old callers."""
        gone, self._listed = self._listed - set(names), frozenset(names)
        for name in names:
            if name not in self._tokens:
                self._tokens[name] = self._metrics.caller_tokens.labels(name)
        for caller, outcome in [it for it in self._calls if it[0] in gone]:
            del self._calls[caller, outcome]
            self._metrics.caller_calls.remove(caller, outcome)
        for caller in gone & self._tokens.keys():
            del self._tokens[caller]
            self._metrics.caller_tokens.remove(caller)


class ModelMetrics:
    """The metrics of one version of a model. Observes the calls and the scheduler of the version."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        """Create every child at zero."""
        self._metrics = metrics
        self._model, self._version = model, version
        self._info: tuple[str, ...] | None = None
        self._children: list[tuple[Counter | Gauge | Histogram, tuple[str, ...]]] = []
        child = self._child
        self._stage_seconds = {stage: child(metrics.stage_seconds, stage) for stage in STAGES}
        self._response_bytes = child(metrics.response_bytes)
        self._inspections = child(metrics.inspections)
        self._inspections_limit = child(metrics.inspections_limit)
        self._batch_sequences = child(metrics.batch_sequences)
        self._batch_tokens = child(metrics.batch_tokens)
        self._tokens = child(metrics.tokens)
        self._padding_tokens = child(metrics.padding_tokens)
        self._batches = {closed_by: child(metrics.batches, closed_by.value) for closed_by in ClosedBy}
        self._queue_requests = child(metrics.queue_requests)
        self._queue_sequences = child(metrics.queue_sequences)
        self._queue_tokens = child(metrics.queue_tokens)
        self._queue_bulk_tokens = child(metrics.queue_bulk_tokens)
        self._cancelled = {stage: child(metrics.cancelled, stage) for stage in ("queued", "running")}
        self.batch_limit_tokens = child(metrics.batch_limit_tokens)
        self.queue_limit_tokens = child(metrics.queue_limit_tokens)
        self._queue_text_bytes = child(metrics.queue_text_bytes)
        self._queue_limit_text_bytes = child(metrics.queue_limit_text_bytes)
        child(metrics.ready)
        child(metrics.model_default)
        self.load_seconds = child(metrics.load_seconds)
        self.warmup_seconds = child(metrics.warmup_seconds)
        # Each of these methods of the observer interfaces only records a number.
        self.tokenized = self._stage_seconds["tokenize"].observe
        self.waited = self._stage_seconds["queue"].observe
        self.inspected = self._stage_seconds["inspect"].observe
        self.expired = child(metrics.expired).inc
        self.batch_failed = child(metrics.failed_batches).inc
        self.was_busy = child(metrics.busy_seconds).inc

    def _child(self, metric: _Metric, *more: str) -> _Metric:
        labels = (self._model, self._version, *more)
        self._children.append((metric, labels))
        return metric.labels(*labels)

    def describe(
        self, *, fingerprint: str, precision: str, provider: str, device: str, requested_device: str, runtime: str
    ) -> None:
        """Replace the labels of `model_info`."""
        if self._info is not None:
            self._metrics.model_info.remove(*self._info)
        self._info = self._model, self._version, fingerprint, precision, provider, device, requested_device, runtime
        self._metrics.model_info.labels(*self._info).set(1)

    def remove(self) -> None:
        """Remove every child; see `Metrics.forget_model`."""
        for metric, labels in self._children:
            metric.remove(*labels)
        if self._info is not None:
            self._metrics.model_info.remove(*self._info)

    def register_text_queue_gauges(self, queued_bytes: Callable[[], int], limit_bytes: int) -> None:
        """Set the function that returns the bytes of waiting text, and the limit. Any thread may call the function."""
        self._queue_text_bytes.set_function(queued_bytes)
        self._queue_limit_text_bytes.set(limit_bytes)

    def answered(self, encode_seconds: float, response_bytes: int) -> None:
        """Observe a reply."""
        self._stage_seconds["encode"].observe(encode_seconds)
        self._response_bytes.observe(response_bytes)

    def inspections_changed(self, pending: int, limit: int) -> None:
        """Set the number of pending inspections, and their limit."""
        self._inspections.set(pending)
        self._inspections_limit.set(limit)

    def register_queue_gauges(
        self,
        requests: Callable[[], int],
        sequences: Callable[[], int],
        tokens: Callable[[], int],
        bulk_tokens: Callable[[], int],
    ) -> None:
        """Set the functions that return the values of the queue's gauges. Any thread may call the functions."""
        self._queue_requests.set_function(requests)
        self._queue_sequences.set_function(sequences)
        self._queue_tokens.set_function(tokens)
        self._queue_bulk_tokens.set_function(bulk_tokens)

    def batch_ran(self, batch: Batch) -> None:
        """Observe a batch that ran."""
        self._batch_sequences.observe(len(batch.sequences))
        tokens = batch.tokens
        self._batch_tokens.observe(tokens)
        self._tokens.inc(tokens)
        self._padding_tokens.inc(batch.padded_tokens - tokens)
        self._stage_seconds["collate"].observe(batch.collate_seconds)
        self._stage_seconds["compute"].observe(batch.compute_seconds)
        self._stage_seconds["split"].observe(batch.split_seconds)
        self._batches[batch.closed_by].inc()

    def cancelled(self, stage: str) -> None:
        """Count a sequence whose caller disconnected."""
        self._cancelled[stage].inc()
