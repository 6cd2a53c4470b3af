"""One call of any protocol, from its arrival until its reply is sent.

Every protocol uses a call in this way:

    method = Method(…)                                     created once for each RPC or route
    call = calls.begin(method, deadline, peer)
    with call:                                             an error in the block is stored as `call.failure`
        call.accept()
        call.hold(len(data))
        model = call.resolve(count, name, version)
        answer = await call.encode(model, EncodeCall(…), build)
    …                                                      send the answer or `call.failure`
    call.release()                                         after the reply has been sent
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Protocol

from encserve_server.callers.registry import Callers
from encserve_server.calls.access import CallerAccess
from encserve_server.calls.method import Access, Method
from encserve_server.errors import (
    Draining,
    EncserveError,
    FieldPath,
    Naming,
    RequestField,
    ResponseTooLarge,
)
from encserve_server.failures import Failure, to_failure
from encserve_server.ledger import ByteBudget, Places
from encserve_server.models.catalog import Catalog
from encserve_server.models.inputs import first_piece
from encserve_server.models.parts import PartedCall, runs_at_once
from encserve_server.models.served import (
    EncodeReply,
    InspectCall,
    InspectReply,
    ServedModel,
    TokenizeCall,
    TokenizeReply,
)
from encserve_server.models.treatment import EncodeCall
from encserve_server.settings import MIB
from encserve_server.statuses import CANCELLED, EXPIRED, OK, UNKNOWN, Status
from encserve_server.system.clock import Clock
from encserve_server.telemetry import call_log, spans
from encserve_server.telemetry.call_log import CallRecord, RefusalLog
from encserve_server.telemetry.lines import LineWriter
from encserve_server.telemetry.logs import log_unexpected
from encserve_server.telemetry.spans import RequestSpan, Tracer
from encserve_server.types.callers import ANY_SENDER, ANYONE, CertificateName, Metadata, Priority, Sender
from encserve_server.types.sequences import TokenSequence

# A larger reply is built in a thread. On the event loop, the work would delay all other calls.
_INLINE_REPLY_BYTES = 256 * 1024
# The maximum size in bytes of a request without a key: a health check, or a request for a list of models.
OPEN_REQUEST_BYTES = 4096
# These exceptions end the task. Every other exception becomes an error reply.
_NOT_ANSWERS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class Peer(Protocol):
    """The other end of a connection."""

    def address(self) -> str:
        """Return the address and port of the peer; empty if the peer has disconnected."""

    def metadata(self) -> Metadata:
        """Return the headers of the request, with names in lower case."""

    def certificate_names(self) -> Collection[CertificateName]:
        """Return the DNS and URI names in the verified certificate of the peer."""


class CallerObserver(Protocol):
    """Counts the calls of each caller. The methods run on the event loop."""

    def ended(self, caller: str, outcome: str, tokens: int) -> None:
        """Count a call that has ended. `outcome` is the reason of an error, or OK, CANCELLED or DEADLINE_EXCEEDED."""


class AnswerTimes(Protocol):
    """Records the durations of encode calls of all protocols. The methods run on the event loop."""

    def observe(self, seconds: float) -> None:
        """Record the duration of a call."""


class Calls:
    """The calls of all protocols, with common limits and observers. Only the event loop uses this class.

    Attributes:
        in_flight: The number of calls without a complete reply. Any thread may read this number.
        idle: Set while no call is in flight.
        draining: Set when the server begins to refuse new calls.
        budget: The memory budget for requests and replies, in bytes.
        places: The slots for slow requests and open streams.
        callers: The known callers; None if everyone may call. Then no caller has a name.
        caller_observer: Counts the calls of each caller; None if no caller has a name.
        answer_times: Record the durations of encode calls, by priority.
        access_log: Writes a line for each call; None without an access log.
        refusals: Logs refused and failed calls, at most one line a second for each caller and reason; None for no log.
    """

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        encode_pool: Executor,
        *,
        max_held_bytes: int = 1024 * MIB,
        max_request_bytes: int = 4 * MIB,
        tracer: Tracer | None = None,
    ) -> None:
        """Set the models and the limits. The threads of `encode_pool` build large replies."""
        self.catalog = catalog
        self.clock = clock
        self.encode_pool = encode_pool
        self.tracer = tracer
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = asyncio.Event()
        self.budget = ByteBudget(max_held_bytes)
        self.places = Places(self.budget, clock, self.draining, max_request_bytes)
        self.callers: Callers | None = None
        self.caller_observer: CallerObserver | None = None
        self.answer_times: Mapping[Priority, AnswerTimes] = {}
        self.access_log: LineWriter[CallRecord] | None = None
        self.refusals: RefusalLog | None = None

    def drain(self) -> None:
        """Refuse new calls with Draining from now on."""
        self.draining.set()

    def begin(self, method: Method, deadline: float = math.inf, peer: Peer | None = None) -> "Call":
        """Begin a call.

        Args:
            method: The method.
            deadline: The clock's time in seconds at which the caller stops waiting; infinity without a deadline.
            peer: The other end of the connection.
        """
        span = None
        if method.observer is not None:
            method.observer.began()
            self.in_flight += 1
            self.idle.clear()
            if self.tracer is not None:
                metadata = () if peer is None else peer.metadata()
                span = self.tracer.begin(method.name, metadata, method.attributes)
        return Call(self, method, deadline, span, peer)

    def begin_request(self, stream: "Call", method: Method, request_id: str) -> "Call":
        """Begin one request of a stream. Only the stream counts as a call in flight."""
        call = Call(self, method, stream.deadline, spans.begin_request(request_id), stream.peer)
        call.is_of_stream = True
        call.inherit(stream)
        return call


class Call:
    """One call, from its arrival until its reply is sent; see the example in the module's docstring.

    Attributes:
        deadline: The clock's time in seconds at which the caller stops waiting; infinity without a deadline.
        span: The span of the call; None without tracing.
        naming: The names of fields and values in errors. A handler may replace `naming`.
        failure: The error of the `with` block; None if the block succeeded or was cancelled.
        is_of_stream: Whether the call is one request of a stream.
        caller: The caller, after `accept`.
        peer: The other end of the connection; None if unknown, or after the `with` block.
    """

    __slots__ = (
        "_access", "_account", "_began", "_calls", "_held_bytes", "_inputs", "_is_open", "_method", "_model",
        "_model_name", "_priority", "_seconds", "_tokens", "caller", "deadline", "failure", "is_of_stream", "naming",
        "peer", "span",
    )  # fmt: skip

    def __init__(
        self,
        calls: Calls,
        method: Method,
        deadline: float,
        span: RequestSpan | None,
        peer: Peer | None = None,
    ) -> None:
        """See `Calls.begin`."""
        self._calls = calls
        self._method = method
        self._began = calls.clock.now()
        self._account = ""
        self._held_bytes = 0
        self._model: ServedModel | None = None
        self._is_open = True
        self.caller = ANYONE
        self.deadline = deadline
        self.span = span
        self.naming = method.naming
        self.failure: Failure | None = None
        self.is_of_stream = False
        self.peer = peer
        self._access: CallerAccess | None = None  # None if everyone may call
        self._model_name, self._inputs, self._tokens = "", 0, 0  # for counts and logs
        self._seconds = 0.0, 0.0  # the time in the queue, and the time in compute
        self._priority: Priority | None = None  # None unless this is an encode call

    def __enter__(self) -> "Call":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """End the work. Store an error as `failure`, unless the caller has disconnected or the process ends."""
        if self._model is not None:
            self._model.leave()
            self._model = None
        if self._access is not None:
            self._access.end(failed=error is not None)
        status, reason, is_answer = OK, "", not isinstance(error, _NOT_ANSWERS)
        now = self._calls.clock.now()
        if error is not None and is_answer:
            self.failure = failure_of(error, self.naming)
            status, reason = self.failure.status, self.failure.reason
        elif error is not None:
            status = EXPIRED if self.deadline <= now else CANCELLED
        method = self._method
        if method.observer is not None:
            method.observer.ended(status, reason, now - self._began)
        if self.span is not None:
            code = {method.status_attribute: method.code_of(status)}
            self.span.end(code, reason, failed=method.is_failure(status))
        if method.observer is not None or (self.failure is not None and method.access is not Access.OPEN):
            self._tell(status, reason, now - self._began)
        self.peer = None  # to break a reference cycle
        return is_answer

    def _tell(self, status: Status, reason: str, seconds: float) -> None:
        """Count the call for its caller, and write the call to the access log or the log of refusals."""
        calls, method, failure = self._calls, self._method, self.failure
        times = None if self._priority is None or self.is_of_stream else calls.answer_times.get(self._priority)
        if times is not None:
            times.observe(seconds)
        if calls.caller_observer is not None:
            calls.caller_observer.ended(self.caller.name, reason or status.grpc, self._tokens)
        if calls.access_log is not None:
            ids = spans.current_ids()
            calls.access_log.put(
                CallRecord(
                    call_log.now(),
                    self.caller.name,
                    "" if self.peer is None else self.peer.address(),
                    method.log_name,
                    self._model_name,
                    self._inputs,
                    self._tokens,
                    method.code_of(status),
                    reason,
                    seconds,
                    *self._seconds,
                    "" if ids is None else ids.trace_id,
                )
            )
        elif failure is not None and calls.refusals is not None:
            is_mistake = failure.is_request_error
            calls.refusals.add(self.caller.name, reason, method.log_name, failure.text, is_callers_mistake=is_mistake)

    def release(self, *_: object) -> None:
        """Give back the call's bytes of the memory budget, after the reply was sent or if no reply will be sent.

        A second `release` does nothing.
        """
        if not self._is_open:
            return
        self._is_open = False
        calls = self._calls
        if self._held_bytes:
            calls.budget.add(self._account, -self._held_bytes)
        if self._method.observer is not None and not self.is_of_stream:
            calls.in_flight -= 1
            if not calls.in_flight:
                calls.idle.set()

    def accept(self) -> None:
        """Check the caller. Call this before any other work, and before the body is read.

        Raises:
            Draining: The server is stopping.
            Unauthenticated: The caller is not known.
            PermissionDenied: The caller may not use this method.
            RateLimited: The caller is over its rate.
        """
        calls, method = self._calls, self._method
        if calls.draining.is_set() and not method.answers_while_draining:
            raise Draining
        if calls.callers is None or method.access is Access.OPEN:
            return
        peer = self.peer
        self._access = access = CallerAccess(calls.callers, calls.clock, () if peer is None else peer.metadata())
        access.identify(tuple if peer is None else peer.certificate_names, method.access)
        self.caller = access.caller
        access.check(method.access)

    @property
    def account(self) -> str:
        """The account for the memory budget: the caller's name, or the peer's address if the caller has no name."""
        if not self._account:
            host = "" if self.peer is None else self.peer.address().rpartition(":")[0]
            self._account = self.caller.name or f"address {host}"
        return self._account

    def inherit(self, stream: "Call") -> None:
        """Take the caller of the stream to which this call belongs."""
        self.caller, self._account = stream.caller, stream.account
        if stream._access is not None:
            self._access = stream._access.of_request()

    def recheck(self) -> None:
        """Check the caller again. Call this for each message of a stream.

        Raises:
            Unauthenticated: The key or certificate was revoked after the last message.
        """
        if self._access is not None:
            self._access.recheck()
            self.caller = self._access.caller

    def charge(self, sequences: Sequence[TokenSequence]) -> None:
        """Count the cost of sequences against the caller's rate; see `CallerAccess.charge`.

        Raises:
            RateLimited: The caller is over its rate, and these are the first tokens of this call.
        """
        if self._access is not None:
            self._access.charge(sequences)

    def may_use(self, model: ServedModel) -> bool:
        """Return whether the caller may use a model."""
        allowed = None if self._access is None else self._access.models
        return allowed is None or model.bundle.name in allowed

    def note(self, sequences: Sequence[TokenSequence], seconds: Callable[[], tuple[float, float]]) -> None:
        """Store the number of inputs, the number of tokens and the durations of a successful call, for counts and logs.

        `seconds` returns the queue time and the compute time in seconds.
        """
        calls = self._calls
        if calls.caller_observer is not None or calls.access_log is not None:
            self._tokens = sum([len(it.input) for it in sequences])
            self._inputs = len(sequences)
        if calls.access_log is not None:
            self._seconds = seconds()

    def hold(self, size: int) -> None:
        """Take `size` bytes of the memory budget, until the call is released.

        Raises:
            BudgetFull: The budget is full. This cannot happen if no other call holds bytes.
        """
        self._calls.budget.take(self._account or self.account, size, self._held_bytes)
        self._held_bytes += size

    def resolve(
        self, sequences: int, name: str, version: str, fingerprint: str = "", space_id: str = ""
    ) -> ServedModel:
        """Return the model of a call; see `Catalog.resolve`. The model stays open until the call ends.

        Raises:
            PermissionDenied: The caller may not use the model.
        """
        self._inputs = sequences
        catalog, allowed = self._calls.catalog, None
        if self._access is not None:  # checked first, so that no other error reveals facts about the model
            self._access.check_model(catalog, name)
            allowed = self._access.models
        model = catalog.resolve(name, version, fingerprint, space_id, allowed)
        if self._model is not None:
            self._model.leave()
        self._model = model
        model.enter()
        self._model_name = f"{model.bundle.name}@{model.bundle.version}"
        if self.span is not None:
            self.span.about(model.bundle.name, model.bundle.version, sequences)
        return model

    async def encode(
        self,
        model: ServedModel,
        request: EncodeCall,
        build: Callable[[EncodeReply], bytes],
        growth: float = 1.0,
        more_bytes: int = 0,
    ) -> bytes:
        """Answer an encode call. A call with many inputs or long inputs runs in parts; see `PartedCall`.

        Args:
            model: The model from `resolve`.
            request: The request.
            build: Builds the bytes of the reply. A large reply is built in a thread.
            growth: The maximum ratio of the reply's size to the model's estimate; 1 for raw numbers.
            more_bytes: The maximum number of bytes in the reply besides the outputs. max_response_bytes does not limit
                these bytes.

        Raises:
            BudgetFull: The memory budget has no room for the reply.
            RateLimited: The caller is over its rate.
            ShareExceeded: This caller, or all bulk calls together, fill their share of the queue.
            ResponseTooLarge: The reply is over the limit.
        """
        reply = await self.compute(model, request, growth, more_bytes)
        self.note(reply.sequences, reply.seconds)
        return await self.build(model, partial(build, reply), reply.estimated_bytes, growth, more_bytes)

    async def compute(
        self, model: ServedModel, request: EncodeCall, growth: float = 1.0, more_bytes: int = 0
    ) -> EncodeReply:
        """Compute the outputs of an encode call. For the arguments and the errors see `encode`."""
        span, sender = self.span, self._sender(request.priority)
        if sender is not ANY_SENDER:  # only named callers and bulk calls have shares
            model.check_share(sender)
        if self.is_of_stream and self._access is not None:  # other calls were checked on arrival
            self._access.check_rate()
        if more_bytes:
            self.hold(more_bytes)
        if model.takes_pairs_only:
            request = model.join_pairs(request)
        end = first_piece(request.inputs)
        reply = await model.prepare(request, span, sender, end=end)
        estimated = reply.estimated_bytes
        self.hold(round(estimated * (1 + growth)))  # the outputs, and the reply
        self.charge(reply.sequences)
        inputs = len(request.inputs)
        if inputs == 1 or (end == inputs and runs_at_once(model, reply)):
            await model.run(reply, self.deadline, span, sender)
            if reply.estimated_bytes > estimated:
                self.hold(round((reply.estimated_bytes - estimated) * (1 + growth)))
        else:
            await PartedCall(
                model,
                request,
                reply,
                lambda more: self.hold(round(more * (1 + growth))),
                clock=self._calls.clock,
                deadline=self.deadline,
                span=span,
                sender=sender,
                charge=self.charge,
            ).run()
        return reply

    def _sender(self, priority: Priority) -> Sender:
        """Return the sender, with the less urgent of two priorities: `priority` and the caller's priority."""
        self._priority = max(priority, self.caller.priority)
        access = self._access
        if access is None and priority is Priority.INTERACTIVE:
            return ANY_SENDER
        return Sender(
            self.caller, self._priority, access.charge_text if access is not None and access.has_rate else None
        )

    async def tokenize(
        self, model: ServedModel, request: TokenizeCall, build: Callable[[TokenizeReply], bytes], growth: float = 1.0
    ) -> bytes:
        """Answer a tokenize call, even if the model is not ready. For the arguments see `encode`."""
        reply = await model.tokenize(
            request,
            lambda estimated_bytes: self.hold(round(estimated_bytes * (1 + growth))),
            self.span,
            self._sender(Priority.INTERACTIVE),
        )
        self.note(reply.sequences, lambda: (0.0, 0.0))
        return await self.build(model, partial(build, reply), reply.estimated_bytes, growth)

    def inspect(self, model: ServedModel, request: InspectCall) -> AbstractAsyncContextManager[InspectReply]:
        """Answer an inspection. The inspection holds a slot until the `async with` block ends.

        Raises:
            RateLimited: The caller is over its rate.
        """
        return model.inspect(request, self.span, self._sender(Priority.INTERACTIVE), self.charge)

    async def build(
        self,
        model: ServedModel,
        build: Callable[[], bytes],
        estimated_bytes: int,
        growth: float = 1.0,
        more_bytes: int = 0,
    ) -> bytes:
        """Build the reply, in a thread if the reply is large. Then the call holds only the bytes of the reply.

        For the arguments see `encode`. `estimated_bytes` is the size of the outputs from which the reply is built.
        """
        began = self._calls.clock.now()
        if estimated_bytes * growth + more_bytes <= _INLINE_REPLY_BYTES:
            data = build()
        else:
            data = await asyncio.get_running_loop().run_in_executor(self._calls.encode_pool, build)
        ended = self._calls.clock.now()
        if self.span is not None:
            self.span.stage("encode", began, ended)
        limit = round(model.limits.max_response_bytes * growth) + more_bytes
        if len(data) > limit:  # the estimate was too low; the client would refuse the reply with a less clear error
            problem = f"the reply takes {len(data)} bytes, over the limit of {limit} (max_response_bytes)"
            raise ResponseTooLarge(FieldPath(RequestField.INPUTS), problem)
        model.observer.answered(ended - began, len(data))
        sent = len(data) * self._method.reply_copies
        self._calls.budget.add(self._account or self.account, sent - self._held_bytes)
        self._held_bytes = sent
        return data


def failure_of(error: BaseException, naming: Naming) -> Failure:
    """Return the error for a caller. For an unexpected exception, the text has only the id of a log line."""
    failure = to_failure(error, naming) if isinstance(error, EncserveError) else None
    return failure or Failure(UNKNOWN, EncserveError.reason, log_unexpected(error))
