"""A folder of files that processes of one user make once and share: large, and easily made again.

A file may be mapped by other processes, so it is never changed in place: an entry is written into a temporary folder
under a lock, flushed, and renamed. What a process that was killed leaves behind has no entry's name, and the next one
that makes something removes it.

An entry is used if its files still have the sizes and times of when they were made. Any write through the file system
changes st_ctime, which no call can set, so this finds what was truncated, overwritten or copied without reading the
files; a SHA-256 of 775 MB takes longer than opening the model. A disk that alters data by itself is not found.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Entries that no process has used for so long are removed when one is made.
KEPT_SECONDS = 30 * 24 * 3600
# Another process that makes an entry is waited for at most so long: its disk may hang.
_LOCK_SECONDS = 120.0
_LOCK_POLL_SECONDS = 0.05
_MANIFEST = "entry.json"
_TEMPORARY = ".making-"
_KEY_DIGITS = 32
_ENTRY = re.compile(f"[0-9a-f]{{{_KEY_DIGITS}}}")
_LEFT = re.compile(r"\.making-(?:\w{8}|[0-9a-f]{32})")  # what tempfile, or a removal, has called it


class Cache:
    """Entries, each a folder of files, in a folder of mode 0700 that belongs to this user."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        """Names the folder, which is made with the first entry; `now` is the time, in seconds since 1970."""
        self._folder = folder
        self._now = now

    def entry(self, key: Mapping[str, str], make: Callable[[Path], None]) -> Path:
        """The folder of the entry for a key.

        Args:
            key: Everything that the files depend on.
            make: Writes the files into an empty folder; called if there is no undamaged entry.

        Raises:
            OSError: The folder cannot be used, for `strerror`; or whatever `make` raises.
        """
        _open_private(self._folder)
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]
        entry = self._folder / name
        if not _is_intact(entry):
            with _locked(self._folder / ".lock"):
                if not _is_intact(entry):
                    self._clean(entry)
                    self._make(entry, key, make)
                    if not _is_intact(entry):
                        raise OSError(errno.ENOTSUP, "this file system does not keep the times of files", str(entry))
        with contextlib.suppress(OSError):  # mounted read-only
            os.utime(entry, (self._now(),) * 2)
        return entry

    def _make(self, entry: Path, key: Mapping[str, str], make: Callable[[Path], None]) -> None:
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self._folder))
        try:
            make(folder)
            files = {path.name: _flushed(path) for path in folder.iterdir()}
            manifest = folder / _MANIFEST
            manifest.write_text(json.dumps({"key": dict(key), "files": files}), encoding="utf-8")
            _flushed(manifest)
            _flush(folder)
            folder.rename(entry)
            _flush(self._folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _clean(self, damaged: Path) -> None:
        """Removes a damaged entry, entries of long ago, and what killed processes have left; under the lock."""
        for path in self._folder.iterdir():
            # Whatever else lies in the folder is not the cache's.
            is_entry = _ENTRY.fullmatch(path.name) is not None and (path / _MANIFEST).is_file()
            if path == damaged or (is_entry and path.lstat().st_mtime < self._now() - KEPT_SECONDS):
                # Renamed first: another process finds a whole entry or none.
                renamed = path.with_name(f"{_TEMPORARY}{path.name}")
                shutil.rmtree(renamed, ignore_errors=True)
                path.rename(renamed)
                path = renamed
            if _LEFT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _open_private(folder: Path) -> None:
    """Makes a folder, and makes sure that nobody else can put files into it.

    Raises:
        OSError: It cannot be made or written, or others can write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    its = folder.lstat()
    if not stat.S_ISDIR(its.st_mode):
        raise OSError(errno.ENOTDIR, "it is a link, not a folder", str(folder))
    if its.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to user {its.st_uid}, not to user {os.geteuid()}", str(folder))
    if its.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(errno.EPERM, "other users can write to it; chmod 700", str(folder))


def _is_intact(entry: Path) -> bool:
    """Whether an entry is there, and nothing has changed its files."""
    try:
        if not (stat.S_ISDIR(entry.lstat().st_mode) and _is_own(entry) and _is_own(entry / _MANIFEST)):
            return False
        files = json.loads((entry / _MANIFEST).read_bytes())["files"]
        return all(_is_own(entry / name) and _stamp(entry / name) == stamp for name, stamp in files.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # as any damaged JSON may cause
        return False


def _is_own(path: Path) -> bool:
    """Whether only this user can have written a file, or what is in a folder; a link is nobody's own."""
    its = path.lstat()
    is_plain = stat.S_ISREG(its.st_mode) or stat.S_ISDIR(its.st_mode)
    return is_plain and its.st_uid == os.geteuid() and not its.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _stamp(path: Path) -> dict[str, Any]:
    """What any write to a file changes."""
    its = path.lstat()
    return {"mode": its.st_mode, "size": its.st_size, "mtime_ns": its.st_mtime_ns, "ctime_ns": its.st_ctime_ns}


def _flushed(path: Path) -> dict[str, Any]:
    """Writes a file through to the disk, so that a power cut cannot leave an entry whose data is missing."""
    _flush(path)
    return _stamp(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that the system releases if the process ends.

    Raises:
        OSError: Another process holds it for too long, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(
                        errno.EBUSY, f"another process has held it for {_LOCK_SECONDS:g} s", str(path)
                    ) from None
                time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)
