"""Tests of the planning of a call, which splits the call into messages.

The messages contain every input once and in order, and each message is within the limits.
"""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_client import InvalidInputError, Output
from encserve_client._logic.answers import model_info
from encserve_client._logic.planning import Limits, Message, as_bulk, cost_of, plan_messages
from encserve_client.inputs import Input, check_inputs, pack_input, read_inputs
from encserve_client.options import Options
from encserve_proto.v1 import encoder_pb2 as pb

TEMPLATE = pb.EncodeRequest(model="m", model_version="2", options=Options().to_proto())

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
id_lists = st.lists(st.integers(0, 2**40), min_size=1, max_size=60)
some_inputs = st.lists(texts | id_lists | id_lists.map(np.array) | id_lists.map(tuple), max_size=60)
limits = st.builds(
    Limits,
    max_sequences=st.integers(1, 20),
    max_tokens=st.integers(1, 200),
    max_request_bytes=st.integers(1, 2000),
    max_sequence_tokens=st.integers(1, 100),
)


def packed(inputs: list[Input]) -> list[pb.Input]:
    return [pack_input(item, f"inputs[{index}]") for index, item in enumerate(inputs)]


def requests_of(messages: list[Message]) -> list[pb.EncodeRequest]:
    return [message.request for message in messages if isinstance(message.request, pb.EncodeRequest)]


def fit(inputs: list[pb.Input], limits: Limits) -> bool:
    """Return whether `inputs` fit into one message."""
    costs = [cost_of(item, limits) for item in inputs]
    return (
        len(inputs) <= limits.max_sequences
        and sum(tokens for tokens, _ in costs) <= limits.max_tokens
        and sum(request_bytes for _, request_bytes in costs) <= limits.max_request_bytes
    )


@given(some_inputs, limits)
def test_messages_have_every_input_once_and_keep_the_limits(inputs: list[Input], limits: Limits) -> None:
    """The messages contain every input once and in order. Only a message with a single input may exceed a limit.

    Each message is as large as possible. The first input of the next message would exceed a limit.
    """
    messages = list(plan_messages(read_inputs(inputs)[0], TEMPLATE, limits))
    requests = requests_of(messages)
    assert [item for request in requests for item in request.inputs] == packed(inputs)
    assert [index for message in messages for index in message.indices] == list(range(len(inputs)))
    for request in requests:
        assert len(request.inputs) == 1 or fit(list(request.inputs), limits)
        assert (request.model, request.model_version) == ("m", "2")
    for one, other in itertools.pairwise(requests):
        assert not fit([*one.inputs, other.inputs[0]], limits)


@given(st.lists(id_lists, min_size=1, max_size=30), st.integers(1, 400))
def test_a_request_is_no_larger_than_planned(inputs: list[Input], max_request_bytes: int) -> None:
    """No planned request with several inputs is larger than `max_request_bytes`.

    In this test the requests have no model name and no options.
    """
    limits = Limits(2**31, 2**31, max_request_bytes, 2**31)
    for request in requests_of(list(plan_messages(inputs, pb.EncodeRequest(), limits))):
        assert request.ByteSize() <= max_request_bytes or len(request.inputs) == 1


HALVING = """
import resource
from encserve_client._logic.planning import Message
from encserve_proto.v1 import encoder_pb2 as pb

message = Message(pb.EncodeRequest(), range(32))
for _ in range(32):
    message.request.inputs.add().text = "x" * 2**20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
halves = message.halves()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.system
def test_a_half_of_a_message_copies_only_its_own_inputs() -> None:
    """The message has texts of 32 MiB. Its two halves together need less than 40 MiB of memory."""
    done = subprocess.run([sys.executable, "-c", HALVING], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 40 * 1024


def test_messages_are_made_one_at_a_time() -> None:
    """The third input is invalid. `plan_messages` yields the first message, and raises an error only later."""
    limits = Limits(1, 2**31, 2**31, 512)
    messages = plan_messages([[1], [2], [2**63]], TEMPLATE, limits)
    assert next(messages).indices == [0]
    with pytest.raises(
        InvalidInputError, match=r"inputs\[2\]\[0\] must be an integer of 64 bits; was 9223372036854775808"
    ):
        list(messages)


@given(st.integers(0, 8))
def test_a_call_of_more_than_two_messages_is_bulk(count: int) -> None:
    template = pb.EncodeRequest(model="m", options=Options().to_proto())
    limits = Limits(1, 2**31, 2**31, 512)
    messages = list(as_bulk(plan_messages([[i] for i in range(count)], template, limits), template))
    assert [message.indices for message in messages] == [[index] for index in range(count)]
    wanted = pb.PRIORITY_BULK if count > 2 else pb.PRIORITY_UNSPECIFIED
    assert [request.priority for request in requests_of(messages)] == [wanted] * count
    assert [request.priority for it in messages for request in requests_of(it.without([1]))] == [wanted] * count


def test_texts_are_not_planned_for_the_worst_case() -> None:
    """The plan estimates the number of tokens of a text. It does not assume one token for each byte.

    256 texts of 100 bytes therefore fit into a message of 16,384 tokens. In the worst case, each text has 102 tokens.
    """
    limits = Limits(256, 65536 // 4, 64 << 20, 512)
    assert len(list(plan_messages(["x" * 100] * 256, TEMPLATE, limits))) == 1


def test_a_message_is_limited_to_a_quarter_of_the_queue() -> None:
    """Each of four concurrent messages may have a quarter of `max_request_tokens`, so that all fit into the queue.

    The server sends no limit on the number of inputs, so the client does not limit this number.
    """
    info = model_info(pb.ModelInfo(d_model=8, max_request_tokens=1000, max_request_bytes=10**6))
    limits = Limits.of(info, max_message_bytes=10**9, max_concurrent_messages=4)
    assert (limits.max_tokens, limits.max_sequences) == (250, 2**31)
    assert 10**6 - 10**4 < limits.max_request_bytes < 10**6
    assert Limits.of(info, max_message_bytes=10**5, max_concurrent_messages=4).max_request_bytes < 10**5


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (7, "inputs must be a list of inputs; was int"),
        ({"b", "a"}, "inputs must be a list of inputs; was set"),
        (["a", b"b"], r"inputs\[1\] must be .* was bytes"),
        ([[1], []], r"inputs\[1\] must have at least one token id; was empty"),
        ([np.zeros((2, 2), int)], r"inputs\[0\] must be a \(seq,\) array .* or float64; was \(2, 2\) of int64"),
        ([np.zeros(2)], r"inputs\[0\] must be .* a \(seq, d_model\) array of float32, .* was \(2,\) of float64"),
        (["a", np.zeros((1, 2, 2))], r"inputs\[1\] must be .* was \(1, 2, 2\) of float64"),
        ([np.zeros((2, 2), complex)], "was .* of complex128"),
        ([np.zeros((2, 2), np.longdouble)], "was .* of (long|float)"),
        ([np.zeros((2, 2), bool)], "was .* of bool"),
        ([np.zeros((2, 2), object)], "was .* of object"),
        ([np.zeros((0, 2))], r"inputs\[0\] must have at least one row and one column; was \(0, 2\)"),
        ([np.zeros((2, 0), np.float32)], r"inputs\[0\] must have at least one row and one column; was \(2, 0\)"),
        (np.zeros((2, 2)), r"inputs must be a list of inputs; for one sequence of vectors pass \[array\]"),
    ],
)
def test_wrong_inputs_are_refused(inputs: object, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text) as caught:
        check_inputs(read_inputs(inputs)[0])  # type: ignore[arg-type]
    assert isinstance(caught.value, TypeError)
    assert caught.value.attempts == 0


@pytest.mark.parametrize("item", [[1, "2"], [1.5], [2**63], "\ud800", [None], [1, True], [np.True_]])
def test_a_value_that_protobuf_cannot_hold_is_refused(item: Input) -> None:
    with pytest.raises(
        InvalidInputError,
        match=r"inputs\[4\](\[\d\] must be an integer of 64 bits; was| must be valid Unicode; has half)",
    ):
        pack_input(item, "inputs[4]")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Options(outputs=()), "outputs must name at least one output"),
        (lambda: Options(outputs=(Output(), Output())), "outputs must differ"),
        (
            lambda: Options(dtype="float64"),  # type: ignore[arg-type]
            "dtype must be one of 'float32', .*, 'int8'; was 'float64'",
        ),
        (lambda: Output("sum"), "kind must be one of .* was 'sum'"),  # type: ignore[arg-type]
        (lambda: Output(0), "kind must be one of .* was 0"),  # type: ignore[arg-type]
    ],
)
def test_wrong_options_are_refused(make: object, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        make()  # type: ignore[operator]
