"""Checks a checkpoint's tensors and reads one weight."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from encserve_export.core.errors import WeightShapeError, WeightValueError

_MAX_LISTED = 12


def listed(names: Sequence[str]) -> str:
    """Join names for an error, at most 12."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def check_values(name: str, tensor: Tensor) -> None:
    """Refuse a tensor unless all of its numbers are floating-point and finite in float32.

    Raises:
        WeightValueError: The text has the tensor's name, and its dtype or the count of wrong numbers.
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        raise WeightValueError(f"{name} must hold all of its numbers; was {tensor.device.type}, {tensor.layout}")
    if not tensor.is_floating_point():
        raise WeightValueError(
            f"{name} must hold floating-point numbers; was {str(tensor.dtype).removeprefix('torch.')}"
        )
    not_finite = int((~torch.isfinite(tensor.float())).sum())
    if not_finite:
        raise WeightValueError(
            f"{name} must be finite; {not_finite} of its {tensor.numel()} numbers are NaN or infinite"
        )


def read_weight(
    tensors: Mapping[str, Tensor], sources: Sequence[str], shape: tuple[int, ...], *, transposed: bool = False
) -> Tensor:
    """Return one weight of the Encoder in float32.

    Args:
        tensors: The checkpoint.
        sources: The names of its parts, equal shares of the first axis.
        shape: The shape of the whole weight.
        transposed: Whether each part is stored as (in, out).

    Raises:
        WeightValueError: A part does not pass `check_values`.
        WeightShapeError: A part has another shape; the text has both.
    """
    share = (shape[0] // len(sources), *shape[1:])
    if transposed:
        share = share[::-1]
    for name in sources:
        check_values(name, tensors[name])
        if tuple(tensors[name].shape) != share:
            raise WeightShapeError(f"{name} must have the shape {share}; was {tuple(tensors[name].shape)}")
    parts = [tensors[name].float().T if transposed else tensors[name].float() for name in sources]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
