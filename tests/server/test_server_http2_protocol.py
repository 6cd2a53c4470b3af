"""What a client may not send, what must be tolerated, and that only what should end does (RFC 9113)."""

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest
from http2_client import PATIENCE_SECONDS, RawClient, data_frame, message
from http2_server import MIB, Bench

from encserve_server.http2 import frames
from encserve_server.http2.connection import Limits
from encserve_server.http2.frames import ErrorCode, frame
from encserve_server.http2.incoming import WINDOW_BYTES

E = ErrorCode
ECHO = "/t.T/echo"


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with Bench(Limits(max_message_bytes=8 * MIB, max_calls=100)) as it:
        yield it


async def echoes(client: RawClient, stream: int) -> None:
    """The connection still works."""
    client.call(stream, ECHO, b"hello")
    answer = await client.answer(stream)
    assert (answer.status, answer.messages) == (0, [b"hello"])


# ── What ends the connection ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", frames.PREFACE[:20] + b"\0" * 20, b"\x16\x03\x01\x02\0"])
async def test_what_is_no_http2(bench: Bench, first: bytes) -> None:
    client = await bench.connect(greets=False)
    client.send(first)
    assert await client.end() == E.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "first",
    [
        frame(frames.PING, 0, 0, bytes(8)),
        frame(77, 0, 0, b"unknown"),
        frames.window_update(0, 1),
        frame(frames.SETTINGS, frames.ACK, 0) + frame(frames.PING, 0, 0, bytes(8)),
    ],
)
async def test_settings_come_first(bench: Bench, first: bytes) -> None:
    client = await bench.connect(greets=False)
    client.send(frames.PREFACE, first)
    assert await client.end() == E.PROTOCOL_ERROR


HEAD = frames.END_HEADERS
BLOCK = b"\x83"  # ":method: POST"
VIOLATIONS = {
    "data on no stream": (E.PROTOCOL_ERROR, data_frame(0, b"x")),
    "data on an idle stream": (E.PROTOCOL_ERROR, data_frame(9, b"x")),
    "data on an even stream": (E.PROTOCOL_ERROR, data_frame(2, b"x")),
    "headers on no stream": (E.PROTOCOL_ERROR, frame(frames.HEADERS, HEAD, 0, BLOCK)),
    "headers on an even stream": (E.PROTOCOL_ERROR, frame(frames.HEADERS, HEAD, 2, BLOCK)),
    "priority on no stream": (E.PROTOCOL_ERROR, frame(frames.PRIORITY, 0, 0, bytes(5))),
    "reset of no stream": (E.PROTOCOL_ERROR, frames.reset(0, E.CANCEL)),
    "reset of an idle stream": (E.PROTOCOL_ERROR, frames.reset(9, E.CANCEL)),
    "reset of three bytes": (E.FRAME_SIZE_ERROR, frame(frames.RST_STREAM, 0, 1, bytes(3))),
    "settings on a stream": (E.PROTOCOL_ERROR, frame(frames.SETTINGS, 0, 1)),
    "settings of five bytes": (E.FRAME_SIZE_ERROR, frame(frames.SETTINGS, 0, 0, bytes(5))),
    "acknowledged settings with some": (E.FRAME_SIZE_ERROR, frame(frames.SETTINGS, frames.ACK, 0, bytes(6))),
    "first window too large": (E.FLOW_CONTROL_ERROR, frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 2**31})),
    "frames too small": (E.PROTOCOL_ERROR, frames.settings_frame({frames.MAX_FRAME_SIZE: 16_383})),
    "frames too large": (E.PROTOCOL_ERROR, frames.settings_frame({frames.MAX_FRAME_SIZE: 2**24})),
    "push of two": (E.PROTOCOL_ERROR, frames.settings_frame({frames.ENABLE_PUSH: 2})),
    "push promise": (E.PROTOCOL_ERROR, frame(frames.PUSH_PROMISE, HEAD, 1, bytes(4))),
    "ping on a stream": (E.PROTOCOL_ERROR, frame(frames.PING, 0, 1, bytes(8))),
    "ping of seven bytes": (E.FRAME_SIZE_ERROR, frame(frames.PING, 0, 0, bytes(7))),
    "ping of nine bytes": (E.FRAME_SIZE_ERROR, frame(frames.PING, frames.ACK, 0, bytes(9))),
    "goaway on a stream": (E.PROTOCOL_ERROR, frame(frames.GOAWAY, 0, 1, bytes(8))),
    "window growing by nothing": (E.PROTOCOL_ERROR, frames.window_update(0, 0)),
    "window growing on an idle stream": (E.PROTOCOL_ERROR, frames.window_update(9, 1)),
    "window update of five bytes": (E.FRAME_SIZE_ERROR, frame(frames.WINDOW_UPDATE, 0, 0, bytes(5))),
    "window too large": (E.FLOW_CONTROL_ERROR, frames.window_update(0, 2**31 - 1)),
    "continuation of nothing": (E.PROTOCOL_ERROR, frame(frames.CONTINUATION, HEAD, 1, BLOCK)),
    "continuation on no stream": (E.PROTOCOL_ERROR, frame(frames.CONTINUATION, HEAD, 0, BLOCK)),
    "continuation of another stream": (
        E.PROTOCOL_ERROR,
        frame(frames.HEADERS, 0, 1, BLOCK) + frame(frames.CONTINUATION, HEAD, 3, BLOCK),
    ),
    "interrupted headers": (E.PROTOCOL_ERROR, frame(frames.HEADERS, 0, 1, BLOCK) + frame(frames.PING, 0, 0, bytes(8))),
    "headers interrupted by an extension": (E.PROTOCOL_ERROR, frame(frames.HEADERS, 0, 1, BLOCK) + frame(77, 0, 1)),
    "empty continuations": (
        E.ENHANCE_YOUR_CALM,
        frame(frames.HEADERS, 0, 1, BLOCK) + frame(frames.CONTINUATION, 0, 1) * 10,
    ),
    "continuations without end": (
        E.ENHANCE_YOUR_CALM,
        frame(frames.HEADERS, 0, 1, BLOCK) + frame(frames.CONTINUATION, 0, 1, bytes(10_000)) * 10,
    ),
    "headers that are no HPACK": (E.COMPRESSION_ERROR, frame(frames.HEADERS, HEAD, 1, b"\xff\xff\xff\xff\xff\xff")),
    "index zero": (E.COMPRESSION_ERROR, frame(frames.HEADERS, HEAD, 1, b"\x80")),
    "a table too large": (E.COMPRESSION_ERROR, frame(frames.HEADERS, HEAD, 1, b"\x3f\xff\xff\x03")),
    "more padding than data": (E.PROTOCOL_ERROR, frame(frames.HEADERS, HEAD | frames.PADDED, 1, b"\x02\x83")),
    "a frame too long": (E.FRAME_SIZE_ERROR, frames.frame_head(16_385, frames.DATA, 0, 1)),
    "an unknown frame too long": (E.FRAME_SIZE_ERROR, frames.frame_head(2**24 - 1, 77, 0, 0)),
}


@pytest.mark.parametrize("what", VIOLATIONS)
async def test_violations_end_their_connection_and_no_other(bench: Bench, what: str) -> None:
    """The calls of that connection end as well."""
    code, data = VIOLATIONS[what]
    good, bad = await bench.connect(), await bench.connect()
    await echoes(good, 1)
    bad.call(5, "/t.T/wait", b"x")
    await bench.until(lambda: bench.service.running == 1)
    if what.startswith(("continuation", "interrupted", "headers", "empty", "index", "a table", "more padding")):
        data = data.replace(frame(0, 0, 1)[5:9], frame(0, 0, 7)[5:9])  # stream 1 is used up
    bad.send(data)
    assert await bad.end() == code
    await bench.until(lambda: bench.service.running == 0)
    await echoes(good, 3)


async def test_a_stream_is_not_used_twice(bench: Bench) -> None:
    client = await bench.connect()
    await echoes(client, 5)
    client.send(client.head(3, ECHO))
    assert await client.end() == E.PROTOCOL_ERROR
    client = await bench.connect()
    await echoes(client, 5)
    client.send(client.head(5, ECHO, end=True))
    assert await client.end() == E.PROTOCOL_ERROR


async def test_more_than_the_connection_s_window(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.http2.intake.CONNECTION_WINDOW_BYTES", 100_000)
    client = await bench.connect()
    client.send(client.head(1, "/t.T/deaf"), client.head(3, "/t.T/deaf"))
    for _ in range(4):
        client.send(data_frame(1, bytes(16_384)), data_frame(3, bytes(16_384)))
    assert await client.end() == E.FLOW_CONTROL_ERROR


# ── What ends a stream ───────────────────────────────────────────────────────────────────────────────────────────────


async def reset_alone(bench: Bench, client: RawClient, stream: int) -> int | None:
    """The stream is reset, its handler ends, and the connection goes on."""
    answer = await client.answer(stream)
    await bench.until(lambda: bench.service.running == 0)
    await echoes(client, stream + 2)
    await bench.until_idle()
    return answer.reset


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        (E.STREAM_CLOSED, data_frame(1, b"late")),
        (E.STREAM_CLOSED, frame(frames.HEADERS, HEAD | frames.END_STREAM, 1, b"\0\x01a\x01b")),
        (E.PROTOCOL_ERROR, frames.window_update(1, 0)),
        (E.FLOW_CONTROL_ERROR, frames.window_update(1, 2**31 - 1)),
        (E.FRAME_SIZE_ERROR, frame(frames.PRIORITY, 0, 1, bytes(4))),
    ],
)
async def test_violations_of_a_call_that_has_sent_all(bench: Bench, code: ErrorCode, bad: bytes) -> None:
    client = await bench.connect()
    client.call(1, "/t.T/wait", b"x")
    await bench.until(lambda: bench.service.running == 1)
    client.send(bad)
    assert await reset_alone(bench, client, 1) == code


async def test_headers_in_the_middle_of_a_call(bench: Bench) -> None:
    client = await bench.connect()
    client.send(client.head(1, "/t.T/chat"))
    client.send(frame(frames.HEADERS, HEAD, 1, client.headers([("a", "b")])))
    assert await reset_alone(bench, client, 1) == E.PROTOCOL_ERROR


async def test_more_than_a_stream_s_window(bench: Bench) -> None:
    client = await bench.connect()
    client.send(client.head(1, "/t.T/deaf"))
    client.send(data_frame(1, message(bytes(8 * MIB))[:16_384]))
    await client.ping()
    client.send(client.head(3, "/t.T/deaf"), data_frame(3, message(b"")))
    # The first is a message, so that what comes after it is not asked for.
    rest = message(bytes(8 * MIB))[: WINDOW_BYTES + 1]
    client.send(*(data_frame(3, rest[at : at + 16_384]) for at in range(0, len(rest), 16_384)))
    answer = await client.answer(3)
    assert answer.reset == E.FLOW_CONTROL_ERROR
    client.send(frames.reset(1, E.CANCEL))
    await echoes(client, 5)
    await bench.until_idle()


# ── What is tolerated ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_extensions_and_priorities_are_ignored(bench: Bench) -> None:
    client = await bench.connect({0x99: 7, frames.ENABLE_PUSH: 0, frames.MAX_CONCURRENT_STREAMS: 0})
    client.send(frame(77, 0xFF, 0, b"x"), frame(77, 0xFF, 1, b"x"), frame(frames.PRIORITY, 0, 1, bytes(5)))
    client.send(frame(frames.PRIORITY, 0, 99, bytes(5)), frame(frames.SETTINGS, frames.ACK, 0))
    client.send(frame(frames.PING, frames.ACK, 0, b"not sent"))
    client.send(frame(frames.GOAWAY, 0, 0, bytes(8) + b"going"))  # and what has begun, and even begins, is answered
    await echoes(client, 1)
    client.send(frame(frames.PRIORITY, 0, 1, bytes(5)))
    await echoes(client, 3)


async def test_padding_and_priority(bench: Bench) -> None:
    client = await bench.connect()
    block = client.head(1, ECHO)[frames.FRAME_HEADER_BYTES :]
    flags = frames.PADDED | frames.HAS_PRIORITY | HEAD
    client.send(frame(frames.HEADERS, flags, 1, b"\x07" + bytes(5) + block + bytes(7)))
    whole = message(b"padded")
    client.send(frame(frames.DATA, frames.PADDED, 1, b"\xff" + whole[:3] + bytes(255)))
    client.send(frame(frames.DATA, 0, 1))
    client.send(frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, b"\0" + whole[3:]))
    answer = await client.answer(1)
    assert (answer.status, answer.messages) == (0, [b"padded"])


async def test_headers_in_pieces(bench: Bench) -> None:
    client = await bench.connect()
    fields = [("x-a", "1" * 3000), ("x-b", "2" * 3000)]
    block = client.head(1, ECHO, *fields)[frames.FRAME_HEADER_BYTES :]
    client.send(frame(frames.HEADERS, 0, 1, b""))
    for at in range(0, len(block), 1000):
        piece = block[at : at + 1000]
        client.send(frame(frames.CONTINUATION, HEAD if at + 1000 >= len(block) else 0, 1, piece))
    client.send(data_frame(1, message(b"x"), end=True))
    answer = await client.answer(1)
    assert answer.status == 0
    assert [field for field in answer.head.items() if field[0].startswith("x-")] == fields


async def test_late_frames_of_calls_that_have_ended(bench: Bench) -> None:
    """They were on their way; the header block still counts for those after it."""
    client = await bench.connect()
    client.send(client.head(1, "/t.T/early"))
    answer = await client.answer(1)
    assert (answer.status, answer.messages) == (0, [b"enough"])
    client.send(data_frame(1, b"late"), frames.window_update(1, 5), frames.window_update(1, 0))
    client.send(frame(frames.HEADERS, HEAD | frames.END_STREAM, 1, client.headers([("x-late", "remembered")])))
    client.send(frames.reset(1, E.CANCEL), frame(frames.PRIORITY, 0, 1, bytes(5)))
    client.call(3, ECHO, b"x", fields=[("x-late", "remembered")])
    answer = await client.answer(3)
    assert (answer.status, answer.head["x-late"]) == (0, "remembered")


async def test_trailers_of_the_client_end_its_messages(bench: Bench) -> None:
    client = await bench.connect()
    client.send(client.head(1, "/t.T/count"), data_frame(1, message(b"abc")))
    client.send(frame(frames.HEADERS, HEAD | frames.END_STREAM, 1, client.headers([("x-trailer", "1")])))
    assert (await client.answer(1)).messages == [b"[3]"]
    client.send(client.head(3, ECHO), data_frame(3, message(b"abc")))
    client.send(frame(frames.HEADERS, HEAD | frames.END_STREAM, 3, client.headers([("x-trailer", "1")])))
    assert (await client.answer(3)).messages == [b"abc"]


async def test_a_client_that_wants_no_table(bench: Bench) -> None:
    """It may expect to be told so in the next header block (RFC 9113, section 4.3.1)."""
    client = await bench.connect({frames.HEADER_TABLE_SIZE: 0})
    client.decoder.max_allowed_table_size = 0
    await echoes(client, 1)
    client.call(3, "/t.T/none", b"")
    client.send(client.head(5, "/", replace={":method": "GET"}, end=True))
    assert (await client.answer(3)).status == 12
    assert (await client.answer(5)).head[":status"] == "415"


async def test_windows_that_change_in_the_middle(bench: Bench) -> None:
    """What is sent stops where it should, also when the window has become less than nothing."""
    client = await bench.connect({frames.INITIAL_WINDOW_SIZE: 1000})
    client.call(1, "/t.T/many", b"1 5000")
    first = await client.frame_of(frames.HEADERS, 1)
    assert first.flags == HEAD

    async def arrived(change: bytes) -> int:
        client.send(change)
        await client.ping()
        await client.ping()  # what the first one's answer came before is written now
        size = sum(len(it.payload) for it in client.seen if it.kind == frames.DATA)
        client.seen = [it for it in client.seen if it.kind != frames.DATA]
        return size

    assert await arrived(b"") == 1000
    assert await arrived(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 300})) == 0  # now it is -700
    assert await arrived(frames.window_update(1, 700)) == 0
    assert await arrived(frames.window_update(1, 1)) == 1
    assert await arrived(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 400})) == 100
    assert await arrived(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 10_000})) == 5005 - 1101
    client.seen.clear()


async def test_frames_are_as_long_as_the_client_takes(bench: Bench) -> None:
    client = await bench.connect({frames.INITIAL_WINDOW_SIZE: MIB, frames.MAX_FRAME_SIZE: 30_000})
    client.send(frames.window_update(0, MIB))
    client.call(1, "/t.T/many", b"1 200000")
    longest = 0
    while not (it := await client.wait_for(lambda it: it.stream == 1)).flags & frames.END_STREAM:
        longest = max(longest, len(it.payload))
    assert longest == 30_000


async def test_who_says_nothing_is_not_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.http2.connection._HANDSHAKE_SECONDS", 0.01)
    client = await bench.connect(greets=False)
    client.send(frames.PREFACE)
    assert await client.end() == E.SETTINGS_TIMEOUT


async def test_what_the_server_says_first(bench: Bench) -> None:
    client = await bench.connect()
    settings = await client.frame_of(frames.SETTINGS)
    assert dict(struct.iter_unpack(">HI", settings.payload)) == {
        frames.MAX_CONCURRENT_STREAMS: 100,
        frames.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
        frames.MAX_HEADER_LIST_SIZE: 16_384,
    }
    await client.wait_for(lambda it: it.kind == frames.SETTINGS and it.flags == frames.ACK)


async def test_a_client_that_floods_and_never_reads_is_dropped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.http2.connection._UNREAD_BYTES", 200_000)
    monkeypatch.setattr("encserve_server.http2.connection._HIGH_WATER_BYTES", 50_000)
    good, bad = await bench.connect(), await bench.connect()
    bad.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await bench.until(lambda: len(bench.connections) == 2)
    largest = 0
    pings = frame(frames.PING, 0, 0, bytes(8)) * 5000
    async with asyncio.timeout(2 * PATIENCE_SECONDS):
        while len(bench.connections) == 2 and not bad.writer.is_closing():
            bad.send(pings)
            try:
                await bad.writer.drain()
            except ConnectionError:
                break
            largest = max(largest, *(it._transport.get_write_buffer_size() for it in bench.connections))
    await bench.until(lambda: len(bench.connections) == 1)
    assert largest < 2 * MIB
    await echoes(good, 1)
