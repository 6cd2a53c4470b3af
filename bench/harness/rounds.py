"""Runs the sides of a comparison in rounds, and computes ratios within each round.

A side is one way to run the workload. Each round runs every side once. If the machine is slow for several rounds, all
sides are slow, and the ratios stay correct. If the machine is slow for a shorter time, only some sides are slow.
Therefore a side runs again if other processes used the CPUs during its run. The decision never depends on the measured
speed.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

PAUSE_SECONDS = 0.2  # the pause before each run lets busy-waiting threads, such as OpenMP's, go to sleep
QUIET_SHARE = 0.05  # a run is disturbed if other processes use a larger share of the CPUs
MAX_TRIES = 4  # the largest number of runs of one side in one round


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of one side in one round.

    Attributes:
        tokens: The number of tokens that the model processed, without padding.
        seconds: The duration.
        latencies: (tokens, seconds) of each timed call. tokens is 0 if unknown.
        server_cpu_ms: The server's CPU time for each sequence, including the model, or None if the time is unknown.
        others: The share of the CPUs that other processes used during the run, from 0 to 1, or None if the
            share is unknown.
    """

    tokens: int
    seconds: float
    latencies: list[tuple[int, float]] = field(default_factory=list)
    server_cpu_ms: float | None = None
    others: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, without padding."""
        return self.tokens / self.seconds

    def p50_seconds(self, min_tokens: int = 0) -> float | None:
        """Return the median latency of calls with at least `min_tokens`, or None if there are no such calls."""
        seconds = [latency for tokens, latency in self.latencies if tokens >= min_tokens]
        return float(np.median(seconds)) if seconds else None


Figure = Callable[[Measurement], float | None]


@dataclass(frozen=True, slots=True)
class Side:
    """One way to run the workload.

    Attributes:
        name: The name in `--only` and in the JSON report.
        label: The name in the tables.
        run: Runs the side once and returns the measurement.
    """

    name: str
    label: str
    run: Callable[[], Measurement]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the quartiles over rounds."""

    low: float
    median: float
    high: float


def orders(names: Sequence[str], rounds: int, seed: int) -> Iterator[list[str]]:
    """Yield a list for each round. Each list has all names in a new random order."""
    rng = random.Random(seed)
    for _ in range(rounds):
        yield rng.sample(list(names), len(names))


class Patience:
    """Repeats runs that other processes disturbed. The total time of repeated runs is limited."""

    def __init__(self, seconds: float, watch: Callable[[], Callable[[], float | None]]) -> None:
        """Set the limit of the total time.

        Args:
            seconds: The limit of the total time of repeated runs.
            watch: Starts to watch the CPUs, and returns a function. The function returns the share of CPU time that
                other processes have used since the start.
        """
        self._seconds = seconds
        self._watch = watch

    def run(self, side: Side) -> Measurement:
        """Run a side until a run is undisturbed or a limit is reached. Return the least disturbed run."""
        tries: list[Measurement] = []
        while True:
            time.sleep(PAUSE_SECONDS)
            began, others = time.monotonic(), self._watch()
            measurement = side.run()
            tries.append(dataclasses.replace(measurement, others=(share := others())))
            if share is None or share <= QUIET_SHARE or len(tries) == MAX_TRIES or self._seconds <= 0:
                return min(tries, key=lambda run: run.others or 0.0)
            self._seconds -= time.monotonic() - began  # a repeated run takes about the same time


NO_PATIENCE = Patience(0, lambda: lambda: None)


def measure(
    sides: Sequence[Side],
    rounds: int,
    seed: int,
    patience: Patience = NO_PATIENCE,
    on_round: Callable[[int, Mapping[str, Measurement]], None] = lambda *_: None,
) -> dict[str, list[Measurement]]:
    """In each round, run every side once, in random order.

    Args:
        sides: The sides.
        rounds: The number of rounds.
        seed: The seed for the random order.
        patience: Repeats runs that other processes disturbed.
        on_round: Called after each round. Arguments: the number of the round, from 0, and the round's measurements by
            the name of the side.

    Returns:
        The measurements of all rounds, by the name of the side.
    """
    by_name = {side.name: side for side in sides}
    found: dict[str, list[Measurement]] = {side.name: [] for side in sides}
    for number, order in enumerate(orders(list(by_name), rounds, seed)):
        for name in order:
            found[name].append(patience.run(by_name[name]))
        on_round(number, {name: measurements[-1] for name, measurements in found.items()})
    return found


def best_rates(sides: Sequence[Side], rounds: int, seed: int) -> dict[str, float]:
    """Return the tokens/s of each side's fastest round. Noise only reduces speed, so slower rounds are ignored."""
    found = measure(sides, rounds, seed)
    return {name: max(run.tokens_per_second for run in runs) for name, runs in found.items()}


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of one or more values."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return Spread(float(low), float(median), float(high))


def _tokens_per_second(measurement: Measurement) -> float:
    return measurement.tokens_per_second


def ratios(
    numerator: Sequence[Measurement], denominator: Sequence[Measurement], figure: Figure = _tokens_per_second
) -> list[float]:
    """Return one ratio per round: the figure of a side, divided by the figure of another side. Skip missing figures."""
    pairs = [(figure(a), figure(b)) for a, b in zip(numerator, denominator, strict=True)]
    return [a / b for a, b in pairs if a is not None and b]


def median_latencies(runs: Sequence[Measurement], min_tokens: int = 0) -> list[float]:
    """Return the median latency in seconds of calls with at least `min_tokens`, for each round with such calls."""
    return [p50 for run in runs if (p50 := run.p50_seconds(min_tokens)) is not None]
