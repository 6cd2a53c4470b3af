"""Maps each error class to its gRPC code, HTTP statuses and retry delay."""

from dataclasses import dataclass, replace
from typing import Literal

from encserve_server import errors
from encserve_server.errors import (
    BudgetFull,
    EncserveError,
    FieldPath,
    Naming,
    Part,
    QueueFull,
    RateLimited,
    RequestError,
)

# All gRPC trailers together may have 8 KiB, and they contain the text twice.
MAX_TEXT_CHARS = 1000
_RETRY_DELAY_S = 0.5

TeiType = Literal["Backend", "Empty", "Overloaded", "Tokenizer", "Unhealthy", "Validation"]


@dataclass(frozen=True, slots=True)
class Status:
    """The statuses of an error class in all protocols.

    Attributes:
        grpc: The gRPC status code's name.
        openai: The HTTP status on the routes of OpenAI.
        openai_type: The `type` of the error on the routes of OpenAI.
        tei: The HTTP status on the routes of text-embeddings-inference.
        tei_type: The `error_type` on the routes of text-embeddings-inference.
        openai_code: The `code` of the error on the routes of OpenAI; empty if OpenAI defines no code for it.
        retry_delay_s: The seconds until a retry; None if a retry does not help. An error can have its own delay.
    """

    grpc: str
    openai: int
    openai_type: str
    tei: int
    tei_type: TeiType
    openai_code: str = ""
    retry_delay_s: float | None = None


_INVALID = "invalid_request_error"
_SERVER = "server_error"

OK = Status("OK", 200, "", 200, "Validation")
# nginx uses 499 if the caller disconnected before the reply. The status is counted and never sent.
CANCELLED = Status("CANCELLED", 499, "", 499, "Validation")
EXPIRED = Status("DEADLINE_EXCEEDED", 499, "", 499, "Validation")
UNKNOWN = Status("INTERNAL", 500, _SERVER, 500, "Backend")
NO_SUCH_PATH = Status("UNIMPLEMENTED", 404, _INVALID, 404, "Validation")
WRONG_METHOD = Status("UNIMPLEMENTED", 405, _INVALID, 405, "Validation")

ERROR_TABLE: dict[type[EncserveError], Status] = {
    errors.InvalidField: Status("INVALID_ARGUMENT", 400, _INVALID, 422, "Validation"),
    errors.EmptyInputs: Status("INVALID_ARGUMENT", 400, _INVALID, 400, "Empty"),
    errors.UnknownField: Status("INVALID_ARGUMENT", 400, _INVALID, 422, "Validation"),
    errors.MalformedRequest: Status("INVALID_ARGUMENT", 400, _INVALID, 400, "Validation"),
    errors.UnsupportedEncoding: Status("INVALID_ARGUMENT", 415, _INVALID, 415, "Validation"),
    errors.TooManyInputs: Status("INVALID_ARGUMENT", 400, _INVALID, 413, "Validation"),
    errors.TooManyOutputs: Status("INVALID_ARGUMENT", 400, _INVALID, 413, "Validation"),
    errors.SequenceTooLong: Status("INVALID_ARGUMENT", 400, _INVALID, 422, "Validation", "context_length_exceeded"),
    errors.TooLongToPool: Status("INVALID_ARGUMENT", 400, _INVALID, 422, "Validation"),
    errors.RequestTooLarge: Status("INVALID_ARGUMENT", 413, _INVALID, 413, "Validation"),
    errors.ResponseTooLarge: Status("INVALID_ARGUMENT", 400, _INVALID, 413, "Validation"),
    errors.ModelNotFound: Status("NOT_FOUND", 404, _INVALID, 404, "Validation"),
    errors.Unauthenticated: Status("UNAUTHENTICATED", 401, _INVALID, 401, "Validation", "invalid_api_key"),
    errors.PermissionDenied: Status("PERMISSION_DENIED", 403, _INVALID, 403, "Validation"),
    errors.RateLimited: Status("RESOURCE_EXHAUSTED", 429, "rate_limit_error", 429, "Overloaded", "rate_limit_exceeded"),
    errors.QueueFull: Status("RESOURCE_EXHAUSTED", 429, "rate_limit_error", 429, "Overloaded", "rate_limit_exceeded"),
    errors.ShareExceeded: Status(
        "RESOURCE_EXHAUSTED", 429, "rate_limit_error", 429, "Overloaded", "rate_limit_exceeded"
    ),
    errors.BudgetFull: Status("RESOURCE_EXHAUSTED", 429, "rate_limit_error", 429, "Overloaded", "rate_limit_exceeded"),
    errors.DeadlineExpired: Status("DEADLINE_EXCEEDED", 408, _INVALID, 408, "Validation"),
    errors.FingerprintMismatch: Status("FAILED_PRECONDITION", 412, _INVALID, 412, "Validation"),
    errors.SpaceMismatch: Status("FAILED_PRECONDITION", 412, _INVALID, 412, "Validation"),
    errors.InspectUnavailable: Status("FAILED_PRECONDITION", 412, _INVALID, 412, "Validation"),
    errors.InferenceFailed: Status("INTERNAL", 500, _SERVER, 424, "Backend"),
    errors.EngineUnhealthy: Status("UNAVAILABLE", 503, _SERVER, 503, "Unhealthy", retry_delay_s=_RETRY_DELAY_S),
    errors.NotReady: Status("UNAVAILABLE", 503, _SERVER, 503, "Unhealthy", retry_delay_s=_RETRY_DELAY_S),
    errors.Draining: Status("UNAVAILABLE", 503, _SERVER, 503, "Unhealthy"),
}
STATUSES = frozenset({OK, CANCELLED, EXPIRED, UNKNOWN, *ERROR_TABLE.values()})
REASONS = sorted({EncserveError.reason, *(error.reason for error in ERROR_TABLE)})


@dataclass(frozen=True, slots=True)
class Failure:
    """An error with the status and the texts that a caller gets.

    Attributes:
        status: The row of the table.
        reason: The machine-readable reason, such as INVALID_FIELD.
        text: The text for people.
        field: The name of the wrong field in the protocol; empty if the whole request is wrong.
        problem: The text without the field.
        retry_delay_s: The seconds until a retry; None if a retry does not help.
        is_request_error: Whether the same request will never succeed.
        part: The wrong part of the request; None if the error has no part.
    """

    status: Status
    reason: str
    text: str
    field: str = ""
    problem: str = ""
    retry_delay_s: float | None = None
    is_request_error: bool = False
    part: Part | None = None


def to_failure(error: EncserveError, naming: Naming) -> Failure | None:
    """Convert an error for a caller of a protocol. Return None for an error that callers must not see."""
    status = ERROR_TABLE.get(type(error))
    if status is None:
        return None
    delay_s = error.retry_delay_s if isinstance(error, QueueFull | BudgetFull | RateLimited) else status.retry_delay_s
    text, problem = _shorten(error.text(naming)), _shorten(error.problem_text(naming))
    failure = Failure(status, type(error).reason, text, "", problem, delay_s)
    if not isinstance(error, RequestError):
        return failure
    part = error.field.part if isinstance(error.field, FieldPath) else None
    return replace(failure, field=error.field_name(naming), is_request_error=True, part=part)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "…"
