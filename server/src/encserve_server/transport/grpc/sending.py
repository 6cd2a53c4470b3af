"""Limits the time in which a caller must read a reply, because an unread reply takes memory."""

from encserve_server.calls import Call
from encserve_server.settings import MIB
from encserve_server.system.background import repeat
from encserve_server.system.clock import Clock
from encserve_server.transport.grpc.connections import close_connections

# The time in which a caller must read a reply, and the additional time for each MiB.
UNREAD_SECONDS = 30.0
_SECONDS_PER_MIB = 1.0
_LOOK_SECONDS = 1.0


def seconds_to_read(size: int) -> float:
    """Return the seconds that a caller may take to read a reply of `size` bytes."""
    return UNREAD_SECONDS + _SECONDS_PER_MIB * size / MIB


class Sending:
    """The replies of unary calls that gRPC is sending; owned by the event loop.

    If a caller does not read, the server closes the connection. This frees all memory that gRPC holds for the caller.
    The server cannot end only the call: gRPC for asyncio cannot end a call after its handler has returned, or while a
    message is being sent.
    """

    def __init__(self, clock: Clock) -> None:
        """Start without replies."""
        self._clock = clock
        self._due: dict[Call, tuple[float, str]] = {}  # the deadline and the peer of each reply

    def begin(self, call: Call, peer: str, size: int) -> None:
        """Limit the time in which the caller must read the reply of a call."""
        self._due[call] = self._clock.now() + seconds_to_read(size), peer

    def end(self, call: Call) -> None:
        """Forget a call, whether or not it has a reply."""
        self._due.pop(call, None)

    async def watch(self) -> None:
        """Close the connections of callers that do not read, until cancelled."""
        await repeat(self._look, _LOOK_SECONDS, clock=self._clock)

    def _look(self) -> None:
        now = self._clock.now()
        late = {call: peer for call, (due, peer) in self._due.items() if due <= now}
        if late:
            close_connections(set(late.values()))
            # Closing a connection needs a free descriptor. If there was none, the connection is still open. So try
            # again later.
            again = now + UNREAD_SECONDS
            self._due |= {call: (again, peer) for call, peer in late.items()}
