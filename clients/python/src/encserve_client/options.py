"""What to return, in the caller's words and in the contract's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from encserve_client._arguments import as_float, as_int, want
from encserve_client.exceptions import InvalidInputError
from encserve_proto.v1 import encoder_pb2 as pb

DType = Literal["float32", "float16"]
Pooling = Literal["model", "mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length"]
InputKind = Literal["token_ids", "embeddings"]
OutputKind = Literal[
    "tokens", "model", "mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length", "multi_vector", "sparse"
]
Task = Literal["query", "document"]
TrainedKind = Literal["model", "multi_vector", "sparse"]
Array = npt.NDArray[np.floating[Any]]
Layers: TypeAlias = bool | Sequence[int]
"""True for every layer, False for none, or the layers from 0 in ascending order."""

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
}
_KIND_NAMES: dict[int, OutputKind] = {number: name for name, number in _KINDS.items()}
TASKS: dict[Task, pb.Task] = {"query": pb.TASK_QUERY, "document": pb.TASK_DOCUMENT}
_DATA_TYPES: dict[DType, pb.DataType] = {"float32": pb.DATA_TYPE_FLOAT32, "float16": pb.DATA_TYPE_FLOAT16}
# The bytes are little-endian whatever this machine is.
_DTYPES: dict[DType, np.dtype[np.floating[Any]]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}


def numpy_dtype(data_type: int) -> np.dtype[np.floating[Any]]:
    """The NumPy type of a DataType that this library has sent."""
    return _DTYPES["float16" if data_type == pb.DATA_TYPE_FLOAT16 else "float32"]


def check_choice(name: str, value: object, choices: object) -> None:
    """Raises InvalidInputError for what is none of a Literal's values."""
    allowed = get_args(choices)
    if value not in allowed:
        raise InvalidInputError(f"{name} must be one of {', '.join(map(repr, allowed))}; was {value!r}")


@dataclass(frozen=True, slots=True)
class Output:
    """One thing to return for every input.

    Attributes:
        kind: "tokens" for one row per token; "mean", "cls", "max", "last_token", "weighted_mean" or "mean_sqrt_length"
            for one row per input, pooled over all of its tokens; "model" for one row per input, made the way the model
            was trained for; "multi_vector" for the vectors that MaxSim compares, as many as an input has; "sparse" for
            weights over the vocabulary, those that are not 0.
        l2_normalize: Whether to scale every row to Euclidean length 1, after it has been cut.
        dimensions: To how many of its first numbers to cut every row. Default: all, or for "model" as many as the model
            was trained for.
        max_active_dims: How many weights of "sparse" to keep, the largest ones. Default: what the model was trained
            with.
        pool_factor: How many vectors of "multi_vector" to make one on average, by hierarchical clustering. Default: no
            more than the model itself does.
    """

    kind: OutputKind = "tokens"
    l2_normalize: bool = False
    dimensions: int | None = None
    max_active_dims: int | None = None
    pool_factor: float | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInputError for a kind that does not exist, or for a number below 1."""
        check_choice("kind", self.kind, OutputKind)
        for name in ("dimensions", "max_active_dims"):
            value = getattr(self, name)
            if value is not None and as_int(name, value) < 1:
                raise InvalidInputError(f"{name} must be >= 1; was {value}")
        if self.pool_factor is not None and not as_float("pool_factor", self.pool_factor) >= 1:
            raise InvalidInputError(f"pool_factor must be >= 1; was {self.pool_factor}")

    @property
    def is_pooled(self) -> bool:
        """Whether it is one row per input."""
        return self.kind not in ("tokens", "multi_vector", "sparse")

    def to_proto(self) -> pb.OutputSpec:
        """The same as a message."""
        return pb.OutputSpec(
            kind=_KINDS[self.kind],
            l2_normalize=self.l2_normalize,
            dimensions=self.dimensions or 0,
            max_active_dims=self.max_active_dims or 0,
            pool_factor=self.pool_factor or 0.0,
        )


@dataclass(frozen=True, slots=True)
class Options:
    """How a call's inputs are treated and what comes back; see `EncoderClient.run`."""

    outputs: tuple[Output, ...] = (Output(),)
    dtype: DType = "float32"
    truncate: bool = False
    exclude_special_tokens: bool = False
    include_token_strings: bool = False
    prompt_name: str | None = None
    task: Task | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInputError for options that no server accepts."""
        if self.task is not None:
            check_choice("task", self.task, Task)
        want("prompt_name", self.prompt_name, (str, type(None)), "a str or None")
        check_choice("dtype", self.dtype, DType)
        if not self.outputs:
            raise InvalidInputError("outputs must name at least one output; was empty")
        if len(set(self.outputs)) != len(self.outputs):
            raise InvalidInputError(f"outputs must differ from each other; was {list(self.outputs)}")

    @property
    def numpy_dtype(self) -> np.dtype[np.floating[Any]]:
        """The type of the numbers on the wire."""
        return _DTYPES[self.dtype]

    @property
    def data_type(self) -> pb.DataType:
        """The same in the contract's words."""
        return _DATA_TYPES[self.dtype]

    @property
    def truncation(self) -> pb.Truncation:
        """What happens to an over-long input, in the contract's words."""
        return pb.TRUNCATION_END if self.truncate else pb.TRUNCATION_REFUSE

    @property
    def task_number(self) -> pb.Task:
        """The task in the contract's words."""
        return pb.TASK_UNSPECIFIED if self.task is None else TASKS[self.task]

    def to_proto(self) -> pb.EncodeOptions:
        """The same as a message."""
        return pb.EncodeOptions(
            outputs=[it.to_proto() for it in self.outputs],
            data_type=self.data_type,
            truncation=self.truncation,
            exclude_special_tokens=self.exclude_special_tokens,
            include_token_strings=self.include_token_strings,
            prompt_name=self.prompt_name,
            task=self.task_number,
        )


def as_outputs(outputs: Sequence[Output | OutputKind]) -> tuple[Output, ...]:
    """Takes names for outputs that are not normalised."""
    if isinstance(outputs, str):
        raise InvalidInputError(f"outputs must be a list; for one output pass [{outputs!r}]")
    return tuple(it if isinstance(it, Output) else Output(it) for it in outputs)


def pooled_output(pooling: Pooling, l2_normalize: bool, dimensions: int | None = None) -> Output:
    """The output for a pooling. Raises InvalidInputError for one that does not exist."""
    check_choice("pooling", pooling, Pooling)
    return Output(pooling, l2_normalize, dimensions)


def kind_name(kind: int) -> OutputKind | None:
    """The name of an OutputKind; None for OUTPUT_KIND_UNSPECIFIED and for one this library does not know."""
    return _KIND_NAMES.get(kind)
