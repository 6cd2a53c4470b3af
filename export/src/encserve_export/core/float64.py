"""Runs a PyTorch module in float64, to measure the rounding errors of float32."""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """Convert a module's floating-point parameters and buffers to float64 for a `with` block.

    In float64 the module takes twice the memory of float32. If the module's own code casts to float32, this cast still
    happens. After the block, all parameters and buffers have their original types and bits again.
    """
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
    dtypes = [tensor.dtype for tensor in tensors]
    try:
        # Several tensors may share memory, such as a mapped file. This memory is freed only after all of these tensors
        # are freed. So each tensor first gets its own memory. Otherwise, the module would be in memory in float32 and
        # in float64.
        _copy(tensors, dtypes)
        _copy(tensors, [torch.float64] * len(tensors))
        yield
    finally:
        _copy(tensors, dtypes)


def _copy(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        _return_freed_memory()
        tensor.data = tensor.data.to(dtype, copy=True)
    _return_freed_memory()


def _return_freed_memory() -> None:
    """Return freed memory to the operating system. Otherwise the process keeps the memory of the old tensors too."""
    # glibc has the function malloc_trim. Other C libraries do not have this function.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
