"""The metrics page: an HTTP server for Prometheus, and for probes that know no gRPC."""

import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler

from encserve_server.system.listeners import open_listeners

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 30.0  # a client that says nothing keeps a thread for so long
_STOP_SECONDS = 0.1


class _Handler(MetricsHandler):
    """Answers /metrics and /healthz, and nothing else."""

    timeout = _SILENT_SECONDS

    def do_HEAD(self) -> None:  # noqa: N802 - the library's name
        """Answers a request of the many that ask for health so: GET without the body."""
        self.do_GET()

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        """Answers one request."""
        path = self.path.partition("?")[0]
        if path == "/metrics" and self.command == "HEAD":
            self._send(200, "")
        elif path == "/metrics":
            super().do_GET()
        elif path == "/healthz":
            assert isinstance(self.server, _Server)  # noqa: S101 - the only class that makes one
            if self.server.is_serving():
                self._send(200, "SERVING")
            else:
                self._send(503, "NOT_SERVING")
        else:
            self._send(404, "there are /metrics and /healthz")

    def _send(self, status: int, text: str) -> None:
        data = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _Server(socketserver.ThreadingTCPServer):
    """Serves on one listener. No HTTPServer: that asks a name server for the machine's name."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: type[_Handler], is_serving: Callable[[], bool]) -> None:
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.is_serving = is_serving
        threading.Thread(target=self.serve_forever, args=(_STOP_SECONDS,), name="encserve-metrics", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs what went wrong with one request, in one line; the library would print it."""
        del request
        gone = isinstance(sys.exception(), ConnectionError)
        logger.log(
            logging.DEBUG if gone else logging.ERROR,
            "a request for the metrics page failed",
            exc_info=True,
            extra={"client": client_address[0]},
        )


class MetricsPage:
    """Serves a registry's metrics and `/healthz` in threads of its own, until it is closed.

    Attributes:
        port: The port; of port 0 the one that was free.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, is_serving: Callable[[], bool]) -> None:
        """Begins to serve on every address of the host.

        Raises:
            OSError: The port cannot be had.
        """
        handler = _Handler.factory(registry)
        self._servers = [_Server(listener, handler, is_serving) for listener in open_listeners(host, port)]
        self.port: int = self._servers[0].socket.getsockname()[1]

    def close(self) -> None:
        """Closes the port."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
