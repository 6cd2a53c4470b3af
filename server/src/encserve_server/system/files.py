"""Reads small configuration files, up to a maximum size. Creates files and folders completely or not at all."""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

# A chain of certificates takes a few KiB. All authorities of a system take 250 KiB.
_MAX_BYTES = 4 * 1024 * 1024
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
# The names of temporary folders begin with this prefix.
TEMPORARY_PREFIX = ".making-"


class FileError(Exception):
    """An operator's file cannot be used. The text names the setting, the file and the cause."""


def read_files(paths: Mapping[str, Path]) -> tuple[bytes, ...]:
    """Return the content of each file.

    Args:
        paths: The path of each file. The key is the setting that names the file.

    Raises:
        FileError: A file cannot be read, is larger than 4 MiB, or is not a regular file.
    """
    contents = []
    for setting, path in paths.items():
        try:
            contents.append(read_small(path))
        except OSError as error:
            raise FileError(f"{setting} {path} cannot be read: {error.strerror}") from error
    return tuple(contents)


def read_small(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: The file cannot be read, is larger than 4 MiB, or is not a regular file; `strerror` has the cause.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"must be a regular file; is {_KINDS.get(kind, 'of another kind')}", str(path))
    # A FIFO may replace the file after this check. Without O_NONBLOCK, a FIFO without a writer would block this thread.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        data = file.read(_MAX_BYTES + 1) or b""
    if len(data) > _MAX_BYTES:
        raise OSError(errno.EFBIG, f"must be at most {_MAX_BYTES} bytes; is larger", str(path))
    return data


def store_whole(target: Path, write: Callable[[Path], None], draft_folder: Path | None = None) -> None:
    """Create a file or a folder. Other processes see the complete content or nothing, even after a power cut.

    An existing file is replaced; an existing folder must be empty. A killed process may leave a folder with a
    name that begins with TEMPORARY_PREFIX.

    Args:
        target: The path of the file or folder. Its parent folder exists.
        write: Takes a path in a temporary folder on the same file system, and creates the file or folder at this path.
        draft_folder: The folder that gets the temporary folder, on the same file system. Default: the parent folder of
            `target`.

    Raises:
        OSError: The temporary folder cannot be written. Exceptions of `write` pass through.
    """
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=draft_folder or target.parent))
    try:
        draft = folder / target.name
        write(draft)
        flush(draft)
        draft.replace(target)
        flush(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until the system has written a file to the disk. For a folder, its list of files is written.

    Raises:
        OSError: The path cannot be opened, or the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
