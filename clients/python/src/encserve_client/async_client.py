"""The client for asyncio. The same methods as `EncoderClient`, which has the full descriptions."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import grpc.aio

from encserve_client._base import (
    DEFAULT_MAX_IN_FLIGHT,
    DEFAULT_MAX_VECTORS_IN_FLIGHT,
    BaseClient,
    EmbedOptions,
    EmbedStreamOptions,
    EncodeOptions,
    EncodeStreamOptions,
    OutputOptions,
    TokenizeOptions,
    embed_options,
    encode_options,
    model_key,
    shown,
    told,
)
from encserve_client._grpc.async_wire import AsyncWire
from encserve_client._grpc.channel import Link
from encserve_client._grpc.metadata import with_trace
from encserve_client._logic.inspecting import inspect_request
from encserve_client._logic.streams import Result
from encserve_client.exceptions import EncserveError, InvalidInputError
from encserve_client.inputs import Input
from encserve_client.options import (
    Array,
    Detail,
    DType,
    Layers,
    OffsetUnit,
    Options,
    Output,
    OutputKind,
    Pooling,
    Progress,
    SpanPooling,
    SpanUnit,
    Task,
    TrainedKind,
    as_outputs,
)
from encserve_client.results import EncodeResult, InspectResult, ModelInfo, SequenceInfo
from encserve_proto.v1.encoder_pb2_grpc import EncoderServiceStub


class AsyncEncoderClient(BaseClient):
    """Asks an encserve server for vectors, from asyncio.

    One client holds one channel, which belongs to the event loop in which it is first used. Any number of tasks may
    use it at a time. Cancelling a task cancels its call on the server.

        async with AsyncEncoderClient("localhost:50051") as client:
            rows = await client.encode(["a text", [101, 2023, 102]])  # a (seq, d_model) array for each

    Arguments, results and errors are those of `EncoderClient`.
    """

    def _set_up(self) -> None:
        self._link: Link | None = None  # made when first used, because it belongs to a loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()  # all that are in use

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel. Calls that other tasks are still in raise `ClientClosedError`. May be called again."""
        self._closed = True
        for link in list(self._links):
            await link.channel.close()

    @overload
    async def encode(  # type: ignore[overload-overlap]
        self,
        inputs: str,
        *,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EncodeOptions],
    ) -> Array: ...

    @overload
    async def encode(  # type: ignore[overload-overlap]
        self,
        inputs: str,
        *,
        return_exceptions: Literal[True],
        **options: Unpack[EncodeOptions],
    ) -> Array | EncserveError: ...

    @overload
    async def encode(
        self,
        inputs: Iterable[Input],
        *,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EncodeOptions],
    ) -> list[Array]: ...

    @overload
    async def encode(
        self,
        inputs: Iterable[Input],
        *,
        return_exceptions: Literal[True],
        **options: Unpack[EncodeOptions],
    ) -> list[Array | EncserveError]: ...

    async def encode(
        self,
        inputs: Iterable[Input],
        *,
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        exclude_special_tokens: bool = False,
        l2_normalize: bool = False,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        return_exceptions: bool = False,
    ) -> Any:
        """One row per token for every input: a (seq_len, d_model) array each. See `EncoderClient.encode`."""
        key, options = (
            model_key(model, version),
            encode_options(
                dtype=dtype,
                truncate=truncate,
                exclude_special_tokens=exclude_special_tokens,
                l2_normalize=l2_normalize,
                prompt_name=prompt_name,
                task=task,
            ),
        )
        return await self._rows(inputs, key, options, timeout_seconds, progress, return_exceptions)

    @overload
    async def embed(
        self,
        inputs: Iterable[Input],
        *,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EmbedOptions],
    ) -> Array: ...

    @overload
    async def embed(  # type: ignore[overload-overlap]
        self,
        inputs: str,
        *,
        return_exceptions: Literal[True],
        **options: Unpack[EmbedOptions],
    ) -> Array | EncserveError: ...

    @overload
    async def embed(
        self,
        inputs: Iterable[Input],
        *,
        return_exceptions: Literal[True],
        **options: Unpack[EmbedOptions],
    ) -> list[Array | EncserveError]: ...

    async def embed(
        self,
        inputs: Iterable[Input],
        *,
        pooling: Pooling | int = "model",
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        l2_normalize: bool = False,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        return_exceptions: bool = False,
    ) -> Any:
        """One row per input: (inputs, width). See `EncoderClient.embed`."""
        key, options = (
            model_key(model, version),
            embed_options(
                pooling=pooling,
                dtype=dtype,
                truncate=truncate,
                l2_normalize=l2_normalize,
                dimensions=dimensions,
                prompt_name=prompt_name,
                task=task,
            ),
        )
        return await self._vectors(inputs, key, options, timeout_seconds, progress, return_exceptions)

    async def encode_query(
        self,
        inputs: Iterable[Input],
        *,
        kind: TrainedKind | None = None,
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = True,
        prompt_name: str | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        return_exceptions: bool = False,
        **output: Unpack[OutputOptions],
    ) -> Any:
        """What the model makes of texts that are looked for. See `EncoderClient.encode_query`."""
        call = self._encode_task(
            "query",
            inputs,
            kind,
            model,
            version,
            timeout_seconds,
            dtype=dtype,
            truncate=truncate,
            prompt_name=prompt_name,
            progress=progress,
            return_exceptions=return_exceptions,
            **output,
        )
        return told(await call)

    async def encode_document(
        self,
        inputs: Iterable[Input],
        *,
        kind: TrainedKind | None = None,
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = True,
        prompt_name: str | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        return_exceptions: bool = False,
        **output: Unpack[OutputOptions],
    ) -> Any:
        """What the model makes of texts that are found. See `EncoderClient.encode_document`."""
        call = self._encode_task(
            "document",
            inputs,
            kind,
            model,
            version,
            timeout_seconds,
            dtype=dtype,
            truncate=truncate,
            prompt_name=prompt_name,
            progress=progress,
            return_exceptions=return_exceptions,
            **output,
        )
        return told(await call)

    async def run(
        self,
        inputs: Iterable[Input],
        *,
        outputs: Sequence[Output | OutputKind | int] = ("tokens",),
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        exclude_special_tokens: bool = False,
        include_token_strings: bool = False,
        prompt_name: str | None = None,
        task: Task | None = None,
        detail: Detail | None = None,
        offset_unit: OffsetUnit = "code_points",
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> EncodeResult:
        """Everything about the inputs at once. See `EncoderClient.run`."""
        options = Options(
            as_outputs(outputs),
            dtype,
            truncate,
            exclude_special_tokens,
            include_token_strings,
            prompt_name,
            task,
            detail,
            offset_unit,
        )
        return await self._run(inputs, model_key(model, version), options, timeout_seconds, progress)

    async def inspect(
        self,
        input: Input,  # noqa: A002 - the contract's own word
        *,
        attention: Layers = True,
        hidden_states: Layers = True,
        positions: bool = False,
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
    ) -> InspectResult:
        """What the model did with one input, layer by layer. See `EncoderClient.inspect`."""
        request = inspect_request(
            input,
            model_key(model, version),
            attention=attention,
            hidden_states=hidden_states,
            positions=positions,
            dtype=dtype,
            truncate=truncate,
            prompt_name=prompt_name,
            task=task,
        )
        return await self._core.inspect(self._wire(), request, timeout_seconds)

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[True] = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EncodeStreamOptions],
    ) -> AsyncGenerator[Array, None]: ...

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[False],
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EncodeStreamOptions],
    ) -> AsyncGenerator[tuple[int, Array], None]: ...

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[True] = ...,
        return_exceptions: Literal[True],
        **options: Unpack[EncodeStreamOptions],
    ) -> AsyncGenerator[Array | EncserveError, None]: ...

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[False],
        return_exceptions: Literal[True],
        **options: Unpack[EncodeStreamOptions],
    ) -> AsyncGenerator[tuple[int, Array | EncserveError], None]: ...

    def encode_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        exclude_special_tokens: bool = False,
        l2_normalize: bool = False,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
    ) -> AsyncGenerator[Any, None]:
        """Encodes as many inputs as there are, however many, in bounded memory. See `EncoderClient.encode_stream`.

        Inputs may come from an async iterable, which is read while answers come in. Leaving an `async for` early does
        not close its generator at once; `contextlib.aclosing` does:

            async with aclosing(client.encode_stream(texts())) as rows_of_texts:
                async for rows in rows_of_texts:  # (seq_len, d_model)
                    ...
        """
        key, options = (
            model_key(model, version),
            encode_options(
                dtype=dtype,
                truncate=truncate,
                exclude_special_tokens=exclude_special_tokens,
                l2_normalize=l2_normalize,
                prompt_name=prompt_name,
                task=task,
            ),
        )
        if not isinstance(inputs, Iterable | AsyncIterable):
            raise InvalidInputError(f"inputs must be an iterable of inputs; was {type(inputs).__name__}")
        results = self._stream(inputs, key, options, ordered, max_in_flight, timeout_seconds, progress)
        return self._results(results, ordered, return_exceptions)

    @overload
    def embed_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[True] = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EmbedStreamOptions],
    ) -> AsyncGenerator[Array, None]: ...

    @overload
    def embed_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[False],
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EmbedStreamOptions],
    ) -> AsyncGenerator[tuple[int, Array], None]: ...

    @overload
    def embed_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[True] = ...,
        return_exceptions: Literal[True],
        **options: Unpack[EmbedStreamOptions],
    ) -> AsyncGenerator[Array | EncserveError, None]: ...

    @overload
    def embed_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[False],
        return_exceptions: Literal[True],
        **options: Unpack[EmbedStreamOptions],
    ) -> AsyncGenerator[tuple[int, Array | EncserveError], None]: ...

    def embed_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        pooling: Pooling | int = "model",
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        l2_normalize: bool = False,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        max_in_flight: int = DEFAULT_MAX_VECTORS_IN_FLIGHT,
    ) -> AsyncGenerator[Any, None]:
        """Embeds as many inputs as there are, however many, in bounded memory. See `EncoderClient.embed_stream`."""
        key, options = (
            model_key(model, version),
            embed_options(
                pooling=pooling,
                dtype=dtype,
                truncate=truncate,
                l2_normalize=l2_normalize,
                dimensions=dimensions,
                prompt_name=prompt_name,
                task=task,
            ),
        )
        if not isinstance(inputs, Iterable | AsyncIterable):
            raise InvalidInputError(f"inputs must be an iterable of inputs; was {type(inputs).__name__}")
        results = self._stream(inputs, key, options, ordered, max_in_flight, timeout_seconds, progress)
        return self._results(results, ordered, return_exceptions)

    @overload
    async def tokenize(  # type: ignore[overload-overlap]
        self, texts: str, **options: Unpack[TokenizeOptions]
    ) -> SequenceInfo: ...

    @overload
    async def tokenize(self, texts: Iterable[str], **options: Unpack[TokenizeOptions]) -> list[SequenceInfo]: ...

    async def tokenize(
        self,
        texts: Iterable[str],
        *,
        model: str | None = None,
        version: str | None = None,
        prompt_name: str | None = None,
        task: Task | None = None,
        truncate: bool | None = None,
        include_token_strings: bool = False,
        offset_unit: OffsetUnit = "code_points",
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Which tokens the model would see of texts, with nothing computed. See `EncoderClient.tokenize`."""
        key = model_key(model, version)
        options = Options(
            truncate=bool(truncate),
            include_token_strings=include_token_strings,
            prompt_name=prompt_name,
            task=task,
            offset_unit=offset_unit,
        )
        return await self._tokenize(texts, key, options, truncate, timeout_seconds, progress)

    async def embed_spans(
        self,
        text: Input,
        spans: Iterable[tuple[int, int]],
        *,
        unit: SpanUnit | None = None,
        pooling: SpanPooling = "mean",
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        l2_normalize: bool = False,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
    ) -> Array:
        """One row for each range of one text, from one run over the whole of it. See `EncoderClient.embed_spans`."""
        key = model_key(model, version)
        output = Output("spans", l2_normalize, dimensions, span_pooling=pooling)
        options = Options((output,), dtype, truncate, prompt_name=prompt_name, task=task, detail="none")
        return await self._spans(text, spans, unit, key, options, timeout_seconds)

    async def models(self, *, timeout_seconds: float | None = None) -> list[ModelInfo]:
        """Every model and version that the server has loaded, the default first."""
        return await self._core.list_models(self._wire(), timeout_seconds)

    async def model(
        self, name: str | None = None, version: str | None = None, *, timeout_seconds: float | None = None
    ) -> ModelInfo:
        """One model; without a name the server's default one."""
        return await self._core.get_model(self._wire(), model_key(name, version), timeout_seconds)

    def _wire(self, inputs: AsyncIterable[Input] | None = None) -> AsyncWire:
        self._check_open()
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise InvalidInputError("the client belongs to the event loop of its first use: make one in each loop")
        self._loop = loop
        return AsyncWire(self._current_link, with_trace(self._metadata), inputs, lambda: self._closed, self._diagnosis)

    def _current_link(self) -> Link:
        """The channel for a new call; gRPC closes one that nobody holds any more."""
        self._check_open()
        changed = self._freshness.new_credentials()
        if self._link is None or changed is not None:
            self._credentials = changed or self._credentials
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(self._target, self._channel_options)
            else:
                channel = grpc.aio.secure_channel(self._target, self._credentials, self._channel_options)
            self._link = Link(channel, EncoderServiceStub(channel))
            self._links.add(self._link)
        return self._link

    async def _results(
        self, results: AsyncGenerator[tuple[int, Result], None], ordered: bool, return_exceptions: bool
    ) -> AsyncGenerator[Any, None]:
        try:
            async for result in results:
                yield shown(*result, ordered, return_exceptions)
        finally:
            await results.aclose()
