"""What callers get of gRPC itself, and what the log gets of them."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from fake_server import SERVICE, FakeServer, StartServer, make_input
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.engine.fake import FakeEngine

ENCODE = {"grpc_type": "unary", "grpc_service": SERVICE, "grpc_method": "Encode"}


async def test_a_flood_that_does_not_end_gets_answers_or_refusals(start_server: StartServer) -> None:
    """gRPC by itself would cancel calls of which more than a thousand wait to be taken."""
    server = await start_server(max_queue_tokens=100)
    target = f"127.0.0.1:{server.app.grpc_port}"
    data = pb.EncodeRequest(inputs=[make_input([1] * 10)]).SerializeToString()
    codes: Counter[grpc.StatusCode] = Counter()

    async def call_twice(channel: Any) -> None:
        for _ in range(2):
            call = channel.unary_unary(f"/{SERVICE}/Encode")(data)
            codes[await call.code()] += 1

    async with AsyncExitStack() as stack:
        own = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(target, options=own)) for _ in range(8)]
        await asyncio.gather(*(call_twice(channels[i % len(channels)]) for i in range(1500)))
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}, codes
    assert codes.total() == 3000
    await server.encode([1] * 10)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_refused(server: FakeServer, compression: grpc.Compression) -> None:
    """Four KiB could be four MiB of empty inputs, and would be made that before anybody could look at them."""
    data = pb.EncodeRequest(inputs=[pb.Input()] * 1000).SerializeToString()
    target = f"127.0.0.1:{server.app.grpc_port}"
    async with grpc.aio.insecure_channel(target, compression=compression) as channel:
        rpc: Any = channel.unary_unary(f"/{SERVICE}/Encode")
        with pytest.raises(grpc.aio.AioRpcError, match="Compression algorithm '.*' is disabled") as caught:
            await rpc(data)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert server.sample("grpc_server_started_total", **ENCODE) == 0


async def test_a_caller_that_goes_in_the_middle_of_its_answer_is_no_news(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_server(FakeEngine(500_000))  # 20 MB an answer, more than any buffer takes
    data = pb.EncodeRequest(inputs=[make_input([1] * 10)]).SerializeToString()
    rpc: Any = server.channel.unary_stream(f"/{SERVICE}/Encode")  # unlike a unary call's, its answer need not be read
    for answered in range(1, 6):
        call = rpc(data)
        await until(lambda: server.sample("grpc_server_handled_total", **ENCODE, grpc_code="OK") == answered)  # noqa: B023
        call.cancel()
    await server.encode([1])
    assert not [record for record in caplog.records if record.levelname != "INFO"]
