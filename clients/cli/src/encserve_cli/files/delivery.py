"""Encodes the inputs of `encode` and `embed`, and prints the outputs or writes them to a file."""

import functools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from encserve_cli import render
from encserve_cli.files.command import STDOUT, Printing, Sources
from encserve_cli.files.encoding import encode_all, encode_block, with_sent_ids
from encserve_cli.files.records import records
from encserve_cli.progress import Count, OnProgress, ProgressCounter, counting, shown_progress
from encserve_cli.shared import ids_of
from encserve_client import EncoderClient, EncodeResult, Output, OutputKind

Run = Callable[[list[Any], Count], EncodeResult]

# All results that are printed are in memory at the same time.
_MOST_PRINTED = 1000


def run_of(client: EncoderClient, kind: OutputKind, sources: Sources, printing: Printing, **options: Any) -> Run:
    """Return a function that encodes inputs. The function raises the error of the first failed input.

    `options` are other arguments of `client.run`.
    """
    has_tokens = kind in ("tokens", "multi_vector", "sparse")

    def run(inputs: list[Any], count: Count) -> EncodeResult:
        result = client.run(
            inputs,
            outputs=[Output(kind, dimensions=printing.dimensions)],
            dtype=printing.dtype,
            include_token_strings=has_tokens and not sources.ids and printing.names_tokens,
            progress=counting(count),
            **options,
        )
        for error in result.errors.values():
            raise error
        return result

    return run


def deliver(run: Run, sources: Sources, printing: Printing, as_json: bool, stop: Callable[[], object]) -> None:
    """Encode all inputs, and print the vectors or write them to a file.

    After an error or Ctrl-C, this function calls `stop`, which ends the running calls of `run`.

    Raises:
        ValueError: An input cannot be read or is refused, there are no inputs, or there are too many to print. Or this
            kind of file cannot hold the vectors.
        OSError: A file cannot be read or written.
        EncserveError: `run` failed for another reason.
    """
    if sources.ids:
        run = functools.partial(_with_ids, run)
    if printing.output is not None:
        _save(run, sources, printing.output, as_json, stop)
        return
    inputs = sources.read_few(_MOST_PRINTED, "--output FILE takes any number")
    result = encode_block(lambda it: run(it, lambda _: None), inputs)
    if as_json:
        sequences = [{it.column: it.value} | its for it, its in zip(inputs, records(result), strict=True)]
        body = {"kind": result.outputs[0].kind, "timings": asdict(result.timings), "sequences": sequences}
        click.echo(json.dumps(ids_of(result) | body, ensure_ascii=False))
    else:
        render.print_made([it.text for it in inputs], result, printing.max_rows)


def _save(run: Run, sources: Sources, path: Path, as_json: bool, stop: Callable[[], object]) -> None:
    """Write the vectors to a file block by block, and print a summary of the file."""
    from encserve_cli.files.writing import writing  # imports pyarrow, which is slow

    inputs = rows = 0
    last: EncodeResult | None = None
    total = None if path == STDOUT else sources.count()
    with writing(path) as writer, _shown_progress(sources, path, total) as on_progress:
        counter = ProgressCounter(total, on_progress)
        counter.report()
        for block, result in encode_all(lambda it: run(it, counter.count_batch), sources.read(), stop):
            if last is not None and result.fingerprint != last.fingerprint:
                raise ValueError(
                    f"the model was replaced meanwhile: {last.fingerprint} by {result.fingerprint}; nothing was "
                    "written. Begin again, or name a --model-version"
                )
            writer.write(block, result)
            last = result
            inputs += len(block)
            rows += sum(len(block.rows) for block in result.outputs[0].blocks)
        if last is None:
            raise sources.none_found
    if path == STDOUT:
        return
    seconds = counter.seconds
    if as_json:
        body = {"kind": last.outputs[0].kind, "output": str(path), "inputs": inputs, "rows": rows, "seconds": seconds}
        click.echo(json.dumps(ids_of(last) | body))
    else:
        render.print_saved(path, last, inputs, rows, seconds)


def _with_ids(run: Run, inputs: list[list[int]], count: Count) -> EncodeResult:
    return with_sent_ids(run(inputs, count), inputs)


def _shown_progress(sources: Sources, path: Path, total: int | None) -> AbstractContextManager[OnProgress]:
    """Show the progress, except with `STDOUT`: the lines of the output may go to the same terminal."""
    if path == STDOUT:
        return nullcontext(lambda _: None)
    return shown_progress(total, "inputs" if sources.ids else "texts")
