"""Everything that a call of this library raises, one class per cause.

    EncserveError
    ├── InvalidRequestError (ValueError)    the request can never succeed as it is
    │   ├── InvalidInputError (TypeError)   refused here, before anything was sent
    │   ├── MessageTooLargeError            one sequence whose request or reply is over a limit, alone in its message
    │   └── InspectUnavailableError         this model, or this server, does not answer `inspect`
    ├── ModelNotFoundError (LookupError)    no such model or version
    ├── AccessDeniedError                   the server, or a proxy before it, did not accept who is asking
    │   ├── UnauthenticatedError            no key, or one that is not known, or not any more
    │   └── PermissionDeniedError           the key is known, and may not use this model or method
    ├── OverloadedError                     refused for lack of room; see its retry_delay_seconds
    │   └── RateLimitedError                more than the key's own rate allows
    ├── DeadlineError (TimeoutError)        timeout_seconds, the call's or a message's, passed
    ├── ServerUnavailableError              no server answers, or the one that does is stopping or failing
    ├── InferenceError                      the model could not compute one of these sequences
    ├── ServerError                         the server failed in a way that it does not explain
    ├── ProtocolError                       the answer is not what the contract promises
    ├── FingerprintError                    the vectors are from another bundle than expected, or than each other
    ├── SpaceError                          the vectors are from another space than expected
    ├── CallCancelledError                  the call was cancelled by something other than its caller
    └── ClientClosedError (RuntimeError)    the client was closed

`grpc.RpcError` never leaves the library. A cancelled asyncio task still raises `asyncio.CancelledError`.
"""

import grpc


class EncserveError(Exception):
    """Base of all errors of this library.

    Attributes:
        code: The gRPC status behind the error; for errors found here, the one that fits best.
        reason: The server's machine-readable reason, such as "QUEUE_FULL"; empty where it gave none.
        attempts: How often the failing message had been sent; 0 where nothing was sent.
        index: The place, among the caller's inputs, of the one that is at fault; None where that is not one of them.
    """

    def __init__(
        self, message: str, *, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN, reason: str = "", attempts: int = 0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.attempts = attempts
        self.index: int | None = None


class InvalidRequestError(EncserveError, ValueError):
    """The request can never succeed as it is; the text names the field, the index and the numbers."""


class InvalidInputError(InvalidRequestError, TypeError):
    """An argument was refused here, before anything was sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=grpc.StatusCode.INVALID_ARGUMENT)


class MessageTooLargeError(InvalidRequestError):
    """One sequence's request or reply is over a limit. Several sequences in a message are split up instead."""


class InspectUnavailableError(InvalidRequestError):
    """The model's bundle has no graph to look into, or the server has `inspect` turned off.

    `ModelInfo.can_inspect` says so beforehand.
    """


class ModelNotFoundError(EncserveError, LookupError):
    """The server has no such model or version."""


class AccessDeniedError(EncserveError):
    """The server, or a proxy before it, did not accept who is asking."""


class UnauthenticatedError(AccessDeniedError):
    """There is no key, or no certificate, that the server knows; `api_key` of the client is the key."""


class PermissionDeniedError(AccessDeniedError):
    """The server knows the key, and its callers file does not allow it this model, or `inspect`."""


class OverloadedError(EncserveError):
    """The server had no room, and went on having none for as long as the retries lasted.

    Attributes:
        retry_delay_seconds: When trying again may help, by the server's own estimate; None where it gave none.
    """

    retry_delay_seconds: float | None = None


class RateLimitedError(OverloadedError):
    """The key has used its rate up, and went on having used it up for as long as the retries lasted."""


class DeadlineError(EncserveError, TimeoutError):
    """timeout_seconds passed: the call's own, or for one of its messages the client's; see `EncoderClient`."""


class ServerUnavailableError(EncserveError):
    """No server answers, or the one that does is stopping or failing, and the retries are used up."""


class InferenceError(EncserveError):
    """The model could not compute one of these sequences."""


class ServerError(EncserveError):
    """The server failed in a way that it does not explain; its log does."""


class ProtocolError(EncserveError):
    """The answer is not what the contract promises: versions that do not fit together, or something in between."""


class FingerprintError(EncserveError):
    """Vectors would come from another bundle than expected, or from several.

    Either the client has an `expected_fingerprint` and the model another, or parts of one call were answered by
    different versions, again and again: that may happen while a model is being replaced. Naming the version avoids it.
    """


class SpaceError(EncserveError):
    """The client has an `expected_space_id` and the model another: its vectors must not be compared with those."""


class CallCancelledError(EncserveError):
    """The call was cancelled by something other than its caller."""


class ClientClosedError(EncserveError, RuntimeError):
    """The client was closed before or during the call."""

    def __init__(self, message: str = "the client is closed") -> None:
        super().__init__(message, code=grpc.StatusCode.CANCELLED)
