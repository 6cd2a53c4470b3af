"""The engine's threads: each takes a batch, runs it, hands over what came of it, and takes the next.

A CPU is used best by several batches side by side, each on a thread of its own: threads that share a batch wait for
each other in every layer, most of all when something else takes one of their cores. But a batch that has no other
beside it is done sooner by all threads together. So a batch that is the only one *widens*: it runs alone, with the
whole device, and what comes meanwhile waits for its end. As soon as there are more, each lane runs one.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from queue import SimpleQueue
from typing import Any

import numpy as np

from encserve_server.engine.base import BatchResult, Engine
from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.scheduling.queue import PendingQueue
from encserve_server.system.clock import AwakeTime, Clock
from encserve_server.system.cpus import lower_thread_priority
from encserve_server.types.arrays import ModelInput, OutputArrays
from encserve_server.types.sequences import Batch, ClosedBy, TokenSequence

# Makes of what a batch gave what each of its sequences is wanted for, None where that is not finite; called in an
# engine's thread, where NumPy warns of nothing.
ComputeOutputs = Callable[[BatchResult, Sequence[TokenSequence]], list[OutputArrays | None]]


class Outcome(Enum):
    """What became of sequences."""

    RAN = auto()  # the batch has outputs
    EXPIRED = auto()  # their deadline has passed; they will not run
    FAILED = auto()  # the engine raised, or gave nothing that is finite; they run again in parts
    CULPRIT = auto()  # a sequence that cannot be computed even alone
    BROKEN = auto()  # the engine fails for everything; no lane takes anything until `Lanes.resume`
    CRASHED = auto()  # a bug: a lane has ended for good
    FAILED_PROBE = auto()  # the engine raised even for what any model can compute


# Called on the event loop, in the order in which things happened.
Deliver = Callable[[Outcome, Batch, BaseException | None], None]


@dataclass(slots=True)
class _Lane:
    """One thread; its state is written by it alone.

    Attributes:
        number: Which one it is, from 0.
        jobs: What it is to do, one after another; None ends it.
        batch: The batch that runs, whole, even while it is run again in parts; None while nothing runs, so that no
            result is kept.
        started_at: When the run began, in awake time; None while nothing runs.
    """

    number: int
    jobs: "SimpleQueue[Callable[[_Lane], None] | None]" = field(default_factory=SimpleQueue)
    batch: Batch | None = None
    started_at: float | None = None


class Lanes:
    """As many threads as the engine can run batches at once, and the queue from which they take.

    Threads run only while there is something pending: `wake` sets one going, and one that leaves something behind sets
    the next going. Of several it is the one that ran last, whose data are still in its CPU's caches.

    `lock` guards the queue, and every decision of which lane takes. It is held for as long as a batch is chosen, and
    never while the engine runs.
    """

    def __init__(
        self,
        engine: Engine,
        compute_outputs: ComputeOutputs,
        policy: BatchPolicy,
        *,
        clock: Clock,
        awake: AwakeTime,
        deliver: Deliver,
        probe: ModelInput,
        failures_before_probe: int,
    ) -> None:
        """Takes the engine and what follows it; `probe` is a sequence that the model can compute."""
        self.pending = PendingQueue()
        self.lock = threading.Lock()
        self._engine = engine
        self._compute_outputs = compute_outputs
        self._policy = policy
        self._clock = clock
        self._awake = awake
        self._deliver = deliver
        self._probe_input = probe
        self._failures_before_probe = failures_before_probe
        self._lanes = [_Lane(number) for number in range(engine.max_parallel_runs)]
        self._idle = self._lanes[::-1]  # those that wait to be set going; the last one ran last
        self._waking = False  # whether a lane is about to take
        self._alone = False  # whether the only active lane has the whole device
        self._stopped = False  # whether this is closed, or a lane has crashed: no lane takes any more, for good
        self._broken = False  # whether the engine fails for everything: no lane takes until `resume`
        self._judging = False  # whether a lane finds out, for all, whether it does
        self._judged = threading.Condition(self.lock)
        self._failures = 0  # runs that failed since the last success
        self._busy_lanes = 0  # how many have a run going on
        self._busy_since = 0.0  # until then busy time has been counted
        self._busy_seconds = 0.0

    def start(self) -> None:
        """Starts the threads; call once, on the event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._ended = [self._event_loop.create_future() for _ in self._lanes]
        for i, (lane, ended) in enumerate(zip(self._lanes, self._ended, strict=True)):
            # Daemons: a stuck engine must not keep the process from ending.
            name = f"encserve-engine-{i}"
            threading.Thread(target=self._live, args=(lane, ended), name=name, daemon=True).start()

    def wake(self) -> None:
        """Sees to it that what is pending will be taken; the caller holds the lock."""
        if self._idle and not (self._stopped or self._broken or self._waking or self._alone):
            self._waking = True
            self._idle.pop().jobs.put(self._work)

    def resume(self) -> None:
        """The engine works again."""
        with self.lock:
            self._broken = False
            self.wake()

    def running(self) -> list[TokenSequence]:
        """The sequences that run."""
        batches = [lane.batch for lane in self._lanes]  # each read once: its thread may clear it meanwhile
        return [sequence for batch in batches if batch is not None for sequence in batch.sequences]

    def oldest_start(self) -> float | None:
        """When the oldest run began, in awake time; None while nothing runs."""
        oldest = None
        for lane in self._lanes:
            started_at = lane.started_at  # as above
            if started_at is not None and (oldest is None or started_at < oldest):
                oldest = started_at
        return oldest

    def take_busy_seconds(self) -> float:
        """How long at least one batch, or probe, ran since this was last called; batches side by side count once."""
        with self.lock:
            self._count_busy(0)
            seconds, self._busy_seconds = self._busy_seconds, 0.0
            return seconds

    async def probe(self) -> bool:
        """Whether the engine can compute what any model can, and a thread is free to ask it."""
        answer: asyncio.Future[bool] = self._event_loop.create_future()

        def run(lane: _Lane) -> None:
            self._tell(_answer, answer, self._probe(lane))

        with self.lock:
            if not self._idle:  # not behind a run that may never end
                return False
            self._idle[-1].jobs.put(run)
        return await answer

    def stop(self) -> None:
        """From now on no lane takes any more."""
        with self.lock:
            self._stopped = True

    async def ended(self) -> None:
        """Ends the threads, and waits for what runs in them."""
        for lane in self._lanes:
            lane.jobs.put(None)
        await asyncio.wait(self._ended)

    # In the lanes' threads

    def _live(self, lane: _Lane, ended: "asyncio.Future[None]") -> None:
        """A thread's life: waits for something to do, and does it."""
        lower_thread_priority()
        np.seterr(all="ignore")  # of this thread: numbers that are not finite are looked for
        while (job := lane.jobs.get()) is not None:
            try:
                job(lane)
            except BaseException as error:  # a bug: callers must not wait forever
                self.stop()
                self._tell(self._deliver, Outcome.CRASHED, lane.batch or _NO_BATCH, error)
                lane.batch = None
        self._tell(_answer, ended, None)

    def _work(self, lane: _Lane) -> None:
        """Runs batches until nothing is pending; between two of them it does not wait for the event loop."""
        lane.batch = self._take(lane, first=True)
        while lane.batch is not None:
            self._run_parts(lane, lane.batch)
            lane.batch = self._take(lane, first=False)

    def _take(self, lane: _Lane, *, first: bool) -> Batch | None:
        """Takes the next batch, or leaves the active lanes."""
        with self.lock:
            if first:
                self._waking = False
            self._alone = False  # only this lane can have had the device to itself
            # Looking is cheaper than taking, and while this thread computes, the event loop cannot deliver.
            only = len(self._idle) == len(self._lanes) - 1  # no other lane runs, or is about to take
            nothing = self._stopped or self._broken or not len(self.pending)
            taken = None if nothing else self.pending.take(self._policy, self._clock.now())
            batch = None if taken is None else taken.batch
            if batch is None:
                self._idle.append(lane)
            else:
                left = len(self.pending)
                batch.lane = lane.number
                batch.alone = self._alone = self._engine.widens and only and not left
                if left:
                    self.wake()
        if taken is not None and taken.expired:
            self._tell(self._deliver, Outcome.EXPIRED, Batch(taken.expired, ClosedBy.QUEUE_EMPTY), None)
        return batch

    def _count_busy(self, change: int) -> float:
        """Counts the time since the last change, and a run that begins or ends; under the lock. Returns the time."""
        now = self._clock.now()
        if self._busy_lanes:
            self._busy_seconds += now - self._busy_since
        self._busy_since = now
        self._busy_lanes += change
        return now

    def _run_parts(self, lane: _Lane, batch: Batch) -> None:
        """Runs a batch, and if that fails its halves and theirs, so that only the culprit fails."""
        parts = [batch]
        while parts:
            part = parts.pop()
            if part is not batch:
                part.sequences = [it for it in part.sequences if not it.ticket.done.done()]
            if not part.sequences:
                continue
            try:
                self._run(lane, part)
            except Exception as error:  # whatever the runtime raises
                if self._is_broken(lane, part, error):
                    self._tell(self._deliver, Outcome.BROKEN, batch, error)
                    return
                if len(part.sequences) == 1:
                    self._tell(self._deliver, Outcome.CULPRIT, part, error)
                else:
                    half = len(part.sequences) // 2
                    halves = part.sequences[half:], part.sequences[:half]
                    parts += [Batch(it, part.closed_by, part.lane, part.alone) for it in halves]
                continue
            is_good = part.outputs.count(None) < len(part.outputs)
            self._tell(self._deliver, Outcome.RAN, part, None)  # from now on the event loop owns it
            if is_good:
                self._failures = 0
            elif self._is_broken(lane, part, nothing := ArithmeticError("no sequence had finite numbers")):
                self._tell(self._deliver, Outcome.BROKEN, batch, nothing)
                return

    def _run(self, lane: _Lane, batch: Batch) -> None:
        """One run, whose beginning others can see, and the outputs of its sequences.

        Raises:
            RuntimeError: The engine has failed: its rows are not those of the inputs.
            Exception: Whatever the runtime raises.
        """
        inputs = [it.input for it in batch.sequences]
        attended = [it.attended for it in batch.sequences]
        with self.lock:
            batch.began_at = self._count_busy(1)
        lane.started_at = self._awake.now()
        try:
            result = self._engine.run(inputs, attended=attended if any(attended) else (), alone=batch.alone)
            lengths = [len(it) for it in inputs]
            padded = len(lengths), max(lengths)
            if result.lengths != lengths or result.output.shape[:2] != padded:
                raise RuntimeError("the engine gave rows that are not those of the sequences")
            began = time.perf_counter()
            batch.outputs = self._compute_outputs(result, batch.sequences)
            batch.split_seconds = time.perf_counter() - began
            if len(batch.outputs) != len(lengths):
                raise RuntimeError("there are not as many outputs as sequences")
        finally:
            lane.started_at = None
            with self.lock:
                batch.ended_at = self._count_busy(-1)
        batch.tokens, batch.padded_tokens = sum(lengths), math.prod(padded)
        batch.collate_seconds, batch.compute_seconds = result.collate_seconds, result.compute_seconds

    def _is_broken(self, lane: _Lane, batch: Batch, error: Exception) -> bool:
        """Counts a failed run and, after several, finds out whether the input or the engine is to blame.

        Lanes that fail meanwhile wait for the answer: what they hold is no culprit if the engine is broken.
        """
        self._tell(self._deliver, Outcome.FAILED, batch, error)
        with self.lock:
            self._judged.wait_for(lambda: not self._judging)
            if self._broken:
                return True
            self._failures += 1
            if self._failures < self._failures_before_probe:
                return False
            self._failures = 0
            self._judging = True
        works = False
        try:
            works = self._probe(lane)
        finally:
            with self.lock:
                self._judging, self._broken = False, not works
                self._judged.notify_all()
        return not works

    def _probe(self, lane: _Lane) -> bool:
        """Whether the engine computes a sequence that any model can."""
        batch = Batch([TokenSequence(self._probe_input, len(self._probe_input))], ClosedBy.QUEUE_EMPTY)
        try:
            self._run(lane, batch)
        except Exception as error:  # whatever the runtime raises
            self._tell(self._deliver, Outcome.FAILED_PROBE, batch, error)
            return False
        return batch.outputs != [None]

    def _tell(self, call: Callable[..., Any], *args: Any) -> None:
        """Has something called on the event loop; if that has ended, nothing waits for it any more."""
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(call, *args)


_NO_BATCH = Batch([], ClosedBy.QUEUE_EMPTY)


def _answer(future: "asyncio.Future[Any]", result: object) -> None:
    """Sets a result, unless its reader has gone."""
    if not future.done():
        future.set_result(result)
