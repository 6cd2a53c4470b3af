"""A fake clock for tests. The time changes only when a test calls `advance`."""

import asyncio
import heapq
import itertools


class FakeClock:
    """A fake of the server's `Clock`. The time changes only in `advance`."""

    def __init__(self, start: float = 0.0) -> None:
        """Start the clock at `start` seconds."""
        self._now = start
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def sleepers(self) -> int:
        """The number of coroutines that wait in `sleep`."""
        return len(self._sleepers)

    def now(self) -> float:
        """The current time of the clock, in seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has advanced by `seconds`."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), woken))
        await woken

    def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds`, and wake each coroutine whose sleep is over."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
