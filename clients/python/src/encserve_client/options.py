"""The options of calls, and their conversion to protobuf messages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from encserve_client._arguments import as_float, as_int, check_type
from encserve_client.exceptions import InvalidInputError
from encserve_proto.v1 import encoder_pb2 as pb

DType = Literal["float32", "float16", "binary", "int8"]
Pooling = Literal["model", "mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length"]
SpanPooling = Literal["mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length"]
InputKind = Literal["token_ids", "embeddings"]
OutputKind = Literal[
    "tokens",
    "model",
    "mean",
    "cls",
    "max",
    "last_token",
    "weighted_mean",
    "mean_sqrt_length",
    "multi_vector",
    "sparse",
    "spans",
]
Detail = Literal["none", "counts", "tokens"]
OffsetUnit = Literal["code_points", "utf8_bytes"]
SpanUnit = Literal["code_points", "utf8_bytes", "tokens"]
Task = Literal["query", "document"]
Priority = Literal["interactive", "bulk"]
Activation = Literal["none", "sigmoid", "softmax"]
TrainedKind = Literal["model", "multi_vector", "sparse"]
Kind = Literal["vector", "multi_vector", "sparse"]
StreamKind = Literal["vector", "tokens", "multi_vector", "sparse"]
Array = npt.NDArray[Any]
"""An array of float32, float16 or int8. For dtype "binary": uint8, with 8 packed bits in each value."""
Progress = Callable[[int, int | None], None]
"""A function. Arguments: the number of finished inputs, and of all inputs (None if unknown)."""
Layers: TypeAlias = bool | Sequence[int]
"""True for all layers, False for none, or the indices of layers in ascending order, from 0."""

_KINDS: dict[OutputKind, pb.OutputKind] = {
    "tokens": pb.OUTPUT_KIND_TOKENS,
    "model": pb.OUTPUT_KIND_MODEL_POOLING,
    "mean": pb.OUTPUT_KIND_MEAN,
    "cls": pb.OUTPUT_KIND_CLS,
    "max": pb.OUTPUT_KIND_MAX,
    "last_token": pb.OUTPUT_KIND_LAST_TOKEN,
    "weighted_mean": pb.OUTPUT_KIND_WEIGHTED_MEAN,
    "mean_sqrt_length": pb.OUTPUT_KIND_MEAN_SQRT_LENGTH,
    "multi_vector": pb.OUTPUT_KIND_MULTI_VECTOR,
    "sparse": pb.OUTPUT_KIND_SPARSE,
    "spans": pb.OUTPUT_KIND_SPANS,
}
_KIND_NAMES: dict[int, OutputKind] = {number: name for name, number in _KINDS.items()}
TASKS: dict[Task, pb.Task] = {"query": pb.TASK_QUERY, "document": pb.TASK_DOCUMENT}
PRIORITIES: dict[Priority | None, pb.Priority] = {
    None: pb.PRIORITY_UNSPECIFIED,
    "interactive": pb.PRIORITY_INTERACTIVE,
    "bulk": pb.PRIORITY_BULK,
}
DETAILS: dict[Detail | None, pb.Detail] = {
    None: pb.DETAIL_UNSPECIFIED,
    "none": pb.DETAIL_NONE,
    "counts": pb.DETAIL_COUNTS,
    "tokens": pb.DETAIL_TOKENS,
}
UNITS: dict[SpanUnit | None, pb.OffsetUnit] = {
    None: pb.OFFSET_UNIT_UNSPECIFIED,
    "code_points": pb.OFFSET_UNIT_CODE_POINTS,
    "utf8_bytes": pb.OFFSET_UNIT_UTF8_BYTES,
    "tokens": pb.OFFSET_UNIT_TOKENS,
}
# Arguments that are for one kind only.
_KIND_OF_ARGUMENT: dict[str, OutputKind] = {
    "max_active_dims": "sparse",
    "pool_factor": "multi_vector",
    "span_pooling": "spans",
}
_DATA_TYPES: dict[DType, pb.DataType] = {
    "float32": pb.DATA_TYPE_FLOAT32,
    "float16": pb.DATA_TYPE_FLOAT16,
    "binary": pb.DATA_TYPE_BINARY,
    "int8": pb.DATA_TYPE_INT8,
}
# The bytes on the wire are always little-endian.
_DTYPES: dict[DType, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "binary": np.dtype("u1"),
    "int8": np.dtype("i1"),
}
_MANY_ROWS = ("tokens", "multi_vector", "sparse", "spans")


def numpy_dtype(data_type: int) -> np.dtype[Any]:
    """Return the NumPy type of a DataType that this library has sent."""
    return _DTYPES["float16" if data_type == pb.DATA_TYPE_FLOAT16 else "float32"]


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise InvalidInputError unless `value` is a value of the Literal `choices`."""
    allowed = get_args(choices)
    if value not in allowed:
        raise InvalidInputError(f"must be one of {', '.join(map(repr, allowed))}; was {value!r}", field=name)


@dataclass(frozen=True, slots=True)
class Output:
    """One output of `run`.

    Attributes:
        kind: "tokens" for one row per token. "mean", "cls", "max", "last_token", "weighted_mean" or "mean_sqrt_length"
            for one row per input, pooled over all tokens. "model" for one row per input, as the model was trained.
            "multi_vector" for the vectors that MaxSim compares. "sparse" for the weights over the vocabulary that are
            not 0. "spans" for one row per range of `embed_spans`.
        l2_normalize: Whether to scale every row to Euclidean length 1, after the cut to `dimensions`.
        dimensions: Keep only this many numbers at the start of each row. Default: for "model"
            `ModelInfo.default_dimensions`, otherwise all.
        max_active_dims: For "sparse": keep only this many of the largest weights. Default: as the model was trained.
        pool_factor: For "multi_vector": how many vectors are merged into one on average, by hierarchical clustering.
            An input of more than 2,048 tokens is an error. Default: as the model was trained.
        span_pooling: For "spans": how the rows of a range become one vector. Default: "mean".
    """

    kind: OutputKind = "tokens"
    l2_normalize: bool = False
    dimensions: int | None = None
    max_active_dims: int | None = None
    pool_factor: float | None = None
    span_pooling: SpanPooling | None = None

    def __post_init__(self) -> None:
        """Raise InvalidInputError for an unknown kind, a number below 1, or an argument of another kind."""
        check_choice("kind", self.kind, OutputKind)
        if self.span_pooling is not None:
            check_choice("span_pooling", self.span_pooling, SpanPooling)
        for name in ("dimensions", "max_active_dims"):
            value = getattr(self, name)
            if value is not None and as_int(name, value) < 1:
                raise InvalidInputError(f"must be >= 1; was {value}", field=name)
        if self.pool_factor is not None and not as_float("pool_factor", self.pool_factor) >= 1:
            raise InvalidInputError(f"must be >= 1; was {self.pool_factor}", field="pool_factor")
        for name, kind in _KIND_OF_ARGUMENT.items():
            if getattr(self, name) is not None and self.kind != kind:
                raise InvalidInputError(f"must be left out, because it is only for the kind {kind!r}", field=name)

    @property
    def is_pooled(self) -> bool:
        """Whether each input has exactly one row."""
        return self.kind not in _MANY_ROWS

    @property
    def number(self) -> pb.OutputKind:
        """The protobuf enum value of the kind."""
        return _KINDS[self.kind]

    def to_proto(self) -> pb.OutputSpec:
        """Return the protobuf message of the output."""
        return pb.OutputSpec(
            kind=self.number,
            l2_normalize=self.l2_normalize,
            dimensions=self.dimensions or 0,
            max_active_dims=self.max_active_dims or 0,
            pool_factor=self.pool_factor or 0.0,
            span_pooling=pb.OUTPUT_KIND_UNSPECIFIED if self.span_pooling is None else _KINDS[self.span_pooling],
        )


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a call; see `EncoderClient.run`."""

    outputs: tuple[Output, ...] = (Output(),)
    dtype: DType = "float32"
    truncate: bool = False
    exclude_special_tokens: bool = False
    include_token_strings: bool = False
    prompt_name: str | None = None
    task: Task | None = None
    detail: Detail | None = None
    offset_unit: OffsetUnit | None = None

    def __post_init__(self) -> None:
        """Check the options. Raise InvalidInputError if a value is not allowed."""
        if self.task is not None:
            check_choice("task", self.task, Task)
        if self.detail is not None:
            check_choice("detail", self.detail, Detail)
        if self.offset_unit is not None:
            check_choice("offset_unit", self.offset_unit, OffsetUnit)
        check_type("prompt_name", self.prompt_name, (str, type(None)), "a str or None")
        check_choice("dtype", self.dtype, DType)
        if not self.outputs:
            raise InvalidInputError("must name at least one output; was empty", field="outputs")
        if len(set(self.outputs)) != len(self.outputs):
            raise InvalidInputError(f"must differ from each other; was {list(self.outputs)}", field="outputs")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The type of the numbers on the wire."""
        return _DTYPES[self.dtype]

    def columns(self, width: int) -> int:
        """Return the number of `numpy_dtype` values in a row of `width` numbers."""
        return -(-width // 8) if self.dtype == "binary" else width

    @property
    def data_type(self) -> pb.DataType:
        """The protobuf value for `dtype`."""
        return _DATA_TYPES[self.dtype]

    @property
    def truncation(self) -> pb.Truncation:
        """The protobuf value for `truncate`."""
        return pb.TRUNCATION_END if self.truncate else pb.TRUNCATION_REFUSE

    @property
    def task_number(self) -> pb.Task:
        """The protobuf value for `task`."""
        return pb.TASK_UNSPECIFIED if self.task is None else TASKS[self.task]

    def to_proto(self) -> pb.EncodeOptions:
        """Return the protobuf message of the options."""
        return pb.EncodeOptions(
            outputs=[output.to_proto() for output in self.outputs],
            data_type=self.data_type,
            truncation=self.truncation,
            exclude_special_tokens=self.exclude_special_tokens,
            include_token_strings=self.include_token_strings,
            prompt_name=self.prompt_name,
            task=self.task_number,
            detail=DETAILS[self.detail],
            offset_unit=UNITS[self.offset_unit],
        )


def as_outputs(outputs: Sequence[Output | OutputKind]) -> tuple[Output, ...]:
    """Convert names of kinds to outputs without normalisation."""
    if isinstance(outputs, str):
        raise InvalidInputError(f"must be a list; for one output pass [{outputs!r}]", field="outputs")
    if not isinstance(outputs, Iterable):
        raise InvalidInputError(f"must be a list; was {type(outputs).__name__}", field="outputs")
    return tuple(output if isinstance(output, Output) else Output(output) for output in outputs)


def embed_output(
    kind: StreamKind,
    pooling: Pooling,
    l2_normalize: bool,
    dimensions: int | None,
    max_active_dims: int | None,
    pool_factor: float | None,
    allowed: object,
) -> Output:
    """Return the output for the arguments of `embed` and `stream`. `allowed` is a Literal type with the kinds.

    Raises:
        InvalidInputError: The kind or the pooling is unknown, or two arguments contradict each other.
    """
    check_choice("kind", kind, allowed)
    check_choice("pooling", pooling, Pooling)
    if kind == "vector":
        return Output(pooling, l2_normalize, dimensions, max_active_dims, pool_factor)
    if pooling != "model":
        raise InvalidInputError(
            f"must be left out with the kind {kind!r}, because pooling makes single vectors; was {pooling!r}",
            field="pooling",
        )
    return Output(kind, l2_normalize, dimensions, max_active_dims, pool_factor)


def kind_name(kind: int) -> OutputKind | int:
    """Return the name of an OutputKind, or the number if this library has no name for the kind."""
    return _KIND_NAMES.get(kind, kind)
