"""The server returns the same hidden states as ONNX Runtime for ONNX files that other programs wrote."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from agreement import worst_relative_error
from checkpoints import MODEL, minilm_directory
from onnx_files import build, export_torch, save, save_with_data
from real_server import real_server

from encserve_client import EncoderClient
from encserve_export import EncoderConfig, OnnxOptions, Target, export_onnx
from encserve_export.kinds.spec import ModelSpec
from encserve_export.onnx_graph import external
from encserve_export.onnx_graph.interface import Names
from encserve_export.source.tokenizer import read_tokenizer
from encserve_proto.bundle.v1 import manifest_pb2

# The largest allowed relative error of each engine. OpenVINO has a larger limit, because ONNX Runtime computes the
# expected values.
SAME = {"onnxruntime": 1e-6, "openvino": 5e-5}
LENGTHS = (1, 24, 3, 9, 24, 2, 17)
CONFIG = EncoderConfig(vocab_size=50, d_model=16, n_heads=2, d_ff=32, n_layers=2, max_sequence_tokens=24)
# The values are the names of a file's inputs for token ids, mask and token types, and the name of the output with the
# hidden states. "" means that the file has no such input.
FILES = {
    "by-hand": ("input_ids", "attention_mask", "", "rows"),
    "with-types": ("input_ids", "attention_mask", "token_type_ids", "rows"),
    "with-data": ("input_ids", "attention_mask", "", "rows"),
    "torch": ("tokens", "real", "segments", "hidden"),
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The ONNX files that `export_onnx` reads. The keys are the names in FILES."""
    folder = tmp_path_factory.mktemp("given")
    return {
        "by-hand": save(build(), folder / "by-hand.onnx"),
        "with-types": save(build(with_types=True), folder / "with-types.onnx"),
        "with-data": save_with_data(build(), folder / "with-data.onnx"),
        "torch": export_torch(folder / "torch.onnx", CONFIG),
    }


@pytest.fixture(scope="module")
def onnx_models(given: dict[str, Path], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with the exported files, and with all-MiniLM-L6-v2 exported from an ONNX file."""
    repository = tmp_path_factory.mktemp("onnx-models")
    with pytest.MonkeyPatch.context() as patch:
        # With this small limit, the exporter writes the weights of a small model to a second file.
        patch.setattr(external, "MAX_FILE_BYTES", 1000)
        for name, path in given.items():
            ids, mask, types, _ = FILES[name]
            names = Names(input_ids=ids, attention_mask=mask, token_type_ids=types or None)
            options = OnnxOptions(names=names, max_sequence_tokens=24)
            export_onnx(path, Target(model_repository=repository, name=name), options)
    assert (repository / "with-data" / "1" / "model.onnx.data").exists()
    options = OnnxOptions(
        max_sequence_tokens=256,
        tokenizer=read_tokenizer(minilm_directory() / "tokenizer.json"),
        vector=ModelSpec(manifest_pb2.POOLING_MEAN, l2_normalize=True),
    )
    export_onnx(models / MODEL / "1" / "model.onnx", Target(model_repository=repository, name=MODEL), options)
    return repository


@pytest.fixture(scope="module", params=SAME)
def engine(request: pytest.FixtureRequest) -> str:
    """The name of the engine that serves the models."""
    return str(request.param)


@pytest.fixture(scope="module")
def onnx_client(onnx_models: Path, engine: str) -> Iterator[EncoderClient]:
    with real_server(onnx_models, "--engine", engine) as server, EncoderClient(server.target) as client:
        yield client


def in_onnx_runtime(path: Path, names: tuple[str, str, str, str], sequence: Any) -> Any:
    """Run an ONNX file of `given` on one sequence with ONNX Runtime. Return the hidden states, (seq_len, d_model)."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ids, mask, types, rows = names
    feeds = {ids: sequence[None], mask: np.ones((1, len(sequence)), np.int64)}
    if types:
        feeds[types] = np.zeros((1, len(sequence)), np.int64)
    return session.run([rows], feeds)[0][0]


@pytest.mark.parametrize("name", FILES)
def test_rows_of_a_batch_with_mixed_lengths_equal_onnx_runtime(
    onnx_client: EncoderClient, given: dict[str, Path], engine: str, name: str
) -> None:
    random = np.random.default_rng(0)
    sequences = [random.integers(0, 50, length) for length in LENGTHS]
    got = onnx_client.token_vectors([ids.tolist() for ids in sequences], model=name)
    for rows, ids in zip(got, sequences, strict=True):
        assert worst_relative_error(rows, in_onnx_runtime(given[name], FILES[name], ids)) <= SAME[engine]


def test_the_onnx_file_and_the_checkpoint_of_a_model_agree(
    onnx_client: EncoderClient, client: EncoderClient, engine: str
) -> None:
    """Export all-MiniLM-L6-v2 from an ONNX file and from the checkpoint. Both models give the same results."""
    texts = ["I understand this", "", "a " * 240, "Grüße aus Köln"]
    for got, want in zip(onnx_client.token_vectors(texts, model=MODEL), client.token_vectors(texts), strict=True):
        assert worst_relative_error(got, want) <= SAME[engine]
    np.testing.assert_allclose(onnx_client.embed(texts, model=MODEL), client.embed(texts), atol=SAME[engine])


def test_layers_and_heads_of_an_onnx_file_are_zero(onnx_client: EncoderClient) -> None:
    """The server reports 0 layers and 0 heads, because an ONNX file does not contain these numbers."""
    info = onnx_client.model("torch")
    assert (info.d_model, info.n_layers, info.n_heads, info.precision) == (16, 0, 0, "float32")
