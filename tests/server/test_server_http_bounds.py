"""Tests of the HTTP port's limits: pipelined requests, chunks, connections, inputs of a body, bytes of all callers."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import StreamReader
from fake_server import Failed, FakeServer, StartServer
from http_calls import connect, get, post, raw
from waiting import PATIENCE_SECONDS, until

from encserve_server.protocols.http_json.decoding import TEXTS_OR_IDS, BodyDecoder
from encserve_server.protocols.tei import EmbedBody
from encserve_server.settings import Settings
from encserve_server.system.background import TURN_BYTES
from encserve_server.transport.http import connection as http_connection
from encserve_server.transport.http.connection import MAX_WAITING_BYTES, Connection

TEXT = b'{"inputs": "hello"}'
ONE = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(TEXT), TEXT)
CHUNKED = b"POST /embed HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
LISTS = b'{"INPUTS": [' + b"[1]," * 1_000_000 + b"[1]]}"
SHARED_SETTINGS = {"http_port": 0}
IDS = b'{"INPUTS": [[' + b"1," * 2_000_000 + b"true]]}"
OBJECTS = b'{"INPUTS": [' + b"{}," * 1_000_000 + b"{}]}"


class FakeTransport(asyncio.Transport):
    """A transport that records whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self._may_read = True

    def is_reading(self) -> bool:
        return self._may_read

    def pause_reading(self) -> None:
        self._may_read = False

    def resume_reading(self) -> None:
        self._may_read = True


def connected() -> tuple[Connection, FakeTransport]:
    """Return a connection and the connection's transport, without a server."""
    transport = FakeTransport()
    connection = Connection(cast("Any", asyncio.Protocol()), set())
    connection.connection_made(transport)
    return connection, transport


def deliver(connection: Connection, data: bytes) -> None:
    """Pass data to a connection, as the event loop does."""
    left = memoryview(data)
    while left:
        buffer = connection.get_buffer(len(left))
        size = min(len(buffer), len(left))
        buffer[:size] = left[:size]
        connection.buffer_updated(size)
        left = left[size:]


async def test_a_read_of_a_connection_is_bounded() -> None:
    """The event loop reads a large body in parts. Between the parts, the loop reads from other connections."""
    connection, _ = connected()
    assert len(connection.get_buffer(2**20)) == TURN_BYTES


async def test_the_bytes_after_a_request_are_bounded() -> None:
    connection, transport = connected()
    deliver(connection, bytes(1000))
    connection.received(1000)
    assert not connection.has_more
    deliver(connection, bytes(MAX_WAITING_BYTES))
    assert transport.is_reading()
    deliver(connection, bytes(100))
    assert not transport.is_reading()
    connection.answered()
    assert not transport.is_reading()
    connection.received(99)  # the next request has 99 bytes
    assert not transport.is_reading()
    connection.answered()
    connection.received(1)
    assert transport.is_reading()


async def test_a_large_body_is_read_to_its_end() -> None:
    connection, transport = connected()
    deliver(connection, bytes(10 * MAX_WAITING_BYTES))
    assert not transport.is_reading()
    connection.wants_body()
    for _ in range(10):
        assert transport.is_reading()
        deliver(connection, bytes(10 * MAX_WAITING_BYTES))
    connection.received(110 * MAX_WAITING_BYTES)
    assert transport.is_reading()
    assert not connection.has_more


async def test_bytes_around_chunks_are_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_PAUSE_SECONDS", 0.0)
    connection, transport = connected()
    connection.wants_body(StreamReader(cast("Any", None), 1024))
    deliver(connection, b"5\r\n")
    assert transport.is_reading()
    deliver(connection, bytes(64 * 1024))
    assert not transport.is_reading()
    await until(transport.is_reading)


async def test_a_refused_body_does_not_count_as_waiting() -> None:
    connection, transport = connected()
    connection.wants_body()
    deliver(connection, bytes(10 * MAX_WAITING_BYTES))
    connection.answered()
    deliver(connection, bytes(100))
    assert transport.is_reading()


async def test_uncounted_blanks_do_not_stop_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_CORRECTION_SECONDS", 0.0)
    connection, transport = connected()
    deliver(connection, bytes(3 * MAX_WAITING_BYTES))
    connection.received(MAX_WAITING_BYTES)
    connection.answered()
    assert not transport.is_reading()
    await until(transport.is_reading)
    assert not connection.has_more


async def test_many_pipelined_requests_are_answered_in_order(shared: FakeServer) -> None:
    async with raw(shared) as (reader, writer):
        writer.write(ONE * 500)
        for _ in range(500):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"\r\n\r\n[[0.5,0.5,0.5,0.5]]")
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "chunk",
    [b"b" * 5000, b"\r\n \r\n1;x=" + b"b" * 5000, b"b\r\n \r\n1;x=b;x=b;x="],
    ids=["endless", "long", "short"],
)
async def test_bytes_around_chunks_are_bounded(
    shared: FakeServer, monkeypatch: pytest.MonkeyPatch, chunk: bytes
) -> None:
    """Endless chunk extensions are refused long before the timeout of a body."""
    monkeypatch.setattr(http_connection, "_PAUSE_SECONDS", 0.0)
    async with raw(shared) as (reader, writer):
        writer.write(CHUNKED + b"1;x=")
        sending = asyncio.create_task(send_until_closed(writer, chunk * 100))
        assert b" 400 " in await reader.readline()  # aiohttp itself refuses many short extensions
        await sending


async def send_until_closed(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while not writer.is_closing():
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0)


async def test_a_body_in_chunks_is_read(start_server: StartServer) -> None:
    """The server reads a body in chunks, and the connection stays open after the reply.

    The headers of the chunks make the request longer than its body.
    """
    server = await start_server(http_port=0, max_text_bytes=4)
    body = json.dumps({"inputs": "x" * 1_000_000}).encode()

    async def parts() -> Any:
        for begin in range(0, len(body), 600):
            yield body[begin : begin + 600]

    async with connect(server) as client:
        for _ in range(3):
            refused = await client.post("/embed", content=parts())
            assert "at most 4 bytes (max_text_bytes)" in refused.text
            assert "connection" not in refused.headers


async def test_a_chunked_body_does_not_count_as_waiting(server: FakeServer) -> None:
    async with raw(server) as (reader, writer):
        for _ in range(3):
            writer.write(CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(TEXT), TEXT))
            await reader.readuntil(b"\r\n\r\n[[0.5,0.5,0.5,0.5]]")
        assert server.app._http is not None
        assert [connection.has_more for connection in server.app._http.connections] == [False]


async def test_a_body_in_chunks_of_one_byte_is_read(shared: FakeServer) -> None:
    """Each byte of the body takes six bytes on the connection. The server accepts this overhead."""
    body = b'{"inputs": "hello"' + b" " * 400_000 + b"}"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    async with raw(shared) as (reader, writer):
        writer.write(CHUNKED + chunks)
        assert b" 200 " in await reader.readline()


async def test_a_malformed_chunk_ends_with_status_408(shared: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a malformed chunk, the server waits until the timeout and returns the status 408.

    aiohttp does not report malformed chunks, so the server cannot return earlier.
    """
    monkeypatch.setattr("encserve_server.ledger.ARRIVAL_SECONDS", 0.1)
    async with raw(shared) as (reader, writer):
        writer.write(CHUNKED + b"5\r\n{ \r\n")
        writer.write(b"x\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 408")


async def test_a_caller_that_waits_for_100_continue(shared: FakeServer) -> None:
    """A caller can wait for the status 100 before it sends the body, as curl does for a large body."""
    async with raw(shared) as (reader, writer):
        head, _, body = ONE.partition(b"\r\n\r\n")
        writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


@pytest.mark.system  # takes more than a second
async def test_connections_are_bounded(start_server: StartServer) -> None:
    """If every connection has a call, the server refuses further requests, but still answers health checks."""
    server = await start_server(http_port=0, max_connections=2)
    assert server.app._http is not None
    connections = server.app._http.connections
    async with raw(server) as (reader, writer):
        async with raw(server) as (_, other):
            for it in (writer, other):
                it.write(ONE[:-1])
            await until(lambda: server.in_flight() == 2)
            refused = await post(server, "/embed", TEXT)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert refused.headers["retry-after"] == "1"
            for path in ("/health", "/ping", "/", "/v2/health/ready", "/v2/health/live"):
                assert (await get(server, path)).status_code == 200
            server.engine.broken = True
            for _ in range(3):
                with pytest.raises(Failed):
                    await server.encode([1])
            await until(lambda: not server.app._health_service.serving[""])
            assert [(await get(server, path)).status_code for path in ("/ping", "/v2/health/live")] == [503, 200]
            server.engine.broken = False
            await until(lambda: server.app._health_service.serving[""])
        await until(lambda: len(connections) == 1)
        assert (await post(server, "/embed", TEXT)).status_code == 200
        writer.write(ONE[-1:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_new_connection_replaces_a_silent_one(start_server: StartServer) -> None:
    """At the limit of connections, a new connection replaces a connection that has had no accepted call.

    The server chooses the connection that has been idle for longest.
    """
    server = await start_server(http_port=0, max_connections=4)
    async with contextlib.AsyncExitStack() as stack:
        known_reader, known_writer = await stack.enter_async_context(raw(server))
        known_writer.write(ONE)
        assert (await known_reader.readline()).startswith(b"HTTP/1.1 200")
        silent = [await stack.enter_async_context(raw(server)) for _ in range(20)]
        silent[-1][1].write(b"POST /embed HTTP/1.1\r\nhost:")  # an incomplete head of a request
        for _ in range(3):
            assert (await post(server, "/embed", TEXT)).status_code == 200
        for reader, _ in silent[:17]:
            assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""
        known_writer.write(ONE)
        await known_reader.readuntil(b"HTTP/1.1 200")


@pytest.mark.system  # takes more than a second
async def test_an_idle_connection_stays_open_longer_than_a_slow_head(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection may be idle for the time in the settings. The head of a request must arrive in a shorter time."""
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 0.1)
    server = await start_server(http_port=0)
    async with raw(server) as (kept, writer), raw(server) as (slow, slow_writer):
        writer.write(ONE)
        await kept.readuntil(b"HTTP/1.1 200")
        slow_writer.write(ONE[:20])
        assert await asyncio.wait_for(slow.read(), PATIENCE_SECONDS) == b""
        writer.write(ONE)
        await kept.readuntil(b"HTTP/1.1 200")
    server = await start_server(http_port=0, http_idle_seconds=1)
    async with raw(server) as (idle, writer):
        writer.write(ONE)
        await idle.readuntil(b"HTTP/1.1 200")
        await asyncio.wait_for(idle.read(), PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("body", "reason", "problem"),
    [
        (LISTS, "TOO_MANY_INPUTS", "INPUTS: must hold at most 2048 sequences"),
        (LISTS.replace(b"[1]", b'"a"'), "TOO_MANY_INPUTS", "INPUTS: must hold at most 2048 sequences"),
        (IDS, "INVALID_FIELD", "INPUTS[0][2000000]: must be a token id; was a boolean"),
        (OBJECTS, "TOO_MANY_INPUTS", "INPUTS: must hold at most 2048 sequences (max_request_sequences); was 1000001"),
        (b"[" * 4_000_000, "MALFORMED_REQUEST", "the body must be a JSON object; was a list"),
        (b'{"INPUTS": ["a", "%s"]}' % (b"a" * 2_000_000), "INVALID_FIELD", "INPUTS[1]: must be at most 262144 bytes"),
        (b'{"INPUTS": "%s"}' % (b"a" * 2_000_000), "INVALID_FIELD", "2000002 bytes"),
        (b'"' + b"\\\\" * 2_000_000, "MALFORMED_REQUEST", "not valid JSON"),
        (b'{"INPUTS": ' + b"1" * 4_000_000 + b"}", "INVALID_FIELD", "INPUTS: must be a string, a list of token ids"),
    ],
    ids=[f"body {i}" for i in range(9)],
)
@pytest.mark.parametrize(("path", "inputs"), [("/v1/embeddings", "input"), ("/embed", "inputs")])
async def test_a_large_body_beyond_the_limits_is_refused(
    shared: FakeServer, path: str, inputs: str, body: bytes, reason: str, problem: str
) -> None:
    refused = await post(shared, path, body.replace(b"INPUTS", inputs.encode()))
    assert refused.headers["encserve-error-reason"] == reason
    assert problem.replace("INPUTS", inputs) in refused.text


async def test_a_large_body_within_the_limits_is_answered(shared: FakeServer) -> None:
    texts = ['hello "brave" \\ new, [world] {} ' * 300] * 256
    ids = [[3] * 256] * 256
    for inputs in (texts, ids):
        response = await post(shared, "/embed", {"inputs": inputs})
        assert response.status_code == 200
        assert len(response.json()) == 256


@pytest.mark.parametrize("inputs", [["hello " * 1000] * 100, [list(range(1000, 2000))] * 100])
async def test_a_large_body_is_decoded_in_turns(inputs: list[Any]) -> None:
    """After each 64 KiB of inputs, the decoder lets other requests run. The byte budget counts the decoded inputs."""
    body = json.dumps({"inputs": inputs}).encode()
    held: list[int] = []
    decoding = asyncio.create_task(
        BodyDecoder(EmbedBody, Settings(model_repository=Path()), inputs=TEXTS_OR_IDS).decode(body, held.append)
    )
    turns = 0
    while not decoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert (await decoding).inputs == inputs
    assert turns > len(body) / 80_000
    assert sum(held) > len(body)
    # The decoder first reserves the largest possible size of an input. Then the decoder corrects the reservation to the
    # real size.
    assert max(held) < 64 * 1024 * 20


async def test_bytes_are_bounded_over_all_callers(start_server: StartServer) -> None:
    """If the open requests of all callers have too many bytes, a further request is refused.

    A body and its texts count until the caller has the reply.
    """
    server = await start_server(http_port=0, max_in_flight_mib=100, max_text_bytes=2**22)
    server.app._calls.budget.limit = 3_000_000
    server.engine.hold()
    text = "hello " * 100_000
    first = asyncio.create_task(post(server, "/embed", {"inputs": [text] * 2}))
    await until(lambda: server.held_bytes() > 2_400_000)
    refused = await post(server, "/embed", {"inputs": text})
    assert (refused.status_code, refused.headers["encserve-error-reason"]) == (429, "BUDGET_FULL")
    assert refused.headers["retry-after"] == "1"
    assert (await post(server, "/tokenize", {"inputs": "hello"})).status_code == 200
    server.engine.let_go()
    assert (await first).status_code == 200
    await until(lambda: server.held_bytes() == 0)
    assert (await post(server, "/embed", {"inputs": text})).status_code == 200
