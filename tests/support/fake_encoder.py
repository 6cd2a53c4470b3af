"""A fake encoder service on a real grpc.aio server, and a helper that calls the service.

The helper uses the sync or the async client. The service and the tests share one event loop. The sync client would
block the loop, so the sync client runs in a worker thread.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt
import pytest
from inspections import inspection

from encserve_client import AsyncEncoderClient, EncoderClient, RetryPolicy
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_proto.v1.encoder_pb2_grpc import EncoderServiceServicer, add_EncoderServiceServicer_to_server

D_MODEL = 8
FIRST, LAST = 1, 2  # the special tokens before and after a text

Rows = npt.NDArray[np.float32]


class Refused(Exception):
    """A function of a test, such as `FakeEncoder.before`, raises this error to refuse a request."""

    def __init__(
        self,
        code: grpc.StatusCode,
        text: str = "refused",
        reason: str = "",
        pushback: str | None = None,
        refused_inputs: str | None = None,
    ) -> None:
        super().__init__(text)
        self.code, self.text, self.reason = code, text, reason
        self.pushback, self.refused_inputs = pushback, refused_inputs

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        found = {
            "encserve-error-reason": self.reason or None,
            "grpc-retry-pushback-ms": self.pushback,
            "encserve-refused-inputs": self.refused_inputs,
        }
        return tuple((name, value) for name, value in found.items() if value is not None)


def ids_of(item: pb.Input) -> list[int]:
    """Return the token ids of an input. In a text, each word is a token, and the id is the word's length."""
    if item.HasField("text"):
        return [FIRST, *(len(word) for word in item.text.split()), LAST]
    return list(item.token_ids.ids)


def rows_of(ids: Iterable[int]) -> Rows:
    """Return fake hidden states for token ids, in the shape (seq, d_model).

    Each number depends on the token id, the position and the column.
    """
    column = np.asarray(list(ids), np.float32)[:, None]
    places = np.arange(len(column), dtype=np.float32)[:, None] / 4
    return np.asarray(column + places + np.arange(D_MODEL, dtype=np.float32) / 64, np.float32)


def rows_of_input(item: pb.Input) -> Rows:
    """Return the fake hidden states of an input, in the shape (seq, d_model).

    If the input has vectors, return the same vectors in float32.
    """
    if not item.HasField("embeddings"):
        return rows_of(ids_of(item))
    vectors = item.embeddings
    dtype = {pb.DATA_TYPE_FLOAT32: "<f4", pb.DATA_TYPE_FLOAT16: "<f2"}[vectors.data_type]
    return np.frombuffer(vectors.data, dtype).reshape(-1, vectors.width).astype(np.float32)


def _info(item: pb.Input, options: pb.EncodeOptions) -> pb.SequenceInfo:
    ids = ids_of(item)
    n_tokens = len(rows_of_input(item))
    info = pb.SequenceInfo(token_count=n_tokens, original_token_count=n_tokens)
    if options.detail == pb.DETAIL_COUNTS:
        return info
    is_special = [token in (FIRST, LAST) for token in ids]
    if item.HasField("text"):
        words = item.text.split()
        starts = [item.text.index(word) for word in words]
        info.token_ids.extend(ids)
        info.char_starts.extend([0, *starts, 0])
        info.char_ends.extend([0, *(start + len(word) for start, word in zip(starts, words, strict=True)), 0])
        if options.include_token_strings:
            info.tokens.extend(["[FIRST]", *words, "[LAST]"])
    if item.HasField("text") or options.exclude_special_tokens:
        info.special.extend(is_special)
    return info


def _tensor(spec: pb.OutputSpec, request: pb.EncodeRequest) -> pb.RaggedTensor:
    rows: list[Rows] = []
    if spec.kind == pb.OUTPUT_KIND_SPARSE:
        return _sparse_tensor(request)
    for item in request.inputs:
        ids = ids_of(item)
        part = rows_of_input(item)
        if spec.kind in (pb.OUTPUT_KIND_UNSPECIFIED, pb.OUTPUT_KIND_TOKENS):
            if request.options.exclude_special_tokens:
                part = part[[token not in (FIRST, LAST) for token in ids]]
        elif spec.kind == pb.OUTPUT_KIND_MULTI_VECTOR:
            part = part[1:-1]
        elif spec.kind == pb.OUTPUT_KIND_CLS:
            part = part[:1]
        elif spec.kind == pb.OUTPUT_KIND_MAX:
            part = part.max(axis=0, keepdims=True)
        else:
            part = part.mean(axis=0, keepdims=True)
        rows.append(part / np.linalg.norm(part, axis=1, keepdims=True) if spec.l2_normalize else part)
    data_type = request.options.data_type or pb.DATA_TYPE_FLOAT32
    dtype = {pb.DATA_TYPE_FLOAT16: "<f2", pb.DATA_TYPE_INT8: "i1"}.get(data_type, "<f4")
    return pb.RaggedTensor(
        kind=spec.kind or pb.OUTPUT_KIND_TOKENS,
        l2_normalized=spec.l2_normalize or data_type == pb.DATA_TYPE_INT8,
        data_type=data_type,
        width=D_MODEL,
        lengths=[len(part) for part in rows],
        data=np.concatenate(rows).astype(dtype).tobytes(),
        indices=np.concatenate([np.arange(len(part), dtype="<u4") + 1 for part in rows]).tobytes()
        if spec.kind == pb.OUTPUT_KIND_MULTI_VECTOR
        else b"",
    )


def _sparse_tensor(request: pb.EncodeRequest) -> pb.RaggedTensor:
    """Return a sparse vector for each input.

    The indices of the vector are the ids of the words. The weight at an index is half the index.
    """
    words = [sorted(set(ids_of(item)) - {FIRST, LAST}) for item in request.inputs]
    flat = np.array([word for its in words for word in its], np.uint32)
    return pb.RaggedTensor(
        kind=pb.OUTPUT_KIND_SPARSE,
        data_type=pb.DATA_TYPE_FLOAT32,
        width=1,
        lengths=[len(its) for its in words],
        data=(flat / 2).astype("<f4").tobytes(),
        indices=flat.astype("<u4").tobytes(),
    )


@dataclass
class FakeEncoder(EncoderServiceServicer):  # type: ignore[misc]
    """A fake encoder service, which records the requests.

    The service calls `before` with each Encode request. `before` may wait, raise `Refused`, or return another answer.
    `inspect` replaces the function `inspections.inspection`. `inspect` may also wait or raise `Refused`.
    """

    max_request_sequences: int = 256
    max_request_tokens: int = 65536
    max_message_bytes: int = 64 * 1024 * 1024
    fingerprint: str = "f" * 16
    space_id: str = "s2-" + "5" * 32
    before: Callable[[pb.EncodeRequest], Awaitable[pb.EncodeResponse | None]] | None = None
    inspect: Callable[[pb.InspectRequest], AsyncIterator[pb.InspectResponse]] | None = None
    is_loading: bool = False  # whether the list of models is still empty
    model_info: pb.ModelInfo = field(default_factory=pb.ModelInfo)  # fields that `info` adds or replaces
    requests: list[pb.EncodeRequest] = field(default_factory=list)
    tokenize_requests: list[pb.TokenizeRequest] = field(default_factory=list)
    inspect_requests: list[pb.InspectRequest] = field(default_factory=list)
    score_requests: list[pb.ScoreRequest] = field(default_factory=list)
    labels: tuple[str, ...] = ("relevant",)
    score_fingerprint: str = ""  # the fingerprint in replies of Score; an empty string means `fingerprint`
    refused_texts: tuple[str, ...] = ("refused",)
    metadata: list[dict[str, str]] = field(default_factory=list)
    n_open: int = 0  # Encode requests without an answer
    n_open_inspections: int = 0
    n_get_model: int = 0
    n_cancelled: int = 0
    target: str = ""
    server: Any = None

    def info(self) -> pb.ModelInfo:
        info = pb.ModelInfo(
            name="tiny",
            version="1",
            fingerprint=self.fingerprint,
            space_id=self.space_id,
            is_default=True,
            d_model=D_MODEL,
            n_layers=2,
            n_heads=2,
            vocab_size=100,
            max_sequence_tokens=64,
            has_tokenizer=True,
            special_token_ids=[FIRST, LAST],
            pooling=pb.OUTPUT_KIND_MEAN,
            vector_width=D_MODEL,
            provider="CPUExecutionProvider",
            precision="float32",
            max_request_sequences=self.max_request_sequences,
            max_request_tokens=self.max_request_tokens,
            max_text_bytes=1000,
            max_request_bytes=self.max_message_bytes,
            max_response_bytes=self.max_message_bytes,
            ready=True,
            prompts={"p": "passage: ", "q": "query: "},
        )
        if self.model_info.sparse_width or self.model_info.multi_vector_width or self.model_info.labels:
            info.ClearField("pooling")
        info.MergeFrom(self.model_info)
        return info

    def answer(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        """Return the answer to a request. If the request or the answer exceeds a limit, raise `Refused`."""
        tokens = [len(rows_of_input(item)) for item in request.inputs]
        if len(tokens) > self.max_request_sequences:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "too many", "TOO_MANY_INPUTS")
        if sum(tokens) > self.max_request_tokens:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "too many tokens", "REQUEST_TOO_LARGE")
        for index, count in enumerate(tokens):
            if count > 64:
                text = f"inputs[{index}]: has {count} tokens; the model takes at most 64"
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, text, "SEQUENCE_TOO_LONG")
        response = pb.EncodeResponse(
            model="tiny",
            model_version="1",
            fingerprint=self.fingerprint,
            space_id=self.space_id,
            outputs=[_tensor(spec, request) for spec in request.options.outputs or [pb.OutputSpec()]],
            sequences=[_info(item, request.options) for item in request.inputs],
            timings=pb.Timings(tokenize_seconds=0.001, queue_seconds=0.002, compute_seconds=0.003),
        )
        if response.ByteSize() > self.max_message_bytes:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "reply too large", "RESPONSE_TOO_LARGE")
        return response

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:  # noqa: N802
        self.requests.append(request)
        self.n_open += 1
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            replaced = await self.before(request) if self.before else None
            return replaced or self.answer(request)
        except Refused as refused:
            context.set_trailing_metadata(refused.trailers)
            await context.abort(refused.code, refused.text)
            raise
        except asyncio.CancelledError:
            self.n_cancelled += 1
            raise
        finally:
            self.n_open -= 1

    async def Inspect(self, request: pb.InspectRequest, context: Any) -> None:  # noqa: N802
        self.inspect_requests.append(request)
        self.n_open_inspections += 1
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            if self.inspect is None:
                for part in inspection(request, len(rows_of_input(request.input))):
                    await context.write(part)
            else:
                async for part in self.inspect(request):
                    await context.write(part)
        except Refused as refused:
            context.set_trailing_metadata(refused.trailers)
            await context.abort(refused.code, refused.text)
        except asyncio.CancelledError:
            self.n_cancelled += 1
            raise
        finally:
            self.n_open_inspections -= 1

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        self.tokenize_requests.append(request)
        options = pb.EncodeOptions(include_token_strings=request.include_token_strings)
        sequences = [_info(pb.Input(text=text), options) for text in request.texts]
        for index, info in enumerate(sequences):
            if info.token_count > 64 and request.truncation == pb.TRUNCATION_REFUSE:
                text = f"texts[{index}]: has {info.token_count} tokens; the model takes at most 64"
                context.set_trailing_metadata((("encserve-error-reason", "SEQUENCE_TOO_LONG"),))
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return pb.TokenizeResponse(model="tiny", model_version="1", fingerprint=self.fingerprint, sequences=sequences)

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:  # noqa: N802
        """Score each document or text by its number of characters. Label n gets n times this number.

        In `token_count`, each character of a text, and of the query of a pair, counts as a token.

        A text in `refused_texts` is refused. For the text "crash", the call fails with the status INTERNAL.
        """
        self.score_requests.append(request)
        texts = [*request.documents, *(pair.document for pair in request.pairs), *request.texts]
        if len(texts or request.document_vectors.lengths) > self.max_request_sequences:
            context.set_trailing_metadata((("encserve-error-reason", "TOO_MANY_INPUTS"),))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "documents: too many")
        for index, text in enumerate(texts):
            if text == "crash":
                await context.abort(grpc.StatusCode.INTERNAL, "crashed")
            if text in self.refused_texts:
                name = "documents" if request.documents else "pairs" if request.pairs else "texts"
                part = ".document" if request.pairs else ""
                context.set_trailing_metadata((("encserve-error-reason", "SEQUENCE_TOO_LONG"),))
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{name}[{index}]{part}: is too long")
        sizes = [len(text) for text in texts] or list(request.document_vectors.lengths)
        scores = np.array(sizes, "<f4")[:, None] * np.arange(1, len(self.labels) + 1, dtype="<f4")
        order = np.argsort(-scores[:, 0], kind="stable")[: request.top_k] if request.top_k else None
        return pb.ScoreResponse(
            model="tiny",
            model_version="1",
            fingerprint=self.score_fingerprint or self.fingerprint,
            space_id=self.space_id,
            scores=(scores if order is None else scores[order]).astype("<f4").tobytes(),
            label_count=len(self.labels),
            labels=self.labels,
            indices=[] if order is None else order.tolist(),
            token_count=sum(map(len, texts)) + sum(len(pair.query) for pair in request.pairs),
        )

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        return pb.ListModelsResponse(models=[] if self.is_loading else [self.info()])

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        self.n_get_model += 1
        if request.model not in ("", "tiny"):
            context.set_trailing_metadata((("encserve-error-reason", "UNKNOWN_MODEL"),))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"model: {request.model!r} is not loaded; tiny is")
        return pb.GetModelResponse(model=self.info())

    async def start(self, port: int = 0) -> None:
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
        self.server = grpc.aio.server(options=options)
        add_EncoderServiceServicer_to_server(self, self.server)
        self.target = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self.server.start()


@pytest.fixture
async def service() -> AsyncIterator[FakeEncoder]:
    """A running `FakeEncoder`. A folder gets this fixture if its conftest.py imports the fixture."""
    it = FakeEncoder()
    await it.start()
    yield it
    await it.server.stop(None)


async def stalled_inspection(request: pb.InspectRequest) -> AsyncIterator[pb.InspectResponse]:
    """Send only the header of an inspection, then wait 30 s. Tests set this function as `FakeEncoder.inspect`."""
    yield inspection(request, 1)[0]
    await asyncio.sleep(30)


class Caller:
    """Calls the sync or the async client from a coroutine. The sync client runs in a worker thread."""

    def __init__(self, kind: str, service: FakeEncoder | None = None) -> None:
        """Set the kind of client, "sync" or "async". Without a service, `connect` needs a target."""
        self.kind = kind
        self.service = service
        self.clients: list[EncoderClient | AsyncEncoderClient] = []

    def connect(self, **settings: Any) -> Any:
        """Create a client. By default, the client waits only 10 to 50 ms before a retry."""
        settings.setdefault("retry", RetryPolicy(initial_backoff_seconds=0.01, max_backoff_seconds=0.05))
        settings.setdefault("timeout_seconds", 60.0)
        if self.service is not None:
            settings.setdefault("target", self.service.target)
        client = (EncoderClient if self.kind == "sync" else AsyncEncoderClient)(**settings)
        self.clients.append(client)
        return client

    async def __call__(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a client and return its result."""
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        return await asyncio.to_thread(method, *args, **kwargs)

    async def all_of(self, client: Any, inputs: Any, kind: str = "tokens", **options: Any) -> list[Any]:
        """Return all results of a stream, without their indices."""
        stream = client.stream(inputs, kind=kind, **options)
        if self.kind == "async":
            return [result async for _, result in stream]
        return [result for _, result in await asyncio.to_thread(list, stream)]

    async def first_of(self, stream: Any) -> Any:
        """Return the next index and result of a stream."""
        return await (anext(stream) if self.kind == "async" else asyncio.to_thread(next, stream))

    async def close(self, it: Any) -> None:
        """Close a client or a stream."""
        ended = it.aclose() if hasattr(it, "aclose") else it.close()
        if inspect.isawaitable(ended):
            await ended
