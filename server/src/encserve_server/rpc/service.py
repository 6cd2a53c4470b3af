"""The RPCs: decode → submit → encode. Messages come and go as bytes, so that parsing them is ours to guard."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import Executor
from enum import Enum
from typing import Any

import grpc

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import DeadlineExpired, Draining, InvalidField, ResponseTooLarge
from encserve_server.models.catalog import Catalog
from encserve_server.models.served import EncodeCall, EncodeReply, InspectCall, InspectReply, ServedModel
from encserve_server.rpc import codec
from encserve_server.rpc.guard import Context, Handler, RpcGuard
from encserve_server.rpc.status import to_failure
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


class _CutShort(Enum):
    CUT_SHORT = "the server drains"


CUT_SHORT = _CutShort.CUT_SHORT


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
        """Many requests, each answered as soon as it is ready; at most `max_stream_in_flight` at a time.

        A place is given back only when an answer has been written, so a caller that does not read stops being read.
        Nobody else writes: gRPC cannot end a call with an error while a message is under way.
        """
        self._refuse_while_draining()
        places = asyncio.Semaphore(self._max_stream_in_flight)
        answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        answering = asyncio.create_task(self._answer_all(requests, places, answers, self._deadline(context)))
        answering.add_done_callback(lambda _: answers.put_nowait(None))
        try:
            while (answer := await answers.get()) is not None:
                await context.write(answer)
                places.release()
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _answer_all(
        self,
        requests: AsyncIterator[bytes],
        places: asyncio.Semaphore,
        answers: "asyncio.Queue[bytes | None]",
        deadline: float,
    ) -> None:
        """Answers a stream's requests, in the order in which they are ready, until there are no more."""

        async def answer(data: bytes) -> None:
            answers.put_nowait(await self._answer(data, deadline))

        draining = asyncio.ensure_future(self._draining.wait())
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await places.acquire()
                    data = await _next(requests, draining)
                    if data is None or data is CUT_SHORT:
                        break
                    tasks.create_task(answer(data))
        except ExceptionGroup as group:  # one cause is enough, and the status table knows single errors only
            raise _first(group) from None
        finally:
            draining.cancel()
        if data is CUT_SHORT:
            raise Draining("the server is stopping; requests that were not answered can be sent to another")

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

    async def _answer(self, data: bytes, deadline: float) -> bytes:
        """One stream request's answer, an error included."""
        request = codec.parse(pb.EncodeStreamRequest, data)
        request_id = request.request_id
        span = spans.begin_request(request_id)
        code, reason = grpc.StatusCode.CANCELLED, ""
        try:
            size = len(request_id.encode())
            if not 1 <= size <= _MAX_REQUEST_ID_BYTES:
                raise InvalidField("request_id", f"must be 1 to {_MAX_REQUEST_ID_BYTES} bytes; was {size}")
            response = await self._encode(request.request, deadline, request_id)
            code = grpc.StatusCode.OK
            return response
        except Exception as error:  # one request's error is its own answer
            failure = to_failure(error)
            code, reason = failure.code, failure.reason
            self._metrics.refused.labels(failure.reason).inc()
            return codec.encode_stream_error(request_id, failure).SerializeToString()
        finally:
            if span is not None:
                span.end(code.name, reason)


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


async def _next(requests: AsyncIterator[bytes], draining: "asyncio.Future[Any]") -> bytes | _CutShort | None:
    """The stream's next request, None at its end, or CUT_SHORT if the server drains first."""
    reading = asyncio.ensure_future(anext(requests, None))
    try:
        await asyncio.wait((reading, draining), return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else CUT_SHORT
    finally:
        reading.cancel()


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The first single error of a group of groups."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
