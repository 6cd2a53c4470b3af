"""The types of the arrays that models take and return."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Input = Ids | Rows
Run = Callable[[Any, Mask], Rows]  # float64 rows if PyTorch computes in float64
