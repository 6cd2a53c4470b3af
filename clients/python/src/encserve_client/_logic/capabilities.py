"""Check that a model supports the options of a call."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import get_args

from encserve_client.exceptions import InvalidInputError, InvalidRequestError
from encserve_client.options import DType, Options, Output
from encserve_client.results import ModelInfo

# The types of the rows of each kind; all types for other kinds.
_DTYPES: Mapping[str | int, tuple[DType, ...]] = {
    "tokens": ("float32", "float16"),
    "sparse": ("float32", "float16"),
    "multi_vector": ("float32", "float16", "int8"),
}


def capability_error(info: ModelInfo, options: Options) -> InvalidRequestError | None:
    """Return the error of a model without support for the options, or None. The error names the alternatives."""
    if 0 < info.max_outputs < len(options.outputs):
        return InvalidInputError(
            f"outputs must be at most {info.max_outputs} (ModelInfo.max_outputs); was {len(options.outputs)}: "
            "make more calls"
        )
    for output in options.outputs:
        if (text := _missing_output(info, output)) is not None:
            return InvalidRequestError(text)
    if options.task is not None and options.task not in info.tasks:
        return InvalidRequestError(f"task={options.task!r}: model {info.name} has {_listed(info.tasks, 'tasks')}")
    if options.prompt_name and options.prompt_name not in info.prompts:
        return InvalidRequestError(
            f"prompt_name={options.prompt_name!r}: model {info.name} has {_listed(info.prompts, 'prompts')}"
        )
    for output in options.outputs:
        if (text := _wrong_numbers(info, output, options.dtype)) is not None:
            return InvalidRequestError(text)
    return None


def _wrong_numbers(info: ModelInfo, output: Output, dtype: DType) -> str | None:
    """Return the problem of the type or the number of dimensions of a row."""
    allowed = _DTYPES.get(output.kind, get_args(DType))
    if dtype not in allowed:
        return f"dtype={dtype!r}: {output.kind!r} has {_listed(allowed, 'types')}"
    if output.dimensions is None or isinstance(output.kind, int):
        return None
    if output.kind == "sparse":
        return "dimensions must not be given for kind='sparse'; max_active_dims limits the weights"
    uncut = replace(info, default_dimensions=0).width(replace(output, dimensions=None))
    if output.dimensions > uncut:
        return f"dimensions must be at most {uncut}, the width of model {info.name}; was {output.dimensions}"
    return None


def _missing_output(info: ModelInfo, output: Output) -> str | None:
    if output.kind == "model" and info.pooling is None:
        return (
            f"kind='vector': model {info.name} was not trained for single vectors; it has "
            f"{_listed(info.kinds, 'kinds')}. Give one of these kinds, or a pooling such as 'mean'"
        )
    if output.kind in ("multi_vector", "sparse") and output.kind not in info.kinds:
        return f"kind={output.kind!r}: model {info.name} has {_listed(info.kinds, 'kinds')}"
    return None


def _listed(names: Iterable[str], what: str) -> str:
    listed = ", ".join(map(repr, names))
    return f"the {what} {listed}" if listed else f"no {what}"
