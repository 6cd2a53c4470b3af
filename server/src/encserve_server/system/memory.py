"""Memory limits, glibc's arenas, and Python's garbage collector.

With a C library other than glibc, the functions for glibc do nothing.
"""

import contextlib
import ctypes
import gc
import os
from pathlib import Path

from encserve_server.system import cgroups

_M_ARENA_MAX = -8  # glibc's <malloc.h>
_ARENAS = 2
# After this number of collections of the middle generation, Python makes a full collection. The default is 10.
_FULL_COLLECTION_EVERY = 1000


def limit_arenas() -> None:
    """Let all threads allocate from two arenas, unless MALLOC_ARENA_MAX is set. Call before the first thread starts.

    By default, glibc has eight arenas for each CPU. The threads of each model would leave small objects in different
    arenas, and glibc could not return large blocks to the system. After 20 new versions of models, 15 % of a server's
    memory was lost this way.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
            ctypes.CDLL("libc.so.6").mallopt(_M_ARENA_MAX, _ARENAS)


def usable_bytes(root: Path = Path("/")) -> int:
    """Return the machine's memory in bytes, or the limit of a container or service if the limit is smaller.

    `root` is the folder that holds proc and sys.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for text in (*cgroups.read_all("memory.max", root), *cgroups.read_all("memory.limit_in_bytes", root, "memory")):
        with contextlib.suppress(ValueError):  # the limit is "max"
            limits.append(int(text))
    return min(limits)


def freeze_gc() -> None:
    """Exclude all existing objects from garbage collection. Call before models are loaded.

    A full collection visits every object, and no other Python code runs meanwhile. On busy CPUs, a collection took 35
    to 60 ms every few seconds. Nearly all existing objects, about 43,000, belong to libraries and never become garbage.
    With a queue of 65,536 sequences, a full collection still takes 55 ms, so the function also makes full collections
    rare. Young objects are collected as often as by default. https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_COLLECTION_EVERY)


def trim() -> None:
    """Return freed memory to the system. Without this call, glibc would keep most of the memory."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def give_back() -> None:
    """Free unreachable objects, and return freed memory to the system."""
    gc.collect()  # a scheduler and its lanes refer to each other, so only a collection frees them
    trim()
