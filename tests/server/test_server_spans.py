"""Ranges of a text: which tokens they have, their rows pooled, and what of them is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_engine import fake_rows
from fake_server import D_MODEL, LONGEST, Failed, FakeServer, StartServer, make_input
from hypothesis import given
from hypothesis import strategies as st

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.models.spans import SentSpans, place_spans
from encserve_server.outputs import SPAN_POOLINGS
from encserve_server.types.requests import OffsetUnit, OutputKind
from encserve_server.types.sequences import TokenSequence

Ranges = list[tuple[int, int]]
SPANS = pb.OutputSpec(kind=pb.OUTPUT_KIND_SPANS)
CHARACTERS, TOKENS, BYTES = pb.OFFSET_UNIT_CODE_POINTS, pb.OFFSET_UNIT_TOKENS, pb.OFFSET_UNIT_UTF8_BYTES
POOL: dict[OutputKind, Callable[[Any], Any]] = {
    OutputKind.MEAN: lambda rows: rows.mean(axis=0),
    OutputKind.CLS: lambda rows: rows[0],
    OutputKind.MAX: lambda rows: rows.max(axis=0),
    OutputKind.LAST_TOKEN: lambda rows: rows[-1],
    OutputKind.WEIGHTED_MEAN: lambda rows: np.average(rows, axis=0, weights=np.arange(1, len(rows) + 1)),
    OutputKind.MEAN_SQRT_LENGTH: lambda rows: rows.sum(axis=0) / np.sqrt(len(rows)),
}


def spans(ranges: Ranges, unit: Any = 0) -> pb.Spans:
    return pb.Spans(unit=unit, starts=[start for start, _ in ranges], ends=[end for _, end in ranges])


def with_spans(it: Any, ranges: Ranges, unit: Any = 0) -> pb.Input:
    sent = make_input(it)
    sent.spans.CopyFrom(spans(ranges, unit))
    return sent


async def encode(server: FakeServer, *inputs: pb.Input, **options: Any) -> pb.EncodeResponse:
    request = pb.EncodeRequest(inputs=inputs, options=pb.EncodeOptions(**{"outputs": [SPANS]} | options))
    return pb.EncodeResponse.FromString(await server.call("Encode", request))


def rows_of(tensor: pb.RaggedTensor) -> list[npt.NDArray[np.float32]]:
    """(spans, width) for each input."""
    rows = np.frombuffer(tensor.data, "<f4").reshape(-1, tensor.width)
    return np.split(rows, np.cumsum(tensor.lengths)[:-1])


@st.composite
def texts_and_ranges(draw: st.DrawFn) -> tuple[str, Ranges, int]:
    """A text of words of one, two and four bytes a code point, ranges of it, and the longest sequence."""
    text = draw(st.text("ab é🙂", max_size=20))
    size = len(text)
    ranges = draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted), min_size=1, max_size=6))
    return text, [(start, end) for start, end in ranges], draw(st.integers(2, 12))


def tokenized(text: str, longest: int) -> tuple[TokenSequence, list[tuple[int, int]]]:
    """A sequence with a token for each word between two special ones, cut to fit, and where its words stand."""
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
        kept_behind=1 if len(kept) < len(words) else 0,
    )
    return sequence, kept


def sent(ranges: Ranges, unit: OffsetUnit) -> SentSpans:
    bounds = np.array(ranges, np.int64).reshape(-1, 2)
    return SentSpans(unit, bounds[:, 0], bounds[:, 1])


@given(texts_and_ranges())
def test_a_range_of_characters_has_the_tokens_that_it_shares_any_with(made: tuple[str, Ranges, int]) -> None:
    text, ranges, longest = made
    sequence, words = tokenized(text, longest)
    placed = place_spans(0, sent(ranges, OffsetUnit.CODE_POINTS), text, sequence).tolist()
    for (start, end), span in zip(ranges, placed, strict=True):
        sharing = [i for i, (first, last) in enumerate(words, 1) if first < end and start < last and start < end]
        assert span == ([sharing[0], sharing[-1] + 1] if sharing else [0, 0])


@given(texts_and_ranges())
def test_bytes_are_the_characters_that_they_are_of(made: tuple[str, Ranges, int]) -> None:
    text, ranges, longest = made
    sequence, _ = tokenized(text, longest)
    in_bytes = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in ranges]
    placed = place_spans(0, sent(in_bytes, OffsetUnit.UTF8_BYTES), text, sequence)
    np.testing.assert_array_equal(placed, place_spans(0, sent(ranges, OffsetUnit.CODE_POINTS), text, sequence))


def test_bytes_within_a_character_have_all_of_it() -> None:
    sequence, _ = tokenized("a é", 8)
    ranges = [(2, 3), (3, 4), (3, 3), (0, 3)]
    assert place_spans(0, sent(ranges, OffsetUnit.UTF8_BYTES), "a é", sequence).tolist() == [
        [2, 3],
        [2, 3],
        [0, 0],
        [1, 3],
    ]


def test_tokens_need_not_stand_in_the_order_of_the_text() -> None:
    """A range then has what stands between its tokens too."""
    sequence = TokenSequence(np.arange(3), 3, np.zeros(3, np.bool_), [2, 0, 4], [3, 2, 5])
    ranges = [(0, 1), (2, 3), (3, 4), (4, 5)]
    placed = place_spans(0, sent(ranges, OffsetUnit.CODE_POINTS), "abcde", sequence)
    assert placed.tolist() == [[0, 2], [0, 2], [0, 0], [2, 3]]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.data())
def test_a_range_of_tokens_means_the_same_ones_however_the_sequence_is_cut(
    count: int, longest: int, kept_behind: int, data: st.DataObject
) -> None:
    kept = min(count, longest)
    kept_behind = min(kept_behind, kept) if kept < count else 0
    seen = [*range(kept - kept_behind), *range(count - kept_behind, count)]
    sequence = TokenSequence(np.array(seen), count, kept_behind=kept_behind)
    start, end = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    [[first, behind]] = place_spans(0, sent([(start, end)], OffsetUnit.TOKENS), "", sequence).tolist()
    assert seen[first:behind] == [place for place in seen if start <= place < end]


async def test_each_range_is_a_row(server: FakeServer) -> None:
    """Of characters and of tokens, in one call; what has no range has no row."""
    response = await encode(
        server,
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
    for rows, its in zip(rows_of(tensor), expected, strict=True):
        np.testing.assert_allclose(rows, its, rtol=1e-6)
    assert [list(it.span_token_counts) for it in response.sequences] == [[1, 2, 0, 2, 0], [3, 1], [1, 4], []]


async def test_what_was_cut_off_has_zeros(server: FakeServer) -> None:
    """Places are those before truncation, so the closing token is where it was."""
    text = "hello " * 50
    ranges = [(0, 1), (30, 33), (40, 51), (51, 52)]
    response = await encode(
        server,
        with_spans(text, ranges, TOKENS),
        with_spans(text, [(174, 179), (180, 185)]),
        with_spans(list(range(40)), [(31, 40), (32, 40)]),
        truncation=pb.TRUNCATION_END,
    )
    assert [list(it.span_token_counts) for it in response.sequences] == [[1, 1, 0, 1], [1, 0], [1, 0]]
    rows = rows_of(response.outputs[0])
    ids = np.array([1, *[4] * 30, 2])
    np.testing.assert_array_equal(rows[0][[0, 3]], fake_rows(ids, D_MODEL)[[0, LONGEST - 1]])
    assert not rows[0][2].any()
    assert not rows[1][1].any()


@pytest.mark.parametrize("pooling", SPAN_POOLINGS)
async def test_every_pooling_of_ranges(server: FakeServer, pooling: OutputKind) -> None:
    """Cut, normalised and of any type, as other outputs are."""
    names: Any = pooling.value
    plain, unit = (
        pb.OutputSpec(kind=pb.OUTPUT_KIND_SPANS, span_pooling=names, l2_normalize=normalize, dimensions=dimensions)
        for normalize, dimensions in ((False, 0), (True, 2))
    )
    response = await encode(server, with_spans([5, 6, 9], [(1, 3)]), outputs=[plain, unit, pb.OutputSpec()])
    rows = fake_rows(np.array([5, 6, 9]), D_MODEL)
    expected = POOL[pooling](rows[1:3].astype(np.float64))
    np.testing.assert_allclose(rows_of(response.outputs[0])[0][0], expected, rtol=1e-6)
    np.testing.assert_allclose(
        rows_of(response.outputs[1])[0][0], expected[:2] / np.linalg.norm(expected[:2]), rtol=1e-6
    )
    assert response.outputs[1].l2_normalized
    options: dict[str, Any] = {"outputs": [plain], "data_type": pb.DATA_TYPE_BINARY}
    binary = (await encode(server, with_spans([5, 6, 9], [(1, 3), (0, 0)]), **options)).outputs[0]
    assert (binary.data, list(binary.lengths)) == (b"\xf0\x00", [2])


async def test_words_of_a_prompt_are_in_no_range_of_the_text(start_server: StartServer) -> None:
    server = await start_server(prompts={"q": "brave new "})
    response = await encode(server, with_spans("hello", [(0, 5)]), with_spans("hello", [(1, 3)], TOKENS))
    assert [list(it.span_token_counts) for it in response.sequences] == [[1], [2]]
    rows = fake_rows(np.array([1, 5, 6, 4, 2]), D_MODEL)
    np.testing.assert_allclose(rows_of(response.outputs[0])[0][0], rows[3])
    np.testing.assert_allclose(rows_of(response.outputs[0])[1][0], rows[1:3].mean(axis=0))


async def test_vectors_have_ranges_too(start_server: StartServer) -> None:
    server = await start_server(takes_vectors=True)
    vectors = np.ones((3, D_MODEL), np.float32)
    response = await encode(server, with_spans(vectors, [(0, 2)]))
    np.testing.assert_allclose(rows_of(response.outputs[0])[0][0], fake_rows(vectors, D_MODEL)[:2].mean(axis=0))


def input_of(ranges: Ranges, unit: Any = 0, it: Any = "hello é") -> list[pb.Input]:
    return [make_input("hello"), with_spans(it, ranges, unit)]


UNEVEN = pb.Input(text="hello", spans=pb.Spans(starts=[0, 1], ends=[1]))
POOLED_BY_MODEL = pb.OutputSpec(kind=pb.OUTPUT_KIND_SPANS, span_pooling=pb.OUTPUT_KIND_MODEL_POOLING)
OF_MEAN = pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN, span_pooling=pb.OUTPUT_KIND_MAX)
BAD: dict[str, tuple[list[pb.Input], list[pb.OutputSpec], str]] = {
    "backwards": (
        input_of([(0, 1), (4, 3)]),
        [SPANS],
        r"inputs\[1\].spans.starts\[1\]: must be at most the range's end, 3; was 4",
    ),
    "behind the text": (
        input_of([(8, 8)]),
        [SPANS],
        r"inputs\[1\].spans.ends\[0\]: must be at most 7, the code points of the text; was 8",
    ),
    "bytes behind": (input_of([(0, 9)], BYTES), [SPANS], r"ends\[0\]: must be at most 8, the bytes of the text; was 9"),
    "ASCII bytes behind": (input_of([(0, 3)], BYTES, "ok"), [SPANS], "must be at most 2, the bytes of the text; was 3"),
    "tokens behind": (input_of([(0, 5)], TOKENS), [SPANS], "must be at most 4, the tokens before truncation; was 5"),
    "no text": (
        input_of([(0, 1)], CHARACTERS, [5]),
        [SPANS],
        r"inputs\[1\].spans.unit: OFFSET_UNIT_CODE_POINTS is for texts",
    ),
    "unit": (input_of([(0, 1)], 4), [SPANS], r"spans.unit: must be a value of OffsetUnit, 0 to 3; was 4"),
    "uneven": ([UNEVEN], [SPANS], r"inputs\[0\].spans.ends: must be as many as starts, 2; was 1"),
    "too many": (input_of([(0, 1)] * 16385), [SPANS], r"inputs\[1\].spans.starts: must be at most 16384; was 16385"),
    "not asked for": (input_of([(0, 1)]), [pb.OutputSpec()], r"inputs\[1\].spans: is for OUTPUT_KIND_SPANS, which"),
    "model pooling": (
        input_of([]),
        [POOLED_BY_MODEL],
        r"outputs\[0\].span_pooling: must be one of .*; was OUTPUT_KIND_MODEL_POOLING",
    ),
    "another kind": (
        input_of([]),
        [SPANS, OF_MEAN],
        r"outputs\[1\].span_pooling: is for OUTPUT_KIND_SPANS alone; was OUTPUT_KIND_MAX",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_is_wrong_is_named(server: FakeServer, name: str) -> None:
    inputs, outputs, problem = BAD[name]
    with pytest.raises(Failed, match=problem) as caught:
        await encode(server, *inputs, outputs=outputs)
    assert caught.value.code.name == "INVALID_ARGUMENT"
    assert not server.engine.batches


async def test_inspections_have_no_ranges(server: FakeServer) -> None:
    with pytest.raises(Failed, match="input.spans: is only for Encode"):
        await server.inspect(pb.InspectRequest(input=with_spans("hello", [(0, 1)])))


async def test_a_thousand_ranges_of_a_text(server: FakeServer) -> None:
    ranges = [(i % 7, i % 7 + i % 11) for i in range(1000)]
    response = await encode(server, with_spans("hello brave new world", ranges))
    assert list(response.outputs[0].lengths) == [1000]


async def test_ranges_are_reckoned_as_they_are_made(start_server: StartServer) -> None:
    """However small their type: else a small request could take any memory."""
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
