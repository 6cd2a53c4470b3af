"""Tests of `stream` of both clients, with a real gRPC server.

The tests cover limits, lost connections, streams that the caller leaves early, and leaks.
"""

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from fake_encoder import Caller, FakeEncoder, rows_of
from fake_wire import counting
from waiting import until

from encserve_client import EncoderClient, InvalidInputError, RetryPolicy
from encserve_proto.v1 import encoder_pb2 as pb


async def jitter(*_: object) -> None:
    await asyncio.sleep(random.uniform(0, 0.005))


async def test_unordered_results_come_when_ready(caller: Caller, service: FakeEncoder) -> None:
    first_may_end = asyncio.Event()

    async def first_waits(request: pb.EncodeRequest) -> None:
        if list(request.inputs[0].token_ids.ids) == [1]:
            await first_may_end.wait()

    service.before = first_waits
    stream = caller.connect().stream([[1], [2]], kind="tokens", ordered=False)
    index, array = await caller.first_of(stream)
    first_may_end.set()
    assert (index, (await caller.first_of(stream))[0]) == (1, 0)
    np.testing.assert_array_equal(array, rows_of([2]))
    await caller.close(stream)


async def test_pooled_results_are_vectors(caller: Caller) -> None:
    texts = ["two words"] * 50
    vectors = await caller.all_of(caller.connect(), texts, kind="vector", dtype="float16")
    assert [vector.shape for vector in vectors] == [(8,)] * 50
    for vector in vectors:
        np.testing.assert_allclose(vector, rows_of([1, 3, 5, 2]).mean(axis=0), rtol=1e-3)
        assert vector.flags.writeable


async def test_each_input_has_one_result_after_a_lost_connection(caller: Caller, service: FakeEncoder) -> None:
    """The server stops during the stream, and starts again on the same port.

    Each input still gets exactly one result.
    """
    service.before = jitter
    port = int(service.target.rpartition(":")[2])
    client = caller.connect(retry=RetryPolicy(max_attempts=1000, max_backoff_seconds=0.2))
    inputs = [[i] for i in range(1, 2000)]
    call = asyncio.create_task(caller.all_of(client, inputs))
    await until(lambda: len(service.requests) > 10)
    await service.server.stop(None)
    await service.start(port)
    arrays = await call
    for array, ids in zip(arrays, inputs, strict=True):
        np.testing.assert_array_equal(array, rows_of(ids))
    assert sum(len(request.inputs) for request in service.requests) <= len(inputs) + 2 * 64
    assert len(service.requests) < len(inputs) / 2


@pytest.mark.parametrize("leave", ["close", "forget", "error"])
async def test_leaving_early_leaks_nothing(caller: Caller, service: FakeEncoder, leave: str) -> None:
    """If the caller leaves the stream early, the server's handlers end.

    No thread and no task of the client remains.
    """
    service.before = jitter
    client = caller.connect()
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    stream = client.stream(counting(10_000, []), kind="tokens")
    for _ in range(3):
        await caller.first_of(stream)
    if leave == "close":
        await caller.close(stream)
    elif leave == "error":
        error = KeyError("the caller's own")
        with pytest.raises(KeyError):
            await (stream.athrow(error) if caller.kind == "async" else caller(stream.throw, error))
    del stream
    gc.collect()
    await until(lambda: service.n_open == 0)
    # Threads with asyncio in their names belong to this test, because it uses `asyncio.to_thread`. Threads of gRPC end
    # when their channel is idle.
    await until(lambda: not [it for it in set(threading.enumerate()) - threads if "asyncio" not in it.name])
    await until(lambda: not [it for it in asyncio.all_tasks() - tasks if "first_of" in repr(it) or "_wire" in repr(it)])


async def test_a_stream_without_iteration_needs_no_close(caller: Caller, service: FakeEncoder) -> None:
    threads = set(threading.enumerate())
    stream = caller.connect().stream([[1]])
    assert set(threading.enumerate()) == threads
    del stream
    assert service.requests == []


async def test_an_error_of_the_callers_iterable_is_raised(caller: Caller, service: FakeEncoder) -> None:
    def broken() -> Iterator[list[int]]:
        yield [1]
        raise KeyError("the caller's own")

    service.before = lambda _: asyncio.sleep(30)
    with pytest.raises(KeyError, match="the caller's own"):
        await caller.all_of(caller.connect(), broken())
    await until(lambda: service.n_open == 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"progress": 1}, "progress must be a function or None; was int"),
        ({"max_in_flight": 0}, "max_in_flight must be >= 1; was 0"),
        ({"max_in_flight": "3"}, "max_in_flight must be an int; was str"),
        ({"timeout_seconds": -1}, "timeout_seconds must be > 0; was -1"),
        ({"model": "tiny", "version": 1}, "version must be a str or None; was int"),
        ({"inputs": 5}, "inputs must be a list of inputs; was int"),
        ({"pooling": "sum"}, "pooling must be one of"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_first_result(options: dict[str, Any], text: str) -> None:
    with EncoderClient() as client, pytest.raises(InvalidInputError, match=text):
        client.stream(**{"inputs": ["a"], **options})


async def test_progress(caller: Caller) -> None:
    """The client calls `progress` after each result. If the inputs have no length, the total is None."""
    told: list[tuple[int, int | None]] = []
    client = caller.connect()

    def progress(done: int, total: int | None) -> None:
        told.append((done, total))

    await caller.all_of(client, [[1], [2], [3]], progress=progress)
    await caller.all_of(client, iter([[1], [2]]), kind="vector", progress=progress)
    assert told == [(1, 3), (2, 3), (3, 3), (1, None), (2, None)]


@pytest.mark.parametrize("caller", ["async"], indirect=True)
async def test_answers_come_while_an_async_iterable_waits(caller: Caller) -> None:
    """The iterable yields its second input only after the first result.

    The client must therefore return the first result while it waits for the second input.
    """
    answered = asyncio.Event()

    async def inputs() -> AsyncIterator[list[int]]:
        yield [1]
        await answered.wait()
        yield [2]

    found = 0
    async with aclosing(caller.connect().stream(inputs())) as stream:
        async for _ in stream:
            found += 1
            answered.set()
    assert found == 2


@pytest.mark.parametrize("caller", ["async"], indirect=True)
async def test_leaving_while_an_async_iterable_waits(caller: Caller, service: FakeEncoder) -> None:
    """The caller leaves the stream while the iterable of inputs waits. The client then cancels the iterable."""
    ended: list[str] = []

    async def inputs() -> AsyncIterator[list[int]]:
        try:
            yield [1]
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    tasks = asyncio.all_tasks()
    async with aclosing(caller.connect().stream(inputs(), kind="tokens", max_in_flight=2)) as stream:
        assert (await anext(stream))[1].shape == (1, 8)
    assert ended == ["cancelled"]
    await until(lambda: service.n_open == 0)
    await until(lambda: not [it for it in asyncio.all_tasks() - tasks if "encserve_client" in repr(it)])


@pytest.mark.parametrize("caller", ["async"], indirect=True)
async def test_an_async_iterable_that_is_cancelled_ends_the_stream(caller: Caller) -> None:
    """The iterable of inputs waits for a task. The test cancels this task, and the stream raises CancelledError."""

    async def inputs() -> AsyncIterator[list[int]]:
        yield [1]
        waited = asyncio.ensure_future(asyncio.sleep(30))
        waited.cancel()
        await waited

    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await caller.all_of(caller.connect(), inputs())
