"""The interface of tracing: spans of requests and batches, and their ids for log lines; implemented in `tracing`.

This module does not use OpenTelemetry. Without tracing, the context variables are never set. Then each place that could
record a span only reads a context variable.

Times are in the clock's seconds. A context variable holds the span of the current request. Each gRPC call, and each
request of a stream, runs in a separate task with a separate copy of the context.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from encserve_server.types.callers import Metadata
from encserve_server.types.sequences import Batch

# The gRPC status codes of server errors. Mistakes of callers and a full queue are not server errors.
SERVER_ERROR_CODES = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)


class Ids(NamedTuple):
    """The ids in log lines. As in W3C Trace Context, they have 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str


class RequestSpan(Protocol):
    """The span of one traced request. Calls after `end` have no effect."""

    def about(self, model: str, version: str, sequences: int) -> None:
        """Record the model and the number of sequences."""

    def counted(self, tokens: int) -> None:
        """Add `tokens` to the request's number of tokens."""

    def stage(self, name: str, began_at: float, ended_at: float) -> None:
        """Record a stage of the work. If several stages have the same name, only the first is recorded."""

    def request(self, request_id: str) -> "RequestSpan | None":
        """Begin a request of this stream. Return None if the stream has the maximum number of traced requests."""

    def end(self, attributes: Mapping[str, str | int], reason: str, *, failed: bool) -> None:
        """End the span.

        Args:
            attributes: The status, such as {"rpc.response.status_code": "OK"}, by the conventions of the protocol.
            reason: The reason of an error; empty without an error.
            failed: Whether the status is a server error.
        """


class BatchTracer(Protocol):
    """Traces the batches of one model."""

    def ran(self, requests: Sequence[RequestSpan], batch: Batch) -> None:
        """Record a batch with sequences of traced requests. Called before the requests get their outputs."""


class Tracer(Protocol):
    """Traces requests. All methods are called on the event loop."""

    def begin(self, name: str, metadata: Metadata, attributes: Mapping[str, str]) -> RequestSpan | None:
        """Begin a request. Return its span; None if the request is not sampled. After this, log lines have its ids.

        `attributes` follow OpenTelemetry's conventions for the protocol.
        """

    def for_model(self, name: str, version: str) -> BatchTracer:
        """Return a tracer for the batches of a model."""

    async def close(self) -> None:
        """Send the remaining spans within a few seconds, and stop tracing."""


_span: ContextVar[RequestSpan | None] = ContextVar("encserve_span", default=None)
_ids: ContextVar[Ids | None] = ContextVar("encserve_ids", default=None)


def current_ids() -> Ids | None:
    """Return the ids of the current request, sampled or not. Return None outside of requests or without tracing."""
    return _ids.get()


def enter(span: RequestSpan | None, ids: Ids | None) -> None:
    """Make a request the current request of this task, and of the tasks that this task starts."""
    _span.set(span)
    _ids.set(ids)


def begin_request(request_id: str) -> RequestSpan | None:
    """Begin one request of a stream in this task. Return its span if the request is traced."""
    stream = _span.get()
    if stream is None:
        return None
    span = stream.request(request_id)
    if span is None:
        _span.set(None)  # spans of this request must not become children of the stream's span
    return span
