"""The pure parts of the HTTP/2 server: frames, header blocks, and messages as they arrive."""

import base64
import itertools
import math
import urllib.parse
from collections.abc import Iterable, Sequence

import grpc
import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_server.http2 import frames
from encserve_server.http2.frames import ConnectionFault, ErrorCode, Frame, FrameReader
from encserve_server.http2.headers import (
    MAX_HEADER_LIST_BYTES,
    RESPONSE_HEAD,
    UNSUPPORTED_MEDIA_TYPE,
    HeaderReader,
    Metadata,
    RequestHead,
    literal,
    read_head,
    write_metadata,
    write_status,
)

BASE = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a.B/C"),
    (":authority", "here"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]

frames_drawn = st.lists(
    st.builds(
        Frame,
        st.integers(0, 255),
        st.integers(0, 255),
        st.integers(0, frames.LARGEST_WINDOW),
        st.one_of(st.binary(max_size=40), st.sampled_from([bytes(frames.FRAME_BYTES), bytes(300)])),
    ),
    max_size=6,
)


def split(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """The data in pieces, cut at these places (modulo its length)."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


def decode(block: bytes) -> list[tuple[str, str]]:
    """What another implementation reads."""
    return [(str(name), str(value)) for name, value in hpack.Decoder().decode(block)]


# ── Frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(frames_drawn, st.lists(st.integers(0, 100_000), max_size=8), st.booleans())
def test_frames_are_the_same_however_they_arrive(expected: list[Frame], cuts: list[int], reserved: bool) -> None:
    """In any pieces, and with or without the reserved bit of the stream's number."""
    bit = (1 << 31) if reserved else 0
    data = frames.PREFACE + b"".join(frames.frame(it.kind, it.flags, it.stream | bit, it.payload) for it in expected)
    reader = FrameReader()
    assert [it for piece in split(data, cuts) for it in reader.feed(piece)] == expected


def test_one_octet_at_a_time() -> None:
    data = frames.PREFACE + frames.frame(frames.PING, 0, 0, b"12345678") + frames.reset(3, ErrorCode.CANCEL)
    reader = FrameReader()
    assert [it for at in range(len(data)) for it in reader.feed(data[at : at + 1])] == [
        Frame(frames.PING, 0, 0, b"12345678"),
        Frame(frames.RST_STREAM, 0, 3, b"\0\0\0\x08"),
    ]


def test_a_frame_too_long_is_known_by_its_head() -> None:
    """Nobody waits for what is not taken; the frames before it are."""
    reader = FrameReader()
    head = frames.frame_head(frames.FRAME_BYTES + 1, 77, 0, 1)
    fed = reader.feed(frames.PREFACE + frames.frame(frames.PING, 0, 0, b"12345678") + head)
    assert next(fed).kind == frames.PING
    with pytest.raises(ConnectionFault, match="16385 bytes; at most 16384") as caught:
        next(fed)
    assert caught.value.code == ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize("data", [b"G", b"GET / HTTP/1.1\r\n\r\n", frames.PREFACE[:-1] + b"X", b"\x16\x03\x01"])
def test_what_is_no_http2_is_known_at_once(data: bytes) -> None:
    with pytest.raises(ConnectionFault, match="not HTTP/2") as caught:
        list(FrameReader().feed(data))
    assert caught.value.code == ErrorCode.PROTOCOL_ERROR


@given(st.binary(max_size=30), st.integers(0, 255), st.sampled_from([frames.DATA, frames.HEADERS]), st.booleans())
def test_padding_is_taken_off(data: bytes, padding: int, kind: int, priority: bool) -> None:
    flags = frames.PADDED | (frames.HAS_PRIORITY if priority else 0)
    before = bytes(5) if priority and kind == frames.HEADERS else b""
    payload = bytes((padding,)) + before + data + bytes(padding)
    assert frames.unpadded(Frame(kind, flags, 1, payload)) == data


@pytest.mark.parametrize(
    ("kind", "flags", "payload"),
    [
        (frames.DATA, frames.PADDED, b""),
        (frames.DATA, frames.PADDED, b"\x01"),
        (frames.DATA, frames.PADDED, b"\x05abcd"),
        (frames.HEADERS, frames.HAS_PRIORITY, b"abcd"),
        (frames.HEADERS, frames.PADDED | frames.HAS_PRIORITY, b"\x01abcde"),
    ],
)
def test_too_much_padding(kind: int, flags: int, payload: bytes) -> None:
    with pytest.raises(ConnectionFault):
        frames.unpadded(Frame(kind, flags, 1, payload))


def test_a_goaway_s_text_is_short() -> None:
    (it,) = (it for it in _all(frames.goaway(7, ErrorCode.PROTOCOL_ERROR, "x" * 100_000)))
    assert it.payload[:8] == b"\0\0\0\x07\0\0\0\x01"
    assert len(it.payload) < 1000


def _all(data: bytes) -> Sequence[Frame]:
    return list(FrameReader().feed(frames.PREFACE + data))


@given(st.integers(0, 40_000), st.integers(0, 1))
def test_a_header_block_of_any_length_is_sent_in_frames_that_everybody_takes(size: int, ended: int) -> None:
    block = bytes(at % 251 for at in range(size))
    first, *others = _all(frames.header_frames(ended, 5, block))
    assert first.kind == frames.HEADERS
    assert first.flags & ~frames.END_HEADERS == ended
    assert all((it.kind, it.flags & ~frames.END_HEADERS) == (frames.CONTINUATION, 0) for it in others)
    assert [bool(it.flags & frames.END_HEADERS) for it in (first, *others)] == [False] * len(others) + [True]
    assert {it.stream for it in (first, *others)} == {5}
    assert b"".join(it.payload for it in (first, *others)) == block


# ── Header blocks ────────────────────────────────────────────────────────────────────────────────────────────────────

names = st.from_regex(r"x-[0-9a-z_.-]{0,20}", fullmatch=True).filter(lambda it: not it.endswith("-bin"))
values = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=300)


@given(names, values)
def test_a_literal_is_read_back(name: str, value: str) -> None:
    assert decode(literal(name, value)) == [(name, value)]


@given(st.lists(st.tuples(names, values), max_size=5), st.binary())
def test_metadata_comes_back(text: list[tuple[str, str]], data: bytes) -> None:
    """Through another implementation, and through what we read ourselves."""
    sent: Metadata = (*text, ("x-bin", data))
    fields = decode(write_metadata(sent))
    assert fields[:-1] == text
    assert base64.b64decode(fields[-1][1] + "==") == data
    assert read_head(fields).metadata == sent


@pytest.mark.parametrize(
    "field",
    [("Upper", "x"), ("", "x"), (":status", "200"), ("a b", "x"), ("grpc-status", "0"), ("grpc-x", "1"), ("é", "x")]
    + [("a", value) for value in ("\n", "a\r\nb: c", "\0", "é", "\x7f")],
)
def test_metadata_that_cannot_be_sent(field: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="metadata"):
        write_metadata([field])


@given(st.sampled_from(list(grpc.StatusCode)), st.text())
def test_a_status_comes_back(code: grpc.StatusCode, text: str) -> None:
    """Percent-encoded; what is printable ASCII stays as it is."""
    fields = dict(decode(write_status(code.value[0], text)))
    assert fields.pop("grpc-status") == str(code.value[0])
    written = fields.pop("grpc-message", "")
    assert not fields
    assert urllib.parse.unquote(written, errors="strict") == text
    assert written.isascii()
    assert written.isprintable()


def test_a_message_stays_readable_and_is_always_sent() -> None:
    """Half a surrogate, as in a file's name that is no UTF-8, is no reason to say nothing."""
    assert decode(write_status(3, "a /b?c=d&~é 5%\n"))[1] == ("grpc-message", "a /b?c=d&~%C3%A9 5%25%0A")
    assert decode(write_status(2, "x\udc80y"))[1][1].startswith("x")


def test_what_every_answer_begins_with() -> None:
    head = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-accept-encoding", "identity,deflate,gzip")]
    assert decode(RESPONSE_HEAD) == head
    assert decode(UNSUPPORTED_MEDIA_TYPE) == [(":status", "415")]


def test_blocks_refer_to_earlier_ones() -> None:
    encoder, reader = hpack.Encoder(), HeaderReader()
    for _ in range(3):
        assert reader.read(encoder.encode(BASE)) == BASE


@pytest.mark.parametrize("block", [b"\xff\xff\xff\xff\xff\xff\xff", b"\x80", b"\xfe", b"\x40\x0aabc", b"\0\x81\xff\0"])
def test_a_block_that_cannot_be_decoded(block: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        HeaderReader().read(block)
    assert caught.value.code == ErrorCode.COMPRESSION_ERROR


@given(st.binary(max_size=60))
def test_any_block_is_read_or_refused(block: bytes) -> None:
    try:
        read_head(HeaderReader().read(block))
    except ConnectionFault as fault:
        assert fault.code == ErrorCode.COMPRESSION_ERROR  # noqa: PT017 - it may also be read


def test_a_small_block_cannot_become_a_huge_list() -> None:
    """One field of 4 KB that is remembered, and then named again and again by one octet each."""
    block = b"\x40\x01a\x7f" + bytes((0x80 | (3900 - 127) & 0x7F, (3900 - 127) >> 7)) + b"x" * 3900
    reader = HeaderReader()
    assert reader.read(block + b"\xbe" * 10)[-1] == ("a", "x" * 3900)
    with pytest.raises(ConnectionFault) as caught:
        reader.read(b"\xbe" * 1000)
    assert caught.value.code == ErrorCode.ENHANCE_YOUR_CALM


def head_of(*fields: tuple[str, str], without: str = "") -> RequestHead:
    return read_head([field for field in BASE if field[0] != without] + list(fields))


def test_a_request_s_head() -> None:
    head = head_of(("grpc-encoding", "gzip"), ("grpc-accept-encoding", "gzip"), ("user-agent", "me"), ("a", "1"))
    assert (head.path, head.encoding, head.is_grpc, head.problem) == ("/a.B/C", "gzip", True, None)
    assert head.timeout_seconds == math.inf
    assert head.metadata == (("user-agent", "me"), ("a", "1"))


@given(st.lists(st.tuples(st.binary(max_size=20), st.booleans()), min_size=1, max_size=4), st.booleans())
def test_binary_metadata(drawn: list[tuple[bytes, bool]], joined: bool) -> None:
    """With padding or without; values that a proxy has joined with commas are several."""
    texts = [base64.b64encode(data).decode().rstrip("=" if bare else "") for data, bare in drawn]
    head = head_of(*[("x-bin", text) for text in ([",".join(texts)] if joined else texts)])
    assert head.problem is None
    assert head.metadata == tuple(("x-bin", data) for data, _ in drawn)


@pytest.mark.parametrize("text", ["a", "é", "a=a", "====", "_-_-", "aa\n", "YQ==YQ=="])
def test_bad_binary_metadata(text: str) -> None:
    problem = head_of(("x-bin", text)).problem
    assert problem is not None
    assert problem[0] == grpc.StatusCode.INTERNAL
    assert "x-bin" in problem[1]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1H", 3600), ("2M", 120), ("3S", 3), ("400m", 0.4), ("5u", 5e-6), ("6n", 6e-9), ("99999999H", 3.599999964e11)],
)
def test_timeouts(text: str, seconds: float) -> None:
    head = head_of(("grpc-timeout", text))
    assert head.problem is None
    assert head.timeout_seconds == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "S", "1", "1s", "-1S", "1.5S", "123456789S", " 1S", "1S ", "١S", "1S\n"])
def test_bad_timeouts(text: str) -> None:
    problem = head_of(("grpc-timeout", text)).problem
    assert problem is not None
    assert problem[0] == grpc.StatusCode.INTERNAL
    assert "grpc-timeout" in problem[1]


@pytest.mark.parametrize(
    "field",
    [("Upper", "x"), ("", "x"), (":foo", "x"), ("a b", "x"), ("connection", "close"), ("upgrade", "x"), ("é", "x")]
    + [("transfer-encoding", "chunked"), (":path", "/twice"), ("grpc-encoding", "a\0b")]
    + [("a", value) for value in ("x\ny", "x\ry", "x\0y")],
)
def test_fields_that_cannot_be(field: tuple[str, str]) -> None:
    problem = head_of(field).problem
    assert problem is not None
    assert problem[0] == grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("without", "field"),
    [
        (":method", (":method", "GET")),
        (":method", ("a", "b")),
        ("content-type", ("a", "b")),
        *[("content-type", ("content-type", it)) for it in ("text/html", "application/grpc-web", "application/json")],
    ],
)
def test_what_is_not_grpc(without: str, field: tuple[str, str]) -> None:
    assert not head_of(field, without=without).is_grpc


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"])
def test_what_is_grpc(kind: str) -> None:
    assert head_of(("content-type", kind), without="content-type").is_grpc


def test_metadata_has_a_limit() -> None:
    used = sum(len(name) + len(value) + 32 for name, value in [*BASE, ("a", "")])
    assert head_of(("a", "x" * (MAX_HEADER_LIST_BYTES - used))).problem is None
    problem = head_of(("a", "x" * (MAX_HEADER_LIST_BYTES - used + 1))).problem
    assert problem is not None
    assert problem[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{MAX_HEADER_LIST_BYTES + 1} bytes; at most {MAX_HEADER_LIST_BYTES}" in problem[1]
