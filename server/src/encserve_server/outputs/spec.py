"""What a caller asks for, and the bounds of that."""

from typing import NamedTuple

from encserve_server.errors import FieldPath, Part, TooManyOutputs
from encserve_server.types.requests import DataType, OutputKind

# Each distinct output costs time and memory of its own; no caller is known that wants more than a few.
MAX_OUTPUTS = 16
# The vectors of a sequence that can be joined: the memory for that grows with the square, and is 50 MB for so many.
MAX_POOLED_VECTORS = 2_048
FLOAT_TYPES = (DataType.FLOAT32, DataType.FLOAT16)
# The kinds that make one row of several.
SPAN_POOLINGS = (
    OutputKind.MEAN,
    OutputKind.CLS,
    OutputKind.MAX,
    OutputKind.LAST_TOKEN,
    OutputKind.WEIGHTED_MEAN,
    OutputKind.MEAN_SQRT_LENGTH,
)


class OutputSpec(NamedTuple):
    """One thing that a caller asks for; 0 and None stand for what the caller does not say.

    Attributes:
        kind: The kind of output.
        l2_normalize: Whether each row is scaled to Euclidean length 1, after it has been cut.
        data_type: The type of the numbers.
        dimensions: To how many of its first numbers a row is cut.
        pool_factor: How many vectors of OutputKind.MULTI_VECTOR become one.
        max_active_dims: How many weights of OutputKind.SPARSE are kept.
        span_pooling: How OutputKind.SPANS pools.
    """

    kind: OutputKind
    l2_normalize: bool = False
    data_type: DataType = DataType.FLOAT32
    dimensions: int = 0
    pool_factor: float = 0.0
    max_active_dims: int = 0
    span_pooling: OutputKind | None = None


def check_output_count(count: int) -> None:
    """Refuse a call with too many outputs.

    Raises:
        TooManyOutputs: There are more than MAX_OUTPUTS.
    """
    if count > MAX_OUTPUTS:
        raise TooManyOutputs(
            FieldPath(Part.OUTPUTS), f"must be at most {MAX_OUTPUTS} (max_outputs); was {count}: make more calls"
        )
