"""Check that a model supports the options of a call."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import grpc
import numpy as np

from encserve_client.exceptions import EncserveError, InvalidInputError, InvalidRequestError
from encserve_client.inputs import SpanInput
from encserve_client.options import DType, Options
from encserve_client.results import ModelInfo

# The allowed types by kind. Other kinds allow all types.
_DTYPES: Mapping[str | int, tuple[DType, ...]] = {
    "tokens": ("float32", "float16"),
    "sparse": ("float32", "float16"),
    "multi_vector": ("float32", "float16", "int8"),
}


def capability_error(info: ModelInfo, options: Options) -> InvalidRequestError | None:
    """Return the error if the model does not support the options, otherwise None. The error names the alternatives."""
    if 0 < info.max_outputs < len(options.outputs):
        return InvalidInputError(
            f"must be at most {info.max_outputs} (ModelInfo.max_outputs); was {len(options.outputs)}: make more calls",
            field="outputs",
        )
    field, problem = next(_problems(info, options), ("", ""))
    if not field:
        return None
    return InvalidRequestError(f"{field}{problem}", code=grpc.StatusCode.INVALID_ARGUMENT, field=field)


def input_errors(info: ModelInfo, inputs: Sequence[object]) -> dict[int, EncserveError]:
    """Return the error of each input of a kind that the model does not take, by index."""
    errors: dict[int, EncserveError] = {}
    takes_texts = info.input_kind != "embeddings" and info.has_tokenizer
    for index, item in enumerate(inputs):
        if takes_texts and isinstance(item, str):  # the common case, fast
            continue
        if problem := _problem_of_input(info, item.input if isinstance(item, SpanInput) else item):
            field = "text" if isinstance(item, SpanInput) else f"inputs[{index}]"
            text = f"{field} {problem}"
            errors[index] = error = InvalidRequestError(text, code=grpc.StatusCode.INVALID_ARGUMENT, field=field)
            error.index = index
    return errors


def _problem_of_input(info: ModelInfo, item: object) -> str:
    is_vectors = isinstance(item, np.ndarray) and item.ndim == 2
    if info.input_kind == "embeddings" and not is_vectors:
        return f"must be an array of vectors, because model {info.name} takes vectors only"
    if info.input_kind == "token_ids" and is_vectors:
        return f"must be a text or token ids, because model {info.name} takes no vectors"
    if info.input_kind == "embeddings" and isinstance(item, np.ndarray) and item.shape[1] != info.d_model:
        return f"must have {info.d_model} columns (d_model of model {info.name}); had {item.shape[1]}"
    if isinstance(item, str) and not info.has_tokenizer:
        return f"must be token ids, because model {info.name} has no tokenizer"
    return ""


def _problems(info: ModelInfo, options: Options) -> Iterator[tuple[str, str]]:
    """Yield (argument, rest of the error message) for each wrong argument."""
    model = f"model {info.name}"
    for output in options.outputs:
        if output.kind == "model" and info.pooling is None:
            yield "kind", f": {model} was not trained for single vectors; {_advice(info)}"
        if output.kind in ("multi_vector", "sparse") and output.kind not in info.kinds:
            yield "kind", f" {output.kind!r}: {model} has {_listed(info.kinds, 'kinds')}"
    if options.task is not None and options.task not in info.tasks:
        yield "task", f" {options.task!r}: {model} has {_listed(info.tasks, 'tasks')}"
    if options.prompt_name and options.prompt_name not in info.prompts:
        yield "prompt_name", f" {options.prompt_name!r}: {model} has {_listed(info.prompts, 'prompts')}"
    yield from _problems_of_numbers(info, options)


def _advice(info: ModelInfo) -> str:
    """Return the next step for callers who want single vectors from a model without them."""
    if info.kinds:
        kinds = _listed(info.kinds, "kinds")
        return f"it has {kinds}. Give one of these kinds, or a pooling such as 'mean'"
    scores = "it computes scores: use rank or score. Or " if info.labels else ""
    return f"{scores}give a pooling such as 'mean'"


def _problems_of_numbers(info: ModelInfo, options: Options) -> Iterator[tuple[str, str]]:
    for output in options.outputs:
        allowed = _DTYPES.get(output.kind, get_args(DType))
        if options.dtype not in allowed:
            yield "dtype", f" {options.dtype!r}: {output.kind!r} has {_listed(allowed, 'types')}"
        if output.dimensions is None:
            continue
        if output.kind == "sparse":
            yield "dimensions", " must not be given for the kind 'sparse': weights over the vocabulary are not in order"
        uncut = replace(info, default_dimensions=0).width(replace(output, dimensions=None))
        if output.dimensions > uncut:
            yield "dimensions", f" must be at most {uncut}, the width of model {info.name}; was {output.dimensions}"


def _listed(names: Iterable[str], what: str) -> str:
    listed = ", ".join(map(repr, names))
    return f"the {what} {listed}" if listed else f"no {what}"
