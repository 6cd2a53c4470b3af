"""Why one message failed, which exception reports the failure, and whether the message is sent again."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from encserve_client import exceptions as errors
from encserve_client.retry import RetryPolicy

_CUT_OFF_CODES = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})
REASON_TRAILER = "encserve-error-reason"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"

# What the server calls a message that may pass in smaller pieces.
_TOO_LARGE_REASONS = frozenset({"RESPONSE_TOO_LARGE", "REQUEST_TOO_LARGE", "TOO_MANY_INPUTS"})
# What the server says where it has no room now.
_NO_ROOM_REASONS = frozenset({"QUEUE_FULL", "SHARE_EXCEEDED", "BUDGET_FULL", "RATE_LIMITED"})
# How long a message waits for a server that has never answered.
_FIRST_CONTACT_SECONDS = 2.0
# How the server's text begins where one input is at fault.
_AT_FAULT = re.compile(r"(?:inputs|texts)\[(\d+)\]")
# gRPC itself refuses an oversize message, on either side, with this text and no reason of ours.
_TOO_LARGE_TEXT = re.compile(r"message larger than max|exceeds maximum (allowed )?size", re.IGNORECASE)
# The server or the network failed one message. Other codes concern the whole call: its options, its caller, the server.
_CODES_OF_A_MESSAGE = frozenset(
    {
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)

_BY_CODE: dict[grpc.StatusCode, type[errors.EncserveError]] = {
    grpc.StatusCode.CANCELLED: errors.CallCancelledError,
    grpc.StatusCode.UNKNOWN: errors.ServerError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.NOT_FOUND: errors.ModelNotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.ServerError,
    grpc.StatusCode.PERMISSION_DENIED: errors.AccessDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: errors.AccessDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.InvalidRequestError,
    grpc.StatusCode.ABORTED: errors.ServerError,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: errors.ProtocolError,
    grpc.StatusCode.INTERNAL: errors.ServerError,
    grpc.StatusCode.UNAVAILABLE: errors.ServerUnavailableError,
    grpc.StatusCode.DATA_LOSS: errors.ServerError,
}
# What a reason says beyond its code.
_BY_REASON: dict[str, type[errors.EncserveError]] = {
    "FINGERPRINT_MISMATCH": errors.FingerprintError,
    "INFERENCE_FAILED": errors.InferenceError,
    "INSPECT_UNAVAILABLE": errors.InspectUnavailableError,
    "PERMISSION_DENIED": errors.PermissionDeniedError,
    "RATE_LIMITED": errors.RateLimitedError,
    "SPACE_MISMATCH": errors.SpaceError,
    "UNAUTHENTICATED": errors.UnauthenticatedError,
}


@dataclass(frozen=True, slots=True)
class CallInfo:
    """What an error's text says of the call.

    Attributes:
        target: The server as the caller named it; empty where nobody said.
        timeout_seconds: How long the call, or one message or input of it, may take.
    """

    target: str = ""
    timeout_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one message failed.

    Attributes:
        code: The gRPC status, never OK.
        message: The text for people.
        reason: The server's machine-readable reason; empty where it gave none.
        retry_delay_seconds: When trying again may help, by the server's word; None where it said nothing.
        retry_forbidden: Whether the server said that trying again does not help.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    retry_delay_seconds: float | None = None
    retry_forbidden: bool = False

    @property
    def is_of_message(self) -> bool:
        """Whether other messages of the call may still succeed."""
        return self.code in _CODES_OF_A_MESSAGE

    @property
    def too_large(self) -> bool:
        """Whether the message is over a limit, so that its halves may pass."""
        if self.reason:
            return self.reason in _TOO_LARGE_REASONS
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and bool(_TOO_LARGE_TEXT.search(self.message))

    def input_at_fault(self, n_inputs: int) -> int | None:
        """The place of the one input that failed, in a message of so many; None where it is not one of them."""
        found = _AT_FAULT.match(self.message)
        place = int(found[1]) if found else 0 if self.too_large and n_inputs == 1 else n_inputs
        return place if place < n_inputs else None

    def to_exception(
        self,
        attempts: int,
        first_index: int = 0,
        call: CallInfo = CallInfo(),
        n_inputs: int = 2**31,
    ) -> errors.EncserveError:
        """The exception for the caller.

        Args:
            attempts: How often the message was sent.
            first_index: The index, among the caller's inputs, of the message's first. The server counts from the
                message's own first input; the text is put right.
            call: The call that the message belongs to.
            n_inputs: How many inputs the message has, where the caller knows: of one alone the place is certain.
        """
        if self.too_large:
            kind: type[errors.EncserveError] = errors.MessageTooLargeError
        else:
            kind = _BY_REASON.get(self.reason) or _BY_CODE.get(self.code, errors.ServerError)
        error = kind.__new__(kind)
        errors.EncserveError.__init__(
            error, self._text(attempts, first_index, call), code=self.code, reason=self.reason, attempts=attempts
        )
        place = self.input_at_fault(n_inputs)
        error.index = None if place is None else first_index + place
        if isinstance(error, errors.OverloadedError):
            error.retry_delay_seconds = self.retry_delay_seconds
        return error

    def _text(self, attempts: int, first_index: int, call: CallInfo) -> str:
        text = self.message or self.code.name
        if first_index:
            text = re.sub(
                r"\b(inputs|texts)\[(\d+)\]", lambda match: f"{match[1]}[{int(match[2]) + first_index}]", text
            )
        # gRPC's own texts for these two name neither the server that was asked nor the time that it had.
        if call.target and self.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            text = f"{text}: {call.target} did not answer within {call.timeout_seconds:g} s"
        elif call.target and self.code is grpc.StatusCode.UNAVAILABLE:
            text = f"{call.target}: {text}"
        elif self.reason == "UNAUTHENTICATED":
            text = f"{text}; this client takes the key from api_key=, --api-key or ENCSERVE_API_KEY"
        return f"{text} (sent {attempts} times)" if attempts > 1 else text


def failure_of_status(
    code: grpc.StatusCode, message: str | None, trailers: Iterable[tuple[str, str | bytes]] | None
) -> Failure:
    """Reads the status and the trailers of an RPC that failed.

    A call that a proxy cuts off, because its server died after the answer had begun, has no status but gRPC's own for
    HTTP/2's RST_STREAM. It counts as what it is: UNAVAILABLE.
    """
    texts = {key: value for key, value in trailers or () if isinstance(value, str)}
    if code in _CUT_OFF_CODES and not texts.get(REASON_TRAILER) and "RST_STREAM" in (message or ""):
        code = grpc.StatusCode.UNAVAILABLE
    pushback = texts.get(PUSHBACK_TRAILER)
    delay = _pushback_seconds(pushback)
    # A pushback that is negative or no number means "do not retry" (gRFC A6).
    forbidden = pushback is not None and delay is None
    return Failure(code, message or "", texts.get(REASON_TRAILER, ""), delay, forbidden)


def failure_of_call(call: Any) -> Failure:
    """Reads the status of one of gRPC's calls, or of its errors, that failed."""
    return failure_of_status(call.code() or grpc.StatusCode.UNKNOWN, call.details(), call.trailing_metadata())


def failure_of_crash(error: Exception) -> Failure:
    """An error that gRPC should not raise, as a failure: the driver waits for one, and must not wait for ever."""
    return Failure(grpc.StatusCode.UNKNOWN, f"gRPC could not make the call: {error!r}")


@dataclass(slots=True)
class ServerHistory:
    """Whether the server of a client has ever answered, also with an error. Each client has one.

    A server that has answered before and is UNAVAILABLE now is probably being restarted, so the client waits. A server
    that has never answered is probably not there, or its address is wrong.
    """

    server_seen: bool = False

    def is_outage(self, failure: Failure) -> bool:
        """Record a failure. Return whether a server that has answered before is unavailable."""
        self.server_seen = self.server_seen or bool(failure.reason)  # only the server itself gives a reason
        return self.server_seen and failure.code is grpc.StatusCode.UNAVAILABLE


def is_retryable(failure: Failure) -> bool:
    """Whether sending the same message again may help."""
    if failure.retry_forbidden:
        return False
    # A gRPC server that stops answers what it has read but not begun with CANCELLED. What is cancelled on this side
    # never comes here: see `Wire.wait`.
    if failure.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return True
    # gRPC itself answers RESOURCE_EXHAUSTED to oversize messages, and a proxy to whatever it likes: only our server's
    # own word that it is a matter of time counts.
    return failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and (
        failure.reason in _NO_ROOM_REASONS or failure.retry_delay_seconds is not None
    )


def seconds_until_retry(
    policy: RetryPolicy,
    failure: Failure,
    attempts: int,
    remaining_seconds: float,
    random: Callable[[], float],
    is_outage: bool = False,
) -> float | None:
    """Return how long to wait before a message is sent again, or None for never.

    Args:
        policy: The policy.
        failure: How the last attempt ended.
        attempts: How often the message has been sent, at least 1.
        remaining_seconds: The time until the deadline of the message.
        random: Draws evenly from [0, 1).
        is_outage: See `ServerHistory.is_outage`.
    """
    if attempts >= policy.max_attempts or not is_retryable(failure):
        return None
    if failure.code is grpc.StatusCode.UNAVAILABLE and not is_outage:  # no server has ever answered
        waited = sum(map(policy.longest_wait, range(1, attempts)))
        remaining_seconds = min(remaining_seconds, _FIRST_CONTACT_SECONDS - waited)
    # Never less than half, so that few attempts outlast the time in which a server that is back is noticed.
    wait = (failure.retry_delay_seconds or 0.0) + (0.5 + random() / 2) * policy.longest_wait(attempts)
    return wait if wait < remaining_seconds else None


def _pushback_seconds(text: str | None) -> float | None:
    if text is None or not text.isascii() or not text.isdigit():
        return None
    return int(text) / 1000
