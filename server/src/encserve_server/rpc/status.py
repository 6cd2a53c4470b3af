"""Error to gRPC status: one table, and the interceptor that applies it and counts every RPC."""

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from encserve_server import errors
from encserve_server.errors import EncserveError, QueueFull, RequestError
from encserve_server.telemetry.metrics import Metrics
from encserve_server.telemetry.spans import Tracer

logger = logging.getLogger(__name__)

ERROR_DOMAIN = "encserve"
REASON_TRAILER = "encserve-error-reason"
# The trailer that gRPC's own retry policy obeys; RetryInfo alone is for people and libraries.
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
DETAILS_TRAILER = "grpc-status-details-bin"
# Trailers share one 8 KiB limit, and the text is in them twice.
_MAX_TEXT_CHARS = 1000
_UNAVAILABLE_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Mapping:
    """What a caller sees of an error class: the status code, the machine-readable reason, and when to try again."""

    code: grpc.StatusCode
    reason: str
    retry_delay_s: float | None = None


ERROR_TABLE: dict[type[EncserveError], Mapping] = {
    errors.InvalidField: Mapping(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    errors.MalformedRequest: Mapping(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST"),
    errors.TooManyInputs: Mapping(grpc.StatusCode.INVALID_ARGUMENT, "TOO_MANY_INPUTS"),
    errors.SequenceTooLong: Mapping(grpc.StatusCode.INVALID_ARGUMENT, "SEQUENCE_TOO_LONG"),
    errors.RequestTooLarge: Mapping(grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_TOO_LARGE"),
    errors.ResponseTooLarge: Mapping(grpc.StatusCode.INVALID_ARGUMENT, "RESPONSE_TOO_LARGE"),
    errors.ModelNotFound: Mapping(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    errors.QueueFull: Mapping(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    errors.DeadlineExpired: Mapping(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXPIRED"),
    errors.FingerprintMismatch: Mapping(grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH"),
    errors.InspectUnavailable: Mapping(grpc.StatusCode.FAILED_PRECONDITION, "INSPECT_UNAVAILABLE"),
    errors.InferenceFailed: Mapping(grpc.StatusCode.INTERNAL, "INFERENCE_FAILED"),
    errors.EngineUnhealthy: Mapping(grpc.StatusCode.UNAVAILABLE, "ENGINE_UNHEALTHY", _UNAVAILABLE_RETRY_S),
    errors.NotReady: Mapping(grpc.StatusCode.UNAVAILABLE, "NOT_READY", _UNAVAILABLE_RETRY_S),
    errors.Draining: Mapping(grpc.StatusCode.UNAVAILABLE, "DRAINING"),
}
_UNKNOWN = Mapping(grpc.StatusCode.INTERNAL, "INTERNAL")
REASONS = [*(mapping.reason for mapping in ERROR_TABLE.values()), _UNKNOWN.reason]


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a caller sees it."""

    code: grpc.StatusCode
    reason: str
    text: str
    retry_delay_s: float | None
    details: list[any_pb2.Any]

    @property
    def trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """The trailing metadata that goes with the status."""
        status = status_pb2.Status(code=self.code.value[0], message=self.text, details=self.details)
        trailers: list[tuple[str, str | bytes]] = [
            (REASON_TRAILER, self.reason),
            (DETAILS_TRAILER, status.SerializeToString()),
        ]
        if self.retry_delay_s is not None:
            trailers.append((PUSHBACK_TRAILER, str(round(self.retry_delay_s * 1000))))
        return tuple(trailers)


def to_failure(error: Exception) -> Failure:
    """What the caller sees of an error. Anything but our own errors becomes a fixed text and an id that is logged."""
    mapping = ERROR_TABLE.get(type(error)) if isinstance(error, EncserveError) else None
    if mapping is None:  # a StartupError too: its text names paths
        error_id = secrets.token_hex(8)
        logger.error("unexpected error", exc_info=error, extra={"error_id": error_id})
        return _failure(_UNKNOWN, f"internal error; the server's log has it under the id {error_id}", None, [])
    message = str(error)
    text = message if len(message) <= _MAX_TEXT_CHARS else message[:_MAX_TEXT_CHARS] + "…"
    more: list[Any] = []
    if isinstance(error, RequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.problem[:_MAX_TEXT_CHARS]
        )
        more.append(error_details_pb2.BadRequest(field_violations=[violation]))
    retry_delay_s = error.retry_delay_s if isinstance(error, QueueFull) else mapping.retry_delay_s
    return _failure(mapping, text, retry_delay_s, more)


def _failure(mapping: Mapping, text: str, retry_delay_s: float | None, more: list[Any]) -> Failure:
    details = [_error_info(mapping.reason), *map(_packed, more)]
    if retry_delay_s is not None:
        seconds, nanos = divmod(round(retry_delay_s * 1e9), 10**9)
        delay = duration_pb2.Duration(seconds=seconds, nanos=nanos)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return Failure(mapping.code, mapping.reason, text, retry_delay_s, details)


@functools.cache
def _error_info(reason: str) -> any_pb2.Any:
    return _packed(error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN))


def _packed(message: Any) -> any_pb2.Any:
    """What `Any.Pack` does. That and `FromNanoseconds` are Python, and take a quarter more of a refusal's CPU time."""
    url = f"type.googleapis.com/{message.DESCRIPTOR.full_name}"
    return any_pb2.Any(type_url=url, value=message.SerializeToString())


def code_label(code: grpc.StatusCode) -> str:
    """A status code as Go writes it, which is what dashboards expect: "OK", "InvalidArgument", "Canceled"."""
    if code is grpc.StatusCode.OK:
        return "OK"
    if code is grpc.StatusCode.CANCELLED:
        return "Canceled"
    return "".join(word.capitalize() for word in code.name.split("_"))


Handler = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[Any]]


async def _abort(context: "grpc.aio.ServicerContext[Any, Any]", failure: Failure) -> None:
    """Ends a call with an error; the handler is to return at once, and grpcio then raises what `abort` raised again.

    Only `abort` sends a status without a message before it, which gRPC's and Envoy's own retries depend on. But grpcio
    keeps its exception beside the call: with a traceback, the call and the frames that handled it would be a cycle,
    which only the collector can free, for every call that is refused.
    """
    try:
        await context.abort(failure.code, failure.text, failure.trailers)
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = None


def _ended_with(context: "grpc.aio.ServicerContext[Any, Any]") -> grpc.StatusCode:
    """The status of a call that has ended before its handler."""
    code: Any = context.code()  # grpcio knows a number, which is 0
    if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK:
        return code
    remaining_s = context.time_remaining()
    expired = remaining_s is not None and remaining_s <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED


class RpcGuard:
    """Turns errors into statuses and counts RPCs, for the methods of one service.

    Handlers are wrapped once, when they are registered: for an interceptor gRPC builds a chain of coroutines in every
    call. Health checks are not counted: they would drown the traffic that dashboards are about.

    Attributes:
        idle: Set while no RPC is being worked on.
    """

    def __init__(self, metrics: Metrics, service: str, methods: dict[str, str]) -> None:
        """Takes the service's full name, and its methods with their types ("unary", "server_stream", "bidi_stream")."""
        self._metrics = metrics
        self._active = 0
        self.idle = asyncio.Event()
        self.idle.set()
        metrics.in_flight.set_function(lambda: self._active)  # read when the page is, so that a call costs nothing
        self._labels = {name: (kind, service, name) for name, kind in methods.items()}
        metrics.zero(self._labels.values(), map(code_label, grpc.StatusCode), REASONS)
        self._refused = {reason: metrics.refused.labels(reason) for reason in REASONS}

    def wrap(self, method: str, inner: Handler, tracer: Tracer | None = None) -> Handler:
        """A method's handler that counts and traces what `inner` does, and turns its errors into statuses."""
        metrics, labels = self._metrics, self._labels[method]
        started = metrics.started.labels(*labels)
        handling_seconds = metrics.handling_seconds.labels(*labels)
        full_name = "/".join(labels[1:])
        handled = {code: metrics.handled.labels(*labels, code_label(code)) for code in grpc.StatusCode}

        @functools.wraps(inner)
        async def wrapped(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
            began = time.perf_counter()
            started.inc()
            code, reason = grpc.StatusCode.OK, ""
            span = None if tracer is None else tracer.begin(full_name, context.invocation_metadata() or ())
            self._active += 1
            self.idle.clear()
            try:
                return await inner(request, context)
            except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.InternalError) as error:
                code = _ended_with(context)
                if isinstance(error, grpc.aio.InternalError):  # so a write fails if the caller went in the middle of it
                    raise asyncio.CancelledError from error
                raise
            except Exception as error:  # everything must become a status; gRPC would send the exception's text
                failure = to_failure(error)
                code, reason = failure.code, failure.reason
                self._refused[reason].inc()
            finally:
                self._active -= 1
                if not self._active:
                    self.idle.set()
                handled[code].inc()
                handling_seconds.observe(time.perf_counter() - began)
                if span is not None:
                    span.end(code.name, reason)
            await _abort(context, failure)
            return b""  # not sent

        return wrapped
