"""The settings and the results of a load test. This module does no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from encserve_cli.load.calls import Call

Seconds = npt.NDArray[np.float64]
NOT_SENT = "NOT_SENT"  # the label of calls that the load generator could not send


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The settings of a load test. Set `concurrency` or `rate_per_second`, not both.

    Attributes:
        concurrency: The number of callers. Each caller sends the next call after a reply.
        rate_per_second: Calls per second. The calls start at the random times of a Poisson process, whether or not
            earlier calls have replies.
        seconds: The duration of the measurement.
        warmup_seconds: The duration of the warm-up, before the measurement.
        timeout_seconds: The timeout of each call.
        seed: The seed of the random times.
    """

    concurrency: int | None = None
    rate_per_second: float | None = None
    seconds: float = 10.0
    warmup_seconds: float = 2.0
    timeout_seconds: float = 30.0
    seed: int = 0

    def arrival_seconds(self) -> Seconds:
        """Return the random start times of the calls, sorted.

        Shape (calls,), in seconds since the start of the warm-up.

        In a Poisson process, the number of events in a fixed time has a Poisson distribution. For a given number of
        events, their times are independent and uniform.
        """
        rng = np.random.default_rng(self.seed)
        seconds = self.warmup_seconds + self.seconds
        count = rng.poisson((self.rate_per_second or 0.0) * seconds)
        return np.sort(rng.uniform(0.0, seconds, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The results of a load test, without the warm-up.

    `calls`, `sequences` and `tokens` count the calls that were answered in the measured time. With `concurrency`,
    latencies and errors count calls that ended in the measured time. With `rate_per_second`, latencies and
    errors count calls that were due in the measured time, even if these calls ended later.

    Attributes:
        load: The settings of the load.
        seconds: The measured time.
        interrupted: Whether Ctrl-C ended the load test.
        calls: The number of answered calls.
        sequences: The number of sequences in the answered calls.
        tokens: The number of tokens in the answered calls.
        latency_seconds: (calls,) For each answered call, the time from when the call was due until the reply. With
            `concurrency`, a call is due when the caller's previous call has ended. After an error, the caller waits 10
            ms first.
        errors: The number of failed calls by status and the server's reason, for example
            "RESOURCE_EXHAUSTED QUEUE_FULL". NOT_SENT counts calls that the load generator could not send in time.
        error_examples: The text of the first error of each kind, including errors of the warm-up.
        error_latency_seconds: (errors,) For each failed call, the time between sending and error.
        lateness_seconds: (calls,) For each call, the time from when the call was due until the call was sent. Lateness
            is part of the latency. With `concurrency`, the array is empty.
        generator_cpu_seconds: The CPU time of this process in the measured time.
    """

    load: Load
    seconds: float
    interrupted: bool
    calls: int
    sequences: int
    tokens: int
    latency_seconds: Seconds
    errors: dict[str, int]
    error_examples: dict[str, str]
    error_latency_seconds: Seconds
    lateness_seconds: Seconds
    generator_cpu_seconds: float

    @property
    def calls_per_second(self) -> float:
        """Answered calls per second."""
        return self.calls / self.seconds if self.seconds else 0.0

    @property
    def sequences_per_second(self) -> float:
        """Sequences of answered calls per second."""
        return self.sequences / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answered calls per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def percentile(values: Seconds, percent: float) -> float | None:
    """Return a percentile, interpolated between values; None without values."""
    return float(np.percentile(values, percent)) if len(values) else None


def summarize(
    load: Load,
    calls: Sequence[Call],
    rows: Seconds,
    labels: Sequence[str],
    *,
    start: float,
    end: float,
    is_interrupted: bool,
    error_examples: dict[str, str],
    generator_cpu_seconds: float,
) -> LoadResult:
    """Compute the result of a load.

    Args:
        load: The settings of the load.
        calls: The calls of the load.
        rows: (rows, 5) One row for each call. The columns are: due, sent, answered, index of the call, index of the
            label. "Sent" is NaN for a call that was not sent.
        labels: The kinds of errors, such as "RESOURCE_EXHAUSTED QUEUE_FULL". The first label is "", for calls without
            an error.
        start: The start of the measured time.
        end: The end of the measured time.
        is_interrupted: See `LoadResult.interrupted`.
        error_examples: See `LoadResult`.
        generator_cpu_seconds: See `LoadResult`.
    """
    due, sent, done, index, label = rows.T
    is_answered = label == 0
    is_in_time = (done >= start) & (done < end)
    counts = is_in_time if load.rate_per_second is None else (due >= start) & (due < end)
    is_failed, is_sent = counts & ~is_answered, np.isfinite(sent)
    answered = [calls[number] for number in index[is_answered & is_in_time].astype(int).tolist()]
    found, numbers = np.unique(label[is_failed].astype(int), return_counts=True)
    return LoadResult(
        load=load,
        seconds=max(end - start, 0.0),
        interrupted=is_interrupted,
        calls=len(answered),
        sequences=sum(call.sequences for call in answered),
        tokens=sum(call.tokens for call in answered),
        latency_seconds=(done - due)[counts & is_answered],
        errors={labels[which]: number for which, number in zip(found.tolist(), numbers.tolist(), strict=True)},
        error_examples=error_examples,
        error_latency_seconds=(done - sent)[is_failed & is_sent],
        lateness_seconds=np.empty(0) if load.rate_per_second is None else (sent - due)[counts & is_sent],
        generator_cpu_seconds=generator_cpu_seconds,
    )
