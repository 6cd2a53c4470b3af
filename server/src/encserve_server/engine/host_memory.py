"""Page-locked memory of the host, into which a GPU copies a result at the full speed of its bus.

Memory that the operating system may move has to be copied twice: into a page-locked place of the driver's, and from
there by the CPU. Locking pages takes milliseconds, so what has been locked is lent again and again.
"""

import contextlib
import ctypes
import logging
import math
import os
import threading
import weakref
from collections import deque
from typing import Protocol

import numpy as np

from encserve_server.types import Numbers

logger = logging.getLogger(__name__)

_SIZES = tuple(1 << power for power in range(16, 33))  # bytes of a block
# Page-locked memory is taken from all processes of the machine: nothing of it can be swapped out.
_MOST_BYTES = 512 * 1024 * 1024
_LIBRARIES = ("libcudart.so.13", "libcudart.so.12")
_ITEM_BYTES = 4  # float32
_PORTABLE = 1  # cudaHostAllocPortable: locked for every context, whichever thread asks


class Allocator(Protocol):
    """Where the memory comes from."""

    def allocate(self, n_bytes: int) -> int:
        """The address of so much memory.

        Raises:
            OSError: There is none.
        """

    def free(self, address: int) -> None:
        """Gives it back."""


class CudaAllocator:
    """Page-locked memory of NVIDIA's runtime library, which ONNX Runtime's CUDA provider has loaded."""

    def __init__(self) -> None:
        """Finds the library.

        Raises:
            OSError: It is not there.
        """
        self._library = _open_library()
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, n_bytes: int) -> int:
        """Locks so many bytes."""
        address = ctypes.c_void_p()
        code = self._library.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(n_bytes), ctypes.c_uint(_PORTABLE))
        if code or address.value is None:
            # Otherwise the next kernel of this thread would find the error, and count it as its own.
            self._library.cudaGetLastError()
            text = self._library.cudaGetErrorString(code) or b"no address"
            raise OSError(f"cudaHostAlloc of {n_bytes} bytes: {text.decode()} ({code})")
        return address.value

    def free(self, address: int) -> None:
        """Unlocks them."""
        if self._library.cudaFreeHost(ctypes.c_void_p(address)):
            self._library.cudaGetLastError()


def _open_library() -> ctypes.CDLL:
    """The one that is loaded already, for there may be several; else the first that can be."""
    if_loaded = getattr(os, "RTLD_NOLOAD", 0)  # not on Windows, where none of these names is found
    for mode in (if_loaded | ctypes.DEFAULT_MODE, ctypes.DEFAULT_MODE):
        for name in _LIBRARIES:
            with contextlib.suppress(OSError):
                return ctypes.CDLL(name, mode)
    raise OSError(f"cannot load {' or '.join(_LIBRARIES)}")


class HostMemory:
    """Lends arrays, and takes their memory back when nobody refers to them, or to a view of them, any more.

    Beyond `most_bytes`, or where none can be had, arrays are of ordinary memory: slower, and never wrong. Any thread
    may call anything.
    """

    def __init__(self, allocator: Allocator, *, most_bytes: int = _MOST_BYTES) -> None:
        """Takes where the memory comes from, and the most that is taken of it."""
        self._allocator = allocator
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._taken_bytes = 0
        # The addresses of each size. A block comes back in whichever thread drops the last reference to it, in the
        # middle of whatever that thread does: so without the lock.
        self._free: dict[int, deque[int]] = {size: deque() for size in _SIZES}
        self._closed = False
        self._told = False  # whether it has been logged that there is no more
        self._exhausted = False  # whether the allocator has had no more

    @property
    def taken_bytes(self) -> int:
        """How much has been taken and not freed, lent or not; until `close`."""
        return self._taken_bytes

    def lend(self, shape: tuple[int, ...]) -> Numbers:
        """A float32 array of this shape; what is in it is left over from before."""
        count = math.prod(shape)
        taken = self._take(count * _ITEM_BYTES)
        if taken is None:
            return np.empty(shape, np.float32)
        size, address = taken
        whole: Numbers = np.frombuffer(memoryview((ctypes.c_byte * size).from_address(address)), np.float32)
        # Views refer to `whole`, so it goes with the last of them. At the process' end there is nothing to give back.
        weakref.finalize(whole, self._give_back, size, address).atexit = False
        return whole[:count].reshape(shape)

    def close(self) -> None:
        """Frees what is not lent; what is lent is freed when it comes back."""
        self._closed = True
        for blocks in self._free.values():
            self._free_all(blocks)

    def _take(self, n_bytes: int) -> tuple[int, int] | None:
        """A block that holds so much: its size and address; None where there is no more."""
        sizes = [size for size in _SIZES if size >= n_bytes]
        if not sizes:
            return None
        least = sizes[0]
        if (address := _pop(self._free[least])) is not None or (address := self._allocate(least)) is not None:
            return least, address
        for size in sizes[1:]:  # larger than needed, and at once
            if (address := _pop(self._free[size])) is not None:
                return size, address
        address = self._allocate(least, make_room=True)
        return None if address is None else (least, address)

    def _allocate(self, size: int, *, make_room: bool = False) -> int | None:
        """A new block, for which idle ones of other sizes may have to go."""
        with self._lock:
            if self._exhausted:
                return None
            if self._taken_bytes + size > self._most_bytes and not (make_room and self._make_room(size)):
                if make_room:
                    self._tell(f"{self._taken_bytes} bytes are taken, of at most {self._most_bytes}")
                return None
            try:
                address = self._allocator.allocate(size)
            except OSError as error:
                self._exhausted = True  # asking again would take time with every batch
                self._tell(str(error))
                return None
            self._taken_bytes += size
            return address

    def _make_room(self, size: int) -> bool:
        """Frees idle blocks, largest first, until so much may be taken; none if that is not enough. Under the lock."""
        idle_bytes = sum(other * len(blocks) for other, blocks in self._free.items())
        if self._taken_bytes - idle_bytes + size > self._most_bytes:
            return False
        for other in reversed(_SIZES):
            while self._taken_bytes + size > self._most_bytes:
                if (address := _pop(self._free[other])) is None:
                    break
                self._allocator.free(address)
                self._taken_bytes -= other
        return self._taken_bytes + size <= self._most_bytes

    def _tell(self, why: str) -> None:
        """Logs, once, that there is no more."""
        if not self._told:
            self._told = True
            _warn(why)

    def _give_back(self, size: int, address: int) -> None:
        blocks = self._free[size]
        blocks.append(address)
        if self._closed:
            self._free_all(blocks)

    def _free_all(self, blocks: "deque[int]") -> None:
        while (address := _pop(blocks)) is not None:
            self._allocator.free(address)


def page_locked_memory() -> HostMemory | None:
    """Memory for the results of a GPU; None, with a warning, where NVIDIA's runtime library cannot be found."""
    try:
        return HostMemory(CudaAllocator())
    except OSError as error:
        _warn(str(error))
        return None


def _warn(why: str) -> None:
    logger.warning("page-locked memory cannot be had: copies from the GPU are slower", extra={"reason": why})


def _pop(blocks: "deque[int]") -> int | None:
    """A block that is not lent, if there is one."""
    try:
        return blocks.pop()
    except IndexError:
        return None
