"""A small gRPC service on our own HTTP/2 server, and what it holds."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

import grpc
from http2_client import PATIENCE_SECONDS, RawClient

from encserve_server.http2.connection import Connection, Limits
from encserve_server.http2.server import Http2Server

MIB = 1024 * 1024
DEFAULT_LIMITS = Limits(max_message_bytes=8 * MIB, max_calls=1000)


class Service(grpc.GenericRpcHandler):
    """Methods named by what they do.

    Attributes:
        running: Handlers that run, and those of asynchronous generators that are not yet finished.
        contexts: The context of each call that has begun.
        gate: What `wait` waits for.
        taken: What handlers note.
    """

    def __init__(self) -> None:
        """Nothing runs."""
        self.running = 0
        self.contexts: list[Any] = []
        self.gate = asyncio.Event()
        self.taken: list[bytes] = []
        methods = {
            **dict.fromkeys(("echo", "wait", "fail", "abort", "trailers"), grpc.unary_unary_rpc_method_handler),
            **dict.fromkeys(
                ("many", "big_abort", "cut_write", "head_abort", "endless"), grpc.unary_stream_rpc_method_handler
            ),
            **dict.fromkeys(("chat", "deaf", "early", "gated"), grpc.stream_stream_rpc_method_handler),
            "count": grpc.stream_unary_rpc_method_handler,
        }
        self._methods: dict[str, Any] = {f"/t.T/{name}": make(getattr(self, name)) for name, make in methods.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._methods.get(str(handler_call_details.method))

    @contextlib.contextmanager
    def _counted(self, context: Any) -> Iterator[None]:
        self.running += 1
        self.contexts.append(context)
        try:
            yield
        finally:
            self.running -= 1

    async def echo(self, request: bytes, context: Any) -> bytes:
        with self._counted(context):
            await context.send_initial_metadata(
                [field for field in context.invocation_metadata() if field[0].startswith("x-")]
            )
            return request

    async def wait(self, request: bytes, context: Any) -> bytes:
        with self._counted(context):
            await self.gate.wait()
            return request

    async def fail(self, request: bytes, context: Any) -> bytes:
        with self._counted(context):
            raise RuntimeError(f"a secret: {request!r}")

    async def abort(self, request: bytes, context: Any) -> bytes:
        with self._counted(context):
            await context.abort(grpc.StatusCode.DATA_LOSS, request.decode(), (("x-why", "so"), ("x-bin", b"\0\xff")))
            raise AssertionError

    async def trailers(self, request: bytes, context: Any) -> bytes:
        """Sets what the request says: whatever the handler does, the call must end."""
        with self._counted(context):
            if request == b"bad trailers":
                context.set_trailing_metadata((("Bad Name", "x"),))
            elif request == b"bad code":
                context.set_code(99)
            elif request == b"bad details":
                context.set_details(object())
            elif request == b"bad callback":
                context.add_done_callback(lambda _: 1 // 0)
            elif request == b"long":
                context.set_trailing_metadata((("x-long", "y" * 40_000),))
            else:
                context.set_code(grpc.StatusCode.NOT_FOUND)
                context.set_details("é" * 10)
                context.set_trailing_metadata((("x-a", "1"), ("x-a", "2")))
            return request

    async def many(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """As many messages as the request says, of as many bytes."""
        with self._counted(context):
            count, size = map(int, request.split())
            for _ in range(count):
                yield bytes(size)

    async def endless(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        with self._counted(context):
            while True:
                yield request

    async def big_abort(self, request: bytes, context: Any) -> None:
        """Writes a message that the request's size says, and aborts while it is on its way."""
        with self._counted(context):
            writing = asyncio.ensure_future(context.write(bytes(int(request))))
            await self.gate.wait()
            try:
                await context.abort(grpc.StatusCode.ABORTED, "cut")
            finally:
                writing.cancel()

    async def cut_write(self, request: bytes, context: Any) -> None:
        """Aborts while a task of its own writes what nobody reads, and waits for that task."""
        with self._counted(context):
            writing = asyncio.ensure_future(context.write(bytes(int(request))))
            await self.gate.wait()
            with contextlib.suppress(grpc.aio.AbortError):
                await context.abort(grpc.StatusCode.ABORTED, "cut")
            await asyncio.wait([writing])
            self.taken.append(b"the write has ended")

    async def head_abort(self, request: bytes, context: Any) -> None:
        del request
        with self._counted(context):
            await context.send_initial_metadata((("x-first", "1"),))
            await self.gate.wait()
            await context.abort(grpc.StatusCode.ABORTED, "after the head")

    async def chat(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        with self._counted(context):
            async for request in requests:
                yield request

    async def deaf(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Does not read until the gate is open; then says how long each message was."""
        with self._counted(context):
            await self.gate.wait()
            async for request in requests:
                yield str(len(request)).encode()

    async def gated(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Reads all, and does what must be done when it is cancelled: which takes until the gate opens."""
        with self._counted(context):
            try:
                async for request in requests:
                    yield request
            finally:
                await self.gate.wait()
                self.taken.append(b"cleaned up")

    async def early(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Answers without reading."""
        del requests
        with self._counted(context):
            yield b"enough"

    async def count(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        with self._counted(context):
            return str([len(request) async for request in requests]).encode()


class Bench:
    """A server with the service, and clients that are closed with it."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        """Takes the server's limits."""
        self.service = Service()
        self.server = Http2Server(limits)
        self.server.add_generic_rpc_handlers((self.service,))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.clients: list[RawClient] = []

    async def __aenter__(self) -> Self:
        """Starts the server."""
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends clients and server."""
        await self.close()

    async def connect(self, settings: dict[int, int] | None = None, *, greets: bool = True) -> RawClient:
        self.clients.append(await RawClient.connect(self.port, settings, greets=greets))
        return self.clients[-1]

    @property
    def connections(self) -> list[Connection]:
        return list(self.server._shared.open)

    async def until(self, true: Callable[[], bool]) -> None:
        """Waits until something is so."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true():
                await asyncio.sleep(0.001)

    async def until_idle(self) -> None:
        """Waits until no call is left, and sees that nothing else of one is."""
        await self.until(lambda: not self.service.running and not any(it.calls for it in self.connections))
        for it in self.connections:
            assert not {**it.outgoing._flows, **it.outgoing._turns, **it.outgoing._held_up, **it.outgoing._shut}

    async def close(self) -> None:
        self.service.gate.set()
        for client in self.clients:
            await client.close()
        await self.server.stop(None)
