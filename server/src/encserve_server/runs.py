"""Runs as the scheduler sees them: what one gave, and how fast they are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from encserve_server.engine.base import BatchResult, Engine
from encserve_server.types import ModelInput


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


@dataclass(frozen=True, slots=True)
class Checked:
    """A batch's result, and for each sequence whether all of its numbers are finite."""

    result: BatchResult
    finite: list[bool]


def run_checked(engine: Engine, sequences: Sequence[ModelInput], *, alone: bool) -> Checked:
    """Runs a batch and looks at every number of it; in an engine's thread, because both take time."""
    result = engine.run(sequences, alone=alone)
    if [len(rows) for rows in result.rows] != [len(it) for it in sequences]:
        raise RuntimeError("the engine gave rows that are not those of the sequences")
    return Checked(result, [bool(np.isfinite(rows).all()) for rows in result.rows])
