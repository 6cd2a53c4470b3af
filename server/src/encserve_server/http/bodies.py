"""Reading the body of a request: bounded in bytes, in chunks and in time."""

import asyncio
import io
from collections.abc import Callable

from aiohttp import StreamReader, web

from encserve_server.calls import OPEN_REQUEST_BYTES
from encserve_server.errors import DeadlineExpired, MalformedRequest, RequestTooLarge, UnsupportedEncoding
from encserve_server.http.connection import Connection

# A body may take 30 s, and 1 s more for every 64 KiB that have come.
BODY_SECONDS = 30.0
_BYTES_PER_SECOND = 64 * 1024
# A chunk costs some microseconds, however small it is.
_FREE_CHUNKS = 1024
_CHUNK_BYTES = 512
_CHUNKS_AT_ONCE = 256
_LAST_CHUNK = b"0\r\n\r\n"
# What is read of a body that has been refused, so that the caller reads the answer before the connection is reset.
_DISCARDED_BYTES = 1024 * 1024
_DISCARDED_CHUNK_BYTES = 4096
_DISCARD_SECONDS = 1.0


async def read_body(
    request: web.BaseRequest, connection: Connection, head_bytes: int, limit: int, hold: Callable[[int], None]
) -> bytes:
    """The body of a request whose head took so many bytes; `hold` is called with the bytes of each part as it comes.

    Raises:
        BudgetFull: `hold` has no room for it.
        RequestTooLarge: The body is over the limit; where its length is declared, nothing of it is read.
        MalformedRequest: The body comes in too many chunks.
        UnsupportedEncoding: The body is compressed; nothing of it is read.
        DeadlineExpired: The body does not come.
        ConnectionError: The caller has gone.
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
        if content.is_eof():  # most bodies come with their head
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
    body, wire_bytes = await _read_parts(content, limit, hold)
    connection.received(head_bytes + wire_bytes + (len(_LAST_CHUNK) if declared is None else 0))
    return body


async def _read_parts(content: StreamReader, limit: int, hold: Callable[[int], None]) -> tuple[bytes, int]:
    """A body that comes in parts, and how many bytes it took on the connection."""
    body = io.BytesIO()  # which grows in place: joining parts takes 25 ms of 32 MiB, and the memory twice
    size = chunks = wire_bytes = 0
    try:
        async with asyncio.timeout(BODY_SECONDS) as bound:
            async for part, is_chunk in content.iter_chunks():
                size += len(part)
                if size > limit:
                    raise _too_large("longer", limit)
                hold(len(part))
                body.write(part)
                wire_bytes += len(part)
                if is_chunk:
                    chunks += 1
                    wire_bytes += len(f"{len(part):x}") + 4
                    await _bound_chunks(chunks, size)
                bound.reschedule((bound.when() or 0.0) + len(part) / _BYTES_PER_SECOND)
    except TimeoutError:
        raise DeadlineExpired(
            f"the body did not come within {BODY_SECONDS:.0f} s, and 1 s more for each 64 KiB; {size} bytes came"
        ) from None
    return body.getvalue(), wire_bytes


async def _bound_chunks(chunks: int, size: int) -> None:
    limit = _FREE_CHUNKS + size // _CHUNK_BYTES
    if chunks > limit:
        raise MalformedRequest(
            "",
            f"{size} bytes of the body came in more than {limit} chunks: send chunks of at least {_CHUNK_BYTES} bytes",
        )
    if not chunks % _CHUNKS_AT_ONCE:
        await asyncio.sleep(0)  # they come without a pause, and others wait


async def discard_body(content: StreamReader) -> None:
    """Reads a little more of a body that has been refused."""
    left = _DISCARDED_BYTES
    try:
        async with asyncio.timeout(_DISCARD_SECONDS):
            async for part, _ in content.iter_chunks():
                left -= len(part) + _DISCARDED_CHUNK_BYTES
                if left <= 0:
                    return
    except (ConnectionError, TimeoutError):
        return


def _too_large(said: str, limit: int) -> RequestTooLarge:
    problem = f"the body must be at most {limit} bytes{{}}; was {said}{{}}"
    if limit == OPEN_REQUEST_BYTES:
        return RequestTooLarge("", problem.format("", ", and this route needs none"))
    return RequestTooLarge("", problem.format(" (max_http_request_mib)", ": send fewer texts"))
