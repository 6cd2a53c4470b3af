"""Tests of the method `inspect` of both clients.

The tests cover requests, results, malformed replies and failures.
"""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest
from fake_encoder import Caller, FakeEncoder, Refused
from fake_wire import FakeWire, gather
from hypothesis import given
from hypothesis import strategies as st
from inspections import N_LAYERS, inspection, tensor_of
from waiting import until

from encserve_client import (
    InvalidInputError,
    OverloadedError,
    ProtocolError,
    RetryPolicy,
)
from encserve_client._logic.calls import Core, Settings
from encserve_client._logic.failures import Failure
from encserve_client._logic.inspecting import InspectAssembler, inspect_request
from encserve_client._logic.wire import run_without_loop
from encserve_client.options import Options
from encserve_client.results import InspectResult
from encserve_proto.v1 import encoder_pb2 as pb

Code = grpc.StatusCode
ATTENTION, HIDDEN, POSITIONS = (
    pb.INSPECT_KIND_ATTENTION_WEIGHTS,
    pb.INSPECT_KIND_HIDDEN_STATES,
    pb.INSPECT_KIND_POSITIONS,
)
N_TOKENS = 3


def request_of(**wanted: Any) -> pb.InspectRequest:
    """Make an Inspect request for three token ids. `wanted` replaces the default arguments."""
    options = {name: wanted.pop(name) for name in ("dtype", "truncate", "prompt_name", "task") if name in wanted}
    wanted = {"attention": True, "hidden_states": True, "positions": False, **wanted}
    return inspect_request([5, 6, 7], ("", ""), Options(**options), **wanted)


def gathered(request: pb.InspectRequest, parts: list[pb.InspectResponse]) -> InspectResult:
    """Make the result of a reply from its messages. The total time is 1.5 s, with 2 attempts."""
    return gather(request, parts).result(1.5, 2)


def chunk(tensor: int, n_bytes: int) -> pb.InspectResponse:
    return pb.InspectResponse(chunk=pb.TensorChunk(tensor=tensor, data=b"\0" * n_bytes))


# Tests of requests.


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, [(ATTENTION, []), (HIDDEN, [])]),
        ({"attention": False}, [(HIDDEN, [])]),
        ({"attention": [1], "hidden_states": (0, 2)}, [(ATTENTION, [1]), (HIDDEN, [0, 2])]),
        ({"attention": range(2), "hidden_states": False}, [(ATTENTION, [0, 1])]),
        ({"attention": np.array([0, 3]), "hidden_states": [np.uint8(4)]}, [(ATTENTION, [0, 3]), (HIDDEN, [4])]),
        ({"attention": False, "hidden_states": False, "positions": True}, [(POSITIONS, [])]),
    ],
)
def test_the_request_lists_the_wanted_tensors(wanted: dict[str, Any], expected: list[tuple[int, list[int]]]) -> None:
    request = request_of(**wanted)
    assert [(spec.kind, list(spec.layers)) for spec in request.tensors] == expected


def test_an_empty_prompt_name_differs_from_none() -> None:
    assert not request_of().HasField("prompt_name")
    for name in ("", "query"):
        request = request_of(prompt_name=name)
        assert (request.HasField("prompt_name"), request.prompt_name) == (True, name)
    with pytest.raises(InvalidInputError, match="prompt_name must be a str or None; was int"):
        request_of(prompt_name=5)


def test_the_request_has_the_task() -> None:
    assert request_of().task == pb.TASK_UNSPECIFIED
    assert request_of(task="query").task == pb.TASK_QUERY
    with pytest.raises(InvalidInputError, match="task must be one of 'query', 'document'; was 'both'"):
        request_of(task="both")


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"attention": [0, -1]}, r"^attention\[1\] must be from 0 to 4294967295; was -1$"),
        ({"hidden_states": [2**32]}, r"^hidden_states\[0\] must be from 0 to 4294967295; was 4294967296$"),
        ({"attention": [0, 2, 1]}, r"^attention must be ascending, each layer once; attention\[2\] was 1 after 2$"),
        ({"hidden_states": [3, 3]}, r"hidden_states\[1\] was 3 after 3$"),
        ({"attention": [0, 1.0]}, r"^attention\[1\] must be an int; was float$"),
        ({"attention": [False, True]}, r"^attention\[0\] must be an int; was bool$"),
        ({"attention": []}, "^attention must name at least one layer; was empty: pass False for no layers$"),
        ({"hidden_states": 1}, r"^hidden_states must be True, False or .* for one layer pass \[1\]$"),
        ({"attention": None}, "^attention must be True, False or a list of layers; was NoneType$"),
        ({"attention": "01"}, "was str$"),
        ({"positions": [0]}, "^positions must be True or False; was list$"),
        (
            {"attention": False, "hidden_states": False},
            "^give at least one of attention, hidden_states and positions; all were False$",
        ),
        ({"dtype": "float64"}, "^dtype must be one of 'float32', 'float16', 'binary', 'int8'; was 'float64'$"),
    ],
)
def test_invalid_options_are_refused(wanted: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        request_of(**wanted)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (["a text"], "^input must be one input; was a list of 1 input: call inspect once for each"),
        (["a", "b"], "was a list of 2 inputs"),
        ([[1, 2], [3]], "was a list of 2 inputs"),
        ((np.zeros(2, int), "a"), "was a tuple of 2 inputs"),
        ([[0.5, 0.25]], "Vectors must be an array$"),
        ([], "^input must have at least one token id; was empty$"),
        (5, r"^input is a single id; for one sequence of ids pass \[ids\]$"),
        (None, "^input must be a text, .* was NoneType$"),
        (np.zeros((2, 2, 2)), r"^input must be a \(seq,\) array .* was \(2, 2, 2\) of float64$"),
        (np.array([[1, np.inf]]), "^input must be finite; was inf in row 0, column 1$"),
        ([1, 2**63], r"^input\[1\] must be an integer of 64 bits; was 9223372036854775808$"),
    ],
)
async def test_only_one_input_is_taken(caller: Caller, service: FakeEncoder, item: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        await caller(caller.connect().inspect, item)
    assert service.inspect_requests == []


# Tests of results.


async def test_the_result_of_an_inspection(caller: Caller, service: FakeEncoder) -> None:
    result = await caller(caller.connect().inspect, "two words", positions=True)
    assert isinstance(result, InspectResult)
    assert (result.model, result.version, result.fingerprint) == ("tiny", "1", "f" * 16)
    assert result.space_id == "s2-" + "5" * 32
    assert (result.sequence.token_count, result.sequence.tokens) == (4, ("t0", "t1", "t2", "t3"))
    assert (result.attention_layers, result.hidden_state_layers) == ((0, 1), (0, 1, 2))
    for got, kind in ((result.attention, ATTENTION), (result.hidden_states, HIDDEN), (result.positions, POSITIONS)):
        np.testing.assert_array_equal(got, tensor_of(kind, 4))
        assert got is not None
        assert got.dtype == np.dtype("<f4")
        assert got.flags.writeable
        assert not got.flags.owndata
    timings = result.timings
    assert (timings.tokenize_seconds, timings.queue_seconds, timings.compute_seconds) == (0.001, 0.002, 0.003)
    assert 0 < timings.total_seconds < 10
    assert (timings.messages, timings.attempts) == (1, 1)


async def test_the_result_has_only_the_wanted_tensors(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect(api_key="secret")
    result = await caller(
        client.inspect,
        [5, 6],
        attention=[1],
        hidden_states=False,
        model="tiny",
        version="1",
        dtype="float16",
        truncate=True,
    )
    np.testing.assert_array_equal(result.attention, tensor_of(ATTENTION, 2)[[1]].astype(np.float16))
    assert result.attention.dtype == np.float16
    assert (result.attention_layers, result.hidden_state_layers) == ((1,), ())
    assert result.hidden_states is None
    assert result.positions is None
    [request] = service.inspect_requests
    assert (request.model, request.model_version, request.truncation) == ("tiny", "1", pb.TRUNCATION_END)
    assert list(request.input.token_ids.ids) == [5, 6]
    assert service.metadata[-1]["authorization"] == "Bearer secret"


async def test_vectors_are_inspected(caller: Caller, service: FakeEncoder) -> None:
    result = await caller(caller.connect().inspect, np.ones((5, 8)))
    assert result.hidden_states.shape == (3, 5, 8)
    assert result.sequence.tokens is None
    assert service.inspect_requests[0].input.embeddings.width == 8


@given(st.lists(st.integers(1, 700), min_size=1, max_size=8), st.sampled_from(["float32", "float16"]))
def test_chunk_boundaries_do_not_change_the_result(sizes: list[int], dtype: str) -> None:
    """The reply may be cut into chunks at any byte, even within a number. The result is the same.

    An empty chunk changes nothing.
    """
    request = request_of(hidden_states=[0, 2], positions=True, dtype=dtype)
    parts = inspection(request, N_TOKENS, max_chunk_bytes=sizes)
    parts[2:2] = [chunk(0, 0)]
    result = gathered(request, [pb.InspectResponse.FromString(part.SerializeToString()) for part in parts])
    wants = [tensor_of(ATTENTION, 3), tensor_of(HIDDEN, 3)[[0, 2]], tensor_of(POSITIONS, 3)]
    for got, want in zip((result.attention, result.hidden_states, result.positions), wants, strict=True):
        assert got is not None
        assert got.tobytes() == want.astype(dtype).tobytes()
        assert got.shape == want.shape
        assert got.flags.writeable
    assert (result.timings.total_seconds, result.timings.attempts) == (1.5, 2)


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak memory of Python and NumPy in bytes while `work` runs.

    Protobuf's memory is not counted.
    """
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n_chunks", [1, 16])
def test_tensor_data_is_in_memory_only_once(n_chunks: int) -> None:
    """The reply has two tensors of 16 MiB each, in one chunk or in 16 chunks.

    Apart from the last chunk, no number is in memory twice.
    """
    request, size = request_of(), 2**24
    header, *_ = inspection(request, 1)
    header.header.sequence.ClearField("tokens")
    header.header.sequence.token_count = 1024
    for tensor, layers, shape in zip(
        header.header.tensors, ([0], [0, 1]), ([1, 4, 1024, 1024], [2, 1024, 2048]), strict=True
    ):
        tensor.Clear()
        tensor.layers.extend(layers)
        tensor.shape.extend(shape)
        tensor.data_type = pb.DATA_TYPE_FLOAT32
    header.header.tensors[0].kind, header.header.tensors[1].kind = ATTENTION, HIDDEN

    def gather() -> None:
        part = chunk(0, size // n_chunks)
        assembler = InspectAssembler(request)
        assert assembler.add(header)
        for part.chunk.tensor in (0, 1):
            assert all(assembler.add(part) for _ in range(n_chunks))
        assembler.result(0.0, 1)

    assert 2 * size < peak_bytes(gather) < 3 * size + size // 4


def test_an_announced_size_allocates_no_memory() -> None:
    """The header of the reply announces 309 GB, but only 1 MiB arrives.

    The client allocates memory only for the received bytes.
    """
    request = request_of(hidden_states=False)
    header, *_ = inspection(request, N_TOKENS)
    header.header.tensors[0].shape[1] = 2**32 - 1

    def gather() -> None:
        assembler = InspectAssembler(request)
        assert assembler.add(header)
        assert assembler.add(chunk(0, 2**20))
        with pytest.raises(ProtocolError, match="had 1048576$"):
            assembler.result(0.0, 1)

    assert peak_bytes(gather) < 2**22


# Tests of malformed replies.


# For N_TOKENS = 3, the attention has 2·2·3·3 numbers. They take 144 bytes, in chunks of 100 and 44 bytes. The hidden
# states have 3·3·8 numbers, which take 288 bytes.
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda parts: parts.clear(), "must have a header with tensors; had none$"),
        (lambda parts: parts.pop(0), "^a chunk's tensor must be one of the 0 announced; was 0$"),
        (lambda parts: parts.insert(1, chunk(2, 1)), "^a chunk's tensor must be one of the 2 announced; was 2$"),
        (lambda parts: parts.append(chunk(0, 1)), r"^tensors\[0\] .* 144 bytes: \(2, 2, 3, 3\) of float32; had 145$"),
        (lambda parts: parts.pop(), r"^tensors\[1\] must have 288 bytes: \(3, 3, 8\) of float32; had 200$"),
        (lambda parts: parts.pop(1), r"^tensors\[0\] must have 144 bytes: .*; had 44$"),
        (lambda parts: setattr(parts[0].header.tensors[0], "kind", POSITIONS), r"kinds \[1, 2\]; were \[3, 2\]$"),
        (lambda parts: parts[0].header.tensors[0].shape.extend([1] * 70), r"^tensors\[0\] must have a shape that"),
        (lambda parts: parts[0].header.sequence.tokens.pop(), "must have 3 tokens of a sequence; had 2$"),
    ],
)  # fmt: skip
def test_malformed_answers_are_refused(change: Callable[[list[pb.InspectResponse]], Any], text: str) -> None:
    request = request_of()
    parts = inspection(request, N_TOKENS, max_chunk_bytes=100)
    gathered(request, parts)
    change(parts)
    with pytest.raises(ProtocolError, match=text):
        gathered(request, parts)


async def test_an_endless_answer_is_read_no_further_than_announced(caller: Caller, service: FakeEncoder) -> None:
    """The server sends more bytes than its header announces.

    The client then raises an error and cancels the call, so the server stops sending.
    """

    async def endless(request: pb.InspectRequest) -> AsyncIterator[pb.InspectResponse]:
        for part in inspection(request, N_TOKENS):
            yield part
        while True:
            yield chunk(1, 2**16)
            await asyncio.sleep(0)

    service.inspect = endless
    with pytest.raises(ProtocolError, match="had 65824$"):
        await caller(caller.connect(timeout_seconds=60).inspect, [5, 6, 7])
    # gRPC cancels the server's handler, or the handler's next write fails. In both cases the handler ends.
    await until(lambda: service.n_open_inspections == 0)
    assert len(service.inspect_requests) == 1


# Tests of failures.


def breaking(service: FakeEncoder, times: int, error: Exception) -> None:
    """Make the first `times` replies fail after three messages. Later replies are complete."""

    async def answer(request: pb.InspectRequest) -> AsyncIterator[pb.InspectResponse]:
        parts = inspection(request, N_TOKENS, max_chunk_bytes=100)
        for index, part in enumerate(parts):
            if index == 3 and len(service.inspect_requests) <= times:
                raise error
            yield part

    service.inspect = answer


async def test_an_incomplete_answer_is_retried(caller: Caller, service: FakeEncoder) -> None:
    """If a reply fails in the middle, the client repeats the whole request.

    The result contains nothing from an incomplete reply.
    """
    breaking(service, 2, Refused(Code.UNAVAILABLE, "stopping", "DRAINING"))
    result = await caller(caller.connect().inspect, [5, 6, 7])
    np.testing.assert_array_equal(result.attention, tensor_of(ATTENTION, 3))
    np.testing.assert_array_equal(result.hidden_states, tensor_of(HIDDEN, 3))
    assert (result.timings.attempts, len(service.inspect_requests)) == (3, 3)
    service.inspect_requests.clear()
    breaking(service, 9, Refused(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL"))
    client = caller.connect(retry=RetryPolicy(max_attempts=2, initial_backoff_seconds=0))
    with pytest.raises(OverloadedError, match=r"^full \(sent 2 times\)$"):
        await caller(client.inspect, [5, 6, 7])


async def test_layers_of_a_replaced_model_are_noticed(caller: Caller, service: FakeEncoder) -> None:
    """The client remembers a model of 1 block. The server then loads a model of 2 blocks, and the client notices."""
    service.model_info = pb.ModelInfo(n_layers=1)
    client = caller.connect()
    await caller(client.inspect, [5], attention=[0])
    service.model_info = pb.ModelInfo()
    for _ in range(2):
        await caller(client.inspect, [5], attention=[1])
    assert service.n_get_model == 2
    with pytest.raises(InvalidInputError, match="^attention must be from 0 to 1; was 2$"):
        await caller(client.inspect, [5], attention=[2])
    assert service.n_get_model == 3


async def test_concurrent_inspections(caller: Caller, service: FakeEncoder) -> None:
    """One client makes 20 concurrent calls. Each call gets the result of its own input."""
    client = caller.connect()
    results = await asyncio.gather(*(caller(client.inspect, [5] * n) for n in range(1, 21)))
    for n, result in enumerate(results, start=1):
        np.testing.assert_array_equal(result.hidden_states, tensor_of(HIDDEN, n))


def test_a_retried_call_on_a_fake_clock() -> None:
    """A failed request is sent again after the first backoff of 1 s. `total_seconds` includes this wait."""
    request = request_of()
    outcomes: list[Any] = [Failure(Code.UNAVAILABLE, "down"), inspection(request, N_TOKENS)]
    model = pb.GetModelResponse(model=pb.ModelInfo(d_model=8))
    wire = FakeWire(lambda rpc, _: (0.5, outcomes.pop(0)) if rpc == "Inspect" else (0.0, model))
    policy = RetryPolicy(max_attempts=3, initial_backoff_seconds=1.0)
    core = Core(Settings(9.0, 1, 1, policy, lambda: 1.0))
    result = run_without_loop(core.inspect(wire, request, ("", ""), Options(), None))
    assert wire.sent == [0.0, 0.0, 1.5]
    assert wire.is_closed
    assert (result.timings.total_seconds, result.timings.attempts) == (2.0, 2)
    assert result.attention_layers == tuple(range(N_LAYERS))
    assert result.positions is None
