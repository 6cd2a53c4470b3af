"""Converts Open Inference messages: to requests, from replies, and to JSON."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from encserve_server.errors import InvalidField
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.outputs import MAX_OUTPUTS
from encserve_server.protocols import wire
from encserve_server.protocols.open_inference.replies import output_tensors
from encserve_server.protocols.open_inference.requests import InferCall, SentOutput, SentRequest
from encserve_server.protocols.open_inference.tensors import CHECKED_PARAMETERS, MAX_SHOWN, SentTensor
from encserve_server.protocols.open_inference.triton import grpc_service_pb2 as pb

_INFER_RESPONSE = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_RAW_OUTPUT_CONTENTS = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_CONTENTS = {
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}


class Contents:
    """The typed contents of a tensor; see `TypedData`."""

    def __init__(self, tensor: pb.ModelInferRequest.InferInputTensor) -> None:
        """Take the tensor. If the datatype is unknown, the contents are empty."""
        field = _CONTENTS.get(tensor.datatype)
        self._values: Sequence[Any] = getattr(tensor.contents, field) if field else ()

    def __len__(self) -> int:
        return len(self._values)

    def numbers(self, dtype: str) -> npt.NDArray[Any]:
        """Return the values as an array of shape (elements,)."""
        return np.array(self._values, dtype)

    def texts(self) -> Sequence[bytes]:
        """Return the values as bytes."""
        return self._values


def read_request(request: pb.ModelInferRequest) -> SentRequest:
    """Convert a message to the request that gRPC and HTTP share, without a copy of the data.

    Raises:
        InvalidField: Some inputs have raw data and some do not.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidField(
            "raw_input_contents",
            f"must have a value for each of the {len(request.inputs)} inputs, or none; has {len(raw)}",
        )
    return SentRequest(
        _inputs(request.inputs, raw),
        [SentOutput(it.name, _parameters(it.parameters)) for it in request.outputs[:MAX_OUTPUTS]],
        len(request.outputs),
        ((name, _value(parameter)) for name, parameter in request.parameters.items()),
        request.id,
    )


def _inputs(sent: Iterable[pb.ModelInferRequest.InferInputTensor], raw: Sequence[bytes]) -> Iterator[SentTensor]:
    for i, it in enumerate(sent):
        if raw and it.HasField("contents") and it.contents.ByteSize():  # MLServer's client also sends empty contents
            raise InvalidField(f"inputs[{i}].contents", "must be empty if raw_input_contents has the data")
        data = raw[i] if raw else Contents(it)
        yield SentTensor(it.name, it.datatype, tuple(it.shape[:MAX_SHOWN]), data, _parameters(it.parameters))


def _parameters(sent: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Return the parameters of a tensor that the server uses."""
    return {name: _value(sent[name]) for name in CHECKED_PARAMETERS if name in sent}


def _value(parameter: pb.InferParameter) -> Any:
    which = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, which) if which else None


def encode_reply(in_stream: bool, model: ServedModel, infer: InferCall, reply: EncodeReply) -> bytes:
    """Return the bytes of a ModelInferResponse. For a stream, return a ModelStreamInferResponse instead.

    Raises:
        ResponseTooLarge: The reply with padding is larger than the limit.
    """
    bundle = model.bundle
    message = pb.ModelInferResponse(model_name=bundle.name, model_version=bundle.version, id=infer.request_id)
    if in_stream:  # this parameter tells the caller that no other reply follows
        message.parameters["triton_final_response"].bool_param = True
    tensors = output_tensors(model, infer, reply)
    for it in tensors:
        message.outputs.add(name=it.name, datatype=it.datatype, shape=it.shape)
    whole: list[wire.Buffer] = [message.SerializeToString()]
    for it in tensors:
        whole += wire.field(_RAW_OUTPUT_CONTENTS, it.parts)
    # The rows are copied only here.
    return wire.join(wire.field(_INFER_RESPONSE, whole) if in_stream else whole)


def encode_stream_error(request_id: str, text: str) -> bytes:
    """Return the bytes of the reply that reports the error of one request in a stream."""
    response = pb.ModelInferResponse(id=request_id)
    return pb.ModelStreamInferResponse(error_message=text, infer_response=response).SerializeToString()


def values_of(message: Message) -> dict[str, Any]:
    """Return a message as values for JSON, with all fields and with the names of enum values, as Triton writes JSON.

    A message field that is not set is left out.
    """
    values = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if not isinstance(value, Message) or message.HasField(field.name):
            values[field.name] = _value_of(field, value)
    return values


def _value_of(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return values_of(value)
    if isinstance(value, Mapping):
        return {str(key): _value_of(field, it) for key, it in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_value_of(field, it) for it in value]
    return value if field.enum_type is None else field.enum_type.values_by_number[value].name
