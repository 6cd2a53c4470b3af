"""How calls end on our own HTTP/2 server, whatever callers and handlers do, and that nothing is left of them."""

import asyncio
import gc
import gzip
import logging
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from http2_client import RawClient, data_frame, message
from http2_server import MIB, Bench

from encserve_server.http2 import frames
from encserve_server.http2.calls import Call
from encserve_server.http2.connection import Limits
from encserve_server.http2.frames import ErrorCode
from encserve_server.http2.incoming import WINDOW_BYTES

E = ErrorCode
S = grpc.StatusCode
LIMIT = 8 * MIB


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with Bench(Limits(max_message_bytes=LIMIT, max_calls=20)) as it:
        yield it


def number(code: grpc.StatusCode) -> int:
    return int(code.value[0])


async def refused(bench: Bench, send: Callable[[RawClient], None], code: grpc.StatusCode, text: str) -> None:
    """The call on stream 1 ends with this status and no message, and the connection goes on without a trace of it."""
    client = await bench.connect()
    send(client)
    answer = await client.answer(1)
    assert (answer.status, answer.messages) == (number(code), [])
    assert text in answer.trailers["grpc-message"]
    client.call(3, "/t.T/echo", b"x")
    assert (await client.answer(3)).messages == [b"x"]
    await bench.until_idle()


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────

HUGE = (1 << 31).to_bytes(4, "big")
BOMB = message(gzip.compress(bytes(LIMIT + 1)), 1)
GZIP = ("grpc-encoding", "gzip")
REFUSED: dict[str, tuple[str, list[tuple[str, str]], bytes, grpc.StatusCode, str]] = {
    "unknown method": ("/t.T/none", [], message(b"x"), S.UNIMPLEMENTED, "Method not found!"),
    "no path": ("", [], message(b"x"), S.UNIMPLEMENTED, "Method not found!"),
    "encoding": ("/t.T/echo", [("grpc-encoding", "br")], message(b"x"), S.UNIMPLEMENTED, "deflate, gzip, identity"),
    "metadata too large": ("/t.T/echo", [("a", "x" * 17_000)], message(b"x"), S.RESOURCE_EXHAUSTED, "at most 16384"),
    "bad binary": ("/t.T/echo", [("a-bin", "*")], message(b"x"), S.INTERNAL, "a-bin"),
    "bad timeout": ("/t.T/echo", [("grpc-timeout", "soon")], message(b"x"), S.INTERNAL, "grpc-timeout"),
    "no message": ("/t.T/echo", [], b"", S.UNIMPLEMENTED, "one message; there were 0"),
    "two messages": ("/t.T/echo", [], message(b"x") * 2, S.UNIMPLEMENTED, "one message"),
    "half a message": ("/t.T/echo", [], message(b"xyz")[:-1], S.INTERNAL, "7 bytes into"),
    "half a message in a stream": ("/t.T/count", [], message(b"xyz")[:-1], S.INTERNAL, "7 bytes into"),
    "too large": ("/t.T/echo", [], b"\0" + HUGE, S.RESOURCE_EXHAUSTED, f"(2147483648 vs. {LIMIT})"),
    "too large in a stream": ("/t.T/chat", [], b"\0" + HUGE, S.RESOURCE_EXHAUSTED, f"(2147483648 vs. {LIMIT})"),
    "bomb": ("/t.T/echo", [GZIP], BOMB, S.RESOURCE_EXHAUSTED, "after decompression"),
    "bomb in a stream": ("/t.T/count", [GZIP], BOMB, S.RESOURCE_EXHAUSTED, "after decompression"),
    "garbage": ("/t.T/echo", [GZIP], message(b"garbage", 1), S.INTERNAL, "decompressed"),
    "compressed unannounced": ("/t.T/count", [], message(b"x", 1), S.INTERNAL, "identity"),
    "no time": ("/t.T/wait", [("grpc-timeout", "0n")], message(b"x"), S.DEADLINE_EXCEEDED, "Deadline Exceeded"),
    "too late": ("/t.T/wait", [("grpc-timeout", "10m")], message(b"x"), S.DEADLINE_EXCEEDED, "Deadline Exceeded"),
}


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "open"])
@pytest.mark.parametrize("what", REFUSED)
async def test_refusals(bench: Bench, what: str, ended: bool) -> None:
    """Whether the caller has ended its side or not; if that is what is wrong, it must have."""
    path, fields, data, code, text = REFUSED[what]
    ended = ended or what in {"no message", "half a message", "half a message in a stream", "bomb", "garbage"}

    def send(client: RawClient) -> None:
        client.send(client.head(1, path, *fields), data_frame(1, data, end=ended))

    await refused(bench, send, code, text)


async def test_a_deadline_passes_before_the_request_is_there(bench: Bench) -> None:
    await refused(
        bench,
        lambda client: client.send(client.head(1, "/t.T/echo", ("grpc-timeout", "10m"))),
        S.DEADLINE_EXCEEDED,
        "Deadline Exceeded",
    )


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("replace", [{":method": "GET"}, {"content-type": "text/html"}, {"content-type": ""}])
async def test_what_is_not_grpc(bench: Bench, replace: dict[str, str], ended: bool) -> None:
    client = await bench.connect()
    client.send(client.head(1, "/t.T/echo", end=ended, replace=replace))
    assert (await client.answer(1)).head == {":status": "415"}
    if not ended:
        assert (await client.answer(1)).reset == E.NO_ERROR
        client.send(data_frame(1, b"late", end=True))
    client.call(3, "/t.T/echo", b"x")
    assert (await client.answer(3)).messages == [b"x"]


async def test_who_is_refused_while_sending_is_told_to_stop(bench: Bench) -> None:
    """RST_STREAM(NO_ERROR), after the status."""
    client = await bench.connect()
    for stream, path in ((1, "/t.T/early"), (3, "/t.T/none")):
        client.send(client.head(stream, path))
        assert (await client.answer(stream)).trailers["grpc-status"] in "0 12"
        assert (await client.answer(stream)).reset == E.NO_ERROR


async def test_more_calls_than_are_allowed(bench: Bench) -> None:
    """They are refused so that clients may try again, at once, and the others go on."""
    client = await bench.connect()
    for at in range(25):
        client.call(2 * at + 1, "/t.T/wait", b"x")
    answers = [await client.answer(2 * at + 1) for at in range(20, 25)]
    assert {answer.reset for answer in answers} == {E.REFUSED_STREAM}
    bench.service.gate.set()
    assert [(await client.answer(2 * at + 1)).status for at in range(20)] == [0] * 20
    client.call(51, "/t.T/echo", b"again")
    assert (await client.answer(51)).messages == [b"again"]


# ── What handlers do ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_handler_that_raises(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The caller learns nothing of why; the log does."""
    with caplog.at_level(logging.ERROR):
        await refused(bench, lambda client: client.call(1, "/t.T/fail", b"x"), S.UNKNOWN, "the handler failed")
    assert "a secret" in caplog.text


async def test_aborting(bench: Bench) -> None:
    client = await bench.connect()
    client.call(1, "/t.T/abort", b"why \xc3\xa9%")
    answer = await client.answer(1)
    assert answer.trailers["grpc-message"] == "why %C3%A9%25"
    assert (answer.status, answer.trailers["x-why"], answer.trailers["x-bin"]) == (15, "so", "AP8")
    assert answer.head is answer.trailers


async def test_trailers(bench: Bench) -> None:
    client = await bench.connect()
    client.call(1, "/t.T/trailers", b"good")
    answer = await client.answer(1)
    assert (answer.status, answer.messages) == (5, [b"good"])
    assert answer.trailers["grpc-message"] == "%C3%A9" * 10


async def test_trailers_longer_than_a_frame(bench: Bench) -> None:
    client = await bench.connect()
    client.call(1, "/t.T/trailers", b"long")
    assert (await client.answer(1)).trailers["x-long"] == "y" * 40_000
    client.call(3, "/t.T/abort", "é".encode() * 5000)
    assert (await client.answer(3)).trailers["grpc-message"] == "%C3%A9" * 5000


@pytest.mark.parametrize("what", ["bad trailers", "bad code", "bad details"])
async def test_a_handler_that_cannot_say_how_it_ends(bench: Bench, what: str) -> None:
    """Its call ends nevertheless."""
    client = await bench.connect()
    client.call(1, "/t.T/trailers", what.encode())
    assert (await client.answer(1)).status == 2
    await bench.until_idle()


async def test_callbacks_that_fail_harm_nobody(bench: Bench) -> None:
    client = await bench.connect()
    client.call(1, "/t.T/trailers", b"bad callback")
    client.call(3, "/t.T/echo", b"x")
    assert (await client.answer(1)).messages == [b"bad callback"]
    assert (await client.answer(3)).messages == [b"x"]
    await bench.until_idle()


async def test_aborting_after_the_head(bench: Bench) -> None:
    client = await bench.connect()
    client.call(1, "/t.T/head_abort", b"")
    await client.wait_for(lambda it: it.kind == frames.HEADERS)
    bench.service.gate.set()
    answer = await client.answer(1)
    assert (answer.status, ":status" in answer.trailers) == (10, False)


async def test_aborting_within_a_message_that_is_not_read(bench: Bench) -> None:
    """The rest of it is not sent, and the status comes though the window is used up."""
    client = await bench.connect()
    client.call(1, "/t.T/big_abort", str(MIB).encode())
    while sum(len(it.payload) for it in client.seen if it.kind == frames.DATA) < frames.FIRST_WINDOW:
        client.seen.append(await client.read() or pytest.fail("the connection ended"))
    bench.service.gate.set()
    answer = await client.answer(1)
    assert (answer.status, len(answer.data), answer.messages) == (10, frames.FIRST_WINDOW, [])
    await bench.until_idle()


# ── Callers that go, or wait, or do not read ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["wait", "endless", "chat", "deaf"])
@pytest.mark.parametrize("hangs_up", [True, False])
async def test_a_caller_that_goes_frees_its_handler(bench: Bench, path: str, hangs_up: bool) -> None:
    """Wherever it waits: for itself, for the caller to read, or for the caller's messages."""
    client = await bench.connect()
    client.send(client.head(1, f"/t.T/{path}"), data_frame(1, message(b"x"), end=path in {"wait", "endless"}))
    await bench.until(lambda: bench.service.running == 1)
    if hangs_up:
        await client.close()
    else:
        client.send(frames.reset(1, E.CANCEL))
    await bench.until_idle()
    context = bench.service.contexts[0]
    await bench.until(context.done)
    assert context.cancelled()
    assert context.code() == S.CANCELLED


async def test_what_a_handler_does_at_its_end_is_not_cancelled_again(bench: Bench) -> None:
    """By another reset, or by the end of the connection."""
    client = await bench.connect()
    client.send(client.head(1, "/t.T/gated"), data_frame(1, message(b"x")))
    await client.frame_of(frames.DATA, 1)
    client.send(frames.reset(1, E.CANCEL), frames.reset(1, E.CANCEL))
    await client.ping()
    await client.close()
    await bench.until(lambda: not bench.connections)
    bench.service.gate.set()
    await bench.until(lambda: bench.service.running == 0)
    assert bench.service.taken == [b"cleaned up"]


async def test_an_answer_that_nobody_reads_ends_with_its_deadline(bench: Bench) -> None:
    client = await bench.connect()
    client.call(1, "/t.T/many", b"1 1000000", fields=[("grpc-timeout", "300m")])
    answer = await client.answer(1)
    assert answer.reset == E.CANCEL or answer.status == number(S.DEADLINE_EXCEEDED)
    assert len(answer.data) <= frames.FIRST_WINDOW
    await bench.until_idle()


async def test_a_stream_that_is_stuck_holds_up_no_other(bench: Bench) -> None:
    client = await bench.connect()
    client.send(frames.window_update(0, 10 * MIB))
    client.call(1, "/t.T/many", b"1 1000000")
    client.call(3, "/t.T/echo", b"x")
    assert (await client.answer(3)).messages == [b"x"]
    client.call(5, "/t.T/many", b"1 50000")
    assert len((await client.answer(5)).messages[0]) == 50_000
    client.send(frames.window_update(1, MIB))
    assert len((await client.answer(1)).messages[0]) == 1_000_000


async def test_a_handler_that_does_not_read_stops_its_caller(bench: Bench) -> None:
    """After one message and one window; and when it reads, the caller may go on to the end."""
    client = await bench.connect()
    sizes = [100_000] * 30
    rest = b"".join(message(bytes(size)) for size in sizes)
    window = WINDOW_BYTES
    client.send(client.head(1, "/t.T/deaf"))
    sent = 0

    def updates() -> int:
        found = [it for it in client.seen if it.kind == frames.WINDOW_UPDATE and it.stream == 1]
        client.seen = [it for it in client.seen if it not in found]
        return sum(frames.read_number(it) for it in found)

    async def send_all_that_may() -> None:
        nonlocal rest, window, sent
        while rest and window:
            piece, rest = rest[: min(window, 16_384)], rest[min(window, 16_384) :]
            window, sent = window - len(piece), sent + len(piece)
            client.send(data_frame(1, piece, end=not rest))
            if not window:
                await client.ping()
                window += updates()

    await send_all_that_may()
    assert window == 0
    assert sent <= WINDOW_BYTES + sizes[0] + 5
    bench.service.gate.set()
    while rest:
        client.seen.append(await client.wait_for(lambda it: it.kind == frames.WINDOW_UPDATE and it.stream == 1))
        window += updates()
        await send_all_that_may()
    assert (await client.answer(1)).messages == [b"100000"] * 30


# ── What is left ─────────────────────────────────────────────────────────────────────────────────────────────────────

KINDS = ("/t.T/echo", "/t.T/none", "/t.T/abort", "/t.T/early", "/t.T/chat", "/t.T/count", "/t.T/trailers")


async def test_nothing_is_left_of_calls(bench: Bench) -> None:
    """No task, no timer, nothing in the connection's tables, and nothing that only the garbage collector would find."""
    client = await bench.connect()
    client.call(1, "/t.T/echo", b"x")
    await client.answer(1)
    tasks = asyncio.all_tasks()
    gc.collect()
    gc.disable()
    try:
        stream = 1
        for at in range(80):
            stream += 2
            ends = at % 3 > 0
            client.send(client.head(stream, KINDS[at % len(KINDS)], ("grpc-timeout", "1H")))
            client.send(data_frame(stream, message(b"x"), end=ends))
            if not ends:
                client.send(frames.reset(stream, E.CANCEL))
            elif at % 5 == 0:
                client.send(data_frame(stream, b"too late"))
            else:
                await client.answer(stream)
        await client.ping()
        await bench.until_idle()
        await bench.until(lambda: asyncio.all_tasks() <= tasks | {asyncio.current_task()})
        bench.service.contexts.clear()
        kinds: tuple[type[Any], ...] = (Call, Exception, types.TracebackType)
        await bench.until(lambda: not [it for it in gc.get_objects() if type(it) is Call])
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [it for it in gc.garbage if issubclass(type(it), kinds)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
