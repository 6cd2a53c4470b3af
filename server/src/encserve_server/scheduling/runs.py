"""Runs as the scheduler sees them: what one gave, and how fast they are."""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from encserve_server.engine.base import BatchResult, Engine
from encserve_server.types import BatchSeconds, ModelInput


@dataclass(slots=True)
class Throughput:
    """A running estimate of tokens a second, to say when trying again makes sense."""

    tokens_per_second: float = field(default=math.nan)

    def add(self, tokens: int, seconds: float) -> None:
        """Counts a run."""
        if seconds <= 0:
            return
        rate = tokens / seconds
        known = self.tokens_per_second
        self.tokens_per_second = rate if math.isnan(known) else 0.8 * known + 0.2 * rate

    def seconds_for(self, tokens: int) -> float:
        """How long `tokens` take, between 10 ms and 5 s; 100 ms while nothing is known."""
        if math.isnan(self.tokens_per_second):
            return 0.1
        return min(max(tokens / self.tokens_per_second, 0.01), 5.0)


class BusyTime:
    """The time in which at least one run is under way: runs side by side count once, not each.

    It is exact whenever it is taken, in the middle of a run too. Any thread may call anything.
    """

    def __init__(self) -> None:
        """Nothing runs, and no time has been counted."""
        self._lock = threading.Lock()
        self._running = 0
        self._counted_until = -math.inf
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        """A run begins."""
        with self._lock:
            self._count(now)
            self._running += 1

    def end(self, now: float) -> None:
        """A run has ended, however."""
        with self._lock:
            self._count(now)
            self._running -= 1

    def take(self, now: float) -> float:
        """The seconds counted since this was last called."""
        with self._lock:
            self._count(now)
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def _count(self, now: float) -> None:
        # Who read the clock first may get the lock last: time never goes back here, and no moment counts twice.
        now = max(now, self._counted_until)
        if self._running:
            self._seconds += now - self._counted_until
        self._counted_until = now


@dataclass(frozen=True, slots=True)
class Checked:
    """A batch's result, for each sequence whether all of its numbers are finite, and where the time went."""

    result: BatchResult
    finite: list[bool]
    seconds: BatchSeconds


def run_checked(engine: Engine, sequences: Sequence[ModelInput], *, alone: bool) -> Checked:
    """Runs a batch and looks at every number of it; in an engine's thread, because both take time."""
    result = engine.run(sequences, alone=alone)
    if [len(rows) for rows in result.rows] != [len(it) for it in sequences]:
        raise RuntimeError("the engine gave rows that are not those of the sequences")
    began = time.perf_counter()
    finite = [bool(np.isfinite(rows).all()) for rows in result.rows]
    check_seconds = time.perf_counter() - began
    return Checked(
        result,
        finite,
        BatchSeconds(result.collate_seconds, result.compute_seconds, result.split_seconds + check_seconds),
    )
