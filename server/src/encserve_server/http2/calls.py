"""One call: it collects what the caller sends, runs the handler, and ends with a status."""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

import grpc

from encserve_server.http2.context import PlainContext
from encserve_server.http2.frames import END_STREAM, ErrorCode, header_frames
from encserve_server.http2.headers import NO_TABLE, RESPONSE_HEAD, Metadata, RequestHead, write_metadata, write_status
from encserve_server.http2.incoming import ENCODINGS, Incoming, MessageFault

logger = logging.getLogger(__name__)

_PLAIN = b"\0"  # the flag of a message that is not compressed
_NOT_FOUND = "Method not found!"  # gRPC's own words, here and below
_NOT_READABLE = "Exception deserializing request!"
# How much later a deadline is here than for its caller: what it takes to arrive, and grpc-timeout has few digits.
_SLACK_SECONDS = 0.01
_SLACK_SHARE = 0.02


class Link(Protocol):
    """What a call needs of its connection."""

    loop: asyncio.AbstractEventLoop
    peer: str

    def send(self, stream: int, data: list[bytes], sent: Callable[[], None] | None) -> None:
        """Sends data, and calls `sent` when the last of it is on its way."""

    def send_frame(self, stream: int, it: bytes, sent: Callable[[], None] | None) -> None:
        """Sends a whole frame after that."""

    def discard(self, stream: int) -> None:
        """Forgets what is still to be sent."""

    def credit(self, stream: int, more: int) -> None:
        """Lets the caller send more."""

    def close(self, call: "Call", code: ErrorCode | None) -> None:
        """The call is over; a code resets the stream."""


class Call(PlainContext):
    """A call, which is also what its handler knows as its context."""

    def __init__(
        self, link: Link, stream: int, head: RequestHead, handler: "grpc.RpcMethodHandler[Any, Any] | None", limit: int
    ) -> None:
        """Takes its connection, what it began with, its handler if there is one, and the most bytes of a message."""
        super().__init__()
        self.stream = stream
        self._link = link
        self._head = head
        self._handler: Any = handler
        self._incoming = Incoming(limit, head.encoding)
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = math.inf
        self._reading: asyncio.Future[None] | None = None
        self._writing: set[asyncio.Future[None]] = set()
        self._head_queued = False
        self._head_left = False
        self._stopped = False  # the handler was cancelled
        self._over = False  # nothing more can be sent
        self._flushing = False  # what was to be sent is still on its way
        self._closed = False  # nothing more happens at all
        self._done_callbacks: list[Callable[[Any], None]] = []

    # ── From the connection ──────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """To be called once, when the head is there."""
        head = self._head
        if head.problem is not None:
            self._finish(*head.problem)
        elif self._handler is None:
            self._finish(grpc.StatusCode.UNIMPLEMENTED, _NOT_FOUND)
        elif head.encoding not in ENCODINGS:
            self._finish(
                grpc.StatusCode.UNIMPLEMENTED,
                f"grpc-encoding must be one of {', '.join(sorted(ENCODINGS))}; was {head.encoding[:100]!r}",
            )
        else:
            if head.timeout_seconds < math.inf:
                loop = self._link.loop
                self._deadline = loop.time() + head.timeout_seconds
                self._timer = loop.call_at(self._deadline, self._expire)
            if self._handler.request_streaming:
                self._run()

    def receive(self, data: bytes, window_bytes: int, *, ended: bool) -> None:
        """A frame of data, which used so much of the stream's window."""
        incoming = self._incoming
        if self._over:
            incoming.ended |= ended
            return
        try:
            incoming.feed(data, window_bytes)
            if ended:
                incoming.end()
        except MessageFault as fault:
            self.end(fault.code, str(fault))
            return
        if more := incoming.credit():
            self._link.credit(self.stream, more)
        if self._handler.request_streaming:
            if incoming.messages or incoming.ended:
                _wake(self._reading)
        elif ended and len(incoming.messages) != 1:
            self._finish(
                grpc.StatusCode.UNIMPLEMENTED, f"the method takes one message; there were {len(incoming.messages)}"
            )
        elif ended:
            self._run()
        elif len(incoming.messages) > 1:
            self._finish(grpc.StatusCode.UNIMPLEMENTED, "the method takes one message; there were more")

    def cancel(self) -> None:
        """The caller has gone. One that goes about when its deadline passes says no more than that, and is expired."""
        if not self._over:
            remaining = self.time_remaining()
            expired = remaining is not None and remaining <= _SLACK_SECONDS + _SLACK_SHARE * self._head.timeout_seconds
            self._code = grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED
        self._over, self._flushing = True, False
        self._drop_unsent()
        if self._task is not None:
            self._stop(self._task)  # it closes the call when it has ended
        else:
            self._close(None)

    def end(self, code: grpc.StatusCode, text: str) -> None:
        """The server ends the call with a status."""
        if not self._over:
            self._cut(code, text)
        if self._task is not None:
            self._stop(self._task)

    @property
    def half_open(self) -> bool:
        """Whether the caller could still send."""
        return not self._incoming.ended

    # ── What the handler sees: grpc.aio.ServicerContext ──────────────────────────────────────────────────────────────

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF."""
        incoming = self._incoming
        while not incoming.messages:
            if incoming.ended:
                return grpc.aio.EOF
            self._reading = self._link.loop.create_future()
            try:
                await self._reading
            finally:
                self._reading = None
        try:
            data = incoming.take()
        except MessageFault as fault:
            await self.abort(fault.code, str(fault))
        if not self._over and (more := incoming.credit()):
            self._link.credit(self.stream, more)
        deserialize = self._handler.request_deserializer
        if deserialize is None:
            return data
        try:
            return deserialize(data)
        except Exception as error:
            logger.debug("a message cannot be read: %s", error, extra={"peer": self._link.peer})
            await self.abort(grpc.StatusCode.INTERNAL, _NOT_READABLE)

    async def write(self, message: Any) -> None:
        """Sends a message, and waits until it is on its way."""
        self._check_open()
        sent = self._link.loop.create_future()
        self._writing.add(sent)
        try:
            self._send_message(message, lambda: _wake(sent))
            await sent
        finally:
            self._writing.discard(sent)

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Sends what comes before the first message."""
        self._check_open()
        self._send_head(initial_metadata)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> Any:
        """Ends the call with an error, without what is still to be sent; raises AbortError."""
        if not self._over:
            self.set_trailing_metadata(trailing_metadata)
            self._cut(code, details)
        raise grpc.aio.AbortError("Locally aborted.")

    async def abort_with_status(self, status: Any) -> Any:
        """The same, from one object."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def time_remaining(self) -> float | None:  # type: ignore[override]
        """Seconds until the caller's deadline; None if it has none."""
        return None if self._deadline == math.inf else max(self._deadline - self._link.loop.time(), 0.0)

    def invocation_metadata(self) -> Metadata:  # type: ignore[override]
        """The caller's own fields."""
        return self._head.metadata

    def peer(self) -> str:
        """The caller's address, as gRPC writes it."""
        return self._link.peer

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """To be called with this context when the call is over."""
        self._done_callbacks.append(callback)

    def cancelled(self) -> bool:
        """Whether the caller has gone or the deadline has passed."""
        return self._over and self._code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)

    def done(self) -> bool:
        """Whether the call is over."""
        return self._over

    # ── Running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        self._task = self._link.loop.create_task(self._handle())
        # Not at the end of the coroutine: a task that is cancelled before its first step never enters it.
        self._task.add_done_callback(self._has_run)

    def _stop(self, task: "asyncio.Task[None]") -> None:
        """Cancels the handler, once: what it does at its end is not cancelled again."""
        if not self._stopped:
            self._stopped = True
            task.cancel()

    def _has_run(self, task: "asyncio.Task[None]") -> None:
        del task
        self._task = None
        if self._over and not self._flushing:
            self._close(None)

    async def _handle(self) -> None:
        """Runs the handler; whatever it does, the call ends with a status."""
        try:
            await self._answer()
            if not self._over:
                self._finish(self._code, self._details)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            if not self._over:  # not the caller: something in the handler
                self._cut(grpc.StatusCode.CANCELLED, "")
        except Exception as error:
            if self._over:  # mostly that it could not send any more
                logger.debug("error in a handler whose call is over", exc_info=error)
            else:
                logger.error("unexpected error in a handler", exc_info=error)
                self._cut(grpc.StatusCode.UNKNOWN, "the handler failed; the server's log says why")

    async def _answer(self) -> None:
        """Gives the handler its request, and sends what it returns or yields."""
        handler = self._handler
        if handler.request_streaming:
            request: Any = self._requests()
        else:
            request = await self.read()
        method = (
            (handler.stream_stream if handler.request_streaming else handler.unary_stream)
            if handler.response_streaming
            else (handler.stream_unary if handler.request_streaming else handler.unary_unary)
        )
        answer = method(request, self)
        if isinstance(answer, AsyncGenerator):
            async with contextlib.aclosing(answer):
                async for message in answer:
                    await self.write(message)
            return
        message = await answer
        if not handler.response_streaming and not self._over:
            self._send_message(message, None)

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def _expire(self) -> None:
        """The caller's deadline has passed."""
        self._timer = None
        if self._flushing:  # an answer that nobody has read
            self._close(ErrorCode.CANCEL)
        self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    # ── Sending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_open(self) -> None:
        if self._over:
            raise grpc.aio.InternalError("the call is over; nothing can be sent any more")

    def _send_head(self, metadata: Any = ()) -> None:
        if not self._head_queued:
            block = RESPONSE_HEAD + write_metadata(metadata or ())
            self._head_queued = True
            self._link.send_frame(self.stream, header_frames(0, self.stream, block), self._sent_head)

    def _sent_head(self) -> None:
        self._head_left = True

    def _send_message(self, message: Any, sent: Callable[[], None] | None) -> None:
        serialize = self._handler.response_serializer
        data: bytes = message if serialize is None else serialize(message)
        self._send_head()
        self._link.send(self.stream, [_PLAIN + len(data).to_bytes(4, "big"), data], sent)

    def _cut(self, code: grpc.StatusCode, text: str) -> None:
        """Ends the call at once, without what is still to be sent."""
        self._drop_unsent()
        self._head_queued = self._head_left
        self._finish(code, text)

    def _drop_unsent(self) -> None:
        """Nothing of what is to be sent will be; tasks of the handler that wait for it do so no longer."""
        self._link.discard(self.stream)
        for waiting in (self._reading, *self._writing):
            if waiting is not None:
                waiting.cancel()

    def _finish(self, code: grpc.StatusCode, text: str) -> None:
        """Sends the status; what is to be sent before it still is."""
        block = NO_TABLE if self._head_queued else RESPONSE_HEAD
        block += write_status(code.value[0], text) + self._trailer_block
        self._over, self._flushing = True, True
        self._code, self._details = code, text
        last = header_frames(END_STREAM, self.stream, block)
        self._link.send_frame(self.stream, last, self._sent_all)

    def _sent_all(self) -> None:
        """The status is on its way. A caller that is still sending is told to stop (RFC 9113, section 8.1)."""
        self._close(ErrorCode.NO_ERROR if self.half_open else None)

    def _close(self, code: ErrorCode | None) -> None:
        """The call holds nothing of its connection any more."""
        if self._closed:
            return
        self._closed = self._over = True
        self._flushing = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._link.close(self, code)
        callbacks, self._done_callbacks = self._done_callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # the connection goes on, whatever it is
                logger.exception("unexpected error in a callback of a call")


def _wake(waiting: "asyncio.Future[None] | None") -> None:
    """Ends a wait, if anybody still waits."""
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
