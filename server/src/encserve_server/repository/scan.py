"""Lists the model repository and chooses the versions to serve. This module reads names and dates, not the bundles."""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from encserve_server.errors import BundleError
from encserve_server.repository.bundle import MANIFEST_NAME

_VALID_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A file's path in its bundle, size, date and inode.
_File = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version of a model in the repository at the last scan.

    Attributes:
        directory: <name>/<version>/ in the repository.
        files: Path, size, date and inode of each file. The value changes if a file is written or replaced.
            None if the files cannot be read now.
        changed_ns: For each file in `files`, the time at which the file or its rights last changed. The value also
            changes if a file is repaired and its modification date is set back.
    """

    directory: Path
    files: tuple[_File, ...] | None
    changed_ns: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The name and the version of the model."""
        return self.directory.parent.name, self.directory.name


@dataclass(frozen=True, slots=True)
class Slot:
    """A model to serve.

    Attributes:
        name: The model's name.
        pinned: The version to serve; empty for the newest.
        count: The number of versions to serve. The first good versions of `candidates` are served.
        candidates: The versions in the repository, the newest first. With a pin, only the pinned version.
        problem: If `candidates` is empty, the reason for people; otherwise empty.
    """

    name: str
    pinned: str
    count: int
    candidates: tuple[Candidate, ...]
    problem: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The identity of the slot. It is the same in every scan."""
        return self.name, self.pinned


def find_slots(repository: Path, wanted: tuple[str, ...], latest_versions: int = 1) -> list[Slot]:
    """Return the models to serve. A folder that cannot be read is left out, so the other models are still served.

    Args:
        repository: The directory that holds `<name>/<version>/`.
        wanted: Models as NAME (the newest versions) or NAME@VERSION; empty for the newest versions of every model.
        latest_versions: The number of versions to serve for a model without a pinned version.

    Raises:
        BundleError: The repository does not exist, or a name in `wanted` is not valid.
        OSError: The repository cannot be read.
    """
    if not repository.is_dir():
        raise BundleError(f"--model-repository {repository}: no such directory")
    if wanted:
        for i, text in enumerate(wanted):
            if text in wanted[:i]:
                raise BundleError(f"--model {text}: it is named twice")
        return [_find_slot(repository, *_split_wanted(text), latest_versions) for text in wanted]
    return [_find_slot(repository, name, "", latest_versions) for name in _models(repository)]


def require(repository: Path, slots: list[Slot]) -> list[Slot]:
    """Return the slots if each has a candidate.

    Raises:
        BundleError: The repository is empty, or a slot has no candidate.
    """
    if not slots:
        problem = f"--model-repository {repository}: no bundle in it; expected <name>/<version>/{MANIFEST_NAME}"
        if (repository / MANIFEST_NAME).is_file():
            raise BundleError(f"{problem}. This is one version of a model: give {repository.absolute().parent.parent}")
        if _versions(repository):
            raise BundleError(f"{problem}. This is the folder of one model: give {repository.absolute().parent}")
        raise BundleError(f"{problem} (encserve-export writes bundles)")
    for slot in slots:
        if not slot.candidates:
            raise BundleError(slot.problem)
    return slots


def check_repository(repository: Path) -> None:
    """Check that a folder is not a bundle, or the folder of one model. The folder may be missing.

    Raises:
        BundleError: The folder holds a bundle or versions of a model, or cannot be read.
    """
    if (repository / MANIFEST_NAME).exists():
        raise BundleError(f"{repository}: is a bundle, not a model repository")
    try:
        versions = _versions(repository)
    except OSError as error:
        raise BundleError(f"{repository}: cannot be read: {error.strerror}") from error
    if versions:
        model_repository = repository.absolute().parent
        raise BundleError(f"{repository}: holds versions of a model; the model repository is {model_repository}")


def newest_version(model: Path) -> Path:
    """Return the folder of the newest version of a model, in the order in which versions are served.

    Raises:
        BundleError: The model has no version, or its folder cannot be read.
    """
    try:
        versions = _versions(model)
    except OSError as error:
        raise BundleError(f"{model}: cannot be read: {error.strerror}") from error
    if not versions:
        raise BundleError(f"{model}: no bundle in it; expected {MANIFEST_NAME} or <version>/{MANIFEST_NAME}")
    return model / versions[-1]


def check_name(field: str, name: str) -> None:
    """Check the name of a model, or a version. `field` is "name" or "version", for the error.

    Raises:
        BundleError: The name cannot be the name of a folder in a model repository.
    """
    if not _VALID_NAME.fullmatch(name):
        raise BundleError(
            f"{field} must be 1 to 64 letters, digits, '.', '_' and '-', with a letter or digit first; was {name!r}"
        )


def tuned_file(directory: Path) -> Path:
    """Return the path of the measured batch budget of a bundle. `directory` is <name>/<version>/ in the repository."""
    return directory.parent / f".{directory.name}.tuned.json"


def source_file(directory: Path) -> Path:
    """Return the path of the source of a bundle that `encserve pull` made. `directory` is <name>/<version>/."""
    return directory.parent / f".{directory.name}.source.json"


def version_key(version: str) -> list[tuple[int, int, str]]:
    """Return a sort key. With this key, 1.9 < 1.10 and 1.0-rc1 < 1.0. Versions with equal parts compare as strings."""
    parts = [(2, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"\d+|[^\d.]+", version)]
    return [*parts, (1, 0, version)]


def _split_wanted(text: str) -> tuple[str, str]:
    """Split NAME or NAME@VERSION into a name and a version. The version is empty for NAME."""
    name, at, version = text.partition("@")
    for part in (name, *([version] if at else [])):
        if not _VALID_NAME.fullmatch(part):
            raise BundleError(f"--model {text}: expected NAME or NAME@VERSION of letters, digits, '.', '_' and '-'")
    return name, version


def _find_slot(repository: Path, name: str, pinned: str, latest_versions: int) -> Slot:
    count = 1 if pinned else latest_versions
    try:
        versions = _versions(repository / name)
    except OSError as error:
        return Slot(name, pinned, count, (), f"{repository / name}: cannot be read: {error.strerror}")
    if not versions:
        problem = f"{repository / name}: no bundle in it; expected <version>/{MANIFEST_NAME}"
        others = ", ".join(_models(repository))
        return Slot(name, pinned, count, (), f"{problem}; the repository holds {others}" if others else problem)
    if pinned and pinned not in versions:
        return Slot(
            name, pinned, count, (), f"{repository / name}: no version {pinned}; there are {', '.join(versions)}"
        )
    directories = [repository / name / version for version in ([pinned] if pinned else reversed(versions))]
    return Slot(name, pinned, count, tuple(map(_candidate, directories)))


def _models(repository: Path) -> list[str]:
    """Return the names of the models that can be read."""
    names = []
    for name in sorted(_names(repository)):
        with contextlib.suppress(OSError):
            if _versions(repository / name):
                names.append(name)
    return names


def _versions(model: Path) -> list[str]:
    """Return a model's versions, the oldest first. Numbers compare as numbers, so 10 comes after 9."""
    try:
        names = _names(model)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((name for name in names if _may_be_a_bundle(model / name)), key=version_key)


def _names(directory: Path) -> list[str]:
    """Return the valid names in a directory."""
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if _VALID_NAME.fullmatch(entry.name)]


def _may_be_a_bundle(directory: Path) -> bool:
    """Return whether a folder has a manifest, or cannot be read."""
    try:
        return (directory / MANIFEST_NAME).is_file()
    except OSError:
        return True


def _candidate(directory: Path) -> Candidate:
    """Return a candidate with all files below a directory."""
    found: list[tuple[_File, int]] = []
    try:
        for parent, _, names in os.walk(directory, onerror=_raise):
            for name in names:
                path = Path(parent, name)
                stat = path.stat()
                file = (str(path.relative_to(directory)), stat.st_size, stat.st_mtime_ns, stat.st_ino)
                found.append((file, stat.st_ctime_ns))
    except OSError:
        return Candidate(directory, None)
    found.sort()
    return Candidate(directory, tuple(file for file, _ in found), tuple(changed_ns for _, changed_ns in found))


def _raise(error: OSError) -> None:
    raise error
