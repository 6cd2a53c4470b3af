"""The metrics page: an HTTP server for Prometheus, and for health probes that cannot use gRPC."""

import contextlib
import logging
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler

from encserve_server.system.certificates import Certificates
from encserve_server.system.listeners import open_listeners

logger = logging.getLogger(__name__)

# Each connection has a thread. Health probes and scrapers need only a few connections.
_MAX_CONNECTIONS = 64
# The maximum duration of a connection.
_CONNECTION_SECONDS = 30.0
_HANDSHAKE_SECONDS = 5.0
# If there are too many connections, the oldest connection is closed. The new connection waits at most this time until
# the thread of the closed connection has ended.
_PLACE_SECONDS = 0.5
_SHUTDOWN_SECONDS = 1.0
_STOP_SECONDS = 0.1


class _Handler(MetricsHandler):
    """Answers /metrics and /healthz."""

    timeout = _CONNECTION_SECONDS

    def do_HEAD(self) -> None:  # noqa: N802 - the library's name
        """Answer like GET, without the body. Many health probes use HEAD."""
        self.do_GET()

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        """Answer one request."""
        path = self.path.partition("?")[0]
        if path == "/metrics" and not self._may_read():
            self._send(403, "/metrics needs a client certificate of an authority of --tls-client-ca-file")
        elif path == "/metrics" and self.command == "HEAD":
            self._send(200, "")
        elif path == "/metrics":
            super().do_GET()
        elif path == "/healthz":
            assert isinstance(self.server, _Server)  # noqa: S101 - only `_Server` creates handlers
            if self.server.is_serving():
                self._send(200, "SERVING")
            else:
                self._send(503, "NOT_SERVING")
        else:
            self._send(404, "unknown path; the paths are /metrics and /healthz")

    def _may_read(self) -> bool:
        """Return whether the caller may read the metrics: it has a certificate, or does not need a certificate."""
        if not isinstance(self.connection, ssl.SSLSocket) or self.connection.context.verify_mode is ssl.CERT_NONE:
            return True
        return bool(self.connection.getpeercert())

    def _send(self, status: int, text: str) -> None:
        data = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _Server(socketserver.ThreadingTCPServer):
    """Serves on one listener. HTTPServer is not suitable, because it looks up the host name in DNS."""

    daemon_threads = True

    def __init__(
        self,
        listener: socket.socket,
        handler: type[_Handler],
        is_serving: Callable[[], bool],
        certificates: Certificates | None,
    ) -> None:
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.is_serving = is_serving
        self._certificates = certificates
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        # The accepted sockets, the oldest first. The value is the socket to close, and the time at which to close it.
        self._open: dict[socket.socket, tuple[socket.socket, float]] = {}
        threading.Thread(target=self.serve_forever, args=(_STOP_SECONDS,), name="encserve-metrics", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection. If there are too many connections, close the oldest connection."""
        if not self._places.acquire(blocking=False):
            for connection, _ in list(self._open.values())[:1]:
                _shut(connection)
            if not self._places.acquire(timeout=_PLACE_SECONDS):
                self.shutdown_request(request)
                return
        self._open[request] = request, time.monotonic() + _CONNECTION_SECONDS
        try:
            super().process_request(request, client_address)
        except BaseException:  # the thread did not start, so it cannot call `_ended`
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection. Called in the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def service_actions(self) -> None:
        """Close connections that have taken too long. Called every `_STOP_SECONDS`."""
        now = time.monotonic()
        for connection, ends in list(self._open.values()):
            if ends > now:
                break
            _shut(connection)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the TLS handshake, and answer one connection. Called in the connection's thread."""
        if self._certificates is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_HANDSHAKE_SECONDS)
        context = self._certificates.current.lenient_context
        with context.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as encrypted:
            self._open[request] = encrypted, self._open[request][1]
            encrypted.do_handshake()
            super().finish_request(encrypted, client_address)
            encrypted.settimeout(_SHUTDOWN_SECONDS)
            with contextlib.suppress(OSError):  # tells the caller that the reply is complete
                encrypted.unwrap()

    def _ended(self, request: socket.socket) -> None:
        del self._open[request]
        self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error of a request in one line. The library would print a traceback."""
        del request
        gone = isinstance(sys.exception(), ConnectionError | ssl.SSLError | TimeoutError)
        logger.log(
            logging.DEBUG if gone else logging.ERROR,
            "a request for the metrics page failed",
            exc_info=True,
            extra={"client": client_address[0]},
        )


def _shut(connection: socket.socket) -> None:
    """Close a connection, so that its thread ends."""
    with contextlib.suppress(OSError):  # the connection is already closed
        # After ssl.SSLSocket.shutdown, the thread of the connection would continue in plaintext.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class MetricsPage:
    """Serves the metrics of a registry and `/healthz` in separate threads, until closed.

    Attributes:
        port: The port. If the requested port was 0, a free port.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        is_serving: Callable[[], bool],
        certificates: Certificates | None = None,
    ) -> None:
        """Start to serve on every address of the host. With `certificates`, use TLS.

        Raises:
            OSError: The port is not available.
        """
        handler = _Handler.factory(registry)
        self._servers = [
            _Server(listener, handler, is_serving, certificates) for listener in open_listeners(host, port)
        ]
        self.port: int = self._servers[0].socket.getsockname()[1]

    def close(self) -> None:
        """Close the port."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
