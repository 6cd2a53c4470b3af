"""Tests of copies and renames of bundles: the manifest, the checks, and the files after an error."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import write_bundle

from encserve_server.errors import BundleError
from encserve_server.repository.bundle import read_bundle
from encserve_server.repository.moving import copy_bundle, rename_bundle


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_unchanged(folder: Path, problem: str, move: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Check that a move fails with an error, and that all files and folders stay as they are."""
    before = tree(folder), sorted(folder.rglob("*"))
    with pytest.raises(BundleError, match=problem):
        move(*arguments, **options)
    assert (tree(folder), sorted(folder.rglob("*"))) == before


def test_a_copy_has_the_same_files_and_another_name_in_the_manifest(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "staging", "tiny", "1")
    before = tree(source)
    copied = copy_bundle(source, tmp_path / "new" / "models", name="small", version="2.0")
    assert copied == tmp_path / "new" / "models" / "small" / "2.0"
    assert tree(source) == before
    old, new = before.pop("manifest.json"), tree(copied)
    assert json.loads(new.pop("manifest.json")) == json.loads(old) | {"name": "small", "version": "2.0"}
    assert new == before
    assert read_bundle(copied).fingerprint == read_bundle(source).fingerprint
    assert {path.name for path in copied.parent.iterdir()} == {"2.0"}
    assert [copied.stat().st_mode & 0o777, (copied / "model.onnx").stat().st_mode & 0o777] == [0o755, 0o644]


def test_a_folder_of_versions_stands_for_the_newest(tmp_path: Path) -> None:
    write_bundle(tmp_path / "staging", "tiny", "9")
    write_bundle(tmp_path / "staging", "tiny", "10")
    assert copy_bundle(tmp_path / "staging" / "tiny", tmp_path / "models") == tmp_path / "models" / "tiny" / "10"


def test_the_manifest_gives_the_name_of_a_folder_that_was_renamed(tmp_path: Path) -> None:
    source = write_bundle(tmp_path, "tiny", "1").rename(tmp_path / "download")
    assert copy_bundle(source, tmp_path / "models") == tmp_path / "models" / "tiny" / "1"


@pytest.mark.parametrize("others", [(), ("2",)])
def test_a_rename_removes_the_old_folder_with_its_batch_budget_and_its_source(
    tmp_path: Path, others: tuple[str, ...]
) -> None:
    source = write_bundle(tmp_path, "tiny", "1")
    for version in others:
        write_bundle(tmp_path, "tiny", version)
    for kind in ("tuned", "source"):
        (source.parent / f".1.{kind}.json").touch()
    renamed = rename_bundle(source, name="small", version="3")
    assert read_bundle(renamed).name == "small"
    assert sorted(tmp_path.glob("*/*")) == [renamed, *(tmp_path / "tiny" / version for version in others)]
    assert (tmp_path / "tiny").exists() == bool(others)


def test_a_version_is_renamed_beside_the_others(tmp_path: Path) -> None:
    write_bundle(tmp_path, "tiny", "1")
    source = write_bundle(tmp_path, "tiny", "3")
    assert rename_bundle(source, version="2") == tmp_path / "tiny" / "2"
    assert sorted(path.name for path in (tmp_path / "tiny").iterdir()) == ["1", "2"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"version": "2"}, "tiny/2: exists; choose another name or version, or remove this folder first"),
        ({"name": "../x"}, "name must be 1 to 64 letters, .*; was '../x'"),
        ({"version": ".1"}, "version must be 1 to 64 letters, .*; was '.1'"),
        ({"version": "v" * 65}, "version must be 1 to 64 letters"),
    ],
)
def test_a_target_that_exists_or_has_a_bad_name_is_refused(
    tmp_path: Path, options: dict[str, str], problem: str
) -> None:
    source = write_bundle(tmp_path, "tiny", "1")
    write_bundle(tmp_path, "tiny", "2")
    assert_unchanged(tmp_path, problem, rename_bundle, source, **options)
    assert_unchanged(tmp_path, problem, copy_bundle, source, tmp_path, **options)


def test_a_bundle_that_has_the_name_and_the_version_already(tmp_path: Path) -> None:
    source = write_bundle(tmp_path, "tiny", "1")
    assert_unchanged(tmp_path, "tiny/1: has this name and version already", rename_bundle, source, version="1")
    assert_unchanged(tmp_path, "tiny/1: exists", copy_bundle, source, tmp_path)


@pytest.mark.parametrize("key", [("tiny", "2"), ("small", "1"), ("small", "2")])
def test_a_folder_that_was_copied_by_hand_gets_the_manifest_of_its_place(tmp_path: Path, key: tuple[str, str]) -> None:
    """The test follows the advice in the error of `read_bundle`. Only the manifest changes."""
    source = write_bundle(tmp_path, "tiny", "1")
    copied = tmp_path.joinpath(*key)
    shutil.copytree(source, copied)
    with pytest.raises(BundleError) as refused:
        read_bundle(copied)
    advice = f"`encserve bundle rename {copied} --name {key[0]} --version {key[1]}` corrects the manifest"
    assert advice in str(refused.value)
    others = {path: path.stat() for path in copied.rglob("*") if path.is_file() and path.name != "manifest.json"}
    assert rename_bundle(copied, name=key[0], version=key[1]) == copied
    assert (read_bundle(copied).name, read_bundle(copied).version) == key
    assert {path: path.stat() for path in others} == others
    assert (copied / "manifest.json").stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in copied.iterdir()) == sorted(path.name for path in source.iterdir())
    assert read_bundle(source).name == "tiny"


def test_an_altered_folder_keeps_its_manifest(tmp_path: Path) -> None:
    copied = write_bundle(tmp_path, "tiny", "1").rename(tmp_path / "tiny" / "2")
    (copied / "model.onnx").write_bytes(b"x")
    assert_unchanged(tmp_path, "model.onnx: .* bytes; its manifest says", rename_bundle, copied, version="2")


def test_a_rename_outside_of_a_repository_is_refused(tmp_path: Path) -> None:
    """The parent folder does not have the model's name. A rename would create a folder next to this parent folder."""
    source = write_bundle(tmp_path / "staging", "tiny", "1").rename(tmp_path / "staging" / "download")
    problem = f"{source}: is not in a folder {'tiny'!r}, .*; `encserve bundle promote` copies the bundle"
    assert_unchanged(tmp_path, problem, rename_bundle, source, name="small")


def test_a_folder_of_versions_is_not_a_repository(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "staging", "tiny", "1")
    model = write_bundle(tmp_path / "models", "other", "1").parent
    problem = f"{model}: holds versions of a model; the model repository is {model.parent}"
    assert_unchanged(tmp_path, problem, copy_bundle, source, model)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_that_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    source = write_bundle(tmp_path, "tiny", "1")

    def fill(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(shutil, "copyfile", fill)
    target = tmp_path / "models" / "tiny" / "1"
    (tmp_path / "models").mkdir()
    assert_unchanged(tmp_path, f"^{target}: {os.strerror(number)}$", copy_bundle, source, tmp_path / "models")


def test_a_bundle_is_not_a_repository(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "staging", "tiny", "1")
    other = write_bundle(tmp_path / "models", "other", "1")
    assert_unchanged(tmp_path, "other/1: is a bundle, not a model repository", copy_bundle, source, other)


def test_an_altered_bundle_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "staging", "tiny", "1")
    (source / "model.onnx").write_bytes(b"x" * (source / "model.onnx").stat().st_size)
    assert_unchanged(tmp_path, "model.onnx: its sha256 is", copy_bundle, source, tmp_path / "models")
    (source / "model.onnx").unlink()
    assert_unchanged(tmp_path, "model.onnx: cannot be read", copy_bundle, source, tmp_path / "models")
    (source / "manifest.json").write_text("{}")
    assert_unchanged(tmp_path, "format_version must be 1", copy_bundle, source, tmp_path / "models")
    assert_unchanged(tmp_path, "no bundle in it", copy_bundle, tmp_path / "nowhere", tmp_path / "models")


def test_a_file_that_changes_during_the_copy_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is verified before it gets its final name, so the repository never has an incomplete bundle."""
    source = write_bundle(tmp_path, "tiny", "1")

    def copy_half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:-1])

    monkeypatch.setattr(shutil, "copyfile", copy_half)
    problem = "model.onnx: .* bytes; its manifest says"
    assert_unchanged(tmp_path, problem, rename_bundle, source, name="small")


def test_an_error_of_the_file_system_names_the_file(tmp_path: Path) -> None:
    source = write_bundle(tmp_path, "tiny", "1")
    (tmp_path / "models").touch()
    assert_unchanged(tmp_path, "models/tiny: Not a directory", copy_bundle, source, tmp_path / "models")
