"""Many callers of one client, and cancelled calls."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_encoder import FakeEncoder, rows_of
from waiting import until

from encserve_client import AsyncEncoderClient, EncoderClient, InvalidInputError


async def test_threads_share_a_client(service: FakeEncoder) -> None:
    """16 threads make calls of one message, calls of several messages, and streams. Each gets its own rows."""
    service.max_request_sequences = 3

    def work(client: EncoderClient, thread: int) -> int:
        for call in range(5):
            inputs = [[thread + 1] * (1 + (call + i) % 4) for i in range(1 + call * 2)]
            streamed = list(client.encode_stream(inputs))
            for arrays in (client.encode(inputs), streamed):
                for array, ids in zip(arrays, inputs, strict=True):
                    np.testing.assert_array_equal(array, rows_of(ids))
        return thread

    def everyone() -> list[int]:
        with EncoderClient(service.target) as client, ThreadPoolExecutor(16) as pool:
            return list(pool.map(lambda thread: work(client, thread), range(16)))

    threads = set(threading.enumerate())
    assert await asyncio.to_thread(everyone) == list(range(16))
    assert service.n_get_model <= 16
    await until(lambda: not [it for it in set(threading.enumerate()) - threads if "asyncio" not in it.name])


async def test_tasks_share_a_client(service: FakeEncoder) -> None:
    service.max_request_sequences = 3
    async with AsyncEncoderClient(service.target) as client:

        async def work(task: int) -> None:
            inputs = [[task + 1] * length for length in (1, 2, 3, 4, 5)]
            streamed = [array async for array in client.encode_stream(inputs)]
            for arrays in (await client.encode(inputs), streamed):
                for array, ids in zip(arrays, inputs, strict=True):
                    np.testing.assert_array_equal(array, rows_of(ids))

        await asyncio.gather(*(work(task) for task in range(50)))


@pytest.mark.parametrize("n_messages", [1, 6])
async def test_cancelling_a_task_cancels_its_call(service: FakeEncoder, n_messages: int) -> None:
    """The caller gets asyncio's own error, the server sees the cancellation, and no task remains."""
    service.max_request_sequences = 1
    service.before = lambda _: asyncio.sleep(30)
    async with AsyncEncoderClient(service.target) as client:
        await client.model()
        call = asyncio.create_task(client.encode([[1]] * n_messages))
        n_out = min(n_messages, 4)
        await until(lambda: len(service.requests) == n_out)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: service.n_cancelled == n_out)
        assert not [task for task in asyncio.all_tasks() if "encserve_client" in repr(task)]
        service.before = None
        assert len(await client.encode([[1]])) == 1  # the client still works


async def test_a_timeout_of_the_callers_own(service: FakeEncoder) -> None:
    """asyncio.timeout works with calls."""
    service.before = lambda _: asyncio.sleep(30)
    async with AsyncEncoderClient(service.target) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.encode([[1]])


async def test_the_async_client_can_be_made_outside_a_loop(service: FakeEncoder) -> None:
    """The channel belongs to the loop of the first call, here in a thread without a loop at construction."""
    client = await asyncio.to_thread(AsyncEncoderClient, service.target)
    async with client:
        assert len(await client.models()) == 1


async def test_an_async_client_in_another_loop_says_so(service: FakeEncoder) -> None:
    """For example with two calls of asyncio.run. The loop of the client is not disturbed."""
    async with AsyncEncoderClient(service.target) as client:
        await client.encode([[1]])
        with pytest.raises(InvalidInputError, match="the event loop of its first use: make one in each loop"):
            await asyncio.to_thread(lambda: asyncio.run(client.encode([[1]])))
        await client.encode([[1]])
