"""A real gRPC server on loopback with a fake engine: what callers get, for good input and for bad."""

import asyncio
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from fake_engine import FakeEngine, fake_rows
from fake_server import D_MODEL, LONGEST, SERVICE, VOCAB_SIZE, Failed, FakeServer, StartServer, make_input
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import InvalidField
from encserve_server.rpc import codec

INVALID = grpc.StatusCode.INVALID_ARGUMENT
KINDS = (pb.OUTPUT_KIND_TOKENS, pb.OUTPUT_KIND_MEAN, pb.OUTPUT_KIND_CLS, pb.OUTPUT_KIND_MAX)
POOLED = pb.OutputSpec(kind=pb.OUTPUT_KIND_MODEL_POOLING)


def rows_of(response: Any, output: int = 0) -> list[Any]:
    """A response's output, cut into one array a sequence."""
    tensor = response.outputs[output]
    dtype = "<f4" if tensor.data_type == pb.DATA_TYPE_FLOAT32 else "<f2"
    flat = np.frombuffer(tensor.data, dtype).reshape(-1, tensor.width)
    assert len(flat) == sum(tensor.lengths)
    return np.split(flat, np.cumsum(tensor.lengths)[:-1])


def expected(*ids: int) -> Any:
    return fake_rows(np.array(ids), D_MODEL)


async def test_ids_come_back_as_rows(server: FakeServer) -> None:
    response = await server.encode([5], [7, 8, 9])
    assert [tensor.kind for tensor in response.outputs] == [pb.OUTPUT_KIND_TOKENS]
    one, three = rows_of(response)
    np.testing.assert_array_equal(one, expected(5))
    np.testing.assert_array_equal(three, expected(7, 8, 9))
    assert (response.model, response.model_version, response.fingerprint) == ("tiny", "2", "f" * 32)
    assert response.space_id == "s2-" + "5" * 32
    assert [info.token_count for info in response.sequences] == [1, 3]
    assert response.timings.compute_seconds > 0


async def test_text_comes_back_with_what_the_model_saw(server: FakeServer) -> None:
    """Ids, offsets in code points, special tokens; and the truncation baked into the tokenizer's file is ignored."""
    text = "hello 🌍 brave new world world"
    response = await server.encode(text, options=pb.EncodeOptions(include_token_strings=True))
    (info,) = response.sequences
    assert list(info.tokens) == ["[CLS]", "hello", "[UNK]", "brave", "new", "world", "world", "[SEP]"]
    assert list(info.token_ids) == [1, 4, 3, 5, 6, 7, 7, 2]
    assert list(info.special) == [True, *[False] * 6, True]
    cut = [text[start:end] for start, end in zip(info.char_starts, info.char_ends, strict=True)]
    assert cut == ["", "hello", "🌍", "brave", "new", "world", "world", ""]
    assert (info.truncated, info.token_count, info.original_token_count) == (False, 8, 8)
    np.testing.assert_array_equal(rows_of(response)[0], expected(1, 4, 3, 5, 6, 7, 7, 2))


async def test_several_outputs_at_once(server: FakeServer) -> None:
    specs = [pb.OutputSpec(kind=kind) for kind in KINDS]
    specs += [pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN, l2_normalize=True), POOLED]
    response = await server.encode([5, 6], [7], options=pb.EncodeOptions(outputs=specs))
    assert [tensor.kind for tensor in response.outputs] == [*KINDS, pb.OUTPUT_KIND_MEAN, pb.OUTPUT_KIND_MEAN]
    assert [tensor.l2_normalized for tensor in response.outputs] == [False] * 4 + [True] * 2
    rows = expected(5, 6)
    np.testing.assert_array_equal(rows_of(response, 0)[0], rows)
    np.testing.assert_allclose(rows_of(response, 1)[0], rows.mean(axis=0, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(rows_of(response, 2)[0], rows[:1])
    np.testing.assert_array_equal(rows_of(response, 3)[0], rows.max(axis=0, keepdims=True))
    assert [list(tensor.lengths) for tensor in response.outputs[1:]] == [[1, 1]] * 5
    for output in (4, 5):
        np.testing.assert_allclose(np.linalg.norm(rows_of(response, output), axis=-1), 1, rtol=1e-6)


async def test_float16(server: FakeServer) -> None:
    response = await server.encode([5, 6], options=pb.EncodeOptions(data_type=pb.DATA_TYPE_FLOAT16))
    assert len(response.outputs[0].data) == 2 * D_MODEL * 2
    np.testing.assert_array_equal(rows_of(response)[0], expected(5, 6).astype(np.float16))


async def test_float16_beyond_its_range_is_infinite(server: FakeServer) -> None:
    response = await server.encode([900], options=pb.EncodeOptions(data_type=pb.DATA_TYPE_FLOAT16))
    assert np.isinf(rows_of(response)[0]).all()


async def test_special_tokens_can_be_left_out(server: FakeServer) -> None:
    specs = [pb.OutputSpec(), pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN)]
    options = pb.EncodeOptions(exclude_special_tokens=True, outputs=specs)
    response = await server.encode("hello world", [1, 8, 2], [1, 2], options=options)
    assert list(response.outputs[0].lengths) == [2, 1, 0]
    np.testing.assert_array_equal(rows_of(response)[0], expected(1, 4, 7, 2)[1:3])
    np.testing.assert_array_equal(rows_of(response)[1], expected(1, 8, 2)[1:2])
    np.testing.assert_allclose(rows_of(response, 1)[1][0], expected(1, 8, 2).mean(axis=0), rtol=1e-6)
    assert list(response.sequences[1].special) == [True, False, True]


async def test_truncation_is_asked_for_and_told(server: FakeServer) -> None:
    """Text keeps the special token after it; ids are cut as they are."""
    options = pb.EncodeOptions(truncation=pb.TRUNCATION_END, include_token_strings=True)
    response = await server.encode("hello " * 50, list(range(40)), options=options)
    text, ids = response.sequences
    assert (text.token_count, text.original_token_count, text.truncated) == (LONGEST, 52, True)
    assert list(text.tokens) == ["[CLS]", *["hello"] * 30, "[SEP]"]
    assert (ids.token_count, ids.original_token_count, ids.truncated) == (LONGEST, 40, True)
    np.testing.assert_array_equal(rows_of(response)[1], expected(*range(LONGEST)))


async def test_the_empty_text_is_its_special_tokens(server: FakeServer) -> None:
    response = await server.encode("")
    assert response.sequences[0].token_count == 2


async def test_a_version_can_be_named(server: FakeServer) -> None:
    request = pb.EncodeRequest(model="tiny", model_version="1", inputs=[make_input([1])])
    response = pb.EncodeResponse.FromString(await server.call("Encode", request))
    assert response.model_version == "1"


async def test_models_are_described(server: FakeServer) -> None:
    listed = pb.ListModelsResponse.FromString(await server.call("ListModels", pb.ListModelsRequest())).models
    assert [(model.version, model.is_default) for model in listed] == [("2", True), ("1", False)]
    model = pb.GetModelResponse.FromString(await server.call("GetModel", pb.GetModelRequest())).model
    assert model == listed[0]
    assert (model.d_model, model.vocab_size, model.max_sequence_tokens) == (D_MODEL, VOCAB_SIZE, LONGEST)
    assert model.ready
    assert model.provider == "FakeExecutionProvider"
    assert (model.pooling, model.l2_normalize) == (pb.OUTPUT_KIND_MEAN, True)


def one(options: pb.EncodeOptions) -> pb.EncodeRequest:
    return pb.EncodeRequest(inputs=[make_input([1])], options=options)


def request(*inputs: Any, **fields: Any) -> pb.EncodeRequest:
    return pb.EncodeRequest(inputs=map(make_input, inputs), **fields)


def unknown(value: int) -> Any:
    """An enum value that no version of the contract has."""
    return value


BAD_REQUESTS = {
    "no inputs": (request(), "inputs", "must hold at least 1 sequence; was empty"),
    "input unset": (
        pb.EncodeRequest(inputs=[pb.Input()]),
        "inputs[0]",
        "must be token_ids, text or embeddings; was none of them",
    ),
    "empty sequence": (request([1], []), "inputs[1].token_ids", "must hold at least 1 id; was empty"),
    "id outside": (request([1], [2, 3, 1000]), "inputs[1].token_ids.ids[2]", "must be from 0 to 999 .*; was 1000"),
    "negative id": (request([-1]), "inputs[0].token_ids.ids[0]", "must be from 0 to 999 .*; was -1"),
    "huge id": (request([2**62]), "inputs[0].token_ids.ids[0]", f"was {2**62}"),
    "too long": (request([1] * 33), "inputs[0].token_ids", "must be at most 32 tokens .*; was 33"),
    "text too long": (request("ok", "hello " * 31), "inputs[1].text", "must be at most 32 tokens .*; was 33"),
    "text too large": (request("x" * 262145), "inputs[0].text", "must be at most 262144 bytes .*; was 262145"),
    "too many": (request(*[[1]] * 257), "inputs", "must hold at most 256 sequences .*; was 257"),
    "data type": (
        one(pb.EncodeOptions(data_type=unknown(9))),
        "options.data_type",
        "must be a value of DataType, 0 to 4; was 9",
    ),
    "truncation": (one(pb.EncodeOptions(truncation=unknown(7))), "options.truncation", "was 7"),
    "output kind": (
        one(pb.EncodeOptions(outputs=[pb.OutputSpec(), pb.OutputSpec(kind=unknown(42))])),
        "options.outputs[1].kind",
        "must be a value of OutputKind, 0 to 11; was 42",
    ),
    "no multi-vectors": (
        one(pb.EncodeOptions(outputs=[pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR)])),
        "options.outputs[0].kind",
        "model tiny has no OUTPUT_KIND_MULTI_VECTOR; it has OUTPUT_KIND_TOKENS, .*_SQRT_LENGTH, OUTPUT_KIND_SPANS$",
    ),
    "no sparse weights": (
        one(pb.EncodeOptions(outputs=[pb.OutputSpec(), pb.OutputSpec(kind=pb.OUTPUT_KIND_SPARSE)])),
        "options.outputs[1].kind",
        "model tiny has no OUTPUT_KIND_SPARSE",
    ),
    "weights of rows": (
        one(pb.EncodeOptions(outputs=[pb.OutputSpec(max_active_dims=3)])),
        "options.outputs[0].max_active_dims",
        "is for OUTPUT_KIND_SPARSE alone; was 3",
    ),
    "rows joined": (
        one(pb.EncodeOptions(outputs=[pb.OutputSpec(kind=pb.OUTPUT_KIND_CLS, pool_factor=2)])),
        "options.outputs[0].pool_factor",
        "is for OUTPUT_KIND_MULTI_VECTOR alone; was 2",
    ),
    "task": (one(pb.EncodeOptions(task=unknown(3))), "options.task", "must be a value of Task, 0 to 2; was 3"),
    "no tasks": (
        one(pb.EncodeOptions(task=pb.TASK_QUERY)),
        "options.task",
        "model tiny does not know TASK_QUERY; it treats all texts alike",
    ),
    "output twice": (
        one(pb.EncodeOptions(outputs=[pb.OutputSpec(), pb.OutputSpec(kind=pb.OUTPUT_KIND_TOKENS)])),
        "options.outputs[1]",
        r"asks for the same as options.outputs\[0\]",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_input_is_named_by_field_index_and_numbers(server: FakeServer, name: str) -> None:
    bad, field, problem = BAD_REQUESTS[name]
    with pytest.raises(Failed, match=problem) as caught:
        await server.call("Encode", bad)
    failed = caught.value
    assert failed.code is INVALID
    assert failed.text.startswith(field)
    (violation,) = failed.details["google.rpc.BadRequest"].field_violations
    assert violation.field == field
    info = failed.details["google.rpc.ErrorInfo"]
    assert (info.domain, info.reason) == ("encserve", failed.reason)
    assert server.engine.batches == [], "a bad request reached the engine"


async def test_bytes_that_are_no_message(server: FakeServer) -> None:
    with pytest.raises(Failed, match=r"4 bytes that are not a encserve.v1.EncodeRequest") as caught:
        await server.call("Encode", b"\xff\xff\xff\xff")
    assert (caught.value.code, caught.value.reason) == (INVALID, "MALFORMED_REQUEST")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": "nobody"}, r"model: no model 'nobody'; there are tiny"),
        ({"model": "../../etc"}, r"no model '../../etc'"),
        ({"model": "tiny", "model_version": "3"}, r"model_version: no version '3' of tiny; there are 2, 1"),
        ({"model": "x" * 100_000}, r"no model 'xxx"),
    ],
)
async def test_an_unknown_model(server: FakeServer, fields: dict[str, str], text: str) -> None:
    with pytest.raises(Failed, match=text) as caught:
        await server.call("Encode", request([1], **fields))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_a_model_without_a_tokenizer_takes_ids_only(start_server: StartServer) -> None:
    server = await start_server(with_tokenizer=False)
    for sent, options, field in (
        ("hello", None, r"inputs\[0\].text"),
        ([1], pb.EncodeOptions(include_token_strings=True), "options.include_token_strings"),
        ([1], pb.EncodeOptions(exclude_special_tokens=True), "options.exclude_special_tokens"),
        ([1], pb.EncodeOptions(outputs=[POOLED]), r"options.outputs\[0\].kind"),
    ):
        with pytest.raises(Failed, match=field):
            await server.encode(sent, options=options)
    assert len(rows_of(await server.encode([1, 2]))[0]) == 2


@pytest.mark.parametrize("known", ["hello", "hello world " * 50], ids=["at once", "in a thread"])
async def test_a_text_that_the_tokenizer_fails_for_is_the_callers(start_server: StartServer, known: str) -> None:
    """It has no token for what it does not know, and says so of all texts of a call at once."""
    server = await start_server(unknown="[NONE]")
    how = pb.EncodeOptions(truncation=pb.TRUNCATION_END)
    assert len((await server.encode(known, "world", options=how)).sequences) == 2
    with pytest.raises(Failed, match=r"inputs\[2\]\.text: the tokenizer of tiny fails for it: .*UNK") as caught:
        await server.encode(known, [4, 5], "hello 🌍", "world", options=how)
    assert caught.value.code is INVALID
    (violation,) = caught.value.details["google.rpc.BadRequest"].field_violations
    assert violation.field == "inputs[2].text"


async def test_one_bad_request_disturbs_nobody(server: FakeServer) -> None:
    calls = [server.encode([i + 1] * (1 + i % 5)) if i % 3 else server.encode([VOCAB_SIZE + i]) for i in range(30)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for i, result in enumerate(results):
        if i % 3:
            np.testing.assert_array_equal(rows_of(result)[0], expected(*[i + 1] * (1 + i % 5)))
        else:
            assert isinstance(result, Failed)


@pytest.mark.parametrize("method", ["Encode", "Tokenize", "ListModels", "GetModel", "Inspect", "EncodeStream"])
async def test_grpc_retries_what_is_refused_by_itself(server: FakeServer, method: str) -> None:
    """It does, and so does Envoy, only if nothing was sent before the status: not even an empty message."""
    policy = {
        "maxAttempts": 3,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.02s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    server.app._calls.drain()
    target = f"127.0.0.1:{server.app.grpc_port}"
    channel: Any = grpc.aio.insecure_channel(target, options=[("grpc.service_config", config)])
    async with channel:
        name = f"/{SERVICE}/{method}"
        calls: dict[str, Callable[[], Any]] = {
            "Inspect": lambda: channel.unary_stream(name)(b"").read(),
            "EncodeStream": lambda: channel.stream_stream(name)(iter(())).read(),
        }
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls.get(method, lambda: channel.unary_unary(name)(b""))()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.sample("encserve_refused_total", reason="DRAINING") == 3


async def test_a_refused_call_is_freed_at_once(server: FakeServer) -> None:
    """Under overload most calls are refused: what they leave behind the cycle collector would have to find."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            with pytest.raises(Failed):
                await server.encode([-1])
        left = [it for it in gc.get_objects() if type(it) is InvalidField]
    finally:
        gc.enable()
    assert not left


async def test_a_reply_over_the_limit_is_refused_before_any_compute(start_server: StartServer) -> None:
    server = await start_server(
        FakeEngine(D_MODEL), max_response_mib=1, max_queue_tokens=10**6, max_request_sequences=2000
    )
    many = [[1] * LONGEST] * 1999
    with pytest.raises(Failed, match=r"over the limit of 1048576 .*the first \d+ of 1999 inputs would fit") as caught:
        await server.encode(*many)
    assert (caught.value.code, caught.value.reason) == (INVALID, "RESPONSE_TOO_LARGE")
    assert server.engine.batches == []
    fitting = int(caught.value.text.partition("the first ")[2].split()[0])
    assert len((await server.encode(*many[:fitting])).sequences) == fitting, "what was said to fit did not"


async def test_more_tokens_than_the_queue(start_server: StartServer) -> None:
    server = await start_server(max_queue_tokens=40)
    with pytest.raises(Failed, match=r"inputs: must be at most 40 tokens in all .*; was 60") as caught:
        await server.encode([1] * 30, [1] * 30)
    assert (caught.value.code, caught.value.reason) == (INVALID, "REQUEST_TOO_LARGE")


async def test_a_full_queue_says_when_to_come_back(start_server: StartServer) -> None:
    server = await start_server(max_queue_tokens=40)
    async with server.queue_of(30):
        with pytest.raises(Failed, match="the queue is full: it holds 30 of at most 40 tokens") as caught:
            await server.encode([3] * 11)
        failed = caught.value
        assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        delay_s = failed.details["google.rpc.RetryInfo"].retry_delay.ToTimedelta().total_seconds()
        assert 0 < delay_s <= 5
        assert int(failed.pushback_ms or 0) == round(delay_s * 1000)
    assert server.sample("encserve_refused_total", reason="QUEUE_FULL") == 1


async def test_a_queue_that_is_shut_to_all_turns_calls_away_unseen(start_server: StartServer) -> None:
    """What refusing costs must not depend on what is refused: nothing is decoded, checked or tokenized."""
    server = await start_server(max_queue_tokens=40, max_request_sequences=999)
    async with server.queue_of(31):
        with pytest.raises(Failed, match="and this request has 10;"):
            await server.encode([3] * 10)  # from now on nobody is taken
        for unseen, has in (("hello", ""), ([VOCAB_SIZE], " and this request has 1"), ([], " and this request has 0")):
            text = f"it holds 31 of at most 40 tokens{has}; once full it takes nothing before it holds at most 30; try"
            with pytest.raises(Failed, match=text) as caught:
                await server.encode(unseen)
            assert caught.value.reason == "QUEUE_FULL"
            assert caught.value.pushback_ms
        # What can be told by counting is, since it would be in vain to try it again.
        for never, reason in (
            ([], "INVALID_FIELD"),
            ([[1]] * 1000, "TOO_MANY_INPUTS"),
            ([[1] * 30] * 2, "REQUEST_TOO_LARGE"),
        ):
            with pytest.raises(Failed) as caught:
                await server.encode(*never)
            assert (caught.value.code, caught.value.reason) == (INVALID, reason)
        assert server.sample("encserve_stage_seconds_count", model="tiny", version="2", stage="tokenize") == 0
    assert len((await server.encode("hello")).sequences) == 1


async def test_an_engine_that_fails_turns_calls_away_unseen(start_server: StartServer) -> None:
    server = await start_server()
    server.engine.broken = True
    reasons = []
    for _ in range(5):
        with pytest.raises(Failed) as caught:
            await server.encode([1])
        reasons.append(caught.value.reason)
    assert reasons[-1] == "ENGINE_UNHEALTHY"
    with pytest.raises(Failed) as caught:
        await server.encode([VOCAB_SIZE])
    assert caught.value.reason == "ENGINE_UNHEALTHY"


async def test_a_deadline_that_passes_in_the_queue_costs_no_compute(server: FakeServer) -> None:
    server.engine.hold()
    running = asyncio.create_task(server.encode([1]))
    await asyncio.to_thread(server.engine.started.acquire)
    with pytest.raises(Failed) as caught:
        await server.encode([2, 2, 2], timeout=0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    # The caller's own clock may be a little ahead of the server's.
    await until(lambda: server.sample("encserve_queue_sequences", model="tiny", version="2") == 0)
    server.engine.let_go()
    await running
    await server.encode([4])
    assert [3] not in server.engine.batches


async def test_a_poisonous_sequence_fails_alone(start_server: StartServer) -> None:
    server = await start_server(FakeEngine(D_MODEL, poison=666))
    calls = [server.encode([666 if i == 5 else i + 1]) for i in range(16)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, Failed) for result in results] == [i == 5 for i in range(16)]
    failed = results[5]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "INFERENCE_FAILED")
    assert "666" not in failed.text, "the engine's own text reached the caller"


async def test_an_unknown_error_becomes_a_fixed_text_and_an_id(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr("encserve_server.rpc.codec.decode_call", explode)
    with pytest.raises(Failed, match=r"internal error; the server's log has it under the id [0-9a-f]{16}") as caught:
        await server.encode([1])
    assert caught.value.code is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.text
    error_id = caught.value.text.split()[-1]
    assert any(getattr(record, "error_id", "") == error_id and record.exc_info for record in caplog.records)


async def test_large_replies_are_whole(start_server: StartServer) -> None:
    """Over the size that is built in a thread."""
    server = await start_server(max_queue_tokens=10**6)
    server.engine.d_model = D_MODEL
    sequences = [[i + 1] * LONGEST for i in range(256)]
    replies = await asyncio.gather(*(server.encode(*sequences, options=None) for _ in range(4)))
    for reply in replies:
        for got, ids in zip(rows_of(reply), sequences, strict=True):
            np.testing.assert_array_equal(got, expected(*ids))


@pytest.mark.parametrize("include_token_strings", [True, False])
async def test_the_estimate_of_a_reply_is_never_too_low(server: FakeServer, include_token_strings: bool) -> None:
    """For words as long as the longest of the vocabulary, and every output at once."""
    specs = [pb.OutputSpec(kind=kind, l2_normalize=norm) for kind in KINDS for norm in (False, True)]
    options = pb.EncodeOptions(outputs=specs, include_token_strings=include_token_strings, truncation=pb.TRUNCATION_END)
    model = server.app.catalog.resolve("", "")
    for inputs in (["[UNK]"] * 3, ["world hello " * 40, "🌍"], [[999] * 32, [1], [2, 1]]):
        request = pb.EncodeRequest(inputs=map(make_input, inputs), options=options)
        reply = await model.prepare(codec.decode_call(request, LONGEST, 0))
        await model.run(reply)
        data = await server.call("Encode", request)
        assert len(data) <= reply.estimated_bytes


async def test_a_reply_that_turns_out_too_large_is_ours_to_refuse(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the estimate ever be too low, gRPC must not be the one to find out."""
    server = await start_server(
        FakeEngine(D_MODEL), max_response_mib=1, max_request_sequences=4000, max_queue_tokens=10**6
    )
    monkeypatch.setattr("encserve_server.models.reply_size.ReplySize.check", lambda *_, **__: 0)
    with pytest.raises(Failed, match="the reply takes .* bytes, over the limit of 1048576") as caught:
        await server.encode(*[[1] * LONGEST] * 4000)
    assert caught.value.reason == "RESPONSE_TOO_LARGE"


async def test_special_tokens_of_texts_are_known_without_the_manifest(start_server: StartServer) -> None:
    """The tokenizer says which it added; only for token ids the manifest has to."""
    server = await start_server()
    model = server.app.catalog.resolve("", "")
    model._treatments._bundle = replace(model.bundle, special_token_ids=())
    options = pb.EncodeOptions(exclude_special_tokens=True)
    assert list((await server.encode("hello world", options=options)).outputs[0].lengths) == [2]
    with pytest.raises(Failed, match="does not say which tokens are special"):
        await server.encode([1, 2], options=options)
