"""What one client's frames mean, and what they may not be (RFC 9113, sections 5 and 6)."""

import logging
from collections.abc import Callable
from typing import Protocol

from encserve_server.http2 import frames
from encserve_server.http2.calls import Call
from encserve_server.http2.frames import ConnectionFault, ErrorCode, Frame, FrameReader, StreamFault, frame
from encserve_server.http2.headers import UNSUPPORTED_MEDIA_TYPE, HeaderReader, RequestHead
from encserve_server.http2.outgoing import Outgoing

logger = logging.getLogger(__name__)

# How much a client may send before it is told that it may send more, and how often it is. Each call has a window of its
# own, so this is given back at once: small, it would let calls that are half sent keep each other from their ends.
CONNECTION_WINDOW_BYTES = 64 * 1024 * 1024
_CREDIT_BYTES = CONNECTION_WINDOW_BYTES // 8
# A header block in several frames; far more than a list of the size that is allowed can take.
_MOST_BLOCK_BYTES = 64 * 1024


class Host(Protocol):
    """What the intake needs of its connection."""

    calls: dict[int, Call]
    outgoing: Outgoing
    peer: str

    def post(self, it: bytes) -> None:
        """Sends a frame of the connection's own, soon."""

    def open_call(self, stream: int, head: RequestHead) -> Call | None:
        """A new call, or None if no more are taken."""

    def pinged(self, payload: bytes) -> None:
        """A ping of ours has come back."""


class Intake:
    """Takes a connection's frames in their order.

    Attributes:
        last_stream: The last call that has begun.
        settled: Whether the client's settings have come.
    """

    def __init__(self, host: Host) -> None:
        """Takes the connection."""
        self._host = host
        self._reader = FrameReader()
        self._headers = HeaderReader()
        self._block: tuple[Frame, bytearray] | None = None  # a header block that goes on in the next frame
        self._allowed = CONNECTION_WINDOW_BYTES  # bytes that the client may send
        self.last_stream = 0
        self.settled = False

    def feed(self, data: bytes) -> None:
        """Takes what has come.

        Raises:
            ConnectionFault: The client broke the protocol.
        """
        for it in self._reader.feed(data):
            self._take(it)

    def _take(self, it: Frame) -> None:
        """One frame."""
        if self._block is not None and it.kind != frames.CONTINUATION:
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, f"a header block is interrupted by a frame of kind {it.kind}"
            )
        if not self.settled and it.kind != frames.SETTINGS:
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
            logger.debug("a stream broke the protocol: %s", fault, extra={"peer": self._host.peer})
            call = self._host.calls.get(it.stream)
            if call is not None:
                call.cancel()
            self._host.post(frames.reset(it.stream, fault.code))

    def _take_data(self, it: Frame) -> None:
        size = len(it.payload)
        data = frames.unpadded(it)
        self._allowed -= size
        if self._allowed < 0:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, f"{-self._allowed} bytes over the window of {CONNECTION_WINDOW_BYTES}"
            )
        if (owed := CONNECTION_WINDOW_BYTES - self._allowed) >= _CREDIT_BYTES:
            self._host.post(frames.window_update(0, owed))
            self._allowed += owed
        call = self._host.calls.get(it.stream)
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
        if len(block) > _MOST_BLOCK_BYTES or not (it.payload or it.flags & frames.END_HEADERS):
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"a header block of {len(block)} bytes, the last frame of {len(it.payload)}",
            )
        if it.flags & frames.END_HEADERS:
            self._block = None
            self._begin(first, bytes(block))

    def _begin(self, it: Frame, block: bytes) -> None:
        """A call begins, or what it sends ends with headers."""
        head = self._headers.read_head(block)  # of refused calls too: later blocks refer to it
        stream, ended = it.stream, bool(it.flags & frames.END_STREAM)
        call = self._host.calls.get(stream)
        if call is not None:
            if not call.half_open:
                raise StreamFault(ErrorCode.STREAM_CLOSED, f"stream {stream} has headers after its end")
            if not ended:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"stream {stream} has headers where none can be")
            call.receive(b"", 0, ended=True)
            return
        if stream <= self.last_stream and ended and not head.path:
            self._check_not_idle(it)
            return  # the end of what was sent to a call that has ended
        if stream <= self.last_stream or stream % 2 == 0:
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, f"stream {stream} cannot begin after stream {self.last_stream}"
            )
        self.last_stream = stream
        if not head.is_grpc:
            flags = frames.END_HEADERS | frames.END_STREAM
            self._host.post(frame(frames.HEADERS, flags, stream, UNSUPPORTED_MEDIA_TYPE))
            if not ended:
                self._host.post(frames.reset(stream, ErrorCode.NO_ERROR))
            return
        call = self._host.open_call(stream, head)
        if call is None:
            # Nothing of it was looked at, so that every client may send it again.
            self._host.post(frames.reset(stream, ErrorCode.REFUSED_STREAM))
            return
        call.begin()
        if ended:
            call.receive(b"", 0, ended=True)

    def _take_reset(self, it: Frame) -> None:
        code = frames.read_number(it)
        call = self._host.calls.get(it.stream)
        if call is None:
            self._check_not_idle(it)
        else:
            logger.debug("a call was reset", extra={"peer": self._host.peer, "code": code})
            call.cancel()

    def _take_settings(self, it: Frame) -> None:
        if it.flags & frames.ACK:
            if it.payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement has settings")
            return
        for name, value in dict(frames.read_settings(it.payload)).items():  # of several of a name the last one holds
            if name == frames.INITIAL_WINDOW_SIZE:
                self._host.outgoing.set_first_window(value)
            elif name == frames.MAX_FRAME_SIZE:
                self._host.outgoing.set_frame_bytes(value)
            elif name == frames.ENABLE_PUSH and value > 1:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH must be 0 or 1; was {value}")
        self.settled = True
        self._host.post(frame(frames.SETTINGS, frames.ACK, 0))

    def _take_ping(self, it: Frame) -> None:
        if len(it.payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a ping has {len(it.payload)} bytes, not 8")
        if not it.flags & frames.ACK:
            self._host.post(frame(frames.PING, frames.ACK, 0, it.payload))
        else:
            self._host.pinged(it.payload)

    def _take_window_update(self, it: Frame) -> None:
        more = frames.read_number(it) & frames.LARGEST_WINDOW
        if it.stream and it.stream not in self._host.calls:
            self._check_not_idle(it)
            return
        if not more:
            fault = StreamFault if it.stream else ConnectionFault
            raise fault(ErrorCode.PROTOCOL_ERROR, f"the window of stream {it.stream} is to grow by 0")
        self._host.outgoing.grow(it.stream, more)

    def _take_priority(self, it: Frame) -> None:
        if len(it.payload) != 5:
            raise StreamFault(ErrorCode.FRAME_SIZE_ERROR, f"a priority has {len(it.payload)} bytes, not 5")

    def _take_push(self, it: Frame) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a client cannot push (stream {it.stream})")

    def _take_goaway(self, it: Frame) -> None:
        """The client will begin nothing more; what it has begun is answered."""

    def _check_not_idle(self, it: Frame) -> None:
        """A frame on a stream without a call is late; on one that never was, it is wrong."""
        if it.stream > self.last_stream or it.stream % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of kind {it.kind} on idle stream {it.stream}")


# What takes which frame, and whether it must be on a stream (True), on none (False), or on either (None).
_TAKE: dict[int, tuple[bool | None, Callable[[Intake, Frame], None]]] = {
    frames.DATA: (True, Intake._take_data),
    frames.HEADERS: (True, Intake._take_headers),
    frames.CONTINUATION: (True, Intake._take_continuation),
    frames.RST_STREAM: (True, Intake._take_reset),
    frames.PRIORITY: (True, Intake._take_priority),
    frames.PUSH_PROMISE: (True, Intake._take_push),
    frames.SETTINGS: (False, Intake._take_settings),
    frames.PING: (False, Intake._take_ping),
    frames.GOAWAY: (False, Intake._take_goaway),
    frames.WINDOW_UPDATE: (None, Intake._take_window_update),
}
