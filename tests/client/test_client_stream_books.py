"""Tests of the logic of `encode_stream`, with a fake connection and a fake clock.

They test order, limits, retries and broken streams.
"""

from collections.abc import Callable, Iterator
from typing import Any

import fake_wire
import grpc
import numpy as np
import pytest
from fake_wire import FakeWire, Outcome, counting
from hypothesis import given
from hypothesis import strategies as st

from encserve_client import (
    DeadlineError,
    EncserveError,
    FingerprintError,
    InvalidInputError,
    InvalidRequestError,
    ProtocolError,
    RetryPolicy,
    ServerUnavailableError,
)
from encserve_client._logic.failures import Failure
from encserve_client._logic.streams import StreamBooks, StreamRun
from encserve_client._logic.wire import run_without_loop
from encserve_client.options import Options
from encserve_proto.v1 import encoder_pb2 as pb

Code = grpc.StatusCode
Answer = Callable[[int, pb.EncodeStreamRequest], Outcome | None]
POLICY = RetryPolicy(initial_backoff_seconds=1.0, backoff_multiplier=2.0)
THRICE = RetryPolicy(max_attempts=3, initial_backoff_seconds=1.0)
BROKEN = Failure(Code.UNAVAILABLE, "connection reset")
UNREACHED = Failure(Code.UNAVAILABLE, "failed to connect to all addresses; last error: … Connection refused (111)")


def ids_in(request: pb.EncodeStreamRequest) -> list[int]:
    """Return the token ids of all inputs of a message."""
    return [token for item in request.request.inputs for token in item.token_ids.ids]


def echo(request: pb.EncodeStreamRequest, fingerprint: str = "f") -> pb.EncodeStreamResponse:
    """Make a reply whose hidden states are the token ids of the inputs."""
    response = fake_wire.echo(request.request, fingerprint)
    return pb.EncodeStreamResponse(request_id=request.request_id, response=response)


def refusal(request: pb.EncodeStreamRequest, code: Code, delay: float = 0.0, text: str = "no") -> Any:
    error = pb.StreamError(code=code.value[0], message=text, retry_delay_seconds=delay)
    return pb.EncodeStreamResponse(request_id=request.request_id, error=error)


def run_of(
    wire: FakeWire,
    *,
    ordered: bool = True,
    max_in_flight: int = 4,
    timeout: float = 100.0,
    policy: RetryPolicy = POLICY,
    target: str = "",
) -> StreamRun:
    """Make a `StreamRun` that always draws the largest jitter, so that the waits before retries are known."""
    books: StreamBooks[Any] = StreamBooks(policy, max_in_flight, timeout, ordered, lambda: 1.0, target)
    return StreamRun(wire, books, pb.EncodeRequest(), Options())


def results(run: StreamRun) -> Iterator[tuple[int, Any]]:
    """Yield the index of each input, with the token id in its result or with its error."""
    while (item := run_without_loop(run.next())) is not None:
        index, result = item
        yield index, result if isinstance(result, EncserveError) else int(result[0, 0])


@given(
    delays=st.lists(st.floats(0, 10), min_size=1, max_size=30),
    breaks=st.sets(st.integers(1, 5), max_size=2),
    refused=st.sets(st.integers(1, 30)),
    max_in_flight=st.integers(1, 40),
    ordered=st.booleans(),
)
def test_every_input_is_answered_once(
    delays: list[float], breaks: set[int], refused: set[int], max_in_flight: int, ordered: bool
) -> None:
    """Replies may be late, messages may be refused, and streams may break. Each input still gets exactly one result.

    With `ordered`, the results come in input order. At any time, the client has read at most
    `max_in_flight` inputs that have no result yet.
    """
    read: list[int] = []
    break_once, refuse_once = set(breaks), set(refused)

    def answer(stream: int, request: pb.EncodeStreamRequest) -> Outcome:
        tokens = ids_in(request)
        assert len(tokens) <= max(max_in_flight // 4, 1)
        if stream in break_once:
            break_once.discard(stream)
            return 0.5, BROKEN
        if refuse_once.intersection(tokens):
            refuse_once.difference_update(tokens)
            return 0.1, refusal(request, Code.RESOURCE_EXHAUSTED, delay=1.0)
        return max(delays[token - 1] for token in tokens), echo(request)

    wire = FakeWire(answer_stream=answer, inputs=counting(len(delays), read))
    found = []
    policy = RetryPolicy(max_attempts=10)
    run = run_of(wire, ordered=ordered, max_in_flight=max_in_flight, timeout=1000.0, policy=policy)
    for index, token in results(run):
        found.append((index, token))
        assert len(read) - (len(found) - 1) <= max_in_flight
    everything = [(i, i + 1) for i in range(len(delays))]
    assert (found if ordered else sorted(found)) == everything


def test_results_come_as_they_are_ready_if_asked() -> None:
    wire = FakeWire(
        answer_stream=lambda _, request: (10.0 - request.request.inputs[0].token_ids.ids[0], echo(request)),
        inputs=[[1], [2], [3]],
    )
    assert list(results(run_of(wire, ordered=False))) == [(2, 3), (1, 2), (0, 1)]


def test_reading_stops_at_the_bound_behind_a_slow_first_answer() -> None:
    """The first reply is slow. The client holds back the later results, because results must be in input order.

    Meanwhile the client reads only `max_in_flight` inputs.
    """
    read: list[int] = []
    wire = FakeWire(
        answer_stream=lambda _, request: (90.0 if request.request_id == "0" else 0.0, echo(request)),
        inputs=counting(1000, read),
    )
    assert next(results(run_of(wire, max_in_flight=5))) == (0, 1)
    assert len(read) == 5


def test_a_ready_result_waits_for_one_read_at_most() -> None:
    read: list[int] = []
    wire = FakeWire(answer_stream=lambda _, request: (0.0, echo(request)), inputs=counting(1000, read))
    run = results(run_of(wire, max_in_flight=64))
    next(run)
    before = len(read)
    next(run)
    assert len(read) - before <= 1


def test_a_broken_stream_is_opened_again_for_what_was_not_answered() -> None:
    sent: list[tuple[int, list[int]]] = []

    def answer(stream: int, request: pb.EncodeStreamRequest) -> Outcome:
        sent.append((stream, ids_in(request)))
        if stream == 1 and ids_in(request) == [3]:
            return 1.0, BROKEN
        return 2.0 * (ids_in(request) == [2]), echo(request)  # input 2 has no reply when the stream breaks

    wire = FakeWire(answer_stream=answer, inputs=[[1], [2], [3]])
    assert list(results(run_of(wire))) == [(0, 1), (1, 2), (2, 3)]
    assert sent == [(1, [1]), (1, [2]), (1, [3]), (2, [2]), (2, [3])]
    assert wire.sent[3:] == [2.0, 2.0]  # the stream broke after 1 s, and the backoff was 1 s


def test_a_stream_that_always_breaks_ends_the_call() -> None:
    """The call ends after the two seconds for a server that has never answered."""
    wire = FakeWire(answer_stream=lambda *_: (0.0, BROKEN), inputs=[[1], [2]])
    with pytest.raises(ServerUnavailableError, match=r"connection reset \(sent 2 times\)"):
        list(results(run_of(wire)))
    assert wire.n_streams == 2


def test_a_restart_in_the_middle_is_waited_out() -> None:
    """While the server restarts, many new streams fail. Each input still gets a result.

    After the restart, messages again have several inputs.
    """
    sizes: list[int] = []

    def answer(stream: int, request: pb.EncodeStreamRequest) -> Outcome:
        if stream == 1 and 5 in ids_in(request):
            return 0.1, BROKEN
        if stream > 1 and wire.now() < 15.0:
            return 0.0, UNREACHED
        sizes.append(len(ids_in(request)))
        return 0.1, echo(request)

    wire = FakeWire(answer_stream=answer, inputs=[[i] for i in range(1, 1000)])
    assert list(results(run_of(wire, max_in_flight=64))) == [(i, i + 1) for i in range(999)]
    assert wire.n_streams > 4
    assert sizes[-2] == 16


def test_a_server_that_does_not_come_back_ends_the_call() -> None:
    """The server goes down and does not come back. The call fails after the timeout of an input."""

    def answer(stream: int, request: pb.EncodeStreamRequest) -> Outcome:
        return (0.1, echo(request)) if stream == 1 and ids_in(request) == [1] else (0.0, UNREACHED)

    wire = FakeWire(answer_stream=answer, inputs=[[i] for i in range(1, 1000)])
    with pytest.raises(ServerUnavailableError, match=r"Connection refused \(111\) \(sent \d+ times\)$"):
        list(results(run_of(wire, timeout=20.0)))
    assert wire.now() <= 21.0


def test_a_stream_that_breaks_in_other_ways_is_not_opened_again() -> None:
    wire = FakeWire(answer_stream=lambda *_: (0.0, Failure(Code.UNAUTHENTICATED, "who?")), inputs=[[1]])
    with pytest.raises(EncserveError, match="who"):
        list(results(run_of(wire)))
    assert wire.n_streams == 1


@pytest.mark.parametrize("max_in_flight", [3, 64])
def test_an_input_that_brings_down_every_stream_is_given_up(max_in_flight: int) -> None:
    """One input breaks every stream. After a few attempts, this input gets an error and all other inputs get results.

    The client stops retrying although other inputs get replies between the failures.
    """

    def answer(_: int, request: pb.EncodeStreamRequest) -> Outcome:
        return (0.5, BROKEN) if 1 in ids_in(request) else (0.1, echo(request))

    wire = FakeWire(answer_stream=answer, inputs=[[i] for i in range(1, 2000)])
    found = dict(results(run_of(wire, ordered=False, max_in_flight=max_in_flight, policy=THRICE)))
    assert isinstance(found.pop(0), ServerUnavailableError)
    assert found == {i: i + 1 for i in range(1, 1999)}
    assert wire.n_streams <= 4


def test_an_error_is_the_inputs_own() -> None:
    """If one input is refused, the stream continues, and the other inputs get results.

    The index in the error text counts the inputs of the whole call, not those of one request message.
    """

    def answer(_: int, request: pb.EncodeStreamRequest) -> Outcome:
        if request.request_id == "1":
            return 0.0, refusal(request, Code.INVALID_ARGUMENT, text="inputs[0]: is bad")
        return 0.0, echo(request)

    wire = FakeWire(answer_stream=answer, inputs=[[1], [2], [3]])
    (_, first), (_, error), (_, last) = results(run_of(wire))
    assert (first, last) == (1, 3)
    assert isinstance(error, InvalidRequestError)
    assert str(error) == "inputs[1]: is bad"
    assert wire.n_streams == 1


def test_a_server_that_is_stopping_gets_nothing_more() -> None:
    """If the server refuses an input with UNAVAILABLE, the client sends the input again on a new stream.

    The client still receives the replies of the old stream.
    """
    sent: list[tuple[int, list[int]]] = []

    def answer(stream: int, request: pb.EncodeStreamRequest) -> Outcome:
        sent.append((stream, ids_in(request)))
        if stream == 1 and ids_in(request) == [2]:
            return 0.0, refusal(request, Code.UNAVAILABLE)
        return 0.5, echo(request)

    wire = FakeWire(answer_stream=answer, inputs=[[1], [2]])
    assert list(results(run_of(wire))) == [(0, 1), (1, 2)]
    assert sent == [(1, [1]), (1, [2]), (2, [2])]


def test_an_input_that_is_never_answered_is_given_up() -> None:
    """An input without a reply gets an error after its timeout. A reply after the timeout is dropped.

    The other inputs get results.
    """

    def answer(_: int, request: pb.EncodeStreamRequest) -> Outcome | None:
        if request.request_id == "0":
            return None
        return 12.0 if request.request_id == "1" else 1.0, echo(request)

    wire = FakeWire(answer_stream=answer, inputs=[[1], [2], [3]])
    found = dict(results(run_of(wire, timeout=10.0)))
    assert isinstance(found[0], DeadlineError)
    assert isinstance(found[1], DeadlineError)
    assert str(found[0]) == "inputs[0] was not answered within 10 s"
    assert found[2] == 3
    assert wire.time == 10.0


def test_a_slow_caller_costs_no_input_its_time() -> None:
    wire = FakeWire(answer_stream=lambda _, request: (3.0, echo(request)), inputs=[[i] for i in range(1, 20)])
    found = []
    for index, token in results(run_of(wire, timeout=5.0, max_in_flight=2)):
        found.append((index, token))
        wire.time += 60.0
    assert found == [(i, i + 1) for i in range(19)]


@pytest.mark.parametrize("request_id", ["7", "x", "", "-1", "9" * 100, "٣"])
def test_an_answer_to_nothing_is_refused(request_id: str) -> None:
    wire = FakeWire(answer_stream=lambda *_: (0.0, pb.EncodeStreamResponse(request_id=request_id)), inputs=[[1]])
    with pytest.raises(ProtocolError, match="which was never sent"):
        list(results(run_of(wire)))


def test_an_answer_without_a_result_is_refused() -> None:
    wire = FakeWire(answer_stream=lambda *_: (0.0, pb.EncodeStreamResponse(request_id="0")), inputs=[[1]])
    with pytest.raises(ProtocolError, match="neither a response nor an error"):
        list(results(run_of(wire)))


def test_a_stream_does_not_mix_vector_spaces() -> None:
    wire = FakeWire(answer_stream=lambda _, request: (0.0, echo(request, request.request_id)), inputs=[[1], [2]])
    with pytest.raises(FingerprintError):
        list(results(run_of(wire)))


@pytest.mark.parametrize("wrong", [5, [], [1.5], None, np.array([[0.0, np.nan]])])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_wrong_input_is_an_error_in_its_place(wrong: object, ordered: bool) -> None:
    """An invalid input gets an error that names its index, and is not sent. The other inputs get results."""
    wire = FakeWire(answer_stream=lambda _, request: (1.0, echo(request)), inputs=[[7], wrong, [9]])
    found = list(results(run_of(wire, ordered=ordered)))
    assert [index for index, _ in found] == ([0, 1, 2] if ordered else [1, 0, 2])
    got = dict(found)
    assert isinstance(got[1], InvalidInputError)
    assert "inputs[1]" in str(got[1])
    assert (got[0], got[2]) == (7, 9)
    assert len(wire.sent) == 2


def test_an_endless_row_of_wrong_inputs_is_read_no_further_than_allowed() -> None:
    read: list[None] = []

    def inputs() -> Iterator[None]:
        while True:
            read.append(None)
            yield None

    stream = results(run_of(FakeWire(inputs=inputs()), max_in_flight=3))
    for taken in range(1, 9):
        assert isinstance(next(stream)[1], InvalidInputError)
        assert len(read) <= taken + 3


def test_a_stream_that_fails_names_the_server() -> None:
    """The error of a failed stream names the server. The timeout error of an input also names the server."""
    down = FakeWire(answer_stream=lambda *_: (0.0, BROKEN), inputs=[[1]])
    with pytest.raises(ServerUnavailableError, match=r"^host:1: connection reset \(sent 2 times\)"):
        list(results(run_of(down, target="host:1")))
    never = FakeWire(answer_stream=lambda *_: None, inputs=[[1]])
    [(_, error)] = results(run_of(never, timeout=2.5, target="host:1"))
    assert str(error) == "inputs[0] was not answered within 2.5 s by host:1"


def packs_of(wire_answer: Answer, inputs: list[Any], **settings: Any) -> tuple[list[list[int]], dict[int, Any]]:
    """Run a stream. Return the token ids in each sent message, and the results by index of the input."""
    sent: list[list[int]] = []

    def answer(stream: int, request: pb.EncodeStreamRequest) -> Outcome | None:
        sent.append(ids_in(request))
        return wire_answer(stream, request)

    wire = FakeWire(answer_stream=answer, inputs=inputs)
    return sent, dict(results(run_of(wire, **settings)))


def test_short_inputs_that_come_fast_share_messages() -> None:
    """The first four inputs are sent immediately, each in a separate message.

    Later messages have up to 16 inputs.
    """
    inputs = [[i] for i in range(1, 1001)]
    sent, found = packs_of(lambda _, request: (1.0, echo(request)), inputs, max_in_flight=64)
    assert found == {i: i + 1 for i in range(1000)}
    assert [it for its in sent for it in its] == list(range(1, 1001))
    assert sent[:4] == [[1], [2], [3], [4]]
    assert max(map(len, sent)) == 16
    assert len(sent) < 1000 / 12


def test_an_input_that_comes_alone_is_sent_at_once() -> None:
    """An input is sent immediately if all earlier inputs have been answered."""
    times: list[float] = []

    def inputs() -> Iterator[list[int]]:
        for i in range(1, 6):
            wire.time += 100.0  # longer than the timeout, but the timeout of an input starts when it is read
            times.append(wire.time)
            yield [i]

    wire = FakeWire(answer_stream=lambda _, request: (0.0, echo(request)))
    wire._inputs = inputs()
    assert dict(results(run_of(wire, max_in_flight=64, timeout=10.0))) == {i: i + 1 for i in range(5)}
    assert wire.sent == times


def test_long_inputs_do_not_share_messages() -> None:
    """The inputs are so long that two inputs exceed the maximum tokens of a message. Each input is sent alone."""
    sent: list[int] = []

    def answer(_: int, request: pb.EncodeStreamRequest) -> Outcome:
        sent.append(len(request.request.inputs))
        return 1.0, refusal(request, Code.INVALID_ARGUMENT)

    wire = FakeWire(answer_stream=answer, inputs=[[1] * 2049] * 30)
    assert len(list(results(run_of(wire, max_in_flight=64)))) == 30
    assert sent == [1] * 30


def test_one_bad_input_does_not_fail_its_neighbours() -> None:
    """If an input of a message is bad, the client sends the message again without the bad input.

    This retry does not count as an attempt of the other inputs.
    """

    def answer(_: int, request: pb.EncodeStreamRequest) -> Outcome:
        bad = [place for place, token in enumerate(ids_in(request)) if token % 3 == 0]
        if bad:
            return 0.5, refusal(request, Code.INVALID_ARGUMENT, text=f"inputs[{bad[0]}]: is bad")
        return 0.5, echo(request)

    sent, found = packs_of(answer, [[i] for i in range(1, 101)], max_in_flight=64)
    assert max(map(len, sent)) == 16
    for index, result in found.items():
        if (index + 1) % 3:
            assert result == index + 1
        else:
            assert (str(result), result.index) == (f"inputs[{index}]: is bad", index)


def test_a_message_that_is_too_large_is_halved() -> None:
    def answer(_: int, request: pb.EncodeStreamRequest) -> Outcome:
        if len(request.request.inputs) > 3:
            failed = pb.StreamError(code=3, message="too many", reason="TOO_MANY_INPUTS")
            return 0.1, pb.EncodeStreamResponse(request_id=request.request_id, error=failed)
        return 0.1, echo(request)

    sent, found = packs_of(answer, [[i] for i in range(1, 101)], max_in_flight=64)
    assert found == {i: i + 1 for i in range(100)}
    assert {2, 4, 8, 16} <= set(map(len, sent))


def test_a_message_that_is_never_answered_makes_room_when_its_inputs_are_given_up() -> None:
    """Four inputs without a reply and a waiting fifth reach the limit `max_in_flight`. The client reads no more inputs.

    After these inputs have timed out, the client sends the remaining inputs.
    """

    def answer(_: int, request: pb.EncodeStreamRequest) -> Outcome | None:
        return None if ids_in(request)[0] <= 4 else (0.0, echo(request))

    def inputs() -> Iterator[list[int]]:
        for i in range(1, 9):
            yield [i]

    wire = FakeWire(answer_stream=answer, inputs=inputs())
    found = dict(results(run_of(wire, max_in_flight=5, timeout=10.0)))
    assert [isinstance(found[i], DeadlineError) for i in range(8)] == [True] * 5 + [False] * 3


def test_no_inputs_open_no_stream() -> None:
    wire = FakeWire(inputs=[])
    assert list(results(run_of(wire))) == []
    assert wire.n_streams == 0
