"""Weights are read from every file they come in, and nothing in a file is executed."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from encserve_export.ground.errors import CheckpointFileError, ConfigError, UnsafeWeightsError
from encserve_export.source.weights import check_harmless, read_checkpoint, read_json, read_table, read_weights


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


@pytest.mark.parametrize("container", [(), ("state_dict",), ("model",), ("model_state_dict",), ("model", "state_dict")])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."])
def test_a_checkpoint_of_a_training_script(tmp_path: Path, container: tuple[str, ...], prefix: str) -> None:
    path = tmp_path / "last.pth"
    content: dict[str, object] = {f"{prefix}layers.0.module.a": torch.ones(2), f"{prefix}b": torch.zeros(3)}
    for key in reversed(container):
        content = {key: content, "epoch": 3, "optimizer": {"state": {0: {"step": torch.ones(1)}}, "lr": 0.1}}
    torch.save(content, path)
    weights = read_checkpoint(path)
    assert set(weights.tensors) == {"layers.0.module.a", "b"}
    assert weights.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_checkpoint_in_safetensors(tmp_path: Path) -> None:
    path, table = tmp_path / "a.safetensors", tmp_path / "table.pt"
    save_file({"module.a": torch.ones(2), "_orig_mod.module.b": torch.ones(1)}, path)
    torch.save({"weight": torch.ones(3, 2)}, table)
    weights = read_checkpoint(path, table)
    assert set(weights.tensors) == {"a", "b"}
    assert weights.sha256 == hashlib.sha256(path.read_bytes() + table.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"model": {"a": torch.ones(1)}, "state_dict": {"a": torch.ones(1)}},
            "several state dicts: state_dict, model;",
        ),
        (
            {"weights": {"a": torch.ones(1)}, "epoch": 3},
            "must hold tensors by name, bare or under .*; was epoch, weights",
        ),
        ({"model": "transformer", 3: torch.ones(1)}, "must hold tensors by name, .*; was 3, model"),
        ([torch.ones(1)], "must hold tensors by name, .*; was list"),
        ({}, "must hold tensors by name, .*; was empty"),
        ({"module.a": torch.ones(1), "a": torch.ones(1)}, "holds a twice, once behind a wrapper's prefix"),
    ],
)
def test_a_checkpoint_without_one_state_dict(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "last.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointFileError, match=message):
        read_checkpoint(path)


def test_a_checkpoint_that_contains_itself(tmp_path: Path) -> None:
    content: dict[str, object] = {}
    content["model"] = content
    torch.save(content, tmp_path / "last.pt")
    with pytest.raises(CheckpointFileError, match="was model"):
        read_checkpoint(tmp_path / "last.pt")


def test_checkpoints_that_need_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to do instead is said, and how to switch the check off is not."""
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"a": torch.ones(1)}, "args": Dangerous()}, tmp_path / "args.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    for name in ("args.pt", "module.pt"):
        with pytest.raises(UnsafeWeightsError, match=r"could execute code .* Save the state dict alone: ") as caught:
            read_checkpoint(tmp_path / name)
        assert not any(word in str(caught.value) for word in ("weights_only", "safe_globals", "trust"))
    assert not (tmp_path / "executed").exists()


def test_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n")
    with pytest.raises(CheckpointFileError, match=r"pytorch_model\.bin is a pointer of git LFS.*git lfs pull"):
        read_weights(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_archive_is_refused(tmp_path: Path) -> None:
    trace: Any = torch.jit.trace
    trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "traced.pt")
    with pytest.raises(
        UnsafeWeightsError, match=r"is a TorchScript archive, which holds code\. Save the state dict"
    ) as it:
        read_checkpoint(tmp_path / "traced.pt")
    assert "weights_only" not in str(it.value)


def test_a_table_of_its_own(tmp_path: Path) -> None:
    table = torch.ones(3, 2)
    save_file({"embedding.weight": table}, tmp_path / "a.safetensors")
    torch.save({"state_dict": {"weight": table}}, tmp_path / "b.pt")
    torch.save(table, tmp_path / "c.pt")
    names = [read_table(tmp_path / name)[0] for name in ("a.safetensors", "b.pt", "c.pt")]
    assert names == ["embedding.weight", "weight", "c"]
    assert torch.equal(read_table(tmp_path / "c.pt")[1], table)


@pytest.mark.parametrize("tensors", [{}, {"b": torch.ones(3, 2), "a": torch.ones(3, 2)}])
def test_an_ambiguous_table(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointFileError, match="the embedding table and nothing else; was (a, b|empty)"):
        read_table(tmp_path / "a.safetensors")


def stride_of_zero(path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(10**6, 10**6)}, path)


def many_names_of_one_tensor(path: Path) -> None:
    table = torch.ones(2**20)
    torch.save({f"a.{i}": table for i in range(1000)}, path)


def zip_bomb(path: Path) -> None:
    torch.save({"a": torch.zeros(2**22)}, path)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def lying_header(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def endless_header(path: Path) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + b"{" * 100)


def huge_pickle(path: Path) -> None:
    """A string of 1 TiB is announced, and 3 bytes of it come."""
    path.write_bytes(b"\x80\x04\x8d" + (2**40).to_bytes(8, "little") + b"abc")


def deep_json(path: Path) -> None:
    path.write_text("[" * 10**6)


def long_json(path: Path) -> None:
    path.write_text("[" + "{}," * 6 * 10**6 + "{}]")


HARM: dict[str, tuple[Callable[[Path], None], str]] = {
    "stride.pt": (
        stride_of_zero,
        "a tensor of shape (1000000, 1000000), 4,000,000,000,000 bytes, of which it stores 4",
    ),
    "names.pt": (many_names_of_one_tensor, "too many share their numbers"),
    "bomb.pt": (zip_bomb, "unpacked; PyTorch compresses none. Save the state dict alone"),
    "huge.pt": (huge_pickle, "huge.pt is"),
    "lying.safetensors": (lying_header, "is no readable safetensors file"),
    "endless.safetensors": (endless_header, "is no readable safetensors file"),
    "deep.json": (deep_json, "cannot be read as JSON"),
    "long.json": (long_json, "has 18,000,004 bytes; at most 16,777,216 are read of such a file"),
}


@pytest.mark.system
def test_files_made_to_harm_are_refused_with_little_memory(tmp_path: Path) -> None:
    """In a process that may take 1 GB more than it has after its imports."""
    for name, (harm, _) in HARM.items():
        harm(tmp_path / name)
    program = """
import resource, sys
from pathlib import Path
from encserve_export.ground.errors import CheckpointError
from encserve_export.source.weights import read_checkpoint, read_json
before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (before + 10**9,) * 2)
for path in map(Path, sys.argv[1:]):
    try:
        (read_json if path.suffix == ".json" else read_checkpoint)(path)
    except CheckpointError as error:
        print(error)
"""
    paths = [str(tmp_path / name) for name in HARM]
    found = subprocess.run(
        [sys.executable, "-c", program, *paths], capture_output=True, text=True, timeout=60, check=True
    )
    said = found.stdout.splitlines()
    assert len(said) == len(HARM), found.stderr
    for line, (_, message) in zip(said, HARM.values(), strict=True):
        assert message in line


def test_layers_that_share_their_weights_are_read(tmp_path: Path) -> None:
    table = torch.ones(8)
    torch.save({f"layers.{i}.a": table for i in range(48)}, tmp_path / "a.pt")
    assert len(read_checkpoint(tmp_path / "a.pt").tensors) == 48


@pytest.mark.parametrize(
    "settings",
    [
        {"vocab_size": 10**9, "hidden_size": 768},
        {"vocab_size": 30_000, "dim": 10**7},
        {"max_position_embeddings": 10**9, "d_model": 64},
        {"in_features": 10**5, "out_features": 10**5},
    ],
)
def test_tables_that_the_weights_do_not_hold_are_refused(tmp_path: Path, settings: dict[str, int]) -> None:
    """Before anything is loaded: a library would make them, and fill them with random numbers."""
    folder = tmp_path / "2_Dense"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({"a": torch.zeros(1000)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"config\.json: .* make a table of [0-9,]+ numbers, and the weights beside"):
        check_harmless(tmp_path)
