"""Tests of the gRPC calls of EncoderService: replies, refusals, overload and errors."""

import asyncio
import gc
import json
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from fake_engine import FakeEngine, fake_rows
from fake_server import (
    D_MODEL,
    LONGEST,
    SERVICE,
    VOCAB_SIZE,
    Failed,
    FakeServer,
    StartServer,
    make_input,
    refusal,
    rows_of,
)
from waiting import collector_off

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import InvalidField
from encserve_server.protocols.encserve import codec

INVALID = grpc.StatusCode.INVALID_ARGUMENT
KINDS = (pb.OUTPUT_KIND_TOKENS, pb.OUTPUT_KIND_MEAN, pb.OUTPUT_KIND_CLS, pb.OUTPUT_KIND_MAX)
TOKENS, CLS = pb.OUTPUT_KIND_TOKENS, pb.OUTPUT_KIND_CLS
MULTI_VECTOR, SPARSE = pb.OUTPUT_KIND_MULTI_VECTOR, pb.OUTPUT_KIND_SPARSE
POOLED = pb.OutputSpec(kind=pb.OUTPUT_KIND_MODEL_POOLING)


def expected(*ids: int) -> Any:
    return fake_rows(np.array(ids), D_MODEL)


async def test_encode_returns_rows_for_ids(shared: FakeServer) -> None:
    response = await shared.encode([5], [7, 8, 9])
    assert [tensor.kind for tensor in response.outputs] == [pb.OUTPUT_KIND_TOKENS]
    one, three = rows_of(response)
    np.testing.assert_array_equal(one, expected(5))
    np.testing.assert_array_equal(three, expected(7, 8, 9))
    assert (response.model, response.model_version, response.fingerprint) == ("tiny", "2", "f" * 32)
    assert response.space_id == "s2-" + "5" * 32
    assert [info.token_count for info in response.sequences] == [1, 3]
    assert response.timings.compute_seconds > 0


async def test_encode_returns_the_tokens_of_a_text(shared: FakeServer) -> None:
    """The reply for a text has the token ids, their offsets in code points, and a mark for special tokens.

    The server ignores the truncation setting of the tokenizer file.
    """
    text = "hello 🌍 brave new world world"
    response = await shared.encode(text, options=pb.EncodeOptions(include_token_strings=True))
    (info,) = response.sequences
    assert list(info.tokens) == ["[CLS]", "hello", "[UNK]", "brave", "new", "world", "world", "[SEP]"]
    assert list(info.token_ids) == [1, 4, 3, 5, 6, 7, 7, 2]
    assert list(info.special) == [True, *[False] * 6, True]
    cut = [text[start:end] for start, end in zip(info.char_starts, info.char_ends, strict=True)]
    assert cut == ["", "hello", "🌍", "brave", "new", "world", "world", ""]
    assert (info.truncated, info.token_count, info.original_token_count) == (False, 8, 8)
    np.testing.assert_array_equal(rows_of(response)[0], expected(1, 4, 3, 5, 6, 7, 7, 2))


async def test_several_outputs_at_once(shared: FakeServer) -> None:
    specs = [pb.OutputSpec(kind=kind) for kind in KINDS]
    specs += [pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN, l2_normalize=True), POOLED]
    response = await shared.encode([5, 6], [7], options=pb.EncodeOptions(outputs=specs))
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


async def test_float16(shared: FakeServer) -> None:
    """Hidden states can be returned as float16. A number beyond the range of float16 becomes infinite."""
    response = await shared.encode([5, 6], [900], options=pb.EncodeOptions(data_type=pb.DATA_TYPE_FLOAT16))
    assert len(response.outputs[0].data) == 3 * D_MODEL * 2
    rows, infinite = rows_of(response)
    np.testing.assert_array_equal(rows, expected(5, 6).astype(np.float16))
    assert np.isinf(infinite).all()


async def test_special_tokens_can_be_left_out(shared: FakeServer) -> None:
    specs = [pb.OutputSpec(), pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN)]
    options = pb.EncodeOptions(exclude_special_tokens=True, outputs=specs)
    response = await shared.encode("hello world", [1, 8, 2], [1, 2], options=options)
    assert list(response.outputs[0].lengths) == [2, 1, 0]
    np.testing.assert_array_equal(rows_of(response)[0], expected(1, 4, 7, 2)[1:3])
    np.testing.assert_array_equal(rows_of(response)[1], expected(1, 8, 2)[1:2])
    np.testing.assert_allclose(rows_of(response, 1)[1][0], expected(1, 8, 2).mean(axis=0), rtol=1e-6)
    assert list(response.sequences[1].special) == [True, False, True]


async def test_truncation_is_optional_and_reported(shared: FakeServer) -> None:
    """A truncated text keeps its last special token. A truncated list of ids keeps only its first ids."""
    options = pb.EncodeOptions(truncation=pb.TRUNCATION_END, include_token_strings=True)
    response = await shared.encode("hello " * 50, list(range(40)), "", options=options)
    text, ids, empty = response.sequences
    assert empty.token_count == 2  # only the two special tokens
    assert (text.token_count, text.original_token_count, text.truncated) == (LONGEST, 52, True)
    assert list(text.tokens) == ["[CLS]", *["hello"] * 30, "[SEP]"]
    assert (ids.token_count, ids.original_token_count, ids.truncated) == (LONGEST, 40, True)
    np.testing.assert_array_equal(rows_of(response)[1], expected(*range(LONGEST)))


async def test_models_are_described(shared: FakeServer) -> None:
    request_ = request([1], model="tiny", model_version="1")
    response = pb.EncodeResponse.FromString(await shared.call("Encode", request_))
    assert response.model_version == "1"
    listed = pb.ListModelsResponse.FromString(await shared.call("ListModels", pb.ListModelsRequest())).models
    assert [(model.version, model.is_default) for model in listed] == [("2", True), ("1", False)]
    model = pb.GetModelResponse.FromString(await shared.call("GetModel", pb.GetModelRequest())).model
    assert model == listed[0]
    assert (model.d_model, model.vocab_size, model.max_sequence_tokens) == (D_MODEL, VOCAB_SIZE, LONGEST)
    assert model.ready
    assert model.provider == "FakeExecutionProvider"
    assert (model.pooling, model.l2_normalize) == (pb.OUTPUT_KIND_MEAN, True)


def one(options: pb.EncodeOptions) -> pb.EncodeRequest:
    return pb.EncodeRequest(inputs=[make_input([1])], options=options)


def outputs(*specs: pb.OutputSpec) -> pb.EncodeRequest:
    return one(pb.EncodeOptions(outputs=specs))


def request(*inputs: Any, **fields: Any) -> pb.EncodeRequest:
    return pb.EncodeRequest(inputs=map(make_input, inputs), **fields)


def unknown(value: int) -> Any:
    """Return `value` with the type Any, so that mypy accepts a number that is not in the enum."""
    return value


# Each row has a request, the field that the error names, and a part of the message.
BAD_REQUESTS: list[tuple[pb.EncodeRequest, str, str]] = [
    (request(), "inputs", "at least 1 sequence"),
    (pb.EncodeRequest(inputs=[pb.Input()]), "inputs[0]", "none is set"),
    (request([1], []), "inputs[1].token_ids", "at least 1 id"),
    (request([1], [2, 3, 1000]), "inputs[1].token_ids.ids[2]", "from 0 to 999"),
    (request([-1]), "inputs[0].token_ids.ids[0]", "was -1"),
    (request([2**62]), "inputs[0].token_ids.ids[0]", f"was {2**62}"),
    (request([1] * 33), "inputs[0].token_ids", "at most 32 tokens"),
    (request("ok", "hello " * 31), "inputs[1].text", "at most 32 tokens"),
    (request("x" * 262145), "inputs[0].text", "at most 262144 bytes"),
    (request(*[[1]] * 2049), "inputs", "at most 2048 sequences"),
    (one(pb.EncodeOptions(data_type=unknown(9))), "options.data_type", "0 to 4; was 9"),
    (one(pb.EncodeOptions(truncation=unknown(7))), "options.truncation", "was 7"),
    (outputs(pb.OutputSpec(), pb.OutputSpec(kind=unknown(42))), "options.outputs[1].kind", "0 to 12; was 42"),
    (outputs(pb.OutputSpec(kind=MULTI_VECTOR)), "options.outputs[0].kind", "OUTPUT_KIND_MULTI_VECTOR"),
    (outputs(pb.OutputSpec(), pb.OutputSpec(kind=SPARSE)), "options.outputs[1].kind", "OUTPUT_KIND_SPARSE"),
    (outputs(pb.OutputSpec(max_active_dims=3)), "options.outputs[0].max_active_dims", "was 3"),
    (outputs(pb.OutputSpec(kind=CLS, pool_factor=2)), "options.outputs[0].pool_factor", "was 2"),
    (one(pb.EncodeOptions(task=unknown(3))), "options.task", "0 to 2; was 3"),
    (one(pb.EncodeOptions(task=pb.TASK_QUERY)), "options.task", "TASK_QUERY"),
    (outputs(pb.OutputSpec(), pb.OutputSpec(kind=TOKENS)), "options.outputs[1]", "options.outputs[0]"),
]


@pytest.mark.parametrize(("bad", "field", "problem"), BAD_REQUESTS)
async def test_the_error_names_the_field_the_index_and_the_numbers(
    shared: FakeServer, bad: pb.EncodeRequest, field: str, problem: str
) -> None:
    batches = list(shared.engine.batches)
    failed = await refusal(shared.call("Encode", bad))
    assert failed.code is INVALID
    assert failed.text.startswith(field)
    assert problem in failed.text
    (violation,) = failed.details["google.rpc.BadRequest"].field_violations
    assert violation.field == field
    info = failed.details["google.rpc.ErrorInfo"]
    assert (info.domain, info.reason) == ("encserve", failed.reason)
    assert shared.engine.batches == batches


LONG_TEXT, LONG_PROBLEM = "hello " * 31, "must be at most 32 tokens (max_sequence_tokens of tiny); was 33. Set truncate"


@pytest.mark.parametrize("good", ["hello", "hello " * 30], ids=["at once", "in a thread"])
async def test_all_refused_inputs_are_named(shared: FakeServer, good: str) -> None:
    """The error is about the first refused input. A trailer has the errors of all refused inputs."""
    failed = await refusal(shared.encode(good, LONG_TEXT, [1], [1000], *[good] * 40, LONG_TEXT))
    assert failed.refused[0] == (failed.text, "SEQUENCE_TOO_LONG")
    names = ["inputs[1].text", "inputs[3].token_ids.ids[0]", "inputs[44].text"]
    assert [text.partition(":")[0] for text, _ in failed.refused] == names
    assert [reason for _, reason in failed.refused] == ["SEQUENCE_TOO_LONG", "INVALID_FIELD", "SEQUENCE_TOO_LONG"]
    assert LONG_PROBLEM in failed.refused[2][0]
    texts = pb.TokenizeRequest(texts=[LONG_TEXT, good, LONG_TEXT], truncation=pb.TRUNCATION_REFUSE)
    failed = await refusal(shared.call("Tokenize", texts))
    assert [text.partition(":")[0] for text, _ in failed.refused] == ["texts[0]", "texts[2]"]


async def test_a_later_piece_names_its_refused_inputs(shared: FakeServer) -> None:
    failed = await refusal(shared.encode(*[[1]] * 300, [1000], [1], [-1]))
    assert [text.partition(".")[0] for text, _ in failed.refused] == ["inputs[300]", "inputs[302]"]


@pytest.mark.parametrize(
    ("inputs", "most"),
    [([[1000]] * 200, 64), ([LONG_TEXT] * 200, 64), ([[]] * 5, 5)],
    ids=["ids", "texts", "few"],
)
async def test_the_names_of_refused_inputs_fit_into_the_trailers(
    shared: FakeServer, inputs: list[Any], most: int
) -> None:
    """gRPC clients accept at most 8 KiB of trailers. So the trailer may lack some of the refused inputs."""
    failed = await refusal(shared.encode(*inputs))
    assert min(most, 30) <= len(failed.refused) <= most
    assert sum(len(text) + len(reason) for text, reason in failed.refused) < 7 * 1024


async def test_texts_that_are_too_large_are_named(start_server: StartServer) -> None:
    server = await start_server(max_text_bytes=100)
    failed = await refusal(server.encode("x" * 101, "hello", "y" * 102))
    assert [text.partition(":")[0] for text, _ in failed.refused] == ["inputs[0].text", "inputs[2].text"]


async def test_an_error_of_the_options_names_no_inputs(shared: FakeServer) -> None:
    failed = await refusal(shared.call("Encode", one(pb.EncodeOptions(task=pb.TASK_QUERY))))
    assert failed.refused == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model": "other"}, "model: no model 'other'; the models are tiny"),
        ({"model": "../../etc"}, "'../../etc'"),
        ({"model": "tiny", "model_version": "3"}, "model_version: no version '3' of tiny; the versions are 2, 1"),
        ({"model": "x" * 100_000}, "'xxx"),
    ],
)
async def test_an_unknown_model(shared: FakeServer, fields: dict[str, str], problem: str) -> None:
    failed = await refusal(shared.call("Encode", request([1], **fields)))
    assert (failed.code, failed.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert problem in failed.text
    assert len(failed.text) < 1000


async def test_a_model_without_a_tokenizer_takes_ids_only(start_server: StartServer) -> None:
    server = await start_server(with_tokenizer=False)
    for sent, options, field in (
        ("hello", None, "inputs[0].text"),
        ([1], pb.EncodeOptions(include_token_strings=True), "options.include_token_strings"),
        ([1], pb.EncodeOptions(exclude_special_tokens=True), "options.exclude_special_tokens"),
        ([1], pb.EncodeOptions(outputs=[POOLED]), "options.outputs[0].kind"),
    ):
        assert (await refusal(server.encode(sent, options=options))).text.startswith(field)
    assert len(rows_of(await server.encode([1, 2]))[0]) == 2


@pytest.mark.parametrize("known", ["hello", "hello world " * 50], ids=["at once", "in a thread"])
async def test_a_text_that_the_tokenizer_fails_for_is_named(start_server: StartServer, known: str) -> None:
    """The error names the text for which the tokenizer fails. The tokenizer library's error does not name the text.

    This tokenizer has no token for unknown words, so it fails for some texts.
    """
    server = await start_server(unknown="[NONE]")
    how = pb.EncodeOptions(truncation=pb.TRUNCATION_END)
    assert len((await server.encode(known, "world", options=how)).sequences) == 2
    failed = await refusal(server.encode(known, [4, 5], "hello 🌍", "world", options=how))
    assert failed.code is INVALID
    (violation,) = failed.details["google.rpc.BadRequest"].field_violations
    assert violation.field == "inputs[2].text"


@pytest.mark.parametrize("method", ["Encode", "Tokenize", "ListModels", "GetModel", "Inspect", "EncodeStream"])
async def test_grpc_retries_refused_calls_by_itself(server: FakeServer, method: str) -> None:
    """A client with a retry policy tries a refused call three times.

    gRPC and Envoy retry only if the server sent nothing before the status.
    """
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
        failed = await refusal(calls.get(method, lambda: channel.unary_unary(name)(b""))())
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert server.sample("encserve_refused_total", reason="DRAINING") == 3


async def test_a_refused_call_is_freed_at_once(shared: FakeServer) -> None:
    """A refused call is freed without the cycle collector, because a server refuses most calls during an overload."""
    gc.collect()
    gc.freeze()  # hides all older objects from `get_objects`
    with collector_off():
        for _ in range(20):
            with pytest.raises(Failed):
                await shared.encode([-1])
        left = [it for it in gc.get_objects() if type(it) is InvalidField]
    assert not left


async def test_a_reply_over_the_limit_is_refused_before_any_compute(start_server: StartServer) -> None:
    server = await start_server(
        FakeEngine(D_MODEL), max_response_mib=1, max_queue_tokens=10**6, max_request_sequences=20_000
    )
    pooled = pb.EncodeOptions(outputs=[pb.OutputSpec(kind=pb.OUTPUT_KIND_CLS)])
    assert (await refusal(server.encode(*[[1]] * 14_000, options=pooled))).reason == "RESPONSE_TOO_LARGE"
    assert server.engine.batches == []
    many = [[1] * LONGEST] * 1999
    # The server prepares the inputs in groups, and checks the size of the reply after each group.
    failed = await refusal(server.encode(*many))
    assert (failed.code, failed.reason) == (INVALID, "RESPONSE_TOO_LARGE")
    fitting = int(failed.text.rpartition("the first ")[2].split()[0])
    assert len((await server.encode(*many[:fitting])).sequences) == fitting


async def test_a_closed_queue_refuses_calls_before_it_reads_them(start_server: StartServer) -> None:
    """While the queue is closed, the server does not read the inputs of a call.

    So the refusal of a large call costs no more than the refusal of a small call.
    """
    server = await start_server(max_queue_tokens=40, max_request_sequences=999)
    async with server.queue_of(31):
        await refusal(server.encode([3] * 10))  # after this refusal the queue is closed
        for unread in ("hello", [VOCAB_SIZE], []):
            failed = await refusal(server.encode(unread))
            assert failed.reason == "QUEUE_FULL"
            assert "31 of at most 40 tokens" in failed.text
            assert failed.pushback_ms
        # Counts are checked first, so that the caller does not retry a call with a wrong count.
        for inputs, reason in (
            ([], "INVALID_FIELD"),
            ([[1]] * 1000, "TOO_MANY_INPUTS"),
        ):
            failed = await refusal(server.encode(*inputs))
            assert (failed.code, failed.reason) == (INVALID, reason)
        assert server.sample("encserve_stage_seconds_count", model="tiny", version="2", stage="tokenize") == 0
    assert len((await server.encode("hello")).sequences) == 1


async def test_an_unhealthy_engine_refuses_calls_before_it_reads_them(server: FakeServer) -> None:
    server.engine.broken = True
    for _ in range(5):
        failed = await refusal(server.encode([1]))
    assert failed.reason == "ENGINE_UNHEALTHY"
    assert (await refusal(server.encode([VOCAB_SIZE]))).reason == "ENGINE_UNHEALTHY"


async def test_other_calls_run_while_a_large_request_is_decoded() -> None:
    """While the server copies token ids, other tasks run at least once for each 32,768 ids."""
    request = pb.EncodeRequest(inputs=[make_input([1] * 512) for _ in range(256)])
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count_turns())
    decoded = await codec.decode_call(request, 512, 0)
    other.cancel()
    assert len(decoded.inputs) == 256
    assert turns >= 256 * 512 // 32_768


@pytest.mark.parametrize("include_token_strings", [True, False])
async def test_the_estimate_of_a_reply_is_never_too_low(shared: FakeServer, include_token_strings: bool) -> None:
    """The requests use the longest tokens of the vocabulary, and ask for eight outputs at once."""
    specs = [pb.OutputSpec(kind=kind, l2_normalize=norm) for kind in KINDS for norm in (False, True)]
    options = pb.EncodeOptions(outputs=specs, include_token_strings=include_token_strings, truncation=pb.TRUNCATION_END)
    model = shared.app.catalog.resolve("", "")
    for inputs in (["[UNK]"] * 3, ["world hello " * 40, "🌍"], [[999] * 32, [1], [2, 1]]):
        request = pb.EncodeRequest(inputs=map(make_input, inputs), options=options)
        reply = await model.prepare(await codec.decode_call(request, LONGEST, 0))
        await model.run(reply)
        data = await shared.call("Encode", request)
        assert len(data) <= reply.estimated_bytes


async def test_a_reply_larger_than_its_estimate_is_refused(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server checks the finished reply. If the estimate was too low, a reply that is too large is refused."""
    server = await start_server(
        FakeEngine(D_MODEL), max_response_mib=1, max_request_sequences=4000, max_queue_tokens=10**6
    )
    monkeypatch.setattr("encserve_server.models.reply_size.ReplySize.check", lambda *_, **__: 0)
    failed = await refusal(server.encode(*[[1] * LONGEST] * 4000))
    assert failed.reason == "RESPONSE_TOO_LARGE"
