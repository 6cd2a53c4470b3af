"""The Open Inference Protocol v2 on a server with a fake engine: what callers get, for good input and for bad."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from fake_engine import fake_rows
from fake_server import D_MODEL, VOCAB_SIZE, Failed, FakeServer, StartServer
from fuzzing import damaged
from grpc_health.v1 import health_pb2
from open_inference import arrays_of, ask, infer, infer_request, text_tensor
from tiny_bundle import write_bundle
from tiny_heads import loader
from waiting import until

from encserve_proto.v1 import encoder_pb2 as encserve_pb
from encserve_server.rpc.open_inference.service import METHODS, SERVICE_NAME
from encserve_server.rpc.open_inference.triton import grpc_service_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXPECTED = {INVALID, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DEADLINE_EXCEEDED}
INFER = {"grpc_type": "unary", "grpc_service": SERVICE_NAME, "grpc_method": "ModelInfer"}
IDS = np.array([[5, 6, 7], [8, 0, 0]])
MASK = np.array([[1, 1, 1], [1, 0, 0]])
PADDED = np.stack(
    [fake_rows(np.array([5, 6, 7]), D_MODEL), np.pad(fake_rows(np.array([8]), D_MODEL), ((0, 2), (0, 0)))]
)


@pytest.mark.parametrize("raw", [True, False])
async def test_ids_come_back_as_padded_rows(server: FakeServer, raw: bool) -> None:
    got = await infer(server, raw=raw, input_ids=IDS, attention_mask=MASK)
    assert list(got) == ["last_hidden_state", "lengths", "embedding"]  # all there are, since none is named
    np.testing.assert_array_equal(got["last_hidden_state"], PADDED)
    assert got["lengths"].tolist() == [3, 1]


@pytest.mark.parametrize("raw", [True, False])
async def test_text_gives_what_encode_gives(server: FakeServer, raw: bool) -> None:
    texts = ["hello brave new world", "", "🌍"]
    got = await infer(server, raw=raw, text=text_tensor(*texts))
    kinds = [encserve_pb.OUTPUT_KIND_TOKENS, encserve_pb.OUTPUT_KIND_MODEL_POOLING]
    options = encserve_pb.EncodeOptions(outputs=[encserve_pb.OutputSpec(kind=kind) for kind in kinds])
    rows, vectors = (await server.encode(*texts, options=options)).outputs
    assert got["lengths"].tolist() == list(rows.lengths)
    parts = [row[:length].tobytes() for row, length in zip(got["last_hidden_state"], rows.lengths, strict=True)]
    assert b"".join(parts) == rows.data
    assert got["embedding"].tobytes() == vectors.data


async def test_texts_may_stand_in_a_column(server: FakeServer) -> None:
    """As KServe's own clients send them."""
    column = await infer(server, text=text_tensor("hello", "world").reshape(2, 1), outputs=["embedding"])
    flat = await infer(server, text=text_tensor("hello", "world"), outputs=["embedding"])
    np.testing.assert_array_equal(column["embedding"], flat["embedding"])


async def test_the_id_the_version_and_the_order_of_outputs_are_the_callers(server: FakeServer) -> None:
    request = infer_request(input_ids=IDS, request_id="a 🌍 id", outputs=["embedding", "lengths"])
    request.model_version = "1"
    response = await ask(server, "ModelInfer", request, pb.ModelInferResponse)
    assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "a 🌍 id")
    assert [it.name for it in response.outputs] == ["embedding", "lengths"]
    assert not any(it.HasField("contents") for it in response.outputs)


async def test_parameters(start_server: StartServer) -> None:
    server = await start_server(prompts={"": "", "new": "brave new "})
    asked = {"outputs": ["embedding"], "text": text_tensor("world")}
    plain = (await infer(server, **asked))["embedding"]
    prompted = (await infer(server, **asked, parameters={"prompt_name": "new"}))["embedding"]
    want = (await infer(server, outputs=["embedding"], text=text_tensor("brave new world")))["embedding"]
    np.testing.assert_array_equal(prompted, want)
    cut = (await infer(server, **asked, parameters={"dimensions": 2}))["embedding"]
    np.testing.assert_array_equal(cut, plain[:, :2])
    half = (await infer(server, **asked, parameters={"datatype": "FP16"}))["embedding"]
    np.testing.assert_array_equal(half, plain.astype("<f2"))
    int8 = (await infer(server, **asked, parameters={"datatype": "INT8"}))["embedding"]
    assert int8.dtype == np.int8
    factor = 127 * np.sqrt(D_MODEL) / 4
    np.testing.assert_allclose(int8, np.clip(plain / np.linalg.norm(plain) * factor, -128, 127), atol=0.51)
    long = np.ones((1, 40), np.int64)
    assert (await infer(server, input_ids=long, parameters={"truncate": True}))["lengths"].tolist() == [32]
    final = {"triton_enable_empty_final_response": True}  # which Triton's perf_analyzer always sends
    np.testing.assert_array_equal((await infer(server, **asked, parameters=final))["embedding"], plain)


async def test_vectors_go_in(start_server: StartServer) -> None:
    server = await start_server(takes_vectors=True)
    vectors = np.random.default_rng(0).standard_normal((2, 3, D_MODEL)).astype("<f4")
    got = await infer(server, inputs_embeds=vectors, attention_mask=MASK)
    typed = await infer(server, raw=False, inputs_embeds=vectors, attention_mask=MASK)
    assert list(got) == ["last_hidden_state", "lengths"]
    assert got["lengths"].tolist() == [3, 1]
    assert got["last_hidden_state"].tobytes() == typed["last_hidden_state"].tobytes()
    assert not got["last_hidden_state"][1, 1:].any()


@pytest.mark.parametrize("raw", [True, False])
async def test_ids_and_masks_of_32_bits_and_token_types_of_zeros_are_taken(server: FakeServer, raw: bool) -> None:
    """As most tokenizers' libraries make them."""
    its = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": np.zeros_like(IDS)}
    got = await infer(server, raw=raw, **{name: array.astype("<i4") for name, array in its.items()})
    np.testing.assert_array_equal(got["last_hidden_state"], PADDED)
    assert got["lengths"].tolist() == [3, 1]
    got = await infer(server, raw=raw, **its)
    np.testing.assert_array_equal(got["last_hidden_state"], PADDED)


async def test_what_clients_say_of_how_data_are_sent_is_ignored(server: FakeServer) -> None:
    """KServe's client sends `binary_data_size` by default, Triton's `binary_data`, MLServer's codecs `content_type`."""
    plain = await infer(server, input_ids=IDS, outputs=["embedding"])
    request = ids(outputs=["embedding"], parameters={"binary_data_output": True, "priority": 3, "content_type": "np"})
    request.inputs[0].parameters["binary_data_size"].int64_param = IDS.nbytes
    request.inputs[0].parameters["binary_data"].bool_param = False
    request.inputs[0].parameters["content_type"].string_param = "np"
    request.inputs[0].parameters["of my own"].string_param = "anything"
    request.inputs[0].contents.SetInParent()  # MLServer's converters leave it empty beside raw data
    request.outputs[0].parameters["binary_data"].bool_param = True
    request.outputs[0].parameters["classification"].int64_param = 0
    got = arrays_of(await ask(server, "ModelInfer", request, pb.ModelInferResponse))
    np.testing.assert_array_equal(got["embedding"], plain["embedding"])


async def test_a_timeout_is_a_deadline(server: FakeServer) -> None:
    """Of the caller's and the request's the sooner one; what waits in the queue leaves it."""
    assert await infer(server, input_ids=IDS, parameters={"timeout": 60_000_000})
    assert await infer(server, input_ids=IDS, parameters={"timeout": 0})
    async with server.queue_of(5):
        with pytest.raises(Failed) as late:
            await infer(server, input_ids=IDS, parameters={"timeout": 50_000})
        assert server.sample("encserve_queue_tokens", model="tiny", version="2") == 5
    assert (late.value.code, late.value.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXPIRED")
    assert "timeout is 50000 microseconds" in late.value.text


def ids(array: Any = IDS, **more: Any) -> pb.ModelInferRequest:
    return infer_request(input_ids=array, **more)


def texts(*its: str, **more: Any) -> pb.ModelInferRequest:
    return infer_request(text=text_tensor(*its), **more)


def masked(mask: Any = MASK) -> pb.ModelInferRequest:
    return infer_request(input_ids=IDS, attention_mask=np.ascontiguousarray(mask))


def parameter(**its: Any) -> pb.ModelInferRequest:
    return texts("hello", parameters=its)


def with_input(request: pb.ModelInferRequest, **fields: Any) -> pb.ModelInferRequest:
    """The request with fields of its first input changed."""
    for field, value in fields.items():
        if field == "shape":
            request.inputs[0].shape[:] = value
        else:
            setattr(request.inputs[0], field, value)
    return request


def with_raw(request: pb.ModelInferRequest, *raw: bytes) -> pb.ModelInferRequest:
    request.raw_input_contents[:] = raw
    return request


def with_shared_memory(field: str) -> pb.ModelInferRequest:
    request = ids(outputs=["embedding"])
    getattr(request, field)[0].parameters["shared_memory_region"].string_param = "region"
    return request


def with_tensor_parameter(request: pb.ModelInferRequest, field: str, **its: Any) -> pb.ModelInferRequest:
    for name, value in its.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(getattr(request, field)[0].parameters[name], kind, value)
    return request


def raw_and_typed() -> pb.ModelInferRequest:
    request = ids()
    request.inputs[0].contents.int64_contents.append(1)
    return request


REFUSED = [
    (infer_request(), "inputs: must hold input_ids or text; was empty"),
    (infer_request(attention_mask=MASK), "inputs: must hold input_ids or text; was attention_mask"),
    (texts("a", input_ids=IDS), "inputs: must hold input_ids or text; was text, input_ids"),
    (infer_request(logits=IDS), "inputs[0].name: model tiny takes input_ids, attention_mask, text; was 'logits'"),
    (infer_request(token_type_ids=IDS * 0), "inputs: must hold input_ids or text; was token_type_ids"),
    (ids(token_type_ids=MASK), "token_type_ids[0, 0]: must be 0: the model takes single texts"),
    (ids(token_type_ids=IDS[:1]), "token_type_ids.shape: must have the shape of input_ids, (2, 3)"),
    (texts("a", token_type_ids=IDS), "token_type_ids.shape: goes with input_ids only"),
    (with_input(masked(), name="attention_mask"), "inputs[1].name: attention_mask is there twice"),
    (with_input(ids(), datatype="FP32"), "input_ids.datatype: must be INT64 or INT32; was 'FP32'"),
    (with_input(ids(), shape=[6]), "input_ids.shape: must be [-1, -1], -1 for any number; was [6]"),
    (with_input(ids(), shape=[-2, -3]), "input_ids.shape: must be"),
    (with_input(ids(), shape=[2**62, 2**62]), "input_ids.shape: must be"),
    (with_input(ids(), shape=[2, 2**31 - 1]), "input_ids[0]: must be at most 32 tokens (max_sequence_tokens of tiny)"),
    (with_input(masked(), shape=[2, 2]), "attention_mask.shape: must have the shape of input_ids, (2, 2)"),
    (with_raw(ids(), b"\0" * 40), "input_ids: must hold 6 elements for its shape [2, 3]; was 5"),
    (with_raw(ids(), b"\0" * 41), "input_ids: must be whole numbers of 8 bytes; was 41"),
    (with_raw(masked(), IDS.tobytes()), "raw_input_contents: must be one for each of the 2 inputs"),
    (with_raw(ids()), "input_ids: must hold 6 elements for its shape [2, 3]; was 0"),
    (raw_and_typed(), "inputs[0].contents: must be empty"),
    (ids(np.zeros((0, 3), np.int64)), "inputs: must hold at least 1 sequence"),
    (ids(np.zeros((1, 0), np.int64)), "input_ids[0]: must hold at least 1 id"),
    (ids(np.array([[1], [VOCAB_SIZE]])), "input_ids[1, 0]: must be from 0 to 999"),
    (ids(np.ones((1, 40), np.int64)), "input_ids[0]: must be at most 32 tokens"),
    (masked(MASK * 0), "input_ids[0]: must hold at least 1 id"),
    (masked(MASK[:, ::-1]), "attention_mask[1]: must be 1 for each token and 0 for the padding"),
    (masked(MASK - 1), "attention_mask[1]: must be 1 for each token and 0 for the padding"),
    (masked(MASK * 2), "attention_mask[0]: must be 1 for each token and 0 for the padding"),
    (texts("a", "b", attention_mask=MASK), "attention_mask.shape: goes with input_ids only"),
    (with_input(texts("a", "b", "c"), shape=[2]), "text: must hold 2 elements for its shape [2]; was 3"),
    (with_raw(texts("a"), b"\xff\0"), "text: must be elements with their length in 4 bytes"),
    (with_raw(texts("a"), b"\x02\0\0\0a"), "text: must be elements with their length in 4 bytes"),
    (infer_request(text=np.array([b"a", b"\xff"], object)), "text[1]: must be UTF-8; is not at byte 0"),
    (texts("hello " * 40), "text[0]: must be at most 32 tokens"),
    (ids(outputs=["logits"]), "outputs[0].name: model tiny has last_hidden_state, lengths, embedding; was 'logits'"),
    (with_shared_memory("inputs"), "input_ids.parameters: shared memory is not served"),
    (with_shared_memory("outputs"), "outputs[0].parameters: shared memory is not served"),
    (with_tensor_parameter(ids(outputs=["embedding"]), "outputs", classification=3), "outputs[0].parameters: class"),
    (with_tensor_parameter(texts("a"), "inputs", content_type="base64"), "text.parameters.content_type: must not be"),
    (parameter(timeout=-1), "parameters.timeout: must be microseconds"),
    (parameter(timeout="1"), "parameters.timeout: must be microseconds"),
    (parameter(binary_data_output=1), "parameters.binary_data_output: must be true or false"),
    (parameter(sequence_id=1), "parameters: there are task"),
    (parameter(trunc=True), "parameters: there are task, prompt_name, dimensions, truncate, datatype, timeout, binary"),
    (parameter(task="query"), "parameters.task: must be left out: this model has no tasks"),
    (parameter(prompt_name="x"), "parameters.prompt_name: model tiny has no prompt 'x'"),
    (parameter(prompt_name=1), "parameters.prompt_name: must be a string; was 1"),
    (parameter(truncate=1), "parameters.truncate: must be true or false; was '1'"),
    (parameter(dimensions=5), "parameters.dimensions: must be from 1 to 4"),
    (parameter(dimensions=True), "parameters.dimensions: must be from 1 to 4"),
    (texts("a", outputs=["lengths"], parameters={"dimensions": 2}), "parameters.dimensions: is for embedding"),
    (parameter(datatype="BF16"), "parameters.datatype: must be FP32 or FP16 or INT8; was 'BF16'"),
]


@pytest.mark.parametrize(("request_", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
async def test_bad_input_is_named(server: FakeServer, request_: pb.ModelInferRequest, text: str) -> None:
    with pytest.raises(Failed) as caught:
        await ask(server, "ModelInfer", request_, pb.ModelInferResponse)
    assert caught.value.code is INVALID
    assert caught.value.text.startswith(text)


async def test_a_text_of_too_many_bytes_is_refused_before_it_is_decoded(start_server: StartServer) -> None:
    server = await start_server(max_text_bytes=9)
    with pytest.raises(Failed) as caught:
        await infer(server, text=text_tensor("hello", "🌍" * 3))
    assert caught.value.text == "text[1]: must be at most 9 bytes (max_text_bytes); was 12"


async def test_dimensions_are_for_models_with_an_embedding(start_server: StartServer, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundles", pooling=0)
    server = await start_server(model=("tiny@1",), tune_batches=False, load=loader(bundle))
    with pytest.raises(Failed) as caught:
        await infer(server, input_ids=IDS, parameters={"dimensions": 2})
    assert caught.value.text == "parameters.dimensions: is for embedding, which model tiny does not have"


async def test_a_reply_that_padding_makes_too_large_is_refused_before_it_is_computed(start_server: StartServer) -> None:
    server = await start_server(max_response_mib=1, max_request_sequences=5000)
    ids = np.ones((4000, 30), np.int64)  # 4,029 rows, padded to 120,000 of 16 bytes
    mask = np.zeros_like(ids)
    mask[:, 0] = mask[0] = 1
    with pytest.raises(Failed, match="over the limit of 1048576") as caught:
        await infer(server, input_ids=ids, attention_mask=mask)
    assert caught.value.reason == "RESPONSE_TOO_LARGE"
    assert server.sample("encserve_batch_sequences_count", model="tiny", version="2") == 0


async def test_errors_of_the_server_have_the_statuses_of_encode(start_server: StartServer) -> None:
    server = await start_server(max_queue_tokens=30)
    with pytest.raises(Failed) as unknown:
        await infer(server, model="nobody", input_ids=IDS)
    assert (unknown.value.code, unknown.value.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    async with server.queue_of(30):
        with pytest.raises(Failed) as full:
            await infer(server, input_ids=IDS)
    assert (full.value.code, full.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert full.value.pushback_ms
    server.engine.hold()
    with pytest.raises(Failed) as late:
        await server.call("ModelInfer", infer_request(input_ids=IDS), SERVICE_NAME, timeout=0.1)
    server.engine.let_go()
    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_caller_that_goes_takes_its_sequences_along(server: FakeServer) -> None:
    server.engine.hold()
    running = asyncio.create_task(server.encode([1]))
    await asyncio.to_thread(server.engine.started.acquire)
    waiting = asyncio.create_task(infer(server, input_ids=IDS))
    await until(lambda: server.sample("encserve_queue_tokens", model="tiny", version="2") > 0)
    waiting.cancel()
    await until(lambda: server.sample("encserve_queue_tokens", model="tiny", version="2") == 0)
    server.engine.let_go()
    await running
    assert server.sample("encserve_cancelled_total", model="tiny", version="2", stage="queued") == 2


async def test_a_server_that_drains_says_so(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in flight is answered; new calls are refused; it lives, and is not ready."""
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 0.5)
    server = await start_server()
    server.engine.hold()
    running = asyncio.create_task(infer(server, input_ids=IDS))
    await asyncio.to_thread(server.engine.started.acquire)
    stopping = asyncio.create_task(server.app.stop())
    await until(server.app._calls.draining.is_set)
    for method, request in {
        "ModelInfer": infer_request(input_ids=IDS),
        "ModelMetadata": pb.ModelMetadataRequest(),
    }.items():
        with pytest.raises(Failed) as refused:
            await server.call(method, request, SERVICE_NAME)
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert (await ask(server, "ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse)).live
    assert not (await ask(server, "ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse)).ready
    server.engine.let_go()
    assert (await running)["lengths"].tolist() == [3, 3]
    assert await stopping


async def stream(server: FakeServer, *requests: bytes) -> list[pb.ModelStreamInferResponse]:
    channel: Any = server.channel

    async def send() -> AsyncIterator[bytes]:
        for data in requests:
            yield data

    call = channel.stream_stream(f"/{SERVICE_NAME}/ModelStreamInfer")(send())
    return [pb.ModelStreamInferResponse.FromString(data) async for data in call]


async def test_a_stream_answers_each_request_by_its_id(server: FakeServer) -> None:
    good = [infer_request(input_ids=IDS, attention_mask=MASK, request_id=str(i)) for i in range(5)]
    bad = infer_request(input_ids=-IDS, request_id="bad")
    answers = await stream(server, *(request.SerializeToString() for request in [*good, bad]))
    by_id = {it.infer_response.id: it for it in answers}
    assert set(by_id) == {*map(str, range(5)), "bad"}
    assert by_id.pop("bad").error_message.startswith("input_ids[0, 0]: must be from 0 to 999")
    for it in by_id.values():
        assert not it.error_message
        np.testing.assert_array_equal(arrays_of(it.infer_response)["last_hidden_state"], PADDED)
        assert it.infer_response.parameters["triton_final_response"].bool_param
    assert server.sample("encserve_refused_total", reason="INVALID_FIELD") == 1


async def test_metadata_and_config_name_the_same_tensors(server: FakeServer) -> None:
    told = await ask(server, "ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse)
    assert told.name == "encserve"
    metadata = await ask(server, "ModelMetadata", pb.ModelMetadataRequest(name="tiny"), pb.ModelMetadataResponse)
    assert (metadata.name, list(metadata.versions)) == ("tiny", ["2", "1"])
    assert [(it.name, it.datatype, list(it.shape)) for it in (*metadata.inputs, *metadata.outputs)] == [
        ("input_ids", "INT64", [-1, -1]),
        ("attention_mask", "INT64", [-1, -1]),
        ("text", "BYTES", [-1]),
        ("last_hidden_state", "FP32", [-1, -1, D_MODEL]),
        ("lengths", "INT64", [-1]),
        ("embedding", "FP32", [-1, D_MODEL]),
    ]
    config = (await ask(server, "ModelConfig", pb.ModelConfigRequest(name="tiny"), pb.ModelConfigResponse)).config
    assert [(it.name, it.dims) for it in config.input] == [(it.name, it.shape) for it in metadata.inputs]
    assert [(it.name, it.dims) for it in config.output] == [(it.name, it.shape) for it in metadata.outputs]
    assert all(it.optional for it in config.input)
    assert config.max_batch_size == 0
    assert config.parameters["fingerprint"].string_value == "f" * 32


async def test_readiness_is_that_of_health(server: FakeServer) -> None:
    async def ready(name: str, version: str = "") -> bool:
        request = pb.ModelReadyRequest(name=name, version=version)
        return bool((await ask(server, "ModelReady", request, pb.ModelReadyResponse)).ready)

    assert (await ask(server, "ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse)).ready
    assert [await ready("tiny"), await ready("tiny", "1"), await ready("tiny", "9"), await ready("no")] == [
        True,
        True,
        False,
        False,
    ]


async def test_the_index_says_what_is_served(server: FakeServer) -> None:
    async def index(**its: Any) -> list[tuple[str, str, str, str]]:
        answer = await ask(server, "RepositoryIndex", pb.RepositoryIndexRequest(**its), pb.RepositoryIndexResponse)
        return [(it.name, it.version, it.state, it.reason) for it in answer.models]

    ready = [("tiny", "2", "READY", ""), ("tiny", "1", "READY", "")]
    assert await index() == ready
    assert await index(ready=True, repository_name="any") == ready
    server.app.catalog.resolve("tiny", "1").not_ready_reason = lambda: "stuck"  # type: ignore[method-assign]
    assert await index() == [ready[0], ("tiny", "1", "UNAVAILABLE", "stuck")]
    assert await index(ready=True) == ready[:1]


@pytest.mark.parametrize("on", [True, False])
async def test_health_knows_the_service(start_server: StartServer, on: bool) -> None:
    server = await start_server(open_inference=on)
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    if on:
        answer = health_pb2.HealthCheckResponse.FromString(await server.call("Check", request, "grpc.health.v1.Health"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await server.app.stop()
        assert not server.app._health_service.serving[SERVICE_NAME]
    else:
        with pytest.raises(Failed, match="must be one of"):
            await server.call("Check", request, "grpc.health.v1.Health")


async def test_statistics_are_of_each_model(server: FakeServer) -> None:
    await infer(server, text=text_tensor("hello"))
    await infer(server, input_ids=IDS)
    with pytest.raises(Failed):
        await infer(server, input_ids=-IDS)
    await server.encode([1])  # another protocol's call
    answer = await ask(server, "ModelStatistics", pb.ModelStatisticsRequest(), pb.ModelStatisticsResponse)
    by_version = {it.version: it for it in answer.model_stats}
    its = by_version["2"].inference_stats
    assert (by_version["2"].inference_count, by_version["2"].execution_count) == (2, 2)
    assert (its.success.count, its.fail.count) == (2, 1)
    assert [it.count for it in (its.queue, its.compute_input, its.compute_infer, its.compute_output)] == [2] * 4
    assert its.compute_infer.ns > 0
    assert by_version["2"].last_inference > 1_700_000_000_000
    assert by_version["1"].inference_stats.success.count == 0


async def test_calls_are_counted(server: FakeServer) -> None:
    await infer(server, input_ids=IDS)
    with pytest.raises(Failed):
        await infer(server, input_ids=-IDS)
    assert server.sample("grpc_server_started_total", **INFER) == 2
    assert server.sample("grpc_server_handled_total", **INFER, grpc_code="OK") == 1
    assert server.sample("grpc_server_handled_total", **INFER, grpc_code="InvalidArgument") == 1
    assert server.sample("encserve_response_bytes_count", model="tiny", version="2") == 1


async def test_it_can_be_turned_off(start_server: StartServer, tmp_path: Path) -> None:
    server = await start_server(open_inference=False)
    with pytest.raises(Failed) as caught:
        await infer(server, input_ids=IDS)
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
    assert server.app.registry.get_sample_value("grpc_server_started_total", INFER) is None


@pytest.mark.parametrize("method", sorted(METHODS))
async def test_bytes_that_are_no_message(server: FakeServer, method: str) -> None:
    channel: Any = server.channel
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_stream(f"/{SERVICE_NAME}/{method}")(b"\x0a\xff").read()
    assert Failed(caught.value).reason == "MALFORMED_REQUEST"


def wild_request(rng: random.Random) -> pb.ModelInferRequest:
    """A request whose every field may be anything that protobuf allows; often a good one."""

    def odd(good: Any, *others: Any) -> Any:
        return rng.choice(others) if rng.random() < 0.06 else good

    rows, columns = rng.choice([0, 1, 2, 5]), rng.choice([0, 1, 3, 40])
    words = ["hello", "", "brave \x00 new", "🌍" * 9, "world " * 50]
    ids = [odd(rng.randrange(VOCAB_SIZE), -1, 2**63 - 1) for _ in range(rows * columns)]
    lengths = [rng.randint(0, columns) for _ in range(rows)]
    inputs: dict[str, Any] = {}
    if rng.random() < 0.5:
        inputs["text"] = text_tensor(*(rng.choice(words) for _ in range(rows)))
    if rng.random() < 0.6 or not inputs:
        inputs["input_ids"] = np.array(ids, "<i8").reshape(rows, columns)
        if rng.random() < 0.5:
            inputs["attention_mask"] = (
                (np.arange(columns) < np.array(lengths)[:, None]).astype("<i8").reshape(rows, columns)
            )
        if rng.random() < 0.2:
            inputs["token_type_ids"] = np.full((rows, columns), odd(0, 1), rng.choice(["<i4", "<i8"]))
    parameters = {
        name: odd(value, 7, True, 0.5, "x", -1)
        for name, value in {
            "truncate": True,
            "datatype": rng.choice(["FP16", "INT8"]),
            "dimensions": 2,
            "prompt_name": "",
            "task": "query",
            "timeout": 60_000_000,
            "priority": 1,
            "binary_data_output": True,
        }.items()
        if rng.random() < 0.1
    }
    names = ["last_hidden_state", "lengths", "embedding", "multi_vector", "sparse_weights", ""]
    outputs = [rng.choice(names[:3] if rng.random() < 0.9 else names) for _ in range(rng.choice([0, 0, 1, 2]))]
    model = odd("tiny", "", "no", "../tiny")
    request = infer_request(raw=rng.random() < 0.6, outputs=outputs, parameters=parameters, model=model, **inputs)
    for it in request.inputs:
        it.name = odd(it.name, "", "input_ids", "text")
        it.datatype = odd(it.datatype, "", "FP32", "BYTES", "INT64", "INT32")
        if rng.random() < 0.2:
            name = rng.choice(["binary_data_size", "content_type", "shared_memory_region", "classification"])
            it.parameters[name].int64_param = rng.choice([0, 1])
        if rng.random() < 0.06:
            it.shape[rng.randrange(len(it.shape))] = rng.choice([-1, 0, 7, 2**31, 2**62, -(2**63)])
    for i, data in enumerate(request.raw_input_contents):
        request.raw_input_contents[i] = odd(data, b"", data[:-1], data + b"\xff", b"\xff" * 12)
    return request


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.system) for seed in range(1, 10))])
async def test_any_message_gets_a_reply_or_a_status_of_ours(server: FakeServer, seed: int) -> None:
    """Ten thousand in all; a thousand after every change."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    unexpected: list[Failed] = []
    for _ in range(1000):
        data = wild_request(rng).SerializeToString()
        if rng.random() < 0.3:
            data = damaged(data, rng)
        try:
            arrays_of(pb.ModelInferResponse.FromString(await server.call("ModelInfer", data, SERVICE_NAME)))
        except Failed as failed:
            seen[failed.reason] += 1
            unexpected += [failed] if failed.code not in EXPECTED else []
        else:
            seen["OK"] += 1
    assert not unexpected
    assert seen["OK"] > 20, f"the fuzzer sent too little that is right: {seen}"
    assert len(seen) >= 4, f"the fuzzer reached too little: {seen}"
    assert len((await server.encode([1, 2])).sequences) == 1
