"""Decodes messages of the Open Inference Protocol to requests, and encodes replies."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.errors import InvalidField
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.open_inference.replies import output_tensors
from encserve_server.open_inference.requests import InferCall, SentOutput, SentRequest
from encserve_server.open_inference.service import PLATFORM, STATISTICS, IndexEntry, Statistics
from encserve_server.open_inference.tensors import (
    CHECKED_PARAMETERS,
    CONFIG_TYPES,
    MAX_SHOWN,
    SentTensor,
    TensorKind,
    inputs_of,
    outputs_of,
)
from encserve_server.outputs import MAX_OUTPUTS
from encserve_server.rpc import wire
from encserve_server.rpc.open_inference.triton import grpc_service_pb2 as pb
from encserve_server.rpc.open_inference.triton import model_config_pb2 as config_pb

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
        """Take the tensor. For an unknown datatype the contents are empty."""
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
    """Return the bytes of a ModelInferResponse. In a stream, a ModelStreamInferResponse wraps it.

    Raises:
        ResponseTooLarge: The reply with padding is larger than the limit.
    """
    bundle = model.bundle
    message = pb.ModelInferResponse(model_name=bundle.name, model_version=bundle.version, id=infer.request_id)
    if in_stream:  # tells the caller that no other reply follows
        message.parameters["triton_final_response"].bool_param = True
    tensors = output_tensors(model, infer, reply)
    for it in tensors:
        message.outputs.add(name=it.name, datatype=it.datatype, shape=it.shape)
    whole: list[wire.Buffer] = [message.SerializeToString()]
    for it in tensors:
        whole += wire.field(_RAW_OUTPUT_CONTENTS, it.parts)
    # The only copy of the rows.
    return wire.join(wire.field(_INFER_RESPONSE, whole) if in_stream else whole)


def encode_metadata(model: ServedModel, versions: Sequence[str]) -> pb.ModelMetadataResponse:
    """Describe a model and its tensors."""

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
    """Describe a model for Triton's tools. With max_batch_size 0, shapes include the batch dimension."""
    bundle = model.bundle
    config = config_pb.ModelConfig(name=bundle.name, platform=PLATFORM, backend=PLATFORM, max_batch_size=0)
    for it in inputs_of(bundle):
        config.input.add(name=it.name, data_type=CONFIG_TYPES[it.datatype], dims=it.shape, optional=it.optional)
    for it in outputs_of(model.outputs):
        config.output.add(name=it.name, data_type=CONFIG_TYPES[it.datatype], dims=it.shape)
    for key, value in {"fingerprint": bundle.fingerprint, "space_id": bundle.space_id}.items():
        config.parameters[key].string_value = value
    return pb.ModelConfigResponse(config=config)


def encode_index(entries: Iterable[IndexEntry]) -> pb.RepositoryIndexResponse:
    """Return the models in the repository."""
    models = [
        pb.RepositoryIndexResponse.ModelIndex(name=it.name, version=it.version, state=it.state, reason=it.reason)
        for it in entries
    ]
    return pb.RepositoryIndexResponse(models=models)


def encode_statistics(model: ServedModel, its: Statistics) -> pb.ModelStatistics:
    """Return the counts and durations of calls. Triton counts a call as one inference if max_batch_size is 0."""
    spent = {name: getattr(its, name) for name in STATISTICS}
    return pb.ModelStatistics(
        name=model.bundle.name,
        version=model.bundle.version,
        last_inference=its.last_at_ms,
        inference_count=its.success.count,
        execution_count=its.success.count,
        inference_stats=pb.InferStatistics(
            **{name: pb.StatisticDuration(count=it.count, ns=it.ns) for name, it in spent.items()}
        ),
    )


def encode_stream_error(request_id: str, text: str) -> bytes:
    """Return the bytes of the reply that reports the error of one request in a stream."""
    response = pb.ModelInferResponse(id=request_id)
    return pb.ModelStreamInferResponse(error_message=text, infer_response=response).SerializeToString()
