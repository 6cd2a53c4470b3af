"""Sends and receives the messages of one call with grpc.aio; see `Wire`."""

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from encserve_client._grpc.channel import Connection, event_of_reply, parse_reply
from encserve_client._grpc.diagnosis import Diagnosis
from encserve_client._grpc.metadata import Metadata
from encserve_client._logic.failures import UNREADABLE_REPLY, Failure, failure_of_call, failure_of_crash
from encserve_client._logic.inspecting import InspectAssembler
from encserve_client._logic.planning import Message
from encserve_client._logic.wire import Answered, Event, Failed, InputRead, InputsEnded, Rpc
from encserve_client.exceptions import ClientClosedError
from encserve_proto.v1 import encoder_pb2 as pb


class AsyncWire:
    """The I/O of one call, as tasks of the running event loop."""

    def __init__(
        self,
        open_connection: Callable[[], Connection],
        metadata: Metadata,
        inputs: AsyncIterable[object] | None,
        is_client_closed: Callable[[], bool],
        diagnosis: Diagnosis | None = None,
    ) -> None:
        self._open_connection = open_connection
        self._diagnosis = diagnosis
        self._metadata = metadata
        self._inputs = inputs
        self._is_client_closed = is_client_closed
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()  # None: the client was closed
        self._tasks: set[asyncio.Task[None]] = set()
        self._may_read = asyncio.Semaphore(0)  # the number of inputs that the task may read
        self._is_reading = False
        self._needs_loop = False  # whether a call was started and gRPC has not sent the request yet

    now = staticmethod(time.monotonic)

    def start(self, rpc: Rpc, message: Message, timeout_seconds: float | None, *, alone: bool) -> None:
        """See `Wire`. Never blocks."""
        connection = self._open_connection()
        method = connection.methods[rpc]
        call = _begin(method, message.request, timeout=timeout_seconds, metadata=self._metadata)
        self._spawn(self._finish_call(call, message, connection))
        self._needs_loop = True

    def read_inputs(self, count: int) -> None:
        """See `Wire`. A separate task reads the inputs, so a slow iterable does not delay the answers."""
        for _ in range(count):
            self._may_read.release()
        if self._inputs is not None and not self._is_reading:
            self._is_reading = True
            self._spawn(self._read_inputs(aiter(self._inputs)))

    def has_event(self) -> bool:
        """See `Wire`."""
        return not self._events.empty()

    async def wait(self, seconds: float | None) -> Event | None:
        """See `Wire`."""
        if self._needs_loop:  # gRPC sends the messages only while this task is suspended
            self._needs_loop = False
            await asyncio.sleep(0)
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
        if event is None:
            raise ClientClosedError("the client was closed during the call")
        if isinstance(event, Failed):
            if self._is_client_closed():
                raise ClientClosedError("the client was closed during the call")
            event = replace(event, failure=await self._explain(event.failure))
        return event

    def end_wait(self) -> None:
        """Make `wait` raise ClientClosedError, even while `wait` waits before a retry."""
        self._events.put_nowait(None)

    async def aclose(self) -> None:
        """See `Wire`."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _explain(self, failure: Failure) -> Failure:
        """Add the cause to a failure of the connection. A thread looks for the cause."""
        if self._diagnosis is None or not self._diagnosis.may_help(failure):
            return failure
        return await asyncio.to_thread(self._diagnosis.explain, failure)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish_call(self, call: Any, message: Message, connection: Connection) -> None:
        """Report the end of a call. The reference to `connection` keeps the channel open."""
        request = message.request
        try:
            if isinstance(request, pb.InspectRequest):
                event: Event = Answered(message, await _assemble(call, request))
            else:
                event = event_of_reply(message, await call)
        except grpc.aio.AioRpcError as error:
            self._events.put_nowait(Failed(message, failure_of_call(error)))
        except asyncio.CancelledError:
            # This event tells the caller of `wait` that the channel was closed.
            self._events.put_nowait(Failed(message, _CANCELLED))
            call.cancel()
            raise
        except DecodeError:
            call.cancel()
            self._events.put_nowait(Failed(message, UNREADABLE_REPLY))
        except Exception as error:
            self._events.put_nowait(Failed(message, failure_of_crash(error)))
        else:
            self._events.put_nowait(event)

    async def _read_inputs(self, inputs: AsyncIterator[object]) -> None:
        try:
            while True:
                await self._may_read.acquire()
                self._events.put_nowait(InputRead(await anext(inputs)))
        except StopAsyncIteration:
            self._events.put_nowait(InputsEnded())
        except (Exception, asyncio.CancelledError) as error:
            self._events.put_nowait(InputsEnded(error))


async def _assemble(call: Any, request: pb.InspectRequest) -> InspectAssembler:
    """Read all messages of an answer to Inspect, or stop at the first wrong message."""
    assembler = InspectAssembler(request)
    async for part in call:
        if not assembler.add(parse_reply(request, part)):
            call.cancel()
            break
    return assembler


_CANCELLED = Failure(grpc.StatusCode.CANCELLED, "the call was cancelled")


def _begin(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return method(*args, **kwargs)
    except grpc.aio.UsageError as error:  # gRPC raises UsageError for a closed channel
        raise ClientClosedError from error
