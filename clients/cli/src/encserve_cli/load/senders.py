"""Calls as bytes in and bytes out, over Encode or over EncodeStream: as little work as gRPC allows.

The generator mostly shares its machine with the server, so what it computes the server does not: an answer to Encode is
not parsed here, and one on a stream only for whose it is.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from encserve_cli.load.calls import Call
from encserve_client import Tls
from encserve_proto.v1 import encoder_pb2 as pb

SERVICE = "encserve.v1.EncoderService"
# The server reads so many requests of a stream ahead, by default; more would wait in the stream itself.
STREAM_CALLS = 64
WRONG_ANSWER = "WRONG_ANSWER"
_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


class CallFailed(Exception):
    """A call was not answered as wanted.

    Attributes:
        label: The status code and, after a space, the server's reason if it gave one: "RESOURCE_EXHAUSTED QUEUE_FULL".
    """

    def __init__(self, code: str, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.label = f"{code} {reason}" if reason else code


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach the server; see `EncoderClient` for its arguments."""

    target: str
    tls: Tls | bool = False
    token: str | None = None

    def open(self) -> grpc.aio.Channel:
        """A channel of one's own, on the running loop. One is enough: several made no difference."""
        options: list[tuple[str, str | int]] = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self.target.startswith("dns:") or "," in self.target:  # several servers, which take turns
            balancing = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": SERVICE}}
            options.append(("grpc.service_config", json.dumps(balancing)))
        tls = Tls() if self.tls is True else self.tls or None
        if tls is None:
            return grpc.aio.insecure_channel(self.target, options=options)
        if tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", tls.server_name))
        return grpc.aio.secure_channel(self.target, tls.credentials(), options=options)

    def options(self, timeout_seconds: float) -> dict[str, Any]:
        """What gRPC is told of a call that may take so long."""
        metadata = () if self.token is None else (("authorization", f"Bearer {self.token}"),)
        return {"timeout": timeout_seconds, "metadata": metadata}


class Sender(Protocol):
    """Makes calls, many at a time."""

    async def send(self, call: Call) -> bytes:
        """The EncodeResponse's bytes. Raises CallFailed."""

    async def aclose(self) -> None:
        """Ends what is open."""


class UnarySender:
    """Makes calls by Encode; `options` are those of each."""

    def __init__(self, channel: grpc.aio.Channel, options: dict[str, Any]) -> None:
        self._method: Any = channel.unary_unary(f"/{SERVICE}/Encode")
        self._options = options

    async def send(self, call: Call) -> bytes:
        """See `Sender`."""
        try:
            answer: bytes = await self._method(call.data, **self._options)
        except grpc.aio.AioRpcError as error:
            raise _failed_call(error) from None
        return answer

    async def aclose(self) -> None:
        """See `Sender`: nothing is."""


class StreamSender:
    """Makes calls over streams that stay open, each call on the next one in turn; `options` are those of a stream."""

    def __init__(self, channel: grpc.aio.Channel, options: dict[str, Any], n_streams: int) -> None:
        method: Any = channel.stream_stream(f"/{SERVICE}/EncodeStream")
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
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._n_calls = 0

    async def send(self, call: Call) -> bytes:
        """See `Sender`."""
        self._n_calls += 1
        request = pb.EncodeStreamRequest(request_id=str(self._n_calls))
        request.request.MergeFromString(call.data)
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = answered
        try:
            async with self._writing:
                if self._rpc is None:
                    self._rpc = self._method(**self._options)
                    self._reader = asyncio.create_task(self._read(self._rpc))
                if not answered.done():
                    await self._rpc.write(request.SerializeToString())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader learns why, and says so to all who wait
        return await answered

    async def aclose(self) -> None:
        """Ends the stream."""
        if self._rpc is not None:
            self._rpc.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self, rpc: Any) -> None:
        failure = CallFailed("UNAVAILABLE", "the stream ended")
        try:
            async for data in rpc:
                self._settle(data)
        except grpc.aio.AioRpcError as error:
            failure = _failed_call(error)
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
        try:
            message = pb.EncodeStreamResponse.FromString(data)
        except Exception as error:
            raise CallFailed(WRONG_ANSWER, "the answer is no EncodeStreamResponse") from error
        answered = self._waiting.pop(message.request_id, None)
        if answered is None:
            raise CallFailed(WRONG_ANSWER, f"an answer to {message.request_id!r}, which nobody asked")
        if message.HasField("error"):
            code = _CODE_NAMES.get(message.error.code, "UNKNOWN")
            answered.set_exception(CallFailed(code, message.error.message, message.error.reason))
        else:
            answered.set_result(message.response.SerializeToString())


def _failed_call(error: grpc.aio.AioRpcError) -> CallFailed:
    """A status other than OK."""
    reason = dict(error.trailing_metadata() or ()).get("encserve-error-reason", "")
    return CallFailed(error.code().name, error.details() or "", str(reason))
