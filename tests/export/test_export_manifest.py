"""The manifest says what is in the bundle, and the same input gives the same bytes."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from google.protobuf import json_format

from encserve_export import EncoderConfig, Exported, Target, export_hf, export_init
from encserve_export.models.own.init import random_encoder
from encserve_export.models.own.reference import count_parameters
from encserve_export.source.tokenizer import read_tokenizer
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint


def read_manifest(bundle: Path) -> manifest_pb2.Manifest:
    return json_format.Parse((bundle / "manifest.json").read_text(), manifest_pb2.Manifest())


def test_the_file_is_the_message(bundles: dict[str, Exported], golden: str) -> None:
    assert read_manifest(bundles[golden].path) == bundles[golden].manifest


def test_every_file_is_listed_with_its_hash(bundles: dict[str, Exported], golden: str) -> None:
    bundle = bundles[golden].path
    listed = {file.path: (file.size_bytes, file.sha256) for file in bundles[golden].manifest.files}
    found = {
        path.name: (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in bundle.iterdir()
        if path.name != "manifest.json"
    }
    assert listed == found


def test_what_it_says_of_a_checkpoint(bundles: dict[str, Exported], data: Path) -> None:
    manifest = bundles["hf-roberta"].manifest
    assert (manifest.format_version, manifest.name, manifest.version) == (1, "hf-roberta", "1")
    shape = manifest.encoder
    assert (shape.d_model, shape.n_heads, shape.d_ff, shape.n_layers, shape.vocab_size) == (64, 4, 128, 2, 101)
    assert (shape.max_sequence_tokens, shape.pad_token_id) == (64, 1)
    assert (shape.activation, shape.norm, shape.position) == ("gelu", "", "learned")
    assert not manifest.HasField("text")
    assert (manifest.pooling, manifest.l2_normalize) == (manifest_pb2.POOLING_UNSPECIFIED, False)
    assert (manifest.graph.file, manifest.graph.precision) == ("model.onnx", "float32")
    assert (manifest.source.kind, manifest.source.description) == ("hf", "RobertaModel")
    weights = (data / "hf-roberta" / "model.safetensors").read_bytes()
    assert manifest.source.weights_sha256 == hashlib.sha256(weights).hexdigest()
    assert set(manifest.source.versions) == {
        *("encserve-export", "onnx", "onnxruntime", "tokenizers", "torch", "transformers"),
    }
    assert 0 < manifest.parity.max_relative_error <= manifest.parity.tolerance == 5e-5
    assert manifest.parity.max_padding_error <= 1e-5
    assert {tuple(case.lengths) for case in manifest.parity.cases} >= {(1,), (64,), (64, 1)}


def test_parameters_are_counted_by_part(tiny: EncoderConfig) -> None:
    config = dataclasses.replace(tiny, position="learned", final_norm=True, embedding_norm=True, n_token_types=2)
    d, ff, blocks = 16, 32, 2
    assert count_parameters(random_encoder(config, 0)) == {
        "embedding": (50 + 24 + 2) * d,
        "attention": blocks * (4 * d * d + 4 * d),
        "feed_forward": blocks * (2 * d * ff + ff + d),
        "norm": (2 * blocks + 2) * 2 * d,
    }


def test_the_same_input_gives_the_same_bytes(
    tiny: EncoderConfig, tmp_path: Path, write_tokenizer: Callable[..., Path]
) -> None:
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    contents = []
    for folder in ("a", "b"):
        bundle = export_init(
            tiny, 5, Target(model_repository=tmp_path / folder, name="random"), tokenizer=tokenizer
        ).path
        contents.append({path.name: path.read_bytes() for path in bundle.iterdir()})
    assert set(contents[0]) == {"manifest.json", "model.onnx", "model.onnx.data", "inspect.onnx", "tokenizer.json"}
    assert contents[0] == contents[1]


def test_the_same_checkpoint_gives_the_same_bytes(bundles: dict[str, Exported], data: Path, models: Path) -> None:
    again = export_hf(data / "hf-bert", Target(model_repository=models, name="hf-bert"), ids_only=True).path
    for path in bundles["hf-bert"].path.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_the_fingerprint_follows_all_that_changes_a_vector(bundles: dict[str, Exported]) -> None:
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
    for other in (changed(pooling=manifest_pb2.POOLING_CLS), changed(l2_normalize=True)):
        assert fingerprint(other) != manifest.fingerprint
    other = changed()
    other.files[0].sha256 = "0" * 64
    assert fingerprint(other) != manifest.fingerprint
    assert len({bundle.manifest.fingerprint for bundle in bundles.values()}) == len(bundles)


def test_fields_are_written_under_their_own_names_in_order(bundles: dict[str, Exported]) -> None:
    fields = json.loads((bundles["hf-bert"].path / "manifest.json").read_text())
    absent = ("text", "head", "query", "document", "multi_vector", "sparse")
    expected = [field.name for field in manifest_pb2.Manifest.DESCRIPTOR.fields if field.name not in absent]
    assert sorted(fields) == sorted(expected)
    assert fields["encoder"]["pad_token_id"] == 0, "a field of value zero is written too"
    assert list(fields["source"]["versions"]) == sorted(fields["source"]["versions"])


def test_a_field_at_its_default_does_not_count() -> None:
    """Otherwise a field that is added to the contract would make every bundle from before unusable."""
    manifest = manifest_pb2.Manifest(
        graph=manifest_pb2.Graph(file="g", opset=20), files=[manifest_pb2.BundleFile(path="g", sha256="ab")]
    )
    canonical = '{"files":{"g":"ab"},"graph":{"file":"g","opset":20}}'
    assert fingerprint(manifest) == hashlib.sha256(canonical.encode()).hexdigest()[:32]
