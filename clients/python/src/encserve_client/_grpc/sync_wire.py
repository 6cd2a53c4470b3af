"""Sends and receives the messages of one call with gRPC's blocking API and futures; see `Wire`. Never suspends."""

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from encserve_client._grpc.channel import Connection, event_of_reply, parse_reply
from encserve_client._grpc.diagnosis import Diagnosis
from encserve_client._grpc.metadata import Metadata
from encserve_client._logic.failures import UNREADABLE_REPLY, failure_of_call
from encserve_client._logic.inspecting import InspectAssembler
from encserve_client._logic.planning import Message
from encserve_client._logic.wire import Answered, Event, Failed, Rpc
from encserve_client.exceptions import ClientClosedError
from encserve_proto.v1 import encoder_pb2 as pb


class SyncWire:
    """The I/O of one call, in the caller's thread. The threads of gRPC only put events into `_events`."""

    def __init__(
        self,
        open_connection: Callable[[], Connection],
        metadata: Metadata,
        is_client_closed: Callable[[], bool],
        diagnosis: Diagnosis | None = None,
    ) -> None:
        self._open_connection = open_connection
        self._diagnosis = diagnosis
        self._metadata = metadata
        self._is_client_closed = is_client_closed
        self._events: queue.SimpleQueue[Event | _FinishedCall | None] = queue.SimpleQueue()  # None: client closed
        # The calls that have not ended, each with its connection: the reference keeps the channel open.
        self._calls: dict[Any, Connection] = {}

    now = staticmethod(time.monotonic)

    def start(self, rpc: Rpc, message: Message, timeout_seconds: float | None, *, alone: bool) -> None:
        """See `Wire`. If `alone`, the call blocks, because then gRPC needs no polling thread."""
        connection = self._open_connection()
        method = connection.methods[rpc]
        options = {"timeout": timeout_seconds, "metadata": self._metadata}
        try:
            if isinstance(request := message.request, pb.InspectRequest):
                with delayed_interrupt():
                    call = method(request, **options)
                    self._calls[call] = connection  # `aclose` cancels the call if `_assemble` raises
                self._assemble(call, message, request)
            elif alone:
                self._events.put(event_of_reply(message, method(request, **options)))
            else:
                with delayed_interrupt():
                    call = method.future(request, **options)
                    self._calls[call] = connection
                    call.add_done_callback(lambda done: self._events.put(_FinishedCall(done, message)))
        except grpc.RpcError as error:
            self._events.put(Failed(message, failure_of_call(error)))
        except DecodeError:
            self._events.put(Failed(message, UNREADABLE_REPLY))
        except ValueError as error:
            raise _translate_error(error) from None

    def _assemble(self, call: Any, message: Message, request: pb.InspectRequest) -> None:
        """Read all messages of an answer to Inspect. Blocks: an Inspect call sends only this request."""
        assembler = InspectAssembler(request)
        for part in call:
            if not assembler.add(parse_reply(request, part)):
                break
        self._events.put(Answered(message, assembler))

    def read_inputs(self, count: int) -> None:
        """See `Wire`. A client for threads takes no async iterables."""
        raise NotImplementedError

    def has_event(self) -> bool:
        """See `Wire`."""
        return not self._events.empty()

    async def wait(self, seconds: float | None) -> Event | None:
        """See `Wire`."""
        try:
            event = self._events.get(timeout=seconds) if seconds != 0 else self._events.get_nowait()
        except queue.Empty:
            return None
        if isinstance(event, _FinishedCall):
            del self._calls[event.call]  # the call holds the response in memory
            event = _event_of(event)
        if event is None:
            raise ClientClosedError("the client was closed during the call")
        if isinstance(event, Failed):
            if self._is_client_closed():
                raise ClientClosedError("the client was closed during the call")
            if self._diagnosis is not None:
                event = replace(event, failure=self._diagnosis.explain(event.failure))
        return event

    def end_wait(self) -> None:
        """Make `wait` raise ClientClosedError, even while `wait` waits before a retry.

        Any thread may call `end_wait`.
        """
        self._events.put(None)

    async def aclose(self) -> None:
        """See `Wire`."""
        for call in self._calls:
            call.cancel()
        self._calls.clear()


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block.

    If KeyboardInterrupt interrupts gRPC while a call starts, gRPC never notices the end of this call. Then
    `Channel.close` waits forever.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield  # only the main thread runs signal handlers; a handler that is not in Python cannot be replaced
        return
    arrived: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            signal.raise_signal(signal.SIGINT)


@dataclass(frozen=True, slots=True)
class _FinishedCall:
    """A call that has ended. A thread of gRPC passes the call to the caller's thread."""

    call: Any
    message: Message


def _translate_error(error: ValueError) -> Exception:
    """Return ClientClosedError for a closed channel, otherwise `error`. gRPC raises ValueError in both cases."""
    return ClientClosedError() if "closed" in str(error) else error


def _event_of(done: _FinishedCall) -> Event:
    if done.call.code() is grpc.StatusCode.OK:
        return event_of_reply(done.message, done.call.result())
    return Failed(done.message, failure_of_call(done.call))
