"""Tests of calls of both clients to a fake service on a real gRPC server: results, requests and failures."""

import asyncio
import functools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from fake_encoder import Caller, FakeEncoder, Refused, rows_of, stalled_inspection
from waiting import until

from encserve import __version__
from encserve_client import (
    AccessDeniedError,
    CallCancelledError,
    ClientClosedError,
    DeadlineError,
    EncserveError,
    InferenceError,
    InvalidInputError,
    InvalidRequestError,
    MessageTooLargeError,
    ModelNotFoundError,
    Outage,
    Output,
    OverloadedError,
    Priority,
    ProtocolError,
    RetryPolicy,
    ServerError,
    ServerUnavailableError,
)
from encserve_client.options import PRIORITIES, Options, OutputKind
from encserve_proto.v1 import encoder_pb2 as pb

Code = grpc.StatusCode
TEXTS = ["one", "two words", "and three words"]


async def test_every_input_gets_its_rows(caller: Caller) -> None:
    """The inputs of one call are texts, and token ids as lists, tuples and arrays.

    Each input gets a read-only array of shape (seq_len, d_model). The arrays are in input order.
    """
    inputs = ["two words", [5, 6, 7], (8,), np.array([9, 10], np.uint16), np.array([11], np.int64)]
    arrays = await caller(caller.connect().token_vectors, inputs)
    for array, ids in zip(arrays, [[1, 3, 5, 2], [5, 6, 7], [8], [9, 10], [11]], strict=True):
        np.testing.assert_array_equal(array, rows_of(ids))
        assert array.dtype == np.float32
        assert array.flags.writeable
        assert not array.flags.owndata


async def test_options_reach_the_server(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect()
    [array] = await caller(
        client.token_vectors,
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


async def test_a_sequence_without_rows(caller: Caller) -> None:
    """If special tokens are excluded, an empty text has no tokens. Its result is an array without rows."""
    [array] = await caller(caller.connect().token_vectors, [""], exclude_special_tokens=True)
    assert array.shape == (0, 8)


async def test_embed_returns_one_matrix(caller: Caller, service: FakeEncoder) -> None:
    service.max_request_sequences = 2
    client = caller.connect()
    vectors = await caller(client.embed, TEXTS, pooling="mean")
    expected = [rows_of(ids).mean(axis=0) for ids in ([1, 3, 2], [1, 3, 5, 2], [1, 3, 5, 5, 2])]
    np.testing.assert_allclose(vectors, expected)
    assert (await caller(client.embed, TEXTS, l2_normalize=True)).shape == (3, 8)
    assert service.requests[-1].options.outputs[0].kind == pb.OUTPUT_KIND_MODEL_POOLING


async def test_run_returns_all_parts_of_an_answer(caller: Caller, service: FakeEncoder) -> None:
    """`run` requests two outputs, and the call needs two messages. The result merges both replies.

    The result also has the details of the tokens, and the timings.
    """
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
    """If the list of inputs is empty, the client sends no Encode request.

    An empty matrix has the width of the model.
    """
    client = caller.connect()
    assert await caller(client.token_vectors, []) == []
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


async def test_oversize_replies_are_split(caller: Caller, service: FakeEncoder) -> None:
    """gRPC refuses a reply that is larger than the client's `max_message_bytes`.

    The client then sends the inputs of the request again, in two halves.
    """
    client = caller.connect(max_message_bytes=6000, max_concurrent_messages=1)
    service.before = _padded(service, 1000)
    arrays = await caller(client.token_vectors, [[5]] * 20)
    assert len(arrays) == 20
    assert len(service.requests[0].inputs) == 20
    service.before = _padded(service, 9000)
    with pytest.raises(MessageTooLargeError, match="larger than max") as caught:
        await caller(client.token_vectors, [[5]])
    assert caught.value.attempts == 1


async def test_a_reply_over_the_clients_own_limit_is_not_computed(caller: Caller, service: FakeEncoder) -> None:
    """A token takes 32 bytes in a reply. The client accepts 20,000 bytes, so a message has less than 625 tokens."""
    client = caller.connect(max_message_bytes=20_000)
    inputs = [[5] * 50] * 40
    assert len(await caller(client.token_vectors, inputs)) == 40
    assert len(await caller.all_of(client, inputs)) == 40
    sizes = [len(it.inputs) for it in service.requests]
    assert sum(sizes) == 80  # no input was sent twice
    assert len(await caller(client.embed, inputs)) == 40
    assert len(service.requests) == len(sizes) + 1


def _padded(service: FakeEncoder, n_bytes: int) -> Any:
    """Make a hook for `FakeEncoder.before` that adds `n_bytes` to the reply for each input."""

    async def before(request: pb.EncodeRequest) -> pb.EncodeResponse:
        response = service.answer(request)
        response.model = "x" * n_bytes * len(request.inputs)
        return response

    return before


@pytest.mark.parametrize("priority", [None, "interactive", "bulk"])
async def test_the_priority_reaches_the_server(caller: Caller, service: FakeEncoder, priority: Priority | None) -> None:
    """If the client has a priority, all its messages have this priority.

    If the client has no priority, a call of more than two messages gets bulk priority.
    """
    service.max_request_sequences = 1
    client = caller.connect(priority=priority)
    await caller(client.token_vectors, [[5]] * 2)
    few = pb.PRIORITY_UNSPECIFIED if priority is None else PRIORITIES[priority]
    assert [request.priority for request in service.requests] == [few] * 2
    service.requests.clear()
    await caller(client.token_vectors, [[5]] * 5)
    many = pb.PRIORITY_BULK if priority is None else PRIORITIES[priority]
    assert [request.priority for request in service.requests] == [many] * 5
    service.requests.clear()
    await caller.all_of(client, [[5]] * 5)
    assert [request.priority for request in service.requests] == [few] * 5


async def test_an_outage_is_reported(caller: Caller, service: FakeEncoder) -> None:
    """The server goes away before a call. The call succeeds after the server has restarted on the same port."""
    outages = list[Outage]()
    client = caller.connect(retry=RetryPolicy(max_backoff_seconds=0.2), on_outage=outages.append)
    await caller(client.token_vectors, [[5]])
    port = int(service.target.rpartition(":")[2])
    await service.server.stop(None)
    call = asyncio.create_task(caller(client.token_vectors, [[6]]))
    await until(lambda: outages)
    assert not call.done()
    await service.start(port)
    assert len(await call) == 1
    assert [(it.target, it.is_over) for it in outages] == [(service.target, False), (service.target, True)]
    assert outages[0].seconds_left == pytest.approx(60, abs=30)


async def test_a_call_that_a_stopping_server_cancels_is_sent_again(caller: Caller, service: FakeEncoder) -> None:
    """A gRPC server that stops sends CANCELLED for calls that it has received but not started.

    The client sends these calls again.
    """
    cancelled: list[object] = []

    async def cancel_once(request: pb.EncodeRequest) -> None:
        ids = list(request.inputs[0].token_ids.ids)
        if ids not in cancelled:
            cancelled.append(ids)
            raise Refused(Code.CANCELLED, "CANCELLED")

    service.before = cancel_once
    client = caller.connect()
    np.testing.assert_array_equal((await caller(client.token_vectors, [[5]]))[0], rows_of([5]))
    np.testing.assert_array_equal((await caller.all_of(client, [[6]]))[0], rows_of([6]))
    assert cancelled == [[5], [6]]


@pytest.mark.parametrize("method", ["token_vectors", "inspect"])
async def test_a_slow_server_meets_the_deadline(caller: Caller, service: FakeEncoder, method: str) -> None:
    """The server does not reply within the timeout. The client raises DeadlineError.

    gRPC cancels the handler in the server.
    """
    service.before, service.inspect = lambda _: asyncio.sleep(30), stalled_inspection
    client = caller.connect()
    await caller(client.model)
    with pytest.raises(DeadlineError, match=f"{service.target} did not answer within 1 s") as caught:
        await caller(getattr(client, method), "text", timeout_seconds=1.0)
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
        await caller(caller.connect().token_vectors, [[i] for i in range(1, 20)])
    await until(lambda: service.n_cancelled == 3)
    assert len(service.requests) == 4


EXPECTED: dict[Code, type[EncserveError]] = {
    Code.CANCELLED: CallCancelledError,
    Code.UNKNOWN: ServerError,
    Code.INVALID_ARGUMENT: InvalidRequestError,
    Code.DEADLINE_EXCEEDED: DeadlineError,
    Code.NOT_FOUND: ModelNotFoundError,
    Code.ALREADY_EXISTS: ServerError,
    Code.PERMISSION_DENIED: AccessDeniedError,
    Code.UNAUTHENTICATED: AccessDeniedError,
    Code.RESOURCE_EXHAUSTED: OverloadedError,
    Code.FAILED_PRECONDITION: InvalidRequestError,
    Code.ABORTED: ServerError,
    Code.OUT_OF_RANGE: InvalidRequestError,
    Code.UNIMPLEMENTED: ProtocolError,
    Code.INTERNAL: ServerError,
    Code.UNAVAILABLE: ServerUnavailableError,
    Code.DATA_LOSS: ServerError,
}


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
async def test_every_status_has_its_exception(caller: Caller, service: FakeEncoder, code: Code) -> None:
    """`token_vectors` and `stream` fail with every gRPC status. The exception is never a `grpc.RpcError`.

    If a new version of gRPC adds a status, this test fails until EXPECTED has an exception for it.
    """

    async def fail(*_: object) -> None:
        raise Refused(code, "because")

    service.before = fail
    client = caller.connect(retry=RetryPolicy(max_attempts=1))
    with pytest.raises(EncserveError, match="because") as caught:
        await caller(client.token_vectors, [[5]])
    assert type(caught.value) is EXPECTED[code]
    assert grpc.RpcError not in type(caught.value).__mro__
    assert (caught.value.code, caught.value.reason, caught.value.attempts) == (code, "", 1)
    try:
        [error] = await caller.all_of(client, [[5]])
    except EncserveError as raised:
        error = raised
    assert (type(error), error.code) == (type(caught.value), code)


@pytest.mark.parametrize(
    ("method", "arguments", "options", "text"),
    [
        ("token_vectors", [[b"bytes"]], {}, r"inputs\[0\] must be"),
        ("embed", [np.array(5)], {}, "inputs must be a list of inputs; was ndarray"),
        ("stream", [{"input_ids": [1]}], {}, "inputs must be a list of inputs; was dict"),
        ("embed_spans", ["a", None], {}, r"spans must be a list of \(start, end\); was NoneType"),
        ("run", [["a"]], {"outputs": None}, "outputs must be a list; was NoneType"),
        ("inspect", [[1, True]], {}, r"input\[1\] must be an integer of 64 bits; was True"),
        ("embed", [["a"]], {"pooling": "sum"}, "pooling must be one of"),
        ("embed", [["a"]], {"kind": "tokens"}, "kind must be one of 'vector', 'multi_vector', 'sparse'; was 'tokens'"),
        ("embed", [["a"]], {"kind": "sparse", "pooling": "mean"}, "pooling must be left out with the kind 'sparse', "),
        ("embed", [["a"]], {"max_active_dims": 0}, "max_active_dims must be >= 1; was 0"),
        ("embed", [["a"]], {"pool_factor": 0.5}, "pool_factor must be >= 1; was 0.5"),
        ("embed", [["a"]], {"task": "passage"}, "task must be one of 'query', 'document'; was 'passage'"),
        ("token_vectors", [["a"]], {"timeout_seconds": 0}, "timeout_seconds must be > 0; was 0"),
        ("token_vectors", [["a"]], {"timeout_seconds": float("nan")}, "timeout_seconds must be > 0; was nan"),
        ("token_vectors", [["a"]], {"timeout_seconds": "5"}, "timeout_seconds must be a number; was str"),
        ("token_vectors", [["a"]], {"model": 1}, "model must be a str or None; was int"),
        ("token_vectors", [["a"]], {"version": 1}, "version must be a str or None; was int"),
        ("model", ["tiny", 1], {}, "version must be a str or None; was int"),
    ],
)
async def test_nothing_is_sent_for_a_wrong_argument(
    caller: Caller, service: FakeEncoder, method: str, arguments: list[Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        await caller(getattr(caller.connect(), method), *arguments, **options)
    assert service.n_get_model == 0


@pytest.mark.parametrize(
    ("method", "arguments", "options", "field", "index"),
    [
        ("tokenize", [5], {}, "texts", None),
        ("tokenize", [["a", 5]], {}, "texts[1]", 1),
        ("tokenize", [["a", "\ud800"]], {}, "texts[1]", 1),
        ("tokenize", [["a", "a " * 70]], {"truncate": False}, "texts[1]", 1),
        ("embed", [["a", "\ud800"]], {}, "inputs[1]", 1),
        ("embed", [["a", "a " * 70]], {}, "inputs[1]", 1),
        ("embed_spans", [5, []], {}, "text", None),
        ("embed_spans", ["\ud800", []], {}, "text", 0),
        ("embed_spans", [[2**64], []], {}, "text[0]", 0),
        ("embed_spans", ["a " * 70, []], {}, "text", 0),
        ("embed", ["a"], {"kind": "sparse"}, "kind", None),
        ("embed", ["a"], {"max_active_dims": 3}, "max_active_dims", None),
    ],
)
async def test_an_error_names_the_argument(
    caller: Caller, method: str, arguments: list[Any], options: dict[str, Any], field: str, index: int | None
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await caller(getattr(caller.connect(), method), *arguments, **options)
    error = caught.value
    assert (error.field, error.index, error.code) == (field, index, Code.INVALID_ARGUMENT)
    assert str(error).startswith(field)
    assert error.problem[0] not in "=: "


@pytest.mark.parametrize(
    ("outputs", "text", "field"),
    [
        (["mean"], "options.outputs[0].dimensions: is wrong", "dimensions"),
        (["mean", "max"], "options.outputs[0].dimensions: is wrong", "outputs[0].dimensions"),
        (["mean", "max"], "options.outputs[1].dimensions: is wrong", "outputs[1].dimensions"),
        (["mean", "max"], "options.data_type: is wrong", "dtype"),
        (["mean"], "expected_fingerprint: is wrong", "expected_fingerprint"),
        (["mean"], "expected_space_id: is wrong", "expected_space_id"),
    ],
)
async def test_an_error_of_the_server_names_the_argument(
    caller: Caller, service: FakeEncoder, outputs: list[OutputKind], text: str, field: str
) -> None:
    async def refuse(_: pb.EncodeRequest) -> None:
        raise Refused(Code.INVALID_ARGUMENT, text, "INVALID_OPTION")

    service.before = refuse
    with pytest.raises(InvalidRequestError, match=rf"^{re.escape(field)}: is wrong$") as caught:
        await caller(caller.connect().run, ["a"], outputs=outputs)
    assert caught.value.field == field


async def test_names_are_resolved(caller: Caller, service: FakeEncoder) -> None:
    port = service.target.rpartition(":")[2]
    assert len(await caller(caller.connect(target=f"dns:///localhost:{port}").models)) == 1


async def test_metadata_and_key_are_sent(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect(api_key="secret", metadata={"x-tenant": "a"})
    await caller(client.token_vectors, [[1]])
    sent = service.metadata[0]
    assert (sent["authorization"], sent["x-tenant"]) == ("Bearer secret", "a")
    assert f"encserve-client/{__version__}" in sent["user-agent"]


async def test_a_raw_method_takes_and_returns_serialized_messages(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect(api_key="secret")
    request = pb.EncodeRequest(inputs=[pb.Input(text="two words")], options=Options().to_proto())
    method = functools.partial(client.raw_method("Encode"), request.SerializeToString(), timeout=30)
    data = await (method() if caller.kind == "async" else asyncio.to_thread(method))
    np.testing.assert_array_equal(pb.EncodeResponse.FromString(data).outputs[0].lengths, [4])
    assert service.metadata[-1]["authorization"] == "Bearer secret"
    await caller.close(client)
    with pytest.raises(ClientClosedError):
        client.raw_method("Encode")
    with pytest.raises(ClientClosedError):
        await (method() if caller.kind == "async" else asyncio.to_thread(method))


async def test_an_error_of_the_callers_code_keeps_its_frames_and_its_cause(caller: Caller) -> None:
    def inputs() -> Iterator[str]:
        yield "a"
        fail()

    def fail(*_: object) -> None:
        try:
            raise KeyError("row 3")
        except KeyError as error:
            raise InvalidInputError("is broken", field="row") from error

    client = caller.connect()
    for call in (functools.partial(client.embed, inputs()), functools.partial(client.embed, ["a"], progress=fail)):
        with pytest.raises(InvalidInputError, match="row is broken") as caught:
            await caller(call)
        assert caught.traceback[-1].name == "fail"
        assert isinstance(caught.value.__cause__, KeyError)


async def test_an_error_of_the_library_has_few_frames(caller: Caller) -> None:
    client = caller.connect()
    for length in (0, 65):
        with pytest.raises(InvalidRequestError) as caught:
            await caller(client.embed, [[1] * length])
        own = [frame for frame in caught.traceback if "encserve_client" in str(frame.path)]
        assert [frame.name for frame in own] == ["embed"]


async def test_a_closed_client_refuses_calls(caller: Caller) -> None:
    client = caller.connect()
    await caller(client.models)
    assert "[open]" in repr(client)
    for _ in range(2):
        await caller.close(client)
    assert "[closed]" in repr(client)
    for call in (client.models, lambda: client.stream(["a"])):
        with pytest.raises(ClientClosedError, match="^the client is closed; make a new client$"):
            await caller(call)


async def test_closing_a_client_ends_its_calls(caller: Caller, service: FakeEncoder) -> None:
    """The client is closed during four calls: one message, several messages, an inspection and a stream.

    All four calls raise ClientClosedError, and the client does not retry them.
    """
    service.before = lambda _: asyncio.sleep(30)
    service.inspect = stalled_inspection
    service.max_request_sequences = 2
    client = caller.connect(
        retry=RetryPolicy(initial_backoff_seconds=100, max_backoff_seconds=100), timeout_seconds=200
    )
    await caller(client.model)
    calls = [
        asyncio.create_task(caller(client.token_vectors, [[1]])),
        asyncio.create_task(caller(client.token_vectors, [[1]] * 5)),
        asyncio.create_task(caller(client.inspect, [1])),
        asyncio.create_task(caller.all_of(client, [[1]] * 5)),
    ]
    await until(lambda: len(service.requests) == 7 and service.inspect_requests)  # three calls send 1, 3 and 3 messages
    await caller.close(client)
    for call in calls:
        with pytest.raises(ClientClosedError, match="the client was closed during the call"):
            await asyncio.wait_for(call, 30)
    with pytest.raises(ClientClosedError):
        await caller(client.inspect, [1])


async def test_closing_a_client_ends_the_wait_before_a_retry(caller: Caller, service: FakeEncoder) -> None:
    refused: list[object] = []

    async def full(request: pb.EncodeRequest) -> None:
        refused.append(request)
        raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", "100000")

    service.before = full
    client = caller.connect(timeout_seconds=1000)
    calls = [
        asyncio.create_task(caller(client.token_vectors, [[1]])),
        asyncio.create_task(caller.all_of(client, [[1]])),
    ]
    await until(lambda: len(refused) == 2 and service.n_open == 0)
    await asyncio.sleep(0)
    await caller.close(client)
    for call in calls:
        with pytest.raises(ClientClosedError, match="the client was closed during the call"):
            await asyncio.wait_for(call, 30)


async def test_an_error_in_grpc_does_not_hang_a_call(caller: Caller) -> None:
    """With invalid metadata, gRPC raises an error without a status. The client then raises ServerError."""
    client = caller.connect()
    client._metadata = (("Bad Key", "x"),)
    for call, arguments in ((client.models, []), (client.token_vectors, [[[1]]]), (client.inspect, [[1]])):
        with pytest.raises(ServerError):
            await caller(call, *arguments)
    with pytest.raises(ServerError):
        await caller.all_of(client, [[1]])


# Tests of replies that are not valid protobuf messages.


class _Broken(grpc.GenericRpcHandler):
    """Answers GetModel with `info`, and each other call with bytes that are not a protobuf message."""

    def __init__(self, info: pb.ModelInfo) -> None:
        self._info = pb.GetModelResponse(model=info).SerializeToString()

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        if details.method.endswith("/Inspect"):
            return grpc.unary_stream_rpc_method_handler(lambda request, context: iter([b"\xff\xff"]))
        reply = self._info if details.method.endswith("/GetModel") else b"\xff\xff"
        return grpc.unary_unary_rpc_method_handler(lambda request, context: reply)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("embed", (["a"],)),
        ("embed", (["a"] * 2_000,)),  # several messages at a time
        ("tokenize", (["a"],)),
        ("score", ([("a", "b")],)),
        ("inspect", ("a",)),
        ("models", ()),
    ],
)
async def test_a_reply_that_is_no_message(
    method: str, arguments: tuple[Any, ...], caller: Caller, service: FakeEncoder
) -> None:
    server = grpc.server(ThreadPoolExecutor(4), handlers=[_Broken(service.info())])
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with pytest.raises(EncserveError, match="the reply is not a message of encserve") as caught:
            await caller(getattr(caller.connect(target=target), method), *arguments)
        assert caught.value.code is Code.INTERNAL
    finally:
        await asyncio.to_thread(server.stop(None).wait)
