"""A folder of large files. One process creates a file once, and all processes of the same user share it.

Other processes may have mapped a file, so a file never changes in place. A process holds a lock while it creates an
entry, and other processes see the complete entry or nothing. A killed process may leave a temporary folder. The next
process that creates an entry removes this folder.

An entry is valid while its files have the same sizes and times as after their creation. Each write through the file
system changes st_ctime, and no system call can set st_ctime. So the check finds truncated, overwritten and copied files
without reading them. (A SHA-256 of 775 MB would take longer than opening the model.) The check does not find damage by
the disk.
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
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from encserve_server.system.files import TEMPORARY_PREFIX, flush, store_whole

# When a process creates an entry, it removes entries that no process has used for this time.
KEPT_SECONDS = 30 * 24 * 3600
# How long to wait for another process that creates an entry. The disk of that process may hang.
_LOCK_SECONDS = 120.0
_LOCK_POLL_SECONDS = 0.05
_MANIFEST = "entry.json"
_KEY_DIGITS = 32
_ENTRY = re.compile(f"[0-9a-f]{{{_KEY_DIGITS}}}")
_TEMPORARY = re.compile(re.escape(TEMPORARY_PREFIX) + r"(?:\w{8}|[0-9a-f]{32})")  # from tempfile, or from `_clean`


class Cache:
    """A folder of mode 0700 that belongs to this user. Each entry is a folder of files."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        """Set the path of the folder. The first entry creates the folder. `now` returns the seconds since 1970."""
        self._folder = folder
        self._now = now

    def entry(self, key: Mapping[str, str], make: Callable[[Path], None]) -> Path:
        """Return the folder of the entry for a key.

        Args:
            key: All properties that determine the contents of the files.
            make: Writes the files into an empty folder. Called if no valid entry exists.

        Raises:
            OSError: The folder cannot be used; `strerror` has the cause. Exceptions of `make` pass through.
        """
        open_private(self._folder)
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]
        entry = self._folder / name
        if not _is_intact(entry):
            with _locked(self._folder / ".lock"):
                if not _is_intact(entry):
                    self._clean(entry)
                    self._make(entry, key, make)
                    if not _is_intact(entry):
                        raise OSError(errno.ENOTSUP, "this file system does not keep the times of files", str(entry))
        with contextlib.suppress(OSError):  # the folder may be mounted read-only
            os.utime(entry, (self._now(),) * 2)
        return entry

    @staticmethod
    def _make(entry: Path, key: Mapping[str, str], make: Callable[[Path], None]) -> None:
        def write(folder: Path) -> None:
            folder.mkdir(mode=0o700)
            make(folder)
            files = {path.name: _flush_and_stamp(path) for path in folder.iterdir()}
            manifest = folder / _MANIFEST
            manifest.write_text(json.dumps({"key": dict(key), "files": files}), encoding="utf-8")
            flush(manifest)

        store_whole(entry, write)

    def _clean(self, damaged: Path) -> None:
        """Remove a damaged entry, unused entries, and the temporary folders of killed processes. Needs the lock."""
        for path in self._folder.iterdir():
            # Files with other names do not belong to the cache.
            is_entry = _ENTRY.fullmatch(path.name) is not None and (path / _MANIFEST).is_file()
            if path == damaged or (is_entry and path.lstat().st_mtime < self._now() - KEPT_SECONDS):
                # Rename first, so that another process finds the whole entry or nothing.
                renamed = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
                shutil.rmtree(renamed, ignore_errors=True)
                path.rename(renamed)
                path = renamed
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def user_folder() -> Path:
    """Return encserve's folder in the user's cache: $XDG_CACHE_HOME/encserve, or ~/.cache/encserve.

    Raises:
        RuntimeError: The user has no home directory.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # by the XDG specification a relative path is ignored
    return (base if base.is_absolute() else Path.home() / ".cache") / "encserve"


def open_private(folder: Path) -> None:
    """Create a folder if needed, and check that only this user can write into the folder.

    Raises:
        OSError: The folder cannot be created or written, or other users can write into the folder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, "it is a link, not a folder", str(folder))
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to user {status.st_uid}, not to user {os.geteuid()}", str(folder))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(errno.EPERM, "other users can write to it; chmod 700", str(folder))


def _is_intact(entry: Path) -> bool:
    """Return whether the entry exists and its files are unchanged."""
    try:
        if not (stat.S_ISDIR(entry.lstat().st_mode) and _is_own(entry) and _is_own(entry / _MANIFEST)):
            return False
        files = json.loads((entry / _MANIFEST).read_bytes())["files"]
        return all(_is_own(entry / name) and _stamp(entry / name) == stamp for name, stamp in files.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # a damaged manifest may cause any of these
        return False


def _is_own(path: Path) -> bool:
    """Return whether only this user can write a file, or the files of a folder. Return False for links."""
    status = path.lstat()
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _stamp(path: Path) -> dict[str, Any]:
    """Return properties of a file. Each write to the file changes at least one of them."""
    status = path.lstat()
    return {
        "mode": status.st_mode,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _flush_and_stamp(path: Path) -> dict[str, Any]:
    flush(path)
    return _stamp(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock. If the process ends, the system releases the lock.

    Raises:
        OSError: Another process holds the lock for too long, or the file system does not support locks.
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
                        errno.EBUSY, f"another process has held the lock for {_LOCK_SECONDS:g} s", str(path)
                    ) from None
                time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)
