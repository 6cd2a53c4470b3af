"""The measurements: each a list of points, run round by round in random order against real servers."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from real_server import RealServer, real_server

from curves.light_load import LightResult, light_closed_loop, light_open_loop
from encserve_cli.load import (
    Call,
    LoadResult,
    closed_loop,
    make_calls,
    real_text_lengths,
    sample_lengths,
)
from encserve_cli.load.samples import percentile
from encserve_client import EncoderClient

CALLERS = 64
SEQUENCE_TOKENS = (8, 16, 32, 64, 128, 256)
BATCH_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
MANY_CALLERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of what 64 callers get in the same round
OVERLOAD = 3.0
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

    def light(self, server: RealServer, calls: Sequence[Call], callers: int) -> LightResult:
        """The same by the generator that takes next to no CPU."""
        return light_closed_loop(server.target, calls, callers=callers, seconds=self.seconds, warmup_seconds=1.5)


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
                saturation[number] = bench.light(server, calls, CALLERS).calls_per_second
            rate = load * saturation[number]
            alone = bench.light(server, calls, 1)
            seconds = max(bench.seconds, bench.tail_seconds)
            seed = bench.seed + 1000 * number
            result = light_open_loop(server.target, calls, rate_per_second=rate, seconds=seconds, seed=seed)
            return {
                "load": load,
                "rate_per_second": rate,
                "p50_seconds": percentile(result.latencies, 50),
                "p99_seconds": percentile(result.latencies, 99),
                "alone_p50_seconds": percentile(alone.latencies, 50),
                "lateness_p99_seconds": percentile(result.lateness, 99),
                "errors": result.errors.total() + len(result.refused),
            }

        return bench.interleaved(LOADS, measure)


def overload(bench: Bench) -> list[dict[str, Any]]:
    """Three times as many calls as can be answered: how many are, and how soon the others are refused."""
    with bench.server("--tune-batches", "--max-queue-tokens", "8192") as server:
        calls = bench.calls(server)

        def measure(factor: float, number: int) -> dict[str, Any]:
            saturation = bench.light(server, calls, CALLERS)
            result = light_open_loop(
                server.target,
                calls,
                rate_per_second=factor * saturation.calls_per_second,
                seconds=max(bench.seconds, bench.tail_seconds),
                seed=bench.seed + 1000 * number,
            )
            return {
                "factor": factor,
                "saturation_per_second": saturation.calls_per_second,
                "goodput_share": result.calls_per_second / saturation.calls_per_second,
                # Calls that are refused need not be as long as those that are not.
                "goodput_tokens_share": result.tokens_per_second / saturation.tokens_per_second,
                "refused": len(result.refused),
                "refused_p50_seconds": percentile(result.refused, 50),
                "refused_p99_seconds": percentile(result.refused, 99),
                "lateness_p99_seconds": percentile(result.lateness, 99),
                "generator_cpu_share": result.cpu_seconds / result.seconds,
                "p99_seconds": percentile(result.latencies, 99),
                "errors": dict(result.errors),
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
