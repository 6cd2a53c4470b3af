"""The user's cache of bundles, and the folders into which `encserve pull` writes bundles.

A bundle appears under its name when it is complete. Processes that make the same bundle wait for each other. A killed
process may leave an unfinished folder, which the next process removes.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from encserve_cli.bundles.argument import MANIFEST, newest_bundle
from encserve_cli.bundles.work import Work
from encserve_cli.interrupts import Interrupts
from encserve_server.errors import BundleError
from encserve_server.repository.bundle import read_bundle
from encserve_server.repository.scan import source_file
from encserve_server.system.cache import open_private, user_folder
from encserve_server.system.files import flush, store_whole

_KEY_DIGITS = 16
_LOOK_SECONDS = 0.2
_NAME_CHARACTERS = 200  # a file system allows 255 bytes
_MAKING = ".making"
_LOCK = ".lock"

Facts = Mapping[str, object]
Make = Callable[[Path, Path], None]


def key_of(facts: Facts) -> str:
    """Return a key for the properties that determine a bundle."""
    return hashlib.sha256(_text(facts).encode()).hexdigest()[:_KEY_DIGITS]


def _text(facts: Facts) -> str:
    return json.dumps(facts, sort_keys=True)


@dataclass(frozen=True, slots=True)
class LastKnown:
    """The last known commits of models on the hub, and files of URIs.

    With these facts, the bundles are found without a network.

    Attributes:
        folder: The folder of the files. The name of a file begins with ".".
    """

    folder: Path

    def remember(self, source: str, fact: str) -> None:
        """Store an ASCII text about a model on the hub, or about a URI. A read-only folder stays as it is."""

        def write(draft: Path) -> None:
            draft.write_text(fact, encoding="ascii")

        if self.recall(source) != fact:
            with suppress(OSError):  # the bundle is finished; only a start without a network needs the fact
                store_whole(self._path(source), write)

    def recall(self, source: str) -> str | None:
        """Return the stored text, or None."""
        with suppress(OSError, ValueError):
            return self._path(source).read_text(encoding="ascii")
        return None

    def _path(self, source: str) -> Path:
        name = quote(source, safe="")
        if len(name) > _NAME_CHARACTERS:
            name = hashlib.sha256(source.encode()).hexdigest()
        return self.folder / f".commit-{name}"


class BundleCache:
    """A folder of finished bundles: NAME-KEY/NAME/VERSION.

    The folder belongs to this user, and other users cannot write into the folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Take the folder. None: $XDG_CACHE_HOME/encserve/bundles or ~/.cache/encserve/bundles."""
        self._own = user_folder()
        self.folder = folder or self._own / "bundles"

    def find(self, name: str, key: str, work: Work) -> Path | None:
        """Return the finished bundle of a key, or None. The checksum of every file is checked.

        A broken bundle counts as missing, and `work` gets a line about it.

        Raises:
            OSError: Other users can write to the cache, or the cache belongs to another user.
        """
        entry = self.folder / f"{name}-{key}"
        if not entry.is_dir():
            return None
        self._open()
        bundle = newest_bundle(entry / name) if (entry / name).is_dir() else None
        if bundle is None:
            work.note(f"a bundle in the cache is incomplete and will be made again: {entry}")
        return bundle if bundle is not None and _is_whole(bundle, work) else None

    def get(self, name: str, key: str, make: Make, work: Work) -> Path:
        """Return the bundle of a key. If it is missing, call `make`, in one process at a time.

        Args:
            name: The name of the model.
            key: See `key_of`.
            make: Writes NAME/VERSION/ into its first argument. The second argument is a folder for temporary files.
            work: Takes the steps of the preparation, and can stop the preparation.

        Raises:
            OSError: The cache cannot be written, or other users can write to it. Other exceptions of `make` and of
                `work` pass through.
        """
        entry = self.folder / f"{name}-{key}"
        checked = _stamp(entry)
        if found := self.find(name, key, work):
            return found
        self._open()
        with _locked(entry, work):
            # Another process may have made the bundle meanwhile.
            if _stamp(entry) != checked and (found := self.find(name, key, work)):
                return found
            shutil.rmtree(entry, ignore_errors=True)
            _sweep(self.folder)
            with _made(entry, make) as made:
                made.rename(entry)
                flush(self.folder)
            bundle = newest_bundle(entry / name)
            assert bundle is not None  # noqa: S101 - `make` has written the bundle
            return bundle

    def _open(self) -> None:
        # ONNX Runtime's cache of weights is in the parent folder. The server refuses a cache to which others can write.
        open_private(self._own)
        open_private(self.folder)


def _stamp(entry: Path) -> tuple[int, int] | None:
    """Return the inode and the time of a folder. If another process replaces the folder, the values change."""
    try:
        status = entry.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def publish(repository: Path, name: str, version: str, facts: Facts, make: Make, work: Work) -> Path:
    """Return the bundle NAME/VERSION in a model repository. If it is missing, call `make`; see `BundleCache.make`.

    Raises:
        ValueError: The version exists and was made of other files, or with other options.
        OSError: The repository cannot be written. Other exceptions of `make` and of `work` pass through.
    """
    repository.mkdir(parents=True, exist_ok=True)
    final = repository / name / version
    source = source_file(final)
    with _locked(repository / f"{name}-{version}", work):
        if final.exists():
            if not _is_of(final, source, facts):
                raise ValueError(
                    f"{final} exists and holds another bundle: give another --version, or remove the folder"
                )
            if _is_whole(final, work):
                return final
            shutil.rmtree(final)
        _sweep(repository)
        with _made(repository / f"{name}-{version}", make) as made:
            final.parent.mkdir(exist_ok=True)
            bundle = made / name / version
            source.write_text(_text({"facts": facts, "manifest": _digest(bundle / MANIFEST)}), encoding="utf-8")
            bundle.rename(final)
            flush(final.parent)
    return final


def _is_of(bundle: Path, source: Path, facts: Facts) -> bool:
    """Return whether a bundle was made of these facts. The version of encserve does not count.

    The file `source` may describe an earlier bundle in the same place. So the hash of the manifest must
    match too. A bundle without a manifest counts as broken, not as another bundle.
    """
    try:
        stored = json.loads(source.read_bytes())
        manifest = bundle / MANIFEST
        is_same = not manifest.exists() or stored["manifest"] == _digest(manifest)
        return is_same and _without_version(stored["facts"]) == _without_version(json.loads(_text(facts)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # an unreadable file may cause any of these
        return False


def _without_version(facts: Facts) -> Facts:
    return {name: fact for name, fact in facts.items() if name != "encserve"}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(bundle: Path, work: Work) -> bool:
    try:
        read_bundle(bundle)
    except BundleError as error:
        work.note(f"a bundle is broken and will be made again: {error}")
        return False
    return True


@contextmanager
def _made(target: Path, make: Make) -> Iterator[Path]:
    """Call `make` for a new folder beside the target, and yield this folder. Remove leftover files at the end."""
    making = target.with_name(f".{target.name}{_MAKING}")
    shutil.rmtree(making, ignore_errors=True)
    made, temporary = making / "bundle", making / "tmp"
    with Interrupts.cleanup(partial(shutil.rmtree, making, ignore_errors=True)):
        try:
            made.mkdir(parents=True)
            temporary.mkdir()
            make(made, temporary)
            yield made
        finally:
            shutil.rmtree(making, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove the unfinished folders of processes that have ended."""
    for making in folder.glob(f".*{_MAKING}"):
        lock = _try_lock(folder / making.name.removeprefix(".").removesuffix(_MAKING))
        if lock is not None:
            shutil.rmtree(making, ignore_errors=True)
            lock()


@contextmanager
def _locked(target: Path, work: Work) -> Iterator[None]:
    """Hold the lock of a target. If another process holds the lock, wait."""
    while (unlock := _try_lock(target)) is None:
        work.stage(f"waiting for another process, which makes {target.name}")
        time.sleep(_LOOK_SECONDS)
    try:
        with Interrupts.cleanup(partial(_lock_of(target).unlink, missing_ok=True)):
            yield
    finally:
        unlock()


def _lock_of(target: Path) -> Path:
    return target.with_name(f".{target.name}{_LOCK}")


def _try_lock(target: Path) -> Callable[[], None] | None:
    """Lock a target, and return a function that unlocks it. Return None if another process holds the lock."""
    path = _lock_of(target)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def unlock() -> None:
        path.unlink(missing_ok=True)
        os.close(descriptor)

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return unlock
    except (BlockingIOError, FileNotFoundError):  # another process has locked or removed the file
        pass
    os.close(descriptor)
    return None
