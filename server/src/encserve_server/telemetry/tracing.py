"""Traces requests and batches with OpenTelemetry's SDK, and sends the spans by OTLP over gRPC.

    caller's span
    └── encserve.v1.EncoderService/Encode     SERVER, one for each RPC or HTTP request
        ├── tokenize                          only for texts
        ├── queue                             until the first batch of the request was formed
        ├── compute ─ ─ link ─ ─▶ batch       one for each batch with sequences of the request
        └── encode                            building the reply
    batch                                     a separate trace, because a batch has many requests
        └─ ─ links ─ ─▶ the requests

A request on a stream has a span "request" below the span of the stream. The stages are children of "request".

If a request has a trace context, this context decides whether the request is sampled. Otherwise the sample ratio
decides.
A batch is sampled if one of its requests is sampled. Spans start and end on the event loop, and a thread of the SDK
sends them. If the thread is too slow, spans are dropped and counted.

Names and attributes follow OpenTelemetry's semantic conventions 1.44.0. The RPC conventions are a release candidate.
The server's own attributes begin with `encserve.`.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from encserve import __version__
from encserve_server.errors import StartupError
from encserve_server.system.clock import Clock
from encserve_server.telemetry import spans
from encserve_server.telemetry.metrics import Metrics
from encserve_server.telemetry.spans import Ids, RequestSpan
from encserve_server.telemetry.trace_export import BoundedProcessor, CountingExporter
from encserve_server.types.callers import Metadata
from encserve_server.types.sequences import Batch

logger = logging.getLogger(__name__)

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
# The maximum number of compute spans of a request. A request with hundreds of sequences may run in more batches. Then
# the last span covers all remaining batches.
MAX_COMPUTE_SPANS = 16
# The maximum number of traced requests of a stream. A stream may last for days, and all its requests are in one trace.
MAX_STREAM_REQUESTS = 1000
# Longer request ids are cut, because a span begins before the request id is validated. Thousands of spans may wait in
# memory.
MAX_REQUEST_ID_CHARS = 128
# At shutdown, the server waits at most this time for the remaining spans.
FLUSH_SECONDS = 3.0
_GIVE_UP_SECONDS = 0.5
# Warnings of these loggers are hidden. Callers with bad headers could fill the log. The exporter would log every retry.
_NOISY_LOGGERS = (
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
)


def open_otlp(endpoint: str, sample_ratio: float, clock: Clock, metrics: Metrics) -> "OtlpTracer":
    """Return a tracer that sends spans to an OTLP receiver. If the receiver is not reachable, spans are lost.

    Args:
        endpoint: http://HOST:PORT, or https:// for TLS.
        sample_ratio: The fraction of requests to sample, from 0 to 1, if the caller does not decide.
        clock: The clock that gives the times of spans.
        metrics: The metrics that count spans.

    Raises:
        StartupError: An environment variable of OpenTelemetry is not valid.
    """
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        exporter = CountingExporter(endpoint, metrics)
        return OtlpTracer(exporter, BoundedProcessor(exporter, metrics), sample_ratio, clock)
    except Exception as error:  # such as an invalid number, or a certificate file that cannot be read
        raise StartupError(f"tracing: OpenTelemetry refuses its settings (OTEL_…): {error}") from error


class OtlpTracer:
    """See `spans.Tracer`. Use the tracer only on the event loop. The SDK's thread also uses `_exporter`."""

    def __init__(
        self, exporter: CountingExporter, processor: BoundedProcessor, sample_ratio: float, clock: Clock
    ) -> None:
        """See `open_otlp`."""
        self._exporter = exporter
        self._processor = processor
        self._clock = clock
        self._propagator = TraceContextTextMapPropagator()
        resource = _resource()
        self._requests = _open_tracer(ParentBased(TraceIdRatioBased(sample_ratio)), resource, processor)
        self._sampled = _open_tracer(ALWAYS_ON, resource, processor)  # for the stages and batches of sampled requests

    def begin(self, name: str, metadata: Metadata, attributes: Mapping[str, str]) -> RequestSpan | None:
        """See `spans.Tracer`."""
        headers = {key: [value for it, value in metadata if it == key] for key in self._propagator.fields}
        moments = _Moments(self._clock)
        span = self._requests.start_span(
            name,
            self._propagator.extract(headers, Context()),
            SpanKind.SERVER,
            attributes=attributes,
            start_time=moments.began_ns,
        )
        request = _RequestSpan(self._sampled, span, moments) if span.is_recording() else None
        spans.enter(request, _ids_of(span))
        return request

    def for_model(self, name: str, version: str) -> "_BatchTracer":
        """See `spans.Tracer`."""
        return _BatchTracer(self._sampled, {"encserve.model": name, "encserve.model_version": version}, self._clock)

    async def close(self) -> None:
        """See `spans.Tracer`."""
        # The flush runs in a daemon thread, because the SDK may wait long for the receiver.
        flush = threading.Thread(target=self._processor.shutdown, name="encserve-flush", daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, FLUSH_SECONDS)
        if flush.is_alive():
            logger.warning("some spans could not be sent", extra={"waited_seconds": FLUSH_SECONDS})
            self._exporter.shutdown()  # stops sending and retrying
            await asyncio.to_thread(flush.join, _GIVE_UP_SECONDS)


def _open_tracer(sampler: Sampler, resource: Resource, processor: BoundedProcessor) -> Tracer:
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider.get_tracer("encserve", __version__, SCHEMA_URL)


def _resource() -> Resource:
    """Describe the server. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override the defaults."""
    defaults = {
        "service.name": "encserve",
        "service.version": __version__,
        "service.instance.id": str(uuid.uuid4()),
    }
    return Resource.create(defaults).merge(OTELResourceDetector().detect())


class _Moments:
    """Converts the clock's seconds to nanoseconds since 1970.

    Each request has one converter, which compares the clock with the wall clock only once. So the request's spans stay
    in order if the wall clock changes, and a drift between the clocks does not grow over months.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.began_ns = time.time_ns()
        self._offset_ns = self.began_ns - round(clock.now() * 1e9)

    def ns(self, at: float) -> int:
        return self._offset_ns + round(at * 1e9)

    def now_ns(self) -> int:
        return self.ns(self._clock.now())


class _RequestSpan:
    """See `spans.RequestSpan`."""

    def __init__(self, tracer: Tracer, span: Span, moments: _Moments) -> None:
        self.context = span.get_span_context()
        self._tracer = tracer
        self._span = span
        self._moments = moments
        self._as_parent = set_span_in_context(span, Context())
        self._tokens = 0
        self._stages: set[str] = set()
        self._computed = 0
        self._further: list[tuple[float, float, SpanContext]] = []  # batches without a separate span
        self._requests = 0  # the number of requests, if this is the span of a stream

    def about(self, model: str, version: str, sequences: int) -> None:
        """See `spans.RequestSpan`."""
        self._span.set_attributes(
            {"encserve.model": model, "encserve.model_version": version, "encserve.sequences": sequences}
        )

    def counted(self, tokens: int) -> None:
        """See `spans.RequestSpan`."""
        self._tokens += tokens
        self._span.set_attribute("encserve.tokens", self._tokens)

    def stage(self, name: str, began_at: float, ended_at: float) -> None:
        """See `spans.RequestSpan`."""
        if (
            self._span.is_recording() and name not in self._stages
        ):  # a request that is split into parts could have hundreds of stages
            self._stages.add(name)
            self._child(name, began_at, ended_at)

    def computed(self, began_at: float, ended_at: float, batch: SpanContext) -> None:
        """Record a batch with sequences of this request."""
        if not self._span.is_recording():  # the caller may have disconnected during the batch
            return
        self._computed += 1
        if self._computed < MAX_COMPUTE_SPANS:
            self._child("compute", began_at, ended_at, [batch])
        else:
            self._further.append((began_at, ended_at, batch))

    def request(self, request_id: str) -> "_RequestSpan | None":
        """See `spans.RequestSpan`."""
        self._requests += 1
        if self._requests > MAX_STREAM_REQUESTS:
            return None
        span = self._tracer.start_span(
            "request",
            self._as_parent,
            attributes={"encserve.request_id": request_id[:MAX_REQUEST_ID_CHARS]},
            start_time=self._moments.now_ns(),
        )
        child = _RequestSpan(
            self._tracer, span, self._moments
        )  # the stream's converter, so that the span lies within the stream's span
        spans.enter(child, _ids_of(span))
        return child

    def end(self, attributes: Mapping[str, str | int], reason: str, *, failed: bool) -> None:
        """See `spans.RequestSpan`."""
        if not self._span.is_recording():
            return
        if self._further:
            began, ended, batches = zip(*self._further, strict=True)
            self._child("compute", min(began), max(ended), batches)
        span = self._span
        span.set_attributes(attributes)
        if self._requests:
            span.set_attribute("encserve.requests", self._requests)
        if reason:
            span.set_attribute("encserve.reason", reason)
        if failed:
            span.set_attribute("error.type", ", ".join(map(str, attributes.values())))
            span.set_status(StatusCode.ERROR, reason or None)
        span.end(self._moments.now_ns())

    def _child(self, name: str, began_at: float, ended_at: float, batches: Sequence[SpanContext] = ()) -> None:
        links = [Link(batch) for batch in batches]
        began_ns, ended_ns = self._moments.ns(began_at), self._moments.ns(ended_at)
        self._tracer.start_span(name, self._as_parent, links=links, start_time=began_ns).end(ended_ns)


class _BatchTracer:
    """See `spans.BatchTracer`."""

    def __init__(self, tracer: Tracer, model: dict[str, AttributeValue], clock: Clock) -> None:
        self._tracer = tracer
        self._model = model
        self._clock = clock

    def ran(self, requests: Sequence[RequestSpan], batch: Batch) -> None:
        """See `spans.BatchTracer`."""
        traced = [it for it in requests if isinstance(it, _RequestSpan)]
        moments = _Moments(self._clock)
        span = self._tracer.start_span(
            "batch",
            Context(),
            attributes={
                **self._model,
                "encserve.batch.sequences": len(batch.sequences),
                "encserve.batch.tokens": batch.tokens,
                "encserve.batch.padded_tokens": batch.padded_tokens,
                "encserve.batch.closed_by": batch.closed_by,
                "encserve.batch.collate_seconds": batch.collate_seconds,
                "encserve.batch.compute_seconds": batch.compute_seconds,
                "encserve.batch.split_seconds": batch.split_seconds,
                "encserve.batch.lane": batch.lane,
                "encserve.batch.alone": batch.alone,
                "encserve.batch.traced_requests": len(traced),
            },
            links=[Link(it.context) for it in traced],
            start_time=moments.ns(batch.began_at),
        )
        span.end(moments.ns(batch.ended_at))
        for request in traced:
            request.computed(batch.began_at, batch.ended_at, span.get_span_context())


def _ids_of(span: Span) -> Ids:
    context = span.get_span_context()
    return Ids(format_trace_id(context.trace_id), format_span_id(context.span_id))
