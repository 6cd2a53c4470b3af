"""The metrics page: an HTTP server for Prometheus."""

import logging
import socket
import sys
import threading
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 30.0  # a client that says nothing keeps a thread for so long
_STOP_SECONDS = 0.1


class MetricsPage(ThreadingHTTPServer):
    """Serves a registry's metrics in threads of its own, until it is closed.

    Raises:
        OSError: The port cannot be had.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Begins to serve; with port 0 on a free one, which is `server_port`."""
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        handler = MetricsHandler.factory(registry)
        handler.timeout = _SILENT_SECONDS  # type: ignore[attr-defined]
        super().__init__((str(address[0]), int(address[1])), handler)
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
