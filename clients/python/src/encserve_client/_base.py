"""The base class of both clients: settings, credentials, and checks of arguments. Subclasses send the messages."""

import functools
import warnings
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, cast

import grpc
import numpy as np

from encserve_client._arguments import as_float, as_int, check_type
from encserve_client._grpc.channel import (
    SERVICE_NAME,
    CertificateReloader,
    Connection,
    channel_credentials,
    channel_options,
)
from encserve_client._grpc.diagnosis import Diagnosis
from encserve_client._grpc.metadata import MetadataArgument, call_metadata, has_bearer_key
from encserve_client._grpc.proxy import proxy_of
from encserve_client._grpc.target import as_target, has_several_addresses, is_local
from encserve_client._logic.answers import ExpectedIds
from encserve_client._logic.calls import Core, ModelKey, Settings
from encserve_client._logic.dispatch import TimeLimit
from encserve_client._logic.scores import (
    Field,
    ScoreAnswer,
    as_vectors,
    check_documents,
    check_pairs,
    score_options,
)
from encserve_client._logic.streams import StreamOptions
from encserve_client._logic.wire import Wire
from encserve_client.exceptions import ClientClosedError, EncserveError, InvalidInputError
from encserve_client.inputs import (
    Input,
    SpanInput,
    check_input,
    check_inputs,
    check_iterable,
    check_spans,
    check_texts,
    read_inputs,
)
from encserve_client.options import (
    UNITS,
    Activation,
    Array,
    DType,
    OffsetUnit,
    Options,
    Pooling,
    Priority,
    Progress,
    SpanUnit,
    Task,
)
from encserve_client.results import Classification, EncodeResult
from encserve_client.retry import OnOutage, RetryPolicy
from encserve_client.tls import Tls
from encserve_proto.v1 import encoder_pb2 as pb

F = TypeVar("F")
MIB = 1024 * 1024
DEFAULT_TIMEOUT_SECONDS = 30.0
DEFAULT_MAX_MESSAGE_BYTES = 64 * MIB
DEFAULT_MAX_CONCURRENT_MESSAGES = 4
DEFAULT_MAX_IN_FLIGHT = 64
DEFAULT_MAX_VECTORS_IN_FLIGHT = 2048


class _CallOptions(TypedDict, total=False):
    task: Task | None
    prompt_name: str | None
    truncate: bool
    dimensions: int | None
    l2_normalize: bool
    dtype: DType
    model: str | None
    version: str | None
    timeout_seconds: float | None
    progress: Progress | None


class EmbedOptions(_CallOptions, total=False):
    """The arguments of `embed` that do not change the type of the result."""

    pooling: Pooling | int
    max_active_dims: int | None
    pool_factor: float | None


class TokenVectorOptions(_CallOptions, total=False):
    """The arguments of `token_vectors` that do not change the type of the result."""

    exclude_special_tokens: bool


class StreamCallOptions(EmbedOptions, total=False):
    """The arguments of `stream` that do not change the type of the results."""

    exclude_special_tokens: bool
    ordered: bool
    max_in_flight: int | None


class ClassifyOptions(TypedDict, total=False):
    """The arguments of `classify` that do not change the type of the result."""

    activation: Activation | None
    truncate: bool
    prompt_name: str | None
    model: str | None
    version: str | None
    timeout_seconds: float | None
    progress: Progress | None


class TokenizeOptions(TypedDict, total=False):
    """The arguments of `tokenize` that do not change the type of the result."""

    model: str | None
    version: str | None
    prompt_name: str | None
    task: Task | None
    truncate: bool | None
    include_token_strings: bool
    offset_unit: OffsetUnit
    timeout_seconds: float | None
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The options of a score call; see `EncoderClient.rank`."""

    activation: Activation | None = None
    truncate: bool = True
    prompt_name: str | None = None
    top_k: int | None = None


class PlaintextKeyWarning(UserWarning):
    """A client sends a key to another machine without encryption."""


class BaseClient:
    """The base of both clients. See `EncoderClient` for the arguments."""

    def __init__(
        self,
        target: str | Sequence[str] | None = None,
        *,
        tls: Tls | bool = False,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        metadata: MetadataArgument | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_concurrent_messages: int = DEFAULT_MAX_CONCURRENT_MESSAGES,
        retry: RetryPolicy | None = None,
        priority: Priority | None = None,
        expected_fingerprint: str | None = None,
        expected_space_id: str | None = None,
        on_outage: OnOutage | None = None,
        channel_arguments: Mapping[str, str | int] | None = None,
    ) -> None:
        self._target = as_target(target)
        settings = Settings(
            as_float("timeout_seconds", timeout_seconds),
            as_int("max_message_bytes", max_message_bytes),
            as_int("max_concurrent_messages", max_concurrent_messages),
            RetryPolicy() if retry is None else check_type("retry", retry, RetryPolicy, "a RetryPolicy"),
            target=self._target,
            expected=ExpectedIds(
                check_type("expected_fingerprint", expected_fingerprint or "", str, "a str or None"),
                check_type("expected_space_id", expected_space_id or "", str, "a str or None"),
            ),
            priority=priority,
            on_outage=check_function("on_outage", on_outage),
        )
        self._core = Core(settings)
        checked_tls, self._credentials = channel_credentials(tls, credentials)
        if checked_tls is not None and checked_tls.server_name is None and has_several_addresses(self._target):
            raise InvalidInputError(
                "must be set to the name that all certificates have, because the target has several addresses",
                field="tls.server_name",
            )
        self._channel_options = channel_options(
            self._target, settings.max_message_bytes, checked_tls, channel_arguments
        )
        self._certificates = CertificateReloader(checked_tls)
        proxy = proxy_of(self._target, dict(self._channel_options))
        # The content of `credentials` is unknown, so a diagnosis could mislead.
        self._diagnosis = None if credentials is not None else Diagnosis(self._target, checked_tls, proxy)
        self._metadata = call_metadata(api_key, metadata)
        if self._credentials is None and not is_local(self._target) and has_bearer_key(self._metadata):
            warnings.warn(
                f"the key goes to {self._target} without encryption, so others on the network can read it: turn on TLS "
                "(tls=True or --tls)",
                PlaintextKeyWarning,
                stacklevel=2,
            )
        self._closed = False
        self._set_up()

    def _set_up(self) -> None:
        """Finish the construction. Subclasses override this method."""

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} has open connections and cannot be pickled or copied: make a client in each "
            "process, worker or actor, in the function that runs there"
        )

    @property
    def target(self) -> str:
        """The target in gRPC's form, with a port. Example: "localhost" becomes "localhost:50051"."""
        return self._target

    def raw_method(self, rpc: str) -> Callable[..., Any]:
        """Return a function that calls an RPC of the service, such as "Encode", with serialized messages.

        For programs that measure or forward calls: nothing is checked, split or sent again. The function takes the
        request and the `timeout` in seconds, and returns the reply. Each call uses the present certificates.

        Args:
            rpc: An RPC with one reply: every RPC except "Inspect".

        Raises:
            ClientClosedError: The client is closed. The function raises this error too, and `grpc.RpcError`.
        """
        self._check_open()
        return functools.partial(self._call_raw, f"/{SERVICE_NAME}/{rpc}")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<{type(self).__name__} {self._target} [{state}]>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError

    def _call_raw(self, path: str, request: bytes, **options: Any) -> Any:
        """Send one serialized message to the RPC at `path`. Subclasses override this method."""
        raise NotImplementedError

    def _current_connection(self) -> Connection:
        """Return the connection for a new call, with the current certificates."""
        raise NotImplementedError

    def _wire(self, inputs: Any = None) -> Wire:
        """Return a wire for one call. The wire reads the async iterable `inputs`, if given."""
        raise NotImplementedError

    async def _run(
        self,
        inputs: Iterable[Input],
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> EncodeResult:
        items, _ = read_inputs(inputs)
        check_function("progress", progress)
        return await self._core.encode(
            self._wire(), items, key, options, timeout_seconds, describe=True, progress=progress
        )

    async def _embed(
        self,
        inputs: Iterable[Input],
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> Any:
        """Return the first output of each input: a matrix if the output is pooled, otherwise a list."""
        items, is_one = read_inputs(inputs)
        check_inputs(items)
        check_function("progress", progress)
        kind = options.outputs[0].kind
        if not items and kind in ("tokens", "multi_vector", "sparse"):
            return []
        result = await self._core.encode(self._wire(), items, key, options, timeout_seconds, progress=progress)
        output = result.outputs[0]
        if kind == "sparse":
            found: Any = output.sparse_vectors()
        elif kind in ("tokens", "multi_vector"):
            found = output.arrays()
        else:
            found = output.matrix()
        return found[0] if is_one else found

    async def _tokenize(
        self,
        texts: Iterable[str],
        key: ModelKey,
        options: Options,
        truncate: bool | None,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> Any:
        items, is_one = read_inputs(texts, "texts")
        check_texts(items)
        check_function("progress", progress)
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
            self._wire(), cast("list[str]", items), key, options, template, timeout_seconds, progress
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
        spanned = SpanInput(check_input(item, "text"), check_spans(spans), unit)
        call = self._core.encode(self._wire(), [spanned], key, options, timeout_seconds)
        return (await call).outputs[0].matrix()

    async def _score(
        self,
        field: Field,
        items: Sequence[str | pb.TextPair],
        key: ModelKey,
        options: ScoreOptions,
        timeout_seconds: float | None,
        progress: Progress | None,
        **more: Any,
    ) -> list[tuple[int, ScoreAnswer]]:
        """Send a score call. `more` has further fields of the request."""
        check_function("progress", progress)
        fields = score_options(options.activation, options.truncate, options.prompt_name, options.top_k)
        request = pb.ScoreRequest(model=key[0], model_version=key[1], **fields, **more)
        return await self._core.score(self._wire(), request, field, items, timeout_seconds, progress)

    async def _score_pairs(
        self,
        pairs: Iterable[tuple[str, str]],
        key: ModelKey,
        options: ScoreOptions,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> Array:
        items = check_pairs(pairs)
        if not items:
            return np.empty(0, np.float32)
        answers = await self._score("pairs", items, key, options, timeout_seconds, progress)
        scores = np.concatenate([answer.scores for _, answer in answers])  # (pairs, labels)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    async def _rank(
        self,
        query: str,
        documents: Any,
        key: ModelKey,
        options: ScoreOptions,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> list[tuple[int, float]]:
        check_type("query", query, str, "a text")
        vectors = as_vectors(documents)
        if vectors is not None:
            items: list[str] = []
            more = {"document_vectors": vectors}
            count = len(vectors.lengths)
        else:
            items, more = check_documents(documents, "documents"), {}
            count = len(items)
        if not count:
            return []
        options = replace(options, top_k=count if options.top_k is None else options.top_k)
        answers = await self._score("documents", items, key, options, timeout_seconds, progress, query=query, **more)
        found = [
            (first + index, float(score))
            for first, answer in answers
            for index, score in zip(answer.indices, answer.scores[:, 0], strict=True)
        ]
        found.sort(key=lambda pair: (-pair[1], pair[0]))
        return found[: options.top_k]

    async def _classify(
        self,
        texts: Iterable[str],
        key: ModelKey,
        options: ScoreOptions,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> Any:
        is_one = isinstance(texts, str)
        items = check_documents([texts] if is_one else texts, "texts")
        if not items:
            return []
        answers = await self._score("texts", items, key, options, timeout_seconds, progress)
        found = []
        for _, answer in answers:
            for scores in answer.scores:
                best = int(scores.argmax())
                found.append(Classification(answer.labels[best], float(scores[best]), scores, answer.labels))
        return found[0] if is_one else found

    def _stream(
        self,
        inputs: Iterable[Any] | AsyncIterable[Any],
        key: ModelKey,
        options: Options,
        ordered: bool,
        max_in_flight: int | None,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> AsyncGenerator[tuple[int, Any], None]:
        """Check the arguments of `stream` before any input is read. Return the generator of results.

        Raises:
            InvalidInputError: An argument is wrong.
        """
        self._check_open()
        check_iterable(inputs)
        check_function("progress", progress)
        if max_in_flight is None:
            few_rows = options.outputs[0].is_pooled or options.outputs[0].kind == "sparse"
            max_in_flight = DEFAULT_MAX_VECTORS_IN_FLIGHT if few_rows else DEFAULT_MAX_IN_FLIGHT
        if as_int("max_in_flight", max_in_flight) < 1:
            raise InvalidInputError(f"must be >= 1; was {max_in_flight}", field="max_in_flight")
        seconds = self._core.time_limit(timeout_seconds, 0.0).seconds
        items = [inputs] if isinstance(inputs, str) else inputs
        total = len(items) if isinstance(items, Sized) else None
        if isinstance(items, AsyncIterable):
            wire, iterator = self._wire(items), None
        else:
            wire, iterator = self._wire(), iter(items)
        stream = StreamOptions(iterator, total, ordered, max_in_flight, progress)
        return self._core.stream(wire, key, options, TimeLimit(seconds), stream)


def trim_traceback(error: EncserveError) -> None:
    """Remove the frames before the first frame outside this library, so that a traceback ends soon after the call.

    Only an error of the caller's code has such a frame: of an iterable, or of a function such as `progress`.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals["__name__"].partition(".")[0] == __package__:
        frames = frames.tb_next
    error.__traceback__ = frames


def check_function(name: str, function: F) -> F:
    """Return `function`. Raise InvalidInputError unless it is a function or None."""
    check_type(name, function, (Callable, type(None)), "a function or None")  # type: ignore[arg-type]
    return function


def model_key(model: str | None, version: str | None) -> ModelKey:
    """Return the model's name and version for a request; "" means the default.

    Raises:
        InvalidInputError: `model` or `version` is neither a str nor None.
    """
    for name, value in (("model", model), ("version", version)):
        check_type(name, value, (str, type(None)), "a str or None")
    return model or "", version or ""
