"""What callers can ask for."""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np


class OutputKind(IntEnum):
    """What one output holds; the values are those of the protobuf enum of the same name."""

    TOKENS = 1
    MEAN = 2
    CLS = 3
    MAX = 4
    MODEL = 5  # as the model was trained to make one vector; see ModelPooling
    LAST_TOKEN = 6
    WEIGHTED_MEAN = 7
    MEAN_SQRT_LENGTH = 8
    MULTI_VECTOR = 9  # a vector for each token that counts in MaxSim
    SPARSE = 10  # weights over the vocabulary
    SPANS = 11  # of each range of the sequence its rows, pooled


class Task(IntEnum):
    """What a text is to a model that treats the two differently; the values are those of the protobuf enum."""

    NEITHER = 0
    QUERY = 1
    DOCUMENT = 2


class DataType(IntEnum):
    """The type of the numbers returned; the values are those of the protobuf enum of the same name."""

    FLOAT32 = 1
    FLOAT16 = 2
    BINARY = 3  # whether a number is more than 0: 8 in a byte
    INT8 = 4  # of rows of length 1; see `outputs.rows.quantized`

    @property
    def dtype(self) -> np.dtype[np.floating[Any] | np.uint8 | np.int8]:
        """The type as NumPy has it, little-endian whatever this machine is; of BINARY that of the bytes."""
        return _DTYPES[self]

    def row_bytes(self, width: int) -> int:
        """The bytes of a row of so many numbers."""
        return (width * _BITS[self] + 7) // 8


_DTYPES: dict[DataType, np.dtype[np.floating[Any] | np.uint8 | np.int8]] = {
    DataType.FLOAT32: np.dtype("<f4"),
    DataType.FLOAT16: np.dtype("<f2"),
    DataType.BINARY: np.dtype(np.uint8),
    DataType.INT8: np.dtype(np.int8),
}
_BITS = (0, 32, 16, 1, 8)  # of a number, by the types' values


class OffsetUnit(IntEnum):
    """What places in a sequence are counted in; the values are those of the protobuf enum of the same name."""

    CODE_POINTS = 1
    UTF8_BYTES = 2
    TOKENS = 3  # before truncation


class Detail(IntEnum):
    """How much a reply says about each sequence; the values are those of the protobuf enum of the same name."""

    NONE = 1
    COUNTS = 2
    TOKENS = 3


class Output(NamedTuple):
    """One thing to return for every sequence, with every default filled in.

    Attributes:
        kind: What it is.
        l2_normalize: Whether each row is scaled to Euclidean length 1, after it has been cut.
        data_type: The type of its numbers; a float16 beyond its range becomes infinite.
        dimensions: To how many of its first numbers a row is cut; 0 for all.
        skipped_tokens: How many tokens at the beginning OutputKind.MODEL leaves out of pooling: those of a prompt.
        task: Whose tokens OutputKind.MULTI_VECTOR has a vector for, and whose pooling.
        pool_factor: How many of its vectors become one, after what the model does of this itself; 0 for no pooling.
        max_active_dims: How many weights of OutputKind.SPARSE are kept, the largest ones; 0 for all.
        span_pooling: How OutputKind.SPANS pools: a kind of `outputs.SPAN_POOLINGS`; None for MEAN.
    """

    kind: OutputKind
    l2_normalize: bool
    data_type: DataType = DataType.FLOAT32
    dimensions: int = 0
    skipped_tokens: int = 0
    task: Task = Task.NEITHER
    pool_factor: float = 0.0
    max_active_dims: int = 0
    span_pooling: OutputKind | None = None
