"""Tests of EncodeStream: many requests over one stream. The server sends each reply when the reply is ready."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from fake_engine import FakeEngine, fake_rows
from fake_server import D_MODEL, SERVICE, Failed, FakeServer, StartServer, make_input, refusal
from waiting import PATIENCE_SECONDS, until

from encserve_proto.v1 import encoder_pb2 as pb


class Stream:
    """An open stream of EncodeStream."""

    def __init__(self, server: FakeServer) -> None:
        rpc: Any = server.channel.stream_stream(f"/{SERVICE}/EncodeStream")
        self.call = rpc()

    async def send(self, request_id: str, *ids: int) -> None:
        request = pb.EncodeRequest(inputs=[make_input(list(ids))])
        await self.call.write(pb.EncodeStreamRequest(request_id=request_id, request=request).SerializeToString())

    async def receive(self) -> pb.EncodeStreamResponse:
        data = await self.call.read()
        assert data is not grpc.aio.EOF
        return pb.EncodeStreamResponse.FromString(data)

    async def end(self) -> None:
        """Read replies until the stream ends."""
        while await self.call.read() is not grpc.aio.EOF:
            pass

    async def replies(self) -> dict[str, pb.EncodeStreamResponse]:
        """Send no more requests, and return all replies by request id."""
        await self.call.done_writing()
        replies = {}
        while (data := await self.call.read()) is not grpc.aio.EOF:
            reply = pb.EncodeStreamResponse.FromString(data)
            assert reply.request_id not in replies, "two replies to one request"
            replies[reply.request_id] = reply
        return replies


def right(response: pb.EncodeStreamResponse, *ids: int) -> bool:
    return response.response.outputs[0].data == fake_rows(np.array(ids), D_MODEL).tobytes()


async def test_answers_are_matched_by_the_callers_id(shared: FakeServer) -> None:
    stream = Stream(shared)
    for i in range(200):
        await stream.send(f"r{i}", i, i + 1)
    answers = await stream.replies()
    assert len(answers) == 200
    assert all(right(answers[f"r{i}"], i, i + 1) for i in range(200))


async def test_an_error_ends_one_request_only(start_server: StartServer) -> None:
    server = await start_server(FakeEngine(D_MODEL, poison=666))
    stream = Stream(server)
    await stream.send("good", 1)
    await stream.send("bad", 1, 1000)
    await stream.send("poison", 666)
    await stream.send("", 1)
    await stream.send("good too", 2)
    answers = await stream.replies()
    assert right(answers["good"], 1)
    assert right(answers["good too"], 2)
    bad = answers["bad"].error
    assert (bad.code, bad.reason) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], "INVALID_FIELD")
    assert bad.message.startswith("inputs[0].token_ids.ids[1]: ")
    assert len(bad.details) == 2
    assert answers["poison"].error.reason == "INFERENCE_FAILED"
    assert "666" not in answers["poison"].error.message
    assert answers[""].error.message.startswith("request_id: ")
    assert server.sample("encserve_refused_total", reason="INVALID_FIELD") == 2


async def test_bytes_that_are_not_a_message_end_it(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Send bytes that are not a message. The stream must end with an error, even if replies are still pending."""
    for good in [0, 1] * 20:
        stream = Stream(server)
        for i in range(good):
            await stream.send(str(i), 1)
        await stream.call.write(b"\xff\xff")
        failed = await refusal(asyncio.wait_for(stream.end(), PATIENCE_SECONDS))
        assert (failed.code, failed.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")
    assert not caplog.records


async def test_the_number_of_requests_read_ahead_is_limited(start_server: StartServer) -> None:
    server = await start_server(max_stream_in_flight=4)
    server.engine.hold()
    stream = Stream(server)
    for i in range(50):
        await stream.send(str(i), 1)
    await asyncio.to_thread(server.engine.started.acquire)
    for _ in range(20):
        await asyncio.sleep(0.01)
        assert server.queued("sequences") <= 4
    server.engine.let_go()
    assert len(await stream.replies()) == 50


async def test_draining_answers_what_was_read_and_then_ends_the_stream(server: FakeServer) -> None:
    server.engine.hold()
    stream = Stream(server)
    await stream.send("read", 1)
    await asyncio.to_thread(server.engine.started.acquire)
    stopping = asyncio.create_task(server.app.stop())
    await until(server.app._calls.draining.is_set)
    server.engine.let_go()
    assert right(await stream.receive(), 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.call.read()
    failed = Failed(caught.value)
    assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert await stopping


async def test_a_complete_stream_ends_with_ok_in_a_drain(server: FakeServer) -> None:
    server.engine.hold()
    stream = Stream(server)
    await stream.send("all", 1)
    await stream.call.done_writing()
    await asyncio.to_thread(server.engine.started.acquire)
    await server.call("GetModel", b"")  # the server has read the end of the stream before this reply
    stopping = asyncio.create_task(server.app.stop())
    await until(server.app._calls.draining.is_set)
    server.engine.let_go()
    assert right(await stream.receive(), 1)
    assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK
    await stopping
