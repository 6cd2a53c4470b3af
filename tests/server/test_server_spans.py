"""Tests of spans, which are ranges of a text: the tokens in a span, pooled vectors, and refused spans."""

from typing import Any

import numpy as np
import pytest
from fake_engine import fake_rows
from fake_server import D_MODEL, LONGEST, Failed, FakeServer, StartServer, make_input, rows_of
from hypothesis import given
from hypothesis import strategies as st
from output_models import POOL

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.models.spans import SentSpans, place_spans
from encserve_server.outputs import SPAN_POOLINGS
from encserve_server.types.requests import OffsetUnit, OutputKind
from encserve_server.types.sequences import TokenSequence

Ranges = list[tuple[int, int]]
SPANS = pb.OutputSpec(kind=pb.OUTPUT_KIND_SPANS)
CHARACTERS, TOKENS, BYTES = pb.OFFSET_UNIT_CODE_POINTS, pb.OFFSET_UNIT_TOKENS, pb.OFFSET_UNIT_UTF8_BYTES


def spans(ranges: Ranges, unit: Any = 0) -> pb.Spans:
    return pb.Spans(unit=unit, starts=[start for start, _ in ranges], ends=[end for _, end in ranges])


def with_spans(it: Any, ranges: Ranges, unit: Any = 0) -> pb.Input:
    sent = make_input(it)
    sent.spans.CopyFrom(spans(ranges, unit))
    return sent


async def encode(server: FakeServer, *inputs: pb.Input, **options: Any) -> pb.EncodeResponse:
    request = pb.EncodeRequest(inputs=inputs, options=pb.EncodeOptions(**{"outputs": [SPANS]} | options))
    return pb.EncodeResponse.FromString(await server.call("Encode", request))


@st.composite
def texts_and_ranges(draw: st.DrawFn) -> tuple[str, Ranges, int]:
    """Draw a text, ranges of the text, and a maximum number of tokens.

    Each code point of the text has one, two or four bytes.
    """
    text = draw(st.text("ab é🙂", max_size=20))
    size = len(text)
    ranges = draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted), min_size=1, max_size=6))
    return text, [(start, end) for start, end in ranges], draw(st.integers(2, 12))


def tokenized(text: str, longest: int) -> tuple[TokenSequence, list[tuple[int, int]]]:
    """Return a truncated sequence, and the ranges of its words in the text.

    The sequence has one token for each word, between two special tokens.
    """
    starts = [i for i, it in enumerate(text) if it != " " and (i == 0 or text[i - 1] == " ")]
    words = [(start, start + len(text[start:].split(" ")[0])) for start in starts]
    kept = words[: longest - 2]
    count = len(kept) + 2
    sequence = TokenSequence(
        np.arange(count),
        char_starts=[0, *(start for start, _ in kept), 0],
        char_ends=[0, *(end for _, end in kept), 0],
        special=np.array([True, *[False] * len(kept), True]),
        original_token_count=len(words) + 2,
        kept_after=1 if len(kept) < len(words) else 0,
    )
    return sequence, kept


def sent(ranges: Ranges, unit: OffsetUnit) -> SentSpans:
    bounds = np.array(ranges, np.int64).reshape(-1, 2)
    return SentSpans(unit, bounds[:, 0], bounds[:, 1])


@given(texts_and_ranges())
def test_a_range_of_characters_has_the_tokens_that_overlap_it(made: tuple[str, Ranges, int]) -> None:
    text, ranges, longest = made
    sequence, words = tokenized(text, longest)
    placed = place_spans(0, sent(ranges, OffsetUnit.CODE_POINTS), text, sequence).tolist()
    for (start, end), span in zip(ranges, placed, strict=True):
        sharing = [i for i, (first, last) in enumerate(words, 1) if first < end and start < last and start < end]
        assert span == ([sharing[0], sharing[-1] + 1] if sharing else [0, 0])


@given(texts_and_ranges())
def test_a_range_of_bytes_equals_its_range_of_characters(made: tuple[str, Ranges, int]) -> None:
    text, ranges, longest = made
    sequence, _ = tokenized(text, longest)
    in_bytes = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in ranges]
    placed = place_spans(0, sent(in_bytes, OffsetUnit.UTF8_BYTES), text, sequence)
    np.testing.assert_array_equal(placed, place_spans(0, sent(ranges, OffsetUnit.CODE_POINTS), text, sequence))


def test_a_byte_within_a_character_selects_the_whole_character() -> None:
    sequence, _ = tokenized("a é", 8)
    ranges = [(2, 3), (3, 4), (3, 3), (0, 3)]
    assert place_spans(0, sent(ranges, OffsetUnit.UTF8_BYTES), "a é", sequence).tolist() == [
        [2, 3],
        [2, 3],
        [0, 0],
        [1, 3],
    ]


def test_tokens_may_be_in_another_order_than_the_text() -> None:
    """The order of tokens may differ from the order of the text.

    The first token of a range is the first token that ends after the range's start. The last token of a range is the
    last token that begins before the range's end.
    """
    sequence = TokenSequence(np.arange(3), 3, np.zeros(3, np.bool_), [2, 0, 4], [3, 2, 5])
    ranges = [(0, 1), (2, 3), (3, 4), (4, 5)]
    placed = place_spans(0, sent(ranges, OffsetUnit.CODE_POINTS), "abcde", sequence)
    assert placed.tolist() == [[0, 2], [0, 2], [0, 0], [2, 3]]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.data())
def test_a_range_of_tokens_selects_the_same_tokens_after_truncation(
    count: int, longest: int, kept_after: int, data: st.DataObject
) -> None:
    kept = min(count, longest)
    kept_after = min(kept_after, kept) if kept < count else 0
    seen = [*range(kept - kept_after), *range(count - kept_after, count)]
    sequence = TokenSequence(np.array(seen), count, kept_after=kept_after)
    start, end = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    [[first, behind]] = place_spans(0, sent([(start, end)], OffsetUnit.TOKENS), "", sequence).tolist()
    assert seen[first:behind] == [place for place in seen if start <= place < end]


async def test_each_range_is_a_row(shared: FakeServer) -> None:
    """Each range of a call gets one vector. An input without ranges gets no vectors.

    The call has both ranges of characters and ranges of tokens.
    """
    response = await encode(
        shared,
        with_spans("hello brave world", [(0, 5), (6, 17), (5, 6), (3, 7), (4, 4)]),
        with_spans([5, 6, 7], [(0, 3), (1, 2)]),
        with_spans("hello brave", [(0, 1), (0, 4)], TOKENS),
        make_input("world"),
    )
    [tensor] = response.outputs
    assert (tensor.kind, tensor.width, list(tensor.lengths)) == (pb.OUTPUT_KIND_SPANS, D_MODEL, [5, 2, 2, 0])
    text, ids = fake_rows(np.array([1, 4, 5, 7, 2]), D_MODEL), fake_rows(np.array([5, 6, 7]), D_MODEL)
    tokens = fake_rows(np.array([1, 4, 5, 2]), D_MODEL)
    zeros = np.zeros(D_MODEL)
    expected: list[Any] = [
        [text[1], text[2:4].mean(axis=0), zeros, text[1:3].mean(axis=0), zeros],
        [ids.mean(axis=0), ids[1]],
        [tokens[0], tokens.mean(axis=0)],
        np.empty((0, D_MODEL)),
    ]
    for rows, want in zip(rows_of(response), expected, strict=True):
        np.testing.assert_allclose(rows, want, rtol=1e-6)
    assert [list(it.span_token_counts) for it in response.sequences] == [[1, 2, 0, 2, 0], [3, 1], [1, 4], []]


async def test_a_truncated_range_has_zeros(shared: FakeServer) -> None:
    """A range without remaining tokens gets a vector of zeros.

    Ranges count tokens before truncation. So truncation does not change the position of the last special token.
    """
    text = "hello " * 50
    ranges = [(0, 1), (30, 33), (40, 51), (51, 52)]
    response = await encode(
        shared,
        with_spans(text, ranges, TOKENS),
        with_spans(text, [(174, 179), (180, 185)]),
        with_spans(list(range(40)), [(31, 40), (32, 40)]),
        truncation=pb.TRUNCATION_END,
    )
    assert [list(it.span_token_counts) for it in response.sequences] == [[1, 1, 0, 1], [1, 0], [1, 0]]
    rows = rows_of(response)
    ids = np.array([1, *[4] * 30, 2])
    np.testing.assert_array_equal(rows[0][[0, 3]], fake_rows(ids, D_MODEL)[[0, LONGEST - 1]])
    assert not rows[0][2].any()
    assert not rows[1][1].any()


@pytest.mark.parametrize("pooling", SPAN_POOLINGS)
async def test_every_pooling_of_ranges(shared: FakeServer, pooling: OutputKind) -> None:
    """Each pooling of a range is right, also for vectors that are cut, normalised, or returned as bits."""
    names: Any = pooling.value
    plain, unit = (
        pb.OutputSpec(kind=pb.OUTPUT_KIND_SPANS, span_pooling=names, l2_normalize=normalize, dimensions=dimensions)
        for normalize, dimensions in ((False, 0), (True, 2))
    )
    response = await encode(shared, with_spans([5, 6, 9], [(1, 3)]), outputs=[plain, unit, pb.OutputSpec()])
    rows = fake_rows(np.array([5, 6, 9]), D_MODEL)
    expected = POOL[pooling](rows[1:3].astype(np.float64))
    np.testing.assert_allclose(rows_of(response)[0][0], expected, rtol=1e-6)
    np.testing.assert_allclose(rows_of(response, 1)[0][0], expected[:2] / np.linalg.norm(expected[:2]), rtol=1e-6)
    assert response.outputs[1].l2_normalized
    options: dict[str, Any] = {"outputs": [plain], "data_type": pb.DATA_TYPE_BINARY}
    binary = (await encode(shared, with_spans([5, 6, 9], [(1, 3), (0, 0)]), **options)).outputs[0]
    assert (binary.data_type, binary.width) == (pb.DATA_TYPE_BINARY, D_MODEL)
    assert (binary.data, list(binary.lengths)) == (b"\xf0\x00", [2])


async def test_a_range_of_the_text_has_no_words_of_the_prompt(start_server: StartServer) -> None:
    server = await start_server(prompts={"q": "brave new "})
    response = await encode(server, with_spans("hello", [(0, 5)]), with_spans("hello", [(1, 3)], TOKENS))
    assert [list(it.span_token_counts) for it in response.sequences] == [[1], [2]]
    rows = fake_rows(np.array([1, 5, 6, 4, 2]), D_MODEL)
    np.testing.assert_allclose(rows_of(response)[0][0], rows[3])
    np.testing.assert_allclose(rows_of(response)[1][0], rows[1:3].mean(axis=0))


async def test_vectors_can_have_ranges(start_server: StartServer) -> None:
    server = await start_server(takes_vectors=True)
    vectors = np.ones((3, D_MODEL), np.float32)
    response = await encode(server, with_spans(vectors, [(0, 2)]))
    np.testing.assert_allclose(rows_of(response)[0][0], fake_rows(vectors, D_MODEL)[:2].mean(axis=0))


def second_input(ranges: Ranges, unit: Any = 0, it: Any = "hello é") -> list[pb.Input]:
    return [make_input("hello"), with_spans(it, ranges, unit)]


UNEVEN = pb.Input(text="hello", spans=pb.Spans(starts=[0, 1], ends=[1]))
POOLED_BY_MODEL = pb.OutputSpec(kind=pb.OUTPUT_KIND_SPANS, span_pooling=pb.OUTPUT_KIND_MODEL_POOLING)
OF_MEAN = pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN, span_pooling=pb.OUTPUT_KIND_MAX)
BAD: list[tuple[list[pb.Input], list[pb.OutputSpec], str]] = [
    (second_input([(0, 1), (4, 3)]), [SPANS], r"inputs\[1\].spans.starts\[1\]: .* 3; was 4"),
    (second_input([(8, 8)]), [SPANS], r"inputs\[1\].spans.ends\[0\]: .* 7, the number of code points .* was 8"),
    (second_input([(0, 9)], BYTES), [SPANS], r"ends\[0\]: .* 8, the number of bytes .* was 9"),
    (second_input([(0, 3)], BYTES, "ok"), [SPANS], r"ends\[0\]: .* 2, the number of bytes .* was 3"),
    (second_input([(0, 5)], TOKENS), [SPANS], r"ends\[0\]: .* 4, the number of tokens .* was 5"),
    (second_input([(0, 1)], CHARACTERS, [5]), [SPANS], r"inputs\[1\].spans.unit: OFFSET_UNIT_CODE_POINTS"),
    (second_input([(0, 1)], 4), [SPANS], "spans.unit: .* OffsetUnit, 0 to 3; was 4"),
    ([UNEVEN], [SPANS], r"inputs\[0\].spans.ends: .* 2; was 1"),
    (second_input([(0, 1)] * 16385), [SPANS], r"inputs\[1\].spans.starts: .* 16384; was 16385"),
    (second_input([(0, 1)]), [pb.OutputSpec()], r"inputs\[1\].spans: .* OUTPUT_KIND_SPANS"),
    (second_input([]), [POOLED_BY_MODEL], r"outputs\[0\].span_pooling: .* was OUTPUT_KIND_MODEL_POOLING"),
    (second_input([]), [SPANS, OF_MEAN], r"outputs\[1\].span_pooling: .* was OUTPUT_KIND_MAX"),
]


@pytest.mark.parametrize(("inputs", "outputs", "problem"), BAD)
async def test_a_bad_range_is_refused_by_field_and_number(
    shared: FakeServer, inputs: list[pb.Input], outputs: list[pb.OutputSpec], problem: str
) -> None:
    batches = list(shared.engine.batches)
    with pytest.raises(Failed, match=problem) as caught:
        await encode(shared, *inputs, outputs=outputs)
    assert caught.value.code.name == "INVALID_ARGUMENT"
    assert shared.engine.batches == batches


async def test_an_inspection_refuses_ranges(shared: FakeServer) -> None:
    with pytest.raises(Failed, match="input.spans: is only for Encode"):
        await shared.inspect(pb.InspectRequest(input=with_spans("hello", [(0, 1)])))


async def test_the_memory_of_ranges_is_bounded(start_server: StartServer) -> None:
    """A call is refused if the vectors of its ranges would take too much memory.

    The server counts float32 vectors, even if the reply has only bits. Otherwise, a small request could use any amount
    of memory.
    """
    server = await start_server(max_response_mib=1)
    inputs = [with_spans([5], [(0, 1)] * 16384) for _ in range(4)]
    problem = "inputs.spans: the rows of 65536 spans would take 1376256 bytes, over the limit of 1048576"
    with pytest.raises(Failed, match=problem) as caught:
        await encode(server, *inputs, data_type=pb.DATA_TYPE_BINARY)
    assert caught.value.reason == "RESPONSE_TOO_LARGE"
    await encode(server, *inputs[:3], data_type=pb.DATA_TYPE_BINARY)
    twice = [SPANS, pb.OutputSpec(kind=pb.OUTPUT_KIND_SPANS, span_pooling=pb.OUTPUT_KIND_MAX)]
    with pytest.raises(Failed, match="the first 1 of 3 inputs would fit") as caught:
        await encode(server, *inputs[:3], outputs=twice, data_type=pb.DATA_TYPE_BINARY)
    assert caught.value.reason == "RESPONSE_TOO_LARGE"
