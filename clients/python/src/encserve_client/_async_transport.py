"""The part of the asyncio client that opens channels and makes calls."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Iterable, Iterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc
import grpc.aio

from encserve_client._base import BaseClient, trim_traceback
from encserve_client._grpc.async_wire import AsyncWire
from encserve_client._grpc.channel import Connection
from encserve_client._grpc.metadata import with_trace
from encserve_client.exceptions import EncserveError, InvalidInputError
from encserve_client.inputs import Input

R = TypeVar("R")
T = TypeVar("T")
StreamInputs: TypeAlias = Iterable[Input] | AsyncIterable[Input]
"""The inputs of a stream."""
Results: TypeAlias = AsyncGenerator[tuple[int, R], None]
"""The results of a stream, each with the index of its input."""


class AsyncTransport(BaseClient):
    """The base of the asyncio client. All calls must run in the event loop of the first call."""

    def _set_up(self) -> None:
        self._connection: Connection | None = None  # opened by the first call, in its event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._wires: weakref.WeakSet[AsyncWire] = weakref.WeakSet()

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel. Calls of other tasks raise `ClientClosedError`. A second call does nothing."""
        self._closed = True
        for connection in list(self._connections):
            await connection.channel.close()
        for wire in list(self._wires):
            wire.end_wait()

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await call
        except EncserveError as error:
            trim_traceback(error)
            raise

    async def _iterate(self, runs: AsyncGenerator[Iterator[tuple[int, R]], None]) -> Results[R]:
        async with aclosing(runs):
            async for results in runs:
                for result in results:
                    yield result

    def _wire(self, inputs: object = None) -> AsyncWire:
        self._check_open()
        self._check_loop()
        metadata = with_trace(self._metadata)
        async_inputs = inputs if isinstance(inputs, AsyncIterable) else None
        wire = AsyncWire(self._current_connection, metadata, async_inputs, lambda: self._closed, self._diagnosis)
        self._wires.add(wire)
        return wire

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise InvalidInputError("the client belongs to the event loop of its first call: make one client per loop")
        self._loop = loop

    async def _call_raw(self, path: str, request: bytes, **options: Any) -> Any:
        self._check_loop()
        connection = self._current_connection()  # the reference keeps the channel open
        return await connection.channel.unary_unary(path)(request, metadata=with_trace(self._metadata), **options)

    def _current_connection(self) -> Connection:
        """Return the connection for a new call. gRPC closes a channel without references."""
        self._check_open()
        changed = self._certificates.new_credentials()
        if self._connection is None or changed is not None:
            self._credentials = changed or self._credentials
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(self._target, self._channel_options)
            else:
                channel = grpc.aio.secure_channel(self._target, self._credentials, self._channel_options)
            self._connection = Connection(channel)
            self._connections.add(self._connection)
        return self._connection
