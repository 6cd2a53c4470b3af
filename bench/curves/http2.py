"""A gRPC caller that costs next to nothing: HTTP/2 frames of bytes prepared beforehand, on one socket.

gRPC's Python library takes as much CPU for a call as a server that answers it. On a machine that generator and server
share, a load of three times what the server stands is then mostly the generator's. This knows one method, no TLS, and
of headers the status.

Frames are those of RFC 9113 as gRPC's own servers send them: no padding, no header block in several frames, streams
that may send 16 KiB at once. What is different is an error. The server is told to keep no table of headers (RFC 7541,
section 4.2), so its header blocks do not depend on each other.
"""

import select
import socket
import struct
from dataclasses import dataclass

from grpc import StatusCode

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 1, 4, 5  # settings
_FRAME_HEADER_BYTES = 9
_LARGEST_WINDOW = 2**31 - 1
_INITIAL_WINDOW = 65_535  # of every connection and stream, until somebody says otherwise
_FRAME_BYTES = 16_384  # what every server takes
_MOST_FRAME_BYTES = 2**17  # what we take
_RECEIVE_BYTES = 2 * _MOST_FRAME_BYTES
_MESSAGE_HEAD_BYTES = 5
# What HTTP/2's reasons for a reset mean in gRPC, where that is not INTERNAL.
_RESET = {7: StatusCode.UNAVAILABLE, 8: StatusCode.CANCELLED, 11: StatusCode.RESOURCE_EXHAUSTED}
_CODES: dict[int, StatusCode] = {code.value[0]: code for code in StatusCode}


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call ended.

    Attributes:
        stream: Which call, as `send` named it.
        code: Its status.
        body: What came with it, as it came.
    """

    stream: int
    code: StatusCode
    body: bytearray

    @property
    def message(self) -> bytes:
        """The reply; empty where there is none."""
        return bytes(self.body[_MESSAGE_HEAD_BYTES:])


class LightConnection:
    """One connection, used by one thread. Several calls may be out; each is one message, answered by at most one."""

    def __init__(self, target: str, method: str) -> None:
        """Connects to HOST:PORT, without TLS; `method` is /package.Service/Method.

        Raises:
            OSError: Nobody listens there.
        """
        host, _, port = target.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers = b"\x83\x86" + b"".join(  # POST, http
            _literal(name, value)
            for name, value in (
                (":path", method),
                (":authority", target),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
            )
        )
        self._stream = -1
        self._window = _INITIAL_WINDOW  # bytes that the server still takes
        self._read = 0  # bytes that it has not been told were read
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._filled = 0  # bytes of it that are the beginning of a frame
        self._bodies: dict[int, bytearray] = {}  # of the calls that are out
        self._ended: list[Answer] = []
        settings = (
            (_HEADER_TABLE_SIZE, 0),
            (_INITIAL_WINDOW_SIZE, _LARGEST_WINDOW),
            (_MAX_FRAME_SIZE, _MOST_FRAME_BYTES),
        )
        self._socket.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, b"".join(struct.pack(">HI", *it) for it in settings))
            + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _LARGEST_WINDOW - _INITIAL_WINDOW))
        )

    def close(self) -> None:
        """Ends the connection, and with it what is out."""
        self._socket.close()

    def send(self, message: bytes) -> int:
        """Makes a call and returns its name; waits only for a server that does not read.

        Raises:
            ValueError: The message does not fit into one frame.
            OSError: The connection has ended.
        """
        body = b"\0" + struct.pack(">I", len(message)) + message  # not compressed
        if len(body) > _FRAME_BYTES:
            raise ValueError(f"a message must be at most {_FRAME_BYTES - 5} bytes; was {len(message)}")
        while len(body) > self._window:
            self._receive()
        self._window -= len(body)
        self._stream += 2
        self._bodies[self._stream] = bytearray()
        head = _frame(_HEADERS, _END_HEADERS, self._stream, self._headers)
        self._socket.sendall(head + _frame(_DATA, _END_STREAM, self._stream, body))
        return self._stream

    def answers(self, timeout_seconds: float) -> list[Answer]:
        """The calls that have ended; waits so long for the first, if there is none yet.

        Raises:
            OSError: The connection has ended.
        """
        if not self._ended and select.select([self._socket], [], [], max(timeout_seconds, 0))[0]:
            self._receive()
        ended, self._ended = self._ended, []
        return ended

    def _receive(self) -> None:
        """Reads what is there, or waits for something."""
        buffer = self._buffer
        received = self._socket.recv_into(buffer[self._filled :])
        if not received:
            raise ConnectionError("the server has closed the connection")
        at, filled = 0, self._filled + received
        while filled - at >= _FRAME_HEADER_BYTES:
            begin = at + _FRAME_HEADER_BYTES
            end = begin + int.from_bytes(buffer[at : at + 3], "big")
            if end - begin > _MOST_FRAME_BYTES:
                raise ConnectionError(f"a frame has {end - begin} bytes; at most {_MOST_FRAME_BYTES} are taken")
            if end > filled:
                break
            stream = int.from_bytes(buffer[at + 5 : begin], "big")
            self._handle(buffer[at + 3], buffer[at + 4], stream, buffer[begin:end])
            at = end
        self._filled = filled - at
        buffer[: self._filled] = buffer[at:filled]

    def _handle(self, kind: int, flags: int, stream: int, payload: memoryview) -> None:
        """One frame."""
        if kind in (_DATA, _HEADERS) and (flags & _PADDED or (kind == _HEADERS and not flags & _END_HEADERS)):
            raise ConnectionError(f"the server pads or splits frames (kind {kind}, flags {flags:#x})")
        if kind == _DATA:
            self._bodies[stream] += payload
            self._read += len(payload)
            if self._read > _LARGEST_WINDOW // 2:
                self._socket.sendall(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._read)))
                self._read = 0
        elif kind == _HEADERS and flags & _END_STREAM:
            self._end(stream, _status(payload))
        elif kind == _RST_STREAM and stream in self._bodies:  # one that has ended is reset if it was not read whole
            self._end(stream, _RESET.get(int.from_bytes(payload, "big"), StatusCode.INTERNAL))
        elif kind == _SETTINGS and not flags & _ACK:
            self._socket.sendall(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == _GOAWAY:
            raise ConnectionError(f"the server ends the connection: {str(payload[8:], errors='replace')}")

    def _end(self, stream: int, code: StatusCode) -> None:
        self._ended.append(Answer(stream, code, self._bodies.pop(stream)))


def _frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _literal(name: str, value: str) -> bytes:
    """A header that is not to be remembered (RFC 7541, section 6.2.2), in plain octets."""
    parts = (name.encode(), value.encode())
    if max(map(len, parts)) > 126:
        raise ValueError(f"{name} must be at most 126 bytes; was {len(parts[1])}")
    return b"\0" + b"".join(bytes((len(part),)) + part for part in parts)


def _status(block: memoryview) -> StatusCode:
    """The gRPC status in a block of trailers (RFC 7541, section 6), in which no header refers to an earlier block."""
    at = 0
    while at < len(block):
        kind = block[at]
        if kind & 0x80:  # a header of the static table: none of those that are looked for
            _, at = _integer(block, at, 7)
        elif kind & 0xE0 == 0x20:  # the size of the table
            _, at = _integer(block, at, 5)
        else:
            index, at = _integer(block, at, 6 if kind & 0x40 else 4)
            name, at = (b"", at) if index else _string(block, at)
            value, at = _string(block, at)
            if name == b"grpc-status":
                return _CODES.get(int(value), StatusCode.UNKNOWN)
    raise ConnectionError("the server's trailers have no status that can be read")


def _integer(block: memoryview, at: int, bits: int) -> tuple[int, int]:
    """A number that begins in the low bits of an octet (section 5.1), and where it ends."""
    most = (1 << bits) - 1
    number, at = block[at] & most, at + 1
    if number == most:
        shift = 0
        while True:
            octet, at = block[at], at + 1
            number += (octet & 0x7F) << shift
            shift += 7
            if octet < 0x80:
                break
    return number, at


def _string(block: memoryview, at: int) -> tuple[bytes, int]:
    """Octets as they are sent, compressed or not (section 5.2), and where they end."""
    length, at = _integer(block, at, 7)
    return bytes(block[at : at + length]), at + length
