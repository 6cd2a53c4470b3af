"""The ledger: how much of each limited resource each caller holds.

A `Pool` is one limited resource: bytes or places. An account is the name of a caller, or the address of a caller
without a name. One rule gives shares: an account may hold at most a fixed multiple of the amount that is still free.
So one account alone cannot fill a pool, and an account that holds nothing finds room. Shared-memory switches limit
their queues with this rule (Choudhury and Hahne, "Dynamic queue length thresholds", 1998).

Front ends only take from pools and give back; the rules are in this module. Use it only on the event loop.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Protocol, TypeVar

from encserve_server.errors import BudgetFull, DeadlineExpired, Draining, EncserveError
from encserve_server.system.background import repeat
from encserve_server.system.clock import Clock

# An account may hold 7 times the free amount. So one account can hold 7/8 of a pool, and each of two accounts 7/15.
_SHARE = 7
# For a call of more than `SMALL_BYTES`, the limit is 3 times the free amount. The last quarter is for small calls.
_LARGE_SHARE = 3
SMALL_BYTES = 256 * 1024
# The retry delay if a pool is full. Most replies are sent within a second.
RETRY_SECONDS = 1.0
# The time in which a request must arrive. A call without progress for this time can lose its place to another call.
ARRIVAL_SECONDS = 30.0
# An HTTP body gets one more second for each 64 KiB that has arrived.
BYTES_PER_SECOND = 64 * 1024
# A request that is not complete after two checks counts as slow. Most requests arrive together with their call.
LOOK_SECONDS = 0.1
_PROMPT_CHECKS = 2
# The smallest number of places, if the byte budget is small.
_LEAST_PLACES = 64
# All calls that need no key together may hold at most an eighth of the places.
_OPEN_DIVISOR = 8
# For a request that is not complete, gRPC uses an eighth more memory than its bytes.
_OVERHEAD_DIVISOR = 8
# The most health watches. Each takes about 25 KiB.
MAX_WATCHES = 1024

_Task = asyncio.Task[Any]


class Pool:
    """One limited resource.

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
        return free >= 0 and self.held_by(account) + size <= share * (free + 1)  # + 1: the last unit can be taken

    def add(self, account: str, size: int) -> None:
        """Add `size` to the amount of an account, without a check. A negative `size` gives back."""
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
            size: The bytes that the call needs now.
            own: The bytes that the call holds already. A call that is alone always has room.

        Raises:
            BudgetFull: The budget or the share of the account has no room.
        """
        share = _SHARE if own + size <= SMALL_BYTES else _LARGE_SHARE
        if self.held > own and not self.has_room(account, size, share):
            raise BudgetFull(
                f"requests and replies in flight hold {self.held} of at most {self.limit} bytes (max_in_flight_mib), "
                f"{self.held_by(account)} of them for this caller, which may hold {share} times the free bytes; this "
                f"call needs {size} more",
                RETRY_SECONDS,
            )
        self.add(account, size)


class Arrival:
    """A request that is not complete, or an open stream. Use it as a context manager around the reads of a task.

    Attributes:
        account: The caller.
        is_open: Whether the call needs no key.
        reserved_bytes: The bytes that its place reserves in the byte budget.
        check: The number of the last check before the request began to arrive; None for a stream.
        since: The time when the request began, or of the last progress of a stream. Infinity for a busy stream.
        seconds: The time in which the request must arrive.
        has_place: Whether it holds a place.
    """

    __slots__ = (
        "_error", "_places", "_task", "account", "check", "has_place", "is_open", "reserved_bytes", "seconds", "since",
    )  # fmt: skip

    def __init__(
        self, places: "Places", account: str, is_open: bool, reserved_bytes: int, check: int | None, since: float
    ) -> None:
        """See the attributes."""
        self._places = places
        self._task: _Task | None = None
        self._error: EncserveError | None = None
        self.account = account
        self.is_open = is_open
        self.reserved_bytes = reserved_bytes
        self.check = check
        self.since = since
        self.seconds = ARRIVAL_SECONDS
        self.has_place = False

    def __enter__(self) -> "Arrival":
        self._task = current_task()
        self._places.register(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Free the place. If the ledger ended the call, raise its error."""
        self._places.remove(self)
        if self._error is not None and kind is asyncio.CancelledError:
            assert self._task is not None  # noqa: S101 - set on entry
            self._task.uncancel()
            raise self._error from None

    def end(self, error: EncserveError) -> None:
        """End the call with an error."""
        self._error = error
        if self._task is not None:
            self._task.cancel()


class Places:
    """Places for slow requests and open streams of all protocols.

    A request that is complete after 0.2 s needs no place. A slow request and an open stream each need a place. gRPC
    gives the size of a message only when the message is complete, so the place of a gRPC call reserves bytes for the
    largest request. All places together reserve at most half of the byte budget.

    If no place is free, a call can get the place of another call that has made no progress for at least 30 s. The other
    call must belong to the same account, or to an account with more places. Of these calls, the ledger ends the call
    without progress for the longest time.

    Attributes:
        pool: All places.
        open_pool: The places of calls that need no key.
    """

    def __init__(self, budget: ByteBudget, clock: Clock, draining: asyncio.Event, max_request_bytes: int) -> None:
        """Derive the number of places from the byte budget.

        Args:
            budget: The byte budget, in which places reserve bytes.
            clock: The clock.
            draining: Set when the server stops. Then slow requests end with `Draining`.
            max_request_bytes: The size of the largest gRPC request.
        """
        half = budget.limit // 2
        largest = max_request_bytes + max_request_bytes // _OVERHEAD_DIVISOR
        places = max(half // largest, _LEAST_PLACES)
        self.pool = Pool(places)
        self.open_pool = Pool(places // _OPEN_DIVISOR)
        self.reserved_bytes = min(largest, half // places)
        self._budget = budget
        self._clock = clock
        self._draining = draining
        self._checks = 0
        self._arrivals: dict[Arrival, None] = {}  # the oldest first

    def arriving(self, account: str, *, is_open: bool = False, reserves: bool = True) -> Arrival:
        """Limit the time in which the request of the current task arrives.

        Args:
            account: The caller.
            is_open: Whether the call needs no key.
            reserves: Whether its place reserves bytes. False for HTTP, which counts the bytes of a body itself.

        Raises:
            BudgetFull: The request is slow, and it gets no place or lost its place to another call.
            DeadlineExpired: The request did not arrive in time.
            Draining: The server is stopping.
        """
        size = self.reserved_bytes if reserves else 0
        return Arrival(self, account, is_open, size, self._checks, self._clock.now())

    def stream(self, account: str, *, is_open: bool = False) -> Arrival:
        """Hold a place for the stream of the current task.

        Raises:
            BudgetFull: No place is free, or another call got the place while the stream was idle.
        """
        stream = Arrival(self, account, is_open, self.reserved_bytes, None, self._clock.now())
        if not self._take_place(stream):
            raise self._no_place()
        return stream

    def progress(self, arrival: Arrival, *, size: int = 0, is_idle: bool = True) -> None:
        """Record progress: `size` bytes of a body, or a message of a stream.

        Args:
            arrival: The request or the stream.
            size: The bytes that have arrived.
            is_idle: Whether a stream waits for its caller. A stream with unanswered requests cannot lose its place.
        """
        if arrival.check is None:
            arrival.since = self._clock.now() if is_idle else math.inf
        arrival.seconds += size / BYTES_PER_SECOND

    async def watch(self) -> None:
        """End requests that arrive too slowly, until cancelled."""
        await repeat(self._check_all, LOOK_SECONDS, clock=self._clock)

    def register(self, arrival: Arrival) -> None:
        """Check an arrival from now on."""
        self._arrivals[arrival] = None

    def remove(self, arrival: Arrival) -> None:
        """Forget an arrival and free its place."""
        self._arrivals.pop(arrival, None)
        if arrival.has_place:
            self._give_place_back(arrival)

    def _check_all(self) -> None:
        self._checks += 1
        now = self._clock.now()
        for it in [it for it in self._arrivals if it.check is not None]:
            if not it.has_place and self._checks - (it.check or 0) > _PROMPT_CHECKS and not self._take_place(it):
                self._end(it, self._no_place(", and this request has not arrived completely"))
            elif it.has_place and self._draining.is_set():  # the request may never arrive
                self._end(it, Draining("the server is stopping; send the request to another server"))
            elif it.since + it.seconds <= now:
                self._end(it, DeadlineExpired(f"the request did not arrive within {it.seconds:.0f} s"))

    def _take_place(self, arrival: Arrival) -> bool:
        """Take a place. If none is free, try to end an idle call. Return whether there was a place."""
        while not self._has_place_for(arrival):
            if not self._end_idle(arrival):
                return False
        try:
            self._budget.take(arrival.account, arrival.reserved_bytes)
        except BudgetFull:
            return False
        arrival.has_place = True
        self.pool.add(arrival.account, 1)
        if arrival.is_open:
            self.open_pool.add(arrival.account, 1)
        return True

    def _has_place_for(self, arrival: Arrival) -> bool:
        is_full = arrival.is_open and self.open_pool.held >= self.open_pool.limit
        return not is_full and self.pool.has_room(arrival.account, 1)

    def _end_idle(self, newcomer: Arrival) -> bool:
        """End the call without progress for the longest time. Return False if no call may be ended for the newcomer."""
        places = self.pool.held_by(newcomer.account)
        holders = [
            it
            for it in self._arrivals
            if it.has_place
            and it.since + ARRIVAL_SECONDS <= self._clock.now()
            and (it.account == newcomer.account or self.pool.held_by(it.account) > places)
            and (it.is_open or not newcomer.is_open)
        ]
        if not holders:
            return False
        oldest = min(holders, key=lambda it: it.since)
        problem = f"the call made no progress for {ARRIVAL_SECONDS:.0f} s, and another call needs its place"
        self._end(oldest, BudgetFull(problem, RETRY_SECONDS))
        return True

    def _end(self, arrival: Arrival, error: EncserveError) -> None:
        """End a request or a stream with an error. Its place is free at once."""
        self.remove(arrival)
        arrival.end(error)

    def _give_place_back(self, arrival: Arrival) -> None:
        arrival.has_place = False
        self._budget.add(arrival.account, -arrival.reserved_bytes)
        self.pool.add(arrival.account, -1)
        if arrival.is_open:
            self.open_pool.add(arrival.account, -1)

    def _no_place(self, addition: str = "") -> BudgetFull:
        return BudgetFull(
            f"{self.pool.held} of {self.pool.limit} places for streams and slow requests are taken "
            f"(max_in_flight_mib){addition}",
            RETRY_SECONDS,
        )


class OpenConnection(Protocol):
    """A connection that a server has accepted.

    Attributes:
        host: The address of the caller, without the port.
        has_called: Whether the connection had an accepted call.
        idle_since: The start of its idle time; infinity while a call is open.
    """

    host: str
    has_called: bool
    idle_since: float


AnyConnection = TypeVar("AnyConnection", bound=OpenConnection)


def connections_to_close(connections: Collection[AnyConnection], count: int) -> list[AnyConnection]:
    """Choose idle connections to close, to make room for new ones. A connection with an open call stays.

    First choose connections that never had an accepted call, then connections of the address with the most idle
    connections. Among these, choose the connections that have been idle for the longest time.
    """
    idle = [it for it in connections if it.idle_since < math.inf]
    hosts = Counter(it.host for it in idle)
    return sorted(idle, key=lambda it: (it.has_called, -hosts[it.host], it.idle_since))[:count]


class Watches:
    """The health watches of all callers. If an account is at its limit, a new watch ends its oldest watch."""

    def __init__(self) -> None:
        """Start without watches."""
        self._pool = Pool(MAX_WATCHES)
        self._tasks: dict[str, dict[_Task, None]] = {}

    @contextlib.contextmanager
    def hold(self, account: str) -> Iterator[None]:
        """Count the watch of the current task.

        Raises:
            BudgetFull: There are too many watches, or a newer watch of the same account needs the room.
        """
        task, tasks = current_task(), self._tasks.setdefault(account, {})
        if not self._pool.has_room(account, 1):
            if not tasks:
                raise self._too_many(account)
            oldest = next(iter(tasks))
            self._remove(account, oldest)
            oldest.cancel()
        tasks[task] = None
        self._pool.add(account, 1)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._tasks.get(account, ()):  # the caller has gone
                raise
            task.uncancel()
            raise self._too_many(account) from None
        finally:
            self._remove(account, task)

    def _remove(self, account: str, task: _Task) -> None:
        tasks = self._tasks.get(account, {})
        if task in tasks:
            del tasks[task]
            self._pool.add(account, -1)
        if not tasks:
            self._tasks.pop(account, None)

    def _too_many(self, account: str) -> BudgetFull:
        held = self._pool.held_by(account)
        return BudgetFull(f"{held} health watches of this caller are open, and a newer one needs room", RETRY_SECONDS)


def current_task() -> _Task:
    """Return the task of a call. gRPC and aiohttp run each call in a task."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine runs in a task
    return task
