"""Inputs: texts of the command line, lines of standard input, and files on this machine or in an object store."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import click

from encserve_cli.shared import lacks_option

STDIN = "-"
DEFAULT_COLUMN = "text"
PAIR_COLUMNS = ("query", "document")  # the columns of pairs in an output, and in inputs by default
# The kinds of input files, and their compression.
SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
CODECS = {".gz": "gzip", ".zst": "zstd"}
KNOWN = f"{', '.join(SUFFIXES)}; all but .parquet also with {' or '.join(CODECS)}"
_SECRET = re.compile("secret|token|password|key|^sig$", re.IGNORECASE)  # names in the query of a URI
_URI = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_STORES = ("s3://", "gs://", "gcs://", "abfs://", "abfss://", "hdfs://", "viewfs://")
_MOST_ID = 2**63 - 1
_ROWS_AT_ONCE = 256

InputKind = Literal["text", "ids", "vectors", "pairs"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options for reading inputs from rows of files.

    Attributes:
        input_kind: The kind of every input: a text, token ids, a list of vectors, or a pair of texts.
        column: The column with the inputs. None means the only column, or "text" if there are several. For
            pairs: the column with the documents.
        keep: Other columns to read, as NAME or NAME:TYPE.
        query_column: For pairs: the column with the queries. Otherwise None.
    """

    input_kind: InputKind = "text"
    column: str | None = None
    keep: tuple[str, ...] = ()
    query_column: str | None = None

    @property
    def columns(self) -> tuple[str | None, ...]:
        """The columns with the inputs: of pairs two, otherwise one."""
        return (self.column,) if self.query_column is None else (self.query_column, self.column)


class Sent(NamedTuple):
    """One input.

    Attributes:
        where: The file and line of the input, for errors: "texts.csv, line 7".
        value: The text, or the token ids.
    """

    where: str
    value: str | list[int]

    @property
    def column(self) -> str:
        """The name of the column of inputs in an output."""
        return "text" if isinstance(self.value, str) else "ids"

    @property
    def text(self) -> str:
        """The text, or the ids with spaces between them."""
        return self.value if isinstance(self.value, str) else " ".join(map(str, self.value))

    @property
    def size(self) -> int:
        """The approximate number of bytes of the input."""
        return len(self.value) if isinstance(self.value, str) else 4 * len(self.value)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of inputs. The file need not exist.

    Attributes:
        name: The name of the file from the command line, as valid Unicode, for errors.
        uri: The absolute path or the URI of the file; "-" for standard input.
        suffix: One of `SUFFIXES`.
        codec: The compression, "gzip" or "zstd"; None for an uncompressed file.
    """

    name: str
    uri: str
    suffix: str
    codec: str | None

    @property
    def is_local(self) -> bool:
        """Whether the file is a path on this machine."""
        return not is_uri(self.uri)

    def place(self, number: int) -> str:
        """Return the file and row for errors: "texts.csv, line 7" or "texts.parquet, row 7"."""
        return f"{self.name}, {'row' if self.suffix == '.parquet' else 'line'} {number}"


STDIN_FILE = DataFile("standard input", STDIN, ".txt", None)


def is_uri(argument: str) -> bool:
    """Whether an argument begins like a URI, such as "s3://"."""
    return _URI.match(argument) is not None


def check_no_secret(uri: str) -> None:
    """Refuse a URI with a password or a key, because plans, logs and errors name the files of a job.

    Raises:
        ValueError: The URI has a secret. The message does not show the secret.
    """
    its = urlsplit(uri)
    if its.password is not None or any(
        _SECRET.search(name) for name, _ in parse_qsl(its.query, keep_blank_values=True)
    ):
        raise ValueError(
            f"{its.scheme}://…: must not contain a secret; set the secret in the environment, for example in "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )


def named_file(name: str) -> DataFile:
    """Return the file of --input. "-" is standard input.

    Raises:
        ValueError: The name belongs to a folder, or to a file of an unknown kind.
        FileNotFoundError: The file is missing. For object stores, the error comes later, from reading.
    """
    if name == STDIN:
        return STDIN_FILE
    if _is_remote(name):
        check_no_secret(name)
        suffix, codec = _kind_of(name)
        if suffix not in SUFFIXES:
            raise ValueError(f"{name}: must end in {KNOWN}")
        return DataFile(name, name, suffix, codec)
    path = Path(unquote(urlsplit(name).path, errors="surrogateescape") if is_uri(name) else name).absolute()
    suffix, codec = _kind_of(str(path))
    shown = click.format_filename(name)
    if path.is_dir():
        raise ValueError(f"{shown}: is a folder; name the files, for example {shown.rstrip('/')}/*.parquet")
    if not path.exists():
        hint = "check the path" if suffix in SUFFIXES else f"inputs end in {KNOWN}"
        raise FileNotFoundError(f"{shown}: there is no such file; {hint}")
    if suffix not in SUFFIXES:
        raise ValueError(f"{shown}: is a file of an unknown kind; known kinds: {KNOWN}")
    return DataFile(shown, str(path), suffix, codec)


def looks_like_file(argument: str) -> bool:
    """Whether an argument is "-", has the suffix of an input file, is an existing path, or is an object store's URI.

    Raises:
        ValueError: The argument is a URI with a secret.
    """
    is_input = _kind_of(argument)[0] in SUFFIXES
    if _is_remote(argument):
        is_input = is_input or (argument.lower().startswith(_STORES) and not re.search(r"\s", argument))
        if is_input:
            check_no_secret(argument)
        return is_input
    return is_input or argument == STDIN or _exists(argument)


def _is_remote(argument: str) -> bool:
    return is_uri(argument) and not argument.lower().startswith("file:")


def _kind_of(name: str) -> tuple[str, str | None]:
    """Return (suffix, codec). Compressed Parquet is not supported, so its suffix is ""."""
    path = Path((name.partition("?")[0] if is_uri(name) else name).lower())
    if (codec := CODECS.get(path.suffix)) is None:
        return path.suffix, None
    suffix = Path(path.stem).suffix
    return ("" if suffix == ".parquet" else suffix), codec


def _exists(path: str) -> bool:
    try:
        return bool(path) and Path(path).exists()
    except OSError:  # a text that is too long for a path
        return False


def read_inputs(texts: Sequence[str], files: Sequence[str], column: str | None, *, ids: bool) -> Iterator[Sent]:
    """Yield every input, in order: the texts, then the rows of the files.

    Args:
        texts: The texts of the command line.
        files: Paths and URIs of files; "-" for standard input.
        column: The column of files with several columns. Default: "text", or the only column.
        ids: Whether inputs are token ids. A text has commas or spaces between ids.

    Raises:
        ValueError: A row is not an input. The message names the file and the line.
        OSError: A file cannot be opened.
    """
    options = ReadOptions("ids" if ids else "text", column)
    found = [named_file(it) for it in files]
    for number, text in enumerate(texts, start=1):
        where = f"argument {number}"
        with _at(where):
            sent = Sent(where, as_ids(text) if ids else as_text(text))
        yield sent
    for file in found:
        yield from _file_inputs(file, options)


def read_lines(path: Path) -> Iterator[str]:
    r"""Yield the lines of a text file with any suffix. Only \n ends a line.

    Raises:
        ValueError: A line is not UTF-8, or has more than 16 MiB. The message names the file and the line.
        OSError: The file cannot be read.
    """
    file = DataFile(click.format_filename(path), str(path.absolute()), ".txt", None)
    for sent in _file_inputs(file, ReadOptions()):
        yield sent.text


def _file_inputs(file: DataFile, options: ReadOptions) -> Iterator[Sent]:
    from encserve_cli.files.rows import open_rows  # imports pyarrow, which is slow

    with open_rows(file, options) as reader:
        while not reader.at_end:
            rows = reader.read(_ROWS_AT_ONCE)
            for place, (number, value) in enumerate(zip(rows.numbers, rows.values, strict=True)):
                if place in rows.problems:
                    raise ValueError(f"{file.place(number)}: {rows.problems[place]}")
                assert isinstance(value, str | list)  # noqa: S101 - the options ask for no vectors
                yield Sent(file.place(number), value)


@contextmanager
def _at(where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def count_inputs(texts: Sequence[str], files: Sequence[str]) -> int | None:
    """Return the number of inputs, or None if counting would need to read a whole file."""
    from encserve_cli.files.storage import count_rows  # imports pyarrow, which is slow

    counts = [count_rows(named_file(it)) for it in files]
    return None if None in counts else len(texts) + sum(it for it in counts if it is not None)


# The errors below do not name the row. The caller adds the row, or rejects the row in a job.


def as_text(value: object) -> str:
    """Return the text. Raise ValueError for any other value."""
    if not isinstance(value, str):
        raise ValueError(f"must be text; was {_shown(value)}{ids_hint()}")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must be UTF-8; character {error.start + 1:,} is not") from None
    return value


def ids_hint() -> str:
    """Return the end of an error about a value that may be token ids."""
    return "" if lacks_option("--ids") else "; for token ids, give --ids"


def as_ids(value: object) -> list[int]:
    """Return the ids in a list or in a text. Raise ValueError for any other value."""
    if isinstance(value, str):
        try:
            value = [int(it) for it in value.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"--ids needs whole numbers, such as 101,2023,102; was {value[:60]!r}") from None
    if not isinstance(value, list) or any(type(it) is not int for it in value):
        raise ValueError(f"--ids needs a list of whole numbers; was {_shown(value)}")
    if value and (max(value) > _MOST_ID or min(value) < -_MOST_ID):
        raise ValueError(f"--ids needs numbers of at most 64 bits; was {_shown(max(value, key=abs))}")
    return value


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:60]


def column_of(wanted: str | None, names: Sequence[str], kind: InputKind) -> str:
    """Return the name of the column of inputs. If it is missing, raise ValueError with the names of all columns."""
    name = wanted or (names[0] if len(names) == 1 else DEFAULT_COLUMN)
    if name not in names:
        known = ", ".join(map(repr, names)) or "none"
        option = "two with --columns" if kind == "pairs" else "one with --column"
        raise ValueError(f"has no column {name!r}; the columns are {known}: choose {option}")
    return name


def json_value(line: str) -> Any:
    """Return the value of a line of a .jsonl file. Raise ValueError if the line is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from None


def json_input(value: Any, options: ReadOptions) -> Any:
    """Return the input in a JSON value: a field of an object, or the value itself. A pair is two fields.

    Raises the error of `column_of`.
    """
    if not isinstance(value, dict):
        return value
    found = tuple(value[column_of(it, list(value), options.input_kind)] for it in options.columns)
    return found if len(found) > 1 else found[0]


def no_column(file: DataFile, option: str) -> ValueError:
    """Return the error for an option that names a column of a .txt file."""
    known = f"{', '.join(SUFFIXES[1:-1])} and {SUFFIXES[-1]}"
    return ValueError(f"{file.name}: {option} is for {known}; every line of a .txt file is one input")
