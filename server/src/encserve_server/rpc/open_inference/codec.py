"""The protocol's messages to calls, and replies to its messages."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.errors import FieldPath, InvalidField, Part, ResponseTooLarge
from encserve_server.models.inputs import SentIds, SentInput, SentVectors
from encserve_server.models.reply_size import ReplyShape
from encserve_server.models.served import EncodeCall, EncodeReply, ServedModel
from encserve_server.outputs import MAX_OUTPUTS, OutputSpec
from encserve_server.rpc import wire
from encserve_server.rpc.open_inference.tensors import (
    ATTENTION_MASK,
    DATATYPE_NAMES,
    DATATYPES,
    INPUT_IDS,
    INPUTS_EMBEDS,
    MAX_SHOWN,
    OUTPUTS,
    TEXT,
    SentTensor,
    TensorKind,
    TensorPart,
    datatype_of,
    inputs_of,
    outputs_of,
    read_inputs,
)
from encserve_server.rpc.open_inference.triton import grpc_service_pb2 as pb
from encserve_server.rpc.open_inference.triton import model_config_pb2 as config_pb
from encserve_server.types.arrays import IndexedRows
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import DataType, Detail, OutputKind, Task

PLATFORM = "encserve"
_INFER_RESPONSE = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_RAW_OUTPUT_CONTENTS = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
# What Triton's own callers add: whether an answer that is the last one may be empty. Here there is one, and it is not.
_EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
_CONFIG_TYPES = {
    "INT64": config_pb.TYPE_INT64,
    "UINT32": config_pb.TYPE_UINT32,
    "FP32": config_pb.TYPE_FP32,
    "BYTES": config_pb.TYPE_STRING,
}
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


class InferNaming:
    """What the fields of ModelInferRequest are called, in errors."""

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
class InferCall:
    """A request for a model, decoded as far as it can be without looking at its data.

    Attributes:
        tensors: The inputs by name.
        outputs: The names of the outputs wanted, none twice.
        count: How many sequences there are.
        parameters: What it says besides.
    """

    tensors: dict[str, SentTensor]
    outputs: tuple[str, ...]
    count: int
    parameters: "Parameters"


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a request, every default filled in.

    Attributes:
        task: What texts are to the model: "query" or "document".
        prompt_name: What goes before every text; None for what the task, or the model, has.
        dimensions: To how many of its first numbers `embedding` is cut; 0 for the model's own.
        truncate: Whether an over-long input is cut instead of refused.
        data_type: The type of the numbers returned, from the parameter `datatype`.
    """

    task: Task = Task.NEITHER
    prompt_name: str | None = None
    dimensions: int = 0
    truncate: bool = False
    data_type: DataType = DataType.FLOAT32


def decode_request(request: pb.ModelInferRequest, model: ServedModel) -> InferCall:
    """Decodes all of a request but its data.

    Raises:
        InvalidField: An input, output or parameter is none of the model's, or the inputs do not go together.
    """
    bundle = model.bundle
    tensors = read_inputs(request, bundle)
    main = [name for name in tensors if name != ATTENTION_MASK]
    if len(main) != 1:
        wanted = " or ".join(it.name for it in inputs_of(bundle) if it.name != ATTENTION_MASK)
        raise InvalidField("inputs", f"must hold {wanted}; was {', '.join(tensors) or 'empty'}")
    shape = tensors[main[0]].shape
    if (mask := tensors.get(ATTENTION_MASK)) is not None and (main[0] == TEXT or mask.shape != shape[:2]):
        why = f"goes with {INPUT_IDS} only" if main[0] == TEXT else f"must have the shape of {main[0]}, {shape[:2]}"
        raise InvalidField(f"{ATTENTION_MASK}.shape", f"{why}; was {mask.shape}")
    parameters = _decode_parameters(request.parameters, model)
    return InferCall(tensors, _decode_outputs(request, model, parameters), shape[0], parameters)


def count_tokens(call: InferCall, longest: int) -> int | None:
    """How many tokens a call has if each input has at most `longest`; None where that takes more than counting."""
    if call.tensors.keys() & {ATTENTION_MASK, TEXT}:
        return None
    (tensor,) = call.tensors.values()
    return call.count * min(tensor.shape[1], longest)


def decode_call(call: InferCall, longest: int) -> EncodeCall:
    """Decodes the data of a call whose inputs are not too many, of each at most `longest` tokens.

    Raises:
        InvalidField: The data do not fit their shape, or the mask is not ones followed by zeros.
    """
    parameters = call.parameters
    outputs = []
    for kind in _kinds(call.outputs):
        dimensions = parameters.dimensions if kind is OutputKind.MODEL else 0
        outputs.append(OutputSpec(kind, data_type=parameters.data_type, dimensions=dimensions))
    return EncodeCall(
        inputs=_decode_inputs(call.tensors, longest),
        outputs=tuple(outputs),
        truncate=parameters.truncate,
        prompt_name=parameters.prompt_name,
        task=parameters.task,
        shape=ReplyShape(Detail.NONE, padded=True),
    )


def _kinds(names: Sequence[str]) -> list[OutputKind]:
    """What is computed for these outputs, nothing twice."""
    return list(dict.fromkeys(OUTPUTS[name][0] for name in names))


def _decode_inputs(tensors: dict[str, SentTensor], longest: int) -> list[SentInput]:
    if TEXT in tensors:
        return list(tensors[TEXT].texts())
    (sent,) = (tensor for name, tensor in tensors.items() if name != ATTENTION_MASK)
    lengths = _lengths(tensors.get(ATTENTION_MASK), sent.shape)
    if sent.name == INPUT_IDS:
        ids = sent.numbers("<i8", sent.contents.int64_contents)  # (n, seq)
        return [SentIds(row[: min(n, longest)], n) for row, n in zip(ids, lengths, strict=True)]
    vectors = sent.numbers("<f4", sent.contents.fp32_contents)  # (n, seq, d_model)
    return [SentVectors(rows[: min(n, longest)], n) for rows, n in zip(vectors, lengths, strict=True)]


def _lengths(mask: SentTensor | None, shape: tuple[int, ...]) -> list[int]:
    """How many tokens each sequence has: what its mask says, or all.

    Raises:
        InvalidField: A row is not ones followed by zeros.
    """
    if mask is None:
        return [shape[1]] * shape[0]
    numbers = mask.numbers("<i8", mask.contents.int64_contents)  # (n, seq)
    lengths: npt.NDArray[np.int64] = (numbers != 0).sum(axis=1)
    wrong = (numbers != (np.arange(shape[1]) < lengths[:, None])).any(axis=1)
    if wrong.any():
        raise InvalidField(
            f"{ATTENTION_MASK}[{int(wrong.argmax())}]",
            "must be 1 for each token and 0 for the padding behind them; was something else: pad on the right",
        )
    counted: list[int] = lengths.tolist()
    return counted


def _decode_outputs(request: pb.ModelInferRequest, model: ServedModel, parameters: Parameters) -> tuple[str, ...]:
    known = [name for name, (kind, _) in OUTPUTS.items() if kind in model.outputs.kinds]
    sent = request.outputs[:MAX_OUTPUTS]  # more are refused by their number
    for i, it in enumerate(sent):
        if it.name not in known:
            there = ", ".join(known)
            raise InvalidField(f"outputs[{i}].name", f"model {model.bundle.name} has {there}; was {it.name[:64]!r}")
        if it.parameters:
            names = ", ".join(sorted(islice(it.parameters, MAX_SHOWN)))[:64]
            raise InvalidField(f"outputs[{i}].parameters", f"outputs have none here, nor shared memory; was {names}")
    wanted = tuple(dict.fromkeys(it.name for it in sent)) or tuple(known)
    if parameters.dimensions and "embedding" not in wanted:
        raise InvalidField("parameters.dimensions", "is for embedding, which is not among the outputs")
    return wanted


def _decode_parameters(sent: Any, model: ServedModel) -> Parameters:
    """Decodes the parameters of a request, a map of names to pb.InferParameter."""
    found: dict[str, Any] = {}
    for name, parameter in sent.items():
        if name == _EMPTY_FINAL_RESPONSE:
            continue
        if name not in _PARAMETERS:
            there = ", ".join(_PARAMETERS)
            raise InvalidField("parameters", f"there are {there}; was {name[:64]!r}")
        own_name, decode = _PARAMETERS[name]
        which = parameter.WhichOneof("parameter_choice")
        found[own_name] = decode(f"parameters.{name}", getattr(parameter, which) if which else None, model)
    return Parameters(**found)


def _task(field_name: str, value: Any, model: ServedModel) -> Task:
    known = [name for name, task in _TASKS.items() if task in model.bundle.tasks]
    if value not in known:
        otherwise = f"must be {' or '.join(map(repr, known))}" if known else "is not for this model, which knows none"
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


def _dimensions(field_name: str, value: Any, model: ServedModel) -> int:
    width = model.outputs.kinds[OutputKind.MODEL].width if OutputKind.MODEL in model.outputs.kinds else 0
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= width:
        raise InvalidField(field_name, f"must be from 1 to {width}, the numbers of embedding; was {str(value)[:64]!r}")
    return value


def _data_type(field_name: str, value: Any, model: ServedModel) -> DataType:
    del model
    if value not in DATATYPES:
        raise InvalidField(field_name, f"must be {' or '.join(DATATYPES)}; was {str(value)[:64]!r}")
    return DATATYPES[value]


_PARAMETERS: dict[str, tuple[str, Callable[[str, Any, ServedModel], Any]]] = {
    "task": ("task", _task),
    "prompt_name": ("prompt_name", _text),
    "dimensions": ("dimensions", _dimensions),
    "truncate": ("truncate", _flag),
    "datatype": ("data_type", _data_type),
}


def encode_reply(model: ServedModel, infer: InferCall, request_id: str, in_stream: bool, reply: EncodeReply) -> bytes:
    """The bytes of a ModelInferResponse, or of a ModelStreamInferResponse around it.

    Raises:
        ResponseTooLarge: With its padding it is over the limit.
    """
    bundle = model.bundle
    message = pb.ModelInferResponse(model_name=bundle.name, model_version=bundle.version, id=request_id)
    if in_stream:  # callers that may get several answers to a request look for the last one
        message.parameters["triton_final_response"].bool_param = True
    places = {kind: i for i, kind in enumerate(_kinds(infer.outputs))}
    raw: list[list[wire.Part]] = []
    for name in infer.outputs:
        kind, part = OUTPUTS[name]
        place = places[kind]
        output = reply.plan.outputs[place]
        made = [sequence.outputs[place] for sequence in reply.sequences]
        shape, parts = _tensor(part, made, reply.plan.widths[place])
        message.outputs.add(name=name, datatype=datatype_of(part, output.data_type), shape=shape)
        raw.append(parts)
    limit = model.limits.max_response_bytes
    if (size := sum(len(it) for parts in raw for it in parts)) > limit:
        raise ResponseTooLarge(
            FieldPath(Part.INPUTS),
            f"the reply would take {size} bytes with its padding, over the limit of {limit} (max_response_bytes); "
            "fewer sequences, those of one length together, or the output embedding take less",
        )
    whole: list[wire.Part] = [message.SerializeToString()]
    for parts in raw:
        whole += wire.field(_RAW_OUTPUT_CONTENTS, parts)
    # The one copy of the rows.
    return wire.join(wire.field(_INFER_RESPONSE, whole) if in_stream else whole)


def _tensor(part: TensorPart, made: Sequence[Any], width: int) -> tuple[list[int], list[wire.Part]]:
    """The shape and the bytes of an output, of what was made of each sequence."""
    rows = [it.rows if isinstance(it, IndexedRows) else it for it in made]  # (rows, width) each
    lengths = [len(it) for it in rows]
    if part is TensorPart.LENGTHS:
        return [len(rows)], [np.array(lengths, "<i8").tobytes()]
    if part is TensorPart.VECTOR:
        return [len(rows), width], [it.data.cast("B") for it in rows]
    most = max(lengths)
    shape = [len(rows), most, width] if part is TensorPart.ROWS else [len(rows), most]
    arrays = [it.indices for it in made] if part is TensorPart.INDICES else rows
    row_bytes = arrays[0].itemsize * (width if part is TensorPart.ROWS else 1)
    padding = memoryview(bytes((most - min(lengths)) * row_bytes))
    parts: list[wire.Part] = []
    for array, length in zip(arrays, lengths, strict=True):
        parts += [array.data.cast("B")] if length else []
        parts.append(padding[: (most - length) * row_bytes])
    return shape, parts


def encode_metadata(model: ServedModel, versions: Sequence[str]) -> pb.ModelMetadataResponse:
    """Describes a model and its tensors."""

    def tensors(kinds: Sequence[TensorKind]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
        return [pb.ModelMetadataResponse.TensorMetadata(name=k.name, datatype=k.datatype, shape=k.shape) for k in kinds]

    return pb.ModelMetadataResponse(
        name=model.bundle.name,
        versions=versions,
        platform=PLATFORM,
        inputs=tensors(inputs_of(model.bundle)),
        outputs=tensors(outputs_of(model.outputs)),
    )


def encode_config(model: ServedModel) -> pb.ModelConfigResponse:
    """Describes a model as Triton's tools ask for it; max_batch_size is 0, so the first dimension is part of shapes."""
    bundle = model.bundle
    config = config_pb.ModelConfig(name=bundle.name, platform=PLATFORM, backend=PLATFORM, max_batch_size=0)
    for it in inputs_of(bundle):
        config.input.add(name=it.name, data_type=_CONFIG_TYPES[it.datatype], dims=it.shape, optional=it.optional)
    for it in outputs_of(model.outputs):
        config.output.add(name=it.name, data_type=_CONFIG_TYPES[it.datatype], dims=it.shape)
    for key, value in {"fingerprint": bundle.fingerprint, "space_id": bundle.space_id}.items():
        config.parameters[key].string_value = value
    return pb.ModelConfigResponse(config=config)


@dataclass(slots=True)
class Spent:
    """How often something was done, and how long that took."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """It was done once more."""
        self.count += 1
        self.seconds += seconds

    def encode(self) -> pb.StatisticDuration:
        """As the protocol has it."""
        return pb.StatisticDuration(count=self.count, ns=round(self.seconds * 1e9))


@dataclass(slots=True)
class Statistics:
    """What the calls of this protocol for one model have taken; owned by the event loop.

    Attributes:
        success: Calls that were answered, from their arrival to their answer.
        fail: Calls that were not.
        queue: The longest wait of an answered call's sequences for their batch.
        compute_input: Tokenizing.
        compute_infer: The longest run of a batch with a call's sequences.
        compute_output: Building the answer.
        last_at_ms: When the last was answered, in milliseconds since 1970.
    """

    success: Spent = field(default_factory=Spent)
    fail: Spent = field(default_factory=Spent)
    queue: Spent = field(default_factory=Spent)
    compute_input: Spent = field(default_factory=Spent)
    compute_infer: Spent = field(default_factory=Spent)
    compute_output: Spent = field(default_factory=Spent)
    last_at_ms: int = 0

    def answered(self, reply: EncodeReply, encode_seconds: float, seconds: float) -> None:
        """A call has been answered after so long; building the answer of its reply is a part of that."""
        self.last_at_ms = time.time_ns() // 1_000_000
        self.success.add(seconds)
        self.compute_input.add(reply.tokenize_seconds)
        queue_seconds, compute_seconds = reply.seconds()
        self.queue.add(queue_seconds)
        self.compute_infer.add(compute_seconds)
        self.compute_output.add(encode_seconds)


def encode_statistics(bundle: Bundle, its: Statistics) -> pb.ModelStatistics:
    """What a model's calls have taken; as Triton counts where max_batch_size is 0, a call is one inference."""
    return pb.ModelStatistics(
        name=bundle.name,
        version=bundle.version,
        last_inference=its.last_at_ms,
        inference_count=its.success.count,
        execution_count=its.success.count,
        inference_stats=pb.InferStatistics(
            success=its.success.encode(),
            fail=its.fail.encode(),
            queue=its.queue.encode(),
            compute_input=its.compute_input.encode(),
            compute_infer=its.compute_infer.encode(),
            compute_output=its.compute_output.encode(),
        ),
    )


def encode_stream_error(request_id: str, text: str) -> bytes:
    """One request's error as its answer in a stream."""
    response = pb.ModelInferResponse(id=request_id)
    return pb.ModelStreamInferResponse(error_message=text, infer_response=response).SerializeToString()
