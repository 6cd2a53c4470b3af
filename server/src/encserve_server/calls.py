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
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto
from functools import partial
from types import TracebackType
from typing import Protocol

from encserve_server.callers.registry import Callers, Identity, KnownCaller, Metadata
from encserve_server.error_table import CANCELLED, EXPIRED, OK, UNKNOWN, Failure, Status, to_failure
from encserve_server.errors import (
    Draining,
    EncserveError,
    FieldPath,
    Naming,
    Part,
    PermissionDenied,
    RateLimited,
    ResponseTooLarge,
    Unauthenticated,
)
from encserve_server.ledger import ByteBudget, Places
from encserve_server.models.catalog import Catalog
from encserve_server.models.parts import PartedCall
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
from encserve_server.system.clock import Clock
from encserve_server.telemetry import call_log, spans
from encserve_server.telemetry.call_log import CallRecord, RefusalLog
from encserve_server.telemetry.lines import LineWriter
from encserve_server.telemetry.logs import log_unexpected
from encserve_server.telemetry.spans import SERVER_ERROR_CODES, RequestSpan, Tracer
from encserve_server.types.callers import ANY_SENDER, ANYONE, CertificateName, Priority, Sender
from encserve_server.types.sequences import TokenSequence

# A reply larger than this is built in a thread: on the event loop it would delay all other calls.
_INLINE_REPLY_BYTES = 256 * 1024
# Health checks, and questions for what is served, are shorter; their callers may have no key.
OPEN_REQUEST_BYTES = 4096
# These end the task that they are raised in; every other exception is an answer.
_NOT_ANSWERS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class Access(Enum):
    """Who may call a method, where keys or certificates are asked for."""

    OPEN = auto()  # everybody: health checks
    LISTING = auto()  # tells what is served; everybody, where a setting says so
    CALLERS = auto()  # those who are known
    INSPECT = auto()  # those of them who may inspect

    @property
    def is_open(self) -> bool:
        """Whether callers without a key may get in: their requests have at most OPEN_REQUEST_BYTES."""
        return self in (Access.OPEN, Access.LISTING)


class Peer(Protocol):
    """The other end of a connection."""

    def address(self) -> str:
        """Its address and port; empty where it has gone."""

    def certificate_names(self) -> Collection[CertificateName]:
        """The DNS and URI names of its verified certificate."""


class CallerObserver(Protocol):
    """Counts the calls of each caller; called on the event loop."""

    def ended(self, caller: str, outcome: str, tokens: int) -> None:
        """A call with so many tokens has ended: with a reason, or with OK, CANCELLED or DEADLINE_EXCEEDED."""


class AnswerTimes(Protocol):
    """Keeps how long calls that encode take, of all protocols; called on the event loop."""

    def observe(self, seconds: float) -> None:
        """A call of one priority has ended after so long."""


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
        access: Access = Access.CALLERS,
        log_name: str = "",
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
            access: Who may call it.
            log_name: Its name in the access log, where that of its spans does not say enough.
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
        self.access = access
        self.log_name = log_name or name


class Calls:
    """The calls of all protocols together; owned by the event loop.

    Attributes:
        in_flight: How many calls are being worked on, or have their answer on its way; any thread may read it.
        idle: Set while no call is in flight.
        draining: Set from when new calls are refused.
        budget: The bytes of requests and replies that calls hold.
        places: The places of slow requests and open streams.
        callers: Who may call; None where everybody may, and nobody is named.
        caller_observer: Counts the calls of each caller; None where callers are not told apart.
        answer_times: Keep how long calls that encode take, by priority.
        access_log: Where each call is written; None for nowhere.
        refusals: Where refused and failed calls are told together; None for nowhere.
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
        """Takes the models, and the threads in which large replies are built."""
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

    @property
    def reads_metadata(self) -> bool:
        """Whether `begin` needs the headers of calls."""
        return self.callers is not None or self.tracer is not None

    def drain(self) -> None:
        """From now on new calls get Draining."""
        self.draining.set()

    def begin(
        self,
        method: Method,
        metadata: Collection[tuple[str, str | bytes]] = (),
        deadline: float = math.inf,
        peer: Peer | None = None,
    ) -> "Call":
        """A call has come.

        Args:
            method: What is called.
            metadata: The headers of the request, their names in lower case; needed where `reads_metadata` says so.
            deadline: When the caller is gone, on the clock; infinity for never.
            peer: The other end of the connection.
        """
        span = None
        if method.observer is not None:
            method.observer.began()
            self.in_flight += 1
            self.idle.clear()
            if self.tracer is not None:
                span = self.tracer.begin(method.name, metadata, method.attributes)
        return Call(self, method, deadline, span, metadata, peer)

    def begin_request(self, stream: "Call", method: Method, request_id: str) -> "Call":
        """A request of a stream has come, which is answered by itself; of the calls in flight the stream is one."""
        call = Call(self, method, stream.deadline, spans.begin_request(request_id), (), stream.peer)
        call.is_of_stream = True
        call.inherit(stream)
        return call


class Call:
    """One call, from its arrival until its answer has left; see the module.

    Attributes:
        deadline: When the caller is gone, on the clock; infinity for never.
        span: Traces it; None where nothing does.
        naming: The names of fields and values in its errors. A handler may replace it.
        failure: Why it failed, once its block has ended; None where it did not.
        is_of_stream: Whether it is one request of a stream.
        caller: Who calls, once the call is accepted.
        peer: The other end of the connection; None once the call has ended, or where nobody said.
    """

    __slots__ = (
        "_account", "_began", "_calls", "_charged", "_charged_text_tokens", "_charged_tokens", "_generation",
        "_held_bytes", "_identity", "_inputs", "_is_open", "_known", "_metadata", "_method", "_model", "_model_name",
        "_prepaid_tokens", "_priority", "_seconds", "_tokens", "caller", "deadline", "failure", "is_of_stream",
        "naming", "peer", "span",
    )  # fmt: skip

    def __init__(
        self,
        calls: Calls,
        method: Method,
        deadline: float,
        span: RequestSpan | None,
        metadata: Metadata = (),
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
        self._metadata = metadata
        self._identity: Identity | None = None
        self._known: KnownCaller | None = None
        self._generation = 0
        self._charged: list[TokenSequence] = []  # sequences that count against the caller's rate
        self._charged_tokens = self._charged_text_tokens = 0  # all tokens that count, and the tokens of texts
        self._prepaid_tokens = 0  # of texts whose sequences `charge` has not counted yet
        self._model_name, self._inputs, self._tokens = "", 0, 0  # what is counted and logged
        self._seconds = 0.0, 0.0  # in the queue and in compute
        self._priority: Priority | None = None  # of a call that encodes

    def __enter__(self) -> "Call":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Ends the work: what failed is kept as `failure`, unless the caller has gone or the process ends."""
        if self._model is not None:
            self._model.leave()
            self._model = None
        if error is not None:
            self._give_rate_back()
        self._charged = []
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
        self.peer, self._metadata = None, ()  # which hold what holds this call
        return is_answer

    def _tell(self, status: Status, reason: str, seconds: float) -> None:
        """Counts the call for its caller, and writes of it where that is asked for."""
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
        """The answer has left, or never will: gives back what the call holds. Callable again."""
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
        """To be called before anything is done for a call, and before any of its body is looked at.

        Raises:
            Draining: The server is stopping.
            Unauthenticated: The caller is not known.
            PermissionDenied: The caller may not use this method.
            RateLimited: The caller is over its rate.
        """
        calls, access = self._calls, self._method.access
        if calls.draining.is_set() and not self._method.answers_while_draining:
            raise Draining("the server is stopping; send the request to another")
        callers = calls.callers
        if callers is None or access is Access.OPEN:
            return
        peer = self.peer
        names = peer.certificate_names if peer is not None else tuple
        try:
            self._identity = callers.identify(self._metadata, names)
        except Unauthenticated:
            if access is Access.LISTING and callers.public_listing:
                return
            raise
        self._recognise(callers)
        rules = None if self._known is None else self._known.rules
        if access is Access.INSPECT and rules is not None and not rules.may_inspect:
            raise PermissionDenied("", f"caller {rules.caller.name} may not use Inspect (inspect in the callers file)")
        if access is not Access.LISTING:
            self._check_rate()

    def _recognise(self, callers: Callers) -> None:
        """Sets who calls, as the callers file says now."""
        self._generation = callers.generation
        self._known = callers.known(self._identity)
        self.caller = callers.caller(self._known, self._metadata)

    @property
    def account(self) -> str:
        """The caller's account in the ledger: its name, or the address of a peer without a name."""
        if not self._account:
            host = "" if self.peer is None else self.peer.address().rpartition(":")[0]
            self._account = self.caller.name or f"address {host}"
        return self._account

    def inherit(self, stream: "Call") -> None:
        """The call is a request of this stream: its caller is the stream's."""
        self.caller, self._known, self._account = stream.caller, stream._known, stream.account

    def recheck(self) -> None:
        """To be called with each message of a stream: the caller may have been revoked since the last one.

        Raises:
            Unauthenticated: It has.
        """
        callers = self._calls.callers
        if callers is not None and callers.generation != self._generation:
            self._recognise(callers)

    def _check_rate(self) -> None:
        """Refuses a caller that is over its rate."""
        known = self._known
        if known is None or known.bucket is None or known.rules.tokens_per_second is None:
            return
        if delay_s := known.bucket.delay_seconds(self._calls.clock.now()):
            raise RateLimited(known.rules.caller.name, known.rules.tokens_per_second, delay_s)

    def charge_text(self, tokens: int) -> None:
        """Count the tokens of texts against the caller's rate as soon as they are made, even if the call fails later.

        Raises:
            RateLimited: Other calls have used up the rate meanwhile, and this call has not counted before.
        """
        self._charged_text_tokens += tokens
        self._prepaid_tokens += tokens
        self._take_from_rate(tokens)

    def charge(self, sequences: Sequence[TokenSequence]) -> None:
        """Count the cost of sequences against the caller's rate.

        If the call fails, sequences that have not started to run cost only the tokens of texts.

        Raises:
            RateLimited: Other calls have used up the rate meanwhile, and this call has not counted before.
        """
        if self._known is None or self._known.bucket is None:
            return
        self._charged += sequences
        due, self._prepaid_tokens = sum([it.cost for it in sequences]) - self._prepaid_tokens, 0
        self._take_from_rate(due)

    def _take_from_rate(self, tokens: int) -> None:
        if self._known is None or self._known.bucket is None:
            return
        has_counted, self._charged_tokens = self._charged_tokens > 0, self._charged_tokens + tokens
        try:
            if not has_counted:
                self._check_rate()
        finally:
            self._known.bucket.take(tokens, self._calls.clock.now())

    def _give_rate_back(self) -> None:
        """Give back the cost of work that the failed call has not started."""
        if self._charged_tokens and self._known is not None and self._known.bucket is not None:
            started = sum([it.cost for it in self._charged if not math.isnan(it.started_at)])
            cost = max(started, self._charged_text_tokens)
            self._known.bucket.take(cost - self._charged_tokens, self._calls.clock.now())

    def may_use(self, model: ServedModel) -> bool:
        """Whether the caller may use a model."""
        allowed = None if self._known is None else self._known.rules.models
        return allowed is None or model.bundle.name in allowed

    def note(self, sequences: Sequence[TokenSequence], seconds: Callable[[], tuple[float, float]]) -> None:
        """Keeps what is counted and logged of an answered call; `seconds` gives those in the queue and in compute."""
        calls = self._calls
        if calls.caller_observer is not None or calls.access_log is not None:
            self._tokens = sum([len(it.input) for it in sequences])
            self._inputs = len(sequences)
        if calls.access_log is not None:
            self._seconds = seconds()

    def hold(self, size: int) -> None:
        """Count bytes of the budget for the caller, until the call is released.

        Raises:
            BudgetFull: There is no room. A call that is alone always has room.
        """
        self._calls.budget.take(self._account or self.account, size, self._held_bytes)
        self._held_bytes += size

    def resolve(
        self, sequences: int, name: str, version: str, fingerprint: str = "", space_id: str = ""
    ) -> ServedModel:
        """The model that so many sequences are for, as `Catalog.resolve` finds it; it stays open until the call ends.

        Raises:
            PermissionDenied: The caller may not use it.
            EncserveError: Whatever `Catalog.resolve` raises.
        """
        rules = None if self._known is None else self._known.rules
        allowed = None if rules is None else rules.models
        self._inputs = sequences
        catalog = self._calls.catalog
        if rules is not None and allowed is not None:  # before anything else of the model could be told
            catalog.check_use(name, rules.caller.name, allowed)
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
            RateLimited: The caller is over its rate.
            ResponseTooLarge: The reply is larger than estimated.
            EncserveError: Whatever `ServedModel.prepare` and `run` raise.
        """
        sender = self._begin_encode(model, request.priority)
        reply = await model.prepare(request, self.span, sender)
        estimated = reply.estimated_bytes
        self.hold(round(estimated * (1 + growth)))  # the rows, and the reply made of them
        self.charge(reply.sequences)
        await model.run(reply, self.deadline, self.span, sender)
        self.note(reply.sequences, reply.seconds)
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
        clock, span, sender = self._calls.clock, self.span, self._begin_encode(model, request.priority)
        if more_bytes:
            self.hold(more_bytes)

        def hold(estimated_bytes: int) -> None:
            self.hold(round(estimated_bytes * (1 + growth)))

        parted = PartedCall(
            model,
            request,
            hold,
            clock=clock,
            deadline=self.deadline,
            span=span,
            sender=sender,
            charge=self.charge,
        )
        reply = await parted.run()
        self.note(reply.sequences, reply.seconds)
        return await self._build(model, partial(build, reply), reply.estimated_bytes, growth, more_bytes)

    def _begin_encode(self, model: ServedModel, priority: Priority) -> Sender:
        """Refuse a call whose caller has used up its rate or its share, before any work.

        Raises:
            RateLimited: The caller is over its rate.
            ShareExceeded: The caller, or bulk, has its share of the queue waiting.
        """
        sender = self._sender(priority)
        model.check_share(sender)
        if self.is_of_stream:  # other calls were checked on arrival
            self._check_rate()
        return sender

    def _sender(self, priority: Priority) -> Sender:
        """The sender of a call with this priority, or with its caller's priority if that is less urgent."""
        self._priority = max(priority, self.caller.priority)
        has_rate = self._known is not None and self._known.bucket is not None
        if self.caller is ANYONE and priority is Priority.INTERACTIVE and not has_rate:
            return ANY_SENDER
        return Sender(self.caller, self._priority, self.charge_text if has_rate else None)

    async def tokenize(
        self, model: ServedModel, request: TokenizeCall, build: Callable[[TokenizeReply], bytes], growth: float = 1.0
    ) -> bytes:
        """Answer a call that only tokenizes, even if the model is not ready. For the rest see `encode`."""
        reply = await model.tokenize(
            request,
            lambda estimated_bytes: self.hold(round(estimated_bytes * (1 + growth))),
            self.span,
            self._sender(Priority.INTERACTIVE),
        )
        self.note(reply.sequences, lambda: (0.0, 0.0))
        return await self._build(model, partial(build, reply), reply.estimated_bytes, growth)

    def inspect(self, model: ServedModel, request: InspectCall) -> AbstractAsyncContextManager[InspectReply]:
        """Answers an inspection; the reply's memory is given back when the block ends.

        Raises:
            RateLimited: The caller is over its rate.
            EncserveError: Whatever `ServedModel.inspect` raises.
        """
        return model.inspect(request, self.span, self._sender(Priority.INTERACTIVE), self.charge)

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
        self._calls.budget.add(self._account or self.account, sent - self._held_bytes)
        self._held_bytes = sent
        return data


def failure_of(error: BaseException, naming: Naming) -> Failure:
    """What a caller sees of an error. Anything but our own errors becomes a fixed text and an id that is logged."""
    failure = to_failure(error, naming) if isinstance(error, EncserveError) else None
    return failure or Failure(UNKNOWN, EncserveError.reason, log_unexpected(error))
