"""Admission, the pending queue, the loop that runs batches, and delivery."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from encserve_server.batching import BatchPolicy, take_batch
from encserve_server.clock import Clock
from encserve_server.engine.base import BatchResult, Engine
from encserve_server.errors import (
    DeadlineExpired,
    EncserveError,
    EngineUnhealthy,
    InferenceFailed,
    QueueFull,
    RequestTooLarge,
)
from encserve_server.types import ClosedBy, EncodedSequence, TokenIds

logger = logging.getLogger(__name__)

# A probe is a sequence that any model can compute; so its failure is the engine's fault.
_PROBE = [np.zeros(1, np.int64)]


class SchedulerObserver(Protocol):
    """Who is told what the scheduler does; called on the event loop."""

    def queue_changed(self, sequences: int, tokens: int) -> None:
        """So much is pending now."""

    def batch_ran(
        self, *, sequences: int, tokens: int, padded_tokens: int, compute_seconds: float, closed_by: ClosedBy
    ) -> None:
        """A batch ran."""

    def batch_failed(self) -> None:
        """The engine raised for a batch."""

    def waited(self, queue_seconds: float) -> None:
        """A sequence left the queue to run."""

    def expired(self) -> None:
        """A sequence's deadline passed in the queue."""

    def cancelled(self, stage: str) -> None:
        """A sequence's caller went away while it was "queued" or "running"."""


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


@dataclass(slots=True, eq=False)
class _Ticket:
    """One call of `encode`: its entries fill `results`; `done` fires when all have, or with the first error."""

    done: asyncio.Future[None]
    results: list[EncodedSequence | None]
    missing: int

    def fail(self, error: EncserveError) -> None:
        """Ends the call with an error, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(slots=True, eq=False)
class _Entry:
    """One pending sequence."""

    ids: TokenIds  # (seq,)
    index: int  # its place in the ticket
    ticket: _Ticket
    enqueued_at: float
    deadline: float
    queued: bool = True
    started_at: float = math.nan

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def gone(self) -> bool:
        return self.ticket.done.done()

    def deliver(self, result: EncodedSequence) -> None:
        ticket = self.ticket
        if ticket.done.done():  # the caller has gone, or a sibling failed: that touches nobody else
            return
        ticket.results[self.index] = result
        ticket.missing -= 1
        if ticket.missing == 0:
            ticket.done.set_result(None)


@dataclass(slots=True)
class _Throughput:
    """A running estimate of tokens a second, to say when trying again makes sense."""

    tokens_per_second: float = field(default=math.nan)

    def add(self, tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        rate = tokens / seconds
        known = self.tokens_per_second
        self.tokens_per_second = rate if math.isnan(known) else 0.8 * known + 0.2 * rate

    def seconds_for(self, tokens: int) -> float:
        """How long `tokens` take, between 10 ms and 5 s; 100 ms while nothing is known."""
        if math.isnan(self.tokens_per_second):
            return 0.1
        return min(max(tokens / self.tokens_per_second, 0.01), 5.0)


class Scheduler:
    """Runs sequences through one engine in batches.

    The contract:

    - `encode` never blocks the event loop. It is admitted or refused at once: the pending tokens of all calls never
      exceed `max_queue_tokens` (QueueFull), and all sequences of a call are admitted or none.
    - There is no timer. When the engine is free, whatever is pending is batched and run; while it runs, more gathers.
    - An entry with k live entries before it at its arrival starts in the (k + 1)-th batch after the one that is
      running, at the latest (see `batching`). So the longest wait is bounded by the queue's bound and the engine's
      speed, never by who arrives later.
    - An entry whose caller has gone or whose deadline has passed is dropped before it is run. A batch that runs is
      never interrupted; who goes meanwhile touches nobody else.
    - A batch that fails is run again in halves, down to single sequences: only a sequence that fails alone fails its
      call (InferenceFailed). After several failures without a success a probe tells whether the engine itself is
      broken; then all calls get EngineUnhealthy at once until a probe succeeds again.

    Who owns what: everything here belongs to the event loop, and only the task of `_serve` takes from `_pending`. The
    engine is touched only by the one thread of `_engine_thread`.
    """

    def __init__(
        self,
        engine: Engine,
        policy: BatchPolicy,
        limits: SchedulerLimits,
        *,
        clock: Clock,
        observer: SchedulerObserver,
        on_health_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes what it works with; `start` sets it going."""
        self._engine = engine
        self._policy = policy
        self._limits = limits
        self._clock = clock
        self._observer = observer
        self._on_health_change = on_health_change
        self._engine_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encserve-engine")
        self._pending: list[_Entry] = []  # in order of arrival; entries that are gone stay until the next batch
        self._queued_sequences = 0  # of the entries that are `queued`
        self._queued_tokens = 0
        self._work = asyncio.Event()  # set while there may be something to run
        self._idle = asyncio.Event()  # set while nothing is pending or running
        self._idle.set()
        self._run_started_at: float | None = None
        self._failures = 0  # runs that failed since the last success
        self._unhealthy_reason = ""
        self._throughput = _Throughput()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = self._unhealthy_reason or ("running" if self._run_started_at is not None else "free")
        return f"<Scheduler [{self._queued_sequences} queued, {self._queued_tokens} tokens | engine {state}]>"

    @property
    def queued_tokens(self) -> int:
        """The pending tokens."""
        return self._queued_tokens

    def start(self) -> None:
        """Starts the loop; call once, on the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="encserve-scheduler")

    async def drain(self) -> None:
        """Returns when nothing is pending or running."""
        await self._idle.wait()

    async def close(self) -> None:
        """Stops the loop and the engine; calls that are not done get EngineUnhealthy. Waits for a running batch."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._fail_pending(EngineUnhealthy("the model is being unloaded"))
        await asyncio.to_thread(self._engine_thread.shutdown)
        self._engine.close()

    def not_ready_reason(self) -> str:
        """Why the engine cannot be relied on now, for people; empty if it can."""
        if self._unhealthy_reason:
            return self._unhealthy_reason
        if self._run_started_at is not None:
            running_s = self._clock.now() - self._run_started_at
            if running_s > self._limits.stall_seconds:
                return f"a batch has been running for {running_s:.0f} s"
        return ""

    async def encode(self, sequences: Sequence[TokenIds], deadline: float = math.inf) -> list[EncodedSequence]:
        """Runs sequences and returns what the engine made of each, in order.

        Args:
            sequences: One or more (seq,) int64 arrays, each checked by the caller.
            deadline: The clock's seconds after which nobody waits any more.

        Raises:
            QueueFull: No room now.
            RequestTooLarge: More tokens than the whole queue may hold.
            DeadlineExpired: The deadline passed in the queue.
            InferenceFailed: The engine cannot compute one of the sequences.
            EngineUnhealthy: The engine fails for everything.
        """
        ticket = self._admit(sequences, deadline)
        try:
            await ticket.done
        except asyncio.CancelledError:
            self._count_cancelled(ticket)
            raise
        finally:
            self._withdraw(ticket)
        return [result for result in ticket.results if result is not None]

    # Admission

    def _admit(self, sequences: Sequence[TokenIds], deadline: float) -> _Ticket:
        """Queues all sequences of a call, or refuses it."""
        if self._unhealthy_reason:
            raise EngineUnhealthy(f"the model is not available: {self._unhealthy_reason}")
        tokens = sum(len(ids) for ids in sequences)
        limit = self._limits.max_queue_tokens
        if tokens > limit:
            raise RequestTooLarge("inputs", f"must be at most {limit} tokens in all (max_queue_tokens); was {tokens}")
        if self._queued_tokens + tokens > limit:
            excess = self._queued_tokens + tokens - limit
            raise QueueFull(tokens, self._queued_tokens, limit, self._throughput.seconds_for(excess))
        now = self._clock.now()
        if deadline <= now:
            self._observer.expired()
            raise DeadlineExpired("the deadline had passed before the request was queued")
        ticket = _Ticket(asyncio.get_running_loop().create_future(), [None] * len(sequences), len(sequences))
        self._pending += [_Entry(ids, i, ticket, now, deadline) for i, ids in enumerate(sequences)]
        self._count_queued(len(sequences), tokens)
        self._idle.clear()
        self._work.set()
        return ticket

    def _withdraw(self, ticket: _Ticket) -> None:
        """Frees at once the room of a call that has ended; its entries are forgotten at the next batch."""
        if ticket.missing == 0:
            return
        for entry in self._pending:
            if entry.ticket is ticket:
                self._leave_queue(entry)

    def _leave_queue(self, entry: _Entry) -> None:
        if entry.queued:
            entry.queued = False
            self._count_queued(-1, -entry.length)

    def _count_queued(self, sequences: int, tokens: int) -> None:
        self._queued_sequences += sequences
        self._queued_tokens += tokens
        self._observer.queue_changed(self._queued_sequences, self._queued_tokens)

    def _count_cancelled(self, ticket: _Ticket) -> None:
        """Tells the observer of every sequence whose caller went away before it was delivered."""
        queued = [entry for entry in self._pending if entry.ticket is ticket]
        now = self._clock.now()
        for entry in queued:
            # gRPC cancels a call whose deadline has passed: that is no caller changing its mind.
            if entry.deadline <= now:
                self._observer.expired()
            else:
                self._observer.cancelled("queued")
        for _ in range(ticket.missing - len(queued)):
            self._observer.cancelled("running")

    # The loop

    async def _serve(self) -> None:
        """Takes, runs and delivers, until cancelled."""
        while True:
            await self._work.wait()
            if self._unhealthy_reason:
                self._idle.set()  # every call has been told; there is nothing to wait for
                await self._recover()
            taken = take_batch(self._pending, self._policy, self._clock.now())
            self._pending = taken.left
            for entry in (*taken.gone, *taken.expired, *taken.batch):
                self._leave_queue(entry)
            for entry in taken.expired:
                self._observer.expired()
                entry.ticket.fail(DeadlineExpired("the deadline passed while the request was queued"))
            if taken.batch:
                try:
                    await self._run(taken.batch, taken.closed_by)
                except asyncio.CancelledError:  # `close`: the run goes on in its thread, but nobody will deliver it
                    for entry in taken.batch:
                        entry.ticket.fail(EngineUnhealthy("the model is being unloaded"))
                    raise
            elif not self._unhealthy_reason:
                self._work.clear()
                self._idle.set()

    async def _run(self, batch: list[_Entry], closed_by: ClosedBy) -> None:
        """Runs a batch and delivers it; if it fails, runs its halves, and theirs."""
        started_at = self._clock.now()
        for entry in batch:
            entry.started_at = started_at
            self._observer.waited(started_at - entry.enqueued_at)
        parts = [batch]
        while parts:
            part = [entry for entry in parts.pop() if not entry.gone]
            if not part:
                continue
            try:
                result = await self._run_in_engine_thread([entry.ids for entry in part])
            except Exception as error:  # whatever the runtime raises
                self._observer.batch_failed()
                logger.warning("a batch failed", extra={"sequences": len(part), "error": repr(error)})
                if len(part) > 1:
                    half = len(part) // 2
                    parts += [part[half:], part[:half]]
                else:
                    part[0].ticket.fail(InferenceFailed("the model could not compute this sequence"))
                if not await self._still_healthy(error):
                    unavailable = EngineUnhealthy(f"the model is not available: {self._unhealthy_reason}")
                    for entry in batch:
                        entry.ticket.fail(unavailable)
                    self._fail_pending(unavailable)
            else:
                self._failures = 0
                self._deliver(part, result, closed_by)

    async def _run_in_engine_thread(self, sequences: Sequence[TokenIds]) -> BatchResult:
        self._run_started_at = self._clock.now()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._engine_thread, self._engine.run, sequences)
        finally:
            self._run_started_at = None

    def _deliver(self, part: list[_Entry], result: BatchResult, closed_by: ClosedBy) -> None:
        """Gives every entry its own rows."""
        for entry, rows in zip(part, result.rows, strict=True):
            if np.isfinite(rows).all():
                entry.deliver(EncodedSequence(rows, entry.started_at - entry.enqueued_at, result.compute_seconds))
            else:
                entry.ticket.fail(InferenceFailed("the model gave numbers that are not finite for this sequence"))
        tokens = sum(entry.length for entry in part)
        self._throughput.add(tokens, result.compute_seconds)
        self._observer.batch_ran(
            sequences=len(part),
            tokens=tokens,
            padded_tokens=result.padded_tokens,
            compute_seconds=result.compute_seconds,
            closed_by=closed_by,
        )

    # Health

    async def _still_healthy(self, error: Exception) -> bool:
        """Counts a failure and, after several, finds out whether the input or the engine is to blame."""
        self._failures += 1
        if self._failures < self._limits.failures_before_probe:
            return True
        self._failures = 0
        if await self._probe():
            return True
        self._set_unhealthy(f"the engine failed {self._limits.failures_before_probe} times and then a probe: {error!r}")
        return False

    async def _probe(self) -> bool:
        try:
            result = await self._run_in_engine_thread(_PROBE)
        except Exception as error:  # whatever the runtime raises
            logger.warning("the engine failed a probe", extra={"error": repr(error)})
            return False
        return bool(np.isfinite(result.rows[0]).all())

    async def _recover(self) -> None:
        """Probes until the engine works again; meanwhile `encode` refuses."""
        while self._unhealthy_reason:
            await self._clock.sleep(self._limits.probe_seconds)
            if await self._probe():
                logger.warning("the engine works again")
                self._set_unhealthy("")

    def _set_unhealthy(self, reason: str) -> None:
        if reason:
            logger.error("the engine is unhealthy", extra={"reason": reason})
        self._unhealthy_reason = reason
        self._on_health_change()

    def _fail_pending(self, error: EncserveError) -> None:
        for entry in self._pending:
            self._leave_queue(entry)
            entry.ticket.fail(error)
        self._pending = []
