"""The Open Inference Protocol over HTTP, as in KServe, Triton and MLServer; see docs/open-inference.md."""

from collections.abc import Iterator
from typing import Any, NotRequired, TypedDict

import msgspec
import numpy as np
import orjson

from encserve_server import __version__
from encserve_server.calls import Call
from encserve_server.errors import FieldPath, InvalidField, ModelNotFound, NotReady, RequestField
from encserve_server.failures import Failure
from encserve_server.http.app import Dialect, Reply, Request, Route
from encserve_server.http.decoding import BodyDecoder, BodyRules
from encserve_server.http.openai import DIALECT as OPENAI
from encserve_server.http.replies import JSON_GROWTH, joined
from encserve_server.http.tensors import LENGTH_HEADER, InferBodies, InferBody
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.open_inference.replies import OutputTensor, output_tensors
from encserve_server.open_inference.requests import NAMING, InferCall
from encserve_server.open_inference.service import EXTENSIONS, PLATFORM, STATISTICS, OpenInference
from encserve_server.open_inference.tensors import (
    CONFIG_TYPES,
    DTYPES,
    OUTPUTS,
    TensorKind,
    TensorPart,
    inputs_of,
    outputs_of,
)
from encserve_server.settings import MIB, Settings
from encserve_server.types.requests import DataType

_MODEL, _VERSION = "/v2/models/{name:path}", "/v2/models/{name:path}/versions/{version}"
_MAX_INDEX_BYTES = 1024
_WHOLE = (TensorPart.LENGTHS, TensorPart.INDICES)
_PIECE_NUMBERS = 16_384
_BINARY = "binary_tensor_data"


_EXAMPLE = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["a cat", "a dog"]}]}


class InferError(TypedDict):
    """An error in the protocol's form.

    Attributes:
        error: The tensor or the parameter, and the problem, with the numbers.
    """

    error: str


class ServerMetadata(TypedDict):
    """The server.

    Attributes:
        extensions: The protocol's extensions that the server has.
    """

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(TypedDict):
    """An input or output tensor of a model.

    Attributes:
        datatype: BYTES for texts, INT64, UINT32 or FP32.
        shape: Its dimensions; -1 for a variable dimension.
    """

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    """A model.

    Attributes:
        versions: Its served versions.
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
        reason: Why it is not ready; empty if it is.
    """

    name: str
    version: str
    state: str
    reason: str


class OutputData(TypedDict):
    """An output tensor.

    Attributes:
        datatype: INT64, UINT32, FP32, FP16 or INT8.
        shape: Its dimensions.
        data: Its numbers, row by row; missing if they are bytes after the JSON.
        parameters: With binary_data_size, the number of bytes after the JSON that are its numbers.
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

    def __init__(self, protocol: OpenInference, rules: BodyRules, settings: Settings) -> None:
        """Keep the methods that gRPC and HTTP share, and the rules for reading bodies."""
        self._protocol = protocol
        self._index = BodyDecoder(IndexBody, rules)
        self._bodies = InferBodies(settings.max_request_mib * MIB, strict=rules.strict)

    def routes(self) -> list[Route]:
        """Return the routes. A longer path comes before the path that ends with the model's name."""
        routes = [
            Route("GET", "/v2", self.server, DIALECT, is_listing=True, reply=ServerMetadata),
            Route("GET", "/v2/health/live", self.live, DIALECT, is_check=True, reply=dict[str, bool]),
            Route("GET", "/v2/health/ready", self.ready, DIALECT, is_check=True, reply=dict[str, bool]),
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
                Route("GET", f"{model}/ready", self.model_ready, DIALECT, is_check=True, reply=ModelReady),
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
        return _json({"name": PLATFORM, "version": __version__, "extensions": [_BINARY, *EXTENSIONS]})

    async def live(self, request: Request, call: Call) -> Reply:
        """Answer `{"live": true}` while the process runs."""
        del request, call
        return _json({"live": True})

    async def ready(self, request: Request, call: Call) -> Reply:
        """Answer `{"ready": true}` while every model is ready, else 503.

        Raises:
            NotReady: A model is not ready, or the server is stopping.
        """
        del request, call
        if not self._protocol.is_ready():
            raise NotReady
        return _json({"ready": True})

    async def model_ready(self, request: Request, call: Call) -> Reply:
        """Answer 200 while the model is ready, else 503.

        Callers need no key, so the reply does not name models.

        Raises:
            NotReady: The model is not ready, or the server is stopping.
            ModelNotFound: There is no such model.
        """
        name, version = _named(request)
        try:
            call.resolve(0, name, version)
        except ModelNotFound:
            raise ModelNotFound(FieldPath(RequestField.MODEL), "no such model or version") from None
        if not self._protocol.is_model_ready(name, version):
            raise NotReady("the model is not ready")
        return _json({"name": name, "ready": True})

    async def model(self, request: Request, call: Call) -> Reply:
        """Describe a model: its versions, its inputs and its outputs."""
        model = call.resolve(0, *_named(request))
        return _json(
            {
                "name": model.bundle.name,
                "versions": self._protocol.versions(model),
                "platform": PLATFORM,
                "inputs": [_metadata(it) for it in inputs_of(model.bundle)],
                "outputs": [_metadata(it) for it in outputs_of(model.outputs)],
            }
        )

    async def config(self, request: Request, call: Call) -> Reply:
        """Describe a model as a model configuration of Triton, for Triton's tools.

        `max_batch_size` is 0, so shapes include the batch dimension.
        """
        model = call.resolve(0, *_named(request))
        bundle = model.bundle
        parameters = {"fingerprint": bundle.fingerprint, "space_id": bundle.space_id}
        return _json(
            {
                "name": bundle.name,
                "platform": PLATFORM,
                "backend": PLATFORM,
                "max_batch_size": 0,
                "input": [_config(it) | {"optional": it.optional} for it in inputs_of(bundle)],
                "output": [_config(it) for it in outputs_of(model.outputs)],
                "parameters": {name: {"string_value": value} for name, value in parameters.items()},
            }
        )

    async def statistics(self, request: Request, call: Call) -> Reply:
        """Return the number and the durations of a model's inference calls; without a name, of all models."""
        found = self._protocol.statistics(call, *_named(request))
        stats = [
            {
                "name": model.bundle.name,
                "version": model.bundle.version,
                "last_inference": its.last_at_ms,
                "inference_count": its.success.count,
                "execution_count": its.success.count,
                "inference_stats": {name: _duration(getattr(its, name)) for name in STATISTICS},
                "batch_stats": [],
            }
            for model, its in found
        ]
        return _json({"model_stats": stats})

    async def index(self, request: Request, call: Call) -> Reply:
        """List the models with their states; with `{"ready": true}` only ready models.

        Raises:
            InvalidField: The body has other fields.
        """
        if len(request.body) > _MAX_INDEX_BYTES:
            raise InvalidField("", f"the body must be at most {_MAX_INDEX_BYTES} bytes; was {len(request.body)}")
        asked = await self._index.decode(request.body or b"{}", call.hold)
        entries = self._protocol.index(call, only_ready=bool(asked.ready))
        return _json(
            [{"name": it.name, "version": it.version, "state": it.state, "reason": it.reason} for it in entries]
        )

    async def infer(self, request: Request, call: Call) -> Reply:
        """Compute the outputs of a model for the tensors of an Open Inference request."""
        sent = self._bodies.read(request.body, request.headers, call.hold)
        model = call.resolve(0, *_named(request))
        headers: dict[str, str] = {}

        def build(model: ServedModel, infer: InferCall, reply: EncodeReply) -> bytes:
            return joined(_pieces(model, infer, output_tensors(model, infer, reply), headers))

        body = await self._protocol.infer(call, model, sent, build, check=_check_half, growth=_growth)
        return Reply(body, headers)


def _named(request: Request) -> tuple[str, str]:
    """Return the model's name and version in a path; empty without one."""
    name, _, version = request.values.get("name", "").partition("@")
    return name, request.values.get("version", version)


def _check_half(infer: InferCall) -> None:
    """Refuse float16 outputs in JSON, which the protocol does not have."""
    as_json = [it for it in infer.outputs if it not in infer.binary and OUTPUTS[it][1] not in _WHOLE]
    if as_json and infer.parameters.data_type is DataType.FLOAT16:
        raise InvalidField(
            "parameters.datatype",
            f'must be FP32 where outputs are JSON, as {as_json[0]} here; the parameter "binary_data_output": true has '
            "them as bytes",
        )


def _growth(infer: InferCall) -> float:
    """Return the largest number of bytes in a reply for each byte of its numbers."""
    return 1.0 if infer.binary and len(infer.binary) == len(infer.outputs) else JSON_GROWTH


def _pieces(
    model: ServedModel, infer: InferCall, tensors: list[OutputTensor], headers: dict[str, str]
) -> Iterator[bytes | memoryview]:
    """A reply: JSON, and perhaps bytes after the JSON. Then `headers` has the size of the JSON."""
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
        for begin in range(0, len(numbers), _PIECE_NUMBERS):
            piece = orjson.dumps(numbers[begin : begin + _PIECE_NUMBERS], option=orjson.OPT_SERIALIZE_NUMPY)
            yield comma + piece[1:-1]
            comma = b","


def _metadata(kind: TensorKind) -> dict[str, Any]:
    return {"name": kind.name, "datatype": kind.datatype, "shape": kind.shape}


def _config(kind: TensorKind) -> dict[str, Any]:
    return {"name": kind.name, "data_type": CONFIG_TYPES[kind.datatype], "dims": kind.shape}


def _duration(spent: Any) -> dict[str, int]:
    return {"count": spent.count, "ns": spent.ns}


def _json(value: Any) -> Reply:
    return Reply(orjson.dumps(value))


def _refuse(failure: Failure) -> dict[str, Any]:
    """Return an error in the protocol's form."""
    return {"error": failure.text}


DIALECT = Dialect(NAMING, OPENAI.status_of, _refuse, InferError, advises=False)
