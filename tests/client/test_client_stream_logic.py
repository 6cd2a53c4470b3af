"""Tests of the logic of `stream`, with a fake connection and a fake clock.

The tests cover the order of results, how many inputs are read ahead, the size of messages, retries, and errors of
single inputs.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from fake_wire import Outcome, WireServer, counting, echo, ids_in
from hypothesis import given
from hypothesis import strategies as st

from encserve_client import (
    DeadlineError,
    FingerprintError,
    InvalidInputError,
    InvalidRequestError,
    ServerError,
    ServerUnavailableError,
)
from encserve_client._logic.calls import Core, Settings
from encserve_client._logic.failures import Failure
from encserve_client._logic.wire import run_without_loop
from encserve_client.options import Options
from encserve_client.retry import RetryPolicy
from encserve_proto.v1 import encoder_pb2 as pb

Code = grpc.StatusCode
DOWN = Failure(Code.UNAVAILABLE, "connection reset")


def stream(
    server: WireServer,
    inputs: Iterable[object],
    *,
    ordered: bool = True,
    max_in_flight: int = 64,
    timeout: float = 100.0,
) -> Iterator[tuple[int, Any]]:
    """Yield (index, result) for each input. The result is the first token id of the input, or an error."""
    policy = RetryPolicy(initial_backoff_seconds=1.0)
    core = Core(Settings(timeout, 64 << 20, 4, policy, random=lambda: 1.0, target="host:1"))
    runs = core.stream(
        lambda _: server.wire,
        inputs,
        ("", ""),
        Options(),
        ordered=ordered,
        max_in_flight=max_in_flight,
        timeout_seconds=None,
        progress=None,
    )
    while (results := run_without_loop(anext(runs, None))) is not None:
        for index, result in results:
            yield index, int(result[0, 0]) if isinstance(result, np.ndarray) else result
    assert server.wire.is_closed


@given(
    delays=st.lists(st.floats(0, 10), min_size=1, max_size=30),
    lost=st.sets(st.integers(1, 30), max_size=4),
    refused=st.sets(st.integers(1, 30)),
    max_in_flight=st.integers(1, 40),
    ordered=st.booleans(),
)
def test_every_input_is_answered_once(
    delays: list[float], lost: set[int], refused: set[int], max_in_flight: int, ordered: bool
) -> None:
    """Replies may be late, and messages may be lost or refused. Each input still gets exactly one result.

    With `ordered`, the results come in input order. At any time, the client has read at most
    `max_in_flight` inputs that have no result yet.
    """
    read: list[int] = []
    lose_once, refuse_once = set(lost), set(refused)

    def encode(request: pb.EncodeRequest) -> Outcome:
        tokens = ids_in(request)
        assert len(tokens) <= max(max_in_flight // 4, 1)
        if lose_once.intersection(tokens):
            lose_once.difference_update(tokens)
            return 0.5, DOWN
        if refuse_once.intersection(tokens):
            refuse_once.difference_update(tokens)
            return 0.1, Failure(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", 1.0)
        return max(delays[token - 1] for token in tokens), echo(request)

    found = []
    server = WireServer(encode)
    for item in stream(
        server,
        counting(len(delays), read),
        ordered=ordered,
        max_in_flight=max_in_flight,
        timeout=1000.0,
    ):
        found.append(item)
        assert len(read) - (len(found) - 1) <= max_in_flight
    everything = [(i, i + 1) for i in range(len(delays))]
    assert (found if ordered else sorted(found)) == everything
    assert server.wire.most_out <= 4


def test_reading_stops_at_max_in_flight_if_the_first_answer_is_slow() -> None:
    """Results must be in input order, so the later results wait. Waiting results count as inputs in flight."""
    read: list[int] = []
    server = WireServer(lambda request: (90.0 if 1 in ids_in(request) else 0.0, echo(request)))
    assert next(stream(server, counting(1000, read), max_in_flight=5)) == (0, 1)
    assert len(read) == 5


def test_a_ready_result_waits_for_at_most_one_read() -> None:
    read: list[int] = []
    results = stream(WireServer(lambda request: (0.0, echo(request))), counting(1000, read))
    next(results)
    before = len(read)
    next(results)
    assert len(read) - before <= 1


def test_a_call_fails_if_the_server_does_not_come_back() -> None:
    server = WireServer(lambda request: (0.0, DOWN) if server.wire.time > 1.0 else (0.7, echo(request)))
    with pytest.raises(ServerUnavailableError, match="^host:1: connection reset"):
        list(stream(server, [[i] for i in range(1, 301)], timeout=20.0))
    assert 15.0 < server.wire.time < 30.0


def test_a_rate_that_is_exceeded_delays_the_call() -> None:
    """The server accepts two messages a second, and refuses more. Each message succeeds before its deadline."""
    next_place = 0.0

    def encode(request: pb.EncodeRequest) -> Outcome:
        nonlocal next_place
        now = server.wire.time
        if now < next_place:
            return 0.0, Failure(Code.RESOURCE_EXHAUSTED, "too fast", "RATE_LIMITED", next_place - now)
        next_place = now + 0.5
        return 0.1, echo(request)

    server = WireServer(encode)
    results = stream(server, [[i] for i in range(1, 101)], max_in_flight=4, timeout=30.0)
    assert list(results) == [(i, i + 1) for i in range(100)]
    assert len(server.sent) < 500


def test_a_timeout_during_an_outage_does_not_stop_other_messages() -> None:
    """The clock jumps by 1,000 s while a message waits for its retry, as if the machine was suspended.

    The deadline of this message passes, so the message fails with DeadlineError. The other inputs get results.
    """
    failures = {2: DOWN, 3: Failure(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", 0.0)}

    def encode(request: pb.EncodeRequest) -> Outcome:
        [token] = ids_in(request)
        if failure := failures.pop(token, None):
            return 0.05 - token / 100, failure
        if token == 3:
            server.wire.time += 1000.0
        return 1.0, echo(request)

    server = WireServer(encode)
    found = dict(stream(server, [[i] for i in range(1, 21)], max_in_flight=4))
    assert isinstance(found.pop(1), DeadlineError)
    assert found == {i: i + 1 for i in range(20) if i != 1}


def test_a_retry_is_sent_in_time_although_the_caller_is_slow() -> None:
    """The caller takes 50 ms for each result. A retry is still sent soon after the delay that the server asks for."""
    failures = [Failure(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", 1.0)]
    retried: list[float] = []

    def encode(request: pb.EncodeRequest) -> Outcome:
        if 1 in ids_in(request):
            if failures:
                return 0.0, failures.pop()
            retried.append(server.wire.time)
        return 0.1, echo(request)

    server = WireServer(encode)
    for _ in stream(server, [[i] for i in range(1, 3001)], ordered=False):
        server.wire.time += 0.05
    assert len(retried) == 1
    assert retried[0] < 5.0


def test_an_error_of_one_input_does_not_fail_its_neighbours() -> None:
    """If the server refuses an input of a message, the client sends the message again without the refused input.

    The error names the index of the input in the call. The error does not say how often the message was sent.
    """

    def encode(request: pb.EncodeRequest) -> Outcome:
        bad = [place for place, token in enumerate(ids_in(request)) if token % 3 == 0]
        if bad:
            return 0.5, Failure(Code.INVALID_ARGUMENT, f"inputs[{bad[0]}]: is bad", "INVALID_INPUT")
        return 0.5, echo(request)

    server = WireServer(encode)
    for index, result in stream(server, [[i] for i in range(1, 101)]):
        if (index + 1) % 3:
            assert result == index + 1
        else:
            assert (str(result), result.index) == (f"inputs[{index}]: is bad", index)
    assert max(map(len, server.sent)) == 16


def test_a_failed_message_fails_only_its_own_inputs() -> None:
    """One message fails with INTERNAL, and one message gets no reply in time. The other messages get results."""

    def encode(request: pb.EncodeRequest) -> Outcome:
        if 20 in ids_in(request):
            return 0.0, Failure(Code.INTERNAL, "broken")
        return 1000.0 if 60 in ids_in(request) else 1.0, echo(request)

    server = WireServer(encode)
    found = dict(stream(server, [[i] for i in range(1, 101)], timeout=10.0))
    [broken], [late] = ([its for its in server.sent if token in its] for token in (20, 60))
    for index in range(100):
        kind = ServerError if index + 1 in broken else DeadlineError if index + 1 in late else int
        assert type(found[index]) is kind
        assert kind is int or found[index].index == index
    assert str(found[59]) == "Deadline Exceeded: host:1 did not answer within 10 s"


def test_an_error_of_the_options_ends_the_call() -> None:
    server = WireServer(lambda _: (0.0, Failure(Code.INVALID_ARGUMENT, "options.prompt_name: no prompts")))
    with pytest.raises(InvalidRequestError, match="^prompt_name: no prompts$") as caught:
        list(stream(server, [[1], [2]]))
    assert caught.value.index is None


def test_the_time_of_a_slow_caller_does_not_count() -> None:
    """The caller takes 60 s for each result, longer than the timeout of 5 s. A failed message is still sent again."""
    failures = [DOWN]
    server = WireServer(lambda request: (3.0, failures.pop() if failures and 5 in ids_in(request) else echo(request)))
    found = []
    for item in stream(server, [[i] for i in range(1, 20)], timeout=5.0, max_in_flight=2):
        found.append(item)
        server.wire.time += 60.0
    assert found == [(i, i + 1) for i in range(19)]


def test_a_stream_does_not_mix_vector_spaces() -> None:
    server = WireServer(lambda request: (0.0, echo(request, str(ids_in(request)[0]))))
    with pytest.raises(FingerprintError):
        list(stream(server, [[1], [2]]))


@pytest.mark.parametrize("wrong", [5, [], [1.5], None, np.array([[0.0, np.nan]])])
@pytest.mark.parametrize("ordered", [True, False])
def test_an_invalid_input_is_an_error_at_its_index(wrong: object, ordered: bool) -> None:
    server = WireServer(lambda request: (1.0, echo(request)))
    found = list(stream(server, [[7], wrong, [9]], ordered=ordered))
    assert [index for index, _ in found] == ([0, 1, 2] if ordered else [1, 0, 2])
    got = dict(found)
    assert isinstance(got[1], InvalidInputError)
    assert "inputs[1]" in str(got[1])
    assert got[1].index == 1
    assert (got[0], got[2]) == (7, 9)
    assert server.sent == [[7], [9]]


def test_endless_invalid_inputs_are_read_only_up_to_max_in_flight() -> None:
    read: list[None] = []

    def inputs() -> Iterator[None]:
        while True:
            read.append(None)
            yield None

    results = stream(WireServer(lambda request: (0.0, echo(request))), inputs(), max_in_flight=3)
    for taken in range(1, 9):
        assert isinstance(next(results)[1], InvalidInputError)
        assert len(read) <= taken + 3


def test_short_inputs_that_arrive_fast_share_messages() -> None:
    """The first input is sent immediately. Later messages have up to a quarter of `max_in_flight` inputs."""
    server = WireServer(lambda request: (1.0, echo(request)))
    found = dict(stream(server, [[i] for i in range(1, 1001)]))
    assert found == {i: i + 1 for i in range(1000)}
    assert [it for its in server.sent for it in its] == list(range(1, 1001))
    assert server.sent[0] == [1]
    assert max(map(len, server.sent)) == 16
    assert len(server.sent) < 1000 / 12


def test_a_single_input_is_sent_at_once() -> None:
    """An input is sent immediately if all earlier inputs have been answered."""
    server = WireServer(lambda request: (0.0, echo(request)))
    times: list[float] = []

    def inputs() -> Iterator[list[int]]:
        for i in range(1, 6):
            server.wire.time += 100.0  # longer than the timeout, but the timeout starts when an input is sent
            times.append(server.wire.time)
            yield [i]

    assert dict(stream(server, inputs(), timeout=10.0)) == {i: i + 1 for i in range(5)}
    assert server.wire.sent[1:] == times  # the first message asks for the model


def test_long_inputs_do_not_share_messages() -> None:
    """The inputs are so long that two inputs exceed the maximum tokens of a message. Each input is sent alone."""
    server = WireServer(lambda request: (1.0, echo(request)))
    assert len(list(stream(server, [[1] * 2049] * 30))) == 30
    assert server.sent == [[1] * 2049] * 30


def test_no_inputs_send_no_message() -> None:
    server = WireServer(lambda request: (0.0, echo(request)))
    assert list(stream(server, [])) == []
    assert server.sent == []
