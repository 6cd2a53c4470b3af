"""One connection: its frames in, what they may not do, and its end."""

import asyncio
import logging
import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from encserve_server.http2 import frames
from encserve_server.http2.calls import Call
from encserve_server.http2.frames import ConnectionFault, ErrorCode, Frame, FrameReader, StreamFault, frame
from encserve_server.http2.headers import MAX_HEADER_LIST_BYTES, UNSUPPORTED_MEDIA_TYPE, HeaderReader, read_head
from encserve_server.http2.incoming import WINDOW_BYTES
from encserve_server.http2.outgoing import Outgoing

logger = logging.getLogger(__name__)

# How far all callers of a connection may be ahead together, and after how much they are told that they may send more.
_CONNECTION_WINDOW_BYTES = 64 * 1024 * 1024
_CONNECTION_CREDIT_BYTES = 8 * 1024 * 1024
# A header block in several frames; far more than a list of the size that is allowed can take.
_MOST_BLOCK_BYTES = 64 * 1024
# What may wait in the transport before data is held back, and before the other end is taken for one that never reads.
_HIGH_WATER_BYTES = 1024 * 1024
_UNREAD_BYTES = 16 * 1024 * 1024
_HANDSHAKE_SECONDS = 20.0
# How long a client may take to learn that it should not begin new calls here.
_GOAWAY_SECONDS = 1.0
# How long the last octets may take to leave.
_CLOSE_SECONDS = 5.0
_MOST_GOAWAY_TEXT_BYTES = 500
_GOAWAY_PING = b"goodbye!"

Lookup = Callable[[str], "grpc.RpcMethodHandler[Any, Any] | None"]


@dataclass(slots=True)
class Limits:
    """What a connection may do.

    Attributes:
        max_message_bytes: The largest message that is taken.
        max_calls: How many calls may be open; more are refused, and clients wait or go elsewhere.
        max_age_seconds: How long it may last, give or take a tenth; None for ever.
    """

    max_message_bytes: int
    max_calls: int
    max_age_seconds: float | None = None


@dataclass(slots=True)
class Shared:
    """What all connections of a server have in common.

    Attributes:
        lookup: A path's handler.
        limits: What each may do.
        open: Those that are open.
        idle: Called when one may have become idle, or has gone.
    """

    lookup: Lookup
    limits: Limits
    idle: Callable[[], None]
    open: "set[Connection]" = field(default_factory=set)


class Connection(asyncio.Protocol):
    """A client's connection, from its first octet to its last."""

    def __init__(self, shared: Shared) -> None:
        """Takes what connections share."""
        self.loop = asyncio.get_running_loop()
        self.peer = ""
        self._shared = shared
        self._transport: asyncio.Transport = None  # type: ignore[assignment] # until there is one
        self._reader = FrameReader()
        self._headers = HeaderReader()
        self._outgoing = Outgoing()
        self._calls: dict[int, Call] = {}
        self._last_stream = 0
        self._block: tuple[Frame, bytearray] | None = None  # a header block that goes on in the next frame
        self._owed = 0  # bytes of the connection's window that are to be given back
        self._control: list[bytes] = []
        self._settled = False  # whether the client's settings have come
        self._paused = False
        self._pumping = False
        self._leaving = False  # the client knows that it should begin no calls
        self._last_taken: int | None = None  # the last stream that is still answered, once that is settled
        self._timers: list[asyncio.TimerHandle] = []

    # ── asyncio.Protocol ─────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greets the client with our settings."""
        self._transport = cast("asyncio.Transport", transport)
        _keep_alive(transport.get_extra_info("socket"))
        self.peer = _peer(transport.get_extra_info("peername"))
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self._shared.open.add(self)
        limits = self._shared.limits
        self._control.append(
            frames.settings_frame(
                {
                    frames.MAX_CONCURRENT_STREAMS: limits.max_calls,
                    frames.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
                    frames.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
                }
            )
        )
        self._grow_window(0, _CONNECTION_WINDOW_BYTES - frames.FIRST_WINDOW)
        self._timers.append(self.loop.call_later(_HANDSHAKE_SECONDS, self._check_settled))
        if limits.max_age_seconds is not None:
            age = limits.max_age_seconds * random.uniform(0.9, 1.1)  # noqa: S311 - so that clients do not all come back at once
            self._timers.append(self.loop.call_later(age, self.leave))
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Takes what has come."""
        try:
            for it in self._reader.feed(data):
                self._take(it)
        except ConnectionFault as fault:
            self._fail(fault)
        except Exception:
            logger.exception("unexpected error in a connection")
            self._fail(ConnectionFault(ErrorCode.INTERNAL_ERROR, "internal error"))
        else:
            self._flush()

    def eof_received(self) -> bool:
        """The client sends nothing more, and as with gRPC's own server its calls end."""
        return False

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._paused = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._paused = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, and with it its calls."""
        del exc
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._shared.open.discard(self)
        for call in list(self._calls.values()):
            call.cancel()
        self._shared.idle()

    # ── For the server ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def n_calls(self) -> int:
        """How many calls are open."""
        return len(self._calls)

    def leave(self) -> None:
        """Asks the client to begin new calls elsewhere; those that are on their way here are still taken.

        Two GOAWAYs, as RFC 9113, section 6.8 has it: the last call's number is only known when the client has read the
        first one.
        """
        if self._leaving or self._transport.is_closing():
            return
        self._leaving = True
        self._control.append(_goaway(frames.LARGEST_WINDOW, ErrorCode.NO_ERROR))
        self._control.append(frame(frames.PING, 0, 0, _GOAWAY_PING))
        self._timers.append(self.loop.call_later(_GOAWAY_SECONDS, self._left))
        self._flush()

    def cancel_calls(self) -> None:
        """Ends every call, and the connection with them."""
        for call in list(self._calls.values()):
            call.end(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
        self._control.append(_goaway(self._last_stream, ErrorCode.NO_ERROR))
        self._flush()
        self._hang_up()

    # ── For calls: calls.Link ────────────────────────────────────────────────────────────────────────────────────────

    def send(self, stream: int, data: list[bytes], sent: Callable[[], None] | None) -> None:
        """Sends data, and calls `sent` when the last of it is on its way."""
        self._outgoing.put(stream, data, sent)
        if not self._pumping:
            self._flush()

    def send_frame(self, stream: int, it: bytes, sent: Callable[[], None] | None) -> None:
        """Sends a whole frame after that."""
        self._outgoing.put_frame(stream, it, sent)
        if not self._pumping:
            self._flush()

    def discard(self, stream: int) -> None:
        """Forgets what is still to be sent."""
        self._outgoing.clear(stream)

    def credit(self, stream: int, more: int) -> None:
        """Lets the caller send more."""
        self._grow_window(stream, more)
        if not self._pumping:
            self._flush()

    def close(self, call: Call, code: ErrorCode | None) -> None:
        """The call is over; a code resets the stream."""
        self._outgoing.drop(call.stream)
        if self._calls.pop(call.stream, None) is None:
            return
        if code is not None:
            self._reset(call.stream, code)
            if not self._pumping:
                self._flush()
        if not self._calls:
            self.loop.call_soon(self._hang_up_if_left)  # its last frame is about to be written
            self._shared.idle()

    # ── Frames in ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, it: Frame) -> None:
        """One frame."""
        if self._block is not None and it.kind != frames.CONTINUATION:
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, f"a header block is interrupted by a frame of kind {it.kind}"
            )
        if not self._settled and it.kind != frames.SETTINGS:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"the first frame must be SETTINGS; was of kind {it.kind}")
        take = _TAKE.get(it.kind)
        if take is None:  # of an extension (section 5.5)
            return
        needs_stream, method = take
        if needs_stream is not None and bool(it.stream) != needs_stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of kind {it.kind} is on stream {it.stream}")
        try:
            method(self, it)
        except StreamFault as fault:
            logger.debug("a stream broke the protocol: %s", fault, extra={"peer": self.peer})
            call = self._calls.get(it.stream)
            if call is not None:
                call.cancel()
            self._reset(it.stream, fault.code)

    def _take_data(self, it: Frame) -> None:
        size = len(it.payload)
        data = frames.unpadded(it)
        self._owed += size
        if self._owed >= _CONNECTION_CREDIT_BYTES:
            self._grow_window(0, self._owed)
            self._owed = 0
        call = self._calls.get(it.stream)
        if call is None:
            self._check_not_idle(it)
            return  # of a call that has ended
        if not call.half_open:
            raise StreamFault(ErrorCode.STREAM_CLOSED, f"stream {it.stream} has data after its end")
        call.receive(data, size, ended=bool(it.flags & frames.END_STREAM))

    def _take_headers(self, it: Frame) -> None:
        block = frames.unpadded(it)
        if it.flags & frames.END_HEADERS:
            self._begin(it, block)
        else:
            self._block = (it, bytearray(block))

    def _take_continuation(self, it: Frame) -> None:
        if self._block is None or self._block[0].stream != it.stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {it.stream} goes on with headers that never began")
        first, block = self._block
        block += it.payload
        if len(block) > _MOST_BLOCK_BYTES or not it.payload:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"a header block of {len(block)} bytes, the last frame of {len(it.payload)}",
            )
        if it.flags & frames.END_HEADERS:
            self._block = None
            self._begin(first, bytes(block))

    def _begin(self, it: Frame, block: bytes) -> None:
        """A call begins, or what it sends ends with headers."""
        fields = self._headers.read(block)  # of refused calls too: later blocks refer to it
        stream, ended = it.stream, bool(it.flags & frames.END_STREAM)
        call = self._calls.get(stream)
        if call is not None:
            if not call.half_open or not ended:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"stream {stream} has headers where none can be")
            call.receive(b"", 0, ended=True)
            return
        if stream <= self._last_stream or stream % 2 == 0:
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, f"stream {stream} cannot begin after stream {self._last_stream}"
            )
        self._last_stream = stream
        if self._last_taken is not None or len(self._calls) >= self._shared.limits.max_calls:
            # Nothing of it was looked at, so that every client may send it again.
            self._reset(stream, ErrorCode.REFUSED_STREAM)
            return
        head = read_head(fields)
        if not head.is_grpc:
            self._control.append(
                frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, UNSUPPORTED_MEDIA_TYPE)
            )
            if not ended:
                self._reset(stream, ErrorCode.NO_ERROR)
            return
        self._outgoing.open(stream)
        call = Call(self, stream, head, self._shared.lookup(head.path), self._shared.limits.max_message_bytes)
        self._calls[stream] = call
        call.begin()
        if ended:
            call.receive(b"", 0, ended=True)

    def _take_reset(self, it: Frame) -> None:
        code = frames.read_number(it)
        call = self._calls.get(it.stream)
        if call is None:
            self._check_not_idle(it)
        else:
            logger.debug("a call was reset", extra={"peer": self.peer, "code": code})
            call.cancel()

    def _take_settings(self, it: Frame) -> None:
        if it.flags & frames.ACK:
            if it.payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement has settings")
            return
        for name, value in frames.read_settings(it.payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                self._outgoing.set_first_window(value)
            elif name == frames.MAX_FRAME_SIZE:
                self._outgoing.set_frame_bytes(value)
            elif name == frames.ENABLE_PUSH and value > 1:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH must be 0 or 1; was {value}")
        self._settled = True
        self._control.append(frame(frames.SETTINGS, frames.ACK, 0))

    def _take_ping(self, it: Frame) -> None:
        if len(it.payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a ping has {len(it.payload)} bytes, not 8")
        if not it.flags & frames.ACK:
            self._control.append(frame(frames.PING, frames.ACK, 0, it.payload))
        elif it.payload == _GOAWAY_PING:
            self._left()

    def _take_window_update(self, it: Frame) -> None:
        more = frames.read_number(it) & frames.LARGEST_WINDOW
        if it.stream and it.stream not in self._calls:
            self._check_not_idle(it)
            return
        if not more:
            fault = StreamFault if it.stream else ConnectionFault
            raise fault(ErrorCode.PROTOCOL_ERROR, f"the window of stream {it.stream} is to grow by 0")
        self._outgoing.grow(it.stream, more)

    def _take_priority(self, it: Frame) -> None:
        if len(it.payload) != 5:
            raise StreamFault(ErrorCode.FRAME_SIZE_ERROR, f"a priority has {len(it.payload)} bytes, not 5")

    def _take_push(self, it: Frame) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a client cannot push (stream {it.stream})")

    def _take_goaway(self, it: Frame) -> None:
        """The client will begin nothing more; what it has begun is answered."""

    def _check_not_idle(self, it: Frame) -> None:
        """A frame on a stream without a call is late; on one that never was, it is wrong."""
        if it.stream > self._last_stream or it.stream % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of kind {it.kind} on idle stream {it.stream}")

    # ── Out, and the end ─────────────────────────────────────────────────────────────────────────────────────────────

    def _grow_window(self, stream: int, more: int) -> None:
        self._control.append(frame(frames.WINDOW_UPDATE, 0, stream, struct.pack(">I", more)))

    def _reset(self, stream: int, code: ErrorCode) -> None:
        self._control.append(frame(frames.RST_STREAM, 0, stream, struct.pack(">I", code)))

    def _flush(self) -> None:
        """Writes what can be written now."""
        if self._pumping:  # by whoever is below us on the stack
            return
        transport = self._transport
        self._pumping = True
        try:
            while not transport.is_closing():
                # What a call's end adds to these while it is taken comes after its last frame.
                ready: list[bytes | memoryview] = [*self._control]
                self._control.clear()
                if not self._paused:
                    ready += self._outgoing.take(_HIGH_WATER_BYTES)
                if not ready:
                    break
                transport.writelines(ready)
        finally:
            self._pumping = False
        if self._paused and transport.get_write_buffer_size() > _UNREAD_BYTES:
            logger.warning("a client asks and never reads", extra={"peer": self.peer})
            transport.abort()

    def _check_settled(self) -> None:
        if not self._settled:
            self._fail(ConnectionFault(ErrorCode.SETTINGS_TIMEOUT, f"no settings within {_HANDSHAKE_SECONDS:.0f} s"))

    def _fail(self, fault: ConnectionFault) -> None:
        """Ends the connection, and says why."""
        logger.debug("a connection broke the protocol: %s", fault, extra={"peer": self.peer})
        self._control.append(_goaway(self._last_stream, fault.code, str(fault)))
        self._flush()
        for call in list(self._calls.values()):
            call.cancel()
        self._hang_up()

    def _left(self) -> None:
        """The client has read that it should begin nothing more."""
        if self._last_taken is None:
            self._last_taken = self._last_stream
            self._control.append(_goaway(self._last_stream, ErrorCode.NO_ERROR))
            self._flush()
            self._hang_up_if_left()

    def _hang_up_if_left(self) -> None:
        if self._last_taken is not None and not self._calls:
            self._hang_up()

    def _hang_up(self) -> None:
        """Closes the connection once everything is written, and in any case soon."""
        if not self._transport.is_closing():
            self._transport.close()
            self._timers.append(self.loop.call_later(_CLOSE_SECONDS, self._transport.abort))


def _goaway(last_stream: int, code: ErrorCode, text: str = "") -> bytes:
    return frame(frames.GOAWAY, 0, 0, struct.pack(">II", last_stream, code) + text.encode()[:_MOST_GOAWAY_TEXT_BYTES])


def _keep_alive(connected: Any) -> None:
    """Has the system notice clients that vanish, within two minutes."""
    if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):  # macOS lacks the first
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _peer(address: Any) -> str:
    """An address as gRPC writes it."""
    if not isinstance(address, tuple):
        return f"unix:{address}"
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


# What takes which frame, and whether it must be on a stream (True), on none (False), or on either (None).
_TAKE: dict[int, tuple[bool | None, Callable[[Connection, Frame], None]]] = {
    frames.DATA: (True, Connection._take_data),
    frames.HEADERS: (True, Connection._take_headers),
    frames.CONTINUATION: (True, Connection._take_continuation),
    frames.RST_STREAM: (True, Connection._take_reset),
    frames.PRIORITY: (True, Connection._take_priority),
    frames.PUSH_PROMISE: (True, Connection._take_push),
    frames.SETTINGS: (False, Connection._take_settings),
    frames.PING: (False, Connection._take_ping),
    frames.GOAWAY: (False, Connection._take_goaway),
    frames.WINDOW_UPDATE: (None, Connection._take_window_update),
}
