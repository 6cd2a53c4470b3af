"""Vectors into files, by their suffix: call by call, and under the file's own name only when it is whole."""

import csv
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as arrow
from pyarrow import parquet

from encserve_cli.files.reading import Sent
from encserve_cli.files.records import records
from encserve_cli.render import row_tokens
from encserve_cli.shared import ids_of
from encserve_client import EncodedOutput, EncodeResult

Array = npt.NDArray[Any]
_RAGGED = ("tokens", "multi_vector", "sparse")
_ROW_GROUP_INPUTS = 4096


class Writer(Protocol):
    """Writes one kind of file."""

    def write(self, inputs: Sequence[Sent], result: EncodeResult) -> None:
        """Adds what was made of some inputs; all results are of the same model and kind."""

    def finish(self) -> None:
        """Writes what is still held; the file is whole then."""


@contextmanager
def writing(path: Path) -> Iterator[Writer]:
    """A writer of the file, which is there, or replaced, only if the block ends well.

    Raises:
        ValueError: Nobody writes files of this suffix, or what does is not installed, or the file cannot hold what is
            to be written.
        OSError: It cannot be written.
    """
    make = _WRITERS.get(path.suffix.lower())
    if make is None:
        raise ValueError(
            f"--output {path}: must end in {', '.join(_WRITERS)}; was {path.suffix or 'without a suffix'}. "
            "End the name of a folder with /"
        )
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder, ExitStack() as stack:
        whole = Path(folder, path.name)
        writer = make(whole, stack)
        yield writer
        writer.finish()
        stack.close()
        whole.replace(path)


class _GrowingArray:
    """A .npy file whose first axis grows. NumPy leaves room in the header for its length."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._file = stack.enter_context(path.open("w+b"))
        self._shape: tuple[int, ...] = ()
        self._dtype: np.dtype[Any] | None = None

    def append(self, array: Array) -> None:
        """Adds rows of the shape and type of those before."""
        if self._dtype is None:
            self._dtype, self._shape = array.dtype, (0, *array.shape[1:])
            self._write_header()
        np.ascontiguousarray(array).tofile(self._file)
        self._shape = (self._shape[0] + len(array), *self._shape[1:])

    def finish(self) -> None:
        """Puts the length into the header."""
        self._write_header()
        self._file.flush()

    def _write_header(self) -> None:
        assert self._dtype is not None  # noqa: S101 - nothing is finished before something was added
        self._file.seek(0)
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"shape": self._shape, "fortran_order": False, "descr": descr}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._file.seek(0, 2)


class _NpyWriter:
    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._array = _GrowingArray(path, stack)

    def write(self, inputs: Sequence[Sent], result: EncodeResult) -> None:
        self._array.append(_one_each(result, ".npy"))

    def finish(self) -> None:
        self._array.finish()


class _NpzWriter:
    """Each array grows in a file of its own, and all are put into one in the end."""

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
            if output.kind == "sparse":  # as scipy.sparse.load_npz reads it
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
            if output.kind in _RAGGED:
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


class _JsonlWriter:
    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._file = stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))

    def write(self, inputs: Sequence[Sent], result: EncodeResult) -> None:
        for it, record in zip(inputs, records(result), strict=True):
            line = {it.column: it.value} | record
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def finish(self) -> None:
        pass


class _CsvWriter:
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

    def finish(self) -> None:
        pass


class _ParquetWriter:
    """Columns: the input, and `vector`, `rows` with what is beside each, or `indices` and `values`."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._writer: Any = None
        self._held: list[Any] = []

    def write(self, inputs: Sequence[Sent], result: EncodeResult) -> None:
        columns = {inputs[0].column: arrow.array([it.value for it in inputs]), **arrow_columns(result)}
        table = arrow.table(columns).replace_schema_metadata(ids_of(result))
        if self._writer is None:
            self._writer = self._stack.enter_context(parquet.ParquetWriter(self._path, table.schema))
        self._held.append(table)
        if sum(map(len, self._held)) >= _ROW_GROUP_INPUTS:
            self._write_held()

    def _write_held(self) -> None:
        if self._held:
            self._writer.write_table(arrow.concat_tables(self._held))
            self._held.clear()

    def finish(self) -> None:
        self._write_held()


def arrow_columns(result: EncodeResult, missing: npt.NDArray[np.bool_] | None = None) -> dict[str, Any]:
    """The columns of Parquet files for what was made of inputs, by their names.

    Args:
        result: What was made.
        missing: (inputs,) which inputs nothing was made of, so that they are not in `result`; None for no input.
    """
    output = result.outputs[0]
    numbers = output.matrix()  # (inputs or rows, width)
    mask = None if missing is None else arrow.array(missing)
    if output.kind not in _RAGGED:
        if missing is not None:
            numbers, present = np.zeros((len(missing), numbers.shape[1]), numbers.dtype), numbers
            numbers[~missing] = present
        return {"vector": arrow.FixedSizeListArray.from_arrays(_flat(numbers), numbers.shape[1], mask=mask)}
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
    """(inputs, width)."""
    if (kind := result.outputs[0].kind) in _RAGGED:
        raise ValueError(
            f"--output: a {suffix} file holds one vector for each input, and of {kind!r} each has a number of its own: "
            ".npz, .jsonl and .parquet hold them"
        )
    return result.outputs[0].matrix()


def _lengths(result: EncodeResult) -> Array:
    """(inputs,), the rows of each."""
    return np.concatenate([block.lengths for block in result.outputs[0].blocks]).astype(np.int64)


def _indices(output: EncodedOutput) -> Array:
    """(weights,), the vocabulary's entry of each."""
    return np.concatenate([its.indices for its in output.sparse_vectors()])


def _beside_rows(result: EncodeResult) -> dict[str, Array]:
    """What stands beside each row: the id of its token, or the place of that in the text unless rows are pooled."""
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
    ".jsonl": _JsonlWriter,
    ".csv": _CsvWriter,
    ".parquet": _ParquetWriter,
}
