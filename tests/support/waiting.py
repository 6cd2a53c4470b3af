"""Waits for conditions."""

import asyncio
import time
from collections.abc import Callable

# Nothing takes so long, however little of its CPUs a machine gets; less than a test may take.
PATIENCE_SECONDS = 60.0


async def until(condition: Callable[[], object]) -> None:
    """Waits for something that is about to happen; fails if it does not."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < ends, f"did not happen within {PATIENCE_SECONDS:g} s"
        await asyncio.sleep(0.01)
