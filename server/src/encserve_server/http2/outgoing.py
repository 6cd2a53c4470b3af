"""What one connection is to send, as the other end's windows allow it (RFC 9113, section 5.2)."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from encserve_server.http2.frames import (
    DATA,
    FIRST_WINDOW,
    FRAME_BYTES,
    LARGEST_WINDOW,
    ConnectionFault,
    ErrorCode,
    StreamFault,
    frame_head,
)

# Longer frames than the least that everybody takes save a little; much longer ones hold up the others.
_MOST_FRAME_BYTES = 64 * 1024
# A stream sends so much before the next has its turn. A usual reply leaves whole: sharing would make all of them late.
_TURN_BYTES = 256 * 1024

Sent = Callable[[], None]


class _Flow:
    """One stream's part: data as memoryviews, frames that need no window as bytes, and whom to tell in between."""

    __slots__ = ("extra", "queue")

    def __init__(self) -> None:
        self.queue: deque[memoryview | bytes | Sent] = deque()
        self.extra = 0  # its window, less the one that streams begin with


class Outgoing:
    """The streams of a connection that have something to send. They take turns."""

    def __init__(self) -> None:
        """Begins with the windows that both ends assume before any SETTINGS."""
        self._window = FIRST_WINDOW
        self._first_window = FIRST_WINDOW
        self._frame_bytes = FRAME_BYTES
        self._flows: dict[int, _Flow] = {}
        # Not dicts: to find the first of one from which many first ones were taken, all of these are passed.
        self._turns: OrderedDict[int, None] = OrderedDict()  # those that could send, in order
        self._held_up: OrderedDict[int, None] = OrderedDict()  # those that only wait for the connection's window
        self._shut: OrderedDict[int, None] = OrderedDict()  # those that wait for their own
        # Looked at when something is taken: however often windows change until then, streams are passed once.
        self._connection_grew = False
        self._first_window_grew = False
        self._most_extra = 0  # no stream has ever had more

    def open(self, stream: int) -> None:
        """A stream that may send from now on."""
        self._flows[stream] = _Flow()

    def drop(self, stream: int) -> None:
        """Forgets a stream and what it had to send; nobody is told."""
        self._flows.pop(stream, None)
        self._turns.pop(stream, None)
        self._held_up.pop(stream, None)
        self._shut.pop(stream, None)

    def clear(self, stream: int) -> None:
        """Forgets what a stream has to send, and goes on with it."""
        flow = self._flows[stream]
        flow.queue.clear()

    def put(self, stream: int, data: Sequence[bytes], sent: Sent | None = None) -> None:
        """Data to be sent in order; `sent` is called when the last of it is on its way."""
        self._put(stream, [memoryview(piece) for piece in data if piece], sent)

    def put_frame(self, stream: int, frame: bytes, sent: Sent | None = None) -> None:
        """A whole frame that needs no window, after what is already to be sent."""
        self._put(stream, [frame], sent)

    def _put(self, stream: int, items: Sequence[memoryview | bytes], sent: Sent | None) -> None:
        queue = self._flows[stream].queue
        queue.extend(items)
        if sent is not None:
            queue.append(sent)
        self._turns[stream] = None

    def take(self, most_bytes: int) -> list[bytes | memoryview]:
        """What can be sent now, in order: about so much of it, more only by one frame."""
        taken: list[bytes | memoryview] = []
        if self._connection_grew:
            self._connection_grew = False
            self._wake(self._held_up)
        if self._first_window_grew:
            self._first_window_grew = False
            self._wake(self._shut)
        while self._turns and most_bytes > 0:
            stream, _ = self._turns.popitem(last=False)
            flow = self._flows[stream]
            used = self._turn(stream, flow, taken, min(most_bytes, _TURN_BYTES))
            most_bytes -= used
            if not flow.queue or stream not in self._flows:
                continue
            if not isinstance(flow.queue[0], memoryview):
                self._turns[stream] = None
            elif self._first_window + flow.extra <= 0:
                self._shut[stream] = None
            else:
                # One that has just sent goes behind those that have not, or it would always be the first.
                (self._turns if used or self._window > 0 else self._held_up)[stream] = None
        return taken

    def _wake(self, waiting: OrderedDict[int, None]) -> None:
        """Those that could not send may be able to; they have waited for longer than those whose turn is to come."""
        for stream in reversed(waiting):
            self._turns[stream] = None
            self._turns.move_to_end(stream, last=False)
        waiting.clear()

    def grow(self, stream: int, more: int) -> None:
        """A WINDOW_UPDATE; stream 0 is the connection.

        Raises:
            ConnectionFault: The connection's window would become too large.
            StreamFault: The stream's window would.
        """
        if stream == 0:
            if self._window + more > LARGEST_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {self._window} cannot grow by {more}")
            self._window += more
            self._connection_grew = True
        elif (flow := self._flows.get(stream)) is not None:
            window = self._first_window + flow.extra
            if window + more > LARGEST_WINDOW:
                raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {window} cannot grow by {more}")
            flow.extra += more
            self._most_extra = max(self._most_extra, flow.extra)
            if flow.queue:
                self._turns[stream] = None

    def set_first_window(self, size: int) -> None:
        """SETTINGS_INITIAL_WINDOW_SIZE: streams that are open gain or lose the difference (section 6.9.2).

        Raises:
            ConnectionFault: It is too large, or makes a stream's window so.
        """
        if size > LARGEST_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE of {size} is too large")
        if size + self._most_extra > LARGEST_WINDOW:
            self._most_extra = max((flow.extra for flow in self._flows.values()), default=0)
            if size + self._most_extra > LARGEST_WINDOW:
                raise ConnectionFault(
                    ErrorCode.FLOW_CONTROL_ERROR, f"a stream would have a window of {size + self._most_extra}"
                )
        self._first_window_grew |= size > self._first_window
        self._first_window = size

    def set_frame_bytes(self, size: int) -> None:
        """SETTINGS_MAX_FRAME_SIZE.

        Raises:
            ConnectionFault: It is not within what the protocol allows.
        """
        if not FRAME_BYTES <= size < 2**24:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {size} is not allowed")
        self._frame_bytes = min(size, _MOST_FRAME_BYTES)

    def _turn(self, stream: int, flow: _Flow, taken: list[bytes | memoryview], most_bytes: int) -> int:
        """Takes from one stream; returns how many bytes."""
        used = 0
        queue = flow.queue
        while queue and used < most_bytes:
            item = queue[0]
            if isinstance(item, memoryview):
                size = self._data_frame(stream, flow, taken)
                if not size:
                    break
                used += size
                continue
            queue.popleft()
            if isinstance(item, bytes):
                taken.append(item)
                used += len(item)
            else:
                item()
        while queue and not isinstance(queue[0], (memoryview, bytes)):
            queue.popleft()()  # type: ignore[operator]
        return used

    def _data_frame(self, stream: int, flow: _Flow, taken: list[bytes | memoryview]) -> int:
        """Takes one DATA frame, as large as windows and frames may be; returns its bytes, 0 if it must wait."""
        room = min(self._window, self._first_window + flow.extra, self._frame_bytes)
        if room <= 0:
            return 0
        queue, size = flow.queue, 0
        head_at = len(taken)
        taken.append(b"")
        while queue and size < room and isinstance(item := queue[0], memoryview):
            if len(item) <= room - size:
                taken.append(item)
                queue.popleft()
                size += len(item)
            else:
                taken.append(item[: room - size])
                queue[0] = item[room - size :]
                size = room
        taken[head_at] = frame_head(size, DATA, 0, stream)
        self._window -= size
        flow.extra -= size
        return size
