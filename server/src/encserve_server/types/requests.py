"""The choices in a request: outputs, tasks, data types, units and details."""

from enum import IntEnum
from typing import Any, NamedTuple, Self

import numpy as np


class OutputKind(IntEnum):
    """The kind of an output. The protobuf enum of the same name has the same values."""

    TOKENS = 1
    MEAN = 2
    CLS = 3
    MAX = 4
    MODEL = 5  # the vector that the model was trained for; see ModelPooling
    LAST_TOKEN = 6
    WEIGHTED_MEAN = 7
    MEAN_SQRT_LENGTH = 8
    MULTI_VECTOR = 9  # a vector for each token, for MaxSim
    SPARSE = 10  # weights over the vocabulary
    SPANS = 11  # a pooled row for each span of the sequence
    SCORES = 12  # a logit for each label of a cross-encoder or a classifier


class Task(IntEnum):
    """Whether a text is a query or a document. The protobuf enum of the same name has the same values."""

    NEITHER = 0
    QUERY = 1
    DOCUMENT = 2


class DataType(IntEnum):
    """The data type of an output. The protobuf enum of the same name has the same values.

    Attributes:
        dtype: The NumPy dtype, always little-endian. BINARY has the dtype of the packed bytes.
        bits: The number of bits of a number.
    """

    FLOAT32 = 1, "<f4", 32
    FLOAT16 = 2, "<f2", 16
    BINARY = 3, "u1", 1  # one bit for each number: 1 if the number is above 0
    INT8 = 4, "i1", 8  # for rows of norm 1; see `outputs.rows.quantized`

    dtype: np.dtype[np.floating[Any] | np.uint8 | np.int8]
    bits: int

    def __new__(cls, value: int, dtype: str, bits: int) -> Self:
        """Set the attributes of a member."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.dtype = np.dtype(dtype)
        member.bits = bits
        return member

    def row_bytes(self, width: int) -> int:
        """Return the size in bytes of a row of `width` numbers."""
        return (width * self.bits + 7) // 8


class OffsetUnit(IntEnum):
    """The unit of offsets into a text. The protobuf enum of the same name has the same values."""

    CODE_POINTS = 1
    UTF8_BYTES = 2
    TOKENS = 3  # token indices before truncation


class Activation(IntEnum):
    """The function that turns logits into scores. The protobuf enums of the same name have the same values."""

    NONE = 1
    SIGMOID = 2
    SOFTMAX = 3


class Detail(IntEnum):
    """The amount of information about each sequence of a reply. The protobuf enum of this name has the same values."""

    NONE = 1
    COUNTS = 2
    TOKENS = 3


class Output(NamedTuple):
    """One output of a call, with all defaults filled in.

    Attributes:
        kind: The kind.
        l2_normalize: Whether to scale each row to norm 1, after `dimensions` has cut the row.
        data_type: The data type. Numbers that overflow float16 become infinite.
        dimensions: The number of dimensions to keep, from the first; 0 for all.
        skipped_tokens: For MODEL: the number of prompt tokens to leave out of pooling.
        task: For MULTI_VECTOR: the task. The task decides which tokens have a vector, and how the model joins vectors.
        pool_factor: For MULTI_VECTOR: the average number of vectors to join into one; 0 for no joining. The model may
            already have joined vectors before.
        max_active_dims: For SPARSE: the number of weights to keep, the largest first; 0 for all.
        span_pooling: For SPANS: one of the output kinds in `outputs.SPAN_POOLINGS`; None for MEAN.
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
