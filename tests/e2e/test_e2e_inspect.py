"""Inspect returns the same attention as PyTorch. The last hidden states of Inspect equal the output of Encode.

The exporter also compares every inspection graph with PyTorch, and tests/export/test_export_gates.py tests this
comparison.
"""

from pathlib import Path

import numpy as np
import pytest
from agreement import worst_relative_error
from checkpoints import DATA, export_golden
from real_server import RealServer, real_server
from safetensors.numpy import load_file

from encserve_client import AsyncEncoderClient, EncoderClient, InspectUnavailableError

TEXTS = {"short": "I understand this", "wide characters": "naïve café 🌍 — 漢字", "long": "word " * 200}


def test_attention_and_hidden_states_equal_the_reference(client: EncoderClient) -> None:
    cases = load_file(DATA / "raw-matrices" / "cases.safetensors")
    for case in range(5):
        result = client.inspect(cases[f"ids.{case}"], model="raw-matrices")
        want = cases[f"attention.{case}"]  # (n_layers, n_heads, seq, seq)
        assert result.attention is not None
        assert result.attention.shape == want.shape
        assert np.abs(result.attention - want).max() <= 1e-5
        assert result.hidden_states is not None
        assert worst_relative_error(result.hidden_states[-1], cases[f"out.{case}"]) <= 5e-5


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_inspect_and_encode_return_the_same_last_hidden_states(
    server: RealServer, client: EncoderClient, text: str
) -> None:
    result, info = client.inspect(text, positions=True), client.model()
    encoded = client.run([text], include_token_strings=True)
    assert result.sequence.tokens == encoded.sequences[0].tokens
    assert result.fingerprint == encoded.fingerprint
    assert result.attention is not None
    assert result.hidden_states is not None
    assert result.positions is not None
    length = result.sequence.token_count
    assert result.attention.shape == (info.n_layers, info.n_heads, length, length)
    assert result.hidden_states.shape == (info.n_layers + 1, length, info.d_model)
    assert result.positions.shape == (256, 384)
    assert np.abs(result.attention.sum(axis=-1) - 1).max() <= 1e-5
    rows = client.token_vectors([*TEXTS.values(), text])[-1]
    assert worst_relative_error(result.hidden_states[-1], rows) <= 1e-5
    async with AsyncEncoderClient(server.target) as async_client:
        some = await async_client.inspect(text, attention=[0, 5], hidden_states=[6], dtype="float16")
    assert some.attention is not None
    assert some.hidden_states is not None
    np.testing.assert_allclose(some.attention, result.attention[[0, 5]], atol=1e-3)
    np.testing.assert_allclose(some.hidden_states, result.hidden_states[[6]], atol=1e-2)


def test_inspect_refuses_files_that_changed_after_the_start(tmp_path: Path) -> None:
    """The model's files change while the server runs. Inspect fails, but Encode returns the same vectors.

    The server loads the inspection graph only at the first Inspect call. After the test restores the old files, Inspect
    works.
    """
    path = export_golden("raw-matrices", tmp_path).path
    with real_server(tmp_path) as server, EncoderClient(server.target) as client:
        before = client.token_vectors([[1, 2, 3]])[0].copy()
        # The running server has mapped the old file into memory. So keep the old file, and write a new file.
        data, backup = path / "model.onnx.data", tmp_path / "backup"
        data.rename(backup)
        data.write_bytes(bytes(backup.stat().st_size))
        with pytest.raises(InspectUnavailableError, match="the server cannot load its inspection graph"):
            client.inspect([1, 2, 3])
        np.testing.assert_array_equal(client.token_vectors([[1, 2, 3]])[0], before)
        backup.replace(data)
        states = client.inspect([1, 2, 3]).hidden_states
        assert states is not None
        assert worst_relative_error(states[-1], before) <= 1e-5
    assert any("its sha256 is" in str(line) for line in server.log)
