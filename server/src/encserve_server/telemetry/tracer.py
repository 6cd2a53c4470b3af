"""Makes spans of what `spans` is told.

A span is made whole, when all is known of it: the SDK's own `start_span` and `end`, with their locks and copies for
spans that change meanwhile, take ten times as long. From the SDK come the propagator, the sampler, the ids, and the
way to the receiver.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    format_span_id,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from encserve_server import __version__
from encserve_server.system.clock import Clock
from encserve_server.telemetry import spans
from encserve_server.telemetry.spans import Ids, RanBatch, RequestSpan
from encserve_server.telemetry.trace_export import BoundedProcessor, CountingExporter

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

_UNSET = Status(StatusCode.UNSET)

Metadata = Iterable[tuple[str, str | bytes]]
Attributes = dict[str, AttributeValue]


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
        self._sampler = sampler
        self._resource = resource
        self._scope = InstrumentationScope("encserve", __version__, SCHEMA_URL)
        self._propagator = TraceContextTextMapPropagator()
        self._ids = RandomIdGenerator()
        self.clock = clock

    def begin(self, method: str, metadata: Metadata) -> RequestSpan | None:
        """See `spans.Tracer`."""
        context = self._propagator.extract(metadata, Context(), _METADATA)
        caller = get_current_span(context).get_span_context()
        parent = caller if caller.is_valid else None
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        sampling = self._sampler.should_sample(context, trace_id, method, SpanKind.SERVER)
        span_context = self.new_context(
            trace_id, sampling.trace_state, sampled=sampling.decision is Decision.RECORD_AND_SAMPLE
        )
        span = None
        if span_context.trace_flags.sampled:
            anchor = Anchor(self.clock.now(), time.time_ns())
            attributes: Attributes = {"rpc.system.name": "grpc", "rpc.method": method}
            span = _RequestSpan(self, method, SpanKind.SERVER, span_context, parent, anchor, attributes)
        spans.enter(span, _ids_of(span_context))
        return span

    def new_context(self, trace_id: int, trace_state: TraceState | None = None, *, sampled: bool = True) -> SpanContext:
        """A new span's ids."""
        flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
        return SpanContext(trace_id, self._ids.generate_span_id(), False, flags, trace_state)

    def new_trace(self) -> SpanContext:
        """The ids of a new span in a new trace."""
        return self.new_context(self._ids.generate_trace_id())

    def ended(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_ns: int,
        end_ns: int,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
        status: Status = _UNSET,
    ) -> None:
        """Makes a span and sends it on its way."""
        span = ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            (),
            links,
            kind,
            status=status,
            start_time=start_ns,
            end_time=end_ns,
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)

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

    def __init__(
        self,
        tracer: OtlpTracer,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        anchor: Anchor,
        attributes: Attributes,
    ) -> None:
        self.context = context
        self._tracer = tracer
        self._name = name
        self._kind = kind
        self._parent = parent
        self._anchor = anchor
        self._began_at = tracer.clock.now()
        self._attributes = attributes
        self._stages: list[tuple[str, float, float]] = []
        self._computed: list[tuple[float, float, SpanContext]] = []
        self._requests = 0  # of a stream
        self._ended = False

    def about(self, model: str, version: str, sequences: int) -> None:
        """See `spans.RequestSpan`."""
        self._attributes |= {
            "encserve.model": model,
            "encserve.model_version": version,
            "encserve.sequences": sequences,
        }

    def counted(self, tokens: int) -> None:
        """See `spans.RequestSpan`."""
        self._attributes["encserve.tokens"] = tokens

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
        context = self._tracer.new_context(self.context.trace_id, self.context.trace_state)
        attributes: Attributes = {"encserve.request_id": request_id}
        # The stream's own clocks, so that this one lies within it.
        child = _RequestSpan(
            self._tracer, "request", SpanKind.INTERNAL, context, self.context, self._anchor, attributes
        )
        spans.enter(child, _ids_of(context))
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
        for name, began, ended in self._stages:
            self._child(name, began, ended)
        computed = sorted(self._computed, key=lambda it: it[:2])
        single, rest = computed[: MAX_COMPUTE_SPANS - 1], computed[MAX_COMPUTE_SPANS - 1 :]
        for began, ended, batch in single:
            self._child("compute", began, ended, [batch])
        if rest:
            self._child("compute", rest[0][0], max(it[1] for it in rest), [it[2] for it in rest])
        attributes = self._attributes
        attributes["rpc.response.status_code"] = code
        if self._requests:
            attributes["encserve.requests"] = self._requests
        if reason:
            attributes["encserve.reason"] = reason
        status = _UNSET
        if code in ERROR_CODES:
            attributes["error.type"] = code
            status = Status(StatusCode.ERROR, reason or None)
        self._tracer.ended(
            self._name,
            self.context,
            self._parent,
            self._anchor.ns(self._began_at),
            self._anchor.ns(ended_at),
            kind=self._kind,
            attributes=attributes,
            status=status,
        )

    def _child(self, name: str, began_at: float, ended_at: float, batches: Sequence[SpanContext] = ()) -> None:
        self._tracer.ended(
            name,
            self._tracer.new_context(self.context.trace_id, self.context.trace_state),
            self.context,
            self._anchor.ns(began_at),
            self._anchor.ns(ended_at),
            links=[Link(batch) for batch in batches],
        )


class _BatchTracer:
    """See `spans.BatchTracer`."""

    def __init__(self, tracer: OtlpTracer, model: Attributes) -> None:
        self._tracer = tracer
        self._model = model

    def ran(self, requests: Sequence[RequestSpan], batch: RanBatch) -> None:
        """See `spans.BatchTracer`."""
        context = self._tracer.new_trace()
        for request in requests:
            request.computed(batch.began_at, batch.ended_at, context)
        # Later, so that those who wait for the rows go first.
        asyncio.get_running_loop().call_soon(self._make, context, requests, batch)

    def _make(self, context: SpanContext, requests: Sequence[RequestSpan], batch: RanBatch) -> None:
        linked = [it.context for it in requests[:MAX_BATCH_LINKS] if isinstance(it, _RequestSpan)]
        anchor = Anchor(self._tracer.clock.now(), time.time_ns())
        self._tracer.ended(
            "batch",
            context,
            None,
            anchor.ns(batch.began_at),
            anchor.ns(batch.ended_at),
            attributes={
                **self._model,
                "encserve.batch.sequences": batch.sequences,
                "encserve.batch.tokens": batch.tokens,
                "encserve.batch.padded_tokens": batch.padded_tokens,
                "encserve.batch.closed_by": batch.closed_by,
                "encserve.batch.collate_seconds": batch.seconds.collate,
                "encserve.batch.compute_seconds": batch.seconds.compute,
                "encserve.batch.split_seconds": batch.seconds.split,
                "encserve.batch.lane": batch.lane,
                "encserve.batch.alone": batch.alone,
                "encserve.batch.traced_requests": len(requests),
            },
            links=[Link(it) for it in linked],
        )


class _MetadataGetter(Getter[Metadata]):
    """Reads a call's metadata."""

    def get(self, carrier: Metadata, key: str) -> list[str] | None:
        """Every value of a key, None where there is none."""
        return [value for name, value in carrier if name == key and isinstance(value, str)] or None

    def keys(self, carrier: Metadata) -> list[str]:
        """The keys."""
        return [name for name, _ in carrier]


_METADATA = _MetadataGetter()


def _ids_of(context: SpanContext) -> Ids:
    return Ids(format_trace_id(context.trace_id), format_span_id(context.span_id))
