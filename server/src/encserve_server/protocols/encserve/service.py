"""The RPCs of encserve.v1."""

import asyncio
from collections.abc import Iterator
from functools import partial

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.calls import Access, Call, score
from encserve_server.endpoints.host import Host
from encserve_server.endpoints.rpcs import (
    RequestStreamRpc,
    ServerStreamRpc,
    Service,
    StreamedRequest,
    UnaryRpc,
    Write,
    parse,
)
from encserve_server.errors import DeadlineExpired, InvalidField
from encserve_server.models.served import InspectCall, InspectReply, ServedModel
from encserve_server.protocols.encserve import codec, inspect_codec, naming, score_codec

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["EncoderService"].full_name
_MAX_REQUEST_ID_BYTES = 128
# The time in which a caller of Inspect must read the whole reply.
_ANSWER_SECONDS = 300.0


class EncoderService:
    """The handlers of encserve.v1.EncoderService."""

    def __init__(self, host: Host) -> None:
        """Keep the calls of all protocols and the threads that encode the replies of Inspect."""
        self._clock = host.calls.clock
        self._catalog = host.calls.catalog
        self._inspect_pool = host.inspect_pool

    def service(self) -> Service:
        """Return the service."""
        encode, listing = naming.ENCODE, Access.LISTING
        return Service(
            SERVICE_NAME,
            [
                UnaryRpc("Encode", encode, answer=self.encode),
                RequestStreamRpc("EncodeStream", encode, parse=self.parse_streamed),
                ServerStreamRpc("Inspect", naming.INSPECT, Access.INSPECT, answer=self.inspect),
                UnaryRpc("Tokenize", naming.TOKENIZE, answer=self.tokenize),
                UnaryRpc("Score", naming.SCORES["documents"], answer=self.score),
                UnaryRpc("ListModels", encode, listing, answer=self.list_models),
                UnaryRpc("GetModel", encode, listing, answer=self.get_model),
            ],
        )

    async def encode(self, data: bytes, call: Call) -> bytes:
        """Answer one request."""
        return await self._encode(parse(pb.EncodeRequest, data), call)

    def parse_streamed(self, data: bytes) -> StreamedRequest:
        """Parse one request of EncodeStream."""
        request = parse(pb.EncodeStreamRequest, data)
        shown_id = request.request_id[:_MAX_REQUEST_ID_BYTES]
        return StreamedRequest(
            request.request_id, partial(self._encode_one, request), partial(codec.encode_stream_error, shown_id)
        )

    async def inspect(self, data: bytes, call: Call, write: Write) -> None:
        """Send attention weights and hidden states of one input: first the header, then the numbers in chunks."""
        request = parse(pb.InspectRequest, data)
        model = self._resolve(request, 1, call)
        decoded = inspect_codec.decode_inspect_call(request, model)
        async with call.inspect(model, decoded) as reply:
            inspection = reply.inspection
            call.note([reply.sequence], lambda: (inspection.queue_seconds, inspection.compute_seconds))
            began = self._clock.now()
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._send(model, decoded, reply, write)
            except TimeoutError:
                raise DeadlineExpired(f"the caller did not read the reply within {_ANSWER_SECONDS:.0f} s") from None
            finally:
                if call.span is not None:
                    call.span.stage("send", began, self._clock.now())

    async def _send(self, model: ServedModel, call: InspectCall, reply: InspectReply, write: Write) -> None:
        """Send the reply of an inspection. Each chunk is encoded after the previous chunk was sent."""
        await write(inspect_codec.encode_inspect_header(model, call, reply).SerializeToString())
        chunks = inspect_codec.encode_chunks(reply.inspection.tensors, call.data_type)
        loop = asyncio.get_running_loop()
        while chunk := await loop.run_in_executor(self._inspect_pool, _next_chunk, chunks):
            await write(chunk)

    async def tokenize(self, data: bytes, call: Call) -> bytes:
        """Return the tokens of texts. The model does not run, so the engine need not be ready."""
        request = parse(pb.TokenizeRequest, data)
        model = call.resolve(len(request.texts), request.model, request.model_version)
        decoded = codec.decode_tokenize_call(request)
        return await call.tokenize(model, decoded, partial(codec.encode_tokens, model, decoded))

    async def score(self, data: bytes, call: Call) -> bytes:
        """Return the scores of documents, pairs or texts."""
        request = parse(pb.ScoreRequest, data)
        inputs = score_codec.inputs_of(request)
        call.naming = naming.SCORES[inputs]
        count = score_codec.count_inputs(request, inputs)
        model = self._resolve(request, count, call)
        model.check_counts(count)
        decoded = score_codec.decode_score_call(request, inputs)
        del request
        return await score(call, model, decoded, partial(score_codec.encode_scores, model))

    async def list_models(self, data: bytes, call: Call) -> bytes:
        """Return every loaded model that the caller may use."""
        parse(pb.ListModelsRequest, data)
        models = [self._info(model) for model in self._catalog.all() if call.may_use(model)]
        return pb.ListModelsResponse(models=models).SerializeToString()

    async def get_model(self, data: bytes, call: Call) -> bytes:
        """Return one model."""
        request = parse(pb.GetModelRequest, data)
        model = call.resolve(0, request.model, request.model_version)
        return pb.GetModelResponse(model=self._info(model)).SerializeToString()

    def _info(self, model: ServedModel) -> pb.ModelInfo:
        return codec.encode_model_info(model, is_default=self._catalog.is_default(model))

    def _resolve(
        self, request: pb.EncodeRequest | pb.InspectRequest | pb.ScoreRequest, sequences: int, call: Call
    ) -> ServedModel:
        expected = request.expected_fingerprint, request.expected_space_id
        return call.resolve(sequences, request.model, request.model_version, *expected)

    async def _encode(self, request: pb.EncodeRequest, call: Call, stream_request_id: str | None = None) -> bytes:
        """Return the bytes of an EncodeResponse. With a stream's request id, return an EncodeStreamResponse instead."""
        model = self._resolve(request, len(request.inputs), call)
        inputs_with_spans = codec.check_counts(request, model)
        decoded = await codec.decode_call(request, model.bundle.max_sequence_tokens, inputs_with_spans)
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
