"""Attacks on a server.

Each attack is a function that runs in another process. The attack ends when the test closes the process's stdin. The
process has a lower CPU priority than the server, so the attacker's own work does not slow down the server.
"""

import asyncio
import contextlib
import json
import os
import pickle
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
import h2.config
import h2.connection
import h2.errors
import h2.events
import hpack

from encserve_proto.v1 import encoder_pb2

ENCODE = "/encserve.v1.EncoderService/Encode"
ENCODE_STREAM = "/encserve.v1.EncoderService/EncodeStream"
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
MODEL_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
INSPECT = "/encserve.v1.EncoderService/Inspect"
SCORE = "/encserve.v1.EncoderService/Score"
WATCH = "/grpc.health.v1.Health/Watch"
_NICENESS = 10
_END_SECONDS = 30
# If a connection ends, the attack opens a new connection after 2 to 4 s.
_RECONNECT_SECONDS = 2.0
_READ_BYTES = 1 << 20
_PACKET_BYTES = 1 << 16
# A slow sender sends one byte of the last 64 KiB of a request each second.
_HELD_BACK_BYTES, _DRIP_SECONDS = 64 * 1024, 1.0
_ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
Report = dict[str, Any]


class Attack:
    """An attack that runs in another process.

    Attributes:
        report: The result of the attack's function. Empty until `stop`.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.report: Report = {}

    def stop(self) -> Report:
        """End the attack and return the report. If the attack has failed, fail the test."""
        if not self.report:
            output, _ = self._process.communicate(timeout=_END_SECONDS)
            self.report = json.loads(output)
        return self.report


@contextlib.contextmanager
def attack(kind: "Callable[..., Report]", *args: Any) -> Iterator[Attack]:
    """Run a function of this file in another process, until the end of the block."""
    command = [sys.executable, __file__, kind.__name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        try:
            pickle.dump(args, process.stdin)
            process.stdin.flush()
            running = Attack(process)
            yield running
            running.stop()
        finally:
            process.kill()


def flood(over: threading.Event, port: int, head: bytes, block: bytes, connections: int) -> Report:
    """Send `head` once on each connection. Then repeat `block` as fast as possible.

    Ignore the replies. If a connection ends, open a new connection.
    """
    counts = Counter[str]()
    with selectors.DefaultSelector() as selector:
        places: dict[socket.socket, tuple[bytes, int]] = {}

        def connect() -> None:
            opened = socket.create_connection(("127.0.0.1", port))
            opened.setblocking(False)
            selector.register(opened, selectors.EVENT_READ | selectors.EVENT_WRITE)
            places[opened] = (head or block, 0)
            counts["connections"] += 1

        def drive(opened: socket.socket, events: int) -> None:
            if events & selectors.EVENT_READ and not opened.recv(_READ_BYTES):
                raise ConnectionResetError
            if events & selectors.EVENT_WRITE:
                data, place = places[opened]
                sent = opened.send(memoryview(data)[place:])
                counts["sent_bytes"] += sent
                places[opened] = (data, place + sent) if place + sent < len(data) else (block, 0)

        for _ in range(connections):
            connect()
        while not over.is_set() and places:
            for key, events in selector.select(0.1):
                opened = key.fileobj
                assert isinstance(opened, socket.socket)
                try:
                    drive(opened, events)
                except OSError:
                    selector.unregister(opened)
                    del places[opened]
                    opened.close()
                    with contextlib.suppress(ConnectionRefusedError):  # the server has ended
                        connect()
        for opened in places:
            opened.close()
    return counts


def ask_http(over: threading.Event, port: int, request: bytes, connections: int) -> Report:
    """Repeat a request on each connection, and count the replies by status."""
    counts = Counter[str]()

    def ask() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as opened:
                opened.settimeout(_END_SECONDS)
                while not over.is_set():
                    opened.sendall(request)
                    counts[_read_answer(opened)] += 1
            counts["connections ended"] += 1
            over.wait(0.01)

    _in_threads(ask, connections)
    return counts


def _read_answer(opened: socket.socket) -> str:
    """Read a reply to its end and return its status.

    Raises:
        OSError: The connection ended before the reply was complete.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := opened.recv(_READ_BYTES)):
            raise ConnectionResetError
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    left = int(fields.get(b"content-length", b"0")) - len(body)
    while left > 0:
        if not (more := opened.recv(_READ_BYTES)):
            raise ConnectionResetError
        left -= len(more)
    return head.split(b" ", 2)[1].decode()


def ask_grpc(over: threading.Event, target: str, path: str, requests: Sequence[bytes], callers: int) -> Report:
    """Send all requests in order from each caller, again and again until the end. Count the replies by status."""
    counts = Counter[str]()

    async def ask(call: Any) -> None:
        while not over.is_set():
            for request in requests:
                if over.is_set():
                    return
                counts[await _unary(call, request)] += 1

    async def run() -> None:
        async with grpc.aio.insecure_channel(target, options=_ANY_SIZE) as channel:
            asking = asyncio.gather(*(ask(channel.unary_unary(path)) for _ in range(callers)))
            while not over.is_set() and not asking.done():
                await asyncio.sleep(0.05)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking

    asyncio.run(run())
    return counts


async def _unary(call: Any, request: bytes) -> str:
    try:
        await call(request)
    except grpc.aio.AioRpcError as error:
        return _status(error)
    return "OK"


def _status(error: grpc.aio.AioRpcError) -> str:
    reasons = [str(value) for key, value in error.trailing_metadata() if key == "encserve-error-reason"]
    return " ".join([error.code().name, *reasons])


def stream_grpc(over: threading.Event, target: str, path: str, request: bytes, count: int) -> Report:
    """Send a request `count` times in one stream, and count the replies."""

    async def run() -> int:
        answers = 0
        async with grpc.aio.insecure_channel(target, options=_ANY_SIZE) as channel:

            async def send(call: Any) -> None:
                for _ in range(count):
                    await call.write(request)
                await call.done_writing()

            call: Any = cast("Any", channel.stream_stream(path))()
            sending = asyncio.create_task(send(call))
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    answers += 1
                    if over.is_set():
                        break
            sending.cancel()
            call.cancel()
        return answers

    return {"answers": asyncio.run(run())}


def inspect(over: threading.Event, target: str, request: bytes, callers: int, key: str, reads: bool) -> Report:
    """Repeat an inspection from each caller, and count replies by status. If `reads` is false, read no replies."""
    counts = Counter[str]()

    async def ask(method: Any) -> None:
        while True:
            call = method(request, metadata=(("api-key", key),))
            try:
                if not reads:
                    await call.initial_metadata()
                    counts["held"] += 1
                    await asyncio.to_thread(over.wait)
                async for _ in call:
                    pass
                counts["OK"] += 1
            except grpc.aio.AioRpcError as error:
                counts[_status(error)] += 1
            await asyncio.sleep(0.01)

    async def run() -> None:
        async with grpc.aio.insecure_channel(target, options=_ANY_SIZE) as channel:
            await _until_over(over, (ask(channel.unary_stream(INSPECT)) for _ in range(callers)))

    asyncio.run(run())
    return counts


async def _until_over(over: threading.Event, works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at the same time until the attack is over."""
    working = asyncio.gather(*works)
    await asyncio.to_thread(over.wait)
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


def rest(over: threading.Event) -> Report:
    """Do nothing until the attack is over."""
    over.wait()
    return {"calls": 0}


def silent(over: threading.Event, ports: Sequence[int], connections: int, hello: bytes, seconds: float) -> Report:
    """Open connections to each port, spread over `seconds`. Each connection sends `hello` and nothing more.

    If a connection ends, open a new connection after a pause.
    """
    counts = Counter[str]()

    async def keep(port: int, number: int) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(number / connections * seconds)
        while True:
            with contextlib.suppress(OSError), contextlib.closing(await _connect(port)) as opened:
                counts[f"connections to {port}"] += 1
                await loop.sock_sendall(opened, hello)
                while await loop.sock_recv(opened, _PACKET_BYTES):
                    pass
            await asyncio.sleep(_RECONNECT_SECONDS * (1 + random.random()))

    asyncio.run(_until_over(over, (keep(port, number) for port in ports for number in range(connections))))
    return counts


def open_watches(over: threading.Event, port: int, connections: int, streams: int, seconds: float) -> Report:
    """Open `streams` streams of Health.Watch on each connection, spread over `seconds`, and keep the streams open.

    This function writes the frames of HTTP/2 itself, because a library needs more CPU time than the server.
    """
    counts = Counter[str]()
    fields = {":method": "POST", ":scheme": "http", ":path": WATCH, ":authority": "a", "te": "trailers"}
    headers = hpack.Encoder().encode([*fields.items(), ("content-type", "application/grpc")])

    def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
        return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data

    async def run() -> None:
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(connections)]
        reading = [asyncio.create_task(read(reader)) for reader, _ in pairs]
        for _, writer in pairs:  # the last frame enlarges the flow-control window for the replies
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
            writer.write(frame(8, 0, 0, (2**30).to_bytes(4, "big")))
        began = time.monotonic()
        for number in range(streams):
            stream = 2 * number + 1
            for _, writer in pairs:
                writer.write(frame(1, 4, stream, headers) + frame(0, 1, stream, bytes(5)))
                await writer.drain()
                counts["streams"] += 1
            await asyncio.sleep(began + number / streams * seconds - time.monotonic())
            if over.is_set():
                return
        await asyncio.to_thread(over.wait)
        for task in reading:
            task.cancel()

    async def read(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                counts["received_bytes"] += len(data)
        counts["connections ended"] += 1

    asyncio.run(run())
    return counts


def keep_streams(
    over: threading.Event, target: str, path: str, request: bytes, streams: int, key: str, pause_seconds: float
) -> Report:
    """Open streams. On each stream, send a request, wait for the reply, pause, and send the request again.

    Count the replies by status. If a stream ends, open a new stream.
    """
    counts = Counter[str]()

    async def keep(method: Any) -> None:
        while True:
            stream = method(metadata=(("api-key", key),))
            await asyncio.sleep(_DRIP_SECONDS)  # wait until all streams are open
            try:
                await stream.write(request)
                while (reply := await stream.read()) is not grpc.aio.EOF:
                    counts[_stream_status(reply)] += 1
                    await asyncio.sleep(pause_seconds)
                    await stream.write(request)
                counts["streams ended"] += 1
            except grpc.aio.AioRpcError as error:
                counts[f"stream ended: {_status(error)}"] += 1
            except asyncio.InvalidStateError:  # the server ended the stream before a write
                counts[f"stream ended: {await stream.code()}"] += 1
            await asyncio.sleep(pause_seconds)

    async def run() -> None:
        async with grpc.aio.insecure_channel(target, options=_ANY_SIZE) as channel:
            method: Any = channel.stream_stream(path)
            keeping = asyncio.gather(*(keep(method) for _ in range(streams)))
            while not over.is_set() and not keeping.done():
                await asyncio.sleep(0.05)
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping

    asyncio.run(run())
    return counts


def _stream_status(data: bytes) -> str:
    reply = encoder_pb2.EncodeStreamResponse.FromString(data)
    return f"status {reply.error.code}" if reply.HasField("error") else "OK"


@dataclass(frozen=True)
class Holder:
    """A group of callers. Each caller has its own connection, and keeps a call open.

    Attributes:
        name: The name of the group in the report.
        count: The number of callers.
        port: The server's port.
        path: The gRPC method or the HTTP route.
        messages: The messages of a gRPC call, or one HTTP body.
        is_grpc: Whether the callers use gRPC. If not, the callers use HTTP/1.1.
        is_slow: Whether the callers send the last 64 KiB slowly. If not, the callers send everything and read nothing.
        key: The key of the callers. Empty for a server without keys.
    """

    name: str
    count: int
    port: int
    path: str
    messages: tuple[bytes, ...]
    is_grpc: bool
    is_slow: bool
    key: str = ""

    def body(self) -> bytes:
        """Return the bytes after the head of the request."""
        if not self.is_grpc:
            return self.messages[0]
        return b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in self.messages)


def hold(over: threading.Event, *holders: Holder) -> Report:
    """Open all calls and keep them open. Count the outcomes in each group of callers."""
    outcomes: dict[str, Counter[str]] = {holder.name: Counter() for holder in holders}

    async def call(holder: Holder, body: bytes) -> None:
        one = _hold_grpc if holder.is_grpc else _hold_http
        try:
            outcome = await one(over, holder, body)
        except OSError:
            outcome = "connection ended"
        outcomes[holder.name][outcome] += 1

    async def run() -> None:
        calls = [call(holder, body) for holder in holders for body in [holder.body()] for _ in range(holder.count)]
        await asyncio.gather(*calls)

    asyncio.run(run())
    return outcomes


async def _connect(port: int) -> socket.socket:
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PACKET_BYTES)  # a buffer for a small part of a reply
    opened.setblocking(False)
    await asyncio.get_running_loop().sock_connect(opened, ("127.0.0.1", port))
    return opened


async def _hold_http(over: threading.Event, holder: Holder, body: bytes) -> str:
    loop = asyncio.get_running_loop()
    head = f"POST {holder.path} HTTP/1.1\r\nhost: a\r\napi-key: {holder.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    fast = memoryview(body)[: len(body) - _HELD_BACK_BYTES if holder.is_slow else len(body)]
    with contextlib.closing(await _connect(holder.port)) as opened:
        try:
            await loop.sock_sendall(opened, head.encode())
            await loop.sock_sendall(opened, fast)
            while not over.is_set():
                await asyncio.sleep(_DRIP_SECONDS / 2)
                with contextlib.suppress(BlockingIOError):
                    status = opened.recv(12, socket.MSG_PEEK)[9:].decode()
                    if status != "200" or holder.is_slow:
                        return status or "connection ended"
                if holder.is_slow:
                    await loop.sock_sendall(opened, b" ")
        except ConnectionError:
            return "connection ended"
    return "held"


async def _hold_grpc(over: threading.Event, holder: Holder, body: bytes) -> str:
    """Send the request as far as the server's flow-control windows allow, and return the outcome.

    This function never enlarges the flow-control window of the reply. So the server cannot finish a large reply.
    """
    loop = asyncio.get_running_loop()
    with contextlib.closing(await _connect(holder.port)) as opened:
        connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        connection.initiate_connection()
        connection.send_headers(
            1,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", holder.path),
                (":authority", "a"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("api-key", holder.key),
            ],
        )
        place, fast_bytes = 0, len(body) - (_HELD_BACK_BYTES if holder.is_slow else 0)
        next_drip = time.monotonic()
        while not over.is_set():
            if place >= fast_bytes and holder.is_slow and time.monotonic() > next_drip:
                fast_bytes, next_drip = fast_bytes + 1, time.monotonic() + _DRIP_SECONDS
            place = _send_data(connection, body, place, fast_bytes)
            await loop.sock_sendall(opened, connection.data_to_send())
            data = b""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRIP_SECONDS):
                    if not (data := await loop.sock_recv(opened, _PACKET_BYTES)):
                        return "connection ended"
            for event in connection.receive_data(data):
                if outcome := _outcome(event):
                    return outcome
    return "held"


def _send_data(connection: Any, body: bytes, place: int, end: int) -> int:
    """Send bytes of the body up to `end`, as far as the flow-control windows allow.

    Return the new position in the body.
    """
    while place < end and (window := connection.local_flow_control_window(1)):
        size = min(window, connection.max_outbound_frame_size, end - place)
        connection.send_data(1, body[place : place + size])
        place += size
    return place


def _outcome(event: Any) -> str:
    """Return how the call ended. If the call has not ended, return an empty string."""
    if isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
        fields: dict[Any, Any] = dict(event.headers)
        if (status := fields.get("grpc-status")) is not None:
            return f"status {status} {fields.get('encserve-error-reason', '')}".strip()
    if isinstance(event, h2.events.StreamReset):
        return f"reset {h2.errors.ErrorCodes(event.error_code).name}"
    return "connection ended" if isinstance(event, h2.events.ConnectionTerminated) else ""


def _in_threads(function: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=function) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C, because the test ends this process
    os.nice(_NICENESS)
    kind, args = globals()[sys.argv[1]], pickle.load(sys.stdin.buffer)  # noqa: S301 - the test's own
    over = threading.Event()

    def wait() -> None:
        sys.stdin.buffer.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    json.dump(kind(over, *args), sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # exit without waiting for open calls


if __name__ == "__main__":
    # A real attacker has its own CPUs. Here the attack shares the CPUs with the server, so its priority is lower.
    os.nice(19)
    _main()
