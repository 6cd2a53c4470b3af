"""Checks the tensors of a checkpoint, and formats their names for errors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from encserve_export.core.errors import WeightValueError

_MAX_LISTED = 12


def listed(names: Sequence[str]) -> str:
    """Join the first 12 names for an error message, and add the number of further names."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def check_values(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not dense, not in memory, not floating-point, or not finite in float32.

    Raises:
        WeightValueError: The tensor is refused. The message has the tensor's name and the reason.
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        raise WeightValueError(f"{name} must be a dense tensor in memory; was {tensor.device.type}, {tensor.layout}")
    if not tensor.is_floating_point():
        raise WeightValueError(
            f"{name} must hold floating-point numbers; was {str(tensor.dtype).removeprefix('torch.')}"
        )
    # PyTorch cannot test 8-bit numbers for infinity, and a float64 may be too large for float32. So such tensors are
    # converted to float32 first. The three types below need no conversion. A conversion would take memory for a copy.
    numbers = tensor if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) else tensor.float()
    not_finite = tensor.numel() - int(torch.isfinite(numbers).sum())
    if not_finite:
        raise WeightValueError(
            f"{name} must be finite; {not_finite} of its {tensor.numel()} numbers are NaN or infinite"
        )
