"""Arrays, with their shapes and dtypes."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]  # (seq,)
Rows = npt.NDArray[np.float32]  # (seq, d_model)
Vectors = npt.NDArray[np.float32]  # (seq, d_model)
ModelInput = TokenIds | Vectors  # one sequence, whichever its model takes; len() is its tokens
Numbers = npt.NDArray[np.float32]
OutputRows = npt.NDArray[np.floating[Any] | np.uint8 | np.int8]  # (rows, width), C-contiguous; bits are (rows, bytes)
Mask = npt.NDArray[np.bool_]
TokenSpans = npt.NDArray[np.int64]  # (spans, 2): where each begins and ends, exclusive, among a sequence's tokens


class IndexedRows(NamedTuple):
    """Rows that are not one for each token, or for each sequence.

    Attributes:
        rows: (rows, width), C-contiguous.
        indices: (rows,) little-endian uint32: the token that each comes from, or its place in the vocabulary; None
            where it comes from several.
    """

    rows: OutputRows
    indices: npt.NDArray[np.uint32] | None


OutputArrays = tuple[Any, ...]  # of one sequence, for each of its outputs: OutputRows, or IndexedRows
