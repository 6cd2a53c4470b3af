"""Runs the loads of `encserve bench`, and prints a table or JSON. docs/how-to/load-test.md describes both."""

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Any

import click

from encserve import __version__
from encserve_cli.load.calls import Request
from encserve_cli.load.generator import run_load
from encserve_cli.load.lengths import read_lengths, real_text_lengths
from encserve_cli.load.results import Load, LoadResult, percentile
from encserve_cli.load.workload import Workload, workload_of_lengths, workload_of_texts
from encserve_client import AsyncEncoderClient, EncoderClient, ModelInfo

_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_WIDTHS = (14, 9, 9, 10, *(7 for _ in _PERCENTILES), 8)
_MODEL_FIELDS = ("name", "version", "fingerprint", "provider", "precision")
_BUSY_CPU_SHARE = 0.8  # above this share of one CPU, the load generator may be slower than the server


def run(
    client: EncoderClient,
    open_client: Callable[[], AsyncEncoderClient],
    loads: Sequence[Load],
    request: Request,
    lengths: Path | None,
    texts: Path | None,
    *,
    as_json: bool,
) -> list[LoadResult]:
    """Run each load, and print the results. After Ctrl-C, the remaining loads do not run.

    Raises:
        EncserveError: The server is not reachable, or refuses the model or the texts.
        ValueError: The file of lengths or texts is not usable, the calls exceed a limit of the server, or the model
            has no ordinary tokens for random texts.
        OSError: The file is not readable.
        KeyboardInterrupt: Ctrl-C was pressed before the first load.
    """
    started_at = datetime.now(UTC)
    info = client.model(request.model, request.version)
    workload = _workload(client, info, request, lengths, texts)
    if not as_json:
        for line in (*_heading(info, workload, request, loads[0]), "", _row("", *_COLUMNS)):
            click.echo(line.rstrip())
    results: list[LoadResult] = []
    for load in loads:
        try:
            results.append(_run_one(open_client, workload, load))
        except KeyboardInterrupt:
            if not results:
                raise
            break
        if not as_json:
            click.echo(_result_row(results[-1]))
        if results[-1].interrupted:
            break
    if as_json:
        click.echo(dumps(_document(client.target, started_at, info, workload, request, results), ensure_ascii=False))
    else:
        for note in [note for result in results for note in _notes(result)]:
            click.echo(note)
    return results


def _workload(
    client: EncoderClient, info: ModelInfo, request: Request, lengths: Path | None, texts: Path | None
) -> Workload:
    if texts is not None:
        return workload_of_texts(texts, client, info, request)
    if lengths is not None:
        return workload_of_lengths(read_lengths(lengths), str(lengths), info, request)
    return workload_of_lengths(real_text_lengths(), "real English texts", info, request)


def _run_one(open_client: Callable[[], AsyncEncoderClient], workload: Workload, load: Load) -> LoadResult:
    """Run a load. If stderr is a terminal, show the name of the load."""
    message = f"{_name(load)}: {load.warmup_seconds + load.seconds:g} s ..." if sys.stderr.isatty() else ""
    click.echo(message, nl=False, err=True)
    try:
        return run_load(open_client, workload.calls, load)
    finally:
        click.echo(f"\r{' ' * len(message)}\r" if message else "", nl=False, err=True)


# The table.

_COLUMNS = ("calls/s", "seq/s", "tokens/s", *(f"p{percent:g}" for percent in _PERCENTILES), "errors")


def _row(*cells: str) -> str:
    return cells[0].ljust(_WIDTHS[0]) + "".join(
        cell.rjust(width) for cell, width in zip(cells[1:], _WIDTHS[1:], strict=True)
    )


def _result_row(result: LoadResult) -> str:
    return _row(
        _name(result.load),
        f"{result.calls_per_second:,.1f}",
        f"{result.sequences_per_second:,.1f}",
        f"{result.tokens_per_second:,.0f}",
        *(_ms(percentile(result.latency_seconds, percent)) for percent in _PERCENTILES),
        f"{sum(result.errors.values()):,}",
    )


def _heading(info: ModelInfo, workload: Workload, request: Request, load: Load) -> list[str]:
    kind = {"texts": "lines", "embeddings": "random vectors, lengths"}.get(workload.kind, "random ids, lengths")
    inputs = "1 sequence" if request.sequences_per_call == 1 else f"{request.sequences_per_call} sequences"
    vectors = f"{request.pooling} pooling" if request.pooling else "one vector per token"
    lines = [
        f"{info.name}, version {info.version}, {info.precision}, {info.provider}",
        f"{kind} of {workload.source}: {workload.mean_tokens:.1f} tokens on average, {workload.longest_tokens} at most",
        f"{inputs} a call, {vectors}, {request.dtype}",
        f"{load.seconds:g} s a row after {load.warmup_seconds:g} s of warm-up; latencies in ms",
    ]
    if workload.cut_sequences:
        lines.insert(2, f"{workload.cut_sequences:,} sequences were cut to {info.max_sequence_tokens} tokens")
    return lines


def _notes(result: LoadResult) -> list[str]:
    name = _name(result.load)
    notes = [
        f"{name}: {count:,} x {status}: {result.error_examples[status]}" for status, count in result.errors.items()
    ]
    if len(result.lateness_seconds):
        p99, longest = (_ms(percentile(result.lateness_seconds, percent)) for percent in (99, 100))
        notes.append(f"{name}: the load generator sent calls late, by {p99} ms (p99) and {longest} ms at most")
    if result.interrupted:
        notes.append(f"{name}: stopped after {result.seconds:.1f} s")
    if result.generator_cpu_seconds > _BUSY_CPU_SHARE * result.seconds > 0:
        used = result.generator_cpu_seconds / result.seconds
        notes.append(
            f"{name}: the load generator used {used:.2f} of a CPU, so the server may be faster than measured. Send "
            "more sequences a call, or run several `encserve bench` at the same time."
        )
    return notes


def _name(load: Load) -> str:
    if load.rate_per_second is not None:
        return f"{load.rate_per_second:g} calls/s"
    return f"{load.concurrency} caller{'' if load.concurrency == 1 else 's'}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f}" if seconds < 1 else f"{seconds * 1000:.0f}"


# The JSON.


def _document(
    target: str,
    started_at: datetime,
    info: ModelInfo,
    workload: Workload,
    request: Request,
    results: Sequence[LoadResult],
) -> dict[str, Any]:
    return {
        "started_at": started_at.isoformat(timespec="seconds"),
        "encserve_cli_version": __version__,
        "target": target,
        "model": {name: getattr(info, name) for name in _MODEL_FIELDS},
        "workload": {
            "kind": workload.kind,
            "source": workload.source,
            "mean_tokens": workload.mean_tokens,
            "longest_tokens": workload.longest_tokens,
            "cut_sequences": workload.cut_sequences,
            "sequences_per_call": request.sequences_per_call,
            "pooling": request.pooling,
            "dtype": request.dtype,
        },
        "runs": [_run_document(result) for result in results],
    }


def _run_document(result: LoadResult) -> dict[str, Any]:
    load, latency, lateness = result.load, result.latency_seconds, result.lateness_seconds
    percentiles = {f"p{percent:g}".replace(".", "_"): percentile(latency, percent) for percent in _PERCENTILES}
    return {
        "concurrency": load.concurrency,
        "rate_per_second": load.rate_per_second,
        "warmup_seconds": load.warmup_seconds,
        "timeout_seconds": load.timeout_seconds,
        "seconds": result.seconds,
        "interrupted": result.interrupted,
        "calls": result.calls,
        "sequences": result.sequences,
        "tokens": result.tokens,
        "calls_per_second": result.calls_per_second,
        "sequences_per_second": result.sequences_per_second,
        "tokens_per_second": result.tokens_per_second,
        "latency_seconds": {
            "samples": len(latency),
            "mean": float(latency.mean()) if len(latency) else None,
            **percentiles,
            "max": percentile(latency, 100),
        },
        "errors": [
            {"status": status, "count": count, "example": result.error_examples[status]}
            for status, count in result.errors.items()
        ],
        "lateness_seconds": {"p99": percentile(lateness, 99), "max": percentile(lateness, 100)},
        "generator_cpu_seconds": result.generator_cpu_seconds,
    }
