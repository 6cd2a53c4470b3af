"""Connections between the sockets and aiohttp, with limits that aiohttp does not have."""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import cast

from aiohttp import StreamReader, web

from encserve_server.endpoints.routes import Check
from encserve_server.errors import MalformedRequest
from encserve_server.system.background import TURN_BYTES

# The maximum number of bytes of later requests that may wait behind the current request. aiohttp limits only the number
# of these requests, not their size.
MAX_WAITING_BYTES = 64 * 1024
_CORRECTION_SECONDS = 1.0
# The maximum time from the first byte of a request until its head is complete.
HEAD_SECONDS = 30.0
# A body in chunks may take on the connection this many bytes for each byte of data, and a constant more. The constant
# is needed because aiohttp may keep received bytes unparsed for a while.
_MOST_OVERHEAD = 8
_FREE_OVERHEAD_BYTES = 1024 * 1024
# The pause after _PAUSE_BYTES of overhead in chunks without a byte of the body. Parsing 1 MiB of overhead takes 2 ms.
_PAUSE_SECONDS = 0.1
_PAUSE_BYTES = 16 * 1024
# The event loop reads at most this many bytes of a connection at a time, so that many large bodies do not delay it. All
# connections share the buffer, because the event loop copies the data before it reads the next connection.
_READ_BUFFER = memoryview(bytearray(TURN_BYTES))
# The time in which a connection over the limit must send its request.
_REFUSAL_SECONDS = 1.0
# A health check's method and path are within this number of bytes from the start of a request.
_MAX_CHECK_BYTES = 64


class Connection(asyncio.BufferedProtocol):
    """One connection. It passes all data to aiohttp. It stops reading while too many bytes of later requests wait.

    The number of waiting bytes is an estimate: the received bytes minus the bytes of complete requests. If heads have
    unneeded blanks, the estimate is too high. So it is set to 0 after a second without a request.

    Attributes:
        host: The address of the other end; empty until the TLS handshake has ended.
        has_called: Whether a call on this connection was accepted.
        idle_since: The event loop's time at which the last request ended, or at which the connection began. Infinity
            during a request.
        handshake: The task of the TLS handshake.
    """

    def __init__(self, inner: web.RequestHandler, open_connections: set["Connection"]) -> None:
        """Take aiohttp's protocol of this connection. The connection is in `open_connections` until it ends."""
        self.host = ""
        self.has_called = False
        self.idle_since = asyncio.get_running_loop().time()
        self.handshake: asyncio.Task[None] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._content: StreamReader | None = None  # the reader of an incomplete body in chunks
        self._body_bytes = 0
        open_connections.add(self)
        self._inner = inner
        self._open_connections = open_connections
        self._transport: asyncio.Transport | None = None
        self._waiting_bytes = 0
        self._is_answering = self._is_in_body = self._is_paused = False
        self._pause_timer: asyncio.TimerHandle | None = None

    @property
    def has_more(self) -> bool:
        """Whether data after the current request have arrived."""
        return self._waiting_bytes > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the event to aiohttp."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports have other base classes
        peer = transport.get_extra_info("peername")
        self.host = peer[0] if isinstance(peer, tuple) else ""
        self._inner.connection_made(self._transport)

    def close(self) -> None:
        """End the connection at once, even during its handshake."""
        self._open_connections.discard(self)
        if self._transport is not None:
            self._transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    def begin(self) -> None:
        """Record that the handling of a request begins."""
        self.idle_since = math.inf
        self._end_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass the event to aiohttp."""
        self._end_head_timer()
        self._open_connections.discard(self)
        self._transport = None
        self._inner.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next read."""
        del sizehint
        return _READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Count the data in the buffer, and pass a copy of the data to aiohttp."""
        data = bytes(_READ_BUFFER[:nbytes])
        if self._head_timer is None and self.idle_since < math.inf:
            self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.close)
        self._waiting_bytes += len(data)
        decoded_bytes = 0 if self._content is None else self._content.total_bytes
        self._inner.data_received(data)
        if not self._is_in_body:
            self._bound()
        elif self._content is not None:
            self._body_bytes += len(data)
            if self._body_bytes > _FREE_OVERHEAD_BYTES + _MOST_OVERHEAD * self._content.total_bytes:
                self._refuse_overhead(self._content)
            elif len(data) >= _PAUSE_BYTES and self._content.total_bytes == decoded_bytes:
                self._pause_shortly()

    def eof_received(self) -> None:
        """Pass the event to aiohttp."""
        self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pass the event to aiohttp."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass the event to aiohttp."""
        self._inner.resume_writing()

    def wants_body(self, content: StreamReader | None = None) -> None:
        """Continue to read, because the body of the current request is not complete.

        `content` is the reader of a body in chunks; None for other bodies.
        """
        self._is_in_body = True
        self._content, self._body_bytes = content, 0
        self._resume()

    def received(self, request_bytes: int | None) -> None:
        """Record that the current request is complete. Later data belong to the next request.

        Args:
            request_bytes: The number of bytes of the request. None for a body in chunks: its size on the connection is
                unknown, so no received byte counts as waiting.
        """
        self._is_answering, self._is_in_body, self._content = True, False, None
        self._waiting_bytes = 0 if request_bytes is None else max(self._waiting_bytes - request_bytes, 0)
        self._bound()

    def answered(self) -> None:
        """Record that the reply was sent."""
        self.idle_since = asyncio.get_running_loop().time()
        if self._is_in_body:  # the body was refused before it was complete
            self._waiting_bytes = 0
        self._is_answering = self._is_in_body = False
        self._content = None
        if self._is_paused:
            self._bound()

    def _refuse_overhead(self, content: StreamReader) -> None:
        """End a body in chunks whose overhead is too large for its data, for example endless chunk extensions."""
        problem = f"{self._body_bytes} bytes were sent for {content.total_bytes} bytes of the body: send larger chunks"
        content.set_exception(MalformedRequest("", problem))
        self._content = None
        self._pause()

    def _pause_shortly(self) -> None:
        """Stop reading for a moment, so that other calls run."""
        if self._transport is not None and self._transport.is_reading():  # aiohttp has not paused the connection
            self._pause()
            self._later(_PAUSE_SECONDS, self._resume)

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _bound(self) -> None:
        self._end_pause_timer()
        if self._waiting_bytes <= MAX_WAITING_BYTES:
            self._resume()
        elif self._transport is not None:
            self._pause()
            if not self._is_answering:  # if no request begins within this time, the estimate was too high
                self._later(_CORRECTION_SECONDS, self._correct)

    def _later(self, seconds: float, resume: Callable[[], None]) -> None:
        """Call `resume` after some seconds, unless the pause ends or changes earlier."""
        self._end_pause_timer()
        self._pause_timer = asyncio.get_running_loop().call_later(seconds, resume)

    def _end_pause_timer(self) -> None:
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None

    def _correct(self) -> None:
        self._waiting_bytes = 0
        self._resume()

    def _pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()
            self._is_paused = True

    def _resume(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()


class Refusal(asyncio.Protocol):
    """A connection over the limit. It gets one reply and is closed. The reply is 503, or the answer to a health check.

    Health checks always get an answer. Otherwise an orchestrator would restart a server that is full.
    """

    def __init__(self, checks: Mapping[bytes, Check], is_serving: Callable[[], bool]) -> None:
        """Take the health checks by path. `is_serving` returns whether every model is ready."""
        self._checks = checks
        self._is_serving = is_serving
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait briefly for the request."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports have other base classes
        self._timer = asyncio.get_running_loop().call_later(_REFUSAL_SECONDS, self._transport.close)

    def data_received(self, data: bytes) -> None:
        """Reply to any request, and close the connection."""
        assert self._transport is not None  # noqa: S101 - asyncio calls connection_made first
        method, _, rest = data[:_MAX_CHECK_BYTES].partition(b" ")
        check = self._checks.get(rest.partition(b" ")[0]) if method in {b"GET", b"HEAD"} else None
        is_healthy = check is Check.LIVE or (check is Check.READY and self._is_serving())
        status = b"200 OK" if is_healthy else b"503 Service Unavailable\r\nretry-after: 1"
        self._transport.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        if self._timer is not None:
            self._timer.cancel()
