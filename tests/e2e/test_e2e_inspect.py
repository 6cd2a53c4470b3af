"""Inspect from checkpoint to client: attention and states are the references' and Encode's."""

from pathlib import Path

import numpy as np
import pytest
from agreement import worst_relative_error
from checkpoints import (
    BARE_GOLDENS,
    DATA,
    GOLDENS,
    MODEL,
    export_golden,
    export_golden_for_embeddings,
    golden_cases,
    golden_vectors,
)
from real_server import RealServer, real_server
from safetensors.numpy import load_file

from encserve_client import (
    AsyncEncoderClient,
    EncoderClient,
    InspectUnavailableError,
    InvalidRequestError,
)

TEXTS = ["I understand this", "naïve café 🌍 — 漢字", "word " * 200]


@pytest.mark.parametrize("case", range(5))
def test_attention_of_the_reference(client: EncoderClient, case: int) -> None:
    cases = load_file(DATA / "raw-matrices" / "cases.safetensors")
    result = client.inspect(cases[f"ids.{case}"], model="raw-matrices")
    want = cases[f"attention.{case}"]  # (n_layers, n_heads, seq, seq)
    assert result.attention is not None
    assert result.attention.shape == want.shape
    assert np.abs(result.attention - want).max() <= 1e-5
    assert result.hidden_states is not None
    assert worst_relative_error(result.hidden_states[-1], cases[f"out.{case}"]) <= 5e-5


@pytest.mark.parametrize("name", GOLDENS)
def test_rows_sum_to_one_and_the_last_state_is_what_encode_answers(client: EncoderClient, name: str) -> None:
    info = client.model(name)
    assert info.can_inspect
    for length in (1, 7, min(info.max_inspect_tokens, 64)):
        ids = np.random.default_rng(length).integers(3, info.vocab_size, length)
        result = client.inspect(ids, model=name)
        assert result.attention is not None
        assert result.hidden_states is not None
        assert result.attention.shape == (info.n_layers, info.n_heads, length, length)
        assert result.hidden_states.shape == (info.n_layers + 1, length, info.d_model)
        assert np.abs(result.attention.sum(axis=-1) - 1).max() <= 1e-5
        rows = client.encode([ids], model=name)[0]
        assert worst_relative_error(result.hidden_states[-1], rows) <= 1e-5


@pytest.mark.parametrize("text", TEXTS, ids=["short", "wide", "long"])
async def test_a_real_model_and_a_text(server: RealServer, client: EncoderClient, text: str) -> None:
    result = client.inspect(text, positions=True)
    encoded = client.run([text], include_token_strings=True)
    assert result.sequence.tokens == encoded.sequences[0].tokens
    assert result.fingerprint == encoded.fingerprint
    assert result.attention is not None
    assert result.hidden_states is not None
    assert result.positions is not None
    # In company the rows are the same.
    rows = client.encode([*TEXTS, text])[-1]
    assert worst_relative_error(result.hidden_states[-1], rows) <= 1e-5
    assert np.abs(result.attention.sum(axis=-1) - 1).max() <= 1e-5
    assert result.positions.shape == (256, 384)
    async with AsyncEncoderClient(server.target) as asking:
        some = await asking.inspect(text, attention=[0, 5], hidden_states=[6], dtype="float16")
    assert some.attention is not None
    assert some.hidden_states is not None
    np.testing.assert_allclose(some.attention, result.attention[[0, 5]], atol=1e-3)
    np.testing.assert_allclose(some.hidden_states, result.hidden_states[[6]], atol=1e-2)


def test_positions_are_the_sinusoids(client: EncoderClient) -> None:
    result = client.inspect([1], model="split-qkv", attention=False, hidden_states=False, positions=True)
    assert result.positions is not None
    place, dimension = np.meshgrid(np.arange(512), np.arange(64), indexing="ij")
    angle = place / 10000 ** (dimension // 2 * 2 / 64)
    np.testing.assert_allclose(result.positions, np.where(dimension % 2, np.cos(angle), np.sin(angle)), atol=1e-6)


def test_too_long_is_refused_with_both_numbers(client: EncoderClient) -> None:
    with pytest.raises(InvalidRequestError, match=r"must be at most 256 tokens .*; was 302"):
        client.inspect("word " * 300)
    assert client.inspect("word " * 300, truncate=True).sequence.token_count == 256


def test_it_can_be_turned_off(models: Path) -> None:
    with real_server(models, "--model", MODEL, "--no-inspect") as off, EncoderClient(off.target) as client:
        assert not client.model().can_inspect
        with pytest.raises(InspectUnavailableError, match="this server has it off"):
            client.inspect("hello")


def test_a_bundle_that_was_replaced_is_not_mixed_with_the_one_that_runs(tmp_path: Path) -> None:
    """The graph for inspections is loaded with the first request; other weights may lie there by then."""
    path = export_golden("raw-matrices", tmp_path).path
    with real_server(tmp_path) as server, EncoderClient(server.target) as client:
        before = client.encode([[1, 2, 3]])[0].copy()
        # By rename, like encserve-export: the server has mapped the old file.
        data, kept = path / "model.onnx.data", tmp_path / "kept"
        data.rename(kept)
        data.write_bytes(bytes(kept.stat().st_size))
        with pytest.raises(InspectUnavailableError, match="its graph for it cannot be loaded any more"):
            client.inspect([1, 2, 3])
        np.testing.assert_array_equal(client.encode([[1, 2, 3]])[0], before)
        kept.replace(data)
        states = client.inspect([1, 2, 3]).hidden_states
        assert states is not None
        assert worst_relative_error(states[-1], before) <= 1e-5
    assert any("its sha256 is" in str(line) for line in server.log)


@pytest.fixture(scope="session")
def fed_vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoints, exported for vectors."""
    repository = tmp_path_factory.mktemp("vectors")
    for name in BARE_GOLDENS:
        export_golden_for_embeddings(name, repository)
    return repository


def test_golden_cases_as_vectors(fed_vectors: Path) -> None:
    """One vector per token: alone, in company, streamed and inspected."""
    flags = [flag for name in BARE_GOLDENS for flag in ("--model", f"{name}-vectors")]
    with real_server(fed_vectors, *flags) as server, EncoderClient(server.target) as client:
        for name in BARE_GOLDENS:
            model = f"{name}-vectors"
            table, (ids, want) = golden_vectors(name), golden_cases(name)
            vectors = [table[it] for it in ids]
            together = client.encode(vectors, model=model)
            alone = [client.encode([one], model=model)[0] for one in vectors]
            streamed = list(client.encode_stream(vectors, model=model))
            for rows in (together, alone, streamed):
                assert max(map(worst_relative_error, rows, want)) <= 5e-5, name
            result = client.inspect(vectors[0], model=model)
            assert result.hidden_states is not None
            assert worst_relative_error(result.hidden_states[-1], want[0]) <= 5e-5
            assert client.model(model).input_kind == "embeddings"
            with pytest.raises(InvalidRequestError, match=f"model {model} takes embeddings only"):
                client.encode([[1, 2]], model=model)
            with pytest.raises(InvalidRequestError, match=r"inputs\[0\].embeddings.width: must be \d+ .*; was 3"):
                client.encode([np.ones((2, 3), np.float32)], model=model)


def test_vectors_for_a_model_of_ids_are_refused(client: EncoderClient) -> None:
    with pytest.raises(InvalidRequestError, match=r"takes token ids or text; it was not exported for embeddings"):
        client.encode([np.ones((2, 384), np.float32)])
