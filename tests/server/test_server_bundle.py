"""Bundles: found, verified, and refused with the file and the reason."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from tiny_bundle import D_MODEL, write_bundle

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint
from encserve_server.errors import BundleError
from encserve_server.repository.bundle import read_bundle
from encserve_server.types.bundles import ModelPooling
from encserve_server.types.requests import OutputKind

TEXT = {"tokenizer_file": "model.onnx"}


def edit(directory: Path, **fields: Any) -> None:
    """Sets top-level fields of a manifest; the fingerprint is made to fit unless it is one of them."""
    path = directory / "manifest.json"
    changed = json.loads(path.read_text()) | fields
    fitting = fingerprint(json_format.ParseDict(changed, manifest_pb2.Manifest()))
    path.write_text(json.dumps({**changed, "fingerprint": fields.get("fingerprint", fitting)}))


def test_a_good_bundle_is_read(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path)
    bundle = read_bundle(directory)
    assert (bundle.name, bundle.version, bundle.d_model) == ("tiny", "1", D_MODEL)
    assert bundle.graph.path == directory / "model.onnx"
    assert bundle.tokenizer_file is None
    assert bundle.pooling == ModelPooling((OutputKind.CLS,), l2_normalize=False, width=D_MODEL)


def test_an_altered_file_is_refused(tmp_path: Path) -> None:
    """One bit is enough."""
    directory = write_bundle(tmp_path)
    data = bytearray((directory / "model.onnx").read_bytes())
    data[100] ^= 1
    (directory / "model.onnx").write_bytes(data)
    with pytest.raises(BundleError, match=r"model.onnx: its sha256 is [0-9a-f]{64}; its manifest says [0-9a-f]{64}"):
        read_bundle(directory)


def test_a_cut_file_is_refused_by_its_size(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path)
    data = (directory / "model.onnx").read_bytes()
    (directory / "model.onnx").write_bytes(data[:-1])
    with pytest.raises(BundleError, match=rf"model.onnx: {len(data) - 1} bytes; its manifest says {len(data)}"):
        read_bundle(directory)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path)
    (directory / "model.onnx").unlink()
    with pytest.raises(BundleError, match="model.onnx: cannot be read: No such file"):
        read_bundle(directory)


@pytest.mark.parametrize("path", ["../../../etc/passwd", "/etc/passwd", "a/../../b", ""])
def test_a_path_out_of_the_bundle_is_refused(tmp_path: Path, path: str) -> None:
    directory = write_bundle(tmp_path)
    edit(directory, files=[{"path": path, "size_bytes": 1, "sha256": "0"}])
    with pytest.raises(BundleError, match=f"files lists {re.escape(repr(path))}, which is outside the bundle"):
        read_bundle(directory)


def test_a_link_out_of_the_bundle_is_refused(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path)
    (directory / "model.onnx").rename(tmp_path / "elsewhere.onnx")
    (directory / "model.onnx").symlink_to(tmp_path / "elsewhere.onnx")
    with pytest.raises(BundleError, match="it leads outside the bundle"):
        read_bundle(directory)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "not a manifest"),
        ("[]", "not a manifest"),
        ("{", "not a manifest"),
        ('{"format_version": 2}', "format_version must be 1 for this server; was 2"),
        ("{}", "format_version must be 1 for this server; was None"),
        ('{"format_version": 1, "surprise": 3}', 'no field named "surprise"'),
        ('{"format_version": 1, "encoder": {"d_model": "wide"}}', "not a manifest"),
    ],
)
def test_a_manifest_that_is_none(tmp_path: Path, content: str, problem: str) -> None:
    directory = write_bundle(tmp_path)
    (directory / "manifest.json").write_text(content)
    with pytest.raises(BundleError, match=problem):
        read_bundle(directory)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "other"}, "it is of other/1 but lies in tiny/1"),
        ({"encoder": {}}, "encoder.d_model must be >= 1; was 0"),
        ({"files": []}, "model.onnx: the manifest does not list it, so nothing vouches for it"),
        ({"graph": {"file": "g.onnx"}}, "graph.file names 'g.onnx', which `files` does not list"),
        ({"pooling": 77}, "pooling 77 is not known to this server"),
        ({"fingerprint": ""}, "its fingerprint is ''; what it describes has '[0-9a-f]{32}'"),
        ({"text": TEXT | {"max_tokens": 9999}}, r"text\.max_tokens must be at most \d+, the encoder's; was 9999"),
        (
            {"text": TEXT | {"template": {"after_tokens": 9999}}},
            r"text\.template\.after_tokens must be below \d+; was 9999",
        ),
        (
            {"text": TEXT | {"template": {}}, "pooling_skips_prompt": True},
            "pooling_skips_prompt needs a text with",
        ),
        ({"text": {"tokenizer_file": "t.json"}}, "text.tokenizer_file names 't.json', which `files` does not list"),
    ],
)
def test_a_manifest_that_contradicts_itself(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    directory = write_bundle(tmp_path)
    edit(directory, **fields)
    with pytest.raises(BundleError, match=problem):
        read_bundle(directory)


@pytest.mark.parametrize(
    ("encoder", "inspect", "problem"),
    [
        ({"n_layers": 0}, {}, "inspect_graph needs encoder.n_layers >= 1; was 0"),
        ({}, {"attention_weights_names": []}, "attention_weights_names must hold 1 names for n_layers 1; was 0"),
        ({}, {"hidden_state_names": ["a"]}, "hidden_state_names must hold 2 names for n_layers 1; was 1"),
        ({}, {"positions_name": ""}, "inspect_graph.positions_name must be set for position 'learned'; was ''"),
        ({"position": "none"}, {}, "inspect_graph.positions_name must be empty for position 'none'; was 'p'"),
        ({}, {"file": "other.onnx"}, "inspect_graph.file names 'other.onnx', which `files` does not list"),
    ],
)
def test_a_graph_for_inspections_that_contradicts_the_manifest(
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
    with pytest.raises(BundleError, match=re.escape(problem)):
        read_bundle(directory)


def test_a_file_that_no_checksum_covers_is_refused(tmp_path: Path) -> None:
    """ONNX Runtime would read weights from it if the graph said so."""
    directory = write_bundle(tmp_path)
    (directory / "weights.bin").write_bytes(b"anything")
    with pytest.raises(BundleError, match="weights.bin: the manifest does not list it"):
        read_bundle(directory)


def test_a_pooling_that_was_changed_changes_the_fingerprint(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path)
    before = read_bundle(directory).fingerprint
    edit(directory, pooling="POOLING_MAX")
    assert read_bundle(directory).fingerprint != before
    edit(directory, pooling="POOLING_MEAN", fingerprint=before)
    with pytest.raises(BundleError, match="its fingerprint is"):
        read_bundle(directory)
