"""One connection: its calls, its frames out, its end."""

import asyncio
import contextlib
import fcntl
import logging
import math
import random
import socket
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from encserve_server.http2 import frames
from encserve_server.http2.calls import Call
from encserve_server.http2.frames import ConnectionFault, ErrorCode, frame
from encserve_server.http2.headers import MAX_HEADER_LIST_BYTES, RequestHead
from encserve_server.http2.incoming import WINDOW_BYTES
from encserve_server.http2.intake import CONNECTION_WINDOW_BYTES, Intake
from encserve_server.http2.outgoing import Outgoing

logger = logging.getLogger(__name__)

# What may wait in the transport before data is held back, and before the other end is taken for one that never reads.
_HIGH_WATER_BYTES = 1024 * 1024
_UNREAD_BYTES = 16 * 1024 * 1024
# After so many times the first others have their turn.
_FLUSH_TURNS = 4
# After so much at once the others have their turn: uvloop reads up to 8 MB of one connection in a row.
_TURN_BYTES = 64 * 1024
_HANDSHAKE_SECONDS = 20.0
# How long a client may take to learn that it should not begin new calls here.
_GOAWAY_SECONDS = 1.0
# How long the last octets may take to leave.
_CLOSE_SECONDS = 5.0
_GOAWAY_PING = b"goodbye!"

Lookup = Callable[[str], "grpc.RpcMethodHandler[Any, Any] | None"]


@dataclass(slots=True)
class Limits:
    """What a connection may do.

    Attributes:
        max_message_bytes: The largest message that is taken.
        max_calls: How many calls may be open; more are refused, and clients wait or go elsewhere.
        max_age_seconds: How long it may last, give or take a tenth; None for ever.
    """

    max_message_bytes: int
    max_calls: int
    max_age_seconds: float | None = None


@dataclass(slots=True)
class Shared:
    """What all connections of a server have in common.

    Attributes:
        lookup: A path's handler.
        limits: What each may do.
        open: Those that are open.
        closed: Called when one has ended.
        stopping: Whether new ones should go elsewhere at once.
        stopped: Whether nothing is taken any more.
    """

    lookup: Lookup
    limits: Limits
    closed: Callable[[], None]
    open: "set[Connection]" = field(default_factory=set)
    stopping: bool = False
    stopped: bool = False


class Connection(asyncio.Protocol):
    """A client's connection, from its first octet to its last."""

    def __init__(self, shared: Shared) -> None:
        """Takes what connections share."""
        self.loop = asyncio.get_running_loop()
        self.peer = ""
        self._shared = shared
        self._transport: asyncio.Transport = None  # type: ignore[assignment] # until there is one
        self.outgoing = Outgoing()
        self.calls: dict[int, Call] = {}
        self._intake = Intake(self)
        self._control: list[bytes] = []
        self._paused = False
        self._flush_scheduled = False
        self._ended = False  # nothing more is taken, and nothing more than what is written is sent
        self._leaving = False  # the client knows that it should begin no calls
        self._last_taken: int | None = None  # the last stream that is still answered, once that is settled
        self._timers: list[asyncio.TimerHandle] = []

    # ── asyncio.Protocol ─────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greets the client with our settings."""
        self._transport = cast("asyncio.Transport", transport)
        _keep_alive(transport.get_extra_info("socket"))
        self.peer = _peer(transport.get_extra_info("peername"))
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self._shared.open.add(self)
        if self._shared.stopped:
            self._transport.abort()
            return
        limits = self._shared.limits
        self._control.append(
            frames.settings_frame(
                {
                    frames.MAX_CONCURRENT_STREAMS: limits.max_calls,
                    frames.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
                    frames.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
                }
            )
        )
        self._control.append(frames.window_update(0, CONNECTION_WINDOW_BYTES - frames.FIRST_WINDOW))
        self._timers.append(self.loop.call_later(_HANDSHAKE_SECONDS, self._check_settled))
        if limits.max_age_seconds is not None:
            spread = random.uniform(0.9, 1.1)  # noqa: S311 - so that clients do not all come back at once
            self._timers.append(self.loop.call_later(spread * limits.max_age_seconds, self.leave))
        if self._shared.stopping:
            self.leave()
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Takes what has come."""
        if self._over:
            return
        try:
            self._intake.feed(data)
        except ConnectionFault as fault:
            self._fail(fault)
        except Exception:
            logger.exception("unexpected error in a connection")
            self._fail(ConnectionFault(ErrorCode.INTERNAL_ERROR, "internal error"))
        else:
            self._flush()
            if len(data) >= _TURN_BYTES and not self._over:
                self._transport.pause_reading()
                self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """The client sends nothing more, and as with gRPC's own server its calls end."""
        self._abort_if_unread(math.inf)
        return False

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._paused = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._paused = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, and with it its calls."""
        del exc
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._shared.open.discard(self)
        for call in list(self.calls.values()):
            call.cancel()
        self._shared.closed()

    # ── For the server ───────────────────────────────────────────────────────────────────────────────────────────────

    def leave(self) -> None:
        """Asks the client to begin new calls elsewhere; those that are on their way here are still taken.

        Two GOAWAYs, as RFC 9113, section 6.8 has it: the last call's number is only known when the client has read the
        first one.
        """
        if self._leaving or self._over:
            return
        self._leaving = True
        self._control.append(frames.goaway(frames.LARGEST_WINDOW, ErrorCode.NO_ERROR))
        self._control.append(frame(frames.PING, 0, 0, _GOAWAY_PING))
        self._timers.append(self.loop.call_later(_GOAWAY_SECONDS, self._left))
        self._flush()

    def cancel_calls(self) -> None:
        """Ends every call, and the connection with them."""
        for call in list(self.calls.values()):
            call.end(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
        self._say_goodbye(ErrorCode.NO_ERROR)
        self._flush()
        self._hang_up()
        self._timers.append(self.loop.call_later(_CLOSE_SECONDS, self._transport.abort))  # read or not

    # ── For calls: calls.Link ────────────────────────────────────────────────────────────────────────────────────────

    def send(self, stream: int, data: list[bytes], sent: Callable[[], None] | None) -> None:
        """Sends data, and calls `sent` when the last of it is on its way."""
        self.outgoing.put(stream, data, sent)
        self._flush_soon()

    def send_frame(self, stream: int, it: bytes, sent: Callable[[], None] | None) -> None:
        """Sends a whole frame after that."""
        self.outgoing.put_frame(stream, it, sent)
        self._flush_soon()

    def discard(self, stream: int) -> None:
        """Forgets what is still to be sent."""
        self.outgoing.clear(stream)

    def credit(self, stream: int, more: int) -> None:
        """Lets the caller send more."""
        self._control.append(frames.window_update(stream, more))
        self._flush_soon()

    def close(self, call: Call, code: ErrorCode | None) -> None:
        """The call is over; a code resets the stream."""
        self.outgoing.drop(call.stream)
        if self.calls.pop(call.stream, None) is None:
            return
        if code is not None:
            self._control.append(frames.reset(call.stream, code))
            self._flush_soon()
        if not self.calls:
            self.loop.call_soon(self._hang_up_if_left)  # its last frame is about to be written

    # ── For the intake: intake.Host ──────────────────────────────────────────────────────────────────────────────────

    def post(self, it: bytes) -> None:
        """Sends a frame of the connection's own, once what has come is taken."""
        self._control.append(it)

    def open_call(self, stream: int, head: RequestHead) -> Call | None:
        """A new call, or None if no more are taken."""
        limits = self._shared.limits
        if self._last_taken is not None or len(self.calls) >= limits.max_calls:
            return None
        self.outgoing.open(stream)
        call = Call(self, stream, head, self._shared.lookup(head.path), limits.max_message_bytes)
        self.calls[stream] = call
        return call

    def pinged(self, payload: bytes) -> None:
        """A ping of ours has come back."""
        if payload == _GOAWAY_PING:
            self._left()

    # ── Out, and the end ─────────────────────────────────────────────────────────────────────────────────────────────

    def _flush_soon(self) -> None:
        """Writes once for all that is sent meanwhile."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Writes what can be written now."""
        self._flush_scheduled = False
        transport = self._transport
        for _ in range(_FLUSH_TURNS):
            if self._over:
                break
            # What a call's end adds to these while it is taken comes after its last frame.
            ready: list[bytes | memoryview] = [*self._control]
            self._control.clear()
            if not self._paused:
                ready += self.outgoing.take(_HIGH_WATER_BYTES)
            if not ready:
                break
            transport.writelines(ready)
        else:
            self._flush_soon()  # a client that reads as fast as we write would keep everybody else waiting
        if self._paused and not self._over and transport.get_write_buffer_size() > _UNREAD_BYTES:
            logger.warning("a client asks and never reads", extra={"peer": self.peer})
            transport.abort()

    def _check_settled(self) -> None:
        if not self._intake.settled:
            self._fail(ConnectionFault(ErrorCode.SETTINGS_TIMEOUT, f"no settings within {_HANDSHAKE_SECONDS:.0f} s"))

    def _fail(self, fault: ConnectionFault) -> None:
        """Ends the connection, and says why."""
        logger.debug("a connection broke the protocol: %s", fault, extra={"peer": self.peer})
        self._say_goodbye(fault.code, str(fault))
        self._flush()
        for call in list(self.calls.values()):
            call.cancel()
        self._hang_up()

    def _say_goodbye(self, code: ErrorCode, text: str = "") -> None:
        """GOAWAY with the last call that was taken, which must not become a later one."""
        last = self._intake.last_stream if self._last_taken is None else self._last_taken
        self._control.append(frames.goaway(last, code, text))

    def _left(self) -> None:
        """The client has read that it should begin nothing more."""
        if self._last_taken is None:
            self._last_taken = self._intake.last_stream
            self._say_goodbye(ErrorCode.NO_ERROR)
            self._flush()
            self._hang_up_if_left()

    def _hang_up_if_left(self) -> None:
        if self._last_taken is not None and not self.calls:
            self._hang_up()

    @property
    def _over(self) -> bool:
        return self._ended or self._transport.is_closing()

    def _hang_up(self) -> None:
        """Ends our half once everything is written; the connection ends when the client has read that, or soon.

        Closed at once, the system would answer whatever the client still sends, such as credit for what it reads, by
        throwing away what it has not read yet.
        """
        if not self._over:
            self._ended = True
            with contextlib.suppress(OSError):  # the client has gone
                self._transport.write_eof()
            self._abort_if_unread(math.inf)

    def _abort_if_unread(self, before: float) -> None:
        """Gives up on a client that has read nothing of what is left since it was last looked."""
        connected = self._transport.get_extra_info("socket")
        unread = self._transport.get_write_buffer_size() + _unread_bytes(connected)
        if unread < before:  # at first in any case
            self._timers.append(self.loop.call_later(_CLOSE_SECONDS, self._abort_if_unread, unread))
        else:
            self._transport.abort()


def _unread_bytes(connected: Any) -> int:
    """What the system holds that the other end has not acknowledged."""
    try:
        return int.from_bytes(fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        return 0


def _keep_alive(connected: Any) -> None:
    """Has the system notice clients that vanish, within two minutes."""
    if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The first three for those of whom nothing is awaited, in seconds; the last one for what is not acknowledged.
        for name, value in (
            *(("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)),
            ("TCP_USER_TIMEOUT", 120_000),
        ):
            if hasattr(socket, name):  # macOS lacks the first
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _peer(address: Any) -> str:
    """An address much as gRPC writes it."""
    if not isinstance(address, tuple):  # it has gone already
        return "unknown"
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
