"""The manifest describes the bundle. Two exports of the same input write the same bytes."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import DATA
from google.protobuf import json_format

from encserve_export import EncoderConfig, Exported, Target, export_hf, export_init
from encserve_export.core.errors import BundleExistsError
from encserve_export.models.own.init import random_encoder
from encserve_export.models.own.reference import count_parameters
from encserve_export.source.tokenizer import read_tokenizer
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint


def test_manifest_json_lists_every_other_file(bundles: dict[str, Exported], golden: str) -> None:
    folder, manifest = bundles[golden].path, bundles[golden].manifest
    assert json_format.Parse((folder / "manifest.json").read_text(), manifest_pb2.Manifest()) == manifest
    listed = {file.path: (file.size_bytes, file.sha256) for file in manifest.files}
    assert listed == {
        path.name: (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }


def test_the_manifest_of_a_checkpoint(bundles: dict[str, Exported]) -> None:
    manifest = bundles["hf-roberta"].manifest
    assert (manifest.format_version, manifest.name, manifest.version) == (1, "hf-roberta", "1")
    shape = manifest.encoder
    assert (shape.d_model, shape.vocab_size, shape.max_sequence_tokens, shape.pad_token_id) == (64, 101, 64, 1)
    assert not manifest.HasField("text")
    assert (manifest.pooling, manifest.l2_normalize) == (manifest_pb2.POOLING_UNSPECIFIED, False)
    assert (manifest.graph.file, manifest.graph.precision) == ("model.onnx", "float32")
    assert (manifest.source.kind, manifest.source.description) == ("hf", "RobertaModel")
    weights = (DATA / "hf-roberta" / "model.safetensors").read_bytes()
    assert manifest.source.weights_sha256 == hashlib.sha256(weights).hexdigest()
    assert set(manifest.source.versions) >= {"encserve", "onnx", "onnxruntime", "tokenizers", "torch"}
    assert 0 < manifest.parity.max_relative_error <= manifest.parity.tolerance == 5e-5
    assert manifest.parity.max_padding_error <= 1e-5
    assert {tuple(case.lengths) for case in manifest.parity.cases} >= {(1,), (64,), (64, 32, 1)}


def test_parameters_are_counted_by_part(tiny: EncoderConfig) -> None:
    config = dataclasses.replace(tiny, position="learned", final_norm=True)
    d, ff, blocks = 16, 32, 2
    assert count_parameters(random_encoder(config, 0)) == {
        "embedding": (50 + 24) * d,
        "attention": blocks * (4 * d * d + 4 * d),
        "feed_forward": blocks * (2 * d * ff + ff + d),
        "norm": (2 * blocks + 1) * 2 * d,
    }


def test_random_weights_of_one_seed_give_the_same_bytes(
    tiny: EncoderConfig, tmp_path: Path, write_tokenizer: Callable[..., Path]
) -> None:
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    contents = []
    for folder in ("a", "b"):
        target = Target(model_repository=tmp_path / folder, name="random")
        bundle = export_init(tiny, 5, target, tokenizer=tokenizer).path
        contents.append({path.name: path.read_bytes() for path in bundle.iterdir()})
    assert set(contents[0]) == {"manifest.json", "model.onnx", "model.onnx.data", "inspect.onnx", "tokenizer.json"}
    assert contents[0] == contents[1]
    with pytest.raises(BundleExistsError, match="or --overwrite to replace it"):
        export_init(tiny, 5, target, tokenizer=tokenizer)


def test_one_checkpoint_gives_the_same_bytes_and_nothing_else(
    bundles: dict[str, Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Export a checkpoint again, and expect the same bytes. The export must not create the cache folder."""
    monkeypatch.setenv("ENCSERVE_CACHE_DIR", str(tmp_path / "cache"))
    models = tmp_path / "models"
    again = export_hf(DATA / "hf-bert", Target(model_repository=models, name="hf-bert"), ids_only=True).path
    for path in bundles["hf-bert"].path.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()
    assert not (tmp_path / "cache").exists()


def test_everything_that_changes_vectors_changes_the_fingerprint(bundles: dict[str, Exported]) -> None:
    manifest = bundles["hf-bert"].manifest
    assert manifest.fingerprint == fingerprint(manifest)
    assert len(manifest.fingerprint) == 32

    def changed(**fields: object) -> manifest_pb2.Manifest:
        copy = manifest_pb2.Manifest()
        copy.CopyFrom(manifest)
        for name, value in fields.items():
            setattr(copy, name, value)
        return copy

    for same in (changed(name="other"), changed(version="2")):
        assert fingerprint(same) == manifest.fingerprint
    other_file = changed()
    other_file.files[0].sha256 = "0" * 64
    for other in (changed(pooling=manifest_pb2.POOLING_CLS), changed(l2_normalize=True), other_file):
        assert fingerprint(other) != manifest.fingerprint
    assert len({bundle.manifest.fingerprint for bundle in bundles.values()}) == len(bundles)


def test_a_field_at_its_default_does_not_change_the_fingerprint() -> None:
    """Compute a fingerprint, and expect that fields with default values do not change the fingerprint.

    So older bundles keep their fingerprints when the manifest gets a new field.
    """
    manifest = manifest_pb2.Manifest(
        graph=manifest_pb2.Graph(file="g", opset=20), files=[manifest_pb2.BundleFile(path="g", sha256="ab")]
    )
    canonical = '{"files":{"g":"ab"},"graph":{"file":"g","opset":20}}'
    assert fingerprint(manifest) == hashlib.sha256(canonical.encode()).hexdigest()[:32]


def test_the_file_has_every_field_in_order(bundles: dict[str, Exported]) -> None:
    fields = json.loads((bundles["hf-bert"].path / "manifest.json").read_text())
    absent = ("text", "head", "query", "document", "multi_vector", "sparse", "scores")
    expected = [field.name for field in manifest_pb2.Manifest.DESCRIPTOR.fields if field.name not in absent]
    assert sorted(fields) == sorted(expected)
    assert fields["encoder"]["pad_token_id"] == 0, "zeros are written too"
    assert list(fields["source"]["versions"]) == sorted(fields["source"]["versions"])
