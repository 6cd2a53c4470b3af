"""A client that speaks HTTP/2 frame by frame, also such as no decent client would send."""

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

import hpack

from encserve_server.http2 import frames
from encserve_server.http2.frames import ErrorCode, Frame, frame

# An answer comes at once; this is for machines that stall.
PATIENCE_SECONDS = 30.0


def message(data: bytes, flag: int = 0) -> bytes:
    """A message as gRPC frames it."""
    return bytes((flag,)) + len(data).to_bytes(4, "big") + data


def data_frame(stream: int, payload: bytes, *, end: bool = False) -> bytes:
    """A DATA frame."""
    return frame(frames.DATA, frames.END_STREAM if end else 0, stream, payload)


@dataclass
class Answer:
    """What came back on one stream.

    Attributes:
        head: The first header block.
        data: What all DATA frames carried.
        trailers: The last header block, which is also the first when there was nothing else.
        reset: The code of RST_STREAM, if one came before or just after the end.
    """

    head: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    reset: int | None = None

    @property
    def status(self) -> int:
        """grpc-status; -1 if there is none."""
        return int(self.trailers.get("grpc-status", "-1"))

    @property
    def messages(self) -> list[bytes]:
        """The messages that are whole."""
        found, rest = [], self.data
        while len(rest) >= 5 and len(rest) >= 5 + (size := int.from_bytes(rest[1:5], "big")):
            found.append(rest[5 : 5 + size])
            rest = rest[5 + size :]
        return found


class RawClient:
    """One connection.

    Attributes:
        seen: All frames that have come and that nobody has waited for, in their order.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes an open connection."""
        self.reader = reader
        self.writer = writer
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        self.seen: list[Frame] = []
        self.acknowledges = True

    @classmethod
    async def connect(cls, port: int, settings: dict[int, int] | None = None, *, greets: bool = True) -> Self:
        """Connects, and says what a client says first."""
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        if greets:
            client.send(frames.PREFACE, frames.settings_frame(settings or {}))
        return client

    def send(self, *data: bytes) -> None:
        """Sends these octets."""
        self.writer.write(b"".join(data))

    def headers(self, fields: Iterable[tuple[str, str]]) -> bytes:
        """A header block: with Huffman codes, and with references to earlier ones."""
        return bytes(self.encoder.encode(list(fields)))

    def head(
        self, stream: int, path: str, *fields: tuple[str, str], end: bool = False, replace: dict[str, str] | None = None
    ) -> bytes:
        """The HEADERS frame that a call begins with; `replace` changes the usual fields."""
        usual = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
            **(replace or {}),
        }
        block = self.headers([*usual.items(), *fields])
        return frame(frames.HEADERS, frames.END_HEADERS | (frames.END_STREAM if end else 0), stream, block)

    def call(self, stream: int, path: str, *messages: bytes, fields: Iterable[tuple[str, str]] = ()) -> None:
        """Sends a whole call."""
        payload = b"".join(message(it) for it in messages)
        self.send(self.head(stream, path, *fields), data_frame(stream, payload, end=True))

    async def read(self) -> Frame | None:
        """The next frame; None at the end of the connection. Settings and pings are acknowledged."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                head = await self.reader.readexactly(frames.FRAME_HEADER_BYTES)
                high, low, kind, flags, stream = struct.unpack(">BHBBI", head)
                it = Frame(kind, flags, stream, await self.reader.readexactly(high << 16 | low))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.writer.close()  # as clients do when the server has ended its half
            return None
        if self.acknowledges and not it.flags & frames.ACK and it.kind in {frames.SETTINGS, frames.PING}:
            self.send(frame(it.kind, frames.ACK, 0, it.payload if it.kind == frames.PING else b""))
        return it

    async def wait_for(self, suits: Callable[[Frame], bool]) -> Frame:
        """The first frame that suits and that nobody has waited for."""
        for at, it in enumerate(self.seen):
            if suits(it):
                return self.seen.pop(at)
        while (got := await self.read()) is not None:
            if suits(got):
                return got
            self.seen.append(got)
        raise AssertionError(f"the connection ended; before that came {self.seen}")

    async def frame_of(self, kind: int, stream: int = 0) -> Frame:
        """The next frame of this kind on this stream."""
        return await self.wait_for(lambda it: it.kind == kind and it.stream == stream)

    async def answer(self, stream: int) -> Answer:
        """What comes on a stream, to its end or its reset."""
        answer = Answer()
        while True:
            it = await self.wait_for(
                lambda it: it.stream == stream and it.kind in {frames.DATA, frames.HEADERS, frames.RST_STREAM}
            )
            if it.kind == frames.RST_STREAM:
                answer.reset = frames.read_number(it)
                return answer
            if it.kind == frames.DATA:
                answer.data += it.payload
            else:
                block = it.payload
                while not it.flags & frames.END_HEADERS:
                    ended = it.flags & frames.END_STREAM
                    it = await self.frame_of(frames.CONTINUATION, stream)
                    block += it.payload
                    it = it._replace(flags=it.flags | ended)
                fields = {str(name): str(value) for name, value in self.decoder.decode(block)}
                answer.head = answer.head or fields
                answer.trailers = fields
            if it.flags & frames.END_STREAM:
                return answer

    async def ping(self) -> None:
        """Waits until the server has taken, and answered, all that was sent before."""
        self.send(frame(frames.PING, 0, 0, b"are here"))
        await self.wait_for(lambda it: it.kind == frames.PING and bool(it.flags & frames.ACK))

    async def end(self) -> ErrorCode | None:
        """Waits for the end of the connection; returns what the last GOAWAY said."""
        while (it := await self.read()) is not None:
            self.seen.append(it)
        codes = [ErrorCode(struct.unpack(">II", it.payload[:8])[1]) for it in self.seen if it.kind == frames.GOAWAY]
        return codes[-1] if codes else None

    async def close(self) -> None:
        """Hangs up."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
