"""Inputs: arguments, lines of standard input, and files by their suffix, on this machine or in an object store."""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

STDIN = "-"
DEFAULT_COLUMN = "text"
# What holds inputs, and what these files may be compressed by.
SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
CODECS = {".gz": "gzip", ".zst": "zstd"}
KNOWN = f"{', '.join(SUFFIXES)}; all but .parquet also with {' or '.join(CODECS)}"
_SECRET = re.compile("secret|token|password|key|^sig$", re.IGNORECASE)  # names in the query of a URI
_URI = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_STORES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_BOM = b"\xef\xbb\xbf"
# The csv module's own limit, 128 KiB, is less than some documents have. A quote that is never closed ends here.
_MOST_FIELD_CHARACTERS = 16 * 1024 * 1024
_BUFFER_BYTES = 1024 * 1024
_MOST_ID = 2**63 - 1


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


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that holds inputs; it need not exist.

    Attributes:
        name: As it was given, for errors.
        uri: Its absolute path, or a URI.
        suffix: One of `SUFFIXES`.
        codec: What it is compressed by, as Arrow calls it, or None.
    """

    name: str
    uri: str
    suffix: str
    codec: str | None

    @property
    def is_local(self) -> bool:
        """Whether it is a path on this machine."""
        return not is_uri(self.uri)

    @property
    def is_in_order(self) -> bool:
        """Whether it can only be read from its beginning."""
        return self.codec is not None or self.suffix in (".csv", ".tsv")


def is_uri(argument: str) -> bool:
    """Whether an argument begins as a URI does, not as a path."""
    return _URI.match(argument) is not None


def check_no_secret(uri: str) -> None:
    """Refuses a URI with a password or a key, because plans, logs and errors name the files of a job.

    Raises:
        ValueError: It has one; the text does not show it.
    """
    its = urlsplit(uri)
    if its.password is not None or any(
        _SECRET.search(name) for name, _ in parse_qsl(its.query, keep_blank_values=True)
    ):
        raise ValueError(
            f"{its.scheme}://…: must not hold a secret; give it in the environment, as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )


def find_file(argument: str) -> DataFile | None:
    """The file that an argument names; None where it names none.

    Raises:
        ValueError: It names a folder, or a file of a kind that is not known.
        FileNotFoundError: It ends as a file does, and there is none. In object stores this shows when it is read.
    """
    if not argument:
        return None
    scheme, _, rest = argument.partition("://")
    if is_uri(argument) and scheme.lower() != "file":
        suffix, codec = _kind_of(rest.partition("?")[0])
        if suffix not in SUFFIXES and (scheme.lower() not in _STORES or re.search(r"\s", argument)):
            return None
        check_no_secret(argument)
        if suffix not in SUFFIXES:
            raise ValueError(f"{argument}: must end in {KNOWN}")
        return DataFile(argument, argument, suffix, codec)
    path = Path(unquote(urlsplit(argument).path) if is_uri(argument) else argument).absolute()
    suffix, codec = _kind_of(str(path))
    if _is(path.is_dir):
        raise ValueError(f"{argument}: is a folder; name its files, as {argument.rstrip('/')}/*.parquet does")
    if _is(path.exists):
        if suffix not in SUFFIXES:
            raise ValueError(f"{argument}: is a file of a kind that is not known; known are {KNOWN}")
    elif suffix in SUFFIXES:
        raise FileNotFoundError(f"{argument}: there is no such file")
    else:
        return None
    return DataFile(argument, str(path), suffix, codec)


def _kind_of(path: str) -> tuple[str, str | None]:
    """The suffix, and the codec; the suffix is "" for what is compressed and must not be."""
    name = Path(path.lower())
    if (codec := CODECS.get(name.suffix)) is None:
        return name.suffix, None
    suffix = Path(name.stem).suffix
    return ("" if suffix == ".parquet" else suffix), codec


def _is(holds: Callable[[], bool]) -> bool:
    """What `Path` says of a path; False for a text that is too long to be one."""
    try:
        return holds()
    except OSError:
        return False


def read_inputs(arguments: Sequence[str], column: str | None, *, ids: bool, texts: bool = False) -> Iterator[Sent]:
    """Every input, in order. "-" is standard input; files are what `find_file` finds.

    Args:
        arguments: What was given.
        column: The column of a file that has several. Default: "text", or the only one.
        ids: Whether inputs are token ids, with commas or spaces between them where they are text.
        texts: Whether every argument is a text, even if there is a file of that name.

    Raises:
        ValueError: Something cannot be read as an input; the text names the file and the line.
        OSError: A file cannot be opened.
    """
    for number, it in enumerate(_sources(arguments, texts=texts), start=1):
        found: Iterator[tuple[str, Any]]
        if isinstance(it, DataFile):
            found = _rows(it, column, ids=ids)
        elif it == STDIN and not texts:
            lines = enumerate(sys.stdin, start=1)
            found = ((f"standard input, line {line}", text.rstrip("\r\n")) for line, text in lines)
        else:
            found = iter([(f"argument {number}", it)])
        for where, value in found:
            with _at(where):
                sent = Sent(where, as_ids(value) if ids else as_text(value))
            yield sent


@contextmanager
def _at(where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def count_inputs(arguments: Sequence[str], *, texts: bool = False) -> int | None:
    """How many inputs there are; None where that takes reading all of them as they will be read."""
    count = 0
    for it in _sources(arguments, texts=texts):
        if not isinstance(it, DataFile):
            if it == STDIN and not texts:
                return None
            count += 1
        elif it.suffix == ".parquet":
            from encserve_cli.files.storage import open_parquet

            with open_parquet(it) as file:
                count += file.metadata.num_rows
        elif it.suffix in (".txt", ".jsonl") and it.codec is None and it.is_local:
            with Path(it.uri).open("rb") as lines:
                count += sum(1 for _ in lines)
        else:
            return None
    return count


def _sources(arguments: Sequence[str], *, texts: bool) -> list[DataFile | str]:
    """What each argument is, before any is read."""
    found: list[DataFile | str] = []
    for argument in arguments:
        try:
            file = None if texts or argument == STDIN else find_file(argument)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"{error}; --text takes every argument as a text") from None
        found.append(file or argument)
    return found


# What follows says what is wrong, but not where: one reader stops there, and another goes on with the next row.


def as_text(value: object) -> str:
    """A text. ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"must be text; was {_shown(value)}; token ids are read with --ids")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must be UTF-8; was not at character {error.start + 1:,}") from None
    return value


def as_ids(value: object) -> list[int]:
    """Ids out of a list, or out of text. ValueError for anything else."""
    if isinstance(value, str):
        try:
            value = [int(it) for it in value.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"--ids wants whole numbers, as in 101,2023,102; was {value[:60]!r}") from None
    if not isinstance(value, list) or any(type(it) is not int for it in value):
        raise ValueError(f"--ids wants a list of whole numbers; was {_shown(value)}")
    if value and (max(value) > _MOST_ID or min(value) < -_MOST_ID):
        raise ValueError(f"--ids wants numbers of at most 64 bits; was {_shown(max(value, key=abs))}")
    return value


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:60]


def column_of(wanted: str | None, names: Sequence[str]) -> str:
    """The name of the column that holds inputs. ValueError, with the names that are there, if it is none of them."""
    name = wanted or (names[0] if len(names) == 1 else DEFAULT_COLUMN)
    if name not in names:
        raise ValueError(
            f"has no column {name!r}; it has {', '.join(map(repr, names)) or 'none'}: --column chooses one"
        )
    return name


def json_value(line: str) -> Any:
    """What a line of a .jsonl file holds. ValueError if it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from None


def json_input(value: Any, column: str | None) -> Any:
    """The input in the value of a line: that itself, or a field of an object. ValueError as in `column_of`."""
    return value[column_of(column, list(value))] if isinstance(value, dict) else value


def field_of(row: Sequence[str], place: int, names: Sequence[str]) -> str:
    """A field of a record. ValueError if the record has too few fields, or too many."""
    if len(row) != len(names):
        raise ValueError(f"must have {len(names)} fields as line 1 has; had {len(row)}")
    return row[place]


def no_column(file: DataFile, option: str) -> ValueError:
    """The error of a .txt file where an option asks for a column."""
    known = f"{', '.join(SUFFIXES[1:-1])} and {SUFFIXES[-1]}"
    return ValueError(f"{file.name}: {option} is for {known}; every line of a .txt file is one input")


def byte_lines(stream: Any) -> tuple[io.BufferedReader, int]:
    """Lines of a binary stream, with their ends, of which only a line feed is one; and how long its byte order mark is.

    The lines begin behind the mark.
    """
    lines = io.BufferedReader(stream, _BUFFER_BYTES)
    mark_bytes = len(_BOM) if lines.peek(len(_BOM)).startswith(_BOM) else 0
    lines.read(mark_bytes)
    return lines, mark_bytes


def csv_rows(file: DataFile, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """The records of a .csv or .tsv file, names first, each with the number of its last line; empty lines are left out.

    Raises:
        ValueError: It is no such file; the text names the file and the line.
    """
    csv.field_size_limit(max(csv.field_size_limit(), _MOST_FIELD_CHARACTERS))
    # A carriage return alone ends a record too, and the csv module wants lines that end there.
    divided = (part for line in lines for part in io.StringIO(line, newline=""))
    rows = csv.reader(divided, strict=True, delimiter="\t" if file.suffix == ".tsv" else ",")
    try:
        for row in rows:
            if row:
                yield rows.line_num, row
    except csv.Error as error:
        raise ValueError(f"{file.name}, line {rows.line_num}: {error}") from error


def _rows(file: DataFile, column: str | None, *, ids: bool) -> Iterator[tuple[str, Any]]:
    """The values of a file, each with its place."""
    from encserve_cli.files.storage import errors_named, open_stream, parquet_values  # which import pyarrow

    if file.suffix == ".parquet":
        rows = enumerate(parquet_values(file, column, ids=ids), start=1)
        yield from ((f"{file.name}, row {number}", value) for number, value in rows)
        return
    if column is not None and file.suffix == ".txt":
        raise no_column(file, "--column")
    with errors_named(file), open_stream(file) as stream:
        lines = _decoded(file, byte_lines(stream)[0])
        if file.suffix in (".csv", ".tsv"):
            yield from _csv_values(file, lines, column)
            return
        for number, line in enumerate(lines, start=1):
            where = f"{file.name}, line {number}"
            text = line.removesuffix("\n").removesuffix("\r")
            with _at(where):
                value = json_input(json_value(text), column) if file.suffix == ".jsonl" else text
            yield where, value


def _decoded(file: DataFile, lines: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            where = f"{file.name}, line {number}"
            raise ValueError(f"{where}: must be UTF-8: {error.reason} at byte {error.start} of the line") from error


def _csv_values(file: DataFile, lines: Iterable[str], column: str | None) -> Iterator[tuple[str, str]]:
    rows = csv_rows(file, lines)
    _, names = next(rows, (0, []))
    if not names:
        return
    with _at(f"{file.name}, line 1"):
        place = names.index(column_of(column, names))
    for number, row in rows:
        where = f"{file.name}, line {number}"
        with _at(where):
            value = field_of(row, place, names)
        yield where, value
