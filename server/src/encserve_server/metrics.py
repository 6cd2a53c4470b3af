"""Every metric of the server, on a registry that is passed in.

Labelled children are looked up once and kept: an observation then costs under a microsecond. The scheduler's are
counted per batch or per sequence, never per token.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from encserve_server.types import ClosedBy

# 0.5 ms … 10 s: a single short sequence on a GPU up to a full queue on a small CPU.
SECONDS_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
SEQUENCES_BUCKETS = tuple(2**i for i in range(11))  # 1 … 1,024
TOKENS_BUCKETS = tuple(2**i for i in range(17))  # 1 … 65,536
_MODEL = ("model", "version")
_METHOD = ("grpc_type", "grpc_service", "grpc_method")


class Metrics:
    """The server's metrics. The gRPC ones have the names and labels of go-grpc-middleware, as dashboards expect."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers everything on `registry`."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # otherwise every child brings a `_created` series along
        self.registry = registry
        self.started = Counter("grpc_server_started", "RPCs begun.", _METHOD, registry=registry)
        self.handled = Counter(
            "grpc_server_handled", "RPCs ended, by status code.", (*_METHOD, "grpc_code"), registry=registry
        )
        self.handling_seconds = Histogram(
            "grpc_server_handling_seconds", "From a request's arrival, whole, to its answer; of a stream, its life.",
            _METHOD, buckets=SECONDS_BUCKETS, registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge("encserve_in_flight_requests", "RPCs open, a stream counting as one.", registry=registry)
        self.refused = Counter(
            "encserve_refused", "Requests answered with an error of ours, by reason.", ("reason",), registry=registry
        )
        self.stage_seconds = Histogram(
            "encserve_stage_seconds",
            "Time by stage: tokenize (a request), queue (a sequence), compute (a batch), encode (a reply), inspect (an "
            "inspection's run).",
            (*_MODEL, "stage"), buckets=SECONDS_BUCKETS, registry=registry,
        )  # fmt: skip
        self.batch_sequences = Histogram(
            "encserve_batch_sequences", "Sequences of a batch.", _MODEL, buckets=SEQUENCES_BUCKETS, registry=registry
        )
        self.batch_tokens = Histogram(
            "encserve_batch_tokens", "Tokens of a batch, padding excluded.", _MODEL, buckets=TOKENS_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self.batch_limit_tokens = Gauge(
            "encserve_batch_limit_tokens", "The most padded tokens of a batch.", _MODEL, registry=registry
        )
        self.tokens = Counter("encserve_tokens", "Tokens run, padding excluded.", _MODEL, registry=registry)
        self.padding_tokens = Counter(
            "encserve_padding_tokens", "Padding laid out in batches, in tokens.", _MODEL, registry=registry
        )
        self.batches = Counter(
            "encserve_batches", "Batches run, by why they took no more.", (*_MODEL, "closed_by"), registry=registry
        )
        self.failed_batches = Counter(
            "encserve_failed_batches", "Runs in which the engine failed.", _MODEL, registry=registry
        )
        self.queue_sequences = Gauge("encserve_queue_sequences", "Sequences waiting.", _MODEL, registry=registry)
        self.queue_tokens = Gauge("encserve_queue_tokens", "Tokens waiting.", _MODEL, registry=registry)
        self.queue_limit_tokens = Gauge(
            "encserve_queue_limit_tokens", "The most tokens that may wait.", _MODEL, registry=registry
        )
        self.cancelled = Counter(
            "encserve_cancelled", "Sequences whose caller went away, queued or running.", (*_MODEL, "stage"),
            registry=registry,
        )  # fmt: skip
        self.expired = Counter(
            "encserve_expired",
            "Sequences whose deadline passed in the queue; never computed.",
            _MODEL,
            registry=registry,
        )
        self.inspections = Gauge(
            "encserve_inspections", "Inspections waiting, running, or being sent.", _MODEL, registry=registry
        )
        self.ready = Gauge("encserve_ready", "1 while the model answers requests, else 0.", _MODEL, registry=registry)
        self.load_seconds = Gauge(
            "encserve_model_load_seconds", "Time to verify and load the model.", _MODEL, registry=registry
        )
        self.warmup_seconds = Gauge("encserve_model_warmup_seconds", "Time to warm it up.", _MODEL, registry=registry)
        self.model_info = Gauge(
            "encserve_model_info",
            "Always 1. provider is what the model really runs on, requested_device what was asked for.",
            (*_MODEL, "fingerprint", "precision", "provider", "device", "requested_device"), registry=registry,
        )  # fmt: skip

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

    def for_model(self, model: str, version: str) -> "ModelMetrics":
        """The metrics of one model, every label set created at zero."""
        return ModelMetrics(self, model, version)


class ModelMetrics:
    """One model's children of `Metrics`; what a scheduler's observer is."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        """Looks every child up once."""
        labels = (model, version)
        self.tokenize_seconds = metrics.stage_seconds.labels(*labels, "tokenize")
        self._queue_seconds = metrics.stage_seconds.labels(*labels, "queue")
        self._compute_seconds = metrics.stage_seconds.labels(*labels, "compute")
        self.encode_seconds = metrics.stage_seconds.labels(*labels, "encode")
        self.inspect_seconds = metrics.stage_seconds.labels(*labels, "inspect")
        self.inspections = metrics.inspections.labels(*labels)
        self._batch_sequences = metrics.batch_sequences.labels(*labels)
        self._batch_tokens = metrics.batch_tokens.labels(*labels)
        self._tokens = metrics.tokens.labels(*labels)
        self._padding_tokens = metrics.padding_tokens.labels(*labels)
        self._batches = {closed_by: metrics.batches.labels(*labels, closed_by.value) for closed_by in ClosedBy}
        self._failed_batches = metrics.failed_batches.labels(*labels)
        self._queue_sequences = metrics.queue_sequences.labels(*labels)
        self._queue_tokens = metrics.queue_tokens.labels(*labels)
        self._cancelled = {stage: metrics.cancelled.labels(*labels, stage) for stage in ("queued", "running")}
        self._expired = metrics.expired.labels(*labels)
        self.batch_limit_tokens = metrics.batch_limit_tokens.labels(*labels)
        self.queue_limit_tokens = metrics.queue_limit_tokens.labels(*labels)
        self.ready = metrics.ready.labels(*labels)
        self.load_seconds = metrics.load_seconds.labels(*labels)
        self.warmup_seconds = metrics.warmup_seconds.labels(*labels)

    def queue_changed(self, sequences: int, tokens: int) -> None:
        """So much is pending now."""
        self._queue_sequences.set(sequences)
        self._queue_tokens.set(tokens)

    def batch_ran(
        self, *, sequences: int, tokens: int, padded_tokens: int, compute_seconds: float, closed_by: ClosedBy
    ) -> None:
        """A batch ran."""
        self._batch_sequences.observe(sequences)
        self._batch_tokens.observe(tokens)
        self._tokens.inc(tokens)
        self._padding_tokens.inc(padded_tokens - tokens)
        self._compute_seconds.observe(compute_seconds)
        self._batches[closed_by].inc()

    def batch_failed(self) -> None:
        """The engine raised for a batch."""
        self._failed_batches.inc()

    def waited(self, queue_seconds: float) -> None:
        """A sequence that has run had waited so long in the queue."""
        self._queue_seconds.observe(queue_seconds)

    def expired(self) -> None:
        """A sequence's deadline passed in the queue."""
        self._expired.inc()

    def cancelled(self, stage: str) -> None:
        """A sequence's caller went away."""
        self._cancelled[stage].inc()
