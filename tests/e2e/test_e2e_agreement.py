"""What is served is what PyTorch computes: real weights, real text, any length, alone and in company."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from agreement import worst_relative_error
from checkpoints import GOLDENS, golden_cases, minilm_directory
from real_server import RealServer
from tokenizers import Tokenizer

from encserve_client import AsyncEncoderClient, EncoderClient, InvalidRequestError
from encserve_export import Encoder

PYTORCH, NEIGHBOURS = 5e-5, 1e-5
TEXTS = [
    "I understand this",
    "The cat sleeps on the warm windowsill.",
    "",
    "Grüße aus Köln, 東京 и Москва: naïve café 🌍 — “quoted”.",
    "a " * 240,
    "Licensed under the Apache License, Version 2.0; you may not use this file except in compliance with it. " * 9,
]


def in_pytorch(encoder: Encoder, ids: list[int]) -> Any:
    """The rows of one sequence run alone and unpadded."""
    with torch.no_grad():
        rows = encoder(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64))
    return rows[0].numpy()


def lengths_to_try() -> list[int]:
    """1 to 256, the model's longest: every short one, then ever fewer, and the last ones."""
    return sorted({*range(1, 17), *(round(1.25**i) for i in range(13, 25)), 127, 128, 129, 200, 254, 255, 256})


@pytest.fixture(scope="module")
def sequences(real_ids: list[int]) -> list[list[int]]:
    """Real text cut to each length, every one from another place."""
    return [real_ids[7 * i : 7 * i + length] for i, length in enumerate(lengths_to_try())]


@pytest.fixture(scope="module")
def wanted(torch_encoder: Encoder, sequences: list[list[int]]) -> list[Any]:
    return [in_pytorch(torch_encoder, ids) for ids in sequences]


def test_alone(client: EncoderClient, sequences: list[list[int]], wanted: list[Any]) -> None:
    """One sequence a call, one call at a time."""
    errors = [worst_relative_error(client.encode([ids])[0], want) for ids, want in zip(sequences, wanted, strict=True)]
    assert max(errors) <= PYTORCH


def test_in_mixed_batches(client: EncoderClient, sequences: list[list[int]], wanted: list[Any]) -> None:
    """All lengths in one call, and all as concurrent calls."""
    together = client.encode(sequences)
    with ThreadPoolExecutor(32) as pool:
        concurrent = list(pool.map(lambda ids: client.encode([ids])[0], sequences))
    for rows in (together, concurrent):
        assert max(map(worst_relative_error, rows, wanted)) <= PYTORCH


def test_texts(client: EncoderClient, torch_encoder: Encoder) -> None:
    """Text goes through the bundle's own tokenizer to the same ids as through the checkpoint's."""
    tokenizer = Tokenizer.from_file(str(minilm_directory() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    result = client.run(TEXTS, include_token_strings=True)
    for text, info, rows in zip(TEXTS, result.sequences, result.outputs[0].arrays(), strict=True):
        encoding = tokenizer.encode(text)
        assert np.asarray(info.token_ids).tolist() == encoding.ids
        assert list(info.tokens or []) == encoding.tokens
        assert worst_relative_error(rows, in_pytorch(torch_encoder, encoding.ids)) <= PYTORCH


def test_neighbours_change_nothing(client: EncoderClient, real_ids: list[int]) -> None:
    """Alone, and with 31 neighbours of other lengths, first, in the middle and last: the same rows to 1e-5."""
    watched = [real_ids[100 : 100 + length] for length in (1, 2, 9, 64, 200, 256)]
    alone = [client.encode([ids])[0] for ids in watched]
    neighbours = [real_ids[i : i + 1 + (i * 37) % 250] for i in range(26)]
    for place in (0, 13, 26):
        rows = client.encode([*neighbours[:place], *watched, *neighbours[place:]])
        assert max(map(worst_relative_error, rows[place:], alone)) <= NEIGHBOURS


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_cases(client: EncoderClient, name: str) -> None:
    """Each case was computed alone and unpadded by the reference; it must come out so, alone and in company."""
    ids, want = golden_cases(name)
    together = client.encode(ids, model=name)
    alone = [client.encode([one], model=name)[0] for one in ids]
    for rows in (together, alone):
        assert max(map(worst_relative_error, rows, want)) <= PYTORCH


async def test_every_way_of_asking_gives_the_same(server: RealServer, client: EncoderClient) -> None:
    """Sync, async, and both streams, in the order of the inputs."""
    want = client.encode(TEXTS)
    ways = {"stream": list(client.encode_stream(TEXTS))}
    async with AsyncEncoderClient(server.target) as asking:
        ways["async"] = await asking.encode(TEXTS)
        ways["async stream"] = [rows async for rows in asking.encode_stream(TEXTS)]
    for way, rows in ways.items():
        assert len(rows) == len(want), way
        assert max(map(worst_relative_error, rows, want)) <= NEIGHBOURS, way


def test_pooled_vectors_are_those_of_the_rows(client: EncoderClient) -> None:
    """The model was trained with the normalised mean; float16 is that, rounded."""
    rows = client.encode(TEXTS)
    means = np.stack([its.mean(axis=0) for its in rows])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(client.embed(TEXTS), means, atol=1e-6)
    np.testing.assert_allclose(client.embed(TEXTS, dtype="float16"), means, atol=1e-3)


def test_related_sentences_score_higher(client: EncoderClient) -> None:
    """The point of it all, on real weights."""
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


def test_a_text_is_cut_where_sentence_transformers_cuts_it(client: EncoderClient) -> None:
    """At max_seq_length, 256, though the model has 512 positions; and the special tokens stay."""
    with pytest.raises(InvalidRequestError, match=r"must be at most 256 tokens .*; was 302"):
        client.embed(["word " * 300])
    info = client.run(["word " * 1000], truncate=True).sequences[0]
    assert (info.token_count, info.original_token_count, info.truncated) == (256, 1002, True)
    assert info.token_ids is not None
    assert (info.token_ids[0], info.token_ids[-1]) == (101, 102)
