"""Defines the precisions of a bundle, and all tolerances of the exporter with their reasons."""

import dataclasses
import math
from typing import Literal

Precision = Literal["float32", "float16", "int8"]

# The exporter treats a checkpoint's position table as sinusoidal if the table differs from the sinusoid formula by at
# most this number. Tables that were computed in float32 differ by up to 4e-4 at position 5,000 (measured against
# float64). Tables of other formulas differ by 1 or more.
SINUSOID_TOLERANCE = 1e-3
# A layer stays in float32 if its measured error in int8 exceeds this number. In all-MiniLM-L6-v2, one layer has an
# error of 0.12. The other layers have errors of 0.02 to 0.08. The least cosine similarity is 0.995 with this one layer
# in float32, and 0.968 with all layers in 8 bits.
MAX_INT8_LAYER_ERROR = 0.1
# Hidden states from a GPU in float16 or TF32 usually have a relative error in this range. Both types have 10 bits
# after the point, and 2⁻¹⁰ is 1e-3. The range is wide because rounding cancels out in some models, and adds up over
# layers in others.
LOW_PRECISION_ERRORS = (1e-4, 2e-2)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The largest allowed differences between a bundle and the original model.

    A row is the hidden state of one token.

    A float32 bundle repeats the computation of PyTorch, so its rows may differ by rounding only. The effect of rounding
    depends on the model and on the CPU. Therefore rows are compared with PyTorch in float64. The tolerance grows with
    PyTorch's own float32 error; see `with_rounding`.

    In float16 and int8 all rows change. For these precisions the cosine similarity is limited instead of the error,
    because a search compares the directions of vectors.

    Attributes:
        error: The largest ‖got - want‖/‖want‖ of a row against PyTorch in float64; None if cosine similarities are
            limited.
        padding_error: The largest ‖got - want‖/‖want‖ between two rows of ONNX Runtime. `got` is a row in a padded
            batch. `want` is the same row if the sequence is computed alone.
        cosine: The least cosine similarity to PyTorch's row; None if errors are limited.
        padding_cosine: The least cosine similarity between a row in a padded batch and the row of the sequence alone.
        maxsim_error: The largest difference between a MaxSim score and the score of sentence-transformers, divided by
            the best score of the same query.
        rank_correlation: The least Spearman rank correlation between the bundle's logits and the logits of
            sentence-transformers, over many pairs of texts. None if the errors of logits are limited.
        attention_error: The largest difference between an attention weight and PyTorch's weight in float64. If cosine
            similarities are limited, this is the largest share of attention that may move to other tokens. The share is
            a mean over the heads and tokens of one layer.
    """

    error: float | None = None
    padding_error: float | None = None
    cosine: float | None = None
    padding_cosine: float | None = None
    maxsim_error: float = 1e-4
    rank_correlation: float | None = None
    attention_error: float = 1e-5

    def with_rounding(self, float32_error: float) -> "Bounds":
        """Return the bounds for a model with this float32 error in PyTorch.

        Limits of cosine similarities do not change.
        """
        error, padding_error = (
            # The row in the padded batch and the row of the sequence alone both have rounding errors. These errors may
            # have opposite directions, so the float32 error counts twice.
            None if tolerance is None else tolerance_for(tolerance, sides * float32_error)
            for tolerance, sides in ((self.error, 1), (self.padding_error, 2))
        )
        return dataclasses.replace(self, error=error, padding_error=padding_error)


def tolerance_for(tolerance: float, float32_error: float) -> float:
    """Return the allowed error against float64: the tolerance, or 4 times PyTorch's float32 error if that is larger.

    ONNX Runtime adds numbers in another order than PyTorch, so its rounding errors differ. The largest error among a
    few thousand rows also varies by chance, so the factor is 4 instead of 1.
    """
    return max(tolerance, 4 * float32_error) if math.isfinite(float32_error) else tolerance


# float32: the rows of trained models differ by 1e-7 to 1e-5. A weight scaled by 1.001, a wrong epsilon or another
# activation changes a row by 1e-4 or more (tested in tests/export/test_export_gates.py). float16: the type has 10
# fraction bits, so one rounding changes a number by up to 0.05 %. int8: the least cosine similarity of all-MiniLM-L6-v2
# is 0.995. docs/how-to/choose-precision.md and docs/explanation/verification.md list these bounds.
BOUNDS: dict[str, Bounds] = {
    "float32": Bounds(error=5e-5, padding_error=1e-5),
    "float16": Bounds(
        cosine=0.999, padding_cosine=0.999, maxsim_error=0.01, attention_error=0.01, rank_correlation=0.99
    ),
    "int8": Bounds(cosine=0.99, padding_cosine=0.999, maxsim_error=0.05, attention_error=0.1, rank_correlation=0.9),
}
# Heads are small float32 graphs, so their outputs differ only by the rounding of one or two layers.
HEAD_TOLERANCE = 1e-5
# The tolerances for the vectors and the sparse weights of texts, compared with sentence-transformers or transformers.
# Both the bundle and the library compute in float32, so two rounding errors of a row (see `BOUNDS`) add up. A sparse
# weight may differ by the first number times the weight, plus the second number. The second number is needed because
# small differences around 0 become weights after ReLU.
PIPELINE_TOLERANCE, PIPELINE_WEIGHT_TOLERANCE = 1e-4, 1e-5
# The tolerance for a logit of a float32 bundle: |got - want| / max(1, |want|), compared with sentence-transformers in
# float64. A logit can be almost 0. So logits from -1 to 1 are compared by their absolute error.
SCORE_TOLERANCE = 1e-4


def bounds_of(precision: str) -> Bounds:
    """Return the bounds of a precision. For a precision that the exporter does not write, use float32's bounds."""
    return BOUNDS.get(precision, BOUNDS["float32"])
