"""What is told of a request while it is handled, for traces and log lines; `tracing` makes OpenTelemetry spans of it.

Nothing here knows OpenTelemetry. With tracing off there is no tracer, nobody sets the context variables, and all that
a request pays is reading one of them where something could be told.

Times are in the clock's seconds. Which request is handled is known by a context variable: gRPC runs every call, and a
stream every request, in a task of its own, which has a copy of the context of its own.
"""

from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from encserve_server.types import BatchSeconds, ClosedBy

Metadata = Collection[tuple[str, str | bytes]]


class Ids(NamedTuple):
    """What log lines carry, as W3C Trace Context writes it: 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class RanBatch:
    """A batch that ran.

    Attributes:
        began_at: When it began.
        ended_at: When what is wanted of it was made.
        seconds: Where the time between went.
        sequences: How many sequences it had.
        tokens: Their tokens.
        padded_tokens: The tokens that were laid out, padding included.
        closed_by: Why it took no more.
        lane: Which of the engine's threads ran it, from 0.
        alone: Whether it had the whole device.
    """

    began_at: float
    ended_at: float
    seconds: BatchSeconds
    sequences: int
    tokens: int
    padded_tokens: int
    closed_by: ClosedBy
    lane: int
    alone: bool


class RequestSpan(Protocol):
    """One request that is traced. What is told once it has ended is forgotten."""

    def about(self, model: str, version: str, sequences: int) -> None:
        """What is asked for: a model, and how many sequences."""

    def counted(self, tokens: int) -> None:
        """How many tokens these have."""

    def stage(self, name: str, began_at: float, ended_at: float) -> None:
        """A part of the work has been done."""

    def request(self, request_id: str) -> "RequestSpan | None":
        """Begins a request of this stream; None if it has had so many that no more are traced."""

    def end(self, code: str | int, reason: str) -> None:
        """It has been answered: with a gRPC status such as "OK" or an HTTP status, and of an error its reason."""


class BatchTracer(Protocol):
    """Traces the batches of one model."""

    def ran(self, requests: Sequence[RequestSpan], batch: RanBatch) -> None:
        """A batch has run for at least one request that is traced; called before anybody has the rows."""


class Tracer(Protocol):
    """Traces requests; everything is called on the event loop."""

    def begin(self, name: str, metadata: Metadata, attributes: Mapping[str, str]) -> RequestSpan | None:
        """A request has begun; gives its span, or None where it is not sampled. Log lines carry its ids from now on.

        `attributes` are those of OpenTelemetry's conventions for its protocol.
        """

    def for_model(self, name: str, version: str) -> BatchTracer:
        """What traces a model's batches."""

    async def close(self) -> None:
        """Sends what has not been sent, within a few seconds; nothing is traced any more."""


_span: ContextVar[RequestSpan | None] = ContextVar("encserve_span", default=None)
_ids: ContextVar[Ids | None] = ContextVar("encserve_ids", default=None)


def current() -> RequestSpan | None:
    """The request that is being handled, if it is traced."""
    return _span.get()


def current_ids() -> Ids | None:
    """The ids of the request that is being handled, traced or not; None outside of requests and without tracing."""
    return _ids.get()


def enter(span: RequestSpan | None, ids: Ids | None) -> None:
    """From now on this task, and what it starts, handles this request."""
    _span.set(span)
    _ids.set(ids)


def begin_request(request_id: str) -> RequestSpan | None:
    """A task has begun to handle one request of a stream; gives its span if it is traced."""
    stream = _span.get()
    if stream is None:
        return None
    span = stream.request(request_id)
    if span is None:
        _span.set(None)  # what is told of this request is not the stream's
    return span
