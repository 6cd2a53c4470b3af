"""Time that passes when a test says so."""

import asyncio
import heapq
import itertools


class FakeClock:
    """A clock that advances only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        """Starts at `start` seconds."""
        self._now = start
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        """The seconds told so far."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Returns once `advance` has passed the moment `seconds` from now."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), woken))
        await woken

    def advance(self, seconds: float) -> None:
        """Moves time forward and wakes whoever slept until then."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
