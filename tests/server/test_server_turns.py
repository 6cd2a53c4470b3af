"""Threads that callers share by turns."""

import asyncio
import threading
from collections import Counter
from functools import partial

import pytest

from encserve_server.models.turns import TurnPool
from encserve_server.types.callers import ANY_SENDER, Caller, Priority, Sender


class Bench:
    """A pool of one thread, which is held until `release`, and what it has done."""

    def __init__(self) -> None:
        self.pool = TurnPool(1)
        self.done: list[str] = []
        self._held = threading.Event()

    async def hold(self) -> list[asyncio.Task[bool]]:
        """Takes all places; what comes then waits for its turn."""
        tasks = [asyncio.create_task(self.pool.run(ANY_SENDER, 0, self._held.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        return tasks

    def send(self, name: str, sender: Sender, cost: float = 1) -> "asyncio.Task[None]":
        return asyncio.create_task(self.pool.run(sender, cost, partial(self.done.append, name)))

    def release(self) -> None:
        self._held.set()


async def test_interactive_work_goes_before_bulk_that_came_first() -> None:
    bench = Bench()
    held = await bench.hold()
    bulk = [bench.send("bulk", Sender(priority=Priority.BULK)) for _ in range(20)]
    await asyncio.sleep(0)
    urgent = [bench.send("urgent", ANY_SENDER) for _ in range(5)]
    await asyncio.sleep(0)
    bench.release()
    await asyncio.gather(*held, *bulk, *urgent)
    assert bench.done.index("urgent") <= 1
    assert bench.done[:8].count("urgent") == 5


@pytest.mark.parametrize(
    ("interactive", "bulk"),
    [
        pytest.param([Caller("web")], [Caller(f"job-{i}") for i in range(8)], id="many bulk callers"),
        pytest.param([Caller("web")], [Caller("jobs", 100.0)], id="a heavy bulk caller"),
        pytest.param([Caller(f"web-{i}") for i in range(8)], [Caller("jobs")], id="many interactive callers"),
        pytest.param([Caller("web")], [Caller("web")], id="one caller"),
    ],
)
async def test_bulk_has_one_turn_in_nine_whoever_waits(interactive: list[Caller], bulk: list[Caller]) -> None:
    bench = Bench()
    held = await bench.hold()
    tasks = []
    for callers, priority in ((interactive, Priority.INTERACTIVE), (bulk, Priority.BULK)):
        for caller in callers:
            count = 160 // len(callers)
            tasks += [bench.send(priority.name, Sender(caller, priority), cost=10) for _ in range(count)]
    await asyncio.sleep(0)
    bench.release()
    await asyncio.gather(*held, *tasks)
    assert bench.done[:90].count("BULK") == 10
    assert bench.done[0] == "INTERACTIVE"


async def test_a_large_piece_of_bulk_work_waits_for_as_much_more_interactive_work() -> None:
    bench = Bench()
    held = await bench.hold()
    tasks = [bench.send("bulk", Sender(priority=Priority.BULK), cost=100) for _ in range(2)]
    tasks += [bench.send("urgent", ANY_SENDER, cost=20) for _ in range(80)]
    await asyncio.sleep(0)
    bench.release()
    await asyncio.gather(*held, *tasks)
    assert [i for i, name in enumerate(bench.done) if name == "bulk"] == [40, 81]


async def test_callers_are_served_by_their_weights() -> None:
    bench = Bench()
    held = await bench.hold()
    callers = [Caller("a", 1.0), Caller("b", 2.0), Caller("c", 4.0)]
    tasks = [bench.send(it.name, Sender(it), cost=10) for it in callers for _ in range(70)]
    await asyncio.sleep(0)
    bench.release()
    await asyncio.gather(*held, *tasks)
    first = Counter(bench.done[:70])
    assert [round(first[it.name] / 10) for it in callers] == [1, 2, 4]


async def test_who_goes_away_takes_no_place() -> None:
    bench = Bench()
    held = await bench.hold()
    gone = [bench.send("gone", ANY_SENDER) for _ in range(5)]
    stays = bench.send("stays", ANY_SENDER)
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    bench.release()
    await asyncio.gather(*held, *gone, stays, return_exceptions=True)
    assert bench.done == ["stays"]
    for _ in range(3):  # every place is free again
        await bench.send("later", ANY_SENDER)


async def test_work_that_is_given_up_moves_no_turn() -> None:
    """One caller gives up what waits; its next work comes as soon as if it had never sent that."""
    bench = Bench()
    held = await bench.hold()
    others = [bench.send("other", Sender(Caller("other")), cost=10) for _ in range(20)]
    gone = [bench.send("gone", Sender(Caller("b")), cost=10) for _ in range(300)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    next_one = bench.send("next", Sender(Caller("b")), cost=10)
    await asyncio.sleep(0)
    bench.release()
    await asyncio.gather(*held, *others, next_one)
    assert bench.done.index("next") <= 1


async def test_work_that_goes_on_after_its_caller_has_gone_keeps_its_place() -> None:
    """A thread cannot be stopped: what is handed over beside it would wait behind it, out of its turn."""
    pool = TurnPool(1)
    go_on, began, done = threading.Event(), threading.Event(), []

    def work() -> None:
        began.set()
        go_on.wait(10)

    running = asyncio.create_task(pool.run(ANY_SENDER, 1, work))
    await asyncio.to_thread(began.wait, 10)
    handed_over = asyncio.create_task(pool.run(ANY_SENDER, 1, lambda: done.append("handed over")))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    low = [asyncio.create_task(pool.run(Sender(priority=Priority.BULK), 1, partial(done.append, "bulk"))) for _ in "ab"]
    await asyncio.sleep(0)
    urgent = asyncio.create_task(pool.run(ANY_SENDER, 1, partial(done.append, "urgent")))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(handed_over, *low, urgent)
    assert done == ["handed over", "urgent", "bulk", "bulk"]


async def test_work_that_was_handed_over_and_given_up_before_it_began_is_not_done() -> None:
    bench = Bench()
    held = await bench.hold()
    held[1].cancel()
    await asyncio.gather(held[1], return_exceptions=True)
    bench.release()
    await held[0]
    for _ in range(3):  # every place is free again
        await bench.send("later", ANY_SENDER)
    assert bench.done == ["later"] * 3


async def test_what_fails_gives_its_place_back() -> None:
    pool = TurnPool(1)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            await pool.run(ANY_SENDER, 1, lambda: 1 / 0)
    assert await pool.run(ANY_SENDER, 1, lambda: 7) == 7


async def test_what_waits_when_the_pool_closes_is_cancelled() -> None:
    bench = Bench()
    held = await bench.hold()
    waits = bench.send("waits", ANY_SENDER)
    await asyncio.sleep(0)
    bench.pool.close()
    bench.release()
    with pytest.raises(asyncio.CancelledError):
        await waits
    await asyncio.gather(*held, return_exceptions=True)
