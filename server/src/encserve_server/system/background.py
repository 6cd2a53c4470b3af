"""Work that the server repeats in the background."""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable

from encserve_server.system.clock import Clock, MonotonicClock

logger = logging.getLogger(__name__)

# After each part of work on this many bytes or characters, the event loop runs other requests.
TURN_BYTES = 64 * 1024


async def repeat(
    work: Callable[[], object],
    seconds: float | None,
    *,
    clock: Clock | None = None,
    wake: asyncio.Event | None = None,
) -> None:
    """Call a function or a coroutine function repeatedly, until it returns True or the task is cancelled.

    An exception does not end the repetition. The traceback goes to the log. Equal exceptions in a row are logged once.

    Args:
        work: The function.
        seconds: The pause before each call. None means that only `wake` ends the pause.
        clock: The clock of the pause; not used with `wake`.
        wake: Ends a pause early. It is cleared before each call.
    """
    failure = ""
    while True:
        if wake is None:
            await (clock or MonotonicClock()).sleep(seconds or 0.0)
        else:
            # asyncio.wait_for is not used: on Python 3.11 it can lose a cancellation that comes together with the
            # event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await wake.wait()
            wake.clear()
        try:
            result = work()
            if inspect.isawaitable(result):
                result = await result
            failure = ""
        except Exception as error:  # a bug must not end the repetition, because nothing would start it again
            if failure != repr(error):
                failure = repr(error)
                logger.exception("background work failed; it goes on", extra={"work": work.__qualname__})
        else:
            if result is True:
                return
