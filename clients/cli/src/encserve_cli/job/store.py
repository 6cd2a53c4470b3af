"""The folder of a job's output, on a disk or in an object store: a file has its final name only when it is whole."""

import fcntl
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as arrow_fs

from encserve_cli.files.reading import check_no_secret
from encserve_cli.files.storage import filesystem_of

_TEMPORARY = ".unfinished-"


class Store(Protocol):
    """A folder. Names may have one folder before them: "_rejected/part.jsonl"."""

    uri: str

    def names(self, folder: str = "") -> dict[str, int]:
        """The files in the folder, or in one of its folders, with their sizes in bytes; none where it is not there.

        Raises:
            OSError: It cannot be read.
        """

    def read(self, name: str) -> str | None:
        """A file's text; None where there is no such file."""

    def writing(self, name: str) -> Any:
        """A context manager that gives the path of a local file to write, and publishes it if the block ends well."""

    def create(self, name: str, text: str) -> bool:
        """Publishes a text under a name, unless there is one: then nothing changes, and it returns False."""

    def delete(self, name: str) -> None:
        """Removes a file, if it is there."""


def write_text(store: Store, name: str, text: str) -> None:
    """Publishes a text under a name, in place of what was there."""
    with store.writing(name) as path:
        path.write_text(text, encoding="utf-8")


def open_store(uri: str) -> Store:
    """The folder of a path, or of a URI such as s3://bucket/folder.

    Raises:
        ValueError: The URI is of a kind that pyarrow does not know, or holds a password.
    """
    if "://" not in uri:
        return LocalStore(Path(uri))
    check_no_secret(uri)
    scheme, _, path, _, _ = urlsplit(uri)
    return LocalStore(Path(unquote(path))) if scheme == "file" else ObjectStore(uri)


class LocalStore:
    """A folder on a disk.

    A file is written beside its place and renamed when it is whole and on the disk. While it is written, a lock on it
    says that its process lives, so what a killed process has left is told from what another process writes.
    """

    def __init__(self, folder: Path) -> None:
        """Removes what killed processes have left in the folder, which is made with its first file."""
        self.uri = str(folder.absolute())
        self._folder = Path(self.uri)
        for path in self._folder.glob(f"{_TEMPORARY}*"):
            _remove_if_dead(path)

    def names(self, folder: str = "") -> dict[str, int]:
        """See `Store`."""
        found = {}
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in (self._folder / folder).iterdir():
                if path.is_file() and not path.name.startswith(_TEMPORARY):
                    found[path.name] = path.stat().st_size
        return found

    def read(self, name: str) -> str | None:
        """See `Store`."""
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """See `Store`."""
        with self._unfinished(name) as path:
            yield path
            _sync(path)
            path.replace(self._folder / name)

    def create(self, name: str, text: str) -> bool:
        """See `Store`."""
        with self._unfinished(name) as path:
            path.write_text(text, encoding="utf-8")
            _sync(path)
            try:
                (self._folder / name).hardlink_to(path)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links; of two that create the same at once both succeed
                if (self._folder / name).exists():
                    return False
                path.replace(self._folder / name)
            return True

    def delete(self, name: str) -> None:
        """See `Store`."""
        (self._folder / name).unlink(missing_ok=True)

    @contextmanager
    def _unfinished(self, name: str) -> Iterator[Path]:
        """A file to write, which is on the disk when the block ends, and removed unless the block renames it."""
        path = self._folder / f"{_TEMPORARY}{Path(name).name}-{uuid.uuid4().hex}"
        try:
            (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_SH)
                try:
                    yield path
                finally:
                    path.unlink(missing_ok=True)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise OSError(f"{self._folder / name}: cannot be written: {reason}") from error


def _remove_if_dead(path: Path) -> None:
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
        path.unlink()


class ObjectStore:
    """A folder in an object store. A file is written on this machine and then uploaded whole."""

    def __init__(self, uri: str) -> None:
        """Finds out what kind of store it is."""
        self.uri = uri.rstrip("/")
        self._files, self._folder = filesystem_of(self.uri)

    def names(self, folder: str = "") -> dict[str, int]:
        """See `Store`."""
        selector = arrow_fs.FileSelector(f"{self._folder}/{folder}".rstrip("/"), allow_not_found=True)
        return {
            it.base_name: it.size for it in self._files.get_file_info(selector) if it.type == arrow_fs.FileType.File
        }

    def read(self, name: str) -> str | None:
        """See `Store`."""
        if self._files.get_file_info(f"{self._folder}/{name}").type != arrow_fs.FileType.File:
            return None
        with self._files.open_input_stream(f"{self._folder}/{name}") as file:
            return bytes(file.read()).decode()

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """See `Store`."""
        with tempfile.TemporaryDirectory(prefix="encserve-") as folder:
            path = Path(folder, Path(name).name)
            yield path
            # In one piece: if a stream is left after a part of the bytes, closing it would publish that part. Not with
            # `copy_files`, of which Arrow itself prints what fails.
            with pa.memory_map(str(path)) as file, self._files.open_output_stream(f"{self._folder}/{name}") as target:
                target.write(file.read_buffer())

    def create(self, name: str, text: str) -> bool:
        """See `Store`. Object stores know no lock; the text that is there in the end is the one that counts."""
        if self.read(name) is not None:
            return False
        with self.writing(name) as path:
            path.write_text(text, encoding="utf-8")
        return self.read(name) == text

    def delete(self, name: str) -> None:
        """See `Store`."""
        if self._files.get_file_info(f"{self._folder}/{name}").type == arrow_fs.FileType.File:
            self._files.delete_file(f"{self._folder}/{name}")


def _sync(path: Path) -> None:
    """Has the disk hold a file's bytes, so that what has its final name is whole after a power failure too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
