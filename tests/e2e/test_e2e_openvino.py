"""OpenVINO in bfloat16 gives almost the same outputs as ONNX Runtime, for a model with real weights.

test_e2e_onnx.py and test_e2e_agreement.py compare OpenVINO in float32.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agreement import least_cosine, worst_relative_error
from checkpoints import MODEL
from real_server import RealServer, cpu_has_bfloat16, real_server

from encserve_client import EncoderClient

LENGTHS = (1, 2, 3, 5, 9, 14, 22, 30, 47, 64, 78, 100, 128, 150, 200, 230, 255, 256)
BFLOAT16 = ("--model", MODEL, "--engine", "openvino", "--precision", "bfloat16")


@pytest.fixture(scope="module")
def bfloat16_server(models: Path) -> Iterator[RealServer]:
    if not cpu_has_bfloat16():
        pytest.skip("THIS CPU HAS NO BFLOAT16: only the refusal of --precision bfloat16 is tested here")
    with real_server(models, *BFLOAT16) as server:
        yield server


@pytest.fixture(scope="module")
def bfloat16_client(bfloat16_server: RealServer) -> Iterator[EncoderClient]:
    with EncoderClient(bfloat16_server.target) as client:
        yield client


@pytest.fixture(scope="module")
def sequences(real_ids: list[int]) -> list[list[int]]:
    """Return token ids of a real text. Each of three parts of the text gives a sequence of each length in LENGTHS."""
    return [real_ids[300 * i + 7 * k :][:length] for i in range(3) for k, length in enumerate(LENGTHS)]


def test_bfloat16_rows_of_both_engines_agree(
    bfloat16_client: EncoderClient, client: EncoderClient, sequences: list[list[int]]
) -> None:
    want = client.token_vectors(sequences)
    together = bfloat16_client.token_vectors(sequences)
    alone = [bfloat16_client.token_vectors([ids])[0] for ids in sequences]
    assert min(least_cosine(together, want), least_cosine(alone, want)) >= 0.999
    assert least_cosine(together, alone) >= 0.9995
    assert max(map(worst_relative_error, together, want)) > 1e-3, "the server computed in float32"


def test_a_server_in_bfloat16_reports_the_precision_and_keeps_the_space_id(
    bfloat16_server: RealServer, bfloat16_client: EncoderClient, client: EncoderClient
) -> None:
    info = bfloat16_client.model()
    assert (info.provider, info.precision) == ("OpenVINO", "bfloat16")
    assert info.space_id == client.model(info.name).space_id != ""
    labels = {"provider": "OpenVINO", "precision": "bfloat16", "device": "cpu"}
    assert bfloat16_server.metric("encserve_model_info", **labels) == 1
    (loaded,) = [line for line in bfloat16_server.log if line["message"] == "model loaded"]
    assert loaded["runtime"].startswith("openvino ")


def test_inspect_runs_on_onnx_runtime(bfloat16_client: EncoderClient) -> None:
    result = bfloat16_client.inspect("I understand this", hidden_states=False)
    assert result.attention is not None
    np.testing.assert_allclose(np.asarray(result.attention).sum(axis=-1), 1, atol=1e-5)


@pytest.mark.skipif(cpu_has_bfloat16(), reason="this CPU has bfloat16")
def test_a_cpu_without_bfloat16_does_not_start(models: Path) -> None:
    with pytest.raises(AssertionError, match="has no instructions for it"), real_server(models, *BFLOAT16):
        pass
