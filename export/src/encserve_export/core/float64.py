"""A PyTorch module in float64: the numbers that float32 approximates."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

# Tensors are converted in groups of at least this size. The C library returns blocks of this size to the system when
# they are freed; freed smaller blocks stay with the process, which took twice the memory of the model's weights.
_GROUP_BYTES = 2**25


@contextlib.contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """Put a module's floating-point parameters and buffers into float64, and afterwards back into their types.

    The module takes twice its float32 memory meanwhile, and at most a group more during a conversion. Casts to float32
    in the module's code stay. Afterwards all numbers have their earlier bits.
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
