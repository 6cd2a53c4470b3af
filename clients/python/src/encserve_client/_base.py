"""What both clients have in common apart from I/O: settings, credentials, and arguments made into options."""

import warnings
from collections.abc import AsyncIterable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import grpc

from encserve_client._arguments import as_float, as_int, want
from encserve_client._grpc.channel import as_target, channel_credentials, channel_options
from encserve_client._grpc.metadata import GivenMetadata, call_metadata
from encserve_client._logic.answers import Expected
from encserve_client._logic.calls import Core, ModelKey, Settings, request_template
from encserve_client._logic.streams import Result, StreamBooks, StreamRun
from encserve_client._logic.wire import Wire
from encserve_client.exceptions import ClientClosedError, EncserveError, InvalidInputError
from encserve_client.inputs import Input, check_inputs, check_iterable
from encserve_client.options import (
    Array,
    DType,
    Options,
    Output,
    Pooling,
    Task,
    TrainedKind,
    check_choice,
    pooled_output,
)
from encserve_client.results import EncodeResult, SparseVector
from encserve_client.retry import RetryPolicy
from encserve_client.tls import Tls

MIB = 1024 * 1024
DEFAULT_TIMEOUT_SECONDS = 30.0
DEFAULT_MAX_MESSAGE_BYTES = 64 * MIB
DEFAULT_MAX_CONCURRENT_MESSAGES = 4
DEFAULT_MAX_IN_FLIGHT = 64
_MOST_NAMED = 10


class StreamOptions(TypedDict, total=False):
    """The arguments of `encode_stream` that do not change the type of what it yields."""

    pooling: Pooling | None
    model: str | None
    version: str | None
    dtype: DType
    truncate: bool
    exclude_special_tokens: bool
    l2_normalize: bool
    dimensions: int | None
    prompt_name: str | None
    max_in_flight: int
    timeout_seconds: float | None


class OutputOptions(TypedDict, total=False):
    """The arguments of `encode_query` and `encode_document` that say what comes back."""

    l2_normalize: bool
    dimensions: int | None
    max_active_dims: int | None
    pool_factor: float | None


Retrieved = Array | list[Array] | list[SparseVector]


class TruncationWarning(UserWarning):
    """Inputs were cut because they are longer than the model takes."""


class BaseClient:
    """Holds what does not depend on threads or asyncio; see `EncoderClient` for the arguments."""

    def __init__(
        self,
        target: str | Sequence[str] = "localhost:50051",
        *,
        tls: Tls | bool = False,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        metadata: GivenMetadata | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_concurrent_messages: int = DEFAULT_MAX_CONCURRENT_MESSAGES,
        retry: RetryPolicy | None = None,
        expected_fingerprint: str | None = None,
        expected_space_id: str | None = None,
        channel_arguments: Mapping[str, str | int] | None = None,
    ) -> None:
        self._target = as_target(target)
        settings = Settings(
            as_float("timeout_seconds", timeout_seconds),
            as_int("max_message_bytes", max_message_bytes),
            as_int("max_concurrent_messages", max_concurrent_messages),
            RetryPolicy() if retry is None else want("retry", retry, RetryPolicy, "a RetryPolicy"),
            target=self._target,
            expected=Expected(
                want("expected_fingerprint", expected_fingerprint or "", str, "a str or None"),
                want("expected_space_id", expected_space_id or "", str, "a str or None"),
            ),
        )
        self._core = Core(settings)
        checked_tls, self._credentials = channel_credentials(tls, credentials)
        if checked_tls is not None and checked_tls.server_name is None and not isinstance(target, str):
            raise ValueError("several addresses need tls=Tls(server_name=…), the one name that their certificates have")
        self._channel_options = channel_options(
            self._target, settings.max_message_bytes, checked_tls, channel_arguments
        )
        self._metadata = call_metadata(token, metadata)
        self._closed = False
        self._set_up()

    def _set_up(self) -> None:
        """What a client does when it is made, with all of its settings there; for its two kinds to say."""

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<{type(self).__name__} {self._target} [{state}]>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError

    def _wire(self, inputs: Any = ()) -> Wire:
        """What one call goes over; `inputs` are those that it reads itself, for its two kinds to say of what type."""
        raise NotImplementedError

    def _encode(
        self,
        items: list[Input],
        model: str | None,
        version: str | None,
        options: Options,
        timeout_seconds: float | None,
        describe: bool = False,
    ) -> Coroutine[Any, Any, EncodeResult]:
        key = model_key(model, version)
        return self._core.encode(self._wire(), items, key, options, timeout_seconds, describe=describe)

    async def _encode_task(
        self,
        task: Task,
        inputs: Iterable[Input],
        kind: TrainedKind | None,
        model: str | None,
        version: str | None,
        timeout_seconds: float | None,
        *,
        dtype: DType,
        truncate: bool,
        prompt_name: str | None,
        **output: Unpack[OutputOptions],
    ) -> tuple[Retrieved, str]:
        """What the model makes of texts of a task, and which of them were cut, for people; empty if none was."""
        items, key = check_inputs(inputs), model_key(model, version)
        check_choice("kind", kind or "model", TrainedKind)  # refused before anything is asked
        Output(kind or "model", **output)
        if kind is None:
            kind = (await self._core.known_model(self._wire(), key, timeout_seconds)).trained_kind
        options = Options((Output(kind, **output),), dtype, truncate, prompt_name=prompt_name, task=task)
        result = await self._encode(items, model, version, options, timeout_seconds, describe=True)
        encoded, cut = result.outputs[0], [i for i, it in enumerate(result.sequences) if it.truncated]
        told = ""
        if cut:
            first = ", ".join(map(str, cut[:_MOST_NAMED])) + (", …" if len(cut) > _MOST_NAMED else "")
            told = f"{len(cut)} of {len(items)} inputs were longer than a {task} may be, and were cut: inputs {first}"
        if kind == "sparse":
            return encoded.sparse_vectors(), told
        return encoded.arrays() if kind == "multi_vector" else encoded.matrix(), told

    def _stream(
        self,
        inputs: Iterable[Any] | AsyncIterable[Any],
        ordered: bool,
        *,
        pooling: Pooling | None,
        model: str | None,
        version: str | None,
        dtype: DType,
        truncate: bool,
        exclude_special_tokens: bool,
        l2_normalize: bool,
        dimensions: int | None,
        prompt_name: str | None,
        max_in_flight: int,
        timeout_seconds: float | None,
    ) -> StreamRun:
        """Checks the arguments of encode_stream, before anything is read.

        Raises:
            InvalidInputError: `inputs` is itself one input, or an option does not exist.
            ValueError: A number is out of bounds.
        """
        check_iterable(inputs)
        if not isinstance(inputs, Iterable | AsyncIterable):
            raise InvalidInputError(f"inputs must be an iterable of inputs; was {type(inputs).__name__}")
        if as_int("max_in_flight", max_in_flight) < 1:
            raise ValueError(f"max_in_flight must be >= 1; was {max_in_flight}")
        settings = self._core.settings
        if pooling is None:
            output = Output("tokens", l2_normalize, dimensions)
        else:
            output = pooled_output(pooling, l2_normalize, dimensions)
        options = Options((output,), dtype, truncate, exclude_special_tokens, prompt_name=prompt_name)
        seconds = self._core.time_limit(timeout_seconds, 0.0).seconds
        books: StreamBooks[Array] = StreamBooks(
            settings.retry, max_in_flight, seconds, ordered, settings.random, settings.target
        )
        template = request_template(model_key(model, version), options, settings.expected)
        return StreamRun(self._wire(inputs), books, template, options)


def model_key(model: str | None, version: str | None) -> ModelKey:
    """A model's name and version as the contract writes them: empty for the default.

    Raises:
        InvalidInputError: One of them is neither a str nor None.
    """
    for name, value in (("model", model), ("version", version)):
        want(name, value, (str, type(None)), "a str or None")
    return model or "", version or ""


def told(answer: tuple[Retrieved, str]) -> Retrieved:
    """What `encode_query` and `encode_document` return; warns their caller of what was cut."""
    encoded, cut = answer
    if cut:
        warnings.warn(cut, TruncationWarning, stacklevel=3)
    return encoded


def shown(index: int, result: Result, ordered: bool, return_exceptions: bool) -> Result | tuple[int, Result]:
    """What encode_stream yields for one result. Raises it if it is an error and errors are to be raised."""
    if isinstance(result, EncserveError) and not return_exceptions:
        raise result
    return result if ordered else (index, result)
