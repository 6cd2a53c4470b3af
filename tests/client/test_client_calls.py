"""Both clients with a real server: results, requests, failures."""

import asyncio
import random
import time
from typing import Any

import grpc
import numpy as np
import pytest
from fake_encoder import Caller, FakeEncoder, Refused, rows_of
from waiting import until

from encserve_client import (
    ClientClosedError,
    DeadlineError,
    EncserveError,
    InferenceError,
    InvalidInputError,
    InvalidRequestError,
    MessageTooLargeError,
    ModelNotFoundError,
    Output,
    OverloadedError,
    Priority,
    RetryPolicy,
    ServerError,
    ServerUnavailableError,
)
from encserve_client.options import PRIORITIES
from encserve_proto.v1 import encoder_pb2 as pb

Code = grpc.StatusCode
TEXTS = ["one", "two words", "and three words"]


async def test_every_input_gets_its_rows(caller: Caller) -> None:
    """Texts, lists, tuples and arrays may be mixed. Each gets a (seq, d_model) array, in order."""
    inputs = ["two words", [5, 6, 7], (8,), np.array([9, 10], np.uint16), np.array([11], np.int64)]
    arrays = await caller(caller.connect().encode, inputs)
    for array, ids in zip(arrays, [[1, 3, 5, 2], [5, 6, 7], [8], [9, 10], [11]], strict=True):
        np.testing.assert_array_equal(array, rows_of(ids))
        assert array.dtype == np.float32
        assert not array.flags.writeable
        assert not array.flags.owndata


async def test_options_reach_the_server(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect()
    [array] = await caller(
        client.encode,
        ["two words"],
        model="tiny",
        version="1",
        dtype="float16",
        truncate=True,
        exclude_special_tokens=True,
        l2_normalize=True,
    )
    assert array.dtype == np.float16
    assert array.shape == (2, 8)
    np.testing.assert_allclose(np.linalg.norm(array.astype(float), axis=1), 1, atol=1e-3)
    [request] = service.requests
    assert (request.model, request.model_version) == ("tiny", "1")
    assert request.options.truncation == pb.TRUNCATION_END


async def test_no_rows_at_all(caller: Caller) -> None:
    """A sequence of special tokens has no rows without the special tokens."""
    [array] = await caller(caller.connect().encode, [""], exclude_special_tokens=True)
    assert array.shape == (0, 8)


async def test_embeddings_are_one_matrix(caller: Caller, service: FakeEncoder) -> None:
    service.max_request_sequences = 2
    client = caller.connect()
    vectors = await caller(client.embed, TEXTS, pooling="mean")
    expected = [rows_of(ids).mean(axis=0) for ids in ([1, 3, 2], [1, 3, 5, 2], [1, 3, 5, 5, 2])]
    np.testing.assert_allclose(vectors, expected)
    assert (await caller(client.embed, TEXTS, l2_normalize=True)).shape == (3, 8)
    assert service.requests[-1].options.outputs[0].kind == pb.OUTPUT_KIND_MODEL_POOLING


async def test_run_tells_everything(caller: Caller, service: FakeEncoder) -> None:
    """The server sends several outputs in several messages, which the client joins."""
    service.max_request_sequences = 2
    client = caller.connect()
    result = await caller(client.run, TEXTS, outputs=["tokens", Output("cls", True)], include_token_strings=True)
    assert (result.model, result.version, result.fingerprint) == ("tiny", "1", "f" * 16)
    assert result.space_id == "s2-" + "5" * 32
    np.testing.assert_array_equal(result.outputs[0].arrays()[2], rows_of([1, 3, 5, 5, 2]))
    assert result.outputs[1].matrix().shape == (3, 8)
    assert (result.outputs[1].kind, result.outputs[1].l2_normalized) == ("cls", True)
    info = result.sequences[2]
    assert info.tokens == ("[FIRST]", "and", "three", "words", "[LAST]")
    assert [TEXTS[2][start:end] for start, end in info.offsets] == ["", "and", "three", "words", ""]
    assert info.special.tolist() == [True, False, False, False, True]
    assert (result.timings.messages, result.timings.attempts) == (2, 2)
    assert result.timings.compute_seconds == 0.003
    assert result.timings.total_seconds > 0


async def test_no_inputs(caller: Caller, service: FakeEncoder) -> None:
    """No request is sent. The arrays still have the model's width."""
    client = caller.connect()
    assert await caller(client.encode, []) == []
    assert service.n_get_model == 0
    assert (await caller(client.embed, iter([]))).shape == (0, 8)
    int8 = await caller(client.run, [], outputs=["mean"], dtype="int8")
    assert (int8.outputs[0].matrix().dtype, int8.outputs[0].l2_normalized) == (np.int8, True)
    result = await caller(client.run, [], outputs=["tokens", "mean"])
    assert [output.matrix().shape for output in result.outputs] == [(0, 8)] * 2
    assert result.fingerprint == "f" * 16
    assert service.requests == []


async def test_models(caller: Caller) -> None:
    client = caller.connect()
    [model] = await caller(client.models)
    assert model == await caller(client.model) == await caller(client.model, "tiny", "1")
    assert (model.d_model, model.pooling, model.special_token_ids, model.ready) == (8, "mean", (1, 2), True)


async def test_order_is_kept_whichever_answer_comes_first(caller: Caller, service: FakeEncoder) -> None:
    service.max_request_sequences = 1
    service.before = lambda _: asyncio.sleep(random.uniform(0, 0.02))
    inputs = [[i, i] for i in range(1, 40)]
    arrays = await caller(caller.connect().encode, inputs)
    for array, ids in zip(arrays, inputs, strict=True):
        np.testing.assert_array_equal(array, rows_of(ids))
    assert len(service.requests) == 39


async def test_texts_with_more_tokens_than_estimated_are_split(caller: Caller, service: FakeEncoder) -> None:
    """Texts of one-letter words have more tokens than usual. The server refuses the message, and its halves pass."""
    service.max_request_tokens = 200
    texts = ["a b c d e f g h i j k l m n o p q r s t u v w x y z"] * 10
    arrays = await caller(caller.connect(max_concurrent_messages=1).encode, texts)
    assert [array.shape for array in arrays] == [(28, 8)] * 10
    assert len(service.requests) > 2


async def test_oversize_replies_are_split(caller: Caller, service: FakeEncoder) -> None:
    """The client accepts smaller replies than the server sends. gRPC's error has no reason of the server."""
    client = caller.connect(max_message_bytes=6000, max_concurrent_messages=1)
    service.before = _padded(service, 1000)
    arrays = await caller(client.encode, [[5]] * 20)
    assert len(arrays) == 20
    assert len(service.requests[0].inputs) == 20
    service.before = _padded(service, 9000)
    with pytest.raises(MessageTooLargeError, match="larger than max") as caught:
        await caller(client.encode, [[5]])
    assert caught.value.attempts == 1


def _padded(service: FakeEncoder, n_bytes: int) -> Any:
    """Answer with a name of this many bytes for each input."""

    async def before(request: pb.EncodeRequest) -> pb.EncodeResponse:
        response = service.answer(request)
        response.model = "x" * n_bytes * len(request.inputs)
        return response

    return before


async def test_a_full_queue_is_tried_again_after_its_delay(caller: Caller, service: FakeEncoder) -> None:
    times: list[float] = []

    async def full_twice(_: pb.EncodeRequest) -> None:
        times.append(time.monotonic())
        if len(times) <= 2:
            raise Refused(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", "80")

    service.before = full_twice
    arrays = await caller(caller.connect().encode, [[5]])
    np.testing.assert_array_equal(arrays[0], rows_of([5]))
    assert all(gap >= 0.08 for gap in np.diff(times))


async def test_a_share_that_is_used_up_is_waited_for_as_long_as_it_takes(caller: Caller, service: FakeEncoder) -> None:
    """Such refusals are retried more often than other failures, because another job uses the share meanwhile."""

    async def refused(_: pb.EncodeRequest) -> None:
        if len(service.requests) <= 8:
            raise Refused(Code.RESOURCE_EXHAUSTED, "bulk has its share", "SHARE_EXCEEDED", "1")

    service.before = refused
    policy = RetryPolicy(max_attempts=2, initial_backoff_seconds=0.001, max_backoff_seconds=0.001)
    arrays = await caller(caller.connect(retry=policy).encode, [[5]])
    np.testing.assert_array_equal(arrays[0], rows_of([5]))
    service.requests.clear()
    with pytest.raises(OverloadedError):
        await caller(caller.connect(retry=RetryPolicy(max_attempts=1)).encode, [[5]])


@pytest.mark.parametrize("priority", [None, "interactive", "bulk"])
async def test_the_priority_reaches_the_server(caller: Caller, service: FakeEncoder, priority: Priority | None) -> None:
    """Calls of several messages are bulk unless the client sets a priority."""
    service.max_request_sequences = 1
    client = caller.connect(priority=priority)
    await caller(client.encode, [[5]] * 2)
    few = pb.PRIORITY_UNSPECIFIED if priority is None else PRIORITIES[priority]
    assert [request.priority for request in service.requests] == [few] * 2
    service.requests.clear()
    await caller(client.encode, [[5]] * 5)
    many = pb.PRIORITY_BULK if priority is None else PRIORITIES[priority]
    assert [request.priority for request in service.requests] == [many] * 5
    await caller.all_of(client, [[5]] * 5)
    assert service.stream_priorities == {few}


async def test_a_server_that_comes_back_is_found(caller: Caller, service: FakeEncoder) -> None:
    """The same channel connects again within the retries of the call."""
    client = caller.connect(retry=RetryPolicy(max_attempts=1000, max_backoff_seconds=0.2))
    await caller(client.encode, [[5]])
    port = int(service.target.rpartition(":")[2])
    await service.server.stop(None)
    call = asyncio.create_task(caller(client.encode, [[6]]))
    await asyncio.sleep(0.3)
    assert not call.done()
    await service.start(port)
    assert len(await call) == 1


async def test_what_a_stopping_server_cancels_is_sent_again(caller: Caller, service: FakeEncoder) -> None:
    """A stopping server cancels calls that gRPC has read and the server has not begun: a unary call or a stream."""
    cancelled: list[object] = []

    async def cancel_once(_: pb.EncodeRequest) -> None:
        if not cancelled:
            cancelled.append("unary")
            raise Refused(Code.CANCELLED, "CANCELLED")

    async def cancel_stream_once(_: pb.EncodeStreamRequest, context: Any) -> None:
        if service.n_streams == 1:
            cancelled.append("stream")
            await context.abort(Code.CANCELLED, "CANCELLED")

    service.before, service.before_stream = cancel_once, cancel_stream_once
    client = caller.connect()
    np.testing.assert_array_equal((await caller(client.encode, [[5]]))[0], rows_of([5]))
    np.testing.assert_array_equal((await caller.all_of(client, [[5]]))[0], rows_of([5]))
    assert cancelled == ["unary", "stream"]


async def test_a_slow_server_meets_the_deadline(caller: Caller, service: FakeEncoder) -> None:
    service.before = lambda _: asyncio.sleep(30)
    client = caller.connect()
    await caller(client.model)
    text = f"Deadline Exceeded.*: {service.target} did not answer within 1 s"
    with pytest.raises(DeadlineError, match=text) as caught:  # the server notices meanwhile
        await caller(client.encode, [[5]], timeout_seconds=1.0)
    assert (caught.value.code, caught.value.attempts) == (Code.DEADLINE_EXCEEDED, 1)
    await until(lambda: service.n_cancelled == 1)


async def test_the_first_failure_cancels_the_other_messages(caller: Caller, service: FakeEncoder) -> None:
    service.max_request_sequences = 1

    async def third_fails(request: pb.EncodeRequest) -> None:
        if request.inputs[0].token_ids.ids[0] == 3:
            await until(lambda: len(service.requests) == 4)
            raise Refused(Code.INTERNAL, "inputs[0]: not finite", "INFERENCE_FAILED")
        await asyncio.sleep(30)

    service.before = third_fails
    with pytest.raises(InferenceError, match=r"inputs\[2\]: not finite"):
        await caller(caller.connect().encode, [[i] for i in range(1, 20)])
    await until(lambda: service.n_cancelled == 3)
    assert len(service.requests) == 4


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
async def test_grpcs_own_exceptions_never_get_out(caller: Caller, service: FakeEncoder, code: Code) -> None:
    """For every status of the unary call and of the stream."""

    async def fail(*_: object) -> None:
        raise Refused(code, "because")

    service.before, service.before_stream = fail, fail
    client = caller.connect(retry=RetryPolicy(max_attempts=1))
    with pytest.raises(EncserveError, match="because") as caught:
        await caller(client.encode, [[5]])
    assert grpc.RpcError not in type(caught.value).__mro__
    assert caught.value.code is code
    with pytest.raises(type(caught.value), match="because"):
        await caller.all_of(client, [[5]])


async def test_refusals_name_the_callers_input(caller: Caller, service: FakeEncoder) -> None:
    service.max_request_sequences = 2
    with pytest.raises(InvalidRequestError, match=r"^inputs\[3\]: has 65 tokens; the model takes at most 64") as caught:
        await caller(caller.connect(max_concurrent_messages=1).encode, [[1], [2], [3], [4] * 65])
    assert caught.value.reason == "SEQUENCE_TOO_LONG"


async def test_an_unknown_model(caller: Caller) -> None:
    with pytest.raises(ModelNotFoundError, match="'nope' is not loaded") as caught:
        await caller(caller.connect().encode, [[1]], model="nope")
    assert caught.value.reason == "UNKNOWN_MODEL"


async def test_nothing_is_sent_for_a_wrong_argument(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect()
    wrong_inputs: list[Any] = [b"text", [b"bytes"], [[]], 5]
    for wrong in wrong_inputs:
        with pytest.raises(InvalidInputError):
            await caller(client.encode, wrong)
    with pytest.raises(InvalidInputError, match="pooling must be one of"):
        await caller(client.embed, ["a"], pooling="sum")
    with pytest.raises(ValueError, match="timeout_seconds must be > 0; was 0"):
        await caller(client.encode, ["a"], timeout_seconds=0)
    with pytest.raises(InvalidInputError, match="timeout_seconds must be a number; was str"):
        await caller(client.encode, ["a"], timeout_seconds="5")
    for name in ("model", "version"):
        with pytest.raises(InvalidInputError, match=f"{name} must be a str or None; was int"):
            await caller(client.encode, ["a"], **{name: 1})
    with pytest.raises(InvalidInputError, match="version must be a str or None; was int"):
        await caller(client.model, "tiny", 1)
    assert service.n_get_model == 0


async def test_no_server(caller: Caller) -> None:
    client = caller.connect(target="127.0.0.1:1")
    with pytest.raises(ServerUnavailableError, match=r"^127\.0\.0\.1:1: .*Failed to connect.*\(sent 5 times\)"):
        await caller(client.models)


async def test_names_are_resolved(caller: Caller, service: FakeEncoder) -> None:
    port = service.target.rpartition(":")[2]
    assert len(await caller(caller.connect(target=f"dns:///localhost:{port}").models)) == 1


async def test_metadata_and_token_are_sent(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect(token="secret", metadata={"x-tenant": "a"})
    await caller(client.encode, [[1]])
    sent = service.metadata[0]
    assert (sent["authorization"], sent["x-tenant"]) == ("Bearer secret", "a")
    assert "encserve-client" in sent["user-agent"]


async def test_a_closed_client_says_so(caller: Caller) -> None:
    client = caller.connect()
    await caller(client.models)
    assert "[open]" in repr(client)
    for _ in range(2):
        await caller.close(client)
    assert "[closed]" in repr(client)
    for call in (client.models, lambda: client.encode_stream(["a"])):
        with pytest.raises(ClientClosedError, match="the client is closed"):
            await caller(call)


async def test_closing_ends_calls_that_are_going_on(caller: Caller, service: FakeEncoder) -> None:
    """A cancelled call of one message, of several messages or of a stream is not repeated and does not wait."""
    service.before = lambda _: asyncio.sleep(30)
    service.before_stream = lambda *_: asyncio.sleep(30)
    service.max_request_sequences = 2
    client = caller.connect(
        retry=RetryPolicy(initial_backoff_seconds=100, max_backoff_seconds=100), timeout_seconds=200
    )
    await caller(client.model)
    calls = [
        asyncio.create_task(caller(client.encode, [[1]])),
        asyncio.create_task(caller(client.encode, [[1]] * 5)),
        asyncio.create_task(caller.all_of(client, [[1]] * 5)),
    ]
    await until(lambda: len(service.requests) == 4 and len(service.stream_requests) == 4)
    await caller.close(client)
    for call in calls:
        with pytest.raises(ClientClosedError, match="the client was closed during the call"):
            await asyncio.wait_for(call, 30)


async def test_a_bug_below_does_not_hang_the_call(caller: Caller, service: FakeEncoder) -> None:
    """gRPC raises errors without a status, here for invalid metadata."""
    client = caller.connect()
    client._metadata = (("Bad Key", "x"),)
    for call in (client.models, client.encode):
        with pytest.raises(ServerError):
            await caller(call, *([[[1]]] if call == client.encode else []))
    with pytest.raises(ServerError):
        await caller.all_of(client, [[1]])


async def test_overload_says_when_to_come_back(caller: Caller, service: FakeEncoder) -> None:
    async def full(_: pb.EncodeRequest) -> None:
        raise Refused(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", "60000")

    service.before = full
    with pytest.raises(OverloadedError) as caught:
        await caller(caller.connect().encode, [[1]])
    assert caught.value.retry_delay_seconds == 60.0
    assert caught.value.attempts == 1
