"""Options for inputs and outputs. The slow imports are in other modules, so that the help is fast."""

import csv
import functools
import glob
import itertools
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from encserve_cli.files.reading import PAIR_COLUMNS, Sent, count_inputs, is_uri, looks_like_file, read_inputs
from encserve_cli.shared import rare_option, with_options

Command = Callable[..., Any]
STDOUT = Path("-")  # --output - writes to standard output
# The suffixes of `files.writing`. Importing that module is slow.
_SUFFIXES = (".npy", ".npz", ".jsonl", ".csv", ".parquet")

# The choices of --dtype, each with its part of the help.
_DTYPES = {
    "float32": "",
    "float16": "",
    "int8": "int8 is not for sparse weights.",
    "binary": "binary is only for one vector per text, and puts 8 numbers into a byte.",
}


@dataclass(frozen=True, slots=True)
class Sources:
    """The inputs of a command.

    Attributes:
        texts: The texts of the command line.
        files: Paths and URIs of files. "-" is standard input.
        column: The column of files with several columns; None for "text", or the only column.
        ids: Whether inputs are token ids.
    """

    texts: tuple[str, ...]
    files: tuple[str, ...]
    column: str | None
    ids: bool

    def read(self) -> Iterator[Sent]:
        """Yield every input; see `read_inputs`."""
        return read_inputs(self.texts, self.files, self.column, ids=self.ids)

    def count(self) -> int | None:
        """Return the number of inputs; see `count_inputs`."""
        return count_inputs(self.texts, self.files)

    @property
    def none_found(self) -> ValueError:
        """The error if the files have no inputs."""
        return ValueError(f"no input was found in {', '.join(self.files)}; give a file with at least one line or row")

    def read_few(self, most: int, advice: str) -> list[Sent]:
        """Return all inputs.

        Raises:
            ValueError: An input is not valid, or the number of inputs is 0 or more than `most`. In the last
                case the message ends with `advice`.
            OSError: A file cannot be read.
        """
        inputs = list(itertools.islice(self.read(), most + 1))
        if len(inputs) > most:
            raise ValueError(f"more than {most:,} inputs: {advice}")
        if not inputs:
            raise self.none_found
        return inputs


@dataclass(frozen=True, slots=True)
class Printing:
    """The destination of vectors.

    Attributes:
        output: A file, `STDOUT`, or None to print the vectors.
        folder: The folder of a job, a path or a URI, or None.
        max_rows: The largest number of rows to print for each text.
    """

    output: Path | None
    folder: str | None
    max_rows: int

    @property
    def names_tokens(self) -> bool:
        """Whether the output has the strings of tokens: on the terminal and in .jsonl files."""
        return self.output in (None, STDOUT) or Path(self.output).suffix.lower() == ".jsonl"


def _is_folder(output: str) -> bool:
    """Whether an output starts a job. True for a folder, a name that ends in /, and a URI of a folder."""
    if is_uri(output) and output.lower().endswith(_SUFFIXES):
        raise click.UsageError(
            f"--output {output}: files are written to paths; with a URI, --output must be the folder of a job"
        )
    return output.endswith("/") or is_uri(output) or Path(output).is_dir()


_INPUT = functools.partial(click.option, "--input", "files", multiple=True, metavar="FILE")


def reads_texts(command: Command) -> Command:
    """Add TEXT, --input, --column and --text to a command. The command gets the argument `sources`."""

    @functools.wraps(command)
    def wrapper(
        *args: Any,
        texts: tuple[str, ...],
        files: tuple[str, ...],
        column: str | None,
        only_texts: bool,
        ids: bool = False,
        **others: Any,
    ) -> Any:
        if not texts and not files:
            raise click.UsageError("no input; give a TEXT, or a file with --input FILE")
        if not only_texts:
            _refuse_names_of_files(texts)
        names = tuple(name for pattern in files for name in _files_of(pattern))
        return command(*args, sources=Sources(texts, names, column, ids), **others)

    return with_options(
        wrapper,
        click.argument("texts", nargs=-1, metavar="[TEXT]..."),
        _INPUT(
            help="Read a file: .txt, .jsonl, .csv, .tsv, or .parquet. Formats other than .parquet may be compressed, "
            "as .gz or .zst. FILE is a path, a URI such as s3://bucket/texts.csv, or a pattern in quotes such as "
            "'corpus/*.parquet'. With '-', the command reads standard input, one text on each line. May be repeated.",
        ),
        click.option("--column", metavar="NAME", help='The column of the inputs. Default: "text", or the only column.'),
        rare_option("--text", "only_texts", is_flag=True, help="Every TEXT is a text, even if it looks like a file."),
    )


def reads_pairs(command: Command) -> Command:
    """Add --input and --columns to a command. The command gets the arguments `sources` and `columns`."""

    @functools.wraps(command)
    def wrapper(*args: Any, files: tuple[str, ...], columns: str, **others: Any) -> Any:
        names = column_names("--columns", columns)
        if len(names) != len(PAIR_COLUMNS) or not all(names) or len(set(names)) < len(names):
            raise click.UsageError(f"--columns must be the names of two columns, as query,document; was {columns}")
        found = tuple(name for pattern in files for name in _files_of(pattern))
        return command(*args, sources=Sources((), found, None, False), columns=names, **others)

    return with_options(
        wrapper,
        _INPUT(
            required=True,
            help="Read a file: .parquet, .jsonl, .csv or .tsv. FILE is a path, a URI such as s3://bucket/pairs.parquet "
            "or a pattern in quotes such as 'pairs/*.parquet'. May be repeated.",
        ),
        click.option(
            "--columns",
            metavar="QUERY,DOCUMENT",
            default=",".join(PAIR_COLUMNS),
            show_default=True,
            help="The columns of the queries and of the documents. Put a name with a comma into double quotes: "
            "'\"a, b\",document'.",
        ),
    )


def column_names(option: str, given: str) -> tuple[str, ...]:
    """Return the names in the value of an option: names with commas between them, in the form of a line of .csv.

    Raises:
        UsageError: A double quote is missing.
    """
    try:
        return tuple(name.strip() for line in csv.reader([given], skipinitialspace=True, strict=True) for name in line)
    except csv.Error as error:
        raise click.UsageError(f"{option} has a name with a wrong double quote ({error}); was {given}") from error


def reads_inputs(command: Command) -> Command:
    """Add the options of `reads_texts`, and --ids."""
    ids = rare_option("--ids", is_flag=True, help="Each TEXT is token ids, special tokens included: 101,2023,102.")
    return reads_texts(ids(command))


def _refuse_names_of_files(texts: Sequence[str]) -> None:
    """Raise UsageError for a text that looks like a file."""
    for text in texts:
        try:
            is_file = looks_like_file(text)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        if is_file:
            name = click.format_filename(text)
            raise click.UsageError(
                f"{name!r} looks like a file: read it with --input {shlex.quote(name)}, or send the text itself with "
                "--text"
            )


def _files_of(pattern: str) -> list[str]:
    """Return the files that match a pattern, sorted. A name without `*`, `?` and `[` is returned unchanged.

    Raises:
        UsageError: No file matches the pattern.
    """
    if is_uri(pattern) or os.path.lexists(pattern) or not set(pattern) & set("*?["):
        return [pattern]
    found = sorted(glob.glob(pattern))  # noqa: PTH207 - the pattern may be absolute
    if not found:
        raise click.UsageError(f"--input {pattern}: no file matches this pattern; check the folder and the pattern")
    return found


def fills_folder(command: Command) -> Command:
    """Add --output FOLDER/ to a command. The command gets the argument `printing`."""

    @functools.wraps(command)
    def wrapper(*args: Any, output: str, **others: Any) -> Any:
        if not _is_folder(output):
            raise click.UsageError(f"--output {output}: must be a folder that exists, or a name that ends in /")
        return command(*args, printing=Printing(None, output, 0), **others)

    help_ = "The folder that the job fills with .parquet files."
    return with_options(wrapper, click.option("--output", required=True, metavar="FOLDER/", help=help_))


def prints_rows(
    command: Command, *, suffixes: Sequence[str] = _SUFFIXES, dtypes: Sequence[str] = tuple(_DTYPES)
) -> Command:
    """Add the options of outputs to a command. The command gets the arguments `printing`, `dimensions` and `dtype`.

    `suffixes` are the suffixes of files that can hold the output. `dtypes` are the choices of --dtype.
    """

    @functools.wraps(command)
    def wrapper(*args: Any, output: str | None, max_rows: int, **others: Any) -> Any:
        folder = output if output is not None and _is_folder(output) else None
        path = None if output is None or folder else Path(output)
        return command(*args, printing=Printing(path, folder, max_rows), **others)

    return with_options(
        wrapper,
        click.option(
            "--output",
            metavar="FILE|FOLDER/|-",
            help=f"Write the vectors to this file: {', '.join(suffixes)}. FOLDER/ starts a job that fills the folder. "
            'With "-", the command prints JSON lines to standard output.',
        ),
        rare_option(
            "--max-rows",
            type=click.IntRange(min=0),
            default=32,
            show_default=True,
            metavar="N",
            help="The maximum number of rows to print for each text.",
        ),
        rare_option(
            "--dimensions",
            type=click.IntRange(min=1),
            metavar="N",
            help="Keep only the first N numbers of each vector. Default: the model's default dimensions, or all.",
        ),
        rare_option(
            "--dtype",
            type=click.Choice(dtypes),
            default="float32",
            show_default=True,
            help=" ".join(["The type of the numbers.", *filter(None, map(_DTYPES.__getitem__, dtypes))]),
        ),
    )
