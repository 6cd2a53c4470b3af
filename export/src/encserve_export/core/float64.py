"""Runs a PyTorch module in float64, as the reference for float32."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """Converts a module's floating-point parameters and buffers to float64 within the block, and back afterwards.

    The module takes twice the memory of float32, not three times: tensors are converted one by one, in place. Casts to
    float32 in the module's code stay. Afterwards all tensors have their earlier bits.
    """
    tensors = [it for it in (*module.parameters(), *module.buffers()) if it.is_floating_point()]
    dtypes = [it.dtype for it in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        yield
    finally:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)
