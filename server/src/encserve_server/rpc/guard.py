"""Around every RPC, what gRPC has of its own: receiving and sending messages, statuses, metrics of RPCs."""

import asyncio
import contextlib
import math
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import grpc

from encserve_server.calls import OPEN_REQUEST_BYTES, Access, Call, Calls, Method
from encserve_server.error_table import REASONS, STATUSES, Failure, Status
from encserve_server.errors import DeadlineExpired, MalformedRequest, Naming, PlainNaming, RequestTooLarge
from encserve_server.ledger import Arrival, Places, Watches, current_task
from encserve_server.rpc.connections import Connections, close_connections
from encserve_server.rpc.sending import Sending, seconds_to_read
from encserve_server.rpc.status import code_label, code_of, trailers_of
from encserve_server.telemetry.metrics import Metrics

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[bytes]
# What is registered with gRPC: takes the requests of a call, and gives an answer's bytes or has written them.
Handler = Callable[[Requests, Context], Awaitable[Any]]
UnaryMethod = Callable[[bytes, Call], Awaitable[bytes]]
StreamMethod = Callable[["Stream", Call], Awaitable[None]]
WritingMethod = Callable[[Requests, Call, Context], Awaitable[None]]

_STATUS_ATTRIBUTE = "rpc.response.status_code"
# The properties of gRPC's auth_context that hold the names of a client certificate.
_CERTIFICATE_NAMES = ("peer_uri", "peer_dns")
# gRPC copies a reply before it sends it.
_REPLY_COPIES = 2
# A caller that has gone ends its requests first; so much later gRPC has cancelled its call.
_GONE_SECONDS = 0.05
_CHECK = Method("", PlainNaming(), None, answers_while_draining=True, access=Access.OPEN)


class RpcGuard:
    """Receives the requests of RPCs, answers them or turns their errors into statuses, and counts them."""

    def __init__(
        self, calls: Calls, metrics: Metrics, places: Places, sending: Sending, connections: Connections
    ) -> None:
        """Keep the calls of all protocols, and the bounds of slow requests, of unread replies and of connections."""
        self._calls = calls
        self._metrics = metrics
        self._places = places
        self._watches = Watches()
        self._sending = sending
        self._connections = connections

    def method(
        self,
        service: str,
        name: str,
        kind: str,
        naming: Naming,
        *,
        answers_while_draining: bool = False,
        access: Access = Access.CALLERS,
    ) -> Method:
        """An RPC that is counted and traced; `kind` is "unary", "server_stream" or "bidi_stream"."""
        observer = _RpcObserver(self._metrics, (kind, service, name))
        return self._method(
            f"{service}/{name}", naming, observer, answers_while_draining=answers_while_draining, access=access
        )

    def request_method(self, service: str, name: str, naming: Naming) -> Method:
        """The requests of a stream, whose errors count as errors of the stream's RPC."""
        observer = _RequestObserver(self._metrics, ("bidi_stream", service, name))
        return self._method("request", naming, observer, log_name=f"{service}/{name} request")

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

    def unary(self, method: Method, answer: UnaryMethod) -> Handler:
        """The handler of an RPC with one request and one answer.

        It is registered as one that reads its requests itself: gRPC would wait for the request without a bound.
        """

        async def handle(_: Requests, context: Context) -> bytes:
            call = self._begin(method, context)
            data = b""
            with call:
                self._accept(call)
                data = await answer(await self._receive(method, call, context), call)
            if call.failure is not None:
                await _abort(context, call.failure)
            elif data:
                self._sending.begin(call, self._connections.peer_of(call), len(data))
            return data

        return handle

    def server_stream(self, method: Method, answer: Callable[[bytes, Call, Context], Awaitable[None]]) -> Handler:
        """The handler of an RPC with one request, which writes its answers."""

        async def write(_: Requests, call: Call, context: Context) -> None:
            await answer(await self._receive(method, call, context), call, context)

        return self._writing(method, write)

    def bidi_stream(self, method: Method, answer: StreamMethod) -> Handler:
        """The handler of an RPC with many requests, which writes its answers."""

        async def write(_: Requests, call: Call, context: Context) -> None:
            with self._places.stream(call.account) as place:
                await answer(Stream(context, self._places, place, call), call)

        return self._writing(method, write)

    def listing_stream(self, name: str, answer: Callable[[Requests, Context], Awaitable[None]]) -> Handler:
        """As `check`, of an RPC with many requests that tells what is served; its failures are counted and logged."""
        method = Method(name, PlainNaming(), None, answers_while_draining=True, access=Access.LISTING)

        async def write(requests: Requests, call: Call, context: Context) -> None:
            with self._places.stream(call.account, is_open=True):
                await answer(_small(requests, call), context)

        return self._writing(method, write)

    def check(self, answer: Callable[[bytes, Context], Awaitable[Any]]) -> Handler:
        """The handler of an RPC with one request that is counted and traced nowhere, as health checks are."""

        async def handle(_: Requests, context: Context) -> Any:
            call = self._begin(_CHECK, context)
            data = b""
            with call, _caller_gone():
                data = await answer(await self._read(_CHECK, call, context), context)
            if call.failure is not None:
                await _abort(context, call.failure)
            return data

        return handle

    def watch(self, answer: Callable[[bytes, Context], Awaitable[None]]) -> Handler:
        """As `check`, for an RPC that stays open to tell of changes. The ledger bounds the number of watches."""

        async def watch(data: bytes, context: Context) -> None:
            with self._watches.hold(f"address {_Peer(context).address().rpartition(':')[0]}"):
                await answer(data, context)

        return self.check(watch)

    def _writing(self, method: Method, answer: WritingMethod) -> Handler:
        async def handle(requests: Requests, context: Context) -> None:
            call = self._begin(method, context)
            with call, _caller_gone():
                self._accept(call)
                await answer(requests, call, context)
            if call.failure is not None:
                if method.observer is None:
                    self._metrics.refused.labels(call.failure.reason).inc()
                await _abort(context, call.failure)

        return handle

    def _begin(self, method: Method, context: Context) -> Call:
        """The call of a context; it is released when gRPC's task for it ends, and so when the answer has left."""
        calls = self._calls
        remaining_s = context.time_remaining()
        deadline = math.inf if remaining_s is None else calls.clock.now() + remaining_s
        metadata = (context.invocation_metadata() or ()) if calls.reads_metadata else ()
        call = calls.begin(method, metadata, deadline, _Peer(context))
        self._connections.begin(call, context.peer())
        current_task().add_done_callback(partial(self._end, call))
        return call

    def _accept(self, call: Call) -> None:
        call.accept()
        self._connections.accept(call)

    def _end(self, call: Call, _: object) -> None:
        self._connections.end(call)
        self._sending.end(call)
        call.release()

    async def _receive(self, method: Method, call: Call, context: Context) -> bytes:
        """The one request of a call, whose bytes the call holds."""
        data = await self._read(method, call, context)
        call.hold(len(data))
        return data

    async def _read(self, method: Method, call: Call, context: Context) -> bytes:
        """Read the one request of a call.

        Raises:
            BudgetFull: The request is slow, and there is no place for it.
            DeadlineExpired: The request does not arrive.
            MalformedRequest: The call has no request.
        """
        is_open = method.access.is_open
        with self._places.arriving(call.account, is_open=is_open):
            data = await context.read()
        if not isinstance(data, bytes):
            await asyncio.sleep(_GONE_SECONDS)
            raise MalformedRequest("", "the call ended without a request")
        if is_open:
            _check_small(data)
        return data


class _Peer:
    """The other end of a call's connection; see `calls.Peer`."""

    __slots__ = ("_context",)

    def __init__(self, context: Context) -> None:
        self._context = context

    def address(self) -> str:
        """As gRPC has it, ipv4:127.0.0.1:50051, without the kind."""
        return urllib.parse.unquote(self._context.peer().partition(":")[2])

    def certificate_names(self) -> list[str]:
        """Those that gRPC has verified."""
        properties = self._context.auth_context()
        return [name.decode() for kind in _CERTIFICATE_NAMES for name in properties.get(kind, ())]


class _RpcObserver:
    """Counts the calls of an RPC as go-grpc-middleware does."""

    def __init__(self, metrics: Metrics, labels: tuple[str, str, str]) -> None:
        """Looks every child up once; `labels` are the RPC's type, service and name."""
        metrics.zero([labels], map(code_label, grpc.StatusCode), REASONS)
        self._started = metrics.started.labels(*labels)
        self._handling_seconds = metrics.handling_seconds.labels(*labels)
        codes = {code.name: metrics.handled.labels(*labels, code_label(code)) for code in grpc.StatusCode}
        self._handled = {status: codes[status.grpc] for status in STATUSES}
        self._refused = {reason: metrics.refused.labels(reason) for reason in REASONS}

    def began(self) -> None:
        """A call has begun."""
        self._started.inc()

    def ended(self, status: Status, reason: str, seconds: float) -> None:
        """A call has ended after so long."""
        self._handled[status].inc()
        self._handling_seconds.observe(seconds)
        if reason:
            self._refused[reason].inc()


class _RequestObserver(_RpcObserver):
    """Counts the failed requests of a stream."""

    def ended(self, status: Status, reason: str, seconds: float) -> None:
        """A request has been answered; those that were answered well are the stream's."""
        if reason:
            self._handled[status].inc()
            self._refused[reason].inc()


class Stream:
    """The requests and answers of one stream."""

    def __init__(self, context: Context, places: Places, place: Arrival, call: Call) -> None:
        """Keep gRPC's context, the stream's place and the stream's call."""
        self._context = context
        self._call = call
        self._places = places
        self._place = place
        self._unanswered = 0

    async def read(self) -> object:
        """The next request's bytes; at the end of the stream gRPC's marker for it, which is not bytes.

        Raises:
            Unauthenticated: The caller has been revoked.
        """
        data: object = await self._context.read()
        if isinstance(data, bytes):
            self._call.recheck()
        self._unanswered += 1
        self._places.progress(self._place, is_idle=False)
        return data

    async def write(self, data: bytes) -> None:
        """Writes an answer; see `write_in_time`."""
        await write_in_time(self._context, data)
        self._unanswered -= 1
        self._places.progress(self._place, is_idle=not self._unanswered)


async def write_in_time(context: Context, data: bytes) -> None:
    """Writes a message of a stream. It holds memory, so a caller that does not read has its connection closed.

    Raises:
        DeadlineExpired: The caller has read nothing for too long.
    """
    limit_s = seconds_to_read(len(data))
    try:
        async with asyncio.timeout(limit_s):
            await context.write(data)
    except TimeoutError:
        close_connections({context.peer()})
        raise DeadlineExpired(f"the caller did not read a message within {limit_s:.0f} s") from None


async def _small(requests: Requests, call: Call) -> Requests:
    async for data in requests:
        call.recheck()
        _check_small(data)
        yield data


def _check_small(data: bytes) -> None:
    """Refuses what need not be parsed: such a request has a name, and its caller may have no key."""
    if len(data) > OPEN_REQUEST_BYTES:
        raise RequestTooLarge("", f"the request must be at most {OPEN_REQUEST_BYTES} bytes; was {len(data)}")


@contextlib.contextmanager
def _caller_gone() -> Iterator[None]:
    """Ends the call of a caller that went in the middle of a write."""
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


async def _abort(context: Context, failure: Failure) -> None:
    """Ends a call with an error; the handler is to return at once, and grpcio then raises what `abort` raised again.

    Only `abort` sends a status without a message before it, which gRPC's and Envoy's own retries depend on. But grpcio
    keeps its exception beside the call: with a traceback, the call and the frames that handled it would be a cycle,
    which only the collector can free, for every call that is refused.
    """
    try:
        await context.abort(code_of(failure), failure.text, trailers_of(failure))
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = None
