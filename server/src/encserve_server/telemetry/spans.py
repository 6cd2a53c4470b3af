"""The parts of a request while it is handled, for traces and log lines; `tracing` makes OpenTelemetry spans of them.

Nothing here knows OpenTelemetry. With tracing off there is no tracer, the context variables are never set, and a
request pays only for reading one of them at each place that could record a part.

Times are in the clock's seconds. Which request is handled is known by a context variable: gRPC runs every call, and a
stream every request, in a task of its own, which has a copy of the context of its own.
"""

from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from encserve_server.types.sequences import Batch

Metadata = Collection[tuple[str, str | bytes]]

# gRPC status codes that count as errors of the server. Callers' mistakes and a full queue do not.
SERVER_ERROR_CODES = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)


class Ids(NamedTuple):
    """What log lines carry, as W3C Trace Context writes it: 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str


class RequestSpan(Protocol):
    """One request that is traced. What comes after its end is ignored."""

    def about(self, model: str, version: str, sequences: int) -> None:
        """What is asked for: a model, and how many sequences."""

    def counted(self, tokens: int) -> None:
        """How many tokens these have, or those of one part of them."""

    def stage(self, name: str, began_at: float, ended_at: float) -> None:
        """A part of the work has been done; only the first of a name is kept."""

    def request(self, request_id: str) -> "RequestSpan | None":
        """Begins a request of this stream; None if it has had so many that no more are traced."""

    def end(self, attributes: Mapping[str, str | int], reason: str, *, failed: bool) -> None:
        """Ends the span.

        Args:
            attributes: The status as the protocol's conventions name it, as {"rpc.response.status_code": "OK"}.
            reason: The reason of an error; empty for none.
            failed: Whether the status is an error of the server.
        """


class BatchTracer(Protocol):
    """Traces the batches of one model."""

    def ran(self, requests: Sequence[RequestSpan], batch: Batch) -> None:
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
        _span.set(None)  # parts of this request are not the stream's
    return span
