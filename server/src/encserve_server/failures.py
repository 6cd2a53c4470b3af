"""Converts an error to the status and the texts that a caller gets."""

from dataclasses import dataclass

from encserve_server.errors import CALLER_ERRORS, EncserveError, FieldPath, Naming, RequestError, RequestField
from encserve_server.statuses import CANCELLED, EXPIRED, OK, UNKNOWN, Status

# gRPC limits all trailers of a reply to 8 KiB together. The trailers contain the text twice.
MAX_TEXT_CHARS = 1000

# All statuses and reasons of replies, for metrics.
STATUSES = frozenset({OK, CANCELLED, EXPIRED, UNKNOWN, *CALLER_ERRORS.values()})
REASONS = sorted({EncserveError.reason, *(error.reason for error in CALLER_ERRORS)})


@dataclass(frozen=True, slots=True)
class Failure:
    """An error with the status and the texts that a caller gets.

    Attributes:
        status: The status.
        reason: The machine-readable reason, such as INVALID_FIELD.
        text: The text for people.
        field: The name of the wrong field in the protocol; empty if the whole request is wrong.
        problem: The text without the field.
        retry_delay_s: The seconds until a retry; None if a retry does not help.
        is_request_error: Whether a retry of the same request will fail too.
        request_field: The wrong field, independent of the protocol. None if the whole request is wrong, or if only this
            protocol has the field.
        refused: (text, reason) of each refused input, in the order of the inputs. The first one is this error. Empty if
            the error is not the result of a check of all inputs.
    """

    status: Status
    reason: str
    text: str
    field: str = ""
    problem: str = ""
    retry_delay_s: float | None = None
    is_request_error: bool = False
    request_field: RequestField | None = None
    refused: tuple[tuple[str, str], ...] = ()


def to_failure(error: EncserveError, naming: Naming) -> Failure | None:
    """Convert an error for a caller of a protocol. Return None for an error that callers must not see."""
    if error.status is None:
        return None
    text, problem = _shorten(error.text(naming)), _shorten(error.problem_text(naming))
    if not isinstance(error, RequestError):
        return Failure(error.status, error.reason, text, problem=problem, retry_delay_s=error.retry_delay_s)
    request_field = error.field.field if isinstance(error.field, FieldPath) else None
    field = error.field_name(naming)
    refused = () if error.others is None else (error, *error.others)
    return Failure(
        error.status,
        error.reason,
        text,
        field,
        problem,
        is_request_error=True,
        request_field=request_field,
        refused=tuple((_shorten(it.text(naming)), it.reason) for it in refused),
    )


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "…"
