"""How cost grows: with the length of sequences, the size of batches, the number of callers, the threads and the load.

    python bench/scaling.py measure MODEL_REPOSITORY FILE [--only PART ...] [--rounds 3] [--seconds 5]
    python bench/scaling.py draw FILE FOLDER

`measure` starts servers, loads them with `encserve bench`'s generator and writes every figure to FILE as JSON; a part
that FILE has already is replaced by what is measured now. Each part is a list of points, measured round by round in
random order. `draw` makes the plots of docs/performance.md of it.
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
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.load import CALLERS
from harness.machine import describe_machine
from real_server import RealServer, real_server

from encserve_cli.load import (
    Call,
    LoadResult,
    Request,
    closed_loop,
    make_calls,
    open_loop,
    real_text_lengths,
    sample_lengths,
)
from encserve_cli.load.samples import percentile
from encserve_client import EncoderClient
from encserve_server.system.cpus import usable_cpus

SEQUENCE_TOKENS = (8, 16, 32, 64, 128, 256)  # up to the demo model's longest
BATCH_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
MANY_CALLERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of what 64 callers get in the same round
OVERLOAD = 3.0
SEQUENCES_PER_CALL, CALL_TOKENS = (1, 4, 16, 64), 20
PAUSE_SECONDS = 0.3
# Usual lengths have 43 tokens in the mean; a caller among many waits for all the others first.
_SLOWEST_TOKENS_PER_SECOND = 2000
_USUAL_TOKENS = 43

Report = Callable[[str], None]


@dataclass
class Bench:
    """What all parts share.

    Attributes:
        model_repository: Where the models are.
        model: NAME or NAME@VERSION; the repository's first without it.
        rounds: How often each point is measured.
        seconds: How long each time.
        tail_seconds: How long at least where a p99 is measured, which needs some hundred calls.
        seed: Of the order and of arrival times.
        say: Tells people how it goes.
    """

    model_repository: Path
    model: str | None
    rounds: int
    seconds: float
    seed: int
    say: Report
    tail_seconds: float = 10.0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        """Seeds the order."""
        self._random = random.Random(self.seed)

    @contextmanager
    def server(self, *flags: str) -> Iterator[RealServer]:
        """A server with further flags, on the CPU."""
        only = ("--model", self.model) if self.model else ()
        with real_server(self.model_repository, "--device", "cpu", *only, *flags) as server:
            yield server

    def calls(self, server: RealServer, lengths: Sequence[int] | None = None) -> list[Call]:
        """Calls of one sequence each, of these lengths in tokens or of those of real texts."""
        with EncoderClient(server.target) as client:
            info = client.model()
        chosen = sample_lengths(real_text_lengths(), 4096, seed=self.seed) if lengths is None else lengths
        return make_calls([min(it, info.max_sequence_tokens) for it in chosen], info)

    def interleaved(self, points: Sequence[Any], measure: Callable[[Any, int], dict[str, Any]]) -> list[dict[str, Any]]:
        """Measures every point once a round, in random order; `measure` gets the point and the number of the round."""
        found = []
        for number in range(self.rounds):
            for point in self._random.sample(list(points), len(points)):
                time.sleep(PAUSE_SECONDS)
                found.append({"round": number, **measure(point, number)})
                self.say(", ".join(f"{name} {_brief(value)}" for name, value in found[-1].items()))
        return found

    def closed(self, server: RealServer, calls: Sequence[Call], callers: int) -> LoadResult:
        """So many callers, until each has had a reply and then for as long as is measured."""
        warmup = max(1.0, 1.2 * callers * _USUAL_TOKENS / _SLOWEST_TOKENS_PER_SECOND)
        return closed_loop(server.target, calls, concurrency=callers, seconds=self.seconds, warmup_seconds=warmup)

    def opened(self, server: RealServer, calls: Sequence[Call], rate_per_second: float, number: int) -> LoadResult:
        """Calls at random times, in a round's own order, for as long as a p99 needs."""
        return open_loop(
            server.target,
            calls,
            rate_per_second=rate_per_second,
            seconds=max(self.seconds, self.tail_seconds),
            seed=self.seed + 1000 * number,
        )


def _brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def by_sequence_tokens(bench: Bench) -> list[dict[str, Any]]:
    """tokens/s where all sequences have the same length, 64 callers."""
    with bench.server("--tune-batches") as server:
        calls = {length: bench.calls(server, [length] * 64) for length in SEQUENCE_TOKENS}

        def measure(length: int, _: int) -> dict[str, Any]:
            rate = bench.closed(server, calls[length], CALLERS).tokens_per_second
            return {"sequence_tokens": length, "tokens_per_second": rate}

        return bench.interleaved(SEQUENCE_TOKENS, measure)


def by_batch_tokens(bench: Bench) -> list[dict[str, Any]]:
    """tokens/s by the budget of a batch, 64 callers with usual lengths; a server for each budget."""
    with ExitStack() as stack:
        servers = {
            budget: stack.enter_context(bench.server("--max-batch-tokens", str(budget))) for budget in BATCH_TOKENS
        }
        calls = bench.calls(next(iter(servers.values())))

        def measure(budget: int, _: int) -> dict[str, Any]:
            result = bench.closed(servers[budget], calls, CALLERS)
            p50 = result.latency_percentile_seconds(50)
            return {"max_batch_tokens": budget, "tokens_per_second": result.tokens_per_second, "p50_seconds": p50}

        return bench.interleaved(BATCH_TOKENS, measure)


def by_callers(bench: Bench) -> list[dict[str, Any]]:
    """tokens/s and latency by the number of callers, usual lengths."""
    with bench.server("--tune-batches") as server:
        calls = bench.calls(server)

        def measure(callers: int, _: int) -> dict[str, Any]:
            result = bench.closed(server, calls, callers)
            return {
                "callers": callers,
                "tokens_per_second": result.tokens_per_second,
                "p50_seconds": result.latency_percentile_seconds(50),
                "p99_seconds": result.latency_percentile_seconds(99),
                "errors": sum(result.errors.values()),
            }

        return bench.interleaved(MANY_CALLERS, measure)


def by_threads(bench: Bench, most: int) -> list[dict[str, Any]]:
    """tokens/s by the threads that compute, 64 callers with usual lengths; a server for each number."""
    counts = [it for it in (1, 2, 4, 8, 16, 32, 64, 128) if it < most] + [most]
    with ExitStack() as stack:
        servers = {it: stack.enter_context(bench.server("--intra-op-threads", str(it))) for it in counts}
        calls = bench.calls(servers[1])

        def measure(threads: int, _: int) -> dict[str, Any]:
            return {
                "threads": threads,
                "tokens_per_second": bench.closed(servers[threads], calls, CALLERS).tokens_per_second,
            }

        return bench.interleaved(counts, measure)


def by_load(bench: Bench) -> list[dict[str, Any]]:
    """Latency of calls that come at random times, by their rate as a share of what 64 callers get in that round."""
    with bench.server("--tune-batches") as server:
        calls = bench.calls(server)
        saturation: dict[int, float] = {}  # calls a second, by round

        def measure(load: float, number: int) -> dict[str, Any]:
            if number not in saturation:
                saturation[number] = bench.closed(server, calls, CALLERS).calls_per_second
            alone = bench.closed(server, calls, 1)
            result = bench.opened(server, calls, load * saturation[number], number)
            return {
                "load": load,
                "rate_per_second": result.rate_per_second,
                "p50_seconds": result.latency_percentile_seconds(50),
                "p99_seconds": result.latency_percentile_seconds(99),
                "alone_p50_seconds": alone.latency_percentile_seconds(50),
                "lateness_p99_seconds": percentile(result.lateness_seconds, 99),
                "errors": sum(result.errors.values()),
            }

        return bench.interleaved(LOADS, measure)


def overload(bench: Bench) -> list[dict[str, Any]]:
    """Three times as many calls as can be answered: how many are, and how soon the others are refused."""
    with bench.server("--tune-batches", "--max-queue-tokens", "8192") as server:
        calls = bench.calls(server)

        def measure(factor: float, number: int) -> dict[str, Any]:
            saturation = bench.closed(server, calls, CALLERS)
            result = bench.opened(server, calls, factor * saturation.calls_per_second, number)
            refused = {it: count for it, count in result.errors.items() if it.startswith("RESOURCE_EXHAUSTED")}
            return {
                "factor": factor,
                "saturation_per_second": saturation.calls_per_second,
                "goodput_share": result.calls_per_second / saturation.calls_per_second,
                # Calls that are refused need not be as long as those that are not.
                "goodput_tokens_share": result.tokens_per_second / saturation.tokens_per_second,
                "refused": sum(refused.values()),
                "failed_p50_seconds": percentile(result.error_latency_seconds, 50),
                "failed_p99_seconds": percentile(result.error_latency_seconds, 99),
                "lateness_p99_seconds": percentile(result.lateness_seconds, 99),
                "generator_cpu_share": result.generator_cpu_seconds / result.seconds,
                "p99_seconds": result.latency_percentile_seconds(99),
                "errors": {it: count for it, count in result.errors.items() if it not in refused},
            }

        return bench.interleaved([OVERLOAD], measure)


def memory(bench: Bench, marks: Sequence[int], lengths: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Resident memory after so many requests, 64 callers with usual lengths or with these; one server, one round."""
    with bench.server() as server:
        calls = bench.calls(server, lengths)
        found: list[dict[str, Any]] = []
        for mark in sorted(marks):
            while (done := server.metric("grpc_server_handled_total", grpc_method="Encode", grpc_code="OK")) < mark:
                closed_loop(server.target, calls, concurrency=CALLERS, seconds=10, warmup_seconds=0.5)
            found.append({"round": 0, "requests": int(done), "resident_bytes": server.resident_bytes()})
            bench.say(f"after {int(done):,} requests {found[-1]['resident_bytes'] / 2**20:.0f} MiB")
        return found


@contextmanager
def fake_engine_server() -> Iterator[tuple[str, str]]:
    """A whole server whose engine answers at once, in a process of its own: its target, and its metrics page."""
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
        most = 2 * CALLERS * SEQUENCES_PER_CALL[-1] * CALL_TOKENS
        app = (await start_fake_server(folder, max_queue_tokens=most)).app
        pipe.send((f"127.0.0.1:{app.grpc_port}", f"http://127.0.0.1:{app.metrics_port}/metrics"))
        await asyncio.Event().wait()

    uvloop.run(serve())


def front_end(bench: Bench) -> list[dict[str, Any]]:
    """What gRPC and Python cost: calls and sequences a second, and CPU time of a call, 64 callers, no compute."""
    with fake_engine_server() as (target, metrics_url):
        with EncoderClient(target) as client:
            info = client.model()

        def measure(count: int, _: int) -> dict[str, Any]:
            calls = make_calls([CALL_TOKENS] * 1024, info, Request(sequences_per_call=count))
            result = closed_loop(
                target, calls, concurrency=CALLERS, seconds=bench.seconds, warmup_seconds=1.0, metrics_url=metrics_url
            )
            cpu = result.server.cpu_seconds if result.server is not None else None
            return {
                "sequences_per_call": count,
                "calls_per_second": result.calls_per_second,
                "sequences_per_second": result.sequences_per_second,
                "server_cpu_seconds_per_call": None if cpu is None else cpu / max(result.calls, 1),
                "generator_cpu_seconds_per_call": result.generator_cpu_seconds / max(result.calls, 1),
                "errors": sum(result.errors.values()),
            }

        return bench.interleaved(SEQUENCES_PER_CALL, measure)


MEMORY_REQUESTS = (20_000, 200_000)
PARTS: dict[str, Callable[[Bench], list[dict[str, Any]]]] = {
    "sequence_tokens": by_sequence_tokens,
    "batch_tokens": by_batch_tokens,
    "callers": by_callers,
    "threads": lambda bench: by_threads(bench, usable_cpus()),
    "load": by_load,
    "overload": overload,
    "front_end": front_end,
    "memory": lambda bench: memory(bench, MEMORY_REQUESTS),
    "memory_short": lambda bench: memory(bench, MEMORY_REQUESTS, range(1, 17)),
}
LONG = ("memory", "memory_short")  # some 20 and 5 minutes with 2 CPUs; only where they are asked for by name

console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """How cost grows, measured and drawn."""


@main.command()
@click.argument("model_repository", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", help="NAME or NAME@VERSION; the first one without it.")
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="A part; may be given several times.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=5.0, show_default=True, type=click.FloatRange(0.1), help="Of each measurement.")
@click.option("--seed", default=0, show_default=True)
def measure(
    model_repository: Path, file: Path, model: str | None, only: tuple[str, ...], rounds: int, seconds: float, seed: int
) -> None:
    """Measure."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in only or [it for it in PARTS if it not in LONG]:
        console.print(f"[bold]{name}[/]")
        bench = Bench(model_repository, model, rounds, seconds, seed, lambda line: console.print(f"  {line}"))
        found[name] = PARTS[name](bench)
        found.setdefault("machine", {})[name] = describe_machine() | {"rounds": rounds, "seconds": seconds}
        file.write_text(json.dumps(found, indent=1) + "\n")


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def draw(file: Path, folder: Path) -> None:
    """Draw."""
    from harness import plots  # which imports matplotlib

    for path in plots.draw(json.loads(file.read_text()), folder):
        console.print(str(path))


if __name__ == "__main__":
    main()
