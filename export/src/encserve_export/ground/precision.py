"""The types that a bundle may compute in, and how far from PyTorch's float32 each may be."""

import dataclasses
from typing import Literal

Precision = Literal["float32", "float16", "int8"]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a bundle is refused for.

    float32 is the same computation again, so its rows have to be PyTorch's but for the order of additions. Rounding to
    fewer bits moves every row; then it counts where rows point to, since that is what is compared and searched by.

    Attributes:
        error: The largest ‖got - want‖/‖want‖ of a row against PyTorch; None where cosines are what counts.
        padding_error: The same, of a sequence in a batch against the sequence alone.
        cosine: The least cosine similarity of a row and PyTorch's; None where errors are what counts.
        padding_cosine: The same, of a sequence in a batch against the sequence alone.
        maxsim_error: The largest difference of a MaxSim score from sentence-transformers', as a share of the best score
            of its query.
        attention_error: The largest difference of an attention weight from PyTorch's; where cosines count, the largest
            share of attention that may go elsewhere in a block, the mean over heads and tokens.
    """

    error: float | None = None
    padding_error: float | None = None
    cosine: float | None = None
    padding_cosine: float | None = None
    maxsim_error: float = 1e-4
    attention_error: float = 1e-5


BOUNDS: dict[Precision, Bounds] = {
    "float32": Bounds(error=5e-5, padding_error=1e-5),
    "float16": Bounds(cosine=0.999, padding_cosine=0.999, maxsim_error=0.01, attention_error=0.01),
    "int8": Bounds(cosine=0.99, padding_cosine=0.999, maxsim_error=0.05, attention_error=0.1),
}
