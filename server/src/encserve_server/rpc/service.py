"""The RPCs of encserve.v1. Handlers take and return bytes, so that the guard also handles errors of parsing."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.calls import Access, Call, Calls
from encserve_server.errors import DeadlineExpired, InvalidField
from encserve_server.models.served import InspectCall, InspectReply, ServedModel
from encserve_server.rpc import codec, inspect_codec, naming
from encserve_server.rpc.guard import Context, Handler, RpcGuard, Stream, write_in_time
from encserve_server.rpc.streams import Answer, answer_one, answer_stream

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["EncoderService"].full_name
# The type of each method, as in the grpc_server_* metrics.
METHODS = {
    "Encode": "unary",
    "EncodeStream": "bidi_stream",
    "Inspect": "server_stream",
    "Tokenize": "unary",
    "ListModels": "unary",
    "GetModel": "unary",
}
_ACCESS = {"Inspect": Access.INSPECT, "ListModels": Access.LISTING, "GetModel": Access.LISTING}
_MAX_REQUEST_ID_BYTES = 128
# The time in which a caller of Inspect must read the whole reply.
_ANSWER_SECONDS = 300.0


class EncoderService:
    """The handlers of encserve.v1.EncoderService."""

    def __init__(self, calls: Calls, *, inspect_pool: Executor, max_stream_in_flight: int) -> None:
        """Keep the calls of all protocols and the threads that encode the replies of Inspect."""
        self._calls = calls
        self._catalog = calls.catalog
        self._inspect_pool = inspect_pool
        self._max_stream_in_flight = max_stream_in_flight

    def handlers(self, guard: RpcGuard) -> dict[str, Handler]:
        """Return the handlers by method name."""
        self._request = guard.request_method(SERVICE_NAME, "EncodeStream", naming.ENCODE)
        names = {"Inspect": naming.INSPECT, "Tokenize": naming.TOKENIZE}
        methods = {
            name: guard.method(
                SERVICE_NAME,
                name,
                kind,
                names.get(name, naming.ENCODE),
                access=_ACCESS.get(name, Access.CALLERS),
            )
            for name, kind in METHODS.items()
        }
        return {
            "Encode": guard.unary(methods["Encode"], self.encode),
            "EncodeStream": guard.bidi_stream(methods["EncodeStream"], self.encode_stream),
            "Inspect": guard.server_stream(methods["Inspect"], self.inspect),
            "Tokenize": guard.unary(methods["Tokenize"], self.tokenize),
            "ListModels": guard.unary(methods["ListModels"], self.list_models),
            "GetModel": guard.unary(methods["GetModel"], self.get_model),
        }

    async def encode(self, data: bytes, call: Call) -> bytes:
        """Answer one request."""
        return await self._encode(codec.parse(pb.EncodeRequest, data), call)

    async def encode_stream(self, stream: Stream, stream_call: Call) -> None:
        """Answer many requests, each as soon as its reply is ready; at most `max_stream_in_flight` at a time."""

        async def answer(data: bytes) -> Answer:
            request = codec.parse(pb.EncodeStreamRequest, data)
            request_id = request.request_id
            call = self._calls.begin_request(stream_call, self._request, request_id)
            work = partial(self._encode_one, request, call)
            shown_id = request_id[:_MAX_REQUEST_ID_BYTES]
            return await answer_one(call, len(data), work, partial(codec.encode_stream_error, shown_id))

        limit = self._max_stream_in_flight
        await answer_stream(stream.read, answer, stream.write, max_in_flight=limit, draining=self._calls.draining)

    async def inspect(self, data: bytes, call: Call, context: Context) -> None:
        """Send attention weights and hidden states of one input: first the header, then the numbers in chunks."""
        request = codec.parse(pb.InspectRequest, data)
        model = self._resolve(request, 1, call)
        decoded = inspect_codec.decode_inspect_call(request, model)
        async with call.inspect(model, decoded) as reply:
            inspection = reply.inspection
            call.note([reply.sequence], lambda: (inspection.queue_seconds, inspection.compute_seconds))
            began = self._calls.clock.now()
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._send(model, decoded, reply, context)
            except TimeoutError:
                raise DeadlineExpired(f"the caller did not read the reply within {_ANSWER_SECONDS:.0f} s") from None
            finally:
                if call.span is not None:
                    call.span.stage("send", began, self._calls.clock.now())

    async def _send(self, model: ServedModel, call: InspectCall, reply: InspectReply, context: Context) -> None:
        """Send the reply of an inspection. A chunk is encoded when gRPC has sent the chunk before."""
        # Sent before the first message: grpcio cannot send an error while it sends metadata and a message together.
        await context.send_initial_metadata(())
        header = inspect_codec.encode_inspect_header(model, call, reply)
        await write_in_time(context, header.SerializeToString())
        chunks = inspect_codec.encode_chunks(reply.inspection.tensors, call.data_type)
        loop = asyncio.get_running_loop()
        while chunk := await loop.run_in_executor(self._inspect_pool, _next_chunk, chunks):
            await write_in_time(context, chunk)

    async def tokenize(self, data: bytes, call: Call) -> bytes:
        """Return the tokens of texts. The model does not run, so the engine need not be ready."""
        request = codec.parse(pb.TokenizeRequest, data)
        model = call.resolve(len(request.texts), request.model, request.model_version)
        decoded = codec.decode_tokenize_call(request)
        return await call.tokenize(model, decoded, partial(codec.encode_tokens, model, decoded))

    async def list_models(self, data: bytes, call: Call) -> bytes:
        """Return every loaded model that the caller may use."""
        codec.parse(pb.ListModelsRequest, data)
        models = [self._info(model) for model in self._catalog.all() if call.may_use(model)]
        return pb.ListModelsResponse(models=models).SerializeToString()

    async def get_model(self, data: bytes, call: Call) -> bytes:
        """Return one model."""
        request = codec.parse(pb.GetModelRequest, data)
        model = call.resolve(0, request.model, request.model_version)
        return pb.GetModelResponse(model=self._info(model)).SerializeToString()

    def _info(self, model: ServedModel) -> pb.ModelInfo:
        return codec.encode_model_info(model, is_default=self._catalog.is_default(model))

    def _resolve(self, request: pb.EncodeRequest | pb.InspectRequest, sequences: int, call: Call) -> ServedModel:
        expected = request.expected_fingerprint, request.expected_space_id
        return call.resolve(sequences, request.model, request.model_version, *expected)

    async def _encode(self, request: pb.EncodeRequest, call: Call, stream_request_id: str | None = None) -> bytes:
        """Return the bytes of an EncodeResponse. With a stream's request id, an EncodeStreamResponse wraps it."""
        model = self._resolve(request, len(request.inputs), call)
        inputs_with_spans = codec.check_counts(request, model)
        decoded = codec.decode_call(request, model.bundle.max_sequence_tokens, inputs_with_spans)
        del request
        return await call.encode(model, decoded, partial(codec.encode_reply, model, decoded, stream_request_id))

    async def _encode_one(self, request: pb.EncodeStreamRequest, call: Call) -> bytes:
        """Return the bytes of the reply to one request of a stream."""
        size = len(request.request_id.encode())
        if not 1 <= size <= _MAX_REQUEST_ID_BYTES:
            raise InvalidField("request_id", f"must be 1 to {_MAX_REQUEST_ID_BYTES} bytes; was {size}")
        return await self._encode(request.request, call, request.request_id)


def _next_chunk(chunks: Iterator[pb.InspectResponse]) -> bytes:
    """Return the bytes of the next message; empty bytes at the end."""
    chunk = next(chunks, None)
    return b"" if chunk is None else chunk.SerializeToString()
