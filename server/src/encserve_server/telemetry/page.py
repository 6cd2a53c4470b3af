"""The metrics page: an HTTP server for Prometheus, and for probes that know no gRPC."""

import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler

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
            self._say(200, "")
        elif path == "/metrics":
            super().do_GET()
        elif path == "/healthz":
            page = self.server
            assert isinstance(page, MetricsPage)  # noqa: S101 - nobody else makes one
            if page.is_serving():
                self._say(200, "SERVING")
            else:
                self._say(503, "NOT_SERVING")
        else:
            self._say(404, "there are /metrics and /healthz")

    def _say(self, status: int, text: str) -> None:
        data = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class MetricsPage(ThreadingHTTPServer):
    """Serves a registry's metrics in threads of its own, until it is closed.

    Attributes:
        is_serving: Whether every model is ready.

    Raises:
        OSError: The port cannot be had.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, is_serving: Callable[[], bool]) -> None:
        """Begins to serve; with port 0 on a free one, which is `server_port`."""
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.is_serving = is_serving
        super().__init__((str(address[0]), int(address[1])), _Handler.factory(registry))
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

    def close(self) -> None:
        """Ends it."""
        self.shutdown()
        self.server_close()
