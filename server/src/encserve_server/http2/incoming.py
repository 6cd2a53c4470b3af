"""A call's messages as they arrive: gRPC's length-prefixed framing (PROTOCOL-HTTP2.md), and when more may come."""

import zlib
from collections import deque

import grpc

from encserve_server.http2.frames import ErrorCode, StreamFault

_PREFIX_BYTES = 5
# How zlib reads what is called so; identity is not compressed.
_WINDOW_BITS = {"deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}
ENCODINGS = {"identity", *_WINDOW_BITS}
# How far a caller may be ahead within one call, and after how much of it it is told that it may send more.
WINDOW_BYTES = 1024 * 1024
_CREDIT_BYTES = WINDOW_BYTES // 4
# Each takes more than its bytes; a window of empty ones would take fourteen times as much.
_MOST_MESSAGES = 32_768


class MessageFault(Exception):
    """A message that cannot be taken; the call ends with this status.

    Attributes:
        code: The status.
    """

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        """Takes the status and what was wrong, with the numbers."""
        self.code = code
        super().__init__(text)


class Incoming:
    """Cuts one call's data into messages.

    The caller may always send the rest of a message that has begun. What comes after it must wait until the handler has
    taken those that are whole: so an unread call holds one message and one window, not all that its caller has.

    Attributes:
        messages: Those that are whole and not yet taken, each with its flag, as they came.
        ended: Whether the caller has sent all it will.
    """

    __slots__ = ("_allowed", "_buffer", "_encoding", "_limit", "ended", "messages")

    def __init__(self, limit_bytes: int, encoding: str) -> None:
        """Takes the most bytes that a message may have, and the call's grpc-encoding, one of ENCODINGS."""
        self._limit = limit_bytes
        self._encoding = encoding
        self._buffer = bytearray()
        self._allowed = WINDOW_BYTES  # bytes that the caller may send
        self.messages: deque[tuple[int, bytes]] = deque()
        self.ended = False

    def feed(self, data: bytes, window_bytes: int) -> None:
        """Takes a frame's payload, which used so much of the stream's window.

        Raises:
            MessageFault: A message is too large.
            StreamFault: It is more than the caller was allowed to send.
        """
        self._allowed -= window_bytes
        if self._allowed < 0:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, f"{-self._allowed} bytes over the window of {WINDOW_BYTES}")
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _PREFIX_BYTES:
            size = int.from_bytes(buffer[at + 1 : at + _PREFIX_BYTES], "big")
            if size > self._limit:
                raise MessageFault(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"SERVER: Received message larger than max ({size} vs. {self._limit})",
                )
            end = at + _PREFIX_BYTES + size
            if end > len(buffer):
                break
            with memoryview(buffer) as view:
                self.messages.append((buffer[at], bytes(view[at + _PREFIX_BYTES : end])))
            at = end
            if len(self.messages) > _MOST_MESSAGES:
                raise MessageFault(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {_MOST_MESSAGES} messages wait to be looked at"
                )
        if at:
            del buffer[:at]

    def end(self) -> None:
        """The caller has sent everything.

        Raises:
            MessageFault: It ended within a message.
        """
        self.ended = True
        if self._buffer:
            raise MessageFault(
                grpc.StatusCode.INTERNAL, f"the call ended {len(self._buffer)} bytes into a message that is longer"
            )

    def credit(self) -> int:
        """How many more bytes the caller may send now, once they are many; each is told once."""
        owed = WINDOW_BYTES - self._allowed
        if self.messages or self.ended or owed < _CREDIT_BYTES:
            return 0
        self._allowed += owed
        return owed

    def take(self) -> bytes:
        """The next message. It is decompressed only now: a window full of small ones may be a thousand times as large.

        Raises:
            MessageFault: It is too large, or compressed in a way that was not announced.
        """
        flag, data = self.messages.popleft()
        if flag == 0:
            return data
        bits = _WINDOW_BITS.get(self._encoding)
        if flag != 1 or bits is None:
            raise MessageFault(
                grpc.StatusCode.INTERNAL, f"a message's flag is {flag} where grpc-encoding is {self._encoding}"
            )
        inflating = zlib.decompressobj(bits)
        try:
            whole = inflating.decompress(data, self._limit + 1)
        except zlib.error as error:
            raise MessageFault(grpc.StatusCode.INTERNAL, f"a message cannot be decompressed: {error}") from None
        if len(whole) > self._limit:
            raise MessageFault(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"SERVER: Received message larger than max (more than {self._limit} after decompression)",
            )
        if not inflating.eof:
            raise MessageFault(grpc.StatusCode.INTERNAL, "a compressed message is not whole")
        return whole
