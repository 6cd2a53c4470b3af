"""The inputs and options of an `Embedder`, and their conversion to a call of the server."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import numpy as np
import numpy.typing as npt

from encserve_server.errors import FieldPath, InvalidField, RequestField
from encserve_server.models.inputs import SentIds, SentInput, SentVectors
from encserve_server.models.pairs import SentPair, SentQuery
from encserve_server.models.reply_size import ReplyShape
from encserve_server.models.scoring import check_activation
from encserve_server.models.treatment import EncodeCall
from encserve_server.outputs import OutputSpec
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import Activation, DataType, Detail, OutputKind, Task

Input = str | tuple[str, str] | Sequence[int] | npt.NDArray[Any]
"""A text, a pair of texts for the output "scores", (seq,) token ids, or (seq, d_model) vectors."""
OutputName = Literal[
    "model",
    "mean",
    "cls",
    "max",
    "last_token",
    "weighted_mean",
    "mean_sqrt_length",
    "tokens",
    "multi_vector",
    "sparse",
    "scores",
]


class LoadOptions(TypedDict, total=False):
    """Settings with the same meaning and defaults as the server's settings; see docs/reference/settings.md."""

    engine: Literal["onnxruntime", "openvino"]
    precision: Literal["model", "float32", "bfloat16"]
    device: Literal["auto", "cpu", "cuda"]
    cache_dir: Path | None
    max_batch_tokens: int | None
    max_batch_sequences: int
    max_padding_fraction: float | None
    tune_batches: bool
    intra_op_threads: int | None
    parallel_batches: int | None
    tokenizer_threads: int
    max_text_bytes: int
    max_vocabulary_mib: int


class EmbedOptions(TypedDict, total=False):
    """The options of a call. The client's `run` has the same options.

    Attributes:
        output: The kind of output. Default: `Embedder.trained_kind`.
        l2_normalize: Whether each row is scaled to Euclidean length 1, after `dimensions` has cut the row.
        dtype: The type of the numbers.
        dimensions: The number of dimensions of a row to keep, from the first.
        max_active_dims: For "sparse": the number of weights to keep, the largest first.
        pool_factor: For "multi_vector": the average number of vectors to join into one.
        task: "query" or "document".
        prompt_name: The prompt before every text; "" for none. Default: the prompt of the task, or of the model.
        truncate: Whether an input that is too long is cut instead of refused.
        exclude_special_tokens: For "tokens": whether to leave out the rows of special tokens.
        activation: For "scores": the function that turns logits into scores; "model" for the model's own. Default:
            "none".
    """

    output: OutputName | None
    l2_normalize: bool
    dtype: Literal["float32", "float16", "int8", "binary"]
    dimensions: int | None
    max_active_dims: int | None
    pool_factor: float | None
    task: Literal["query", "document"] | None
    prompt_name: str | None
    truncate: bool
    exclude_special_tokens: bool
    activation: Literal["model", "none", "sigmoid", "softmax"]


def to_call(inputs: Sequence[SentInput], output: OutputName, options: EmbedOptions) -> EncodeCall:
    """Convert inputs and options to a call of the server.

    Raises:
        InvalidField: An option has an invalid value.
    """
    dtype, task = options.get("dtype", "float32"), options.get("task")
    _check_choice("output", output, get_args(OutputName))
    _check_choice("dtype", dtype, [it.name.lower() for it in DataType])
    _check_choice("task", task, [None, *(it.name.lower() for it in Task if it)])
    without_special = options.get("exclude_special_tokens", False) and output == "tokens"
    spec = OutputSpec(
        OutputKind[output.upper()],
        l2_normalize=options.get("l2_normalize", False),
        data_type=DataType[dtype.upper()],
        dimensions=_check_count("dimensions", options.get("dimensions")),
        max_active_dims=_check_count("max_active_dims", options.get("max_active_dims")),
        pool_factor=options.get("pool_factor") or 0.0,
    )
    return EncodeCall(
        inputs,
        (spec,),
        truncate=options.get("truncate", False),
        prompt_name=options.get("prompt_name"),
        task=Task.NEITHER if task is None else Task[task.upper()],
        shape=ReplyShape(Detail.COUNTS, without_special=without_special),
    )


def to_activation(options: EmbedOptions, bundle: Bundle) -> Activation:
    """Return the function that turns the logits of a model into scores.

    Raises:
        InvalidField: The option has an invalid value, or is softmax for a model with one label.
    """
    name = options.get("activation", "none")
    _check_choice("activation", name, ["model", *(it.name.lower() for it in Activation)])
    if name == "model":
        return Activation.NONE if bundle.scores is None else bundle.scores.activation
    activation = Activation[name.upper()]
    check_activation(bundle, activation)
    return activation


def to_sent(at: int, value: Input, bundle: Bundle) -> SentInput:
    """Convert the input with index `at`.

    Raises:
        InvalidField: The input is neither a text, nor a pair of texts, nor token ids, nor vectors.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(it, str) for it in value):
        return SentPair(SentQuery(str(value[0])), str(value[1]))
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.empty(0, object)
    if not array.size and array.dtype != object:
        if bundle.graph.takes_vectors:
            return SentVectors(np.empty((0, bundle.d_model), np.float32), 0)
        return SentIds(np.empty(0, np.int64), 0)
    if array.ndim == 1 and array.dtype.kind in "iu":
        return SentIds(array.astype(np.int64, copy=False), len(array))
    if array.ndim == 2 and array.dtype.kind in "iuf":
        return SentVectors(array.astype(np.float32, copy=False), len(array))
    raise InvalidField(
        FieldPath(RequestField.INPUT, at),
        "must be a text, a list of 64-bit ids, or a (seq, d_model) array of numbers; was "
        f"{type(value).__name__} of {array.dtype} {array.shape}",
    )


def _check_choice(field: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        raise InvalidField(field, f"must be one of {', '.join(map(repr, choices))}; was {value!r}")


def _check_count(field: str, value: int | None) -> int:
    if value is not None and value < 1:
        raise InvalidField(field, f"must be at least 1, or left out; was {value}")
    return value or 0
