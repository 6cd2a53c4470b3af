"""What the ASGI server calls for each request: finds the route, reads the body, answers, counts, traces.

Plain ASGI: there are ten routes, all known beforehand, and what a framework brings for others would be paid by every
request.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from encserve_server.errors import DeadlineExpired, Draining, RequestTooLarge
from encserve_server.http.status import ERROR_TABLE, NO_SUCH_PATH, REASONS, WRONG_METHOD, Failure, to_failure
from encserve_server.models.calls import Calls
from encserve_server.telemetry.metrics import Metrics
from encserve_server.telemetry.spans import Tracer

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

REASON_HEADER = b"encserve-error-reason"
_JSON: Headers = [(b"content-type", b"application/json")]
# A body that comes more slowly is given up on: it holds memory.
_BODY_SECONDS = 30.0
# What nginx calls it when the caller went before its answer; nobody is sent it.
_CALLER_GONE = 499


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one protocol tells errors.

    Attributes:
        inputs: What the field of a request's inputs is called.
        refuse: The status and the JSON of an error.
    """

    inputs: str
    refuse: Callable[[Failure], tuple[int, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a method of a path.

    Attributes:
        method: The method.
        path: The whole path.
        handle: Takes a request's body and gives the answer's, JSON.
        dialect: How it tells errors.
        is_check: Whether it asks for health: those are counted nowhere, and answered to the end.
    """

    method: str
    path: str
    handle: Callable[[bytes], Awaitable[bytes]]
    dialect: Dialect
    is_check: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    headers: Headers
    reason: str = ""


class _CallerGoneError(Exception):
    """The caller went away before it had its answer."""


class HttpApp:
    """The ASGI application."""

    def __init__(
        self,
        routes: list[Route],
        calls: Calls,
        metrics: Metrics,
        *,
        dialect_of: Callable[[str], Dialect],
        max_body_bytes: int,
        tracer: Tracer | None = None,
    ) -> None:
        """Takes what is answered, the calls of all protocols, and how callers of a path that is not there are told."""
        self._calls = calls
        self._metrics = metrics
        self._dialect_of = dialect_of
        self._max_body_bytes = max_body_bytes
        self._tracer = tracer
        self._routes = {(it.method, it.path): it for it in routes}
        counted = [f"{it.method} {it.path}" for it in routes if not it.is_check]
        statuses = {200, 500, _CALLER_GONE}
        statuses |= {status for it in ERROR_TABLE.values() for status in (it.openai_status, it.tei_status)}
        metrics.zero_http(counted, map(str, sorted(statuses)), REASONS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        # Many that ask for health send HEAD, which is GET without the body; uvicorn leaves that out.
        route = self._routes.get(("GET" if scope["method"] == "HEAD" else scope["method"], scope["path"]))
        with contextlib.suppress(_CallerGoneError):
            if route is None:
                await _send(send, self._not_there(scope["path"]))
            elif route.is_check:
                await _send(send, await self._attempt(route, b""))
            else:
                await self._count(route, scope, receive, send)

    async def _count(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, counted and traced."""
        name, metrics = f"{route.method} {route.path}", self._metrics
        began = time.perf_counter()
        span = None
        if self._tracer is not None:
            headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]
            attributes = {"http.request.method": route.method, "http.route": route.path}
            span = self._tracer.begin(name, headers, attributes)
        self._calls.opened()
        status, reason = _CALLER_GONE, ""
        try:
            answer = await self._answer(route, scope, receive)
            status, reason = answer.status, answer.reason
            await _send(send, answer)
        except _CallerGoneError:
            status, reason = _CALLER_GONE, ""
        finally:
            metrics.http_requests.labels(name, str(status)).inc()
            metrics.http_request_seconds.labels(name).observe(time.perf_counter() - began)
            if reason:
                metrics.refused.labels(reason).inc()
            if span is not None:
                span.end(status, reason)
            self._calls.closed()

    async def _answer(self, route: Route, scope: Scope, receive: Receive) -> _Answer:
        """What a caller gets.

        Raises:
            _CallerGoneError: It is there no more.
        """
        try:
            body = await self._read(scope, receive)
            self._calls.refuse_while_draining()
            return await _while_there(receive, self._attempt(route, body))
        except _CallerGoneError:
            raise
        except asyncio.CancelledError:  # the ASGI server's, when the grace period is over
            return self._refusal(route, Draining("the server is stopping, and could not answer in time"))
        except Exception as error:
            return self._refusal(route, error)

    async def _attempt(self, route: Route, body: bytes) -> _Answer:
        try:
            return _Answer(200, await route.handle(body), _JSON)
        except Exception as error:
            return self._refusal(route, error)

    def _refusal(self, route: Route, error: Exception) -> _Answer:
        failure = to_failure(error, route.dialect.inputs)
        headers = [*_JSON, (REASON_HEADER, failure.reason.encode())]
        if failure.retry_delay_s is not None:
            headers += _retry_headers(failure.retry_delay_s)
        if self._calls.draining.is_set():
            headers.append((b"connection", b"close"))  # so that the next call goes elsewhere
        status, body = route.dialect.refuse(failure)
        return _Answer(status, orjson.dumps(body), headers, failure.reason)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The body.

        Raises:
            RequestTooLarge: It is over the limit.
            DeadlineExpired: It does not come.
            _CallerGoneError: The caller went away.
        """
        limit = self._max_body_bytes
        said = dict(scope["headers"]).get(b"content-length", b"")
        if said.isdigit() and int(said) > limit:
            raise _too_large(f"{int(said)}", limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _CallerGoneError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_large("longer", limit)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise DeadlineExpired(f"the body did not come within {_BODY_SECONDS:.0f} s") from None

    def _not_there(self, path: str) -> _Answer:
        """What callers of other paths and methods get; they are counted nowhere."""
        if methods := sorted(method for method, it in self._routes if it == path):
            failure = Failure(WRONG_METHOD, "WRONG_METHOD", f"the method must be {' or '.join(methods)}")
        else:
            failure = Failure(NO_SUCH_PATH, "NO_SUCH_PATH", "there is nothing at this path; see docs/http.md")
        status, body = self._dialect_of(path).refuse(failure)
        headers = [*_JSON, (b"allow", ", ".join(methods).encode())] if methods else _JSON
        return _Answer(status, orjson.dumps(body), headers)


def _too_large(said: str, limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        "", f"the body must be at most {limit} bytes (max_request_mib); was {said}: send fewer texts"
    )


def _retry_headers(delay_s: float) -> Headers:
    """When to try again: in whole seconds for all, and in milliseconds for OpenAI's clients."""
    return [
        (b"retry-after", b"%d" % math.ceil(delay_s)),
        (b"retry-after-ms", b"%d" % round(delay_s * 1000)),
    ]


async def _while_there(receive: Receive, answering: Awaitable[_Answer]) -> _Answer:
    """What `answering` gives; it is cancelled if the caller goes away.

    Raises:
        _CallerGoneError: It did.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - ASGI servers run every request in one
    watching = asyncio.ensure_future(receive())
    has_gone = is_over = False

    def leave(_: object) -> None:
        nonlocal has_gone
        if not is_over:
            has_gone = True
            task.cancel()

    watching.add_done_callback(leave)
    try:
        return await answering
    except asyncio.CancelledError:
        if has_gone and not task.uncancel():
            raise _CallerGoneError from None
        raise
    finally:
        is_over = True
        watching.cancel()


async def _send(send: Send, answer: _Answer) -> None:
    """Sends an answer.

    Raises:
        _CallerGoneError: There is nobody who could read it.
    """
    headers = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
    except RuntimeError as error:  # uvloop's, where the ASGI server has not been told yet that the connection is gone
        if "closed" not in str(error):
            raise
        raise _CallerGoneError from error
