"""Tests with threads or tasks that share one client, and tests of cancelled calls."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fake_encoder import FakeEncoder, rows_of, stalled_inspection
from waiting import until

from encserve_client import AsyncEncoderClient, EncoderClient, InvalidInputError


async def test_threads_share_a_client(service: FakeEncoder) -> None:
    """16 threads share a client and make unary calls and streams. Each thread gets the results of its own inputs."""
    service.max_request_sequences = 3

    def work(client: EncoderClient, thread: int) -> int:
        for call in range(5):
            inputs = [[thread + 1] * (1 + (call + i) % 4) for i in range(1 + call * 2)]
            streamed = [rows for _, rows in client.stream(inputs, kind="tokens")]
            for arrays in (client.token_vectors(inputs), streamed):
                for array, ids in zip(arrays, inputs, strict=True):
                    np.testing.assert_array_equal(array, rows_of(ids))
        return thread

    def all_threads() -> list[int]:
        with EncoderClient(service.target) as client, ThreadPoolExecutor(16) as pool:
            return list(pool.map(lambda thread: work(client, thread), range(16)))

    threads = set(threading.enumerate())
    assert await asyncio.to_thread(all_threads) == list(range(16))
    assert service.n_get_model <= 16
    await until(lambda: not [it for it in set(threading.enumerate()) - threads if "asyncio" not in it.name])


async def test_tasks_share_a_client(service: FakeEncoder) -> None:
    service.max_request_sequences = 3
    async with AsyncEncoderClient(service.target) as client:

        async def work(task: int) -> None:
            inputs = [[task + 1] * length for length in (1, 2, 3, 4, 5)]
            streamed = [rows async for _, rows in client.stream(inputs, kind="tokens")]
            for arrays in (await client.token_vectors(inputs), streamed):
                for array, ids in zip(arrays, inputs, strict=True):
                    np.testing.assert_array_equal(array, rows_of(ids))

        await asyncio.gather(*(work(task) for task in range(50)))


@pytest.mark.parametrize(
    ("method", "inputs", "n_requests"),
    [("token_vectors", [[1]], 1), ("token_vectors", [[1]] * 6, 4), ("inspect", [1], 1)],
    ids=["one message", "several messages", "inspect"],
)
async def test_cancelling_a_task_cancels_its_call(
    service: FakeEncoder, method: str, inputs: list[Any], n_requests: int
) -> None:
    """Cancel a task during a call, and another task before its call is sent.

    The server's handlers are cancelled, and no task of the client remains. Later calls of the client succeed.
    """
    service.max_request_sequences = 1
    service.before, service.inspect = lambda _: asyncio.sleep(30), stalled_inspection
    async with AsyncEncoderClient(service.target) as client:
        await client.model()
        call = asyncio.create_task(getattr(client, method)(inputs))
        await until(lambda: len(service.requests) + len(service.inspect_requests) == n_requests)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: service.n_cancelled == n_requests)
        assert not [task for task in asyncio.all_tasks() if "encserve_client" in repr(task)]
        unsent = asyncio.create_task(getattr(client, method)(inputs))
        await asyncio.sleep(0)
        unsent.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unsent
        service.before = service.inspect = None
        assert len(await client.token_vectors([[1]])) == 1
        assert (await client.inspect([5, 6, 7])).attention_layers == (0, 1)


async def test_the_async_client_can_be_made_outside_a_loop(service: FakeEncoder) -> None:
    """A thread without an event loop makes the client.

    The client creates its gRPC channel at its first call, in the event loop of this call.
    """
    client = await asyncio.to_thread(AsyncEncoderClient, service.target)
    async with client:
        assert len(await client.models()) == 1


async def test_an_async_client_refuses_another_loop(service: FakeEncoder) -> None:
    """The client refuses a call from another event loop. After that, calls in its first loop still succeed."""
    async with AsyncEncoderClient(service.target) as client:
        await client.token_vectors([[1]])
        text = "^the client belongs to the event loop of its first call: make one client per loop$"
        calls: list[Callable[[], Any]] = [
            lambda: client.token_vectors([[1]]),
            lambda: client.raw_method("ListModels")(b""),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError, match=text):
                await asyncio.to_thread(lambda call: asyncio.run(call()), call)
        await client.token_vectors([[1]])


INTERRUPTED = """
import os, signal, sys, threading
from encserve_client import EncoderClient

METHODS = {
    "many": lambda client: client.token_vectors([[1]] * 6),
    "one": lambda client: client.token_vectors([[1]]),
    "stream": lambda client: list(client.stream([[1]] * 6)),
    "inspect": lambda client: client.inspect([1]),
}
method = METHODS[sys.argv[2]]


class Interrupt:
    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, argument):
        if self.left and os.sep + "grpc" + os.sep in frame.f_code.co_filename:
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)


def go_on(client):
    method(client)
    client.close()


number, interrupt = 0, None
while interrupt is None or not interrupt.left:
    number += 1
    interrupt = Interrupt(number)
    client = EncoderClient(sys.argv[1])
    client.model()
    try:
        sys.settrace(interrupt)
        method(client)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    thread = threading.Thread(target=go_on, args=[client], daemon=True)
    thread.start()
    thread.join(20)
    if thread.is_alive():
        print("hangs after an interrupt at function", number, flush=True)
        os._exit(1)
print(number)
"""


@pytest.mark.system
@pytest.mark.parametrize("method", ["many", "one", "stream", "inspect"])
async def test_an_interrupt_in_grpcs_code_leaves_a_client_that_works(service: FakeEncoder, method: str) -> None:
    """SIGINT interrupts a call in gRPC's code. After SIGINT, the client can make another call and close.

    In call n, SIGINT arrives when Python enters a function of gRPC for the n-th time.
    """
    service.max_request_sequences = 2
    command = [sys.executable, "-c", INTERRUPTED, service.target, method]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 10
