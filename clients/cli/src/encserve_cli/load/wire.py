"""Calls as bytes in and bytes out, over Encode or over EncodeStream: as little work as gRPC allows.

The generator mostly shares its machine with the server, so what it computes the server does not. Nothing is parsed here
but, of a stream's answers, whose they are.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from encserve_cli.load.calls import Call
from encserve_client import Tls
from encserve_client._grpc.channel import channel_options
from encserve_client._grpc.metadata import Metadata, call_metadata
from encserve_client._logic.failures import REASON_TRAILER
from encserve_proto.v1 import encoder_pb2 as pb

_SERVICE = "/encserve.v1.EncoderService"
_LARGEST_MESSAGE_BYTES = 2**31 - 1
# The server reads so many requests of a stream ahead, by default; more would wait in the stream itself.
STREAM_CALLS = 64
# Tags of EncodeStreamRequest and EncodeStreamResponse: field number × 8, and 2 for bytes with their length before them.
_REQUEST_ID, _REQUEST, _RESPONSE = 0x0A, 0x12, 0x12
WRONG_ANSWER = "WRONG_ANSWER"


class CallFailed(Exception):
    """A call was not answered as wanted.

    Attributes:
        label: The status code and, after a space, the server's reason if it gave one: "RESOURCE_EXHAUSTED QUEUE_FULL".
    """

    def __init__(self, label: str, text: str) -> None:
        super().__init__(text)
        self.label = label


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach the server; see `EncoderClient` for its arguments."""

    target: str
    tls: Tls | bool = False
    token: str | None = None

    def open(self) -> grpc.aio.Channel:
        """A channel of one's own, on the running loop. One is enough: several made no difference."""
        tls = Tls() if self.tls is True else self.tls or None
        options = [
            *channel_options(self.target, _LARGEST_MESSAGE_BYTES, tls, None),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if tls is None:
            return grpc.aio.insecure_channel(self.target, options=options)
        return grpc.aio.secure_channel(self.target, tls.credentials(), options=options)

    @property
    def metadata(self) -> Metadata:
        """What every call sends along."""
        return call_metadata(self.token, None)


class Sender(Protocol):
    """Makes calls, many at a time."""

    async def send(self, call: Call) -> bytes:
        """The EncodeResponse's bytes. Raises CallFailed."""

    async def aclose(self) -> None:
        """Ends what is open."""


class UnarySender:
    """Makes calls by Encode."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata, timeout_seconds: float) -> None:
        self._method: Any = channel.unary_unary(f"{_SERVICE}/Encode")
        self._options = {"timeout": timeout_seconds, "metadata": metadata or None}

    async def send(self, call: Call) -> bytes:
        """See `Sender`."""
        try:
            answer: bytes = await self._method(call.data, **self._options)
        except grpc.aio.AioRpcError as error:
            raise failed_call(error) from None
        return answer

    async def aclose(self) -> None:
        """See `Sender`: nothing is."""


class StreamSender:
    """Makes calls over streams that stay open, each call on the next one in turn."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata, timeout_seconds: float, n_streams: int) -> None:
        """`timeout_seconds` is how long a stream may live."""
        method: Any = channel.stream_stream(f"{_SERVICE}/EncodeStream")
        options = {"timeout": timeout_seconds, "metadata": metadata or None}
        self._streams = [_Stream(method, options) for _ in range(n_streams)]
        self._turn = 0

    async def send(self, call: Call) -> bytes:
        """See `Sender`."""
        self._turn = (self._turn + 1) % len(self._streams)
        return await self._streams[self._turn].send(call)

    async def aclose(self) -> None:
        """See `Sender`."""
        for stream in self._streams:
            await stream.aclose()


class _Stream:
    """One stream, opened when it is first used, and again after it broke."""

    def __init__(self, method: Any, options: dict[str, Any]) -> None:
        self._method = method
        self._options = options
        self._rpc: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._free: list[bytes] = []
        self._n_ids = 0

    async def send(self, call: Call) -> bytes:
        """See `Sender`."""
        request_id = self._free.pop() if self._free else self._new_id()
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answered
        try:
            async with self._writing:
                if self._rpc is None:
                    self._rpc = self._method(**self._options)
                    self._reader = asyncio.create_task(self._read(self._rpc))
                if not answered.done():
                    await self._rpc.write(stream_request(request_id, call.data))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader learns why, and says so to all who wait
        try:
            return await answered
        finally:
            # An id whose call was cancelled may still be answered, so it is not used again.
            if self._waiting.pop(request_id, None) is None:
                self._free.append(request_id)

    async def aclose(self) -> None:
        """Ends the stream."""
        if self._rpc is not None:
            self._rpc.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    def _new_id(self) -> bytes:
        self._n_ids += 1
        return b"%d" % self._n_ids

    async def _read(self, rpc: Any) -> None:
        failure = CallFailed("UNAVAILABLE", "the stream ended")
        try:
            while (data := await rpc.read()) is not grpc.aio.EOF:
                self._settle(data)
            if (code := await rpc.code()) is not grpc.StatusCode.OK:
                failure = CallFailed(code.name, await rpc.details() or "")
        except grpc.aio.AioRpcError as error:
            failure = failed_call(error)
        except CallFailed as error:
            rpc.cancel()
            failure = error
        finally:
            self._rpc = None
            for answered in self._waiting.values():
                if not answered.done():
                    answered.set_exception(failure)
            self._waiting.clear()

    def _settle(self, data: bytes) -> None:
        """Hands an answer to whoever waits for it. Raises CallFailed if nobody does."""
        request_id, answer = split_stream_response(data)
        answered = self._waiting.pop(request_id, None)
        if answered is None:
            raise CallFailed(WRONG_ANSWER, f"an answer to {request_id!r}, which nobody asked")
        if answered.done():
            return
        if isinstance(answer, CallFailed):
            answered.set_exception(answer)
        else:
            answered.set_result(answer)


def stream_request(request_id: bytes, request: bytes) -> bytes:
    """The bytes of an EncodeStreamRequest around those of a request. `request_id` has at most 127 bytes."""
    return b"%c%c%b%c%b%b" % (_REQUEST_ID, len(request_id), request_id, _REQUEST, _varint(len(request)), request)


def split_stream_response(data: bytes) -> tuple[bytes, bytes | CallFailed]:
    """The id of an EncodeStreamResponse, and the bytes of its response or what failed.

    Fields usually come in the order of their numbers; then nothing but three headers is looked at. Raises CallFailed if
    it is no EncodeStreamResponse.
    """
    if len(data) > 1 and data[0] == _REQUEST_ID and data[1] < 128:
        at = 2 + data[1]
        if at < len(data) and data[at] == _RESPONSE:
            size, begin = _read_varint(data, at + 1)
            if begin + size == len(data):
                return data[2:at], data[begin:]
    try:
        message = pb.EncodeStreamResponse.FromString(data)
    except Exception as error:
        raise CallFailed(WRONG_ANSWER, "the answer is no EncodeStreamResponse") from error
    if message.WhichOneof("result") == "error":
        code = _CODE_NAMES.get(message.error.code, "UNKNOWN")
        return message.request_id.encode(), CallFailed(_label(code, message.error.reason), message.error.message)
    return message.request_id.encode(), message.response.SerializeToString()


def failed_call(error: grpc.aio.AioRpcError) -> CallFailed:
    """A status other than OK."""
    reason = dict(error.trailing_metadata() or ()).get(REASON_TRAILER, "")
    return CallFailed(_label(error.code().name, str(reason)), error.details() or "")


_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


def _label(code: str, reason: str) -> str:
    return f"{code} {reason}" if reason else code


def _varint(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first, the top bit where more follow."""
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends; 0 if it does not."""
    number = shift = 0
    for place in range(at, min(at + 10, len(data))):
        number |= (data[place] & 127) << shift
        shift += 7
        if data[place] < 128:
            return number, place + 1
    return 0, len(data) + 1
