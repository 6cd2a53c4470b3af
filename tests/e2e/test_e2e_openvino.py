"""Real weights on OpenVINO: float32 agrees with ONNX Runtime, bfloat16 within the promised cosine."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agreement import least_cosine, worst_relative_error
from checkpoints import GOLDENS, MODEL, export_golden_for_embeddings, golden_cases
from real_server import RealServer, cpu_has_bfloat16, real_server

from encserve_client import EncoderClient

PYTORCH, NEIGHBOURS = 5e-5, 1e-5
LENGTHS = (1, 2, 3, 5, 9, 14, 22, 30, 47, 64, 78, 100, 128, 150, 200, 230, 255, 256)
# A token's row in bfloat16 beside the row in float32, and a row alone beside the same row among neighbours.
MIN_COSINE, MIN_COSINE_OF_NEIGHBOURS = 0.999, 0.9995


@pytest.fixture(scope="module")
def float32_client(models: Path) -> Iterator[EncoderClient]:
    flags = [flag for name in (MODEL, *GOLDENS) for flag in ("--model", name)]
    with real_server(models, "--engine", "openvino", *flags) as server, EncoderClient(server.target) as client:
        yield client


@pytest.fixture(scope="module")
def bfloat16_server(models: Path) -> Iterator[RealServer]:
    if not cpu_has_bfloat16():
        pytest.skip("THIS CPU HAS NO BFLOAT16: only the refusal of --precision bfloat16 is tested here")
    with real_server(models, "--model", MODEL, "--engine", "openvino", "--precision", "bfloat16") as server:
        yield server


@pytest.fixture(scope="module")
def bfloat16_client(bfloat16_server: RealServer) -> Iterator[EncoderClient]:
    with EncoderClient(bfloat16_server.target) as client:
        yield client


@pytest.fixture(scope="module")
def texts(real_ids: list[int]) -> list[list[int]]:
    """Real text cut to each length, each from three places."""
    return [real_ids[300 * i + 7 * k :][:length] for i in range(3) for k, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_cases_in_float32(float32_client: EncoderClient, name: str) -> None:
    ids, want = golden_cases(name)
    together = float32_client.encode(ids, model=name)
    alone = [float32_client.encode([one], model=name)[0] for one in ids]
    for rows in (together, alone):
        assert max(map(worst_relative_error, rows, want)) <= PYTORCH


def test_real_text_in_float32(float32_client: EncoderClient, client: EncoderClient, texts: list[list[int]]) -> None:
    together = float32_client.encode(texts)
    alone = [float32_client.encode([ids])[0] for ids in texts]
    assert max(map(worst_relative_error, together, client.encode(texts))) <= PYTORCH
    assert max(map(worst_relative_error, together, alone)) <= NEIGHBOURS


def test_a_model_of_vectors_in_float32(tmp_path: Path) -> None:
    export_golden_for_embeddings("raw-matrices", tmp_path)
    rows = []
    for engine in ("onnxruntime", "openvino"):
        with real_server(tmp_path, "--engine", engine) as server, EncoderClient(server.target) as client:
            info = client.model()
            assert info.input_kind == "embeddings"
            random = np.random.default_rng(0)
            vectors = [random.standard_normal((n, info.d_model)).astype(np.float32) for n in (1, 9, 4, 17)]
            rows.append(client.encode(vectors))
    assert max(map(worst_relative_error, *rows)) <= PYTORCH


def test_real_text_in_bfloat16(bfloat16_client: EncoderClient, client: EncoderClient, texts: list[list[int]]) -> None:
    want = client.encode(texts)
    together = bfloat16_client.encode(texts)
    alone = [bfloat16_client.encode([ids])[0] for ids in texts]
    for rows in (together, alone):
        assert least_cosine(rows, want) >= MIN_COSINE
    assert least_cosine(together, alone) >= MIN_COSINE_OF_NEIGHBOURS
    assert max(map(worst_relative_error, together, want)) > 1e-3, "the rows are float32's, not bfloat16's"


def test_a_server_in_bfloat16_says_so_and_keeps_the_space(
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
    flags = ("--model", MODEL, "--engine", "openvino", "--precision", "bfloat16")
    with pytest.raises(AssertionError, match="has no instructions for it"), real_server(models, *flags):
        pass
