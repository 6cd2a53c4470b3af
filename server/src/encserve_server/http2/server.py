"""The server: handlers, listening sockets, start, drain, stop."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterable
from typing import Any

import grpc

from encserve_server.http2.connection import Connection, Limits, Shared

_BACKLOG = 1024
# A name may have addresses that this machine lacks, IPv6's mostly.
_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


class Http2Server(grpc.aio.Server):
    """Takes handlers, and serves them, as `grpc.aio.Server` does, without TLS."""

    def __init__(self, limits: Limits) -> None:
        """Takes what each connection may do."""
        self._handlers: list[Any] = []
        self._methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._sockets: list[socket.socket] = []
        self._listening: list[asyncio.Server] = []
        self._closed = asyncio.Event()
        self._shared = Shared(self._find, limits, self._closed.set)
        self._stopped = asyncio.Event()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Adds services."""
        self._handlers.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """Adds a service's methods, which generated code adds as generic handlers as well."""
        self._methods.update({f"/{service_name}/{name}": handler for name, handler in method_handlers.items()})

    def add_insecure_port(self, address: str) -> int:
        """Binds "HOST:PORT" or "[IPV6]:PORT", all of HOST's addresses that this machine has; returns the port.

        Raises:
            RuntimeError: It cannot be bound.
        """
        host, _, port_text = address.rpartition(":")
        port = int(port_text)
        missing: OSError | None = None
        listening: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, where in dict.fromkeys((it[0], it[4]) for it in found):
                try:
                    listening.append(_listen(family, (where[0], port, *where[2:])))
                except OSError as error:
                    if error.errno not in _NOT_HERE:
                        raise
                    missing = error
                else:
                    port = listening[-1].getsockname()[1]
            if missing is not None and not listening:
                raise missing
        except OSError as error:
            for bound in listening:
                bound.close()
            reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
            raise RuntimeError(f"{address}: {reason}") from error
        self._sockets += listening
        return port

    def add_secure_port(self, address: str, server_credentials: Any) -> int:
        """There is no TLS here.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("TLS ends before this server, at a proxy")

    async def start(self) -> None:
        """Accepts connections from now on."""
        loop = asyncio.get_running_loop()
        for bound in self._sockets:
            listening = await loop.create_server(lambda: Connection(self._shared), sock=bound, backlog=_BACKLOG)
            self._listening.append(listening)

    async def stop(self, grace: float | None) -> None:
        """Accepts nothing new, asks clients to go, waits so many seconds for their calls, then ends these too."""
        for listening in self._listening:
            listening.close()
        self._listening.clear()
        for bound in self._sockets:
            bound.close()  # also where nobody has listened yet
        self._sockets.clear()
        self._shared.stopping = True
        for connection in list(self._shared.open):
            connection.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace or 0):
                await self._all_closed()
        self._shared.stopped = True
        for connection in list(self._shared.open):
            connection.cancel_calls()
        await self._all_closed()
        self._stopped.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Waits until it has stopped, or so many seconds; returns whether the time was up."""
        try:
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        except TimeoutError:
            return True
        return False

    def _find(self, path: str) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """A path's handler."""
        found = self._methods.get(path)
        if found is None:
            details = _Details(path)
            found = next((it for handler in self._handlers if (it := handler.service(details)) is not None), None)
            if found is not None:
                self._methods[path] = found  # at most one for each method that there is
        return found

    async def _all_closed(self) -> None:
        """Waits until there are no connections; those that are to leave do so when their calls are over."""
        while self._shared.open:
            self._closed.clear()
            await self._closed.wait()


class _Details(grpc.HandlerCallDetails):
    """What a generic handler is asked with."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


def _listen(family: int, where: Any) -> socket.socket:
    """A bound socket, shared with nobody."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" alone is every address, IPv4's too; beside others each has a socket of its own.
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != "::"))
        bound.bind(where)
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound
