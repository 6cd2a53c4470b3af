"""Files that are open for a job: the rows of any part of them."""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from encserve_cli.files.reading import (
    DataFile,
    as_ids,
    as_text,
    byte_lines,
    column_of,
    csv_rows,
    field_of,
    json_input,
    json_value,
)
from encserve_cli.files.storage import batch_rows, open_parquet, open_random, open_stream, parquet_column, pylist_of
from encserve_cli.job.kept import array_of, plain_type
from encserve_cli.job.types import InputFile, InputKind, Part, ReadOptions, Rows, Value

T = TypeVar("T")
Records = Iterator[tuple[int, list[str]]]


class ChangedError(Exception):
    """A file is not as it was planned."""


class Source(Protocol):
    """A file that is open."""

    def read(self, part: Part) -> Rows:
        """The rows of a part. ChangedError if the file is not as it was planned."""

    def close(self) -> None:
        """Closes it."""


def open_source(file: DataFile, planned: InputFile, options: ReadOptions, kept_types: Mapping[str, str]) -> Source:
    """Opens a file to read parts of it. ChangedError if it is not as it was planned."""
    if file.suffix == ".parquet":
        return _Parquet(file, planned, options)
    if file.suffix in (".csv", ".tsv"):
        return _Csv(file, options)
    return (_OrderedLines if file.is_in_order else _Lines)(file, options, kept_types)


class _Lines:
    """An uncompressed .txt or .jsonl file: a part is a range of bytes."""

    def __init__(self, file: DataFile, options: ReadOptions, kept_types: Mapping[str, str]) -> None:
        self._rows_of = _LineRows(file, options, kept_types)
        self._opened = open_random(file)

    def read(self, part: Part) -> Rows:
        data = self._opened.read_at(part.length, part.offset)
        lines = data.removesuffix(b"\n").split(b"\n")
        if len(data) < part.length or len(lines) != part.rows:
            raise ChangedError(
                f"it had {part.rows:,} lines in {part.length:,} bytes from byte {part.offset:,} on, and now has "
                f"{len(lines):,} in {len(data):,}"
            )
        return self._rows_of(lines, part)

    def close(self) -> None:
        self._opened.close()


class _InOrder(Generic[T]):
    """The records of a file that can only be read from its beginning."""

    def __init__(self, file: DataFile, records_of: Callable[[Iterable[bytes]], Iterator[T]]) -> None:
        self._file = file
        self._records_of = records_of
        self._begin()

    def _begin(self) -> None:
        self._stream = open_stream(self._file)
        self._records = self._records_of(byte_lines(self._stream)[0])
        self._row = 0

    def take(self, part: Part) -> list[T]:
        if part.first_row < self._row:
            self.close()
            self._begin()
        skipped = part.first_row - self._row
        found = list(itertools.islice(self._records, skipped, skipped + part.rows))
        self._row = part.first_row + part.rows
        if len(found) < part.rows:
            raise ChangedError(f"it had {self._row:,} rows or more, and now has fewer")
        return found

    def close(self) -> None:
        self._stream.close()


class _OrderedLines:
    """A compressed .txt or .jsonl file."""

    def __init__(self, file: DataFile, options: ReadOptions, kept_types: Mapping[str, str]) -> None:
        self._rows_of = _LineRows(file, options, kept_types)
        self._lines = _InOrder(file, iter)
        self.close = self._lines.close

    def read(self, part: Part) -> Rows:
        return self._rows_of(self._lines.take(part), part)


@dataclass(frozen=True, slots=True)
class _LineRows:
    """Makes rows of lines."""

    file: DataFile
    options: ReadOptions
    kept_types: Mapping[str, str]

    def __call__(self, lines: Sequence[bytes], part: Part) -> Rows:
        found: Iterable[Any] = map(text_of, lines)
        columns: dict[str, Any] = {}
        if self.file.suffix == ".jsonl":
            found = list(map(json_or_error, found))
            objects = [it if isinstance(it, dict) else {} for it in found]
            columns = {name: _array_of([it.get(name) for it in objects], its) for name, its in self.kept_types.items()}
            found = [_input_or_error(it, self.options.column) for it in found]
        numbers = range(part.first_row + 1, part.first_row + part.rows + 1)
        return _rows(found, self.options.input_kind, pa.table(columns), numbers)


def _input_or_error(value: Any, column: str | None) -> Any:
    try:
        return json_input(value, column)
    except ValueError as error:
        return error


def _array_of(values: Sequence[Any], its: str) -> Any:
    try:
        return array_of(values, its)
    except ValueError as error:
        raise ChangedError(str(error)) from error


def _check_kept(keep: Sequence[str], names: Sequence[str]) -> None:
    if missing := [name for name in keep if name not in names]:
        raise ChangedError(f"it had a column {missing[0]!r}")


class _Csv:
    """A .csv or .tsv file."""

    def __init__(self, file: DataFile, options: ReadOptions) -> None:
        self._options = options
        self._names: list[str] = []
        self._place = 0
        self._records = _InOrder(file, functools.partial(self._records_of, file))
        self.close = self._records.close

    def _records_of(self, file: DataFile, lines: Iterable[bytes]) -> Records:
        self._names, self._place, records = csv_of(file, lines, self._options.column)
        return records

    def read(self, part: Part) -> Rows:
        records = self._records.take(part)
        _check_kept(self._options.keep, self._names)
        kept = {name: self._column([row for _, row in records], name) for name in self._options.keep}
        found = [self._input_or_error(row) for _, row in records]
        return _rows(found, self._options.input_kind, pa.table(kept), [number for number, _ in records])

    def _input_or_error(self, row: Sequence[str]) -> str | ValueError:
        try:
            return field_of(row, self._place, self._names)
        except ValueError as error:
            return error

    def _column(self, rows: Sequence[Sequence[str]], name: str) -> Any:
        place = self._names.index(name)
        return _array_of([row[place] if len(row) == len(self._names) else None for row in rows], str(pa.string()))


class _Parquet:
    """A Parquet file. It goes on within a row group where the last part ended."""

    def __init__(self, file: DataFile, planned: InputFile, options: ReadOptions) -> None:
        self._kind = options.input_kind
        self._opened = open_parquet(file)
        metadata = self._opened.metadata
        if metadata.num_rows != planned.rows:
            raise ChangedError(f"it had {planned.rows:,} rows and now has {metadata.num_rows:,}")
        self._name = parquet_column(file, self._opened, options.column, options.input_kind)
        schema = self._opened.schema_arrow
        _check_kept(options.keep, schema.names)
        self._kept = pa.schema([pa.field(name, plain_type(schema.field(name).type)) for name in options.keep])
        self._columns = [self._name, *options.keep]
        groups = range(metadata.num_row_groups)
        self._starts = np.cumsum([0, *(metadata.row_group(number).num_rows for number in groups)])  # (row groups + 1,)
        self._batch_rows = batch_rows(self._opened)
        self._begin(0)

    def _begin(self, group: int) -> None:
        groups = range(group, len(self._starts) - 1)
        self._batches = self._opened.iter_batches(self._batch_rows, row_groups=groups, columns=self._columns)
        self._batch: Any = None  # what is left of the last one
        self._row = int(self._starts[group])

    def read(self, part: Part) -> Rows:
        group = int(np.searchsorted(self._starts, part.first_row, side="right")) - 1
        if part.first_row < self._row or self._row < self._starts[group]:
            self._begin(group)
        for _ in self._take(part.first_row - self._row):
            pass
        table = pa.Table.from_batches(list(self._take(part.rows)))
        column = table.column(self._name)
        found = _vectors(column) if self._kind == "vectors" else pylist_of(column)
        numbers = range(part.first_row + 1, part.first_row + part.rows + 1)
        return _rows(found, self._kind, table.select(self._kept.names).cast(self._kept), numbers)

    def _take(self, rows: int) -> Iterator[Any]:
        """The next rows, in batches."""
        while rows:
            if self._batch is None or not self._batch.num_rows:
                self._batch = next(self._batches, None)
                if self._batch is None:
                    raise ChangedError("it has fewer rows than it says")
                continue  # which may be empty
            taken = self._batch.slice(0, rows)
            self._batch = self._batch.slice(taken.num_rows)
            self._row += taken.num_rows
            rows -= taken.num_rows
            yield taken

    def close(self) -> None:
        self._opened.close()


def _vectors(column: Any) -> list[Any]:
    """(seq, d_model) of each row of a column of lists of lists, or what it has instead."""
    lists = pa.large_list(pa.large_list(pa.float32()))
    outer = column.combine_chunks().cast(lists)
    inner = outer.values
    if inner.null_count or inner.values.null_count:
        return list(column.to_pylist())
    numbers = inner.values.to_numpy()
    ends, edges = outer.offsets.to_numpy(), inner.offsets.to_numpy()
    found: list[Any] = []
    for is_there, begin, end in zip(outer.is_valid().to_pylist(), ends, ends[1:], strict=False):
        widths = np.diff(edges[begin : end + 1])
        if len(widths) and (widths == widths[0]).all():
            found.append(numbers[edges[begin] : edges[end]].reshape(len(widths), -1))
        else:
            found.append([[0.0] * int(width) for width in widths] if is_there else None)
    return found


def _rows(found: Iterable[Any], kind: InputKind, kept: Any, numbers: Sequence[int]) -> Rows:
    """Rows of what was found in each, which is an error where nothing was."""
    values: list[Value | None] = []
    problems: dict[int, str] = {}
    for place, it in enumerate(found):
        try:
            values.append(_checked(it, kind))
        except ValueError as error:
            values.append(None)
            problems[place] = str(error)
    return Rows(values, problems, kept, numbers)


def _checked(value: Any, kind: InputKind) -> Value:
    if isinstance(value, ValueError):
        raise value
    if value is None:
        raise ValueError("is null")
    found = _CONVERT[kind](value)
    if not len(found):
        raise ValueError("is empty")
    return found


def _as_vectors(value: Any) -> npt.NDArray[np.float32]:
    """(seq, d_model). ValueError for what is no list of lists of numbers, of which each has equally many."""
    if isinstance(value, np.ndarray):
        array = value
    else:
        rows = value if isinstance(value, list) else [value]
        if not all(isinstance(row, list) and all(type(it) in (int, float) for it in row) for row in rows):
            raise ValueError(f"must be a list of lists of numbers; was {json.dumps(value, default=str)[:60]}")
        if len(widths := sorted({len(row) for row in rows})) > 1:
            raise ValueError(
                f"must have vectors of one length; has some of {widths[0]} and some of {widths[-1]} numbers"
            )
        try:
            with np.errstate(over="ignore"):
                array = np.array(rows, np.float32)
        except OverflowError:
            raise ValueError("must have numbers that float32 can hold") from None
    if not array.size:
        raise ValueError("is empty")
    if not np.isfinite(array).all():
        raise ValueError("must have finite numbers; has NaN, infinity or one that float32 cannot hold")
    return array


_CONVERT: dict[InputKind, Callable[[Any], Value]] = {"text": as_text, "ids": as_ids, "vectors": _as_vectors}


def csv_of(file: DataFile, lines: Iterable[bytes], column: str | None) -> tuple[list[str], int, Records]:
    """The names of columns, none where the file is empty; the place of the inputs' one; and the records after them."""
    rows = csv_rows(file, (it.decode(errors="surrogateescape") for it in lines))
    number, names = next(rows, (0, []))
    try:
        return names, names.index(column_of(column, names)) if names else 0, rows
    except ValueError as error:
        raise ValueError(f"{file.name}, line {number}: {error}") from None


def text_of(line: bytes) -> str:
    """A line without its end. A byte that is no UTF-8 becomes a surrogate, which `as_text` finds."""
    return line.decode(errors="surrogateescape").removesuffix("\n").removesuffix("\r")


def json_or_error(line: str) -> Any:
    """The value of a line of a .jsonl file, or a ValueError that says what is wrong with it."""
    try:
        return json_value(line)
    except ValueError as error:
        return error
