"""The folder of a job's output, on a disk or in an object store. Only complete files get their final name."""

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import click
import pyarrow as pa
import pyarrow.fs as arrow_fs

from encserve_cli.files.reading import check_no_secret, is_uri
from encserve_cli.files.storage import filesystem_of
from encserve_cli.interrupts import Interrupts

_TEMPORARY = ".unfinished-"


class Store(Protocol):
    """A folder. The name of a file may begin with a subfolder: "_rejected/part.jsonl".

    Attributes:
        uri: The absolute path or the URI.
        is_local: Whether the folder is on a disk.
    """

    uri: str
    is_local: bool

    def names(self, folder: str = "") -> list[str]:
        """Return the names of files in the folder or in a subfolder; empty if the folder is missing.

        Raises:
            OSError: The folder cannot be read.
        """

    def holds(self, uri: str, folder: str = "") -> bool:
        """Whether a file is in the folder or in a subfolder. Links are followed.

        Args:
            uri: The absolute path or the URI of an existing file.
            folder: The subfolder; "" for the folder itself.
        """

    def read(self, name: str) -> bytes | None:
        """Return the contents of a file; None if the file is missing."""

    def open(self, name: str) -> Any:
        """Open a file as a `pyarrow.NativeFile` with random access."""

    def new_file(self, name: str) -> AbstractContextManager[Path]:
        """Yield the local path of a new file.

        At the end of the block, the file gets its final name. An older file of that name is replaced.

        If the block ends with an error, the file is removed.

        Raises:
            OSError: The file cannot be written. The message begins with the name of the file.
        """

    def create(self, name: str, text: str) -> bool:
        """Write a text file. If the name exists, change nothing and return False."""

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""


def write_text(store: Store, name: str, text: str) -> None:
    """Write a text file, and replace an older file."""
    with store.new_file(name) as path, written(f"{store.uri}/{name}"):
        path.write_text(text, encoding="utf-8")


@contextmanager
def written(uri: str) -> Iterator[None]:
    """If writing fails, raise an OSError whose message begins with the name of the file."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise OSError(f"{uri}: cannot be written: {reason}") from error


def open_store(uri: str) -> Store:
    """Return the folder of a path, or of a URI such as s3://bucket/folder.

    Raises:
        ValueError: The kind of URI is unknown, or the URI has a password.
    """
    if "://" not in uri:
        return LocalStore(Path(uri))
    check_no_secret(uri)
    scheme, _, path, _, _ = urlsplit(uri)
    return LocalStore(Path(unquote(path, errors="surrogateescape"))) if scheme == "file" else ObjectStore(uri)


class LocalStore:
    """A folder on a disk.

    A file is written under a hidden name. When the file is complete and on the disk, it gets the final name. The
    writing process locks the hidden file. A hidden file without a lock is left over from a killed process.
    """

    is_local = True

    def __init__(self, folder: Path) -> None:
        """Remove the hidden files of killed processes. The folder is created with its first file."""
        self._folder = folder.absolute()
        self.uri = click.format_filename(self._folder)
        for path in self._folder.glob(f"{_TEMPORARY}*"):
            _remove_if_dead(path)

    def names(self, folder: str = "") -> list[str]:
        """See `Store`."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._folder / folder) as entries:
            return [it.name for it in entries if it.is_file() and not it.name.startswith(_TEMPORARY)]
        return []

    def holds(self, uri: str, folder: str = "") -> bool:
        """See `Store`."""
        own, path = self._folder / folder, Path(uri)
        return not is_uri(uri) and own.is_dir() and any(own.samefile(it) for it in (path.parent, path.resolve().parent))

    def read(self, name: str) -> bytes | None:
        """See `Store`."""
        with suppress(FileNotFoundError):
            return (self._folder / name).read_bytes()
        return None

    def open(self, name: str) -> Any:
        """See `Store`."""
        return pa.OSFile(os.fsencode(self._folder / name))

    @contextmanager
    def new_file(self, name: str) -> Iterator[Path]:
        """See `Store`."""
        with self._hidden_file(name) as path:
            yield path
            with written(f"{self.uri}/{name}"):
                _sync(path)
                path.replace(self._folder / name)

    @contextmanager
    def _hidden_file(self, name: str) -> Iterator[Path]:
        """Yield the path of an empty hidden file, which is removed at the end."""
        path = self._folder / f"{_TEMPORARY}{Path(name).name}-{uuid.uuid4().hex}"
        with written(f"{self.uri}/{name}"):
            (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
            file = path.open("xb")
        remove = partial(path.unlink, missing_ok=True)
        with file, Interrupts.cleanup(remove):
            try:
                with suppress(OSError):  # the file system may lack locks
                    fcntl.flock(file, fcntl.LOCK_SH)
                yield path
            finally:
                remove()

    def create(self, name: str, text: str) -> bool:
        """See `Store`."""
        final = self._folder / name
        with self._hidden_file(name) as path, written(f"{self.uri}/{name}"):
            path.write_text(text, encoding="utf-8")
            _sync(path)
            try:
                final.hardlink_to(path)
            except FileExistsError:
                return False
            except OSError:  # without hard links, two processes may succeed at the same time
                if final.exists():
                    return False
                path.replace(final)
            return True

    def delete(self, name: str) -> None:
        """See `Store`."""
        (self._folder / name).unlink(missing_ok=True)


def _remove_if_dead(path: Path) -> None:
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the process that locked the file lives
        path.unlink()


class ObjectStore:
    """A folder in an object store. A file is first written on this machine. Then one write uploads the whole file."""

    is_local = False

    def __init__(self, uri: str) -> None:
        """Connect to the store."""
        self.uri = uri.rstrip("/")
        self._files, self._folder = filesystem_of(self.uri)

    def names(self, folder: str = "") -> list[str]:
        """See `Store`."""
        selector = arrow_fs.FileSelector(f"{self._folder}/{folder}".rstrip("/"), allow_not_found=True)
        return [it.base_name for it in self._files.get_file_info(selector) if it.type == arrow_fs.FileType.File]

    def holds(self, uri: str, folder: str = "") -> bool:
        """See `Store`. Object stores have no links."""
        files, path = filesystem_of(uri)
        own = f"{self._folder}/{folder}".rstrip("/")
        return bool(files.type_name == self._files.type_name and path.rpartition("/")[0] == own)

    def read(self, name: str) -> bytes | None:
        """See `Store`."""
        if self._files.get_file_info(f"{self._folder}/{name}").type != arrow_fs.FileType.File:
            return None
        with self._files.open_input_stream(f"{self._folder}/{name}") as file:
            return bytes(file.read())

    def open(self, name: str) -> Any:
        """See `Store`."""
        return self._files.open_input_file(f"{self._folder}/{name}")

    @contextmanager
    def new_file(self, name: str) -> Iterator[Path]:
        """See `Store`."""
        with (
            tempfile.TemporaryDirectory(prefix="encserve-") as folder,
            Interrupts.cleanup(partial(shutil.rmtree, folder, ignore_errors=True)),
        ):
            path = Path(folder, Path(name).name)
            yield path
            # One write for the whole file: a stream that is closed early would publish a part of the file. Arrow's
            # `copy_files` is not used, because `copy_files` prints errors to the terminal.
            with pa.memory_map(str(path)) as file, self._files.open_output_stream(f"{self._folder}/{name}") as out:
                out.write(file.read_buffer())

    def create(self, name: str, text: str) -> bool:
        """See `Store`.

        Object stores have no locks. If two processes write, the last text stays. So this function reads the text again
        to find out which text stayed.
        """
        if self.read(name) is not None:
            return False
        write_text(self, name, text)
        return self.read(name) == text.encode()

    def delete(self, name: str) -> None:
        """See `Store`."""
        if self._files.get_file_info(f"{self._folder}/{name}").type == arrow_fs.FileType.File:
            self._files.delete_file(f"{self._folder}/{name}")


def _sync(path: Path) -> None:
    """Write a file's bytes to the disk, so that a power failure cannot leave an incomplete file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
