"""Streams of requests that are answered each by itself: reading, answering and writing at once, with a bound."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import Enum
from typing import Any

import grpc

from encserve_server.errors import Draining
from encserve_server.rpc.status import Failure, to_failure
from encserve_server.telemetry import spans
from encserve_server.telemetry.metrics import Metrics


class _CutShort(Enum):
    CUT_SHORT = "the server drains"


CUT_SHORT = _CutShort.CUT_SHORT


async def answer_stream(
    requests: AsyncIterator[bytes],
    answer: Callable[[bytes], Awaitable[bytes]],
    write: Callable[[bytes], Awaitable[None]],
    *,
    max_in_flight: int,
    draining: asyncio.Event,
) -> None:
    """Answers many requests, each as soon as it is ready; at most `max_in_flight` at a time.

    A place is given back only when an answer has been written, so a caller that does not read stops being read.
    Nobody else writes: gRPC cannot end a call with an error while a message is under way.

    Raises:
        Draining: The server drains; what had been read is answered.
    """
    places = asyncio.Semaphore(max_in_flight)
    answers: asyncio.Queue[bytes | None] = asyncio.Queue()
    answering = asyncio.create_task(_answer_all(requests, answer, places, answers, draining))
    answering.add_done_callback(lambda _: answers.put_nowait(None))
    try:
        while (ready := await answers.get()) is not None:
            await write(ready)
            places.release()
        await answering
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)


async def answer_one(
    metrics: Metrics, request_id: str, answer: Awaitable[bytes], of_failure: Callable[[Failure], bytes]
) -> bytes:
    """One request's answer, counted and traced; its error is an answer too."""
    span = spans.begin_request(request_id)
    code, reason = grpc.StatusCode.CANCELLED, ""
    try:
        response = await answer
        code = grpc.StatusCode.OK
        return response
    except Exception as error:
        failure = to_failure(error)
        code, reason = failure.code, failure.reason
        metrics.refused.labels(failure.reason).inc()
        return of_failure(failure)
    finally:
        if span is not None:
            span.end(code.name, reason)


async def _answer_all(
    requests: AsyncIterator[bytes],
    answer: Callable[[bytes], Awaitable[bytes]],
    places: asyncio.Semaphore,
    answers: "asyncio.Queue[bytes | None]",
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
                data = await _next(requests, drains)
                if data is None or data is CUT_SHORT:
                    break
                tasks.create_task(give(data))
    except ExceptionGroup as group:  # one cause is enough, and the status table knows single errors only
        raise _first(group) from None
    finally:
        drains.cancel()
    if data is CUT_SHORT:
        raise Draining("the server is stopping; requests that were not answered can be sent to another")


async def _next(requests: AsyncIterator[bytes], drains: "asyncio.Future[Any]") -> bytes | _CutShort | None:
    """The stream's next request, None at its end, or CUT_SHORT if the server drains first."""
    reading = asyncio.ensure_future(anext(requests, None))
    try:
        await asyncio.wait((reading, drains), return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else CUT_SHORT
    finally:
        reading.cancel()


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The first single error of a group of groups."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
