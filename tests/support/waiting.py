"""Waiting for a condition."""

import asyncio
import time
from collections.abc import Callable

# More than any test needs on a busy machine, and less than the timeout of a test.
PATIENCE_SECONDS = 60.0


async def until(condition: Callable[[], object]) -> None:
    """Waits for a condition; fails after a minute."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < ends, f"did not happen within {PATIENCE_SECONDS:g} s"
        await asyncio.sleep(0.01)
