"""Admission, delivery, and the engine's health; `lanes` runs the batches."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from encserve_server.engine.base import Engine
from encserve_server.errors import (
    DeadlineExpired,
    EncserveError,
    EngineUnhealthy,
    InferenceFailed,
    QueueFull,
    RequestTooLarge,
)
from encserve_server.scheduling.admission import Admission, Throughput
from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.scheduling.lanes import Lanes, MakeOutputs
from encserve_server.scheduling.pending import Entry, PendingQueue, QueueObserver, Ticket
from encserve_server.system.clock import Clock
from encserve_server.telemetry import spans
from encserve_server.telemetry.spans import BatchTracer, RanBatch
from encserve_server.types import EncodedSequence, ModelInput, Output, OutputArrays, OutputKind, TokenSpans

logger = logging.getLogger(__name__)

# What a model that takes ids is probed with.
_FIRST_ID = np.zeros(1, np.int64)
_ROWS = (Output(OutputKind.TOKENS, l2_normalize=False),)


class SchedulerObserver(QueueObserver, Protocol):
    """Who is told what the scheduler does; called on the event loop."""

    def batch_ran(self, batch: RanBatch) -> None:
        """A batch ran."""

    def batch_failed(self) -> None:
        """The engine raised for a batch."""

    def was_busy(self, seconds: float) -> None:
        """At least one batch ran for so long, since this was last told."""

    def waited(self, queue_seconds: float) -> None:
        """A sequence that has run had waited so long in the queue."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The bounds of a scheduler.

    Attributes:
        max_queue_tokens: The most pending tokens; more are refused. It bounds memory, and with the engine's speed the
            longest wait.
        failures_before_probe: After how many failed runs without one success the engine is probed.
        probe_seconds: How often an unhealthy engine is probed.
        stall_seconds: How long one run may take before the engine counts as stuck.
    """

    max_queue_tokens: int
    failures_before_probe: int = 3
    probe_seconds: float = 1.0
    stall_seconds: float = 60.0


class Scheduler:
    """Runs sequences through one engine in batches.

    The contract:

    - `encode` never blocks the event loop. It is admitted or refused at once: the pending tokens of all calls never
      exceed `max_queue_tokens` (QueueFull), and all sequences of a call are admitted or none. Once a call has been
      refused for want of room, so is everybody until a quarter of the queue is free (see `admission`).
    - There is no timer. When the engine is free, whatever is pending is batched and run; while it runs, more gathers.
      The engine's threads take the next batch themselves the moment that one is done; the event loop delivers
      meanwhile. An engine that can runs several batches at once (see `lanes`).
    - An entry with k live entries before it at its arrival starts in the (k + 1)-th batch after those that are
      running, at the latest (see `batching`). So the longest wait is bounded by the queue's bound and the engine's
      speed, never by who arrives later.
    - An entry whose caller has gone or whose deadline has passed is dropped before it is run. A batch that runs is
      never interrupted; who goes meanwhile touches nobody else.
    - A batch that fails is run again in halves, down to single sequences: only a sequence that fails alone fails its
      call (InferenceFailed). After several failures without a success a probe tells whether the engine itself is
      broken; then all calls get EngineUnhealthy at once until a probe succeeds again.

    Who owns what: everything here belongs to the event loop. The engine belongs to the threads of `_lanes`, which take
    from `_pending`, make of a batch what is wanted of it, and tell the `on_…` methods, on the event loop, what came of
    it.
    """

    def __init__(
        self,
        engine: Engine,
        make_outputs: MakeOutputs,
        policy: BatchPolicy,
        limits: SchedulerLimits,
        *,
        clock: Clock,
        observer: SchedulerObserver,
        on_health_change: Callable[[], None] = lambda: None,
        probe: ModelInput = _FIRST_ID,
        tracer: BatchTracer | None = None,
    ) -> None:
        """Takes what it works with; `start` sets it going.

        `probe` is a sequence that the model can compute, so that its failure is the engine's fault.
        """
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._observer = observer
        self._on_health_change = on_health_change
        self._tracer = tracer
        self._pending = PendingQueue(observer)
        self._admission = Admission(limits.max_queue_tokens)
        self._lanes = Lanes(
            engine,
            make_outputs,
            self._pending,
            policy,
            clock=clock,
            listener=self,
            probe=probe,
            failures_before_probe=limits.failures_before_probe,
        )
        self._unhealthy_reason = ""
        self._throughput = Throughput()
        self._recovery: asyncio.Task[None] | None = None
        self._over = False  # closed, or crashed: nothing will run any more

    def __repr__(self) -> str:
        state = self._unhealthy_reason or ("running" if self._lanes.oldest_start() is not None else "free")
        return f"<Scheduler [{self._pending.sequences} queued, {self._pending.tokens} tokens | engine {state}]>"

    def start(self) -> None:
        """Starts the engine's threads; call once, on the event loop."""
        self._lanes.start()

    async def close(self) -> None:
        """Stops the engine; calls that are not done get EngineUnhealthy. Waits for running batches."""
        self._end("it is being unloaded")
        self._lanes.stop()
        unloaded = EngineUnhealthy("the model is being unloaded")
        self._fail(self._lanes.running(), unloaded)
        self._pending.fail_all(unloaded)
        await self._lanes.ended()
        # Not on the event loop: giving hundreds of megabytes back takes tens of milliseconds.
        await asyncio.get_running_loop().run_in_executor(None, self._engine.close)

    def not_ready_reason(self) -> str:
        """Why the engine cannot be relied on now, for people; empty if it can."""
        if self._unhealthy_reason:
            return self._unhealthy_reason
        started_at = self._lanes.oldest_start()
        if started_at is not None:
            running_s = self._clock.now() - started_at
            if running_s > self._limits.stall_seconds:
                return f"a batch has been running for {running_s:.0f} s"
        return ""

    def check_open(self, count_tokens: Callable[[], int | None]) -> None:
        """Returns unless every call would be refused now, whatever is in it, so that nobody looks into it for nothing.

        Args:
            count_tokens: Tells how many tokens the call has, None if that takes more than counting; for the answer.

        Raises:
            QueueFull: No room for anybody.
            RequestTooLarge: More tokens than the whole queue may hold.
            EngineUnhealthy: The engine fails for everything.
        """
        self._check_ready()
        queued = self._pending.tokens
        if self._admission.shut_to_all(queued):
            self._check_room(count_tokens(), queued)

    async def encode(
        self,
        sequences: Sequence[ModelInput],
        wanted: tuple[Output, ...] = _ROWS,
        deadline: float = math.inf,
        attended: Sequence[int] = (),
        token_spans: Sequence[TokenSpans | None] = (),
    ) -> list[EncodedSequence]:
        """Runs sequences and returns what was made of each, in order.

        Args:
            sequences: One or more (seq,) int64 arrays of ids, or (seq, d_model) float32 arrays of vectors, whichever
                the model takes; each checked by the caller.
            wanted: What is to be made of each.
            deadline: The clock's seconds after which nobody waits any more.
            attended: For each how many of its first tokens all of its tokens see, 0 for all; or nothing.
            token_spans: For each what OutputKind.SPANS has rows for, None for nothing; or nothing for all.

        Raises:
            QueueFull: No room now.
            RequestTooLarge: More tokens than the whole queue may hold.
            DeadlineExpired: The deadline passed in the queue.
            InferenceFailed: The engine cannot compute one of the sequences.
            EngineUnhealthy: The engine fails for everything.
        """
        ticket = self._admit(sequences, wanted, deadline, attended, token_spans)
        try:
            await ticket.done
        except asyncio.CancelledError:
            self._pending.tell_cancelled(ticket, self._clock.now())
            raise
        finally:
            if ticket.missing:
                self._pending.withdraw(ticket)
            if ticket.span is not None:
                self._tell_queued(ticket)
            ticket.entries.clear()  # they refer to the ticket: without this the rows would wait for the cycle collector
        return [result for result in ticket.results if result is not None]

    def _admit(
        self,
        sequences: Sequence[ModelInput],
        wanted: tuple[Output, ...],
        deadline: float,
        attended: Sequence[int],
        token_spans: Sequence[TokenSpans | None],
    ) -> Ticket:
        """Queues all sequences of a call, or refuses it."""
        self._check_ready()
        self._check_room(sum(map(len, sequences)), self._pending.tokens)
        now = self._clock.now()
        if deadline <= now:
            for _ in sequences:
                self._observer.expired()
            raise DeadlineExpired("the deadline had passed before the request was queued")
        ticket = Ticket.of(sequences, wanted, now, deadline, spans.current(), attended, token_spans)
        self._pending.add(ticket)
        self._lanes.wake()
        return ticket

    def _check_ready(self) -> None:
        if reason := self.not_ready_reason():
            raise EngineUnhealthy(f"the model is not available: {reason}")

    def _check_room(self, tokens: int | None, queued: int) -> None:
        """Decides about a call of so many tokens, None for at least one."""
        limit = self._limits.max_queue_tokens
        if tokens is not None and tokens > limit:
            raise RequestTooLarge("inputs", f"must be at most {limit} tokens in all (max_queue_tokens); was {tokens}")
        if excess := self._admission.excess(tokens or 1, queued):
            delay_s = self._throughput.seconds_for(excess)
            raise QueueFull("tokens", tokens, queued, limit, delay_s, self._admission.reopens_at_tokens)

    def _tell_queued(self, ticket: Ticket) -> None:
        """Tells a call's span how long it was queued: until its first batch was taken, or it gave up."""
        starts = [entry.started_at for entry in ticket.entries if not math.isnan(entry.started_at)]
        if ticket.span is not None:
            ticket.span.stage("queue", ticket.entries[0].enqueued_at, min(starts, default=self._clock.now()))

    # What the lanes tell

    def on_expired(self, entries: list[Entry]) -> None:
        """Tells callers that their time is up."""
        self._fail(entries, DeadlineExpired("the deadline passed while the request was queued"))

    def on_ran(self, entries: list[Entry], outputs: list[OutputArrays | None], batch: RanBatch) -> None:
        """Gives every entry its own outputs."""
        if self._tracer is not None:
            traced = {entry.ticket.span: None for entry in entries if entry.ticket.span is not None}
            if traced:
                self._tracer.ran(list(traced), batch)
        for entry, its in zip(entries, outputs, strict=True):
            if its is None:
                entry.ticket.fail(InferenceFailed(f"inputs[{entry.index}]: the model's numbers for it are not finite"))
            else:
                entry.deliver(EncodedSequence(its, entry.started_at - entry.enqueued_at, batch.seconds.compute))
        beside = 1 if batch.alone else self._engine.max_parallel_runs  # how many runs share the device, at most
        self._throughput.add(batch.tokens, batch.seconds.compute / beside)
        # Counted when those who wait for these outputs have had their turn.
        asyncio.get_running_loop().call_soon(self._count, entries, batch)

    def _count(self, entries: list[Entry], batch: RanBatch) -> None:
        """Tells the observer of a batch that ran."""
        for entry in entries:
            self._observer.waited(entry.started_at - entry.enqueued_at)
        self._observer.batch_ran(batch)
        self._observer.was_busy(self._lanes.take_busy_seconds())

    def on_failed(self, error: Exception) -> None:
        """Counts and logs it."""
        self._observer.batch_failed()
        self._observer.was_busy(self._lanes.take_busy_seconds())
        logger.warning("a batch failed", extra={"error": repr(error)})

    def on_failed_probe(self, error: Exception) -> None:
        """Logs it."""
        self._observer.was_busy(self._lanes.take_busy_seconds())
        logger.warning("the engine failed a probe", extra={"error": repr(error)})

    def on_culprit(self, entry: Entry) -> None:
        """Fails the call of a sequence that nothing else can be blamed for."""
        entry.ticket.fail(InferenceFailed(f"inputs[{entry.index}]: the model could not compute it"))

    def on_broken(self, entries: list[Entry], error: Exception) -> None:
        """Fails everybody, and begins to look whether the engine comes back."""
        if not self._over:
            times = self._limits.failures_before_probe
            self._set_unhealthy(f"the engine failed {times} times in a row, and then with a known good input", error)
        self._fail_everybody(entries)
        if not self._over and (self._recovery is None or self._recovery.done()):
            self._recovery = asyncio.get_running_loop().create_task(self._recover(), name="encserve-recovery")

    def on_crashed(self, entries: list[Entry], error: BaseException) -> None:
        """Says that nothing will run any more: a dead scheduler must not look healthy."""
        self._end("the scheduler has stopped after an internal error", error)
        self._fail_everybody(entries)

    # Health

    def _fail_everybody(self, entries: Sequence[Entry]) -> None:
        """Ends the calls of these entries and of all that are pending."""
        unavailable = EngineUnhealthy(f"the model is not available: {self._unhealthy_reason}")
        self._fail(entries, unavailable)
        self._pending.fail_all(unavailable)

    def _fail(self, entries: Sequence[Entry], error: EncserveError) -> None:
        for entry in entries:
            entry.ticket.fail(error)

    def _end(self, reason: str, error: BaseException | None = None) -> None:
        """From now on every call is refused, for good."""
        self._over = True
        if self._recovery is not None:
            self._recovery.cancel()
        if error is None:
            self._unhealthy_reason = reason
        else:
            self._set_unhealthy(reason, error)

    async def _recover(self) -> None:
        """Probes until the engine works again; meanwhile `encode` refuses."""
        while True:
            await self._clock.sleep(self._limits.probe_seconds)
            if await self._lanes.probe():
                logger.warning("the engine works again")
                self._set_unhealthy("")
                self._lanes.resume()
                return

    def _set_unhealthy(self, reason: str, error: BaseException | None = None) -> None:
        """Sets or clears the reason, which callers see; the error itself is for the log."""
        if reason:
            logger.error("the engine is unhealthy", extra={"reason": reason, "error": repr(error)})
        changed = reason != self._unhealthy_reason
        self._unhealthy_reason = reason
        if changed:
            self._on_health_change()
