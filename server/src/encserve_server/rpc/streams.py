"""Streams of requests that are answered each by itself: reading, answering and writing at once, with a bound."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import Any

from encserve_server.calls import Call
from encserve_server.error_table import Failure
from encserve_server.errors import Draining

# An answer, and the call that holds its memory until it has been written.
Answer = tuple[bytes, Call]


class _CutShort(Enum):
    CUT_SHORT = "the server drains"


CUT_SHORT = _CutShort.CUT_SHORT


async def answer_stream(
    read: Callable[[], Awaitable[object]],
    answer: Callable[[bytes], Awaitable[Answer]],
    write: Callable[[bytes], Awaitable[None]],
    *,
    max_in_flight: int,
    draining: asyncio.Event,
) -> None:
    """Answers many requests, each as soon as it is ready; at most `max_in_flight` at a time.

    A place is given back only when an answer has been written, so a caller that does not read stops being read.
    Only this function writes: gRPC cannot end a call with an error while a message is under way.

    Args:
        read: Gives the next request, and at the end something other than bytes.
        answer: Answers one request.
        write: Writes one answer.
        max_in_flight: How many requests are read and not yet answered, at most.
        draining: Set from when no more requests are read.

    Raises:
        Draining: The server drains; what had been read is answered.
        DeadlineExpired: The caller does not read.
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
            del ready, data  # large, and the next may be long in coming
        await answering
    finally:
        # Not awaited: gRPC may cancel this task meanwhile, and nothing may be left behind then.
        answering.add_done_callback(partial(_release_unsent, answers))
        answering.cancel()


async def answer_one(
    call: Call, size: int, work: Callable[[], Awaitable[bytes]], of_failure: Callable[[Failure], bytes]
) -> Answer:
    """One request's answer; its error is an answer too.

    Args:
        call: The call of the request.
        size: The bytes that the request has taken.
        work: What answers it.
        of_failure: Makes the answer of an error.
    """
    data = b""
    try:
        with call:
            call.hold(size)
            data = await work()
        if call.failure is not None:
            data = of_failure(call.failure)
    except BaseException:  # the stream has ended
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
    """Answers a stream's requests, in the order in which they are ready, until there are no more."""

    async def give(data: bytes) -> None:
        answers.put_nowait(await answer(data))

    drains = asyncio.ensure_future(draining.wait())
    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await places.acquire()
                data = await _next(read, drains)
                if data is None or data is CUT_SHORT:
                    break
                tasks.create_task(give(data))
                del data  # large, and the next may be long in coming
    except ExceptionGroup as group:  # one cause is enough, and the status table knows single errors only
        raise _first(group) from None
    finally:
        drains.cancel()
    if data is CUT_SHORT:
        raise Draining("the server is stopping; requests that were not answered can be sent to another")


async def _next(read: Callable[[], Awaitable[object]], drains: "asyncio.Future[Any]") -> bytes | _CutShort | None:
    """The stream's next request, None at its end, or CUT_SHORT if the server drains first."""
    reading = asyncio.ensure_future(read())
    try:
        await asyncio.wait((reading, drains), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            return CUT_SHORT
        data = reading.result()
        return data if isinstance(data, bytes) else None
    finally:
        reading.cancel()


def _release_unsent(answers: "asyncio.Queue[Answer | None]", answering: "asyncio.Task[None]") -> None:
    """The stream has ended and nothing of it runs any more: no answer that is left will be written."""
    if not answering.cancelled():
        answering.exception()  # or it would be logged, beside what has ended the stream
    while not answers.empty():
        if (unsent := answers.get_nowait()) is not None:
            unsent[1].release()


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The first single error of a group of groups."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
