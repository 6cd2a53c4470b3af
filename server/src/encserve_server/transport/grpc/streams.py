"""Answers the requests of a stream independently. Reading, answering and writing run concurrently, up to a limit."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import Any

from encserve_server.calls import Call
from encserve_server.endpoints.rpcs import StreamedRequest
from encserve_server.errors import Draining

# The bytes of a reply, and the call that counts the memory of these bytes until they are written.
Answer = tuple[bytes, Call]


class _Drained(Enum):
    DRAINED = "the server is stopping"


_DRAINED = _Drained.DRAINED


async def answer_stream(
    read: Callable[[], Awaitable[object]],
    answer: Callable[[bytes], Awaitable[Answer]],
    write: Callable[[bytes], Awaitable[None]],
    *,
    max_in_flight: int,
    draining: asyncio.Event,
) -> None:
    """Answer the requests of a stream, at most `max_in_flight` at a time. Write each reply as soon as it is ready.

    A request counts as in flight until its reply is written. So if a caller does not read replies, the server stops
    reading requests. Only this function writes, one message at a time. So no write is in progress when this function
    raises an error; during a write, gRPC could not end the call.

    Args:
        read: Returns the next request. At the end of the stream, `read` returns a value that is not bytes.
        answer: Answers one request.
        write: Writes one reply.
        max_in_flight: The maximum number of requests in flight.
        draining: Set when the server stops. After that, no more requests are read.

    Raises:
        Draining: The server is stopping. The requests that were already read are answered.
        DeadlineExpired: The caller does not read the replies.
    """
    places = asyncio.Semaphore(max_in_flight)
    answers: asyncio.Queue[Answer | None] = asyncio.Queue()
    answering = asyncio.create_task(_answer_all(read, answer, places, answers, draining))
    answering.add_done_callback(lambda _: answers.put_nowait(None))
    try:
        while (ready := await answers.get()) is not None:
            data, call = ready
            try:
                await write(data)
            finally:
                call.release()
            places.release()
            del ready, data  # frees their memory now, because the next reply may take long
        await answering
    finally:
        # Not awaited, because gRPC may cancel this task during the wait. Then the replies would not be released.
        answering.add_done_callback(partial(_release_unsent, answers))
        answering.cancel()


async def answer_one(call: Call, size: int, request: StreamedRequest) -> Answer:
    """Answer one request of a stream. `size` is the number of bytes of the request. An error becomes a reply too."""
    data = b""
    try:
        with call:
            call.hold(size)
            data = await request.answer(call)
        if call.failure is not None:
            data = request.refuse(call.failure)
    except BaseException:  # the stream has ended, and the reply will not be written
        call.release()
        raise
    return data, call


async def _answer_all(
    read: Callable[[], Awaitable[object]],
    answer: Callable[[bytes], Awaitable[Answer]],
    places: asyncio.Semaphore,
    answers: "asyncio.Queue[Answer | None]",
    draining: asyncio.Event,
) -> None:
    """Put each reply into the queue as soon as it is ready, until the end of the stream."""

    async def put_answer(data: bytes) -> None:
        answers.put_nowait(await answer(data))

    stop = asyncio.ensure_future(draining.wait())
    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await places.acquire()
                data = await _next_request(read, stop)
                if data is None or data is _DRAINED:
                    break
                tasks.create_task(put_answer(data))
                del data  # frees the memory now, because the next request may take long
    except ExceptionGroup as group:  # other code expects single errors, such as those in `CALLER_ERRORS`
        raise _first_error(group) from None
    finally:
        stop.cancel()
    if data is _DRAINED:
        raise Draining("the server is stopping; send the unanswered requests to another server")


async def _next_request(read: Callable[[], Awaitable[object]], stop: "asyncio.Future[Any]") -> bytes | _Drained | None:
    """Return the next request, None at the end of the stream, or _DRAINED if the server stops first."""
    reading = asyncio.ensure_future(read())
    try:
        await asyncio.wait((reading, stop), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            return _DRAINED
        data = reading.result()
        return data if isinstance(data, bytes) else None
    finally:
        reading.cancel()


def _release_unsent(answers: "asyncio.Queue[Answer | None]", answering: "asyncio.Task[None]") -> None:
    """Release the replies that will not be written because the stream has ended."""
    if not answering.cancelled():
        answering.exception()  # marks the reported error as read; otherwise asyncio would log the error
    while not answers.empty():
        if (unsent := answers.get_nowait()) is not None:
            unsent[1].release()


def _first_error(group: ExceptionGroup[Exception]) -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
