"""How connections end on our own HTTP/2 server, what becomes of their calls, and what grpcio's client gets from it."""

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from http2_client import PATIENCE_SECONDS, RawClient, data_frame, message
from http2_server import MIB, Bench

from encserve_server.http2 import frames
from encserve_server.http2.connection import Limits
from encserve_server.http2.frames import ErrorCode

E = ErrorCode


def make_bench(**limits: Any) -> Bench:
    return Bench(Limits(max_message_bytes=8 * MIB, max_calls=1000, **limits))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with make_bench() as it:
        yield it


async def last_streams(client: RawClient) -> list[int]:
    """What the GOAWAYs until the end of the connection said, all without an error."""
    assert await client.end() == E.NO_ERROR
    found = [struct.unpack(">II", it.payload[:8]) for it in client.seen if it.kind == frames.GOAWAY]
    assert {code for _, code in found} == {E.NO_ERROR}
    return [stream for stream, _ in found]


async def leaves(bench: Bench, client: RawClient) -> None:
    """The rest of a connection that is asked to go, with a call on it and another on its way."""
    client.acknowledges = False
    first = await client.frame_of(frames.GOAWAY)
    assert struct.unpack(">II", first.payload) == (frames.LARGEST_WINDOW, E.NO_ERROR)
    ping = await client.frame_of(frames.PING)
    client.call(3, "/t.T/wait", b"on its way")
    client.send(frames.frame(frames.PING, frames.ACK, 0, ping.payload))
    second = await client.frame_of(frames.GOAWAY)
    assert struct.unpack(">II", second.payload) == (3, E.NO_ERROR)
    client.call(5, "/t.T/wait", b"too late")
    assert (await client.answer(5)).reset == E.REFUSED_STREAM
    bench.service.gate.set()
    assert (await client.answer(1)).messages == [b"early"]
    assert (await client.answer(3)).messages == [b"on its way"]
    assert await client.read() is None


async def test_stopping_waits_for_calls(bench: Bench) -> None:
    client = await bench.connect()
    client.call(1, "/t.T/wait", b"early")
    await bench.until(lambda: bench.service.running == 1)
    stopping = asyncio.ensure_future(bench.server.stop(PATIENCE_SECONDS))
    await leaves(bench, client)
    await stopping
    assert not await bench.server.wait_for_termination()
    with pytest.raises(ConnectionError):
        await bench.connect()


async def test_a_connection_s_age() -> None:
    async with make_bench(max_age_seconds=0.05) as bench:
        client = await bench.connect()
        client.call(1, "/t.T/wait", b"early")
        await leaves(bench, client)
        await (await bench.connect()).ping()


async def test_stopping_at_once_ends_calls_with_a_status(bench: Bench) -> None:
    client = await bench.connect()
    client.call(1, "/t.T/wait", b"x")
    client.send(client.head(3, "/t.T/chat"), data_frame(3, message(b"x")))
    client.call(5, "/t.T/many", b"1 1000000")
    await bench.until(lambda: bench.service.running == 3)
    await client.ping()
    stopping = asyncio.ensure_future(bench.server.stop(None))
    assert [(await client.answer(stream)).status for stream in (1, 3, 5)] == [14, 14, 14]
    streams = await last_streams(client)
    assert streams == sorted(streams, reverse=True)
    await stopping
    await bench.until(lambda: bench.service.running == 0)


async def test_goaways_never_name_a_later_call_than_before(bench: Bench) -> None:
    """Even if refused calls have come in between (RFC 9113, section 6.8)."""
    client = await bench.connect()
    client.acknowledges = False
    client.call(1, "/t.T/wait", b"x")
    await bench.until(lambda: bench.service.running == 1)
    stopping = asyncio.ensure_future(bench.server.stop(PATIENCE_SECONDS))
    ping = await client.frame_of(frames.PING)
    client.send(frames.frame(frames.PING, frames.ACK, 0, ping.payload))
    client.call(3, "/t.T/wait", b"refused")
    await client.answer(3)
    client.send(frames.window_update(0, 0))
    assert await client.end() == E.PROTOCOL_ERROR
    named = [struct.unpack(">I", it.payload[:4])[0] for it in client.seen if it.kind == frames.GOAWAY]
    assert named == [frames.LARGEST_WINDOW, 1, 1]
    await stopping


async def test_stopping_without_clients() -> None:
    """Also before it was started; its port is free again."""
    for starts in (True, False):
        bench = Bench()
        if starts:
            await bench.server.start()
        await bench.server.stop(PATIENCE_SECONDS)
        again = Bench()
        assert again.server.add_insecure_port(f"127.0.0.1:{bench.port}") == bench.port
        await again.close()


# ── grpcio's client ──────────────────────────────────────────────────────────────────────────────────────────────────

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.fixture
async def channel(bench: Bench) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{bench.port}", OPTIONS) as it:
        yield it


async def test_large_messages_both_ways(channel: grpc.aio.Channel) -> None:
    data = bytes(range(256)) * (5 * MIB // 256)
    echo: Any = channel.unary_unary("/t.T/echo")
    assert await echo(data, timeout=PATIENCE_SECONDS) == data
    chat: Any = channel.stream_stream("/t.T/chat")
    assert [it async for it in chat(iter([data] * 3), timeout=PATIENCE_SECONDS)] == [data] * 3
    many: Any = channel.unary_stream("/t.T/many")
    assert [len(it) async for it in many(b"50 100000", timeout=PATIENCE_SECONDS)] == [100_000] * 50


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compression(channel: grpc.aio.Channel, compression: grpc.Compression) -> None:
    data = b"compressible " * 10_000
    echo: Any = channel.unary_unary("/t.T/echo")
    assert await echo(data, compression=compression, timeout=PATIENCE_SECONDS) == data
    chat: Any = channel.stream_stream("/t.T/chat")
    calls = chat(iter([data, b"", data]), compression=compression, timeout=PATIENCE_SECONDS)
    assert [it async for it in calls] == [data, b"", data]


async def test_many_at_once(channel: grpc.aio.Channel, bench: Bench) -> None:
    echo: Any = channel.unary_unary("/t.T/echo")
    sent = [str(at).encode() * 100 for at in range(200)]
    assert await asyncio.gather(*(echo(it, timeout=PATIENCE_SECONDS) for it in sent)) == sent
    await bench.until_idle()


async def test_metadata(channel: grpc.aio.Channel) -> None:
    metadata = (("x-a", "1"), ("x-a", "two words, and a comma"), ("x-b-bin", bytes(range(256))), ("x-c-bin", b""))
    echo: Any = channel.unary_unary("/t.T/echo")
    call = echo(b"x", metadata=metadata, timeout=PATIENCE_SECONDS)
    assert [field for field in await call.initial_metadata() if field[0].startswith("x-")] == list(metadata)
    abort: Any = channel.unary_unary("/t.T/abort")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await abort("wozu? 100 % é\n".encode(), timeout=PATIENCE_SECONDS)
    assert caught.value.code() == grpc.StatusCode.DATA_LOSS
    assert caught.value.details() == "wozu? 100 % é\n"
    assert dict(caught.value.trailing_metadata()) == {"x-why": "so", "x-bin": b"\0\xff"}


async def test_cancelling_and_deadlines(channel: grpc.aio.Channel, bench: Bench) -> None:
    wait: Any = channel.unary_unary("/t.T/wait")
    call = wait(b"x")
    await bench.until(lambda: bench.service.running == 1)
    call.cancel()
    await bench.until_idle()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wait(b"x", timeout=0.05)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    endless: Any = channel.unary_stream("/t.T/endless")
    call = endless(bytes(100_000))
    assert len(await call.read()) == 100_000
    call.cancel()
    await bench.until_idle()


async def test_a_request_that_cannot_be_read(bench: Bench, channel: grpc.aio.Channel) -> None:
    """It is the caller's fault, and no error of the handler's."""
    handler: Any = grpc.unary_unary_rpc_method_handler(bench.service.echo, lambda data: data.decode(), str.encode)
    bench.server.add_registered_method_handlers("t.U", {"echo": handler})
    echo: Any = channel.unary_unary("/t.U/echo")
    assert await echo(b"good", timeout=PATIENCE_SECONDS) == b"good"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echo(b"\xff", timeout=PATIENCE_SECONDS)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert caught.value.details() == "Exception deserializing request!"
