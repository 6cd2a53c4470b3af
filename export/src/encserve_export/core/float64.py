"""Runs a PyTorch module in float64, to measure the rounding errors of float32."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

# Tensors are converted in groups of at least this size. The C library returns freed blocks of this size to the
# operating system. It keeps smaller freed blocks in the process. With smaller blocks, the process took twice the memory
# of the model's weights.
_GROUP_BYTES = 2**25


@contextlib.contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """Convert a module's floating-point parameters and buffers to float64 for the `with` block, and then back.

    Within the block, the module takes twice its float32 memory. A conversion takes the memory of at most one more group
    of tensors. Casts to float32 in the module's code still apply. After the block, parameters and buffers are
    bit-identical to before.
    """
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
    dtypes = [tensor.dtype for tensor in tensors]
    try:
        _convert(tensors, [torch.float64] * len(tensors))
        yield
    finally:
        _convert(tensors, dtypes)


def _convert(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """Convert tensors in place, one group after another."""
    for dtype in dict.fromkeys(dtypes):
        group: list[Tensor] = []
        size = 0
        alike = [tensor for tensor, wanted in zip(tensors, dtypes, strict=True) if wanted == dtype]
        for tensor in alike:
            group.append(tensor)
            size += tensor.numel() * dtype.itemsize
            if size >= _GROUP_BYTES or tensor is alike[-1]:
                _convert_group(group, dtype)
                group, size = [], 0


def _convert_group(tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Copy tensors into one block of memory, and make the tensors views of the block."""
    block = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    for tensor, part in zip(tensors, torch.split(block, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.data = part.view(tensor.shape).copy_(tensor.data)
