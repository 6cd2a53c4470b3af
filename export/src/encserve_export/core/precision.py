"""The precisions of a bundle, and every tolerance of the exporter, each with its source."""

import dataclasses
import math
from typing import Literal

Precision = Literal["float32", "float16", "int8"]

# Sinusoidal position tables that were computed in float32 are off by up to 4e-4 at position 5,000 (measured against
# float64). Other formulas are off by 1 and more.
SINUSOID_TOLERANCE = 1e-3
# A layer whose measured error is larger stays in float32. Of all-MiniLM-L6-v2, one layer has an error of 0.12, the
# others 0.02 to 0.08. With that layer in 8 bits, the least cosine similarity falls from 0.995 to 0.968.
MAX_INT8_LAYER_ERROR = 0.1
# The errors of rows that a GPU computed in float16 or TF32. Both have 10 bits after the point, and 2⁻¹⁰ is 1e-3. The
# range is wide because rounding cancels out in some models, and adds up over layers in others.
LOW_PRECISION_ERRORS = (1e-4, 2e-2)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The largest allowed differences of a bundle.

    A float32 bundle repeats the computation of PyTorch, so its rows may differ by rounding only. The effect of rounding
    depends on the model and on the CPU: rows are compared with PyTorch in float64, and PyTorch's own float32 error is
    the measure, see `with_rounding`. In lower precisions every row moves. Its direction counts: searches compare
    directions.

    Attributes:
        error: The largest ‖got - want‖/‖want‖ of a row against PyTorch in float64; None if cosines count.
        padding_error: The same, of a sequence in a batch against the sequence alone, both in ONNX Runtime.
        cosine: The least cosine similarity to PyTorch's row; None if errors count.
        padding_cosine: The same, of a sequence in a batch against the sequence alone.
        maxsim_error: The largest difference of a MaxSim score from sentence-transformers', as a share of the best score
            of its query.
        attention_error: The largest difference of an attention weight from PyTorch's in float64; if cosines count, the
            largest share of a block's attention that moves to other tokens, the mean over heads and tokens.
    """

    error: float | None = None
    padding_error: float | None = None
    cosine: float | None = None
    padding_cosine: float | None = None
    maxsim_error: float = 1e-4
    attention_error: float = 1e-5

    def with_rounding(self, float32_error: float) -> "Bounds":
        """The bounds for a model with this error in PyTorch's own float32; bounds on cosines do not change."""
        error, padding_error = (
            # Alone and padded may both be off by `error`, in opposite directions.
            None if tolerance is None else tolerance_for(tolerance, sides * float32_error)
            for tolerance, sides in ((self.error, 1), (self.padding_error, 2))
        )
        return dataclasses.replace(self, error=error, padding_error=padding_error)


def tolerance_for(tolerance: float, float32_error: float) -> float:
    """The allowed error against float64: the tolerance, or 4 times PyTorch's float32 error if that is larger.

    ONNX Runtime sums in another order than PyTorch, so its error is another sample of the same rounding, and the
    largest of a few thousand rows varies.
    """
    return max(tolerance, 4 * float32_error) if math.isfinite(float32_error) else tolerance


# float32: the rows of trained models are off by 1e-7 to 1e-5 (docs/performance.md); a weight scaled by 1.001, a wrong
# epsilon or another activation moves a row by 1e-4 and more (tests/export/test_export_gates.py has each).
# float16: 10 bits after the point. int8: all-MiniLM-L6-v2 has a least cosine similarity of 0.995.
# docs/models.md has the retrieval quality of both.
BOUNDS: dict[str, Bounds] = {
    "float32": Bounds(error=5e-5, padding_error=1e-5),
    "float16": Bounds(cosine=0.999, padding_cosine=0.999, maxsim_error=0.01, attention_error=0.01),
    "int8": Bounds(cosine=0.99, padding_cosine=0.999, maxsim_error=0.05, attention_error=0.1),
}
# Heads are small float32 graphs: their outputs differ by the rounding of one or two layers.
HEAD_TOLERANCE = 1e-5
# Texts against sentence-transformers or transformers: both sides compute in float32, so two rounding errors of a row
# (`BOUNDS`) add up. A weight over the vocabulary may differ by the second number, and by the first relative to itself:
# ReLU turns small differences around 0 into weights.
PIPELINE_TOLERANCE, PIPELINE_WEIGHT_TOLERANCE = 1e-4, 1e-5


def bounds_of(precision: str) -> Bounds:
    """The bounds of a graph's precision; float32's bounds for a precision that the exporter does not write."""
    return BOUNDS.get(precision, BOUNDS["float32"])
