"""A clock that moves only when a test moves it."""

import asyncio
import heapq
import itertools


class FakeClock:
    """A clock that moves only in `advance`."""

    def __init__(self, start: float = 0.0) -> None:
        """Start at `start` seconds."""
        self._now = start
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def sleepers(self) -> int:
        """The number of coroutines that wait in `sleep`."""
        return len(self._sleepers)

    def now(self) -> float:
        """The time in seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has moved forward by this number of seconds."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), woken))
        await woken

    def advance(self, seconds: float) -> None:
        """Move the time forward, and wake the coroutines whose sleep has ended."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
