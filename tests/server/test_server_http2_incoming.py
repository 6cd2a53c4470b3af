"""A call's messages as they arrive: framing, compression, limits, and when the caller may send more."""

import gzip
import itertools
import tracemalloc
import zlib
from collections.abc import Iterable

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encserve_server.http2.frames import ErrorCode, StreamFault
from encserve_server.http2.incoming import WINDOW_BYTES, Incoming, MessageFault

LIMIT = 1000
MIB = 1024 * 1024


def split(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """The data in pieces, cut at these places (modulo its length)."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


def prefixed(message: bytes, flag: int = 0) -> bytes:
    """A message as gRPC frames it."""
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def feed(incoming: Incoming, data: bytes) -> None:
    incoming.feed(data, len(data))


def take_all(incoming: Incoming) -> list[bytes]:
    return [incoming.take() for _ in range(len(incoming.messages))]


messages_drawn = st.lists(st.tuples(st.binary(max_size=LIMIT), st.booleans()), max_size=6)


@given(messages_drawn, st.sampled_from(["gzip", "deflate"]), st.lists(st.integers(0, 10_000), max_size=8))
def test_messages_are_the_same_however_they_arrive(
    drawn: list[tuple[bytes, bool]], encoding: str, cuts: list[int]
) -> None:
    """In any pieces, each of them compressed or not."""
    compress = gzip.compress if encoding == "gzip" else zlib.compress
    data = b"".join(prefixed(compress(it), 1) if squeezed else prefixed(it) for it, squeezed in drawn)
    incoming = Incoming(2 * LIMIT, encoding)
    taken = []
    for piece in split(data, cuts):
        feed(incoming, piece)
        taken += take_all(incoming)
    incoming.end()
    assert incoming.ended
    assert taken == [it for it, _ in drawn]


def test_a_message_too_large_is_known_by_its_prefix() -> None:
    incoming = Incoming(LIMIT, "identity")
    feed(incoming, prefixed(bytes(LIMIT)))
    with pytest.raises(MessageFault, match=r"larger than max \(1001 vs. 1000\)") as caught:
        feed(incoming, prefixed(bytes(LIMIT + 1))[:5])
    assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1])
def test_the_limit_is_of_what_comes_out(encoding: str, size: int) -> None:
    compress = gzip.compress if encoding == "gzip" else zlib.compress
    incoming = Incoming(LIMIT, encoding)
    feed(incoming, prefixed(compress(bytes(size)), 1))
    if size == LIMIT:
        assert incoming.take() == bytes(size)
        return
    with pytest.raises(MessageFault, match="after decompression") as caught:
        incoming.take()
    assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_bomb_is_not_inflated() -> None:
    """Neither beyond the limit, nor before somebody takes it: a window of small messages could become gigabytes."""
    bomb = prefixed(gzip.compress(bytes(64 * MIB)), 1)
    many = prefixed(gzip.compress(bytes(MIB)), 1)
    incoming = Incoming(MIB, "gzip")
    tracemalloc.start()
    try:
        for _ in range(100):
            feed(incoming, many)
        feed(incoming, bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
        for _ in range(100):
            assert len(incoming.take()) == MIB
        with pytest.raises(MessageFault):
            incoming.take()
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("encoding", "flag", "data"),
    [
        *[("identity", 1, b""), ("gzip", 2, b""), ("identity", 255, b"x"), ("gzip", 1, b"garbage"), ("gzip", 1, b"")],
        *[("gzip", 1, zlib.compress(b"x")), ("deflate", 1, gzip.compress(b"x")), ("gzip", 1, gzip.compress(b"x")[:-1])],
    ],
)
def test_what_cannot_be_decompressed(encoding: str, flag: int, data: bytes) -> None:
    incoming = Incoming(LIMIT, encoding)
    with pytest.raises(MessageFault) as caught:  # noqa: PT012 - either of them says so
        feed(incoming, prefixed(data, flag))
        incoming.take()
    assert caught.value.code == grpc.StatusCode.INTERNAL


@given(st.binary(max_size=200), st.sampled_from(["gzip", "deflate", "identity"]))
def test_any_data_is_taken_or_refused(data: bytes, encoding: str) -> None:
    incoming = Incoming(LIMIT, encoding)
    try:
        feed(incoming, data)
        take_all(incoming)
        incoming.end()
    except MessageFault as fault:
        assert fault.code in {grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED}  # noqa: PT017


@pytest.mark.parametrize("size", [1, 4, 5, 9])
def test_the_end_within_a_message(size: int) -> None:
    incoming = Incoming(LIMIT, "identity")
    feed(incoming, prefixed(b"whole") + prefixed(b"hello")[:size])
    with pytest.raises(MessageFault, match=f"ended {size} bytes into") as caught:
        incoming.end()
    assert caught.value.code == grpc.StatusCode.INTERNAL
    assert incoming.ended


def test_more_than_the_window_breaks_the_protocol() -> None:
    """Padding counts as well."""
    incoming = Incoming(WINDOW_BYTES * 2, "identity")
    incoming.feed(prefixed(bytes(LIMIT)), WINDOW_BYTES)
    with pytest.raises(StreamFault) as caught:
        incoming.feed(b"", 1)
    assert caught.value.code == ErrorCode.FLOW_CONTROL_ERROR


@settings(deadline=None, max_examples=40)  # megabytes each
@given(
    st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(16_000, MIB), st.booleans()), min_size=1, max_size=40),
)
def test_credit_neither_starves_nor_spoils_the_caller(sizes: list[int], steps: list[tuple[int, bool]]) -> None:
    """A caller that uses all of its window, and a handler that takes messages now and then, come to the end.

    Unread, the call never holds more than one message and one window.
    """
    data = memoryview(b"".join(prefixed(bytes(size)) for size in sizes))
    incoming = Incoming(3 * MIB, "identity")
    window, sent, taken, taken_bytes = WINDOW_BYTES, 0, 0, 0
    longest = max(sizes) + 5
    for at in range(10_000):
        size, takes = steps[at % len(steps)]
        piece = data[sent : sent + min(size, window)]
        incoming.feed(bytes(piece), len(piece))
        sent, window = sent + len(piece), window - len(piece)
        window += incoming.credit()
        assert 0 <= window <= WINDOW_BYTES
        assert sent + window - taken_bytes <= longest + WINDOW_BYTES
        if incoming.messages and (takes or not piece):
            taken_bytes += len(incoming.take()) + 5
            taken += 1
            window += incoming.credit()
        if taken == len(sizes):
            return
    pytest.fail(f"stuck after {taken} of {len(sizes)} messages, with a window of {window}")
