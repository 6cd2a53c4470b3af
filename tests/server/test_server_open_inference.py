"""Tests of the Open Inference Protocol v2 over gRPC: replies, refusals, metadata and counters."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from fake_server import D_MODEL, VOCAB_SIZE, Failed, FakeServer, StartServer, refusal
from fuzzing import damaged
from grpc_health.v1 import health_pb2
from open_inference import IDS, MASK, PADDED, arrays_of, ask, infer, infer_request, text_tensor, wild_inputs
from tiny_bundle import write_bundle
from tiny_heads import loader
from waiting import until

from encserve_proto.v1 import encoder_pb2 as encserve_pb
from encserve_server.protocols.open_inference.rpcs import SERVICE_NAME
from encserve_server.protocols.open_inference.triton import grpc_service_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXPECTED = {INVALID, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DEADLINE_EXCEEDED}
METHODS = (
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata"),
    *("ModelInfer", "ModelStreamInfer", "ModelConfig", "ModelStatistics", "RepositoryIndex"),
)
INFER = {"grpc_type": "unary", "grpc_service": SERVICE_NAME, "grpc_method": "ModelInfer"}


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("dtype", ["<i8", "<i4"])
async def test_ids_give_padded_rows(shared: FakeServer, raw: bool, dtype: str) -> None:
    """The request has token ids, a mask, and token types of zeros. The reply has padded hidden states.

    Most tokenizer libraries return a mask and token types, so callers may send both.
    """
    arrays = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": IDS * 0}
    got = await infer(shared, raw=raw, **{name: array.astype(dtype) for name, array in arrays.items()})
    assert list(got) == ["last_hidden_state", "lengths", "embedding"]  # by default, the reply has all outputs
    np.testing.assert_array_equal(got["last_hidden_state"], PADDED)
    assert got["lengths"].tolist() == [3, 1]


@pytest.mark.parametrize("raw", [True, False])
async def test_text_gives_the_same_as_encode(shared: FakeServer, raw: bool) -> None:
    texts = ["hello brave new world", "", "🌍"]
    got = await infer(shared, raw=raw, text=text_tensor(*texts))
    kinds = [encserve_pb.OUTPUT_KIND_TOKENS, encserve_pb.OUTPUT_KIND_MODEL_POOLING]
    options = encserve_pb.EncodeOptions(outputs=[encserve_pb.OutputSpec(kind=kind) for kind in kinds])
    rows, vectors = (await shared.encode(*texts, options=options)).outputs
    assert got["lengths"].tolist() == list(rows.lengths)
    parts = [row[:length].tobytes() for row, length in zip(got["last_hidden_state"], rows.lengths, strict=True)]
    assert b"".join(parts) == rows.data
    assert got["embedding"].tobytes() == vectors.data
    column = await infer(shared, raw=raw, text=text_tensor(*texts).reshape(3, 1))  # KServe sends this shape
    np.testing.assert_array_equal(column["embedding"], got["embedding"])


async def test_the_reply_repeats_id_version_and_order_of_outputs(shared: FakeServer) -> None:
    request = infer_request(input_ids=IDS, request_id="a 🌍 id", outputs=["embedding", "lengths"])
    request.model_version = "1"
    response = await ask(shared, "ModelInfer", request, pb.ModelInferResponse)
    assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "a 🌍 id")
    assert [it.name for it in response.outputs] == ["embedding", "lengths"]
    assert not any(it.HasField("contents") for it in response.outputs)


async def test_parameters(start_server: StartServer) -> None:
    server = await start_server(prompts={"": "", "new": "brave new "})

    async def embedding(text: str = "world", **parameters: Any) -> Any:
        request = {"outputs": ["embedding"], "text": text_tensor(text), "parameters": parameters}
        return (await infer(server, **request))["embedding"]

    plain = await embedding()
    np.testing.assert_array_equal(await embedding(prompt_name="new"), await embedding("brave new world"))
    np.testing.assert_array_equal(await embedding(dimensions=2), plain[:, :2])
    np.testing.assert_array_equal(await embedding(datatype="FP16"), plain.astype("<f2"))
    int8 = await embedding(datatype="INT8")
    assert int8.dtype == np.int8
    factor = 127 * np.sqrt(D_MODEL) / 4
    np.testing.assert_allclose(int8, np.clip(plain / np.linalg.norm(plain) * factor, -128, 127), atol=0.51)
    # Triton's perf_analyzer always sends this parameter.
    np.testing.assert_array_equal(await embedding(triton_enable_empty_final_response=True), plain)
    long = np.ones((1, 40), np.int64)
    assert (await infer(server, input_ids=long, parameters={"truncate": True}))["lengths"].tolist() == [32]


async def test_a_model_of_vectors(start_server: StartServer) -> None:
    server = await start_server(takes_vectors=True)
    vectors = np.random.default_rng(0).standard_normal((2, 3, D_MODEL)).astype("<f4")
    got = await infer(server, inputs_embeds=vectors, attention_mask=MASK)
    typed = await infer(server, raw=False, inputs_embeds=vectors, attention_mask=MASK)
    assert list(got) == ["last_hidden_state", "lengths"]
    assert got["lengths"].tolist() == [3, 1]
    assert got["last_hidden_state"].tobytes() == typed["last_hidden_state"].tobytes()
    assert not got["last_hidden_state"][1, 1:].any()


async def test_transport_parameters_of_clients_are_ignored(shared: FakeServer) -> None:
    """KServe's client sends `binary_data_size`, Triton's client `binary_data`, and MLServer's codecs `content_type`."""
    plain = await infer(shared, input_ids=IDS, outputs=["embedding"])
    request = ids(outputs=["embedding"], parameters={"binary_data_output": True, "priority": 3, "content_type": "np"})
    request.inputs[0].parameters["binary_data_size"].int64_param = IDS.nbytes
    request.inputs[0].parameters["binary_data"].bool_param = False
    request.inputs[0].parameters["content_type"].string_param = "np"
    request.inputs[0].parameters["of my own"].string_param = "anything"
    request.inputs[0].contents.SetInParent()  # MLServer sends empty contents together with raw data
    request.outputs[0].parameters["binary_data"].bool_param = True
    request.outputs[0].parameters["classification"].int64_param = 0
    got = arrays_of(await ask(shared, "ModelInfer", request, pb.ModelInferResponse))
    np.testing.assert_array_equal(got["embedding"], plain["embedding"])


async def test_a_timeout_is_a_deadline(shared: FakeServer) -> None:
    assert await infer(shared, input_ids=IDS, parameters={"timeout": 60_000_000})
    assert await infer(shared, input_ids=IDS, parameters={"timeout": 0})
    async with shared.queue_of(5):
        late = await refusal(infer(shared, input_ids=IDS, parameters={"timeout": 50_000}))
        assert shared.queued() == 5
    assert (late.code, late.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXPIRED")
    assert "50000 microseconds" in late.text


def ids(array: Any = IDS, **more: Any) -> pb.ModelInferRequest:
    return infer_request(input_ids=array, **more)


def texts(*words: str, **more: Any) -> pb.ModelInferRequest:
    return infer_request(text=text_tensor(*words), **more)


def masked(mask: Any = MASK) -> pb.ModelInferRequest:
    return infer_request(input_ids=IDS, attention_mask=np.ascontiguousarray(mask))


def parameter(**parameters: Any) -> pb.ModelInferRequest:
    return texts("hello", parameters=parameters)


def with_input(request: pb.ModelInferRequest, **fields: Any) -> pb.ModelInferRequest:
    """Change fields of the first input, and return the request."""
    for field, value in fields.items():
        if field == "shape":
            request.inputs[0].shape[:] = value
        else:
            setattr(request.inputs[0], field, value)
    return request


def with_raw(request: pb.ModelInferRequest, *raw: bytes) -> pb.ModelInferRequest:
    request.raw_input_contents[:] = raw
    return request


def with_tensor_parameter(request: pb.ModelInferRequest, field: str, **parameters: Any) -> pb.ModelInferRequest:
    for name, value in parameters.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(getattr(request, field)[0].parameters[name], kind, value)
    return request


def raw_and_typed() -> pb.ModelInferRequest:
    request = ids()
    request.inputs[0].contents.int64_contents.append(1)
    return request


REGION = {"shared_memory_region": "region"}
# Each row has a request, the field that the error names, and a part of the message.
REFUSED = [
    (infer_request(), "inputs", "was empty"),
    (infer_request(attention_mask=MASK), "inputs", "was attention_mask"),
    (texts("a", input_ids=IDS), "inputs", "was text, input_ids"),
    (infer_request(logits=IDS), "inputs[0].name", "'logits'"),
    (infer_request(token_type_ids=IDS * 0), "inputs", "was token_type_ids"),
    (ids(token_type_ids=MASK), "token_type_ids[0, 0]", "must be 0"),
    (ids(token_type_ids=IDS[:1]), "token_type_ids.shape", "(2, 3)"),
    (texts("a", token_type_ids=IDS), "token_type_ids.shape", "is only for input_ids"),
    (with_input(masked(), name="attention_mask"), "inputs[1].name", "twice"),
    (with_input(ids(), datatype="FP32"), "input_ids.datatype", "'FP32'"),
    (with_input(ids(), shape=[6]), "input_ids.shape", "[6]"),
    (with_input(ids(), shape=[-2, -3]), "input_ids.shape", "[-2, -3]"),
    (with_input(ids(), shape=[2**62, 2**62]), "input_ids.shape", f"{2**62}"),
    (with_input(ids(), shape=[2, 2**31 - 1]), "input_ids[0]", "at most 32 tokens"),
    (with_input(masked(), shape=[2, 2]), "attention_mask.shape", "(2, 2)"),
    (with_raw(ids(), b"\0" * 40), "input_ids", "6 elements"),
    (with_raw(ids(), b"\0" * 41), "input_ids", "41"),
    (with_raw(masked(), IDS.tobytes()), "raw_input_contents", "2 inputs"),
    (with_raw(ids()), "input_ids", "was 0"),
    (raw_and_typed(), "inputs[0].contents", "empty"),
    (ids(np.zeros((0, 3), np.int64)), "inputs", "at least 1 sequence"),
    (ids(np.zeros((1, 0), np.int64)), "input_ids[0]", "at least 1 id"),
    (ids(np.array([[1], [VOCAB_SIZE]])), "input_ids[1, 0]", "from 0 to 999"),
    (ids(np.ones((1, 40), np.int64)), "input_ids[0]", "at most 32 tokens"),
    (masked(MASK * 0), "input_ids[0]", "at least 1 id"),
    (masked(MASK[:, ::-1]), "attention_mask[1]", "padding"),
    (masked(MASK - 1), "attention_mask[1]", "padding"),
    (masked(MASK * 2), "attention_mask[0]", "padding"),
    (texts("a", "b", attention_mask=MASK), "attention_mask.shape", "is only for input_ids"),
    (with_input(texts("a", "b", "c"), shape=[2]), "text", "was 3"),
    (with_raw(texts("a"), b"\xff\0"), "text", "4 bytes"),
    (with_raw(texts("a"), b"\x02\0\0\0a"), "text", "4 bytes"),
    (infer_request(text=np.array([b"a", b"\xff"], object)), "text[1]", "byte 0"),
    (texts("hello " * 40), "text[0]", "at most 32 tokens"),
    (ids(outputs=["logits"]), "outputs[0].name", "'logits'"),
    (with_tensor_parameter(ids(), "inputs", **REGION), "input_ids.parameters", "shared memory"),
    (with_tensor_parameter(ids(outputs=["embedding"]), "outputs", **REGION), "outputs[0].parameters", "shared memory"),
    (with_tensor_parameter(ids(outputs=["embedding"]), "outputs", classification=3), "outputs[0].parameters", "class"),
    (with_tensor_parameter(texts("a"), "inputs", content_type="base64"), "text.parameters.content_type", "base64"),
    (parameter(timeout=-1), "parameters.timeout", "microseconds"),
    (parameter(timeout="1"), "parameters.timeout", "microseconds"),
    (parameter(binary_data_output=1), "parameters.binary_data_output", "true or false"),
    (parameter(sequence_id=1), "parameters", "sequence_id"),
    (parameter(trunc=True), "parameters", "truncate"),
    (parameter(task="query"), "parameters.task", "no tasks"),
    (parameter(prompt_name="x"), "parameters.prompt_name", "'x'"),
    (parameter(prompt_name=1), "parameters.prompt_name", "was 1"),
    (parameter(truncate=1), "parameters.truncate", "true or false"),
    (parameter(dimensions=5), "parameters.dimensions", "from 1 to 4"),
    (parameter(dimensions=True), "parameters.dimensions", "from 1 to 4"),
    (texts("a", outputs=["lengths"], parameters={"dimensions": 2}), "parameters.dimensions", "embedding"),
    (parameter(datatype="BF16"), "parameters.datatype", "'BF16'"),
]


@pytest.mark.parametrize(("request_", "field", "problem"), REFUSED)
async def test_the_error_names_the_bad_field(shared: FakeServer, request_: Any, field: str, problem: str) -> None:
    failed = await refusal(ask(shared, "ModelInfer", request_, pb.ModelInferResponse))
    assert failed.code is INVALID
    assert failed.text.startswith(f"{field}: ")
    assert problem in failed.text


async def test_limits_of_settings_and_models(start_server: StartServer, tmp_path: Path) -> None:
    server = await start_server(max_text_bytes=9)
    failed = await refusal(infer(server, text=text_tensor("hello", "🌍" * 3)))
    assert failed.text == "text[1]: must be at most 9 bytes (max_text_bytes); was 12"
    bundle = write_bundle(tmp_path / "bundles", pooling=0)
    server = await start_server(model=("tiny@1",), tune_batches=False, load=loader(bundle))
    failed = await refusal(infer(server, input_ids=IDS, parameters={"dimensions": 2}))
    assert failed.text.startswith("parameters.dimensions: ")


async def test_a_padded_reply_that_is_too_large_is_refused_before_the_run(start_server: StartServer) -> None:
    server = await start_server(max_response_mib=1, max_request_sequences=5000)
    array = np.ones((4000, 30), np.int64)  # the request has 4,029 tokens, but the padded reply has 120,000 vectors
    mask = np.zeros_like(array)
    mask[:, 0] = mask[0] = 1
    failed = await refusal(infer(server, input_ids=array, attention_mask=mask))
    assert failed.reason == "RESPONSE_TOO_LARGE"
    assert server.sample("encserve_batch_sequences_count", model="tiny", version="2") == 0


async def test_errors_of_the_server_have_the_statuses_of_encode(start_server: StartServer) -> None:
    server = await start_server(max_queue_tokens=30)
    unknown = await refusal(infer(server, model="other", input_ids=IDS))
    assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    async with server.queue_of(30):
        full = await refusal(infer(server, input_ids=IDS))
    assert (full.code, full.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert full.pushback_ms
    server.engine.hold()
    late = await refusal(server.call("ModelInfer", infer_request(input_ids=IDS), SERVICE_NAME, timeout=0.1))
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_cancelled_call_leaves_the_queue(server: FakeServer) -> None:
    running = await server.start_held(server.encode([1]))
    waiting = asyncio.create_task(infer(server, input_ids=IDS))
    await until(lambda: server.queued() > 0)
    waiting.cancel()
    await until(lambda: server.queued() == 0)
    server.engine.let_go()
    await running


async def test_a_stream_answers_each_request_by_its_id(server: FakeServer) -> None:
    requests = [infer_request(input_ids=IDS, attention_mask=MASK, request_id=str(i)) for i in range(5)]
    requests.append(infer_request(input_ids=-IDS, request_id="bad"))
    rpc: Any = server.channel.stream_stream(f"/{SERVICE_NAME}/ModelStreamInfer")
    replies = [
        pb.ModelStreamInferResponse.FromString(it) async for it in rpc(it.SerializeToString() for it in requests)
    ]
    by_id = {it.infer_response.id: it for it in replies}
    assert set(by_id) == {*map(str, range(5)), "bad"}
    assert by_id.pop("bad").error_message.startswith("input_ids[0, 0]: must be from 0 to 999")
    for it in by_id.values():
        assert not it.error_message
        np.testing.assert_array_equal(arrays_of(it.infer_response)["last_hidden_state"], PADDED)
        assert it.infer_response.parameters["triton_final_response"].bool_param
    assert server.sample("encserve_refused_total", reason="INVALID_FIELD") == 1


async def test_metadata_and_config_name_the_same_tensors(shared: FakeServer) -> None:
    about = await ask(shared, "ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse)
    assert about.name == "encserve"
    metadata = await ask(shared, "ModelMetadata", pb.ModelMetadataRequest(name="tiny"), pb.ModelMetadataResponse)
    assert (metadata.name, list(metadata.versions)) == ("tiny", ["2", "1"])
    assert [(it.name, it.datatype, list(it.shape)) for it in (*metadata.inputs, *metadata.outputs)] == [
        ("input_ids", "INT64", [-1, -1]),
        ("attention_mask", "INT64", [-1, -1]),
        ("text", "BYTES", [-1]),
        ("last_hidden_state", "FP32", [-1, -1, D_MODEL]),
        ("lengths", "INT64", [-1]),
        ("embedding", "FP32", [-1, D_MODEL]),
    ]
    config = (await ask(shared, "ModelConfig", pb.ModelConfigRequest(name="tiny"), pb.ModelConfigResponse)).config
    assert [(it.name, it.dims) for it in config.input] == [(it.name, it.shape) for it in metadata.inputs]
    assert [(it.name, it.dims) for it in config.output] == [(it.name, it.shape) for it in metadata.outputs]
    assert all(it.optional for it in config.input)
    assert config.max_batch_size == 0
    assert config.parameters["fingerprint"].string_value == "f" * 32


async def test_readiness_and_the_index_of_models(server: FakeServer) -> None:
    async def ready(name: str, version: str = "") -> bool:
        request = pb.ModelReadyRequest(name=name, version=version)
        return bool((await ask(server, "ModelReady", request, pb.ModelReadyResponse)).ready)

    async def index(**fields: Any) -> list[tuple[str, str, str, str]]:
        reply = await ask(server, "RepositoryIndex", pb.RepositoryIndexRequest(**fields), pb.RepositoryIndexResponse)
        return [(it.name, it.version, it.state, it.reason) for it in reply.models]

    assert (await ask(server, "ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse)).ready
    assert await ready("tiny")
    assert await ready("tiny", "1")
    assert not await ready("tiny", "9")
    assert not await ready("no")
    both = [("tiny", "2", "READY", ""), ("tiny", "1", "READY", "")]
    assert await index() == both
    assert await index(ready=True, repository_name="any") == both
    server.app.catalog.resolve("tiny", "1").not_ready_reason = lambda: "stuck"  # type: ignore[method-assign]
    assert await index() == [both[0], ("tiny", "1", "UNAVAILABLE", "stuck")]
    assert await index(ready=True) == both[:1]


async def test_health_knows_the_service(shared: FakeServer) -> None:
    health = await shared.call("Check", health_pb2.HealthCheckRequest(service=SERVICE_NAME), "grpc.health.v1.Health")
    assert health_pb2.HealthCheckResponse.FromString(health).status == health_pb2.HealthCheckResponse.SERVING


async def test_the_protocol_can_be_turned_off(start_server: StartServer) -> None:
    server = await start_server(open_inference=False)
    assert (await refusal(infer(server, input_ids=IDS))).code is grpc.StatusCode.UNIMPLEMENTED
    check = server.call("Check", health_pb2.HealthCheckRequest(service=SERVICE_NAME), "grpc.health.v1.Health")
    assert (await refusal(check)).code is grpc.StatusCode.NOT_FOUND
    assert server.app.registry.get_sample_value("grpc_server_started_total", INFER) is None


async def test_statistics_and_counters(server: FakeServer) -> None:
    await infer(server, text=text_tensor("hello"))
    await infer(server, input_ids=IDS)
    await refusal(infer(server, input_ids=-IDS))
    await server.encode([1])  # the statistics do not count this call of another protocol
    reply = await ask(server, "ModelStatistics", pb.ModelStatisticsRequest(), pb.ModelStatisticsResponse)
    by_version = {it.version: it for it in reply.model_stats}
    stats = by_version["2"].inference_stats
    assert (by_version["2"].inference_count, by_version["2"].execution_count) == (2, 2)
    assert (stats.success.count, stats.fail.count) == (2, 1)
    assert [it.count for it in (stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output)] == [2] * 4
    assert stats.compute_infer.ns > 0
    assert by_version["2"].last_inference > 1_700_000_000_000
    assert by_version["1"].inference_stats.success.count == 0
    assert server.sample("grpc_server_started_total", **INFER) == 3
    assert server.sample("grpc_server_handled_total", **INFER, grpc_code="OK") == 2
    assert server.sample("grpc_server_handled_total", **INFER, grpc_code="InvalidArgument") == 1
    assert server.sample("encserve_response_bytes_count", model="tiny", version="2") == 3


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_not_a_message(shared: FakeServer, method: str) -> None:
    channel: Any = shared.channel
    failed = await refusal(channel.unary_stream(f"/{SERVICE_NAME}/{method}")(b"\x0a\xff").read())
    assert failed.reason == "MALFORMED_REQUEST"


def wild_request(rng: random.Random) -> pb.ModelInferRequest:
    """Return a random request. Any field may be invalid."""

    def odd(good: Any, *others: Any) -> Any:
        return rng.choice(others) if rng.random() < 0.06 else good

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
    request = infer_request(
        raw=rng.random() < 0.6, outputs=outputs, parameters=parameters, model=model, **wild_inputs(rng)
    )
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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.system) for seed in range(1, 4))])
async def test_any_message_gets_a_reply_or_a_known_status(shared: FakeServer, seed: int) -> None:
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    unexpected: list[Failed] = []
    for _ in range(1000):
        data = wild_request(rng).SerializeToString()
        if rng.random() < 0.3:
            data = damaged(data, rng)
        try:
            arrays_of(pb.ModelInferResponse.FromString(await shared.call("ModelInfer", data, SERVICE_NAME)))
        except Failed as failed:
            seen[failed.reason] += 1
            unexpected += [failed] if failed.code not in EXPECTED else []
        else:
            seen["OK"] += 1
    assert not unexpected
    assert seen["OK"] > 20, f"the fuzzer sent too few valid requests: {seen}"
    assert len(seen) >= 4, f"the replies have fewer than 4 different outcomes: {seen}"
    assert len((await shared.encode([1, 2])).sequences) == 1
