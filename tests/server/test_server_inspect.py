"""Inspect on a real gRPC server with a fake inspector: what callers get, and that encoding never waits for it."""

import asyncio
import threading
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
from encserve_server.rpc import sending, service
from encserve_server.types.inspections import InspectKind

ATTENTION, STATES, POSITIONS = (
    pb.INSPECT_KIND_ATTENTION_WEIGHTS,
    pb.INSPECT_KIND_HIDDEN_STATES,
    pb.INSPECT_KIND_POSITIONS,
)


def request(it: Any, *specs: pb.InspectSpec, **fields: Any) -> pb.InspectRequest:
    return pb.InspectRequest(input=make_input(it), tensors=specs, **fields)


def tensors_of(parts: list[pb.InspectResponse]) -> list[Any]:
    """The arrays of an answer, put together as its header says."""
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
    """What the fake inspector gives for layers of a kind."""
    return np.stack([fake_numbers(kind, layer, shape) for layer in numbers])


async def test_everything_inside_by_default(server: FakeServer) -> None:
    parts = await server.inspect(request("hello world"))
    header = parts[0].header
    assert (header.model, header.model_version, header.fingerprint) == ("tiny", "2", "f" * 32)
    assert list(header.sequence.tokens) == ["[CLS]", "hello", "world", "[SEP]"]
    assert list(header.sequence.token_ids) == [1, 4, 7, 2]
    assert [tensor.kind for tensor in header.tensors] == [ATTENTION, STATES]
    assert [list(tensor.layers) for tensor in header.tensors] == [[0, 1, 2], [0, 1, 2, 3]]
    attention, states = tensors_of(parts)
    np.testing.assert_array_equal(attention, layers(InspectKind.ATTENTION_WEIGHTS, range(N_LAYERS), N_HEADS, 4, 4))
    np.testing.assert_array_equal(states, layers(InspectKind.HIDDEN_STATES, range(N_LAYERS + 1), 4, D_MODEL))
    assert header.timings.compute_seconds > 0


async def test_kinds_and_layers_are_chosen(server: FakeServer) -> None:
    wanted = [pb.InspectSpec(kind=POSITIONS), pb.InspectSpec(kind=STATES, layers=[0, 3])]
    parts = await server.inspect(request([5, 6], *wanted, data_type=pb.DATA_TYPE_FLOAT16))
    positions, states = tensors_of(parts)
    kinds = [(tensor.kind, list(tensor.layers)) for tensor in parts[0].header.tensors]
    assert kinds == [(POSITIONS, []), (STATES, [0, 3])]
    assert positions.shape == (LONGEST, D_MODEL)
    assert positions.dtype == np.float16
    np.testing.assert_array_equal(states, layers(InspectKind.HIDDEN_STATES, [0, 3], 2, D_MODEL).astype(np.float16))
    info = parts[0].header.sequence
    assert (list(info.token_ids), list(info.tokens)) == ([5, 6], ["brave", "new"])


async def test_vectors_have_no_ids_and_no_tokens(start_server: StartServer) -> None:
    server = await start_server(takes_vectors=True)
    parts = await server.inspect(request(np.ones((3, D_MODEL), np.float32)))
    info = parts[0].header.sequence
    assert (info.token_count, list(info.token_ids), list(info.tokens)) == (3, [], [])
    assert tensors_of(parts)[0].shape == (N_LAYERS, N_HEADS, 3, 3)


async def test_large_tensors_come_in_chunks(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.rpc.inspect_codec._CHUNK_BYTES", 100)
    server = await start_server()
    parts = await server.inspect(request([1] * 20))
    # 20 x 20 x 2 heads x 4 bytes a layer: 32 chunks each; 20 x 4 x 4 bytes a state: 3 full ones and a rest.
    assert len(parts) == 1 + N_LAYERS * 32 + (N_LAYERS + 1) * 4
    np.testing.assert_array_equal(
        tensors_of(parts)[0], layers(InspectKind.ATTENTION_WEIGHTS, range(N_LAYERS), N_HEADS, 20, 20)
    )


def spec(kind: Any, *layers: int) -> pb.InspectSpec:
    return pb.InspectSpec(kind=kind, layers=layers)


BAD_REQUESTS = {
    "no input": (pb.InspectRequest(), "input", "must be token_ids, text or embeddings; was none of them"),
    "empty": (request([]), "input.token_ids", "must hold at least 1 id; was empty"),
    "id outside": (request([1, 1000]), "input.token_ids.ids[1]", "must be from 0 to 999 .*; was 1000"),
    "too long": (request([1] * 21), "input.token_ids", "at most 20 tokens .max_inspect_tokens of tiny.; was 21"),
    "text too long": (request("hello " * 19), "input.text", "must be at most 20 tokens .*; was 21"),
    "no kind": (request([1], spec(0)), "tensors[0].kind", "must be a value of InspectKind, 1 to 3; was 0"),
    "unknown kind": (request([1], spec(1), spec(9)), "tensors[1].kind", "1 to 3; was 9"),
    "kind twice": (request([1], spec(2), spec(1), spec(2, 0)), "tensors[2]", "same kind as tensors.0."),
    "attention layer": (request([1], spec(1, 0, 3)), "tensors[0].layers[1]", "must be from 0 to 2; was 3"),
    "state layer": (request([1], spec(2, 4)), "tensors[0].layers[0]", "must be from 0 to 3; was 4"),
    "layer twice": (request([1], spec(1, 1, 1)), "tensors[0].layers[1]", "must be more than the one before, 1; was 1"),
    "layers of positions": (request([1], spec(3, 0)), "tensors[0].layers", "must be empty for positions"),
    "data type": (request([1], data_type=7), "data_type", "must be a value of DataType, 0 to 4; was 7"),
    "truncation": (request([1], truncation=7), "truncation", "must be a value of Truncation, 0 to 2; was 7"),
    "vectors": (request(np.ones((2, 4), np.float32)), "input.embeddings", "takes token ids or text; it was not"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_requests_are_named_and_never_run(start_server: StartServer, name: str) -> None:
    server = await start_server(max_inspect_tokens=20)
    bad, field, problem = BAD_REQUESTS[name]
    with pytest.raises(Failed, match=problem) as caught:
        await server.inspect(bad)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = caught.value.details["google.rpc.BadRequest"].field_violations
    assert violation.field == field
    assert server.inspector.lengths == []
    with pytest.raises(Failed, match=r"encserve.v1.InspectRequest") as caught:
        await server.inspect(b"\xff\xff")
    assert caught.value.reason == "MALFORMED_REQUEST"


@pytest.mark.parametrize("it", [[1] * 30, "hello " * 30], ids=["ids", "text"])
async def test_an_over_long_input_is_cut_where_allowed(start_server: StartServer, it: Any) -> None:
    server = await start_server(max_inspect_tokens=20)
    info = (await server.inspect(request(it, truncation=pb.TRUNCATION_END)))[0].header.sequence
    assert (info.token_count, info.truncated) == (20, True)
    assert info.original_token_count == (30 if isinstance(it, list) else 32)
    assert server.inspector.lengths == [20]


async def test_the_text_has_the_prompt_that_it_would_be_encoded_with(start_server: StartServer) -> None:
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
    for it, problem in (("hello", "has no prompt 'title'; it has 'query', 'passage'"), ([4], "goes before texts only")):
        with pytest.raises(Failed, match=problem) as caught:
            await server.inspect(request(it, prompt_name="title" if it == "hello" else "query"))
        (violation,) = caught.value.details["google.rpc.BadRequest"].field_violations
        assert violation.field == "prompt_name"


async def test_a_model_without_positions_says_so(start_server: StartServer) -> None:
    server = await start_server(position="none")
    with pytest.raises(Failed, match=r"tensors\[0\].kind: model tiny adds nothing for a token's place"):
        await server.inspect(request([1], spec(POSITIONS)))


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"can_inspect": False}, "its bundle holds no graph for it"), ({"inspect": False}, "this server has it off")],
)
async def test_it_can_be_missing_or_off(start_server: StartServer, settings: dict[str, Any], why: str) -> None:
    server = await start_server(**settings)
    # Whatever else is wrong: the layers of such a model may not even be known.
    with pytest.raises(Failed, match=f"model tiny cannot be inspected: {why}") as caught:
        await server.inspect(request([1], spec(ATTENTION, 99)))
    assert (caught.value.code, caught.value.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "INSPECT_UNAVAILABLE",
    )
    info = pb.GetModelResponse.FromString(await server.call("GetModel", pb.GetModelRequest())).model
    assert (info.can_inspect, info.max_inspect_tokens) == (False, 0)


async def test_the_model_tells_what_can_be_seen(server: FakeServer) -> None:
    info = pb.GetModelResponse.FromString(await server.call("GetModel", pb.GetModelRequest())).model
    assert (info.can_inspect, info.max_inspect_tokens, info.position) == (True, LONGEST, "sinusoidal")
    assert {part.part: part.count for part in info.parameters} == {"attention": 12, "norm": 3}
    assert info.input_kind == pb.INPUT_KIND_TOKEN_IDS


async def test_encoding_does_not_wait_for_it(server: FakeServer) -> None:
    server.inspector.hold()
    inspecting = asyncio.create_task(server.inspect(request([1])))
    await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
    for _ in range(10):
        await server.encode([1, 2, 3])
    assert not inspecting.done()
    server.inspector.let_go()
    await inspecting


async def test_its_chunks_do_not_wait_behind_large_replies(server: FakeServer) -> None:
    release = threading.Event()
    building = [server.app._encode_pool.submit(release.wait) for _ in range(8)]
    try:
        assert len(await server.inspect(request([1]), timeout=60)) > 1
    finally:
        release.set()
    assert all(it.result() for it in building)


async def test_its_queue_is_small_and_full_is_said(start_server: StartServer) -> None:
    server = await start_server(max_inspections=2)
    server.inspector.hold()
    admitted = [asyncio.create_task(server.inspect(request([1]))) for _ in range(2)]
    await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
    while server.sample("encserve_inspections", model="tiny", version="2") < 2:
        await asyncio.sleep(0.01)
    with pytest.raises(Failed, match=r"holds 2 of at most 2 inspections and this request has 1; try") as caught:
        await server.inspect(request([1]))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    server.inspector.let_go()
    await asyncio.gather(*admitted)
    assert server.sample("encserve_inspections", model="tiny", version="2") == 0
    await server.inspect(request([1]))


async def test_a_caller_that_goes_while_it_waits_is_forgotten(server: FakeServer) -> None:
    server.inspector.hold()
    running = asyncio.create_task(server.inspect(request([1])))
    await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
    waiting = asyncio.create_task(server.inspect(request([1, 2])))
    while server.sample("encserve_inspections", model="tiny", version="2") < 2:
        await asyncio.sleep(0.01)
    waiting.cancel()
    while server.sample("encserve_inspections", model="tiny", version="2") > 1:
        await asyncio.sleep(0.01)
    server.inspector.let_go()
    await running
    await server.inspect(request([1, 2, 3]))
    assert server.inspector.lengths == [1, 3]


async def test_callers_that_go_leave_nothing_behind_and_a_run_keeps_its_place(start_server: StartServer) -> None:
    server = await start_server(max_inspections=2)
    lane = server.app.catalog.resolve("", "")._inspect_lane
    assert lane is not None
    server.inspector.hold()
    running = asyncio.create_task(server.inspect(request([1])))
    await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
    running.cancel()
    for _ in range(5):
        waiting = asyncio.create_task(server.inspect(request([1, 2])))
        while server.sample("encserve_inspections", model="tiny", version="2") < 2:
            await asyncio.sleep(0.01)
        waiting.cancel()
        while server.sample("encserve_inspections", model="tiny", version="2") > 1:
            await asyncio.sleep(0.01)
    assert server.sample("encserve_inspections", model="tiny", version="2") == 1  # the one that cannot be interrupted
    assert lane._thread._work_queue.qsize() == 0
    server.inspector.let_go()
    await server.inspect(request([1, 2, 3]))
    assert server.inspector.lengths == [1, 3]
    assert server.sample("encserve_inspections", model="tiny", version="2") == 0


async def test_a_deadline_ends_the_wait(server: FakeServer) -> None:
    server.inspector.hold()
    running = asyncio.create_task(server.inspect(request([1])))
    await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
    with pytest.raises(Failed) as caught:
        await server.inspect(request([1, 2]), timeout=0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(60):  # the caller's own clock may be a little ahead of the server's
        while server.sample("encserve_inspections", model="tiny", version="2") > 1:
            await asyncio.sleep(0.01)
    server.inspector.let_go()
    await running
    assert server.inspector.lengths == [1]


@pytest.mark.parametrize(
    ("specs", "what"),
    [([], "attention weights of layer 1"), ([spec(STATES, 1, 3)], "hidden states of layer 1")],
)
async def test_numbers_that_are_not_finite_are_an_error_as_of_encode(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, specs: list[pb.InspectSpec], what: str
) -> None:
    def poisoned(kind: InspectKind, layer: int, shape: tuple[int, ...]) -> Any:
        return np.full(shape, np.nan if layer >= 1 else 0, np.float32)

    monkeypatch.setattr(fake, "fake_numbers", poisoned)
    with pytest.raises(Failed, match=f"input: the model's numbers for it are not finite: {what}") as caught:
        await server.inspect(request([1], *specs))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INTERNAL, "INFERENCE_FAILED")
    await server.inspect(request([1], spec(STATES, 0)))


async def test_a_run_that_fails_gives_an_id_and_the_next_one_is_tried(server: FakeServer) -> None:
    server.inspector.broken = True
    with pytest.raises(Failed, match=r"internal error; the server's log has it under the id \w{16}") as caught:
        await server.inspect(request([1]))
    assert caught.value.code is grpc.StatusCode.INTERNAL
    assert "device" not in caught.value.text
    server.inspector.broken = False
    await server.inspect(request([1]))
    await server.encode([1])


async def test_a_graph_that_cannot_be_loaded_is_tried_again(start_server: StartServer) -> None:
    """What is wrong with it stands in the log; callers are told no paths."""
    found: list[FakeInspector] = []

    def load() -> FakeInspector:
        if not found:
            raise BundleError("/secret/models/m/1/inspect.onnx: its sha256 is another")
        return found[0]

    server = await start_server(load_inspector=load)
    with pytest.raises(Failed, match="its graph for it cannot be loaded any more") as caught:
        await server.inspect(request([1]))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "INSPECT_UNAVAILABLE")
    assert "secret" not in caught.value.text
    found.append(server.inspector)
    assert len(await server.inspect(request([1]))) > 1


async def test_a_caller_that_reads_nothing_is_given_up_on(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a few of them would hold every place, and the memory of their answers, for ever."""
    monkeypatch.setattr(sending, "UNREAD_SECONDS", 0.2)
    server = await start_server()
    monkeypatch.setattr(server.inspector, "_n_heads", 4000)  # 20 MB of attention weights
    rpc: Any = server.channel.unary_stream(f"/{SERVICE}/Inspect")
    call = rpc(request([1] * LONGEST, spec(ATTENTION)).SerializeToString())
    assert await call.read() is not grpc.aio.EOF
    while server.sample("encserve_inspections", model="tiny", version="2"):
        await asyncio.sleep(0.05)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # its connection is closed
    labels = {"grpc_type": "server_stream", "grpc_service": SERVICE, "grpc_method": "Inspect"}
    await until(lambda: server.sample("grpc_server_handled_total", **labels, grpc_code="DeadlineExceeded") == 1)
    assert server.sample("encserve_refused_total", reason="DEADLINE_EXPIRED") == 1


async def test_a_caller_that_does_not_even_read_the_header_is_given_up_on(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "UNREAD_SECONDS", 0.2)
    server = await start_server()
    options = [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.app.grpc_port}", options=options) as channel:
        rpc: Any = channel.unary_stream(f"/{SERVICE}/Inspect")
        call = rpc(request([1] * LONGEST, spec(STATES, 0)).SerializeToString())
        await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
        async with asyncio.timeout(60):
            while server.sample("encserve_inspections", model="tiny", version="2"):
                await asyncio.sleep(0.05)
        call.cancel()


async def test_a_caller_that_goes_while_it_is_written_to_is_no_error_of_ours(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.inspector, "_n_heads", 4000)  # 20 MB of attention weights
    for _ in range(5):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.app.grpc_port}")
        rpc: Any = channel.unary_stream(f"/{SERVICE}/Inspect")
        call = rpc(request([1] * LONGEST, spec(ATTENTION)).SerializeToString())
        assert await call.read() is not grpc.aio.EOF
        await asyncio.sleep(0.05)  # by now a write waits for it
        await channel.close()
    async with asyncio.timeout(60):
        while server.sample("encserve_inspections", model="tiny", version="2"):
            await asyncio.sleep(0.05)
    labels = {"grpc_type": "server_stream", "grpc_service": SERVICE, "grpc_method": "Inspect"}
    assert server.sample("grpc_server_handled_total", **labels, grpc_code="Internal") == 0
    assert server.sample("grpc_server_handled_total", **labels, grpc_code="Canceled") == 5
    assert server.sample("encserve_refused_total", reason="INTERNAL") == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_caller_that_reads_too_slowly_is_given_up_on(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk now and then would keep a place in the lane for as long as it likes."""
    monkeypatch.setattr(service, "_ANSWER_SECONDS", 0.3)
    server = await start_server()
    monkeypatch.setattr(server.inspector, "_n_heads", 4000)  # 20 MB of attention weights
    rpc: Any = server.channel.unary_stream(f"/{SERVICE}/Inspect")
    call = rpc(request([1] * LONGEST, spec(ATTENTION)).SerializeToString())
    while server.sample("encserve_inspections", model="tiny", version="2") or not server.inspector.lengths:
        await asyncio.wait_for(call.read(), 60)
        await asyncio.sleep(0.05)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the answer was not read within" in (caught.value.details() or "")


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_it_is_counted(server: FakeServer) -> None:
    await server.inspect(request([1]))
    labels = {"grpc_type": "server_stream", "grpc_service": SERVICE, "grpc_method": "Inspect"}
    assert server.sample("grpc_server_started_total", **labels) == 1
    assert server.sample("grpc_server_handled_total", **labels, grpc_code="OK") == 1
    stage = {"model": "tiny", "version": "2", "stage": "inspect"}
    assert server.sample("encserve_stage_seconds_count", **stage) == 1


async def test_who_waits_for_a_model_that_is_unloaded_is_told_at_once(server: FakeServer) -> None:
    """The one that runs gets its answer; nothing runs after the session was freed."""
    lane = server.app.catalog.resolve("", "").check_inspectable()
    wanted, ran = [(InspectKind.HIDDEN_STATES, (0,))], []

    async def inspect(length: int) -> None:
        async with lane.inspect(np.zeros(length, np.int64), wanted) as inspection:
            ran.append(len(inspection.tensors[0].parts[0]))

    await inspect(1)
    await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
    server.inspector.hold()
    running = asyncio.create_task(inspect(2))
    await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
    waiting = [asyncio.create_task(inspect(3)) for _ in range(3)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(lane.close())
    for task in waiting:
        with pytest.raises(EngineUnhealthy, match="the model is being unloaded"):
            await asyncio.wait_for(task, 60)
    with pytest.raises(EngineUnhealthy, match="the model is being unloaded"):
        await inspect(4)
    assert not running.done()
    server.inspector.let_go()
    await asyncio.gather(running, closing, lane.close())
    assert server.inspector.closed
    assert ran == server.inspector.lengths == [1, 2]
    assert server.sample("encserve_inspections", model="tiny", version="2") == 0


async def test_stopping_waits_for_a_running_one(start_server: StartServer) -> None:
    server = await start_server()
    server.inspector.hold()
    running = asyncio.create_task(server.inspect(request([1])))
    await asyncio.to_thread(server.inspector.started.acquire, timeout=60)
    stopping = asyncio.create_task(server.app.stop())
    await asyncio.sleep(0.05)
    server.inspector.let_go()
    assert len(await running) > 1
    assert await stopping
    assert server.inspector.closed
