"""Failures of messages: causes, exceptions, and retries."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from encserve_client import exceptions as errors
from encserve_client.retry import OnOutage, Outage, RetryPolicy

_CUT_OFF_CODES = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})
REASON_TRAILER = "encserve-error-reason"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
REFUSED_INPUTS_TRAILER = "encserve-refused-inputs"

# The server's reasons for refusing a message that the client may split.
_TOO_LARGE_REASONS = frozenset({"RESPONSE_TOO_LARGE", "REQUEST_TOO_LARGE", "TOO_MANY_INPUTS"})
# The server's reasons for refusing a message while the server is full.
_NO_ROOM_REASONS = frozenset({"QUEUE_FULL", "SHARE_EXCEEDED", "BUDGET_FULL", "RATE_LIMITED"})
# The total time of retries if the server has never answered.
_FIRST_CONTACT_SECONDS = 2.0
# Shorter outages are not reported, for example if one of several servers restarts.
_REPORT_SECONDS = 0.5
# The start of the server's text if one input caused the failure.
_INPUT_AT_FAULT = re.compile(r"(?:inputs|texts|documents|document_vectors|pairs)\[(\d+)\]")
# The start of the server's text if one field of the request is wrong.
_FIELD = re.compile(
    r"(?:inputs|texts|documents|document_vectors|pairs|query|top_k|activation|input|options|tensors|model|model_version|"
    r"prompt_name|task|expected_fingerprint|expected_space_id)\b"
    r"[\w.\[\]]*(?=: )"
)
# Parts to remove from the server's field names.
_INNER = re.compile(r"^options\.|\.(?:text|token_ids|ids|embeddings|data)\b")
# The client's argument for a field of the server, if the two names differ.
_ARGUMENTS = {"data_type": "dtype", "model_version": "version"}
# If a message is too large, gRPC refuses it, in the client or in the server. The error has this text and no reason.
_TOO_LARGE_TEXT = re.compile(r"message larger than max|exceeds maximum (allowed )?size", re.IGNORECASE)
# Failures of one message. With other codes, the cause is the options, the caller or the server, so
# the whole call fails.
_CODES_OF_ONE_MESSAGE = frozenset(
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
# Reasons with a more specific exception than the exception of the status code.
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
class Failure:
    """The failure of one message.

    Attributes:
        code: The gRPC status, never OK.
        message: The text for people.
        reason: The server's machine-readable reason; "" without one.
        retry_delay_seconds: The retry delay that the server requested, if any.
        retry_forbidden: Whether the server forbids retries.
        refused: The failure of each input that the server refused. Empty if the server gave no list. Then other inputs
            may be wrong too.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    retry_delay_seconds: float | None = None
    retry_forbidden: bool = False
    refused: "tuple[Failure, ...]" = ()

    @property
    def is_full_server(self) -> bool:
        """Whether the server is full now, for this caller or for all callers."""
        # gRPC also uses RESOURCE_EXHAUSTED for oversize messages, and proxies use the code for their own limits. So
        # only a reason or a delay of our server counts.
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and (
            self.reason in _NO_ROOM_REASONS or self.retry_delay_seconds is not None
        )

    @property
    def affects_one_message(self) -> bool:
        """Whether other messages of the call may still succeed."""
        return self.code in _CODES_OF_ONE_MESSAGE

    @property
    def is_too_large(self) -> bool:
        """Whether the message is over a limit. Two smaller messages may then be accepted."""
        if self.reason:
            return self.reason in _TOO_LARGE_REASONS
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and bool(_TOO_LARGE_TEXT.search(self.message))

    def inputs_at_fault(self, n_inputs: int) -> "dict[int, Failure]":
        """Return the failure of each input at fault, by position in the message. The message has `n_inputs` inputs."""
        found: dict[int, Failure] = {}
        for failure in self.refused or (self,):
            name = _INPUT_AT_FAULT.match(failure.message)
            if name and int(name[1]) < n_inputs:
                found[int(name[1])] = failure
        return found or ({0: self} if self.is_too_large and n_inputs == 1 else {})

    def to_exception(
        self,
        attempts: int,
        indices: Sequence[int] = (),
        target: str = "",
        timeout_seconds: float = math.inf,
        arguments: Iterable[tuple[str, str]] = (),
    ) -> errors.EncserveError:
        """Return the exception for the caller.

        Args:
            attempts: How often the message was sent.
            indices: The caller's index of each input of the message. The exception's text has these indices instead of
                positions in the message.
            target: The target of the client; "" if unknown.
            timeout_seconds: The timeout of the call, or the client's timeout of each message.
            arguments: Prefixes of field names, and their replacements; see `Message.arguments`.
        """
        if self.is_too_large:
            kind: type[errors.EncserveError] = errors.MessageTooLargeError
        else:
            kind = _BY_REASON.get(self.reason) or _BY_CODE.get(self.code, errors.ServerError)
        text, field = self._text(attempts, indices, target, timeout_seconds), ""
        if found := _FIELD.match(text):
            field = _INNER.sub("", found[0])
            for begin, argument in arguments:
                if field.startswith(begin):
                    field = argument + field.removeprefix(begin)
                    break
            field = _ARGUMENTS.get(field, field)
            text = f"{field}{text[found.end() :]}"
        error = kind.__new__(kind)
        errors.EncserveError.__init__(error, text, code=self.code, reason=self.reason, attempts=attempts, field=field)
        for position in self.inputs_at_fault(len(indices)):
            error.index = indices[position]
            break
        if isinstance(error, errors.OverloadedError):
            error.retry_delay_seconds = self.retry_delay_seconds
        return error

    def _text(self, attempts: int, indices: Sequence[int], target: str, timeout_seconds: float) -> str:
        def with_index(name: re.Match[str]) -> str:
            position = int(name[2])
            return f"{name[1]}[{indices[position]}]" if position < len(indices) else name[0]

        text = re.sub(r"\b(inputs|texts|documents|pairs)\[(\d+)\]", with_index, self.message or self.code.name)
        # gRPC's texts for these two codes name neither the server nor the timeout.
        if target and self.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            text = f"{text}: {target} did not answer within {timeout_seconds:g} s"
        elif target and self.code is grpc.StatusCode.UNAVAILABLE:
            text = f"{target}: {text}"
        elif self.reason == "UNAUTHENTICATED":
            text = f"{text}; this client takes the key from api_key=, --api-key or ENCSERVE_API_KEY"
        return f"{text} (sent {attempts} times)" if attempts > 1 else text


def failure_of_status(
    code: grpc.StatusCode, message: str | None, trailers: Iterable[tuple[str, str | bytes]] | None
) -> Failure:
    """Return the failure for the status and the trailers of a failed RPC.

    If a server dies during an answer, a proxy may reset the stream. gRPC reports RST_STREAM as UNKNOWN or INTERNAL.
    This function then returns UNAVAILABLE.
    """
    texts = {key: value for key, value in trailers or () if isinstance(value, str)}
    if code in _CUT_OFF_CODES and not texts.get(REASON_TRAILER) and "RST_STREAM" in (message or ""):
        code = grpc.StatusCode.UNAVAILABLE
    pushback = texts.get(PUSHBACK_TRAILER)
    delay = _pushback_seconds(pushback)
    # A pushback that is not a number >= 0 means "do not retry" (gRFC A6).
    forbidden = pushback is not None and delay is None
    refused = _refused_inputs(code, texts.get(REFUSED_INPUTS_TRAILER, "[]"))
    return Failure(code, message or "", texts.get(REASON_TRAILER, ""), delay, forbidden, refused)


def _refused_inputs(code: grpc.StatusCode, text: str) -> tuple[Failure, ...]:
    try:
        return tuple(Failure(code, str(it["message"]), str(it["reason"])) for it in json.loads(text))
    except (ValueError, TypeError, KeyError):  # a proxy has changed the trailer
        return ()


def failure_of_call(call: Any) -> Failure:
    """Return the failure for a failed call of gRPC, or for gRPC's exception."""
    return failure_of_status(call.code() or grpc.StatusCode.UNKNOWN, call.details(), call.trailing_metadata())


def failure_of_crash(error: Exception) -> Failure:
    """Return the failure for an unexpected exception of gRPC. The call waits for one result of each message."""
    return Failure(grpc.StatusCode.UNKNOWN, f"gRPC could not make the call: {error!r}")


UNREADABLE_REPLY = Failure(
    grpc.StatusCode.INTERNAL, "the reply is not a message of encserve; is another server at this address?"
)


class ServerHistory:
    """Whether the server has ever answered, also with an error that has a reason. Each client has one.

    A server that has answered before and is UNAVAILABLE now is probably being restarted, so the client waits. A server
    that has never answered probably does not exist, or the address is wrong.

    Attributes:
        server_seen: Whether the server has ever answered.
    """

    def __init__(self) -> None:
        self.server_seen = False


class Outages:
    """The outages that one call meets. Each call reports its own outages, in order."""

    def __init__(self, history: ServerHistory, target: str, on_outage: OnOutage | None) -> None:
        self._history = history
        self._target = target
        self._on_outage = on_outage
        self._away_since: float | None = None
        self._is_reported = False

    def is_outage(self, failure: Failure) -> bool:
        """Record a failure. Return whether a server that has answered before is unavailable."""
        history = self._history
        if failure.code is grpc.StatusCode.UNAVAILABLE:
            history.server_seen = history.server_seen or bool(failure.reason)  # only the server itself gives a reason
            return history.server_seen
        if failure.reason:
            self.record_answer()
        return False

    def record_retry(self, now: float, seconds_left: float) -> None:
        """Record that a message is sent again during an outage. Report an outage once, after `_REPORT_SECONDS`."""
        self._away_since = now if self._away_since is None else self._away_since
        if not self._is_reported and now - self._away_since >= _REPORT_SECONDS:
            self._is_reported = True
            self._report(Outage(self._target, seconds_left))

    def record_answer(self) -> None:
        """Record an answer. Report the end of an outage."""
        self._history.server_seen = True
        was_reported, self._away_since, self._is_reported = self._is_reported, None, False
        if was_reported:
            self._report(Outage(self._target, 0.0, is_over=True))

    def _report(self, outage: Outage) -> None:
        if self._on_outage is not None:
            self._on_outage(outage)


def is_retryable(failure: Failure) -> bool:
    """Whether sending the same message again may help."""
    if failure.retry_forbidden:
        return False
    # A stopping gRPC server answers CANCELLED to calls that the server has read but not begun. Calls that this client
    # cancels never get here: see `Wire.wait`.
    return failure.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED) or failure.is_full_server


def seconds_until_retry(
    policy: RetryPolicy,
    failure: Failure,
    attempts: int,
    remaining_seconds: float,
    random: Callable[[], float],
    is_outage: bool = False,
) -> float | None:
    """Return the wait before the next attempt, in seconds, or None for no retry.

    Args:
        policy: The policy.
        failure: The failure of the last attempt.
        attempts: How often the message was sent, at least 1.
        remaining_seconds: The time until the deadline of the message.
        random: Returns uniform random numbers from [0, 1).
        is_outage: See `Outages.is_outage`.
    """
    if attempts >= policy.max_attempts or not is_retryable(failure):
        return None
    if failure.code is grpc.StatusCode.UNAVAILABLE and not is_outage:  # no server has ever answered
        waited = sum(map(policy.longest_wait, range(1, attempts)))
        remaining_seconds = min(remaining_seconds, _FIRST_CONTACT_SECONDS - waited)
    # The wait is at least half of the longest wait. Therefore a few attempts cover the time until gRPC
    # finds a restarted server.
    wait = (failure.retry_delay_seconds or 0.0) + (0.5 + random() / 2) * policy.longest_wait(attempts)
    return wait if wait < remaining_seconds else None


def _pushback_seconds(text: str | None) -> float | None:
    if text is None or not text.isascii() or not text.isdigit():
        return None
    return int(text) / 1000
