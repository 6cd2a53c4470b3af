"""Tests of the scheduler with a fake engine and a fake clock.

They check delivery, admission, cancellation, deadlines, failures and health. A lane is a thread that runs batches on
the engine. A probe runs a sequence that every working engine can compute.
"""

import asyncio
import contextlib
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from fake_engine import FakeEngine, fake_rows
from waiting import collector_off, until

from encserve_server.engine.base import BatchResult
from encserve_server.errors import (
    DeadlineExpired,
    EncserveError,
    EngineUnhealthy,
    InferenceFailed,
    QueueFull,
    RequestTooLarge,
    ShareExceeded,
)
from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.scheduling.scheduler import Scheduler, SchedulerLimits
from encserve_server.types.arrays import ModelInput, OutputArrays, TokenIds
from encserve_server.types.callers import ANY_SENDER, Caller, Priority, Sender
from encserve_server.types.sequences import Batch, TokenSequence

POISON, NAN, CRASH, STUCK = 666, 777, 888, 999
LIMIT = 100  # the queue holds at most this number of tokens
BULK = Sender(priority=Priority.BULK)


class Recorder:
    """An observer that counts the events of the scheduler."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.busy_seconds = 0.0

    def register_queue_gauges(
        self,
        requests: Callable[[], int],
        sequences: Callable[[], int],
        tokens: Callable[[], int],
        bulk_tokens: Callable[[], int],
    ) -> None:
        del bulk_tokens
        self._queue = requests, sequences, tokens

    @property
    def requests(self) -> int:
        return self._queue[0]()

    @property
    def queue(self) -> tuple[int, int]:
        """Return the number of waiting sequences, and their cost in tokens."""
        return self._queue[1](), self._queue[2]()

    def batch_ran(self, batch: Batch) -> None:
        self.counts["batches"] += 1
        self.counts["tokens"] += batch.tokens

    def batch_failed(self) -> None:
        self.counts["failed"] += 1

    def was_busy(self, seconds: float) -> None:
        self.busy_seconds += seconds

    def waited(self, queue_seconds: float) -> None:
        self.counts["waited"] += 1

    def expired(self) -> None:
        self.counts["expired"] += 1

    def cancelled(self, stage: str) -> None:
        self.counts[f"cancelled {stage}"] += 1

    @property
    def dropped(self) -> tuple[int, int, int]:
        """Return three counts of sequences: expired, cancelled in the queue, and cancelled in a batch."""
        return self.counts["expired"], self.counts["cancelled queued"], self.counts["cancelled running"]


def finite_rows(result: BatchResult, sequences: Sequence[TokenSequence]) -> list[OutputArrays | None]:
    """Return the hidden states of each sequence, or None for a sequence with numbers that are not finite."""
    assert len(result.lengths) == len(sequences)
    return [(rows,) if np.isfinite(rows).all() else None for rows in result.rows]


class BrokenTracer:
    """A tracer that raises for every batch."""

    def ran(self, requests: Sequence[object], batch: Batch) -> None:
        raise RuntimeError("the tracer has a bug")


class Span:
    """A fake span of a traced request. It checks the times of the stage `queue`."""

    def stage(self, name: str, began_at: float, ended_at: float) -> None:
        assert name == "queue"
        assert ended_at >= began_at


class Bench:
    """A scheduler with its engine, clock and observer."""

    def __init__(self, lanes: int, *, batch_tokens: int = 10, **limits: Any) -> None:
        self.engine = FakeEngine(poison=POISON, nan_id=NAN, max_parallel_runs=lanes)
        self.clock = FakeClock()
        self.seen = Recorder()
        self.health_changes = 0
        self.scheduler = Scheduler(
            self.engine,
            finite_rows,
            BatchPolicy(batch_tokens, 16, 1.0),
            SchedulerLimits(LIMIT, **limits),
            clock=self.clock,
            observer=self.seen,
            on_health_change=self._count_change,
            tracer=BrokenTracer(),
        )

    def _count_change(self) -> None:
        self.health_changes += 1

    async def encode(
        self, *inputs: ModelInput, deadline: float = math.inf, extra_cost: int = 0, sender: Sender = ANY_SENDER
    ) -> list[TokenSequence]:
        """Send one call and return its sequences. Each sequence costs its length plus `extra_cost` tokens."""
        sequences = [TokenSequence(it, len(it), cost=len(it) + extra_cost) for it in inputs]
        await self.scheduler.run(sequences, deadline, sender=sender)
        return sequences

    def send(self, *inputs: ModelInput, **how: Any) -> "asyncio.Task[list[TokenSequence]]":
        return asyncio.create_task(self.encode(*inputs, **how))

    async def queue(self, *calls: Sequence[ModelInput], **how: Any) -> "list[asyncio.Task[list[TokenSequence]]]":
        """Send calls, and wait until all calls are queued or one call is done."""
        before = self.seen.queue[0]
        tasks = [self.send(*call, **how) for call in calls]
        await until(lambda: self.seen.queue[0] == before + sum(map(len, calls)) or any(it.done() for it in tasks))
        return tasks

    async def busy(self) -> "asyncio.Task[list[TokenSequence]]":
        """Send a first call and hold it in the engine, so that later calls wait. Return the task of the call."""
        self.engine.hold()
        call = self.send(ids(1))
        await self.engine_started()
        return call

    async def engine_started(self) -> None:
        assert await asyncio.to_thread(self.engine.started.acquire, timeout=60)

    async def pass_seconds(self, seconds: int) -> None:
        """Advance the clock second by second. Let the event loop run after each second."""
        for _ in range(seconds):
            self.clock.advance(1)
            await settle()

    def second_passes_and(self, condition: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that checks `condition`, and advances the clock by one second if `condition` is false.

        A probe fails if no lane is idle. The scheduler then waits one second before the next probe. So `condition` may
        need several seconds.
        """

        def check() -> bool:
            if not condition() and self.clock.sleepers:
                self.clock.advance(1.0)
            return condition()

        return check

    def before_run(self, monkeypatch: pytest.MonkeyPatch, function: Callable[[Sequence[ModelInput]], object]) -> None:
        """Before each run, call `function` with the inputs of the batch, in the engine's thread."""
        run = self.engine.run

        def call_and_run(sequences: Sequence[ModelInput], **options: Any) -> BatchResult:
            function(sequences)
            return run(sequences, **options)

        monkeypatch.setattr(self.engine, "run", call_and_run)

    def raise_for(self, monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[Sequence[ModelInput]], bool]) -> None:
        """Crash the engine's thread in every batch for which `is_bad` is true."""

        def crash(sequences: Sequence[ModelInput]) -> None:
            if is_bad(sequences):
                raise SystemExit("a bug")

        self.before_run(monkeypatch, crash)


def ids(*values: int) -> TokenIds:
    return np.array(values, np.int64)


def tokens(count: int, value: int = 1) -> TokenIds:
    return np.full(count, value, np.int64)


def right(results: Sequence[TokenSequence]) -> bool:
    """Return whether each sequence has the hidden states of its own ids."""
    return all(np.array_equal(result.outputs[0], fake_rows(result.input, 4)) for result in results)


async def settle() -> None:
    """Let the event loop run its ready tasks."""
    for _ in range(10):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def bench_of(lanes: int, *, has_wide_session: bool = True, **how: Any) -> AsyncIterator[Bench]:
    bench = Bench(lanes, **how)
    bench.engine.has_wide_session = has_wide_session
    bench.scheduler.start()
    try:
        yield bench
    finally:
        bench.engine.let_go()
        await bench.scheduler.close()


@pytest.fixture(params=[1, 3], ids=["one-lane", "three-lanes"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with bench_of(request.param, batch_tokens=64) as bench:
        yield bench


@pytest.fixture
async def one_lane() -> AsyncIterator[Bench]:
    async with bench_of(1) as bench:
        yield bench


@pytest.fixture
async def two_lanes() -> AsyncIterator[Bench]:
    async with bench_of(2) as bench:
        yield bench


@pytest.fixture
async def two_narrow_lanes() -> AsyncIterator[Bench]:
    async with bench_of(2, has_wide_session=False) as bench:
        yield bench


# Delivery


async def test_each_call_gets_its_own_rows(bench: Bench) -> None:
    first = await bench.busy()
    calls = [[ids(*range(i + 1, i + 2 + j)) for j in range(1 + i % 3)] for i in range(12)]
    running = await bench.queue(*calls)
    bench.engine.let_go()
    for call, task in zip(calls, running, strict=True):
        results = await task
        assert [it.input for it in results] == call
        assert right(results)
    assert right(await first)
    assert bench.seen.queue == (0, 0)
    assert bench.seen.counts["batches"] < sum(map(len, calls)), "nothing was batched"


async def test_wrong_row_counts_are_a_failure_of_the_engine(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench.engine.run

    def short(sequences: Sequence[TokenIds], **options: Any) -> BatchResult:
        result = run(sequences, **options)
        return replace(result, output=result.output[:, :-1])

    monkeypatch.setattr(bench.engine, "run", short)
    with pytest.raises(InferenceFailed):
        await bench.encode(ids(1, 2), ids(3))


async def test_the_engine_continues_while_the_event_loop_is_busy(bench: Bench) -> None:
    first = await bench.busy()
    (second,) = await bench.queue([ids(2)])
    bench.engine.let_one_go()
    # This line blocks the event loop until the second batch has begun.
    assert bench.engine.started.acquire(timeout=60)
    assert not first.done()
    bench.engine.let_go()
    assert right(await first)
    assert right(await second)


async def test_a_tracer_that_raises_does_not_fail_the_call(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    sequence = TokenSequence(ids(3), 1, cost=1)
    await asyncio.wait_for(bench.scheduler.run([sequence], span=Span()), 60)  # type: ignore[arg-type]
    assert right([sequence])
    await until(lambda: bench.seen.counts["batches"] == 1)
    assert caplog.messages == ["a batch could not be traced"]


async def test_idle_lanes_store_no_results(bench: Bench) -> None:
    results = await bench.encode(ids(1, 2), ids(3))
    rows = weakref.ref(results[0].outputs[0])
    del results
    await until(lambda: rows() is None)


@pytest.mark.parametrize("how", ["poison", "expired", "broken", "closed"])
async def test_a_failed_call_needs_no_cycle_collector(bench: Bench, how: str) -> None:
    """The inputs of a failed call are freed without the cycle collector.

    An error refers to the frames of its traceback, and these frames refer to the inputs. So an error in a reference
    cycle would keep the inputs in memory.
    """
    first = await bench.busy()
    inputs = [ids(2), ids(POISON if how == "poison" else 3)]
    references = [weakref.ref(it) for it in inputs]
    call = bench.send(*inputs, deadline=5.0 if how == "expired" else math.inf)
    await until(lambda: bench.seen.queue[0] == 2)
    with collector_off():
        del inputs
        bench.clock.advance(6)
        bench.engine.broken = how == "broken"
        closing = asyncio.create_task(bench.scheduler.close()) if how == "closed" else None
        bench.engine.let_go()
        for task in (call, first):
            with contextlib.suppress(EncserveError):
                await task
        del call, first, task
        if closing is not None:
            await closing
        await until(lambda: not any(it() is not None for it in references))


# Admission. The limit of the queue is 100 tokens.


@pytest.mark.parametrize("extra_cost", [0, 40], ids=["tokens", "tokens and outputs"])
async def test_a_full_queue_refuses_the_whole_call_until_a_quarter_is_free(bench: Bench, extra_cost: int) -> None:
    """After a refusal, the queue refuses all calls until a quarter of the queue is free.

    Otherwise, short calls would fill every gap, and long calls would always be refused.
    """
    bench.scheduler.check_open()
    first = await bench.busy()
    waiting = await bench.queue(*[[tokens(45 - extra_cost)]] * 2, extra_cost=extra_cost)
    assert bench.seen.queue == (2, 90)
    bench.scheduler.check_open()
    with pytest.raises(QueueFull, match=r"holds 90 of at most 100 tokens and this request has 11;") as caught:
        await bench.encode(ids(1), tokens(10))
    assert caught.value.retry_delay_s > 0
    assert bench.seen.queue == (2, 90), "part of the refused call was queued"
    with pytest.raises(QueueFull, match="requests again at 75 tokens"):
        await bench.encode(ids(1, 2))
    with pytest.raises(QueueFull, match="holds 90"):
        bench.scheduler.check_open()
    waiting.pop().cancel()
    await until(lambda: bench.seen.queue == (1, 45))
    waiting += await bench.queue([tokens(11)])
    bench.engine.let_go()
    await asyncio.gather(first, *waiting)
    await until(lambda: bench.seen.counts["batches"] >= 2)
    assert bench.seen.counts["tokens"] == 1 + 45 - extra_cost + 11, "the cost of outputs was counted as tokens"


@pytest.mark.parametrize(
    ("lengths", "extra_cost", "figures"), [([101], 0, "at most 100 .* was 101"), ([1, 1], 50, "was 2, .* 102")]
)
async def test_a_call_larger_than_the_queue_is_always_refused(
    bench: Bench, lengths: list[int], extra_cost: int, figures: str
) -> None:
    with pytest.raises(RequestTooLarge, match=figures):
        await bench.encode(*map(tokens, lengths), extra_cost=extra_cost)
    assert bench.engine.batches == []


async def test_the_queue_never_exceeds_its_limit(bench: Bench) -> None:
    """Random calls arrive, and some are cancelled. The engine runs from time to time.

    At the end, every call is done, and the queue is empty.
    """
    rng = np.random.default_rng(0)
    bench.engine.hold()
    tasks, most = [], 0
    for i in range(400):
        tasks.append(bench.send(tokens(int(rng.integers(1, 30)), 1 + i % 50)))
        if rng.random() < 0.33:
            tasks[int(rng.integers(len(tasks)))].cancel()
        if rng.random() < 0.2:
            bench.engine.let_one_go()
        await asyncio.sleep(0)
        most = max(most, bench.seen.queue[1])
    bench.engine.let_go()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    allowed = (list, QueueFull, asyncio.CancelledError)
    assert all(isinstance(result, allowed) for result in results), Counter(map(type, results))
    assert 50 < most <= LIMIT
    await until(lambda: (bench.seen.requests, bench.seen.queue) == (0, (0, 0)))
    assert right(await bench.encode(ids(1)))


async def test_bulk_is_limited_and_does_not_close_the_queue(bench: Bench) -> None:
    """Bulk calls may take at most half of the queue.

    A bulk call is also refused if it would leave less than a quarter of the queue free.
    """
    first = await bench.busy()
    waiting = await bench.queue([tokens(25)], [tokens(20)], sender=BULK)
    with pytest.raises(ShareExceeded, match="bulk has 45 tokens waiting, its share of the queue is 50"):
        await bench.encode(tokens(6), sender=BULK)
    waiting += await bench.queue([tokens(26)])
    with pytest.raises(QueueFull):
        await bench.encode(tokens(5), sender=BULK)
    waiting += await bench.queue([tokens(29)])
    bench.engine.let_go()
    await asyncio.gather(first, *waiting)


async def test_only_the_caller_over_its_share_is_refused(bench: Bench) -> None:
    """The first caller may take half of the queue. Then a second caller, with twice the weight, may take 40 %.

    So another caller always finds room.
    """
    first = await bench.busy()
    flood, other = Sender(Caller("flood")), Sender(Caller("other", 2.0))
    waiting = await bench.queue([tokens(25)], [tokens(25)], sender=flood)
    with pytest.raises(ShareExceeded, match="flood has 50 tokens waiting, .* is 50, and this request has 1;") as caught:
        await bench.encode(ids(1), sender=flood)
    assert caught.value.retry_delay_s > 0
    with pytest.raises(ShareExceeded):
        bench.scheduler.check_share(flood)
    bench.scheduler.check_share(other)
    waiting += await bench.queue([tokens(25)], [tokens(10)], sender=other)
    with pytest.raises(ShareExceeded, match="share of the queue is 40"):
        await bench.encode(tokens(6), sender=other)
    bench.engine.let_go()
    await asyncio.gather(first, *waiting)
    await bench.encode(ids(1), sender=flood)


async def test_a_caller_with_an_empty_queue_may_send_one_large_call(bench: Bench) -> None:
    first = await bench.busy()
    waiting = await bench.queue([tokens(60)], sender=BULK)
    bench.engine.let_go()
    await asyncio.gather(first, *waiting)
    await bench.encode(tokens(100), sender=Sender(Caller("large"), Priority.BULK))


# Cancellation and deadlines


async def test_a_cancelled_call_does_not_affect_its_batch(bench: Bench) -> None:
    first = await bench.busy()
    calls = await bench.queue(*[[ids(i, i)] for i in range(1, 9)])
    bench.engine.let_one_go()
    await first
    await bench.engine_started()
    cancelled = calls.pop(3)
    cancelled.cancel()
    await until(cancelled.done)
    assert bench.seen.dropped == (0, 0, 1)
    bench.engine.let_go()
    assert all(right(it) for it in await asyncio.gather(*calls))
    assert right(await bench.encode(ids(9)))


async def test_a_call_cancelled_in_the_queue_frees_its_room_and_never_runs(bench: Bench) -> None:
    first = await bench.busy()
    (cancelled,) = await bench.queue([tokens(60)])
    cancelled.cancel()
    await until(cancelled.done)
    assert bench.seen.queue == (0, 0)
    assert bench.seen.dropped == (0, 1, 0)
    later = await bench.queue([tokens(100)])
    bench.engine.let_go()
    await asyncio.gather(first, *later)
    assert [60] not in bench.engine.batches


@pytest.mark.parametrize("expires", [False, True])
async def test_a_sequence_dropped_by_a_lane_is_counted_once(bench: Bench, expires: bool) -> None:
    """A lane may drop the sequences of a cancelled or expired call before the event loop runs the call's task.

    Each dropped sequence must be counted once.
    """
    first = await bench.busy()
    (dropped,) = await bench.queue([ids(2), ids(2)], deadline=5.0)
    (other,) = await bench.queue([ids(3)])
    if expires:  # the lane drops the call first, and gRPC cancels the call later
        bench.clock.advance(6)
    else:
        dropped.cancel()
    bench.engine.let_one_go()
    assert bench.engine.started.acquire(timeout=60)  # blocks the event loop, so that the lane drops the call first
    dropped.cancel()
    bench.engine.let_go()
    await asyncio.wait([dropped])
    await asyncio.gather(first, other)
    assert bench.engine.batches == [[1], [1]]
    assert bench.seen.dropped == ((2, 0, 0) if expires else (0, 2, 0))


async def test_an_expired_call_never_runs(bench: Bench) -> None:
    first = await bench.busy()
    (short,) = await bench.queue([ids(2)], deadline=5.0)
    (long,) = await bench.queue([ids(3)], deadline=50.0)
    (cancelled,) = await bench.queue([ids(4)], deadline=5.0)
    bench.clock.advance(10)
    cancelled.cancel()  # gRPC cancels a call at its deadline
    await until(cancelled.done)
    assert bench.seen.dropped == (1, 0, 0)
    with pytest.raises(DeadlineExpired):
        await bench.encode(ids(2), deadline=10.0)
    bench.engine.let_go()
    with pytest.raises(DeadlineExpired):
        await short
    assert right(await long)
    await first
    assert (bench.engine.batches, bench.seen.dropped) == ([[1], [1]], (3, 0, 0))


async def test_all_sequences_of_an_expired_call_are_counted(one_lane: Bench) -> None:
    """All four sequences of the call are counted, although the lane has checked only the first sequence."""
    first = await one_lane.busy()
    (long,) = await one_lane.queue([tokens(5)])
    (short,) = await one_lane.queue([tokens(length) for length in (5, 9, 9, 9)], deadline=5.0)
    one_lane.clock.advance(6)
    one_lane.engine.let_one_go()
    with pytest.raises(DeadlineExpired):
        await short
    assert one_lane.seen.dropped == (4, 0, 0)
    assert one_lane.seen.queue == (0, 0)
    one_lane.engine.let_go()
    await asyncio.gather(first, long)
    assert one_lane.engine.batches == [[1], [5]]


# Failures


@pytest.mark.parametrize(("bad", "place"), [(POISON, 0), (POISON, 3), (POISON, 7), (NAN, 3)])
async def test_a_bad_sequence_fails_only_its_own_call(bench: Bench, bad: int, place: int) -> None:
    first = await bench.busy()
    calls = await bench.queue(*[[ids(bad if i == place else i + 1)] for i in range(8)])
    bench.engine.let_go()
    results = await asyncio.gather(*calls, return_exceptions=True)
    await first
    assert [isinstance(result, InferenceFailed) for result in results] == [i == place for i in range(8)]
    assert all(right(it) for it in results if isinstance(it, list))
    assert bench.scheduler.not_ready_reason() == ""


async def test_bad_calls_never_make_the_engine_unhealthy(bench: Bench) -> None:
    """After several failures, the scheduler probes the engine, and the probe succeeds.

    So a caller with bad calls cannot stop the server.
    """
    for _ in range(10):
        with pytest.raises(InferenceFailed):
            await bench.encode(ids(POISON))
    assert bench.health_changes == 0
    assert right(await bench.encode(ids(1)))


async def test_a_broken_engine_is_unhealthy_until_a_probe_succeeds(bench: Bench) -> None:
    bench.engine.broken = True
    for _ in range(3):
        with pytest.raises((InferenceFailed, EngineUnhealthy)):
            await bench.encode(ids(1))
    await until(lambda: bench.scheduler.not_ready_reason() != "")
    with pytest.raises(EngineUnhealthy, match="3 times") as caught:
        await bench.encode(ids(1))
    assert "the device is lost" not in str(caught.value), "the error text of the engine reached the caller"
    assert (bench.health_changes, bench.seen.busy_seconds) == (1, 0)
    bench.engine.broken = False
    bench.engine.hold()
    runs = len(bench.engine.batches)

    await until(bench.second_passes_and(lambda: len(bench.engine.batches) > runs))
    bench.clock.advance(20)
    bench.engine.let_go()
    await until(lambda: bench.scheduler.not_ready_reason() == "")
    assert right(await bench.encode(ids(1)))
    await until(lambda: bench.seen.counts["batches"] == 1)
    assert (bench.health_changes, bench.seen.busy_seconds) == (2, 20)


async def test_an_engine_without_finite_numbers_is_unhealthy(bench: Bench) -> None:
    bench.engine.nan_id = 0  # the probe has this id, so the probe fails too
    for _ in range(3):
        with pytest.raises((InferenceFailed, EngineUnhealthy)):
            await bench.encode(ids(0))
    await until(lambda: bench.scheduler.not_ready_reason() != "")


@pytest.mark.parametrize("lanes", [1, 4])
async def test_a_broken_engine_fails_all_waiting_calls_at_once(lanes: int) -> None:
    """The first two failed runs fail only their own calls.

    After the third failed run, the scheduler probes the engine. The probe fails, so all other calls fail at once.
    """
    async with bench_of(lanes) as bench:
        first = await bench.busy()
        calls = await bench.queue(*[[tokens(10, i)] for i in range(1, 9)])
        bench.engine.broken = True
        bench.engine.let_go()
        results = await asyncio.gather(first, *calls, return_exceptions=True)
        assert Counter(map(type, results)) == {InferenceFailed: 2, EngineUnhealthy: 7}
        assert (bench.health_changes, bench.seen.queue) == (1, (0, 0))


async def test_a_crash_of_a_lane_ends_all_calls_for_good(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await bench.busy()
    monkeypatch.setattr("encserve_server.scheduling.queue.plan_batch", lambda *_: 1 / 0)
    (waiting,) = await bench.queue([ids(2)])
    bench.engine.let_go()
    with pytest.raises(EngineUnhealthy, match="the scheduler has stopped"):
        await waiting
    await first
    with pytest.raises(EngineUnhealthy):
        await bench.encode(ids(3))


async def test_a_crash_while_parts_of_a_batch_run_leaves_no_call_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a batch fails, its lane runs the batch again in two halves.

    A half that waits for its run is not in a queue. So a crashing lane must end the calls of this half.
    """
    first = await bench.busy()
    calls = await bench.queue(*[[ids(i)] for i in range(1, 5)])
    bench.engine.poison = 4
    bench.raise_for(monkeypatch, lambda sequences: len(sequences) == 2)
    bench.engine.let_go()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert all(isinstance(result, EngineUnhealthy) for result in results)
    await first


async def test_a_scheduler_that_crashed_never_becomes_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane crashes, and the other lane finds a broken engine.

    Later, the engine works again, but the scheduler stays stopped.
    """
    async with bench_of(2, has_wide_session=False, failures_before_probe=1) as bench:
        bench.raise_for(monkeypatch, lambda sequences: CRASH in sequences[0])
        first = await bench.busy()
        with pytest.raises(EngineUnhealthy):
            await bench.encode(ids(CRASH))
        bench.engine.broken = True
        bench.engine.let_go()
        with pytest.raises(EngineUnhealthy):
            await first
        bench.engine.broken = False
        for _ in range(3):
            bench.clock.advance(10)
            await settle()
        assert "has stopped" in bench.scheduler.not_ready_reason()
        assert bench.health_changes == 1


# Stalled runs


async def test_calls_behind_a_stalled_run_get_an_error(bench: Bench) -> None:
    """Calls that wait behind a run of more than 60 s get an error. The call in the stalled run may still succeed.

    Otherwise, calls without a deadline would wait until the run ends.
    """
    for round_ in range(2):
        first = await bench.busy()
        waiting = await bench.queue(*[[ids(2), ids(3)]] * 2)
        await bench.pass_seconds(60)
        assert (bench.health_changes, [call.done() for call in waiting]) == (round_, [False, False])
        assert bench.scheduler.not_ready_reason() == ""
        await bench.pass_seconds(1)
        for call in waiting:
            with pytest.raises(EngineUnhealthy, match="61 s"):
                await call
        assert bench.health_changes == round_ + 1
        assert (bench.seen.requests, bench.seen.queue) == (0, (0, 0))
        with pytest.raises(EngineUnhealthy, match="61 s"):
            await bench.encode(ids(4))
        with pytest.raises(EngineUnhealthy, match="61 s"):
            bench.scheduler.check_open()
        assert not first.done()
        bench.engine.let_go()
        assert right(await first)
        assert bench.scheduler.not_ready_reason() == ""
    assert right(await bench.encode(ids(5)))
    assert bench.engine.batches == [[1]] * 3, "a call ran after the caller had got an error"
    assert bench.seen.dropped == (0, 0, 0)


async def test_a_call_with_one_part_in_a_stalled_run_gets_an_error(one_lane: Bench) -> None:
    one_lane.engine.hold()
    call = one_lane.send(*[tokens(10, i) for i in (2, 3)])
    await one_lane.engine_started()
    await one_lane.pass_seconds(61)
    with pytest.raises(EngineUnhealthy):
        await call
    assert one_lane.seen.queue == (0, 0)
    one_lane.engine.let_go()
    await until(lambda: not one_lane.scheduler.not_ready_reason())
    assert right(await one_lane.encode(ids(5)))
    assert one_lane.engine.batches == [[10], [1]]


async def test_a_suspended_process_has_no_stalled_run(one_lane: Bench) -> None:
    """SIGSTOP, or a suspended machine, pauses the event loop and the run. The pause does not count as a stall."""
    first = await one_lane.busy()
    (waiting,) = await one_lane.queue([ids(2)])
    await one_lane.pass_seconds(30)
    one_lane.clock.advance(3600)
    assert one_lane.scheduler.not_ready_reason() == ""  # the first check after the pause
    await settle()
    assert one_lane.scheduler.not_ready_reason() == ""
    assert not waiting.done()
    await one_lane.pass_seconds(20)
    assert one_lane.scheduler.not_ready_reason() == ""
    await one_lane.pass_seconds(20)
    with pytest.raises(EngineUnhealthy, match="a batch has been running for"):
        await waiting
    one_lane.engine.let_go()
    assert right(await first)


async def test_a_run_may_end_while_readiness_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler is ready, even if the engine's thread ends a run while the event loop reads the readiness."""
    first = await bench.busy()
    now, loop_thread = bench.clock.now, threading.get_ident()

    def run_ends() -> float:
        if threading.get_ident() == loop_thread:
            bench.engine.let_go()
            while "engine free" not in repr(bench.scheduler):
                time.sleep(0.001)
        return now()

    monkeypatch.setattr(bench.clock, "now", run_ends)
    assert bench.scheduler.not_ready_reason() == ""
    monkeypatch.undo()
    await first


# Lanes. In these tests, a batch has at most 10 tokens.


async def test_a_single_batch_has_the_whole_device(two_lanes: Bench) -> None:
    """A single batch has the whole device. So a call that arrives during its run waits, although a lane is free."""
    first = await two_lanes.busy()
    (second,) = await two_lanes.queue([ids(2)])
    assert not await asyncio.to_thread(two_lanes.engine.started.acquire, timeout=0.05)
    two_lanes.engine.let_go()
    assert right(await first + await second)
    assert two_lanes.engine.alone == [True, True]


async def test_several_batches_run_in_parallel(two_lanes: Bench) -> None:
    """The running batches share the device, so a new call starts at once if a lane is free."""
    two_lanes.engine.hold()
    call = two_lanes.send(*[tokens(10, i) for i in (1, 2, 3)])
    await two_lanes.engine_started()
    await two_lanes.engine_started()
    assert not await asyncio.to_thread(two_lanes.engine.started.acquire, timeout=0.05), "a batch without a lane started"
    for done in (1, 2):
        two_lanes.engine.let_one_go()
        await until(lambda done=done: two_lanes.seen.counts["batches"] == done)  # type: ignore[misc]
    await two_lanes.engine_started()
    newcomer = two_lanes.send(ids(7))
    await two_lanes.engine_started()
    assert two_lanes.engine.alone == [False] * 4
    two_lanes.engine.let_go()
    assert right(await newcomer)
    assert right(await call)


async def test_a_probe_runs_in_an_idle_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a successful probe in an idle lane, the scheduler is ready, although the run in the other lane goes on."""
    bench = Bench(2, stall_seconds=math.inf)
    bench.engine.has_wide_session = False
    bench.scheduler.start()
    began, ends = threading.Event(), threading.Event()

    def hang(sequences: Sequence[ModelInput]) -> None:
        if STUCK in sequences[0]:
            began.set()
            assert ends.wait(60)

    bench.before_run(monkeypatch, hang)
    stuck = bench.send(ids(STUCK))
    await asyncio.to_thread(began.wait, 60)
    bench.engine.broken = True
    for _ in range(3):
        with pytest.raises((InferenceFailed, EngineUnhealthy)):
            await bench.encode(ids(1))
    await until(lambda: bench.scheduler.not_ready_reason() != "")
    bench.engine.broken = False
    await until(bench.second_passes_and(lambda: bench.scheduler.not_ready_reason() == ""))
    assert not stuck.done()
    ends.set()
    assert right(await stuck)
    await bench.scheduler.close()


async def test_the_lane_that_ran_last_runs_next(two_lanes: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most calls run in the lane of the previous call, because the caches of this lane's CPU still have the data.

    If this lane becomes idle too late, a call runs in another lane.
    """
    threads: list[str] = []
    two_lanes.before_run(monkeypatch, lambda _: threads.append(threading.current_thread().name))
    two_lanes.engine.hold()
    call = two_lanes.send(*[tokens(10, i) for i in (1, 2, 3)])
    await until(lambda: len(threads) == 2)
    two_lanes.engine.let_go()
    await call
    assert len(set(threads)) == 2
    threads.clear()
    for i in range(30):
        await two_lanes.encode(ids(i))
        await asyncio.sleep(0.002)  # time for the lane to become idle
    assert sum(before != after for before, after in pairwise(threads)) < 15


async def test_parallel_runs_count_as_busy_once(two_narrow_lanes: Bench) -> None:
    """One run is active from t = 2 s to t = 6 s, and the other from t = 4 s to t = 12 s. Idle time does not count.

    The runs overlap, because this engine never gives one batch the whole device.
    """
    bench = two_narrow_lanes
    bench.engine.hold()
    bench.clock.advance(2)
    calls = []
    for i in range(2):
        calls.append(bench.send(ids(i)))
        await bench.engine_started()
        bench.clock.advance(2)
    bench.engine.let_one_go()
    await until(lambda: bench.seen.counts["batches"] == 1)
    assert bench.seen.busy_seconds == 4
    bench.clock.advance(6)
    bench.engine.let_go()
    await asyncio.gather(*calls)
    bench.clock.advance(30)
    await bench.encode(ids(1))
    await until(lambda: bench.seen.counts["batches"] == 3)
    assert bench.seen.busy_seconds == 10


# Closing the scheduler


async def test_closing_ends_running_waiting_and_later_calls(bench: Bench) -> None:
    first = await bench.busy()
    waiting = await bench.queue(*[[ids(2)]] * 3)
    closing = asyncio.create_task(bench.scheduler.close())
    for call in (first, *waiting):
        with pytest.raises(EngineUnhealthy):
            await call
    bench.engine.let_go()
    await asyncio.wait_for(closing, 60)
    assert bench.engine.closed
    assert bench.engine.batches == [[1]]
    with pytest.raises(EngineUnhealthy):
        await asyncio.wait_for(bench.encode(ids(1)), 60)


async def test_closing_while_parts_of_a_batch_run_leaves_no_call_waiting(bench: Bench) -> None:
    first = await bench.busy()
    calls = await bench.queue(*[[ids(i)] for i in range(1, 5)])
    bench.engine.poison = 4
    bench.engine.let_one_go()  # runs the first call
    await first
    await bench.engine_started()
    bench.engine.let_one_go()  # runs the batch of four calls, which fails
    await bench.engine_started()
    closing = asyncio.create_task(bench.scheduler.close())
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert all(isinstance(result, EngineUnhealthy) for result in results)
    bench.engine.let_go()
    await closing
    assert len(bench.engine.batches) == 3, "a part of the batch ran after its calls had ended"
