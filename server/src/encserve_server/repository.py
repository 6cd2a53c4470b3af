"""What lies in the model repository, and which of it is to be served. Looks at names and dates, never into a bundle."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from encserve_server.bundle import MANIFEST_NAME
from encserve_server.errors import BundleError

_VALID_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A file's path in its bundle, size, time of change and inode.
_FileState = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version of a model as it lies in the repository now.

    Attributes:
        directory: MODELS/<name>/<version>.
        state: Of each of its files the size, the time of change and the inode: differs when anything was replaced.
    """

    directory: Path
    state: tuple[_FileState, ...]

    @property
    def key(self) -> tuple[str, str]:
        """The model's name and its version."""
        return self.directory.parent.name, self.directory.name


@dataclass(frozen=True, slots=True)
class Slot:
    """A model that is to be served.

    Attributes:
        name: The model's name.
        pinned: The version to serve; empty for the newest.
        count: How many versions to serve: the first so many of `candidates` that are good.
        candidates: The versions that there are, the newest first; only the pinned one where there is one.
    """

    name: str
    pinned: str
    count: int
    candidates: tuple[Candidate, ...]

    @property
    def key(self) -> tuple[str, str]:
        """What stays the same from one look into the repository to the next."""
        return self.name, self.pinned


def find_slots(repository: Path, wanted: tuple[str, ...], latest_versions: int = 1) -> list[Slot]:
    """The models to serve.

    Args:
        repository: The directory that holds `<name>/<version>/`.
        wanted: Models as NAME (its newest versions) or NAME@VERSION; empty for the newest versions of every model.
        latest_versions: How many of the newest versions to serve where none is named.

    Raises:
        BundleError: The repository or something wanted is not there.
    """
    if not repository.is_dir():
        raise BundleError(f"--model-repository {repository}: no such directory")
    if wanted:
        for i, text in enumerate(wanted):
            if text in wanted[:i]:
                raise BundleError(f"--model {text}: it is named twice")
        return [_find_slot(repository, *_split_wanted(text), latest_versions) for text in wanted]
    names = [model.name for model in sorted(repository.iterdir()) if _versions(model)]
    if not names:
        raise BundleError(
            f"--model-repository {repository}: no bundle in it; expected <name>/<version>/{MANIFEST_NAME} "
            "(encserve-export writes them)"
        )
    return [_find_slot(repository, name, "", latest_versions) for name in names]


def newest_bundle(repository: Path, model: str | None) -> Path:
    """The directory of one model's newest version, or of NAME@VERSION; without a model of the first by name.

    Raises:
        BundleError: It is not there.
    """
    return find_slots(repository, (model,) if model else ())[0].candidates[0].directory


def version_key(version: str) -> list[tuple[int, int, str]]:
    """A sort key for which 1.9 < 1.10 and 1.0-rc1 < 1.0; the text itself settles what is left."""
    parts = [(2, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"\d+|[^\d.]+", version)]
    return [*parts, (1, 0, version)]


def _split_wanted(text: str) -> tuple[str, str]:
    """NAME or NAME@VERSION as (name, version), the version empty for the newest."""
    name, at, version = text.partition("@")
    for part in (name, *([version] if at else [])):
        if not _VALID_NAME.fullmatch(part):
            raise BundleError(f"--model {text}: expected NAME or NAME@VERSION of letters, digits, '.', '_' and '-'")
    return name, version


def _find_slot(repository: Path, name: str, pinned: str, latest_versions: int) -> Slot:
    versions = _versions(repository / name)
    if not versions:
        raise BundleError(
            f"{repository / name}: no bundle in it; expected <version>/{MANIFEST_NAME}{_others(repository)}"
        )
    if pinned and pinned not in versions:
        raise BundleError(f"{repository / name}: no version {pinned}; there are {', '.join(versions)}")
    candidates = []
    for version in [pinned] if pinned else reversed(versions):
        directory = repository / name / version
        candidates.append(Candidate(directory, tuple(sorted(_file_states(directory)))))
    return Slot(name, pinned, 1 if pinned else latest_versions, tuple(candidates))


def _others(repository: Path) -> str:
    """What there is, for an error that says what there is not."""
    names = [model.name for model in sorted(repository.iterdir()) if _versions(model)]
    return f"; the repository holds {', '.join(names)}" if names else ""


def _versions(model: Path) -> list[str]:
    """A model's versions, oldest first: numbers in them compare as numbers, so 10 comes after 9."""
    if not model.is_dir() or not _VALID_NAME.fullmatch(model.name):
        return []
    versions = [
        entry.name
        for entry in model.iterdir()
        if _VALID_NAME.fullmatch(entry.name) and (entry / MANIFEST_NAME).is_file()
    ]
    return sorted(versions, key=version_key)


def _file_states(directory: Path) -> Iterator[_FileState]:
    """The state of every file below a directory; nothing for one that vanishes meanwhile."""
    for parent, _, names in os.walk(directory):
        for name in names:
            path = Path(parent, name)
            try:
                stat = path.stat()
            except OSError:
                continue
            yield str(path.relative_to(directory)), stat.st_size, stat.st_mtime_ns, stat.st_ino
