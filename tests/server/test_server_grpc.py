"""Tests of gRPC: many calls at once, connections, compression, health, reflection and stops."""

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
from fake_engine import FakeEngine
from fake_server import SERVICE, Failed, FakeServer, StartServer, make_input, refusal
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from waiting import PATIENCE_SECONDS, until

from encserve_proto.v1 import encoder_pb2 as pb

CHECK = "/grpc.health.v1.Health/Check"
# No other test uses this address, so a free port of this address stays free.
OTHER_ADDRESS = ("127.0.0.2", 0)
REFLECTION = "reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.mark.system  # takes more than a second
async def test_every_call_of_a_flood_is_answered_or_refused(start_server: StartServer) -> None:
    """Each of 2,200 calls gets a reply, or is refused because the queue is full.

    gRPC itself would cancel calls beyond a thousand waiting calls. The server's limit prevents this.
    """
    server = await start_server(max_queue_tokens=100)
    target = f"127.0.0.1:{server.app.grpc_port}"
    data = pb.EncodeRequest(inputs=[make_input([1] * 10)]).SerializeToString()
    codes: Counter[grpc.StatusCode] = Counter()

    async def call_twice(channel: Any) -> None:
        for _ in range(2):
            call = channel.unary_unary(f"/{SERVICE}/Encode")(data)
            codes[await call.code()] += 1
            if grpc.StatusCode.RESOURCE_EXHAUSTED in codes:
                server.engine.let_go()

    server.engine.hold()  # the engine runs nothing until the queue is full
    async with AsyncExitStack() as stack:
        own = [("grpc.use_local_subchannel_pool", 1)]  # each channel has its own connection
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(target, options=own)) for _ in range(8)]
        await asyncio.gather(*(call_twice(channels[i % len(channels)]) for i in range(1100)))
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}, codes
    assert codes.total() == 2200
    await server.encode([1] * 10)


async def test_connections_are_bounded(start_server: StartServer) -> None:
    """Beyond the limit, the server closes connections without a call, and serves the other connections."""
    server = await start_server(max_connections=3)
    port = server.app.grpc_port
    busy = await server.start_held(server.encode([1]))
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
    try:
        pending = {asyncio.create_task(reader.read()) for reader, _ in connections}
        # The server sends a settings frame first, but `read` returns only when the connection ends.
        while len(pending) > 2:
            done, pending = await asyncio.wait(pending, timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            assert done, f"{len(pending)} are open"
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", own) as channel:
            check: Any = channel.unary_unary(CHECK)
            # gRPC may still count connections that have just been closed.
            await check(HealthCheckRequest().SerializeToString(), wait_for_ready=True, timeout=PATIENCE_SECONDS)
        server.engine.let_go()
        assert len((await busy).sequences) == 1
    finally:
        for _, writer in connections:
            writer.close()
    await asyncio.gather(*pending)


async def test_connections_with_calls_stay_longer_than_silent_ones(start_server: StartServer) -> None:
    """Beyond the limit, the server closes the longest idle connection of all connections without an accepted call.

    After a health check, the idle time of its connection begins again. A connection with an accepted call stays even
    if the connection has been idle for longest.
    """
    server = await start_server(max_connections=3)
    await server.encode([1])
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.app.grpc_port}", own) as channel, Silent(server) as silent:
        await silent.open(3, remaining=2)
        check: Any = channel.unary_unary(CHECK)
        await check(b"")
        await silent.open(1, remaining=1)


async def test_a_new_connection_may_have_the_port_of_an_earlier_one(start_server: StartServer) -> None:
    """A new connection counts as idle since its own start, not since the last call from the same port."""
    server = await start_server(max_connections=3)
    port = server.app.grpc_port
    address = await check_health(port)
    async with Silent(server) as silent:
        await silent.open(4, remaining=3, local_addr=OTHER_ADDRESS)
        # Now the server knows that all open connections began after the health check. So the server would close the
        # last connection first if the last connection counted as idle since the check.
        await silent.open(3, remaining=3, local_addr=OTHER_ADDRESS)
        await silent.open(1, remaining=3, local_addr=address)
        assert not silent.ended[-1].done()


class Silent(AsyncExitStack):
    """Connections that send nothing.

    Attributes:
        ended: For each connection, a task that ends when the server closes the connection.
    """

    def __init__(self, server: FakeServer) -> None:
        super().__init__()
        self._port = server.app.grpc_port
        self.ended: list[asyncio.Task[bytes]] = []

    async def open(self, count: int, *, remaining: int, **options: Any) -> None:
        """Open connections, and wait until only `remaining` connections are open."""
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, **options)
            self.ended.append(asyncio.create_task(reader.read()))
            self.push_async_callback(asyncio.wait_for, self.ended[-1], PATIENCE_SECONDS)
            self.callback(writer.close)
        await until(lambda: sum(not task.done() for task in self.ended) == remaining)


async def check_health(port: int) -> tuple[str, int]:
    """Make a health check, and reset the connection, so that its address is free again. Return the address."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=OTHER_ADDRESS)
    address: tuple[str, int] = writer.get_extra_info("sockname")
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    connection.initiate_connection()
    fields = {":method": "POST", ":scheme": "http", ":path": CHECK, ":authority": "a", "te": "trailers"}
    connection.send_headers(1, [*fields.items(), ("content-type", "application/grpc")])
    connection.send_data(1, bytes(5), end_stream=True)
    writer.write(connection.data_to_send())
    while not any(
        isinstance(event, h2.events.StreamEnded) for event in connection.receive_data(await reader.read(4096))
    ):
        pass
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return address


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_refused(server: FakeServer, compression: grpc.Compression) -> None:
    """Without the refusal, gRPC would unpack 4 KiB to 4 MiB of empty inputs before the server checks any limit."""
    data = pb.EncodeRequest(inputs=[pb.Input()] * 1000).SerializeToString()
    target = f"127.0.0.1:{server.app.grpc_port}"
    async with grpc.aio.insecure_channel(target, compression=compression) as channel:
        rpc: Any = channel.unary_unary(f"/{SERVICE}/Encode")
        assert (await refusal(rpc(data))).code is grpc.StatusCode.UNIMPLEMENTED
    # The server counts a call when the call begins. Then gRPC refuses the message and cancels the call.
    await until(lambda: server.in_flight() == 0)
    assert server.handled("Canceled") == server.rpc_sample("started_total")
    assert server.sample("encserve_refused_total", reason="MALFORMED_REQUEST") == 0


async def test_a_caller_that_leaves_during_its_reply_is_not_logged(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_server(FakeEngine(500_000))  # replies of 20 MB, larger than any socket buffer
    data = pb.EncodeRequest(inputs=[make_input([1] * 10)]).SerializeToString()
    # In a unary call, the client's gRPC reads the reply at once. In a stream, the reply stays unread. So the test
    # declares a stream.
    rpc: Any = server.channel.unary_stream(f"/{SERVICE}/Encode")
    for answered in range(1, 4):
        call = rpc(data)
        await until(lambda: server.handled("OK") == answered)  # noqa: B023
        call.cancel()
    await server.encode([1])
    assert not [record for record in caplog.records if record.levelname != "INFO"]


@pytest.mark.parametrize(
    "method",
    ["health.v1.Health/Check", "health.v1.Health/Watch", REFLECTION, REFLECTION.replace("v1alpha", "v1")],
)
async def test_other_services_refuse_bytes_that_are_not_a_message(
    shared: FakeServer, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A call with bytes that are not a message is refused. No error is logged, because the caller made the mistake."""
    channel: Any = shared.channel
    failed = await refusal(channel.unary_stream(f"/grpc.{method}")(b"\xff\xff").read())
    assert (failed.code, failed.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")
    assert not [record for record in caplog.records if record.levelname != "INFO"]


async def test_a_stop_ends_watchers_and_reflection(start_server: StartServer) -> None:
    """A stop ends streams of health and reflection at once, not at the end of the grace period.

    Clients such as load balancers keep these streams open.
    """
    server = await start_server(grace_seconds=3600)
    channel: Any = server.channel
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
    unknown = channel.unary_stream("/grpc.health.v1.Health/Watch")(HealthCheckRequest(service="no").SerializeToString())
    reflection = channel.stream_stream(f"/grpc.{REFLECTION}")()
    await reflection.write(ServerReflectionRequest(list_services="").SerializeToString())
    await reflection.read()
    seen = await statuses(watch, until_status=HealthCheckResponse.SERVING)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await server.app.stop()
    seen += await statuses(watch)
    assert seen[-2:] == [HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING]
    assert await watch.code() is grpc.StatusCode.UNAVAILABLE
    assert await statuses(unknown) == [HealthCheckResponse.SERVICE_UNKNOWN]


async def test_a_watcher_that_does_not_read_does_not_stop_other_watchers(start_server: StartServer) -> None:
    server = await start_server(grace_seconds=3600, stall_seconds=0.1)
    target = f"127.0.0.1:{server.app.grpc_port}"
    # A response has seven bytes. The window of this caller has five bytes, so the server cannot send the response.
    narrow = [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(target, options=narrow) as channel:
        deaf: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        held = deaf(b"")
        await held.initial_metadata()
        watch: Any = server.channel.unary_stream("/grpc.health.v1.Health/Watch")
        other = watch(b"")
        await statuses(other, until_status=HealthCheckResponse.SERVING)
        server.engine.hold()
        stuck = asyncio.create_task(server.encode([1]))
        await statuses(other, until_status=HealthCheckResponse.NOT_SERVING)
        server.engine.let_go()
        await stuck
        async with asyncio.timeout(PATIENCE_SECONDS):
            await statuses(other, until_status=HealthCheckResponse.SERVING)
            assert await server.app.stop()


async def statuses(watch: Any, until_status: int | None = None) -> list[int]:
    """Return the statuses that a watcher receives before the stream ends, or up to the status `until_status`."""
    seen: list[int] = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        while (data := await watch.read()) is not grpc.aio.EOF:
            seen.append(HealthCheckResponse.FromString(data).status)
            if seen[-1] == until_status:
                break
    return seen


async def test_a_call_at_the_end_of_a_stop_is_refused_and_not_cancelled(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a stop, the server answers the last running call.

    The caller's next call must get the status UNAVAILABLE.
    """
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 0.1)
    server = await start_server()
    server.engine.hold()
    ended: list[Failed] = []

    async def call_on() -> None:
        while not ended:
            try:
                await server.encode([1])
            except Failed as failed:
                ended.append(failed)

    calling = asyncio.create_task(call_on())
    await asyncio.to_thread(server.engine.started.acquire)
    stopping = asyncio.create_task(server.app.stop())
    await asyncio.sleep(0.2)  # longer than `_REFUSING_SECONDS`
    server.engine.let_go()
    await calling
    assert [(it.code, it.reason) for it in ended] == [(grpc.StatusCode.UNAVAILABLE, "DRAINING")]
    assert await stopping


async def test_an_idle_server_refuses_calls_before_it_stops(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC must not close connections as soon as the stop begins."""
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 1.0)
    server = await start_server()
    stopping = asyncio.create_task(server.app.stop())
    await until(server.app._calls.draining.is_set)
    failed = await refusal(server.encode([1]))
    assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert await stopping
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 0.0)  # no pause when the fixture stops the server
