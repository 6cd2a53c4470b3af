"""The server gives the rows that PyTorch computes: real weights, real text, any length, alone and in company."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from agreement import worst_relative_error
from architectures import rows_of
from checkpoints import GOLDENS, golden_cases, minilm_directory
from real_server import RealServer
from tokenizers import Tokenizer

from encserve_client import AsyncEncoderClient, EncoderClient, InvalidRequestError

PYTORCH, NEIGHBOURS = 5e-5, 1e-5
# Every short length, then fewer and fewer, and the last ones before 256 tokens, the longest that the model takes.
LENGTHS = sorted({*range(1, 17), *(round(1.25**i) for i in range(13, 25)), 127, 128, 129, 200, 254, 255, 256})
TEXTS = [
    "I understand this",
    "The cat sleeps on the warm windowsill.",
    "",
    "Grüße aus Köln, 東京 и Москва: naïve café 🌍 — “quoted”.",
    "a " * 240,
    "Licensed under the Apache License, Version 2.0; you may not use this file except in compliance with it. " * 9,
]


@pytest.fixture(scope="module")
def sequences(real_ids: list[int]) -> list[list[int]]:
    """Real text cut to each length, each from another place."""
    return [real_ids[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]


def test_rows_alone_in_mixed_batches_and_in_concurrent_calls(
    client: EncoderClient, minilm: Any, sequences: list[list[int]]
) -> None:
    want = [rows_of(minilm, ids) for ids in sequences]
    alone = [client.encode([ids])[0] for ids in sequences]
    together = client.encode(sequences)
    with ThreadPoolExecutor(32) as pool:
        concurrent = list(pool.map(lambda ids: client.encode([ids])[0], sequences))
    for rows in (alone, together, concurrent):
        assert max(map(worst_relative_error, rows, want)) <= PYTORCH


def test_rows_and_tokens_of_texts(client: EncoderClient, minilm: Any) -> None:
    """The bundle's tokenizer gives the ids of the checkpoint's."""
    tokenizer = Tokenizer.from_file(str(minilm_directory() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    result = client.run(TEXTS, include_token_strings=True)
    for text, info, rows in zip(TEXTS, result.sequences, result.outputs[0].arrays(), strict=True):
        encoding = tokenizer.encode(text)
        assert np.asarray(info.token_ids).tolist() == encoding.ids
        assert list(info.tokens or []) == encoding.tokens
        assert worst_relative_error(rows, rows_of(minilm, encoding.ids)) <= PYTORCH


def test_neighbours_change_nothing(client: EncoderClient, real_ids: list[int]) -> None:
    """Alone, and with 26 neighbours of other lengths, first, in the middle and last."""
    watched = [real_ids[100 : 100 + length] for length in (1, 2, 9, 64, 200, 256)]
    alone = [client.encode([ids])[0] for ids in watched]
    neighbours = [real_ids[i : i + 1 + (i * 37) % 250] for i in range(26)]
    for place in (0, 13, 26):
        rows = client.encode([*neighbours[:place], *watched, *neighbours[place:]])
        assert max(map(worst_relative_error, rows[place:], alone)) <= NEIGHBOURS


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_cases(client: EncoderClient, name: str) -> None:
    """The reference computed each case alone and without padding."""
    ids, want = golden_cases(name)
    together = client.encode(ids, model=name)
    alone = [client.encode([one], model=name)[0] for one in ids]
    for rows in (together, alone):
        assert max(map(worst_relative_error, rows, want)) <= PYTORCH


async def test_each_method_of_the_clients_gives_the_same(server: RealServer, client: EncoderClient) -> None:
    want = client.encode(TEXTS)
    found = {"stream": list(client.encode_stream(TEXTS))}
    async with AsyncEncoderClient(server.target) as other:
        found["async"] = await other.encode(TEXTS)
        found["async stream"] = [rows async for rows in other.encode_stream(TEXTS)]
    for method, rows in found.items():
        assert len(rows) == len(want), method
        assert max(map(worst_relative_error, rows, want)) <= NEIGHBOURS, method


def test_pooled_vectors_are_the_normalized_means_of_the_rows(client: EncoderClient) -> None:
    means = np.stack([rows.mean(axis=0) for rows in client.encode(TEXTS)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(client.embed(TEXTS), means, atol=1e-6)
    np.testing.assert_allclose(client.embed(TEXTS, dtype="float16"), means, atol=1e-3)


def test_related_sentences_score_higher(client: EncoderClient) -> None:
    cat, kitten, stocks, shares = client.embed(
        [
            "The cat sleeps on the warm windowsill.",
            "A kitten is napping by the sunny window.",
            "Stock markets fell sharply on Monday.",
            "Shares dropped at the start of the week.",
        ]
    )
    assert min(cat @ kitten, stocks @ shares) > 0.5
    assert max(cat @ stocks, cat @ shares, kitten @ stocks, kitten @ shares) < 0.3


def test_a_text_is_cut_at_max_seq_length_of_sentence_transformers(client: EncoderClient) -> None:
    """256 tokens, though the model has 512 positions; the special tokens stay."""
    with pytest.raises(InvalidRequestError, match=r"at most 256 tokens .*was 302"):
        client.embed(["word " * 300])
    info = client.run(["word " * 1000], truncate=True).sequences[0]
    assert (info.token_count, info.original_token_count, info.truncated) == (256, 1002, True)
    assert info.token_ids is not None
    assert (info.token_ids[0], info.token_ids[-1]) == (101, 102)
