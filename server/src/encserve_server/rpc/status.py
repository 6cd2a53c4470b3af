"""Error to gRPC status, by one table."""

from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from encserve_server import errors
from encserve_server.errors import EncserveError, QueueFull, RequestError
from encserve_server.telemetry.logs import log_unexpected

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
    """What a caller sees of an error class beside its reason: the status code, and when to try again."""

    code: grpc.StatusCode
    retry_delay_s: float | None = None


ERROR_TABLE: dict[type[EncserveError], Mapping] = {
    errors.InvalidField: Mapping(grpc.StatusCode.INVALID_ARGUMENT),
    errors.MalformedRequest: Mapping(grpc.StatusCode.INVALID_ARGUMENT),
    errors.TooManyInputs: Mapping(grpc.StatusCode.INVALID_ARGUMENT),
    errors.SequenceTooLong: Mapping(grpc.StatusCode.INVALID_ARGUMENT),
    errors.RequestTooLarge: Mapping(grpc.StatusCode.INVALID_ARGUMENT),
    errors.ResponseTooLarge: Mapping(grpc.StatusCode.INVALID_ARGUMENT),
    errors.ModelNotFound: Mapping(grpc.StatusCode.NOT_FOUND),
    errors.QueueFull: Mapping(grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.DeadlineExpired: Mapping(grpc.StatusCode.DEADLINE_EXCEEDED),
    errors.FingerprintMismatch: Mapping(grpc.StatusCode.FAILED_PRECONDITION),
    errors.SpaceMismatch: Mapping(grpc.StatusCode.FAILED_PRECONDITION),
    errors.InspectUnavailable: Mapping(grpc.StatusCode.FAILED_PRECONDITION),
    errors.InferenceFailed: Mapping(grpc.StatusCode.INTERNAL),
    errors.EngineUnhealthy: Mapping(grpc.StatusCode.UNAVAILABLE, _UNAVAILABLE_RETRY_S),
    errors.NotReady: Mapping(grpc.StatusCode.UNAVAILABLE, _UNAVAILABLE_RETRY_S),
    errors.Draining: Mapping(grpc.StatusCode.UNAVAILABLE),
}
REASONS = [*(error.reason for error in ERROR_TABLE), EncserveError.reason]


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
    if mapping is None or not isinstance(error, EncserveError):  # a StartupError too: its text names paths
        return _failure(grpc.StatusCode.INTERNAL, EncserveError.reason, log_unexpected(error), None, [])
    message = str(error)
    text = message if len(message) <= _MAX_TEXT_CHARS else message[:_MAX_TEXT_CHARS] + "…"
    more: list[Message] = []
    if isinstance(error, RequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.problem[:_MAX_TEXT_CHARS]
        )
        more.append(error_details_pb2.BadRequest(field_violations=[violation]))
    retry_delay_s = error.retry_delay_s if isinstance(error, QueueFull) else mapping.retry_delay_s
    return _failure(mapping.code, type(error).reason, text, retry_delay_s, more)


def _failure(
    code: grpc.StatusCode, reason: str, text: str, retry_delay_s: float | None, more: list[Message]
) -> Failure:
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN), *more]
    if retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return Failure(code, reason, text, retry_delay_s, list(map(_packed, details)))


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def code_label(code: grpc.StatusCode) -> str:
    """A status code as Go writes it, which is what dashboards expect: "OK", "InvalidArgument", "Canceled"."""
    if code is grpc.StatusCode.OK:
        return "OK"
    if code is grpc.StatusCode.CANCELLED:
        return "Canceled"
    return "".join(word.capitalize() for word in code.name.split("_"))
