"""Replies on their way: a caller that does not read one keeps its memory, so the time for that is bounded."""

import contextlib
import ipaddress
import logging
import os
import socket
import stat
import sys
import urllib.parse
from collections.abc import Collection
from pathlib import Path

from encserve_server.calls import Call
from encserve_server.settings import MIB
from encserve_server.system.background import repeat
from encserve_server.system.clock import Clock

logger = logging.getLogger(__name__)

# How long a reply may take to be read, and how much longer for each MiB.
UNREAD_SECONDS = 30.0
_SECONDS_PER_MIB = 1.0
_LOOK_SECONDS = 1.0
_FDS = Path("/proc/self/fd")


def seconds_to_read(size: int) -> float:
    """How long a caller may take to read a reply of so many bytes."""
    return UNREAD_SECONDS + _SECONDS_PER_MIB * size / MIB


class Sending:
    """The replies of unary calls that gRPC sends; owned by the event loop.

    Asyncio's gRPC has no way to end a call whose handler has returned, nor one whose message is under way. So the
    caller's connection is closed, and with it everything that gRPC keeps for that caller.
    """

    def __init__(self, clock: Clock) -> None:
        """Starts with none."""
        self._clock = clock
        self._due: dict[Call, tuple[float, str]] = {}  # when each reply has to have been read, and by which peer

    def begin(self, call: Call, peer: str, size: int) -> None:
        """The reply of a call goes out."""
        self._due[call] = self._clock.now() + seconds_to_read(size), peer

    def end(self, call: Call) -> None:
        """The reply of a call has left, or never will; callable for any call."""
        self._due.pop(call, None)

    async def watch(self) -> None:
        """Close the connections of callers that do not read, until cancelled."""
        await repeat(self._look, _LOOK_SECONDS, clock=self._clock)

    def _look(self) -> None:
        now = self._clock.now()
        late = {call: peer for call, (due, peer) in self._due.items() if due <= now}
        if late:
            close_connections(set(late.values()))
            again = now + UNREAD_SECONDS  # where a connection could not be closed, for want of descriptors
            self._due |= {call: (again, peer) for call, peer in late.items()}


def close_connections(peers: Collection[str]) -> None:
    """Closes the connections of peers, as gRPC names them: `ipv4:127.0.0.1:50123`. Only Linux can find them."""
    for peer in peers:
        logger.warning("a caller does not read its replies; its connection is closed", extra={"peer": peer})
    if sys.platform != "linux":
        return
    wanted = {_endpoint(*urllib.parse.unquote(it).partition(":")[2].rpartition(":")[::2]) for it in peers}
    with contextlib.suppress(OSError):
        for path in list(_FDS.iterdir()):
            _close(int(path.name), wanted)


_Endpoint = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def _close(descriptor: int, wanted: Collection[_Endpoint | None]) -> None:
    """Closes a connection if its other end is wanted; a copy of its descriptor stays the connection's meanwhile."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                is_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_ip and _endpoint(*connection.getpeername()[:2]) in wanted:
                    connection.shutdown(socket.SHUT_RDWR)


def _endpoint(host: str, port: str | int) -> _Endpoint | None:
    """An address and a port; of IPv4 in IPv6 that of IPv4. None for what is neither."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
        return getattr(address, "ipv4_mapped", None) or address, int(port)
    except ValueError:  # a socket of another family
        return None
