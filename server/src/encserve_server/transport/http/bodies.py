"""Reads the body of a request, with limits on size and time."""

import asyncio
import io

from aiohttp import StreamReader, web

from encserve_server.calls import OPEN_REQUEST_BYTES, Call
from encserve_server.errors import RequestTooLarge, UnsupportedEncoding
from encserve_server.ledger import Arrival, Places
from encserve_server.transport.http.connection import Connection

# After a refusal, the server reads and drops at most this many bytes of the body. If the server closed the connection
# at once, a caller that still sends could lose the reply.
_DISCARDED_BYTES = 1024 * 1024
_DISCARD_SECONDS = 1.0
# A body is stored in blocks. A single growing buffer would be copied many times: about 8 times for a large body.
_BLOCK_BYTES = 1024 * 1024


async def read_body(
    request: web.BaseRequest, connection: Connection, head_bytes: int, limit: int, call: Call, places: Places
) -> bytes:
    """Read the body of a request.

    Args:
        request: The request.
        connection: The connection. It counts bytes.
        head_bytes: The number of bytes of the request's head.
        limit: The maximum number of bytes of the body.
        call: The call. Its byte budget counts the bytes that arrive.
        places: The places for slow bodies.

    Raises:
        BudgetFull: The body exceeds the free budget, or it is slow and all places are taken.
        MalformedRequest: The chunks of the body are too small for their overhead.
        RequestTooLarge: The body is over the limit. If the declared length is over the limit, the body is not read.
        UnsupportedEncoding: The body is compressed. The body is not read.
        DeadlineExpired: The body does not arrive.
        ConnectionError: The caller has disconnected.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedEncoding(
            "",
            f"the header Content-Encoding must be absent or identity; was {encoding[:64]!r}. Do not compress the body",
        )
    declared, content = request.content_length, request.content
    if declared is not None:
        if declared > limit:
            raise _too_large(f"{declared}", limit)
        if content.is_eof():  # most bodies arrive together with their head
            connection.received(head_bytes + declared)
            body = content.read_nowait()
            call.hold(declared)
            return body
    if not request.body_exists:
        connection.received(head_bytes)
        return b""
    if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    connection.wants_body(content if declared is None else None)
    body = await _read_parts(content, limit, call, places)
    connection.received(None if declared is None else head_bytes + declared)
    return body


async def _read_parts(content: StreamReader, limit: int, call: Call, places: Places) -> bytes:
    """Read a body that arrives in several parts."""
    blocks, block = [], io.BytesIO()
    with Arrival(places, call.account, reserves=False) as arrival:
        while not content.at_eof():  # so the last part is not followed by a turn
            async with places.turn():
                part = content.read_nowait()  # here aiohttp parses up to 64 KiB or 256 chunks of the following part
            part = part or await content.readany()
            arrival.progress(size=len(part))
            if arrival.size > limit:
                raise _too_large("longer", limit)
            call.hold(len(part))
            block.write(part)
            if block.tell() >= _BLOCK_BYTES:
                blocks.append(block.getvalue())
                block = io.BytesIO()
    return b"".join([*blocks, block.getvalue()])


async def discard_body(content: StreamReader) -> None:
    """Read and drop the rest of a refused body, up to a maximum size and time."""
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
