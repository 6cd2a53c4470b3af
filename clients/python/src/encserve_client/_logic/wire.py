"""What the logic needs of gRPC: the interface that is implemented once for threads, once for asyncio, once as a fake.

The logic in `calls` is written once, as coroutines over this interface. The wire for threads never suspends in them, so
that `run_without_loop` drives them to the end in the caller's own thread; the one for asyncio suspends as usual.
"""

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from encserve_client._logic.failures import Failure
from encserve_client._logic.planning import Message
from encserve_proto.v1 import encoder_pb2 as pb

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
class StreamAnswered:
    """A stream brought one answer."""

    stream: int
    response: pb.EncodeStreamResponse


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream is over: with a failure, or because the server had no more to say."""

    stream: int
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class InputRead:
    """The caller's iterable brought its next input."""

    item: object


@dataclass(frozen=True, slots=True)
class InputsEnded:
    """The caller's iterable is at its end, or raised this."""

    error: BaseException | None = None


Event = Answered | Failed | StreamAnswered | StreamEnded | InputRead | InputsEnded


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

    def open_stream(self) -> int:
        """Opens an EncodeStream and returns its number, never 0."""

    def send(self, stream: int, request: pb.EncodeStreamRequest) -> None:
        """Queues a request for a stream; a stream that is over drops it."""

    def finish(self, stream: int) -> None:
        """Says that no more requests come on a stream; its answers still do."""

    def read_input(self) -> None:
        """Asks for the caller's next input."""

    async def wait(self, seconds: float | None) -> Event | None:
        """The next event; None if none came within so many seconds. None as an argument waits for ever.

        Raises:
            ClientClosedError: Something ended because the client was closed, whatever gRPC makes of that.
        """

    async def aclose(self) -> None:
        """Cancels everything that is still going on and waits until it has ended."""


def run_without_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Drives a coroutine that never suspends, and returns what it returns."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    coroutine.close()
    raise RuntimeError("a coroutine suspended outside an event loop")
