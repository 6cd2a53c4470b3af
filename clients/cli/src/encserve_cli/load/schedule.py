"""When to send, and who sends how much. Pure."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What one generator process does.

    Attributes:
        mode: "closed": so many callers, each with one call out; "open": calls at random times, answered or not.
        concurrency: The callers; in an open loop the most calls that may be out.
        rate_per_second: Calls per second of an open loop; 0 in a closed one.
        warmup_seconds: How long to load the server before anything counts.
        seconds: How long everything counts after that.
        timeout_seconds: How long one call may take.
        stream: Whether calls go over EncodeStream.
        seed: Of the arrival times.
        first_call: The index of the call to begin with.
    """

    mode: Literal["closed", "open"]
    concurrency: int
    rate_per_second: float = 0.0
    warmup_seconds: float = 2.0
    seconds: float = 10.0
    timeout_seconds: float = 30.0
    stream: bool = False
    seed: int = 0
    first_call: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError with the setting, its bound and the value."""
        for name in ("concurrency", "seconds", "timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0; was {getattr(self, name)}")
        if not self.warmup_seconds >= 0:
            raise ValueError(f"warmup_seconds must be >= 0; was {self.warmup_seconds}")
        if self.mode == "open" and not self.rate_per_second > 0:
            raise ValueError(f"rate_per_second must be > 0; was {self.rate_per_second}")


def split_plan(plan: LoadPlan, processes: int, n_calls: int) -> list[LoadPlan]:
    """The same load from several processes, each with at least one caller, beginning at different calls.

    Poisson arrivals at a rate are those of several independent ones whose rates add up to it.
    """
    count = min(processes, plan.concurrency)
    return [
        LoadPlan(
            mode=plan.mode,
            concurrency=plan.concurrency // count + (number < plan.concurrency % count),
            rate_per_second=plan.rate_per_second / count,
            warmup_seconds=plan.warmup_seconds,
            seconds=plan.seconds,
            timeout_seconds=plan.timeout_seconds,
            stream=plan.stream,
            seed=plan.seed + number,
            first_call=n_calls * number // count,
        )
        for number in range(count)
    ]


def poisson_times(rate_per_second: float, seconds: float, seed: int) -> Seconds:
    """When calls arrive, in seconds from the beginning: ascending, all of them before `seconds`.

    The gaps between arrivals of a Poisson process are independent and exponentially distributed.
    """
    rng = np.random.default_rng(seed)
    times = np.empty(0, np.float64)
    last = 0.0
    while last < seconds:
        # A little more than are expected; once is nearly always enough.
        expected = (seconds - last) * rate_per_second
        gaps = rng.exponential(1 / rate_per_second, int(expected + 4 * np.sqrt(expected)) + 16)
        times = np.concatenate([times, last + np.cumsum(gaps)])
        last = float(times[-1])
    return times[times < seconds]
