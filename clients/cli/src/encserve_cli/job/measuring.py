"""How large the rows of a file are: what the planning pass reads of it."""

import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from encserve_cli.files.reading import DataFile, byte_lines, no_column
from encserve_cli.files.storage import batch_rows, is_text, open_parquet, open_stream, parquet_column
from encserve_cli.job.cutting import Counts, Sizes, sizes_of_text
from encserve_cli.job.kept import KeptTypes, note_types, plain_type
from encserve_cli.job.sources import csv_of, json_or_error, text_of
from encserve_cli.job.types import InputKind, ReadOptions

_BLOCK_BYTES = 16 * 1024 * 1024
_LINES = 4096  # looked at at a time


def measure(file: DataFile, options: ReadOptions, kept: KeptTypes) -> Iterator[Sizes]:
    """The sizes of all rows of a file, in order; tells `kept` of its columns."""
    if options.input_kind == "vectors" and file.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{file.name}: vectors are read from .jsonl and .parquet files")
    if file.suffix == ".parquet":
        return _parquet(file, options, kept)
    if file.suffix in (".csv", ".tsv"):
        return _csv(file, options, kept)
    if file.suffix == ".txt" and (options.column is not None or options.keep):
        raise no_column(file, "--keep" if options.keep else "--column")
    return _lines(file, options, kept)


def _parquet(file: DataFile, options: ReadOptions, kept: KeptTypes) -> Iterator[Sizes]:
    with open_parquet(file) as opened:
        name = parquet_column(file, opened, options.column, options.input_kind)
        if twice := {it for it in opened.schema_arrow.names if opened.schema_arrow.names.count(it) > 1}:
            raise ValueError(f"{file.name}: has more than one column {min(twice)!r}; rename one")
        kept.add_columns(file, {it.name: str(plain_type(it.type)) for it in opened.schema_arrow}, name)
        for batch in opened.iter_batches(batch_rows(opened), columns=[name]):
            yield _sizes_of_column(batch.column(name), options.input_kind)


def _sizes_of_column(column: Any, kind: InputKind) -> Sizes:
    if is_text(column.type):
        return sizes_of_text(kind, _counts(pc.binary_length(column.cast(pa.large_string()))))
    rows = _counts(pc.list_value_length(column))  # or ids
    if kind == "ids":
        return Sizes(rows * 8, rows, np.zeros_like(rows))
    widths = _counts(pc.list_value_length(pc.list_flatten(column)))  # (all rows' vectors,)
    before = np.concatenate([[0], np.cumsum(widths)])
    ends = np.cumsum(rows)
    return Sizes((before[ends] - before[ends - rows]) * 4, rows, np.zeros_like(rows))


def _counts(column: Any) -> Counts:
    """(rows,), where null counts as 0."""
    return np.asarray(pc.fill_null(column, 0).to_numpy(zero_copy_only=False), np.int64)


def _lines(file: DataFile, options: ReadOptions, kept: KeptTypes) -> Iterator[Sizes]:
    with open_stream(file) as stream:
        lines, offset = byte_lines(stream)
        found = _line_lengths(lines) if not options.keep else _json_lengths(file, lines, options.keep, kept)
        for lengths in found:  # with the line feed
            beside = None if file.is_in_order else lengths
            yield sizes_of_text(options.input_kind, np.maximum(lengths - 1, 0), beside, offset)
            offset += int(lengths.sum())


def _line_lengths(stream: io.BufferedReader) -> Iterator[Counts]:
    """The bytes of each line with its line feed, which the last one need not have."""
    begun = 0  # of a line whose end is in a later block
    while block := stream.read(_BLOCK_BYTES):
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
        if len(ends):
            lengths = np.diff(ends, prepend=0)
            lengths[0] += begun
            begun = 0
            yield lengths
        begun += len(block) - (int(ends[-1]) if len(ends) else 0)
    if begun:
        yield np.array([begun])


def _json_lengths(file: DataFile, lines: Iterable[bytes], keep: Sequence[str], kept: KeptTypes) -> Iterator[Counts]:
    """The same of a .jsonl file, whose values are looked at for their types."""
    seen: dict[str, set[str]] = {name: set() for name in keep}
    found = iter(lines)
    rows = 0
    while some := list(itertools.islice(found, _LINES)):
        note_types(map(json_or_error, map(text_of, some)), seen)
        rows += len(some)
        yield np.array([len(it) for it in some])
    if rows:
        kept.add_fields(file, seen)


def _csv(file: DataFile, options: ReadOptions, kept: KeptTypes) -> Iterator[Sizes]:
    with open_stream(file) as stream:
        names, place, rows = csv_of(file, byte_lines(stream)[0], options.column)
        if names:
            kept.add_columns(file, dict.fromkeys(names, str(pa.string())), names[place])
        while some := list(itertools.islice(rows, _LINES)):
            # A record of too few fields has no input, so its size is of no matter.
            values = (row[place] if place < len(row) else "" for _, row in some)
            lengths = [len(it) if it.isascii() else len(it.encode(errors="surrogateescape")) for it in values]
            yield sizes_of_text(options.input_kind, np.array(lengths))
