"""inference.GRPCInferenceService: the six RPCs of the protocol, and three that Triton's tools insist on."""

from collections.abc import AsyncIterator
from functools import partial
from weakref import WeakKeyDictionary

from encserve_server import __version__
from encserve_server.errors import ModelNotFound, NotReady, RequestError
from encserve_server.models.calls import Calls
from encserve_server.models.catalog import Catalog
from encserve_server.models.served import EncodeCall, EncodeReply, ServedModel
from encserve_server.rpc.codec import parse
from encserve_server.rpc.guard import Context, Handler, RpcGuard, deadline_of
from encserve_server.rpc.open_inference import codec
from encserve_server.rpc.open_inference.codec import Statistics
from encserve_server.rpc.open_inference.triton import grpc_service_pb2 as pb
from encserve_server.rpc.status import Failure
from encserve_server.rpc.streams import answer_one, answer_stream
from encserve_server.system.clock import Clock
from encserve_server.telemetry import spans
from encserve_server.telemetry.metrics import Metrics

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
_EXTENSIONS = ("model_configuration", "statistics")


class OpenInferenceService:
    """The handlers of inference.GRPCInferenceService."""

    def __init__(
        self, calls: Calls, catalog: Catalog, metrics: Metrics, *, clock: Clock, max_stream_in_flight: int
    ) -> None:
        """Takes the calls of all protocols, and the models."""
        self._calls = calls
        self._catalog = catalog
        self._metrics = metrics
        self._clock = clock
        self._max_stream_in_flight = max_stream_in_flight
        self._statistics: WeakKeyDictionary[ServedModel, Statistics] = WeakKeyDictionary()

    def handlers(self, guard: RpcGuard, tracer: spans.Tracer | None = None) -> dict[str, Handler]:
        """The methods by their names."""
        methods: dict[str, Handler] = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
            "ModelStreamInfer": self.model_stream_infer,
            "ModelConfig": self.model_config,
            "ModelStatistics": self.model_statistics,
        }
        return {name: guard.wrap(name, method, tracer) for name, method in methods.items()}

    async def server_live(self, data: bytes, context: Context) -> bytes:
        """Whether the process answers."""
        del context
        parse(pb.ServerLiveRequest, data)
        return pb.ServerLiveResponse(live=True).SerializeToString()

    async def server_ready(self, data: bytes, context: Context) -> bytes:
        """Whether every model can be relied on; health says the same."""
        del context
        parse(pb.ServerReadyRequest, data)
        return pb.ServerReadyResponse(ready=self._are_ready(self._catalog.all())).SerializeToString()

    async def model_ready(self, data: bytes, context: Context) -> bytes:
        """Whether one model can be relied on; one that is not there cannot."""
        del context
        request = parse(pb.ModelReadyRequest, data)
        try:
            models = [self._catalog.resolve(request.name, request.version)]
        except (ModelNotFound, NotReady):
            models = []
        return pb.ModelReadyResponse(ready=self._are_ready(models)).SerializeToString()

    def _are_ready(self, models: list[ServedModel]) -> bool:
        draining = self._calls.draining.is_set()
        return bool(models) and not draining and not any(model.not_ready_reason() for model in models)

    async def server_metadata(self, data: bytes, context: Context) -> bytes:
        """What server this is."""
        del context
        parse(pb.ServerMetadataRequest, data)
        message = pb.ServerMetadataResponse(name=codec.PLATFORM, version=__version__, extensions=_EXTENSIONS)
        return message.SerializeToString()

    async def model_metadata(self, data: bytes, context: Context) -> bytes:
        """The inputs and outputs of a model, and its versions."""
        del context
        self._calls.refuse_while_draining()
        request = parse(pb.ModelMetadataRequest, data)
        bundle = self._catalog.resolve(request.name, request.version).bundle
        versions = [it.bundle.version for it in self._catalog.all() if it.bundle.name == bundle.name]
        return codec.encode_metadata(bundle, versions).SerializeToString()

    async def model_config(self, data: bytes, context: Context) -> bytes:
        """The same as Triton's tools ask for it."""
        del context
        self._calls.refuse_while_draining()
        request = parse(pb.ModelConfigRequest, data)
        return codec.encode_config(self._catalog.resolve(request.name, request.version).bundle).SerializeToString()

    async def model_infer(self, data: bytes, context: Context) -> bytes:
        """One request, one response."""
        self._calls.refuse_while_draining()
        return await self._infer(parse(pb.ModelInferRequest, data), deadline_of(context, self._clock))

    async def model_stream_infer(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Many requests, each answered as soon as it is ready; at most `max_stream_in_flight` at a time."""
        self._calls.refuse_while_draining()
        deadline = deadline_of(context, self._clock)

        async def answer(data: bytes) -> bytes:
            request = parse(pb.ModelInferRequest, data)
            answering = self._infer(request, deadline, in_stream=True)
            return await answer_one(self._metrics, request.id, answering, partial(_stream_error, request.id))

        limit = self._max_stream_in_flight
        await answer_stream(requests, answer, context.write, max_in_flight=limit, draining=self._calls.draining)

    async def model_statistics(self, data: bytes, context: Context) -> bytes:
        """What the calls of this protocol have taken; of every model where none is named."""
        del context
        self._calls.refuse_while_draining()
        request = parse(pb.ModelStatisticsRequest, data)
        found = [self._catalog.resolve(request.name, request.version)] if request.name else self._catalog.all()
        models = [codec.encode_statistics(it.bundle, self._statistics.get(it, Statistics())) for it in found]
        return pb.ModelStatisticsResponse(model_stats=models).SerializeToString()

    async def _infer(self, request: pb.ModelInferRequest, deadline: float, *, in_stream: bool = False) -> bytes:
        """The bytes of a ModelInferResponse, or of a ModelStreamInferResponse around it."""
        began = self._clock.now()
        model = self._catalog.resolve(request.model_name, request.model_version)
        statistics = self._statistics.setdefault(model, Statistics())
        built: list[tuple[EncodeReply, float]] = []

        def build(call: EncodeCall, reply: EncodeReply) -> bytes:
            began = self._clock.now()
            data = codec.encode_reply(model, infer, call, reply, request.id, in_stream=in_stream)
            built.append((reply, self._clock.now() - began))  # perhaps in a thread, which counts nothing
            return data

        try:
            infer = codec.decode_request(request, model.bundle)
            if (span := spans.current()) is not None:
                span.about(*model.key, infer.count)
            response = await self._calls.encode(
                model,
                infer.count,
                deadline,
                count_tokens=lambda: codec.count_tokens(infer, model.bundle.max_sequence_tokens),
                decode=lambda: codec.decode_call(infer, model.bundle),
                build=build,
            )
        except BaseException as error:
            statistics.fail.add(self._clock.now() - began)
            if isinstance(error, RequestError):
                raise codec.in_our_terms(error) from None
            raise
        statistics.answered(*built[0], self._clock.now() - began)
        return response


def _stream_error(request_id: str, failure: Failure) -> bytes:
    return codec.encode_stream_error(request_id, failure.text)
