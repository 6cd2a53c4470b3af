"""The wire for asyncio: grpc.aio."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from encserve_client._grpc.channel import Link
from encserve_client._grpc.diagnosis import Diagnosis
from encserve_client._grpc.metadata import Metadata
from encserve_client._logic.failures import Failure, failure_of_call, failure_of_crash
from encserve_client._logic.inspecting import Gathering
from encserve_client._logic.planning import Message
from encserve_client._logic.wire import (
    Answered,
    Event,
    Failed,
    InputRead,
    InputsEnded,
    Rpc,
    StreamAnswered,
    StreamEnded,
)
from encserve_client.exceptions import ClientClosedError
from encserve_proto.v1 import encoder_pb2 as pb


class AsyncWire:
    """One call's I/O as tasks of the running loop; everything here belongs to that loop's thread."""

    def __init__(
        self,
        link: Callable[[], Link],
        metadata: Metadata,
        inputs: AsyncIterator[object],
        is_client_closed: Callable[[], bool],
        diagnosis: Diagnosis | None = None,
    ) -> None:
        self._link = link
        self._links: set[Link] = set()  # those in use, which so are not closed
        self._diagnosis = diagnosis
        self._metadata = metadata
        self._inputs = inputs
        self._is_client_closed = is_client_closed
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: dict[int, _Stream] = {}

    def now(self) -> float:
        """See `Wire`."""
        return time.monotonic()

    def start(self, rpc: Rpc, message: Message, timeout_seconds: float | None, *, alone: bool) -> None:
        """See `Wire`. Never blocks, alone or not."""
        call = _begin(getattr(self._stub(), rpc), message.request, timeout=timeout_seconds, metadata=self._metadata)
        self._spawn(self._finish_call(call, message))

    def open_stream(self) -> int:
        """See `Wire`."""
        number = len(self._streams) + 1
        self._streams[number] = stream = _Stream(_begin(self._stub().EncodeStream, metadata=self._metadata))
        self._spawn(self._read_stream(number, stream))
        self._spawn(stream.write())
        return number

    def send(self, stream: int, request: pb.EncodeStreamRequest) -> None:
        """See `Wire`."""
        self._streams[stream].requests.put_nowait(request)

    def finish(self, stream: int) -> None:
        """See `Wire`."""
        self._streams[stream].requests.put_nowait(None)

    def read_input(self) -> None:
        """See `Wire`. Reads in a task, so that answers come in while the caller's iterable waits for something."""
        self._spawn(self._read_input())

    async def wait(self, seconds: float | None) -> Event | None:
        """See `Wire`."""
        if not self._events.empty():
            event = self._events.get_nowait()
        elif seconds == 0:
            return None
        else:
            try:
                async with asyncio.timeout(seconds):
                    event = await self._events.get()
            except TimeoutError:
                return None
        if isinstance(event, Failed | StreamEnded) and self._is_client_closed():
            raise ClientClosedError("the client was closed during the call")
        if isinstance(event, Failed | StreamEnded) and event.failure is not None:
            event = replace(event, failure=await self._explained(event.failure))
        return event

    async def aclose(self) -> None:
        """See `Wire`."""
        for stream in self._streams.values():
            stream.call.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._links.clear()

    async def _explained(self, failure: Failure) -> Failure:
        """The same with its cause, if that is TLS."""
        if self._diagnosis is None or not self._diagnosis.may_help(failure):
            return failure
        return await asyncio.to_thread(self._diagnosis.explain, failure)

    def _stub(self) -> Any:
        """The methods of the newest channel."""
        link = self._link()
        self._links.add(link)
        return link.stub

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish_call(self, call: Any, message: Message) -> None:
        request = message.request
        try:
            response = await (_gather(call, request) if isinstance(request, pb.InspectRequest) else call)
        except grpc.aio.AioRpcError as error:
            self._events.put_nowait(Failed(message, failure_of_call(error)))
        except asyncio.CancelledError:
            self._events.put_nowait(Failed(message, _CANCELLED))  # of use if it was the channel that was closed
            call.cancel()
            raise
        except Exception as error:
            self._events.put_nowait(Failed(message, failure_of_crash(error)))
        else:
            self._events.put_nowait(Answered(message, response))

    async def _read_stream(self, number: int, stream: "_Stream") -> None:
        failure: Failure | None = None
        try:
            async for response in stream.call:
                self._events.put_nowait(StreamAnswered(number, response))
        except grpc.aio.AioRpcError as error:
            failure = failure_of_stream(error)
        except asyncio.CancelledError:
            self._events.put_nowait(StreamEnded(number, _CANCELLED))
            raise
        except Exception as error:
            failure = failure_of_crash(error)
        finally:
            stream.requests.put_nowait(None)  # ends the writer
        self._events.put_nowait(StreamEnded(number, failure))

    async def _read_input(self) -> None:
        try:
            item = await anext(self._inputs)
        except StopAsyncIteration:
            self._events.put_nowait(InputsEnded())
        except Exception as error:
            self._events.put_nowait(InputsEnded(error))
        else:
            self._events.put_nowait(InputRead(item))


class _Stream:
    """One EncodeStream and the requests that wait to be written to it."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.requests: asyncio.Queue[pb.EncodeStreamRequest | None] = asyncio.Queue()

    async def write(self) -> None:
        """Writes what is queued. The reader learns why a stream broke; all there is to do here is to end it."""
        try:
            while (request := await self.requests.get()) is not None:
                await self.call.write(request)
            await self.call.done_writing()
        except Exception:
            self.call.cancel()


async def _gather(call: Any, request: pb.InspectRequest) -> Gathering:
    """Reads an answer of many messages, to its end or to what is wrong with it."""
    gathering = Gathering(request)
    async for part in call:
        if not gathering.add(part):
            call.cancel()
            break
    return gathering


_CANCELLED = Failure(grpc.StatusCode.CANCELLED, "the call was cancelled")


def _begin(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return method(*args, **kwargs)
    except grpc.aio.UsageError as error:  # gRPC's word for a channel that was closed
        raise ClientClosedError from error


def failure_of_stream(error: grpc.aio.AioRpcError) -> Failure:
    """Reads the status of a stream that broke.

    When a write meets a stream that has just ended, grpc.aio puts a status of its own in place of the real one
    (grpc/grpc issue 36066). Only a new stream can tell what is the matter, so this counts as UNAVAILABLE.
    """
    failure = failure_of_call(error)
    if failure.code is grpc.StatusCode.INTERNAL and failure.message == "Internal error from Core":
        return Failure(grpc.StatusCode.UNAVAILABLE, "the stream broke while a request was being written")
    return failure
