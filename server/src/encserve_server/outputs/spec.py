"""The outputs that a caller asks for, and their limits."""

from typing import NamedTuple

from encserve_server.errors import FieldPath, RequestField, TooManyOutputs
from encserve_server.types.requests import DataType, OutputKind

# Each output costs time and memory. Known callers ask for a few outputs.
MAX_OUTPUTS = 16
# The maximum number of vectors of a sequence for joining. Memory grows with the square of this number: 50 MB for 2,048.
MAX_POOLED_VECTORS = 2_048
FLOAT_TYPES = (DataType.FLOAT32, DataType.FLOAT16)
# The kinds that pool several rows into one.
SPAN_POOLINGS = (
    OutputKind.MEAN,
    OutputKind.CLS,
    OutputKind.MAX,
    OutputKind.LAST_TOKEN,
    OutputKind.WEIGHTED_MEAN,
    OutputKind.MEAN_SQRT_LENGTH,
)


class OutputSpec(NamedTuple):
    """One output that a caller asks for. 0 and None stand for the default.

    Attributes:
        kind: The kind of output.
        l2_normalize: Whether to scale each row to norm 1, after `dimensions` has cut the row.
        data_type: The data type of the rows.
        dimensions: The number of dimensions to keep, from the first.
        pool_factor: For OutputKind.MULTI_VECTOR: the average number of vectors to join into one.
        max_active_dims: For OutputKind.SPARSE: the number of weights to keep, the largest first.
        span_pooling: For OutputKind.SPANS: the pooling.
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
        TooManyOutputs: The call has more than MAX_OUTPUTS outputs.
    """
    if count > MAX_OUTPUTS:
        raise TooManyOutputs(
            FieldPath(RequestField.OUTPUTS),
            f"must be at most {MAX_OUTPUTS} (max_outputs); was {count}: make more calls",
        )
