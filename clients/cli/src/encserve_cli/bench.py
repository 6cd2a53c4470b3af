"""The options of `encserve bench`. The slow imports are in `bench_run`, so that the help is fast."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from encserve_cli.connection import connection_options
from encserve_cli.interrupts import Interrupts
from encserve_cli.shared import SectionCommand, model_options, rare_option, with_client

if TYPE_CHECKING:
    from encserve_client import DType, EncoderClient, Pooling

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(cls=SectionCommand)
@partial(connection_options, has_input=False)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 4096),
    multiple=True,
    metavar="N",
    help="N callers. Each caller sends the next call after a reply. Default: 64.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0.01, 10_000),
    multiple=True,
    metavar="N",
    help="N calls a second at random times, whether or not earlier calls have replies.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 600),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="The duration of the measurement for each row.",
)
@rare_option(
    "--warmup-seconds",
    type=click.FloatRange(0, 60),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="The duration of the warm-up, before the measurement.",
)
@click.option(
    "--lengths",
    type=_FILE,
    help="A JSON file with a list of lengths in tokens, or with a histogram. Default: lengths of real texts.",
)
@click.option("--texts", type=_FILE, help="Send the lines of this file instead of random token ids.")
@click.option(
    "--sequences-per-call",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Inputs in each call.",
)
@click.option(
    "--pooling",
    type=click.Choice(["model", "mean", "cls", "max"]),
    help="Pool token vectors into one vector. Default: one vector per token.",
)
@rare_option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="The type of the numbers.",
)
@model_options
@with_client
def bench(
    client: "EncoderClient",
    concurrency: tuple[int, ...],
    rate: tuple[float, ...],
    seconds: float,
    warmup_seconds: float,
    lengths: Path | None,
    texts: Path | None,
    sequences_per_call: int,
    pooling: "Pooling | None",
    dtype: "DType",
    model: str | None,
    model_version: str | None,
    as_json: bool,
) -> None:
    """Send calls to a server, and report rates and latencies.

    --concurrency and --rate may be repeated. The report has a row for each value. With --rate, the latency of a call is
    measured from the time when the call was due, even if the call was sent late. Ctrl-C ends the load at once. The
    report then has the calls that ended before. The exit status is 1 if a row has no answered call.
    """
    from encserve_cli import bench_run
    from encserve_cli.load.calls import Request
    from encserve_cli.load.results import Load

    if lengths is not None and texts is not None:
        raise click.UsageError("--lengths and --texts do not go together; leave out one option")
    server = click.get_current_context().obj
    shared = {"seconds": seconds, "warmup_seconds": warmup_seconds, "timeout_seconds": server.timeout_seconds}
    loads = [Load(concurrency=callers, **shared) for callers in concurrency or (() if rate else (64,))]
    loads += [Load(rate_per_second=calls_per_second, **shared) for calls_per_second in rate]
    request = Request(
        sequences_per_call=sequences_per_call, pooling=pooling, dtype=dtype, model=model, version=model_version
    )
    Interrupts.current().leave()  # asyncio ends a load at Ctrl-C
    results = bench_run.run(client, server.async_client, loads, request, lengths, texts, as_json=as_json)
    if not all(result.calls for result in results):
        click.get_current_context().exit(1)
