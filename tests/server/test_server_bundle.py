"""Tests of reading and verifying bundles. Each error names the file or field, and the reason."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_heads
from google.protobuf import json_format
from tiny_bundle import D_MODEL, VOCAB_SIZE, write_bundle
from tiny_heads import multi_vector, npy, sparse

from encserve_proto.bundle.v1 import manifest_pb2 as m
from encserve_proto.fingerprint import fingerprint
from encserve_server.errors import BundleError
from encserve_server.repository.bundle import read_bundle
from encserve_server.types.bundles import ModelPooling
from encserve_server.types.requests import OutputKind


def edit(directory: Path, **fields: Any) -> None:
    """Set top-level fields of a manifest, and compute its fingerprint again unless `fields` has a fingerprint."""
    path = directory / "manifest.json"
    changed = json.loads(path.read_text()) | fields
    fitting = fingerprint(json_format.ParseDict(changed, m.Manifest()))
    path.write_text(json.dumps({**changed, "fingerprint": fields.get("fingerprint", fitting)}))


def assert_refused(directory: Path, problem: str) -> None:
    with pytest.raises(BundleError, match=problem):
        read_bundle(directory)


def test_a_good_bundle_is_read(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path)
    bundle = read_bundle(directory)
    assert (bundle.name, bundle.version, bundle.d_model) == ("tiny", "1", D_MODEL)
    assert bundle.graph.path == directory / "model.onnx"
    assert bundle.tokenizer_file is None
    assert bundle.pooling == ModelPooling((OutputKind.CLS,), l2_normalize=False, width=D_MODEL)
    edit(directory, pooling="POOLING_MAX")
    assert read_bundle(directory).fingerprint != bundle.fingerprint
    edit(directory, pooling="POOLING_MEAN", fingerprint=bundle.fingerprint)
    assert_refused(directory, "its fingerprint is")


# Files


def test_an_altered_file_is_refused(tmp_path: Path) -> None:
    """A bundle is refused if a file has a changed bit, lacks a byte, is missing, or is a link out of the bundle."""
    directory = write_bundle(tmp_path)
    data = (directory / "model.onnx").read_bytes()
    (directory / "model.onnx").write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    assert_refused(directory, r"model.onnx: its sha256 is [0-9a-f]{64}; .* [0-9a-f]{64}")
    (directory / "model.onnx").write_bytes(data[:-1])
    assert_refused(directory, rf"model.onnx: {len(data) - 1} bytes; .* {len(data)}")
    (directory / "model.onnx").unlink()
    assert_refused(directory, "model.onnx: .*No such file")
    (tmp_path / "elsewhere.onnx").write_bytes(data)
    (directory / "model.onnx").symlink_to(tmp_path / "elsewhere.onnx")
    assert_refused(directory, "outside the bundle")


def test_a_file_without_a_checksum_is_refused(tmp_path: Path) -> None:
    """If the graph named a file without a checksum, ONNX Runtime would read weights that are not verified."""
    directory = write_bundle(tmp_path)
    (directory / "weights.bin").write_bytes(b"anything")
    assert_refused(directory, "weights.bin: the manifest does not list this file")


@pytest.mark.parametrize("path", ["../../../etc/passwd", "/etc/passwd", "a/../../b", ""])
def test_a_path_outside_the_bundle_is_refused(tmp_path: Path, path: str) -> None:
    directory = write_bundle(tmp_path)
    edit(directory, files=[{"path": path, "size_bytes": 1, "sha256": "0"}])
    assert_refused(directory, f"{re.escape(repr(path))}, which is outside the bundle")


# Manifests


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "not a manifest"),
        ("[]", "not a manifest"),
        ("{", "not a manifest"),
        ('{"format_version": 2}', "format_version must be 1 .* was 2"),
        ("{}", "format_version must be 1 .* was None"),
        ('{"format_version": 1, "surprise": 3}', '"surprise"'),
        ('{"format_version": 1, "encoder": {"d_model": "wide"}}', "not a manifest"),
    ],
)
def test_a_file_that_is_not_a_manifest_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    directory = write_bundle(tmp_path)
    (directory / "manifest.json").write_text(content)
    assert_refused(directory, problem)


TEXT = {"tokenizer_file": "model.onnx"}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "other"}, "other/1 .* tiny/1"),
        ({"encoder": {}}, "encoder.d_model must be >= 1; was 0"),
        ({"files": []}, "model.onnx: the manifest does not list this file"),
        ({"graph": {"file": "g.onnx"}}, "graph.file names 'g.onnx'"),
        ({"pooling": 77}, "pooling 77"),
        ({"fingerprint": ""}, "its fingerprint is ''; .* '[0-9a-f]{32}'"),
        ({"text": TEXT | {"max_tokens": 9999}}, r"text\.max_tokens must be at most max_sequence_tokens, \d+; was 9999"),
        ({"text": TEXT | {"template": {"after_tokens": 9999}}}, r"text\.template\.after_tokens .* \d+; was 9999"),
        ({"text": TEXT | {"template": {}}, "pooling_skips_prompt": True}, "pooling_skips_prompt needs a text"),
        ({"text": {"tokenizer_file": "t.json"}}, "text.tokenizer_file names 't.json'"),
    ],
)
def test_a_contradicting_manifest_is_refused(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    directory = write_bundle(tmp_path)
    edit(directory, **fields)
    assert_refused(directory, problem)


@pytest.mark.parametrize(
    ("encoder", "inspect", "problem"),
    [
        ({"n_layers": 0}, {}, "n_layers >= 1; was 0"),
        ({}, {"attention_weights_names": []}, "attention_weights_names must hold 1 names .* was 0"),
        ({}, {"hidden_state_names": ["a"]}, "hidden_state_names must hold 2 names .* was 1"),
        ({}, {"positions_name": ""}, "inspect_graph.positions_name .* position 'learned'; was ''"),
        ({"position": "none"}, {}, "inspect_graph.positions_name .* position 'none'; was 'p'"),
        ({}, {"file": "other.onnx"}, "inspect_graph.file names 'other.onnx'"),
    ],
)
def test_a_contradicting_inspection_graph_is_refused(
    tmp_path: Path, encoder: dict[str, Any], inspect: dict[str, Any], problem: str
) -> None:
    directory = write_bundle(tmp_path)
    shape = json.loads((directory / "manifest.json").read_text())["encoder"]
    good: dict[str, Any] = {
        "file": "model.onnx",
        "attention_weights_names": ["w"],
        "hidden_state_names": ["a", "b"],
        "positions_name": "p",
    }
    shape |= {"n_layers": 1, "position": "learned"}
    edit(directory, encoder=shape, inspect_graph=good)
    assert read_bundle(directory).inspect_graph is not None
    edit(directory, encoder=shape | encoder, inspect_graph=good | inspect)
    assert_refused(directory, problem)


# Heads and tasks

FILES = {
    "multi_vector.onnx": tiny_heads.multi_vector_file(),
    "sparse.onnx": tiny_heads.sparse_file("max"),
    "own_id.onnx": tiny_heads.own_id_file(),
    "query.json": b"{}",
    "query.npy": npy(np.ones(VOCAB_SIZE, np.float32)),
    "short.npy": npy(np.ones(3, np.float32)),
}
OWN_ID: dict[str, Any] = {"pooling": m.SPARSE_POOLING_OWN_ID, "mask_name": "", "file": "own_id.onnx"}


def query(**fields: Any) -> dict[str, Any]:
    return {"query": m.TaskSettings(**fields)}


def static(weights_file: str = "query.npy") -> dict[str, Any]:
    return query(static_sparse=m.StaticSparse(tokenizer_file="query.json", weights_file=weights_file))


def expansion(min_tokens: int, token_id: int = 3, *, attended: bool = True) -> dict[str, Any]:
    return query(expansion=m.Expansion(min_tokens=min_tokens, token_id=token_id, attended=attended))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"multi_vector": multi_vector(file="no.onnx")}, "multi_vector.file names 'no.onnx'"),
        ({"multi_vector": multi_vector(width=0)}, "multi_vector.width must be >= 1; was 0"),
        ({"multi_vector": multi_vector(similarity="xtr")}, "multi_vector.similarity .* was 'xtr'"),
        ({"sparse": sparse(pooling=0)}, "sparse.pooling 0"),
        ({"sparse": sparse(width=0)}, "sparse.width must be >= 1; was 0"),
        ({"sparse": sparse(mask_name="")}, "sparse.mask_name must be set .* was ''"),
        ({"sparse": sparse(**OWN_ID | {"mask_name": "m"})}, "sparse.mask_name must be empty .* was 'm'"),
        ({"sparse": sparse(**OWN_ID | {"width": 49})}, "sparse.width .* 50; was 49"),
        (query(prompt_name="q"), "query.prompt_name is 'q'"),
        (query(max_tokens=65), "query.max_tokens must be at most max_sequence_tokens, 64; was 65"),
        (query(skipped_token_ids=[1, 50]), "query.skipped_token_ids must be below 50; one is 50"),
        (query(kept_token_ids=[99]), "query.kept_token_ids must be below 50; one is 99"),
        (expansion(0), "query.expansion.min_tokens must be from 1 .* 64; was 0"),
        (expansion(65), "query.expansion.min_tokens must be from 1 .* 64; was 65"),
        (expansion(9, 50), "query.expansion.token_id must be below 50; was 50"),
        ({**expansion(9, attended=False), "sparse": sparse()}, "query.expansion.attended must be true"),
        (query(token_pooling=m.TokenPooling(factor=0.5)), "query.token_pooling.factor .* >= 1; was 0.5"),
        (static(), "query.static_sparse needs sparse"),
        ({**static("no.npy"), "sparse": sparse()}, "static_sparse.weights_file names 'no.npy'"),
        ({**static("query.json"), "sparse": sparse()}, "query.json: not a NumPy array"),
        ({**static("short.npy"), "sparse": sparse()}, r"short.npy: .* \(50,\), .* \(3,\)"),
        ({**query(), "graph__input_ids_name": "", "graph__embeddings_name": "ids"}, "query and document"),
    ],
)
def test_a_contradicting_head_or_task_is_refused(tmp_path: Path, parts: dict[str, Any], problem: str) -> None:
    assert_refused(write_bundle(tmp_path, files=FILES, **parts), problem)
