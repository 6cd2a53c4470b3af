"""The exporter reads weights from every supported kind of file, and never runs code from these files."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from encserve_export.core.errors import CheckpointFileError, UnsafeWeightsError
from encserve_export.source.weights import read_checkpoint, read_json, read_object, read_table, read_weights

AGAIN = r"download or save it again \(in a git clone: git lfs pull\)$"
DOWNLOAD = r"[Dd]ownload .* again \(in a git clone: git lfs pull\)"


def sha256(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def write_index(folder: Path, files: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_single_weights_file_is_read(tmp_path: Path, name: str) -> None:
    tensors = {"a": torch.ones(2, dtype=torch.float16)}
    if name.endswith(".bin"):
        torch.save(tensors, tmp_path / name)
    else:
        save_file(tensors, tmp_path / name)
    weights = read_weights(tmp_path)
    assert torch.equal(weights.tensors["a"], tensors["a"])
    assert weights.sha256 == sha256(tmp_path / name)


def test_several_weights_files_with_an_index_are_read(tmp_path: Path) -> None:
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    save_file({"a": torch.ones(2)}, first)
    save_file({"b": torch.zeros(3)}, second)
    write_index(tmp_path, {"a": first.name, "b": second.name})
    weights = read_weights(tmp_path)
    assert set(weights.tensors) == {"a", "b"}
    assert weights.sha256 == sha256(first, second)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "model-1.safetensors"}, r"model-1\.safetensors is missing, but the index names it; " + AGAIN),
        ({"a": "../model.safetensors"}, r"must name .* files in the same folder; was '\.\./model\.safetensors'"),
        ({"a": "/model.safetensors"}, "files in the same folder"),
        ({"a": "model.py"}, "files in the same folder"),
        ([], "has no weight_map"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, files: object, message: str) -> None:
    write_index(tmp_path, files)
    with pytest.raises(CheckpointFileError, match=message):
        read_weights(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileError, match=r"looked for model\.safetensors and pytorch_model\.bin"):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 cut off",
        b"\x80\x02 not a pickle",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d",
    ],
    ids=["empty", "zip", "pickle", "git lfs"],
)
def test_the_error_names_an_unreadable_file(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((CheckpointFileError, UnsafeWeightsError), match=f"{name} is .*{DOWNLOAD}"):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_error_names_a_truncated_file(tmp_path: Path, name: str) -> None:
    tensors = {"a": torch.ones(1000)}
    if name.endswith(".bin"):
        torch.save(tensors, tmp_path / name)
    else:
        save_file(tensors, tmp_path / name)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:2000])
    with pytest.raises(CheckpointFileError, match=f"{name} is .*{DOWNLOAD}"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is missing$"), ("{", "cannot be read as JSON: "), ("[]", "hold a JSON object; was list")],
)
def test_the_error_names_a_missing_or_broken_json_file(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointFileError, match=rf"config\.json .*{message}"):
        read_object(path)
    if content == "[]":
        assert read_json(path) == []


class Dangerous:
    """An object that runs a command when pickle loads the object."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("content", [{"a": Dangerous()}, torch.nn.Linear(2, 2)], ids=["command", "module"])
def test_a_pickle_of_other_objects_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    message = "could run code, so they are never loaded. Save only the state dict: torch.save"
    reads: list[Callable[[], object]] = [
        lambda: read_weights(tmp_path),
        lambda: read_checkpoint(tmp_path / "pytorch_model.bin"),
    ]
    for read in reads:
        with pytest.raises(UnsafeWeightsError, match=message) as caught:
            read()
        assert not any(word in str(caught.value) for word in ("weights_only", "safe_globals", "trust"))
    assert not (tmp_path / "executed").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_archive_is_not_loaded(tmp_path: Path) -> None:
    trace: Any = torch.jit.trace
    trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "traced.pt")
    with pytest.raises(CheckpointFileError, match="TorchScript.*save only the state dict"):
        read_checkpoint(tmp_path / "traced.pt")


def test_a_weights_file_with_other_objects_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointFileError, match="must hold tensors by name and nothing else"):
        read_weights(tmp_path)


@pytest.mark.parametrize("container", [(), ("state_dict",), ("model",), ("model_state_dict",), ("model", "state_dict")])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.module."])
def test_a_checkpoint_of_a_training_script(tmp_path: Path, container: tuple[str, ...], prefix: str) -> None:
    path = tmp_path / "last.pth"
    content: dict[str, object] = {f"{prefix}layers.0.module.a": torch.ones(2), f"{prefix}b": torch.zeros(3)}
    for key in reversed(container):
        content = {key: content, "epoch": 3, "optimizer": {"state": {0: {"step": torch.ones(1)}}, "lr": 0.1}}
    torch.save(content, path)
    weights = read_checkpoint(path)
    assert set(weights.tensors) == {"layers.0.module.a", "b"}
    assert weights.sha256 == sha256(path)


def test_the_hash_covers_a_file_of_embeddings(tmp_path: Path) -> None:
    path, table = tmp_path / "a.safetensors", tmp_path / "table.pt"
    save_file({"module.a": torch.ones(2), "_orig_mod.module.b": torch.ones(1)}, path)
    torch.save({"weight": torch.ones(3, 2)}, table)
    weights = read_checkpoint(path, table)
    assert set(weights.tensors) == {"a", "b"}
    assert weights.sha256 == sha256(path, table)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"model": {"a": torch.ones(1)}, "state_dict": {"a": torch.ones(1)}},
            "several state dicts: state_dict, model;",
        ),
        (
            {"weights": {"a": torch.ones(1)}, "epoch": 3},
            "tensors by name, at the top level or under .*; was epoch, weights",
        ),
        ({"model": "transformer", 3: torch.ones(1)}, "must hold tensors by name, .*; was 3, model"),
        ([torch.ones(1)], "must hold tensors by name, .*; was list"),
        ({}, "must hold tensors by name, .*; was empty"),
        ({"module.a": torch.ones(1), "a": torch.ones(1)}, "holds a twice, once with a wrapper's prefix"),
    ],
)
def test_a_checkpoint_without_one_state_dict_is_refused(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "last.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointFileError, match=message):
        read_checkpoint(path)


def test_a_file_with_one_table_is_read(tmp_path: Path) -> None:
    table = torch.ones(3, 2)
    save_file({"embedding.weight": table}, tmp_path / "a.safetensors")
    torch.save({"state_dict": {"weight": table}}, tmp_path / "b.pt")
    torch.save(table, tmp_path / "c.pt")
    names = [read_table(tmp_path / name)[0] for name in ("a.safetensors", "b.pt", "c.pt")]
    assert names == ["embedding.weight", "weight", "c"]
    assert torch.equal(read_table(tmp_path / "c.pt")[1], table)


@pytest.mark.parametrize("tensors", [{}, {"b": torch.ones(3, 2), "a": torch.ones(3, 2)}])
def test_a_file_with_no_table_or_several_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointFileError, match="the embedding table and nothing else; was (a, b|empty)"):
        read_table(tmp_path / "a.safetensors")
