"""What was measured, and what is made of it. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from encserve_cli.load.server_view import ServerView

Seconds = npt.NDArray[np.float64]
# The label of calls of an open loop that never left, because too many were out until the end.
NOT_SENT = "NOT_SENT"
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class Samples:
    """What one generator process brings back.

    Attributes:
        rows: float64 (calls, 6), as bytes: when it was due, sent and answered; the call's index; the index of its
            label; 1 if it had to wait for a place, else 0.
        labels: Of statuses; the first is "", of calls answered right.
        examples: The text of the first error with each label.
        tokens: Of each call; 0 where it is not known.
        end: When sending ended.
        cpu_seconds: CPU time of the process while it counted.
    """

    rows: bytes
    labels: tuple[str, ...]
    examples: dict[str, str]
    tokens: tuple[int, ...]
    end: float
    cpu_seconds: float

    def table(self) -> Seconds:
        """The rows, (calls, 6)."""
        return np.frombuffer(self.rows, np.float64).reshape(-1, _COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What a load did, after its warm-up.

    In a closed loop what counts are the calls that ended within `seconds`. In an open loop latencies, errors and
    lateness are of the calls that were due within `seconds`, however late they were answered; calls, sequences and
    tokens are those answered within `seconds`.

    Attributes:
        mode: "closed" or "open".
        concurrency: Callers; in an open loop the most calls that could be out.
        rate_per_second: Calls per second that were meant; None in a closed loop.
        processes: Generator processes.
        stream: Whether calls went over EncodeStream.
        seconds: How long it counted.
        calls: Calls answered right.
        sequences: Their sequences.
        tokens: Their tokens.
        latency_seconds: (calls,) from when a call was due until it was answered; in a closed loop a call is due when
            its caller is free. Without those that failed.
        errors: How many calls failed, by status and the server's reason, such as "RESOURCE_EXHAUSTED QUEUE_FULL".
        error_examples: The text of the first error of each kind, in the warm-up or after.
        error_latency_seconds: (errors,) from when a call was sent until it failed.
        lateness_seconds: (calls,) from when a call was due until the generator sent it, without those that had to
            wait for a place; empty in a closed loop. It is the generator's own fault, and part of the latency.
        held_calls: How many calls had to wait for a place because too many were out.
        generator_cpu_seconds: CPU time of the generator processes.
        interrupted: Whether it ended before its time.
        server: The server's own view; None where its metrics could not be had.
        server_missing: Why not; empty where they could.
    """

    mode: Literal["closed", "open"]
    concurrency: int
    rate_per_second: float | None
    processes: int
    stream: bool
    seconds: float
    calls: int
    sequences: int
    tokens: int
    latency_seconds: Seconds
    errors: dict[str, int]
    error_examples: dict[str, str] = field(default_factory=dict)
    error_latency_seconds: Seconds = field(default_factory=lambda: np.empty(0))
    lateness_seconds: Seconds = field(default_factory=lambda: np.empty(0))
    held_calls: int = 0
    generator_cpu_seconds: float = 0.0
    interrupted: bool = False
    server: ServerView | None = None
    server_missing: str = ""

    @property
    def calls_per_second(self) -> float:
        """Calls answered right, per second."""
        return self.calls / self.seconds if self.seconds else 0.0

    @property
    def sequences_per_second(self) -> float:
        """Their sequences, per second."""
        return self.sequences / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Their tokens, per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def latency_percentile_seconds(self, percent: float) -> float | None:
        """Interpolated between samples; None without any."""
        return percentile(self.latency_seconds, percent)


def percentile(values: Seconds | Sequence[float], percent: float) -> float | None:
    """Interpolated between samples; None without any."""
    return float(np.percentile(values, percent)) if len(values) else None


def merge_samples(
    parts: Sequence[Samples], sequences: npt.NDArray[np.int64], *, start: float, end: float, is_open: bool
) -> LoadResult:
    """Puts the processes' samples together; see `LoadResult` for what counts.

    Args:
        parts: One for each process; of the same calls.
        sequences: (calls,) the sequences of each call.
        start: When counting began.
        end: When it was to end; it ended earlier if a process was stopped.
        is_open: Whether calls had a time at which they were due.

    The result's settings are those of an unnamed closed loop or open loop; the caller puts in its own.
    """
    ended = min([end, *(part.end for part in parts)])
    tokens_by_call = np.max([part.tokens for part in parts], axis=0)
    totals: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    latencies, error_latencies, lateness, held = [], [], [], 0
    for part in parts:
        due, sent, done, index, label, was_held = part.table().T
        counts = (due >= start) & (due < ended) if is_open else (done >= start) & (done < ended)
        is_right = label == 0
        answered = index[is_right & (done >= start) & (done < ended)].astype(np.int64)
        totals["calls"] += len(answered)
        totals["sequences"] += int(sequences[answered].sum())
        totals["tokens"] += int(tokens_by_call[answered].sum())
        latencies.append((done - due)[counts & is_right])
        is_sent = label != (part.labels.index(NOT_SENT) if NOT_SENT in part.labels else -1)
        error_latencies.append((done - sent)[counts & ~is_right & is_sent])
        for number, count in zip(*np.unique(label[counts & ~is_right], return_counts=True), strict=True):
            errors[part.labels[int(number)]] += int(count)
        examples = part.examples | examples
        if is_open:
            lateness.append((sent - due)[counts & (was_held == 0)])
            held += int((counts & (was_held == 1)).sum())
    return LoadResult(
        mode="open" if is_open else "closed",
        concurrency=0,
        rate_per_second=None,
        processes=len(parts),
        stream=False,
        seconds=max(ended - start, 0.0),
        calls=totals["calls"],
        sequences=totals["sequences"],
        tokens=totals["tokens"],
        latency_seconds=np.concatenate([np.empty(0), *latencies]),
        errors=dict(sorted(errors.items())),
        error_examples=examples,
        error_latency_seconds=np.concatenate([np.empty(0), *error_latencies]),
        lateness_seconds=np.concatenate([np.empty(0), *lateness]),
        held_calls=held,
        generator_cpu_seconds=sum(part.cpu_seconds for part in parts),
        interrupted=ended < end,
    )
