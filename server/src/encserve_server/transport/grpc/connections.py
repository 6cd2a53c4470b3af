"""Closes gRPC connections: idle connections beyond the limit, and connections of callers that do not read replies.

grpcio does not expose its connections. So this module finds them among the sockets of the process, on Linux only.
"""

import contextlib
import errno
import functools
import ipaddress
import logging
import math
import os
import socket
import stat
import sys
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from encserve_server.ledger import connections_to_close
from encserve_server.settings import MIB
from encserve_server.system.background import repeat
from encserve_server.system.clock import Clock
from encserve_server.types.callers import CertificateName, Metadata, dns_name, uri_name

logger = logging.getLogger(__name__)

_FDS = Path("/proc/self/fd")
# gRPC accepts up to HEADROOM × limit connections. So a new connection is accepted before `Connections` has closed an
# old connection.
HEADROOM = 2
_LOOK_SECONDS = 0.1
# A new connection has this time for its first call. It counts from the last check without the connection. If that check
# is longer ago than _UNSEEN_SECONDS, for example because the event loop was busy, the time counts from then.
_FIRST_CALL_SECONDS = 0.3
_UNSEEN_SECONDS = 0.2
# If a check finds too many connections, the next check follows soon. The pause is `_PAUSE_PART` × the duration of the
# check. The check does not run in a thread, because there it would take seconds: while the event loop is busy, the
# thread would wait for the GIL after each system call.
_PAUSE_PART = 4
_LEAST_PAUSE_SECONDS = 0.01
# The time in which a caller must read a reply, and the additional time for each MiB.
UNREAD_SECONDS = 30.0
_SECONDS_PER_MIB = 1.0
_REPLY_LOOK_SECONDS = 1.0
# The properties of gRPC's auth_context with the names in a client certificate.
_CERTIFICATE_NAMES = {"peer_dns": dns_name, "peer_uri": uri_name}

Context = grpc.aio.ServicerContext[Any, Any]
Endpoint = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


class Peer:
    """The other end of an open call; see `calls.Peer`.

    Attributes:
        name: gRPC's name for the peer, such as ipv4:127.0.0.1:50123.
        is_accepted: Whether the call was accepted.
        reads_until: The clock's time until which the caller must read the reply; infinity before the reply is ready.
    """

    __slots__ = ("_context", "is_accepted", "name", "reads_until")

    def __init__(self, context: Context) -> None:
        """Keep gRPC's context of the call."""
        self._context = context
        self.name = context.peer()
        self.is_accepted = False
        self.reads_until = math.inf

    def address(self) -> str:
        """Return the address and port, such as 127.0.0.1:50051. gRPC's name has the prefix "ipv4:" or "ipv6:"."""
        return urllib.parse.unquote(self.name.partition(":")[2])

    def metadata(self) -> Metadata:
        """Return the headers of the call."""
        return self._context.invocation_metadata() or ()

    def certificate_names(self) -> list[CertificateName]:
        """Return the DNS and URI names of the client certificate. gRPC has verified the certificate."""
        properties = self._context.auth_context()
        return [make(name.decode()) for key, make in _CERTIFICATE_NAMES.items() for name in properties.get(key, ())]


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection; see `ledger.OpenConnection`."""

    descriptor: int
    endpoint: Endpoint
    host: str
    has_called: bool
    idle_since: float


class Connections:
    """Closes connections. Owned by the event loop.

    If a new connection exceeds the limit, idle connections are closed. The sockets are checked only while the process
    has more descriptors than the limit.

    If a caller does not read the reply of a unary call, its connection is closed. This frees all memory that gRPC holds
    for the caller. The server cannot end only the call: gRPC for asyncio cannot end a call after its handler has
    returned, or while a message is being sent.

    Attributes:
        open: The peers of the open calls.
    """

    def __init__(self, limit: int, port: Callable[[], int], clock: Clock) -> None:
        """Keep the limit.

        Args:
            limit: The maximum number of connections.
            port: Returns the port on which gRPC listens.
            clock: The time.
        """
        self._limit = limit
        self._port = port
        self._clock = clock
        self.open: set[Peer] = set()
        # For each peer, the time of its last call; the oldest first. Peers with an accepted call, and other peers.
        self._accepted: dict[str, float] = {}
        self._others: dict[str, float] = {}
        self._seen: dict[Endpoint, float] = {}  # for each connection, the earliest time at which it can have begun
        self._looked_at = -math.inf
        self._sockets: dict[int, tuple[int, Endpoint | None]] = {}  # by descriptor: the inode and the peer, see `_find`

    def end(self, peer: Peer) -> None:
        """Record the end of a peer's call."""
        self.open.discard(peer)
        last = self._accepted if peer.is_accepted or peer.name in self._accepted else self._others
        last.pop(peer.name, None)
        last[peer.name] = self._clock.now()
        if len(last) > self._limit * HEADROOM:
            del last[next(iter(last))]

    async def watch(self) -> None:
        """Close connections beyond the limit, until cancelled."""
        if sys.platform == "linux":
            await repeat(self._look, _LOOK_SECONDS, clock=self._clock)

    async def watch_replies(self) -> None:
        """Close the connections of callers that do not read their replies, until cancelled."""
        await repeat(self._close_unread, _REPLY_LOOK_SECONDS, clock=self._clock)

    def _close_unread(self) -> None:
        now = self._clock.now()
        late = [peer for peer in self.open if peer.reads_until <= now]
        if late:
            close_connections({peer.name for peer in late})
            # Closing a connection needs a free descriptor. If there was none, the connection is still open. So try
            # again later.
            for peer in late:
                peer.reads_until = now + UNREAD_SECONDS

    async def _look(self) -> None:
        began = self._clock.now()
        while self._close_excess():
            await self._clock.sleep(max((self._clock.now() - began) * _PAUSE_PART, _LEAST_PAUSE_SECONDS))
            began = self._clock.now()

    def _close_excess(self) -> bool:
        """Close connections beyond the limit. Return whether there were more connections than the limit."""
        now = self._clock.now()
        since, self._looked_at = max(self._looked_at, now - _UNSEEN_SECONDS), now
        with contextlib.suppress(OSError):  # listing the descriptors needs a free descriptor
            if len(os.listdir(_FDS)) > self._limit:  # noqa: PTH208 - Path.iterdir takes four times as long
                connections = self._known(self._find(), since)
                excess = len(connections) - self._limit
                if excess > 0:
                    for it in connections_to_close(connections, excess):
                        _shut_down(it.descriptor, {it.endpoint})
                return excess > 0
        self._seen.clear()
        self._sockets.clear()
        return False

    def _find(self) -> dict[int, Endpoint]:
        """Return the peer of each connection, by descriptor. The peers of known sockets are not looked up again."""
        port, sockets = self._port(), {}
        for name in os.listdir(_FDS):  # noqa: PTH208 - see above
            with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
                descriptor = int(name)
                status = os.fstat(descriptor)
                if stat.S_ISSOCK(status.st_mode):
                    known = self._sockets.get(descriptor)
                    is_same = known is not None and known[0] == status.st_ino
                    sockets[descriptor] = known if is_same and known else (status.st_ino, _peer(descriptor, port))
        self._sockets = sockets
        return {descriptor: peer for descriptor, (_, peer) in sockets.items() if peer is not None}

    def _known(self, peers: Mapping[int, Endpoint], since: float) -> list[_Connection]:
        """Return the connections with the state that decides which connections to close.

        `since` is the time of the previous check. A new connection counts as idle since then until its first call.
        Calls before that time are calls of an earlier connection, whose port the new connection has got.
        """
        busy = {endpoint_of(peer.name) for peer in self.open}
        accepted, others = (
            {endpoint_of(peer): at for peer, at in last.items()} for last in (self._accepted, self._others)
        )
        self._seen = {peer: self._seen.get(peer, since) for peer in peers.values()}
        new = self._clock.now() - _FIRST_CALL_SECONDS

        def idle_since(peer: Endpoint) -> float:
            seen = self._seen[peer]
            return math.inf if peer in busy or seen > new else max(accepted.get(peer) or others.get(peer) or seen, seen)

        return [
            _Connection(
                descriptor,
                peer,
                str(peer[0]),
                peer in accepted,
                idle_since(peer),
            )
            for descriptor, peer in peers.items()
        ]


def seconds_to_read(size: int) -> float:
    """Return the seconds that a caller may take to read a reply of `size` bytes."""
    return UNREAD_SECONDS + _SECONDS_PER_MIB * size / MIB


def close_connections(peers: Collection[str]) -> None:
    """Close the connections of peers. `peers` are gRPC's names, such as `ipv4:127.0.0.1:50123`."""
    for peer in peers:
        logger.warning("a caller does not read its replies; its connection is closed", extra={"peer": peer})
    if sys.platform == "linux":
        wanted = {endpoint_of(peer) for peer in peers}
        with contextlib.suppress(OSError):
            for name in os.listdir(_FDS):  # noqa: PTH208 - see above
                _shut_down(int(name), wanted)


@functools.lru_cache(maxsize=4096)
def endpoint_of(peer: str) -> Endpoint | None:
    """Return the address and port of a peer, from gRPC's name for the peer. Return None if the name has no address."""
    return _endpoint(*urllib.parse.unquote(peer).partition(":")[2].rpartition(":")[::2])


def _shut_down(descriptor: int, wanted: Collection[Endpoint | None]) -> None:
    """Close a connection if its peer is one of `wanted`."""
    with contextlib.suppress(OSError), _socket(descriptor) as connection:
        if _endpoint(*connection.getpeername()[:2]) in wanted:
            connection.shutdown(socket.SHUT_RDWR)


def _peer(descriptor: int, port: int) -> Endpoint | None:
    """Return the peer of a connection to a port; None for other sockets."""
    with contextlib.suppress(OSError), _socket(descriptor) as connection:
        if connection.getsockname()[1] == port:
            return _endpoint(*connection.getpeername()[:2])
    return None


def _socket(descriptor: int) -> socket.socket:
    """Return a copy of a TCP socket of this process.

    Raises:
        OSError: The descriptor is closed, or is not a TCP socket.
    """
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    connection = socket.socket(fileno=os.dup(descriptor))
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        connection.close()
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    return connection


def _endpoint(host: str, port: str | int) -> Endpoint | None:
    """Return an address and a port. An IPv4 address in IPv6 form becomes IPv4. Other address families give None."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
        return getattr(address, "ipv4_mapped", None) or address, int(port)
    except ValueError:  # the socket has another address family
        return None
