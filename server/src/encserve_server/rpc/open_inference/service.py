"""inference.GRPCInferenceService: the six RPCs of the protocol, and four that Triton's tools insist on."""

from functools import partial

from encserve_server import __version__
from encserve_server.calls import Access, Call, Calls
from encserve_server.error_table import Failure
from encserve_server.open_inference.requests import InferNaming
from encserve_server.open_inference.service import EXTENSIONS, PLATFORM, OpenInference
from encserve_server.rpc.codec import parse
from encserve_server.rpc.guard import Handler, RpcGuard, Stream
from encserve_server.rpc.open_inference import codec
from encserve_server.rpc.open_inference.triton import grpc_service_pb2 as pb
from encserve_server.rpc.streams import Answer, answer_one, answer_stream

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
# Each method with its type, as grpc_server_* metrics name it.
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
# Answered for as long as the process answers at all.
_STATUS_METHODS = frozenset({"ServerLive", "ServerReady", "ModelReady", "ServerMetadata"})
_ACCESS = dict.fromkeys(("ServerLive", "ServerReady", "ModelReady"), Access.OPEN) | dict.fromkeys(
    ("ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"), Access.LISTING
)
_MAX_SHOWN_ID_CHARS = 128


class OpenInferenceService:
    """The handlers of inference.GRPCInferenceService."""

    def __init__(self, calls: Calls, protocol: OpenInference, *, max_stream_in_flight: int) -> None:
        """Takes the calls of all protocols, and what this one's front ends have in common."""
        self._calls = calls
        self._protocol = protocol
        self._max_stream_in_flight = max_stream_in_flight

    def handlers(self, guard: RpcGuard) -> dict[str, Handler]:
        """The methods by their names."""
        naming = InferNaming()
        self._request = guard.request_method(SERVICE_NAME, "ModelStreamInfer", naming)
        methods = {
            name: guard.method(
                SERVICE_NAME,
                name,
                kind,
                naming,
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
        """Whether the process answers."""
        del call
        parse(pb.ServerLiveRequest, data)
        return pb.ServerLiveResponse(live=True).SerializeToString()

    async def server_ready(self, data: bytes, call: Call) -> bytes:
        """Whether every model can be relied on; health says the same."""
        del call
        parse(pb.ServerReadyRequest, data)
        return pb.ServerReadyResponse(ready=self._protocol.is_ready()).SerializeToString()

    async def model_ready(self, data: bytes, call: Call) -> bytes:
        """Whether one model can be relied on; one that is not there cannot."""
        del call
        request = parse(pb.ModelReadyRequest, data)
        ready = self._protocol.is_model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready).SerializeToString()

    async def server_metadata(self, data: bytes, call: Call) -> bytes:
        """What server this is."""
        del call
        parse(pb.ServerMetadataRequest, data)
        message = pb.ServerMetadataResponse(name=PLATFORM, version=__version__, extensions=EXTENSIONS)
        return message.SerializeToString()

    async def model_metadata(self, data: bytes, call: Call) -> bytes:
        """The inputs and outputs of a model, and its versions."""
        request = parse(pb.ModelMetadataRequest, data)
        model = call.resolve(0, request.name, request.version)
        return codec.encode_metadata(model, self._protocol.versions(model)).SerializeToString()

    async def model_config(self, data: bytes, call: Call) -> bytes:
        """The same as Triton's tools ask for it."""
        request = parse(pb.ModelConfigRequest, data)
        return codec.encode_config(call.resolve(0, request.name, request.version)).SerializeToString()

    async def model_infer(self, data: bytes, call: Call) -> bytes:
        """One request, one response."""
        return await self._infer(parse(pb.ModelInferRequest, data), call)

    async def model_stream_infer(self, stream: Stream, stream_call: Call) -> None:
        """Many requests, each answered as soon as it is ready; at most `max_stream_in_flight` at a time."""

        async def answer(data: bytes) -> Answer:
            request = parse(pb.ModelInferRequest, data)
            call = self._calls.begin_request(stream_call, self._request, request.id)
            work = partial(self._infer, request, call, in_stream=True)
            return await answer_one(call, len(data), work, partial(_stream_error, request.id[:_MAX_SHOWN_ID_CHARS]))

        limit = self._max_stream_in_flight
        await answer_stream(stream.read, answer, stream.write, max_in_flight=limit, draining=self._calls.draining)

    async def model_statistics(self, data: bytes, call: Call) -> bytes:
        """What the calls of this protocol have taken; of every model where none is named."""
        request = parse(pb.ModelStatisticsRequest, data)
        models = [codec.encode_statistics(*it) for it in self._protocol.statistics(call, request.name, request.version)]
        return pb.ModelStatisticsResponse(model_stats=models).SerializeToString()

    async def repository_index(self, data: bytes, call: Call) -> bytes:
        """What is served; there is one repository, whatever it is called."""
        request = parse(pb.RepositoryIndexRequest, data)
        return codec.encode_index(self._protocol.index(call, only_ready=request.ready)).SerializeToString()

    async def _infer(self, request: pb.ModelInferRequest, call: Call, *, in_stream: bool = False) -> bytes:
        """The bytes of a ModelInferResponse, or of a ModelStreamInferResponse around it."""
        model = call.resolve(0, request.model_name, request.model_version)
        return await self._protocol.infer(
            call, model, codec.read_request(request), partial(codec.encode_reply, in_stream)
        )


def _stream_error(request_id: str, failure: Failure) -> bytes:
    return codec.encode_stream_error(request_id, failure.text)
