"""The arrays that models take and give."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Input = Ids | Rows
Run = Callable[[Any, Mask], Rows]  # of whichever input the model takes; float64 where PyTorch computes in that
