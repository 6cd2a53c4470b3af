"""Tests of the search for models and versions in a repository, and of the order of versions."""

import os
from pathlib import Path

import pytest
from tiny_bundle import write_bundle

from encserve_server.errors import BundleError
from encserve_server.repository.scan import Candidate, find_slots, require, version_key


def newest(repository: Path, *wanted: str) -> list[Path]:
    """Return the directory of the newest version of each model."""
    return [slot.candidates[0].directory for slot in find_slots(repository, wanted)]


def candidate(repository: Path) -> Candidate:
    """Return the only version in the repository."""
    [slot] = find_slots(repository, ())
    [only] = slot.candidates
    return only


def test_versions_are_ordered() -> None:
    versions = ["1.0-beta", "1.0-rc1", "1.0-rc2", "1.0", "1.0.1", "1.9", "1.10", "2", "10"]
    shuffled = [*versions[4:], *versions[:4]]
    assert sorted(shuffled, key=version_key) == versions


def test_only_bundles_are_found(tmp_path: Path) -> None:
    """Drafts, empty folders and files are skipped. The name of a draft begins with a dot."""
    write_bundle(tmp_path, "b")
    write_bundle(tmp_path, "a")
    (tmp_path / "a" / ".2.partial").mkdir()
    (tmp_path / "a" / "3").mkdir()
    (tmp_path / "README").touch()
    assert newest(tmp_path) == [tmp_path / "a" / "1", tmp_path / "b" / "1"]


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("unknown", "unknown: no bundle in it; .*; the repository holds tiny"),
        ("tiny@7", "tiny: no version 7; there are 1"),
        ("../tiny", "expected NAME or NAME@VERSION"),
        ("tiny@", "expected NAME or NAME@VERSION"),
        ("tiny@../1", "expected NAME or NAME@VERSION"),
    ],
)
def test_a_missing_model_is_reported(tmp_path: Path, wanted: str, problem: str) -> None:
    write_bundle(tmp_path)
    with pytest.raises(BundleError, match=problem):
        require(tmp_path, find_slots(tmp_path, (wanted,)))


def test_an_empty_or_missing_repository(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle in it"):
        require(tmp_path, find_slots(tmp_path, ()))
    with pytest.raises(BundleError, match="nowhere: no such directory"):
        find_slots(tmp_path / "nowhere", ())


@pytest.mark.parametrize(
    ("inside", "problem"), [(("tiny",), "the folder of one model"), (("tiny", "1"), "one version of a model")]
)
def test_a_folder_inside_a_repository(tmp_path: Path, inside: tuple[str, ...], problem: str) -> None:
    write_bundle(tmp_path)
    folder = tmp_path.joinpath(*inside)
    with pytest.raises(BundleError, match=f"{problem}: give {tmp_path}$"):
        require(folder, find_slots(folder, ()))


def test_a_model_named_twice_is_refused(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    with pytest.raises(BundleError, match="--model tiny: it is named twice"):
        find_slots(tmp_path, ("tiny", "tiny"))


def test_all_versions_are_candidates_from_the_newest(tmp_path: Path) -> None:
    for version in ("2", "10", "9"):
        write_bundle(tmp_path, version=version)
    free, pinned = find_slots(tmp_path, ("tiny", "tiny@9"), latest_versions=2)
    assert [it.key for it in free.candidates] == [("tiny", "10"), ("tiny", "9"), ("tiny", "2")]
    assert (free.key, free.count) == (("tiny", ""), 2)
    assert [it.key for it in pinned.candidates] == [("tiny", "9")]
    assert (pinned.key, pinned.count) == (("tiny", "9"), 1)


def test_a_candidate_differs_after_any_change_of_a_file(tmp_path: Path) -> None:
    """Any change of a file changes the candidate. A candidate is a version that the server may load.

    A new date, a new file or a replaced file changes `files`. New permissions change only `changed_ns`. New content
    with the old date also changes only `changed_ns`.
    """
    directory = write_bundle(tmp_path)
    file = directory / "model.onnx"
    seen = [candidate(tmp_path)]
    assert candidate(tmp_path) == seen[0]
    os.utime(file, ns=(0, 0))
    seen.append(candidate(tmp_path))
    (directory / "new").write_bytes(file.read_bytes())
    seen.append(candidate(tmp_path))
    os.utime(directory / "new", ns=(0, 0))
    (directory / "new").rename(file)  # same bytes and same date, but another inode
    seen.append(candidate(tmp_path))
    assert len({it.files for it in seen}) == 4
    file.chmod(0o600)
    seen.append(candidate(tmp_path))
    file.write_bytes(bytes(file.stat().st_size))
    os.utime(file, ns=(0, 0))
    seen.append(candidate(tmp_path))
    assert len(set(seen)) == 6
    assert len({it.files for it in seen}) == 4
