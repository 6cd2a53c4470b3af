"""Loading a server and measuring it: generator processes, their common clock, and the readings of its metrics.

The generators are processes of their own even if there is one: whoever waits here may draw a progress bar or read a
page without making a call late.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from encserve_cli.load.calls import Call
from encserve_cli.load.crew import Crew
from encserve_cli.load.samples import LoadResult, merge_samples
from encserve_cli.load.schedule import LoadPlan, split_plan
from encserve_cli.load.senders import Connection
from encserve_cli.load.server_view import (
    MetricsMissing,
    ServerView,
    difference,
    fetch_page,
    read_page,
)

Progress = Callable[[float], None]
_TICK_SECONDS = 0.1
# Between telling the generators when to begin and that time.
_LEAD_SECONDS = 0.05


def closed_loop(
    target: str | Connection,
    calls: Sequence[Call],
    *,
    concurrency: int,
    seconds: float,
    warmup_seconds: float = 2.0,
    timeout_seconds: float = 30.0,
    stream: bool = False,
    processes: int = 1,
    metrics_url: str | None = None,
    on_progress: Progress | None = None,
) -> LoadResult:
    """So many callers, each with one call out and the next one right after its answer.

    A caller whose call failed waits 10 ms. Blocks until it is over; KeyboardInterrupt ends it early, and the result is
    of the time until then. The processes are spawned, so a script that calls this guards its own work by
    `if __name__ == "__main__":`.

    Args:
        target: The server, as host:port, or a `Connection`.
        calls: What to send, in turn; see `make_calls`.
        concurrency: The callers.
        seconds: How long to measure.
        warmup_seconds: How long to load the server before that.
        timeout_seconds: How long one call may take.
        stream: Whether to call by EncodeStream, 64 callers to a stream, instead of Encode.
        processes: Generator processes; at most as many as callers.
        metrics_url: The server's metrics page, for `LoadResult.server`; None to leave that out.
        on_progress: Called ten times a second with the share that is over, 0 to 1.

    Raises:
        ServerUnavailableError: No server answers at the target.
        ValueError: There are no calls, or a number is out of bounds.
    """
    plan = LoadPlan(
        mode="closed",
        concurrency=concurrency,
        warmup_seconds=warmup_seconds,
        seconds=seconds,
        timeout_seconds=timeout_seconds,
        stream=stream,
    )
    return _run(target, calls, plan, processes, metrics_url, on_progress)


def open_loop(
    target: str | Connection,
    calls: Sequence[Call],
    *,
    rate_per_second: float,
    seconds: float,
    warmup_seconds: float = 2.0,
    timeout_seconds: float = 30.0,
    max_outstanding: int = 1024,
    seed: int = 0,
    stream: bool = False,
    processes: int = 1,
    metrics_url: str | None = None,
    on_progress: Progress | None = None,
) -> LoadResult:
    """Calls at the random times of a Poisson process, whether or not those before are answered.

    Latencies count from when a call was due. If max_outstanding calls are out, the next one waits, and its latency
    grows; what has not been sent at the end counts as the error "NOT_SENT".

    Args:
        target: As for `closed_loop`, and so are the others.
        calls: What to send, in turn.
        rate_per_second: Calls per second.
        seconds: How long to measure.
        warmup_seconds: How long to load the server before that.
        timeout_seconds: How long one call may take.
        max_outstanding: The most calls that may be out.
        seed: Of the arrival times.
        stream: Whether to call by EncodeStream.
        processes: Generator processes.
        metrics_url: The server's metrics page.
        on_progress: Called with the share that is over.

    Raises:
        ServerUnavailableError: No server answers at the target.
        ValueError: There are no calls, or a number is out of bounds.
    """
    plan = LoadPlan(
        mode="open",
        concurrency=max_outstanding,
        rate_per_second=rate_per_second,
        warmup_seconds=warmup_seconds,
        seconds=seconds,
        timeout_seconds=timeout_seconds,
        stream=stream,
        seed=seed,
    )
    return _run(target, calls, plan, processes, metrics_url, on_progress)


def _run(
    target: str | Connection,
    calls: Sequence[Call],
    plan: LoadPlan,
    processes: int,
    metrics_url: str | None,
    on_progress: Progress | None,
) -> LoadResult:
    if not calls:
        raise ValueError("calls must hold at least one call; was empty")
    if processes < 1:
        raise ValueError(f"processes must be >= 1; was {processes}")
    connection = Connection(target=target) if isinstance(target, str) else target
    with Crew(connection, calls, split_plan(plan, processes, len(calls))) as crew:
        begin = time.perf_counter() + _LEAD_SECONDS
        start, end = begin + plan.warmup_seconds, begin + plan.warmup_seconds + plan.seconds
        watch = _Watch(metrics_url)
        crew.tell(begin)
        try:
            _wait_until(start, begin, end, on_progress)
            watch.read()
            _wait_until(end, begin, end, on_progress)
        except KeyboardInterrupt:
            crew.tell(None)
        watch.read()
        parts = crew.collect()
    sequences = np.array([call.sequences for call in calls], np.int64)
    result = merge_samples(parts, sequences, start=start, end=end, is_open=plan.mode == "open")
    view, missing = watch.view(calls[0].expected.fingerprint)
    return dataclasses.replace(
        result,
        concurrency=plan.concurrency,
        rate_per_second=plan.rate_per_second or None,
        stream=plan.stream,
        server=view,
        server_missing=missing,
    )


def _wait_until(when: float, begin: float, end: float, on_progress: Progress | None) -> None:
    """Sleeps until then, saying every now and then how far it is."""
    while (left := when - time.perf_counter()) > 0:
        time.sleep(min(left, _TICK_SECONDS))
        if on_progress is not None:
            on_progress(min(max((time.perf_counter() - begin) / (end - begin), 0.0), 1.0))


class _Watch:
    """Readings of a metrics page. What goes wrong is kept as text: it must not end a run."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        self._missing = "" if url else "no metrics page was named"
        self._pages: list[tuple[float, str]] = []

    def read(self) -> None:
        """Keeps the page as it is now; it is parsed when the load is over."""
        if self._url is None or self._missing:
            return
        try:
            self._pages.append((time.perf_counter(), fetch_page(self._url)))
        except MetricsMissing as error:
            self._missing = str(error)

    def view(self, fingerprint: str) -> tuple[ServerView | None, str]:
        """What happened between the two readings, or why that is not known."""
        if len(self._pages) < 2:
            return None, self._missing or "the run ended before its warm-up"
        (before, first), (after, second) = self._pages
        try:
            return difference(read_page(first), read_page(second), fingerprint, after - before), ""
        except MetricsMissing as error:
            return None, str(error)
