"""Memory: the C library's is kept together and given back when a model goes, Python's is not searched in vain.

Where the C library is not glibc, nothing happens to its memory.
"""

import contextlib
import ctypes
import gc
import os

_M_ARENA_MAX = -8  # glibc's <malloc.h>
_ARENAS = 2


def limit_arenas() -> None:
    """Has all threads allocate from two arenas, unless MALLOC_ARENA_MAX says otherwise; call before there are threads.

    By default there are eight for each CPU. Each model's threads would leave a few small things behind in arenas of
    their own, which keep large pieces from being given back: some 15 % of a server's memory after 20 new versions.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
            ctypes.CDLL("libc.so.6").mallopt(_M_ARENA_MAX, _ARENAS)


def settle() -> None:
    """Has the garbage collector leave alone what is there now, the libraries; call before there are models.

    A full collection looks at every object, and nothing else runs meanwhile: 35 to 60 ms, every few seconds, where all
    CPUs compute. Nearly all objects, some 43,000, are the libraries' and never become garbage.
    https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Frees what nobody can reach, and returns freed memory to the system; glibc would keep most of it."""
    gc.collect()  # a scheduler and its lanes know each other, and would stay until Python happens to look
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
