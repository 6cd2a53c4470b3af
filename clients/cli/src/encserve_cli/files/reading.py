"""Inputs: arguments, lines of standard input, and files by their suffix."""

import csv
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

STDIN = "-"
DEFAULT_COLUMN = "text"
_PARQUET_ROWS = 4096  # read at a time


class Sent(NamedTuple):
    """One input.

    Attributes:
        where: Where it comes from, for errors: "texts.csv, line 7".
        value: The text, or the token ids.
    """

    where: str
    value: str | list[int]

    @property
    def column(self) -> str:
        """What the input is called beside its vectors."""
        return "text" if isinstance(self.value, str) else "ids"

    @property
    def text(self) -> str:
        """The text, or the ids with spaces between them."""
        return self.value if isinstance(self.value, str) else " ".join(map(str, self.value))

    @property
    def size(self) -> int:
        """Roughly how many bytes of text it is."""
        return len(self.value) if isinstance(self.value, str) else 4 * len(self.value)


def read_inputs(arguments: Sequence[str], column: str | None, *, ids: bool) -> Iterator[Sent]:
    """Every input, in order. "-" is standard input, and what ends in one of `SUFFIXES` is a file.

    Args:
        arguments: What was given.
        column: The column of a file that has several. Default: "text", or the only one.
        ids: Whether inputs are token ids, with commas or spaces between them where they are text.

    Raises:
        ValueError: Something cannot be read as an input; the text names the file and the line.
        OSError: A file cannot be opened.
    """
    for number, argument in enumerate(arguments, start=1):
        found: Iterator[tuple[str, Any]]
        if argument == STDIN:
            found = _lines(sys.stdin, "standard input")
        elif (suffix := Path(argument).suffix.lower()) in _READERS:
            found = _READERS[suffix](Path(argument), column)
        else:
            found = iter([(f"argument {number}", argument)])
        for where, value in found:
            yield Sent(where, _as_ids(where, value) if ids else _as_text(where, value))


def count_inputs(arguments: Sequence[str]) -> int | None:
    """How many inputs there are; None where that takes reading all of them as they will be read."""
    count = 0
    for argument in arguments:
        suffix = Path(argument).suffix.lower()
        if argument == STDIN or suffix == ".csv":
            return None
        if suffix in (".txt", ".jsonl"):
            with Path(argument).open("rb") as lines:
                count += sum(1 for _ in lines)
        elif suffix == ".parquet":
            with _parquet_of(Path(argument)) as file:
                count += file.metadata.num_rows
        else:
            count += 1
    return count


def _as_text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: must be text; was {json.dumps(value)[:60]}; token ids are read with --ids")
    return value


def _as_ids(where: str, value: object) -> list[int]:
    """Ids out of a list, or out of text."""
    if isinstance(value, str):
        try:
            return [int(it) for it in value.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"{where}: --ids wants whole numbers, as in 101,2023,102; was {value[:60]!r}") from None
    if not isinstance(value, list) or any(type(it) is not int for it in value):
        raise ValueError(f"{where}: --ids wants a list of whole numbers; was {json.dumps(value)[:60]}")
    return value


def _lines(file: TextIO, name: str) -> Iterator[tuple[str, str]]:
    """Every line is an input, an empty one too, so that line i of the file is row i of the result."""
    for number, line in enumerate(file, start=1):
        yield f"{name}, line {number}", line.rstrip("\r\n")


@contextmanager
def _text_of(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8: {error.reason} at byte {error.start}") from error


def _text_lines(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    if column is not None:
        raise ValueError(f"{path}: --column is for .jsonl, .csv and .parquet; every line of a .txt file is one input")
    with _text_of(path) as file:
        yield from _lines(file, str(path))


def _json_lines(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    """Each line a string, a list of ids, or an object."""
    with _text_of(path) as file:
        for where, line in _lines(file, str(path)):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: must be JSON: {error}") from None
            yield where, value[_column(where, column, list(value))] if isinstance(value, dict) else value


def _csv_rows(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    with _text_of(path) as file:
        rows = csv.reader(file, strict=True)
        try:
            names = next(rows, [])
            place = names.index(_column(f"{path}, line 1", column, names))
            for row in rows:
                if not row:  # an empty line between records
                    continue
                where = f"{path}, line {rows.line_num}"
                if len(row) != len(names):
                    raise ValueError(f"{where}: must have {len(names)} fields as line 1 has; had {len(row)}")
                yield where, row[place]
        except csv.Error as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from error


def _parquet_rows(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    with _parquet_of(path) as file:
        name = _column(str(path), column, file.schema_arrow.names)
        numbers = itertools.count(1)
        for batch in file.iter_batches(_PARQUET_ROWS, columns=[name]):
            for value in batch.column(0).to_pylist():
                yield f"{path}, row {next(numbers)}", value


@contextmanager
def _parquet_of(path: Path) -> Iterator[Any]:
    arrow = import_arrow()
    try:
        with arrow.parquet.ParquetFile(path) as file:
            yield file
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {error}") from error


def _column(where: str, wanted: str | None, names: Sequence[str]) -> str:
    name = wanted or (names[0] if len(names) == 1 else DEFAULT_COLUMN)
    if name not in names:
        there = ", ".join(map(repr, names)) or "none"
        raise ValueError(f"{where}: has no column {name!r}; it has {there}: --column chooses one")
    return name


def import_arrow() -> Any:
    """The module pyarrow, with pyarrow.parquet in it. ValueError where it is not installed."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ValueError("Parquet files need the package pyarrow: pip install 'encserve-cli[parquet]'") from error
    return pyarrow


_READERS: dict[str, Callable[[Path, str | None], Iterator[tuple[str, Any]]]] = {
    ".txt": _text_lines,
    ".jsonl": _json_lines,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}
SUFFIXES = tuple(_READERS)
