"""A request of the protocol, whatever brought it, to a call of a model."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.errors import FieldPath, InvalidField, Part
from encserve_server.models.inputs import SentIds, SentInput, SentVectors
from encserve_server.models.reply_size import ReplyShape
from encserve_server.models.served import ServedModel
from encserve_server.models.treatment import EncodeCall
from encserve_server.open_inference.tensors import (
    ATTENTION_MASK,
    DATATYPE_NAMES,
    DATATYPES,
    INPUT_IDS,
    INPUTS_EMBEDS,
    OUTPUTS,
    TEXT,
    TOKEN_TYPE_IDS,
    SentTensor,
    check_inputs,
    check_parameters,
    inputs_of,
)
from encserve_server.outputs import OutputSpec
from encserve_server.types.callers import PRIORITIES, Priority
from encserve_server.types.requests import DataType, Detail, OutputKind, Task

# What callers send and what changes nothing: whether the last answer to a request may be empty (there is one answer,
# and it is not empty), and how MLServer's codecs made the request.
_IGNORED_PARAMETERS = frozenset({"triton_enable_empty_final_response", "content_type"})
_TASKS = {task.name.lower(): task for task in Task if task}
_NAMES = {
    Part.INPUTS: "inputs",
    Part.INPUT: "inputs",
    Part.TEXT: TEXT,
    Part.IDS: INPUT_IDS,
    Part.VECTORS: INPUTS_EMBEDS,
    Part.VECTORS_DATA: INPUTS_EMBEDS,
    Part.VECTORS_WIDTH: f"{INPUTS_EMBEDS}.shape",
    Part.OUTPUT_DIMENSIONS: "parameters.dimensions",
    Part.DATA_TYPE: "parameters.datatype",
    Part.TASK: "parameters.task",
    Part.PROMPT_NAME: "parameters.prompt_name",
    Part.MODEL: "model_name",
    Part.MODEL_VERSION: "model_version",
}
_VALUE_NAMES: dict[type[Enum], Mapping[Any, str]] = {
    OutputKind: {kind: name for name, (kind, _) in reversed(OUTPUTS.items())},  # the first of each kind
    DataType: DATATYPE_NAMES,
}
_OF_INPUTS = (Part.INPUT, Part.TEXT, Part.IDS, Part.VECTORS, Part.VECTORS_DATA)
# What goes with ids or vectors, and is no input by itself.
_BESIDE = (ATTENTION_MASK, TOKEN_TYPE_IDS)


class InferNaming:
    """What the fields of a request are called, in errors."""

    def field(self, path: FieldPath) -> str:
        """As in `input_ids[3, 17]`."""
        name = _NAMES.get(path.part, "outputs")
        if path.at is None or path.part not in _OF_INPUTS:
            return name
        return f"{name}[{path.at}]" if path.place is None else f"{name}[{path.at}, {path.place}]"

    def value(self, value: Enum) -> str:
        """As in `query`, `embedding` or `FP32`."""
        return _VALUE_NAMES.get(type(value), {}).get(value) or value.name.lower()


@dataclass(frozen=True, slots=True)
class SentOutput:
    """An output that a request names.

    Attributes:
        name: Its name.
        parameters: What the request says of it besides: of `CHECKED_PARAMETERS` and `binary_data` those that are there.
    """

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request, of which nothing has been checked.

    Attributes:
        inputs: Its inputs; read once, and no further than to the first that is wrong.
        outputs: The outputs that it names, or the first `MAX_OUTPUTS` of them.
        output_count: How many it names.
        parameters: Its parameters, each with a bool, a number, a string, or None, which is as good as none.
        request_id: What the answer is to be marked with.
    """

    inputs: Iterable[SentTensor]
    outputs: Sequence[SentOutput]
    output_count: int
    parameters: Iterable[tuple[str, Any]]
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a request, every default filled in.

    Attributes:
        task: What texts are to the model: "query" or "document".
        prompt_name: What goes before every text; None for what the task, or the model, has.
        dimensions: To how many of its first numbers `embedding` is cut; 0 for the model's own.
        truncate: Whether an over-long input is cut instead of refused.
        data_type: The type of the numbers returned, from the parameter `datatype`.
        timeout_us: After how many microseconds the caller wants no answer any more; 0 for never.
        binary_output: Whether outputs are wanted as bytes, over HTTP, from the parameter `binary_data_output`.
        priority: How urgent the request is: "interactive" or "bulk". Triton's numbers are ignored.
    """

    task: Task = Task.NEITHER
    prompt_name: str | None = None
    dimensions: int = 0
    truncate: bool = False
    data_type: DataType = DataType.FLOAT32
    timeout_us: int = 0
    binary_output: bool = False
    priority: Priority = Priority.INTERACTIVE


@dataclass(frozen=True, slots=True)
class InferCall:
    """A request for a model, decoded as far as it can be without looking at its data.

    Attributes:
        tensors: The inputs by name.
        outputs: The names of the outputs wanted, none twice.
        binary: Those of them that are wanted as bytes, over HTTP.
        count: How many sequences there are.
        parameters: What it says besides.
        request_id: What the answer is to be marked with.
    """

    tensors: dict[str, SentTensor]
    outputs: tuple[str, ...]
    binary: Collection[str]
    count: int
    parameters: Parameters
    request_id: str


def decode_request(sent: SentRequest, model: ServedModel) -> InferCall:
    """Decodes all of a request but its data.

    Raises:
        InvalidField: An input, output or parameter is none of the model's, or the inputs do not go together.
    """
    bundle = model.bundle
    tensors = check_inputs(sent.inputs, bundle)
    main = [name for name in tensors if name not in _BESIDE]
    if len(main) != 1:
        wanted = " or ".join(it.name for it in inputs_of(bundle) if it.name != ATTENTION_MASK)
        raise InvalidField("inputs", f"must hold {wanted}; was {', '.join(tensors) or 'empty'}")
    shape = tensors[main[0]].shape
    for name in _BESIDE:
        if (beside := tensors.get(name)) is not None and (main[0] == TEXT or beside.shape != shape[:2]):
            why = f"goes with {INPUT_IDS} only" if main[0] == TEXT else f"must have the shape of {main[0]}, {shape[:2]}"
            raise InvalidField(f"{name}.shape", f"{why}; was {beside.shape}")
    parameters = _decode_parameters(sent.parameters, model)
    outputs, binary = _decode_outputs(sent.outputs, model, parameters)
    return InferCall(tensors, outputs, binary, shape[0], parameters, sent.request_id)


def count_tokens(call: InferCall, longest: int) -> int | None:
    """How many tokens a call has if each input has at most `longest`; None where that takes more than counting."""
    if call.tensors.keys() & {ATTENTION_MASK, TEXT}:
        return None
    return call.count * min(_main(call.tensors).shape[1], longest)


def check_length(call: InferCall, model: ServedModel) -> None:
    """Refuses inputs that are too long by their shape alone, before their data are decoded.

    Raises:
        SequenceTooLong: They are, and may not be cut.
    """
    main = _main(call.tensors)
    if main.name == TEXT or ATTENTION_MASK in call.tensors or call.parameters.truncate:
        return
    part = Part.IDS if main.name == INPUT_IDS else Part.VECTORS
    model.check_length(FieldPath(part, 0), main.shape[1], call.parameters.task)


def decode_call(call: InferCall, longest: int, max_text_bytes: int) -> EncodeCall:
    """Decodes the data of a call whose inputs are not too many, of each at most `longest` tokens.

    Raises:
        InvalidField: The data do not fit their shape, the mask is not ones followed by zeros, a token type is not 0, or
            a text has more than `max_text_bytes`.
    """
    parameters = call.parameters
    outputs = []
    for kind in kinds_of(call.outputs):
        dimensions = parameters.dimensions if kind is OutputKind.MODEL else 0
        outputs.append(OutputSpec(kind, data_type=parameters.data_type, dimensions=dimensions))
    return EncodeCall(
        inputs=_decode_inputs(call.tensors, longest, max_text_bytes),
        outputs=tuple(outputs),
        truncate=parameters.truncate,
        prompt_name=parameters.prompt_name,
        task=parameters.task,
        shape=ReplyShape(Detail.NONE, padded=True),
        priority=parameters.priority,
    )


def kinds_of(names: Sequence[str]) -> list[OutputKind]:
    """What is computed for these outputs, nothing twice."""
    return list(dict.fromkeys(OUTPUTS[name][0] for name in names))


def _main(tensors: Mapping[str, SentTensor]) -> SentTensor:
    (found,) = (tensor for name, tensor in tensors.items() if name not in _BESIDE)
    return found


def _decode_inputs(tensors: Mapping[str, SentTensor], longest: int, max_text_bytes: int) -> list[SentInput]:
    sent = _main(tensors)
    if sent.name == TEXT:
        return list(sent.texts(max_text_bytes))
    lengths = _lengths(tensors.get(ATTENTION_MASK), sent.shape)
    if (types := tensors.get(TOKEN_TYPE_IDS)) is not None:
        _check_types(types.numbers())
    numbers = sent.numbers()
    if sent.name == INPUT_IDS:  # (n, seq)
        ids = ((row[: min(n, longest)], n) for row, n in zip(numbers, lengths, strict=True))
        return [SentIds(row.astype("<i8", copy=False), n) for row, n in ids]
    return [SentVectors(rows[: min(n, longest)], n) for rows, n in zip(numbers, lengths, strict=True)]  # (n, seq, d)


def _check_types(types: npt.NDArray[Any]) -> None:
    """Refuses token types, (n, seq), other than 0: graphs have no input for them."""
    if types.any():
        row, place = divmod(int(np.argmax(types != 0)), types.shape[1])
        raise InvalidField(
            f"{TOKEN_TYPE_IDS}[{row}, {place}]",
            f"must be 0: the model takes single texts, whose tokens are all of type 0; was {types[row, place]}",
        )


def _lengths(mask: SentTensor | None, shape: tuple[int, ...]) -> list[int]:
    """How many tokens each sequence has: what its mask says, or all.

    Raises:
        InvalidField: A row is not ones followed by zeros.
    """
    if mask is None:
        return [shape[1]] * shape[0]
    lengths = []
    for i, row in enumerate(mask.numbers()):  # (seq,)
        length = int(np.count_nonzero(row))
        if not (row[:length] == 1).all():
            raise InvalidField(
                f"{ATTENTION_MASK}[{i}]",
                "must be 1 for each token and 0 for the padding behind them; was something else: pad on the right",
            )
        lengths.append(length)
    return lengths


def _decode_outputs(
    sent: Sequence[SentOutput], model: ServedModel, parameters: Parameters
) -> tuple[tuple[str, ...], Collection[str]]:
    """The outputs wanted, and which of them as bytes."""
    known = [name for name, (kind, _) in OUTPUTS.items() if kind in model.outputs.kinds]
    binary: dict[str, bool] = {}
    for i, it in enumerate(sent):
        if it.name not in known:
            there = ", ".join(known)
            raise InvalidField(f"outputs[{i}].name", f"model {model.bundle.name} has {there}; was {it.name[:64]!r}")
        check_parameters(f"outputs[{i}].parameters", it.parameters)
        as_bytes = it.parameters.get("binary_data")
        binary[it.name] = (
            parameters.binary_output
            if as_bytes is None
            else _flag(f"outputs[{i}].parameters.binary_data", as_bytes, model)
        )
    wanted = tuple(binary) or tuple(known)
    if parameters.dimensions and "embedding" not in wanted:
        raise InvalidField("parameters.dimensions", "is for embedding, which is not among the outputs")
    return wanted, frozenset(name for name in wanted if binary.get(name, parameters.binary_output))


def _decode_parameters(sent: Iterable[tuple[str, Any]], model: ServedModel) -> Parameters:
    found: dict[str, Any] = {}
    for name, value in sent:
        if name in _IGNORED_PARAMETERS:
            continue
        if name not in _PARAMETERS:
            there = ", ".join(_PARAMETERS)
            raise InvalidField("parameters", f"there are {there}; was {name[:64]!r}")
        if value is not None:
            own_name, decode = _PARAMETERS[name]
            found[own_name] = decode(f"parameters.{name}", value, model)
    return Parameters(**found)


def _task(field_name: str, value: Any, model: ServedModel) -> Task:
    known = [name for name, task in _TASKS.items() if task in model.bundle.tasks]
    if value not in known:
        otherwise = f"must be {' or '.join(map(repr, known))}" if known else "must be left out: this model has no tasks"
        raise InvalidField(field_name, f"{otherwise}; was {str(value)[:64]!r}")
    return _TASKS[value]


def _text(field_name: str, value: Any, model: ServedModel) -> str:
    del model
    if not isinstance(value, str):
        raise InvalidField(field_name, f"must be a string; was {value!r}")
    return value


def _flag(field_name: str, value: Any, model: ServedModel) -> bool:
    del model
    if not isinstance(value, bool):
        raise InvalidField(field_name, f"must be true or false; was {str(value)[:64]!r}")
    return value


def _priority(field_name: str, value: Any, model: ServedModel) -> Priority:
    del model
    if isinstance(value, int) and not isinstance(value, bool):  # Triton's levels, which its server is set up with
        return Priority.INTERACTIVE
    if value not in PRIORITIES:
        raise InvalidField(field_name, f"must be {' or '.join(map(repr, PRIORITIES))}; was {str(value)[:64]!r}")
    return PRIORITIES[value]


def _dimensions(field_name: str, value: Any, model: ServedModel) -> int:
    if OutputKind.MODEL not in model.outputs.kinds:
        raise InvalidField(field_name, f"is for embedding, which model {model.bundle.name} does not have")
    width = model.outputs.kinds[OutputKind.MODEL].width
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= width:
        raise InvalidField(field_name, f"must be from 1 to {width}, the numbers of embedding; was {str(value)[:64]!r}")
    return value


def _data_type(field_name: str, value: Any, model: ServedModel) -> DataType:
    del model
    if value not in DATATYPES:
        raise InvalidField(field_name, f"must be {' or '.join(DATATYPES)}; was {str(value)[:64]!r}")
    return DATATYPES[value]


def _timeout(field_name: str, value: Any, model: ServedModel) -> int:
    del model
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        problem = f"must be microseconds, a whole number of at least 0; 0 means no limit; was {str(value)[:64]!r}"
        raise InvalidField(field_name, problem)
    return value


_PARAMETERS: dict[str, tuple[str, Callable[[str, Any, ServedModel], Any]]] = {
    "task": ("task", _task),
    "prompt_name": ("prompt_name", _text),
    "dimensions": ("dimensions", _dimensions),
    "truncate": ("truncate", _flag),
    "datatype": ("data_type", _data_type),
    "timeout": ("timeout_us", _timeout),
    "binary_data_output": ("binary_output", _flag),
    "priority": ("priority", _priority),
}
