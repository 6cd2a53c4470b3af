"""The exceptions of this library, one class per cause.

    EncserveError
    ├── InvalidRequestError (ValueError)    the request must be changed to succeed
    │   ├── InvalidInputError (TypeError)   the client refused an argument
    │   ├── MessageTooLargeError            the request or the reply of one single input is over a limit
    │   └── InspectUnavailableError         the model or the server does not support `inspect`
    ├── ModelNotFoundError (LookupError)    no such model or version
    ├── AccessDeniedError                   the server or a proxy refused the caller
    │   ├── UnauthenticatedError            the key is missing, unknown or revoked
    │   └── PermissionDeniedError           the key is valid but not allowed to use this model or method
    ├── OverloadedError                     the server was full; see `retry_delay_seconds`
    │   └── RateLimitedError                the key is over its rate limit
    ├── DeadlineError (TimeoutError)        the time of the call or of one message is over
    ├── ServerUnavailableError              no server answers, or the server is stopping or failing
    ├── InferenceError                      the model could not compute an input
    ├── ServerError                         the server failed without an explanation
    ├── ProtocolError                       the answer is not valid
    ├── FingerprintError                    the vectors are from another bundle than expected, or from several
    ├── SpaceError                          the vectors are from another space than expected
    ├── CallCancelledError                  the call was cancelled, but not by the caller
    └── ClientClosedError (RuntimeError)    the client was closed

No method raises `grpc.RpcError`, except the functions of `raw_method`. A cancelled asyncio task still raises
`asyncio.CancelledError`.
"""

import grpc


class EncserveError(Exception):
    """Base of all errors of this library.

    Attributes:
        code: The gRPC status of the error. For an error that the client itself found: the closest status.
        reason: The server's machine-readable reason, such as "QUEUE_FULL"; "" without one.
        attempts: How often the failed message was sent; 0 if nothing was sent.
        index: The index of the input that caused the error; None if the error concerns no single input.
        field: The argument that caused the error, such as "timeout_seconds" or "inputs[3]". The error message
            begins with the argument. "" if the error concerns no single argument.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        attempts: int = 0,
        field: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.attempts = attempts
        self.field = field
        self.index: int | None = None

    @property
    def problem(self) -> str:
        """The error message without the argument's name."""
        return str(self).removeprefix(self.field).removeprefix(":").lstrip()


class InvalidRequestError(EncserveError, ValueError):
    """The request must be changed to succeed. The error message names the field, the index and the numbers."""


class InvalidInputError(InvalidRequestError, TypeError):
    """The client refused an argument or an input. Earlier messages of the same call may have been sent."""

    def __init__(self, problem: str, *, field: str = "") -> None:
        message = f"{field} {problem}" if field else problem
        super().__init__(message, code=grpc.StatusCode.INVALID_ARGUMENT, field=field)


class MessageTooLargeError(InvalidRequestError):
    """The request or the reply of one single input is over a limit. Messages of several inputs are split instead."""


class InspectUnavailableError(InvalidRequestError):
    """The model's bundle does not support `inspect`, or the server has `inspect` turned off.

    Check `ModelInfo.can_inspect` before a call.
    """


class ModelNotFoundError(EncserveError, LookupError):
    """The server has no such model or version."""


class AccessDeniedError(EncserveError):
    """The server or a proxy refused the caller."""


class UnauthenticatedError(AccessDeniedError):
    """The server does not know the key or the client certificate. Set `api_key` of the client."""


class PermissionDeniedError(AccessDeniedError):
    """The key is valid, but the server's callers file does not allow this model, or `inspect`."""


class OverloadedError(EncserveError):
    """The server was full until the last retry.

    Attributes:
        retry_delay_seconds: The delay until the next attempt, as the server asked; None if the server gave no delay.
    """

    retry_delay_seconds: float | None = None


class RateLimitedError(OverloadedError):
    """The key was over its rate limit until the last retry."""


class DeadlineError(EncserveError, TimeoutError):
    """The time of the call, or of one message, is over. See `timeout_seconds` of `EncoderClient`."""


class ServerUnavailableError(EncserveError):
    """No server answers, or the server is stopping or failing. The retries are used up."""


class InferenceError(EncserveError):
    """The model could not compute an input."""


class ServerError(EncserveError):
    """The server failed without an explanation. The server's log has the cause."""


class ProtocolError(EncserveError):
    """The answer is not valid. The versions of client and server differ, or a proxy changed the answer."""


class FingerprintError(EncserveError):
    """The vectors are from another bundle than expected, or from several bundles.

    First case: the model's fingerprint differs from `expected_fingerprint` of the client. Second case: a model was
    replaced again and again, so different versions answered parts of one call. To avoid the second case, name the
    version.
    """


class SpaceError(EncserveError):
    """The `space_id` of the model differs from `expected_space_id` of the client. Never compare their vectors."""


class CallCancelledError(EncserveError):
    """The call was cancelled, but not by the caller."""


class ClientClosedError(EncserveError, RuntimeError):
    """The client was closed before or during the call."""

    def __init__(self, message: str = "the client is closed; make a new client") -> None:
        super().__init__(message, code=grpc.StatusCode.CANCELLED)
