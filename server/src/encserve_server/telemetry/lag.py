"""How late the event loop is: every caller waits for what it does meanwhile."""

from collections.abc import Callable

from encserve_server.system.clock import Clock

_PERIOD_SECONDS = 0.1
# A loop without a tick for so long is dead. Whatever takes long, loading most of all, is done in threads.
STANDSTILL_SECONDS = 5.0


class LoopWatch:
    """Ticks on the event loop ten times a second."""

    def __init__(self, clock: Clock, observe: Callable[[float], None]) -> None:
        """`observe` gets the seconds that a tick was late."""
        self._clock = clock
        self._observe = observe
        self._ticked_at = clock.now()

    def is_alive(self) -> bool:
        """Whether the loop has ticked in the last `STANDSTILL_SECONDS`; callable in any thread."""
        return self._clock.now() - self._ticked_at < STANDSTILL_SECONDS

    async def run(self) -> None:
        """Observes how late each tick is, until it is cancelled.

        A loop that stands still for long is late for every tick that it missed, not for one. So the observations are
        what something that becomes due at any moment has to wait, and a second's standstill is not lost among a
        thousand good ticks.
        """
        due = self._clock.now() + _PERIOD_SECONDS
        while True:
            await self._clock.sleep(max(due - self._clock.now(), 0.0))
            self._ticked_at = now = self._clock.now()
            while due <= now:
                self._observe(now - due)
                due += _PERIOD_SECONDS
