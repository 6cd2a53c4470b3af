"""Types of arrays, with their shapes and dtypes."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]  # (seq,)
Rows = npt.NDArray[np.float32]  # (seq, d_model)
Vectors = npt.NDArray[np.float32]  # (seq, d_model)
ModelInput = TokenIds | Vectors  # the input of one sequence for its model; len() is the number of tokens
Numbers = npt.NDArray[np.float32]
# (rows, width), C-contiguous. For BINARY, `width` numbers are packed into ceil(width / 8) bytes.
OutputRows = npt.NDArray[np.floating[Any] | np.uint8 | np.int8]
Mask = npt.NDArray[np.bool_]
TokenSpans = npt.NDArray[np.int64]  # (spans, 2): start and exclusive end, as token indices


class IndexedRows(NamedTuple):
    """Rows of MULTI_VECTOR or SPARSE, each with an index.

    Attributes:
        rows: (rows, width), C-contiguous.
        indices: (rows,) little-endian uint32: the index of the row's token in the sequence (MULTI_VECTOR), or the
            token id of the weight (SPARSE). None if vectors were joined.
    """

    rows: OutputRows
    indices: npt.NDArray[np.uint32] | None


OutputArrays = tuple[Any, ...]  # an OutputRows or IndexedRows for each output of one sequence
