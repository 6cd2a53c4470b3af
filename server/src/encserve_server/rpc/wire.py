"""Protobuf messages put together from parts, so that large data are copied once: into the message that is sent.

A library's message copies its data when they are set and again when it is serialised. In the wire format a field is its
key, for data and messages followed by their length, and the fields of a message come in any order, so a message can be
the bytes of one that the library made with the large fields written behind it.
https://protobuf.dev/programming-guides/encoding/
"""

import io
from collections.abc import Sequence

import numpy as np

Part = bytes | memoryview  # of single bytes, so that len() is its size

_LENGTH_DELIMITED = 2
_LARGE_BYTES = 256 * 1024


def varint(number: int) -> bytes:
    """A number of 0 or more, 7 bits a byte, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, parts: Sequence[Part]) -> list[Part]:
    """A field of bytes, or of a message, whose value is these parts back to back."""
    return [varint(number << 3 | _LENGTH_DELIMITED) + varint(sum(map(len, parts))), *parts]


def join(parts: Sequence[Part]) -> bytes:
    """These parts back to back. For large ones other threads run meanwhile.

    `bytes.join` copies a memoryview while it holds Python's lock, NumPy does not. A BytesIO of zeros that nothing else
    refers to lends its memory to be written, and gives it back as bytes, neither of which copies it.
    """
    size = sum(map(len, parts))
    if size < _LARGE_BYTES:
        return b"".join(parts)
    joined = io.BytesIO(bytes(size))
    with joined.getbuffer() as view:
        place = 0
        for part in parts:
            np.copyto(np.frombuffer(view, np.uint8, len(part), place), np.frombuffer(part, np.uint8))
            place += len(part)
    return joined.getvalue()
