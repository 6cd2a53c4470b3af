"""Measures the delay of the event loop. Every call takes longer by this delay."""

from collections.abc import Callable

from encserve_server.system.clock import Clock

_PERIOD_SECONDS = 0.1
# If the event loop has no tick for this time, it is dead. Long work, such as loading a model, runs in threads.
STANDSTILL_SECONDS = 5.0


class LoopWatch:
    """Ticks on the event loop ten times a second."""

    def __init__(self, clock: Clock, observe: Callable[[float], None]) -> None:
        """Set the clock. `observe` takes the delay of each tick, in seconds."""
        self._clock = clock
        self._observe = observe
        self._ticked_at = clock.now()

    def is_alive(self) -> bool:
        """Return whether the loop ticked in the last `STANDSTILL_SECONDS`. Any thread may call this."""
        return self._clock.now() - self._ticked_at < STANDSTILL_SECONDS

    async def run(self) -> None:
        """Observe the delay of each tick, until cancelled.

        The delay of a tick is the delay of work that is due at this time. A blocked loop misses several ticks, and each
        missed tick gives one observation. For example, a loop that is blocked for a second gives ten observations.
        """
        due = self._clock.now() + _PERIOD_SECONDS
        while True:
            await self._clock.sleep(max(due - self._clock.now(), 0.0))
            self._ticked_at = now = self._clock.now()
            while due <= now:
                self._observe(now - due)
                due += _PERIOD_SECONDS
