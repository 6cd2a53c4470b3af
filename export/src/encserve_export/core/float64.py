"""A PyTorch module in float64: the numbers that float32 approximates."""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """Convert a module's floating-point parameters and buffers to float64, and afterwards back to their types.

    In float64 the module takes twice its float32 memory. Casts to float32 in the module's code stay. Afterwards all
    numbers have their earlier bits.
    """
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
    dtypes = [tensor.dtype for tensor in tensors]
    try:
        _convert(tensors, [torch.float64] * len(tensors))
        yield
    finally:
        _convert(tensors, dtypes)


def _convert(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        _return_freed_memory()
        tensor.data = tensor.data.to(dtype)
    _return_freed_memory()


def _return_freed_memory() -> None:
    """Return freed memory to the system. Without this, the process kept the old tensors' memory as well."""
    # A function of glibc; other C libraries have none of this name.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
