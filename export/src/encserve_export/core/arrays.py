"""Defines the types of the arrays that models take and return."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]  # hidden states, or other vectors: one row per token or text
Input = Ids | Rows
Run = Callable[[Any, Mask], Rows]  # returns float64 if PyTorch computes in float64


def half_and_half(mask: Mask) -> Mask:
    """Return token types for a comparison: 0 for the first half of each sequence's tokens, 1 for the second half.

    Args:
        mask: int64 (batch, seq), 0 for the padding after the tokens.

    Returns:
        int64 (batch, seq). The types of a sequence do not depend on its padding.
    """
    tokens = mask > 0
    halves = (tokens.sum(axis=1, keepdims=True) + 1) // 2  # (batch, 1)
    return np.asarray(tokens & (np.arange(mask.shape[1]) >= halves), np.int64)
