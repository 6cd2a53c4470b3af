"""A server in a process of its own, for as long as a block lasts."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any


@contextmanager
def serving(serve: Callable[[Connection], None]) -> Iterator[Any]:
    """Runs `serve` in a new process, and gives the first thing that it sends: where it can be asked."""
    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    process = spawn.Process(target=serve, args=(far,), daemon=True)
    process.start()
    far.close()
    try:
        yield near.recv()
    finally:
        process.terminate()
        process.join(timeout=10)
