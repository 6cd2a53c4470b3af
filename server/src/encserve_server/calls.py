"""Around every call of every protocol: whether it is taken, what it holds, and how it is traced, counted and answered.

method = Method(…)                                     once, for each RPC or route
call = calls.begin(method, metadata, deadline)
with call:                                             an error of the block becomes `call.failure`
call.accept()
call.hold(len(data))
model = call.resolve(count, name, version)
answer = await call.encode(model, EncodeCall(…), build)
…                                                      the answer, or `call.failure`, is sent
call.release()                                         once it has left
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from functools import partial
from types import TracebackType
from typing import Protocol

from encserve_server.error_table import CANCELLED, EXPIRED, OK, UNKNOWN, Failure, Status, to_failure
from encserve_server.errors import BudgetFull, Draining, EncserveError, FieldPath, Naming, Part, ResponseTooLarge
from encserve_server.models.catalog import Catalog
from encserve_server.models.parts import PartedCall
from encserve_server.models.served import EncodeCall, EncodeReply, ServedModel, TokenizeCall, TokenizeReply
from encserve_server.settings import MIB
from encserve_server.system.clock import Clock
from encserve_server.telemetry import spans
from encserve_server.telemetry.logs import log_unexpected
from encserve_server.telemetry.spans import SERVER_ERROR_CODES, RequestSpan, Tracer

# A reply larger than this is built in a thread: on the event loop it would delay all other calls.
_INLINE_REPLY_BYTES = 256 * 1024
# When to try again where the byte budget is full: replies leave within a second, unless their callers do not read.
_BUDGET_RETRY_S = 1.0
# A call that holds no more is a small one.
_SMALL_BYTES = 256 * 1024
# These end the task that they are raised in; every other exception is an answer.
_NOT_ANSWERS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class CallObserver(Protocol):
    """Counts the calls of one RPC or route, in the protocol's own metrics; called on the event loop."""

    def began(self) -> None:
        """A call has begun."""

    def ended(self, status: Status, reason: str, seconds: float) -> None:
        """A call has ended after so long; of an error the reason is given."""


class Method:
    """One RPC, or one HTTP route, as calls of it are traced, counted and answered."""

    def __init__(
        self,
        name: str,
        naming: Naming,
        observer: CallObserver | None,
        *,
        attributes: Mapping[str, str] | None = None,
        status_attribute: str = "",
        code_of: Callable[[Status], str | int] = lambda status: status.grpc,
        is_failure: Callable[[Status], bool] = lambda status: status.grpc in SERVER_ERROR_CODES,
        answers_while_draining: bool = False,
        reply_copies: int = 1,
    ) -> None:
        """Takes what the protocol says of the method.

        Args:
            name: The name of its spans.
            naming: What its fields and values are called in errors.
            observer: Counts its calls; None for those that are counted nowhere and traced nowhere, as health checks.
            attributes: Those of its spans, of OpenTelemetry's conventions for the protocol.
            status_attribute: The attribute of its spans that holds the code.
            code_of: The protocol's code for a status.
            is_failure: Whether a status counts as the server's error in traces.
            answers_while_draining: Whether it is answered while the server stops.
            reply_copies: How many times a reply is in memory while it is sent.
        """
        self.name = name
        self.naming = naming
        self.observer = observer
        self.attributes = attributes or {}
        self.status_attribute = status_attribute
        self.code_of = code_of
        self.is_failure = is_failure
        self.answers_while_draining = answers_while_draining
        self.reply_copies = reply_copies


class Calls:
    """The calls of all protocols together; owned by the event loop.

    Attributes:
        in_flight: How many calls are being worked on, or have their answer on its way; any thread may read it.
        idle: Set while no call is in flight.
        draining: Set from when new calls are refused.
        held_bytes: The bytes of requests and replies that calls hold; any thread may read it.
        max_held_bytes: The most that they may.
    """

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        encode_pool: Executor,
        *,
        max_held_bytes: int = 1024 * MIB,
        tracer: Tracer | None = None,
    ) -> None:
        """Takes the models, and the threads in which large replies are built."""
        self.catalog = catalog
        self.clock = clock
        self.encode_pool = encode_pool
        self.tracer = tracer
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = asyncio.Event()
        self.held_bytes = 0
        self.max_held_bytes = max_held_bytes

    def drain(self) -> None:
        """From now on new calls get Draining."""
        self.draining.set()

    def take(self, size: int) -> bool:
        """Counts bytes against the budget, until they are given back; False where there is no room."""
        if self.held_bytes + size > self.max_held_bytes:
            return False
        self.held_bytes += size
        return True

    def give_back(self, size: int) -> None:
        """The bytes are not held any more."""
        self.held_bytes -= size

    def begin(
        self, method: Method, metadata: Collection[tuple[str, str | bytes]] = (), deadline: float = math.inf
    ) -> "Call":
        """A call has come.

        Args:
            method: What is called.
            metadata: The headers of the request.
            deadline: When the caller is gone, on the clock; infinity for never.
        """
        span = None
        if method.observer is not None:
            method.observer.began()
            self.in_flight += 1
            self.idle.clear()
            if self.tracer is not None:
                span = self.tracer.begin(method.name, metadata, method.attributes)
        return Call(self, method, deadline, span)

    def begin_request(self, stream: "Call", method: Method, request_id: str) -> "Call":
        """A request of a stream has come, which is answered by itself; of the calls in flight the stream is one."""
        call = Call(self, method, stream.deadline, spans.begin_request(request_id))
        call.is_of_stream = True
        return call


class Call:
    """One call, from its arrival until its answer has left; see the module.

    Attributes:
        deadline: When the caller is gone, on the clock; infinity for never.
        span: Traces it; None where nothing does.
        failure: Why it failed, once its block has ended; None where it did not.
        is_of_stream: Whether it is one request of a stream.
    """

    __slots__ = (
        "_began", "_calls", "_held_bytes", "_is_open", "_method", "_model", "deadline", "failure", "is_of_stream",
        "span",
    )  # fmt: skip

    def __init__(self, calls: Calls, method: Method, deadline: float, span: RequestSpan | None) -> None:
        """See `Calls.begin`."""
        self._calls = calls
        self._method = method
        self._began = calls.clock.now()
        self._held_bytes = 0
        self._model: ServedModel | None = None
        self._is_open = True
        self.deadline = deadline
        self.span = span
        self.failure: Failure | None = None
        self.is_of_stream = False

    def __enter__(self) -> "Call":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Ends the work: what failed is kept as `failure`, unless the caller has gone or the process ends."""
        if self._model is not None:
            self._model.leave()
            self._model = None
        status, reason, is_answer = OK, "", not isinstance(error, _NOT_ANSWERS)
        now = self._calls.clock.now()
        if error is not None and is_answer:
            self.failure = failure_of(error, self._method.naming)
            status, reason = self.failure.status, self.failure.reason
        elif error is not None:
            status = EXPIRED if self.deadline <= now else CANCELLED
        method = self._method
        if method.observer is not None:
            method.observer.ended(status, reason, now - self._began)
        if self.span is not None:
            code = {method.status_attribute: method.code_of(status)}
            self.span.end(code, reason, failed=method.is_failure(status))
        return is_answer

    def release(self, *_: object) -> None:
        """The answer has left, or never will: gives back what the call holds. Callable again."""
        if not self._is_open:
            return
        self._is_open = False
        calls = self._calls
        calls.held_bytes -= self._held_bytes
        if self._method.observer is not None and not self.is_of_stream:
            calls.in_flight -= 1
            if not calls.in_flight:
                calls.idle.set()

    def accept(self) -> None:
        """To be called before anything is done for a call.

        Raises:
            Draining: The server is stopping.
        """
        if self._calls.draining.is_set() and not self._method.answers_while_draining:
            raise Draining("the server is stopping; send the request to another")

    def hold(self, size: int) -> None:
        """Counts bytes against the budget of all calls, until the call is released.

        An eighth of the budget is for calls that hold little, so that large ones do not shut all others out.

        Raises:
            BudgetFull: There is no room; a call that is alone always has room.
        """
        calls = self._calls
        is_small = self._held_bytes + size <= _SMALL_BYTES
        room = calls.max_held_bytes if is_small else calls.max_held_bytes // 8 * 7
        others = calls.held_bytes - self._held_bytes
        if others and calls.held_bytes + size > room:
            raise BudgetFull(
                f"requests and replies in flight hold {calls.held_bytes} of at most {calls.max_held_bytes} bytes "
                f"(max_in_flight_mib) and this one needs {size} more",
                _BUDGET_RETRY_S,
            )
        calls.held_bytes += size
        self._held_bytes += size

    def resolve(
        self, sequences: int, name: str, version: str, fingerprint: str = "", space_id: str = ""
    ) -> ServedModel:
        """The model that so many sequences are for, as `Catalog.resolve` finds it; it stays open until the call ends.

        Raises:
            EncserveError: Whatever `Catalog.resolve` raises.
        """
        model = self._calls.catalog.resolve(name, version, fingerprint, space_id)
        if self._model is not None:
            self._model.leave()
        self._model = model
        model.enter()
        if self.span is not None:
            self.span.about(model.bundle.name, model.bundle.version, sequences)
        return model

    async def encode(
        self, model: ServedModel, request: EncodeCall, build: Callable[[EncodeReply], bytes], growth: float = 1.0
    ) -> bytes:
        """Answers a call.

        Args:
            model: The model, as `resolve` gave it.
            request: What is asked of it.
            build: Makes the reply's bytes; called in a thread where there are many.
            growth: How many bytes those are, at most, for each that a model estimates: 1 for raw numbers.

        Raises:
            BudgetFull: There is no room for the reply.
            ResponseTooLarge: The reply is larger than estimated.
            EncserveError: Whatever `ServedModel.prepare` and `run` raise.
        """
        reply = await model.prepare(request, self.span)
        estimated = reply.estimated_bytes
        self.hold(round(estimated * (1 + growth)))  # the rows, and the reply made of them
        await model.run(reply, self.deadline, self.span)
        if reply.estimated_bytes > estimated:
            self.hold(round((reply.estimated_bytes - estimated) * (1 + growth)))
        return await self._build(model, partial(build, reply), reply.estimated_bytes, growth)

    async def encode_in_parts(
        self,
        model: ServedModel,
        request: EncodeCall,
        build: Callable[[EncodeReply], bytes],
        growth: float = 1.0,
        more_bytes: int = 0,
    ) -> bytes:
        """Answers a call of any number of inputs, in parts where they are many or long; see `encode` and `PartedCall`.

        `more_bytes` are those of the reply that are not made of rows, at most; no limit of replies counts them.

        Raises:
            EncserveError: Whatever `encode` and `PartedCall.run` raise.
        """
        clock, span = self._calls.clock, self.span
        if more_bytes:
            self.hold(more_bytes)

        def hold(estimated_bytes: int) -> None:
            self.hold(round(estimated_bytes * (1 + growth)))

        reply = await PartedCall(model, request, hold, clock=clock, deadline=self.deadline, span=span).run()
        return await self._build(model, partial(build, reply), reply.estimated_bytes, growth, more_bytes)

    async def tokenize(
        self, model: ServedModel, request: TokenizeCall, build: Callable[[TokenizeReply], bytes], growth: float = 1.0
    ) -> bytes:
        """Answers a call that only tokenizes, whether or not the model is ready; for the rest see `encode`."""
        reply = await model.tokenize(request, self.span)
        self.hold(round(reply.estimated_bytes * (1 + growth)))
        return await self._build(model, partial(build, reply), reply.estimated_bytes, growth)

    async def _build(
        self,
        model: ServedModel,
        build: Callable[[], bytes],
        estimated_bytes: int,
        growth: float,
        more_bytes: int = 0,
    ) -> bytes:
        """What `build` makes, in a thread where that is much. From now on the call holds what it is."""
        began = self._calls.clock.now()
        if estimated_bytes * growth + more_bytes <= _INLINE_REPLY_BYTES:
            data = build()
        else:
            data = await asyncio.get_running_loop().run_in_executor(self._calls.encode_pool, build)
        ended = self._calls.clock.now()
        if self.span is not None:
            self.span.stage("encode", began, ended)
        limit = round(model.limits.max_response_bytes * growth) + more_bytes
        if len(data) > limit:  # the estimate was wrong; callers' own limits would fail the call without a reason
            problem = f"the reply takes {len(data)} bytes, over the limit of {limit} (max_response_bytes)"
            raise ResponseTooLarge(FieldPath(Part.INPUTS), problem)
        model.answered(ended - began, len(data))
        sent = len(data) * self._method.reply_copies
        self._calls.held_bytes += sent - self._held_bytes
        self._held_bytes = sent
        return data


def failure_of(error: BaseException, naming: Naming) -> Failure:
    """What a caller sees of an error. Anything but our own errors becomes a fixed text and an id that is logged."""
    failure = to_failure(error, naming) if isinstance(error, EncserveError) else None
    return failure or Failure(UNKNOWN, EncserveError.reason, log_unexpected(error))
