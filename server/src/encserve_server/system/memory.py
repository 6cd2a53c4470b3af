"""Memory: the C library's is kept together and given back when a model goes, Python's is not searched in vain.

Where the C library is not glibc, nothing happens to its memory.
"""

import contextlib
import ctypes
import gc
import os
from pathlib import Path

_CGROUP_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")  # v2, v1
_M_ARENA_MAX = -8  # glibc's <malloc.h>
_ARENAS = 2
# Of so many collections of the middle generation one is full, not of ten.
_FULL_COLLECTION_EVERY = 1000


def limit_arenas() -> None:
    """Has all threads allocate from two arenas, unless MALLOC_ARENA_MAX says otherwise; call before there are threads.

    By default there are eight for each CPU. Each model's threads would leave a few small things behind in arenas of
    their own, which keep large pieces from being given back: some 15 % of a server's memory after 20 new versions.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
            ctypes.CDLL("libc.so.6").mallopt(_M_ARENA_MAX, _ARENAS)


def usable_bytes() -> int:
    """The machine's memory in bytes, less where a container's limit allows fewer."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no cgroup of this version, or "max": no limit
            limits.append(int(path.read_text()))
    return min(limits)


def freeze_gc() -> None:
    """Exempts from garbage collection what is there now, the libraries; call before there are models.

    A full collection looks at every object, and nothing else runs meanwhile: 35 to 60 ms, every few seconds, where all
    CPUs compute. Nearly all objects, some 43,000, are the libraries' and never become garbage. Of a queue of 65,536
    sequences it takes 55 ms, so full collections are rare too; what is young is collected as before.
    https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_COLLECTION_EVERY)


def trim() -> None:
    """Returns freed memory to the system; glibc would keep most of it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def give_back() -> None:
    """Frees what is unreachable, and returns freed memory to the system; glibc would keep most of it."""
    gc.collect()  # a scheduler and its lanes know each other, and would stay until Python happens to look
    trim()
