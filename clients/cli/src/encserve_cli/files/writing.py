"""Writers of vectors, by the suffix of the file. A file gets its final name only when it is complete."""

import csv
import json
import os
import shutil
import sys
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as arrow
from pyarrow import parquet

from encserve_cli.files.command import STDOUT
from encserve_cli.files.reading import PAIR_COLUMNS, InputKind, Sent
from encserve_cli.files.records import records
from encserve_cli.interrupts import Interrupts
from encserve_cli.render import row_tokens
from encserve_cli.shared import ids_of
from encserve_client import EncodedOutput, EncodeResult

Array = npt.NDArray[Any]
RAGGED = ("tokens", "multi_vector", "sparse")  # kinds with several rows for an input
# A Parquet row group is written when it has this many inputs or bytes.
_ROW_GROUP_INPUTS = 4096
_ROW_GROUP_BYTES = 64 * 1024 * 1024


class Writer(ABC):
    """Writes one kind of file."""

    @abstractmethod
    def write(self, inputs: Sequence[Sent], result: EncodeResult) -> None:
        """Add inputs and their outputs. All results have the same model and kind."""

    def finish(self) -> None:  # noqa: B027 - most writers have nothing left to write
        """Write the remaining data. The file is then complete."""


@contextmanager
def writing(path: Path) -> Iterator[Writer]:
    """Yield a writer of a file. The file is created or replaced only if the block ends without an error.

    For `STDOUT`, the writer prints the lines of a .jsonl file immediately.

    Raises:
        ValueError: The suffix is unknown, or this kind of file cannot hold the outputs.
        OSError: The file cannot be written.
    """
    if path == STDOUT:
        yield _JsonlWriter(sys.stdout)
        return
    make = _WRITERS.get(path.suffix.lower())
    if make is None:
        raise ValueError(
            f"--output {path}: must end in {', '.join(_WRITERS)}; was {path.suffix or 'without a suffix'}. "
            "End the name of a folder with /"
        )
    with ExitStack() as folders, ExitStack() as stack:
        try:
            folder = folders.enter_context(tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent))
        except OSError as error:
            raise OSError(
                f"--output {path}: cannot write into the folder {path.parent}: {error.strerror}. Make this folder, or "
                "name another"
            ) from error
        folders.enter_context(Interrupts.cleanup(partial(shutil.rmtree, folder, ignore_errors=True)))
        whole = Path(folder, path.name)
        writer = make(whole, stack)
        yield writer
        writer.finish()
        stack.close()
        whole.replace(path)


class _GrowingArray:
    """A .npy file whose first axis grows. NumPy's header has space for a longer length."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._file = stack.enter_context(path.open("w+b"))
        self._shape: tuple[int, ...] = ()
        self._dtype: np.dtype[Any] | None = None

    def append(self, array: Array) -> None:
        """Add rows. All rows have the same shape and type."""
        if self._dtype is None:
            self._dtype, self._shape = array.dtype, (0, *array.shape[1:])
            self._write_header()
        np.ascontiguousarray(array).tofile(self._file)
        self._shape = (self._shape[0] + len(array), *self._shape[1:])

    def finish(self) -> None:
        """Write the final length into the header."""
        self._write_header()
        self._file.flush()

    def _write_header(self) -> None:
        assert self._dtype is not None  # noqa: S101 - `append` comes before `finish`
        self._file.seek(0)
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"shape": self._shape, "fortran_order": False, "descr": descr}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._file.seek(0, 2)


class _NpyWriter(Writer):
    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._array = _GrowingArray(path, stack)

    def write(self, inputs: Sequence[Sent], result: EncodeResult) -> None:
        self._array.append(_one_each(result, ".npy"))

    def finish(self) -> None:
        self._array.finish()


class _NpzWriter(Writer):
    """Each array grows in a temporary file. At the end, all files are put into one archive."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._arrays: dict[str, tuple[_GrowingArray, Path]] = {}
        self._more: dict[str, Array] = {}
        self._inputs = self._weights = 0

    def write(self, inputs: Sequence[Sent], result: EncodeResult) -> None:
        output = result.outputs[0]
        rows, lengths = output.matrix(), _lengths(result)
        if not self._arrays:
            self._more = {name: np.array(value) for name, value in ids_of(result).items()}
            if output.kind == "sparse":  # the format of scipy.sparse.load_npz
                self._more["format"] = np.array("csr")
                self._append("indptr", np.zeros(1, np.int64))
        if output.kind == "sparse":
            self._append("data", rows[:, 0])
            self._append("indices", _indices(output).astype(np.int64))
            self._append("indptr", self._weights + np.cumsum(lengths))
            self._weights += len(rows)
            self._inputs += len(lengths)
            self._more["shape"] = np.array([self._inputs, output.sparse_width])
        else:
            self._append("rows", rows)
            if output.kind in RAGGED:
                self._append("lengths", lengths)
            for name, numbers in _beside_rows(result).items():
                self._append(name, numbers)

    def _append(self, name: str, array: Array) -> None:
        if name not in self._arrays:
            path = self._path.with_name(f"{name}.npy")
            self._arrays[name] = _GrowingArray(path, self._stack), path
        self._arrays[name][0].append(array)

    def finish(self) -> None:
        with zipfile.ZipFile(self._path, "w", allowZip64=True) as archive:
            for array, path in self._arrays.values():
                array.finish()
                archive.write(path, path.name)
                path.unlink()
            for name, value in self._more.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, value)


class _JsonlWriter(Writer):
    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    @classmethod
    def of_file(cls, path: Path, stack: ExitStack) -> "_JsonlWriter":
        return cls(stack.enter_context(path.open("w", encoding="utf-8", newline="\n")))

    def write(self, inputs: Sequence[Sent], result: EncodeResult) -> None:
        for it, record in zip(inputs, records(result), strict=True):
            self._stream.write(json.dumps({it.column: it.value} | record, ensure_ascii=False) + "\n")
        self._stream.flush()


class _CsvWriter(Writer):
    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._lines = csv.writer(stack.enter_context(path.open("w", encoding="utf-8", newline="")))
        self._has_names = False

    def write(self, inputs: Sequence[Sent], result: EncodeResult) -> None:
        vectors = _one_each(result, ".csv")
        if not self._has_names:
            self._lines.writerow([inputs[0].column, *range(vectors.shape[1])])
            self._has_names = True
        for it, row in zip(inputs, vectors.tolist(), strict=True):
            self._lines.writerow([it.text, *row])


class _ParquetWriter(Writer):
    """Writes Parquet.

    The columns are the inputs, and one of these groups: `vector`; `rows` and the tokens of the rows; `indices` and
    `values`.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._file: ParquetFile | None = None
        self._held: list[Any] = []

    def write(self, inputs: Sequence[Sent], result: EncodeResult) -> None:
        if self._file is None:
            output = result.outputs[0]
            rows = output.matrix()
            kind: InputKind = "text" if inputs[0].column == "text" else "ids"
            fields = INPUT_TYPES[kind] | output_types(
                str(output.kind), arrow.from_numpy_dtype(rows.dtype), rows.shape[1]
            )
            self._file = self._stack.enter_context(ParquetFile(self._path, arrow.schema(fields, ids_of(result)), kind))
        self._held.append(self._file.table([it.value for it in inputs], result))
        size = sum(table.nbytes for table in self._held)
        if sum(map(len, self._held)) >= _ROW_GROUP_INPUTS or size >= _ROW_GROUP_BYTES:
            self._write_held()

    def _write_held(self) -> None:
        if self._held:
            assert self._file is not None  # noqa: S101 - the first `write` sets it
            self._file.write(arrow.concat_tables(self._held))
            self._held.clear()

    def finish(self) -> None:
        self._write_held()


# The columns of each kind of inputs, with their types. Input vectors are not written.
INPUT_TYPES: Mapping[InputKind, dict[str, Any]] = {
    "text": {"text": arrow.string()},
    "ids": {"ids": arrow.list_(arrow.int64())},
    "vectors": {},
    "pairs": dict.fromkeys(PAIR_COLUMNS, arrow.string()),
}


def output_types(kind: str, number: Any, width: int) -> dict[str, Any]:
    """Return the columns of Parquet files for a kind of output, with their Arrow types.

    Args:
        kind: The kind of the output.
        number: The Arrow type of a number; uint8 for "binary".
        width: The number of numbers in a row; for "binary" the number of bytes.
    """
    row = arrow.list_(number, width)
    if kind == "sparse":
        return {"indices": arrow.list_(arrow.uint32()), "values": arrow.list_(number)}
    if kind == "tokens":
        return {"rows": arrow.list_(row), "token_ids": arrow.list_(arrow.int64())}
    if kind == "multi_vector":
        return {"rows": arrow.list_(row), "token_indices": arrow.list_(arrow.uint32())}
    if kind == "scores":
        return {"score": number} if width == 1 else {"scores": row}
    return {"vector": row}


class ParquetFile:
    """Writes a Parquet file of inputs and outputs, in row groups. Use it as a context manager."""

    def __init__(self, path: Path, schema: Any, input_kind: InputKind) -> None:
        """Open the file.

        Args:
            path: The file.
            schema: The pyarrow.Schema: the columns of `INPUT_TYPES`, the columns of `output_types`, and other columns.
            input_kind: The kind of every input.
        """
        self._schema = schema
        self._input_kind = input_kind
        # Numbers of vectors rarely repeat, so a dictionary and statistics would only cost time and space.
        plain = [field.name for field in schema if not arrow.types.is_nested(field.type)]
        self._file = arrow.OSFile(os.fsencode(path), "wb")
        self._writer = parquet.ParquetWriter(
            self._file, schema, use_dictionary=plain or False, write_statistics=plain or False
        )

    def table(
        self,
        values: Sequence[Any],
        result: EncodeResult | None,
        missing: npt.NDArray[np.bool_] | None = None,
        further: Any = None,
    ) -> Any:
        """Return a table of rows with the file's schema.

        Args:
            values: (rows,) The inputs; None for a row without an input. A pair is a (query, document) tuple.
            result: The outputs of the rows that are not missing; None if all rows are missing.
            missing: (rows,) True for rows without an output, which get null. None if all rows have an output.
            further: pyarrow.Table, (rows, other columns).
        """
        columns = self._input_columns(values)
        columns |= {} if result is None else _output_columns(result, missing)
        columns |= {} if further is None else dict(zip(further.column_names, further.columns, strict=True))
        arrays = [
            columns[field.name] if field.name in columns else arrow.nulls(len(values), field.type)
            for field in self._schema
        ]
        return arrow.Table.from_arrays(arrays, schema=self._schema)

    def _input_columns(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return the columns of the inputs by name."""
        types = INPUT_TYPES[self._input_kind]
        if self._input_kind != "pairs":
            return {name: arrow.array(values, its) for name, its in types.items()}
        return {
            name: arrow.array([None if it is None else it[place] for it in values], its)
            for place, (name, its) in enumerate(types.items())
        }

    def write(self, table: Any) -> None:
        """Add a row group."""
        self._writer.write_table(table)

    def add_metadata(self, metadata: Mapping[str, str]) -> None:
        """Add metadata to the footer. The schema has its own metadata."""
        self._writer.add_key_value_metadata(dict(metadata))

    def __enter__(self) -> "ParquetFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # If writing failed, errors from closing must not hide the first error.
        with suppress(*((OSError, arrow.ArrowException) if kind else ())):
            self._writer.close()
            self._file.close()


def _output_columns(result: EncodeResult, missing: npt.NDArray[np.bool_] | None) -> dict[str, Any]:
    """Return the columns of a result by name. Rows without an output are null."""
    output = result.outputs[0]
    numbers = output.matrix()  # (inputs or rows, width)
    mask = None if missing is None else arrow.array(missing)
    if output.kind not in RAGGED:
        if missing is not None:
            numbers, present = np.zeros((len(missing), numbers.shape[1]), numbers.dtype), numbers
            numbers[~missing] = present
        (name,) = output_types(str(output.kind), arrow.float32(), numbers.shape[1])
        if name == "score":
            return {name: arrow.array(numbers[:, 0], mask=missing)}
        return {name: arrow.FixedSizeListArray.from_arrays(_flat(numbers), numbers.shape[1], mask=mask)}
    lengths = _lengths(result)
    if missing is not None:
        lengths, present = np.zeros(len(missing), np.int64), lengths
        lengths[~missing] = present
    ends = arrow.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

    def lists(values: Any) -> Any:
        return arrow.ListArray.from_arrays(ends, values, mask=mask)

    if output.kind == "sparse":
        return {"indices": lists(arrow.array(_indices(output))), "values": lists(_flat(numbers))}
    rows = arrow.FixedSizeListArray.from_arrays(_flat(numbers), numbers.shape[1])
    return {"rows": lists(rows)} | {name: lists(arrow.array(its)) for name, its in _beside_rows(result).items()}


def _flat(numbers: Array) -> Any:
    return arrow.array(numbers.reshape(-1))


def _one_each(result: EncodeResult, suffix: str) -> Array:
    """Return (inputs, width)."""
    if (kind := result.outputs[0].kind) in RAGGED:
        raise ValueError(
            f"--output: a {suffix} file holds one vector for each input, but {kind!r} has several rows: use .npz, "
            ".jsonl or .parquet"
        )
    return result.outputs[0].matrix()


def _lengths(result: EncodeResult) -> Array:
    """Return (inputs,), the number of rows of each input."""
    return np.concatenate([block.lengths for block in result.outputs[0].blocks]).astype(np.int64)


def _indices(output: EncodedOutput) -> Array:
    """Return (weights,), the token id of each weight."""
    return np.concatenate([its.indices for its in output.sparse_vectors()])


def _beside_rows(result: EncodeResult) -> dict[str, Array]:
    """Return the column with each row's token: the token's id, or the token's index. Empty for pooled rows."""
    output = result.outputs[0]
    if output.kind == "multi_vector":
        places = [its for its in output.token_indices() if its is not None]
        return {"token_indices": np.concatenate(places)} if len(places) == len(result.sequences) else {}
    if output.kind != "tokens":
        return {}
    shown = [row_tokens(*its) for its in zip(result.sequences, _lengths(result).tolist(), strict=True)]
    return {"token_ids": np.array([token for its in shown for _, token in its], np.int64)}


_WRITERS: Mapping[str, Callable[[Path, ExitStack], Writer]] = {
    ".npy": _NpyWriter,
    ".npz": _NpzWriter,
    ".jsonl": _JsonlWriter.of_file,
    ".csv": _CsvWriter,
    ".parquet": _ParquetWriter,
}
