"""Files on this machine and in object stores. The import of pyarrow is slow, so only readers import this module."""

import gzip
import hashlib
import io
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.fs as arrow_fs
from pyarrow import parquet

from encserve_cli.files.reading import STDIN, DataFile, InputKind, column_of, ids_hint, is_uri

# The reader has at most this much of each column chunk in memory, for row groups of any size.
_PARQUET_BUFFER_BYTES = 4 * 1024 * 1024
# The limits of one read. With a dictionary, decoded rows are much larger than encoded rows, so rows are limited too.
_BATCH_ROWS = 64
_BATCH_BYTES = 16 * 1024 * 1024
_RETRY_SECONDS = 30
_BUFFER_BYTES = 1024 * 1024
_MOST_COUNTED_BYTES = 1024 * 1024 * 1024
# A checksum covers this many blocks of this many bytes.
_CHECKSUM_BLOCKS = 8
_CHECKSUM_BLOCK_BYTES = 256 * 1024


def filesystem_of(uri: str) -> tuple[Any, str]:
    """Return the file system of an absolute path or a URI, and the path inside.

    Raises:
        ValueError: pyarrow does not know the kind of URI.
        OSError: pyarrow cannot use this kind of URI on this machine.
    """
    if not is_uri(uri):
        return arrow_fs.LocalFileSystem(), uri
    with errors_named_as(uri):
        files, path = arrow_fs.FileSystem.from_uri(_with_patience(uri))
        return files, path.rstrip("/")


def _with_patience(uri: str) -> str:
    """Limit the time of retries. Without a limit, Google's client retries for 15 minutes."""
    if uri.lower().startswith(("gs://", "gcs://")) and "retry_limit_seconds=" not in uri:
        return f"{uri}{'&' if '?' in uri else '?'}retry_limit_seconds={_RETRY_SECONDS}"
    return uri


def size_and_time(file: DataFile) -> tuple[int, int]:
    """Return the size of a file in bytes, and its modification time in ns since 1970; 0 if the time is unknown.

    Raises:
        ValueError: The kind of URI is unknown, or the file is not a regular file.
        OSError: The file is missing or is a folder, or the store does not answer.
    """
    with errors_named(file):
        if file.is_local:
            found = Path(file.uri).stat()
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{file.name}: is not a regular file; write its contents into a file first")
            return found.st_size, found.st_mtime_ns
        files, path = filesystem_of(file.uri)
        info = files.get_file_info(path)
        if info.type == arrow_fs.FileType.NotFound:
            raise FileNotFoundError(f"{file.name}: there is no such file")
        if info.type == arrow_fs.FileType.Directory:
            raise IsADirectoryError(f"{file.name}: is a folder; name the files")
        return info.size, info.mtime_ns or 0


def checksum(file: DataFile, size_bytes: int) -> str:
    """Return the SHA-256, as hex, of a file's size and of 8 evenly spaced blocks of 256 KiB.

    The first and the last block are the beginning and the end of the file. The blocks cover all of a file of up to 2
    MiB. In a larger file, a change between the blocks is not detected if the size stays the same.
    """
    digest = hashlib.sha256(f"{size_bytes}\n".encode())
    last = size_bytes - _CHECKSUM_BLOCK_BYTES
    if size_bytes <= _CHECKSUM_BLOCKS * _CHECKSUM_BLOCK_BYTES:
        offsets = list(range(0, size_bytes, _CHECKSUM_BLOCK_BYTES))
    else:
        offsets = [last * index // (_CHECKSUM_BLOCKS - 1) for index in range(_CHECKSUM_BLOCKS)]
    with errors_named(file), _open_random(file) as opened:
        for offset in offsets:
            digest.update(opened.read_at(min(_CHECKSUM_BLOCK_BYTES, size_bytes - offset), offset))
    return digest.hexdigest()


def count_rows(file: DataFile) -> int | None:
    """Return the number of rows of a Parquet file, or of at most 1 GiB of lines on this machine.

    None for other files, because counting would take long, and for pipes, because a pipe can be read only once.
    """
    if file.uri == STDIN or (file.is_local and not Path(file.uri).is_file()):
        return None
    if file.suffix == ".parquet":
        with open_parquet(file) as opened:
            return int(opened.metadata.num_rows)
    if file.suffix in (".csv", ".tsv") or file.codec or not file.is_local:
        return None
    if Path(file.uri).stat().st_size > _MOST_COUNTED_BYTES:
        return None
    count, block = 0, b""
    with errors_named(file), Path(file.uri).open("rb", buffering=0) as stream:
        while found := stream.read(_BUFFER_BYTES):
            block = found
            count += block.count(b"\n")
    return count + (not block.endswith(b"\n") and block not in (b"", b"\xef\xbb\xbf"))


def open_stream(file: DataFile) -> IO[bytes]:
    """Return a file's decompressed bytes as a stream with `readline(limit)`; raises as `size_and_time`."""
    if file.uri == STDIN:
        return sys.stdin.buffer
    with errors_named(file):
        if file.is_local and file.codec is None:
            return Path(file.uri).open("rb", buffering=_BUFFER_BYTES)
        raw = _open_random(file) if file.is_local else _open_input(file)
        # Python's gzip reader accepts padding at the end. Arrow's reader refuses padding.
        whole = gzip.GzipFile(fileobj=raw) if file.codec == "gzip" else raw
        if file.codec == "zstd":
            whole = pa.CompressedInputStream(raw, "zstd")
        return io.BufferedReader(cast("io.RawIOBase", whole), _BUFFER_BYTES)


def _open_input(file: DataFile) -> Any:
    files, path = filesystem_of(file.uri)
    return files.open_input_stream(path, compression=None)


def _open_random(file: DataFile) -> Any:
    """Return a file as a `pyarrow.NativeFile` with random access."""
    if file.is_local:
        return pa.OSFile(os.fsencode(file.uri))  # Arrow takes str only if it is valid Unicode
    files, path = filesystem_of(file.uri)
    return files.open_input_file(path)


def open_parquet(file: DataFile) -> Any:
    """Return a `pyarrow.parquet.ParquetFile`. Raises as `size_and_time`, and ValueError if the file is not Parquet."""
    with errors_named(file):
        return parquet.ParquetFile(_open_random(file), buffer_size=_PARQUET_BUFFER_BYTES)


def errors_named(file: DataFile) -> AbstractContextManager[None]:
    """Put the file's name before the text of each pyarrow error in the block.

    Raises:
        ValueError: The file is damaged, or the content does not fit the suffix.
        OSError: The file cannot be read.
    """
    kind = f" as {'Parquet' if file.suffix == '.parquet' else file.codec or file.suffix}"
    return errors_named_as(file.name, kind, is_local=file.is_local)


@contextmanager
def errors_named_as(name: str, kind: str = "", *, is_local: bool = False) -> Iterator[None]:
    """See `errors_named`. Disk errors have an errno. A local error without errno means damaged contents."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name}: cannot be read{kind}: {_first_line(error)}") from error
    except OSError as error:
        if str(error).startswith(name):
            raise
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(f"{name}: there is no such file") from error
        if error.errno:
            raise OSError(f"{name}: cannot be read: {os.strerror(error.errno)}") from error
        if is_local:
            raise ValueError(f"{name}: cannot be read{kind}: {_first_line(error)}") from error
        raise OSError(f"{name}: cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:400]


def parquet_column(file: DataFile, schema: Any, column: str | None, kind: InputKind) -> str:
    """Return the name of the column of inputs.

    Raises:
        ValueError: The column is missing, or its type does not fit the kind of inputs.
    """
    try:
        name = column_of(column, schema.names, kind)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None
    its = schema.field(name).type
    holds = {
        "text": is_text(its),
        "ids": is_text(its) or _is_list(its, pa.types.is_integer),
        "vectors": _is_list(its, lambda row: _is_list(row, pa.types.is_floating)),
        "pairs": is_text(its),
    }
    if not holds[kind]:
        hint = ids_hint() if kind == "text" and holds["ids"] else ""
        raise ValueError(f"{file.name}: column {name!r} must be of {_WANTED[kind]}; its type is {its}{hint}")
    return name


_WANTED = {
    "text": "text",
    "ids": "lists of whole numbers",
    "vectors": "lists of lists of floating-point numbers",
    "pairs": "text",
}


def is_text(its: Any) -> bool:
    """Whether an Arrow type is a text type."""
    if pa.types.is_dictionary(its):
        its = its.value_type
    return any(is_a(its) for is_a in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _is_list(its: Any, holds: Callable[[Any], bool]) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_a(its) for is_a in lists) and holds(its.value_type)


def batch_rows(opened: Any) -> int:
    """Return the number of rows of a Parquet file for one read: at most 64, and at most 16 MiB of encoded rows."""
    metadata = opened.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    row_bytes = max((its.total_byte_size // its.num_rows for its in groups if its.num_rows), default=0)
    return min(max(_BATCH_BYTES // max(row_bytes, 1), 1), _BATCH_ROWS)
