"""Tests of retries and exceptions of the client.

The tests cover which failures the client retries, how long it waits, and which exception it raises.
"""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_client import (
    DeadlineError,
    EncserveError,
    InferenceError,
    InspectUnavailableError,
    InvalidInputError,
    InvalidRequestError,
    MessageTooLargeError,
    ModelNotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitedError,
    RetryPolicy,
    UnauthenticatedError,
)
from encserve_client._logic.failures import (
    Failure,
    failure_of_status,
    is_retryable,
    seconds_until_retry,
)

Code = grpc.StatusCode
POLICY = RetryPolicy(max_attempts=4, initial_backoff_seconds=0.1, backoff_multiplier=2, max_backoff_seconds=0.3)
FULL = Failure(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", 1.5)
DOWN = Failure(Code.UNAVAILABLE, "down")


def always(value: float):  # type: ignore[no-untyped-def]
    return lambda: value


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (DOWN, True),
        (Failure(Code.UNAVAILABLE, "", "DRAINING"), True),
        (Failure(Code.CANCELLED, "CANCELLED"), True),
        (Failure(Code.UNAVAILABLE, "", "DRAINING", retry_forbidden=True), False),
        (FULL, True),
        (Failure(Code.RESOURCE_EXHAUSTED, "", "QUEUE_FULL"), True),
        (Failure(Code.RESOURCE_EXHAUSTED, "", "BUDGET_FULL"), True),
        (Failure(Code.RESOURCE_EXHAUSTED, "", "SHARE_EXCEEDED"), True),
        (Failure(Code.RESOURCE_EXHAUSTED, "", "", 0.1), True),
        (Failure(Code.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4)"), False),
        (Failure(Code.RESOURCE_EXHAUSTED, "quota of some proxy"), False),
        (Failure(Code.DEADLINE_EXCEEDED, ""), False),
        (Failure(Code.INTERNAL, "", "INFERENCE_FAILED"), False),
        (Failure(Code.FAILED_PRECONDITION, "", "INSPECT_UNAVAILABLE"), False),
        (Failure(Code.ABORTED, ""), False),
    ],
)
def test_only_temporary_failures_are_retried(failure: Failure, expected: bool) -> None:
    assert is_retryable(failure) is expected
    wait = seconds_until_retry(POLICY, failure, 1, 100.0, always(0.5), is_outage=False)
    assert (wait is not None) is expected


@pytest.mark.parametrize("code", [Code.UNKNOWN, Code.INTERNAL])
def test_a_call_that_a_proxy_aborts_is_sent_again(code: grpc.StatusCode) -> None:
    """If gRPC's error text says that a proxy aborted the call, the client retries the call.

    An error with the reason INTERNAL comes from the server, so the client does not retry it.
    """
    text = "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))"
    cut_off = failure_of_status(code, text, ())
    assert cut_off.code is Code.UNAVAILABLE
    assert is_retryable(cut_off)
    for other in (
        failure_of_status(code, text, [("encserve-error-reason", "INTERNAL")]),
        failure_of_status(code, "Exception iterating responses", ()),
        failure_of_status(Code.INVALID_ARGUMENT, text, ()),
    ):
        assert not is_retryable(other)


def test_a_policy_without_backoff_waits_a_little() -> None:
    policy = RetryPolicy(initial_backoff_seconds=0, max_backoff_seconds=0)
    assert seconds_until_retry(policy, FULL, 9, 100.0, always(1.0)) == pytest.approx(1.55)


@given(
    attempts=st.integers(1, 10_000),
    draw=st.floats(0, 1, exclude_max=True),
    remaining=st.floats(0, 1e6),
    asked=st.none() | st.floats(0, 1e6),
)
def test_a_wait_is_within_its_bounds(attempts: int, draw: float, remaining: float, asked: float | None) -> None:
    """A wait is at least the server's delay, and at most `max_backoff_seconds` longer. It ends before the deadline."""
    policy = RetryPolicy()
    failure = Failure(Code.UNAVAILABLE, "", retry_delay_seconds=asked)
    wait = seconds_until_retry(policy, failure, attempts, remaining, lambda: draw)
    if wait is not None:
        assert (asked or 0.0) <= wait <= (asked or 0.0) + policy.max_backoff_seconds
        assert wait < remaining


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_attempts": 0}, "max_attempts must be >= 1; was 0"),
        ({"initial_backoff_seconds": -1}, "was -1"),
        ({"backoff_multiplier": 0.5}, "backoff_multiplier must be >= 1; was 0.5"),
        ({"initial_backoff_seconds": 9}, "was 5.0 < 9"),
        ({"max_attempts": 2.5}, "max_attempts must be an int; was float"),
        ({"max_attempts": None}, "max_attempts must be an int; was NoneType"),
        ({"max_backoff_seconds": "9"}, "max_backoff_seconds must be a number; was str"),
    ],
)
def test_a_wrong_policy_is_refused(settings: dict[str, float], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        RetryPolicy(**settings)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(Code.INTERNAL, "", "INFERENCE_FAILED"), InferenceError),
        (Failure(Code.FAILED_PRECONDITION, "", "INSPECT_UNAVAILABLE"), InspectUnavailableError),
        (Failure(Code.INVALID_ARGUMENT, "", "RESPONSE_TOO_LARGE"), MessageTooLargeError),
        (Failure(Code.INVALID_ARGUMENT, "", "REQUEST_TOO_LARGE"), MessageTooLargeError),
        (Failure(Code.INVALID_ARGUMENT, "", "TOO_MANY_INPUTS"), MessageTooLargeError),
        (Failure(Code.RESOURCE_EXHAUSTED, "CLIENT: Sent message larger than max (9 vs. 4)"), MessageTooLargeError),
        (Failure(Code.INVALID_ARGUMENT, "", "SEQUENCE_TOO_LONG"), InvalidRequestError),
        (Failure(Code.INVALID_ARGUMENT, "", "TOO_MANY_OUTPUTS"), InvalidRequestError),
        (Failure(Code.INVALID_ARGUMENT, "", "TOO_LONG_TO_POOL"), InvalidRequestError),
        (Failure(Code.RESOURCE_EXHAUSTED, "", "BUDGET_FULL"), OverloadedError),
        (Failure(Code.RESOURCE_EXHAUSTED, "", "RATE_LIMITED"), RateLimitedError),
        (Failure(Code.UNAUTHENTICATED, "", "UNAUTHENTICATED"), UnauthenticatedError),
        (Failure(Code.PERMISSION_DENIED, "", "PERMISSION_DENIED"), PermissionDeniedError),
    ],
)
def test_the_reason_decides_the_exception(failure: Failure, expected: type[EncserveError]) -> None:
    assert type(failure.to_exception(attempts=1)) is expected


def test_exceptions_are_also_builtin_exceptions() -> None:
    """Some exceptions of the client are also built-in exceptions.

    Callers can therefore catch them as TimeoutError, ValueError or LookupError.
    """
    assert issubclass(DeadlineError, TimeoutError)
    assert issubclass(InvalidRequestError, ValueError)
    assert issubclass(ModelNotFoundError, LookupError)


def test_trailers_are_read() -> None:
    trailers: list[tuple[str, str | bytes]] = [
        ("encserve-error-reason", "QUEUE_FULL"),
        ("grpc-retry-pushback-ms", "250"),
        ("x-bin", b"\0"),
    ]
    failure = failure_of_status(Code.RESOURCE_EXHAUSTED, "full", trailers)
    assert failure == Failure(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", 0.25)
    error = failure.to_exception(attempts=3)
    assert isinstance(error, OverloadedError)
    assert (error.retry_delay_seconds, error.attempts, str(error)) == (0.25, 3, "full (sent 3 times)")


@pytest.mark.parametrize(
    "text", ["", "[", "7", "null", "{}", "[7]", '["a"]', '[{"message": "inputs[0]: no"}]', '[{"reason": 7}]']
)
def test_a_damaged_list_of_refused_inputs_is_ignored(text: str) -> None:
    failure = failure_of_status(Code.INVALID_ARGUMENT, "inputs[2]: bad", [("encserve-refused-inputs", text)])
    assert failure.inputs_at_fault(3) == {2: failure}


def test_refused_inputs_that_were_not_sent_are_ignored() -> None:
    text = '[{"message": "inputs[1]: bad", "reason": "A"}, {"message": "inputs[3]: bad", "reason": "B"}]'
    failure = failure_of_status(Code.INVALID_ARGUMENT, "inputs[1]: bad", [("encserve-refused-inputs", text)])
    assert list(failure.inputs_at_fault(3)) == [1]


def test_an_input_that_was_not_sent_keeps_its_name() -> None:
    error = Failure(Code.INVALID_ARGUMENT, "inputs[3]: bad").to_exception(1, indices=range(256, 259))
    assert (str(error), error.index) == ("inputs[3]: bad", None)


@pytest.mark.parametrize("pushback", ["-1", "soon", "", "1.5", "٣"])
def test_a_pushback_that_is_not_a_delay_forbids_retries(pushback: str) -> None:
    failure = failure_of_status(Code.UNAVAILABLE, "", [("grpc-retry-pushback-ms", pushback)])
    assert failure.retry_forbidden
    assert not is_retryable(failure)
