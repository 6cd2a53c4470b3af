"""The HTTP server: uvicorn on the event loop that is there, with a socket and bounds of our own."""

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Iterator

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from encserve_server.http import openai, tei
from encserve_server.http.app import HttpApp
from encserve_server.http.openai import OpenAiRoutes
from encserve_server.http.tei import TeiRoutes
from encserve_server.models.calls import Calls
from encserve_server.models.catalog import Catalog
from encserve_server.settings import MIB, Settings
from encserve_server.telemetry.metrics import Metrics
from encserve_server.telemetry.spans import Tracer

_BACKLOG = 2048
# The line and the headers of a request; httptools sets no bound.
_MAX_HEAD_BYTES = 64 * 1024
# Longer than clients and proxies keep an idle connection: if this side closed it while they send, a call were lost.
_IDLE_SECONDS = 75.0
# A connection whose caller takes nothing of what it is sent is ended, and with it the memory of the answer.
_UNREAD_SECONDS = 60.0


class _Protocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0
    _head_end = 0

    def data_received(self, data: bytes) -> None:
        """Refuses a head without end."""
        self._head_bytes += len(data)
        left = data
        while left:
            self._head_end = len(left)
            super().data_received(left)
            left = left[self._head_end :]  # what the parser leaves of a request that offers another protocol
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request must be at most {_MAX_HEAD_BYTES} bytes.")

    def _should_upgrade(self) -> bool:
        """Whether the request offers another protocol; then the parser leaves its body."""
        return any(name == b"upgrade" for name, _ in self.headers)

    def handle_websocket_upgrade(self) -> None:
        """Reads the head again without the offer: Java's client makes one on each connection, for HTTP/2."""
        offer = sys.exception()  # which the base class handles here
        assert isinstance(offer, httptools.HttpParserUpgrade)  # noqa: S101 - the parser's
        self._head_end = offer.args[0]
        kept = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        version = self.parser.get_http_version().encode()
        head = b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(kept))
        self.parser = httptools.HttpRequestParser(self)  # the other takes nothing more if the connection is to close
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        super().data_received(head)

    def on_headers_complete(self) -> None:
        """See the base class."""
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See the base class."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See the base class."""
        self._head_bytes = 0
        super().on_message_complete()


class _Server(uvicorn.Server):
    """Signals are the whole server's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def open_http(
    settings: Settings,
    calls: Calls,
    catalog: Catalog,
    metrics: Metrics,
    is_serving: Callable[[], bool],
    tracer: Tracer | None,
) -> "HttpServer":
    """Listens, and answers from now on; to be called on the event loop.

    Raises:
        OSError: The port cannot be had.
    """
    routes = OpenAiRoutes(calls, catalog).routes()
    routes += TeiRoutes(calls, is_serving, settings.tokenizer_threads).routes()
    app = HttpApp(
        routes,
        calls,
        metrics,
        dialect_of=lambda path: openai.DIALECT if path.startswith("/v1/") else tei.DIALECT,
        max_body_bytes=settings.max_request_mib * MIB,
        tracer=tracer,
    )
    return HttpServer(app, settings.host, settings.http_port or 0)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's says more than that a caller went while it was being answered."""
    return "returned without" not in record.getMessage()


class HttpServer:
    """Serves from when it is made until it is closed.

    Attributes:
        app: What answers.
        port: Where it listens.
    """

    def __init__(self, app: HttpApp, host: str, port: int) -> None:
        """Takes the address; with port 0 it is a free one.

        Raises:
            OSError: The port cannot be had.
        """
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: is every address of IPv4 too
        listener = socket.create_server(
            (str(address[0]), int(address[1])), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections have it from their listener
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_UNREAD_SECONDS * 1000))
        self.port: int = listener.getsockname()[1]
        self.app = app
        self._config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=round(_IDLE_SECONDS),
        )
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self._server = _Server(self._config)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="encserve-http")

    async def close(self, grace_seconds: float) -> None:
        """Ends connections: idle ones at once, others when they have their answer, or so many seconds later."""
        self._config.timeout_graceful_shutdown = grace_seconds  # type: ignore[assignment] # it waits for fractions too
        self._server.should_exit = True
        await self._serving
