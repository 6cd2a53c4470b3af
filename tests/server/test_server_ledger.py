"""Tests of the ledger, which limits the bytes and places of each caller. A caller that holds nothing finds room."""

import asyncio
import resource
from itertools import pairwise

import pytest
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from encserve_server import ledger
from encserve_server.errors import BudgetFull, DeadlineExpired, EncserveError
from encserve_server.ledger import Arrival, ByteBudget, Places, Pool, Watches
from encserve_server.system.descriptors import allowed_connections

CALLERS = st.sampled_from(["a", "b", "c"])


@given(st.integers(8, 10_000), st.lists(st.tuples(CALLERS, st.integers(1, 5_000)), max_size=60))
def test_a_pool_keeps_its_limit_and_has_room_for_others(limit: int, claims: list[tuple[str, int]]) -> None:
    """After any claims of three callers, a fourth caller still finds room for a small claim."""
    pool = Pool(limit * 1000)
    for account, size in claims:
        if pool.has_room(account, size * 1000):
            pool.add(account, size * 1000)
    assert pool.held <= pool.limit
    assert pool.held == sum(pool.held_by(it) for it in "abc")
    assert pool.has_room("newcomer", pool.limit // 1000)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=20))
def test_bytes_given_back_are_free_again(sizes: list[int]) -> None:
    budget, taken = ByteBudget(1000), []
    for size in sizes:
        try:
            budget.take("a", size)
        except BudgetFull:
            continue
        taken.append(size)
    for size in taken:
        budget.add("a", -size)
    assert (budget.held, budget.held_by("a")) == (0, 0)


def test_large_calls_of_one_caller_leave_a_quarter_for_small_calls() -> None:
    budget = ByteBudget(100 * 2**20)
    for _ in range(75):
        budget.take("a", 2**20)
    with pytest.raises(BudgetFull):
        budget.take("a", 2**20)
    budget.take("a", 1000)
    budget.take("b", 10 * 2**20)


def test_a_call_that_is_alone_always_has_room() -> None:
    budget = ByteBudget(1000)
    budget.take("a", 5000)
    budget.take("a", 5000, own=5000)
    with pytest.raises(BudgetFull, match="10000 of at most 1000 bytes"):
        budget.take("b", 1)


class Held:
    """Tasks that hold places until they are cancelled."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.ended: dict[str, EncserveError | None] = {}
        self.arrivals: dict[str, Arrival] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, name: str, account: str, *, is_stream: bool = True) -> None:
        async def hold() -> None:
            try:
                with Arrival(self.places, account, is_open=False, is_stream=is_stream) as self.arrivals[name]:
                    await asyncio.Event().wait()
            except EncserveError as error:
                self.ended[name] = error

        self.tasks.append(asyncio.create_task(hold()))
        await asyncio.sleep(0)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def places_of(clock: FakeClock, monkeypatch: pytest.MonkeyPatch, count: int) -> Places:
    monkeypatch.setattr(ledger, "_LEAST_PLACES", count)
    return Places(ByteBudget(2**30), clock, asyncio.Event(), 2**29)


async def test_streams_of_one_caller_leave_places_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    places = places_of(FakeClock(), monkeypatch, 16)
    held = Held(places)
    for i in range(20):
        await held.start(f"a{i}", "a")
    assert list(held.ended) == [f"a{i}" for i in range(14, 20)]  # caller a may hold 14 of 16 places
    await held.start("b", "b")
    assert "b" not in held.ended
    await held.stop()
    assert (places.pool.held, places._budget.held) == (0, 0)


async def test_a_new_stream_ends_the_longest_idle_stream_of_the_largest_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    places = places_of(clock, monkeypatch, 8)
    held = Held(places)
    for name in ("b0", "a0", "a1", "a2", "c0", "c1", "c2", "c3"):
        await held.start(name, name[0])
    clock.advance(29.0)
    await held.start("b1", "b")
    await asyncio.sleep(0)
    assert list(held.ended) == ["b1"]  # every stream has made progress in the last 30 s
    clock.advance(2.0)
    await held.start("b2", "b")
    await asyncio.sleep(0)
    assert list(held.ended) == ["b1", "b0"], "the ended stream is not the longest idle stream of caller b"
    await held.start("d0", "d")
    await asyncio.sleep(0)
    assert list(held.ended)[2:] == ["a0"]
    await held.stop()


async def test_a_body_with_progress_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    places = places_of(clock, monkeypatch, 8)
    held = Held(places)
    for name in ("a0", "a1", "a2", "a3"):
        await held.start(name, "a", is_stream=False)
    for _ in range(4):
        await places._look()
    for name in ("c0", "c1", "c2", "c3"):
        await held.start(name, "c")
    for _ in range(4):
        clock.advance(10.0)
        for name in ("a0", "a1", "a2", "a3"):
            held.arrivals[name].progress(size=2**20)
    await held.start("b0", "b")
    await asyncio.sleep(0)
    assert list(held.ended) == ["c0"]
    await held.stop()


async def test_a_slow_request_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    places = places_of(clock, monkeypatch, 8)
    held = Held(places)
    await held.start("slow", "a", is_stream=False)
    for _ in range(4):
        await places._look()
    assert places.pool.held_by("a") == 1
    clock.advance(31.0)
    await places._look()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert isinstance(held.ended["slow"], DeadlineExpired)
    assert places.pool.held == 0


async def test_one_slow_request_is_refused_in_each_turn_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal costs CPU time. So hundreds of refusals at once would delay other calls."""
    places = places_of(FakeClock(), monkeypatch, 8)
    held, ended = Held(places), list[int]()
    for i in range(20):
        await held.start(f"a{i}", "a", is_stream=False)
    for _ in range(2):
        await places._look()

    async def count_ended() -> None:
        while True:
            ended.append(len(held.ended))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_ended())
    await asyncio.sleep(0)
    await places._look()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    counting.cancel()
    assert (ended[0], ended[-1]) == (0, 13)  # caller a may hold 7 of 8 places
    assert max(after - before for before, after in pairwise(ended)) == 1
    await held.stop()


async def test_one_body_continues_in_each_turn_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    places = places_of(clock, monkeypatch, 8)
    turns, turns_of_parts = 0, list[int]()

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            clock.advance(0.001)
            turns += 1

    async def read_body() -> None:
        for _ in range(3):
            async with places.turn():
                turns_of_parts.append(turns)

    counting = asyncio.create_task(count_turns())
    await read_body()
    assert turns <= 3, "a body without others must not wait"
    turns_of_parts.clear()
    await asyncio.gather(*(read_body() for _ in range(20)))
    counting.cancel()
    assert len(set(turns_of_parts)) == 60


@pytest.mark.parametrize(
    ("parts_s", "rest_s"),
    [
        ([0.002], 0.006),
        ([0.0005] * 4, 0.006),  # a rest of 0.0015 s is too short for a sleep, so four rests add up
        ([6.0], 0.05),  # the process was suspended during the part, so the rest is limited
    ],
)
async def test_bodies_rest_longer_than_a_part_took(
    monkeypatch: pytest.MonkeyPatch, parts_s: list[float], rest_s: float
) -> None:
    """Costly parts leave most of the event loop's time for other calls, even if all parts belong to one body."""
    clock = FakeClock()
    places = places_of(clock, monkeypatch, 8)
    for part_s in parts_s:
        async with places.turn():
            clock.advance(part_s)
    began = list[float]()

    async def read_part() -> None:
        async with places.turn():
            began.append(clock.now())

    reading = asyncio.create_task(read_part())
    for _ in range(200):
        await asyncio.sleep(0)
        clock.advance(0.001)
    await reading
    assert began == [pytest.approx(sum(parts_s) + rest_s, abs=0.0015)]


async def test_a_new_watch_replaces_an_old_one_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_WATCHES", 8)
    clock = FakeClock()
    watches, ended, tasks = Watches(clock), list[str](), list[asyncio.Task[None]]()

    async def watch(name: str) -> None:
        try:
            with watches.hold(name[0]):
                await asyncio.Event().wait()
        except BudgetFull:
            ended.append(name)

    async def start(*names: str) -> None:
        for name in names:
            tasks.append(asyncio.create_task(watch(name)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    await start("a0", "a1", "a2", "a3", "a4", "a5", "a6")  # caller a may hold 7 of 8 watches
    clock.advance(29.0)
    await start("a7", "b0", "b1")
    assert ended == ["a7", "b1"], "a watch younger than 30 s must stay"
    clock.advance(1.0)
    await start("a8", "a9", "b2")
    assert ended == ["a7", "b1", "a0", "a1", "b2"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "raised"),
    [
        (1024, 1_048_576, 1000, 3256),  # the limit is raised
        (1024, 1024, 256, None),
        (512, 1024, 256, 1024),
        (1_048_576, 1_048_576, 1000, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, None),
        (64, 64, 16, None),
    ],
)
def test_connections_within_the_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    allowed: int,
    raised: int | None,
) -> None:
    """The server raises the limit of open files for 1,000 connections. A low hard limit allows fewer."""
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert allowed_connections(1000) == allowed
    assert limits == ([] if raised is None else [(raised, hard)])
    assert ("open files" in caplog.text) == (allowed < 1000)
