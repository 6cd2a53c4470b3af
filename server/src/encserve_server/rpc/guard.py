"""Around every RPC: errors become statuses, and the RPCs of our own service are counted and traced."""

import asyncio
import functools
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from encserve_server.models.calls import Calls
from encserve_server.rpc.status import REASONS, Failure, code_label, to_failure
from encserve_server.system.clock import Clock
from encserve_server.telemetry.metrics import Metrics
from encserve_server.telemetry.spans import Tracer

Context = grpc.aio.ServicerContext[Any, Any]
# Takes a request's bytes, or all of them one after another, and gives an answer's, or writes them and gives nothing.
Handler = Callable[[Any, Context], Awaitable[Any]]


def deadline_of(context: Context, clock: Clock) -> float:
    """When a call's caller is gone, on the clock; infinity where it set no deadline."""
    remaining_s = context.time_remaining()
    return math.inf if remaining_s is None else clock.now() + remaining_s


def answering(inner: Handler) -> Handler:
    """A method's handler that turns the errors of `inner` into statuses; health checks, say, are not counted."""

    @functools.wraps(inner)
    async def wrapped(request: Any, context: Context) -> Any:
        answer, failure = await _attempt(inner, request, context)
        if failure is not None:
            await _abort(context, failure)
        return answer

    return wrapped


class RpcGuard:
    """Turns errors into statuses, and counts and traces RPCs, for the methods of one service.

    Handlers are wrapped once, when they are registered: for an interceptor gRPC builds a chain of coroutines in every
    call.
    """

    def __init__(self, metrics: Metrics, calls: Calls, service: str, methods: dict[str, str]) -> None:
        """Takes the service's full name, and its methods with their types ("unary", "server_stream", "bidi_stream")."""
        self._metrics = metrics
        self._calls = calls
        self._labels = {name: (kind, service, name) for name, kind in methods.items()}
        metrics.zero(self._labels.values(), map(code_label, grpc.StatusCode), REASONS)
        self._refused = {reason: metrics.refused.labels(reason) for reason in REASONS}

    def wrap(self, method: str, inner: Handler, tracer: Tracer | None = None) -> Handler:
        """A method's handler that counts and traces what `inner` does, and turns its errors into statuses."""
        metrics, labels = self._metrics, self._labels[method]
        started = metrics.started.labels(*labels)
        handling_seconds = metrics.handling_seconds.labels(*labels)
        full_name = "/".join(labels[1:])
        attributes = {"rpc.system.name": "grpc", "rpc.method": full_name}
        handled = {code: metrics.handled.labels(*labels, code_label(code)) for code in grpc.StatusCode}

        @functools.wraps(inner)
        async def wrapped(request: Any, context: Context) -> Any:
            began = time.perf_counter()
            started.inc()
            span = None if tracer is None else tracer.begin(full_name, context.invocation_metadata() or (), attributes)
            self._calls.opened()
            code, reason = grpc.StatusCode.CANCELLED, ""
            try:
                answer, failure = await _attempt(inner, request, context)
                code, reason = (failure.code, failure.reason) if failure else (grpc.StatusCode.OK, "")
            except asyncio.CancelledError:
                code = _ended_with(context)
                raise
            finally:
                handled[code].inc()
                handling_seconds.observe(time.perf_counter() - began)
                if span is not None:
                    span.end(code.name, reason)
                task = asyncio.current_task()
                if code is grpc.StatusCode.OK and task is not None:
                    task.add_done_callback(self._closed)  # in which gRPC now sends the answer
                else:
                    self._closed()
            if failure is not None:
                self._refused[failure.reason].inc()
                await _abort(context, failure)
            return answer

        return wrapped

    def _closed(self, *_: object) -> None:
        self._calls.closed()


async def _attempt(inner: Handler, request: Any, context: Context) -> tuple[Any, Failure | None]:
    """What a handler gives, or how it failed: gRPC would send an exception's text.

    Raises:
        CancelledError: The caller has gone.
    """
    try:
        return await inner(request, context), None
    except grpc.aio.InternalError as error:  # so a write fails if the caller went in the middle of it
        raise asyncio.CancelledError from error
    except Exception as error:
        return b"", to_failure(error)  # the bytes are not sent


async def _abort(context: Context, failure: Failure) -> None:
    """Ends a call with an error; the handler is to return at once, and grpcio then raises what `abort` raised again.

    Only `abort` sends a status without a message before it, which gRPC's and Envoy's own retries depend on. But grpcio
    keeps its exception beside the call: with a traceback, the call and the frames that handled it would be a cycle,
    which only the collector can free, for every call that is refused.
    """
    try:
        await context.abort(failure.code, failure.text, failure.trailers)
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = None


def _ended_with(context: Context) -> grpc.StatusCode:
    """The status of a call whose caller did not wait for its handler."""
    remaining_s = context.time_remaining()
    expired = remaining_s is not None and remaining_s <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED
