"""The ledger: how much of each limited resource each caller holds.

A `Pool` is one limited resource: bytes or places. A place is a slot for one slow request or one open stream. An account
is a caller's name, or the peer's address for a caller without a name. An account may hold at most a fixed multiple of
the amount that is still free. So one account alone cannot fill a pool, and an account that holds nothing finds room.
Network switches with shared memory limit their queues with this rule (Choudhury and Hahne, "Dynamic queue length
thresholds", 1998).

Transports only take from pools and give back. This module has all the rules. Use it only on the event loop.
"""

import asyncio
import contextlib
import heapq
import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from typing import Any, Protocol, TypeVar

from encserve_server.errors import BudgetFull, DeadlineExpired, Draining, EncserveError
from encserve_server.system.background import repeat
from encserve_server.system.clock import Clock

# An account may hold 7 times the amount that stays free. So a single account gets at most 7/8 of a pool. If two
# accounts ask for everything, each gets 7/15.
_SHARE = 7
# For a call of more than `SMALL_BYTES`, the account may hold only 3 times the amount that stays free. So even a single
# account leaves a quarter for small calls.
_LARGE_SHARE = 3
SMALL_BYTES = 256 * 1024
# The retry delay if a pool is full. Most replies are sent within a second.
RETRY_SECONDS = 1.0
# The time in which a request must arrive. A stream without progress for this time, or a health watch of this age, can
# lose its place to another call.
ARRIVAL_SECONDS = 30.0
# An HTTP body gets one more second for each 64 KiB that has arrived.
BYTES_PER_SECOND = 64 * 1024
# `Places` looks at all requests every `LOOK_SECONDS`. A request that is incomplete at its third look is slow. Most
# requests are complete at the first look.
LOOK_SECONDS = 0.1
_PROMPT_LOOKS = 2
# The pause between two parts of different bodies, and after the refusal of a slow request.
_PAUSE_SECONDS = 0.001
# For each second that parts of bodies take, all bodies rest for 3 seconds. So parts take at most a quarter of the event
# loop's time, even if they consist of tiny chunks. The time in which aiohttp receives bytes does not count. Short rests
# add up until they are long enough for a sleep. If the process was suspended during a part, the rest is limited.
_REST_PER_SECOND = 3
_LEAST_REST_SECONDS, _MOST_REST_SECONDS = 0.005, 0.05
# The minimum number of places, even if the byte budget is small.
_LEAST_PLACES = 64
# Calls that may come without a key may together hold at most an eighth of the places.
_OPEN_PART = 8
# gRPC holds an incomplete request in memory that is an eighth larger than the request.
_OVERHEAD_PART = 8
# The maximum number of health watches. Each watch takes about 25 KiB.
MAX_WATCHES = 1024

_Task = asyncio.Task[Any]


class Pool:
    """One bounded resource.

    Attributes:
        limit: The amount that all accounts together may hold.
        held: The amount that all accounts hold now; any thread may read it.
    """

    def __init__(self, limit: int) -> None:
        """Start with nothing held."""
        self.limit = limit
        self.held = 0
        self._accounts: dict[str, int] = {}

    def held_by(self, account: str) -> int:
        """Return the amount that an account holds."""
        return self._accounts.get(account, 0)

    def has_room(self, account: str, size: int, share: int = _SHARE) -> bool:
        """Return whether an account may take `size` more."""
        free = self.limit - self.held - size
        return free >= 0 and self.held_by(account) + size <= share * (
            free + 1
        )  # without + 1, an account could never take the last free unit

    def add(self, account: str, size: int) -> None:
        """Add `size` to the amount of an account, without a check. `size` may be negative."""
        self.held += size
        amount = self._accounts.get(account, 0) + size
        if amount:
            self._accounts[account] = amount
        else:
            self._accounts.pop(account, None)


class ByteBudget(Pool):
    """The bytes of requests and replies that calls of all protocols hold."""

    def take(self, account: str, size: int, own: int = 0) -> None:
        """Count bytes for an account.

        Args:
            account: The caller.
            size: The number of bytes that the call needs now.
            own: The number of bytes that the call holds already. If no other call holds bytes, this call may exceed the
                limit.

        Raises:
            BudgetFull: The budget or the share of the account has no room.
        """
        share = _SHARE if own + size <= SMALL_BYTES else _LARGE_SHARE
        if self.held > own and not self.has_room(account, size, share):
            raise BudgetFull(
                f"requests and replies in flight hold {self.held} of at most {self.limit} bytes (max_in_flight_mib). "
                f"This caller holds {self.held_by(account)} bytes and may hold {share} times the free bytes. This "
                f"call needs {size} more",
                RETRY_SECONDS,
            )
        if size:
            self.held += size
            self._accounts[account] = self._accounts.get(account, 0) + size


class Arrival:
    """A request that is not complete, or an open stream. The task of the call uses this object as a context manager.

    Attributes:
        account: The caller.
        is_open: Whether the call may come without a key.
        reserved_bytes: The number of bytes that a place for this call reserves in the byte budget.
        look: The value of `Places.looks` when the request began to arrive; None for a stream.
        began: The clock's time at which the request began to arrive.
        since: The clock's time of the last progress; infinity while a stream works on replies.
        seconds: The time in which the request must arrive.
        size: The number of bytes that have arrived; 0 over gRPC, which does not report this number.
        has_place: Whether the request or stream holds a place.
    """

    __slots__ = (
        "_places", "_refusal", "_task", "account", "began", "has_place", "is_open", "look", "reserved_bytes", "seconds",
        "since", "size",
    )  # fmt: skip

    def __init__(
        self,
        places: "Places",
        account: str,
        *,
        is_open: bool = False,
        is_stream: bool = False,
        reserves: bool = True,
    ) -> None:
        """Keep the properties of the call.

        Args:
            places: The places.
            account: The caller.
            is_open: Whether the call may come without a key.
            is_stream: Whether the call is a stream. A stream needs a place at once.
            reserves: Whether the call's place reserves bytes. False for an HTTP body: its bytes are counted as they
                arrive.
        """
        self._places = places
        self._task: _Task | None = None
        self._refusal: EncserveError | None = None
        self.account = account
        self.is_open = is_open
        self.reserved_bytes = places.reserved_bytes if reserves else 0
        self.look = None if is_stream else places.looks
        self.began = self.since = places.clock.now()
        self.seconds = ARRIVAL_SECONDS
        self.size = 0
        self.has_place = False

    def __enter__(self) -> "Arrival":
        """Start the time limit of the arrival. A stream takes a place.

        Raises:
            BudgetFull: All places are taken.
        """
        self._task = asyncio.current_task()
        if self.look is None:
            self._places.take_place(self)
        self._places.arrivals[self] = None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Free the place. If the ledger has ended the call, raise the reason.

        Raises:
            BudgetFull: The request was slow and found no place, or another call got the place.
            DeadlineExpired: The request did not arrive in time.
            Draining: The server is stopping.
        """
        self._places.arrivals.pop(self, None)
        if self.has_place:
            self._places.give_place_back(self)
        if self._refusal is not None and kind is asyncio.CancelledError and self._task is not None:
            self._task.uncancel()
            raise self._refusal from None

    def progress(self, *, size: int = 0, is_idle: bool = True) -> None:
        """Record progress: `size` bytes of a body, or a message of a stream.

        Args:
            size: The number of bytes that have arrived since the last progress.
            is_idle: Whether a stream waits for its caller. A stream that works on replies cannot lose its place.
        """
        self.since = self._places.clock.now() if is_idle else math.inf
        self.size += size
        self.seconds += size / BYTES_PER_SECOND

    def end(self, error: EncserveError) -> None:
        """End the call with an error, and free its place at once."""
        self._places.arrivals.pop(self, None)
        if self.has_place:
            self._places.give_place_back(self)
        self._refusal = error
        if self._task is not None:
            self._task.cancel()


class Places:
    """Places for slow requests and open streams of all protocols.

    A request that arrives within 0.2 s needs no place. A slow request and an open stream each take a place. gRPC
    reports the size of a message only when the message is complete. So the place of a gRPC call reserves bytes for the
    largest request. All places together reserve at most half of the byte budget.

    If no place is free, an account can take the place of another holder. This holder is the one with the oldest
    `since`, and `since` must be at least 30 s ago. The holder must belong to the same account, or to an account with
    more places. A call that may come without a key takes only places of other such calls.

    Attributes:
        pool: The places.
        open_pool: The places of calls that may come without a key.
        reserved_bytes: The number of bytes that the place of a gRPC call reserves.
        arrivals: The requests that are not complete, and the open streams; the oldest first.
        looks: How many times `watch` has looked at the arrivals.
        clock: The time.
    """

    def __init__(self, budget: ByteBudget, clock: Clock, draining: asyncio.Event, max_request_bytes: int) -> None:
        """Derive the number of places from the byte budget.

        Args:
            budget: The byte budget in which places reserve bytes.
            clock: The time.
            draining: Set when the server stops. After that, slow requests end with `Draining`.
            max_request_bytes: The size of the largest gRPC request.
        """
        half = budget.limit // 2
        largest = max_request_bytes + max_request_bytes // _OVERHEAD_PART
        places = max(half // largest, _LEAST_PLACES)
        self.pool = Pool(places)
        self.open_pool = Pool(places // _OPEN_PART)
        self.reserved_bytes = min(largest, half // places)
        self._budget = budget
        self.clock = clock
        self._draining = draining
        self.looks = 0
        self._turn = asyncio.Lock()
        self._rested_at = -math.inf  # the end of the rest of all bodies
        self.arrivals: dict[Arrival, None] = {}

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn to handle one part of a body. The part is handled inside the block, without an await.

        In each turn of the event loop, only one body continues. If many bodies arrive, or if the last parts were
        costly, a pause comes before the turn. So other calls need not wait for all bodies.
        """
        is_busy = self._turn.locked()
        async with self._turn:
            rest_s = self._rested_at - self.clock.now()
            if rest_s >= _LEAST_REST_SECONDS:
                await self.clock.sleep(rest_s)
            else:
                await asyncio.sleep(_PAUSE_SECONDS if is_busy else 0.0)
            began = self.clock.now()
            try:
                yield
            finally:
                now = self.clock.now()
                rest_s = max(self._rested_at - began, 0.0) + _REST_PER_SECOND * (now - began)
                self._rested_at = now + min(rest_s, _MOST_REST_SECONDS)

    async def watch(self) -> None:
        """End requests that arrive too slowly, until cancelled."""
        await repeat(self._look, LOOK_SECONDS, clock=self.clock)

    async def _look(self) -> None:
        """Give places to slow requests, and end requests that must end. In each turn of the loop, only one ends."""
        self.looks += 1
        for it in [it for it in self.arrivals if it.look is not None]:
            error = self._check(it) if it in self.arrivals else None
            if error is not None:
                it.end(error)
                await asyncio.sleep(_PAUSE_SECONDS)

    def _check(self, arrival: Arrival) -> EncserveError | None:
        """Give a request a place if it is slow. Return an error if the request must end."""
        if not arrival.has_place and self.looks - (arrival.look or 0) > _PROMPT_LOOKS:
            try:
                self.take_place(arrival)
            except BudgetFull as error:
                return error
        elif arrival.has_place and self._draining.is_set():  # the rest of the request may never arrive
            return Draining()
        elif arrival.began + arrival.seconds <= self.clock.now():
            came = f"; {arrival.size} bytes came" if arrival.size else ""
            return DeadlineExpired(f"the request did not arrive within {arrival.seconds:.0f} s{came}")
        return None

    def take_place(self, arrival: Arrival) -> None:
        """Give an arrival a place. If no place is free, end another holder if possible.

        Raises:
            BudgetFull: All places are taken, or the bytes of the place exceed the budget.
        """
        while not self._has_place_for(arrival):
            if not self._end_idle(arrival):
                raise BudgetFull(
                    f"{self.pool.held} of {self.pool.limit} places for streams and slow requests are taken "
                    "(max_in_flight_mib)",
                    RETRY_SECONDS,
                )
        self._budget.take(arrival.account, arrival.reserved_bytes)
        arrival.has_place = True
        self.pool.add(arrival.account, 1)
        if arrival.is_open:
            self.open_pool.add(arrival.account, 1)

    def _has_place_for(self, arrival: Arrival) -> bool:
        is_full = arrival.is_open and self.open_pool.held >= self.open_pool.limit
        return not is_full and self.pool.has_room(arrival.account, 1)

    def _end_idle(self, asking: Arrival) -> bool:
        """End the idle holder with the oldest `since` whose place `asking` may take. Return False without a holder."""
        most = self.pool.held_by(asking.account)
        holders = [
            it
            for it in self.arrivals
            if it.has_place
            and it.since + ARRIVAL_SECONDS <= self.clock.now()
            and (it.account == asking.account or self.pool.held_by(it.account) > most)
            and (it.is_open or not asking.is_open)
        ]
        if not holders:
            return False
        oldest = min(holders, key=lambda it: it.since)
        problem = f"the call made no progress for {ARRIVAL_SECONDS:.0f} s, and another call needs its place"
        oldest.end(BudgetFull(problem, RETRY_SECONDS))
        return True

    def give_place_back(self, arrival: Arrival) -> None:
        """Free the place of an arrival."""
        arrival.has_place = False
        self._budget.add(arrival.account, -arrival.reserved_bytes)
        self.pool.add(arrival.account, -1)
        if arrival.is_open:
            self.open_pool.add(arrival.account, -1)


class OpenConnection(Protocol):
    """A connection that a server has accepted.

    Attributes:
        host: The address of the other end, without the port.
        has_called: Whether a call on this connection was accepted.
        idle_since: The time at which the connection became idle; infinity while it has a call.
    """

    host: str
    has_called: bool
    idle_since: float


AnyConnection = TypeVar("AnyConnection", bound=OpenConnection)


def connections_to_close(connections: Collection[AnyConnection], count: int) -> list[AnyConnection]:
    """Choose up to `count` connections to close, so that new connections have room. Connections with a call stay.

    The first criterion is that no call was ever accepted on the connection. The second is the number of idle
    connections from the same address. The third is the longest idle time.
    """
    idle = [it for it in connections if it.idle_since < math.inf]
    hosts = Counter(it.host for it in idle)
    return heapq.nsmallest(count, idle, key=lambda it: (it.has_called, -hosts[it.host], it.idle_since))


class Watches:
    """The health watches of all callers.

    If an account has no room for a new watch, the oldest watch of the account ends if it began at least 30 s ago.
    """

    def __init__(self, clock: Clock) -> None:
        """Start without watches."""
        self._clock = clock
        self._pool = Pool(MAX_WATCHES)
        self._began: dict[str, dict[_Task, float]] = {}  # by account: the tasks of its watches, the oldest first

    @contextlib.contextmanager
    def hold(self, account: str) -> Iterator[None]:
        """Count the watch of the current task.

        Raises:
            BudgetFull: There are too many watches, or a newer watch of the same account needs the room.
        """
        task, now = current_task(), self._clock.now()
        if not self._pool.has_room(account, 1):
            oldest, began = next(iter(self._began.get(account, {}).items()), (task, now))
            if began + ARRIVAL_SECONDS > now:
                raise self._too_many(account)
            self._remove(account, oldest)
            oldest.cancel()
        self._began.setdefault(account, {})[task] = now
        self._pool.add(account, 1)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._began.get(account, ()):  # the caller closed the watch
                raise
            task.uncancel()
            raise self._too_many(account) from None
        finally:
            self._remove(account, task)

    def _remove(self, account: str, task: _Task) -> None:
        began = self._began.get(account, {})
        if task in began:
            del began[task]
            self._pool.add(account, -1)
        if not began:
            self._began.pop(account, None)

    def _too_many(self, account: str) -> BudgetFull:
        held = self._pool.held_by(account)
        return BudgetFull(f"{held} health watches of this caller are open: open fewer watches", RETRY_SECONDS)


def current_task() -> _Task:
    """Return the task of a call. gRPC and aiohttp run each call in a task."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine runs in a task
    return task
