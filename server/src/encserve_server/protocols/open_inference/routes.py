"""The Open Inference Protocol over HTTP, as in KServe, Triton and MLServer; see docs/reference/open-inference.md."""

from collections.abc import Iterator
from typing import Any, NotRequired, TypedDict

import msgspec
import numpy as np
import orjson

from encserve_server.calls import Call
from encserve_server.endpoints.host import Host
from encserve_server.endpoints.routes import Check, Dialect, Reply, Request, Route
from encserve_server.errors import FieldPath, InvalidField, ModelNotFound, NotReady, RequestField
from encserve_server.failures import Failure
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.protocols.http_json.decoding import BodyDecoder
from encserve_server.protocols.http_json.replies import JSON_GROWTH, PIECE_NUMBERS, joined
from encserve_server.protocols.open_inference.json_bodies import LENGTH_HEADER, InferBodies, InferBody
from encserve_server.protocols.open_inference.messages import values_of
from encserve_server.protocols.open_inference.replies import OutputTensor, output_tensors
from encserve_server.protocols.open_inference.requests import NAMING, InferCall
from encserve_server.protocols.open_inference.service import OpenInference
from encserve_server.protocols.open_inference.tensors import DTYPES, OUTPUTS, TensorPart
from encserve_server.settings import MIB
from encserve_server.types.requests import DataType

_MODEL, _VERSION = "/v2/models/{name:path}", "/v2/models/{name:path}/versions/{version}"
_MAX_INDEX_BYTES = 1024
_WHOLE = (TensorPart.LENGTHS, TensorPart.INDICES)
_BINARY = "binary_tensor_data"


_EXAMPLE = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["a cat", "a dog"]}]}


class InferError(TypedDict):
    """An error in the protocol's form.

    Attributes:
        error: The tensor or the parameter, the problem, the sent value and the allowed values.
    """

    error: str


class ServerMetadata(TypedDict):
    """The name, version and extensions of the server.

    Attributes:
        extensions: The protocol extensions that the server supports.
    """

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(TypedDict):
    """An input or output tensor of a model.

    Attributes:
        datatype: BYTES for texts, INT64, UINT32 or FP32.
        shape: The size of each dimension; -1 for a variable size.
    """

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    """A model.

    Attributes:
        versions: The served versions of the model.
    """

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(TypedDict):
    """A model that is ready."""

    name: str
    ready: bool


class IndexedModel(TypedDict):
    """A version of a model.

    Attributes:
        state: READY or UNAVAILABLE.
        reason: The reason why the model is not ready; empty if it is ready.
    """

    name: str
    version: str
    state: str
    reason: str


class OutputData(TypedDict):
    """An output tensor.

    Attributes:
        datatype: INT64, UINT32, FP32, FP16 or INT8.
        shape: The size of each dimension.
        data: The numbers, as a flat list in row order; missing if they are sent as bytes after the JSON.
        parameters: binary_data_size is the number of this tensor's bytes after the JSON.
    """

    name: str
    datatype: str
    shape: list[int]
    data: NotRequired[list[float]]
    parameters: NotRequired[dict[str, int]]


class InferReply(TypedDict):
    """The outputs of a model.

    Attributes:
        id: The id of the request, if it has one.
    """

    model_name: str
    model_version: str
    id: NotRequired[str]
    outputs: list[OutputData]


class IndexBody(msgspec.Struct):
    """The fields of a request for the list of models; the body may be empty.

    Attributes:
        ready: Whether only ready models are listed.
    """

    ready: bool | None = None


class OpenInferenceRoutes:
    """The handlers of the protocol's routes."""

    def __init__(self, host: Host) -> None:
        """Keep the methods that gRPC and HTTP share."""
        self._methods = OpenInference(host)
        self._index = BodyDecoder(IndexBody, host.settings)
        self._bodies = InferBodies(host.settings.max_request_mib * MIB, strict=host.settings.strict_http)

    def routes(self) -> list[Route]:
        """Return the routes. Longer paths come first, because a model's name in a path may contain slashes."""
        routes = [
            Route("GET", "/v2", self.server, DIALECT, is_listing=True, reply=ServerMetadata),
            Route("GET", "/v2/health/live", self.live, DIALECT, check=Check.LIVE, reply=dict[str, bool]),
            Route("GET", "/v2/health/ready", self.ready, DIALECT, check=Check.READY, reply=dict[str, bool]),
            Route(
                "POST",
                "/v2/repository/index",
                self.index,
                DIALECT,
                is_listing=True,
                body=IndexBody,
                reply=list[IndexedModel],
                example={"ready": True},
            ),
            Route("GET", "/v2/models/stats", self.statistics, DIALECT, is_listing=True, reply=dict[str, Any]),
        ]
        for model in (_VERSION, _MODEL):
            routes += [
                Route(
                    "POST",
                    f"{model}/infer",
                    self.infer,
                    DIALECT,
                    body=InferBody,
                    reply=InferReply,
                    example=_EXAMPLE,
                ),
                Route("GET", f"{model}/ready", self.model_ready, DIALECT, check=Check.READY, reply=ModelReady),
                Route("GET", f"{model}/config", self.config, DIALECT, is_listing=True, reply=dict[str, Any]),
                Route("GET", f"{model}/stats", self.statistics, DIALECT, is_listing=True, reply=dict[str, Any]),
            ]
        about = [
            Route("GET", path, self.model, DIALECT, is_listing=True, reply=ModelMetadata) for path in (_VERSION, _MODEL)
        ]
        return [*routes, *about]

    async def server(self, request: Request, call: Call) -> Reply:
        """Return the name and version of the server, and its extensions of the Open Inference Protocol."""
        del request, call
        message = self._methods.server_metadata()
        message.extensions.insert(0, _BINARY)
        return _json(values_of(message))

    async def live(self, request: Request, call: Call) -> Reply:
        """Answer `{"live": true}`. The process answers while it runs."""
        del request, call
        return _json({"live": True})

    async def ready(self, request: Request, call: Call) -> Reply:
        """Answer `{"ready": true}` while every model is ready, otherwise 503.

        Raises:
            NotReady: A model is not ready, or the server is stopping.
        """
        del request, call
        if not self._methods.is_ready():
            raise NotReady
        return _json({"ready": True})

    async def model_ready(self, request: Request, call: Call) -> Reply:
        """Answer 200 while the model is ready, otherwise 503.

        Callers need no key, so an error does not list the server's models.

        Raises:
            NotReady: The model is not ready, or the server is stopping.
            ModelNotFound: The model does not exist.
        """
        name, version = _named(request)
        try:
            call.resolve(0, name, version)
        except ModelNotFound:
            raise ModelNotFound(FieldPath(RequestField.MODEL), "no such model or version") from None
        if not self._methods.is_model_ready(name, version):
            raise NotReady("the model is not ready")
        return _json({"name": name, "ready": True})

    async def model(self, request: Request, call: Call) -> Reply:
        """Describe a model: its versions, its inputs and its outputs."""
        message = self._methods.model_metadata(call, *_named(request))
        return _json(values_of(message))

    async def config(self, request: Request, call: Call) -> Reply:
        """Describe a model in the form of Triton's model configuration, for Triton's tools.

        `max_batch_size` is 0, which means that shapes include the batch dimension.
        """
        return _json(values_of(self._methods.model_config(call, *_named(request))))

    async def statistics(self, request: Request, call: Call) -> Reply:
        """Return the number and durations of inference calls for a model. Without a name, list all models."""
        return _json(values_of(self._methods.statistics(call, *_named(request))))

    async def index(self, request: Request, call: Call) -> Reply:
        """List the models with their states; with `{"ready": true}` only ready models.

        Raises:
            InvalidField: The body has other fields.
        """
        if len(request.body) > _MAX_INDEX_BYTES:
            raise InvalidField("", f"the body must be at most {_MAX_INDEX_BYTES} bytes; was {len(request.body)}")
        asked = await self._index.decode(request.body or b"{}", call.hold)
        index = self._methods.index(call, only_ready=bool(asked.ready))
        return _json(values_of(index)["models"])

    async def infer(self, request: Request, call: Call) -> Reply:
        """Compute the outputs of a model for the tensors of an Open Inference request."""
        sent = self._bodies.read(request.body, request.headers, call.hold)
        model = call.resolve(0, *_named(request))
        headers: dict[str, str] = {}

        def build(model: ServedModel, infer: InferCall, reply: EncodeReply) -> bytes:
            return joined(_pieces(model, infer, output_tensors(model, infer, reply), headers))

        body = await self._methods.infer(call, model, sent, build, check=_check_half, growth=_growth)
        return Reply(body, headers)


def _named(request: Request) -> tuple[str, str]:
    """Return the name and version of the model from the path. A missing name or version is an empty string."""
    name, _, version = request.values.get("name", "").partition("@")
    return name, request.values.get("version", version)


def _check_half(infer: InferCall) -> None:
    """Refuse float16 outputs in JSON, because the protocol allows float16 only as bytes."""
    as_json = [it for it in infer.outputs if it not in infer.binary and OUTPUTS[it][1] not in _WHOLE]
    if as_json and infer.parameters.data_type is DataType.FLOAT16:
        raise InvalidField(
            "parameters.datatype",
            f'must be FP32 or INT8 for outputs in JSON, such as {as_json[0]}. Set the parameter "binary_data_output": '
            "true to get outputs as bytes",
        )


def _growth(infer: InferCall) -> float:
    """Return the maximum number of bytes in a reply for each byte of its numbers."""
    return 1.0 if infer.binary and len(infer.binary) == len(infer.outputs) else JSON_GROWTH


def _pieces(
    model: ServedModel, infer: InferCall, tensors: list[OutputTensor], headers: dict[str, str]
) -> Iterator[bytes | memoryview]:
    """Write the JSON of a reply, and then the outputs in bytes. If an output is in bytes, set the headers for bytes."""
    size = 0
    for piece in _json_pieces(model, infer, tensors):
        size += len(piece)
        yield piece
    if infer.binary:
        headers[LENGTH_HEADER], headers["content-type"] = f"{size}", "application/octet-stream"
        for it in tensors:
            yield from it.parts if it.name in infer.binary else ()


def _json_pieces(model: ServedModel, infer: InferCall, tensors: list[OutputTensor]) -> Iterator[bytes]:
    """Write the JSON of a reply."""
    head: dict[str, Any] = {"model_name": model.bundle.name, "model_version": model.bundle.version}
    if infer.request_id:
        head["id"] = infer.request_id
    yield orjson.dumps(head)[:-1] + b',"outputs":['
    for i, it in enumerate(tensors):
        about: dict[str, Any] = {"name": it.name, "datatype": it.datatype, "shape": it.shape}
        if it.name in infer.binary:
            about["parameters"] = {"binary_data_size": it.size}
        yield (b"," if i else b"") + orjson.dumps(about)[:-1]
        if it.name not in infer.binary:
            yield b',"data":['
            yield from _numbers(it)
            yield b"]"
        yield b"}"
    yield b"]}"


def _numbers(tensor: OutputTensor) -> Iterator[bytes]:
    """Write the numbers of a tensor, row by row, with commas between them."""
    comma = b""
    for part in tensor.parts:
        numbers = np.frombuffer(part, DTYPES[tensor.datatype])
        for begin in range(0, len(numbers), PIECE_NUMBERS):
            piece = orjson.dumps(numbers[begin : begin + PIECE_NUMBERS], option=orjson.OPT_SERIALIZE_NUMPY)
            yield comma + piece[1:-1]
            comma = b","


def _json(value: Any) -> Reply:
    return Reply(orjson.dumps(value))


def _refuse(failure: Failure) -> dict[str, Any]:
    """Return an error in the protocol's form."""
    return {"error": failure.text}


DIALECT = Dialect(NAMING, _refuse, InferError)
