"""Checks of a checkpoint's names and numbers, and the reading of one weight."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from encserve_export.core.errors import WeightNamesError, WeightShapeError, WeightValueError

_MAX_LISTED = 12


def check_names(description: str, names: Iterable[str], needed: Iterable[str], *, advice: str = "") -> None:
    """Refuse a checkpoint with missing or surplus names.

    Args:
        description: The layout, for the error.
        names: The checkpoint's names.
        needed: The names that it must have.
        advice: The end of the error.

    Raises:
        WeightNamesError: Names are missing or surplus; the text lists the first 12 of each.
    """
    names, needed = set(names), set(needed)
    differences = {"missing": sorted(needed - names), "surplus": sorted(names - needed)}
    problems = [f"{kind}: {listed(found)}" for kind, found in differences.items() if found]
    if problems:
        raise WeightNamesError(f"the weights do not fit {description}; {'; '.join(problems)}{advice}")


def listed(names: Sequence[str]) -> str:
    """Join names for an error, at most 12."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def check_values(name: str, tensor: Tensor) -> None:
    """Refuse a tensor of other numbers than finite floating-point ones.

    Raises:
        WeightValueError: The text has the tensor's name and its dtype, or the count of such numbers.
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        raise WeightValueError(f"{name} must hold all of its numbers; was {tensor.device.type}, {tensor.layout}")
    if not tensor.is_floating_point():
        raise WeightValueError(
            f"{name} must hold floating-point numbers; was {str(tensor.dtype).removeprefix('torch.')}"
        )
    # A float64 may be too large for float32, in which it is used.
    bad = int((~torch.isfinite(tensor.float())).sum())
    if bad:
        raise WeightValueError(f"{name} must be finite; {bad} of its {tensor.numel()} numbers are NaN or infinite")


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
        WeightShapeError: A part has another shape; the text has both.
    """
    share = (shape[0] // len(sources), *shape[1:])
    if transposed:
        share = share[::-1]
    for name in sources:
        if tuple(tensors[name].shape) != share:
            raise WeightShapeError(f"{name} must have the shape {share}; was {tuple(tensors[name].shape)}")
    parts = [tensors[name].float().T if transposed else tensors[name].float() for name in sources]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
