"""Bundles whose heads, tasks or files for them contradict each other: refused when they are read, or loaded."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_heads
from tiny_bundle import VOCAB_SIZE, write_bundle
from tiny_heads import multi_vector, sparse
from tokenizers import Tokenizer, models

from encserve_proto.bundle.v1 import manifest_pb2 as m
from encserve_server.errors import BundleError
from encserve_server.models.turns import TurnPool
from encserve_server.repository.bundle import read_bundle
from encserve_server.repository.loading import load_model
from encserve_server.settings import Settings


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


FILES = {
    "multi_vector.onnx": tiny_heads.multi_vector_file(),
    "sparse.onnx": tiny_heads.sparse_file("max"),
    "own_id.onnx": tiny_heads.own_id_file(),
    "query.json": Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE + 1)}, unk_token="w0"))
    .to_str()
    .encode(),
    "query.npy": npy(np.ones(VOCAB_SIZE, np.float32)),
    "short.npy": npy(np.ones(3, np.float32)),
}
OWN_ID: dict[str, Any] = {"pooling": m.SPARSE_POOLING_OWN_ID, "mask_name": "", "file": "own_id.onnx"}


def query(**fields: Any) -> dict[str, Any]:
    return {"query": m.TaskSettings(**fields)}


def static(weights_file: str = "query.npy", tokenizer_file: str = "query.json") -> dict[str, Any]:
    return query(static_sparse=m.StaticSparse(tokenizer_file=tokenizer_file, weights_file=weights_file))


def expansion(min_tokens: int, token_id: int = 3, *, attended: bool = True) -> dict[str, Any]:
    return query(expansion=m.Expansion(min_tokens=min_tokens, token_id=token_id, attended=attended))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (
            {"multi_vector": multi_vector(file="no.onnx")},
            "multi_vector.file names 'no.onnx', which `files` does not list",
        ),
        ({"multi_vector": multi_vector(width=0)}, "multi_vector.width must be >= 1; was 0"),
        (
            {"multi_vector": multi_vector(similarity="xtr")},
            "multi_vector.similarity must be maxsim or meanmaxsim; was 'xtr'",
        ),
        ({"sparse": sparse(pooling=0)}, "sparse.pooling 0 is not known to this server"),
        ({"sparse": sparse(width=0)}, "sparse.width must be >= 1; was 0"),
        ({"sparse": sparse(mask_name="")}, "sparse.mask_name must be set for this pooling; was ''"),
        ({"sparse": sparse(**OWN_ID | {"mask_name": "m"})}, "sparse.mask_name must be empty for this pooling; was 'm'"),
        ({"sparse": sparse(**OWN_ID | {"width": 49})}, "sparse.width must hold every id of a vocabulary of 50; was 49"),
        (query(prompt_name="q"), "query.prompt_name is 'q'; the prompts are none"),
        (query(max_tokens=65), "query.max_tokens must be at most 64, the encoder's; was 65"),
        (query(skipped_token_ids=[1, 50]), "query.skipped_token_ids must be below 50; one is 50"),
        (query(kept_token_ids=[99]), "query.kept_token_ids must be below 50; one is 99"),
        (expansion(0), "query.expansion.min_tokens must be from 1 to the longest text's, 64; was 0"),
        (expansion(65), "query.expansion.min_tokens must be from 1 to the longest text's, 64; was 65"),
        (expansion(9, 50), "query.expansion.token_id must be below 50; was 50"),
        (
            {**expansion(9, attended=False), "sparse": sparse()},
            "query.expansion.attended must be true beside sparse",
        ),
        (
            query(token_pooling=m.TokenPooling(factor=0.5)),
            "query.token_pooling.factor must be a number from 1; was 0.5",
        ),
        (static(), "query.static_sparse needs sparse, which is not set"),
        ({**static("no.npy"), "sparse": sparse()}, "static_sparse.weights_file names 'no.npy', which `files` does not"),
        ({**static("query.json"), "sparse": sparse()}, "query.json: not an array of NumPy"),
        (
            {**static("short.npy"), "sparse": sparse()},
            r"short.npy: must be float32 \(50,\) as sparse.width; was float32 \(3,\)",
        ),
        (
            {**query(), "graph__input_ids_name": "", "graph__embeddings_name": "ids"},
            "query and document are of texts, not embeddings",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself(tmp_path: Path, parts: dict[str, Any], problem: str) -> None:
    directory = write_bundle(tmp_path, files=FILES, **parts)
    with pytest.raises(BundleError, match=problem):
        read_bundle(directory)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (
            {"multi_vector": multi_vector(width=4)},
            r"multi_vector.onnx: it gives \(2, 3\) for \(2,\); the manifest says that its width is 4",
        ),
        (
            {"multi_vector": multi_vector(input_name="x")},
            "the graph's inputs and output are .*'rows'.*; the manifest names",
        ),
        (
            {"sparse": sparse(width=49)},
            r"sparse.onnx: it gives \(2, 50\) for \(2, 3\); the manifest says that its width is 49",
        ),
        ({"sparse": sparse(file="query.json")}, "query.json: ONNX Runtime cannot load it"),
        ({"sparse": sparse(), "encoder__d_model": 9}, "sparse.onnx: it fails for vectors of 9 numbers"),
        ({**static(), "sparse": sparse()}, "query.json: it gives ids up to 50, but the model's end at 49"),
    ],
)
def test_a_head_that_is_another_than_the_manifests(tmp_path: Path, parts: dict[str, Any], problem: str) -> None:
    directory = write_bundle(tmp_path, files=FILES, **parts)
    with pytest.raises(BundleError, match=problem):
        load(directory)


def test_a_model_that_joins_vectors_needs_what_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.outputs.token_pooling.importlib.util.find_spec", lambda name: None)
    pooled = query(token_pooling=m.TokenPooling(factor=2))
    directory = write_bundle(tmp_path, files=FILES, multi_vector=multi_vector(), **pooled)
    with pytest.raises(BundleError, match=r"tiny pools the vectors of tokens, which needs encserve-server\[pooling\]"):
        load(directory)


def load(directory: Path) -> None:
    load_model(directory, Settings(model_repository=directory, tune_batches=False), TurnPool(1))
