"""Error to HTTP status, by one table for both protocols."""

import re
from dataclasses import dataclass
from typing import Literal

from encserve_server import errors
from encserve_server.errors import EncserveError, QueueFull, RequestError
from encserve_server.telemetry.logs import log_unexpected

_MAX_TEXT_CHARS = 1000
_UNAVAILABLE_RETRY_S = 1.0

# With its default, LangChain sends the ids of OpenAI's own tokenizer to whatever server it is pointed at.
_IDS_ADVICE = (
    ". Send text, or ids of this model's own tokenizer: LangChain's OpenAIEmbeddings do with "
    "check_embedding_ctx_length=False"
)

TeiType = Literal["Backend", "Empty", "Overloaded", "Tokenizer", "Unhealthy", "Validation"]


class EmptyInputs(errors.InvalidField):
    """There are no inputs, which text-embeddings-inference tells from other mistakes."""

    reason = errors.InvalidField.reason


class UnknownField(errors.InvalidField):
    """There is a field that nobody knows: its name is the caller's own."""

    reason = errors.InvalidField.reason


@dataclass(frozen=True, slots=True)
class Mapping:
    """What a caller sees of an error class.

    Attributes:
        openai_status: The status where OpenAI's protocol is spoken.
        openai_type: The error's `type` there.
        tei_status: The status where text-embeddings-inference's protocol is spoken.
        tei_type: The error's `error_type` there.
        openai_code: The error's `code` in OpenAI's protocol, where that has a name of its own for it.
        retry_delay_s: When to try again; None where that does not help.
    """

    openai_status: int
    openai_type: str
    tei_status: int
    tei_type: TeiType
    openai_code: str = ""
    retry_delay_s: float | None = None


_INVALID = "invalid_request_error"
_SERVER = "server_error"
ERROR_TABLE: dict[type[EncserveError], Mapping] = {
    errors.InvalidField: Mapping(400, _INVALID, 422, "Validation"),
    EmptyInputs: Mapping(400, _INVALID, 400, "Empty"),
    UnknownField: Mapping(400, _INVALID, 422, "Validation"),
    errors.MalformedRequest: Mapping(400, _INVALID, 400, "Validation"),
    errors.TooManyInputs: Mapping(400, _INVALID, 413, "Validation"),
    errors.SequenceTooLong: Mapping(400, _INVALID, 422, "Validation", "context_length_exceeded"),
    errors.RequestTooLarge: Mapping(413, _INVALID, 413, "Validation"),
    errors.ResponseTooLarge: Mapping(400, _INVALID, 413, "Validation"),
    errors.ModelNotFound: Mapping(404, _INVALID, 404, "Validation"),
    errors.QueueFull: Mapping(429, "rate_limit_error", 429, "Overloaded", "rate_limit_exceeded"),
    errors.DeadlineExpired: Mapping(408, _INVALID, 408, "Validation"),
    errors.FingerprintMismatch: Mapping(412, _INVALID, 412, "Validation"),
    errors.SpaceMismatch: Mapping(412, _INVALID, 412, "Validation"),
    errors.InspectUnavailable: Mapping(412, _INVALID, 412, "Validation"),
    errors.InferenceFailed: Mapping(500, _SERVER, 424, "Backend"),
    errors.EngineUnhealthy: Mapping(503, _SERVER, 503, "Unhealthy", retry_delay_s=_UNAVAILABLE_RETRY_S),
    errors.NotReady: Mapping(503, _SERVER, 503, "Unhealthy", retry_delay_s=_UNAVAILABLE_RETRY_S),
    errors.Draining: Mapping(503, _SERVER, 503, "Unhealthy", retry_delay_s=_UNAVAILABLE_RETRY_S),
}
_UNKNOWN = Mapping(500, _SERVER, 500, "Backend")
# What is answered to those who ask for nothing that there is.
NO_SUCH_PATH = Mapping(404, _INVALID, 404, "Validation")
WRONG_METHOD = Mapping(405, _INVALID, 405, "Validation")
REASONS = sorted({EncserveError.reason, *(error.reason for error in ERROR_TABLE)})


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a caller sees it.

    Attributes:
        mapping: Its row of the table.
        reason: The same as over gRPC.
        text: For people.
        field: The wrong field, as the protocol calls it; empty if it is the whole request.
        retry_delay_s: When to try again; None where that does not help.
    """

    mapping: Mapping
    reason: str
    text: str
    field: str = ""
    retry_delay_s: float | None = None


def to_failure(error: Exception, inputs_name: str) -> Failure:
    """What the caller sees of an error, where inputs are in a field of this name.

    Anything but our own errors becomes a fixed text and an id that is logged.
    """
    if not isinstance(error, EncserveError) or (mapping := ERROR_TABLE.get(type(error))) is None:
        return Failure(_UNKNOWN, EncserveError.reason, log_unexpected(error))
    field, text = "", str(error)
    if isinstance(error, RequestError):
        field = error.field if isinstance(error, UnknownField) else _own_name(error.field, inputs_name)
        text = f"{field}: {error.problem}" if field else error.problem
        if ".token_ids.ids[" in error.field:
            text += _IDS_ADVICE
    retry_delay_s = error.retry_delay_s if isinstance(error, QueueFull) else mapping.retry_delay_s
    text = re.sub(r"\b(inputs|texts)\[", f"{inputs_name}[", text)
    if len(text) > _MAX_TEXT_CHARS:
        text = text[:_MAX_TEXT_CHARS] + "…"
    return Failure(mapping, type(error).reason, text, field, retry_delay_s)


def _own_name(field: str, inputs_name: str) -> str:
    """A field's path in these protocols: `input[3][17]` for `inputs[3].token_ids.ids[17]`."""
    field = re.sub(r"\.text$|\.token_ids(\.ids)?", "", field).removeprefix("options.")
    return "model" if field == "model_version" else re.sub(r"^(inputs|texts)\b", inputs_name, field)
