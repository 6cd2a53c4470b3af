"""Sends the calls of a load test, and records when each call was due, sent and answered.

The calls are serialized before the load, and replies are not parsed. The load generator usually shares the CPUs with
the server, so each computation in the generator would slow the server.
"""

import asyncio
import gc
import itertools
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

import grpc.aio
import numpy as np

from encserve_cli.load.calls import Call
from encserve_cli.load.results import NOT_SENT, Load, LoadResult, summarize
from encserve_client import AsyncEncoderClient

# After an error, a caller waits before the next call. Otherwise a server that is full or down would get thousands of
# calls a second. The load generator would then use the CPU time that the server needs to recover.
ERROR_PAUSE_SECONDS = 0.01
# Calls at random times may be late. The load generator gives up unsent calls this many seconds after the end.
GRACE_SECONDS = 1.0


def run_load(
    open_client: Callable[[], AsyncEncoderClient],
    calls: Sequence[Call],
    load: Load,
    *,
    on_edge: Callable[[], None] | None = None,
) -> LoadResult:
    """Run a load test, and return the results. Return when all open calls have ended.

    The load test runs on a new event loop in this thread. Ctrl-C ends the load test at once. The result then has only
    the calls that ended before Ctrl-C.

    Args:
        open_client: A function that returns a new client of the server. The load has one channel, because more channels
            are not faster.
        calls: At least one call. The calls are sent in this order. After the last call the first call is sent again.
        load: The number of callers or the rate, the durations, and the timeout.
        on_edge: A function that is called at the start and at the end of the measured time. Another thread runs it.

    Raises:
        EncserveError: The server does not answer.
        KeyboardInterrupt: Ctrl-C was pressed before the first call.
    """
    generator = _Generator(calls, load, on_edge)
    gc.collect()
    gc.freeze()  # garbage collection during the load ignores the objects that exist now
    try:
        return asyncio.run(generator.run(open_client))
    finally:
        gc.unfreeze()


class _Generator:
    """Runs one load. Times are seconds of `time.perf_counter`."""

    def __init__(self, calls: Sequence[Call], load: Load, on_edge: Callable[[], None] | None) -> None:
        self._calls = calls
        self._load = load
        self._on_edge = on_edge
        self._rows = array("d")  # 5 numbers for each call: due, sent, answered, index of the call, index of the label
        self._labels: dict[str, int] = {"": 0}  # the empty label is for calls without an error
        self._examples: dict[str, str] = {}
        self._cpu_seconds = 0.0

    async def run(self, open_client: Callable[[], AsyncEncoderClient]) -> LoadResult:
        load = self._load
        async with open_client() as client:
            await client.models()  # connects
            self._send = client.raw_method("Encode")
            self._begin = time.perf_counter()
            self._start = self._begin + load.warmup_seconds
            self._end = ended = self._start + load.seconds
            is_interrupted = False
            try:
                await self._send_all()
            except asyncio.CancelledError:  # asyncio cancels this task when Ctrl-C is pressed
                is_interrupted, ended = True, min(self._end, time.perf_counter())
        return summarize(
            load,
            self._calls,
            np.frombuffer(self._rows, np.float64).reshape(-1, 5),
            list(self._labels),
            start=self._start,
            end=ended,
            is_interrupted=is_interrupted,
            error_examples=self._examples,
            generator_cpu_seconds=self._cpu_seconds,
        )

    async def _send_all(self) -> None:
        order = itertools.cycle(range(len(self._calls)))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            if self._load.rate_per_second is not None:
                await self._send_at_random_times(order, group)
            for _ in range(self._load.concurrency or 0):
                group.create_task(self._run_caller(order))

    async def _run_caller(self, order: Iterator[int]) -> None:
        while (now := time.perf_counter()) < self._end:
            if not await self._call(now, next(order)):
                await asyncio.sleep(ERROR_PAUSE_SECONDS)

    async def _send_at_random_times(self, order: Iterator[int], group: asyncio.TaskGroup) -> None:
        times = self._begin + self._load.arrival_seconds()
        for index, due in enumerate(times):
            # `sleep` even for a late call, so that the tasks of earlier calls can run.
            await asyncio.sleep(max(float(due) - time.perf_counter(), 0))
            if time.perf_counter() > self._end + GRACE_SECONDS:
                label = self._label(NOT_SENT, "the load generator has no CPU time for so many calls a second")
                for unsent in times[index:]:
                    self._rows.extend((unsent, np.nan, self._end, 0, label))
                return
            group.create_task(self._call(float(due), next(order)))

    async def _call(self, due: float, index: int) -> bool:
        """Send a call and record the times. Return whether the call succeeded."""
        sent, label = time.perf_counter(), 0
        try:
            await self._send(self._calls[index].data, timeout=self._load.timeout_seconds)
        except grpc.aio.AioRpcError as error:
            reason = dict(error.trailing_metadata() or ()).get("encserve-error-reason", "")
            label = self._label(f"{error.code().name} {reason}".strip(), error.details() or "")
        self._rows.extend((due, sent, time.perf_counter(), index, label))
        return label == 0

    def _label(self, label: str, example: str) -> int:
        self._examples.setdefault(label, example)
        return self._labels.setdefault(label, len(self._labels))

    async def _watch(self) -> None:
        """Measure the CPU time of this process within the measured time, and call `on_edge`."""
        await asyncio.sleep(self._start - time.perf_counter())
        before = time.process_time()
        try:
            await self._report_edge()
            await asyncio.sleep(self._end - time.perf_counter())
        finally:
            self._cpu_seconds = time.process_time() - before
        await self._report_edge()

    async def _report_edge(self) -> None:
        if self._on_edge is not None:
            await asyncio.to_thread(self._on_edge)
