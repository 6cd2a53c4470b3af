"""The duration of a job, estimated from a short sample of its rows."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from encserve_cli.files.rows import Value
from encserve_cli.job.inputs import read_blocks
from encserve_cli.job.plan import Plan
from encserve_cli.job.types import Encoder, Work, ignore_batch

_MOST_ROWS = 512
_ENOUGH_SECONDS = 1.5  # the next batch takes about as long as all earlier batches together


@dataclass(frozen=True, slots=True)
class Sample:
    """The duration of encoding some rows.

    Attributes:
        rows: The number of rows.
        seconds: The duration.
    """

    rows: int
    seconds: float

    def seconds_of(self, rows: int) -> float:
        """Return the estimated duration for `rows` rows."""
        return self.seconds * rows / self.rows


def take_sample(
    plan: Plan, work: Sequence[Work], encoder: Encoder, clock: Callable[[], float] = time.perf_counter
) -> Sample | None:
    """Encode 1, 2, 4, … up to 512 rows, evenly spaced in the first missing block. Stop after 1.5 s.

    Returns:
        The duration of the last batch, when the engine is warm; None if no row can be encoded.
    """
    values = _first_values(plan, work)
    sample = None
    count, began = 1, clock()
    while values and count <= min(len(values), _MOST_ROWS) and clock() - began < _ENOUGH_SECONDS:
        places = np.linspace(0, len(values), count, endpoint=False, dtype=np.int64)
        before = clock()
        encoder.encode([values[place] for place in places.tolist()], ignore_batch)
        sample = Sample(count, clock() - before)
        count *= 2
    return sample


def _first_values(plan: Plan, work: Sequence[Work]) -> list[Value]:
    for it in work:
        with closing(read_blocks(plan, it, lambda: None)) as blocks:
            block = next(blocks, None)
        if block is not None and (values := [value for value in block.rows.values if value is not None]):
            return values
    return []
