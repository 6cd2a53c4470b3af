"""What a connection is to send: a model of it, beside which random steps are taken, and single rules."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from encserve_server.http2 import frames
from encserve_server.http2.frames import ConnectionFault, ErrorCode, Frame, FrameReader, StreamFault
from encserve_server.http2.outgoing import Outgoing

TURN_BYTES = 256 * 1024
MUCH = 1 << 40
sizes = st.one_of(st.integers(0, 100), st.integers(0, 200_000))


def cut(taken: list[bytes | memoryview]) -> list[Frame]:
    """What was taken, as frames; ours may be longer than a client's."""
    data, at, found = b"".join(taken), 0, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        begin = at + frames.FRAME_HEADER_BYTES
        stream = int.from_bytes(data[at + 5 : begin], "big")
        at = begin + size
        assert at <= len(data)
        found.append(Frame(data[begin - 6], data[begin - 5], stream, data[begin:at]))
    return found


def is_empty(outgoing: Outgoing) -> bool:
    """Whether nothing is remembered of any stream."""
    return not (outgoing._flows or outgoing._turns or outgoing._held_up or outgoing._shut)


class Model:
    """One stream: what was put and not yet seen to leave, and its window."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.queue: list[bytes | Frame | int] = []  # data, a frame, or the number of a `sent`


class Sending(RuleBasedStateMachine):
    """Random steps; each take is compared with the model, frame by frame."""

    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.outgoing = Outgoing()
        self.models: dict[int, Model] = {}
        self.window = self.first_window = frames.FIRST_WINDOW
        self.frame_bytes = frames.FRAME_BYTES
        self.next_stream = 1
        self.number = 0
        self.told: list[int] = []
        self.fill = 0

    def made(self, size: int) -> bytes:
        """Data that differs from all other, so that order is seen."""
        self.fill += 1
        return (self.fill.to_bytes(4, "big") * (size // 4 + 1))[:size]

    def sent(self, stream: int, wanted: bool) -> Callable[[], None] | None:
        if not wanted:
            return None
        self.number += 1
        number = self.number
        self.models[stream].queue.append(number)
        return lambda: self.told.append(number)

    @rule(target=streams)
    def open(self) -> int:
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        self.outgoing.open(stream)
        self.models[stream] = Model(self.first_window)
        return stream

    @rule(stream=streams, drawn=st.lists(sizes, max_size=3), wanted=st.booleans())
    def put(self, stream: int, drawn: list[int], wanted: bool) -> None:
        pieces = [self.made(size) for size in drawn]
        self.models[stream].queue += [piece for piece in pieces if piece]
        self.outgoing.put(stream, pieces, self.sent(stream, wanted))

    @rule(stream=streams, wanted=st.booleans())
    def put_frame(self, stream: int, wanted: bool) -> None:
        payload = self.made(12)
        self.models[stream].queue.append(Frame(frames.HEADERS, 4, stream, payload))
        self.outgoing.put_frame(stream, frames.frame(frames.HEADERS, 4, stream, payload), self.sent(stream, wanted))

    @rule(stream=streams)
    def clear(self, stream: int) -> None:
        self.outgoing.clear(stream)
        self.models[stream].queue.clear()

    @rule(stream=consumes(streams))
    def drop(self, stream: int) -> None:
        self.outgoing.drop(stream)
        del self.models[stream]

    @rule(more=st.one_of(st.integers(1, 300_000), st.just(frames.LARGEST_WINDOW)))
    def grow_all(self, more: int) -> None:
        if self.window + more > frames.LARGEST_WINDOW:
            with pytest.raises(ConnectionFault):
                self.outgoing.grow(0, more)
            return
        self.outgoing.grow(0, more)
        self.window += more

    @rule(stream=streams, more=st.one_of(st.integers(1, 300_000), st.just(frames.LARGEST_WINDOW)))
    def grow(self, stream: int, more: int) -> None:
        model = self.models[stream]
        if model.window + more > frames.LARGEST_WINDOW:
            with pytest.raises(StreamFault):
                self.outgoing.grow(stream, more)
            return
        self.outgoing.grow(stream, more)
        model.window += more

    @rule(size=st.one_of(st.just(0), st.integers(0, 200_000)))
    def set_first_window(self, size: int) -> None:
        change = size - self.first_window
        if any(model.window + change > frames.LARGEST_WINDOW for model in self.models.values()):
            return  # the connection would end
        self.outgoing.set_first_window(size)
        self.first_window = size
        for model in self.models.values():
            model.window += change

    @rule(size=st.integers(frames.FRAME_BYTES, 2**24 - 1))
    def set_frame_bytes(self, size: int) -> None:
        self.outgoing.set_frame_bytes(size)
        self.frame_bytes = size

    @rule(most=st.one_of(st.integers(1, 300_000), st.just(MUCH)))
    def take(self, most: int) -> None:
        before = self.told
        self.told = []
        found = cut(self.outgoing.take(most))
        expected: list[int] = []
        used = 0
        for it in found:
            assert used < most, "a frame more than was asked for"
            used += len(it.payload)
            self.leave(it, expected)
        for model in self.models.values():
            while model.queue and isinstance(model.queue[0], int) and used < most:
                expected.append(model.queue.pop(0))  # type: ignore[arg-type]
        # Those of other streams may come in any order, and when enough was taken they may wait with their stream.
        assert sorted(self.told) == sorted(expected) or (used >= most and set(self.told) >= set(expected))
        for model in self.models.values():
            model.queue = [it for it in model.queue if it not in self.told or not isinstance(it, int)]
        self.told = before + self.told
        if used < most:
            self.nothing_stays_back()

    def leave(self, it: Frame, expected: list[int]) -> None:
        """One frame leaves the model."""
        model = self.models[it.stream]
        queue = model.queue
        self.skip(queue, expected)
        if it.kind != frames.DATA:
            assert queue.pop(0) == it
        else:
            assert it.flags == 0
            assert 0 < len(it.payload) <= min(self.window, model.window, self.frame_bytes)
            self.window -= len(it.payload)
            model.window -= len(it.payload)
            rest = it.payload
            while rest:
                piece = queue.pop(0)
                assert isinstance(piece, bytes)
                assert rest[: len(piece)] == piece[: len(rest)]
                if len(piece) > len(rest):
                    queue.insert(0, piece[len(rest) :])
                rest = rest[len(piece) :]
        self.skip(queue, expected)  # with the last of what came before it

    @staticmethod
    def skip(queue: list[bytes | Frame | int], expected: list[int]) -> None:
        """Those who are told now."""
        while queue and isinstance(number := queue[0], int):
            expected.append(number)
            del queue[0]

    def nothing_stays_back(self) -> None:
        for stream, model in self.models.items():
            if model.queue:
                assert isinstance(model.queue[0], bytes), f"stream {stream} has a frame that needs no window"
                assert min(self.window, model.window) <= 0, f"stream {stream} could send"

    @invariant()
    def told_once(self) -> None:
        assert len(self.told) == len(set(self.told))

    @precondition(lambda self: not self.models)
    @invariant()
    def empty_when_all_are_dropped(self) -> None:
        assert is_empty(self.outgoing)


Sending.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSending = Sending.TestCase


# ── Single rules ─────────────────────────────────────────────────────────────────────────────────────────────────────


def stream_order(taken: list[bytes | memoryview]) -> list[int]:
    """The streams of the frames, each run of a stream once."""
    order: list[int] = []
    for it in cut(taken):
        if order[-1:] != [it.stream]:
            order.append(it.stream)
    return order


def roomy() -> Outgoing:
    """With windows that are never in the way."""
    outgoing = Outgoing()
    outgoing.set_first_window(frames.LARGEST_WINDOW)
    outgoing.grow(0, frames.LARGEST_WINDOW - frames.FIRST_WINDOW)
    return outgoing


def test_streams_take_turns() -> None:
    """A usual reply leaves whole; of long ones each sends a part, and the short one is not behind all of them."""
    outgoing = roomy()
    for stream, size in ((1, 3 * TURN_BYTES), (3, 3 * TURN_BYTES), (5, 1000)):
        outgoing.open(stream)
        outgoing.put(stream, [bytes(size)])
    assert stream_order(outgoing.take(MUCH)) == [1, 3, 5, 1, 3, 1, 3]
    assert outgoing.take(MUCH) == []


def test_a_turn_goes_on_with_the_next_stream_in_the_next_take() -> None:
    outgoing = roomy()
    for stream in (1, 3):
        outgoing.open(stream)
        outgoing.put(stream, [bytes(3 * TURN_BYTES)])
    assert [stream_order(outgoing.take(TURN_BYTES)) for _ in range(6)] == [[1], [3]] * 3


def test_those_held_up_by_the_connection_s_window_take_turns_too() -> None:
    """Whoever waits longest is first, however little the window grows."""
    outgoing = Outgoing()
    for stream in (1, 3, 5):
        outgoing.open(stream)
        outgoing.put(stream, [bytes(60_000)])
    assert stream_order(outgoing.take(MUCH)) == [1, 3]
    order = []
    for _ in range(6):
        outgoing.grow(0, 10)
        order += stream_order(outgoing.take(MUCH))
    assert sorted(order[:2]) == [3, 5]
    assert sorted(order[2:4]) == [3, 5]


@pytest.mark.parametrize("closed", ["connection", "stream"])
def test_refusals_pass_a_closed_window(closed: str) -> None:
    outgoing = Outgoing()
    outgoing.open(1)
    if closed == "stream":
        outgoing.set_first_window(0)
        outgoing.grow(1, 10)
    outgoing.put(1, [bytes(frames.FIRST_WINDOW)])
    outgoing.put_frame(1, frames.frame(frames.HEADERS, 5, 1, b"late"))
    outgoing.take(MUCH)
    outgoing.put(1, [b"stuck"])
    outgoing.open(3)
    outgoing.put_frame(3, frames.frame(frames.HEADERS, 5, 3, b"refused"))
    assert stream_order(outgoing.take(MUCH))[-1] == 3
    outgoing.clear(1)
    outgoing.put_frame(1, frames.frame(frames.HEADERS, 5, 1, b"cut"))
    assert [it.payload for it in cut(outgoing.take(MUCH))] == [b"cut"]


def test_a_window_may_become_negative() -> None:
    """Settings that come in between (RFC 9113, section 6.9.2)."""
    outgoing = Outgoing()
    outgoing.open(1)
    outgoing.put(1, [bytes(60_000)])
    outgoing.take(50_000)
    outgoing.set_first_window(100)
    outgoing.grow(1, 10_000)
    outgoing.put(1, [b"x"])
    rest = cut(outgoing.take(MUCH))
    assert rest == []
    outgoing.set_first_window(frames.FIRST_WINDOW)
    assert cut(outgoing.take(MUCH))[-1].payload[-1:] == b"x"


def test_whoever_is_told_may_drop_the_stream() -> None:
    outgoing = Outgoing()
    for stream in (1, 3):
        outgoing.open(stream)
    outgoing.put_frame(1, frames.frame(frames.HEADERS, 5, 1), lambda: outgoing.drop(1))
    outgoing.put(3, [b"x"], lambda: outgoing.drop(3))
    assert stream_order(outgoing.take(MUCH)) == [1, 3]
    assert is_empty(outgoing)


@pytest.mark.parametrize("size", [0, 1, frames.FRAME_BYTES - 1, 2**24, 2**32 - 1])
def test_frames_that_are_too_small_or_large_cannot_be_agreed(size: int) -> None:
    with pytest.raises(ConnectionFault) as caught:
        Outgoing().set_frame_bytes(size)
    assert caught.value.code == ErrorCode.PROTOCOL_ERROR


def test_first_windows_have_a_limit() -> None:
    with pytest.raises(ConnectionFault) as caught:
        Outgoing().set_first_window(frames.LARGEST_WINDOW + 1)
    assert caught.value.code == ErrorCode.FLOW_CONTROL_ERROR
    outgoing = Outgoing()
    outgoing.open(1)
    outgoing.grow(1, 1)
    with pytest.raises(ConnectionFault) as caught:
        outgoing.set_first_window(frames.LARGEST_WINDOW)
    assert caught.value.code == ErrorCode.FLOW_CONTROL_ERROR


def test_what_is_sent_can_be_read() -> None:
    """By the reader of the other direction, whose frames are the smallest that are allowed."""
    outgoing = Outgoing()
    outgoing.open(1)
    outgoing.put(1, [bytes(10), bytes(40_000)])
    data = b"".join(outgoing.take(MUCH))
    assert [len(it.payload) for it in FrameReader().feed(frames.PREFACE + data)] == [16_384, 16_384, 40_010 - 32_768]
