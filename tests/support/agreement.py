"""Functions that compare computed hidden states with expected hidden states, token by token."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def worst_relative_error(got: Any, want: Any) -> float:
    """Compute the relative error |got - want| / |want| of each token, with Euclidean norms. Return the largest error.

    Both arrays have the shape (seq, d_model).
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"the shape is {got.shape}; expected {want.shape}"
    errors = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    return float(errors.max(initial=0.0))


def least_cosine(got: Sequence[Any], want: Sequence[Any]) -> float:
    """Compute the cosine similarity of each token, and return the lowest similarity.

    Both arguments are lists of arrays of shape (seq, d_model).
    """
    rows, others = np.concatenate(got).astype(np.float64), np.concatenate(want).astype(np.float64)
    cosines = (rows * others).sum(axis=1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(others, axis=1)
    return float(cosines.min())
