"""Page-locked memory of the host, into which a GPU copies a result at the full speed of its bus.

Memory that the operating system may move has to be copied twice: into a page-locked place of the driver's, and from
there by the CPU. Locking pages takes milliseconds, so what has been locked is lent again and again.
"""

import ctypes
import logging
import math
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
            text = self._library.cudaGetErrorString(code) or b"no address"
            raise OSError(f"cudaHostAlloc of {n_bytes} bytes: {text.decode()} ({code})")
        return address.value

    def free(self, address: int) -> None:
        """Unlocks them."""
        self._library.cudaFreeHost(ctypes.c_void_p(address))


def _open_library() -> ctypes.CDLL:
    for name in _LIBRARIES[:-1]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return ctypes.CDLL(_LIBRARIES[-1])


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

    @property
    def taken_bytes(self) -> int:
        """How much memory has been taken and not given back, lent or not."""
        return self._taken_bytes

    def lend(self, shape: tuple[int, ...]) -> Numbers:
        """A float32 array of this shape; what is in it is left over from before."""
        count = math.prod(shape)
        size = next((it for it in _SIZES if it >= count * _ITEM_BYTES), None)
        address = None if size is None else self._take(size)
        if size is None or address is None:
            return np.empty(shape, np.float32)
        whole: Numbers = np.frombuffer(memoryview((ctypes.c_byte * size).from_address(address)), np.float32)
        # Views refer to `whole`, so it goes with the last of them. At the process' end there is nothing to give back.
        weakref.finalize(whole, self._give_back, size, address).atexit = False
        return whole[:count].reshape(shape)

    def close(self) -> None:
        """Frees what is not lent; what is lent is freed when it comes back."""
        self._closed = True
        for blocks in self._free.values():
            _free_all(self._allocator, blocks)

    def _take(self, size: int) -> int | None:
        """A block of this size, or None where there is no more."""
        blocks = self._free[size]
        try:
            return blocks.pop()
        except IndexError:
            pass
        with self._lock:
            if self._taken_bytes + size > self._most_bytes:
                return None
            try:
                address = self._allocator.allocate(size)
            except OSError as error:
                self._most_bytes = self._taken_bytes  # asking again would take time with every batch
                _warn(error)
                return None
            self._taken_bytes += size
            return address

    def _give_back(self, size: int, address: int) -> None:
        blocks = self._free[size]
        blocks.append(address)
        if self._closed:
            _free_all(self._allocator, blocks)


def page_locked_memory() -> HostMemory | None:
    """Memory for the results of a GPU; None, with a warning, where NVIDIA's runtime library cannot be found."""
    try:
        return HostMemory(CudaAllocator())
    except OSError as error:
        _warn(error)
        return None


def _warn(error: OSError) -> None:
    logger.warning("no more page-locked memory: copies from the GPU are slower", extra={"error": str(error)})


def _free_all(allocator: Allocator, blocks: "deque[int]") -> None:
    while True:
        try:
            address = blocks.pop()
        except IndexError:
            return
        allocator.free(address)
