"""Check that a model supports the options of a call."""

from collections.abc import Iterable

from encserve_client.exceptions import InvalidInputError, InvalidRequestError
from encserve_client.options import Options, Output
from encserve_client.results import ModelInfo


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
