"""Encodes the inputs of `encode` and `embed` without a job: prints the outputs, or writes them to one file."""

import functools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict
from pathlib import Path

import click

from encserve_cli import render
from encserve_cli.files.command import STDOUT, Printing, Sources
from encserve_cli.files.encoding import blocks_of, encode_in_order, refused
from encserve_cli.files.reading import Sent
from encserve_cli.files.records import records
from encserve_cli.files.writing import writing
from encserve_cli.job.types import BatchProgress, Encoder, ignore_batch
from encserve_cli.progress import OnProgress, ProgressCounter, shown_progress
from encserve_cli.shared import ids_of
from encserve_client import EncodeResult

# All results that are printed are in memory at the same time.
_MOST_PRINTED = 1000


def deliver(encoder: Encoder, sources: Sources, printing: Printing, as_json: bool, stop: Callable[[], object]) -> None:
    """Encode all inputs, and print the vectors or write them to a file.

    After an error or Ctrl-C, this function calls `stop`, which ends the running calls of the encoder.

    Raises:
        ValueError: An input cannot be read or is refused, there are no inputs, or there are too many to print. Or this
            kind of file cannot hold the vectors.
        OSError: A file cannot be read or written.
        EncserveError, RuntimeError: The encoder fails for every input.
    """
    if printing.output is not None:
        _save(encoder, sources, printing.output, as_json, stop)
        return
    inputs = sources.read_few(_MOST_PRINTED, "--output FILE takes any number")
    result = _encode(encoder, ignore_batch, inputs)
    if as_json:
        sequences = [{it.column: it.value} | its for it, its in zip(inputs, records(result), strict=True)]
        body = {"kind": result.outputs[0].kind, "timings": asdict(result.timings), "sequences": sequences}
        click.echo(json.dumps(ids_of(result) | body, ensure_ascii=False))
    else:
        render.print_made([it.text for it in inputs], result, printing.max_rows)


def _encode(encoder: Encoder, on_batch: BatchProgress, inputs: Sequence[Sent]) -> EncodeResult:
    """Return the outputs. Raise ValueError for the first refused input."""
    encoded = encoder.encode([it.value for it in inputs], on_batch)
    for index, error in sorted(encoded.refused.items()):
        raise refused(inputs[index], error) from error
    assert encoded.result is not None  # noqa: S101 - there are inputs, and none was refused
    return encoded.result


def _save(encoder: Encoder, sources: Sources, path: Path, as_json: bool, stop: Callable[[], object]) -> None:
    """Write the vectors to a file block by block, and print a summary of the file."""
    inputs = rows = 0
    result: EncodeResult | None = None
    with ExitStack() as stack:
        writer = stack.enter_context(writing(path))  # before the inputs are read, because the path may be refused
        total = None if path == STDOUT else sources.count()
        counter = ProgressCounter(total, stack.enter_context(_shown_progress(sources, path, total)))
        counter.report()
        encode = functools.partial(_encode, encoder, counter.count_batch)
        results = stack.enter_context(closing(encode_in_order(encode, blocks_of(sources.read()), stop)))
        for block, result in results:
            writer.write(block, result)
            inputs += len(block)
            rows += sum(len(it.rows) for it in result.outputs[0].blocks)
        if result is None:
            raise sources.none_found
        seconds = counter.report().seconds
    if path == STDOUT:
        return
    if as_json:
        body = {"kind": result.outputs[0].kind, "output": str(path), "inputs": inputs, "rows": rows, "seconds": seconds}
        click.echo(json.dumps(ids_of(result) | body))
    else:
        render.print_saved(path, result, inputs, rows, seconds)


def _shown_progress(sources: Sources, path: Path, total: int | None) -> AbstractContextManager[OnProgress]:
    """Show the progress, except with `STDOUT`: the lines of the output may go to the same terminal."""
    if path == STDOUT:
        return nullcontext(lambda _: None)
    return shown_progress(total, "inputs" if sources.ids else "texts")
