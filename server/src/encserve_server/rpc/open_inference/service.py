"""inference.GRPCInferenceService: the six RPCs of the protocol, and four that Triton's tools need."""

from functools import partial

from encserve_server import __version__
from encserve_server.calls import Access, Call, Calls
from encserve_server.failures import Failure
from encserve_server.open_inference.requests import NAMING
from encserve_server.open_inference.service import EXTENSIONS, PLATFORM, OpenInference
from encserve_server.rpc.codec import parse
from encserve_server.rpc.guard import Handler, RpcGuard, Stream
from encserve_server.rpc.open_inference import codec
from encserve_server.rpc.open_inference.triton import grpc_service_pb2 as pb
from encserve_server.rpc.streams import Answer, answer_one, answer_stream

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
# The type of each method, as in the grpc_server_* metrics.
METHODS = {
    "ServerLive": "unary",
    "ServerReady": "unary",
    "ModelReady": "unary",
    "ServerMetadata": "unary",
    "ModelMetadata": "unary",
    "ModelInfer": "unary",
    "ModelStreamInfer": "bidi_stream",
    "ModelConfig": "unary",
    "ModelStatistics": "unary",
    "RepositoryIndex": "unary",
}
# These methods are answered until the server has stopped.
_STATUS_METHODS = frozenset({"ServerLive", "ServerReady", "ModelReady", "ServerMetadata"})
_ACCESS = dict.fromkeys(("ServerLive", "ServerReady", "ModelReady"), Access.OPEN) | dict.fromkeys(
    ("ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"), Access.LISTING
)
_MAX_SHOWN_ID_CHARS = 128


class OpenInferenceService:
    """The handlers of inference.GRPCInferenceService."""

    def __init__(self, calls: Calls, protocol: OpenInference, *, max_stream_in_flight: int) -> None:
        """Keep the calls of all protocols, and the part of the protocol that gRPC and HTTP share."""
        self._calls = calls
        self._protocol = protocol
        self._max_stream_in_flight = max_stream_in_flight

    def handlers(self, guard: RpcGuard) -> dict[str, Handler]:
        """Return the handlers by method name."""
        self._request = guard.request_method(SERVICE_NAME, "ModelStreamInfer", NAMING)
        methods = {
            name: guard.method(
                SERVICE_NAME,
                name,
                kind,
                NAMING,
                answers_while_draining=name in _STATUS_METHODS,
                access=_ACCESS.get(name, Access.CALLERS),
            )
            for name, kind in METHODS.items()
        }
        unary = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
            "ModelConfig": self.model_config,
            "ModelStatistics": self.model_statistics,
            "RepositoryIndex": self.repository_index,
        }
        handlers = {name: guard.unary(methods[name], answer) for name, answer in unary.items()}
        handlers["ModelStreamInfer"] = guard.bidi_stream(methods["ModelStreamInfer"], self.model_stream_infer)
        return handlers

    async def server_live(self, data: bytes, call: Call) -> bytes:
        """Say that the server is alive."""
        del call
        parse(pb.ServerLiveRequest, data)
        return pb.ServerLiveResponse(live=True).SerializeToString()

    async def server_ready(self, data: bytes, call: Call) -> bytes:
        """Return whether all models are ready, as the health service does."""
        del call
        parse(pb.ServerReadyRequest, data)
        return pb.ServerReadyResponse(ready=self._protocol.is_ready()).SerializeToString()

    async def model_ready(self, data: bytes, call: Call) -> bytes:
        """Return whether one model is ready. An unknown model is not ready."""
        del call
        request = parse(pb.ModelReadyRequest, data)
        ready = self._protocol.is_model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready).SerializeToString()

    async def server_metadata(self, data: bytes, call: Call) -> bytes:
        """Return the name, version and extensions of this server."""
        del call
        parse(pb.ServerMetadataRequest, data)
        message = pb.ServerMetadataResponse(name=PLATFORM, version=__version__, extensions=EXTENSIONS)
        return message.SerializeToString()

    async def model_metadata(self, data: bytes, call: Call) -> bytes:
        """Return the inputs, outputs and versions of a model."""
        request = parse(pb.ModelMetadataRequest, data)
        model = call.resolve(0, request.name, request.version)
        return codec.encode_metadata(model, self._protocol.versions(model)).SerializeToString()

    async def model_config(self, data: bytes, call: Call) -> bytes:
        """Return the inputs and outputs of a model in the format of Triton's tools."""
        request = parse(pb.ModelConfigRequest, data)
        return codec.encode_config(call.resolve(0, request.name, request.version)).SerializeToString()

    async def model_infer(self, data: bytes, call: Call) -> bytes:
        """Answer one request."""
        return await self._infer(parse(pb.ModelInferRequest, data), call)

    async def model_stream_infer(self, stream: Stream, stream_call: Call) -> None:
        """Answer many requests, each as soon as its reply is ready; at most `max_stream_in_flight` at a time."""

        async def answer(data: bytes) -> Answer:
            request = parse(pb.ModelInferRequest, data)
            call = self._calls.begin_request(stream_call, self._request, request.id)
            work = partial(self._infer, request, call, in_stream=True)
            return await answer_one(call, len(data), work, partial(_stream_error, request.id[:_MAX_SHOWN_ID_CHARS]))

        limit = self._max_stream_in_flight
        await answer_stream(stream.read, answer, stream.write, max_in_flight=limit, draining=self._calls.draining)

    async def model_statistics(self, data: bytes, call: Call) -> bytes:
        """Return counts and durations of the calls of this protocol, for one model or for all models."""
        request = parse(pb.ModelStatisticsRequest, data)
        models = [codec.encode_statistics(*it) for it in self._protocol.statistics(call, request.name, request.version)]
        return pb.ModelStatisticsResponse(model_stats=models).SerializeToString()

    async def repository_index(self, data: bytes, call: Call) -> bytes:
        """Return the served models. There is one repository, so its name in the request is ignored."""
        request = parse(pb.RepositoryIndexRequest, data)
        return codec.encode_index(self._protocol.index(call, only_ready=request.ready)).SerializeToString()

    async def _infer(self, request: pb.ModelInferRequest, call: Call, *, in_stream: bool = False) -> bytes:
        """Return the bytes of a ModelInferResponse. In a stream, a ModelStreamInferResponse wraps it."""
        model = call.resolve(0, request.model_name, request.model_version)
        return await self._protocol.infer(
            call, model, codec.read_request(request), partial(codec.encode_reply, in_stream)
        )


def _stream_error(request_id: str, failure: Failure) -> bytes:
    return codec.encode_stream_error(request_id, failure.text)
