"""The scheduler with a fake engine and a fake clock: admission, delivery, cancellation, deadlines, failures, health."""

import asyncio
import contextlib
import gc
import math
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from fake_clock import FakeClock
from fake_engine import FakeEngine, fake_rows

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
from encserve_server.scheduling.lanes import Outcome
from encserve_server.scheduling.queue import PendingQueue
from encserve_server.scheduling.scheduler import Scheduler, SchedulerLimits
from encserve_server.types.arrays import ModelInput, OutputArrays, TokenIds
from encserve_server.types.callers import ANY_SENDER, Caller, Priority, Sender
from encserve_server.types.sequences import Batch, ClosedBy, TokenSequence

POISON, NAN = 666, 777


class Recorder:
    """An observer that remembers."""

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


def rows_of(result: BatchResult, sequences: Sequence[TokenSequence]) -> list[OutputArrays | None]:
    """The rows of each sequence, None where they are not finite."""
    assert len(result.lengths) == len(sequences)
    return [(rows,) if np.isfinite(rows).all() else None for rows in result.rows]


class Bench:
    """A scheduler and everything around it."""

    def __init__(self, policy: BatchPolicy, limits: SchedulerLimits, lanes: int) -> None:
        self.engine = FakeEngine(poison=POISON, nan_id=NAN, max_parallel_runs=lanes)
        self.clock = FakeClock()
        self.seen = Recorder()
        self.health_changes = 0
        self.scheduler = Scheduler(
            self.engine,
            rows_of,
            policy,
            limits,
            clock=self.clock,
            observer=self.seen,
            on_health_change=self._changed,
        )

    def _changed(self) -> None:
        self.health_changes += 1

    async def encode(
        self,
        inputs: Sequence[ModelInput],
        deadline: float = math.inf,
        extra_cost: int = 0,
        sender: Sender = ANY_SENDER,
    ) -> list[TokenSequence]:
        """One call; the outputs of each sequence cost so many tokens beside its own."""
        sequences = [TokenSequence(it, len(it), cost=len(it) + extra_cost) for it in inputs]
        await self.scheduler.run(sequences, deadline, sender=sender)
        return sequences

    async def busy(self) -> asyncio.Task[list[TokenSequence]]:
        """Holds the engine with a first call, so that everything after it queues."""
        self.engine.hold()
        call = asyncio.create_task(self.encode([ids(1)]))
        await self.engine_started()
        return call

    async def engine_started(self) -> None:
        assert await asyncio.to_thread(self.engine.started.acquire, timeout=60)


def ids(*values: int) -> TokenIds:
    return np.array(values, np.int64)


def right(sequences: Sequence[TokenIds], results: Sequence[TokenSequence]) -> bool:
    return len(sequences) == len(results) and all(
        np.array_equal(result.outputs[0], fake_rows(its, 4)) for its, result in zip(sequences, results, strict=True)
    )


async def until(condition: Callable[[], bool]) -> None:
    """Yields to the loop until a condition holds; the test's own timeout bounds it."""
    while not condition():
        await asyncio.sleep(0)


@pytest.fixture(params=[1, 3], ids=["one-lane", "three-lanes"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    bench = Bench(BatchPolicy(64, 16, 1.0), SchedulerLimits(max_queue_tokens=100), request.param)
    bench.scheduler.start()
    yield bench
    bench.engine.let_go()
    await bench.scheduler.close()


async def test_rows_come_back_to_whom_they_belong(bench: Bench) -> None:
    """Fifty calls of one to three sequences at once."""
    first = await bench.busy()
    calls = [[ids(*range(i + 1, i + 2 + j)) for j in range(1 + i % 3)] for i in range(12)]
    running = [asyncio.create_task(bench.encode(call)) for call in calls]
    await until(lambda: bench.seen.queue[0] == sum(map(len, calls)))
    bench.engine.let_go()
    for call, task in zip(calls, running, strict=True):
        assert right(call, await task)
    assert right([ids(1)], await first)
    assert bench.seen.queue == (0, 0)
    assert bench.seen.counts["batches"] < sum(map(len, calls)), "nothing was batched"


async def test_an_idle_engine_starts_at_once(bench: Bench) -> None:
    """The fake clock never moves, so any timer would hang here."""
    assert right([ids(5)], await bench.encode([ids(5)]))


async def test_a_full_queue_refuses_at_once_and_all_of_a_call(bench: Bench) -> None:
    first = await bench.busy()
    waiting = asyncio.create_task(bench.encode([ids(*range(1, 91))]))
    await until(lambda: bench.seen.queue == (1, 90))
    with pytest.raises(QueueFull, match=r"holds 90 of at most 100 tokens and this request has 11") as caught:
        await bench.encode([ids(1), ids(*range(1, 11))])
    assert caught.value.retry_delay_s > 0
    assert bench.seen.queue == (1, 90), "part of the refused call was queued"
    bench.engine.let_go()
    await asyncio.gather(first, waiting)


async def test_whoever_was_refused_is_not_overtaken_by_a_shorter_call(bench: Bench) -> None:
    """Otherwise short calls, which always find room, would keep long ones out while there is too much to do."""
    first = await bench.busy()
    waiting = [asyncio.create_task(bench.encode([ids(*range(1, 31))])) for _ in range(3)]
    await until(lambda: bench.seen.queue == (3, 90))
    with pytest.raises(QueueFull, match=r"holds 90 of at most 100 tokens and this request has 11; try again"):
        await bench.encode([ids(*range(1, 12))])
    with pytest.raises(QueueFull, match=r"90 .* 100 .* has 2; once full it takes nothing before it holds at most 75;"):
        await bench.encode([ids(1, 2)])
    waiting.pop().cancel()
    await until(lambda: bench.seen.queue == (2, 60))
    again = asyncio.create_task(bench.encode([ids(*range(1, 12))]))
    await until(lambda: bench.seen.queue == (3, 71))
    bench.engine.let_go()
    await asyncio.gather(first, *waiting, again)


async def test_more_than_the_whole_queue_is_the_callers_mistake(bench: Bench) -> None:
    with pytest.raises(RequestTooLarge, match="at most 100 tokens in all .*; was 101"):
        await bench.encode([np.ones(101, np.int64)])


async def test_cancelling_in_mid_batch_touches_nobody_else(bench: Bench) -> None:
    """The neighbours of a caller that goes away while its batch runs are answered, and so is who comes after."""
    first = await bench.busy()
    calls = [asyncio.create_task(bench.encode([ids(i, i)])) for i in range(1, 9)]
    await until(lambda: bench.seen.queue[0] == 8)
    bench.engine.let_one_go()
    await first
    await bench.engine_started()
    calls[3].cancel()
    await until(calls[3].done)
    assert bench.seen.counts["cancelled running"] == 1
    bench.engine.let_go()
    for i, call in enumerate(calls, start=1):
        if i != 4:
            assert right([ids(i, i)], await call)
    assert right([ids(9)], await bench.encode([ids(9)]))


async def test_who_goes_while_queued_is_never_run_and_frees_its_room_at_once(bench: Bench) -> None:
    first = await bench.busy()
    going = asyncio.create_task(bench.encode([np.ones(60, np.int64)]))
    await until(lambda: bench.seen.queue == (1, 60))
    going.cancel()
    await until(going.done)
    assert bench.seen.queue == (0, 0)
    assert bench.seen.counts["cancelled queued"] == 1
    staying = asyncio.create_task(bench.encode([np.ones(100, np.int64)]))
    bench.engine.let_go()
    await asyncio.gather(first, staying)
    assert [60] not in bench.engine.batches


async def test_an_expired_entry_is_never_run(bench: Bench) -> None:
    first = await bench.busy()
    hasty = asyncio.create_task(bench.encode([ids(2)], deadline=5.0))
    patient = asyncio.create_task(bench.encode([ids(3)], deadline=50.0))
    await until(lambda: bench.seen.queue[0] == 2)
    bench.clock.advance(10)
    bench.engine.let_go()
    with pytest.raises(DeadlineExpired):
        await hasty
    assert right([ids(3)], await patient)
    await first
    assert (bench.engine.batches, bench.seen.counts["expired"]) == ([[1], [1]], 1)


async def test_a_deadline_already_past_is_not_queued(bench: Bench) -> None:
    bench.clock.advance(10)
    with pytest.raises(DeadlineExpired):
        await bench.encode([ids(2)], deadline=10.0)
    assert bench.engine.batches == []


async def test_a_call_cancelled_after_its_deadline_counts_as_expired(bench: Bench) -> None:
    """gRPC cancels the handler of a call whose deadline passes."""
    first = await bench.busy()
    call = asyncio.create_task(bench.encode([ids(2)], deadline=5.0))
    await until(lambda: bench.seen.queue[0] == 1)
    bench.clock.advance(6)
    call.cancel()
    await until(call.done)
    assert (bench.seen.counts["expired"], bench.seen.counts["cancelled queued"]) == (1, 0)
    bench.engine.let_go()
    await first


@pytest.mark.parametrize("place", range(8))
async def test_a_poisonous_sequence_takes_down_nobody_but_itself(bench: Bench, place: int) -> None:
    first = await bench.busy()
    calls = [asyncio.create_task(bench.encode([ids(POISON if i == place else i + 1)])) for i in range(8)]
    await until(lambda: bench.seen.queue[0] == 8)
    bench.engine.let_go()
    results = await asyncio.gather(*calls, return_exceptions=True)
    await first
    assert [isinstance(result, InferenceFailed) for result in results] == [i == place for i in range(8)]
    assert bench.scheduler.not_ready_reason() == ""


async def test_poison_alone_again_and_again_does_not_make_the_engine_unhealthy(bench: Bench) -> None:
    """After several failures a probe finds the engine well, so that no caller can switch a server off."""
    for _ in range(10):
        with pytest.raises(InferenceFailed):
            await bench.encode([ids(POISON)])
    assert bench.health_changes == 0
    assert right([ids(1)], await bench.encode([ids(1)]))


async def test_numbers_that_are_not_finite_fail_only_their_own_call(bench: Bench) -> None:
    first = await bench.busy()
    bad = asyncio.create_task(bench.encode([ids(NAN)]))
    good = asyncio.create_task(bench.encode([ids(2)]))
    await until(lambda: bench.seen.queue[0] == 2)
    bench.engine.let_go()
    with pytest.raises(InferenceFailed, match="not finite"):
        await bad
    assert right([ids(2)], await good)
    await first


async def test_a_broken_engine_is_unhealthy_and_comes_back_by_itself(bench: Bench) -> None:
    bench.engine.broken = True
    with pytest.raises(InferenceFailed):
        await bench.encode([ids(1)])
    with pytest.raises(InferenceFailed):
        await bench.encode([ids(1)])
    with pytest.raises((InferenceFailed, EngineUnhealthy)):
        await bench.encode([ids(1)])
    await until(lambda: bench.scheduler.not_ready_reason() != "")
    with pytest.raises(EngineUnhealthy, match="the engine failed 3 times in a row") as caught:
        await bench.encode([ids(1)])
    assert "the device is lost" not in str(caught.value), "the engine's own text reached the caller"
    bench.engine.broken = False

    def a_second_passes() -> bool:
        """Whether it is ready; a probe that finds the lane not yet at rest is made again a second later."""
        if bench.clock._sleepers:
            bench.clock.advance(1.0)
        return bench.scheduler.not_ready_reason() == ""

    await until(a_second_passes)
    assert right([ids(1)], await bench.encode([ids(1)]))
    assert bench.health_changes == 2


async def test_a_broken_engine_fails_everything_pending_at_once(bench: Bench) -> None:
    """Whoever waits can go to another replica; nobody waits for 2n failing runs."""
    first = await bench.busy()
    calls = [asyncio.create_task(bench.encode([ids(i)])) for i in range(1, 41)]
    await until(lambda: bench.seen.queue[0] == 40)
    bench.engine.broken = True
    bench.engine.let_go()
    results = await asyncio.gather(first, *calls, return_exceptions=True)
    assert all(isinstance(result, EngineUnhealthy | InferenceFailed) for result in results)
    lanes = bench.engine.max_parallel_runs
    assert sum(isinstance(result, EngineUnhealthy) for result in results) >= 41 - 3 * lanes
    assert len(bench.engine.batches) <= 6 * lanes
    assert bench.seen.queue == (0, 0)


async def test_a_batch_that_runs_too_long_is_reported(bench: Bench) -> None:
    first = await bench.busy()
    bench.clock.advance(59)
    assert bench.scheduler.not_ready_reason() == ""
    bench.clock.advance(2)
    assert bench.scheduler.not_ready_reason() == "a batch has been running for 61 s"
    bench.engine.let_go()
    await first
    assert bench.scheduler.not_ready_reason() == ""


async def test_close_tells_whoever_still_waits(bench: Bench) -> None:
    first = await bench.busy()
    waiting = asyncio.create_task(bench.encode([ids(2)]))
    await until(lambda: bench.seen.queue[0] == 1)
    closing = asyncio.create_task(bench.scheduler.close())
    with pytest.raises(EngineUnhealthy):
        await waiting
    bench.engine.let_go()
    await closing
    assert bench.engine.closed
    with pytest.raises(EngineUnhealthy):
        await first


async def test_the_queue_never_exceeds_its_bound_under_any_interleaving(bench: Bench) -> None:
    """A storm of calls, a third cancelled: every one ends, the bound holds, and nothing stays counted."""
    rng = np.random.default_rng(0)
    most = 0

    class Watched(PendingQueue):
        """Remembers the most that it ever counted against its bound."""

        def __setattr__(self, name: str, value: object) -> None:
            nonlocal most
            if name == "cost":
                assert isinstance(value, int)
                most = max(most, value)
            super().__setattr__(name, value)

    bench.scheduler._pending.__class__ = Watched
    tasks = []
    for i in range(400):
        length = int(rng.integers(1, 30))
        tasks.append(asyncio.create_task(bench.encode([np.full(length, 1 + i % 50, np.int64)])))
        if rng.random() < 0.33:
            tasks[int(rng.integers(len(tasks)))].cancel()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    allowed = (list, QueueFull, asyncio.CancelledError)
    assert all(isinstance(result, allowed) for result in results), Counter(map(type, results))
    await until(lambda: bench.seen.queue == (0, 0))
    assert 50 < most <= 100
    assert (bench.seen.requests, bench.seen.queue) == (0, (0, 0))
    assert right([ids(1)], await bench.encode([ids(1)]))


async def test_an_engine_that_gives_wrong_rows_has_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the wrong count or length are never handed to anybody."""
    real = bench.engine.run

    def short(sequences: Sequence[TokenIds], *, attended: Sequence[int], alone: bool) -> BatchResult:
        result = real(sequences, attended=attended, alone=alone)
        return replace(result, output=result.output[:, :-1])

    monkeypatch.setattr(bench.engine, "run", short)
    with pytest.raises(InferenceFailed, match=r"input 1|input 0"):
        await bench.encode([ids(1, 2), ids(3)])


async def test_a_loop_that_dies_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bug in the scheduler may leave a server that hangs and looks healthy."""
    first = await bench.busy()
    monkeypatch.setattr("encserve_server.scheduling.queue.plan_batch", lambda *_: 1 / 0)
    waiting = asyncio.create_task(bench.encode([ids(2)]))
    await until(lambda: bench.seen.queue[0] == 1)
    bench.engine.let_go()
    with pytest.raises(EngineUnhealthy, match="the scheduler has stopped"):
        await waiting
    await first
    assert bench.scheduler.not_ready_reason()
    with pytest.raises(EngineUnhealthy):
        await bench.encode([ids(3)])


async def test_a_storm_of_cancellations_while_a_batch_runs_leaves_nothing_behind(bench: Bench) -> None:
    """What is kept stays bounded, however often callers come and go while the engine hangs."""
    first = await bench.busy()
    for _ in range(50):
        calls = [asyncio.create_task(bench.encode([ids(1)])) for _ in range(90)]
        await until(lambda: bench.seen.queue == (90, 90))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert bench.seen.queue == (0, 0)
        assert len(bench.scheduler._pending) <= 200
    bench.engine.let_go()
    await first
    assert bench.seen.counts["cancelled queued"] == 50 * 90


async def test_the_engine_goes_on_while_the_event_loop_is_busy(bench: Bench) -> None:
    """Between two batches the event loop has callers to serve; the engine must not wait for that."""
    first = await bench.busy()
    second = asyncio.create_task(bench.encode([ids(2)]))
    await until(lambda: bench.seen.queue[0] == 1)
    bench.engine.let_one_go()
    # Nothing is awaited here, so the event loop stands still until the second batch has begun.
    assert bench.engine.started.acquire(timeout=60)
    assert not first.done()
    bench.engine.let_go()
    assert right([ids(1)], await first)
    assert right([ids(2)], await second)


async def test_a_run_that_ends_while_readiness_is_asked_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread may end a run between any two steps of the event loop."""
    now = bench.clock.now
    lane = bench.scheduler._lanes._lanes[0]

    def ends_meanwhile() -> float:
        lane.started_at = None
        return now()

    lane.started_at = now()
    monkeypatch.setattr(bench.clock, "now", ends_meanwhile)
    assert bench.scheduler.not_ready_reason() == ""


async def lanes_of(count: int, *, widens: bool = True) -> AsyncIterator[Bench]:
    """A bench whose engine runs several batches at once, each of at most 10 tokens."""
    bench = Bench(BatchPolicy(10, 16, 1.0), SchedulerLimits(max_queue_tokens=100), count)
    bench.engine.widens = widens
    bench.scheduler.start()
    try:
        yield bench
    finally:
        bench.engine.let_go()
        await bench.scheduler.close()


@pytest.fixture
async def two_lanes() -> AsyncIterator[Bench]:
    async for bench in lanes_of(2):
        yield bench


@pytest.fixture
async def two_narrow_lanes() -> AsyncIterator[Bench]:
    async for bench in lanes_of(2, widens=False):
        yield bench


async def test_a_batch_with_nobody_beside_it_has_the_whole_device(two_lanes: Bench) -> None:
    """And keeps it: who comes meanwhile waits, though a lane is free."""
    first = await two_lanes.busy()
    second = asyncio.create_task(two_lanes.encode([ids(2)]))
    await until(lambda: two_lanes.seen.queue[0] == 1)
    assert not await asyncio.to_thread(two_lanes.engine.started.acquire, timeout=0.05)
    two_lanes.engine.let_go()
    assert right([ids(1)], await first)
    assert right([ids(2)], await second)
    assert two_lanes.engine.alone == [True, True]


async def test_a_probe_does_not_wait_behind_runs_that_may_never_end(two_lanes: Bench) -> None:
    lanes = two_lanes.scheduler._lanes
    two_lanes.engine.hold()
    call = asyncio.create_task(two_lanes.encode([np.full(10, i, np.int64) for i in (1, 2, 3)]))
    await until(lambda: not lanes._idle)
    assert not await asyncio.wait_for(lanes.probe(), 60)
    two_lanes.engine.let_go()
    await call
    await until(lambda: len(lanes._idle) == 2)
    assert await asyncio.wait_for(lanes.probe(), 60)


async def test_the_thread_that_ran_last_runs_next(two_lanes: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CPU has the data still in its caches; taking turns costs one caller some tenths of a millisecond."""
    lanes, run = two_lanes.scheduler._lanes, two_lanes.engine.run
    threads: list[str] = []

    def noting(sequences: Sequence[TokenIds], *, attended: Sequence[int], alone: bool) -> BatchResult:
        threads.append(threading.current_thread().name)
        return run(sequences, attended=attended, alone=alone)

    monkeypatch.setattr(two_lanes.engine, "run", noting)
    two_lanes.engine.hold()
    call = asyncio.create_task(two_lanes.encode([np.full(10, i, np.int64) for i in (1, 2, 3)]))
    await until(lambda: len(threads) == 2)
    two_lanes.engine.let_go()
    await call
    assert set(threads) == {"encserve-engine-0", "encserve-engine-1"}
    for i in range(6):
        await until(lambda: len(lanes._idle) == 2)
        last = lanes._idle[-1].number
        threads.clear()
        await two_lanes.encode([ids(i)])
        assert threads == [f"encserve-engine-{last}"]


async def test_batches_run_side_by_side_while_there_are_several(two_lanes: Bench) -> None:
    """The engine is held, so both have begun before either is done."""
    two_lanes.engine.hold()
    call = asyncio.create_task(two_lanes.encode([np.full(10, i, np.int64) for i in (1, 2, 3)]))
    await two_lanes.engine_started()
    await two_lanes.engine_started()
    assert two_lanes.engine.alone == [False, False]
    assert not await asyncio.to_thread(two_lanes.engine.started.acquire, timeout=0.05), "more than the engine can run"
    two_lanes.engine.let_go()
    assert right([np.full(10, i, np.int64) for i in (1, 2, 3)], await call)
    assert two_lanes.seen.counts["batches"] == 3


async def test_who_comes_while_a_lane_is_free_starts_at_once(two_lanes: Bench) -> None:
    two_lanes.engine.hold()
    call = asyncio.create_task(two_lanes.encode([np.full(10, i, np.int64) for i in (1, 2)]))
    await two_lanes.engine_started()
    await two_lanes.engine_started()
    two_lanes.engine.let_one_go()
    await until(lambda: two_lanes.seen.counts["batches"] == 1)
    newcomer = asyncio.create_task(two_lanes.encode([ids(7)]))
    await two_lanes.engine_started()
    assert two_lanes.engine.alone == [False, False, False]
    two_lanes.engine.let_go()
    assert right([ids(7)], await newcomer)
    await call


async def test_a_device_that_gains_nothing_from_one_batch_alone_is_never_kept_for_it(two_narrow_lanes: Bench) -> None:
    """So a GPU gets its next batch while one runs."""
    bench = two_narrow_lanes
    first = await bench.busy()
    second = asyncio.create_task(bench.encode([ids(2)]))
    await bench.engine_started()
    bench.engine.let_go()
    assert right([ids(1)], await first)
    assert right([ids(2)], await second)


async def test_a_culprit_in_one_lane_does_not_stop_the_other(two_lanes: Bench) -> None:
    sequences = [np.full(10, i, np.int64) for i in (1, POISON, 3, 4)]
    calls = [asyncio.create_task(two_lanes.encode([it])) for it in sequences]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, InferenceFailed) for result in results] == [False, True, False, False]
    assert two_lanes.scheduler.not_ready_reason() == ""


async def test_a_crash_while_a_batch_is_run_in_parts_leaves_nobody_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts that were still to run are in no queue; only the lane knows of them."""
    first = await bench.busy()
    calls = [asyncio.create_task(bench.encode([ids(i)])) for i in range(1, 5)]
    await until(lambda: bench.seen.queue[0] == 4)
    bench.engine.poison = 4
    real = bench.engine.run

    def crashes(sequences: Sequence[TokenIds], *, attended: Sequence[int], alone: bool) -> BatchResult:
        if len(sequences) == 2:
            raise SystemExit("a bug")
        return real(sequences, attended=attended, alone=alone)

    monkeypatch.setattr(bench.engine, "run", crashes)
    bench.engine.let_go()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert all(isinstance(result, EngineUnhealthy) for result in results)
    await first


async def test_closing_while_a_batch_is_run_in_parts_leaves_nobody_waiting(bench: Bench) -> None:
    first = await bench.busy()
    calls = [asyncio.create_task(bench.encode([ids(i)])) for i in range(1, 5)]
    await until(lambda: bench.seen.queue[0] == 4)
    bench.engine.poison = 4
    bench.engine.let_one_go()  # the first call
    await first
    await bench.engine_started()
    bench.engine.let_one_go()  # the batch, which fails
    await bench.engine_started()
    closing = asyncio.create_task(bench.scheduler.close())
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert all(isinstance(result, EngineUnhealthy) for result in results)
    bench.engine.let_go()
    await closing
    assert len(bench.engine.batches) == 3, "what nobody waits for was run"


async def test_idle_lanes_keep_no_results(bench: Bench) -> None:
    results = await bench.encode([ids(1, 2), ids(3)])
    rows = weakref.ref(results[0].outputs[0])
    del results
    await asyncio.wait_for(until(lambda: rows() is None), 60)


async def test_after_a_crash_nothing_makes_it_healthy_again(bench: Bench) -> None:
    first = await bench.busy()
    nothing = Batch([], ClosedBy.QUEUE_EMPTY)
    bench.scheduler._deliver(Outcome.CRASHED, nothing, RuntimeError("a bug"))
    bench.scheduler._deliver(Outcome.BROKEN, nothing, RuntimeError("the device is lost"))
    bench.clock.advance(10)
    await asyncio.sleep(0.01)
    assert "has stopped" in bench.scheduler.not_ready_reason()
    bench.engine.let_go()
    await first


async def test_what_a_broken_engine_fails_is_never_called_a_culprit() -> None:
    """Every lane holds something when the first of them finds out."""
    async for bench in lanes_of(4):
        first = await bench.busy()
        calls = [asyncio.create_task(bench.encode([np.full(10, i, np.int64)])) for i in range(1, 9)]
        await until(lambda bench=bench: bench.seen.queue[0] == 8)  # type: ignore[misc]
        bench.engine.broken = True
        bench.engine.let_go()
        results = await asyncio.gather(first, *calls, return_exceptions=True)
        assert Counter(map(type, results)) == {InferenceFailed: 2, EngineUnhealthy: 7}, "two fail before the probe"
        assert bench.health_changes == 1


async def test_a_call_after_closing_is_refused(bench: Bench) -> None:
    await bench.scheduler.close()
    with pytest.raises(EngineUnhealthy, match="unloaded"):
        await asyncio.wait_for(bench.encode([ids(1)]), 60)
    bench.scheduler = Scheduler(
        bench.engine,
        rows_of,
        BatchPolicy(64, 16, 1.0),
        SchedulerLimits(100),
        clock=bench.clock,
        observer=bench.seen,
    )
    bench.scheduler.start()  # the fixture closes it


async def test_closing_while_batches_follow_each_other(bench: Bench) -> None:
    """What has begun may end; what has not is told; nothing hangs."""
    first = await bench.busy()
    waiting = [asyncio.create_task(bench.encode([ids(2)])) for _ in range(3)]
    await until(lambda: bench.seen.queue[0] == 3)
    closing = asyncio.create_task(bench.scheduler.close())
    await asyncio.sleep(0)
    bench.engine.let_go()
    await asyncio.wait_for(closing, 60)
    results = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert all(isinstance(result, EngineUnhealthy) for result in results)
    assert bench.engine.batches == [[1]]


async def settled() -> None:
    """Lets the event loop do what is to be done now."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_callers_behind_a_stalled_run_get_an_error(bench: Bench) -> None:
    """Without a deadline they would wait for as long as it takes; the run itself may still end well."""
    first = await bench.busy()
    waiting = [asyncio.create_task(bench.encode([ids(2), ids(3)])) for _ in range(2)]
    await until(lambda: bench.seen.queue[0] == 4)
    bench.clock.advance(60)
    await settled()
    assert (bench.health_changes, [call.done() for call in waiting]) == (0, [False, False])
    bench.clock.advance(1)
    for call in waiting:
        with pytest.raises(EngineUnhealthy, match="the model is not available: a batch has been running for 61 s"):
            await call
    assert bench.health_changes == 1
    assert (bench.seen.requests, bench.seen.queue) == (0, (0, 0))
    with pytest.raises(EngineUnhealthy, match="a batch has been running for 61 s"):
        await bench.encode([ids(4)])
    assert not first.done()
    bench.engine.let_go()
    assert right([ids(1)], await first)
    assert right([ids(5)], await bench.encode([ids(5)]))
    assert bench.engine.batches == [[1], [1]], "what had its error was run"
    assert not bench.seen.counts["cancelled queued"] + bench.seen.counts["expired"]


async def test_a_stall_is_noticed_each_time(bench: Bench) -> None:
    for _ in range(2):
        first = await bench.busy()
        waiting = asyncio.create_task(bench.encode([ids(2)]))
        await until(lambda: bench.seen.queue[0] == 1)
        bench.clock.advance(61)
        with pytest.raises(EngineUnhealthy, match="has been running"):
            await waiting
        bench.engine.let_go()
        await first


async def test_a_call_of_which_a_part_waits_behind_a_stalled_run_gets_its_error() -> None:
    """The lane that has the other part goes on; its outputs are not delivered."""
    async for bench in lanes_of(1):  # of 10 tokens
        bench.engine.hold()
        call = asyncio.create_task(bench.encode([np.full(10, i, np.int64) for i in (2, 3)]))
        await bench.engine_started()
        bench.clock.advance(61)
        with pytest.raises(EngineUnhealthy, match="has been running"):
            await call
        assert bench.seen.queue == (0, 0)
        bench.engine.let_go()
        await until(lambda bench=bench: not bench.scheduler.not_ready_reason())  # type: ignore[misc]
        assert right([ids(5)], await bench.encode([ids(5)]))
        assert bench.engine.batches == [[10], [1]]


async def test_what_outputs_cost_counts_against_the_queue(bench: Bench) -> None:
    first = await bench.busy()
    waiting = asyncio.create_task(bench.encode([ids(*range(1, 11))], extra_cost=80))
    await until(lambda: bench.seen.queue == (1, 90))  # in what the queue is bounded by
    with pytest.raises(QueueFull, match=r"holds 90 of at most 100 tokens and this request has 11"):
        await bench.encode([ids(1)], extra_cost=10)
    bench.engine.let_go()
    await asyncio.gather(first, waiting)
    assert right([ids(1)], await bench.encode([ids(1)], extra_cost=99))
    await until(lambda: bench.seen.counts["batches"] == 3)
    assert bench.seen.counts["tokens"] == 12


async def test_a_call_whose_outputs_cost_more_than_the_queue_holds_is_the_callers_mistake(bench: Bench) -> None:
    text = r"at most 100 tokens in all \(max_queue_tokens\); was 2, and with its outputs it costs as much as 102"
    with pytest.raises(RequestTooLarge, match=text):
        await bench.encode([ids(1), ids(2)], extra_cost=50)
    assert bench.engine.batches == []


async def test_a_batch_has_no_more_outputs_than_its_budget_has_room_for() -> None:
    async for bench in lanes_of(1):  # of 10 tokens
        first = await bench.busy()
        calls = [asyncio.create_task(bench.encode([ids(i)], extra_cost=5)) for i in range(4)]
        await until(lambda bench=bench: bench.seen.queue[0] == 4)  # type: ignore[misc]
        bench.engine.let_go()
        await asyncio.gather(first, *calls)
        assert bench.engine.batches == [[1], [1, 1], [1, 1]]


@pytest.mark.parametrize("tokens", [None, 2])
async def test_the_door_is_looked_at_before_a_call_is(bench: Bench, tokens: int | None) -> None:
    bench.scheduler.check_open(tokens)
    first = await bench.busy()
    waiting = asyncio.create_task(bench.encode([ids(*range(1, 91))]))
    await until(lambda: bench.seen.queue == (1, 90))
    bench.scheduler.check_open(tokens)
    with pytest.raises(QueueFull):
        await bench.encode([ids(*range(1, 12))])
    asked = "" if tokens is None else " and this request has 2"
    with pytest.raises(QueueFull, match=f"holds 90 of at most 100 tokens{asked}; once full"):
        bench.scheduler.check_open(tokens)
    with pytest.raises(RequestTooLarge, match="was 101"):
        bench.scheduler.check_open(101)
    bench.clock.advance(61)
    with pytest.raises(EngineUnhealthy, match="has been running"):
        bench.scheduler.check_open(tokens)
    bench.engine.let_go()
    await asyncio.gather(first, waiting, return_exceptions=True)


class Span:
    """A request that is traced."""

    def stage(self, name: str, began_at: float, ended_at: float) -> None:
        assert name == "queue"
        assert ended_at >= began_at


class Tracer:
    """Cannot trace."""

    def ran(self, requests: Sequence[object], batch: Batch) -> None:
        raise RuntimeError("the tracer has a bug")


async def test_a_tracer_that_raises_costs_nobody_an_answer(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.scheduler._tracer = Tracer()
    sequence = TokenSequence(ids(3), 1, cost=1)
    await asyncio.wait_for(bench.scheduler.run([sequence], span=Span()), 60)  # type: ignore[arg-type]
    assert right([ids(3)], [sequence])
    await until(lambda: bench.seen.counts["batches"] == 1)
    assert caplog.messages == ["a batch could not be traced"]


async def test_a_lane_that_drops_a_cancelled_sequence_first_does_not_change_what_is_counted(bench: Bench) -> None:
    """A lane may take between a cancellation and the next step of the call's task; no such sequence has run."""
    first = await bench.busy()
    going = asyncio.create_task(bench.encode([ids(2), ids(2)]))
    staying = asyncio.create_task(bench.encode([ids(3)]))
    await until(lambda: bench.seen.queue[0] == 3)
    going.cancel()
    bench.engine.let_one_go()
    assert bench.engine.started.acquire(timeout=60)  # nothing is awaited: the event loop stands still
    bench.engine.let_go()
    await asyncio.wait([going])
    await asyncio.gather(first, staying)
    assert bench.engine.batches == [[1], [1]]
    assert (bench.seen.counts["cancelled queued"], bench.seen.counts["cancelled running"]) == (2, 0)


async def test_what_expires_while_its_caller_goes_is_counted_once(bench: Bench) -> None:
    """gRPC cancels a call at its deadline, just when a lane finds its sequences expired."""
    first = await bench.busy()
    going = asyncio.create_task(bench.encode([ids(2), ids(2)], deadline=5.0))
    staying = asyncio.create_task(bench.encode([ids(3)]))
    await until(lambda: bench.seen.queue[0] == 3)
    bench.clock.advance(6)
    bench.engine.let_one_go()
    assert bench.engine.started.acquire(timeout=60)  # as above
    going.cancel()
    bench.engine.let_go()
    await asyncio.wait([going])
    await asyncio.gather(first, staying)
    counts = bench.seen.counts
    assert (counts["expired"], counts["cancelled queued"], counts["cancelled running"]) == (2, 0, 0)


async def test_every_sequence_of_a_call_that_expires_is_counted() -> None:
    """The lane has looked at the first of four alone; the call has ended for all."""
    async for bench in lanes_of(1):  # of 10 tokens
        first = await bench.busy()
        patient = asyncio.create_task(bench.encode([np.full(5, 2, np.int64)]))
        hasty = asyncio.create_task(bench.encode([np.full(length, 3, np.int64) for length in (5, 9, 9, 9)], 5.0))
        await until(lambda bench=bench: bench.seen.queue[0] == 5)  # type: ignore[misc]
        bench.clock.advance(6)
        bench.engine.let_one_go()
        with pytest.raises(DeadlineExpired):
            await hasty
        assert bench.seen.counts["expired"] == 4
        assert bench.seen.queue == (0, 0)
        bench.engine.let_go()
        await asyncio.gather(first, patient)
        assert bench.engine.batches == [[1], [5]]


@pytest.mark.parametrize("how", ["poison", "expired", "broken", "closed"])
async def test_nothing_of_a_failed_call_waits_for_the_cycle_collector(bench: Bench, how: str) -> None:
    """An error refers to the frames that it passed; what fails is as large as what does not."""
    first = await bench.busy()
    inputs = [ids(2), ids(POISON if how == "poison" else 3)]
    kept = [weakref.ref(it) for it in inputs]
    call = asyncio.create_task(bench.encode(inputs, deadline=5.0 if how == "expired" else math.inf))
    await until(lambda: bench.seen.queue[0] == 2)
    gc.collect()
    gc.disable()
    try:
        del inputs
        bench.clock.advance(6)
        bench.engine.broken = how == "broken"
        closing = asyncio.create_task(bench.scheduler.close()) if how == "closed" else None
        bench.engine.let_go()
        with contextlib.suppress(EncserveError):
            await call
        with contextlib.suppress(EncserveError):
            await first
        del call, first
        if closing is not None:
            await closing
        await asyncio.wait_for(until(lambda: not any(it() is not None for it in kept)), 10)
    finally:
        gc.enable()


async def test_time_side_by_side_is_busy_once(two_narrow_lanes: Bench) -> None:
    """Two runs begin at 2 and 4 s and end at 6 and 12 s."""
    bench, lanes = two_narrow_lanes, two_narrow_lanes.scheduler._lanes
    bench.engine.hold()
    bench.clock.advance(2)
    calls = []
    for i in range(2):
        calls.append(asyncio.create_task(bench.encode([ids(i)])))
        await bench.engine_started()
        bench.clock.advance(2)
    assert lanes.take_busy_seconds() == 4  # in the middle of both
    bench.engine.let_one_go()
    await until(lambda: len(lanes._idle) == 1)
    bench.clock.advance(6)
    bench.engine.let_go()
    await asyncio.gather(*calls)
    await until(lambda: len(lanes._idle) == 2)
    bench.clock.advance(30)
    assert bench.seen.busy_seconds + lanes.take_busy_seconds() == 6


async def test_no_time_between_runs_is_busy(bench: Bench) -> None:
    """A caller has its answer when the run has ended, whatever its lane still has to do."""
    for _ in range(50):
        await bench.encode([ids(1)])
        bench.clock.advance(10)
    await until(lambda: bench.seen.counts["batches"] == 50)
    assert bench.seen.busy_seconds + bench.scheduler._lanes.take_busy_seconds() == 0


async def test_a_probe_is_busy_time(bench: Bench) -> None:
    bench.engine.hold()
    probing = asyncio.create_task(bench.scheduler._lanes.probe())
    await bench.engine_started()
    bench.clock.advance(2)
    assert bench.scheduler._lanes.take_busy_seconds() == 2
    bench.engine.let_go()
    assert await probing


# Shares of the queue, which holds 100 tokens here

BULK = Sender(priority=Priority.BULK)


async def queue_up(bench: Bench, lengths: Sequence[int], sender: Sender) -> list[asyncio.Task[list[TokenSequence]]]:
    """Calls of one sequence each, which wait."""
    before = bench.seen.queue[0]
    tasks = [asyncio.create_task(bench.encode([ids(*[1] * it)], sender=sender)) for it in lengths]
    await until(lambda: bench.seen.queue[0] == before + len(lengths) or any(it.done() for it in tasks))
    return tasks


async def test_bulk_takes_half_of_the_queue_and_shuts_nobody_out(bench: Bench) -> None:
    first = await bench.busy()
    waiting = await queue_up(bench, [25, 25], BULK)
    with pytest.raises(ShareExceeded, match="bulk has 50 tokens waiting, of the 50 that are its share of the queue"):
        await bench.encode([ids(1)], sender=BULK)
    waiting += await queue_up(bench, [25, 25], ANY_SENDER)
    bench.engine.let_go()
    await asyncio.gather(first, *waiting)


async def test_bulk_leaves_a_quarter_free_and_does_not_shut_the_door(bench: Bench) -> None:
    first = await bench.busy()
    waiting = await queue_up(bench, [35, 35], ANY_SENDER)
    with pytest.raises(QueueFull, match="the queue is full"):
        await bench.encode([ids(*[1] * 6)], sender=BULK)
    waiting += await queue_up(bench, [30], ANY_SENDER)
    bench.engine.let_go()
    await asyncio.gather(first, *waiting)


async def test_a_caller_over_its_share_is_refused_and_others_are_not(bench: Bench) -> None:
    """Alone a caller may take half, since another may come; beside one of twice its weight a quarter."""
    first = await bench.busy()
    flood, other = Sender(Caller("flood")), Sender(Caller("other", 2.0))
    waiting = await queue_up(bench, [25, 25], flood)
    with pytest.raises(
        ShareExceeded, match="caller flood has 50 tokens waiting, of the 50 .* this request has 1; try"
    ) as error:
        await bench.encode([ids(1)], sender=flood)
    assert error.value.retry_delay_s > 0
    with pytest.raises(ShareExceeded):
        bench.scheduler.check_share(flood)
    bench.scheduler.check_share(other)
    waiting += await queue_up(bench, [25, 10], other)
    with pytest.raises(ShareExceeded, match="of the 40 that"):
        await bench.encode([ids(*[1] * 6)], sender=other)
    bench.engine.let_go()
    await asyncio.gather(first, *waiting)
    await bench.encode([ids(1)], sender=flood)


async def test_one_large_call_is_taken_where_nothing_of_its_caller_waits(bench: Bench) -> None:
    first = await bench.busy()
    waiting = await queue_up(bench, [60], BULK)
    bench.engine.let_go()
    await asyncio.gather(first, *waiting)
    await bench.encode([ids(*[1] * 100)], sender=Sender(Caller("large"), Priority.BULK))


async def test_interactive_sequences_run_before_bulk_ones_that_came_first(bench: Bench) -> None:
    first = await bench.busy()
    bulk = await queue_up(bench, [20, 20], BULK)
    urgent = await queue_up(bench, [5], ANY_SENDER)
    bench.engine.let_go()
    (urgent_sequence,) = await urgent[0]
    found = [sequence for task in bulk for sequence in await task]
    await first
    assert all(urgent_sequence.started_at <= it.started_at for it in found)
    assert bench.engine.batches.index([5]) < min(
        bench.engine.batches.index(it) for it in bench.engine.batches if 20 in it
    )
