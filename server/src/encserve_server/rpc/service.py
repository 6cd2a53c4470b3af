"""The RPCs: decode → submit → encode. Messages come and go as bytes, so that parsing them is ours to guard."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import Executor
from functools import partial

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import DeadlineExpired, InvalidField
from encserve_server.models.calls import Calls
from encserve_server.models.catalog import Catalog
from encserve_server.models.served import InspectCall, InspectReply, ServedModel
from encserve_server.rpc import codec
from encserve_server.rpc.guard import Context, Handler, RpcGuard, deadline_of
from encserve_server.rpc.status import Failure
from encserve_server.rpc.streams import answer_one, answer_stream
from encserve_server.system.clock import Clock
from encserve_server.telemetry import spans
from encserve_server.telemetry.metrics import Metrics

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["EncoderService"].full_name
# Each method with its type, as grpc_server_* metrics name it.
METHODS = {
    "Encode": "unary",
    "EncodeStream": "bidi_stream",
    "Inspect": "server_stream",
    "Tokenize": "unary",
    "ListModels": "unary",
    "GetModel": "unary",
}
_MAX_REQUEST_ID_BYTES = 128
# How long a caller of Inspect may read nothing, and how long it may take to read everything.
_UNREAD_SECONDS = 30.0
_ANSWER_SECONDS = 300.0


class EncoderService:
    """The handlers of encserve.v1.EncoderService."""

    def __init__(
        self,
        calls: Calls,
        catalog: Catalog,
        metrics: Metrics,
        *,
        clock: Clock,
        encode_pool: Executor,
        max_stream_in_flight: int,
    ) -> None:
        """Takes the calls of all protocols, the models, and the threads in which inspections are written."""
        self._calls = calls
        self._catalog = catalog
        self._metrics = metrics
        self._clock = clock
        self._encode_pool = encode_pool
        self._max_stream_in_flight = max_stream_in_flight

    def handlers(self, guard: RpcGuard, tracer: spans.Tracer | None = None) -> dict[str, Handler]:
        """The methods by their names."""
        methods: dict[str, Handler] = {
            "Encode": self.encode,
            "EncodeStream": self.encode_stream,
            "Inspect": self.inspect,
            "Tokenize": self.tokenize,
            "ListModels": self.list_models,
            "GetModel": self.get_model,
        }
        return {name: guard.wrap(name, method, tracer) for name, method in methods.items()}

    async def encode(self, data: bytes, context: Context) -> bytes:
        """One request, one response."""
        self._calls.refuse_while_draining()
        request = codec.parse(pb.EncodeRequest, data)
        return await self._encode(request, deadline_of(context, self._clock))

    async def encode_stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Many requests, each answered as soon as it is ready; at most `max_stream_in_flight` at a time."""
        self._calls.refuse_while_draining()
        deadline = deadline_of(context, self._clock)

        async def answer(data: bytes) -> bytes:
            request = codec.parse(pb.EncodeStreamRequest, data)
            request_id = request.request_id
            answering = self._encode_one(request, deadline)
            return await answer_one(self._metrics, request_id, answering, partial(_stream_error, request_id))

        limit = self._max_stream_in_flight
        await answer_stream(requests, answer, context.write, max_in_flight=limit, draining=self._calls.draining)

    async def inspect(self, data: bytes, context: Context) -> None:
        """What happens inside a model: the header, then the numbers in chunks."""
        self._calls.refuse_while_draining()
        request = codec.parse(pb.InspectRequest, data)
        model = self._resolve(request, 1)
        call = codec.decode_inspect_call(request, model)
        span = spans.current()
        with model.in_use():
            async with model.inspect(call) as reply:
                began = self._clock.now()
                try:
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        await self._send(model, call, reply, context)
                except TimeoutError:
                    raise DeadlineExpired(f"the answer was not read within {_ANSWER_SECONDS:.0f} s") from None
                finally:
                    if span is not None:
                        span.stage("send", began, self._clock.now())

    async def _send(self, model: ServedModel, call: InspectCall, reply: InspectReply, context: Context) -> None:
        """Sends an inspection's answer, each chunk when the one before has left."""
        # By itself, since grpcio cannot answer with an error while it is under way with the first message.
        await _soon(context.send_initial_metadata(()))
        await _soon(context.write(codec.encode_inspect_header(model, call, reply).SerializeToString()))
        chunks = codec.encode_chunks(reply.inspection.tensors, call.data_type)
        loop = asyncio.get_running_loop()
        while chunk := await loop.run_in_executor(self._encode_pool, _next_chunk, chunks):
            await _soon(context.write(chunk))

    async def tokenize(self, data: bytes, context: Context) -> bytes:
        """The tokens of texts, with no model run; so it is answered whether or not the engine is ready."""
        del context
        self._calls.refuse_while_draining()
        request = codec.parse(pb.TokenizeRequest, data)
        model = self._calls.resolve(len(request.texts), request.model, request.model_version)
        call = codec.decode_tokenize_call(request, model)
        return await self._calls.tokenize(model, call, partial(codec.encode_tokens, model, call))

    async def list_models(self, data: bytes, context: Context) -> bytes:
        """Every model that is loaded."""
        del context
        self._calls.refuse_while_draining()
        codec.parse(pb.ListModelsRequest, data)
        models = [self._info(model) for model in self._catalog.all()]
        return pb.ListModelsResponse(models=models).SerializeToString()

    async def get_model(self, data: bytes, context: Context) -> bytes:
        """One model."""
        del context
        self._calls.refuse_while_draining()
        request = codec.parse(pb.GetModelRequest, data)
        model = self._catalog.resolve(request.model, request.model_version)
        return pb.GetModelResponse(model=self._info(model)).SerializeToString()

    def _info(self, model: ServedModel) -> pb.ModelInfo:
        return codec.encode_model_info(model, is_default=self._catalog.is_default(model))

    def _resolve(self, request: pb.EncodeRequest | pb.InspectRequest, sequences: int) -> ServedModel:
        expected = request.expected_fingerprint, request.expected_space_id
        return self._calls.resolve(sequences, request.model, request.model_version, *expected)

    async def _encode(self, request: pb.EncodeRequest, deadline: float, stream_request_id: str | None = None) -> bytes:
        """The bytes of an EncodeResponse, or with a stream's request id of an EncodeStreamResponse around it."""
        count = len(request.inputs)
        model = self._resolve(request, count)
        return await self._calls.encode(
            model,
            count,
            deadline,
            count_tokens=lambda: codec.count_tokens(request, model.bundle.max_sequence_tokens),
            decode=lambda: codec.decode_call(request, model),
            build=lambda call, reply: codec.encode_reply(model, call, reply, stream_request_id),
        )

    async def _encode_one(self, request: pb.EncodeStreamRequest, deadline: float) -> bytes:
        """The bytes of one stream request's answer."""
        size = len(request.request_id.encode())
        if not 1 <= size <= _MAX_REQUEST_ID_BYTES:
            raise InvalidField("request_id", f"must be 1 to {_MAX_REQUEST_ID_BYTES} bytes; was {size}")
        return await self._encode(request.request, deadline, request.request_id)


def _stream_error(request_id: str, failure: Failure) -> bytes:
    return codec.encode_stream_error(request_id, failure).SerializeToString()


def _next_chunk(chunks: Iterator[pb.InspectResponse]) -> bytes:
    """The next message's bytes; empty at the end."""
    chunk = next(chunks, None)
    return b"" if chunk is None else chunk.SerializeToString()


async def _soon(write: Awaitable[None]) -> None:
    """Waits for a part of an answer to be sent. It holds memory, so a caller that does not read is given up on.

    Raises:
        DeadlineExpired: The caller has read nothing for too long.
    """
    try:
        async with asyncio.timeout(_UNREAD_SECONDS):
            await write
    except TimeoutError:
        raise DeadlineExpired(f"nothing of the answer was read for {_UNREAD_SECONDS:.0f} s") from None
