"""The types that a bundle may compute in, and how far from PyTorch each may be."""

import dataclasses
import math
from typing import Literal

Precision = Literal["float32", "float16", "int8"]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a bundle is refused for.

    float32 is the same computation again, so its rows have to be PyTorch's but for rounding. How much rounding moves
    them depends on the model and on the CPU, so the judge is PyTorch in float64, and PyTorch's own float32 is the
    measure: see `widened`. Rounding to fewer bits moves every row; then it counts where rows point to, since that is
    what is compared and searched by.

    Attributes:
        error: The largest ‖got - want‖/‖want‖ of a row against PyTorch in float64; None where cosines are what counts.
        padding_error: The same, of a sequence in a batch against the sequence alone, both in ONNX Runtime.
        cosine: The least cosine similarity of a row and PyTorch's; None where errors are what counts.
        padding_cosine: The same, of a sequence in a batch against the sequence alone.
        maxsim_error: The largest difference of a MaxSim score from sentence-transformers', as a share of the best score
            of its query.
        attention_error: The largest difference of an attention weight from PyTorch's in float64; where cosines count,
            the largest share of attention that may go elsewhere in a block, the mean over heads and tokens.
    """

    error: float | None = None
    padding_error: float | None = None
    cosine: float | None = None
    padding_cosine: float | None = None
    maxsim_error: float = 1e-4
    attention_error: float = 1e-5

    def widened(self, float32_error: float) -> "Bounds":
        """The bounds for rows that PyTorch's own float32 gives with this error; cosines are what they were."""
        error, padding_error = (
            # Alone and padded may each be as far off as `error` says, and in opposite directions.
            None if tolerance is None else allowed(tolerance, sides * float32_error)
            for tolerance, sides in ((self.error, 1), (self.padding_error, 2))
        )
        return dataclasses.replace(self, error=error, padding_error=padding_error)


def allowed(tolerance: float, float32_error: float) -> float:
    """How far from float64 ONNX Runtime may be: as the tolerance says, or 4 times as far as PyTorch's float32 is.

    Where PyTorch's float32 is not finite it measures nothing.
    """
    return max(tolerance, 4 * float32_error) if math.isfinite(float32_error) else tolerance


BOUNDS: dict[str, Bounds] = {
    "float32": Bounds(error=5e-5, padding_error=1e-5),
    "float16": Bounds(cosine=0.999, padding_cosine=0.999, maxsim_error=0.01, attention_error=0.01),
    "int8": Bounds(cosine=0.99, padding_cosine=0.999, maxsim_error=0.05, attention_error=0.1),
}


def bounds_of(precision: str) -> Bounds:
    """The bounds of a precision that a graph may have, as float32's for one that no bundle is made in."""
    return BOUNDS.get(precision, BOUNDS["float32"])
