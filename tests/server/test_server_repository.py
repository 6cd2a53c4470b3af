"""What is found in a model repository, and in which order."""

import os
from pathlib import Path

import pytest
from tiny_bundle import write_bundle

from encserve_server.errors import BundleError
from encserve_server.repository.scan import Candidate, find_slots, require, version_key


def newest(repository: Path, *wanted: str) -> list[Path]:
    """The directory of each slot's first candidate."""
    return [slot.candidates[0].directory for slot in find_slots(repository, wanted)]


def candidate(repository: Path) -> Candidate:
    """The one version that there is."""
    [slot] = find_slots(repository, ())
    [only] = slot.candidates
    return only


def test_versions_are_ordered_as_people_expect() -> None:
    versions = ["1.0-beta", "1.0-rc1", "1.0-rc2", "1.0", "1.0.1", "1.9", "1.10", "2", "10"]
    shuffled = [*versions[4:], *versions[:4]]
    assert sorted(shuffled, key=version_key) == versions


def test_the_newest_version_counts_numbers_as_numbers(tmp_path: Path) -> None:
    for version in ("2", "10", "9"):
        write_bundle(tmp_path, version=version)
    assert newest(tmp_path) == [tmp_path / "tiny" / "10"]
    assert newest(tmp_path, "tiny", "tiny@2") == [tmp_path / "tiny" / "10", tmp_path / "tiny" / "2"]


def test_only_bundles_are_found(tmp_path: Path) -> None:
    """Half-written directories begin with a dot, and stray files are nobody's model."""
    write_bundle(tmp_path, "b")
    write_bundle(tmp_path, "a")
    (tmp_path / "a" / ".2.partial").mkdir()
    (tmp_path / "a" / "3").mkdir()
    (tmp_path / "README").touch()
    assert newest(tmp_path) == [tmp_path / "a" / "1", tmp_path / "b" / "1"]


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("nobody", "nobody: no bundle in it"),
        ("tiny@7", "tiny: no version 7; there are 1"),
        ("../tiny", "expected NAME or NAME@VERSION"),
        ("tiny@", "expected NAME or NAME@VERSION"),
        ("tiny@../1", "expected NAME or NAME@VERSION"),
    ],
)
def test_a_wanted_model_that_is_not_there(tmp_path: Path, wanted: str, problem: str) -> None:
    write_bundle(tmp_path)
    with pytest.raises(BundleError, match=problem):
        require(tmp_path, find_slots(tmp_path, (wanted,)))


def test_an_empty_or_missing_repository(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle in it; expected <name>/<version>/manifest.json"):
        require(tmp_path, find_slots(tmp_path, ()))
    with pytest.raises(BundleError, match="nowhere: no such directory"):
        find_slots(tmp_path / "nowhere", ())


def test_a_model_named_twice_is_refused(tmp_path: Path) -> None:
    """One of the two would never be used."""
    write_bundle(tmp_path)
    with pytest.raises(BundleError, match="--model tiny: it is named twice"):
        find_slots(tmp_path, ("tiny", "tiny"))


def test_a_missing_model_is_told_what_there_is(tmp_path: Path) -> None:
    write_bundle(tmp_path, "b")
    write_bundle(tmp_path, "a")
    with pytest.raises(BundleError, match="nope: no bundle in it; .*; the repository holds a, b"):
        require(tmp_path, find_slots(tmp_path, ("nope",)))


def test_all_versions_are_candidates_the_newest_first(tmp_path: Path) -> None:
    for version in ("2", "10", "9"):
        write_bundle(tmp_path, version=version)
    free, pinned = find_slots(tmp_path, ("tiny", "tiny@9"), latest_versions=2)
    assert [it.key for it in free.candidates] == [("tiny", "10"), ("tiny", "9"), ("tiny", "2")]
    assert (free.key, free.count) == (("tiny", ""), 2)
    assert [it.key for it in pinned.candidates] == [("tiny", "9")]
    assert (pinned.key, pinned.count) == (("tiny", "9"), 1)


def test_a_candidate_differs_when_a_file_of_it_was_touched_replaced_or_added(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path)
    first = candidate(tmp_path)
    assert candidate(tmp_path) == first
    os.utime(directory / "model.onnx", ns=(0, 0))
    touched = candidate(tmp_path)
    (directory / "new").write_bytes((directory / "model.onnx").read_bytes())
    added = candidate(tmp_path)
    os.utime(directory / "new", ns=(0, 0))
    (directory / "new").rename(directory / "model.onnx")  # the same bytes and the same time
    replaced = candidate(tmp_path)
    assert len({it.files for it in (first, touched, added, replaced)}) == 4


def test_a_candidate_differs_when_a_file_of_it_was_mended_though_no_date_tells(tmp_path: Path) -> None:
    """Its rights, or its bytes with the date put back: the files look the same, and yet something was done to them."""
    file = write_bundle(tmp_path) / "model.onnx"
    os.utime(file, ns=(0, 0))
    seen = [candidate(tmp_path)]
    file.chmod(0o600)
    seen.append(candidate(tmp_path))
    file.write_bytes(bytes(file.stat().st_size))
    os.utime(file, ns=(0, 0))
    seen.append(candidate(tmp_path))
    assert len(set(seen)) == 3
    assert len({it.files for it in seen}) == 1
