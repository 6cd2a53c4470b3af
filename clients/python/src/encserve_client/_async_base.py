"""What the client for asyncio stands on: its channel, and driving a call to its end."""

import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from encserve_client._base import BaseClient, shown
from encserve_client._exceptions import CallCancelledError, ClientClosedError
from encserve_client._inputs import Input
from encserve_client._stream_run import StreamRun
from encserve_client._tracing import with_trace
from encserve_client._wire_async import AsyncWire
from encserve_proto.v1.encoder_pb2_grpc import EncoderServiceStub

T = TypeVar("T")


class AsyncBase(BaseClient):
    """Holds a channel for asyncio; see `AsyncEncoderClient`."""

    _channel: grpc.aio.Channel | None
    _stub: Any

    def _set_up(self) -> None:
        self._channel = None  # made when first used, because it belongs to a loop
        self._stub = None

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel. Calls that other tasks are still in raise `ClientClosedError`. May be called again."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    def _wire(self, inputs: Iterable[Input] | AsyncIterable[Input] = ()) -> AsyncWire:
        self._check_open()
        if self._channel is None:
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self._target, self._channel_options)
            else:
                self._channel = grpc.aio.secure_channel(self._target, self._credentials, self._channel_options)
            self._stub = EncoderServiceStub(self._channel)
        return AsyncWire(self._stub, with_trace(self._metadata), time.monotonic, _iterate(inputs))

    async def _drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return await coroutine
        except CallCancelledError as error:  # gRPC cancels what is going on when the channel is closed
            if self._closed:
                raise ClientClosedError("the client was closed during the call") from error
            raise

    async def _results(self, run: StreamRun, ordered: bool, return_exceptions: bool) -> AsyncGenerator[Any, None]:
        try:
            while (result := await self._drive(run.next())) is not None:
                yield shown(*result, ordered, return_exceptions)
        finally:
            await run.aclose()


async def _iterate(inputs: Iterable[Input] | AsyncIterable[Input]) -> AsyncIterator[Input]:
    """Makes any iterable an async one."""
    if isinstance(inputs, AsyncIterable):
        async for item in inputs:
            yield item
    else:
        for item in inputs:
            yield item
