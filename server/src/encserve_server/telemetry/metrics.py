"""Every metric of the server, on a registry that is passed in.

Labelled children are looked up once and kept: an observation then costs a microsecond or two. The scheduler's are
counted per batch or per sequence, never per token. No label's value comes from a caller, but for names that a trusted
proxy gives, which are bounded. `make docs` makes docs/metrics.md of what is registered here, in this order.
"""

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from encserve_server import __version__
from encserve_server.types.callers import Priority
from encserve_server.types.sequences import Batch, ClosedBy

# 0.5 ms … 10 s: a single short sequence on a GPU up to a full queue on a small CPU.
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
    """What became of a bundle that was to be loaded."""

    LOADED = "loaded"
    REFUSED = "refused"  # it was altered, incomplete, or its model cannot compute


class Metrics:
    """The server's metrics. The gRPC ones have the names and labels of go-grpc-middleware, as dashboards expect."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers everything on `registry`."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # otherwise every child brings a `_created` series along
        self.registry = registry
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)

        self.started = counter(
            "grpc_server_started", "RPCs begun; health checks and reflection are counted nowhere.", _METHOD
        )
        self.handled = counter(
            "grpc_server_handled",
            "RPCs ended, by status code; of a stream also each request that ends with an error.",
            (*_METHOD, "grpc_code"),
        )
        self.handling_seconds = histogram(
            "grpc_server_handling_seconds",
            "Time from the arrival of a whole request to its answer; of a stream, its life.",
            _METHOD,
            buckets=SECONDS_BUCKETS,
        )
        self.http_requests = counter(
            "encserve_http_requests",
            "HTTP requests answered, by route and status; 499 is a caller that went before its answer. Health and "
            "unknown paths are counted nowhere.",
            ("route", "status"),
        )
        self.http_request_seconds = histogram(
            "encserve_http_request_seconds",
            "Time from the head of an HTTP request to its answer.",
            ("route",),
            buckets=SECONDS_BUCKETS,
        )
        self.answer_seconds = histogram(
            "encserve_answer_seconds",
            "Time from the arrival of a call that encodes to its answer, of all protocols, by priority: interactive or "
            "bulk. Not of streams, nor of calls that are refused before they are looked at.",
            ("priority",),
            buckets=SECONDS_BUCKETS,
        )
        self.answer_times = {it: self.answer_seconds.labels(it.name.lower()) for it in Priority}
        self.in_flight = gauge(
            "encserve_in_flight_requests", "Calls being worked on, of all protocols; a stream counts as one."
        )
        self.in_flight_bytes = gauge(
            "encserve_in_flight_bytes", "Bytes of requests and replies that calls hold, of all protocols."
        )
        self.in_flight_limit_bytes = gauge(
            "encserve_in_flight_limit_bytes", "The most bytes that calls may hold (--max-in-flight-mib)."
        )
        self.refused = counter(
            "encserve_refused",
            "Requests answered with an error, by the reason that the caller is told (docs/errors.md).",
            ("reason",),
        )
        self.caller_calls = counter(
            "encserve_caller_calls",
            "Calls of each caller, by outcome: OK, CANCELLED, DEADLINE_EXCEEDED, or the reason of an error "
            "(docs/errors.md); counted where callers are told apart. A caller without a name is one that was refused, "
            "or the one of a single key.",
            ("caller", "outcome"),
        )
        self.caller_tokens = counter(
            "encserve_caller_tokens", "Tokens of the calls of each caller that were answered.", ("caller",)
        )
        self.callers_reads = counter(
            "encserve_callers_reads",
            "How often --callers or --api-key-file has changed, by outcome: loaded, or refused (it cannot be used, and "
            "what was read before is kept).",
            ("outcome",),
        )
        for read in LoadOutcome:
            self.callers_reads.labels(read.value)
        self.callers_file_refused = gauge(
            "encserve_callers_file_refused",
            "1 while --callers or --api-key-file cannot be used as it is now; what was read before is kept. Else 0.",
        )
        self.response_bytes = histogram(
            "encserve_response_bytes",
            "Size of each reply with rows or tokens, as serialised; not of Inspect.",
            _MODEL,
            buckets=BYTES_BUCKETS,
        )
        self.stage_seconds = histogram(
            "encserve_stage_seconds",
            "Time by stage: tokenize (the texts of a request), queue (a sequence's wait for its batch), collate "
            "(laying out a batch), compute (running it), split (checking and pooling its rows), encode (building a "
            "reply), inspect (running an inspection).",
            (*_MODEL, "stage"),
            buckets=SECONDS_BUCKETS,
        )

        self.queue_requests = gauge("encserve_queue_requests", "Requests with sequences waiting for a batch.", _MODEL)
        self.queue_sequences = gauge("encserve_queue_sequences", "Sequences waiting for a batch.", _MODEL)
        self.queue_tokens = gauge(
            "encserve_queue_tokens",
            "What waits for a batch, in tokens; with what its outputs cost beside the tokens.",
            _MODEL,
        )
        self.queue_bulk_tokens = gauge(
            "encserve_queue_bulk_tokens", "What of that is bulk, which is no reason to add servers.", _MODEL
        )
        self.queue_limit_tokens = gauge(
            "encserve_queue_limit_tokens", "The most tokens that may wait (--max-queue-tokens).", _MODEL
        )
        self.queue_text_bytes = gauge(
            "encserve_queue_text_bytes", "Text waiting for the tokenizer, or in it, as UTF-8.", _MODEL
        )
        self.queue_limit_text_bytes = gauge(
            "encserve_queue_limit_text_bytes", "The most text that may wait (--max-queue-text-mib).", _MODEL
        )
        self.cancelled = counter(
            "encserve_cancelled",
            "Sequences whose caller went away, by the stage that they were in: queued or running.",
            (*_MODEL, "stage"),
        )
        self.expired = counter(
            "encserve_expired", "Sequences whose deadline passed in the queue; they were never run.", _MODEL
        )

        self.batches = counter(
            "encserve_batches",
            "Batches run, by why they took no more: drained (nothing else waited), tokens, sequences or padding (one "
            "more would have exceeded --max-batch-tokens, --max-batch-sequences or --max-padding-fraction).",
            (*_MODEL, "closed_by"),
        )
        self.batch_sequences = histogram(
            "encserve_batch_sequences", "Sequences of a batch.", _MODEL, buckets=SEQUENCES_BUCKETS
        )
        self.batch_tokens = histogram(
            "encserve_batch_tokens", "Tokens of a batch, padding excluded.", _MODEL, buckets=TOKENS_BUCKETS
        )
        self.batch_limit_tokens = gauge(
            "encserve_batch_limit_tokens",
            "The most padded tokens of a batch: --max-batch-tokens, or what was found to be best.",
            _MODEL,
        )
        self.tokens = counter("encserve_tokens", "Tokens run, padding excluded.", _MODEL)
        self.padding_tokens = counter("encserve_padding_tokens", "Padding laid out in batches.", _MODEL)
        self.failed_batches = counter(
            "encserve_failed_batches", "Runs in which the engine failed; a batch is then run again in halves.", _MODEL
        )
        self.busy_seconds = counter(
            "encserve_device_busy_seconds",
            "Time in which at least one batch of the model ran; its rate is at most 1, since those side by side count "
            "once.",
            _MODEL,
        )

        self.inspections = gauge("encserve_inspections", "Inspections waiting, running, or being sent.", _MODEL)
        self.inspections_limit = gauge(
            "encserve_inspections_limit", "The most inspections at once (--max-inspections).", _MODEL
        )

        self.ready = gauge("encserve_ready", "1 while the version answers requests, else 0.", _MODEL)
        self.model_default = gauge(
            "encserve_model_default",
            "1 for the version of its model that requests without a version get, else 0.",
            _MODEL,
        )
        self.model_info = gauge(
            "encserve_model_info",
            "Always 1. provider is what the model really runs on, requested_device what was asked for.",
            (*_MODEL, "fingerprint", "precision", "provider", "device", "requested_device", "runtime"),
        )
        self.load_seconds = gauge("encserve_model_load_seconds", "Time to verify and load the version.", _MODEL)
        self.warmup_seconds = gauge(
            "encserve_model_warmup_seconds",
            "Time to warm the version up, and to find its best batches if they were not known.",
            _MODEL,
        )
        self.model_loads = counter(
            "encserve_model_loads",
            "Bundles that were to be loaded, by outcome: loaded, or refused (altered, incomplete, or of no use).",
            ("model", "outcome"),
        )
        self.refused_versions = gauge(
            "encserve_refused_versions", "Versions in the model repository that could not be loaded.", ("model",)
        )
        self.repository_overdue_seconds = gauge(
            "encserve_repository_overdue_seconds",
            "How long ago a look into the model repository should have found all that is wanted. More than 0 while a "
            "load takes long, or what is wanted cannot be read; 0 with --model-poll-seconds 0.",
        )

        self.event_loop_lag_seconds = histogram(
            "encserve_event_loop_lag_seconds",
            "How late the event loop does what is due, sampled 10 times a second.",
            buckets=LAG_BUCKETS,
        )
        self.log_lines_lost = counter(
            "encserve_log_lines_lost",
            "Lines that could not be written, because nobody reads standard error (server) or standard output (access) "
            "fast enough, or because it is closed.",
            ("log",),
        )
        for log in ("server", "access"):
            self.log_lines_lost.labels(log)
        self.trace_spans = counter(
            "encserve_trace_spans",
            "Spans of traces, by outcome: exported, failed (the receiver did not take them), or dropped (the queue was "
            "full).",
            ("outcome",),
        )
        for outcome in ("exported", "failed", "dropped"):
            self.trace_spans.labels(outcome)
        self.tls_expiry = gauge(
            "encserve_tls_certificate_expiry_timestamp_seconds",
            "When the certificates of --tls-cert-file, the first of them, and the authorities of --tls-client-ca-file, "
            "the last of them, expire, in seconds since 1970. Absent without TLS.",
            ("file",),
        )
        self.tls_reloads = counter(
            "encserve_tls_reloads",
            "Changes of the TLS files, by outcome: loaded, or refused (incomplete, expired, or of a key that does not "
            "belong to the certificate; what was served before is served on). Absent without TLS.",
            ("outcome",),
        )
        self.tls_files_refused = gauge(
            "encserve_tls_files_refused",
            "1 while the TLS files are not used as they are now; what was served before is served on. Else 0.",
        )
        self.gpu_memory_used_bytes = gauge(
            "encserve_gpu_memory_used_bytes",
            "Memory in use on a GPU, by whatever process. Absent without a GPU.",
            ("gpu",),
        )
        self.gpu_memory_total_bytes = gauge(
            "encserve_gpu_memory_total_bytes", "Memory of a GPU. Absent without a GPU.", ("gpu",)
        )
        self.build_info = gauge("encserve_build_info", "Always 1; the server's version.", ("version",))
        self.build_info.labels(__version__).set(1)

    def callers_read(self, taken: bool) -> None:
        """The file of callers, or of keys, has changed."""
        self.callers_reads.labels((LoadOutcome.LOADED if taken else LoadOutcome.REFUSED).value).inc()
        self.callers_file_refused.set(not taken)

    def zero(self, methods: Iterable[tuple[str, str, str]], codes: Iterable[str], reasons: Iterable[str]) -> None:
        """Creates every label set of the RPC metrics at zero, so that a rate over the first error is not missed."""
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
        """Creates the counts of a model's loads at zero; call before its first load begins."""
        for outcome in LoadOutcome:
            self.model_loads.labels(model, outcome.value)
        self.refused_versions.labels(model)

    def for_model(self, model: str, version: str) -> "ModelMetrics":
        """The metrics of one version of a model, registered at zero unless the version has been registered before."""
        self.zero_loads(model)
        key = model, version
        if key not in self._models:
            self._models[key] = ModelMetrics(self, model, version)
        return self._models[key]

    def forget_model(self, model: str, version: str) -> None:
        """Takes all of a version off the page but the counts of its loads; what it counts later goes nowhere."""
        if (gone := self._models.pop((model, version), None)) is not None:
            gone.remove()


class CallerMetrics:
    """Counts the calls of callers; see `calls.CallerObserver`.

    Their names are bounded by who lists them. Another name is that of a caller who is gone, and is not counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        """Begins with no caller."""
        self._metrics = metrics
        self._calls: dict[tuple[str, str], Counter] = {}
        self._tokens: dict[str, Counter] = {}
        self._listed: frozenset[str] = frozenset()

    def ended(self, caller: str, outcome: str, tokens: int) -> None:
        """A call has ended."""
        if caller and caller not in self._listed:
            return
        if (calls := self._calls.get((caller, outcome))) is None:
            calls = self._calls[caller, outcome] = self._metrics.caller_calls.labels(caller, outcome)
        calls.inc()
        if tokens:
            if (counted := self._tokens.get(caller)) is None:
                counted = self._tokens[caller] = self._metrics.caller_tokens.labels(caller)
            counted.inc(tokens)

    def only(self, names: Collection[str]) -> None:
        """Callers have changed: counts at zero those that are new, and takes those that are gone off the page."""
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
    """The children of `Metrics` for one version of a model: the observer of its calls and of its scheduler."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        """Looks every child up once."""
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
        self._failed_batches = child(metrics.failed_batches)
        self._busy_seconds = child(metrics.busy_seconds)
        self._queue_requests = child(metrics.queue_requests)
        self._queue_sequences = child(metrics.queue_sequences)
        self._queue_tokens = child(metrics.queue_tokens)
        self._queue_bulk_tokens = child(metrics.queue_bulk_tokens)
        self._cancelled = {stage: child(metrics.cancelled, stage) for stage in ("queued", "running")}
        self._expired = child(metrics.expired)
        self.batch_limit_tokens = child(metrics.batch_limit_tokens)
        self.queue_limit_tokens = child(metrics.queue_limit_tokens)
        self._queue_text_bytes = child(metrics.queue_text_bytes)
        self._queue_limit_text_bytes = child(metrics.queue_limit_text_bytes)
        child(metrics.ready)
        child(metrics.model_default)
        self.load_seconds = child(metrics.load_seconds)
        self.warmup_seconds = child(metrics.warmup_seconds)

    def _child(self, metric: _Metric, *more: str) -> _Metric:
        """The child of a metric whose first labels are model and version."""
        labels = (self._model, self._version, *more)
        self._children.append((metric, labels))
        return metric.labels(*labels)

    def describe(
        self, *, fingerprint: str, precision: str, provider: str, device: str, requested_device: str, runtime: str
    ) -> None:
        """Says what the model is and what it runs on, in place of what was said before."""
        if self._info is not None:
            self._metrics.model_info.remove(*self._info)
        self._info = self._model, self._version, fingerprint, precision, provider, device, requested_device, runtime
        self._metrics.model_info.labels(*self._info).set(1)

    def remove(self) -> None:
        """Removes every child; see `Metrics.forget_model`."""
        for metric, labels in self._children:
            metric.remove(*labels)
        if self._info is not None:
            self._metrics.model_info.remove(*self._info)

    def register_text_queue_gauges(self, queued_bytes: Callable[[], int], limit_bytes: int) -> None:
        """Has the gauges of waiting text call `queued_bytes`, in any thread; at most `limit_bytes` may wait."""
        self._queue_text_bytes.set_function(queued_bytes)
        self._queue_limit_text_bytes.set(limit_bytes)

    def tokenized(self, seconds: float) -> None:
        """The texts of a call have been tokenized, or refused."""
        self._stage_seconds["tokenize"].observe(seconds)

    def answered(self, encode_seconds: float, response_bytes: int) -> None:
        """A reply has been built."""
        self._stage_seconds["encode"].observe(encode_seconds)
        self._response_bytes.observe(response_bytes)

    def inspections_changed(self, pending: int, limit: int) -> None:
        """So many are waiting, running, or being sent now, of at most `limit`."""
        self._inspections.set(pending)
        self._inspections_limit.set(limit)

    def inspected(self, compute_seconds: float) -> None:
        """One has run for so long."""
        self._stage_seconds["inspect"].observe(compute_seconds)

    def register_queue_gauges(
        self,
        requests: Callable[[], int],
        sequences: Callable[[], int],
        tokens: Callable[[], int],
        bulk_tokens: Callable[[], int],
    ) -> None:
        """Has the gauges of the queue call these functions, in any thread."""
        self._queue_requests.set_function(requests)
        self._queue_sequences.set_function(sequences)
        self._queue_tokens.set_function(tokens)
        self._queue_bulk_tokens.set_function(bulk_tokens)

    def batch_ran(self, batch: Batch) -> None:
        """A batch ran."""
        self._batch_sequences.observe(len(batch.sequences))
        tokens = batch.tokens
        self._batch_tokens.observe(tokens)
        self._tokens.inc(tokens)
        self._padding_tokens.inc(batch.padded_tokens - tokens)
        self._stage_seconds["collate"].observe(batch.collate_seconds)
        self._stage_seconds["compute"].observe(batch.compute_seconds)
        self._stage_seconds["split"].observe(batch.split_seconds)
        self._batches[batch.closed_by].inc()

    def batch_failed(self) -> None:
        """The engine raised for a batch."""
        self._failed_batches.inc()

    def was_busy(self, seconds: float) -> None:
        """At least one batch ran for so long since the last call."""
        self._busy_seconds.inc(seconds)

    def waited(self, queue_seconds: float) -> None:
        """A sequence that has run had waited so long in the queue."""
        self._stage_seconds["queue"].observe(queue_seconds)

    def expired(self) -> None:
        """A sequence's deadline passed in the queue."""
        self._expired.inc()

    def cancelled(self, stage: str) -> None:
        """A sequence's caller went away."""
        self._cancelled[stage].inc()
