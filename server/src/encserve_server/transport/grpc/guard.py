"""The gRPC side of every RPC: receives and sends messages, converts errors to statuses, and counts calls."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import grpc

from encserve_server.calls import OPEN_REQUEST_BYTES, Access, Call, Calls, Method
from encserve_server.endpoints.rpcs import RequestStreamRpc, Rpc, ServerStreamRpc, Service, UnaryRpc
from encserve_server.errors import PLAIN, DeadlineExpired, MalformedRequest, Naming, RequestTooLarge
from encserve_server.failures import REASONS, STATUSES, Failure
from encserve_server.ledger import Arrival, Watches, current_task
from encserve_server.statuses import Status
from encserve_server.telemetry.metrics import Metrics
from encserve_server.transport.grpc.connections import Connections, Context, Peer, close_connections, seconds_to_read
from encserve_server.transport.grpc.status import code_label, code_of, trailers_of
from encserve_server.transport.grpc.streams import Answer, answer_one, answer_stream

Requests = AsyncIterator[bytes]
# A handler for gRPC. It takes the requests of a call. It returns the bytes of the reply, or writes the replies itself.
Handler = Callable[[Requests, Context], Awaitable[Any]]
WritingMethod = Callable[[Requests, Call, Context], Awaitable[None]]

_STATUS_ATTRIBUTE = "rpc.response.status_code"
# gRPC copies a reply before sending it, so memory holds the reply twice.
_REPLY_COPIES = 2
# If a caller disconnects, reads end at once, but gRPC cancels the call a little later. If a read ends without a
# request, the server waits this long for the cancellation.
_GONE_SECONDS = 0.05
_CHECK = Method("", PLAIN, None, answers_while_draining=True, access=Access.OPEN)


class RpcGuard:
    """Wraps the methods of services: receives requests, sends replies or error statuses, and counts calls."""

    def __init__(self, calls: Calls, metrics: Metrics, connections: Connections, *, max_stream_in_flight: int) -> None:
        """Keep the calls of all protocols, the metrics, and the limits of connections and streams."""
        self._max_stream_in_flight = max_stream_in_flight
        self._calls = calls
        self._metrics = metrics
        self._watches = Watches(calls.clock)
        self._connections = connections

    def handlers(self, service: Service) -> dict[str, Handler]:
        """Return the handlers of a service by method name."""
        return {rpc.name: self._handler(service.name, rpc) for rpc in service.rpcs}

    def _handler(self, service: str, rpc: Rpc) -> Handler:
        labels = rpc.kind, service, rpc.name
        method = self._method(
            f"{service}/{rpc.name}",
            rpc.naming,
            _RpcObserver(self._metrics, labels),
            answers_while_draining=rpc.answers_while_draining,
            access=rpc.access,
        )
        if isinstance(rpc, UnaryRpc):
            return self._unary(method, rpc)
        if isinstance(rpc, ServerStreamRpc):
            return self._server_stream(method, rpc)
        assert isinstance(rpc, RequestStreamRpc)  # noqa: S101 - there is no other kind
        observer = _RequestObserver(self._metrics, labels)
        one = self._method("request", rpc.naming, observer, log_name=f"{service}/{rpc.name} request")
        return self._request_stream(method, one, rpc)

    def _method(
        self,
        name: str,
        naming: Naming,
        observer: "_RpcObserver",
        *,
        answers_while_draining: bool = False,
        access: Access = Access.CALLERS,
        log_name: str = "",
    ) -> Method:
        return Method(
            name,
            naming,
            observer,
            attributes={"rpc.system.name": "grpc", "rpc.method": name},
            status_attribute=_STATUS_ATTRIBUTE,
            answers_while_draining=answers_while_draining,
            reply_copies=_REPLY_COPIES,
            access=access,
            log_name=log_name,
        )

    def _unary(self, method: Method, rpc: UnaryRpc) -> Handler:
        """Return the handler of an RPC with one request and one reply.

        The handler reads the request, because gRPC would wait for the request without a time limit.
        """

        async def handle(_: Requests, context: Context) -> bytes:
            call, peer = self._begin(method, context)
            data = b""
            with call:
                call.accept()
                peer.is_accepted = True
                data = await rpc.answer(await self._receive(method, call, context), call)
            if call.failure is not None:
                await _abort(context, call.failure)
            elif data:
                peer.reads_until = self._calls.clock.now() + seconds_to_read(len(data))
            return data

        return handle

    def _server_stream(self, method: Method, rpc: ServerStreamRpc) -> Handler:
        """Return the handler of an RPC with one request and many replies."""

        async def write(_: Requests, call: Call, context: Context) -> None:
            data = await self._receive(method, call, context)
            is_first = True

            async def write_one(reply: bytes) -> None:
                nonlocal is_first
                if is_first:  # grpcio cannot send an error while it sends the metadata together with a message
                    is_first = False
                    await context.send_initial_metadata(())
                await write_in_time(context, reply)

            await rpc.answer(data, call, write_one)

        return self._writing(method, write)

    def _request_stream(self, method: Method, one: Method, rpc: RequestStreamRpc) -> Handler:
        """Return the handler of an RPC with many requests. The call of each request has the method `one`."""

        async def write(_: Requests, call: Call, context: Context) -> None:
            async def answer(data: bytes) -> Answer:
                request = rpc.parse(data)
                return await answer_one(self._calls.begin_request(call, one, request.request_id), len(data), request)

            with Arrival(self._calls.places, call.account, is_stream=True) as place:
                stream = Stream(context, place, call)
                await answer_stream(
                    stream.read,
                    answer,
                    stream.write,
                    max_in_flight=self._max_stream_in_flight,
                    draining=self._calls.draining,
                )

        return self._writing(method, write)

    def listing_stream(self, name: str, answer: Callable[[Requests, Context], Awaitable[None]]) -> Handler:
        """Return the handler of an RPC with many requests that lists models or services.

        Only failures are counted and logged.
        """
        method = Method(name, PLAIN, None, answers_while_draining=True, access=Access.LISTING)

        async def write(requests: Requests, call: Call, context: Context) -> None:
            with Arrival(self._calls.places, call.account, is_open=True, is_stream=True):
                await answer(_checked(requests, call), context)

        return self._writing(method, write)

    def check(self, answer: Callable[[bytes, Context], Awaitable[Any]]) -> Handler:
        """Return the handler of an RPC with one request, without metrics and traces. Health checks use this handler."""
        return self._checking(answer, lambda _: contextlib.nullcontext())

    def watch(self, answer: Callable[[bytes, Context], Awaitable[None]]) -> Handler:
        """Return the handler of a health watch, without metrics and traces. The number of watches is limited."""
        return self._checking(answer, lambda call: self._watches.hold(call.account))

    def _checking(
        self,
        answer: Callable[[bytes, Context], Awaitable[Any]],
        hold: Callable[[Call], AbstractContextManager[None]],
    ) -> Handler:
        """Return the handler of a health RPC. `hold` refuses a call before its request is read."""

        async def handle(_: Requests, context: Context) -> Any:
            call, _peer = self._begin(_CHECK, context)
            data = b""
            with call, _cancelled_if_disconnected(), hold(call):
                data = await answer(await self._read(_CHECK, call, context), context)
            if call.failure is not None:
                await _abort(context, call.failure)
            return data

        return handle

    def _writing(self, method: Method, answer: WritingMethod) -> Handler:
        async def handle(requests: Requests, context: Context) -> None:
            call, peer = self._begin(method, context)
            with call, _cancelled_if_disconnected():
                call.accept()
                peer.is_accepted = True
                await answer(requests, call, context)
            if call.failure is not None:
                if method.observer is None:
                    self._metrics.refused.labels(call.failure.reason).inc()
                await _abort(context, call.failure)

        return handle

    def _begin(self, method: Method, context: Context) -> tuple[Call, Peer]:
        """Begin the call of a context. The call is released after its reply, when gRPC's task ends."""
        calls, peer = self._calls, Peer(context)
        remaining_s = context.time_remaining()
        deadline = math.inf if remaining_s is None else calls.clock.now() + remaining_s
        call = calls.begin(method, deadline, peer)
        self._connections.open.add(peer)
        current_task().add_done_callback(partial(self._end, call, peer))
        return call, peer

    def _end(self, call: Call, peer: Peer, _: object) -> None:
        self._connections.end(peer)
        call.release()

    async def _receive(self, method: Method, call: Call, context: Context) -> bytes:
        """Read the only request of a call, and take its size from the byte budget."""
        data = await self._read(method, call, context)
        call.hold(len(data))
        return data

    async def _read(self, method: Method, call: Call, context: Context) -> bytes:
        """Read the only request of a call.

        Raises:
            BudgetFull: The request is slow, and all places for slow requests are taken.
            DeadlineExpired: The request does not arrive in time.
            MalformedRequest: The call has no request.
        """
        is_open = method.access.is_open
        with Arrival(self._calls.places, call.account, is_open=is_open):
            data = await context.read()
        if not isinstance(data, bytes):
            await asyncio.sleep(_GONE_SECONDS)
            raise MalformedRequest("", "the call ended without a request")
        if is_open:
            _check_small(data)
        return data


class _RpcObserver:
    """Counts the calls of an RPC, with the metrics of go-grpc-middleware."""

    def __init__(self, metrics: Metrics, labels: tuple[str, str, str]) -> None:
        """Look up the metrics of the RPC. `labels` are the type, service and name of the RPC."""
        metrics.zero([labels], map(code_label, grpc.StatusCode), REASONS)
        self._started = metrics.started.labels(*labels)
        self._handling_seconds = metrics.handling_seconds.labels(*labels)
        codes = {code.name: metrics.handled.labels(*labels, code_label(code)) for code in grpc.StatusCode}
        self._handled = {status: codes[status.grpc] for status in STATUSES}
        self._refused = {reason: metrics.refused.labels(reason) for reason in REASONS}

    def began(self) -> None:
        """Count a call that begins."""
        self._started.inc()

    def ended(self, status: Status, reason: str, seconds: float) -> None:
        """Count a call that ended, with its duration."""
        self._handled[status].inc()
        self._handling_seconds.observe(seconds)
        if reason:
            self._refused[reason].inc()


class _RequestObserver(_RpcObserver):
    """Counts the failed requests of a stream."""

    def ended(self, status: Status, reason: str, seconds: float) -> None:
        """Count a request that failed. Successful requests are not counted separately; the stream is counted."""
        if reason:
            self._handled[status].inc()
            self._refused[reason].inc()


class Stream:
    """The requests and answers of one stream."""

    def __init__(self, context: Context, place: Arrival, call: Call) -> None:
        """Keep gRPC's context, the stream's place and the stream's call."""
        self._context = context
        self._call = call
        self._place = place
        self._unanswered = 0

    async def read(self) -> object:
        """Return the bytes of the next request. At the end of the stream, return a gRPC constant that is not bytes.

        Raises:
            Unauthenticated: The key of the caller was revoked.
        """
        data: object = await self._context.read()
        if isinstance(data, bytes):
            self._call.recheck()
        self._unanswered += 1
        self._place.progress(is_idle=False)
        return data

    async def write(self, data: bytes) -> None:
        """Write a reply; see `write_in_time`."""
        await write_in_time(self._context, data)
        self._unanswered -= 1
        self._place.progress(is_idle=not self._unanswered)


async def write_in_time(context: Context, data: bytes) -> None:
    """Write a message of a stream. If the caller does not read the message in time, close the connection.

    Raises:
        DeadlineExpired: The caller did not read the message in time.
    """
    limit_s = seconds_to_read(len(data))
    try:
        async with asyncio.timeout(limit_s):
            await context.write(data)
    except TimeoutError:
        close_connections({context.peer()})
        raise DeadlineExpired(f"the caller did not read a message within {limit_s:.0f} s") from None


async def _checked(requests: Requests, call: Call) -> Requests:
    """Yield the requests of a stream. Check the size of each request, and the caller's key."""
    async for data in requests:
        call.recheck()
        _check_small(data)
        yield data


def _check_small(data: bytes) -> None:
    """Refuse a large request before it is parsed. A valid request is small, and the caller may have no key."""
    if len(data) > OPEN_REQUEST_BYTES:
        raise RequestTooLarge("", f"the request must be at most {OPEN_REQUEST_BYTES} bytes; was {len(data)}")


@contextlib.contextmanager
def _cancelled_if_disconnected() -> Iterator[None]:
    """Raise CancelledError if the caller disconnected during a write."""
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


async def _abort(context: Context, failure: Failure) -> None:
    """End a call with an error. The handler must return after this; grpcio then raises the exception of `abort` again.

    gRPC clients and Envoy retry a call only if no message comes before the error. Only `abort` ends a call without a
    message. grpcio keeps the exception of `abort` in the call. With its traceback, the exception would refer to the
    frames of the handler, and the frames to the call. Only the garbage collector could free such a cycle.
    """
    try:
        await context.abort(code_of(failure), failure.text, trailers_of(failure))
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = None
