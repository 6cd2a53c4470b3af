"""Interleaved rounds, and ratios taken round by round, so that a slow moment of the machine hits all sides.

A moment shorter than a round hits some sides only. So where others used the CPUs while a side ran, it is run again.
What decides that is what others did, never how the side came out.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Threads that spin after their last run, as OpenMP's do, are asleep after this.
PAUSE_SECONDS = 0.2
QUIET_SHARE = 0.05  # of the CPUs, used by others: no more than this is taken as quiet
TRIES = 4  # of one side in one round


@dataclass(frozen=True, slots=True)
class Measurement:
    """One side in one round.

    Attributes:
        tokens: Real tokens that were computed, no padding.
        seconds: How long that took.
        latencies: (tokens, seconds) of each call, where calls are what is timed; 0 tokens where they are not known.
        server_cpu_ms: CPU time of the server for a sequence, the model included; None where it is not known.
        others: The share of the CPUs that others used meanwhile, from 0 to 1; None if not known.
    """

    tokens: int
    seconds: float
    latencies: list[tuple[int, float]] = field(default_factory=list)
    server_cpu_ms: float | None = None
    others: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """The throughput."""
        return self.tokens / self.seconds

    def p50_seconds(self, at_least_tokens: int = 0) -> float | None:
        """The median latency of calls of at least so many tokens; None where there are none."""
        seconds = [it for tokens, it in self.latencies if tokens >= at_least_tokens]
        return float(np.median(seconds)) if seconds else None


Figure = Callable[[Measurement], float | None]


@dataclass(frozen=True, slots=True)
class Side:
    """One of those who are compared.

    Attributes:
        name: What `--only` and the JSON call it.
        label: What the table calls it.
        run: Handles the whole workload once and says how long it took.
    """

    name: str
    label: str
    run: Callable[[], Measurement]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and its quartiles over rounds."""

    low: float
    median: float
    high: float


def orders(names: Sequence[str], rounds: int, seed: int) -> Iterator[list[str]]:
    """For each round all names in a random order of its own."""
    rng = random.Random(seed)
    for _ in range(rounds):
        yield rng.sample(list(names), len(names))


class Patience:
    """How much longer a run may take for the sake of quiet."""

    def __init__(self, seconds: float, watch: Callable[[], Callable[[], float | None]]) -> None:
        """`watch` begins to watch and gives what tells the share of the CPUs that others have used since."""
        self._seconds = seconds
        self._watch = watch

    def run(self, side: Side) -> Measurement:
        """Runs a side, again while it was disturbed and there is patience left; gives the least disturbed run."""
        tries: list[Measurement] = []
        while True:
            time.sleep(PAUSE_SECONDS)
            began, others = time.monotonic(), self._watch()
            measurement = side.run()
            tries.append(dataclasses.replace(measurement, others=(share := others())))
            if share is None or share <= QUIET_SHARE or len(tries) == TRIES or self._seconds <= 0:
                return min(tries, key=lambda it: it.others or 0.0)
            # What the next try will cost.
            self._seconds -= time.monotonic() - began


NO_PATIENCE = Patience(0, lambda: lambda: None)


def measure(
    sides: Sequence[Side],
    rounds: int,
    seed: int,
    on_round: Callable[[int, Mapping[str, Measurement]], None],
    patience: Patience,
) -> dict[str, list[Measurement]]:
    """Runs every side once a round and tells `on_round` of each round; gives the measurements by side, by round."""
    by_name = {side.name: side for side in sides}
    found: dict[str, list[Measurement]] = {side.name: [] for side in sides}
    for number, order in enumerate(orders(list(by_name), rounds, seed)):
        for name in order:
            found[name].append(patience.run(by_name[name]))
        on_round(number, {name: its[-1] for name, its in found.items()})
    return found


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles of one or more values."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return Spread(float(low), float(median), float(high))


def _tokens_per_second(measurement: Measurement) -> float:
    return measurement.tokens_per_second


def ratios(
    mine: Sequence[Measurement], base: Sequence[Measurement], figure: Figure = _tokens_per_second
) -> list[float]:
    """A figure of mine, tokens/s or another, as a ratio to the other side's, round by round; not where one has none."""
    pairs = [(figure(a), figure(b)) for a, b in zip(mine, base, strict=True)]
    return [a / b for a, b in pairs if a is not None and b]


def latencies(mine: Sequence[Measurement], at_least_tokens: int = 0) -> list[float]:
    """My median latencies in seconds, round by round; empty where nothing of that length is timed."""
    found = [it.p50_seconds(at_least_tokens) for it in mine]
    return [it for it in found if it is not None]
