"""These tests export static embeddings in the formats of sentence-transformers and model2vec.

A static embedding has a tokenizer and a table of vectors. The vector of a text is the mean of its tokens' vectors.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from static_models import WIDTH, write_model2vec, write_static
from tokenizers import Tokenizer

from encserve_export import Target, export_hf
from encserve_export.core.errors import UnsupportedModelError
from encserve_export.kinds.static import read_static, write_graph
from encserve_proto.bundle.v1 import manifest_pb2


@pytest.mark.parametrize("write", [write_static, write_model2vec])
def test_a_table_is_exported_and_compared(write: Callable[[Path], Path], tmp_path: Path) -> None:
    exported = export_hf(write(tmp_path / "m"), Target(model_repository=tmp_path / "models", name="m"))
    its = exported.manifest
    assert (its.pooling, its.l2_normalize) == (manifest_pb2.POOLING_MEAN, True)
    assert (its.source.route, exported.notes["route"]) == ("static", "a table, without an encoder")
    assert (its.encoder.d_model, its.encoder.max_sequence_tokens, its.text.takes_empty) == (WIDTH, 8192, True)
    assert its.parity.pipeline_texts >= 5
    assert its.parity.max_pipeline_error <= 1e-6
    tokenizer = Tokenizer.from_file(str(exported.path / "tokenizer.json"))
    assert tokenizer.encode("C 東京 a").ids == [6, 4]  # the tokenizer adds no special tokens


def test_the_truncation_of_a_tokenizer_sets_the_maximum_length(tmp_path: Path) -> None:
    directory = write_static(tmp_path / "m", dense=True)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_truncation(30)
    tokenizer.save(path)
    its = export_hf(directory, Target(model_repository=tmp_path / "models", name="m")).manifest
    assert (its.encoder.max_sequence_tokens, its.head.width) == (30, 7)
    assert its.parity.max_pipeline_error <= 1e-6
    tokenizer.enable_truncation(30, direction="left")
    tokenizer.save(path)
    with pytest.raises(UnsupportedModelError, match="cuts long texts at their beginning"):
        export_hf(directory, Target(model_repository=tmp_path / "models", name="other"))


def test_a_model2vec_directory_without_modules_json_is_refused(tmp_path: Path) -> None:
    directory = write_model2vec(tmp_path / "m")
    (directory / "modules.json").unlink()
    with pytest.raises(
        UnsupportedModelError, match=r"model2vec directory without modules\.json.* Save the model again"
    ):
        export_hf(directory, Target(model_repository=tmp_path / "models", name="m"))


@pytest.mark.parametrize("weighted", [False, True])
def test_an_int8_table_needs_token_weights(weighted: bool, tmp_path: Path) -> None:
    """Export an int8 table with token weights and without. Without token weights, expect an error.

    sentence-transformers multiplies an int8 table by the token weights. The product has floating-point numbers.
    """
    directory = write_model2vec(tmp_path / "m")
    tensors = load_file(directory / "model.safetensors")
    tensors["embeddings"] = (tensors["embeddings"] * 20).to(torch.int8)
    weights = tensors.pop("weights")
    if weighted:
        tensors["weights"] = weights
        want = tensors["embeddings"].double()[tensors["mapping"]] * weights[:, None]
    save_file(tensors, directory / "model.safetensors")
    if weighted:
        table = read_static(directory).table
        assert table is not None
        np.testing.assert_allclose(table, want.numpy(), rtol=1e-6)
        return
    with pytest.raises(UnsupportedModelError, match="export a model with a float32 or float16 table"):
        read_static(directory)


def test_a_table_is_in_a_second_file(tmp_path: Path) -> None:
    """Write a graph with a table of vectors. Expect the table in a second file next to the small graph file.

    An ONNX file cannot have more than 2 GB.
    """
    table = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    path = tmp_path / "model.onnx"
    write_graph(table, path)
    assert path.stat().st_size < 1000
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ids = np.array([[3, 999]])
    (rows,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert np.array_equal(rows, table[ids])
