"""Which route takes a directory, and why; and what is said where config.json says what no route computes."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, Architecture, change_config, save

from encserve_export import Exported, Target, export_hf
from encserve_export.ground.errors import CheckpointFileError, ParityError, UnsupportedModelError
from encserve_export.kinds.reading import read
from encserve_export.models.own.layouts import hf_bert
from encserve_export.routes.hf import Plan, plan

NAMED = {architecture.name: architecture for architecture in ARCHITECTURES}


def export(directory: Path, **options: object) -> Exported:
    target = Target(model_repository=directory.parent / "models", name="m", overwrite=True)
    return export_hf(directory, target, max_sequence_tokens=20, ids_only=True, **options)  # type: ignore[arg-type]


def planned(directory: Path) -> Plan:
    return plan(read(directory))


def test_a_plan_says_which_routes_take_a_directory_and_why(tmp_path: Path) -> None:
    """It reads config.json and which files there are; the weights may be broken."""
    bert, gte, electra = (save(NAMED[name], tmp_path) for name in ("BERT", "GTE", "ELECTRA"))
    for directory in (bert, gte, electra):
        (directory / "model.safetensors").write_bytes(b"broken")
    assert planned(bert).refusals == {"onnx": "there is no onnx/model.onnx"}
    assert planned(bert).order == ("own", "onnx", "transformers")
    assert planned(gte).order == ("onnx", "transformers", "own")
    assert "our own encoder is no faster for it" in planned(gte).reason
    assert "model_type must be one of bert, " in planned(electra).refusals["own"]
    assert plan(read(gte), 2000).order == ("own", "onnx", "transformers")


@pytest.mark.parametrize("name", ["BERT", "ELECTRA", "T5"])
def test_an_onnx_file_alone_is_taken(name: str, tmp_path: Path) -> None:
    """As in the directories of Xenova's on the hub: config.json, and no weights beside onnx/model.onnx."""
    directory = save(NAMED[name], tmp_path)
    graph = export(directory, via="transformers").path / "model.onnx"
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointFileError, match="holds no weights; looked for"):
        export(directory)
    (directory / "onnx").mkdir()
    shutil.copy(graph, directory / "onnx")
    exported = export(directory)
    assert exported.manifest.source.route == "onnx"
    assert "our own encoder does not take it: the directory holds no weights" in exported.notes["route"]
    with pytest.raises(UnsupportedModelError, match="holds no weights. Without --via transformers, every way"):
        export(directory, via="transformers")


@pytest.mark.parametrize("wrong", [{"layer_norm_eps": 1e-3}, {"activation": "relu"}, {"pad_token_id": 7}])
def test_our_own_encoder_is_compared_with_transformers(
    wrong: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that is read wrong gives a graph that is true to our encoder, and not to the model."""
    directory = save(NAMED["RoBERTa"], tmp_path)
    layout = hf_bert.read_layout

    def misread(settings: dict[str, object]) -> object:
        found = layout(settings)
        return dataclasses.replace(found, config=dataclasses.replace(found.config, **wrong))  # type: ignore[arg-type]

    monkeypatch.setattr(hf_bert, "read_layout", misread)
    with pytest.raises(ParityError, match=r"our own encoder computes something else than .*with --via transf"):
        export(directory)
    assert not (tmp_path / "models" / "m").exists()


def test_positions_that_transformers_ignores_are_remarked(tmp_path: Path) -> None:
    directory = save(NAMED["BERT"], tmp_path)
    assert "remark" not in export(directory).notes
    change_config(directory, position_embedding_type="alibi", auto_map={"AutoModel": "modeling.Mine"})
    code, positions = export(directory).notes["remark"].split("; ")
    assert code.endswith("(auto_map) was not run: the model is read as transformers' own bert")
    assert (
        "position_embedding_type 'alibi', which transformers' own bert ignores: if the model was trained" in positions
    )


def test_positions_that_transformers_reads_are_not_remarked(tmp_path: Path) -> None:
    sizes = {**NAMED["BERT"].settings, "pad_token_id": 0, "mask_token_id": 4, "position_embedding_type": "rotary"}
    assert planned(save(Architecture("ESM", "esm", sizes), tmp_path)).remarks == ()
