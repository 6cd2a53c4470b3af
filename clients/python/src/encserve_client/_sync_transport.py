"""The part of the client for threads that opens channels and makes calls."""

import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc

from encserve_client._base import BaseClient
from encserve_client._grpc.channel import Link
from encserve_client._grpc.metadata import with_trace
from encserve_client._grpc.sync_wire import SyncWire
from encserve_client._logic.wire import run_without_loop
from encserve_client.exceptions import InvalidInputError
from encserve_client.inputs import Input
from encserve_proto.v1.encoder_pb2_grpc import EncoderServiceStub

R = TypeVar("R")
T = TypeVar("T")
StreamInputs: TypeAlias = Iterable[Input]
"""The inputs of a stream."""
Results: TypeAlias = Generator[tuple[int, R], None, None]
"""The results of a stream, each with the index of its input."""


class SyncTransport(BaseClient):
    """A client whose calls block the caller's thread. Several threads may use it at the same time."""

    def _set_up(self) -> None:
        self._lock = threading.Lock()
        self._closers: weakref.WeakKeyDictionary[Link, Callable[[], object]] = weakref.WeakKeyDictionary()
        self._link = self._open()

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
        for close in closers:
            close()

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        return run_without_loop(call)

    def _iterate(self, results: AsyncGenerator[tuple[int, R], None]) -> Results[R]:
        try:
            while True:
                yield run_without_loop(anext(results))
        except StopAsyncIteration:
            return
        finally:
            run_without_loop(results.aclose())

    def _wire(self, inputs: object = None) -> SyncWire:
        self._check_open()
        if inputs is not None:
            raise InvalidInputError(
                f"inputs must be an iterable; was {type(inputs).__name__}: AsyncEncoderClient takes async iterables"
            )
        return SyncWire(self._current_link, with_trace(self._metadata), lambda: self._closed, self._diagnosis)

    def _open(self) -> Link:
        # A channel connects when it is first used.
        if self._credentials is None:
            channel = grpc.insecure_channel(self._target, self._channel_options)
        else:
            channel = grpc.secure_channel(self._target, self._credentials, self._channel_options)
        link = Link(channel, EncoderServiceStub(channel))
        self._closers[link] = closer = weakref.finalize(link, channel.close)
        closer.atexit = False
        return link

    def _current_link(self) -> Link:
        """Return the channel for a new call."""
        with self._lock:
            self._check_open()
            if (changed := self._freshness.new_credentials()) is not None:
                self._credentials = changed
                self._link = self._open()
            return self._link
