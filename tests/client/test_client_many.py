"""Tests of calls with one or many inputs.

The tests cover a single text, errors of single inputs, progress, writable arrays, tokens and spans.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_encoder import Caller, FakeEncoder, Refused, rows_of
from grpc import StatusCode

import encserve_client
from encserve_client import (
    EncserveError,
    InferenceError,
    InvalidInputError,
    InvalidRequestError,
    Output,
    SequenceInfo,
    sentence_spans,
    token_spans,
)
from encserve_client.inputs import check_spans
from encserve_proto.v1 import encoder_pb2 as pb

WORDS = rows_of([1, 3, 5, 2])  # the hidden states of "two words"
LONG = [4] * 65  # one more token than the service accepts
LATE = pb.ModelInfo(multi_vector_width=8, multi_vector_similarity="maxsim")


async def test_a_text_is_one_input(caller: Caller, service: FakeEncoder) -> None:
    """If the argument is a single text, the result is a single array and not a list."""
    service.model_info = pb.ModelInfo(tasks=[pb.TaskInfo(task=pb.TASK_QUERY)])
    client = caller.connect()
    np.testing.assert_array_equal(await caller(client.token_vectors, "two words"), WORDS)
    np.testing.assert_allclose(await caller(client.embed, "two words"), WORDS.mean(axis=0), rtol=1e-6)
    assert (await caller(client.embed, "two words", task="query")).shape == (8,)
    assert len((await caller(client.run, "two words")).sequences) == 1
    assert len(await caller.all_of(client, "two words")) == 1
    service.model_info = LATE
    late = caller.connect()
    assert (await caller(late.embed, "two words", kind="multi_vector")).shape == (2, 8)
    assert [len(it.inputs) for it in service.requests] == [1] * 6


@pytest.mark.parametrize("n", [1, 10])
async def test_arrays_are_writable(caller: Caller, service: FakeEncoder, n: int) -> None:
    """The caller may write to all arrays in results. The call may have one message, several messages or no inputs."""
    service.max_request_sequences = 4
    client, texts = caller.connect(), ["two words"] * n
    result = await caller(client.run, texts, outputs=["tokens", "mean"])
    info = result.sequences[0]
    arrays: list[Any] = [
        *await caller(client.token_vectors, texts),
        *await caller.all_of(client, texts),
        await caller(client.embed, texts),
        await caller(client.embed, []),
        *result.outputs[0].arrays(),
        result.outputs[0].matrix(),
        result.outputs[0].blocks[0].lengths,
        info.token_ids,
        info.offsets,
        info.special,
    ]
    for array in arrays:
        array[...] = 0


@pytest.mark.parametrize("size", [4, 256])
async def test_a_failed_input_does_not_fail_the_others(caller: Caller, service: FakeEncoder, size: int) -> None:
    """A failed input of a stream has an error at its index.

    An input fails if the client finds it invalid, if the server refuses it, or if the model fails for it.
    """
    service.max_request_sequences = size

    async def poisoned(request: pb.EncodeRequest) -> None:
        for index, item in enumerate(request.inputs):
            if list(item.token_ids.ids) == [66]:
                raise Refused(
                    StatusCode.INTERNAL, f"inputs[{index}]: the model could not compute this input", "INFERENCE_FAILED"
                )

    service.before = poisoned
    inputs: list[Any] = [[i] for i in range(1, 60)]
    inputs[3], inputs[4], inputs[20], inputs[41], inputs[58] = LONG, LONG, [66], None, [1.5]
    client = caller.connect()
    found = await caller.all_of(client, inputs)
    failed = {index: type(it) for index, it in enumerate(found) if isinstance(it, EncserveError)}
    refused, wrong = InvalidRequestError, InvalidInputError
    assert failed == {3: refused, 4: refused, 20: InferenceError, 41: wrong, 58: wrong}
    for index, it in enumerate(found):
        if index in failed:
            assert it.index == index
            assert f"inputs[{index}]" in str(it)
        else:
            np.testing.assert_array_equal(it, rows_of(inputs[index]))
    vectors = await caller.all_of(client, inputs, kind="vector")
    assert {index for index, it in enumerate(vectors) if isinstance(it, EncserveError)} == set(failed)
    assert {it.shape for it in vectors if not isinstance(it, EncserveError)} == {(8,)}


async def test_all_refused_inputs_of_a_message_are_known_after_one_reply(caller: Caller, service: FakeEncoder) -> None:
    """The server names all refused inputs in a trailer. The client sends the other inputs of the message once more."""

    async def name_all(request: pb.EncodeRequest) -> None:
        errors = [
            {"message": f"inputs[{i}].token_ids: has {len(it.token_ids.ids)} tokens", "reason": "SEQUENCE_TOO_LONG"}
            for i, it in enumerate(request.inputs)
            if len(it.token_ids.ids) == len(LONG)
        ]
        if errors:
            first = errors[0]
            raise Refused(
                StatusCode.INVALID_ARGUMENT, first["message"], first["reason"], refused_inputs=json.dumps(errors)
            )

    service.before = name_all
    inputs = [LONG if i % 3 == 0 else [i] for i in range(50)]
    client = caller.connect()
    result = await caller(client.run, inputs)
    assert [len(request.inputs) for request in service.requests] == [50, 33]
    assert list(result.errors) == list(range(0, 50, 3))
    for index, error in result.errors.items():
        assert (error.index, error.field, error.reason) == (index, f"inputs[{index}]", "SEQUENCE_TOO_LONG")
        assert type(error) is InvalidRequestError
    for index in range(50):
        if index % 3:
            np.testing.assert_array_equal(result.outputs[0].array(index), rows_of([index]))
    found = await caller.all_of(client, inputs)
    assert [index for index, it in enumerate(found) if isinstance(it, EncserveError)] == list(range(0, 50, 3))
    with pytest.raises(InvalidRequestError, match=r"^inputs\[0\]: has 65 tokens$"):
        await caller(client.embed, inputs)


async def test_all_inputs_may_fail(caller: Caller) -> None:
    found = await caller.all_of(caller.connect(), [LONG, None], kind="vector")
    assert [type(it) for it in found] == [InvalidRequestError, InvalidInputError]


async def test_a_bool_is_no_token_id(caller: Caller) -> None:
    client = caller.connect()
    text = r"^inputs\[1\]\[1\] must be an integer of 64 bits; was True$"
    result = await caller(client.run, [[1], [1, True]])
    [_, streamed] = await caller.all_of(client, [[1], [1, True]])
    for error in (result.errors[1], streamed):
        with pytest.raises(InvalidInputError, match=text):
            raise error


async def test_the_error_of_a_call_has_the_index(caller: Caller, service: FakeEncoder) -> None:
    service.max_request_sequences = 2
    client = caller.connect()
    for inputs in ([[1]] * 5 + [LONG], [[1]] * 5 + [[]]):
        with pytest.raises(InvalidRequestError, match=r"^inputs\[5\]") as caught:
            await caller(client.token_vectors, inputs)
        assert caught.value.index == 5


async def test_progress(caller: Caller, service: FakeEncoder) -> None:
    """The callback `progress` gets the number of finished inputs.

    If the callback raises an exception, the call raises the same exception.
    """
    service.max_request_sequences = 3
    client = caller.connect()
    inputs = [[i + 1] for i in range(10)]
    for method in (client.token_vectors, client.embed, client.run):
        calls: list[tuple[int, int]] = []
        await caller(method, inputs, progress=lambda *its, calls=calls: calls.append(its))
        assert calls == sorted(set(calls))
        assert len(calls) == 4
        assert calls[-1] == (10, 10)
    calls = []
    await caller.all_of(client, [[1], LONG, [3]], progress=lambda *its: calls.append(its))
    assert calls[-1] == (3, 3)

    def stop(done: int, total: int | None) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        await caller(client.token_vectors, inputs, progress=stop)
    with pytest.raises(InvalidInputError, match="progress must be a function or None; was str"):
        await caller(client.token_vectors, inputs, progress="bar")


async def test_the_detail_of_sequences_suits_the_method(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect()
    await caller(client.token_vectors, ["a"])
    await caller(client.embed, ["a"])
    await caller(client.run, ["a"])
    result = await caller(client.run, ["a"], outputs=["mean"], detail="tokens", offset_unit="utf8_bytes")
    assert result.sequences[0].token_ids.tolist() == [1, 1, 2]
    assert [it.options.detail for it in service.requests] == [
        pb.DETAIL_COUNTS,
        pb.DETAIL_NONE,
        pb.DETAIL_UNSPECIFIED,
        pb.DETAIL_TOKENS,
    ]
    assert service.requests[-1].options.offset_unit == pb.OFFSET_UNIT_UTF8_BYTES
    for wrong in ({"detail": "all"}, {"offset_unit": "tokens"}):
        with pytest.raises(InvalidInputError, match=f"{next(iter(wrong))} must be one of"):
            await caller(client.run, ["a"], **wrong)


async def test_texts_to_tokenize_share_messages_of_any_number_of_tokens(caller: Caller, service: FakeEncoder) -> None:
    await caller(caller.connect().tokenize, ["a " * 60] * 200)
    assert [len(it.texts) for it in service.tokenize_requests] == [200]


async def test_tokenize(caller: Caller, service: FakeEncoder) -> None:
    """`tokenize` splits the texts into several messages. An error has the index of the text in the call."""
    service.max_request_sequences = 3
    client = caller.connect()
    texts = [f"{'x' * (i + 1)} words" for i in range(10)]
    found = await caller(client.tokenize, texts, include_token_strings=True)
    assert [it.token_ids.tolist() for it in found] == [[1, i + 1, 5, 2] for i in range(10)]
    assert found[3].tokens == ("[FIRST]", "xxxx", "words", "[LAST]")
    assert [len(it.texts) for it in service.tokenize_requests] == [3, 3, 3, 1]
    assert (await caller(client.tokenize, "one")).token_count == 3
    assert await caller(client.tokenize, []) == []
    with pytest.raises(InvalidRequestError, match=r"^texts\[7\]: has 72 tokens") as caught:
        await caller(client.tokenize, [*texts[:7], "word " * 70], truncate=False)
    assert caught.value.index == 7
    with pytest.raises(InvalidInputError, match=r"texts\[1\] must be a str; was list"):
        await caller(client.tokenize, ["a", [1]])
    with pytest.raises(
        InvalidInputError, match=r"^texts\[0\] must be valid Unicode; has half of a surrogate pair at character 1$"
    ):
        await caller(client.tokenize, ["b\ud83d"])


async def test_spans_are_sent_with_their_unit(caller: Caller, service: FakeEncoder) -> None:
    await caller(caller.connect().embed_spans, "two words", [(0, 3), (4, 9)], pooling="max", unit="utf8_bytes")
    [request] = service.requests
    spans = request.inputs[0].spans
    assert (list(spans.starts), list(spans.ends), spans.unit) == ([0, 4], [3, 9], pb.OFFSET_UNIT_UTF8_BYTES)
    [output] = request.options.outputs
    assert (output.kind, output.span_pooling) == (pb.OUTPUT_KIND_SPANS, pb.OUTPUT_KIND_MAX)


NEW_KIND = 77  # a value that only a newer server knows


async def test_an_unknown_kind_is_returned_as_its_number(caller: Caller, service: FakeEncoder) -> None:
    service.model_info = pb.ModelInfo(pooling=NEW_KIND, input_kind=NEW_KIND)  # type: ignore[arg-type]

    async def of_new_kind(request: pb.EncodeRequest) -> pb.EncodeResponse:
        response = service.answer(request)
        response.outputs[0].kind = NEW_KIND  # type: ignore[assignment]
        return response

    service.before = of_new_kind
    client = caller.connect()
    info = await caller(client.model)
    assert (info.pooling, info.input_kind, info.trained_kind) == (NEW_KIND, NEW_KIND, "model")
    assert json.dumps(info.pooling) == "77"
    result = await caller(client.run, ["a", "b"], outputs=["model"])
    assert result.outputs[0].kind == NEW_KIND
    assert (await caller(client.embed, ["a", "b"])).shape == (2, 8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: check_spans([(1, -1)]),
        lambda: check_spans([(1, 2, 3)]),  # type: ignore[list-item]
        lambda: token_spans(SequenceInfo(1, 1, False, None, None, None, None), 5),
        lambda: token_spans(SequenceInfo(1, 1, False, None, np.zeros((1, 2), np.int64), None, None), 0),
        lambda: Output("spans", span_pooling="model"),  # type: ignore[arg-type]
    ],
    ids=["a negative end", "three numbers", "no offsets", "no tokens in a span", "the pooling of a span"],
)
def test_wrong_spans_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidInputError):
        make()


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two!  Three?", ["One.", "Two!", "Three?"]),
        ("  no end", ["no end"]),
        ("3.14 is pi. It is.", ["3.14 is pi.", "It is."]),
        ('He said "no." Then left.', ['He said "no."', "Then left."]),
        ("一つ。二つ！三つ", ["一つ。", "二つ！", "三つ"]),
        ("A title\n\nA text", ["A title", "A text"]),
        ("", []),
        (" \n ", []),
        ("Wait... what?!", ["Wait...", "what?!"]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert [text[start:end] for start, end in sentence_spans(text)] == sentences


def test_token_spans() -> None:
    """`token_spans` divides the tokens into spans of `size` tokens. The last span may have fewer tokens.

    Special tokens do not belong to a span.
    """
    offsets = np.array([(0, 0), (0, 3), (3, 5), (6, 9), (10, 11), (11, 12), (0, 0)])
    info = SequenceInfo(7, 7, False, None, offsets, None, None)
    assert token_spans(info, 2) == [(0, 5), (6, 11), (11, 12)]
    assert token_spans(info, 9) == [(0, 12)]
    assert token_spans(SequenceInfo(2, 2, False, None, offsets[[0, 6]], None, None), 2) == []


async def test_a_sparse_vector_has_the_width_of_the_new_model(caller: Caller, service: FakeEncoder) -> None:
    """The client remembers a model. The server then loads another model, which has a larger vocabulary."""
    service.model_info = pb.ModelInfo(sparse_width=10)
    client = caller.connect()
    await caller(client.embed, ["abc"], kind="sparse")
    service.model_info, service.fingerprint = pb.ModelInfo(sparse_width=1000), "e" * 16
    [vector] = await caller(client.embed, ["abc"], kind="sparse")
    assert vector.width == 1000
    [vector] = await caller.all_of(client, ["abc"], kind="sparse")
    assert vector.width == 1000


async def test_an_expected_fingerprint_is_named_by_tokenize(caller: Caller) -> None:
    with pytest.raises(
        encserve_client.FingerprintError, match="^expected_fingerprint: e{16} is expected, but the answer has f"
    ):
        await caller(caller.connect(expected_fingerprint="e" * 16).tokenize, ["a"])


async def test_a_very_long_timeout_is_no_timeout(caller: Caller) -> None:
    assert (await caller(caller.connect(timeout_seconds=1e12).embed, "a")).shape == (8,)
