"""How long a job will take, from a short sample of its rows."""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from encserve_cli.job.inputs import PartReader
from encserve_cli.job.plan import Plan
from encserve_cli.job.types import Encoder, Part, Value, ignore_batch

_MOST_ROWS = 512
_ENOUGH_SECONDS = 1.5  # the next batch would take about as long as all before it, and a little


@dataclass(frozen=True, slots=True)
class Sample:
    """What encoding some rows took.

    Attributes:
        rows: How many rows.
        text_bytes: The bytes of their inputs, as `Part.text_bytes` counts them.
        tokens: Their tokens, padding excluded.
        seconds: How long it took.
    """

    rows: int
    text_bytes: int
    tokens: int
    seconds: float

    def seconds_of(self, text_bytes: int) -> float:
        """How long inputs of so many bytes take."""
        return self.seconds * text_bytes / self.text_bytes

    def tokens_of(self, text_bytes: int) -> float:
        """How many tokens inputs of so many bytes have."""
        return self.tokens * text_bytes / self.text_bytes


def shared_out(plan: Plan, missing: Sequence[Part], workers: int) -> list[int]:
    """The bytes of text of each worker that has something to do, if parts are shared out as evenly as possible.

    One worker alone does a part, and all parts of a file that can only be read from its beginning.
    """
    alone: Counter[tuple[int, int]] = Counter()
    for it in missing:
        alone[it.input, 0 if plan.inputs[it.input].in_order else it.number] += it.text_bytes
    shares = [0] * min(workers, len(alone))
    for text_bytes in sorted(alone.values(), reverse=True):
        heapq.heapreplace(shares, shares[0] + text_bytes)
    return shares


def take_sample(
    plan: Plan, part: Part, encoder: Encoder, clock: Callable[[], float] = time.perf_counter
) -> Sample | None:
    """Encodes rows from all over a part: 1, 2, 4 and so on up to 512, and no more once that has taken a while.

    The last of these counts: by then everything is warm. None where the part has no row that can be encoded.
    """
    reader = PartReader(plan.inputs, plan.read, plan.kept_types)
    try:
        rows = reader.read(part)
    finally:
        reader.close()
    values = [value for place, value in enumerate(rows.values) if value is not None and place not in rows.problems]
    size = sum(map(_size, values))
    scale = part.text_bytes / size if size else 0.0  # of .jsonl files the plan counts whole lines
    sample = None
    count, began = 1, clock()
    while values and count <= min(len(values), _MOST_ROWS) and clock() - began < _ENOUGH_SECONDS:
        sample = _timed(_evenly(values, count), scale, encoder, clock) or sample
        count *= 2
    return sample


def _evenly(values: Sequence[Value], count: int) -> list[Value]:
    places = np.linspace(0, len(values), count, endpoint=False, dtype=np.int64)
    return [values[place] for place in places.tolist()]


def _timed(values: Sequence[Value], scale: float, encoder: Encoder, clock: Callable[[], float]) -> Sample | None:
    text_bytes = round(sum(map(_size, values)) * scale)
    began = clock()
    encoded = encoder.encode(values, ignore_batch)
    seconds = clock() - began
    return Sample(len(values), text_bytes, encoded.tokens, seconds) if text_bytes else None


def _size(value: Value) -> int:
    """As `PartLimits.max_text_bytes` counts it."""
    if isinstance(value, str):
        return len(value.encode())
    return 8 * len(value) if isinstance(value, list) else value.nbytes
