"""The client for asyncio. The same methods as `EncoderClient`, which has the full descriptions."""

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from typing import Any, Literal, Unpack, overload

from encserve_client._async_base import AsyncBase
from encserve_client._base import DEFAULT_MAX_IN_FLIGHT, StreamOptions, model_key, stream_plan
from encserve_client._exceptions import EncserveError
from encserve_client._inputs import Input, check_inputs
from encserve_client._inspect_request import Layers, inspect_request
from encserve_client._inspection import InspectResult
from encserve_client._options import Array, DType, Options, Output, OutputKind, Pooling, as_outputs, pooled_output
from encserve_client._results import EncodeResult, ModelInfo


class AsyncEncoderClient(AsyncBase):
    """Asks an encserve server for vectors, from asyncio.

    One client holds one channel, which belongs to the event loop in which it is first used. Any number of tasks may
    use it at a time. Cancelling a task cancels its call on the server.

        async with AsyncEncoderClient("localhost:50051") as client:
            rows = await client.encode(["a text", [101, 2023, 102]])  # a (seq, d_model) array for each

    Arguments, results and errors are those of `EncoderClient`.
    """

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
        timeout_seconds: float | None = None,
    ) -> list[Array]:
        """One row per token for every input: a (seq_len, d_model) array each. See `EncoderClient.encode`."""
        items = check_inputs(inputs)
        options = Options((Output("tokens", l2_normalize),), dtype, truncate, exclude_special_tokens)
        if not items:
            return []
        return (await self._encode(items, model, version, options, timeout_seconds)).outputs[0].arrays()

    async def embed(
        self,
        inputs: Iterable[Input],
        *,
        pooling: Pooling = "model",
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        l2_normalize: bool = False,
        timeout_seconds: float | None = None,
    ) -> Array:
        """One row per input: (inputs, d_model). See `EncoderClient.embed`."""
        options = Options((pooled_output(pooling, l2_normalize),), dtype, truncate)
        return (await self._encode(check_inputs(inputs), model, version, options, timeout_seconds)).outputs[0].matrix()

    async def run(
        self,
        inputs: Iterable[Input],
        *,
        outputs: Sequence[Output | OutputKind] = ("tokens",),
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        exclude_special_tokens: bool = False,
        include_token_strings: bool = False,
        timeout_seconds: float | None = None,
    ) -> EncodeResult:
        """Everything about the inputs at once. See `EncoderClient.run`."""
        options = Options(as_outputs(outputs), dtype, truncate, exclude_special_tokens, include_token_strings)
        return await self._encode(check_inputs(inputs), model, version, options, timeout_seconds, describe=True)

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
        )
        return await self._drive(self._core.inspect(self._wire(), request, timeout_seconds))

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[True] = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[Array, None]: ...

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[False],
        return_exceptions: Literal[False] = ...,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[tuple[int, Array], None]: ...

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[True] = ...,
        return_exceptions: Literal[True],
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[Array | EncserveError, None]: ...

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: Literal[False],
        return_exceptions: Literal[True],
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[tuple[int, Array | EncserveError], None]: ...

    def encode_stream(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        pooling: Pooling | None = None,
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        exclude_special_tokens: bool = False,
        l2_normalize: bool = False,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Encodes as many inputs as there are, however many, in bounded memory. See `EncoderClient.encode_stream`.

        Inputs may come from an async iterable, which is read while answers come in. Leaving an `async for` early does
        not close its generator at once; `contextlib.aclosing` does:

            async with aclosing(client.encode_stream(texts(), pooling="model")) as vectors:
                async for vector in vectors:  # (d_model,)
                    ...
        """
        plan = stream_plan(
            inputs,
            pooling=pooling,
            dtype=dtype,
            truncate=truncate,
            exclude_special_tokens=exclude_special_tokens,
            l2_normalize=l2_normalize,
            max_in_flight=max_in_flight,
            timeout_seconds=timeout_seconds,
        )
        run = self._stream_run(self._wire(inputs), ordered, model_key(model, version), plan)
        return self._results(run, ordered, return_exceptions)

    async def models(self, *, timeout_seconds: float | None = None) -> list[ModelInfo]:
        """Every model and version that the server has loaded, the default first."""
        return await self._drive(self._core.list_models(self._wire(), timeout_seconds))

    async def model(
        self, name: str | None = None, version: str | None = None, *, timeout_seconds: float | None = None
    ) -> ModelInfo:
        """One model; without a name the server's default one."""
        return await self._drive(self._core.get_model(self._wire(), model_key(name, version), timeout_seconds))

    async def _encode(
        self,
        items: list[Input],
        model: str | None,
        version: str | None,
        options: Options,
        timeout_seconds: float | None,
        describe: bool = False,
    ) -> EncodeResult:
        call = self._core.encode(
            self._wire(), items, model_key(model, version), options, timeout_seconds, describe=describe
        )
        return await self._drive(call)
