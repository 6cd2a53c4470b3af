"""The interface between the logic and gRPC. Implementations: for threads, for asyncio, and a fake for tests.

The logic in `calls` is written once, as coroutines over this interface. The wire for threads never suspends, so
`run_without_loop` runs the coroutines to the end in the caller's thread. The wire for asyncio suspends as usual.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from encserve_client._logic.failures import Failure
from encserve_client._logic.planning import Message

Rpc = Literal["Encode", "Inspect", "Tokenize", "Score", "ListModels", "GetModel"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answered:
    """A message was answered. `response` is the protobuf reply; for Inspect, the `InspectAssembler` with all parts."""

    message: Message
    response: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A message failed."""

    message: Message
    failure: Failure


@dataclass(frozen=True, slots=True)
class InputRead:
    """The caller's async iterable returned its next input."""

    item: object


@dataclass(frozen=True, slots=True)
class InputsEnded:
    """The caller's async iterable ended, or raised `error`."""

    error: BaseException | None = None


Event = Answered | Failed | InputRead | InputsEnded


class Wire(Protocol):
    """The I/O of one call.

    The driver, `calls.exchange` or `streams.Stream`, gets all results as events, in the order of arrival.
    """

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    def start(self, rpc: Rpc, message: Message, timeout_seconds: float | None, *, alone: bool) -> None:
        """Send a message. If `alone`, the driver has no other work, so the wire may block until the answer.

        The answer to an InspectRequest has many messages. The wire collects all of them into one event. So an
        incomplete answer is a failure, as for every other RPC.
        """

    def read_inputs(self, count: int) -> None:
        """Allow the wire to read `count` more inputs from the caller's async iterable. Each input becomes an event."""

    def has_event(self) -> bool:
        """Whether `wait(0)` would return an event."""

    async def wait(self, seconds: float | None) -> Event | None:
        """Return the next event, or None after `seconds` without an event. `seconds` None waits without a limit.

        Raises:
            ClientClosedError: A message failed because the client was closed.
        """

    async def aclose(self) -> None:
        """Cancel all running work. With asyncio, also wait for the end of the work."""


def run_without_loop(awaitable: Awaitable[T]) -> T:
    """Run an awaitable that never suspends, and return its result."""
    try:
        next(awaitable.__await__())
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise RuntimeError("a coroutine suspended outside an event loop")
