"""How late the event loop is: what it does meanwhile, everybody waits for."""

from collections.abc import Callable

from encserve_server.system.clock import Clock

_PERIOD_SECONDS = 0.1


async def watch_lag(clock: Clock, observe: Callable[[float], None]) -> None:
    """Ten times a second, tells how many seconds late the event loop got to it; runs until it is cancelled.

    A loop that stands still for long is late for every tick that it missed, not for one. So the observations are what
    something that becomes due at any moment has to wait, and a second's standstill is not lost among a thousand good
    ticks.
    """
    due = clock.now() + _PERIOD_SECONDS
    while True:
        await clock.sleep(max(due - clock.now(), 0.0))
        now = clock.now()
        while due <= now:
            observe(now - due)
            due += _PERIOD_SECONDS
