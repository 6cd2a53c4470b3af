"""Header blocks: HPACK in and out (RFC 7541), and the names and values that gRPC gives them (PROTOCOL-HTTP2.md).

What is received is decoded by the hpack library, tables and Huffman codes included. What is sent is a handful of
fields, written as literals that nobody has to remember, so that no state is kept for them.
"""

import base64
import functools
import math
import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass

import grpc
import hpack
from hpack.table import HeaderTable

from encserve_server.http2.frames import ConnectionFault, ErrorCode

# Above the first a call is refused, as gRPC does by default; above the second the connection ends.
MAX_HEADER_LIST_BYTES = 16 * 1024
_MOST_HEADER_LIST_BYTES = 64 * 1024
_FIELD_OVERHEAD_BYTES = 32  # as section 4.1 counts
# How many blocks are remembered, and the longest that is.
_MOST_KNOWN_BLOCKS = 64
_MOST_KNOWN_BYTES = 1024

Metadata = tuple[tuple[str, str | bytes], ...]

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_NAME = re.compile(r"[0-9a-z_.-]+")
_NO_VALUE = re.compile(r"[\0\r\n]")  # RFC 9113, section 8.2.1
_CONTENT_TYPE = re.compile(r"application/grpc([+;]|$)")
# Fields that are the call's own and no metadata.
_OWN = {
    *(":method", ":path", ":scheme", ":authority"),
    *("te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "grpc-message-type"),
}
_CONNECTION_FIELDS = {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"}


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What a call begins with.

    Attributes:
        path: "/package.Service/Method".
        timeout_seconds: How long the caller waits, counted from when it sent this; infinity if it does not say.
        encoding: How messages are compressed, "identity" if they are not.
        metadata: The caller's own fields, in their order; those whose names end in -bin as bytes.
        is_grpc: Whether it is one of gRPC's; others know no gRPC status.
        problem: What is wrong with it, and the status that says so; None if nothing is.
    """

    path: str
    timeout_seconds: float
    encoding: str
    metadata: Metadata
    is_grpc: bool
    problem: tuple[grpc.StatusCode, str] | None


class _Table(HeaderTable):
    """A table of HPACK that tells whether anything in it has changed."""

    changed = False

    def add(self, name: bytes, value: bytes) -> None:
        self.changed = True
        super().add(name, value)

    @property
    def maxsize(self) -> int:
        return super().maxsize

    @maxsize.setter
    def maxsize(self, newmax: int) -> None:
        self.changed = True
        HeaderTable.maxsize.fset(self, newmax)  # type: ignore[attr-defined]


class HeaderReader:
    """Decodes one connection's header blocks, which refer to each other.

    Most calls of a client begin with the same octets. They mean the same for as long as the table is the same, so they
    are decoded once: it takes longer than anything else that is done for a call here.
    """

    def __init__(self) -> None:
        """Begins with an empty table."""
        self._decoder = hpack.Decoder(_MOST_HEADER_LIST_BYTES)
        self._table = _Table()
        self._decoder.header_table = self._table
        self._known: dict[bytes, RequestHead] = {}

    def read_head(self, block: bytes) -> RequestHead:
        """What a call begins with.

        Raises:
            ConnectionFault: As `read` does.
        """
        head = self._known.get(block)
        if head is None:
            self._table.changed = False
            head = read_head(self.read(block))
            if self._table.changed or len(self._known) >= _MOST_KNOWN_BLOCKS:
                self._known.clear()
            if not self._table.changed and head.problem is None and len(block) <= _MOST_KNOWN_BYTES:
                self._known[block] = head
        return head

    def read(self, block: bytes) -> list[tuple[str, str]]:
        """The fields of a block.

        Raises:
            ConnectionFault: It cannot be read, or is far too long; what comes after it could not be read either.
        """
        try:
            return [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in self._decoder.decode(block, raw=True)
            ]
        except hpack.OversizedHeaderListError as error:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from None
        except (hpack.HPACKError, IndexError, ValueError) as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, f"a header block cannot be decoded: {error}") from None


def read_head(fields: Iterable[tuple[str, str]]) -> RequestHead:
    """What the fields of a request mean; whatever is wrong is told as the head's problem."""
    own: dict[str, str] = {}  # the call's, pseudo-header fields included
    metadata: list[tuple[str, str | bytes]] = []
    problems: list[str] = []
    size = 0
    for name, value in fields:
        size += len(name) + len(value) + _FIELD_OVERHEAD_BYTES
        if not value.isprintable() and _NO_VALUE.search(value):
            problems.append(f"the value of {name[:100]!r} has a line's end or a zero")
        elif name in _OWN:
            if name in own:
                problems.append(f"{name} is given twice")
            own[name] = value
        elif not _NAME.fullmatch(name) or name in _CONNECTION_FIELDS:
            problems.append(f"a field must not be named {name[:100]!r}")
        elif name.endswith("-bin"):
            try:
                # Several of a name may have been joined on their way, with commas, which base64 has none of.
                metadata += ((name, _decode_binary(piece.strip(" "))) for piece in value.split(","))
            except ValueError:
                problems.append(f"{name[:100]} must be in base64")
        else:
            metadata.append((name, value))
    timeout_seconds = _read_timeout(own.get("grpc-timeout"), problems)
    problem = None
    if size > MAX_HEADER_LIST_BYTES:
        text = f"the metadata has {size} bytes; at most {MAX_HEADER_LIST_BYTES} are taken"
        problem = (grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    elif problems:
        problem = (grpc.StatusCode.INTERNAL, problems[0])
    return RequestHead(
        path=own.get(":path", ""),
        timeout_seconds=timeout_seconds,
        encoding=own.get("grpc-encoding", "identity"),
        metadata=tuple(metadata),
        is_grpc=own.get(":method") == "POST" and _CONTENT_TYPE.match(own.get("content-type", "")) is not None,
        problem=problem,
    )


def _read_timeout(text: str | None, problems: list[str]) -> float:
    """Seconds; infinity if there is none, or none that can be read."""
    if text is None:
        return math.inf
    match = _TIMEOUT.fullmatch(text)
    if match is None:
        problems.append(f"grpc-timeout must be digits and a unit; was {text[:100]!r}")
        return math.inf
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def _decode_binary(value: str) -> bytes:
    """Base64 with or without padding."""
    return base64.b64decode(value + "=" * (-len(value) % 4), validate=True)


def _integer(number: int, bits: int, first: int = 0) -> bytes:
    """A number in the low bits of an octet and those after it (RFC 7541, section 5.1)."""
    most = (1 << bits) - 1
    if number < most:
        return bytes((first | number,))
    octets = [first | most]
    number -= most
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)


def literal(name: str, value: str) -> bytes:
    """A field that is not to be remembered (section 6.2.2), in plain octets."""
    return b"\0" + _string(name) + _string(value)


def _string(text: str | bytes) -> bytes:
    """A text's octets, with their number before them (section 5.2)."""
    octets = text if isinstance(text, bytes) else text.encode("latin-1")
    return _integer(len(octets), 7) + octets


# Every block begins with this: our table has no entries. A client that allows a smaller table than usual wants to be
# told so in the next block (RFC 9113, section 4.3.1), and one octet is less than to remember which block that is.
NO_TABLE = _integer(0, 5, 0x20)
# ":status: 200" is number 8 of the static table, "content-type" number 31 (RFC 7541, appendix A).
RESPONSE_HEAD = (
    NO_TABLE
    + _integer(8, 7, 0x80)
    + _integer(31, 4)
    + _string("application/grpc")
    + literal("grpc-accept-encoding", "identity,deflate,gzip")
)
UNSUPPORTED_MEDIA_TYPE = NO_TABLE + _integer(8, 4) + _string("415")  # ":status: 415"


def write_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """A handler's own fields. Those whose names end in -bin are bytes, and sent in base64.

    Raises:
        ValueError: A name or a value cannot be sent.
    """
    fields = []
    for name, value in metadata:
        fields.append(_field_name(name))
        if name.endswith("-bin"):
            data = value if isinstance(value, bytes) else value.encode()
            fields.append(_string(base64.b64encode(data).rstrip(b"=")))
        else:
            text = value.decode("latin-1") if isinstance(value, bytes) else value
            if not text.isascii() or not text.isprintable():
                raise ValueError(f"metadata {name} must be printable ASCII; was {text!r}")
            fields.append(_string(text))
    return b"".join(fields)


_ALLOWED_GRPC = {"grpc-retry-pushback-ms", "grpc-status-details-bin"}


@functools.lru_cache(maxsize=64)
def _field_name(name: str) -> bytes:
    """How a field of a handler's begins (section 6.2.2); handlers have few."""
    if not _NAME.fullmatch(name) or (name.startswith("grpc-") and name not in _ALLOWED_GRPC):
        raise ValueError(f"metadata must not be named {name!r}")
    return b"\0" + _string(name)


def write_status(code: int, text: str) -> bytes:
    """The fields that every call ends with."""
    fields = _STATUS_FIELDS.get(code) or literal("grpc-status", str(code))
    if text:
        if not text.isascii() or not text.isprintable() or "%" in text:
            text = urllib.parse.quote(text, safe=_MESSAGE_SAFE, errors="replace")
        fields += literal("grpc-message", text)
    return fields


_STATUS_FIELDS = {code: literal("grpc-status", str(code)) for code in range(17)}
# PROTOCOL-HTTP2.md: what is printable ASCII is sent as it is, but for the percent sign.
_MESSAGE_SAFE = "".join(chr(octet) for octet in range(0x20, 0x7F) if octet != 0x25)
