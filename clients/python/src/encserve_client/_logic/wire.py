"""What the logic needs of gRPC: the interface that is implemented once for threads, once for asyncio, once as a fake.

The logic in `calls` is written once, as coroutines over this interface. The wire for threads never suspends in them, so
that `run_without_loop` drives them to the end in the caller's own thread; the one for asyncio suspends as usual.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from encserve_client._logic.failures import Failure
from encserve_client._logic.planning import Message

Rpc = Literal["Encode", "Inspect", "Tokenize", "ListModels", "GetModel"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answered:
    """A message was answered: by a message, or to Inspect by a `Gathering` of all of them."""

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
    """The caller's async iterable ended, or raised this error."""

    error: BaseException | None = None


Event = Answered | Failed | InputRead | InputsEnded


class Wire(Protocol):
    """One call's I/O. Everything that happens comes back as an event, in the order in which it happened.

    It belongs to one call and one driver; `aclose` ends whatever is still going on, and nothing outlives it.
    """

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""

    def start(self, rpc: Rpc, message: Message, timeout_seconds: float | None, *, alone: bool) -> None:
        """Sends a message. `alone`: nothing else is to be done until it ends, so it may block until then.

        The many messages that answer an InspectRequest are gathered and come as one event when all are there, so that
        to its driver it is a call like any other: what broke off half-way has failed, and is sent again as a whole.
        """

    def read_inputs(self, count: int) -> None:
        """Allow so many more inputs to be read from the caller's async iterable, each of which becomes an event."""

    async def wait(self, seconds: float | None) -> Event | None:
        """The next event; None if none came within so many seconds. None as an argument waits for ever.

        Raises:
            ClientClosedError: Something ended because the client was closed, whatever gRPC makes of that.
        """

    async def aclose(self) -> None:
        """Cancels everything that is still going on and waits until it has ended."""


def run_without_loop(awaitable: Awaitable[T]) -> T:
    """Run an awaitable that never suspends, and return its result."""
    try:
        next(awaitable.__await__())
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise RuntimeError("a coroutine suspended outside an event loop")
