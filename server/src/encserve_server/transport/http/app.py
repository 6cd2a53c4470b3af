"""Handles each HTTP request: finds the route, reads the body, calls the handler, and sends the reply.

This module uses no web framework. aiohttp's framework would add 21 µs to each request. This is an eighth of the time
of a small request.
"""

import asyncio
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson
from aiohttp import web

from encserve_server.callers.registry import certificate_names
from encserve_server.calls import OPEN_REQUEST_BYTES, Access, Call, Calls, Method
from encserve_server.endpoints.routes import PLACEHOLDER, Dialect, Reply, Request, Route
from encserve_server.errors import Draining
from encserve_server.failures import REASONS, STATUSES, Failure
from encserve_server.ledger import BYTES_PER_SECOND
from encserve_server.statuses import NO_SUCH_PATH, WRONG_METHOD, Status
from encserve_server.system.background import TURN_BYTES
from encserve_server.telemetry.metrics import Metrics
from encserve_server.transport.http.bodies import discard_body, read_body
from encserve_server.transport.http.connection import Connection
from encserve_server.types.callers import CertificateName, Metadata

REASON_HEADER = "encserve-error-reason"
_HEADERS = {"content-type": "application/json", "server": "encserve"}
_MAX_HEAD_BYTES = 64 * 1024
# The caller has 30 s to read a reply, and 1 s more for each 64 KiB that the caller has read.
SEND_SECONDS = 30.0
_OK, _NO_CONTENT, _UNAUTHORIZED, _HEAD_TOO_LARGE, _SERVER_ERRORS, _UNAVAILABLE = 200, 204, 401, 431, 500, 503
_NO_VALUES: Mapping[str, str] = {}
_MAX_SHOWN = 64
# After an error with one of these statuses, the server does not read the rest of the body, which is late or malformed.
_BAD_BODIES = (400, 408)
# A refused body of at most this size is read to its end. Then the connection can stay open, and the caller does not
# need another TLS handshake.
_SMALL_BODY_BYTES = 64 * 1024
# The retry delay of the status 503. After this time, a retry probably reaches a ready server.
_UNAVAILABLE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]


class HttpApp:
    """Answers the requests of all routes.

    Attributes:
        checks: The health checks by path. Paths with placeholders are left out.
    """

    def __init__(
        self,
        routes: Collection[Route],
        calls: Calls,
        metrics: Metrics,
        *,
        elsewhere: Dialect,
        max_body_bytes: int,
        metrics_port: int = 0,
        cors_origins: Collection[str] = (),
    ) -> None:
        """Prepare the routes.

        Args:
            routes: The routes.
            calls: The calls of all protocols.
            metrics: Counts requests.
            elsewhere: Writes the errors of paths that do not exist.
            max_body_bytes: The maximum size of a body.
            metrics_port: The port of the metrics, for error messages.
            cors_origins: The origins of web pages that may read replies in a browser; "*" for all.
        """
        self._calls = calls
        self._elsewhere = elsewhere
        self._max_body_bytes = max_body_bytes
        self._metrics_port = metrics_port
        self._cors_origins = frozenset(cors_origins)
        self.checks = {it.path.encode(): it.check for it in routes if it.check is not None and "{" not in it.path}
        self._all = [(route, _pattern(route.path)) for route in routes]
        self._there = ", ".join(f"{route.method} {route.path}" for route in routes)
        known = [(route, _method(route, metrics)) for route in routes]
        self._routes = {(it[0].method, it[0].path): it for it in known if "{" not in it[0].path}
        self._patterns = [(_pattern(it[0].path), *it) for it in known if "{" in it[0].path]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_over = False

    async def close(self, grace_seconds: float) -> None:
        """Wait until every request has its reply. After `grace_seconds`, open requests get an error as their reply."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_seconds)
        self._is_over = True
        for task in self._tasks:
            task.cancel()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request.

        Raises:
            CancelledError: The caller has disconnected.
        """
        task, transport = asyncio.current_task(), request.transport
        if task is None or transport is None:
            raise asyncio.CancelledError
        connection = transport.get_protocol()
        assert isinstance(connection, Connection)  # noqa: S101 - see HttpServer
        self._tasks.add(task)
        connection.begin()
        try:
            return await self._answer(request, connection)
        finally:
            connection.answered()
            self._tasks.discard(task)

    async def _answer(self, request: web.BaseRequest, connection: Connection) -> web.StreamResponse:
        head_bytes = _head_bytes(request)
        if head_bytes > _MAX_HEAD_BYTES:
            return await _send(request, connection, _Answer(_HEAD_TOO_LARGE, b"", {**_HEADERS, "connection": "close"}))
        # Many health checks send HEAD. HEAD is like GET, but the reply has no body.
        path, values = request.path, _NO_VALUES
        found = self._routes.get(("GET" if request.method == "HEAD" else request.method, path))
        if found is None:
            found, values = self._match("GET" if request.method == "HEAD" else request.method, path)
        cors = self._cors_headers(request) if self._cors_origins else None
        if found is None:
            connection.received(head_bytes)
            return await _send(request, connection, _with(cors, self._not_there(request.method, path, cors)))
        route, method = found
        call = self._calls.begin(method, peer=_Peer(request))
        try:
            answer = None
            with call:
                reply = await self._handle(request, connection, head_bytes, route, values, call)
                answer = _Answer(_OK, reply.body, {**_HEADERS, **reply.headers} if reply.headers else _HEADERS)
            return await _send(request, connection, _with(cors, answer or self._refusal(route.dialect, call.failure)))
        finally:
            call.release()

    def _match(self, method: str, path: str) -> tuple["tuple[Route, Method] | None", Mapping[str, str]]:
        """Return the route of a path with placeholders, and the values of the placeholders."""
        for pattern, route, counted in self._patterns:
            if route.method == method and (found := pattern.fullmatch(path)):
                return (route, counted), found.groupdict()
        return None, _NO_VALUES

    async def _handle(
        self,
        request: web.BaseRequest,
        connection: Connection,
        head_bytes: int,
        route: Route,
        values: Mapping[str, str],
        call: Call,
    ) -> Reply:
        """Read the body and call the handler.

        Raises:
            CancelledError: The caller has disconnected.
            Draining: The server is stopping.
        """
        try:
            call.accept()
            is_open = _access(route).is_open
            connection.has_called = connection.has_called or not is_open
            limit = OPEN_REQUEST_BYTES if is_open else self._max_body_bytes
            body = await read_body(request, connection, head_bytes, limit, call, self._calls.places)
            return await route.handle(Request(body, request.headers, values), call)
        except ConnectionError as error:
            raise asyncio.CancelledError from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_over or task is None:
                raise
            task.uncancel()
            raise Draining("the server is stopping, and could not answer in time") from None

    def _refusal(self, dialect: Dialect, failure: Failure | None) -> _Answer:
        assert failure is not None  # noqa: S101 - a call without an answer has a failure
        status = dialect.status_of(failure.status)
        headers = {**_HEADERS, REASON_HEADER: failure.reason}
        delay_s = failure.retry_delay_s or (_UNAVAILABLE_RETRY_S if status == _UNAVAILABLE else None)
        if delay_s is not None:  # OpenAI's clients also read milliseconds
            headers |= {"retry-after": f"{math.ceil(delay_s)}", "retry-after-ms": f"{round(delay_s * 1000)}"}
        if status == _UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        if self._calls.draining.is_set():
            headers["connection"] = "close"  # so that the caller's next request goes to another server
        return _Answer(status, orjson.dumps(dialect.refuse(failure)), headers)

    def _not_there(self, method: str, path: str, cors: Mapping[str, str] | None) -> _Answer:
        """Return the reply to an unknown path or method. Such requests are not counted."""
        here = [route for route, pattern in self._all if pattern.fullmatch(path)]
        methods = sorted({route.method for route in here})
        if here and cors and method == "OPTIONS":  # a browser sends this before the request itself
            return _Answer(_NO_CONTENT, b"", {**_HEADERS, "access-control-allow-methods": ", ".join(methods)})
        if here:
            dialect = here[0].dialect
            failure = Failure(WRONG_METHOD, "WRONG_METHOD", f"the method must be {' or '.join(methods)}")
            headers: Mapping[str, str] = {**_HEADERS, "allow": ", ".join(methods)}
        else:
            dialect, headers = self._elsewhere, _HEADERS
            problem = (
                f"unknown route {path[:_MAX_SHOWN]}; the routes are {self._there}. The metrics are at /metrics of "
                f"port {self._metrics_port}"
            )
            failure = Failure(NO_SUCH_PATH, "NO_SUCH_PATH", problem)
        return _Answer(dialect.status_of(failure.status), orjson.dumps(dialect.refuse(failure)), headers)

    def _cors_headers(self, request: web.BaseRequest) -> Mapping[str, str]:
        """Return the headers that allow web pages of the request's origin to read the reply."""
        origin = request.headers.get("origin", "")
        if not origin or not self._cors_origins & {origin, "*"}:
            return {"vary": "origin"}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "*",
            "access-control-allow-headers": request.headers.get("access-control-request-headers", "*"),
            "access-control-max-age": "600",
            "vary": "origin",
        }


class _Peer:
    """The other end of a request's connection; see `calls.Peer`."""

    __slots__ = ("_request",)

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request

    def address(self) -> str:
        """Return the address and the port; an IPv6 address has brackets."""
        peer = self._request.get_extra_info("peername")
        if not isinstance(peer, tuple):
            return ""
        host, port = peer[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def metadata(self) -> Metadata:
        """Return the headers of the request."""
        return [(name.lower(), value) for name, value in self._request.headers.items()]

    def certificate_names(self) -> list[CertificateName]:
        """Return the DNS and URI names of the client certificate. ssl has verified the certificate."""
        return certificate_names(self._request.get_extra_info("peercert") or {})


class _RouteObserver:
    """Counts the requests of one route; see `calls.CallObserver`."""

    def __init__(self, metrics: Metrics, name: str, status_of: Callable[[Status], int]) -> None:
        self._status_of = status_of
        self._seconds = metrics.http_request_seconds.labels(name)
        codes = sorted({status_of(status) for status in STATUSES})
        self._requests = {code: metrics.http_requests.labels(name, str(code)) for code in codes}
        self._refused = {reason: metrics.refused.labels(reason) for reason in REASONS}

    def began(self) -> None:
        """Do nothing: requests are counted when they end."""

    def ended(self, status: Status, reason: str, seconds: float) -> None:
        """See `calls.CallObserver`."""
        self._requests[self._status_of(status)].inc()
        self._seconds.observe(seconds)
        if reason:
            self._refused[reason].inc()


def _method(route: Route, metrics: Metrics) -> Method:
    name, status_of = f"{route.method} {route.path}", route.dialect.status_of
    return Method(
        name,
        route.dialect.naming,
        _RouteObserver(metrics, name, status_of) if route.check is None else None,
        attributes={"http.request.method": route.method, "http.route": route.path},
        status_attribute="http.response.status_code",
        code_of=status_of,
        is_failure=lambda status: status_of(status) >= _SERVER_ERRORS,
        answers_while_draining=route.check is not None,
        access=_access(route),
    )


def _access(route: Route) -> Access:
    return Access.OPEN if route.check is not None else Access.LISTING if route.is_listing else Access.CALLERS


def _pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of a path with placeholders."""
    named = []
    for fixed, name, kind in re.findall(rf"([^{{]*)(?:{PLACEHOLDER.pattern})?", path):
        named += [re.escape(fixed), f"(?P<{name}>{'.+' if kind else '[^/]+'})" if name else ""]
    return re.compile("".join(named))


def _with(headers: Mapping[str, str] | None, answer: _Answer) -> _Answer:
    return replace(answer, headers={**answer.headers, **headers}) if headers else answer


def _head_bytes(request: web.BaseRequest) -> int:
    """Return the number of bytes of a request's head, without unneeded blanks."""
    line_bytes = len(request.method) + len(request.raw_path) + len("  HTTP/1.1\r\n\r\n")
    return line_bytes + sum(len(name) + len(value) + len(": \r\n") for name, value in request.raw_headers)


async def _send(request: web.BaseRequest, connection: Connection, answer: _Answer) -> web.StreamResponse:
    """Send a reply in pieces, as fast as the caller reads. If the caller does not read, close the connection.

    Raises:
        CancelledError: The caller has disconnected, or does not read.
    """
    body, is_read = answer.body, request.content.at_eof()
    in_pieces = len(body) > TURN_BYTES and request.method != "HEAD"  # aiohttp sends no body for HEAD
    if not in_pieces:
        response: web.StreamResponse = web.Response(status=answer.status, headers=answer.headers, body=body)
    else:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_length = len(body)
    # If a request has the header Upgrade, aiohttp drops the data after this request, so the connection must close.
    is_lost = "upgrade" in request.headers and connection.has_more
    is_small = not is_read and _is_small(request, answer)
    if not (is_read or is_small) or is_lost or "connection" in answer.headers:
        response.force_close()
    try:
        async with asyncio.timeout(SEND_SECONDS) as bound:
            await response.prepare(request)
            if in_pieces:
                pieces = memoryview(body)
                for begin in range(0, len(body), TURN_BYTES):
                    await response.write(pieces[begin : begin + TURN_BYTES])
                    bound.reschedule((bound.when() or 0.0) + TURN_BYTES / BYTES_PER_SECOND)
            await response.write_eof()
    except (ConnectionError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
        raise asyncio.CancelledError from None
    if is_small:
        await _drop_body(request, connection, response)
    elif not is_read and answer.status not in _BAD_BODIES:
        await discard_body(request.content)
    return response


async def _drop_body(request: web.BaseRequest, connection: Connection, response: web.StreamResponse) -> None:
    """Read and drop the rest of a small refused body. The connection stays open if the whole body arrives."""
    connection.wants_body()
    await discard_body(request.content)
    if request.content.at_eof():
        connection.received(_head_bytes(request) + (request.content_length or 0))
    else:
        response.force_close()


def _is_small(request: web.BaseRequest, answer: _Answer) -> bool:
    """Return whether to read the rest of a refused body, so that the connection can stay open."""
    declared = request.content_length
    if declared is None or answer.status in _BAD_BODIES or "expect" in request.headers:
        return False
    return declared <= _SMALL_BODY_BYTES
