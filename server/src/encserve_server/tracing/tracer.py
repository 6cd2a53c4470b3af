"""Makes spans of what `spans` is told."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
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

from encserve_server import __version__, spans
from encserve_server.clock import Clock
from encserve_server.spans import Ids, RanBatch, RequestSpan
from encserve_server.tracing.export import BoundedProcessor, CountingExporter

logger = logging.getLogger(__name__)

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
# Of a server's span; the caller's own mistakes, and a full queue, are none.
ERROR_CODES = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
# A request of hundreds of sequences runs in dozens of batches: the last span stands for all further ones.
MAX_COMPUTE_SPANS = 16
# A batch has up to hundreds of requests.
MAX_BATCH_LINKS = 32
# A stream may go on for days, and its requests are all in one trace.
MAX_STREAM_REQUESTS = 1000
# How long the end of the process waits for what has not been sent.
FLUSH_SECONDS = 3.0
_GIVE_UP_SECONDS = 0.5

Metadata = Iterable[tuple[str, str | bytes]]


class OtlpTracer:
    """See `spans.Tracer`. Everything belongs to the event loop but what the SDK's thread does with `_exporter`."""

    def __init__(
        self,
        processor: BoundedProcessor,
        exporter: CountingExporter,
        sampler: Sampler,
        resource: Resource,
        clock: Clock,
    ) -> None:
        """Takes where ended spans go, who decides which requests have any, and who says so."""
        self._processor = processor
        self._exporter = exporter
        self._propagator = TraceContextTextMapPropagator()
        self.clock = clock

        def tracer(sampler: Sampler) -> Tracer:
            provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
            provider.add_span_processor(processor)
            return provider.get_tracer("encserve", __version__, SCHEMA_URL)

        self._deciding = tracer(sampler)
        # Of what belongs to a request that is sampled, a batch too, though that begins a trace of its own.
        self.always = tracer(ALWAYS_ON)

    def begin(self, method: str, metadata: Metadata) -> RequestSpan | None:
        """See `spans.Tracer`."""
        context = self._propagator.extract(metadata, Context(), _METADATA)
        anchor = Anchor(self.clock.now(), time.time_ns())
        span = self._deciding.start_span(
            method,
            context,
            SpanKind.SERVER,
            {"rpc.system.name": "grpc", "rpc.method": method},
            start_time=anchor.wall_ns,
        )
        traced = _RequestSpan(self, span, anchor) if span.is_recording() else None
        spans.enter(traced, _ids_of(span))
        return traced

    def for_model(self, name: str, version: str) -> "_BatchTracer":
        """See `spans.Tracer`."""
        return _BatchTracer(self, {"encserve.model": name, "encserve.model_version": version})

    async def close(self) -> None:
        """See `spans.Tracer`."""
        await asyncio.sleep(0)  # for spans that are made in the next turn
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def flush() -> None:
            self._processor.force_flush()
            self._processor.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ended.set)

        # A daemon, and not one of the loop's threads: those are waited for, and this one may wait for the receiver.
        threading.Thread(target=flush, name="encserve-flush", daemon=True).start()
        if not await _is_set_within(ended, FLUSH_SECONDS):
            logger.warning("some spans could not be sent", extra={"waited_seconds": FLUSH_SECONDS})
            self._exporter.shutdown()  # ends what is being sent, and the wait before the next try
            await _is_set_within(ended, _GIVE_UP_SECONDS)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


class Anchor:
    """One moment on the clock that never goes back and on the wall's; between two of them the first one is right.

    Every request has one of its own: so its spans fit into each other whatever happens to the wall's clock meanwhile,
    and a server that has been up for months is not months' drift away.
    """

    __slots__ = ("at", "wall_ns")

    def __init__(self, at: float, wall_ns: int) -> None:
        """Takes the clock's seconds, and nanoseconds since 1970 at that moment."""
        self.at = at
        self.wall_ns = wall_ns

    def ns(self, at: float) -> int:
        """Nanoseconds since 1970 of a moment on the clock."""
        return self.wall_ns + round((at - self.at) * 1e9)


class _RequestSpan:
    """See `spans.RequestSpan`."""

    def __init__(self, tracer: OtlpTracer, span: Span, anchor: Anchor) -> None:
        self.context = span.get_span_context()
        self._tracer = tracer
        self._span = span
        self._anchor = anchor
        self._about: dict[str, AttributeValue] = {}
        self._stages: list[tuple[str, float, float]] = []
        self._computed: list[tuple[float, float, SpanContext]] = []
        self._requests = 0  # of a stream
        self._ended = False

    def about(self, model: str, version: str, lengths: Sequence[int]) -> None:
        """See `spans.RequestSpan`."""
        self._about |= {
            "encserve.model": model,
            "encserve.model_version": version,
            "encserve.sequences": len(lengths),
            "encserve.tokens": sum(lengths),
        }

    def stage(self, name: str, began_at: float, ended_at: float) -> None:
        """See `spans.RequestSpan`."""
        if not self._ended:
            self._stages.append((name, began_at, ended_at))

    def computed(self, began_at: float, ended_at: float, batch: object) -> None:
        """See `spans.RequestSpan`."""
        assert isinstance(batch, SpanContext)  # noqa: S101 - only `_BatchTracer` has any
        if not self._ended:  # its caller may have gone while the batch ran
            self._computed.append((began_at, ended_at, batch))

    def request(self, request_id: str) -> "_RequestSpan | None":
        """See `spans.RequestSpan`."""
        self._requests += 1
        if self._requests > MAX_STREAM_REQUESTS:
            return None
        tracer = self._tracer
        anchor = self._anchor  # the stream's own, so that this one lies within it
        span = tracer.always.start_span(
            "request",
            set_span_in_context(self._span, Context()),
            attributes={"encserve.request_id": request_id},
            start_time=anchor.ns(tracer.clock.now()),
        )
        child = _RequestSpan(tracer, span, anchor)
        spans.enter(child, _ids_of(span))
        return child

    def end(self, code: str, reason: str) -> None:
        """See `spans.RequestSpan`."""
        if not self._ended:
            self._ended = True
            ended_at = self._tracer.clock.now()
            # Later, so that the answer goes first.
            asyncio.get_running_loop().call_soon(self._make, ended_at, code, reason)

    def _make(self, ended_at: float, code: str, reason: str) -> None:
        """Makes every span of the request."""
        context = set_span_in_context(self._span, Context())
        for name, began, ended in self._stages:
            self._child(context, name, began, ended)
        computed = sorted(self._computed, key=lambda it: it[:2])
        single, rest = computed[: MAX_COMPUTE_SPANS - 1], computed[MAX_COMPUTE_SPANS - 1 :]
        for began, ended, batch in single:
            self._child(context, "compute", began, ended, [batch])
        if rest:
            self._child(context, "compute", rest[0][0], max(it[1] for it in rest), [it[2] for it in rest])
        self._span.set_attributes({**self._about, "rpc.response.status_code": code})
        if self._requests:
            self._span.set_attribute("encserve.requests", self._requests)
        if reason:
            self._span.set_attribute("encserve.reason", reason)
        if code in ERROR_CODES:
            self._span.set_attribute("error.type", code)
            self._span.set_status(StatusCode.ERROR, reason or None)
        self._span.end(self._anchor.ns(ended_at))

    def _child(
        self, context: Context, name: str, began_at: float, ended_at: float, batches: Sequence[SpanContext] = ()
    ) -> None:
        links = [Link(batch) for batch in batches]
        span = self._tracer.always.start_span(name, context, links=links, start_time=self._anchor.ns(began_at))
        span.end(self._anchor.ns(ended_at))


class _BatchTracer:
    """See `spans.BatchTracer`."""

    def __init__(self, tracer: OtlpTracer, model: dict[str, AttributeValue]) -> None:
        self._tracer = tracer
        self._model = model

    def ran(self, requests: Sequence[RequestSpan], batch: RanBatch) -> None:
        """See `spans.BatchTracer`."""
        anchor = Anchor(self._tracer.clock.now(), time.time_ns())
        span = self._tracer.always.start_span("batch", Context(), start_time=anchor.ns(batch.began_at))
        for request in requests:
            request.computed(batch.began_at, batch.ended_at, span.get_span_context())
        # Later, so that those who wait for the rows go first.
        asyncio.get_running_loop().call_soon(self._make, span, requests, batch, anchor)

    def _make(self, span: Span, requests: Sequence[RequestSpan], batch: RanBatch, anchor: Anchor) -> None:
        for request in requests[:MAX_BATCH_LINKS]:
            assert isinstance(request, _RequestSpan)  # noqa: S101 - there are no others
            span.add_link(request.context)
        span.set_attributes(
            {
                **self._model,
                "encserve.batch.sequences": batch.sequences,
                "encserve.batch.tokens": batch.tokens,
                "encserve.batch.padded_tokens": batch.padded_tokens,
                "encserve.batch.closed_by": batch.closed_by,
                "encserve.batch.lane": batch.lane,
                "encserve.batch.alone": batch.alone,
                "encserve.batch.collate_seconds": batch.seconds.collate,
                "encserve.batch.compute_seconds": batch.seconds.compute,
                "encserve.batch.split_seconds": batch.seconds.split,
                "encserve.batch.traced_requests": len(requests),
            }
        )
        span.end(anchor.ns(batch.ended_at))


class _MetadataGetter(Getter[Metadata]):
    """Reads a call's metadata."""

    def get(self, carrier: Metadata, key: str) -> list[str] | None:
        """Every value of a key, None where there is none."""
        return [value for name, value in carrier if name == key and isinstance(value, str)] or None

    def keys(self, carrier: Metadata) -> list[str]:
        """The keys."""
        return [name for name, _ in carrier]


_METADATA = _MetadataGetter()


def _ids_of(span: Span) -> Ids | None:
    context = span.get_span_context()
    return Ids(format_trace_id(context.trace_id), format_span_id(context.span_id)) if context.is_valid else None
