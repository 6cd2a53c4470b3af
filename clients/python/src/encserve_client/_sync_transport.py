"""The part of the client for threads that opens channels and makes calls."""

import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc

from encserve_client._base import BaseClient, trim_traceback
from encserve_client._grpc.channel import Connection
from encserve_client._grpc.metadata import with_trace
from encserve_client._grpc.sync_wire import SyncWire
from encserve_client._logic.wire import run_without_loop
from encserve_client.exceptions import EncserveError, InvalidInputError
from encserve_client.inputs import Input

R = TypeVar("R")
T = TypeVar("T")
StreamInputs: TypeAlias = Iterable[Input]
"""The inputs of a stream."""
Results: TypeAlias = Generator[tuple[int, R], None, None]
"""The results of a stream, each with the index of its input."""


class SyncTransport(BaseClient):
    """The base of the client for threads. Calls block the caller's thread. Several threads may share a client."""

    def _set_up(self) -> None:
        self._lock = threading.Lock()
        self._closers: weakref.WeakKeyDictionary[Connection, Callable[[], object]] = weakref.WeakKeyDictionary()
        self._wires: weakref.WeakSet[SyncWire] = weakref.WeakSet()
        self._connection = self._open()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel. Calls of other threads raise `ClientClosedError`. A second call does nothing."""
        with self._lock:
            self._closed = True
            closers = list(self._closers.values())
            wires = list(self._wires)
        for close in closers:
            close()
        for wire in wires:
            wire.end_wait()

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return run_without_loop(call)
        except EncserveError as error:
            trim_traceback(error)
            raise

    def _iterate(self, runs: AsyncGenerator[Iterator[tuple[int, R]], None]) -> Results[R]:
        try:
            while (results := run_without_loop(anext(runs, None))) is not None:
                yield from results
        finally:
            run_without_loop(runs.aclose())

    def _wire(self, inputs: object = None) -> SyncWire:
        self._check_open()
        if isinstance(inputs, AsyncIterable):
            raise InvalidInputError(
                f"must be an iterable; was {type(inputs).__name__}: for async iterables use AsyncEncoderClient",
                field="inputs",
            )
        wire = SyncWire(self._current_connection, with_trace(self._metadata), lambda: self._closed, self._diagnosis)
        with self._lock:
            self._wires.add(wire)
        return wire

    def _call_raw(self, path: str, request: bytes, **options: Any) -> Any:
        connection = self._current_connection()  # the reference keeps the channel open
        return connection.channel.unary_unary(path)(request, metadata=with_trace(self._metadata), **options)

    def _open(self) -> Connection:
        """Create a channel. The channel connects when the first call uses it."""
        if self._credentials is None:
            channel = grpc.insecure_channel(self._target, self._channel_options)
        else:
            channel = grpc.secure_channel(self._target, self._credentials, self._channel_options)
        connection = Connection(channel)
        self._closers[connection] = closer = weakref.finalize(connection, channel.close)
        closer.atexit = False
        return connection

    def _current_connection(self) -> Connection:
        with self._lock:
            self._check_open()
            if (changed := self._certificates.new_credentials()) is not None:
                self._credentials = changed
                self._connection = self._open()
            return self._connection
