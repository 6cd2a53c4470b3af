"""These tests export sparse encoders. A sparse encoder gives a weight to each word of the vocabulary.

The export refuses a directory with settings that a bundle cannot express.
"""

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from sparse_models import (
    D_MODEL,
    LONGEST,
    change,
    write_bge_m3,
    write_language_model,
    write_splade,
    write_static_queries,
    write_trained_splade,
)

from encserve_export import Target, export_hf
from encserve_export.core.errors import (
    CheckpointFileError,
    ConfigError,
    ParityError,
    UnsafeWeightsError,
    UnsupportedModelError,
)
from encserve_export.core.precision import BOUNDS
from encserve_export.kinds.reading import read
from encserve_export.report import show
from encserve_proto.bundle.v1 import manifest_pb2


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splade(tmp_path_factory.mktemp("splade") / "model", max_active_dims=32)


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_static_queries(tmp_path_factory.mktemp("static") / "model")


@pytest.fixture(scope="module")
def bge_m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bge_m3(tmp_path_factory.mktemp("m3") / "model")


@pytest.fixture
def directory(splade: Path, tmp_path: Path) -> Path:
    """Copy the directory of a SPLADE model. A test may change the copy."""
    return shutil.copytree(splade, tmp_path / "model")


def export(directory: Path, folder: Path, **options: Any) -> Any:
    return export_hf(directory, Target(model_repository=folder / "models", name="m"), **options)


@pytest.mark.parametrize(
    "precision", ["float32", *(pytest.param(it, marks=pytest.mark.system) for it in ("float16", "int8"))]
)
def test_splade_is_exported_and_compared(splade: Path, tmp_path: Path, precision: Any) -> None:
    exported = export(splade, tmp_path, precision=precision)
    manifest = exported.manifest
    assert manifest.sparse.pooling == manifest_pb2.SPARSE_POOLING_MAX
    assert (manifest.sparse.width, manifest.sparse.max_active_dims) == (1000, 32)
    assert (manifest.query.prompt_name, manifest.document.prompt_name) == ("query", "document")
    # The comparison has 8 queries and 8 documents. In float16 and int8, the empty query and the empty document are left
    # out.
    assert manifest.parity.pipeline_texts == (16 if precision == "float32" else 14)
    assert manifest.parity.min_pipeline_cosine >= (BOUNDS[precision].cosine or 0)
    assert manifest.encoder.max_sequence_tokens == LONGEST
    assert exported.unused_parts == ()
    assert {"sparse.onnx", "sparse.onnx.data"} <= {file.path for file in manifest.files}


@pytest.mark.system
def test_lengths_of_queries_and_documents(directory: Path, tmp_path: Path) -> None:
    change(directory / "sentence_bert_config.json", query_length=8, document_length=LONGEST)
    manifest = export(directory, tmp_path).manifest
    assert (manifest.query.max_tokens, manifest.document.max_tokens) == (8, 0)
    shorter = Target(model_repository=tmp_path / "models", name="shorter")
    assert export_hf(directory, shorter, max_sequence_tokens=6).manifest.query.max_tokens == 0


@pytest.mark.system
@pytest.mark.parametrize("kind", ["ModernBert", "MPNet", "XLMRoberta", "Electra", "Albert"])
def test_heads_of_other_language_models_are_exported(kind: str, tmp_path: Path) -> None:
    """Export SPLADE models of other architectures, and expect success.

    The export itself compares the weights with sentence-transformers.
    """
    manifest = export(write_splade(tmp_path / "model", kind), tmp_path).manifest
    assert manifest.parity.pipeline_texts == 16


@pytest.mark.system
def test_static_weights_for_queries_are_exported(static: Path, tmp_path: Path) -> None:
    exported = export(static, tmp_path)
    its = exported.manifest.query.static_sparse
    assert its.max_tokens == 40
    assert not exported.manifest.document.HasField("static_sparse")
    assert np.load(exported.path / its.weights_file).shape == (1000,)
    assert json.loads((exported.path / its.tokenizer_file).read_text())["post_processor"] is None


def test_the_remark_explains_texts_without_a_task(static: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(static, tmp_path / "model")
    path = directory / "router_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "parameters": {**config["parameters"], "default_route": "query"}}))
    assert "sentence-transformers encodes such a text as a query" in read(directory).remark


@pytest.mark.system
def test_wrong_sparse_weights_are_refused(splade: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = read(splade)
    assert vector.sparse is not None
    vector.sparse.module.logarithms = 2  # type: ignore[assignment]
    monkeypatch.setattr("encserve_export.routes.hf.read", lambda *_, **__: vector)
    with pytest.raises(ParityError, match="gives other weights than sentence-transformers .* task query: one"):
        export(splade, tmp_path)
    assert not (tmp_path / "models").exists()


@pytest.mark.system
def test_weights_just_above_zero_are_accepted(tmp_path: Path) -> None:
    """Export a model that gives a weight to few words, and expect success.

    A weight just above 0 has a large relative error. So the comparison also needs an absolute tolerance.
    """
    assert export(write_trained_splade(tmp_path / "model", active=10), tmp_path).manifest.parity.pipeline_texts == 16


@pytest.mark.system
def test_a_precision_that_changes_weights_too_much_is_refused(
    splade: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tighten the int8 bound in the comparison of texts, but not in other comparisons. Expect an error with numbers."""
    bounds = dataclasses.replace(BOUNDS["int8"], cosine=0.99999)
    monkeypatch.setattr("encserve_export.check.pipeline.bounds_of", lambda _: bounds)
    figures = r"a row has the cosine similarity 0\.99\d\d; at least 0.99999 is required. Export in float32 instead"
    with pytest.raises(ParityError, match=f"gives another vector than sentence-transformers .* task query: {figures}"):
        export(splade, tmp_path, precision="int8")
    assert not (tmp_path / "models").exists()


def test_modules_that_a_bundle_cannot_express_are_refused(tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SpladePooling

    model = str(write_language_model(tmp_path / "language-model"))

    def splade() -> list[Any]:
        return [Transformer(model, transformer_task="fill-mask"), SpladePooling()]

    SparseEncoder(modules=[Router.for_query_document(splade(), splade())]).save(str(tmp_path / "two"))
    with pytest.raises(
        UnsupportedModelError, match="queries and documents use different encoders. Export the folder of each"
    ):
        read(tmp_path / "two")
    csr = [Transformer(model), Pooling(D_MODEL), SparseAutoEncoder(D_MODEL, hidden_dim=48, k=4)]
    SparseEncoder(modules=csr).save(str(tmp_path / "csr"))
    with pytest.raises(
        UnsupportedModelError, match=r"a query goes through the modules Transformer, Pooling, SparseAutoEncoder\. A"
    ):
        read(tmp_path / "csr")


def test_bge_m3_has_three_outputs(bge_m3: Path, tmp_path: Path) -> None:
    exported = export(bge_m3, tmp_path)
    manifest = exported.manifest
    assert manifest.pooling == manifest_pb2.POOLING_CLS
    assert manifest.l2_normalize
    assert (manifest.multi_vector.width, manifest.multi_vector.similarity) == (D_MODEL, "meanmaxsim")
    assert manifest.multi_vector.skips_first_token
    assert manifest.sparse.pooling == manifest_pb2.SPARSE_POOLING_OWN_ID
    assert sorted(manifest.sparse.skipped_token_ids) == [0, 1, 2, 3]
    assert "FlagEmbedding cuts texts to 512 tokens" in exported.notes["remark"]
    # The export compares three outputs of 8 texts: the dense vector, the MaxSim vectors, and the sparse weights.
    assert (manifest.parity.pipeline_texts, manifest.parity.maxsim_tolerance) == (24, 1e-4)


def facts(exported: Any) -> dict[str, str]:
    """Return the lines of an export's report, by the name of the line."""
    console = Console(record=True, file=io.StringIO())
    show(exported, console)
    return {line[:13].strip(): line[13:].strip() for line in console.export_text().splitlines()}


@pytest.mark.system
def test_the_report_describes_the_vectors_and_weights(splade: Path, static: Path, bge_m3: Path, tmp_path: Path) -> None:
    said = facts(export(bge_m3, tmp_path / "m3"))
    assert said["pooling"] == f"cls, scaled to length 1, {D_MODEL} dimensions"
    assert said["vectors"] == f"one vector of {D_MODEL} dimensions per token, compared by meanmaxsim"
    assert said["weights"] == "over 1000 words, each token gives a weight to its own id"
    assert said["document"] == "at most 640 tokens"
    said = facts(export(splade, tmp_path / "splade"))
    assert said["weights"] == "over 1000 words, the maximum over the tokens, only the 32 largest"
    assert "pooling" not in said
    said = facts(export(static, tmp_path / "static"))
    assert said["query"].endswith("weights from a table, without running the encoder, at most 40 tokens")


@pytest.mark.system
def test_the_report_names_an_unused_language_model_head(tmp_path: Path) -> None:
    """Export a language model as a dense model. Expect that the report names the unused head.

    The report must also say how to export a sparse model. The test follows this advice.
    """
    from sentence_transformers import SparseEncoder

    left = facts(export(write_language_model(tmp_path / "bare"), tmp_path))["unused parts"]
    assert left.startswith(
        "cls, the head of a language model. In a SPLADE model, this head computes the weights of words"
    )
    SparseEncoder(str(tmp_path / "bare"), device="cpu").save_pretrained(str(tmp_path / "other"))
    assert export(tmp_path / "other", tmp_path / "saved").manifest.HasField("sparse")


@pytest.mark.system
@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json"])
def test_a_model_that_cuts_texts_at_the_beginning_is_refused(where: str, directory: Path, tmp_path: Path) -> None:
    left = {"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    change(directory / where, **({"truncation": left} if where == "tokenizer.json" else {"truncation_side": "left"}))
    with pytest.raises(UnsupportedModelError, match=r'cuts long texts at their beginning .* Write "truncation_side"'):
        export(directory, tmp_path)
    change(directory / "tokenizer_config.json", truncation_side="right")
    assert export(directory, tmp_path).manifest.parity.pipeline_texts == 16


@pytest.mark.system
def test_a_changed_tokenizer_of_the_static_weights_changes_the_space_id(static: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(static, tmp_path / "model")
    (path,) = directory.glob("query*/tokenizer.json")
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    space_id = export(static, tmp_path).manifest.space_id
    assert export(directory, tmp_path / "again").manifest.space_id == space_id
    change(path, normalizer={"type": "Lowercase"})
    assert export(directory, tmp_path / "lower").manifest.space_id != space_id


@pytest.mark.system
def test_other_heads_change_the_space_id(bge_m3: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(bge_m3, tmp_path / "model")
    torch.save(torch.nn.Linear(D_MODEL, 1).state_dict(), directory / "sparse_linear.pt")
    spaces = [export(it, tmp_path / it.parent.name).manifest.space_id for it in (bge_m3, directory)]
    assert spaces[0] != spaces[1]


def test_files_that_are_not_linear_heads_are_refused(bge_m3: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(bge_m3, tmp_path / "model")
    torch.save(torch.nn.Linear(D_MODEL, 2).state_dict(), directory / "sparse_linear.pt")
    with pytest.raises(CheckpointFileError, match=r"sparse_linear.pt must have 1 output per token; was 2"):
        export(directory, tmp_path)
    torch.save({"weights": torch.ones(1)}, directory / "sparse_linear.pt")
    with pytest.raises(CheckpointFileError, match="must hold the weight of a linear layer, .*; was weights"):
        export(directory, tmp_path)
    torch.save(torch.nn.Linear(D_MODEL, 1), directory / "sparse_linear.pt")
    with pytest.raises(UnsafeWeightsError):
        export(directory, tmp_path)


def test_the_head_of_a_sparse_model_cannot_be_ignored(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"--ignore-head is for a classifier or a cross-encoder; .* a sparse model"):
        read(directory, ignore_head=True)
