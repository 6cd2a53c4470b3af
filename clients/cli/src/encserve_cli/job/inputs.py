"""The input files of a job: their sizes and checksums, and their rows."""

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from encserve_cli.files.kept import common_type, split_type, type_named
from encserve_cli.files.reading import PAIR_COLUMNS, STDIN, DataFile, ReadOptions, named_file
from encserve_cli.files.rows import RowReader, column_types, open_rows
from encserve_cli.files.storage import checksum, count_rows, size_and_time
from encserve_cli.job.plan import Plan
from encserve_cli.job.types import Block, InputFile, Part, Work

T = TypeVar("T")
V = TypeVar("V")
# Object stores answer slowly, so many requests run at the same time.
_THREADS = 16
# The columns that a job writes itself.
_OUTPUT_COLUMNS = ("text", "ids", "vector", "rows", "token_ids", "token_indices", "indices", "values")
_SCORE_COLUMNS = (*PAIR_COLUMNS, "score", "scores")


def in_threads(function: Callable[[T], V], values: Sequence[T]) -> list[V]:
    """Return the results of a function for all values, in order. Threads help because `function` waits for files."""
    if len(values) == 1:  # without a thread, so that Ctrl-C ends the call
        return [function(values[0])]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="encserve-file") as pool:
        return list(pool.map(function, values))


def find_inputs(arguments: Sequence[str], known: Sequence[InputFile] = ()) -> list[InputFile]:
    """Return the files of the arguments, in order.

    Args:
        arguments: Paths and URIs.
        known: Files with known checksums. With equal path, size and time, the checksum is not computed again.

    Raises:
        ValueError: An argument is not a file, is given twice, or cannot be read as Parquet.
        OSError: A file is missing or cannot be read.
    """
    checksums = {(it.uri, it.size_bytes, it.modified_ns): it.checksum for it in known if it.modified_ns}
    return in_threads(functools.partial(_describe, checksums), _files(arguments))


def _describe(checksums: Mapping[tuple[str, int, int], str], file: DataFile) -> InputFile:
    size_bytes, modified_ns = size_and_time(file)
    found = checksums.get((file.uri, size_bytes, modified_ns)) or checksum(file, size_bytes)
    return InputFile(file.uri, size_bytes, modified_ns, found, count_rows(file))


def _files(arguments: Sequence[str]) -> list[DataFile]:
    found: dict[str, DataFile] = {}
    for argument in arguments:
        if argument == STDIN:
            raise ValueError(
                "-: a job may read its inputs again after a failure, but standard input can be read only once; write "
                "the texts into a file first"
            )
        file = named_file(argument)
        place = str(Path(file.uri).resolve()) if file.is_local else file.uri
        if place in found:
            raise ValueError(f"{file.name}: is given twice")
        found[place] = file
    return list(found.values())


def kept_types(inputs: Sequence[InputFile], options: ReadOptions) -> dict[str, str]:
    """Check the columns of all files, and return the Arrow types of the columns of --keep.

    Columns of Parquet files keep their types. Columns of .csv files are text. The first lines of all .jsonl files
    decide the types of their fields.

    Raises:
        ValueError: A file is damaged or lacks a column, or the type of a column differs between files.
        OSError: A file cannot be read.
    """
    _check_names(options)
    files = [named_file(it.uri) for it in inputs]
    found = list(zip(files, in_threads(lambda file: column_types(file, options), files), strict=True))
    return {name: its or _type_of(name, found) for name, its in map(split_type, options.keep)}


def _check_names(options: ReadOptions) -> None:
    names = [split_type(it)[0] for it in options.keep]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"--keep {name}: is given twice")
        if name in (_SCORE_COLUMNS if options.input_kind == "pairs" else _OUTPUT_COLUMNS):
            raise ValueError(f"--keep {name}: the job writes a column {name!r}; rename the column of the inputs")


def _type_of(name: str, found: Sequence[tuple[DataFile, Mapping[str, set[str]]]]) -> str:
    own = [(file.name, its) for file, types in found if file.suffix != ".jsonl" for its in types.get(name, ())]
    fields = [(file.name, types[name]) for file, types in found if file.suffix == ".jsonl" and types.get(name)]
    for other, its in own:
        if its != own[0][1]:
            raise ValueError(_mismatch(name, own[0], (other, its)))
    common = common_type(its for _, types in fields for its in types)
    if not own:
        return common
    if fields and (common, own[0][1]) not in (("int64", "double"), (own[0][1], common)):
        raise ValueError(_mismatch(name, own[0], (fields[0][0], common)))
    if any(file.suffix == ".jsonl" for file, _ in found) and type_named(own[0][1]) is None:
        raise ValueError(f"--keep {name}: is {own[0][1]} in {own[0][0]}, a type that .jsonl files do not have")
    return own[0][1]


def _mismatch(name: str, one: tuple[str, str], other: tuple[str, str]) -> str:
    return (
        f"--keep {name}: is {one[1]} in {one[0]} and {other[1]} in {other[0]}; the type must be the same in all "
        f"inputs: --keep {name}:string converts the values to text"
    )


def open_input(plan: Plan, index: int) -> RowReader:
    """Open an input file of a job, at the first row.

    Raises:
        ValueError: The file has changed since the job began.
        OSError: The file is missing or cannot be read.
    """
    planned = plan.inputs[index]
    file = named_file(planned.uri)
    size_bytes, modified_ns = size_and_time(file)
    is_known = (size_bytes, modified_ns) == (planned.size_bytes, planned.modified_ns) and modified_ns
    if not is_known and (size_bytes != planned.size_bytes or checksum(file, size_bytes) != planned.checksum):
        raise ValueError(
            f"{file.name}: was changed since the job began; put the old file back, or begin again with --overwrite"
        )
    return open_rows(file, plan.read, plan.kept_types)


def read_blocks(plan: Plan, work: Work, on_read: Callable[[], None]) -> Generator[Block, None, None]:
    """Yield the rows of the missing parts of `work`, in order.

    The file is read once, starting at the first of these parts.

    Args:
        plan: The job.
        work: The parts.
        on_read: A function that is called often. An exception of `on_read` ends the iteration.

    Raises:
        ValueError: The file was changed or is damaged.
        OSError: The file is missing or cannot be read.
    """
    with open_input(plan, work.input) as reader:
        reader.skip(work.first * plan.part_rows)
        number = work.first
        while not reader.at_end and (work.end is None or number < work.end):
            on_read()
            part = Part(work.input, number)
            if work.has(part):
                yield from _part_blocks(reader, part, plan.part_rows)
            else:
                reader.skip(plan.part_rows)
            number += 1


def _part_blocks(reader: RowReader, part: Part, rows: int) -> Iterator[Block]:
    left = rows
    while left and not reader.at_end:
        found = reader.read(left)
        left -= len(found.values)
        yield Block(part, found, reader.file, not left or reader.at_end, reader.at_end)
