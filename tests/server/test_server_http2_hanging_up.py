"""Clients that hang up, do not read, or read slowly; and what the server's books say of calls that end so."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import hpack
import pytest
from fake_server import FakeServer, StartServer
from http2_client import PATIENCE_SECONDS, RawClient, data_frame, message
from http2_server import MIB, Bench
from waiting import until

from encserve_server import logs
from encserve_server.http2 import connection, frames, incoming, server
from encserve_server.http2.connection import Limits
from encserve_server.http2.frames import LARGEST_WINDOW
from encserve_server.service import SERVICE_NAME

STREAM = f"/{SERVICE_NAME}/EncodeStream"
LABELS = {"grpc_type": "bidi_stream", "grpc_service": SERVICE_NAME, "grpc_method": "EncodeStream"}


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with Bench(Limits(max_message_bytes=8 * MIB, max_calls=1000)) as it:
        yield it


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CLOSE_SECONDS", 0.2)


async def asks_and_never_reads(bench: Bench) -> RawClient:
    """A client for which far more is written than the system takes."""
    client = await bench.connect({frames.INITIAL_WINDOW_SIZE: LARGEST_WINDOW})
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(frames.window_update(0, LARGEST_WINDOW - frames.FIRST_WINDOW))
    client.call(1, "/t.T/many", f"64 {MIB}".encode())
    await bench.until(lambda: any(it._paused for it in bench.connections))
    return client


@pytest.mark.usefixtures("_impatient")
async def test_a_client_that_ends_its_half_and_does_not_read_is_given_up(bench: Bench) -> None:
    client = await asks_and_never_reads(bench)
    client.writer.write_eof()
    await bench.until(lambda: not bench.connections and not bench.service.running)


@pytest.mark.usefixtures("_impatient")
async def test_a_client_that_does_not_read_holds_up_no_stop(bench: Bench) -> None:
    client = await asks_and_never_reads(bench)
    client.writer.write_eof()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await bench.server.stop(0)
    assert not bench.service.running


def slow_client(port: int, size: int) -> int:
    """Asks for a reply of so many bytes, reads it slowly, and gives credit for it; returns the bytes that came."""
    fields = (":method", "POST"), (":scheme", "http"), (":path", "/t.T/many"), ("content-type", "application/grpc")
    begin = frames.PREFACE + frames.settings_frame({frames.INITIAL_WINDOW_SIZE: LARGEST_WINDOW})
    begin += frames.window_update(0, 2**30)
    begin += frames.frame(frames.HEADERS, frames.END_HEADERS, 1, hpack.Encoder().encode(fields))
    count = 0
    with socket.socket() as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connected.settimeout(PATIENCE_SECONDS)
        connected.connect(("127.0.0.1", port))
        connected.sendall(begin + data_frame(1, message(f"1 {size}".encode()), end=True))
        while chunk := connected.recv(65536):
            count += len(chunk)
            connected.sendall(frames.window_update(0, 1))
            time.sleep(0.005)
    return count


async def test_a_reply_that_is_being_read_is_not_cut_off_by_a_stop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has left for the system, which throws it away if we close a connection on which the client still speaks."""
    monkeypatch.setattr(connection, "_GOAWAY_SECONDS", 0.05)
    reading = asyncio.ensure_future(asyncio.to_thread(slow_client, bench.port, 16 * MIB))
    await bench.until(lambda: bool(bench.service.contexts))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await bench.server.stop(PATIENCE_SECONDS)
    assert await reading > 16 * MIB


async def test_a_task_of_a_handler_does_not_wait_for_what_will_not_be_sent(bench: Bench) -> None:
    client = await bench.connect({frames.INITIAL_WINDOW_SIZE: 0})
    client.call(1, "/t.T/cut_write", str(MIB).encode())
    await bench.until(lambda: bench.service.running == 1)
    bench.service.gate.set()
    assert (await client.answer(1)).trailers["grpc-status"] == str(grpc.StatusCode.ABORTED.value[0])
    await bench.until(lambda: bench.service.taken == [b"the write has ended"])


async def test_a_flood_of_empty_messages(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes more memory than it has bytes, so the window does not bound them."""
    monkeypatch.setattr(incoming, "_MOST_MESSAGES", 100)
    client = await bench.connect()
    client.send(client.head(1, "/t.T/deaf"), data_frame(1, message(b"") * 100))
    await client.ping()
    client.send(data_frame(1, message(b"")))
    answer = await client.answer(1)
    assert answer.trailers["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    assert "100 messages" in answer.trailers["grpc-message"]


def test_addresses_that_a_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have some; what is bound must not be left behind where another cannot be."""
    tried: list[Any] = []
    errors: list[OSError | None] = [None, OSError(99, "Cannot assign requested address")]
    real = server._listen

    def listen(family: int, where: Any) -> socket.socket:
        if (error := errors[len(tried)]) is not None:
            tried.append(None)
            raise error
        tried.append(real(socket.AF_INET, ("127.0.0.1", 0)))
        return tried[-1]  # type: ignore[no-any-return]

    both = [(family, socket.SOCK_STREAM, 6, "", ("127.0.0.1", at)) for at, family in enumerate((2, 10))]
    monkeypatch.setattr(server, "_listen", listen)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    it = server.Http2Server(Limits(max_message_bytes=1, max_calls=1))
    assert it.add_insecure_port("name:0") == tried[0].getsockname()[1]
    tried[0].close()
    tried.clear()
    errors[1] = OSError(98, "Address already in use")
    with pytest.raises(RuntimeError, match="Address already in use"):
        it.add_insecure_port("name:0")
    assert tried[0].fileno() == -1
    tried.clear()
    errors[:] = [OSError(99, "Cannot assign requested address")] * 2
    with pytest.raises(RuntimeError, match="Cannot assign"):
        it.add_insecure_port("name:0")


def handled(fake: FakeServer, code: str) -> float:
    return fake.sample("grpc_server_handled_total", **LABELS, grpc_code=code)


@pytest.fixture
async def raw(server: FakeServer) -> AsyncIterator[RawClient]:
    it = await RawClient.connect(server.app.grpc_port)
    yield it
    await it.close()


async def counted(fake: FakeServer, code: str) -> None:
    """Waits until one call is counted so, and sees that none is left."""
    await until(lambda: handled(fake, code))
    assert handled(fake, code) == 1
    assert fake.sample("grpc_server_started_total", **LABELS) == 1
    assert fake.sample("encserve_in_flight_requests") == 0


@pytest.mark.parametrize(
    ("fields", "data", "status", "code"),
    [
        ((("grpc-encoding", "gzip"),), message(b"no gzip", 1), grpc.StatusCode.INTERNAL, "Internal"),
        ((), b"\0\x7f\xff\xff\xff", grpc.StatusCode.RESOURCE_EXHAUSTED, "ResourceExhausted"),
    ],
    ids=["cannot be decompressed", "too large"],
)
async def test_a_bad_message_in_a_stream_is_counted_as_it_is_answered(
    server: FakeServer,
    raw: RawClient,
    caplog: pytest.LogCaptureFixture,
    fields: tuple[tuple[str, str], ...],
    data: bytes,
    status: grpc.StatusCode,
    code: str,
) -> None:
    """And is no unexpected error: anybody can send one."""
    raw.send(raw.head(1, STREAM, *fields))
    await until(lambda: server.sample("grpc_server_started_total", **LABELS))
    raw.send(data_frame(1, data))
    assert (await raw.answer(1)).trailers["grpc-status"] == str(status.value[0])
    await counted(server, code)
    assert server.sample("encserve_refused_total", reason="INTERNAL") == 0
    assert not [it for it in caplog.records if it.levelno >= logging.ERROR]


async def test_an_expired_call_is_counted_as_expired_however_early_its_timer_is(
    server: FakeServer, raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers of event loops may be rounded; what the caller was told is what counts."""
    monkeypatch.setattr("encserve_server.http2.calls.Call.time_remaining", lambda _: 0.001)
    raw.send(raw.head(1, STREAM, ("grpc-timeout", "100m")))
    assert (await raw.answer(1)).trailers["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
    await counted(server, "DeadlineExceeded")


@pytest.mark.parametrize(("remaining_seconds", "code"), [(0.4, "DeadlineExceeded"), (0.5, "Canceled")])
async def test_a_caller_that_goes_at_its_deadline_is_counted_as_expired(
    server: FakeServer, raw: RawClient, monkeypatch: pytest.MonkeyPatch, remaining_seconds: float, code: str
) -> None:
    """By its own clock, which is a little ahead: 2 % of 20 s and 10 ms are taken for that."""
    monkeypatch.setattr("encserve_server.http2.calls.Call.time_remaining", lambda _: remaining_seconds)
    raw.send(raw.head(1, STREAM, ("grpc-timeout", "20S")))
    await until(lambda: server.sample("grpc_server_started_total", **LABELS))
    raw.send(frames.reset(1, frames.ErrorCode.CANCEL))
    await counted(server, code)


async def test_calls_that_a_stop_ends_are_counted_as_unavailable(start_server: StartServer) -> None:
    fake = await start_server(grace_seconds=0.0)
    client = await RawClient.connect(fake.app.grpc_port)
    # Idle streams end with the drain; one whose answer is not read does not.
    client.send(client.head(1, f"/{SERVICE_NAME}/Encode", ("grpc-timeout", "1H")))
    await client.ping()
    stopping = asyncio.ensure_future(fake.app.stop())
    assert (await client.answer(1)).trailers["grpc-status"] == str(grpc.StatusCode.UNAVAILABLE.value[0])
    assert await client.end() is not None
    assert await stopping


@pytest.fixture
def _own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("_own_logging")
def test_what_callers_send_is_in_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    """HPACK's library notes every field on its way."""
    logs.configure("debug", "text")
    hpack.Decoder().decode(hpack.Encoder().encode([("authorization", "Bearer SECRET")]))
    logging.getLogger("encserve_server").debug("but this")
    written = capsys.readouterr().err
    assert "but this" in written
    assert "SECRET" not in written
