"""Tests of gRPC calls: the byte budget, slow callers, streams, stops and unexpected errors."""

import asyncio
import contextlib
import gc
import types
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine
from fake_server import D_MODEL, INFER_SERVICE, LONGEST, SERVICE, FakeServer, StartServer, make_input, refusal
from open_inference import infer_request, text_tensor
from waiting import PATIENCE_SECONDS, until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server import ledger
from encserve_server.errors import PLAIN, BundleError, FieldPath, InvalidField, RequestField
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.protocols.encserve import codec, inspect_codec, naming
from encserve_server.protocols.open_inference import requests as infer_requests
from encserve_server.protocols.open_inference import service as infer_service
from encserve_server.protocols.open_inference.triton import grpc_service_pb2 as infer_pb
from encserve_server.transport.grpc import connections
from encserve_server.transport.grpc.streams import answer_stream

MIB = 2**20
SHARED_SETTINGS = {"max_queue_tokens": 100}
OWN = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]


async def all_given_back(server: FakeServer) -> None:
    await until(lambda: (server.held_bytes(), server.in_flight()) == (0, 0))
    model = server.app.catalog.resolve("", "")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await model.unused()


def stream_of(server: FakeServer, service: str = SERVICE, method: str = "EncodeStream") -> Any:
    rpc: Any = server.channel.stream_stream(f"/{service}/{method}")
    return rpc()


def stream_request(request_id: str, *inputs: Any) -> bytes:
    request = pb.EncodeRequest(inputs=map(make_input, inputs))
    return pb.EncodeStreamRequest(request_id=request_id, request=request).SerializeToString()


async def read_all(call: Any) -> None:
    """Send no more requests on a stream, and read the rest of the replies."""
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass


class Panic(BaseException):
    """An exception that is not a subclass of Exception, like the exception that PyO3 raises if Rust code panics."""


# The byte budget


async def good(server: FakeServer) -> None:
    await server.encode("hello brave new world", [1, 2, 3])


async def refused(server: FakeServer) -> None:
    assert (await refusal(server.encode([1, 10**6]))).reason == "INVALID_FIELD"


async def poisoned(server: FakeServer) -> None:
    server.engine.poison = 666
    assert (await refusal(server.encode([666]))).reason == "INFERENCE_FAILED"
    server.engine.poison = None


async def expired(server: FakeServer) -> None:
    server.engine.hold()
    failed = await refusal(server.encode([1], timeout=0.1))
    server.engine.let_go()
    assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def cancelled(server: FakeServer) -> None:
    server.engine.hold()
    rpc: Any = server.channel.unary_unary(f"/{SERVICE}/Encode")
    call = rpc(pb.EncodeRequest(inputs=[make_input([1])]).SerializeToString())
    await until(lambda: server.held_bytes() > 0)
    call.cancel()
    await until(lambda: server.held_bytes() == 0)
    server.engine.let_go()


async def tokenized(server: FakeServer) -> None:
    await server.call("Tokenize", pb.TokenizeRequest(texts=["hello world"] * 20))


async def inspected(server: FakeServer) -> None:
    await server.inspect(pb.InspectRequest(input=make_input([1, 2])))


async def described(server: FakeServer) -> None:
    await server.call("ListModels", b"")
    await server.call("GetModel", b"")


async def inferred(server: FakeServer) -> None:
    await server.call("ModelInfer", infer_request(text=text_tensor("hello")), INFER_SERVICE)
    assert (await refusal(server.call("ModelInfer", infer_request(), INFER_SERVICE))).reason == "INVALID_FIELD"


async def streamed(server: FakeServer) -> None:
    call = stream_of(server)
    for i in range(20):
        await call.write(stream_request(str(i), [1, 2], [3] if i % 2 else [10**6]))
    await read_all(call)


async def stream_broken_off(server: FakeServer) -> None:
    server.engine.hold()
    call = stream_of(server)
    for i in range(20):
        await call.write(stream_request(str(i), [1, 2]))
    await until(lambda: server.queued("sequences") > 0)
    assert server.held_bytes() > 0
    call.cancel()
    await until(lambda: (server.held_bytes(), server.queued("sequences")) == (0, 0))
    server.engine.let_go()


async def malformed(server: FakeServer) -> None:
    for method in ("Encode", "Tokenize", "GetModel", "ListModels"):
        failed = await refusal(server.call(method, b"\xff\xff"))
        assert (failed.reason, "2 bytes" in failed.text) == ("MALFORMED_REQUEST", True)
    assert (await refusal(server.call("Explode", b""))).code is grpc.StatusCode.UNIMPLEMENTED
    call = stream_of(server)
    await call.write(b"\xff\xff")
    assert (await refusal(call.read())).reason == "MALFORMED_REQUEST"


CALLS = [
    good, refused, poisoned, expired, cancelled, tokenized, inspected, described, inferred, streamed, stream_broken_off,
    malformed,
]  # fmt: skip


@pytest.mark.parametrize("calls", CALLS)
async def test_a_call_releases_all_resources(
    shared: FakeServer, calls: Callable[[FakeServer], Awaitable[None]]
) -> None:
    await calls(shared)
    await all_given_back(shared)
    await shared.encode([1])


async def test_the_bytes_of_a_waiting_call_count(server: FakeServer) -> None:
    data = pb.EncodeRequest(inputs=[make_input([1] * LONGEST)]).SerializeToString()
    calling = await server.start_held(server.call("Encode", data))
    rows = LONGEST * D_MODEL * 4
    assert server.held_bytes() > len(data) + 2 * rows  # the request, the hidden states, and the reply
    server.engine.let_go()
    await calling
    await all_given_back(server)


async def test_a_full_budget_refuses_further_calls(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call beyond the byte budget is refused, but a call that is alone is always admitted."""
    monkeypatch.setattr(server.app._calls.budget, "limit", 3000)
    first = await server.start_held(server.encode([1] * LONGEST, [2] * LONGEST))  # this call uses over 2,000 bytes
    before = server.held_bytes()
    assert before > 1000
    failed = await refusal(server.encode([3] * LONGEST, [4] * LONGEST))
    assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUDGET_FULL")
    assert "3000 bytes (max_in_flight_mib)" in failed.text
    assert failed.pushback_ms == "1000"
    assert failed.details["google.rpc.RetryInfo"].retry_delay.seconds == 1
    await until(lambda: server.held_bytes() == before)
    server.engine.let_go()
    assert len((await first).sequences) == 2
    await all_given_back(server)
    assert server.sample("encserve_refused_total", reason="BUDGET_FULL") == 1
    monkeypatch.setattr(server.app._calls.budget, "limit", 1)
    assert len((await server.encode([1] * LONGEST, "hello")).sequences) == 2
    await server.call("Tokenize", pb.TokenizeRequest(texts=["hello"]))


async def test_a_full_budget_refuses_one_request_of_a_stream(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.hold()
    call = stream_of(server)
    await until(lambda: server.held_bytes() > 0)
    monkeypatch.setattr(server.app._calls.budget, "limit", int(server.held_bytes()) * 8 // 7 + 6000)
    await call.write(stream_request("first", [1] * LONGEST))
    await asyncio.to_thread(server.engine.started.acquire)
    await call.write(stream_request("second", [2] * LONGEST))
    answer = pb.EncodeStreamResponse.FromString(await call.read())
    assert (answer.request_id, answer.error.reason) == ("second", "BUDGET_FULL")
    assert answer.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert answer.error.retry_delay_seconds == 1
    server.engine.let_go()
    assert pb.EncodeStreamResponse.FromString(await call.read()).request_id == "first"
    await call.write(stream_request("third", [3] * LONGEST))
    assert not pb.EncodeStreamResponse.FromString(await call.read()).HasField("error")
    call.cancel()
    await all_given_back(server)


# Receiving


@pytest.fixture
def two_places(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return settings of a server with two places. Each slow request and each open stream takes one place."""
    monkeypatch.setattr(ledger, "_LEAST_PLACES", 2)
    monkeypatch.setattr(ledger, "LOOK_SECONDS", 0.02)
    return {"max_request_mib": 4, "max_response_mib": 1, "max_in_flight_mib": 8}


def half_sent(server: FakeServer) -> Any:
    """Start a call that never sends its request."""
    rpc: Any = server.channel.stream_unary(f"/{SERVICE}/Encode")
    return rpc()


async def test_only_slow_requests_need_places(start_server: StartServer, two_places: dict[str, Any]) -> None:
    server = await start_server(**two_places)
    halves = [half_sent(server) for _ in range(2)]
    await until(lambda: server.held_bytes() == 4 * MIB)  # the two places share half of the 8 MiB budget
    await asyncio.gather(*(server.encode([i]) for i in range(10)))
    failed = await refusal(half_sent(server))
    assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUDGET_FULL")
    assert failed.details["google.rpc.RetryInfo"].retry_delay.seconds == 1
    await server.call("Check", b"", "grpc.health.v1.Health")
    halves[0].cancel()
    await until(lambda: server.held_bytes() == 2 * MIB)
    further = half_sent(server)
    await until(lambda: server.held_bytes() == 4 * MIB)
    for half in (further, halves[1]):
        half.cancel()
    await all_given_back(server)


async def test_an_incomplete_request_ends_after_the_timeout(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, two_places: dict[str, Any]
) -> None:
    monkeypatch.setattr(ledger, "ARRIVAL_SECONDS", 0.05)
    server = await start_server(**two_places)
    failed = await refusal(half_sent(server))
    assert (failed.code, failed.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXPIRED")
    await all_given_back(server)


async def test_a_stop_does_not_wait_for_incomplete_requests(
    start_server: StartServer, two_places: dict[str, Any]
) -> None:
    server = await start_server(**two_places, grace_seconds=3600)
    ended = asyncio.create_task(refusal(half_sent(server)))
    await until(lambda: server.in_flight() == 1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await server.app.stop()
    failed = await ended
    assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_a_call_without_a_request_is_refused_at_once(server: FakeServer) -> None:
    call = half_sent(server)
    await call.done_writing()
    async with asyncio.timeout(PATIENCE_SECONDS / 3):  # shorter than the time limit for a request to arrive
        failed = await refusal(call)
    assert (failed.code, failed.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")
    await all_given_back(server)


async def test_a_caller_that_leaves_while_it_sends_is_counted_as_cancelled(server: FakeServer) -> None:
    for i in range(3):
        call = half_sent(server)
        await until(lambda: server.in_flight() == 1)
        call.cancel()
        await until(lambda: server.in_flight() == 0)
        assert server.handled("Canceled") == i + 1
    assert server.handled("InvalidArgument") == 0
    assert server.sample("encserve_refused_total", reason="MALFORMED_REQUEST") == 0


async def test_streams_are_bounded(start_server: StartServer, two_places: dict[str, Any]) -> None:
    server = await start_server(**two_places)
    calls = [stream_of(server) for _ in range(2)]
    for call in calls:
        await call.write(stream_request("a", [1]))
        await call.read()
    assert (await refusal(stream_of(server).read())).reason == "BUDGET_FULL"
    await server.encode([1])
    calls[0].cancel()
    await until(lambda: server.in_flight() == 1)
    further = stream_of(server)
    await further.write(stream_request("a", [1]))
    assert await further.read() is not grpc.aio.EOF
    for call in (further, calls[1]):
        call.cancel()
    await all_given_back(server)


async def test_a_new_stream_takes_the_place_of_the_longest_idle_one(
    start_server: StartServer, two_places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends the longest idle stream when a new stream needs a place.

    The server cannot distinguish an idle stream from a stream with an incomplete message.
    """
    server = await start_server(**two_places)
    monkeypatch.setattr(ledger, "ARRIVAL_SECONDS", 0.05)
    server.engine.hold()
    busy, idle = stream_of(server), stream_of(server)
    await busy.write(stream_request("a", [1]))
    await asyncio.to_thread(server.engine.started.acquire)
    ended = asyncio.create_task(refusal(idle.read()))
    await until(lambda: server.in_flight() == 2)
    await asyncio.sleep(0.1)
    assert not ended.done(), "an idle stream ended before another call needed its place"
    further = stream_of(server)
    assert (await ended).reason == "BUDGET_FULL"
    server.engine.let_go()
    await further.write(stream_request("b", [1]))
    for call, request_id in ((busy, "a"), (further, "b")):
        assert pb.EncodeStreamResponse.FromString(await call.read()).request_id == request_id
        call.cancel()
    await all_given_back(server)


# Sending


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server close the connection of a caller that does not read a reply within 0.2 s."""
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.2)
    monkeypatch.setattr(connections, "_SECONDS_PER_MIB", 0.0)
    monkeypatch.setattr(connections, "_REPLY_LOOK_SECONDS", 0.02)


async def test_callers_that_do_not_read_a_reply_lose_their_connection(
    impatient: None, monkeypatch: pytest.MonkeyPatch, start_server: StartServer
) -> None:
    close, all_held = connections.close_connections, asyncio.Event()
    # The server closes no connection before all three replies are ready. Otherwise, on a slow machine, the connection
    # could close while the last reply is not ready.
    monkeypatch.setattr(connections, "close_connections", lambda peers: close(peers) if all_held.is_set() else None)
    server = await start_server(FakeEngine(500_000))  # hidden states of 2 MB for each token
    data = pb.EncodeRequest(inputs=[make_input([1] * 5)]).SerializeToString()
    other = stream_of(server)
    await other.write(stream_request("a", [1]))
    await other.read()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.app.grpc_port}", options=OWN) as channel:
        # In a unary call, the client's gRPC reads the reply at once. In a stream, the reply stays unread. So the test
        # declares a stream.
        rpc: Any = channel.unary_stream(f"/{SERVICE}/Encode")
        calls = [rpc(data) for _ in range(3)]
        await until(lambda: server.handled("OK") == 3)
        held = 3 * 2 * 10_000_000 + 4.5 * MIB  # three replies of 10 MB, gRPC's copy of each reply, and the open stream
        assert server.held_bytes() == pytest.approx(held, rel=0.01)
        assert server.in_flight() == 4  # the three calls and the stream
        all_held.set()
        await until(lambda: server.held_bytes() == 4.5 * MIB)  # the budget reserves 4.5 MiB for an open stream
        for call in calls:
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
    await other.write(stream_request("b", [1]))
    assert pb.EncodeStreamResponse.FromString(await other.read()).request_id == "b"
    other.cancel()
    await all_given_back(server)


async def test_callers_that_do_not_read_a_stream_lose_their_connection(
    impatient: None, start_server: StartServer
) -> None:
    server = await start_server(FakeEngine(500_000))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.app.grpc_port}", options=OWN) as channel:
        rpc: Any = channel.stream_stream(f"/{SERVICE}/EncodeStream")
        call = rpc()
        for i in range(10):
            await call.write(stream_request(str(i), [1] * 5))
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
    await all_given_back(server)
    await until(lambda: server.handled("DeadlineExceeded", "EncodeStream") == 1)
    await server.encode([1])


async def test_the_timeout_of_a_reply_grows_by_a_second_per_mib() -> None:
    assert connections.seconds_to_read(0) == 30
    assert connections.seconds_to_read(64 * MIB) == 94


async def test_the_search_for_a_connection_leaves_no_descriptor() -> None:
    """After the search, no new descriptor is open. Descriptors of earlier tests may have been closed meanwhile."""
    before = set(connections._FDS.iterdir())
    for _ in range(5):
        connections.close_connections({"ipv4:127.0.0.1:1", "ipv6:%5B::1%5D:1", "unix:/a/socket", "ipv4:none:x", ""})
    assert set(connections._FDS.iterdir()) <= before


async def test_connections_of_every_address_family_are_closed() -> None:
    ends: list[asyncio.StreamWriter] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer)

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        readers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await until(lambda: len(ends) == 3)
        peers = [it.get_extra_info("peername")[1] for it in ends]
        # If a server listens on ::, gRPC reports an IPv4 caller in the form ipv6:[::ffff:ADDRESS]:PORT.
        connections.close_connections({f"ipv4:127.0.0.1:{peers[0]}", f"ipv6:%5B::ffff:127.0.0.1%5D:{peers[2]}"})
        ends[1].write(b"open")
        assert [await reader.read(4) for reader, _ in readers] == [b"", b"open", b""]
    finally:
        for writer in (*ends, *(it for _, it in readers)):
            writer.close()
        listening.close()


# Streams


async def test_the_errors_of_a_streams_requests_are_counted(server: FakeServer) -> None:
    call = stream_of(server)
    for i, ids in enumerate([[1], [10**6], [2], [-1]]):
        await call.write(stream_request(str(i), ids))
    await call.write(pb.EncodeStreamRequest(request_id="5", request=pb.EncodeRequest(model="no")).SerializeToString())
    await read_all(call)
    await until(lambda: server.handled("OK", "EncodeStream") == 1)  # the stream; its good requests are not counted
    assert server.handled("InvalidArgument", "EncodeStream") == 2
    assert server.handled("NotFound", "EncodeStream") == 1
    assert server.rpc_sample("started_total", "EncodeStream") == 1
    assert server.sample("encserve_refused_total", reason="INVALID_FIELD") == 2
    assert server.rpc_sample("handling_seconds_count", "EncodeStream") == 1


async def test_the_errors_of_an_open_inference_stream_are_counted(server: FakeServer) -> None:
    call = stream_of(server, INFER_SERVICE, "ModelStreamInfer")
    await call.write(infer_request(text=text_tensor("hello")).SerializeToString())
    await call.write(infer_request().SerializeToString())
    await read_all(call)
    await until(lambda: server.handled("OK", "ModelStreamInfer") == 1)
    assert server.handled("InvalidArgument", "ModelStreamInfer") == 1


async def test_a_huge_request_id_is_refused_and_shortened(server: FakeServer) -> None:
    huge = "i" * (4 * 10**6)
    call = stream_of(server)
    await call.write(stream_request(huge, [1]))
    answer = pb.EncodeStreamResponse.FromString(await call.read())
    assert answer.request_id == huge[:128]
    assert answer.error.message.startswith("request_id: ")
    assert len(answer.SerializeToString()) < 1000
    call.cancel()
    call = stream_of(server, INFER_SERVICE, "ModelStreamInfer")
    request = infer_request(text=text_tensor("hello"))
    request.id = huge
    await call.write(request.SerializeToString())
    infer_answer = infer_pb.ModelStreamInferResponse.FromString(await call.read())
    assert infer_answer.infer_response.id == huge[:128]
    assert infer_answer.error_message.startswith("id: ")
    call.cancel()
    await all_given_back(server)


async def test_an_idle_stream_stores_no_message(server: FakeServer) -> None:
    """The server keeps no request of an idle stream in memory, because thousands of streams may be idle."""
    call = stream_of(server)
    await call.write(stream_request("a", [1]))
    await call.read()
    # The budget reserves 4.5 MiB for an open stream.
    await until(lambda: server.in_flight() == 1 and server.held_bytes() == 4.5 * MIB)
    await asyncio.sleep(0.05)
    assert kept_messages() == []
    call.cancel()


def kept_messages() -> list[str]:
    """Return the names of all local variables of the server's suspended coroutines that hold bytes or tuples."""
    return [
        f"{it.__qualname__}: {name}"
        for it in gc.get_objects()
        if type(it) is types.CoroutineType and it.cr_frame and "encserve_server" in it.cr_code.co_filename
        for name, value in it.cr_frame.f_locals.items()
        if isinstance(value, bytes | tuple) and value
    ]


class Unsent:
    """A fake call whose reply is not written yet."""

    def __init__(self) -> None:
        self.is_released = False

    def release(self) -> None:
        self.is_released = True


@pytest.mark.parametrize("cancels", [1, 2])
async def test_unwritten_replies_of_a_cancelled_stream_are_released(cancels: int) -> None:
    """gRPC may cancel the task of a stream twice. Even then, the server must release all unwritten replies."""
    unsent: list[Unsent] = []
    requests = asyncio.Queue[bytes]()
    never = asyncio.Event()
    for _ in range(3):
        requests.put_nowait(b"request")

    async def answer(_: bytes) -> Any:
        unsent.append(Unsent())
        if len(unsent) == 3:
            with contextlib.suppress(asyncio.CancelledError):
                await never.wait()  # this reply is ready only after the cancellation
        return b"answer", unsent[-1]

    async def write(_: bytes) -> None:
        await never.wait()

    stream = asyncio.create_task(answer_stream(requests.get, answer, write, max_in_flight=8, draining=asyncio.Event()))
    await until(lambda: len(unsent) == 3)
    for _ in range(cancels):
        stream.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await stream
    await until(lambda: all(it.is_released for it in unsent))


# Counts are checked before the contents of a request are copied


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of a function each time the function copies contents of a request."""
    seen: list[str] = []

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            seen.append(name)
            return real(*args, **more)

        return call

    for module, name in (
        (codec, "decode_input"),
        (codec, "_decode_output"),
        (codec, "_decode_ranges"),
        (inspect_codec, "decode_input"),
        (infer_service, "decode_call"),
        (TextTokenizer, "tokenize"),
    ):
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return seen


POOLED = pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN)
MANY_SPANS = pb.Spans(starts=[0] * 16_385, ends=[1] * 16_385)
TOO_MUCH: dict[str, tuple[pb.EncodeRequest, str]] = {
    "inputs": (pb.EncodeRequest(inputs=[make_input([1])] * 2049), "TOO_MANY_INPUTS"),
    "no inputs": (pb.EncodeRequest(), "INVALID_FIELD"),
    "outputs": (
        pb.EncodeRequest(inputs=[make_input([1])], options=pb.EncodeOptions(outputs=[POOLED] * 17)),
        "TOO_MANY_OUTPUTS",
    ),
    "spans": (
        pb.EncodeRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=[1]), spans=MANY_SPANS)]),
        "INVALID_FIELD",
    ),
    "ends of spans": (
        pb.EncodeRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=[1]), spans=pb.Spans(starts=[0]))]),
        "INVALID_FIELD",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
@pytest.mark.parametrize("in_stream", [False, True])
async def test_a_request_refused_by_its_counts_is_not_copied(
    shared: FakeServer, copied: list[str], name: str, in_stream: bool
) -> None:
    request, reason = TOO_MUCH[name]
    if in_stream:
        call = stream_of(shared)
        await call.write(pb.EncodeStreamRequest(request_id="a", request=request).SerializeToString())
        assert pb.EncodeStreamResponse.FromString(await call.read()).error.reason == reason
        call.cancel()
    else:
        assert (await refusal(shared.call("Encode", request))).reason == reason
    assert copied == []
    await shared.encode([1])
    assert copied == ["decode_input"]


async def test_too_many_texts_are_not_tokenized(shared: FakeServer, copied: list[str]) -> None:
    failed = await refusal(shared.call("Tokenize", pb.TokenizeRequest(texts=["hello"] * 2049)))
    assert (failed.reason, copied) == ("TOO_MANY_INPUTS", [])


def ids_tensor(shape: tuple[int, int]) -> Any:
    tensor = infer_pb.ModelInferRequest.InferInputTensor(name="input_ids", datatype="INT64", shape=shape)
    tensor.contents.int64_contents.extend([1] * (shape[0] * shape[1]))
    return tensor


@pytest.mark.parametrize("what", ["inputs", "texts", "outputs", "dimensions"])
async def test_an_open_inference_request_refused_by_its_counts_is_not_copied(
    shared: FakeServer, copied: list[str], what: str
) -> None:
    request = infer_pb.ModelInferRequest(model_name="tiny")
    tensor = ids_tensor((2049, 1) if what == "inputs" else (1, 1))
    if what == "texts":
        tensor = infer_pb.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[2049])
        tensor.contents.bytes_contents.extend([b"hello"] * 2049)
    elif what == "dimensions":
        tensor.shape.extend([1] * 100_000)
    request.inputs.append(tensor)
    if what == "outputs":
        request.outputs.extend([infer_pb.ModelInferRequest.InferRequestedOutputTensor(name="embedding")] * 17)
    reasons = {"outputs": "TOO_MANY_OUTPUTS", "dimensions": "INVALID_FIELD"}
    failed = await refusal(shared.call("ModelInfer", request, INFER_SERVICE))
    assert failed.reason == reasons.get(what, "TOO_MANY_INPUTS")
    assert copied == []


# Stops and faults


@pytest.mark.parametrize("method", ["Encode", "Inspect", "ModelInfer"])
async def test_a_stop_answers_running_calls(start_server: StartServer, method: str) -> None:
    server = await start_server(open_inference=True, grace_seconds=60)
    server.engine.hold()
    server.inspector.hold()
    if method == "Encode":
        answer: Any = asyncio.create_task(server.encode([1]))
    elif method == "Inspect":
        answer = asyncio.create_task(server.inspect(pb.InspectRequest(input=make_input([1]))))
    else:
        answer = asyncio.create_task(server.call("ModelInfer", infer_request(text=text_tensor("hello")), INFER_SERVICE))
    started = server.inspector.started if method == "Inspect" else server.engine.started
    await asyncio.to_thread(started.acquire)
    assert server.in_flight() == 1
    stopping = asyncio.create_task(server.app.stop())
    await until(server.app._calls.draining.is_set)
    assert not stopping.done()
    server.engine.let_go()
    server.inspector.let_go()
    assert await stopping
    assert await answer
    assert (server.held_bytes(), server.in_flight()) == (0, 0)
    assert server.engine.closed
    assert server.inspector.closed == (method == "Inspect")  # the inspection graph is loaded at the first inspection


async def test_a_stop_refuses_new_calls(start_server: StartServer) -> None:
    server = await start_server(grace_seconds=60)
    running = await server.start_held(server.encode([1]))
    server.app._calls.drain()
    for call in (
        server.encode([1]),
        server.call("Tokenize", pb.TokenizeRequest(texts=["hello"])),
        server.call("GetModel", b""),
        server.inspect(pb.InspectRequest(input=make_input([1]))),
        server.call("ModelInfer", infer_request(text=text_tensor("hello")), INFER_SERVICE),
        stream_of(server).read(),
    ):
        failed = await refusal(call)
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    live = infer_pb.ServerLiveResponse.FromString(await server.call("ServerLive", b"", INFER_SERVICE))
    assert live.live
    await server.call("Check", b"", "grpc.health.v1.Health")
    server.engine.let_go()
    await running
    await all_given_back(server)


@pytest.mark.parametrize("raised", [Panic("the Rust code panicked"), MemoryError("none"), BundleError("a path")])
@pytest.mark.parametrize("where", ["decode", "build", "build in a thread"])
async def test_every_exception_becomes_an_internal_error(
    shared: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    raised: BaseException,
    where: str,
) -> None:
    """The caller gets a fixed text and an id. The log has the error with the same id."""
    if where == "build in a thread":
        monkeypatch.setattr("encserve_server.calls.call._INLINE_REPLY_BYTES", 0)

    def fail(*_: Any, **__: Any) -> Any:
        raise raised

    before = shared.handled("Internal")
    with monkeypatch.context() as broken:
        broken.setattr(codec, "decode_call" if where == "decode" else "encode_reply", fail)
        failed = await refusal(shared.encode([1]))
        assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert str(raised) not in failed.text
        (record,) = [it for it in caplog.records if getattr(it, "error_id", "") == failed.text.split()[-1]]
        assert record.exc_info
        call = stream_of(shared)
        await call.write(stream_request("a", [1]))
        assert pb.EncodeStreamResponse.FromString(await call.read()).error.reason == "INTERNAL"
    await call.write(stream_request("b", [1]))
    assert not pb.EncodeStreamResponse.FromString(await call.read()).HasField("error")
    call.cancel()
    assert shared.handled("Internal") == before + 1
    await all_given_back(shared)


async def test_a_panic_outside_the_requests_of_a_stream_ends_it(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise Panic

    monkeypatch.setattr("encserve_server.protocols.encserve.service.parse", fail)
    call = stream_of(server)
    await call.write(stream_request("a", [1]))
    assert (await refusal(call.read())).reason == "INTERNAL"
    assert server.handled("Internal", "EncodeStream") == 1
    await all_given_back(server)


@pytest.mark.parametrize("names", [naming.ENCODE, naming.TOKENIZE, naming.INSPECT, infer_requests.NAMING])
def test_every_field_of_a_request_has_a_name_in_every_protocol(names: Any) -> None:
    for field in RequestField:
        for at, place in ((None, None), (3, None), (3, 17)):
            error = InvalidField(FieldPath(field, at, place), "wrong")
            assert error.field_name(names)
            assert "{" not in error.text(names)
            assert error.text(PLAIN)
