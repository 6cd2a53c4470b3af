"""Clocks. They are passed as arguments, so that tests control the time."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """The time functions of the server."""

    def now(self) -> float:
        """The seconds on a clock that never goes back. Only differences between two values have a meaning."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""


class MonotonicClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await asyncio.sleep(seconds)


class AwakeTime:
    """Counts the seconds in which the process runs.

    If more than `max_gap_seconds` pass between two ticks, only `max_gap_seconds` count. Such a gap can come from
    SIGSTOP, a suspended machine or a blocked event loop. Call `tick` regularly on the event loop. Any thread may call
    `now`.
    """

    def __init__(self, clock: Clock, max_gap_seconds: float) -> None:
        """Start at 0 seconds."""
        self._clock = clock
        self._max_gap_seconds = max_gap_seconds
        self._last = clock.now(), 0.0  # the clock's time and the awake time of the last tick

    def now(self) -> float:
        """Return the counted seconds."""
        ticked_at, seconds = self._last
        return seconds + min(self._clock.now() - ticked_at, self._max_gap_seconds)

    def tick(self) -> None:
        """Count the time since the last tick."""
        seconds = self.now()
        self._last = self._clock.now(), seconds
