"""Agreement, per row: |got - want| <= tolerance * |want|, Euclidean."""

from typing import Any

import numpy as np


def worst_relative_error(got: Any, want: Any) -> float:
    """The largest error over the rows of two (seq, d_model) arrays."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{got.shape} where {want.shape} was due"
    errors = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    return float(errors.max(initial=0.0))
