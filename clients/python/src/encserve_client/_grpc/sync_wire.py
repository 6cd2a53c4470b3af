"""The wire for threads: gRPC's blocking API and its futures. Never suspends."""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc

from encserve_client._grpc.channel import Link
from encserve_client._grpc.diagnosis import Diagnosis
from encserve_client._grpc.metadata import Metadata
from encserve_client._logic.failures import failure_of_call
from encserve_client._logic.inspecting import Gathering
from encserve_client._logic.planning import Message
from encserve_client._logic.wire import Answered, Event, Failed, Rpc
from encserve_client.exceptions import ClientClosedError
from encserve_proto.v1 import encoder_pb2 as pb


class SyncWire:
    """The I/O of one call, on the caller's thread. The threads of gRPC only put events into `_events`."""

    def __init__(
        self,
        link: Callable[[], Link],
        metadata: Metadata,
        is_client_closed: Callable[[], bool],
        diagnosis: Diagnosis | None = None,
    ) -> None:
        self._link = link
        self._diagnosis = diagnosis
        self._metadata = metadata
        self._is_client_closed = is_client_closed
        self._events: queue.SimpleQueue[Event | _Done] = queue.SimpleQueue()
        self._calls: dict[Any, Link] = {}  # those that are out, each with its channel, which stays open until the end

    def now(self) -> float:
        """See `Wire`."""
        return time.monotonic()

    def start(self, rpc: Rpc, message: Message, timeout_seconds: float | None, *, alone: bool) -> None:
        """See `Wire`. A call that is alone blocks, which saves gRPC's own polling thread."""
        link = self._link()
        method = getattr(link.stub, rpc)
        try:
            if isinstance(request := message.request, pb.InspectRequest):
                call = method(request, timeout=timeout_seconds, metadata=self._metadata)
                self._calls[call] = link  # whatever ends the reading, `aclose` ends the call
                self._gather(call, message, request)
                return
            if alone:
                response = method(message.request, timeout=timeout_seconds, metadata=self._metadata)
                self._events.put(Answered(message, response))
                return
            call = method.future(message.request, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            self._events.put(Failed(message, failure_of_call(error)))
            return
        except ValueError as error:
            raise _closed_or(error) from None
        self._calls[call] = link
        call.add_done_callback(lambda done: self._events.put(_Done(done, message)))

    def _gather(self, call: Any, message: Message, request: pb.InspectRequest) -> None:
        """Reads an answer of many messages, blocking: a call has but one such message, which so is always alone."""
        gathering = Gathering(request)
        for part in call:
            if not gathering.add(part):
                break
        self._events.put(Answered(message, gathering))

    def read_inputs(self, count: int) -> None:
        """See `Wire`. A client for threads takes no async iterables."""
        raise NotImplementedError

    async def wait(self, seconds: float | None) -> Event | None:
        """See `Wire`."""
        try:
            event = self._events.get(timeout=seconds) if seconds != 0 else self._events.get_nowait()
        except queue.Empty:
            return None
        if isinstance(event, _Done):
            del self._calls[event.call]  # it holds the response
            event = _end_of(event)
        if isinstance(event, Failed):
            if self._is_client_closed():
                raise ClientClosedError("the client was closed during the call")
            if self._diagnosis is not None:
                event = replace(event, failure=self._diagnosis.explain(event.failure))
        return event

    async def aclose(self) -> None:
        """See `Wire`."""
        for call in self._calls:
            call.cancel()
        self._calls.clear()


@dataclass(frozen=True, slots=True)
class _Done:
    """A call that is over, on its way from gRPC's thread to the caller's."""

    call: Any
    message: Message


def _closed_or(error: ValueError) -> Exception:
    """A closed channel is a ValueError to gRPC, known only by its text."""
    return ClientClosedError() if "closed" in str(error) else error


def _end_of(done: _Done) -> Event:
    """What became of a call that is over."""
    if done.call.code() is grpc.StatusCode.OK:
        return Answered(done.message, done.call.result())
    return Failed(done.message, failure_of_call(done.call))
