"""Measures how speed, latency and memory depend on sequence length, batch size, callers, threads and load.

    python bench/scaling.py measure MODEL_REPOSITORY FILE [--only PART ...] [--rounds 3] [--seconds 5]
    python bench/scaling.py draw FILE FOLDER

`measure` starts servers, calls them with the load generator of `encserve bench`, and writes all numbers to FILE. FILE
is JSON. A part is a list of points, for example one point for each number of callers. The entry `runs` has the commit,
date, command and machine of each part. Each round measures every point once, in random order. Parts of an existing FILE
stay, unless they are measured again. `draw` makes the plots of docs/explanation/performance.md.
"""

import asyncio
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.command import console
from harness.load import CALLERS, call_server
from harness.machine import describe_run, write_report
from harness.meter import Meter
from real_server import RealServer, real_server

from encserve_cli.load.calls import Call, Request, random_calls
from encserve_cli.load.lengths import real_text_lengths, sample_lengths
from encserve_cli.load.results import Load, LoadResult, percentile
from encserve_client import EncoderClient
from encserve_server.system.cpus import usable_cpus

SEQUENCE_TOKENS = (8, 16, 32, 64, 128, 256)  # 256 is the limit of the demo's model
BATCH_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
CALLER_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # 1 means the calls/s of 64 callers in the same round
OVERLOAD = 3.0
SEQUENCES_PER_CALL, CALL_TOKENS = (1, 4, 16, 64), 20
MEMORY_REQUESTS = (20_000, 200_000)
PAUSE_SECONDS = 0.3
TAIL_SECONDS = 10.0  # the least duration of a p99 measurement, because a p99 needs some hundred calls
# The mean tokens of a call, and the lowest expected tokens/s of a server. In the warm-up, a caller's first call may
# wait for the first calls of all other callers. The warm-up's duration is computed from these two numbers.
MEAN_TOKENS, LEAST_TOKENS_PER_SECOND = 43, 2000


@dataclass
class Bench:
    """The settings of all parts.

    Attributes:
        model_repository: The folder of the models.
        model: NAME or NAME@VERSION, or None for the first model.
        rounds: The number of measurements of each point.
        seconds: The duration of each measurement.
        seed: The seed for the order of points, and for the times at which calls start.
    """

    model_repository: Path
    model: str | None
    rounds: int
    seconds: float
    seed: int
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        """Create the generator of the random order from the seed."""
        self._random = random.Random(self.seed)

    @contextmanager
    def server(self, *flags: str) -> Iterator[RealServer]:
        """Run a server on the CPU with additional flags."""
        only = ("--model", self.model) if self.model else ()
        with real_server(self.model_repository, "--device", "cpu", *only, *flags) as server:
            yield server

    def calls(self, server: RealServer, lengths: Sequence[int] | None = None) -> list[Call]:
        """Make calls of one sequence each. By default, the sequences have the token counts of real texts."""
        with EncoderClient(server.target) as client:
            info = client.model()
        chosen = sample_lengths(real_text_lengths(), 4096, seed=self.seed) if lengths is None else lengths
        return random_calls([min(length, info.max_sequence_tokens) for length in chosen], info)

    def interleaved(self, points: Sequence[Any], measure: Callable[[Any, int], dict[str, Any]]) -> list[dict[str, Any]]:
        """Call `measure(point, round number)` for every point once a round, in random order. Return the results."""
        found = []
        for number in range(self.rounds):
            for point in self._random.sample(list(points), len(points)):
                time.sleep(PAUSE_SECONDS)
                found.append({"round": number, **measure(point, number)})
                console.print("  " + ", ".join(f"{name} {_brief(value)}" for name, value in found[-1].items()))
        return found

    def closed(self, server: RealServer, calls: Sequence[Call], callers: int) -> LoadResult:
        """Run callers that send the next call after each reply. In the warm-up, each caller has time for one call."""
        warmup = max(1.0, 1.2 * callers * MEAN_TOKENS / LEAST_TOKENS_PER_SECOND)
        return call_server(server.target, calls, Load(concurrency=callers, seconds=self.seconds, warmup_seconds=warmup))

    def opened(self, server: RealServer, calls: Sequence[Call], rate_per_second: float, number: int) -> LoadResult:
        """Start calls at random times, independently of replies. The times depend on the seed and the round."""
        seconds = max(self.seconds, TAIL_SECONDS)
        load = Load(rate_per_second=rate_per_second, seconds=seconds, seed=self.seed + 1000 * number)
        return call_server(server.target, calls, load)


def _brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def by_sequence_tokens(bench: Bench) -> list[dict[str, Any]]:
    """Measure the tokens/s of 64 callers for each length. All sequences of a point have the same length."""
    with bench.server("--tune-batches") as server:
        calls = {length: bench.calls(server, [length] * 64) for length in SEQUENCE_TOKENS}

        def measure(length: int, _: int) -> dict[str, Any]:
            rate = bench.closed(server, calls[length], CALLERS).tokens_per_second
            return {"sequence_tokens": length, "tokens_per_second": rate}

        return bench.interleaved(SEQUENCE_TOKENS, measure)


def by_server_flag(bench: Bench, flag: str, values: Sequence[int]) -> list[dict[str, Any]]:
    """Measure the tokens/s and the p50 of 64 callers for each value of a flag. Each value gets its own server."""
    name = flag.removeprefix("--intra-op-").removeprefix("--").replace("-", "_")
    with ExitStack() as stack:
        servers = {value: stack.enter_context(bench.server(flag, str(value))) for value in values}
        calls = bench.calls(servers[values[0]])

        def measure(value: int, _: int) -> dict[str, Any]:
            result = bench.closed(servers[value], calls, CALLERS)
            p50 = percentile(result.latency_seconds, 50)
            return {name: value, "tokens_per_second": result.tokens_per_second, "p50_seconds": p50}

        return bench.interleaved(values, measure)


def thread_counts(cpus: int) -> list[int]:
    """Return the powers of two that are less than `cpus`, and `cpus` itself."""
    return [2**exponent for exponent in range(cpus.bit_length()) if 2**exponent < cpus] + [cpus]


def by_callers(bench: Bench) -> list[dict[str, Any]]:
    """Measure tokens/s and latency for each number of callers."""
    with bench.server("--tune-batches") as server:
        calls = bench.calls(server)

        def measure(callers: int, _: int) -> dict[str, Any]:
            result = bench.closed(server, calls, callers)
            return {
                "callers": callers,
                "tokens_per_second": result.tokens_per_second,
                "p50_seconds": percentile(result.latency_seconds, 50),
                "p99_seconds": percentile(result.latency_seconds, 99),
                "errors": sum(result.errors.values()),
            }

        return bench.interleaved(CALLER_COUNTS, measure)


def by_load(bench: Bench) -> list[dict[str, Any]]:
    """Measure the latency of calls that start at random times, for each load in `LOADS`.

    A load is the number of calls per second, divided by the calls per second of 64 callers in the same round.
    """
    with bench.server("--tune-batches") as server:
        calls = bench.calls(server)
        saturation: dict[int, float] = {}  # round → calls per second

        def measure(load: float, number: int) -> dict[str, Any]:
            if number not in saturation:
                saturation[number] = bench.closed(server, calls, CALLERS).calls_per_second
            alone = bench.closed(server, calls, 1)
            result = bench.opened(server, calls, load * saturation[number], number)
            return {
                "load": load,
                "rate_per_second": result.load.rate_per_second,
                "p50_seconds": percentile(result.latency_seconds, 50),
                "p99_seconds": percentile(result.latency_seconds, 99),
                "alone_p50_seconds": percentile(alone.latency_seconds, 50),
                "lateness_p99_seconds": percentile(result.lateness_seconds, 99),
                "errors": sum(result.errors.values()),
            }

        return bench.interleaved(LOADS, measure)


def overload(bench: Bench) -> list[dict[str, Any]]:
    """Send three times as many calls per second as 64 callers reach.

    Count the replies, and measure the time until a refusal.
    """
    with bench.server("--tune-batches", "--max-queue-tokens", "8192") as server:
        calls = bench.calls(server)

        def measure(factor: float, number: int) -> dict[str, Any]:
            saturation = bench.closed(server, calls, CALLERS)
            result = bench.opened(server, calls, factor * saturation.calls_per_second, number)
            refused = {name: n for name, n in result.errors.items() if name.startswith("RESOURCE_EXHAUSTED")}
            return {
                "factor": factor,
                "saturation_per_second": saturation.calls_per_second,
                "goodput_share": result.calls_per_second / saturation.calls_per_second,
                # The server may refuse more long calls than short calls, so the share of tokens is measured too.
                "goodput_tokens_share": result.tokens_per_second / saturation.tokens_per_second,
                "refused": sum(refused.values()),
                "failed_p50_seconds": percentile(result.error_latency_seconds, 50),
                "failed_p99_seconds": percentile(result.error_latency_seconds, 99),
                "lateness_p99_seconds": percentile(result.lateness_seconds, 99),
                "generator_cpu_share": result.generator_cpu_seconds / result.seconds,
                "p99_seconds": percentile(result.latency_seconds, 99),
                "errors": {name: n for name, n in result.errors.items() if name not in refused},
            }

        return bench.interleaved([OVERLOAD], measure)


def memory(bench: Bench) -> list[dict[str, Any]]:
    """Measure the resident memory of one server after each number of requests from 64 callers."""
    with bench.server() as server:
        calls = bench.calls(server)
        found: list[dict[str, Any]] = []
        for count in MEMORY_REQUESTS:
            while (done := server.metric("grpc_server_handled_total", grpc_method="Encode", grpc_code="OK")) < count:
                call_server(server.target, calls, Load(concurrency=CALLERS, seconds=10, warmup_seconds=0.5))
            found.append({"round": 0, "requests": int(done), "resident_bytes": server.resident_bytes()})
            console.print(f"  after {int(done):,} requests {found[-1]['resident_bytes'] / 2**20:.0f} MiB")
        return found


@contextmanager
def fake_engine_server() -> Iterator[tuple[str, int]]:
    """Start a server whose engine runs no model. Yield the server's gRPC target, and the port of its metrics."""
    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = spawn.Process(target=_serve_fake_engine, args=(far, Path(folder)), daemon=True)
        process.start()
        far.close()
        try:
            yield near.recv()
        finally:
            process.terminate()
            process.join(timeout=10)


def _serve_fake_engine(pipe: Connection, folder: Path) -> None:
    from fake_server import start_fake_server

    async def serve() -> None:
        queue_tokens = 2 * CALLERS * SEQUENCES_PER_CALL[-1] * CALL_TOKENS
        app = (await start_fake_server(folder, max_queue_tokens=queue_tokens)).app
        pipe.send((f"127.0.0.1:{app.grpc_port}", app.metrics_port))
        await asyncio.Event().wait()

    uvloop.run(serve())


def front_end(bench: Bench) -> list[dict[str, Any]]:
    """Measure the server without a model: the calls/s of 64 callers, and the CPU time of a call."""
    with fake_engine_server() as (target, metrics_port):
        with EncoderClient(target) as client:
            info = client.model()

        def measure(count: int, _: int) -> dict[str, Any]:
            calls = random_calls([CALL_TOKENS] * 1024, info, Request(sequences_per_call=count))
            meter = Meter(metrics_port)
            load = Load(concurrency=CALLERS, seconds=bench.seconds, warmup_seconds=1.0)
            result = call_server(target, calls, load, meter)
            return {
                "sequences_per_call": count,
                "calls_per_second": result.calls_per_second,
                "sequences_per_second": result.sequences_per_second,
                "server_cpu_seconds_per_call": meter.cpu_seconds / max(result.calls, 1),
                "generator_cpu_seconds_per_call": result.generator_cpu_seconds / max(result.calls, 1),
                "errors": sum(result.errors.values()),
            }

        return bench.interleaved(SEQUENCES_PER_CALL, measure)


PARTS: dict[str, Callable[[Bench], list[dict[str, Any]]]] = {
    "sequence_tokens": by_sequence_tokens,
    "batch_tokens": lambda bench: by_server_flag(bench, "--max-batch-tokens", BATCH_TOKENS),
    "callers": by_callers,
    "threads": lambda bench: by_server_flag(bench, "--intra-op-threads", thread_counts(usable_cpus())),
    "load": by_load,
    "overload": overload,
    "front_end": front_end,
    "memory": memory,
}
LONG = ("memory",)  # the part takes 20 minutes on 2 CPUs, so it runs only with --only memory


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure how speed, latency and memory depend on the load, and draw plots."""


@main.command()
@click.argument("model_repository", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", help="NAME or NAME@VERSION; default: the first model.")
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="A part to measure; may be repeated.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option(
    "--seconds", default=5.0, show_default=True, type=click.FloatRange(0.1), help="The duration of each measurement."
)
@click.option("--seed", default=0, show_default=True)
def measure(
    model_repository: Path, file: Path, model: str | None, only: tuple[str, ...], rounds: int, seconds: float, seed: int
) -> None:
    """Measure the parts, and write all numbers to FILE."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in only or [part for part in PARTS if part not in LONG]:
        console.print(f"[bold]{name}[/]")
        found[name] = PARTS[name](Bench(model_repository, model, rounds, seconds, seed))
        found.setdefault("runs", {})[name] = describe_run() | {"rounds": rounds, "seconds": seconds}
        write_report(file, found)


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def draw(file: Path, folder: Path) -> None:
    """Draw the plots of FILE into FOLDER."""
    from harness import plots  # imported here, because it loads matplotlib

    for path in plots.draw(json.loads(file.read_text()), folder):
        console.print(str(path))


if __name__ == "__main__":
    main()
