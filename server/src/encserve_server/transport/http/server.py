"""The HTTP server: aiohttp's server on the running event loop, with our own sockets and limits."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from encserve_server.endpoints.host import Host
from encserve_server.endpoints.routes import Dialect, Route
from encserve_server.ledger import connections_to_close
from encserve_server.settings import MIB
from encserve_server.system.certificates import Certificates
from encserve_server.system.listeners import open_listeners
from encserve_server.telemetry.metrics import Metrics
from encserve_server.transport.http.app import HttpApp
from encserve_server.transport.http.connection import Connection, Refusal

_BACKLOG = 2048
# The limits of a request's head: the maximum size of a line or header, and the maximum number of headers. `app` limits
# the size of the whole head.
_MAX_LINE_BYTES = 8190
_MAX_HEADERS = 64
# aiohttp reads about this many bytes of a body ahead. For a body in chunks, aiohttp also limits the number of chunks:
# at most a sixteenth of this number.
_READ_AHEAD_BYTES = 4 * 1024
# The operating system closes a connection if the other end acknowledges no data within this time.
_UNACKNOWLEDGED_SECONDS = 60.0
_CLOSE_SECONDS = 1.0
# The time for a TLS handshake.
_HANDSHAKE_SECONDS = 10.0
# The time for the other end to confirm the end of a TLS connection.
_SHUTDOWN_SECONDS = 1.0
# The maximum number of TLS handshakes, at one time, for connections over the limit. These connections only get the
# reply of `Refusal`.
_SPARE_HANDSHAKES = 64
# The maximum number of reply bytes that a TLS connection buffers. This is the default for plaintext. The default for
# TLS is 512 KiB.
_UNSENT_BYTES = 64 * 1024
# The pause after a connection could not be accepted because no descriptor was free. asyncio has the same pause.
_ACCEPT_PAUSE_SECONDS = 1.0


async def open_http(
    host: Host,
    routes: Sequence[Route],
    metrics: Metrics,
    *,
    elsewhere: Dialect,
    metrics_port: int,
    certificates: Certificates | None = None,
) -> "HttpServer":
    """Start the HTTP server. With `certificates`, the server uses TLS; otherwise plaintext.

    Args:
        host: The calls of all protocols, and the settings.
        routes: The routes of all protocols.
        metrics: Counts requests.
        elsewhere: Writes the errors of paths that do not exist.
        metrics_port: The port of the metrics, for error messages.
        certificates: The TLS files.

    Raises:
        OSError: The port is not available.
    """
    settings = host.settings
    app = HttpApp(
        routes,
        host.calls,
        metrics,
        elsewhere=elsewhere,
        max_body_bytes=settings.max_http_request_mib * MIB,
        metrics_port=metrics_port,
        cors_origins=settings.cors_allow_origin,
    )
    server = HttpServer(app, host.is_serving, settings.max_connections, settings.http_idle_seconds, certificates)
    await server.start(settings.host, settings.http_port or 0)
    return server


class HttpServer:
    """Serves HTTP on every address of a host.

    Attributes:
        app: Answers requests.
        port: The port, after the start.
        connections: The open connections.
        handshakes: The tasks of TLS handshakes.
    """

    def __init__(
        self,
        app: HttpApp,
        is_serving: Callable[[], bool],
        max_connections: int,
        idle_seconds: float,
        certificates: Certificates | None = None,
    ) -> None:
        """Set the parts of the server. The server does not listen yet.

        Args:
            app: Answers requests.
            is_serving: Returns whether every model is ready.
            max_connections: The maximum number of open connections.
            idle_seconds: The seconds after which an idle connection is closed.
            certificates: The TLS files; None for plaintext.
        """
        self.app = app
        self.port = 0
        self.connections: set[Connection] = set()
        self._is_serving = is_serving
        self.handshakes: set[asyncio.Task[None]] = set()
        self._max_connections = max_connections
        self._certificates = certificates
        # aiohttp logs callers' mistakes and disconnects as errors.
        quiet = logging.getLogger("encserve_server.transport.http.aiohttp")
        quiet.setLevel(logging.CRITICAL)
        self._server = web.Server(
            app.answer,
            handler_cancellation=True,
            keepalive_timeout=idle_seconds,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            max_headers=_MAX_HEADERS,
            read_bufsize=_READ_AHEAD_BYTES,
            lingering_time=0.0,
            auto_decompress=False,
            access_log=None,
            logger=quiet,
        )
        self._runner = web.ServerRunner(self._server, shutdown_timeout=_CLOSE_SECONDS)
        self._listening: list[asyncio.Server] = []
        self._accepting: dict[socket.socket, asyncio.Task[None]] = {}

    async def start(self, host: str, port: int) -> None:
        """Listen on a port; 0 means a free port.

        Raises:
            OSError: The port is not available.
        """
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        for listener in open_listeners(host, port, _BACKLOG):
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit this option from the listener
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_UNACKNOWLEDGED_SECONDS * 1000))
            self.port = listener.getsockname()[1]
            if self._certificates is None:
                self._listening.append(await loop.create_server(self._make_connection, sock=listener, backlog=_BACKLOG))
            else:
                listener.setblocking(False)
                self._accepting[listener] = loop.create_task(self._accept(listener, self._certificates))

    async def close(self, grace_seconds: float) -> None:
        """Close idle connections now. Close each other connection after its reply, or after `grace_seconds`."""
        for listening in self._listening:
            listening.close()
        for task in (ending := [*self._accepting.values(), *self.handshakes]):
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for listener in self._accepting:
            listener.close()
        await self.app.close(grace_seconds)
        await self._runner.cleanup()

    def _make_connection(self) -> Connection | Refusal:
        if len(self.connections) >= self._max_connections:
            idle = connections_to_close(self.connections, 1)
            if not idle:
                return Refusal(self.app.checks, self._is_serving)
            idle[0].close()
        return Connection(self._server(), self.connections)

    async def _accept(self, listener: socket.socket, certificates: Certificates) -> None:
        """Accept connections and start their TLS handshakes, until cancelled.

        asyncio's own TLS server does not report connections during their handshake. So the number of these connections
        would be unlimited.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            connection = self._make_connection()
            if isinstance(connection, Refusal) and len(self.handshakes) >= self._max_connections + _SPARE_HANDSHAKES:
                accepted.close()
                continue
            handshake = loop.create_task(self._encrypt(accepted, connection, certificates.current.context))
            self.handshakes.add(handshake)
            handshake.add_done_callback(self.handshakes.discard)
            if isinstance(connection, Connection):
                connection.handshake = handshake
                handshake.add_done_callback(partial(self._end_handshake, connection))

    def _end_handshake(self, connection: Connection, _: object) -> None:
        """Forget a connection whose handshake failed."""
        if not connection.host:
            self.connections.discard(connection)

    async def _encrypt(
        self, accepted: socket.socket, connection: Connection | Refusal, context: ssl.SSLContext
    ) -> None:
        with contextlib.suppress(OSError):  # the handshake or the connection failed, or took too long
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=context,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )
            transport.set_write_buffer_limits(_UNSENT_BYTES)
