"""Tests of Inspect on a gRPC server with a fake inspector: replies, refusals, and the queue of inspections."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fake_engine as fake
import grpc
import numpy as np
import pytest
from fake_engine import FakeInspector, fake_numbers
from fake_server import D_MODEL, LONGEST, N_HEADS, N_LAYERS, SERVICE, Failed, FakeServer, StartServer, make_input
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import BundleError, EngineUnhealthy
from encserve_server.protocols.encserve import service
from encserve_server.transport.grpc import connections
from encserve_server.types.inspections import InspectKind

ATTENTION = pb.INSPECT_KIND_ATTENTION_WEIGHTS
STATES = pb.INSPECT_KIND_HIDDEN_STATES
POSITIONS = pb.INSPECT_KIND_POSITIONS
METHOD = {"grpc_type": "server_stream", "grpc_service": SERVICE, "grpc_method": "Inspect"}


def spec(kind: Any, *layers: int) -> pb.InspectSpec:
    return pb.InspectSpec(kind=kind, layers=layers)


def request(it: Any, *specs: pb.InspectSpec, **fields: Any) -> pb.InspectRequest:
    return pb.InspectRequest(input=make_input(it), tensors=specs, **fields)


def tensors_of(parts: list[pb.InspectResponse]) -> list[Any]:
    """Join the chunks of a reply as its header describes, and return the arrays."""
    header, chunks = parts[0].header, [part.chunk for part in parts[1:]]
    assert all(part.WhichOneof("part") == "chunk" for part in parts[1:])
    assert [chunk.tensor for chunk in chunks] == sorted(chunk.tensor for chunk in chunks)
    assert all(0 < len(chunk.data) <= 2**20 for chunk in chunks)
    arrays = []
    for i, tensor in enumerate(header.tensors):
        data = b"".join(chunk.data for chunk in chunks if chunk.tensor == i)
        dtype = "<f4" if tensor.data_type == pb.DATA_TYPE_FLOAT32 else "<f2"
        arrays.append(np.frombuffer(data, dtype).reshape(tuple(tensor.shape)))
    return arrays


def layers(kind: InspectKind, numbers: range | list[int], *shape: int) -> Any:
    """Return the numbers that the fake inspector computes for this kind and these layers, stacked into one array."""
    return np.stack([fake_numbers(kind, layer, shape) for layer in numbers])


def inspections(server: FakeServer) -> float:
    """Return the number of running and waiting inspections."""
    return server.sample("encserve_inspections", model="tiny", version="2")


async def hold(server: FakeServer) -> "asyncio.Task[list[pb.InspectResponse]]":
    """Start an inspection of one token. The inspection runs until the test calls `inspector.let_go`."""
    server.inspector.hold()
    running = asyncio.create_task(server.inspect(request([1])))
    await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
    return running


async def queue_behind(server: FakeServer, length: int) -> "asyncio.Task[list[pb.InspectResponse]]":
    """Send an inspection of `length` tokens, and wait until the server has two inspections."""
    waiting = asyncio.create_task(server.inspect(request([1] * length)))
    await until(lambda: inspections(server) == 2)
    return waiting


async def get_model(server: FakeServer) -> pb.ModelInfo:
    return pb.GetModelResponse.FromString(await server.call("GetModel", pb.GetModelRequest())).model


# Replies


async def test_the_default_is_all_attention_weights_and_hidden_states(server: FakeServer) -> None:
    parts = await server.inspect(request("hello world"))
    header = parts[0].header
    assert (header.model, header.model_version, header.fingerprint) == ("tiny", "2", "f" * 32)
    assert list(header.sequence.tokens) == ["[CLS]", "hello", "world", "[SEP]"]
    assert list(header.sequence.token_ids) == [1, 4, 7, 2]
    kinds = [(tensor.kind, list(tensor.layers)) for tensor in header.tensors]
    assert kinds == [(ATTENTION, [0, 1, 2]), (STATES, [0, 1, 2, 3])]
    attention, states = tensors_of(parts)
    np.testing.assert_array_equal(attention, layers(InspectKind.ATTENTION_WEIGHTS, range(N_LAYERS), N_HEADS, 4, 4))
    np.testing.assert_array_equal(states, layers(InspectKind.HIDDEN_STATES, range(N_LAYERS + 1), 4, D_MODEL))
    assert header.timings.compute_seconds > 0
    assert server.sample("grpc_server_started_total", **METHOD) == 1
    await until(lambda: server.sample("grpc_server_handled_total", **METHOD, grpc_code="OK") == 1)
    assert server.sample("encserve_stage_seconds_count", model="tiny", version="2", stage="inspect") == 1
    info = await get_model(server)
    assert (info.can_inspect, info.max_inspect_tokens, info.position) == (True, LONGEST, "sinusoidal")
    assert {part.part: part.count for part in info.parameters} == {"attention": 12, "norm": 3}
    assert info.input_kind == pb.INPUT_KIND_TOKEN_IDS


async def test_kinds_and_layers_can_be_chosen(shared: FakeServer) -> None:
    parts = await shared.inspect(request([5, 6], spec(POSITIONS), spec(STATES, 0, 3), data_type=pb.DATA_TYPE_FLOAT16))
    positions, states = tensors_of(parts)
    kinds = [(tensor.kind, list(tensor.layers)) for tensor in parts[0].header.tensors]
    assert kinds == [(POSITIONS, []), (STATES, [0, 3])]
    assert (positions.shape, positions.dtype) == ((LONGEST, D_MODEL), np.float16)
    np.testing.assert_array_equal(states, layers(InspectKind.HIDDEN_STATES, [0, 3], 2, D_MODEL).astype(np.float16))
    info = parts[0].header.sequence
    assert (list(info.token_ids), list(info.tokens)) == ([5, 6], ["brave", "new"])


async def test_vectors_have_no_ids_and_no_tokens(start_server: StartServer) -> None:
    server = await start_server(takes_vectors=True)
    parts = await server.inspect(request(np.ones((3, D_MODEL), np.float32)))
    info = parts[0].header.sequence
    assert (info.token_count, list(info.token_ids), list(info.tokens)) == (3, [], [])
    assert tensors_of(parts)[0].shape == (N_LAYERS, N_HEADS, 3, 3)


async def test_large_tensors_come_in_chunks(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.protocols.encserve.inspect_codec._CHUNK_BYTES", 100)
    parts = await server.inspect(request([1] * 20))
    # A chunk has 100 bytes. The attention weights of a layer have 20 x 20 x 2 heads x 4 bytes, so they need 32 chunks.
    # The hidden states of a layer have 20 x 4 x 4 bytes, so they need 4 chunks.
    assert len(parts) == 1 + N_LAYERS * 32 + (N_LAYERS + 1) * 4
    want = layers(InspectKind.ATTENTION_WEIGHTS, range(N_LAYERS), N_HEADS, 20, 20)
    np.testing.assert_array_equal(tensors_of(parts)[0], want)


async def test_inspect_adds_the_same_prompt_as_encode(start_server: StartServer) -> None:
    server = await start_server(prompts={"query": "world ", "passage": "hello hello "})

    async def tokens(**how: Any) -> list[str]:
        inspected = (await server.inspect(request("hello", **how)))[0].header.sequence
        encoded = await server.encode("hello", options=pb.EncodeOptions(include_token_strings=True, **how))
        assert list(inspected.tokens) == list(encoded.sequences[0].tokens)
        return list(inspected.tokens)[1:-1]

    assert await tokens() == ["world", "hello"]
    assert await tokens(prompt_name="passage") == ["hello", "hello", "hello"]
    assert await tokens(prompt_name="") == ["hello"]
    assert (await server.inspect(request([4])))[0].header.sequence.token_count == 1, "ids get no default prompt"
    for it, name in (("hello", "title"), ([4], "query")):
        with pytest.raises(Failed) as caught:
            await server.inspect(request(it, prompt_name=name))
        (violation,) = caught.value.details["google.rpc.BadRequest"].field_violations
        assert violation.field == "prompt_name"


# Refusals

BAD_REQUESTS = [
    (pb.InspectRequest(), "input", "token_ids, text or embeddings"),
    (request([]), "input.token_ids", "was empty"),
    (request([1, 1000]), "input.token_ids.ids[1]", "from 0 to 999 .*; was 1000"),
    (request([1] * 21), "input.token_ids", "20 tokens .max_inspect_tokens of tiny.; was 21"),
    (request("hello " * 19), "input.text", "20 tokens .*; was 21"),
    (request([1], spec(0)), "tensors[0].kind", "InspectKind, 1 to 3; was 0"),
    (request([1], spec(1), spec(9)), "tensors[1].kind", "1 to 3; was 9"),
    (request([1], spec(2), spec(1), spec(2, 0)), "tensors[2]", "same kind as tensors.0."),
    (request([1], spec(1, 0, 3)), "tensors[0].layers[1]", "from 0 to 2; was 3"),
    (request([1], spec(2, 4)), "tensors[0].layers[0]", "from 0 to 3; was 4"),
    (request([1], spec(1, 1, 1)), "tensors[0].layers[1]", "the layer before; was 1"),
    (request([1], spec(3, 0)), "tensors[0].layers", "must be empty for positions"),
    (request([1], data_type=7), "data_type", "DataType, 0 to 4; was 7"),
    (request([1], data_type="DATA_TYPE_BINARY"), "data_type", "DATA_TYPE_BINARY is only for outputs of Encode"),
    (request([1], data_type="DATA_TYPE_INT8"), "data_type", "DATA_TYPE_INT8 is only for outputs of Encode"),
    (request([1], truncation=7), "truncation", "Truncation, 0 to 2; was 7"),
    (request(np.ones((2, 4), np.float32)), "input.embeddings", "takes token ids or text"),
]  # fmt: skip


async def test_a_bad_request_is_refused_by_field_and_never_runs(start_server: StartServer) -> None:
    server = await start_server(max_inspect_tokens=20)
    for bad, field, problem in BAD_REQUESTS:
        with pytest.raises(Failed, match=problem) as caught:
            await server.inspect(bad)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = caught.value.details["google.rpc.BadRequest"].field_violations
        assert violation.field == field
    with pytest.raises(Failed) as caught:
        await server.inspect(b"\xff\xff")
    assert caught.value.reason == "MALFORMED_REQUEST"
    assert server.inspector.lengths == []
    for it, count in (([1] * 30, 30), ("hello " * 30, 32)):
        info = (await server.inspect(request(it, truncation=pb.TRUNCATION_END)))[0].header.sequence
        assert (info.token_count, info.truncated, info.original_token_count) == (20, True, count)
    assert server.inspector.lengths == [20, 20]


@pytest.mark.parametrize("settings", [{"can_inspect": False}, {"inspect": False}])
async def test_a_model_without_inspection_refuses_first(start_server: StartServer, settings: dict[str, Any]) -> None:
    """The server refuses first, because all further checks need the layers of the model, which may be unknown."""
    server = await start_server(**settings)
    with pytest.raises(Failed) as caught:
        await server.inspect(request([1], spec(ATTENTION, 99)))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "INSPECT_UNAVAILABLE")
    info = await get_model(server)
    assert (info.can_inspect, info.max_inspect_tokens) == (False, 0)


async def test_a_model_without_positions_refuses_them(start_server: StartServer) -> None:
    server = await start_server(position="none")
    with pytest.raises(Failed, match=r"tensors\[0\].kind: "):
        await server.inspect(request([1], spec(POSITIONS)))


# The queue of inspections


async def test_encoding_does_not_wait_for_an_inspection(server: FakeServer) -> None:
    running = await hold(server)
    for _ in range(10):
        await server.encode([1, 2, 3])
    assert not running.done()
    server.inspector.let_go()
    await running


async def test_chunks_do_not_wait_behind_large_replies(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inspect must not need the threads that build large replies of Encode. These threads may be busy."""
    submit, pools = ThreadPoolExecutor.submit, set()

    def note_pool(pool: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Any:
        pools.add(pool)
        return submit(pool, *args, **kwargs)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", note_pool)
    await server.encode(*[[1] * LONGEST] * 256)
    for_encode = set(pools)
    assert for_encode
    pools.clear()
    await server.inspect(request([1]))
    assert not for_encode & pools


async def test_a_full_queue_refuses_an_inspection(start_server: StartServer) -> None:
    server = await start_server(max_inspections=2)
    admitted = [await hold(server), await queue_behind(server, 1)]
    with pytest.raises(Failed, match="2 of at most 2 inspections") as caught:
        await server.inspect(request([1]))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    server.inspector.let_go()
    await asyncio.gather(*admitted)
    assert inspections(server) == 0
    await server.inspect(request([1]))


async def test_cancelled_inspections_leave_the_queue_unless_they_run(start_server: StartServer) -> None:
    server = await start_server(max_inspections=2)
    running = await hold(server)
    running.cancel()
    for _ in range(5):
        (await queue_behind(server, 2)).cancel()
        await until(lambda: inspections(server) == 1)  # the running inspection cannot be interrupted
    server.inspector.let_go()
    await server.inspect(request([1, 2, 3]))
    assert server.inspector.lengths == [1, 3]
    assert inspections(server) == 0


async def test_a_deadline_ends_the_wait(server: FakeServer) -> None:
    running = await hold(server)
    with pytest.raises(Failed) as caught:
        await server.inspect(request([1, 2]), timeout=0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: inspections(server) == 1)  # the caller's timeout may end before the server's timeout
    server.inspector.let_go()
    await running
    assert server.inspector.lengths == [1]


# Failures


@pytest.mark.parametrize(
    ("specs", "tensor"), [([], "attention weights of layer 1"), ([spec(STATES, 1, 3)], "hidden states of layer 1")]
)
async def test_numbers_that_are_not_finite_are_an_error(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, specs: list[pb.InspectSpec], tensor: str
) -> None:
    def numbers(kind: InspectKind, layer: int, shape: tuple[int, ...]) -> Any:
        return np.full(shape, np.nan if layer >= 1 else 0, np.float32)

    monkeypatch.setattr(fake, "fake_numbers", numbers)
    with pytest.raises(Failed, match=f"input: .*{tensor}") as caught:
        await server.inspect(request([1], *specs))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INTERNAL, "INFERENCE_FAILED")
    await server.inspect(request([1], spec(STATES, 0)))


async def test_a_failed_run_hides_its_error_and_the_next_one_works(server: FakeServer) -> None:
    server.inspector.broken = True
    with pytest.raises(Failed, match=r"id \w{16}") as caught:
        await server.inspect(request([1]))
    assert caught.value.code is grpc.StatusCode.INTERNAL
    assert "device" not in caught.value.text
    server.inspector.broken = False
    await server.inspect(request([1]))


async def test_a_graph_that_cannot_be_loaded_is_tried_again(start_server: StartServer) -> None:
    """If the graph cannot be loaded, the next call tries again. The error has no file path."""
    found: list[FakeInspector] = []

    def load() -> FakeInspector:
        if not found:
            raise BundleError("/secret/models/m/1/inspect.onnx: its sha256 is another")
        return found[0]

    server = await start_server(load_inspector=load)
    with pytest.raises(Failed) as caught:
        await server.inspect(request([1]))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "INSPECT_UNAVAILABLE")
    assert "secret" not in caught.value.text
    found.append(server.inspector)
    assert len(await server.inspect(request([1]))) > 1


# Slow readers of large replies


def open_call(channel: grpc.aio.Channel, *specs: pb.InspectSpec) -> Any:
    rpc: Any = channel.unary_stream(f"/{SERVICE}/Inspect")
    return rpc(request([1] * LONGEST, *specs).SerializeToString())


async def end_of(call: Any) -> grpc.aio.AioRpcError:
    """Read a reply that must end with an error, and return the error."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the reply was complete")


@pytest.mark.system  # takes more than a second
async def test_a_caller_that_reads_nothing_loses_its_connection(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few callers that read nothing could block all inspections, and fill the memory with unread replies."""
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.2)
    server.inspector.n_heads = 4000
    call = open_call(server.channel, spec(ATTENTION))
    assert await call.read() is not grpc.aio.EOF
    await until(lambda: not inspections(server))
    assert (await end_of(call)).code() is grpc.StatusCode.UNAVAILABLE
    await until(lambda: server.sample("grpc_server_handled_total", **METHOD, grpc_code="DeadlineExceeded") == 1)
    assert server.sample("encserve_refused_total", reason="DEADLINE_EXPIRED") == 1
    options = [
        ("grpc.http2.lookahead_bytes", 5),
        ("grpc.http2.bdp_probe", 0),
    ]  # with these options, the client's gRPC reads nothing, not even the header
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.app.grpc_port}", options=options) as channel:
        call = open_call(channel, spec(STATES, 0))
        await until(lambda: len(server.inspector.lengths) == 2)
        await until(lambda: not inspections(server))
        call.cancel()


async def test_a_caller_that_reads_too_slowly_is_ended(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends the call of a slow reader, because the call would block the queue of inspections."""
    monkeypatch.setattr(service, "_ANSWER_SECONDS", 0.3)
    server.inspector.n_heads = 4000
    call = open_call(server.channel, spec(ATTENTION))
    while inspections(server) or not server.inspector.lengths:
        await asyncio.wait_for(call.read(), 60)
        await asyncio.sleep(0.05)
    error = await end_of(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not read the reply within" in (error.details() or "")


async def test_a_caller_that_disconnects_during_a_write_is_not_a_server_error(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.inspector.n_heads = 4000
    for _ in range(3):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.app.grpc_port}")
        assert await open_call(channel, spec(ATTENTION)).read() is not grpc.aio.EOF
        await asyncio.sleep(0.05)  # after this pause, the server waits until the caller reads
        await channel.close()
    await until(lambda: not inspections(server))
    await until(lambda: server.sample("grpc_server_handled_total", **METHOD, grpc_code="Canceled") == 3)
    assert server.sample("grpc_server_handled_total", **METHOD, grpc_code="Internal") == 0
    assert server.sample("encserve_refused_total", reason="INTERNAL") == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# Unloading and stopping


async def test_unloading_ends_waiting_inspections_but_not_the_running_one(server: FakeServer) -> None:
    lane = server.app.catalog.resolve("", "").check_inspectable()
    ran: list[int] = []

    async def inspect(length: int) -> None:
        with lane.place() as place:
            inspection = await lane.run(place, np.zeros(length, np.int64), [(InspectKind.HIDDEN_STATES, (0,))])
            ran.append(len(inspection.tensors[0].parts[0]))

    await inspect(1)
    await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
    server.inspector.hold()
    running = asyncio.create_task(inspect(2))
    await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
    waiting = [asyncio.create_task(inspect(3)) for _ in range(3)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(lane.close())
    for call in (*waiting, inspect(4)):
        with pytest.raises(EngineUnhealthy):
            await asyncio.wait_for(call, 60)
    assert not running.done()
    server.inspector.let_go()
    await asyncio.gather(running, closing, lane.close())
    assert server.inspector.closed
    assert ran == server.inspector.lengths == [1, 2]
    assert inspections(server) == 0
