"""What both clients have in common apart from I/O: settings, credentials, and arguments made into options."""

import warnings
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, TypedDict, TypeVar, Unpack, cast

import grpc

from encserve_client._arguments import as_float, as_int, want
from encserve_client._grpc.channel import Freshness, channel_credentials, channel_options
from encserve_client._grpc.diagnosis import Diagnosis
from encserve_client._grpc.metadata import GivenMetadata, call_metadata, has_bearer_key
from encserve_client._grpc.proxy import proxy_of
from encserve_client._grpc.target import as_target, has_several_addresses, is_local
from encserve_client._logic.answers import Expected
from encserve_client._logic.calls import Core, ModelKey, Settings, request_template
from encserve_client._logic.streams import Result, StreamBooks, StreamRun
from encserve_client._logic.wire import Wire
from encserve_client.exceptions import ClientClosedError, EncserveError, InvalidInputError
from encserve_client.inputs import Input, Spanned, check_input, check_iterable, check_spans, read_inputs
from encserve_client.options import (
    UNITS,
    Array,
    DType,
    OffsetUnit,
    Options,
    Output,
    Pooling,
    Priority,
    Progress,
    SpanUnit,
    Task,
    TrainedKind,
    check_choice,
    pooled_output,
)
from encserve_client.results import EncodeResult
from encserve_client.retry import RetryPolicy
from encserve_client.tls import Tls
from encserve_proto.v1 import encoder_pb2 as pb

T = TypeVar("T")
MIB = 1024 * 1024
DEFAULT_TIMEOUT_SECONDS = 30.0
DEFAULT_MAX_MESSAGE_BYTES = 64 * MIB
DEFAULT_MAX_CONCURRENT_MESSAGES = 4
DEFAULT_MAX_IN_FLIGHT = 64
DEFAULT_MAX_VECTORS_IN_FLIGHT = 256
_MOST_NAMED = 10


class CallOptions(TypedDict, total=False):
    """The arguments of `encode` and `embed` that both have, and that do not change the type of what is returned."""

    model: str | None
    version: str | None
    dtype: DType
    truncate: bool
    l2_normalize: bool
    prompt_name: str | None
    task: Task | None
    timeout_seconds: float | None
    progress: Progress | None


class EncodeOptions(CallOptions, total=False):
    """The arguments of `encode` that do not change the type of what it returns."""

    exclude_special_tokens: bool


class EmbedOptions(CallOptions, total=False):
    """The arguments of `embed` that do not change the type of what it returns."""

    pooling: Pooling | int
    dimensions: int | None


class EncodeStreamOptions(EncodeOptions, total=False):
    """The arguments of `encode_stream` that do not change the type of what it yields."""

    max_in_flight: int


class EmbedStreamOptions(EmbedOptions, total=False):
    """The arguments of `embed_stream` that do not change the type of what it yields."""

    max_in_flight: int


class TokenizeOptions(TypedDict, total=False):
    """The arguments of `tokenize` that do not change the type of what it returns."""

    model: str | None
    version: str | None
    prompt_name: str | None
    task: Task | None
    truncate: bool | None
    include_token_strings: bool
    offset_unit: OffsetUnit
    timeout_seconds: float | None
    progress: Progress | None


class OutputOptions(TypedDict, total=False):
    """The arguments of `encode_query` and `encode_document` that say what comes back."""

    l2_normalize: bool
    dimensions: int | None
    max_active_dims: int | None
    pool_factor: float | None


class TruncationWarning(UserWarning):
    """Inputs were cut because they are longer than the model takes."""


class PlaintextKeyWarning(UserWarning):
    """A client sends a key to another machine without encryption."""


class BaseClient:
    """Holds what does not depend on threads or asyncio; see `EncoderClient` for the arguments."""

    def __init__(
        self,
        target: str | Sequence[str] | None = None,
        *,
        tls: Tls | bool = False,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        metadata: GivenMetadata | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_concurrent_messages: int = DEFAULT_MAX_CONCURRENT_MESSAGES,
        retry: RetryPolicy | None = None,
        priority: Priority | None = None,
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
            priority=priority,
        )
        self._core = Core(settings)
        checked_tls, self._credentials = channel_credentials(tls, credentials)
        if checked_tls is not None and checked_tls.server_name is None and has_several_addresses(self._target):
            raise InvalidInputError(
                "several addresses need tls=Tls(server_name=…), the one name that their certificates have"
            )
        self._channel_options = channel_options(
            self._target, settings.max_message_bytes, checked_tls, channel_arguments
        )
        self._freshness = Freshness(checked_tls)
        proxy = proxy_of(self._target, dict(self._channel_options))
        # What `credentials` stand for is not known.
        self._diagnosis = None if credentials is not None else Diagnosis(self._target, checked_tls, proxy)
        self._metadata = call_metadata(api_key, metadata)
        if self._credentials is None and not is_local(self._target) and has_bearer_key(self._metadata):
            warnings.warn(
                f"the key goes to {self._target} without encryption, and everybody on the way can read it: give "
                "tls=True or Tls(ca=…), or --tls or --ca in a command",
                PlaintextKeyWarning,
                stacklevel=2,
            )
        self._closed = False
        self._set_up()

    def _set_up(self) -> None:
        """What a client does when it is made, with all of its settings there; for its two kinds to say."""

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} has open connections and cannot be pickled or copied: make a client in each "
            "process, worker or actor, in the function that runs there"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<{type(self).__name__} {self._target} [{state}]>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError

    def _wire(self, inputs: Any = ()) -> Wire:
        """What one call goes over; `inputs` are those that it reads itself, for its two kinds to say of what type."""
        raise NotImplementedError

    async def _run(
        self,
        inputs: Iterable[Input],
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> EncodeResult:
        """Everything about inputs of which none may fail."""
        items, _ = read_inputs(inputs)
        check_progress(progress)
        return await self._core.encode(
            self._wire(), items, key, options, timeout_seconds, describe=True, progress=progress
        )

    async def _rows(
        self,
        inputs: Iterable[Input],
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
        progress: Progress | None,
        return_exceptions: bool,
    ) -> Any:
        """What `encode` returns."""
        items, is_one = read_inputs(inputs, keep_wrong=return_exceptions)
        if not items:
            return []
        result, rejected = await self._try(items, key, options, timeout_seconds, progress, return_exceptions)
        rows = in_their_places(len(items), result.outputs[0].arrays(), rejected)
        return rows[0] if is_one else rows

    async def _vectors(
        self,
        inputs: Iterable[Input],
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
        progress: Progress | None,
        return_exceptions: bool,
    ) -> Any:
        """What `embed` returns."""
        items, is_one = read_inputs(inputs, keep_wrong=return_exceptions)
        result, rejected = await self._try(items, key, options, timeout_seconds, progress, return_exceptions)
        matrix = result.outputs[0].matrix()
        if return_exceptions:
            vectors = in_their_places(len(items), list(matrix), rejected)
            return vectors[0] if is_one else vectors
        return matrix[0] if is_one else matrix

    async def _try(
        self,
        items: list[Input],
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
        progress: Progress | None,
        return_exceptions: bool,
        describe: bool = False,
    ) -> tuple[EncodeResult, dict[int, EncserveError]]:
        """The result of the inputs that did not fail by themselves, and the errors of the others."""
        check_progress(progress)
        rejected: dict[int, EncserveError] = {}
        result = await self._core.encode(
            self._wire(),
            items,
            key,
            options,
            timeout_seconds,
            describe=describe,
            progress=progress,
            rejected=rejected if return_exceptions else None,
        )
        return result, rejected

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
        progress: Progress | None,
        return_exceptions: bool,
        **output: Unpack[OutputOptions],
    ) -> tuple[Any, str]:
        """What the model makes of texts of a task, and which of them were cut, for people; empty if none was."""
        (items, is_one), key = read_inputs(inputs, keep_wrong=return_exceptions), model_key(model, version)
        check_choice("kind", kind or "model", TrainedKind)
        Output(kind or "model", **output)  # refused before anything is asked
        if kind is None:
            kind = (await self._core.known_model(self._wire(), key, timeout_seconds)).trained_kind
        options = Options(
            (Output(kind, **output),), dtype, truncate, prompt_name=prompt_name, task=task, detail="counts"
        )
        result, rejected = await self._try(
            items, key, options, timeout_seconds, progress, return_exceptions, describe=True
        )
        sequences = in_their_places(len(items), result.sequences, rejected)
        cut = [i for i, it in enumerate(sequences) if not isinstance(it, EncserveError) and it.truncated]
        told = ""
        if cut:
            first = ", ".join(map(str, cut[:_MOST_NAMED])) + (", …" if len(cut) > _MOST_NAMED else "")
            told = f"{len(cut)} of {len(items)} inputs were longer than a {task} may be, and were cut: inputs {first}"
        encoded = result.outputs[0]
        if kind == "model" and not return_exceptions:
            return (encoded.matrix()[0] if is_one else encoded.matrix()), told
        one_each: Sequence[Any] = encoded.sparse_vectors() if kind == "sparse" else encoded.arrays()
        if kind == "model":
            one_each = [its[0] for its in one_each]
        found = in_their_places(len(items), one_each, rejected)
        return (found[0] if is_one else found), told

    async def _tokenize(
        self,
        texts: Iterable[str],
        key: ModelKey,
        options: Options,
        truncate: bool | None,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> Any:
        """What `tokenize` returns."""
        items, is_one = read_inputs(texts)
        for index, item in enumerate(items):
            want(f"texts[{index}]", item, str, "a str")
        check_progress(progress)
        if not items:
            return []
        template = pb.TokenizeRequest(
            model=key[0],
            model_version=key[1],
            prompt_name=options.prompt_name,
            task=options.task_number,
            truncation=pb.TRUNCATION_UNSPECIFIED if truncate is None else options.truncation,
            include_token_strings=options.include_token_strings,
            offset_unit=UNITS[options.offset_unit],
        )
        found = await self._core.tokenize(
            self._wire(), cast("list[str]", items), key, template, timeout_seconds, progress
        )
        return found[0] if is_one else found

    async def _spans(
        self,
        item: Input,
        spans: Iterable[tuple[int, int]],
        unit: SpanUnit | None,
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
    ) -> Array:
        """What `embed_spans` returns."""
        spanned = Spanned(check_input(item, "text"), check_spans(spans), unit)
        call = self._core.encode(self._wire(), [spanned], key, options, timeout_seconds)
        return (await call).outputs[0].matrix()

    def _stream(
        self,
        inputs: Iterable[Any] | AsyncIterable[Any],
        key: ModelKey,
        options: Options,
        ordered: bool,
        max_in_flight: int,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> StreamRun:
        """Checks the arguments of encode_stream and embed_stream, before anything is read.

        Raises:
            InvalidInputError: `inputs` is itself one input but no text, or an option is wrong.
        """
        check_iterable(inputs)
        check_progress(progress)
        if not isinstance(inputs, Iterable | AsyncIterable):
            raise InvalidInputError(f"inputs must be an iterable of inputs; was {type(inputs).__name__}")
        if as_int("max_in_flight", max_in_flight) < 1:
            raise InvalidInputError(f"max_in_flight must be >= 1; was {max_in_flight}")
        settings = self._core.settings
        seconds = self._core.time_limit(timeout_seconds, 0.0).seconds
        items = [inputs] if isinstance(inputs, str) else inputs
        books: StreamBooks[Array] = StreamBooks(
            settings.retry,
            max_in_flight,
            seconds,
            ordered,
            settings.random,
            settings.target,
            settings.max_concurrent_messages,
            self._core.contact,
        )
        template = request_template(key, options, settings)
        total = len(items) if isinstance(items, Sized) else None
        return StreamRun(self._wire(items), books, template, options, progress, total)


def encode_options(
    *,
    dtype: DType,
    truncate: bool,
    exclude_special_tokens: bool,
    l2_normalize: bool,
    prompt_name: str | None,
    task: Task | None,
) -> Options:
    """Those of `encode` and `encode_stream`: a row per token, and nothing told of the tokens."""
    return Options(
        (Output("tokens", l2_normalize),),
        dtype,
        truncate,
        exclude_special_tokens,
        prompt_name=prompt_name,
        task=task,
        detail="counts",
    )


def embed_options(
    *,
    pooling: Pooling | int,
    dtype: DType,
    truncate: bool,
    l2_normalize: bool,
    dimensions: int | None,
    prompt_name: str | None,
    task: Task | None,
) -> Options:
    """Those of `embed` and `embed_stream`: a row per input, and nothing told of it."""
    output = pooled_output(pooling, l2_normalize, dimensions)
    return Options((output,), dtype, truncate, prompt_name=prompt_name, task=task, detail="none")


def check_progress(progress: object) -> None:
    """Raises InvalidInputError for what cannot be called."""
    want("progress", progress, (Callable, type(None)), "a function or None")  # type: ignore[arg-type]


def in_their_places(
    n_inputs: int, found: Iterable[T], rejected: Mapping[int, EncserveError]
) -> list[T | EncserveError]:
    """What was found for the inputs that did not fail, with the errors of the others where they belong."""
    rest = iter(found)
    return [rejected[index] if index in rejected else next(rest) for index in range(n_inputs)]


def model_key(model: str | None, version: str | None) -> ModelKey:
    """A model's name and version as the contract writes them: empty for the default.

    Raises:
        InvalidInputError: One of them is neither a str nor None.
    """
    for name, value in (("model", model), ("version", version)):
        want(name, value, (str, type(None)), "a str or None")
    return model or "", version or ""


def told(answer: tuple[Any, str]) -> Any:
    """What `encode_query` and `encode_document` return; warns their caller of what was cut."""
    encoded, cut = answer
    if cut:
        warnings.warn(cut, TruncationWarning, stacklevel=3)
    return encoded


def shown(index: int, result: Result, ordered: bool, return_exceptions: bool) -> Result | tuple[int, Result]:
    """What a stream yields for one result. Raises it if it is an error and errors are to be raised."""
    if isinstance(result, EncserveError) and not return_exceptions:
        raise result
    return result if ordered else (index, result)
