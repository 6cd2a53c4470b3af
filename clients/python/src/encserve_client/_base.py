"""The base class of both clients: settings, credentials, and checks of arguments. Subclasses send the messages."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import grpc

from encserve_client._arguments import as_float, as_int, check_function, check_type
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
from encserve_client.exceptions import ClientClosedError, EncserveError, InvalidInputError
from encserve_client.options import Activation, DType, OffsetUnit, Pooling, Priority, Progress, Task
from encserve_client.retry import OnOutage, RetryPolicy
from encserve_client.tls import Tls

MIB = 1024 * 1024
DEFAULT_TIMEOUT_SECONDS = 30.0
DEFAULT_MAX_MESSAGE_BYTES = 64 * MIB
DEFAULT_MAX_CONCURRENT_MESSAGES = 4


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

    pooling: Pooling
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
            f"{type(self).__name__} has open connections and cannot be pickled or copied: make a new client in the "
            "function that runs in the other process, worker or actor"
        )

    @property
    def target(self) -> str:
        """The target in gRPC's form, with a port. Example: "localhost" becomes "localhost:50051"."""
        return self._target

    def raw_method(self, rpc: str) -> Callable[..., Any]:
        """Return a function that calls an RPC of the service, such as "Encode", with serialized messages.

        The returned function is for programs that measure or forward calls. The client does not check, split or retry
        these messages. The function takes the request and the `timeout` in seconds, and returns the reply. Each call
        uses the present certificates.

        Args:
            rpc: An RPC with one reply: every RPC except "Inspect".

        Raises:
            ClientClosedError: The client is closed. The returned function also raises `ClientClosedError`, and
                `grpc.RpcError`.
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


def trim_traceback(error: EncserveError) -> None:
    """Remove this library's frames from the start of the traceback, so that the traceback is short.

    If the error comes from the caller's iterable or from a function such as `progress`, the traceback keeps the frames
    from there on.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals["__name__"].partition(".")[0] == __package__:
        frames = frames.tb_next
    error.__traceback__ = frames


def model_key(model: str | None, version: str | None) -> ModelKey:
    """Return the model's name and version for a request; "" means the default.

    Raises:
        InvalidInputError: `model` or `version` is neither a str nor None.
    """
    for name, value in (("model", model), ("version", version)):
        check_type(name, value, (str, type(None)), "a str or None")
    return model or "", version or ""
