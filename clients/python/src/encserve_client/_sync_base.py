"""What the client for threads stands on: its channel, and driving a call to its end in the caller's thread."""

import time
from collections.abc import Coroutine, Generator, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from encserve_client._base import BaseClient, shown
from encserve_client._exceptions import CallCancelledError, ClientClosedError
from encserve_client._inputs import Input
from encserve_client._stream_run import StreamRun
from encserve_client._tracing import with_trace
from encserve_client._wire import run_without_loop
from encserve_client._wire_sync import SyncWire
from encserve_proto.v1.encoder_pb2_grpc import EncoderServiceStub

T = TypeVar("T")


class SyncBase(BaseClient):
    """Holds a channel for threads; see `EncoderClient`."""

    _channel: grpc.Channel
    _stub: Any

    def _set_up(self) -> None:
        # A channel connects when it is first used.
        if self._credentials is None:
            self._channel = grpc.insecure_channel(self._target, self._channel_options)
        else:
            self._channel = grpc.secure_channel(self._target, self._credentials, self._channel_options)
        self._stub = EncoderServiceStub(self._channel)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel. Calls that other threads are still in raise `ClientClosedError`. May be called again."""
        self._closed = True
        self._channel.close()

    def _wire(self, inputs: Iterable[Input] = ()) -> SyncWire:
        self._check_open()
        return SyncWire(self._stub, with_trace(self._metadata), time.monotonic, iter(inputs))

    def _drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return run_without_loop(coroutine)
        except CallCancelledError as error:  # gRPC cancels what is going on when the channel is closed
            if self._closed:
                raise ClientClosedError("the client was closed during the call") from error
            raise

    def _results(self, run: StreamRun, ordered: bool, return_exceptions: bool) -> Generator[Any, None, None]:
        try:
            while (result := self._drive(run.next())) is not None:
                yield shown(*result, ordered, return_exceptions)
        finally:
            run_without_loop(run.aclose())
