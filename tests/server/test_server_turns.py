"""Tests of a pool of threads that callers share by weight and priority."""

import asyncio
import threading
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest

from encserve_server.models.turns import FairThreadPool
from encserve_server.types.callers import ANY_SENDER, Caller, Priority, Sender

BULK = Sender(priority=Priority.BULK)


class Bench:
    """A pool of one thread, and the names of finished work. `hold` blocks the thread until `release`."""

    def __init__(self) -> None:
        self.pool = FairThreadPool(1)
        self.done: list[str] = []
        self._released = threading.Event()

    async def hold(self) -> list["asyncio.Task[bool]"]:
        """Send two tasks: the first blocks the thread, and the second waits. Later work waits for both."""
        tasks = [asyncio.create_task(self.pool.run(ANY_SENDER, 0, self._released.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        return tasks

    def send(self, name: str, sender: Sender = ANY_SENDER, cost: int = 1) -> "asyncio.Task[None]":
        return asyncio.create_task(self.pool.run(sender, cost, partial(self.done.append, name)))

    async def release(self) -> None:
        await asyncio.sleep(0)
        self._released.set()

    async def finish(self, *tasks: "asyncio.Task[None] | asyncio.Task[bool]") -> None:
        """Release the thread, and wait for the tasks."""
        await self.release()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def assert_free(self) -> None:
        for _ in range(3):
            await asyncio.wait_for(self.send("later"), 60)


@pytest.mark.parametrize(
    ("interactive", "bulk"),
    [
        pytest.param([Caller("web")], [Caller(f"job-{i}") for i in range(8)], id="many bulk callers"),
        pytest.param([Caller("web")], [Caller("jobs", 100.0)], id="a heavy bulk caller"),
        pytest.param([Caller(f"web-{i}") for i in range(8)], [Caller("jobs")], id="many interactive callers"),
        pytest.param([Caller("web")], [Caller("web")], id="one caller"),
    ],
)
async def test_bulk_gets_one_turn_in_nine(interactive: list[Caller], bulk: list[Caller]) -> None:
    """While both kinds of work wait, one of nine tasks is bulk.

    Interactive work starts first, although bulk work arrives first.
    """
    bench = Bench()
    held = await bench.hold()
    tasks = []
    for callers, priority in ((bulk, Priority.BULK), (interactive, Priority.INTERACTIVE)):
        for caller in callers:
            tasks += [bench.send(priority.name, Sender(caller, priority), 10) for _ in range(160 // len(callers))]
        await asyncio.sleep(0)
    await bench.finish(*held, *tasks)
    assert bench.done[:90].count("BULK") == 10
    assert bench.done[0] == "INTERACTIVE"


async def test_large_bulk_work_waits_for_more_interactive_work() -> None:
    bench = Bench()
    held = await bench.hold()
    tasks = [bench.send("bulk", BULK, 100) for _ in range(2)] + [bench.send("urgent", cost=20) for _ in range(80)]
    await bench.finish(*held, *tasks)
    assert [i for i, name in enumerate(bench.done) if name == "bulk"] == [40, 81]


async def test_callers_are_served_by_their_weights() -> None:
    bench = Bench()
    held = await bench.hold()
    callers = [Caller("a", 1.0), Caller("b", 2.0), Caller("c", 4.0)]
    tasks = [bench.send(it.name, Sender(it), 10) for it in callers for _ in range(70)]
    await bench.finish(*held, *tasks)
    first = Counter(bench.done[:70])
    assert [round(first[it.name] / 10) for it in callers] == [1, 2, 4]
    a_turns = [i for i, name in enumerate(bench.done) if name == "a"][:10]
    assert max(after - before for before, after in pairwise(a_turns)) <= 9, "not interleaved"


async def test_an_absent_caller_gains_no_credit() -> None:
    bench = Bench()
    first, second = Sender(Caller("first")), Sender(Caller("second"))
    for _ in range(20):
        await bench.send("first", first, 10)
    bench.done.clear()
    held = await bench.hold()
    tasks = [bench.send(it.caller.name, it, 10) for it in (first, second) for _ in range(20)]
    await bench.finish(*held, *tasks)
    assert 9 <= bench.done[:20].count("second") <= 11


async def test_cancelled_work_does_not_delay_other_work() -> None:
    """Work that is cancelled before its start does not delay the next work of the caller."""
    bench = Bench()
    held = await bench.hold()
    others = [bench.send("other", Sender(Caller("other")), 10) for _ in range(20)]
    cancelled = [bench.send("cancelled", Sender(Caller("b")), 10) for _ in range(300)]
    await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    await bench.finish(*held, *others, bench.send("next", Sender(Caller("b")), 10))
    assert bench.done.index("next") <= 1
    assert bench.done.count("other") == 20
    assert "cancelled" not in bench.done
    await bench.assert_free()


async def test_running_work_keeps_its_place_after_its_caller_has_gone() -> None:
    """If a caller disconnects, its running work still counts as running, because a thread cannot be stopped.

    Otherwise, the pool would hand more work to the thread, and bulk work would start before urgent work.
    """
    bench = Bench()
    running, handed_over = await bench.hold()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    low = [bench.send("bulk", BULK) for _ in range(2)]
    await asyncio.sleep(0)
    urgent = bench.send("urgent")
    await bench.finish(handed_over, *low, urgent)
    assert bench.done == ["urgent", "bulk", "bulk"]


async def test_work_cancelled_before_its_thread_begins_is_not_done() -> None:
    bench = Bench()
    running, handed_over = await bench.hold()
    next_ = bench.send("next")
    await asyncio.sleep(0)
    handed_over.cancel()
    await asyncio.gather(handed_over, return_exceptions=True)
    await bench.finish(running, next_)
    await bench.assert_free()
    assert bench.done == ["next", "later", "later", "later"]


async def test_failed_work_releases_its_place() -> None:
    bench = Bench()
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            await bench.pool.run(ANY_SENDER, 1, lambda: 1 / 0)
    assert await bench.pool.run(ANY_SENDER, 1, lambda: 7) == 7


async def test_closing_cancels_waiting_work() -> None:
    bench = Bench()
    held = await bench.hold()
    waiting = bench.send("waiting")
    await asyncio.sleep(0)
    bench.pool.close()
    await bench.finish(*held)
    with pytest.raises(asyncio.CancelledError):
        await waiting
