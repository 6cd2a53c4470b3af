"""Reads the body of a request, with bounds on bytes and on time."""

import asyncio
import io
from collections.abc import Callable

from aiohttp import StreamReader, web

from encserve_server.calls import OPEN_REQUEST_BYTES
from encserve_server.errors import DeadlineExpired, RequestTooLarge, UnsupportedEncoding
from encserve_server.http.connection import Connection

# A body may take 30 s, and 1 s more for each 64 KiB that have arrived. The bytes around chunks do not count as arrived,
# so this bounds endless chunk extensions too.
BODY_SECONDS = 30.0
_BYTES_PER_SECOND = 64 * 1024
# The server reads so much more of a refused body, because the caller must read the reply before the connection closes.
_DISCARDED_BYTES = 1024 * 1024
_DISCARD_SECONDS = 1.0


async def read_body(
    request: web.BaseRequest, connection: Connection, head_bytes: int, limit: int, hold: Callable[[int], None]
) -> bytes:
    """Read the body of a request.

    Args:
        request: The request.
        connection: The connection, which counts bytes.
        head_bytes: The bytes of the head of the request.
        limit: The most bytes of a body.
        hold: Gets the bytes of each part of the body that arrives.

    Raises:
        BudgetFull: There is no room for the body.
        RequestTooLarge: The body is over the limit. A body with such a declared length is not read.
        UnsupportedEncoding: The body is compressed, and is not read.
        DeadlineExpired: The body does not arrive.
        ConnectionError: The caller has disconnected.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedEncoding(
            "",
            f"the header Content-Encoding must be absent or identity; was {encoding[:64]!r}. Send it uncompressed",
        )
    declared, content = request.content_length, request.content
    if declared is not None:
        if declared > limit:
            raise _too_large(f"{declared}", limit)
        if content.is_eof():  # most bodies arrive together with their head
            connection.received(head_bytes + declared)
            body = content.read_nowait()
            hold(declared)
            return body
    if not request.body_exists:
        connection.received(head_bytes)
        return b""
    if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    connection.wants_body()
    body = await _read_parts(content, limit, hold)
    connection.received(None if declared is None else head_bytes + declared)
    return body


async def _read_parts(content: StreamReader, limit: int, hold: Callable[[int], None]) -> bytes:
    """Read a body that arrives in parts."""
    body = io.BytesIO()  # grows in place, so the body is in memory once
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS) as bound:
            while part := await content.readany():
                size += len(part)
                if size > limit:
                    raise _too_large("longer", limit)
                hold(len(part))
                body.write(part)
                await asyncio.sleep(0)  # aiohttp hands over up to 1,024 chunks in one step, as long as bytes are there
                bound.reschedule((bound.when() or 0.0) + len(part) / _BYTES_PER_SECOND)
    except TimeoutError:
        raise DeadlineExpired(
            f"the body did not come within {BODY_SECONDS:.0f} s, and 1 s more for each 64 KiB; {size} bytes came"
        ) from None
    return body.getvalue()


async def discard_body(content: StreamReader) -> None:
    """Read a little more of a refused body."""
    left = _DISCARDED_BYTES
    try:
        async with asyncio.timeout(_DISCARD_SECONDS):
            while left > 0 and (part := await content.readany()):
                left -= len(part)
                await asyncio.sleep(0)
    except (ConnectionError, TimeoutError):
        return


def _too_large(size: str, limit: int) -> RequestTooLarge:
    problem = f"the body must be at most {limit} bytes{{}}; was {size}{{}}"
    if limit == OPEN_REQUEST_BYTES:
        return RequestTooLarge("", problem.format("", ", and this route needs none"))
    return RequestTooLarge("", problem.format(" (max_http_request_mib)", ": send fewer texts"))
