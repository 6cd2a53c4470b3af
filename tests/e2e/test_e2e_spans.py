"""Spans, tokens, detail and binary vectors, asked for by the clients of a real server with real weights."""

import numpy as np
import pytest
from real_server import RealServer

from encserve_client import (
    AsyncEncoderClient,
    EncoderClient,
    InvalidRequestError,
    ModelNotFoundError,
    Output,
    sentence_spans,
    token_spans,
)
from encserve_client.options import SpanPooling

TEXT = "Grüße aus Köln! 東京 is far. The cat sleeps 🌍 on the warm windowsill. It dreams of 3.14 mice."
POOLINGS: tuple[SpanPooling, ...] = ("mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length")


def pooled(rows: np.ndarray, pooling: SpanPooling) -> np.ndarray:
    """(width,): the rows of one range, in float64."""
    rows = rows.astype(np.float64)
    weights = np.arange(1, len(rows) + 1)[:, None]
    by_pooling: dict[SpanPooling, np.ndarray] = {
        "mean": rows.mean(axis=0),
        "cls": rows[0],
        "max": rows.max(axis=0),
        "last_token": rows[-1],
        "weighted_mean": (rows * weights).sum(axis=0) / weights.sum(),
        "mean_sqrt_length": rows.sum(axis=0) / np.sqrt(len(rows)),
    }
    return by_pooling[pooling]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_span_is_the_pooled_rows_of_its_tokens(client: EncoderClient, pooling: SpanPooling) -> None:
    """As the client has them from the same text: sentences, every so many tokens, ranges that overlap."""
    result = client.run(TEXT)
    [rows], [info] = result.outputs[0].arrays(), result.sequences
    assert info.offsets is not None
    starts, ends = info.offsets.T
    spans = [*sentence_spans(TEXT), *token_spans(info, 3), (0, len(TEXT)), (5, 30), (6, 8)]
    got = client.embed_spans(TEXT, spans, pooling=pooling)
    for (start, end), row in zip(spans, got, strict=True):
        its = rows[(starts < end) & (ends > start) & (ends > starts)]
        np.testing.assert_allclose(row, pooled(its, pooling), atol=1e-6)


def test_spans_in_every_unit(client: EncoderClient) -> None:
    """Of a text in code points, bytes and tokens, and of its ids in tokens, the same rows."""
    spans = sentence_spans(TEXT)
    want = client.embed_spans(TEXT, spans)
    in_bytes = [tuple(len(TEXT[:place].encode()) for place in span) for span in spans]
    np.testing.assert_array_equal(client.embed_spans(TEXT, in_bytes, unit="utf8_bytes"), want)  # type: ignore[arg-type]
    info = client.tokenize(TEXT)
    assert info.offsets is not None
    assert info.token_ids is not None
    starts, ends = info.offsets.T
    places = [np.flatnonzero((starts < end) & (ends > start)) for start, end in spans]
    in_tokens = [(int(its[0]), int(its[-1]) + 1) for its in places]
    np.testing.assert_array_equal(client.embed_spans(TEXT, in_tokens, unit="tokens"), want)
    np.testing.assert_array_equal(client.embed_spans(info.token_ids, in_tokens), want)


def test_a_thousand_spans(client: EncoderClient) -> None:
    spans = [(i % 40, 40 + i % 50) for i in range(1000)]
    rows = client.embed_spans(TEXT, spans, l2_normalize=True, dimensions=16)
    assert rows.shape == (1000, 16)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert not rows.flags.writeable


def test_spans_without_tokens_and_wrong_ones(client: EncoderClient) -> None:
    assert not client.embed_spans(TEXT, [(3, 3), (15, 16)]).any()  # empty, and a space
    assert client.embed_spans(TEXT, []).shape[0] == 0
    long = "The cat sleeps. " * 300
    rows = client.embed_spans(long, [(0, 15), (4000, 4015)], truncate=True)
    assert rows.any(axis=1).tolist() == [True, False]
    for span, words in (((5, 4), r"spans.*end, 4; was 5"), ((0, 5000), "spans.*was 5000")):
        with pytest.raises(InvalidRequestError, match=words):
            client.embed_spans(TEXT, [span])


def test_tokens_are_those_that_encode_sees(client: EncoderClient) -> None:
    """In several messages; every token unless it is to be cut, and offsets in bytes on request."""
    texts = [TEXT, "", "The cat sleeps. " * 300] * 120
    told: list[tuple[int, int | None]] = []
    found = client.tokenize(texts, include_token_strings=True, progress=lambda *its: told.append(its))
    assert len(found) == len(texts)
    assert told[-1] == (360, 360)
    [info] = client.run(TEXT, include_token_strings=True).sequences
    for one in (found[0], client.tokenize(TEXT, include_token_strings=True)):
        assert (one.token_count, one.tokens) == (info.token_count, info.tokens)
        np.testing.assert_array_equal(one.token_ids, info.token_ids)
        np.testing.assert_array_equal(one.offsets, info.offsets)
    limit = client.model().max_sequence_tokens
    assert found[2].token_count > limit
    cut = client.tokenize(texts[2], truncate=True)
    assert (cut.token_count, cut.original_token_count, cut.truncated) == (limit, found[2].token_count, True)
    with pytest.raises(InvalidRequestError, match=r"^texts\[2\]") as caught:
        client.tokenize(texts[:3], truncate=False)
    assert caught.value.index == 2
    offsets = client.tokenize(TEXT, offset_unit="utf8_bytes").offsets
    assert offsets is not None
    assert int(offsets.max()) == len(TEXT.encode())
    assert client.tokenize([]) == []
    with pytest.raises(ModelNotFoundError):
        client.tokenize(TEXT, model="nope")


def test_binary_vectors(client: EncoderClient) -> None:
    """The signs of the numbers, eight in a byte; the same from `run`, from a stream, and of spans."""
    texts = [TEXT, "The cat", "3.14"]
    floats = client.embed(texts, dimensions=13)
    want = np.packbits(floats > 0, axis=1)
    assert want.shape == (3, 2)
    packed = client.embed(texts, dtype="binary", dimensions=13)
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, want)
    result = client.run(texts, outputs=[Output("model", dimensions=13)], dtype="binary")
    np.testing.assert_array_equal(result.outputs[0].matrix(), want)
    np.testing.assert_array_equal(list(client.embed_stream(texts, dtype="binary", dimensions=13)), want)
    spans = sentence_spans(TEXT)
    signs = np.packbits(client.embed_spans(TEXT, spans) > 0, axis=1)
    np.testing.assert_array_equal(client.embed_spans(TEXT, spans, dtype="binary"), signs)
    assert client.embed([], dtype="binary", dimensions=13).shape == (0, 2)
    with pytest.raises(InvalidRequestError, match="BINARY|binary"):
        client.encode(texts, dtype="binary")


def test_detail(client: EncoderClient) -> None:
    """Rows of tokens tell of tokens, pooled vectors how many there were, unless something else is asked for."""
    for outputs, detail, has_count, has_ids in (
        (["tokens"], None, True, True),
        (["model"], None, True, False),
        (["model"], "tokens", True, True),
        (["tokens"], "counts", True, False),
        (["tokens"], "none", False, False),
    ):
        result = client.run([TEXT], outputs=outputs, detail=detail)  # type: ignore[arg-type]
        [info] = result.sequences
        assert (info.token_count > 0, info.token_ids is not None) == (has_count, has_ids)
        assert result.outputs[0].matrix().any()


async def test_asyncio(server: RealServer, client: EncoderClient) -> None:
    spans = sentence_spans(TEXT)
    async with AsyncEncoderClient(server.target) as asking:
        np.testing.assert_array_equal(await asking.embed_spans(TEXT, spans), client.embed_spans(TEXT, spans))
        assert (await asking.tokenize(TEXT)).token_count == client.tokenize(TEXT).token_count
        assert [it.token_count for it in await asking.tokenize(["a", "b c"])] == [3, 4]
        long = "The cat sleeps. " * 300
        first, error, last = await asking.embed([TEXT, long, "b"], return_exceptions=True)
        assert isinstance(error, InvalidRequestError)
        assert np.shape(first) == np.shape(last)  # type: ignore[arg-type]
