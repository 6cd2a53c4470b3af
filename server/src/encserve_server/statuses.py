"""The statuses of replies in all protocols."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a reply in each protocol.

    Attributes:
        grpc: The name of the gRPC status code.
        openai: The HTTP status on OpenAI's routes.
        openai_type: The `type` of the error on OpenAI's routes.
        tei: The HTTP status on text-embeddings-inference's routes.
        tei_type: The `error_type` on text-embeddings-inference's routes.
        openai_code: The `code` of the error on OpenAI's routes; empty if OpenAI defines no code for the error.
    """

    grpc: str
    openai: int
    openai_type: str
    tei: int
    tei_type: Literal["Backend", "Empty", "Overloaded", "Tokenizer", "Unhealthy", "Validation"] = "Validation"
    openai_code: str = ""


_REQUEST, _SERVER, _RATE = "invalid_request_error", "server_error", "rate_limit_error"

OK = Status("OK", 200, "", 200)
# The caller disconnected before the reply. nginx also uses 499 for this. The server counts this status but never sends
# it.
CANCELLED = Status("CANCELLED", 499, "", 499)
EXPIRED = Status("DEADLINE_EXCEEDED", 499, "", 499)
UNKNOWN = Status("INTERNAL", 500, _SERVER, 500, "Backend")
NO_SUCH_PATH = Status("UNIMPLEMENTED", 404, _REQUEST, 404)
WRONG_METHOD = Status("UNIMPLEMENTED", 405, _REQUEST, 405)

INVALID = Status("INVALID_ARGUMENT", 400, _REQUEST, 422)
EMPTY = Status("INVALID_ARGUMENT", 400, _REQUEST, 400, "Empty")
MALFORMED = Status("INVALID_ARGUMENT", 400, _REQUEST, 400)
UNSUPPORTED = Status("INVALID_ARGUMENT", 415, _REQUEST, 415)
TOO_MANY = Status("INVALID_ARGUMENT", 400, _REQUEST, 413)
TOO_LONG = Status("INVALID_ARGUMENT", 400, _REQUEST, 422, openai_code="context_length_exceeded")
TOO_LARGE = Status("INVALID_ARGUMENT", 413, _REQUEST, 413)
NOT_FOUND = Status("NOT_FOUND", 404, _REQUEST, 404)
UNAUTHENTICATED = Status("UNAUTHENTICATED", 401, _REQUEST, 401, openai_code="invalid_api_key")
FORBIDDEN = Status("PERMISSION_DENIED", 403, _REQUEST, 403)
EXHAUSTED = Status("RESOURCE_EXHAUSTED", 429, _RATE, 429, "Overloaded", "rate_limit_exceeded")
LATE = Status("DEADLINE_EXCEEDED", 408, _REQUEST, 408)
MISMATCH = Status("FAILED_PRECONDITION", 412, _REQUEST, 412)
FAILED = Status("INTERNAL", 500, _SERVER, 424, "Backend")
UNAVAILABLE = Status("UNAVAILABLE", 503, _SERVER, 503, "Unhealthy")
