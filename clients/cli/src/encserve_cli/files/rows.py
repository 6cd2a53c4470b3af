"""Reads the rows of input files in order.

Each row has an input or a problem, and the values of its --keep columns.

Commands and jobs use this reader, so they read the same inputs from the same files. The reader reports a bad row and
goes on. A command then fails; a job only rejects the row.
"""

import bisect
import csv
import io
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from encserve_cli.files.kept import array_of, cast_column, json_types, split_type, type_named
from encserve_cli.files.reading import (
    PAIR_COLUMNS,
    STDIN,
    DataFile,
    InputKind,
    ReadOptions,
    as_ids,
    as_text,
    column_of,
    json_input,
    json_value,
    no_column,
)
from encserve_cli.files.storage import (
    batch_rows,
    errors_named,
    is_text,
    open_parquet,
    open_stream,
    parquet_column,
)

MIB = 1024 * 1024
# A `read` stops soon after this many bytes, so that several reads fit into memory.
_READ_BYTES = 16 * MIB
# The longest line in bytes. The reader skips longer lines in pieces, and never loads a whole long line into memory. The
# csv module's default limit, 128 KiB, is too low.
_MOST_LINE_BYTES = 16 * MIB
_BOM = b"\xef\xbb\xbf"
_LONG_LINE = f"must be a line of at most {_MOST_LINE_BYTES // MIB} MiB"
# The values in this many first lines of each .jsonl file decide the types of --keep.
_SAMPLE_LINES = 2048

# A text, (seq,) token ids, (seq, d_model) vectors, or a (query, document) pair of texts.
Value = str | list[int] | npt.NDArray[np.float32] | tuple[str, str]
Record = TypeVar("Record")
NO_TYPES: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class Rows:
    """Some rows of a file, in order.

    Attributes:
        numbers: (rows,) The position of each row, from 1. For text: the number of the row's last line. For Parquet: the
            row number.
        values: (rows,) The input of each row; None for a row without an input.
        problems: The reason why a row has no usable input, by index of the row.
        kept: pyarrow.Table, (rows, columns of --keep). Without --keep, the table has no columns.
    """

    numbers: list[int]
    values: list[Value | None]
    problems: dict[int, str]
    kept: Any


class RowReader(ABC):
    """Reads the rows of one file in order. One thread may use a reader at a time.

    Attributes:
        file: The file.
    """

    def __init__(self, file: DataFile, options: ReadOptions, kept_types: Mapping[str, str]) -> None:
        self.file = file
        self._options = options
        self._kept_types = kept_types

    @property
    @abstractmethod
    def at_end(self) -> bool:
        """Whether all rows have been read."""

    @abstractmethod
    def skip(self, rows: int) -> None:
        """Skip `rows` rows, or all remaining rows if there are fewer."""

    @abstractmethod
    def read(self, rows: int) -> Rows:
        """Return the next rows: at least one, at most `rows`, and fewer if their inputs exceed 16 MiB.

        From the same position, `read` with equal `rows` always returns the same number of rows. Earlier reads do not
        change this number.

        Raises:
            ValueError: The file is damaged, or a value does not fit the type of its column of --keep.
            OSError: The file cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> "RowReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, numbers: list[int], found: Iterable[Any], kept: Any) -> Rows:
        """Return rows. Each element of `found` is a raw value, or a ValueError with the problem of the row."""
        values: list[Value | None] = []
        problems: dict[int, str] = {}
        for index, it in enumerate(found):
            try:
                values.append(_checked_value(it, self._options.input_kind))
            except ValueError as error:
                values.append(None)
                problems[index] = str(error)
        return Rows(numbers, values, problems, kept)

    def _kept_table(self, numbers: Sequence[int], columns: Mapping[str, Sequence[Any]], *, parsed: bool) -> Any:
        """Return the table of --keep. `columns` has (rows,) values by name. For `parsed`, see `array_of`."""
        types, place = self._kept_types, self.file.place
        return pa.table(
            {
                name: array_of(values, name, types[name], lambda index: place(numbers[index]), parsed=parsed)
                for name, values in columns.items()
            }
        )


def open_rows(file: DataFile, options: ReadOptions, kept_types: Mapping[str, str] = NO_TYPES) -> RowReader:
    """Open a file. The reader starts at the file's first row.

    Args:
        file: The file.
        options: The options for reading the file.
        kept_types: The types of the columns of --keep, by name.

    Raises:
        ValueError: The content does not fit the suffix of the file, or a column is missing.
        OSError: The file cannot be read.
    """
    if options.input_kind == "vectors" and file.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{file.name}: vectors are read from .jsonl and .parquet files")
    if options.input_kind == "pairs" and file.suffix == ".txt":
        raise ValueError(f"{file.name}: pairs are read from .jsonl, .csv, .tsv and .parquet files")
    if file.suffix == ".txt" and file.uri != STDIN and (options.column is not None or options.keep):
        raise no_column(file, "--keep" if options.keep else "--column")
    with errors_named(file):
        if file.suffix == ".parquet":
            return _ParquetRows(file, options, kept_types)
        if file.suffix in (".csv", ".tsv"):
            return _CsvRows(file, options, kept_types)
        if file.suffix == ".jsonl":
            return _JsonRows(file, options, kept_types)
        return _TextRows(file, options, kept_types)


def column_types(file: DataFile, options: ReadOptions) -> dict[str, set[str]]:
    """Return the types of the columns of --keep in a file, by name, from its first rows.

    A Parquet or CSV file has one type for each column. For a .jsonl file, see `json_types`.

    Raises:
        ValueError: The file is damaged, or the column of the inputs or a column of --keep is missing.
        OSError: The file cannot be read.
    """
    names = [split_type(it)[0] for it in options.keep]
    with open_rows(file, options, dict.fromkeys(names, "string")) as reader, errors_named(file):
        if isinstance(reader, _JsonRows):
            return reader.sampled_types(options.keep)
        return reader.column_types(names) if isinstance(reader, _CsvRows | _ParquetRows) else {}


def _check_columns(file: DataFile, names: Sequence[str], columns: Sequence[str], there: Sequence[str]) -> None:
    """Check that each --keep column is in the file and is not a column of the inputs."""
    for name in names:
        if name in columns:
            raise ValueError(f"--keep {name}: is the column of the inputs; the output always has this column")
        if name not in there:
            raise ValueError(
                f"{file.name}: has no column {name!r} for --keep; the columns are "
                f"{', '.join(map(repr, there)) or 'none'}"
            )


class _SequentialRows(RowReader, Generic[Record]):
    """Rows of a file that is read from its beginning. The reader is one record ahead."""

    def __init__(self, file: DataFile, options: ReadOptions, kept_types: Mapping[str, str]) -> None:
        super().__init__(file, options, kept_types)
        self._stream = open_stream(file)
        try:
            self._records = self._parse(_lines(self._stream))
            self._next = next(self._records, None)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _parse(self, lines: Iterator[bytes | None]) -> Iterator[tuple[int, int, Record]]:
        """Yield (number, size in bytes, record) of each record."""

    @abstractmethod
    def _rows(self, numbers: list[int], records: list[Record]) -> Rows:
        """Turn records into rows."""

    @property
    def at_end(self) -> bool:
        return self._next is None

    def skip(self, rows: int) -> None:
        with errors_named(self.file):
            for _ in range(rows):
                if self._next is None:
                    return
                self._next = next(self._records, None)

    def read(self, rows: int) -> Rows:
        numbers: list[int] = []
        records: list[Record] = []
        size = 0
        with errors_named(self.file):
            while self._next is not None and len(records) < rows and size < _READ_BYTES:
                number, length, record = self._next
                numbers.append(number)
                records.append(record)
                size += length
                self._next = next(self._records, None)
        return self._rows(numbers, records)

    def close(self) -> None:
        if self.file.uri != STDIN:
            self._stream.close()


def _lines(stream: Any) -> Iterator[bytes | None]:
    r"""Yield lines with their line ends; only \n ends a line. Yield None for a line that is too long.

    A byte order mark at the beginning is left out.
    """
    line = stream.readline(len(_BOM) + _MOST_LINE_BYTES + 1).removeprefix(_BOM)
    while line:
        if len(line) > _MOST_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = stream.readline(MIB)
            yield None
        else:
            yield line
        line = stream.readline(_MOST_LINE_BYTES + 1)


def _text_of(line: bytes) -> str:
    """Return a line without its line end. Bytes that are not UTF-8 become surrogates, which `as_text` refuses."""
    return line.decode(errors="surrogateescape").removesuffix("\n").removesuffix("\r")


class _TextRows(_SequentialRows[bytes | None]):
    """The lines of a .txt file."""

    def _parse(self, lines: Iterator[bytes | None]) -> Iterator[tuple[int, int, bytes | None]]:
        for number, line in enumerate(lines, start=1):
            yield number, len(line or b""), line

    def _rows(self, numbers: list[int], records: list[bytes | None]) -> Rows:
        found = (ValueError(_LONG_LINE) if it is None else _text_of(it) for it in records)
        return self._checked(numbers, found, pa.table({}))


class _JsonRows(_TextRows):
    """The lines of a .jsonl file."""

    def _rows(self, numbers: list[int], records: list[bytes | None]) -> Rows:
        parsed = list(map(_json_or_error, records))
        kept = {name: [_field(it, name) for it in parsed] for name in self._kept_types}
        found = (_input_or_error(it, self._options) for it in parsed)
        return self._checked(numbers, found, self._kept_table(numbers, kept, parsed=True))

    def sampled_types(self, keep: Sequence[str]) -> dict[str, set[str]]:
        """Return the types of fields in the first lines. The reader cannot be used afterwards."""
        first = [] if self._next is None else [self._next]
        sample = itertools.islice(itertools.chain(first, self._records), _SAMPLE_LINES)
        parsed = [_json_or_error(record) for _, _, record in sample]
        found = {}
        for column in keep:
            name, its = split_type(column)
            if name in self._options.columns:
                raise ValueError(f"--keep {name}: is the column of the inputs; the output always has this column")
            if its is None and parsed and not any(isinstance(it, dict) and name in it for it in parsed):
                raise ValueError(
                    f"{self.file.name}: none of the first {len(parsed):,} lines has a field {name!r} for --keep; if "
                    f"a later line has this field, give --keep {name}:string"
                )
            found[name] = json_types(_field(it, name) for it in parsed)
        return found


def _json_or_error(line: bytes | None) -> Any:
    """Return the value of a line, or a ValueError with the reason if the line has no value."""
    try:
        return ValueError(_LONG_LINE) if line is None else json_value(_text_of(line))
    except ValueError as error:
        return error


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _input_or_error(value: Any, options: ReadOptions) -> Any:
    try:
        return json_input(value, options)
    except ValueError as error:
        return error


class _CsvRows(_SequentialRows[list[str]]):
    """The records of a .csv or .tsv file. The number of a record is the number of its last line."""

    _names: Sequence[str] = ()
    _places: Sequence[int] = ()  # the indices of the columns of the inputs

    def _parse(self, lines: Iterator[bytes | None]) -> Iterator[tuple[int, int, list[str]]]:
        csv.field_size_limit(max(csv.field_size_limit(), _MOST_LINE_BYTES))
        records = csv.reader(self._divided(lines), strict=True, delimiter="\t" if self.file.suffix == ".tsv" else ",")
        try:
            for record in records:
                if record and not self._names:
                    self._take_names(record, records.line_num)
                elif record:
                    yield records.line_num, sum(map(len, record)), record
        except csv.Error as error:
            raise ValueError(f"{self.file.place(records.line_num)}: {error}") from error

    def _divided(self, lines: Iterator[bytes | None]) -> Iterator[str]:
        """Split lines at carriage returns too, because the csv module requires this."""
        for number, line in enumerate(lines, start=1):
            if line is None:
                raise ValueError(f"{self.file.place(number)}: {_LONG_LINE}")
            yield from io.StringIO(line.decode(errors="surrogateescape"), newline="")

    def _take_names(self, names: Sequence[str], number: int) -> None:
        try:
            self._places = [names.index(column_of(it, names, self._options.input_kind)) for it in self._options.columns]
        except ValueError as error:
            raise ValueError(f"{self.file.place(number)}: {error}") from None
        _check_columns(self.file, [*self._kept_types], [names[place] for place in self._places], names)
        self._names = names

    def _rows(self, numbers: list[int], records: list[list[str]]) -> Rows:
        places = {name: self._names.index(name) for name in self._kept_types}
        is_whole = [len(it) == len(self._names) for it in records]
        kept = {
            name: [it[place] if whole else None for it, whole in zip(records, is_whole, strict=True)]
            for name, place in places.items()
        }
        return self._checked(numbers, map(self._field_or_error, records), self._kept_table(numbers, kept, parsed=False))

    def _field_or_error(self, record: Sequence[str]) -> str | tuple[str, ...] | ValueError:
        if len(record) != len(self._names):
            return ValueError(f"must have {len(self._names)} fields, like the first line; had {len(record)}")
        found = tuple(record[place] for place in self._places)
        return found if len(found) > 1 else found[0]

    def column_types(self, names: Sequence[str]) -> dict[str, set[str]]:
        """Return the types of columns."""
        return {name: {"string"} for name in names if self._names}


class _ParquetRows(RowReader):
    """The rows of a Parquet file. Skipped row groups are not read."""

    def __init__(self, file: DataFile, options: ReadOptions, kept_types: Mapping[str, str]) -> None:
        super().__init__(file, options, kept_types)
        self._opened = open_parquet(file)
        try:
            self._find_columns()
        except BaseException:
            self.close()
            raise
        metadata = self._opened.metadata
        groups = range(metadata.num_row_groups)
        self._starts: list[int] = [0, *itertools.accumulate(metadata.row_group(number).num_rows for number in groups)]
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None  # the batch that was read most recently
        self._batch_end = 0  # the index of the first row after this batch
        self._row = 0

    def _find_columns(self) -> None:
        schema = self._opened.schema_arrow
        if twice := {name for name in schema.names if schema.names.count(name) > 1}:
            raise ValueError(f"{self.file.name}: has more than one column {min(twice)!r}; rename one")
        kind = self._options.input_kind
        self._columns = [parquet_column(self.file, schema, it, kind) for it in self._options.columns]
        _check_columns(self.file, [*self._kept_types], self._columns, schema.names)
        self._kept_schema = pa.schema(
            [(name, self._kept_type(schema.field(name), wanted)) for name, wanted in self._kept_types.items()]
        )

    def _kept_type(self, field: Any, wanted: str) -> Any:
        plain = _plain_type(field.type)
        found = plain if str(plain) == wanted else type_named(wanted)
        if found is None:
            raise ValueError(f"{self.file.name}: --keep {field.name}: must have the type {wanted}; was {field.type}")
        return found

    @property
    def at_end(self) -> bool:
        return self._row >= self._starts[-1]

    def skip(self, rows: int) -> None:
        self._row = min(self._row + rows, self._starts[-1])

    def _peek(self, rows: int) -> Any:
        """Return the next rows of one batch, at least one."""
        group = bisect.bisect_right(self._starts, self._row) - 1
        if self._batch is None or self._batch_end < self._starts[group]:
            groups = range(group, len(self._starts) - 1)
            columns = [*self._columns, *self._kept_types]
            self._batches = self._opened.iter_batches(batch_rows(self._opened), row_groups=groups, columns=columns)
            self._batch_end = self._starts[group]
        while self._batch_end <= self._row:
            self._batch = next(self._batches, None)
            if self._batch is None:
                raise ValueError(f"{self.file.name}: cannot be read as Parquet: has fewer rows than its footer says")
            self._batch_end += len(self._batch)
        return self._batch.slice(self._row - self._batch_end + len(self._batch), rows)

    def read(self, rows: int) -> Rows:
        numbers: list[int] = []
        values: list[Value | None] = []
        problems: dict[int, str] = {}
        kept = []
        size = 0
        with errors_named(self.file):
            while len(values) < rows and size < _READ_BYTES and not self.at_end:
                batch = self._peek(rows - len(values))
                found = self._checked([], self._values(batch), None)
                taken = 0
                while taken < len(batch) and size < _READ_BYTES:
                    size += _size(found.values[taken])
                    taken += 1
                problems |= {len(values) + index: why for index, why in found.problems.items() if index < taken}
                numbers += range(self._row + 1, self._row + taken + 1)
                values += found.values[:taken]
                kept.append(self._kept(batch.slice(0, taken)))
                self._row += taken
        return Rows(numbers, values, problems, pa.concat_tables(kept))

    def _values(self, batch: Any) -> list[Any]:
        convert = _vectors if self._options.input_kind == "vectors" else _pylist
        found = [convert(batch.column(name)) for name in self._columns]
        return list(zip(*found, strict=True)) if len(found) > 1 else found[0]

    def _kept(self, batch: Any) -> Any:
        first = self._row + 1
        columns = [
            cast_column(batch.column(it.name), it.name, it.type, lambda index: self.file.place(first + index))
            for it in self._kept_schema
        ]
        return pa.Table.from_arrays(columns, schema=self._kept_schema)

    def column_types(self, names: Sequence[str]) -> dict[str, set[str]]:
        """Return the types of columns."""
        return {name: {str(_plain_type(self._opened.schema_arrow.field(name).type))} for name in names}

    def close(self) -> None:
        self._opened.close(force=True)


def _plain_type(its: Any) -> Any:
    """Return the output type of a Parquet column: string for every text type, otherwise the column's own type."""
    if pa.types.is_dictionary(its):
        its = its.value_type
    return pa.string() if is_text(its) else its


def _pylist(column: Any) -> list[Any]:
    """Convert an Arrow array to Python values. Bytes that are not UTF-8 become surrogates, which `as_text` refuses."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        plain = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
        return [None if it is None else it.decode(errors="surrogateescape") for it in plain]


def _vectors(column: Any) -> list[Any]:
    """Return a (seq, d_model) array for each row, or the lists of the row if they are not a matrix."""
    rows = column.cast(pa.large_list(pa.large_list(pa.float32())))
    return [_matrix(row.values) if row.is_valid else None for row in rows]


def _matrix(vectors: Any) -> Any:
    numbers = vectors.flatten()
    if vectors.null_count or numbers.null_count or len(vectors.value_lengths().unique()) != 1:
        return vectors.to_pylist()
    return numbers.to_numpy().reshape(len(vectors), -1)


def _size(value: Value | None) -> int:
    """Return the approximate number of bytes of an input."""
    if value is None or isinstance(value, str):
        return len(value or "")
    if isinstance(value, tuple):
        return sum(map(len, value))
    return 8 * len(value) if isinstance(value, list) else value.nbytes


def _checked_value(value: Any, kind: InputKind) -> Value:
    """Check a raw value and convert it to an input. Empty ids and vectors are refused; an empty text is an input."""
    if isinstance(value, ValueError):
        raise value
    if value is None:
        raise ValueError("is null")
    found = _CONVERT[kind](value)
    if kind != "text" and not len(found):
        raise ValueError("is empty")
    return found


def _as_vectors(value: Any) -> npt.NDArray[np.float32]:
    """Return (seq, d_model). Raise ValueError unless the value is a list of lists of numbers, all of one length."""
    if isinstance(value, np.ndarray):
        array = value
    else:
        rows = value if isinstance(value, list) else [value]
        if not all(isinstance(row, list) and all(type(it) in (int, float) for it in row) for row in rows):
            raise ValueError(f"must be a list of lists of numbers; was {json.dumps(value, default=str)[:60]}")
        if len(widths := sorted({len(row) for row in rows})) > 1:
            raise ValueError(
                f"must have vectors of one length; the vectors have between {widths[0]} and {widths[-1]} numbers"
            )
        try:
            with np.errstate(over="ignore"):
                array = np.array(rows, np.float32)
        except OverflowError:
            raise ValueError("must have numbers that float32 can hold") from None
    if not array.size:
        raise ValueError("is empty")
    if not np.isfinite(array).all():
        raise ValueError("must have finite numbers; has NaN, infinity, or a number too large for float32")
    return array


def _as_pair(value: Any) -> tuple[str, str]:
    """Return (query, document). Raise ValueError unless the value is a pair of texts."""
    if not isinstance(value, tuple):
        raise ValueError(f"must be an object with two fields; was {json.dumps(value, default=str)[:60]}")
    texts = []
    for name, text in zip(PAIR_COLUMNS, value, strict=True):
        try:
            if not isinstance(text, str):
                raise ValueError("is null" if text is None else f"must be text; was {text!r:.60}")
            texts.append(as_text(text))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return texts[0], texts[1]


_CONVERT: dict[InputKind, Callable[[Any], Value]] = {
    "text": as_text,
    "ids": as_ids,
    "vectors": _as_vectors,
    "pairs": _as_pair,
}
