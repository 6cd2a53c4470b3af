"""Files on this machine and in object stores, as streams of pyarrow. Takes long to import, so only readers do."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import pyarrow as pa
import pyarrow.fs as arrow_fs
from pyarrow import parquet

from encserve_cli.files.reading import DataFile, column_of, is_uri

# Of each column chunk so much is held, however large its row group is.
_PARQUET_BUFFER_BYTES = 4 * 1024 * 1024
# Read at a time, at most.
_BATCH_ROWS = 4096
_BATCH_BYTES = 16 * 1024 * 1024
_RETRY_SECONDS = 30


def filesystem_of(uri: str) -> tuple[Any, str]:
    """The file system of an absolute path or a URI, and the path in it.

    Raises:
        ValueError: pyarrow does not know the kind of URI.
        OSError: It knows the kind, but cannot use it on this machine.
    """
    if not is_uri(uri):
        return arrow_fs.LocalFileSystem(), uri
    with _named(uri):
        files, path = arrow_fs.FileSystem.from_uri(_with_patience(uri))
        return files, path.rstrip("/")


def _with_patience(uri: str) -> str:
    """Google's client tries for 15 minutes to reach anybody, unless the URI says otherwise."""
    if uri.lower().startswith(("gs://", "gcs://")) and "retry_limit_seconds=" not in uri:
        return f"{uri}{'&' if '?' in uri else '?'}retry_limit_seconds={_RETRY_SECONDS}"
    return uri


def size_and_time(file: DataFile) -> tuple[int, int]:
    """The size of a file in bytes, and when it was last changed, in ns since 1970; 0 if unknown.

    Raises:
        ValueError: pyarrow does not know the kind of URI.
        OSError: It is not there, is a folder, or the store does not answer.
    """
    with errors_named(file):
        files, path = filesystem_of(file.uri)
        info = files.get_file_info(path)
        if info.type == arrow_fs.FileType.NotFound:
            raise FileNotFoundError(f"{file.name}: there is no such file")
        if info.type == arrow_fs.FileType.Directory:
            raise IsADirectoryError(f"{file.name}: is a folder; name its files")
        return info.size, info.mtime_ns or 0


def open_stream(file: DataFile) -> Any:
    """A file's bytes from the beginning, decompressed, as a binary stream; errors as in `size_and_time`."""
    with errors_named(file):
        files, path = filesystem_of(file.uri)
        return files.open_input_stream(path, compression=file.codec)


def open_random(file: DataFile) -> Any:
    """A file's bytes at any place, as a `pyarrow.NativeFile`; errors as in `size_and_time`."""
    with errors_named(file):
        files, path = filesystem_of(file.uri)
        return files.open_input_file(path)


def open_parquet(file: DataFile) -> Any:
    """A `pyarrow.parquet.ParquetFile`; errors as in `size_and_time`, and ValueError if it is none."""
    with errors_named(file):
        files, path = filesystem_of(file.uri)
        return parquet.ParquetFile(path, filesystem=files, buffer_size=_PARQUET_BUFFER_BYTES)


def errors_named(file: DataFile) -> AbstractContextManager[None]:
    """Puts a file's name before what pyarrow says of it while it is read.

    Raises:
        ValueError: The file is not whole, or not what its suffix says.
        OSError: It cannot be read.
    """
    kind = f" as {'Parquet' if file.suffix == '.parquet' else file.codec or file.suffix}"
    return _named(file.name, kind, is_local=file.is_local)


@contextmanager
def _named(name: str, kind: str = "", *, is_local: bool = False) -> Iterator[None]:
    """See `errors_named`. What a disk says has a number; an error without one comes from what makes sense of bytes."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
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


def parquet_column(file: DataFile, opened: Any, column: str | None, kind: Literal["text", "ids", "vectors"]) -> str:
    """The name of the column that holds inputs.

    Raises:
        ValueError: There is no such column, there are several, or it is of a type that holds no inputs of this kind.
    """
    schema = opened.schema_arrow
    try:
        name = column_of(column, schema.names)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None
    if schema.names.count(name) > 1:
        raise ValueError(f"{file.name}: has {schema.names.count(name)} columns {name!r}")
    its = schema.field(name).type
    holds = {
        "text": is_text(its),
        "ids": is_text(its) or _is_list(its, pa.types.is_integer),
        "vectors": _is_list(its, lambda row: _is_list(row, pa.types.is_floating)),
    }
    if not holds[kind]:
        hint = "; token ids are read with --ids" if kind == "text" and holds["ids"] else ""
        raise ValueError(f"{file.name}: column {name!r} must be of {_WANTED[kind]}; its type is {its}{hint}")
    return name


_WANTED = {"text": "text", "ids": "lists of whole numbers", "vectors": "lists of lists of floating-point numbers"}


def is_text(its: Any) -> bool:
    """Whether an Arrow type is one of text."""
    if pa.types.is_dictionary(its):
        its = its.value_type
    return any(is_a(its) for is_a in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _is_list(its: Any, holds: Callable[[Any], bool]) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_a(its) for is_a in lists) and holds(its.value_type)


def batch_rows(opened: Any) -> int:
    """How many rows of a Parquet file to read at a time, so that they are some MiB at most on average."""
    metadata = opened.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    widest = max((its.total_byte_size / max(its.num_rows, 1) for its in groups), default=0)
    return int(min(max(_BATCH_BYTES / max(widest, 1), 1), _BATCH_ROWS))


def pylist_of(column: Any) -> list[Any]:
    """An Arrow array or column as Python's values; text that is no UTF-8 has surrogates in the places of its bytes."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        plain = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
        return [None if it is None else it.decode(errors="surrogateescape") for it in plain]


def parquet_values(file: DataFile, column: str | None, *, ids: bool) -> Iterator[Any]:
    """Every value of a column, in order; errors as in `open_parquet` and `parquet_column`."""
    with errors_named(file), open_parquet(file) as opened:
        name = parquet_column(file, opened, column, "ids" if ids else "text")
        for batch in opened.iter_batches(batch_rows(opened), columns=[name]):
            yield from pylist_of(batch.column(name))
