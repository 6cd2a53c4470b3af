"""Bytes to frames and back (RFC 9113, section 4)."""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
# The least that an end may allow, and what we allow (section 6.5.2).
FRAME_BYTES = 16_384
_MOST_TEXT_BYTES = 500
LARGEST_WINDOW = 2**31 - 1
FIRST_WINDOW = 65_535

_HEAD = struct.Struct(">BHBBI")  # length in 8 + 16 bits, kind, flags, stream

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
# Flags; END_STREAM of data and headers is ACK of settings and pings.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)


class ErrorCode(IntEnum):
    """Why a stream or a connection ends (section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Fault(Exception):
    """The other end broke the protocol.

    Attributes:
        code: What it is told.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        """Takes the code and what was wrong, with the numbers."""
        self.code = code
        super().__init__(text)


class ConnectionFault(Fault):
    """Nothing that it sends can be trusted any more: the connection ends with GOAWAY."""


class StreamFault(Fault):
    """Within one stream, which ends with RST_STREAM; the others go on."""


class Frame(NamedTuple):
    """One frame, without its length."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame_head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """The nine octets before a payload of `length` bytes."""
    return _HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return frame_head(len(payload), kind, flags, stream) + payload


def header_frames(flags: int, stream: int, block: bytes) -> bytes:
    """A header block, in as many frames as it takes."""
    if len(block) <= FRAME_BYTES:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    rest = range(FRAME_BYTES, len(block), FRAME_BYTES)
    pieces = [frame(HEADERS, flags, stream, block[:FRAME_BYTES])]
    pieces += (
        frame(CONTINUATION, END_HEADERS if at == rest[-1] else 0, stream, block[at : at + FRAME_BYTES]) for at in rest
    )
    return b"".join(pieces)


def settings_frame(settings: dict[int, int]) -> bytes:
    """A SETTINGS frame of these identifiers and values."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in settings.items()))


def window_update(stream: int, more: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", more))


def reset(stream: int, code: ErrorCode) -> bytes:
    """An RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, struct.pack(">I", code))


def goaway(last_stream: int, code: ErrorCode, text: str = "") -> bytes:
    """A GOAWAY frame, with a text for people."""
    return frame(GOAWAY, 0, 0, struct.pack(">II", last_stream, code) + text.encode()[:_MOST_TEXT_BYTES])


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """The identifiers and values of a SETTINGS frame.

    Raises:
        ConnectionFault: It is not made of six octets each.
    """
    if len(payload) % 6:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes are not six octets each")
    yield from struct.iter_unpack(">HI", payload)


def read_number(it: Frame) -> int:
    """The one number of a WINDOW_UPDATE or RST_STREAM frame.

    Raises:
        ConnectionFault: It is not four octets.
    """
    if len(it.payload) != 4:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of kind {it.kind} has {len(it.payload)} bytes, not 4")
    return int.from_bytes(it.payload, "big")


def unpadded(it: Frame) -> bytes:
    """The payload of DATA or HEADERS without padding and priority.

    Raises:
        ConnectionFault: There is more padding than payload.
    """
    payload, begin, end = it.payload, 0, len(it.payload)
    if it.flags & PADDED:
        if not payload:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame has no length of its padding")
        begin, end = 1, end - payload[0]
    if it.kind == HEADERS and it.flags & HAS_PRIORITY:
        begin += 5
    if begin > end:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{len(payload)} bytes are too few for padding and priority")
    return payload[begin:end] if begin or end != len(payload) else payload


class FrameReader:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        """Expects a client's preface first."""
        self._rest = b""
        self._begun = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole now.

        Raises:
            ConnectionFault: It is no HTTP/2, or a frame is longer than allowed.
        """
        if self._rest:
            data = self._rest + data
        at = 0
        if not self._begun:
            seen = data[: len(PREFACE)]
            if not PREFACE.startswith(seen):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"not HTTP/2: it begins with {seen!r}")
            if len(seen) < len(PREFACE):
                self._rest = data
                return
            self._begun, at = True, len(PREFACE)
        while len(data) - at >= FRAME_HEADER_BYTES:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            length = high << 16 | low
            if length > FRAME_BYTES:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame has {length} bytes; at most {FRAME_BYTES} are allowed"
                )
            begin = at + FRAME_HEADER_BYTES
            if begin + length > len(data):
                break
            at = begin + length
            yield Frame(kind, flags, stream & LARGEST_WINDOW, data[begin:at])
        self._rest = data[at:]
