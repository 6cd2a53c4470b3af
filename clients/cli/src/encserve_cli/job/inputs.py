"""Inputs of a job: one pass over all files finds parts, and a reader then reads parts in any order."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from encserve_cli.files.reading import KNOWN, STDIN, DataFile, find_file
from encserve_cli.files.storage import errors_named, size_and_time
from encserve_cli.job.cutting import Sizes, cut
from encserve_cli.job.kept import KeptTypes
from encserve_cli.job.measuring import measure
from encserve_cli.job.sources import ChangedError, Source, open_source
from encserve_cli.job.types import InputFile, Part, PartLimits, ReadOptions, Rows, Scan


def find_inputs(arguments: Sequence[str]) -> list[InputFile]:
    """The files that arguments name, one each; how many rows they have is not looked for.

    Raises:
        ValueError: An argument is no file, or is given twice.
        OSError: A file is not there or cannot be read.
    """
    return [_input_of(file) for file in _files(arguments)]


def _input_of(file: DataFile) -> InputFile:
    size_bytes, modified_ns = size_and_time(file)
    return InputFile(file.uri, size_bytes, modified_ns, 0, file.is_in_order)


def scan(
    arguments: Sequence[str],
    options: ReadOptions,
    limits: PartLimits,
    progress: Callable[[int], None] | None = None,
) -> Scan:
    """Finds the rows and the parts of all files, for which it reads each once.

    Args:
        arguments: Paths and URIs of files.
        options: How rows become inputs.
        limits: Where a part ends.
        progress: Is told how many more rows were found.

    Raises:
        ValueError: An argument is no file, or is given twice; a file cannot be read as what its suffix says; a column
            is not there or of another type than it must be.
        OSError: A file is not there or cannot be read.
    """
    kept = KeptTypes(options.keep, options.column)
    inputs: list[InputFile] = []
    parts: list[Part] = []
    for file in _files(arguments):
        planned = _input_of(file)  # before it is read: what is changed meanwhile is noticed later
        with errors_named(file):
            found = list(cut(_told(measure(file, options, kept), progress), limits, len(inputs)))
        parts += found
        inputs.append(dataclasses.replace(planned, rows=sum(it.rows for it in found)))
    return Scan(tuple(inputs), tuple(parts), kept.types())


def _files(arguments: Sequence[str]) -> list[DataFile]:
    """The files that arguments name; of a job nothing else is an input."""
    found: dict[str, DataFile] = {}
    for argument in arguments:
        if argument == STDIN:
            raise ValueError(
                "-: a job that goes on after a failure reads its inputs again, and standard input is gone then; write "
                "it into a file first"
            )
        file = find_file(argument)
        if file is None:
            raise ValueError(f"{argument[:60]!r}: is no file; the inputs of a job are files that end in {KNOWN}")
        place = str(Path(file.uri).resolve()) if file.is_local else file.uri
        if place in found:
            raise ValueError(f"{argument}: is given twice")
        found[place] = file
    return list(found.values())


def _told(chunks: Iterable[Sizes], progress: Callable[[int], None] | None) -> Iterator[Sizes]:
    for chunk in chunks:
        yield chunk
        if progress is not None:
            progress(len(chunk.tokens))


class PartReader:
    """Reads parts of a job. Only one thread may use it at a time.

    Parts in the order of the plan cost each byte once, because the file stays open where the last part ended. A file
    that can only be read in order is begun again for a part before that place.
    """

    def __init__(self, inputs: Sequence[InputFile], options: ReadOptions, kept_types: Mapping[str, str]) -> None:
        """Takes what the planning pass found."""
        self._inputs = inputs
        self._options = options
        self._kept_types = kept_types
        self._open: tuple[int, DataFile, Source] | None = None

    def read(self, part: Part) -> Rows:
        """Reads a part. What is wrong with one of its rows is among its problems.

        Raises:
            ValueError: The file is no longer as it was planned, or cannot be read as what its suffix says.
            OSError: It is not there or cannot be read.
        """
        try:
            if self._open is None or self._open[0] != part.input:
                self.close()
                self._open = (part.input, *self._opened(self._inputs[part.input]))
            _, file, source = self._open
            with errors_named(file):
                return source.read(part)
        except BaseException as error:
            self.close()  # where the file stands is not known
            if isinstance(error, ChangedError):
                uri = self._inputs[part.input].uri
                raise ValueError(f"{uri}: was changed since the plan was made: {error}") from error
            raise

    def _opened(self, planned: InputFile) -> tuple[DataFile, Source]:
        file = find_file(planned.uri)
        assert file is not None  # noqa: S101 - it was one for the planning pass
        size_bytes, modified_ns = size_and_time(file)
        if size_bytes != planned.size_bytes:
            raise ChangedError(f"it had {planned.size_bytes:,} bytes and now has {size_bytes:,}")
        if modified_ns != planned.modified_ns and modified_ns and planned.modified_ns:
            raise ChangedError("it was written to")
        with errors_named(file):
            return file, open_source(file, planned, self._options, self._kept_types)

    def close(self) -> None:
        """Closes the file that is open, if any; `read` opens it again."""
        if self._open is not None:
            self._open[-1].close()
        self._open = None
