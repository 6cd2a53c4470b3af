"""Decodes a request of the protocol, from gRPC or HTTP, into a call of a model."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.errors import FieldPath, InvalidField, Naming, RequestField
from encserve_server.models.inputs import SentIds, SentInput, SentVectors
from encserve_server.models.pairs import SentPair, SentQuery
from encserve_server.models.reply_size import ReplyShape
from encserve_server.models.served import ServedModel
from encserve_server.models.treatment import EncodeCall
from encserve_server.outputs import OutputSpec
from encserve_server.protocols.open_inference.tensors import (
    ATTENTION_MASK,
    DATATYPE_NAMES,
    DATATYPES,
    INPUT_IDS,
    INPUTS_EMBEDS,
    OUTPUTS,
    QUERY,
    TEXT,
    TOKEN_TYPE_IDS,
    SentTensor,
    check_inputs,
    check_parameters,
    inputs_of,
)
from encserve_server.types.callers import PRIORITIES, Priority
from encserve_server.types.requests import DataType, Detail, OutputKind, Task

# Parameters that clients send and this server ignores. The first asks for an empty last reply, but this server sends
# only one reply for each request. The second names the MLServer codec that made the request.
_IGNORED_PARAMETERS = frozenset({"triton_enable_empty_final_response", "content_type"})
_TASKS = {task.name.lower(): task for task in Task if task}
_AT = "{at:[#{place:, #}]}"  # such as [3, 17]
_FIELDS = dict.fromkeys(RequestField, "outputs") | {
    RequestField.INPUTS: "inputs",
    RequestField.INPUT: "inputs" + _AT,
    RequestField.TEXT: TEXT + _AT,
    RequestField.QUERY: QUERY + _AT,
    RequestField.IDS: INPUT_IDS + _AT,
    RequestField.VECTORS: INPUTS_EMBEDS + _AT,
    RequestField.VECTORS_DATA: INPUTS_EMBEDS + _AT,
    RequestField.VECTORS_WIDTH: f"{INPUTS_EMBEDS}.shape",
    RequestField.OUTPUT_DIMENSIONS: "parameters.dimensions",
    RequestField.DATA_TYPE: "parameters.datatype",
    RequestField.TASK: "parameters.task",
    RequestField.PROMPT_NAME: "parameters.prompt_name",
    RequestField.MODEL: "model_name",
    RequestField.MODEL_VERSION: "model_version",
}
_VALUES: dict[type[Enum], Mapping[Any, str]] = {
    # Several names can mean the same kind. The order is reversed, so that the first name stays.
    OutputKind: {kind: name for name, (kind, _) in reversed(OUTPUTS.items())},
    DataType: DATATYPE_NAMES,
}
NAMING = Naming(_FIELDS, _VALUES)
# Tensors that describe the ids or vectors of the same request.
_DESCRIPTIONS = (ATTENTION_MASK, TOKEN_TYPE_IDS)
_BESIDE = (*_DESCRIPTIONS, QUERY)


@dataclass(frozen=True, slots=True)
class SentOutput:
    """An output that a request names.

    Attributes:
        name: The name of the output.
        parameters: The parameters of the output, but only `binary_data` and the names in `CHECKED_PARAMETERS`.
    """

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request before any check.

    Attributes:
        inputs: The inputs. They can be read only once; reading ends at the first invalid input.
        outputs: The requested outputs, but at most the first `MAX_OUTPUTS`.
        output_count: The number of requested outputs.
        parameters: The parameters: bools, numbers and strings. None stands for a missing parameter.
        request_id: The id that the reply repeats.
    """

    inputs: Iterable[SentTensor]
    outputs: Sequence[SentOutput]
    output_count: int
    parameters: Iterable[tuple[str, Any]]
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a request, with defaults.

    Attributes:
        task: The task of the texts: "query" or "document".
        prompt_name: The prompt before every text; None for the prompt of the task or the model.
        dimensions: The number of dimensions to which `embedding` is cut; 0 for the model's dimensions.
        truncate: Whether an input that is too long is cut instead of refused.
        data_type: The type of the returned numbers, from the parameter `datatype`.
        timeout_us: The caller's timeout in microseconds; 0 for none.
        binary_output: Whether outputs are sent as bytes over HTTP, from the parameter `binary_data_output`.
        priority: "interactive" or "bulk". Triton's numbers are ignored.
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
    """A request for a model, decoded except for its data.

    Attributes:
        tensors: The inputs by name.
        outputs: The names of the requested outputs, each once.
        binary: The outputs that are sent as bytes over HTTP.
        count: The number of sequences.
        parameters: The parameters.
        request_id: The id that the reply repeats.
    """

    tensors: dict[str, SentTensor]
    outputs: tuple[str, ...]
    binary: Collection[str]
    count: int
    parameters: Parameters
    request_id: str


def decode_request(sent: SentRequest, model: ServedModel) -> InferCall:
    """Decode a request except for its data.

    Raises:
        InvalidField: The model lacks an input, output or parameter, or the inputs do not match each other.
    """
    bundle = model.bundle
    tensors = check_inputs(sent.inputs, bundle)
    main = [name for name in tensors if name not in _BESIDE]
    if len(main) != 1:
        wanted = " or ".join(it.name for it in inputs_of(bundle) if it.name not in _BESIDE)
        raise InvalidField("inputs", f"must hold {wanted}; was {', '.join(tensors) or 'empty'}")
    shape = tensors[main[0]].shape
    for name in _DESCRIPTIONS:
        if (beside := tensors.get(name)) is not None and (main[0] == TEXT or beside.shape != shape[:2]):
            why = f"is only for {INPUT_IDS}" if main[0] == TEXT else f"must have the shape of {main[0]}, {shape[:2]}"
            raise InvalidField(f"{name}.shape", f"{why}; was {beside.shape}")
    if (query := tensors.get(QUERY)) is not None:
        if main[0] != TEXT:
            raise InvalidField(QUERY, f"is only for {TEXT}; was sent with {main[0]}")
        if query.shape[0] not in (1, shape[0]):
            problem = f"must hold 1 query, or 1 for each of the {shape[0]} texts; was {list(query.shape)}"
            raise InvalidField(f"{QUERY}.shape", problem)
    parameters = _decode_parameters(sent.parameters, model)
    outputs, binary = _decode_outputs(sent.outputs, model, parameters)
    return InferCall(tensors, outputs, binary, shape[0], parameters, sent.request_id)


def check_length(call: InferCall, model: ServedModel) -> None:
    """Refuse inputs that are too long, before their data are decoded. The shape gives the length.

    Raises:
        SequenceTooLong: An input is too long and may not be cut.
    """
    main = _main(call.tensors)
    if main.name == TEXT or ATTENTION_MASK in call.tensors or call.parameters.truncate:
        return
    field = RequestField.IDS if main.name == INPUT_IDS else RequestField.VECTORS
    model.check_length(FieldPath(field, 0), main.shape[1], call.parameters.task)


def decode_call(call: InferCall, longest: int, max_text_bytes: int) -> EncodeCall:
    """Decode the data of a call. At most `longest` tokens of each input are decoded.

    Raises:
        InvalidField: The data do not match their shape, a row of the mask is not ones followed by zeros, or a token
            type is not 0. Or a text has more than `max_text_bytes`.
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
    """Return the kinds of these outputs, each kind once."""
    return list(dict.fromkeys(OUTPUTS[name][0] for name in names))


def _main(tensors: Mapping[str, SentTensor]) -> SentTensor:
    (found,) = (tensor for name, tensor in tensors.items() if name not in _BESIDE)
    return found


def _decode_inputs(tensors: Mapping[str, SentTensor], longest: int, max_text_bytes: int) -> list[SentInput]:
    sent = _main(tensors)
    if sent.name == TEXT:
        texts = list(sent.texts(max_text_bytes))
        if (query := tensors.get(QUERY)) is None:
            return list(texts)
        queries = [SentQuery(text) for text in query.texts(max_text_bytes)]
        return [SentPair(queries[i if len(queries) > 1 else 0], text) for i, text in enumerate(texts)]
    lengths = _lengths(tensors.get(ATTENTION_MASK), sent.shape)
    if (types := tensors.get(TOKEN_TYPE_IDS)) is not None:
        _check_types(types.numbers())
    numbers = sent.numbers()
    if sent.name == INPUT_IDS:  # (n, seq)
        ids = ((row[: min(n, longest)], n) for row, n in zip(numbers, lengths, strict=True))
        return [SentIds(row.astype("<i8", copy=False), n) for row, n in ids]
    return [SentVectors(rows[: min(n, longest)], n) for rows, n in zip(numbers, lengths, strict=True)]  # (n, seq, d)


def _check_types(types: npt.NDArray[Any]) -> None:
    """Refuse token types other than 0, because graphs have no input for token types. `types` has shape (n, seq)."""
    if types.any():
        row, place = divmod(int(np.argmax(types != 0)), types.shape[1])
        raise InvalidField(
            f"{TOKEN_TYPE_IDS}[{row}, {place}]",
            f"must be 0, because a single text has only the token type 0; was {types[row, place]}",
        )


def _lengths(mask: SentTensor | None, shape: tuple[int, ...]) -> list[int]:
    """Return the number of tokens of each sequence, from its mask. Without a mask, every position is a token.

    Raises:
        InvalidField: A row of the mask is not ones followed by zeros.
    """
    if mask is None:
        return [shape[1]] * shape[0]
    lengths = []
    for i, row in enumerate(mask.numbers()):  # (seq,)
        length = int(np.count_nonzero(row))
        if not (row[:length] == 1).all():
            raise InvalidField(
                f"{ATTENTION_MASK}[{i}]",
                "must be 1 for each token, then 0 for each position of padding; was something else. Pad on the right",
            )
        lengths.append(length)
    return lengths


def _decode_outputs(
    sent: Sequence[SentOutput], model: ServedModel, parameters: Parameters
) -> tuple[tuple[str, ...], Collection[str]]:
    """Return the requested outputs, and the outputs that are sent as bytes."""
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
    if isinstance(value, int) and not isinstance(value, bool):  # Triton's priorities are numbers
        return Priority.INTERACTIVE
    if value not in PRIORITIES:
        raise InvalidField(field_name, f"must be {' or '.join(map(repr, PRIORITIES))}; was {str(value)[:64]!r}")
    return PRIORITIES[value]


def _dimensions(field_name: str, value: Any, model: ServedModel) -> int:
    if OutputKind.MODEL not in model.outputs.kinds:
        raise InvalidField(field_name, f"is for embedding, which model {model.bundle.name} does not have")
    width = model.outputs.kinds[OutputKind.MODEL].width
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= width:
        problem = f"must be from 1 to {width}, the dimensions of embedding; was {str(value)[:64]!r}"
        raise InvalidField(field_name, problem)
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
