"""Admission, delivery, and the engine's health; `lanes` runs the batches."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from encserve_server.engine.base import Engine
from encserve_server.errors import (
    DeadlineExpired,
    EngineUnhealthy,
    FieldPath,
    InferenceFailed,
    QueueFull,
    RequestField,
    RequestTooLarge,
    ShareExceeded,
)
from encserve_server.scheduling.admission import Admission, Throughput
from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.scheduling.lanes import Lanes, Outcome
from encserve_server.scheduling.queue import QueueObserver, Ticket
from encserve_server.scheduling.runner import ComputeOutputs
from encserve_server.system.background import repeat
from encserve_server.system.clock import AwakeTime, Clock
from encserve_server.telemetry.spans import BatchTracer, RequestSpan
from encserve_server.types.arrays import ModelInput
from encserve_server.types.callers import ANY_SENDER, Caller, Priority, Sender
from encserve_server.types.sequences import Batch, TokenSequence

logger = logging.getLogger(__name__)

# The probe of a model that takes ids.
_FIRST_ID = np.zeros(1, np.int64)
# The scheduler checks for a stalled run this many times in `stall_seconds`, and at least once per second.
_STALL_LOOKS = 4
_MAX_STALL_POLL_SECONDS = 1.0
# If the next check comes later than this many pauses, the process was probably suspended. The rest of this time does
# not count.
_MAX_GAP_PAUSES = 2


class SchedulerObserver(QueueObserver, Protocol):
    """Receives the events of the scheduler on the event loop."""

    def batch_ran(self, batch: Batch) -> None:
        """A batch ran."""

    def batch_failed(self) -> None:
        """The engine raised an error for a batch."""

    def was_busy(self, seconds: float) -> None:
        """Since the last report, at least one batch was running for this time."""

    def waited(self, queue_seconds: float) -> None:
        """A sequence has run. Its wait in the queue was `queue_seconds`."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The bounds of a scheduler.

    Attributes:
        max_queue_tokens: The maximum cost of all pending sequences, in tokens. It limits memory and the longest wait.
        failures_before_probe: After this number of failed runs in a row, the scheduler probes the engine.
        probe_seconds: The time between two probes of an unhealthy engine.
        stall_seconds: A run that takes longer than this is stalled. Time in which the whole process is suspended does
            not count.
    """

    max_queue_tokens: int
    failures_before_probe: int = 3
    probe_seconds: float = 1.0
    stall_seconds: float = 60.0


class Scheduler:
    """Runs sequences through one engine in batches.

    The contract:

    - `run` never blocks the event loop. It admits or refuses a call at once, with all sequences or none. The cost of
      pending calls never exceeds `max_queue_tokens` (QueueFull). After a refusal, the queue refuses all calls until a
      quarter of the queue is free (see `admission`).
    - Each named caller has a share of the queue: w / (2w + the weights of the other waiting callers). w is the caller's
      weight; the second w keeps room for one more caller. A call is refused (ShareExceeded) if it would fill more than
      half of the queue and exceed its caller's share, unless nothing of this caller waits.
    - Bulk takes at most half of the queue, and leaves a quarter of the queue free. Each bulk caller has a share of this
      half by the same rule.
    - The scheduler uses no timer. When the engine is free, it runs a batch of pending sequences. The engine's threads
      take the next batch at once. Meanwhile, the event loop delivers outputs. Some engines run several batches at once
      (see `lanes`).
    - With one caller and one priority, a sequence starts at the latest in the (k + 1)-th batch after the running
      batches. k is the number of live sequences ahead of the sequence (see `batching`). So the longest wait depends
      only on the limit of the queue and the speed of the engine, not on later arrivals.
    - With several callers, the work that another caller can run before a sequence starts is limited to
      (other weight / own weight) x (own waiting cost + MOST_AHEAD_TOKENS) + one batch (see `queue`).
    - Interactive sequences run before bulk sequences. While both wait, one batch in BULK_TURN is a bulk batch. So bulk
      waits at most BULK_TURN times as long as without interactive sequences.
    - The queue drops a sequence if its caller has disconnected or its deadline has passed. A running batch is never
      interrupted, and a caller that disconnects does not affect other callers.
    - A failed batch runs again in halves, down to single sequences. Only a sequence that fails alone fails its call
      (InferenceFailed). After several failures without a success, a probe shows whether the engine is broken. If so,
      all calls get EngineUnhealthy until a probe succeeds.
    - While a run takes longer than `stall_seconds`, new and waiting calls get EngineUnhealthy. Calls in the running
      batch may still succeed.

    The event loop owns all attributes. The threads of `_lanes` own the engine. Under `Lanes.lock`, the threads take
    batches from the queue. They pass results to `_deliver` on the event loop.
    """

    def __init__(
        self,
        engine: Engine,
        compute_outputs: ComputeOutputs,
        policy: BatchPolicy,
        limits: SchedulerLimits,
        *,
        clock: Clock,
        observer: SchedulerObserver,
        on_health_change: Callable[[], None] = lambda: None,
        probe: ModelInput = _FIRST_ID,
        tracer: BatchTracer | None = None,
    ) -> None:
        """Set the parts; `start` starts the threads. `probe` is a sequence that every working engine can compute."""
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._observer = observer
        self._on_health_change = on_health_change
        self._tracer = tracer
        self._admission = Admission(limits.max_queue_tokens)
        self._stall_poll_seconds = min(limits.stall_seconds / _STALL_LOOKS, _MAX_STALL_POLL_SECONDS)
        self._awake = AwakeTime(clock, _MAX_GAP_PAUSES * self._stall_poll_seconds)
        self._lanes = Lanes(
            engine,
            compute_outputs,
            policy,
            clock=clock,
            awake=self._awake,
            deliver=self._deliver,
            probe=probe,
            failures_before_probe=limits.failures_before_probe,
        )
        self._pending = pending = self._lanes.pending
        observer.register_queue_gauges(
            lambda: pending.requests,
            lambda: pending.sequences,
            lambda: pending.cost,
            lambda: pending.cost_of(Priority.BULK),
        )
        self._unhealthy_reason = ""
        self._throughput = Throughput()
        self._reported_busy_seconds = 0.0
        self._recovery: asyncio.Task[None] | None = None
        self._stall_watch: asyncio.Task[None] | None = None
        self._over = False  # closed or crashed: no further sequence will run

    def __repr__(self) -> str:
        state = self._unhealthy_reason or ("running" if self._lanes.oldest_start() is not None else "free")
        return f"<Scheduler [{self._pending.sequences} queued, {self._pending.cost} tokens | engine {state}]>"

    def start(self) -> None:
        """Start the engine's threads. Call this once, on the event loop."""
        self._lanes.start()
        self._stall_watch = asyncio.get_running_loop().create_task(
            repeat(self._look_for_stall, self._stall_poll_seconds, clock=self._clock), name="encserve-stalls"
        )

    async def close(self) -> None:
        """Stop the engine. Pending calls get EngineUnhealthy. Wait for running batches."""
        self._end("it is being unloaded")
        self._lanes.stop()
        self._fail_all(EngineUnhealthy("the model is being unloaded"), self._lanes.running())
        await self._lanes.ended()
        # A thread closes the engine, because freeing hundreds of megabytes would block the event loop for tens of
        # milliseconds.
        await asyncio.get_running_loop().run_in_executor(None, self._engine.close)

    def not_ready_reason(self) -> str:
        """Return the reason why the engine is not ready, for people; empty if it is ready."""
        if self._unhealthy_reason:
            return self._unhealthy_reason
        started_at = self._lanes.oldest_start()
        if started_at is not None:
            running_s = self._awake.now() - started_at
            if running_s > self._limits.stall_seconds:
                return f"a batch has been running for {running_s:.0f} s"
        return ""

    def check_open(self) -> None:
        """Check that the queue takes calls now, before any work is done for a call.

        Raises:
            QueueFull: The queue is full.
            EngineUnhealthy: The engine fails for all calls.
        """
        self._check_ready()
        queued = self._pending.cost
        if self._admission.is_closed(queued):
            self._check_room(None, queued)

    def check_share(self, sender: Sender, cost: int = 1) -> None:
        """Check that a call of this cost does not exceed a share of the queue.

        Every call must keep to its caller's share of the queue. A bulk call must also keep to its caller's share of the
        half for bulk.

        Raises:
            ShareExceeded: The call would exceed the share of its caller or of bulk, and a part of this share is in use.
        """
        pending, caller, size = self._pending, sender.caller, self._limits.max_queue_tokens
        self._check_caller_share(caller, cost, size, pending.cost, Priority)
        if sender.priority is Priority.BULK:
            size, waiting = size // 2, pending.cost_of(Priority.BULK)
            self._check_caller_share(caller, cost, size, waiting, [Priority.BULK])
            self._refuse_over_share("bulk", cost, waiting, size)

    def _check_caller_share(
        self, caller: Caller, cost: int, size: int, waiting: int, priorities: Iterable[Priority]
    ) -> None:
        """Check a caller's share of `size` tokens, if the caller has a name and more than half of these are taken."""
        if caller.name and waiting + cost > size // 2:
            own, weight_of_others = self._pending.share_of(caller, priorities)
            # The share keeps room for one more caller with the same weight.
            share = int(size * caller.weight / (2 * caller.weight + weight_of_others))
            self._refuse_over_share(f"caller {caller.name}", cost, own, share)

    def _refuse_over_share(self, whose: str, cost: int, waiting: int, share: int) -> None:
        if waiting and waiting + cost > share:
            raise ShareExceeded(whose, cost, waiting, share, self._throughput.seconds_for(waiting + cost - share))

    async def run(
        self,
        sequences: list[TokenSequence],
        deadline: float = math.inf,
        span: RequestSpan | None = None,
        sender: Sender = ANY_SENDER,
    ) -> None:
        """Run the sequences of a call, and set the outputs of each.

        Args:
            sequences: One or more checked sequences, each with a cost and requested outputs. Do not change the list.
            deadline: The clock's time until which the caller waits.
            span: Traces the call.
            sender: The caller and the priority.

        Raises:
            QueueFull: The queue has no room now.
            ShareExceeded: The queue has no room for more of this caller, or for more bulk.
            RequestTooLarge: The sequences cost more than the whole queue may hold.
            DeadlineExpired: The deadline passed in the queue.
            InferenceFailed: The engine cannot compute one of the sequences.
            EngineUnhealthy: The engine fails for all calls.
        """
        ticket = self._admit(sequences, deadline, span, sender)
        try:
            await ticket.done
            if ticket.error is not None:
                raise ticket.error.with_traceback(None)  # other calls may raise the same error object
        except (asyncio.CancelledError, DeadlineExpired) as end:
            self._count_dropped(ticket, is_cancelled=isinstance(end, asyncio.CancelledError))
            raise
        finally:
            if ticket.missing:
                with self._lanes.lock:
                    self._pending.withdraw(ticket)
            if span is not None:  # the queue stage ends when the first batch is taken, or else with the call
                starts = [it.started_at for it in sequences if not math.isnan(it.started_at)]
                span.stage("queue", sequences[0].enqueued_at, min(starts, default=self._clock.now()))
            ticket.sequences, ticket.error = [], None  # otherwise arrays would stay until the garbage collector runs

    def _admit(
        self, sequences: list[TokenSequence], deadline: float, span: RequestSpan | None, sender: Sender
    ) -> Ticket:
        """Queue all sequences of a call, or refuse the call."""
        cost = sum([it.cost for it in sequences])
        self._check_ready()
        if cost > self._limits.max_queue_tokens:
            self._refuse_size(sequences, cost)
        if sender is not ANY_SENDER:  # only named callers and bulk calls have shares
            self.check_share(sender, cost)
        self._check_room(cost, self._pending.cost, sender.priority)
        now = self._clock.now()
        if deadline <= now:
            for _ in sequences:
                self._observer.expired()
            raise DeadlineExpired("the deadline had passed before the request was queued")
        done = asyncio.get_running_loop().create_future()
        ticket = Ticket(sequences, done, len(sequences), caller=sender.caller, priority=sender.priority, span=span)
        for sequence in sequences:
            sequence.ticket = ticket
            sequence.enqueued_at, sequence.deadline = now, deadline
        with self._lanes.lock:
            self._pending.add(ticket)
            self._lanes.wake()
        return ticket

    def _check_ready(self) -> None:
        if reason := self.not_ready_reason():
            raise _unavailable(reason)

    def _refuse_size(self, sequences: Sequence[TokenSequence], cost: int) -> None:
        """Refuse a sequence that is larger than the queue. Larger calls were already split into parts."""
        tokens, limit = sum([len(it.input) for it in sequences]), self._limits.max_queue_tokens
        size = f"{tokens}" if cost == tokens else f"{tokens}, and {cost} with the cost of its outputs"
        raise RequestTooLarge(
            FieldPath(RequestField.INPUT, sequences[0].index),
            f"must be at most {limit} tokens (max_queue_tokens); was {size}",
        )

    def _check_room(self, cost: int | None, queued: int, priority: Priority = Priority.INTERACTIVE) -> None:
        """Refuse a call if the queue has no room. A cost of None means at least one token."""
        is_bulk = priority is Priority.BULK
        if excess := (self._admission.bulk_excess if is_bulk else self._admission.excess)(cost or 1, queued):
            delay_s = self._throughput.seconds_for(excess)
            limit = self._limits.max_queue_tokens
            raise QueueFull("tokens", cost, queued, limit, delay_s, self._admission.reopens_at_tokens)

    def _count_dropped(self, ticket: Ticket, *, is_cancelled: bool) -> None:
        """Count the sequences without outputs of a call whose caller disconnected or whose deadline passed."""
        with self._lanes.lock:
            self._pending.withdraw(ticket)  # after this, no lane takes these sequences
        # A lane may have dropped some of these sequences already. `started_at` shows whether a lane took a sequence.
        unstarted = sum([math.isnan(it.started_at) for it in ticket.sequences])
        # gRPC also cancels a call whose deadline has passed. Such a call counts as expired, not as cancelled.
        expired = ticket.sequences[0].deadline <= self._clock.now()
        for _ in range(unstarted):
            if expired:
                self._observer.expired()
            else:
                self._observer.cancelled("queued")
        for _ in range(ticket.missing - unstarted if is_cancelled else 0):
            self._observer.cancelled("running")

    # Deliveries of the lanes

    def _deliver(self, outcome: Outcome, batch: Batch, error: BaseException | None) -> None:
        """Deliver the outcome of a batch to its calls."""
        if outcome is Outcome.RAN:
            self._deliver_outputs(batch)
        elif outcome is Outcome.EXPIRED:
            expired = DeadlineExpired("the deadline passed while the request was queued")
            for sequence in batch.sequences:
                sequence.ticket.fail(expired)
        elif outcome is Outcome.CULPRIT:
            self._fail_one(batch.sequences[0], InferenceFailed.NOT_COMPUTED)
        elif outcome is Outcome.CRASHED:  # health must report a scheduler that has stopped
            self._end("the scheduler has stopped after an internal error", error)
            self._fail_all(_unavailable(self._unhealthy_reason), batch.sequences)
        elif outcome is Outcome.BROKEN:
            self._on_broken(batch, error)
        else:
            self._report_busy()
            failed = outcome is Outcome.FAILED
            if failed:
                self._observer.batch_failed()
            logger.warning("a batch failed" if failed else "the engine failed a probe", extra={"error": repr(error)})

    def _deliver_outputs(self, batch: Batch) -> None:
        """Give each sequence its outputs."""
        for sequence, outputs in zip(batch.sequences, batch.outputs, strict=True):
            ticket = sequence.ticket
            if ticket.done.done():
                continue
            if outputs is None:
                self._fail_one(sequence, InferenceFailed.NOT_FINITE)
                continue
            sequence.outputs = outputs
            sequence.compute_seconds = batch.compute_seconds
            ticket.missing -= 1
            if not ticket.missing:
                ticket.done.set_result(None)
        batch.outputs = []
        # Trace now, because a span ends with its call. Count in a later step of the event loop: the tasks that wait for
        # these outputs run first.
        if self._tracer is not None:
            self._trace(batch, self._tracer)
        asyncio.get_running_loop().call_soon(self._count, batch)

    def _trace(self, batch: Batch, tracer: BatchTracer) -> None:
        """Trace a batch. An error in tracing does not affect the calls."""
        traced = {it.ticket.span: None for it in batch.sequences if it.ticket.span is not None}
        if traced:
            try:
                tracer.ran(list(traced), batch)
            except Exception:
                logger.exception("a batch could not be traced")

    def _count(self, batch: Batch) -> None:
        """Report a batch to the observer."""
        beside = 1 if batch.alone else self._engine.max_parallel_runs  # the number of batches that run at the same time
        cost = sum([it.cost for it in batch.sequences])  # not tokens, because the queue's limit is in cost
        self._throughput.add(cost, (batch.compute_seconds + batch.split_seconds) / beside)
        for sequence in batch.sequences:
            self._observer.waited(sequence.started_at - sequence.enqueued_at)
        self._observer.batch_ran(batch)
        self._report_busy()

    def _report_busy(self) -> None:
        """Report the busy time since the last report to the observer."""
        busy_seconds = self._lanes.busy_seconds
        self._observer.was_busy(busy_seconds - self._reported_busy_seconds)
        self._reported_busy_seconds = busy_seconds

    def _on_broken(self, batch: Batch, error: BaseException | None) -> None:
        """Fail all calls, and start to probe the engine."""
        if not self._over:
            times = self._limits.failures_before_probe
            self._set_unhealthy(f"the engine failed {times} times in a row, and then with a known good input", error)
        self._fail_all(_unavailable(self._unhealthy_reason), batch.sequences)
        if not self._over and (self._recovery is None or self._recovery.done()):
            self._recovery = asyncio.get_running_loop().create_task(
                repeat(self._recover, self._limits.probe_seconds, clock=self._clock), name="encserve-recovery"
            )

    # Health

    def _fail_one(self, sequence: TokenSequence, problem: str) -> None:
        sequence.ticket.fail(InferenceFailed(sequence.index, problem))

    def _fail_all(self, error: EngineUnhealthy, running: Sequence[TokenSequence]) -> None:
        """Fail the calls of these sequences and all pending calls."""
        with self._lanes.lock:
            sequences = [*running, *self._pending.take_all()]
        for sequence in sequences:
            sequence.ticket.fail(error)

    def _end(self, reason: str, error: BaseException | None = None) -> None:
        """Refuse all calls after this."""
        self._over = True
        for task in (self._recovery, self._stall_watch):
            if task is not None:
                task.cancel()
        if error is None:
            self._unhealthy_reason = reason
        else:
            self._set_unhealthy(reason, error)

    async def _recover(self) -> bool:
        """Probe the engine. Return whether it works again."""
        if not await self._lanes.probe():
            return False
        logger.warning("the engine works again")
        self._lanes.resume()
        self._set_unhealthy("")
        return True

    def _look_for_stall(self) -> None:
        """End the calls that wait for a stalled run. Without this, calls without a deadline would wait forever."""
        self._awake.tick()
        if not self._unhealthy_reason and (reason := self.not_ready_reason()):
            self._fail_all(_unavailable(reason), [])
            self._on_health_change()

    def _set_unhealthy(self, reason: str, error: BaseException | None = None) -> None:
        """Set the reason, which callers see, or clear it. The error goes to the log."""
        if reason:
            logger.error("the engine is unhealthy", extra={"reason": reason, "error": repr(error)})
        changed = reason != self._unhealthy_reason
        self._unhealthy_reason = reason
        if changed:
            self._on_health_change()


def _unavailable(reason: str) -> EngineUnhealthy:
    return EngineUnhealthy(f"the model is not available: {reason}")
