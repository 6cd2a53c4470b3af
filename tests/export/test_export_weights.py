"""Weights are read from every file they come in, and nothing in a file is executed."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from encserve_export.errors import CheckpointFileError, UnsafeWeightsError
from encserve_export.weights import read_json, read_weights


def test_one_file_and_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, path)
    weights = read_weights(tmp_path)
    assert weights.tensors["a"].tolist() == [1, 1]
    assert weights.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def write_sharded(folder: Path, names: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_several_files_with_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-00002-of-00002.safetensors")
    write_sharded(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    assert set(read_weights(tmp_path).tensors) == {"a", "b"}


def test_a_file_that_the_index_names_is_missing(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a": "model-00001-of-00001.safetensors"})
    with pytest.raises(CheckpointFileError, match=r"model-00001-of-00001\.safetensors is missing; the index names it"):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "model.py"])
def test_an_index_cannot_name_other_files(tmp_path: Path, name: str) -> None:
    write_sharded(tmp_path, {"a": name})
    with pytest.raises(CheckpointFileError, match="must name files beside it"):
        read_weights(tmp_path)


def test_an_index_without_a_map(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointFileError, match="has no weight_map"):
        read_weights(tmp_path)


def test_a_pickle_of_tensors(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, dtype=torch.float16)}, tmp_path / "pytorch_model.bin")
    assert read_weights(tmp_path).tensors["a"].dtype == torch.float16


class Dangerous:
    """Asks for a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


def test_a_pickle_that_needs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Dangerous()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsafeWeightsError, match="could execute code and is never loaded: .*system") as caught:
        read_weights(tmp_path)
    assert "weights_only" not in str(caught.value), "the way around the check is not advertised"
    assert not (tmp_path / "executed").exists()


def test_a_pickle_of_something_else(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointFileError, match="must hold tensors by name and nothing else"):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"\x80\x02 no pickle"])
def test_an_unreadable_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((CheckpointFileError, UnsafeWeightsError), match=name):
        read_weights(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileError, match=r"looked for model\.safetensors and pytorch_model\.bin"):
        read_weights(tmp_path)


def test_json_that_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileError, match="is missing"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointFileError, match="cannot be read as JSON"):
        read_json(tmp_path / "config.json")
