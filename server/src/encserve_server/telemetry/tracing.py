"""OpenTelemetry spans of requests and of batches, made by its SDK and sent by OTLP over gRPC.

    caller's span
    └── encserve.v1.EncoderService/Encode     SERVER, one for each RPC, or request over HTTP
        ├── tokenize                          where there is text
        ├── queue                             until its first batch was taken
        ├── compute ─ ─ link ─ ─▶ batch       one for each batch that held sequences of it
        └── encode                            the reply
    batch                                     a trace of its own: it belongs to many requests
        └─ ─ links ─ ─▶ the requests

A request on a stream has a span "request" under the stream's, which then has those parts.

The caller decides whether a request is sampled; where it says nothing, chance does. A batch is if a request in it is.
Spans are made on the event loop, and a thread of the SDK sends them. What that thread cannot keep up with is dropped
and counted.

Names and attributes are those of OpenTelemetry's semantic conventions 1.44.0, where RPCs are a release candidate, and
our own under `encserve.`.
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

from encserve_server import __version__
from encserve_server.errors import StartupError
from encserve_server.system.clock import Clock
from encserve_server.telemetry import spans
from encserve_server.telemetry.metrics import Metrics
from encserve_server.telemetry.spans import Ids, Metadata, RequestSpan
from encserve_server.telemetry.trace_export import BoundedProcessor, CountingExporter
from encserve_server.types.sequences import Batch

logger = logging.getLogger(__name__)

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
# A request of hundreds of sequences runs in dozens of batches: the last span stands for all further ones.
MAX_COMPUTE_SPANS = 16
# A stream may go on for days, and its requests are all in one trace.
MAX_STREAM_REQUESTS = 1000
# A span begins before its request id is checked, and thousands of spans may wait to be sent.
MAX_REQUEST_ID_CHARS = 128
# How long the end of the process waits for what has not been sent.
FLUSH_SECONDS = 3.0
_GIVE_UP_SECONDS = 0.5
# What these say about a caller's headers could be said as often as a caller likes, and each retry is no news.
_NOISY_LOGGERS = (
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
)


def open_otlp(endpoint: str, sample_ratio: float, clock: Clock, metrics: Metrics) -> "OtlpTracer":
    """Traces to an OTLP receiver, which need not be there: what cannot be sent is lost, and nothing else happens.

    Args:
        endpoint: http://HOST:PORT, or https:// for TLS.
        sample_ratio: How many of the requests whose callers say nothing about it are traced, from 0 to 1.
        clock: The clock of all times that spans are given.
        metrics: Where spans are counted.

    Raises:
        StartupError: One of OpenTelemetry's own environment variables is wrong.
    """
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        exporter = CountingExporter(endpoint, metrics)
        return OtlpTracer(exporter, BoundedProcessor(exporter, metrics), sample_ratio, clock)
    except Exception as error:  # a number that is none, a certificate that cannot be read, …
        raise StartupError(f"tracing: OpenTelemetry does not take its settings (OTEL_…): {error}") from error


class OtlpTracer:
    """See `spans.Tracer`. Everything belongs to the event loop but what the SDK's thread does with `_exporter`."""

    def __init__(
        self, exporter: CountingExporter, processor: BoundedProcessor, sample_ratio: float, clock: Clock
    ) -> None:
        """Takes where ended spans go, and how many requests have any whose callers say nothing about it."""
        self._exporter = exporter
        self._processor = processor
        self._clock = clock
        self._propagator = TraceContextTextMapPropagator()
        resource = _resource()
        self._requests = _open_tracer(ParentBased(TraceIdRatioBased(sample_ratio)), resource, processor)
        self._sampled = _open_tracer(ALWAYS_ON, resource, processor)  # what belongs to requests that are sampled

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
        # A daemon: it may wait for the receiver for as long as the SDK does.
        flush = threading.Thread(target=self._processor.shutdown, name="encserve-flush", daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, FLUSH_SECONDS)
        if flush.is_alive():
            logger.warning("some spans could not be sent", extra={"waited_seconds": FLUSH_SECONDS})
            self._exporter.shutdown()  # ends what is being sent, and the wait before the next try
            await asyncio.to_thread(flush.join, _GIVE_UP_SECONDS)


def _open_tracer(sampler: Sampler, resource: Resource, processor: BoundedProcessor) -> Tracer:
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider.get_tracer("encserve", __version__, SCHEMA_URL)


def _resource() -> Resource:
    """Who sends the spans: what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say, and ours where they say nothing."""
    ours = {
        "service.name": "encserve",
        "service.version": __version__,
        "service.instance.id": str(uuid.uuid4()),
    }
    return Resource.create(ours).merge(OTELResourceDetector().detect())


class _Moments:
    """Nanoseconds since 1970 of what the clock says, which never goes back; at the beginning the wall's clock is right.

    Every request has one of its own: so its spans fit into each other whatever happens to the wall's clock meanwhile,
    and a server that has been up for months is not months' drift away.
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
        self._further: list[tuple[float, float, SpanContext]] = []  # batches that have no span of their own
        self._requests = 0  # of a stream

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
        if self._span.is_recording() and name not in self._stages:  # a request in parts could have hundreds
            self._stages.add(name)
            self._child(name, began_at, ended_at)

    def computed(self, began_at: float, ended_at: float, batch: SpanContext) -> None:
        """A batch has run that holds sequences of this request."""
        if not self._span.is_recording():  # its caller may have gone while the batch ran
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
        child = _RequestSpan(self._tracer, span, self._moments)  # the stream's moments, so that it lies within it
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
