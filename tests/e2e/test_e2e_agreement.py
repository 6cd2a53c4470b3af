"""The server returns the same hidden states as PyTorch, for sequences of any length, alone and in batches.

Most tests use all-MiniLM-L6-v2 and real texts. A golden checkpoint is a checkpoint in tests/data with stored outputs.
The model's original code computed these outputs. The tests in this file send vectors to golden checkpoints.
tests/export/test_export_graph.py tests golden checkpoints with token ids.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import worst_relative_error
from architectures import rows_of
from checkpoints import BARE_GOLDENS, export_golden_for_embeddings, golden_cases, golden_vectors
from real_server import RealServer, real_server
from tokenizers import Tokenizer

from encserve_client import AsyncEncoderClient, EncoderClient, InvalidRequestError

# The largest allowed relative error of a token's hidden state. PYTORCH applies to comparisons with PyTorch.
# OTHER_BATCH applies to comparisons with the same sequence in another batch.
PYTORCH, OTHER_BATCH = 5e-5, 1e-5
# Sequence lengths in tokens: 1 to 16, some longer lengths, and lengths near the model's limit of 256.
LENGTHS = sorted({*range(1, 17), *(round(1.25**i) for i in range(13, 25)), 127, 128, 129, 200, 254, 255, 256})
TEXTS = [
    "I understand this",
    "The cat sleeps on the warm windowsill.",
    "",
    "Grüße aus Köln, 東京 и Москва: naïve café 🌍 — “quoted”.",
    "a " * 240,
    "Licensed under the Apache License, Version 2.0; you may not use this file except in compliance with it. " * 9,
]


def assert_rows(got: Any, want: Any, tolerance: float) -> None:
    assert len(got) == len(want)
    assert max(map(worst_relative_error, got, want)) <= tolerance


def test_rows_do_not_depend_on_batches_or_concurrent_calls(
    client: EncoderClient, minilm: Any, real_ids: list[int]
) -> None:
    sequences = [real_ids[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]
    alone = [client.token_vectors([ids])[0] for ids in sequences]
    assert_rows(alone, [rows_of(minilm, ids) for ids in sequences], PYTORCH)
    with ThreadPoolExecutor(32) as pool:
        concurrent = list(pool.map(lambda ids: client.token_vectors([ids])[0], sequences))
    for rows in (client.token_vectors(sequences), client.token_vectors(sequences[::-1])[::-1], concurrent):
        assert_rows(rows, alone, OTHER_BATCH)


async def test_every_client_method_returns_the_right_rows_and_tokens(
    server: RealServer, client: EncoderClient, minilm: Any, tokenizer: Tokenizer
) -> None:
    result = client.run(TEXTS, include_token_strings=True)
    rows = result.outputs[0].arrays()
    encodings = [tokenizer.encode(text) for text in TEXTS]
    assert [np.asarray(info.token_ids).tolist() for info in result.sequences] == [it.ids for it in encodings]
    assert [list(info.tokens or []) for info in result.sequences] == [it.tokens for it in encodings]
    assert_rows(rows, [rows_of(minilm, it.ids) for it in encodings], PYTORCH)
    async with AsyncEncoderClient(server.target) as other:
        in_stream = [rows async for _, rows in other.stream(TEXTS, kind="tokens")]
        for got in (
            [rows for _, rows in client.stream(TEXTS, kind="tokens")],
            await other.token_vectors(TEXTS),
            in_stream,
        ):
            assert_rows(got, rows, OTHER_BATCH)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_golden_checkpoints_return_the_stored_rows_for_vectors(tmp_path: Path, engine: str) -> None:
    """Send vectors as inputs in single calls, a batch, a stream and Inspect. The outputs equal the stored outputs.

    The server refuses a call with token ids.
    """
    for name in BARE_GOLDENS:
        export_golden_for_embeddings(name, tmp_path)
    with real_server(tmp_path, "--engine", engine) as server, EncoderClient(server.target) as client:
        for name in BARE_GOLDENS:
            model, table, (ids, want) = f"{name}-vectors", golden_vectors(name), golden_cases(name)
            vectors = [table[it] for it in ids]
            assert_rows(client.token_vectors(vectors, model=model), want, PYTORCH)
            assert_rows([client.token_vectors([one], model=model)[0] for one in vectors], want, PYTORCH)
            in_stream = [rows for _, rows in client.stream(vectors, kind="tokens", model=model)]
            assert_rows(in_stream, want, PYTORCH)
            states = client.inspect(vectors[0], model=model).hidden_states
            assert states is not None
            assert worst_relative_error(states[-1], want[0]) <= PYTORCH
            assert client.model(model).input_kind == "embeddings"
        with pytest.raises(InvalidRequestError, match=f"model {model} takes vectors only"):
            client.token_vectors([[1, 2]], model=model)


def test_a_text_has_at_most_max_seq_length_tokens(client: EncoderClient) -> None:
    """The model's limit is 256 tokens, although the model has 512 positions. The server refuses longer texts.

    With truncation, the server cuts the text to 256 tokens, special tokens included.
    """
    with pytest.raises(InvalidRequestError, match=r"at most 256 tokens .*was 302"):
        client.embed(["word " * 300])
    info = client.run(["word " * 1000], truncate=True).sequences[0]
    assert (info.token_count, info.original_token_count, info.truncated) == (256, 1002, True)
    assert info.token_ids is not None
    assert (info.token_ids[0], info.token_ids[-1]) == (101, 102)
    with pytest.raises(InvalidRequestError, match=r"must be a text or token ids, because model .* takes no vectors"):
        client.token_vectors([np.ones((2, 384), np.float32)])
