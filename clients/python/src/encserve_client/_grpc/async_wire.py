"""The wire for asyncio: grpc.aio."""

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
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
from encserve_client._logic.wire import Answered, Event, Failed, InputRead, InputsEnded, Rpc
from encserve_client.exceptions import ClientClosedError
from encserve_proto.v1 import encoder_pb2 as pb


class AsyncWire:
    """One call's I/O as tasks of the running loop; everything here belongs to that loop's thread."""

    def __init__(
        self,
        link: Callable[[], Link],
        metadata: Metadata,
        inputs: AsyncIterable[object] | None,
        is_client_closed: Callable[[], bool],
        diagnosis: Diagnosis | None = None,
    ) -> None:
        self._link = link
        self._diagnosis = diagnosis
        self._metadata = metadata
        self._inputs = inputs
        self._is_client_closed = is_client_closed
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._may_read = asyncio.Semaphore(0)  # inputs that may be read and were not
        self._is_reading = False
        self._starts_unseen = False  # whether a message was started since the event loop last ran

    def now(self) -> float:
        """See `Wire`."""
        return time.monotonic()

    def start(self, rpc: Rpc, message: Message, timeout_seconds: float | None, *, alone: bool) -> None:
        """See `Wire`. Never blocks, alone or not."""
        link = self._link()
        call = _begin(getattr(link.stub, rpc), message.request, timeout=timeout_seconds, metadata=self._metadata)
        self._spawn(self._finish_call(call, message, link))
        self._starts_unseen = True

    def read_inputs(self, count: int) -> None:
        """See `Wire`. A task reads them, so that answers arrive while the caller's iterable waits."""
        for _ in range(count):
            self._may_read.release()
        if self._inputs is not None and not self._is_reading:
            self._is_reading = True
            self._spawn(self._read_inputs(aiter(self._inputs)))

    async def wait(self, seconds: float | None) -> Event | None:
        """See `Wire`."""
        if self._starts_unseen:  # a caller that is never suspended would keep the messages from being sent
            self._starts_unseen = False
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
        if isinstance(event, Failed):
            if self._is_client_closed():
                raise ClientClosedError("the client was closed during the call")
            event = replace(event, failure=await self._explained(event.failure))
        return event

    async def aclose(self) -> None:
        """See `Wire`."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _explained(self, failure: Failure) -> Failure:
        """The same with its cause, if that is TLS."""
        if self._diagnosis is None or not self._diagnosis.may_help(failure):
            return failure
        return await asyncio.to_thread(self._diagnosis.explain, failure)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish_call(self, call: Any, message: Message, link: Link) -> None:
        """Report the end of a call. The task holds `link`, because gRPC closes a channel that nobody holds."""
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

    async def _read_inputs(self, inputs: AsyncIterator[object]) -> None:
        try:
            while True:
                await self._may_read.acquire()
                self._events.put_nowait(InputRead(await anext(inputs)))
        except StopAsyncIteration:
            self._events.put_nowait(InputsEnded())
        except (Exception, asyncio.CancelledError) as error:
            self._events.put_nowait(InputsEnded(error))


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
