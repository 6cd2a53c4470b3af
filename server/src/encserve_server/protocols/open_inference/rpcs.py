"""inference.GRPCInferenceService: the protocol's six RPCs, and four more for Triton's tools."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from encserve_server.calls import Access, Call
from encserve_server.endpoints.host import Host
from encserve_server.endpoints.rpcs import RequestStreamRpc, Service, StreamedRequest, UnaryRpc, parse
from encserve_server.failures import Failure
from encserve_server.protocols.open_inference import messages
from encserve_server.protocols.open_inference.requests import NAMING
from encserve_server.protocols.open_inference.service import OpenInference
from encserve_server.protocols.open_inference.triton import grpc_service_pb2 as pb

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_MAX_SHOWN_ID_CHARS = 128

M = TypeVar("M", bound=Message)


class OpenInferenceService:
    """The handlers of inference.GRPCInferenceService."""

    def __init__(self, host: Host) -> None:
        """Keep the methods that gRPC and HTTP share."""
        self._methods = OpenInference(host)

    def service(self) -> Service:
        """Return the service. An unknown model counts as not ready. RepositoryIndex ignores the repository's name."""
        methods, listing = self._methods, Access.LISTING
        return Service(
            SERVICE_NAME,
            [
                _rpc("ServerLive", pb.ServerLiveRequest, lambda *_: pb.ServerLiveResponse(live=True), Access.OPEN),
                _rpc(
                    "ServerReady",
                    pb.ServerReadyRequest,
                    lambda *_: pb.ServerReadyResponse(ready=methods.is_ready()),
                    Access.OPEN,
                ),
                _rpc(
                    "ModelReady",
                    pb.ModelReadyRequest,
                    lambda it, _: pb.ModelReadyResponse(ready=methods.is_model_ready(it.name, it.version)),
                    Access.OPEN,
                ),
                _rpc(
                    "ServerMetadata",
                    pb.ServerMetadataRequest,
                    lambda *_: methods.server_metadata(),
                    listing,
                    answers_while_draining=True,
                ),
                _rpc(
                    "ModelMetadata",
                    pb.ModelMetadataRequest,
                    lambda it, call: methods.model_metadata(call, it.name, it.version),
                    listing,
                ),
                UnaryRpc("ModelInfer", NAMING, answer=self.model_infer),
                RequestStreamRpc("ModelStreamInfer", NAMING, parse=self.parse_streamed),
                _rpc(
                    "ModelConfig",
                    pb.ModelConfigRequest,
                    lambda it, call: pb.ModelConfigResponse(config=methods.model_config(call, it.name, it.version)),
                    listing,
                ),
                _rpc(
                    "ModelStatistics",
                    pb.ModelStatisticsRequest,
                    lambda it, call: methods.statistics(call, it.name, it.version),
                    listing,
                ),
                _rpc(
                    "RepositoryIndex",
                    pb.RepositoryIndexRequest,
                    lambda it, call: methods.index(call, only_ready=it.ready),
                    listing,
                ),
            ],
        )

    async def model_infer(self, data: bytes, call: Call) -> bytes:
        """Answer one request."""
        return await self._infer(parse(pb.ModelInferRequest, data), call)

    def parse_streamed(self, data: bytes) -> StreamedRequest:
        """Parse one request of ModelStreamInfer."""
        request = parse(pb.ModelInferRequest, data)
        refuse = partial(_stream_error, request.id[:_MAX_SHOWN_ID_CHARS])
        return StreamedRequest(request.id, partial(self._infer, request, in_stream=True), refuse)

    async def _infer(self, request: pb.ModelInferRequest, call: Call, *, in_stream: bool = False) -> bytes:
        """Return the bytes of a ModelInferResponse. For a stream, return a ModelStreamInferResponse instead."""
        model = call.resolve(0, request.model_name, request.model_version)
        sent = messages.read_request(request)
        return await self._methods.infer(call, model, sent, partial(messages.encode_reply, in_stream))


def _rpc(
    name: str,
    kind: type[M],
    handle: Callable[[M, Call], Message],
    access: Access,
    *,
    answers_while_draining: bool = False,
) -> UnaryRpc:
    """Return an RPC whose reply needs no computation."""

    async def answer(data: bytes, call: Call) -> bytes:
        return handle(parse(kind, data), call).SerializeToString()

    return UnaryRpc(name, NAMING, access, answers_while_draining or access is Access.OPEN, answer=answer)


def _stream_error(request_id: str, failure: Failure) -> bytes:
    return messages.encode_stream_error(request_id, failure.text)
