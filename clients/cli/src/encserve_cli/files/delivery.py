"""Encodes the inputs of `encode` and `embed`, and prints the outputs or writes them to a file."""

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from encserve_cli import render
from encserve_cli.files.command import STDOUT, Printing, Sources
from encserve_cli.files.encoding import Run, encode_all, encode_block, with_sent_ids
from encserve_cli.files.records import records
from encserve_cli.shared import ids_of
from encserve_client import EncoderClient, EncodeResult, Output, OutputKind

# Results that are printed are all held in memory.
_MOST_PRINTED = 1000


def run_of(
    client: EncoderClient, kind: OutputKind, sources: Sources, printing: Printing, **options: Any
) -> Run[EncodeResult]:
    """Return a function that encodes some inputs, and raises the error of the first failed input.

    `options` are further arguments of `client.run`.
    """
    has_tokens = kind in ("tokens", "multi_vector", "sparse")

    def run(inputs: list[Any]) -> EncodeResult:
        result = client.run(
            inputs,
            outputs=[Output(kind, dimensions=printing.dimensions)],
            dtype=printing.dtype,
            include_token_strings=has_tokens and not sources.ids and printing.names_tokens,
            **options,
        )
        for error in result.errors.values():
            raise error
        return result

    return run


def deliver(
    run: Run[EncodeResult], sources: Sources, printing: Printing, as_json: bool, stop: Callable[[], object]
) -> None:
    """Encode all inputs, and print the vectors or write them to a file.

    After an error or Ctrl-C, `stop` makes the running calls of `run` end soon.

    Raises:
        ValueError: An input cannot be read or is refused, there are no inputs or too many to print, or the kind of
            file cannot hold the vectors.
        OSError: A file cannot be read or written.
        EncserveError: `run` failed for another reason.
    """
    if sources.ids:
        run = functools.partial(_with_ids, run)
    if printing.output is not None:
        _save(run, sources, printing.output, as_json, stop)
        return
    inputs = sources.read_few(_MOST_PRINTED, "--output FILE takes any number")
    result = encode_block(run, inputs)
    if as_json:
        sequences = [{it.column: it.value} | its for it, its in zip(inputs, records(result), strict=True)]
        body = {"kind": result.outputs[0].kind, "timings": asdict(result.timings), "sequences": sequences}
        click.echo(json.dumps(ids_of(result) | body, ensure_ascii=False))
    else:
        render.print_made([it.text for it in inputs], result, printing.max_rows)


def _save(run: Run[EncodeResult], sources: Sources, path: Path, as_json: bool, stop: Callable[[], object]) -> None:
    """Write the vectors to a file block by block, and print a summary of the file."""
    from encserve_cli.files.writing import writing  # which imports pyarrow

    began = time.monotonic()
    inputs = rows = 0
    last: EncodeResult | None = None
    with writing(path) as writer, _progress(sources) as advance:
        for block, result in encode_all(run, sources.read(), stop):
            if last is not None and result.fingerprint != last.fingerprint:
                raise ValueError(
                    f"the model was replaced meanwhile: {last.fingerprint} by {result.fingerprint}; nothing was "
                    "written. Begin again, or name a --model-version"
                )
            writer.write(block, result)
            last = result
            inputs += len(block)
            rows += sum(len(block.rows) for block in result.outputs[0].blocks)
            advance(len(block))
        if last is None:
            raise sources.none_found
    if path == STDOUT:
        return
    seconds = time.monotonic() - began
    if as_json:
        body = {"kind": last.outputs[0].kind, "output": str(path), "inputs": inputs, "rows": rows, "seconds": seconds}
        click.echo(json.dumps(ids_of(last) | body))
    else:
        render.print_saved(path, last, inputs, rows, seconds)


def _with_ids(run: Run[EncodeResult], inputs: list[list[int]]) -> EncodeResult:
    return with_sent_ids(run(inputs), inputs)


@contextmanager
def _progress(sources: Sources) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal. The function that is given adds finished inputs to the bar."""
    console = Console(stderr=True)
    columns = (MofNCompleteColumn(), TextColumn("inputs"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=sources.count() if console.is_terminal else None)
        yield lambda count: progress.advance(task, count)
