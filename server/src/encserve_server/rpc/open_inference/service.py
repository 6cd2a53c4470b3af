"""inference.GRPCInferenceService: the six RPCs of the protocol, and three that Triton's tools insist on."""

from functools import partial
from weakref import WeakKeyDictionary

from encserve_server import __version__
from encserve_server.calls import Call, Calls
from encserve_server.error_table import Failure
from encserve_server.errors import InvalidField, ModelNotFound, NotReady
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.rpc.codec import parse
from encserve_server.rpc.guard import Handler, RpcGuard, Stream
from encserve_server.rpc.open_inference import codec
from encserve_server.rpc.open_inference.codec import InferCall, Statistics
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
}
# Answered for as long as the process answers at all.
_STATUS_METHODS = frozenset({"ServerLive", "ServerReady", "ModelReady", "ServerMetadata"})
# Ids are echoed, and are in traces.
_MAX_ID_CHARS = 1024
_MAX_SHOWN_ID_CHARS = 128
_EXTENSIONS = ("model_configuration", "statistics")


class OpenInferenceService:
    """The handlers of inference.GRPCInferenceService."""

    def __init__(self, calls: Calls, *, max_stream_in_flight: int) -> None:
        """Takes the calls of all protocols."""
        self._calls = calls
        self._catalog = calls.catalog
        self._max_stream_in_flight = max_stream_in_flight
        self._statistics: WeakKeyDictionary[ServedModel, Statistics] = WeakKeyDictionary()

    def handlers(self, guard: RpcGuard) -> dict[str, Handler]:
        """The methods by their names."""
        naming = codec.InferNaming()
        self._request = guard.request_method(SERVICE_NAME, "ModelStreamInfer", naming)
        methods = {
            name: guard.method(SERVICE_NAME, name, kind, naming, answers_while_draining=name in _STATUS_METHODS)
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
        return pb.ServerReadyResponse(ready=self._are_ready(self._catalog.all())).SerializeToString()

    async def model_ready(self, data: bytes, call: Call) -> bytes:
        """Whether one model can be relied on; one that is not there cannot."""
        del call
        request = parse(pb.ModelReadyRequest, data)
        try:
            models = [self._catalog.resolve(request.name, request.version)]
        except (ModelNotFound, NotReady):
            models = []
        return pb.ModelReadyResponse(ready=self._are_ready(models)).SerializeToString()

    def _are_ready(self, models: list[ServedModel]) -> bool:
        draining = self._calls.draining.is_set()
        return bool(models) and not draining and not any(model.not_ready_reason() for model in models)

    async def server_metadata(self, data: bytes, call: Call) -> bytes:
        """What server this is."""
        del call
        parse(pb.ServerMetadataRequest, data)
        message = pb.ServerMetadataResponse(name=codec.PLATFORM, version=__version__, extensions=_EXTENSIONS)
        return message.SerializeToString()

    async def model_metadata(self, data: bytes, call: Call) -> bytes:
        """The inputs and outputs of a model, and its versions."""
        request = parse(pb.ModelMetadataRequest, data)
        model = call.resolve(0, request.name, request.version)
        versions = [it.bundle.version for it in self._catalog.all() if it.bundle.name == model.bundle.name]
        return codec.encode_metadata(model, versions).SerializeToString()

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
        del call
        request = parse(pb.ModelStatisticsRequest, data)
        found = [self._catalog.resolve(request.name, request.version)] if request.name else self._catalog.all()
        models = [codec.encode_statistics(it.bundle, self._statistics.get(it, Statistics())) for it in found]
        return pb.ModelStatisticsResponse(model_stats=models).SerializeToString()

    async def _infer(self, request: pb.ModelInferRequest, call: Call, *, in_stream: bool = False) -> bytes:
        """The bytes of a ModelInferResponse, or of a ModelStreamInferResponse around it."""
        clock = self._calls.clock
        began = clock.now()
        model = call.resolve(0, request.model_name, request.model_version)
        statistics = self._statistics.setdefault(model, Statistics())
        built: list[tuple[EncodeReply, float]] = []

        def build(infer: InferCall, request_id: str, reply: EncodeReply) -> bytes:
            began = clock.now()
            data = codec.encode_reply(model, infer, request_id, in_stream, reply)
            built.append((reply, clock.now() - began))  # perhaps in a thread, which counts nothing
            return data

        try:
            if len(request.id) > _MAX_ID_CHARS:
                raise InvalidField("id", f"must be at most {_MAX_ID_CHARS} characters; was {len(request.id)}")
            infer = codec.decode_request(request, model)
            if call.span is not None:
                call.span.about(*model.key, infer.count)
            longest = model.bundle.max_sequence_tokens
            model.check_counts(infer.count, codec.count_tokens(infer, longest), len(request.outputs))
            decoded = codec.decode_call(infer, longest)
            response = await call.encode(model, decoded, partial(build, infer, request.id))
        except BaseException:
            statistics.fail.add(clock.now() - began)
            raise
        statistics.answered(*built[0], clock.now() - began)
        return response


def _stream_error(request_id: str, failure: Failure) -> bytes:
    return codec.encode_stream_error(request_id, failure.text)
