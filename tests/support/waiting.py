"""Waits until a condition is true. Turns Python's cycle collector off.

Without the collector, a test can find objects that stay in memory because they are in a reference cycle.
"""

import asyncio
import gc
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# This time is long enough for every condition on a busy machine, but shorter than the timeout of a test.
PATIENCE_SECONDS = 60.0


async def until(condition: Callable[[], object]) -> None:
    """Wait until a function or a coroutine function returns a true value. After PATIENCE_SECONDS, fail the test."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while not (await result if inspect.isawaitable(result := condition()) else result):
        assert time.monotonic() < ends, f"the condition did not hold within {PATIENCE_SECONDS:g} s"
        await asyncio.sleep(0.002)


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect all garbage, and turn the cycle collector off for the block.

    During the block, unused objects stay in memory only if they are in a reference cycle.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
