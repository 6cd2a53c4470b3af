"""Time as a dependency, so that tests decide when it passes."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What the server needs of time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds`."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds`."""
        await asyncio.sleep(seconds)
