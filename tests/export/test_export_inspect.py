"""`encserve-export inspect`: parameters by layer, and the signal with and without residual connections."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import BARE_GOLDENS
from click.testing import CliRunner
from exporting import export_once

from encserve_export import Encoder, EncoderConfig, Exported, Target, export_init
from encserve_export.bundle.parameters import count_by_layer
from encserve_export.bundle.propagation import Signal, measure, random_input, read_sequence
from encserve_export.bundle.read import read_bundle
from encserve_export.cli import main
from encserve_export.ground.errors import BundleError, SequenceError
from encserve_export.models.own.init import random_encoder


def signals(encoder: Encoder, ids: Any) -> list[Signal]:
    """The figures from PyTorch, by their definitions."""
    tokens = torch.from_numpy(ids)[None]
    found = []
    for state in encoder.inspect(tokens, torch.ones_like(tokens)).hidden_states:
        rows = state[0].double().numpy()
        norms = np.linalg.norm(rows, axis=1)
        pairs = [rows[i] @ rows[j] / norms[i] / norms[j] for i in range(len(rows)) for j in range(len(rows)) if i != j]
        found.append(Signal(norms.mean(), np.mean(pairs)))
    return found


@pytest.mark.parametrize("fields", [{}, {"norm": "pre", "final_norm": True}, {"d_ff": 0}, {"norm": "none"}])
def test_the_signal_is_that_of_pytorch_with_and_without_residuals(
    tiny: EncoderConfig, models: Path, fields: dict[str, Any]
) -> None:
    config = dataclasses.replace(tiny, **fields)
    bundle = read_bundle(export_init(config, 3, Target(model_repository=models, name="m")).path)
    ids = random_input(bundle, 7)
    encoder = random_encoder(config, 3)
    cut = Encoder(dataclasses.replace(config, residual=False))
    cut.load_state_dict(encoder.state_dict())
    propagation = measure(bundle, ids)
    assert propagation.without_residuals is not None
    with torch.inference_mode():
        for got, want in ((propagation.signals, encoder), (propagation.without_residuals, cut)):
            figures = [dataclasses.astuple(signal) for signal in got]
            np.testing.assert_allclose(figures, [dataclasses.astuple(it) for it in signals(want, ids)], rtol=1e-4)


def test_a_model_without_residuals_has_one_column(bundles: dict[str, Exported]) -> None:
    propagation = measure(read_bundle(bundles["attention-only"].path), np.array([1, 2, 3]))
    assert propagation.without_residuals is None
    assert len(propagation.signals) == 2


def test_one_token_has_no_pairs(bundles: dict[str, Exported]) -> None:
    propagation = measure(read_bundle(bundles["raw-matrices"].path), np.array([1]))
    assert all(np.isnan(signal.cosine) and signal.norm > 0 for signal in propagation.signals)


@pytest.mark.parametrize("name", [*BARE_GOLDENS, "hf-roberta", "hf-distilbert"])
def test_every_parameter_is_in_the_table(bundles: dict[str, Exported], name: str) -> None:
    exported = bundles[name]
    layers = count_by_layer(read_bundle(exported.path))
    counted: dict[str, int] = {part.part: 0 for part in exported.manifest.parameters}
    for layer in layers:
        for part, count in layer.counts.items():
            counted[part] += count
    assert counted == {part.part: part.count for part in exported.manifest.parameters}
    blocks = [f"layer {i}" for i in range(exported.manifest.encoder.n_layers)]
    final = ["final norm"] if name in {"split-qkv", "torch-native-pre"} else []
    assert [layer.name for layer in layers] == ["embeddings", *blocks, *final]


def test_equal_weights_count_once_for_each_layer(tiny: EncoderConfig, models: Path) -> None:
    """Fresh LayerNorms are all equal, and the graph keeps them once."""
    exported = export_once(export_init, tiny, 0, target=Target(model_repository=models, name="m"))
    layers = count_by_layer(read_bundle(exported.path))
    assert [layer.counts.get("norm") for layer in layers] == [None, 64, 64]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def test_the_tables(bundles: dict[str, Exported]) -> None:
    result = run(bundles["split-qkv"].path, "--ids", "3,1,4")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["total", "6,208", "49,920", "49,728", "896", "106,752"] in lines
    assert ["layer", "2", "16,640", "16,576", "256", "33,472"] in lines
    assert "Signal propagation, 3 tokens of the given ids:" in result.output
    after = [line for line in lines if line[:1] == ["layer"] and len(line) == 6 and "." in line[2]]
    assert len(after) == 3
    assert all(len(line) <= 100 for line in result.output.splitlines() if not line.startswith(("model", "encoder")))


def test_rows_that_are_never_used_are_said(bundles: dict[str, Exported]) -> None:
    assert "and 64 that the graph never uses" in run(bundles["hf-bert"].path).output


def test_a_model_without_residuals_says_so(bundles: dict[str, Exported]) -> None:
    result = run(bundles["attention-only"].path)
    assert "32 tokens of random tokens" in result.output
    assert "This model has no residual connections." in result.output


def test_a_model_that_takes_vectors(tiny: EncoderConfig, models: Path) -> None:
    config = dataclasses.replace(tiny, input="embeddings", vocab_size=0)
    exported = export_init(config, 0, Target(model_repository=models, name="m"))
    assert "24 tokens of random tokens" in run(exported.path).output
    result = run(exported.path, "--ids", "1")
    assert result.exit_code == 1
    assert "m takes embeddings: there is neither text nor ids for it" in result.output


@pytest.mark.parametrize(
    ("text", "ids", "problem"),
    [
        ("a", "1", "give --text or --ids, not both"),
        ("a", None, "raw-matrices has no tokenizer; give --ids"),
        (None, "1,x", "--ids must be numbers with commas between them; was '1,x'"),
        (None, "1,100", "ids must be from 0 to 99; were from 1 to 100"),
        (None, "-1", "ids must be from 0 to 99; were from -1 to -1"),
        (None, ",".join(["1"] * 513), "must have 1 to 512 tokens; was 513"),
    ],
)
def test_what_is_no_sequence_is_refused(
    bundles: dict[str, Exported], text: str | None, ids: str | None, problem: str
) -> None:
    with pytest.raises(SequenceError, match=problem):
        read_sequence(read_bundle(bundles["raw-matrices"].path), text, ids, 8)


def test_no_bundle_is_said(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "holds no bundle: there is no manifest.json in it; give MODEL_REPOSITORY/NAME/VERSION" in result.output


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "is no manifest"), ("[]", "is no manifest"), ('{"format_version": 2}', "format_version must be 1; was 2")],
)
def test_another_manifest_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(BundleError, match=problem):
        read_bundle(tmp_path)


def test_an_altered_file_is_refused(tiny: EncoderConfig, models: Path) -> None:
    path = export_once(export_init, tiny, 0, target=Target(model_repository=models, name="m")).path
    data = bytearray((path / "model.onnx.data").read_bytes())
    data[-1] ^= 1
    (path / "model.onnx.data").write_bytes(data)
    with pytest.raises(BundleError, match=r"model.onnx.data is altered: its sha256 is \w+; the manifest says \w+"):
        read_bundle(path)
    (path / "model.onnx.data").unlink()
    with pytest.raises(BundleError, match=r"model.onnx.data cannot be read"):
        read_bundle(path)


def test_a_bundle_without_a_graph_for_inspections(tiny: EncoderConfig, models: Path) -> None:
    path = export_once(export_init, tiny, 0, target=Target(model_repository=models, name="m")).path
    fields = json.loads((path / "manifest.json").read_text())
    del fields["inspect_graph"]
    (path / "manifest.json").write_text(json.dumps(fields))
    result = run(path)
    assert result.exit_code == 0
    assert "No signal propagation: this bundle has no graph for inspections." in result.output


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"files": []}, "graph.file names 'model.onnx', which the manifest does not list"),
        ({}, "holds left.over, which the manifest does not list"),
        ({"files": [{"path": "../x", "sha256": "0"}]}, "files lists '../x', which is outside the bundle"),
        ({"inspect_graph": {"file": "../x.onnx"}}, "inspect_graph.file names '../x.onnx', which the manifest does not"),
        ({"graph": {"file": "/x.onnx"}}, "graph.file names '/x.onnx', which the manifest does not list"),
        ({"l2_normalize": True}, "its fingerprint is '[0-9a-f]{32}'; what it describes has '[0-9a-f]{32}'"),
    ],
)
def test_what_no_checksum_covers_is_not_looked_into(
    tiny: EncoderConfig, models: Path, fields: dict[str, Any], problem: str
) -> None:
    """An ONNX file may name any file that its weights lie in."""
    path = export_once(export_init, tiny, 3, target=Target(model_repository=models, name="m")).path
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | fields))
    if not fields:
        (path / "left.over").touch()
    with pytest.raises(BundleError, match=problem):
        read_bundle(path)
