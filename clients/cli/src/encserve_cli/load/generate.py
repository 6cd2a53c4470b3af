"""One generator process' load, on its own event loop."""

import asyncio
import itertools
import math
import time
from array import array
from collections.abc import Iterator, Sequence

import grpc.aio

from encserve_cli.load.calls import Call
from encserve_cli.load.samples import NOT_SENT, Samples
from encserve_cli.load.schedule import LoadPlan, poisson_times
from encserve_cli.load.senders import (
    STREAM_CALLS,
    WRONG_ANSWER,
    CallFailed,
    Connection,
    Sender,
    StreamSender,
    UnarySender,
)
from encserve_client import ProtocolError

# One answer in so many is read and checked; the others are dropped as the bytes that they are.
CHECKED_ONE_IN = 100
# A caller whose call failed waits so long before the next one. Otherwise a server that is away, or refuses, would be
# asked thousands of times a second, and the generator would take the CPU that it needs to recover.
ERROR_PAUSE_SECONDS = 0.01


class Generator:
    """Makes the calls of a plan and keeps when each was due, sent and answered.

    Everything belongs to one event loop. Times are of `time.perf_counter`, which all processes of a machine share.
    """

    def __init__(self, calls: Sequence[Call], plan: LoadPlan) -> None:
        self._calls = calls
        self._plan = plan
        self._stopped = asyncio.Event()
        self._end = math.inf
        self._rows = array("d")
        self._labels: dict[str, int] = {"": 0}
        self._examples: dict[str, str] = {}
        self._tokens = [call.tokens for call in calls]
        self._n_answers = 0
        self._cpu_seconds = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._sender: Sender

    def stop(self) -> None:
        """Sends nothing more; what is out is waited for."""
        self._end = min(self._end, time.perf_counter())
        self._stopped.set()

    async def run(self, begin: float, channel: grpc.aio.Channel, connection: Connection) -> Samples:
        """Loads the server from a time on, until the plan's end or `stop`, and waits for what is still out."""
        plan = self._plan
        self._end = min(self._end, begin + plan.warmup_seconds + plan.seconds)
        self._sender = self._make_sender(channel, connection)
        await self._sleep_until(begin)
        cpu = asyncio.create_task(self._watch_cpu(begin + plan.warmup_seconds))
        order = itertools.islice(itertools.cycle(range(len(self._calls))), plan.first_call, None)
        if plan.mode == "closed":
            await asyncio.gather(*(self._caller(order) for _ in range(plan.concurrency)))
        else:
            await self._arrivals(begin, order)
        await cpu
        await self._sender.aclose()
        return Samples(
            rows=self._rows.tobytes(),
            labels=tuple(self._labels),
            examples=self._examples,
            tokens=tuple(self._tokens),
            end=self._end,
            cpu_seconds=self._cpu_seconds,
        )

    def _make_sender(self, channel: grpc.aio.Channel, connection: Connection) -> Sender:
        plan = self._plan
        if not plan.stream:
            return UnarySender(channel, connection.options(plan.timeout_seconds))
        life_seconds = plan.warmup_seconds + plan.seconds + plan.timeout_seconds
        return StreamSender(channel, connection.options(life_seconds), math.ceil(plan.concurrency / STREAM_CALLS))

    async def _caller(self, order: Iterator[int]) -> None:
        """One caller of a closed loop."""
        now, keep = time.perf_counter, self._rows.extend
        while (sent := now()) < self._end:
            index = next(order)
            done, status = await self._call(index)
            keep((sent, sent, done, index, status, 0))
            if status:
                await asyncio.sleep(ERROR_PAUSE_SECONDS)

    async def _arrivals(self, begin: float, order: Iterator[int]) -> None:
        """An open loop: every call at its time, unless too many are out; then as soon as one comes back."""
        plan = self._plan
        places = asyncio.Semaphore(plan.concurrency)
        length_seconds = plan.warmup_seconds + plan.seconds
        free_at = -math.inf  # when the last call that was held up got its place
        for due in (begin + poisson_times(plan.rate_per_second, length_seconds, plan.seed)).tolist():
            await self._sleep_until(due)
            if due >= self._end:
                break
            held = due < free_at or places.locked()
            if places.locked():
                await self._place_or_end(places)
                free_at = time.perf_counter()
            else:
                await places.acquire()
            if held and time.perf_counter() >= self._end:
                self._rows.extend((due, self._end, self._end, 0, self._status(NOT_SENT, "too many calls were out"), 1))
                continue
            task = asyncio.create_task(self._arrival(due, next(order), held, places))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _place_or_end(self, places: asyncio.Semaphore) -> None:
        """Takes a place, or gives up at the end of the run."""
        try:
            async with asyncio.timeout(max(self._end - time.perf_counter(), 0)):
                await places.acquire()
        except TimeoutError:
            pass

    async def _arrival(self, due: float, index: int, held: bool, places: asyncio.Semaphore) -> None:
        sent = time.perf_counter()
        done, status = await self._call(index)
        self._rows.extend((due, sent, done, index, status, held))
        places.release()

    async def _call(self, index: int) -> tuple[float, int]:
        """When a call was answered, and by what status."""
        call = self._calls[index]
        try:
            answer = await self._sender.send(call)
        except CallFailed as error:
            return time.perf_counter(), self._status(error.label, str(error))
        done = time.perf_counter()
        self._n_answers += 1
        if self._n_answers % CHECKED_ONE_IN == 1 or not self._tokens[index]:
            try:
                self._tokens[index] = call.check(answer)
            except ProtocolError as error:
                return done, self._status(WRONG_ANSWER, str(error))
        return done, 0

    def _status(self, label: str, text: str) -> int:
        self._examples.setdefault(label, text)
        return self._labels.setdefault(label, len(self._labels))

    async def _sleep_until(self, when: float) -> None:
        """Sleeps, or not if that time has passed or the run was stopped."""
        delay = min(when, self._end) - time.perf_counter()
        if delay > 0.1:  # long enough for somebody to lose patience
            try:
                async with asyncio.timeout(delay):
                    await self._stopped.wait()
            except TimeoutError:
                pass
        elif delay > 0:
            await asyncio.sleep(delay)

    async def _watch_cpu(self, start: float) -> None:
        """Counts this process' CPU time from `start` to the end."""
        await self._sleep_until(start)
        before = time.process_time()
        await self._sleep_until(self._end)
        self._cpu_seconds = time.process_time() - before
