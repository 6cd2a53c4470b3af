"""Tests of the logic of a call, with a fake connection and a fake clock.

The tests cover retries, deadlines, the splitting into messages, and concurrency.
"""

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from fake_wire import FakeWire, Outcome, WireServer, echo
from hypothesis import given
from hypothesis import strategies as st

from encserve_client import (
    DeadlineError,
    EncodeResult,
    EncserveError,
    InvalidInputError,
    InvalidRequestError,
    Outage,
    OverloadedError,
    ProtocolError,
    RetryPolicy,
    ServerError,
    ServerUnavailableError,
)
from encserve_client._logic.calls import Core, Settings
from encserve_client._logic.failures import Failure
from encserve_client._logic.wire import run_without_loop
from encserve_client.inputs import Input
from encserve_client.options import Options, Output, Progress
from encserve_client.retry import OnOutage
from encserve_proto.v1 import encoder_pb2 as pb

Code = grpc.StatusCode
Encode = Callable[[pb.EncodeRequest], Outcome]
DOWN = Failure(Code.UNAVAILABLE, "down")
FULL = Failure(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", 2.0)
POLICY = RetryPolicy(initial_backoff_seconds=1.0, backoff_multiplier=2.0)
THRICE = RetryPolicy(max_attempts=3, initial_backoff_seconds=1.0)
ONE_OUTPUT = Options()
THREE_OUTPUTS = Options(tuple(Output(dimensions=dimensions) for dimensions in (None, 1, 2)))


def core_of(
    timeout_seconds: float = 100.0,
    max_concurrent: int = 4,
    retry: RetryPolicy = POLICY,
    on_outage: OnOutage | None = None,
) -> Core:
    """Make a `Core` that always draws the largest jitter, so that the waits before retries are known."""
    return Core(
        Settings(
            timeout_seconds,
            64 << 20,
            max_concurrent,
            retry,
            random=lambda: 1.0,
            target="host:1",
            on_outage=on_outage,
        )
    )


def encode(
    core: Core,
    server: WireServer,
    inputs: list[Input],
    timeout_seconds: float | None = None,
    options: Options = ONE_OUTPUT,
    *,
    describe: bool = False,
    progress: Progress | None = None,
) -> EncodeResult:
    call = core.encode(server.wire, inputs, ("", ""), options, timeout_seconds, describe=describe, progress=progress)
    try:
        return run_without_loop(call)
    finally:
        assert server.wire.is_closed


def ids_in(result: EncodeResult) -> list[list[int]]:
    return [array[:, 0].astype(int).tolist() for array in result.outputs[0].arrays()]


def failing(failures: list[Failure]) -> Encode:
    """Make a server function that answers the first requests with `failures`, one each. Later requests get a reply."""
    left = list(failures)
    return lambda request: (0.0, left.pop(0)) if left else (0.0, echo(request))


@pytest.mark.parametrize(
    ("failures", "sent"),
    [([DOWN, DOWN], [0.0, 1.0, 3.0]), ([FULL], [0.0, 3.0]), ([DOWN] * 5, [0.0, 1.0, 3.0, 7.0, 12.0, 17.0])],
    ids=["the backoff doubles", "the server's delay and 1 s of jitter", "the backoff is at most 5 s"],
)
def test_a_failed_message_is_sent_again(failures: list[Failure], sent: list[float]) -> None:
    server = WireServer(failing(failures))
    result = encode(core_of(), server, [[5, 6]])
    assert server.wire.sent[1:] == sent  # the first request is GetModel
    assert ids_in(result) == [[5, 6]]
    assert (result.timings.messages, result.timings.attempts) == (1, len(sent))
    assert result.timings.total_seconds == sent[-1]


@pytest.mark.parametrize(
    ("core", "failures", "error", "text", "attempts"),
    [
        (core_of(retry=THRICE), [FULL] * 9, OverloadedError, "full (sent 3 times)", 3),
        (core_of(timeout_seconds=40.0), [FULL] * 99, OverloadedError, "full (sent 7 times)", 7),
        (core_of(timeout_seconds=40.0), [DOWN] * 99, ServerUnavailableError, "host:1: down (sent 10 times)", 10),
        (core_of(retry=RetryPolicy(max_attempts=1)), [DOWN], ServerUnavailableError, "host:1: down", 1),
    ],
    ids=["max_attempts", "a full queue until no time is left", "no time is left", "one attempt"],
)
def test_attempts_end(
    core: Core, failures: list[Failure], error: type[EncserveError], text: str, attempts: int
) -> None:
    with pytest.raises(error) as caught:
        encode(core, WireServer(failing(failures)), [[5]])
    assert (str(caught.value), caught.value.attempts) == (text, attempts)


def test_a_server_that_never_answers_gets_two_seconds() -> None:
    """The client waits 1 s and then sends again. A second wait of 2 s would exceed the limit of two seconds."""
    server = WireServer(failing([]))
    server.wire = FakeWire(lambda rpc, request: (0.0, DOWN))
    with pytest.raises(ServerUnavailableError, match=r"^host:1: down \(sent 2 times\)$"):
        encode(core_of(), server, [[5]])


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        ([DOWN] * 5, [(1.0, Outage("host:1", 99.0)), (17.0, Outage("host:1", 0.0, is_over=True))]),
        ([DOWN, DOWN, FULL], [(1.0, Outage("host:1", 99.0)), (3.0, Outage("host:1", 0.0, is_over=True))]),
        ([DOWN], []),
        ([FULL] * 5, []),
    ],
    ids=["a long outage", "a full server is there", "too short", "no outage"],
)
def test_an_outage_and_its_end_are_reported_once(failures: list[Failure], told: list[tuple[float, Outage]]) -> None:
    """The client reports an outage when a message fails at least 0.5 s after the start of the outage."""
    found = list[tuple[float, Outage]]()
    server = WireServer(failing(failures))
    encode(core_of(on_outage=lambda it: found.append((server.wire.time, it))), server, [[5]])
    assert found == told


def test_each_of_two_outages_is_reported() -> None:
    """Two outages take 3 s each. In each outage, four messages fail at the same time."""

    def answer(request: Any) -> Any:
        return (0.0, DOWN) if server.wire.time % 23 < 3 else (20.0, echo(request))

    found = list[bool]()
    server = WireServer(answer, max_request_sequences=256)
    encode(core_of(on_outage=lambda it: found.append(it.is_over)), server, [[1]] * 2048)
    assert found == [False, True, False, True]


def test_each_call_reports_the_outage_that_it_meets() -> None:
    """The first two calls give up during an outage. The failures of the first calls do not count for the last call."""
    found = list[bool]()
    core = core_of(timeout_seconds=6.0, on_outage=lambda it: found.append(it.is_over))
    server = WireServer(failing([DOWN] * 8))
    for _ in range(2):
        with pytest.raises(ServerUnavailableError):
            encode(core, server, [[5]])
        server.wire.time += 100.0
    assert found == [False, False]
    encode(core, server, [[5]])
    assert found == [False, False, False, True]


def test_a_short_outage_after_a_call_that_gave_up_is_not_reported() -> None:
    found = list[Outage]()
    core = core_of(retry=THRICE, on_outage=found.append)
    server = WireServer(failing([DOWN]))

    def stop(done: int, total: int | None) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError):
        encode(core, server, [[5]], progress=stop)
    server.wire.time += 100.0
    server.encode = failing([DOWN])
    encode(core, server, [[5]])
    assert found == []


def test_a_server_that_never_answered_has_no_outage() -> None:
    found = list[Outage]()
    server = WireServer(failing([]))
    server.wire = FakeWire(lambda rpc, request: (0.0, DOWN))
    with pytest.raises(ServerUnavailableError):
        encode(core_of(on_outage=found.append), server, [[5]])
    assert found == []


def test_all_attempts_of_a_message_share_its_timeout() -> None:
    answers = iter([(4.0, DOWN), (99.0, None)])
    server = WireServer(lambda _: next(answers))
    text = r"^Deadline Exceeded: host:1 did not answer within 6 s \(sent 2 times\)$"
    with pytest.raises(DeadlineError, match=text) as caught:
        encode(core_of(timeout_seconds=6.0), server, [[5]])
    assert server.wire.time == 6.0
    assert caught.value.attempts == 2


def test_no_wait_exceeds_the_deadline() -> None:
    """The server asks for a retry delay that ends after the deadline. The caller gets the error immediately."""
    server = WireServer(failing([FULL]))
    with pytest.raises(OverloadedError) as caught:
        encode(core_of(timeout_seconds=2.5), server, [[5]])
    assert server.wire.time == 0.0
    assert caught.value.retry_delay_seconds == 2.0


def test_a_call_may_take_longer_than_the_timeout_of_a_message() -> None:
    """10,000 inputs need 40 messages. A message takes 20 s, and the client sends four messages at a time.

    The call succeeds after 200 s, although the timeout of a message is 30 s.
    """
    server = WireServer(lambda request: (20.0, echo(request)), max_request_sequences=256)
    inputs: list[Input] = [[i + 1] for i in range(10_000)]
    assert ids_in(encode(core_of(timeout_seconds=30.0), server, inputs)) == inputs
    assert server.wire.time == 200.0


def test_an_outage_starts_no_timeout_of_unsent_messages() -> None:
    """The server is unavailable for a short time at 40 s. The timeout of a message is 30 s.

    The outage must not start the timeout of messages that have not been sent yet.
    """

    def answer(request: Any) -> Any:
        return (0.0, DOWN) if 40.0 <= server.wire.time < 41.3 else (20.0, echo(request))

    server = WireServer(answer, max_request_sequences=256)
    inputs: list[Input] = [[i + 1] for i in range(10_000)]
    assert ids_in(encode(core_of(timeout_seconds=30.0), server, inputs)) == inputs
    assert 200.0 < server.wire.time < 225.0


def test_messages_suit_a_slow_server() -> None:
    """The server computes 700 tokens per second, as BERT-large does on four CPUs.

    The messages must be so small that each gets its reply within the timeout of 30 s.
    """
    free_at = 0.0

    def compute(request: pb.EncodeRequest) -> Outcome:
        nonlocal free_at
        n_tokens = sum(len(item.token_ids.ids) for item in request.inputs)
        free_at = max(free_at, server.wire.time) + n_tokens / 700
        return free_at - server.wire.time, echo(request)

    server = WireServer(compute, max_request_sequences=1024, max_request_tokens=65536)
    encode(core_of(timeout_seconds=30.0), server, [[1] * 64] * 2000)
    assert server.wire.time == pytest.approx(2000 * 64 / 700)


def test_each_half_of_a_split_message_has_a_full_timeout() -> None:
    def too_large(request: pb.EncodeRequest) -> Outcome:
        if len(request.inputs) > 1:
            return 6.0, Failure(Code.INVALID_ARGUMENT, "too large", "RESPONSE_TOO_LARGE")
        return 6.0, echo(request)

    assert ids_in(encode(core_of(timeout_seconds=10.0), server := WireServer(too_large), [[5], [6]])) == [[5], [6]]
    assert server.wire.time == 12.0


@pytest.mark.parametrize("client_timeout", [3.0, 100.0])
def test_the_timeout_of_a_call_is_for_all_its_messages(client_timeout: float) -> None:
    server = WireServer(lambda request: (4.0, echo(request)), max_request_sequences=1)
    core = core_of(timeout_seconds=client_timeout, max_concurrent=1)
    assert ids_in(encode(core, server, [[5], [6]], timeout_seconds=9.0)) == [[5], [6]]
    began = server.wire.time
    with pytest.raises(DeadlineError, match="host:1 did not answer within 7 s"):
        encode(core, server, [[5], [6]], timeout_seconds=7.0)
    assert server.wire.time == began + 7.0


def test_an_unsent_message_fails_with_the_deadline() -> None:
    """Messages are sent one at a time, and the first message uses the whole timeout of the call.

    The call fails with DeadlineError, because the second message was not sent.
    """
    server = WireServer(lambda request: (2.0, echo(request)), max_request_sequences=1)
    with pytest.raises(DeadlineError, match="^2 s passed before everything was sent to host:1$"):
        encode(core_of(max_concurrent=1), server, [[5], [6]], timeout_seconds=2.0)


def test_the_deadline_of_a_message_that_waits_for_a_retry_names_the_last_failure() -> None:
    """The first message fails after 1 s. Its retry waits for the second message, which takes the rest of the time."""
    stopping = Failure(Code.CANCELLED, "the server stops")
    server = WireServer(
        lambda request: (1.0, stopping) if request.inputs[0].token_ids.ids[0] == 5 else (3.0, echo(request)),
        max_request_sequences=1,
    )
    text = "^4 s passed before everything was sent to host:1; the last attempt failed: the server stops$"
    with pytest.raises(DeadlineError, match=text) as caught:
        encode(core_of(max_concurrent=1), server, [[5], [6]], timeout_seconds=4.0)
    assert caught.value.attempts == 1


def test_late_answers_keep_the_order_of_inputs() -> None:
    """The server replies to later messages first. The results are still in input order.

    At most four messages wait for a reply at the same time.
    """
    server = WireServer(
        lambda request: (100.0 - request.inputs[0].token_ids.ids[0], echo(request)), max_request_sequences=2
    )
    inputs: list[Input] = [[i] for i in range(1, 20)]
    result = encode(core_of(timeout_seconds=1000.0), server, inputs)
    assert ids_in(result) == inputs
    assert server.sizes == [2] * 9 + [1]
    assert server.wire.most_out == 4


def test_too_large_messages_are_halved() -> None:
    """The server refuses messages of more than 3 inputs, although its reply to GetModel has no limit of inputs.

    The client sends each refused message again in two halves. The next call fetches the limits again.
    """

    def at_most_3(request: pb.EncodeRequest) -> Outcome:
        if len(request.inputs) > 3:
            return 0.0, Failure(Code.INVALID_ARGUMENT, "too large", "RESPONSE_TOO_LARGE")
        return 0.0, echo(request)

    core, server = core_of(), WireServer(at_most_3)
    inputs: list[Input] = [[i, i] for i in range(1, 12)]
    assert ids_in(encode(core, server, inputs)) == inputs
    assert server.sizes[0] == 11
    assert max(server.sizes[3:]) <= 5
    server.info.max_request_sequences = 3
    encode(core, server, inputs)
    assert server.n_get_model == 2
    assert server.sizes[-4:] == [3, 3, 3, 2]


def echo_thrice(request: pb.EncodeRequest) -> Outcome:
    response = echo(request)
    response.outputs.extend([response.outputs[0]] * 2)
    return 0.0, response


@pytest.mark.parametrize("inputs", [[], [[1]]])
def test_too_many_outputs_are_refused_before_inputs_are_sent(inputs: list[Input]) -> None:
    server = WireServer(echo_thrice, max_outputs=2)
    text = r"^outputs must be at most 2 \(ModelInfo.max_outputs\); was 3: make more calls$"
    with pytest.raises(InvalidInputError, match=text) as caught:
        encode(core_of(), server, inputs, options=THREE_OUTPUTS)
    assert (server.sizes, caught.value.attempts) == ([], 0)


def test_a_raised_limit_of_outputs_is_noticed() -> None:
    """The client has cached a limit of two outputs, and the server has raised the limit to three.

    The client fetches the model's limits again before it refuses a call, so the call with three outputs succeeds.
    """
    core, server = core_of(), WireServer(echo_thrice, max_outputs=2)
    with pytest.raises(InvalidInputError):
        encode(core, server, [[1]], options=THREE_OUTPUTS)
    server.info.max_outputs = 3
    for _ in range(2):
        assert len(encode(core, server, [[1]], options=THREE_OUTPUTS).outputs) == 3
    assert server.n_get_model == 2


def test_without_a_limit_of_outputs_the_server_decides() -> None:
    server = WireServer(echo_thrice)
    assert len(encode(core_of(), server, [[1]], options=THREE_OUTPUTS).outputs) == 3
    assert server.n_get_model == 1


def test_a_model_without_a_width_is_refused() -> None:
    wire = FakeWire(lambda rpc, request: (0.0, pb.GetModelResponse()))
    with pytest.raises(ProtocolError, match="d_model >= 1"):
        run_without_loop(core_of().get_model(wire, ("", ""), None))


def refusing(bad: set[int]) -> Encode:
    """Make a server function that refuses a message for the first input whose token id is in `bad`."""

    def answer(request: pb.EncodeRequest) -> Outcome:
        for position, item in enumerate(request.inputs):
            if item.token_ids.ids[0] in bad:
                text = f"inputs[{position}].token_ids.ids[0]: is bad"
                return 0.1, Failure(Code.INVALID_ARGUMENT, text, "INVALID_TOKEN_ID")
        return 0.1 * (request.inputs[0].token_ids.ids[0] % 3), echo(request)

    return answer


@given(
    n_inputs=st.integers(1, 40),
    refused=st.sets(st.integers(0, 39)),
    invalid=st.sets(st.integers(0, 39), max_size=3),
    size=st.integers(1, 40),
)
def test_run_returns_rows_or_an_error_for_each_input(
    n_inputs: int, refused: set[int], invalid: set[int], size: int
) -> None:
    """Only the refused inputs have errors. The other rows equal the rows of a call without the refused inputs."""
    inputs: list[Any] = [[] if i in invalid else [i + 1] * (1 + i % 3) for i in range(n_inputs)]
    failed = {i for i in range(n_inputs) if i in refused | invalid}
    counts: list[tuple[int, int | None]] = []
    server = WireServer(refusing({i + 1 for i in refused}), max_request_sequences=size)
    result = encode(core_of(), server, inputs, describe=True, progress=lambda *count: counts.append(count))
    assert list(result.errors) == sorted(failed)
    for index, error in result.errors.items():
        assert error.index == index
        assert isinstance(error, InvalidRequestError)
        name, problem = f"inputs[{index}]", "must have" if index in invalid else "is bad"
        assert str(error).startswith(name)
        assert error.problem.startswith(problem)
    [output] = result.outputs
    good = [item for index, item in enumerate(inputs) if index not in failed]
    assert np.concatenate([block.rows for block in output.blocks])[:, 0].tolist() == [
        it for item in good for it in item
    ]
    lengths = [0 if index in failed else len(item) for index, item in enumerate(inputs)]
    assert np.concatenate([block.lengths for block in output.blocks]).tolist() == lengths
    assert [info.token_count for info in result.sequences] == lengths
    for index, item in enumerate(inputs):
        if index in failed:
            with pytest.raises(InvalidRequestError) as caught:
                output.array(index)
            assert caught.value is result.errors[index]
        else:
            assert output.array(index)[:, 0].tolist() == item
    for all_inputs in (output.matrix, output.arrays, output.token_indices):
        if failed:
            with pytest.raises(InvalidRequestError) as caught:
                all_inputs()
            assert caught.value is result.errors[min(failed)]
        else:
            assert len(all_inputs())
    assert counts == sorted(counts)
    if any(index not in invalid for index in range(n_inputs)):  # a message was sent
        assert counts[-1] == (n_inputs, n_inputs)


def test_refusals_of_all_inputs_resend_each_input_a_few_times() -> None:
    """The server names one input of a message at a time. 400 inputs are sent at most 10 times each."""
    server = WireServer(refusing({1}))
    result = encode(core_of(), server, [[1]] * 400, describe=True)
    assert len(result.errors) == 400
    assert sum(server.sizes) <= 10 * 400


@pytest.mark.parametrize("most", [40, 64])
def test_refused_inputs_in_one_reply_need_few_messages(most: int) -> None:
    """The server names up to `most` refused inputs in a reply. All other inputs get their rows."""

    def answer(request: pb.EncodeRequest) -> Outcome:
        bad = [position for position, item in enumerate(request.inputs) if item.token_ids.ids[0] == 1]
        if not bad:
            return 0.0, echo(request)
        texts = [f"inputs[{position}].token_ids.ids[0]: is bad" for position in bad[:most]]
        code, reason = Code.INVALID_ARGUMENT, "INVALID_TOKEN_ID"
        named = tuple(Failure(code, text, reason) for text in texts)
        return 0.0, Failure(code, texts[0], reason, refused=named)

    server = WireServer(answer)
    inputs: list[Input] = [[1] if index % 4 else [index + 2] for index in range(400)]
    result = encode(core_of(), server, inputs, describe=True)
    assert list(result.errors) == [index for index in range(400) if index % 4]
    assert len(server.sizes) <= 300 // most + 2
    assert [result.outputs[0].array(index).tolist() for index in range(0, 400, 4)] == [
        [[index + 2]] for index in range(0, 400, 4)
    ]
    for index, error in result.errors.items():
        assert (error.index, error.field) == (index, f"inputs[{index}][0]")


VECTORS_ONLY = {"input_kind": pb.INPUT_KIND_EMBEDDINGS}


@pytest.mark.parametrize(
    ("limits", "item", "problem"),
    [
        ({}, "a", "must be token ids, because model m has no tokenizer"),
        ({}, np.ones((2, 2)), "must be a text or token ids, because model m takes no vectors"),
        (
            VECTORS_ONLY,
            np.ones((2, 3)),
            r"must have 2 columns \(d_model of model m\); had 3",
        ),
        (
            VECTORS_ONLY,
            [5],
            "must be an array of vectors, because model m takes vectors only",
        ),
    ],
)
def test_inputs_that_the_model_does_not_take_are_not_sent(limits: dict[str, Any], item: Input, problem: str) -> None:
    core, server = core_of(), WireServer(failing([]), **limits)
    for _ in range(2):
        result = encode(core, server, [item] * 400, describe=True)
        assert (len(result.errors), result.errors[3].index) == (400, 3)
        with pytest.raises(InvalidRequestError, match=rf"^inputs\[0\] {problem}$"):
            encode(core, server, [item])
    assert server.sizes == []


def test_a_tokenizer_that_the_model_gets_later_is_noticed() -> None:
    core, server = core_of(), WireServer(failing([]))
    result = encode(core, server, [[5], "a"], describe=True)
    assert (list(result.errors), server.sizes) == ([1], [1])
    server.info.has_tokenizer = True
    server.encode = lambda request: (0.0, echo(pb.EncodeRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=[7]))])))
    assert ids_in(encode(core, server, ["a"])) == [[7]]


def test_a_stored_error_does_not_grow() -> None:
    [output] = encode(core_of(), WireServer(refusing({2})), [[1], [2]], describe=True).outputs
    reads: list[Callable[[], object]] = [lambda: output.array(1), output.matrix]
    for read in reads:
        depths = set()
        for _ in range(3):
            with pytest.raises(InvalidRequestError) as caught:
                read()
            depths.add(len(caught.traceback))
        assert len(depths) == 1


def test_an_index_that_is_out_of_range() -> None:
    [output] = encode(core_of(), WireServer(lambda request: (0.0, echo(request))), [[1], [2]], describe=True).outputs
    for index in (2, -1):
        with pytest.raises(IndexError, match=f"index must be from 0 to 1; was {index}"):
            output.array(index)
    with pytest.raises(ValueError, match="the kind of the output must be 'sparse'; was 'tokens'"):
        output.sparse_vector(0)


def crashing(bad: set[int], seconds: float = 0.0) -> Encode:
    """Make a server function that fails for each message with a token id in `bad`. The failure has no error reason."""

    def answer(request: pb.EncodeRequest) -> Outcome:
        if any(item.token_ids.ids[0] in bad for item in request.inputs):
            return seconds, Failure(Code.INTERNAL, "crashed")
        return 0.0, echo(request)

    return answer


def test_run_records_the_failure_of_a_message_for_its_inputs() -> None:
    result = encode(
        core_of(), WireServer(crashing({3}), max_request_sequences=2), [[i] for i in range(1, 7)], describe=True
    )
    assert {index: str(error) for index, error in result.errors.items()} == {2: "crashed", 3: "crashed"}
    assert [error.index for error in result.errors.values()] == [2, 3]
    assert [error.problem for error in result.errors.values()] == ["crashed", "crashed"]
    assert result.outputs[0].array(4).tolist() == [[5.0]]


@pytest.mark.parametrize("bad", [{1, 2, 3}, {1}], ids=["all messages fail", "the rest is refused"])
def test_run_raises_if_no_message_was_answered(bad: set[int]) -> None:
    def answer(request: pb.EncodeRequest) -> Outcome:
        return (
            refusing({2, 3} - bad)(request)
            if request.inputs[0].token_ids.ids[0] not in bad
            else (
                0.0,
                Failure(Code.INTERNAL, "crashed"),
            )
        )

    with pytest.raises(ServerError, match="crashed") as caught:
        encode(core_of(), WireServer(answer, max_request_sequences=1), [[1], [2], [3]], describe=True)
    assert caught.value.index is None


def test_run_ends_after_8_failed_messages_in_a_row() -> None:
    """The call has 100 messages, and the server never answers. The call must not wait for the timeout of each message.

    After 8 failed messages, the call ends.
    """
    server = WireServer(lambda request: (1000.0, echo(request)), max_request_sequences=1)
    with pytest.raises(DeadlineError, match="did not answer within 100 s"):
        encode(core_of(), server, [[i] for i in range(1, 101)], describe=True)
    assert len(server.sizes) == 11  # 8 messages have failed, and 3 have no reply yet
    assert server.wire.time == 200.0
    one = WireServer(crashing(set(range(1, 101))), max_request_sequences=1)
    with pytest.raises(ServerError):
        encode(core_of(max_concurrent=1), one, [[i] for i in range(1, 101)], describe=True)
    assert len(one.sizes) == 8
    some = WireServer(crashing({i for i in range(1, 101) if i % 8}), max_request_sequences=1)
    result = encode(core_of(max_concurrent=1), some, [[i] for i in range(1, 101)], describe=True)
    assert len(result.errors) == 88


def test_run_raises_an_error_of_all_inputs() -> None:
    server = WireServer(failing([Failure(Code.INVALID_ARGUMENT, "options: are wrong", "INVALID_OPTION")] * 9))
    with pytest.raises(InvalidRequestError, match="options: are wrong") as caught:
        encode(core_of(), server, [[1], [2]], describe=True)
    assert caught.value.index is None


def test_progress_is_called_while_a_message_waits_for_a_retry() -> None:
    """The callback `progress` can end the call by an exception, even if the server is unavailable."""
    server = WireServer(failing([DOWN] * 50))
    core = core_of()
    encode(core, WireServer(failing([])), [[1]])  # the client now knows that the server exists

    def stop(done: int, total: int | None) -> None:
        assert (done, total) == (0, 2)
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        encode(core, server, [[1], [2]], progress=stop)
    assert server.wire.time == 0.0


def test_progress_can_end_a_call_to_a_server_that_does_not_answer() -> None:
    server = WireServer(lambda request: (1000.0, echo(request)))

    def stop(done: int, total: int | None) -> None:
        if server.wire.time >= 3.0:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        encode(core_of(timeout_seconds=900.0), server, [[1], [2]], progress=stop)
    assert server.wire.time == 3.0
