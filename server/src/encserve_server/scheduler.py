"""Admission, the loop that runs batches, and delivery."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from encserve_server.batching import BatchPolicy, Taken
from encserve_server.clock import Clock
from encserve_server.engine.base import Engine
from encserve_server.errors import (
    DeadlineExpired,
    EngineUnhealthy,
    InferenceFailed,
    QueueFull,
    RequestTooLarge,
)
from encserve_server.pending import Entry, PendingQueue, QueueObserver, Ticket
from encserve_server.runs import Checked, FailedRun, Throughput, halves_of, run_checked
from encserve_server.types import ClosedBy, EncodedSequence, ModelInput

logger = logging.getLogger(__name__)

# What a model that takes ids is probed with.
_FIRST_ID = np.zeros(1, np.int64)


class SchedulerObserver(QueueObserver, Protocol):
    """Who is told what the scheduler does; called on the event loop."""

    def batch_ran(
        self, *, sequences: int, tokens: int, padded_tokens: int, compute_seconds: float, closed_by: ClosedBy
    ) -> None:
        """A batch ran."""

    def batch_failed(self) -> None:
        """The engine raised for a batch."""

    def waited(self, queue_seconds: float) -> None:
        """A sequence left the queue to run."""


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
      exceed `max_queue_tokens` (QueueFull), and all sequences of a call are admitted or none.
    - There is no timer. When the engine is free, whatever is pending is batched and run; while it runs, more gathers.
      The engine's thread takes the next batch itself the moment that one is done; the event loop delivers meanwhile.
    - An entry with k live entries before it at its arrival starts in the (k + 1)-th batch after the one that is
      running, at the latest (see `batching`). So the longest wait is bounded by the queue's bound and the engine's
      speed, never by who arrives later.
    - An entry whose caller has gone or whose deadline has passed is dropped before it is run. A batch that runs is
      never interrupted; who goes meanwhile touches nobody else.
    - A batch that fails is run again in halves, down to single sequences: only a sequence that fails alone fails its
      call (InferenceFailed). After several failures without a success a probe tells whether the engine itself is
      broken; then all calls get EngineUnhealthy at once until a probe succeeds again.

    Who owns what: everything here belongs to the event loop, but `_engine`, `_batch` and `_run_started_at` to the one
    thread of `_engine_thread`; the event loop only looks at the last two. That thread takes from `_pending`, or, while
    it does nothing, the task of `_serve` does.
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
        probe: ModelInput = _FIRST_ID,
    ) -> None:
        """Takes what it works with; `start` sets it going.

        `probe` is a sequence that the model can compute, so that its failure is the engine's fault.
        """
        self._engine = engine
        self._policy = policy
        self._limits = limits
        self._clock = clock
        self._observer = observer
        self._on_health_change = on_health_change
        self._probe_input = probe
        self._engine_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encserve-engine")
        self._pending = PendingQueue(observer)
        self._work = asyncio.Event()  # set while there may be something to run
        self._running: Future[Any] | None = None  # what the engine's thread did last, done or not
        self._run_started_at: float | None = None  # None while nothing runs
        self._batch: list[Entry] = []  # what runs, or ran last
        self._closing = False
        self._failures = 0  # runs that failed since the last success
        self._unhealthy_reason = ""
        self._throughput = Throughput()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = self._unhealthy_reason or ("running" if self._run_started_at is not None else "free")
        return f"<Scheduler [{self._pending.sequences} queued, {self._pending.tokens} tokens | engine {state}]>"

    def start(self) -> None:
        """Starts the loop; call once, on the event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="encserve-scheduler")
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stops the loop and the engine; calls that are not done get EngineUnhealthy. Waits for a running batch."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._pending.fail_all(EngineUnhealthy("the model is being unloaded"))
        if self._running is not None:
            await asyncio.wait([asyncio.wrap_future(self._running)])
        self._engine_thread.shutdown(wait=False)
        self._engine.close()

    def not_ready_reason(self) -> str:
        """Why the engine cannot be relied on now, for people; empty if it can."""
        if self._unhealthy_reason:
            return self._unhealthy_reason
        started_at = self._run_started_at  # read once: the engine's thread may clear it meanwhile
        if started_at is not None:
            running_s = self._clock.now() - started_at
            if running_s > self._limits.stall_seconds:
                return f"a batch has been running for {running_s:.0f} s"
        return ""

    async def encode(self, sequences: Sequence[ModelInput], deadline: float = math.inf) -> list[EncodedSequence]:
        """Runs sequences and returns what the engine made of each, in order.

        Args:
            sequences: One or more (seq,) int64 arrays of ids, or (seq, d_model) float32 arrays of vectors, whichever
                the model takes; each checked by the caller.
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
            self._pending.tell_cancelled(ticket, self._clock.now())
            raise
        finally:
            if ticket.missing:
                self._pending.withdraw(ticket)
            ticket.entries.clear()  # they refer to the ticket: without this the rows would wait for the cycle collector
        return [result for result in ticket.results if result is not None]

    def _admit(self, sequences: Sequence[ModelInput], deadline: float) -> Ticket:
        """Queues all sequences of a call, or refuses it."""
        if reason := self.not_ready_reason():
            raise EngineUnhealthy(f"the model is not available: {reason}")
        tokens, queued, limit = sum(map(len, sequences)), self._pending.tokens, self._limits.max_queue_tokens
        if tokens > limit:
            raise RequestTooLarge("inputs", f"must be at most {limit} tokens in all (max_queue_tokens); was {tokens}")
        if queued + tokens > limit:
            raise QueueFull("tokens", tokens, queued, limit, self._throughput.seconds_for(queued + tokens - limit))
        now = self._clock.now()
        if deadline <= now:
            for _ in sequences:
                self._observer.expired()
            raise DeadlineExpired("the deadline had passed before the request was queued")
        ticket = Ticket.of(sequences, now, deadline)
        self._pending.add(ticket)
        self._work.set()
        return ticket

    # The loop

    async def _serve(self) -> None:
        """Sets the engine's thread going whenever there is something to run, until cancelled."""
        while True:
            await self._work.wait()
            if self._unhealthy_reason:
                await self._recover()
            taken = self._pending.take(self._policy, self._clock.now())
            self._tell_taken(taken)
            if taken.batch:
                try:
                    await self._run(taken)
                except BaseException:  # `close`, or a bug: the run may go on in its thread, but nobody will deliver it
                    for entry in self._batch:
                        entry.ticket.fail(EngineUnhealthy("the model is being unloaded"))
                    raise
            elif not self._unhealthy_reason:
                self._work.clear()

    def _tell_taken(self, taken: Taken[Entry]) -> None:
        """Tells who has left the queue: callers, that their time is up; the observer, how long each has waited."""
        for entry in taken.expired:
            entry.ticket.fail(DeadlineExpired("the deadline passed while the request was queued"))
        for entry in taken.batch:
            self._observer.waited(entry.started_at - entry.enqueued_at)

    async def _run(self, taken: Taken[Entry]) -> None:
        """Runs a batch, and those that come after it, until nothing is pending or one fails."""
        self._batch = taken.batch
        self._running = self._engine_thread.submit(self._run_on, taken)
        failed = await asyncio.wrap_future(self._running)
        if failed is not None:
            await self._run_parts(failed)

    def _run_on(self, taken: Taken[Entry]) -> FailedRun | None:
        """In the engine's thread: runs batches for as long as that goes well.

        The event loop delivers each while the next runs. Between two batches the engine does not wait for the event
        loop, which has the callers of the last one to serve.
        """
        tell = self._event_loop.call_soon_threadsafe
        while True:
            batch = self._batch = taken.batch
            try:
                checked = self._run_timed([entry.input for entry in batch])
            except Exception as error:  # whatever the runtime raises
                return FailedRun(batch, taken.closed_by, error)
            if not any(checked.finite):
                tell(self._deliver, batch, checked, taken.closed_by)
                return FailedRun([], taken.closed_by, ArithmeticError("no sequence had finite numbers"))
            tell(self._ran, batch, checked, taken.closed_by)
            if self._closing:
                return None
            taken = self._pending.take(self._policy, self._clock.now())
            tell(self._tell_taken, taken)
            if not taken.batch:
                return None

    def _ran(self, batch: list[Entry], checked: Checked, closed_by: ClosedBy) -> None:
        """Delivers a batch that ran as it should."""
        self._failures = 0
        self._deliver(batch, checked, closed_by)

    async def _run_parts(self, failed: FailedRun) -> None:
        """Runs the halves of a batch that failed, and theirs, so that only the culprit fails."""
        parts = halves_of(failed.batch)
        await self._failed(failed.batch, failed.error)
        while parts:
            part = [entry for entry in parts.pop() if not entry.gone]
            if not part:
                continue
            try:
                checked = await self._run_in_engine_thread([entry.input for entry in part])
            except Exception as error:  # whatever the runtime raises
                parts += halves_of(part)
                await self._failed(failed.batch, error)
            else:
                self._deliver(part, checked, failed.closed_by)
                if any(checked.finite):
                    self._failures = 0
                else:
                    await self._failed(failed.batch, ArithmeticError("no sequence had finite numbers"))

    async def _run_in_engine_thread(self, sequences: Sequence[ModelInput]) -> Checked:
        running = self._running = self._engine_thread.submit(self._run_timed, sequences)
        return await asyncio.wrap_future(running)

    def _run_timed(self, sequences: Sequence[ModelInput]) -> Checked:
        """In the engine's thread: one run, whose beginning others can see."""
        self._run_started_at = self._clock.now()
        try:
            return run_checked(self._engine, sequences)
        finally:
            self._run_started_at = None

    def _deliver(self, part: list[Entry], checked: Checked, closed_by: ClosedBy) -> None:
        """Gives every entry its own rows."""
        result = checked.result
        for entry, rows, finite in zip(part, result.rows, checked.finite, strict=True):
            if finite:
                entry.deliver(EncodedSequence(rows, entry.started_at - entry.enqueued_at, result.compute_seconds))
            else:
                entry.ticket.fail(InferenceFailed(f"inputs[{entry.index}]: the model's numbers for it are not finite"))
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

    async def _failed(self, batch: list[Entry], error: Exception) -> None:
        """Counts a failed run and, after several, finds out whether the input or the engine is to blame."""
        self._observer.batch_failed()
        logger.warning("a batch failed", extra={"error": repr(error)})
        self._failures += 1
        if self._failures < self._limits.failures_before_probe:
            return
        self._failures = 0
        if await self._probe():
            return
        self._set_unhealthy(
            f"the engine failed {self._limits.failures_before_probe} times in a row, and then with a known good input",
            error,
        )
        unavailable = EngineUnhealthy(f"the model is not available: {self._unhealthy_reason}")
        for entry in batch:
            entry.ticket.fail(unavailable)
        self._pending.fail_all(unavailable)

    async def _probe(self) -> bool:
        try:
            checked = await self._run_in_engine_thread([self._probe_input])
        except Exception as error:  # whatever the runtime raises
            logger.warning("the engine failed a probe", extra={"error": repr(error)})
            return False
        return all(checked.finite)

    async def _recover(self) -> None:
        """Probes until the engine works again; meanwhile `encode` refuses."""
        while self._unhealthy_reason:
            await self._clock.sleep(self._limits.probe_seconds)
            if await self._probe():
                logger.warning("the engine works again")
                self._set_unhealthy("")

    def _set_unhealthy(self, reason: str, error: BaseException | None = None) -> None:
        """Sets or clears the reason, which callers see; the error itself is for the log."""
        if reason:
            logger.error("the engine is unhealthy", extra={"reason": reason, "error": repr(error)})
        self._unhealthy_reason = reason
        self._on_health_change()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """The loop ends only when it is cancelled. If it fails, that is said: a dead loop must not look healthy."""
        if not task.cancelled():
            self._set_unhealthy("the scheduler has stopped after an internal error", task.exception())
            self._pending.fail_all(EngineUnhealthy(f"the model is not available: {self._unhealthy_reason}"))
