"""The logic of a call in virtual time: retries, deadlines, splitting, concurrency. No network, no waiting."""

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from fake_wire import FakeWire, Outcome

from encserve_client import (
    DeadlineError,
    EncodeResult,
    InvalidInputError,
    InvalidRequestError,
    MessageTooLargeError,
    OverloadedError,
    ProtocolError,
    RetryPolicy,
    ServerUnavailableError,
)
from encserve_client._logic.calls import Core, Settings
from encserve_client._logic.failures import Failure
from encserve_client._logic.wire import Rpc, run_without_loop
from encserve_client.inputs import Input
from encserve_client.options import Options, Output
from encserve_proto.v1 import encoder_pb2 as pb

Code = grpc.StatusCode
Encode = Callable[[pb.EncodeRequest], Outcome]
DOWN = Failure(Code.UNAVAILABLE, "down")
FULL = Failure(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", 2.0)
POLICY = RetryPolicy(max_attempts=3, initial_backoff_seconds=1.0, backoff_multiplier=2.0)
ONE_OUTPUT = Options()
THREE_OUTPUTS = Options(tuple(Output(dimensions=dimensions) for dimensions in (None, 1, 2)))


def echo(request: pb.EncodeRequest) -> pb.EncodeResponse:
    """Rows of one number, the token id."""
    ids = [list(item.token_ids.ids) for item in request.inputs]
    tensor = pb.RaggedTensor(
        kind=pb.OUTPUT_KIND_TOKENS,
        data_type=pb.DATA_TYPE_FLOAT32,
        width=1,
        lengths=map(len, ids),
        data=np.array([token for its in ids for token in its], "<f4").tobytes(),
    )
    sequences = [pb.SequenceInfo(token_count=len(its), original_token_count=len(its)) for its in ids]
    return pb.EncodeResponse(outputs=[tensor], sequences=sequences, fingerprint="f")


class Server:
    """Scripts a `FakeWire`: the answer to GetModel, and a function for the answers to Encode."""

    def __init__(self, encode: Encode, **limits: Any) -> None:
        self.encode = encode
        self.info = pb.ModelInfo(fingerprint="f", name="m", d_model=1, max_sequence_tokens=512, **limits)
        self.sizes: list[int] = []
        self.n_get_model = 0
        self.wire = FakeWire(self._answer)

    def _answer(self, rpc: Rpc, request: Any) -> Outcome:
        if rpc == "GetModel":
            self.n_get_model += 1
            return 0.0, pb.GetModelResponse(model=self.info)
        self.sizes.append(len(request.inputs))
        return self.encode(request)


def core_of(timeout_seconds: float = 100.0, max_concurrent: int = 4, retry: RetryPolicy = POLICY) -> Core:
    """A core with the largest jitter."""
    return Core(Settings(timeout_seconds, 64 << 20, max_concurrent, retry, random=lambda: 1.0, target="host:1"))


def encode(
    core: Core,
    server: Server,
    inputs: list[Input],
    timeout_seconds: float | None = None,
    options: Options = ONE_OUTPUT,
) -> EncodeResult:
    call = core.encode(server.wire, inputs, ("", ""), options, timeout_seconds)
    try:
        return run_without_loop(call)
    finally:
        assert server.wire.is_closed


def ids_in(result: EncodeResult) -> list[list[int]]:
    return [array[:, 0].astype(int).tolist() for array in result.outputs[0].arrays()]


def failing(failures: list[Failure]) -> Encode:
    """Fail `times` times, then answer."""
    left = list(failures)
    return lambda request: (0.0, left.pop(0)) if left else (0.0, echo(request))


def test_backoff_then_success() -> None:
    """The client waits 1 s, then 2 s. The result has the number of attempts."""
    server = Server(failing([DOWN, DOWN]))
    result = encode(core_of(), server, [[5, 6]])
    assert server.wire.sent == [0.0, 0.0, 1.0, 3.0]  # a request for the model, then three attempts
    assert ids_in(result) == [[5, 6]]
    assert (result.timings.messages, result.timings.attempts, result.timings.total_seconds) == (1, 3, 3.0)


def test_the_servers_delay_is_kept() -> None:
    server = Server(failing([FULL]))
    encode(core_of(), server, [[5]])
    assert server.wire.sent[1:] == [0.0, 3.0]  # the requested 2 s, and 1 s of jitter


def test_attempts_run_out() -> None:
    with pytest.raises(OverloadedError, match=r"^full \(sent 3 times\)$") as caught:
        encode(core_of(), Server(failing([FULL] * 9)), [[5]])
    assert caught.value.attempts == 3


def test_a_server_that_never_answered_is_given_up_after_its_attempts() -> None:
    server = Server(failing([]))
    server.wire = FakeWire(lambda rpc, request: (0.0, DOWN))
    with pytest.raises(ServerUnavailableError, match=r"^host:1: down \(sent 3 times\)$"):
        encode(core_of(), server, [[5]])


def test_a_server_that_has_answered_is_waited_for() -> None:
    """The client waits 1, 2, 4, and then 5 s each time, until the message's time is over."""
    server = Server(failing([DOWN] * 9))
    result = encode(core_of(), server, [[5]])
    assert result.timings.attempts == 10
    assert server.wire.sent[1:6] == [0.0, 1.0, 3.0, 7.0, 12.0]
    with pytest.raises(ServerUnavailableError, match=r"^host:1: down \(sent \d+ times\)$") as caught:
        encode(core_of(timeout_seconds=40.0), Server(failing([DOWN] * 99)), [[5]])
    assert caught.value.attempts == 10
    with pytest.raises(ServerUnavailableError, match=r"^host:1: down$"):
        encode(core_of(retry=RetryPolicy(max_attempts=1)), Server(failing([DOWN])), [[5]])


def test_attempts_while_the_server_is_away_do_not_count() -> None:
    """After a restart the queue of the server may be full for a while."""
    server = Server(failing([FULL, *[DOWN] * 5, FULL]))
    assert encode(core_of(), server, [[5]]).timings.attempts == 8


def test_a_messages_time_is_over_all_its_attempts() -> None:
    """Each attempt has the rest of the message's time."""
    answers = iter([(4.0, DOWN), (99.0, None)])
    server = Server(lambda _: next(answers))
    text = r"^Deadline Exceeded: host:1 did not answer within 6 s \(sent 2 times\)$"
    with pytest.raises(DeadlineError, match=text) as caught:
        encode(core_of(timeout_seconds=6.0), server, [[5]])
    assert server.wire.time == 6.0
    assert caught.value.attempts == 2


def test_a_wait_past_the_deadline_is_not_begun() -> None:
    """The caller gets the error at once, with the server's delay."""
    server = Server(failing([FULL]))
    with pytest.raises(OverloadedError) as caught:
        encode(core_of(timeout_seconds=2.5), server, [[5]])
    assert server.wire.time == 0.0
    assert caught.value.retry_delay_seconds == 2.0


def test_a_long_call_may_take_longer_than_each_of_its_messages() -> None:
    """A slow server takes 20 s for each of 40 messages, four at a time. The limit of a message is 30 s."""
    server = Server(lambda request: (20.0, echo(request)), max_request_sequences=256)
    inputs: list[Input] = [[i + 1] for i in range(10_000)]
    assert ids_in(encode(core_of(timeout_seconds=30.0), server, inputs)) == inputs
    assert server.wire.time == 200.0


def test_an_outage_starts_no_clock_of_messages_whose_turn_has_not_come() -> None:
    """Otherwise a restart of one second would fail every call that takes longer than one message may."""

    def answer(request: Any) -> Any:
        return (0.0, DOWN) if 40.0 <= server.wire.time < 41.3 else (20.0, echo(request))

    server = Server(answer, max_request_sequences=256)
    inputs: list[Input] = [[i + 1] for i in range(10_000)]
    assert ids_in(encode(core_of(timeout_seconds=30.0), server, inputs)) == inputs
    assert 200.0 < server.wire.time < 225.0


def test_messages_are_small_enough_for_a_slow_server() -> None:
    """BERT-large on four CPUs computes about 700 tokens a second, and a message has 30 s by default."""
    free_at = 0.0

    def compute(request: pb.EncodeRequest) -> Outcome:
        nonlocal free_at
        n_tokens = sum(len(item.token_ids.ids) for item in request.inputs)
        free_at = max(free_at, server.wire.time) + n_tokens / 700
        return free_at - server.wire.time, echo(request)

    server = Server(compute, max_request_sequences=1024, max_request_tokens=65536)
    encode(core_of(timeout_seconds=30.0), server, [[1] * 64] * 2000)
    assert server.wire.time == pytest.approx(2000 * 64 / 700)


def test_a_messages_time_begins_when_it_is_sent() -> None:
    """A slow message fails even late in a call, because the limit belongs to the message."""
    answers = iter([9.0, 9.0, 11.0])
    server = Server(lambda request: (next(answers), echo(request)), max_request_sequences=1)
    with pytest.raises(DeadlineError, match="host:1 did not answer within 10 s"):
        encode(core_of(timeout_seconds=10.0, max_concurrent=1), server, [[5], [6], [7]])
    assert server.wire.time == 28.0


def test_halves_have_time_of_their_own() -> None:
    def too_large(request: pb.EncodeRequest) -> Outcome:
        if len(request.inputs) > 1:
            return 6.0, Failure(Code.INVALID_ARGUMENT, "too large", "RESPONSE_TOO_LARGE")
        return 6.0, echo(request)

    assert ids_in(encode(core_of(timeout_seconds=10.0), server := Server(too_large), [[5], [6]])) == [[5], [6]]
    assert server.wire.time == 12.0


@pytest.mark.parametrize("clients_own", [3.0, 100.0])
def test_a_calls_own_timeout_is_for_the_whole_and_goes_before_the_clients(clients_own: float) -> None:
    server = Server(lambda request: (4.0, echo(request)), max_request_sequences=1)
    core = core_of(timeout_seconds=clients_own, max_concurrent=1)
    assert ids_in(encode(core, server, [[5], [6]], timeout_seconds=9.0)) == [[5], [6]]
    began = server.wire.time
    with pytest.raises(DeadlineError, match="host:1 did not answer within 7 s"):
        encode(core, server, [[5], [6]], timeout_seconds=7.0)
    assert server.wire.time == began + 7.0


def test_what_there_was_no_time_to_send_is_a_deadline_too() -> None:
    """Only one message may be open at a time, and the first one takes the whole time of the call."""
    server = Server(lambda request: (2.0, echo(request)), max_request_sequences=1)
    with pytest.raises(DeadlineError, match="^2 s passed before everything was sent to host:1$"):
        encode(core_of(max_concurrent=1), server, [[5], [6]], timeout_seconds=2.0)


def test_order_is_kept_whichever_answer_comes_first() -> None:
    """The server answers later messages first. Never more than four messages are open."""
    server = Server(
        lambda request: (100.0 - request.inputs[0].token_ids.ids[0], echo(request)), max_request_sequences=2
    )
    inputs: list[Input] = [[i] for i in range(1, 20)]
    result = encode(core_of(timeout_seconds=1000.0), server, inputs)
    assert ids_in(result) == inputs
    assert server.sizes == [2] * 9 + [1]
    assert server.wire.most_out == 4


def test_messages_too_large_are_halved_until_they_pass() -> None:
    """The server accepts at most 3 sequences, and its limits said more. The client asks for the limits again."""

    def at_most_3(request: pb.EncodeRequest) -> Outcome:
        if len(request.inputs) > 3:
            return 0.0, Failure(Code.INVALID_ARGUMENT, "too large", "RESPONSE_TOO_LARGE")
        return 0.0, echo(request)

    core, server = core_of(), Server(at_most_3)
    inputs: list[Input] = [[i, i] for i in range(1, 12)]
    assert ids_in(encode(core, server, inputs)) == inputs
    assert server.sizes[0] == 11
    assert max(server.sizes[3:]) <= 5
    server.info.max_request_sequences = 3
    encode(core, server, inputs)
    assert server.n_get_model == 2
    assert server.sizes[-4:] == [3, 3, 3, 2]


def test_grpcs_own_size_limit_halves_but_never_repeats() -> None:
    """RESOURCE_EXHAUSTED without a reason of the server: the client never sends the same message twice."""
    refusal = Failure(Code.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 4)")
    server = Server(lambda _: (0.0, refusal))
    with pytest.raises(MessageTooLargeError):
        encode(core_of(), server, [[i] for i in range(1, 5)])
    assert server.sizes[0] == 4
    assert server.sizes.count(4) == 1
    alone = Server(lambda _: (0.0, refusal))
    with pytest.raises(MessageTooLargeError) as caught:
        encode(core_of(), alone, [[1]])
    assert alone.sizes == [1]
    assert caught.value.attempts == 1


def test_the_first_failure_ends_the_call() -> None:
    """The client sends nothing more. The error names the caller's index."""

    def second_fails(request: pb.EncodeRequest) -> Outcome:
        if request.inputs[0].token_ids.ids[0] == 3:
            return 1.0, Failure(Code.INVALID_ARGUMENT, "inputs[1]: is bad", "SEQUENCE_TOO_LONG")
        return 5.0, echo(request)

    server = Server(second_fails, max_request_sequences=2)
    with pytest.raises(InvalidRequestError, match=r"inputs\[3\]: is bad") as caught:
        encode(core_of(), server, [[i] for i in range(1, 50)])
    assert caught.value.reason == "SEQUENCE_TOO_LONG"
    assert server.wire.time == 1.0
    assert len(server.sizes) == 4


def test_a_model_is_asked_for_once() -> None:
    core, server = core_of(), Server(failing([]))
    for _ in range(3):
        encode(core, server, [[1]])
    assert server.n_get_model == 1


def echo_thrice(request: pb.EncodeRequest) -> Outcome:
    response = echo(request)
    response.outputs.extend([response.outputs[0]] * 2)
    return 0.0, response


@pytest.mark.parametrize("inputs", [[], [[1]]])
def test_more_outputs_than_a_server_takes_are_refused_before_inputs_are_sent(inputs: list[Input]) -> None:
    server = Server(echo_thrice, max_outputs=2)
    text = r"^outputs must be at most 2 \(ModelInfo.max_outputs\); was 3: make more calls$"
    with pytest.raises(InvalidInputError, match=text) as caught:
        encode(core_of(), server, inputs, options=THREE_OUTPUTS)
    assert (server.sizes, caught.value.attempts) == ([], 0)


def test_a_server_that_takes_more_outputs_than_before_gets_them() -> None:
    """The client's copy of the model's description may be old, so it refuses no call."""
    core, server = core_of(), Server(echo_thrice, max_outputs=2)
    with pytest.raises(InvalidInputError):
        encode(core, server, [[1]], options=THREE_OUTPUTS)
    server.info.max_outputs = 3
    for _ in range(2):
        assert len(encode(core, server, [[1]], options=THREE_OUTPUTS).outputs) == 3
    assert server.n_get_model == 2


def test_a_server_that_does_not_say_how_many_outputs_it_takes_judges_itself() -> None:
    server = Server(echo_thrice)
    assert len(encode(core_of(), server, [[1]], options=THREE_OUTPUTS).outputs) == 3
    assert server.n_get_model == 1


def test_asking_for_the_model_is_retried_too() -> None:
    """The request has the same deadline as the call."""
    answers: list[Outcome] = [
        (0.0, DOWN),
        (0.0, pb.GetModelResponse(model=pb.ModelInfo(fingerprint="f", name="m", d_model=1))),
    ]
    wire = FakeWire(lambda rpc, request: answers.pop(0) if rpc == "GetModel" else (0.0, echo(request)))
    result = run_without_loop(core_of().encode(wire, [[1]], ("", ""), Options(), None))
    assert ids_in(result) == [[1]]
    assert wire.sent == [0.0, 1.0, 1.0]


def test_a_model_without_a_width_is_refused() -> None:
    wire = FakeWire(lambda rpc, request: (0.0, pb.GetModelResponse()))
    with pytest.raises(ProtocolError, match="d_model >= 1"):
        run_without_loop(core_of().get_model(wire, ("", ""), None))


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_must_be_positive(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout_seconds must be > 0; was"):
        core_of().time_limit(timeout, 0.0)
    with pytest.raises(ValueError, match="timeout_seconds must be > 0; was"):
        core_of(timeout_seconds=timeout)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="max_concurrent_messages must be >= 1; was 0"):
        Settings(1.0, 1, 0, POLICY)
    with pytest.raises(ValueError, match="max_message_bytes must be >= 1; was 0"):
        Settings(1.0, 0, 1, POLICY)
