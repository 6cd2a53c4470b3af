"""Finds and closes gRPC connections among the sockets of the process, because grpcio gives no access. Linux only."""

import contextlib
import ipaddress
import logging
import math
import os
import socket
import stat
import sys
import urllib.parse
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from encserve_server.ledger import connections_to_close
from encserve_server.system.background import repeat
from encserve_server.system.clock import Clock

logger = logging.getLogger(__name__)

_FDS = Path("/proc/self/fd")
# gRPC accepts this many times the limit. So it accepts new connections until `Connections` closes old ones.
HEADROOM = 2
_LOOK_SECONDS = 0.2

Endpoint = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection; see `ledger.OpenConnection`."""

    endpoint: Endpoint
    host: str
    has_called: bool
    idle_since: float


class Connections:
    """Keeps the number of gRPC connections at its limit: closes idle connections to make room for new ones.

    The sockets are checked only while the process has more descriptors than the limit. Owned by the event loop.
    """

    def __init__(
        self, limit: int, port: Callable[[], int], busy_peers: Callable[[], Collection[str]], clock: Clock
    ) -> None:
        """Keep the limit.

        Args:
            limit: The largest number of connections.
            port: Returns the port on which gRPC listens.
            busy_peers: Returns the peers with a call, as gRPC names them.
            clock: The time.
        """
        self._limit = limit
        self._port = port
        self._busy_peers = busy_peers
        self._clock = clock
        self._known: dict[Endpoint, _Connection] = {}

    async def watch(self) -> None:
        """Close connections beyond the limit, until cancelled."""
        if sys.platform == "linux":
            await repeat(self._look, _LOOK_SECONDS, clock=self._clock)

    def _look(self) -> None:
        with contextlib.suppress(OSError):  # no descriptor is free
            if len(os.listdir(_FDS)) > self._limit:  # noqa: PTH208 - Path.iterdir takes four times as long
                self._update()
                excess = len(self._known) - self._limit
                if excess > 0:
                    _shut_down({it.endpoint for it in connections_to_close(self._known.values(), excess)})
                return
        self._known.clear()

    def _update(self) -> None:
        """Bring the known connections up to date."""
        busy = {endpoint_of(peer) for peer in self._busy_peers()}
        now, known = self._clock.now(), {}
        for connection in _sockets():
            if connection.getsockname()[1] == self._port() and (end := _endpoint(*connection.getpeername()[:2])):
                it = self._known.get(end) or _Connection(end, str(end[0]), False, now)
                if end in busy:
                    it.has_called, it.idle_since = True, math.inf
                elif it.idle_since == math.inf:
                    it.idle_since = now
                known[end] = it
        self._known = known


def close_connections(peers: Collection[str]) -> None:
    """Close the connections of peers, as gRPC names them: `ipv4:127.0.0.1:50123`."""
    for peer in peers:
        logger.warning("a caller does not read its replies; its connection is closed", extra={"peer": peer})
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            _shut_down({endpoint_of(peer) for peer in peers})


def endpoint_of(peer: str) -> Endpoint | None:
    """Return the address and the port of a peer, as gRPC names it; None if it has none."""
    return _endpoint(*urllib.parse.unquote(peer).partition(":")[2].rpartition(":")[::2])


def _shut_down(wanted: Collection[Endpoint | None]) -> None:
    for connection in _sockets():
        if _endpoint(*connection.getpeername()[:2]) in wanted:
            with contextlib.suppress(OSError):  # the other end has closed it
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """Yield a copy of each connected TCP socket of this process. The copy is open until the next one."""
    for name in os.listdir(_FDS):  # noqa: PTH208 - see above
        with contextlib.suppress(OSError):  # not a socket, not connected, or closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()
                        yield connection


def _endpoint(host: str, port: str | int) -> Endpoint | None:
    """Return an address and a port. An IPv4 address in IPv6 becomes IPv4. None for other families."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
        return getattr(address, "ipv4_mapped", None) or address, int(port)
    except ValueError:  # a socket of another family
        return None
