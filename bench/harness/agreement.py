"""Compares the hidden states or vectors of a side with the rows of a reference.

A side is one way to run the model.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

COMPARED_SEQUENCES = 8
TOLERANCE = 5e-5  # largest difference between two rows, relative to the norm of the reference's row


def worst_difference(got: Sequence[Any], want: Sequence[Any]) -> float:
    """Return the largest ‖a − b‖₂ / ‖b‖₂. `a` is a row of `got`, and `b` is the row of `want` with the same index.

    Each array is (rows, d_model).
    """
    norm = np.linalg.norm
    return max(float((norm(a - b, axis=1) / norm(b, axis=1)).max()) for a, b in zip(got, want, strict=True))


def lowest_cosine(got: Sequence[Any], want: Sequence[Any]) -> float:
    """Return the lowest cosine between rows of `got` and `want` with the same index. Each array is (rows, d_model)."""
    norm = np.linalg.norm
    return min(
        float(((a * b).sum(axis=1) / (norm(a, axis=1) * norm(b, axis=1))).min()) for a, b in zip(got, want, strict=True)
    )


def compare_rows(
    side: str, got: Sequence[Any], want: Sequence[Any], *, least_cosine: float | None = None
) -> dict[str, float]:
    """Compare the rows of a side with the rows of the reference.

    Args:
        side: The side's name, for the error message.
        got: Arrays (rows, d_model) of the side.
        want: Arrays (rows, d_model) of the reference.
        least_cosine: The lowest allowed cosine, for a side with a lower precision. If None, `TOLERANCE` is the limit.

    Returns:
        The largest `difference` and the lowest `cosine`.

    Raises:
        SystemExit: The shapes differ, or a row differs by more than the limit.
    """
    shapes = [[array.shape for array in arrays] for arrays in (got, want)]
    if shapes[0] != shapes[1]:
        raise SystemExit(f"{side}: the arrays have the shapes {shapes[0]}; the reference has {shapes[1]}")
    difference, cosine = worst_difference(got, want), lowest_cosine(got, want)
    if least_cosine is None and difference > TOLERANCE:
        raise SystemExit(f"{side}: a row differs by {difference:.1e} of the norm; at most {TOLERANCE:g} is allowed")
    if least_cosine is not None and cosine < least_cosine:
        raise SystemExit(f"{side}: a row has the cosine {cosine:.5f}; at least {least_cosine:g} is required")
    return {"difference": difference, "cosine": cosine}


def probe_indices(lengths: Sequence[int]) -> list[int]:
    """Return the indices of the sequences to compare. The longest sequence shows whether a side truncates."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    count = min(COMPARED_SEQUENCES, len(order))
    return [order[round(rank)] for rank in np.linspace(0, len(order) - 1, count)]
