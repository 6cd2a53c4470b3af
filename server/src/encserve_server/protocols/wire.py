"""Builds serialized protobuf messages from buffers, so that large data is copied only once.

The protobuf library copies data twice: when a field is set, and when the message is serialized. In the wire format, the
fields of a message may come in any order. So the library serializes the message without the large fields, and this
module appends them. https://protobuf.dev/programming-guides/encoding/
"""

import io
from collections.abc import Sequence

import numpy as np

Buffer = bytes | memoryview  # the items of a memoryview are bytes, so len() is its size in bytes

_LENGTH_DELIMITED = 2
_LARGE_BYTES = 256 * 1024


def varint(number: int) -> bytes:
    """Encode a nonnegative number: 7 bits in each byte, the lowest bits first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, parts: Sequence[Buffer]) -> list[Buffer]:
    """Return a field of bytes, or of a message. The value is the concatenation of `parts`."""
    return [varint(number << 3 | _LENGTH_DELIMITED) + varint(sum(map(len, parts))), *parts]


def join(parts: Sequence[Buffer]) -> bytes:
    """Concatenate parts. Other threads can run while large parts are copied.

    `bytes.join` holds Python's global lock while it copies, but NumPy releases the lock. So NumPy copies the parts into
    a BytesIO. The BytesIO returns its memory as bytes without a copy.
    """
    size = sum(map(len, parts))
    if size < _LARGE_BYTES:
        return b"".join(parts)
    joined = io.BytesIO(bytes(size))
    with joined.getbuffer() as view:
        offset = 0
        for part in parts:
            np.copyto(np.frombuffer(view, np.uint8, len(part), offset), np.frombuffer(part, np.uint8))
            offset += len(part)
    return joined.getvalue()
