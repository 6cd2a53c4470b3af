"""The RPCs: decode → submit → encode. Messages come and go as bytes, so that parsing them is ours to guard."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import Executor
from functools import partial

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import DeadlineExpired, Draining, InvalidField, ResponseTooLarge
from encserve_server.models.catalog import Catalog
from encserve_server.models.served import EncodeCall, EncodeReply, InspectCall, InspectReply, ServedModel
from encserve_server.rpc import codec
from encserve_server.rpc.guard import Context, Handler, RpcGuard
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
    "ListModels": "unary",
    "GetModel": "unary",
}
# A reply larger than this is built in a thread: on the event loop it would hold up everybody else.
_INLINE_REPLY_BYTES = 256 * 1024
_MAX_REQUEST_ID_BYTES = 128
# How long a caller of Inspect may read nothing, and how long it may take to read everything.
_UNREAD_SECONDS = 30.0
_ANSWER_SECONDS = 300.0


class EncoderService:
    """The handlers of encserve.v1.EncoderService."""

    def __init__(
        self, catalog: Catalog, metrics: Metrics, *, clock: Clock, encode_pool: Executor, max_stream_in_flight: int
    ) -> None:
        """Takes the models, and the threads in which large replies are built."""
        self._catalog = catalog
        self._metrics = metrics
        self._clock = clock
        self._encode_pool = encode_pool
        self._max_stream_in_flight = max_stream_in_flight
        self._draining = asyncio.Event()

    def handlers(self, guard: RpcGuard, tracer: spans.Tracer | None = None) -> dict[str, Handler]:
        """The methods by their names."""
        methods: dict[str, Handler] = {
            "Encode": self.encode,
            "EncodeStream": self.encode_stream,
            "Inspect": self.inspect,
            "ListModels": self.list_models,
            "GetModel": self.get_model,
        }
        return {name: guard.wrap(name, method, tracer) for name, method in methods.items()}

    def drain(self) -> None:
        """From now on new requests get Draining, and streams end once what they have read is answered."""
        self._draining.set()

    async def encode(self, data: bytes, context: Context) -> bytes:
        """One request, one response."""
        self._refuse_while_draining()
        request = codec.parse(pb.EncodeRequest, data)
        return await self._encode(request, self._deadline(context))

    async def encode_stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Many requests, each answered as soon as it is ready; at most `max_stream_in_flight` at a time."""
        self._refuse_while_draining()
        deadline = self._deadline(context)

        async def answer(data: bytes) -> bytes:
            request = codec.parse(pb.EncodeStreamRequest, data)
            request_id = request.request_id
            answering = self._encode_one(request, deadline)
            return await answer_one(self._metrics, request_id, answering, partial(_stream_error, request_id))

        limit = self._max_stream_in_flight
        await answer_stream(requests, answer, context.write, max_in_flight=limit, draining=self._draining)

    async def inspect(self, data: bytes, context: Context) -> None:
        """What happens inside a model: the header, then the numbers in chunks."""
        self._refuse_while_draining()
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

    async def list_models(self, data: bytes, context: Context) -> bytes:
        """Every model that is loaded."""
        del context
        self._refuse_while_draining()
        codec.parse(pb.ListModelsRequest, data)
        models = [self._info(model) for model in self._catalog.all()]
        return pb.ListModelsResponse(models=models).SerializeToString()

    async def get_model(self, data: bytes, context: Context) -> bytes:
        """One model."""
        del context
        self._refuse_while_draining()
        request = codec.parse(pb.GetModelRequest, data)
        model = self._catalog.resolve(request.model, request.model_version)
        return pb.GetModelResponse(model=self._info(model)).SerializeToString()

    def _refuse_while_draining(self) -> None:
        if self._draining.is_set():
            raise Draining("the server is stopping; send the request to another")

    def _info(self, model: ServedModel) -> pb.ModelInfo:
        return codec.encode_model_info(model, is_default=self._catalog.is_default(model))

    def _resolve(self, request: pb.EncodeRequest | pb.InspectRequest, sequences: int) -> ServedModel:
        """The model that so many sequences are for; tells the request's span of it."""
        expected = request.expected_fingerprint, request.expected_space_id
        model = self._catalog.resolve(request.model, request.model_version, *expected)
        if (span := spans.current()) is not None:
            span.about(model.bundle.name, model.bundle.version, sequences)
        return model

    def _deadline(self, context: Context) -> float:
        """The caller's deadline on our clock; infinity where there is none."""
        remaining_s = context.time_remaining()
        return math.inf if remaining_s is None else self._clock.now() + remaining_s

    async def _encode(self, request: pb.EncodeRequest, deadline: float, stream_request_id: str | None = None) -> bytes:
        """The bytes of an EncodeResponse, or with a stream's request id of an EncodeStreamResponse around it."""
        model = self._resolve(request, len(request.inputs))
        model.check_count(len(request.inputs))
        # Before the inputs are decoded: refusing a call must not take what answering it does.
        model.check_open(lambda: codec.count_tokens(request, model.bundle.max_sequence_tokens))
        call = codec.decode_call(request, model)
        with model.in_use():
            reply = await model.encode(call, deadline)
            what = model, call, reply, stream_request_id, spans.current()
            if reply.estimated_bytes <= _INLINE_REPLY_BYTES:
                return self._build(*what)
            return await asyncio.get_running_loop().run_in_executor(self._encode_pool, self._build, *what)

    def _build(
        self,
        model: ServedModel,
        call: EncodeCall,
        reply: EncodeReply,
        stream_request_id: str | None,
        span: spans.RequestSpan | None,
    ) -> bytes:
        """The bytes of a response; any thread may ask."""
        began = self._clock.now()
        data = codec.encode_reply(model, call, reply, stream_request_id)
        ended = self._clock.now()
        if span is not None:
            span.stage("encode", began, ended)
        limit = model.limits.max_response_bytes
        if len(data) > limit:  # the estimate was wrong; callers' own limits would fail the call without a reason
            raise ResponseTooLarge("inputs", f"the reply takes {len(data)} bytes, over the limit of {limit}")
        model.answered(ended - began, len(data))
        return data

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
