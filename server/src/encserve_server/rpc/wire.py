"""Protobuf messages put together from parts, so that large data are copied once: into the message that is sent.

A library's message copies its data when they are set and again when it is serialised. In the wire format a field is its
key, for data and messages followed by their length, and the fields of a message come in any order, so a message can be
the bytes of one that the library made with the large fields written behind it.
https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Sequence

Part = bytes | memoryview  # of single bytes, so that len() is its size

_LENGTH_DELIMITED = 2


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
