"""`encserve bench`: load a server, and print what it stood."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from encserve_cli import bench_json, bench_render
from encserve_cli.load.calls import Request
from encserve_cli.load.lengths import read_lengths, real_text_lengths
from encserve_cli.load.loops import closed_loop, open_loop
from encserve_cli.load.samples import LoadResult
from encserve_cli.load.senders import WRONG_ANSWER, Connection
from encserve_cli.load.workload import Workload, workload_of_lengths, workload_of_texts
from encserve_cli.shared import calls_server, names_model
from encserve_client import DType, EncoderClient, ModelInfo, Pooling

_METRICS_PORT = 9464
_MOST_SECONDS = 600
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked for; written into the JSON as it stands."""

    target: str
    concurrency: tuple[int, ...]
    rate_per_second: tuple[float, ...]
    seconds: float
    warmup_seconds: float
    timeout_seconds: float
    lengths: str | None
    texts: str | None
    sequences_per_call: int
    stream: bool
    pooling: Pooling | None
    dtype: DType
    processes: int
    max_outstanding: int
    seed: int
    metrics_url: str | None


@click.command()
@click.option("--concurrency", type=click.IntRange(1, 4096), multiple=True, help="Callers, each with one call out.")
@click.option(
    "--rate", type=click.FloatRange(0.01, 100_000), multiple=True, help="Calls a second, at random times instead."
)
@click.option(
    "--seconds", type=click.FloatRange(0.1, _MOST_SECONDS), default=10.0, show_default=True, help="Time to measure."
)
@click.option(
    "--warmup-seconds", type=click.FloatRange(0, 60), default=2.0, show_default=True, help="Load before that."
)
@click.option("--lengths", type=_FILE, help="JSON: a list of lengths, or a histogram. Default: of real texts.")
@click.option("--texts", type=_FILE, help="Send the lines of this file as text instead of random ids.")
@click.option("--sequences-per-call", type=click.IntRange(1), default=1, show_default=True, help="Inputs of a call.")
@click.option("--stream", is_flag=True, help="Call by EncodeStream, 64 calls to a stream.")
@click.option("--pooling", type=click.Choice(["model", "mean", "cls", "max"]), help="Default: one row per token.")
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Generators to share it.")
@click.option(
    "--max-outstanding", type=click.IntRange(1, 65536), default=1024, show_default=True, help="With --rate: calls out."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of ids and arrival times.")
@click.option("--metrics-url", help="The server's metrics page. Default: port 9464 of the target's host.")
@click.option("--output-json", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON to this file too.")
@names_model
@calls_server
def bench(
    client: EncoderClient,
    concurrency: tuple[int, ...],
    rate: tuple[float, ...],
    seconds: float,
    warmup_seconds: float,
    lengths: Path | None,
    texts: Path | None,
    sequences_per_call: int,
    stream: bool,
    pooling: Pooling | None,
    dtype: DType,
    processes: int,
    max_outstanding: int,
    seed: int,
    metrics_url: str | None,
    output_json: Path | None,
    model: str | None,
    model_version: str | None,
    as_json: bool,
) -> None:
    """Load the server and print what it stood.

    --concurrency and --rate may be given several times, one row each; without either there are 64 callers. With --rate
    latencies count from when a call was due, whether or not it could be sent then. Ctrl-C ends early. The exit status
    is 1 if an answer was wrong, or none came.
    """
    if concurrency and rate:
        raise click.UsageError("give either --concurrency or --rate")
    if lengths is not None and texts is not None:
        raise click.UsageError("give either --lengths or --texts")
    started_at = datetime.now(UTC)
    connect = click.get_current_context().obj
    (target,), keywords = connect.args, connect.keywords
    settings = Settings(
        target=target,
        concurrency=concurrency or (() if rate else (64,)),
        rate_per_second=rate,
        seconds=seconds,
        warmup_seconds=warmup_seconds,
        timeout_seconds=keywords["timeout_seconds"],
        lengths=None if lengths is None else str(lengths),
        texts=None if texts is None else str(texts),
        sequences_per_call=sequences_per_call,
        stream=stream,
        pooling=pooling,
        dtype=dtype,
        processes=processes,
        max_outstanding=max_outstanding,
        seed=seed,
        metrics_url=metrics_url or default_metrics_url(target),
    )
    info = client.model(model, model_version)
    workload = _workload(settings, info, model, model_version)
    connection = Connection(target=target, tls=keywords["tls"], token=keywords["api_key"])
    results = _run_all(settings, connection, workload)
    body = json.dumps(bench_json.document(settings, started_at, info, workload, results), ensure_ascii=False)
    if output_json is not None:
        output_json.write_text(body + "\n", encoding="utf-8", newline="\n")
    if as_json:
        click.echo(body)
    else:
        bench_render.print_bench(settings, info, workload, results)
    if any(WRONG_ANSWER in it.errors or not (it.calls or it.interrupted) for it in results):
        click.get_current_context().exit(1)


def default_metrics_url(target: str) -> str | None:
    """Where a server that listens there has its metrics unless told otherwise; None where the target names no host."""
    host, colon, port = target.rpartition("/")[2].rpartition(":")
    if target.startswith("unix:") or not (host and colon and port.isdigit()):
        return None
    return f"http://{host}:{_METRICS_PORT}/metrics"


def _workload(settings: Settings, info: ModelInfo, model: str | None, model_version: str | None) -> Workload:
    request = Request(
        sequences_per_call=settings.sequences_per_call,
        pooling=settings.pooling,
        dtype=settings.dtype,
        truncate=settings.texts is not None,  # of random ids a model has as many as fit; a text may be longer
        model=model,
        version=model_version,
    )
    if settings.texts is not None:
        lines = Path(settings.texts).read_text(encoding="utf-8").splitlines()
        texts = [it for it in lines if it.strip()]
        return workload_of_texts(texts, settings.texts, info, request, settings.seed)
    if settings.lengths is not None:
        histogram, source = read_lengths(Path(settings.lengths)), settings.lengths
    else:
        histogram, source = real_text_lengths(), "real English texts"
    return workload_of_lengths(histogram, source, info, request, settings.seed)


def _run_all(settings: Settings, connection: Connection, workload: Workload) -> list[LoadResult]:
    """One result for each concurrency or rate; fewer after Ctrl-C. Raises click.Abort if there is none."""
    common: dict[str, Any] = {
        "seconds": settings.seconds,
        "warmup_seconds": settings.warmup_seconds,
        "timeout_seconds": settings.timeout_seconds,
        "stream": settings.stream,
        "processes": settings.processes,
        "metrics_url": settings.metrics_url,
    }
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    results: list[LoadResult] = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def bar(name: str, value: float) -> Callable[[float], None]:
            task = progress.add_task(f"{name} {value:g}", total=1.0)
            return lambda share: progress.update(task, completed=share)

        try:
            for callers in settings.concurrency:
                on_progress = bar("callers", callers)
                results.append(
                    closed_loop(connection, workload.calls, concurrency=callers, on_progress=on_progress, **common)
                )
                if results[-1].interrupted:
                    break
            for rate in settings.rate_per_second:
                results.append(
                    open_loop(
                        connection,
                        workload.calls,
                        rate_per_second=rate,
                        max_outstanding=settings.max_outstanding,
                        seed=settings.seed,
                        on_progress=bar("calls/s", rate),
                        **common,
                    )
                )
                if results[-1].interrupted:
                    break
        except KeyboardInterrupt:  # between two runs, or the second one
            if not results:
                raise click.Abort from None
    return results
