"""The types of the arrays that models take and return."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]  # hidden states, or other vectors: one row per token or text
Input = Ids | Rows
Run = Callable[[Any, Mask], Rows]  # returns float64 if PyTorch computes in float64
