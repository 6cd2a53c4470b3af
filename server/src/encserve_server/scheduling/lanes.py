"""The engine's threads, called lanes. A lane takes a batch from the queue, runs it, and hands over the outputs.

A CPU has its best throughput with several batches at a time, one thread each. Threads that share a batch wait for each
other in every layer. They wait longer if another program uses a core. But a single batch ends sooner if all threads
share it. So a batch is *alone* if no other lane is busy and no further sequence waits. A batch that is alone runs on
all threads, and later sequences wait until it ends. As soon as more sequences wait, each lane runs a batch.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue
from typing import Any

from encserve_server.engine.base import Engine
from encserve_server.errors import EngineUnhealthy
from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.scheduling.queue import PendingQueue
from encserve_server.scheduling.runner import ComputeOutputs, in_halves, probe, run_batch, start_thread
from encserve_server.system.clock import AwakeTime, Clock
from encserve_server.system.cpus import lower_thread_priority
from encserve_server.types.arrays import ModelInput
from encserve_server.types.sequences import Batch, TokenSequence


class Outcome(Enum):
    """The result of a run, or another event of a lane."""

    RAN = auto()  # the batch has outputs
    EXPIRED = auto()  # the deadline of the sequences passed, so they will not run
    FAILED = auto()  # the engine raised an error, or no sequence has finite outputs
    CULPRIT = auto()  # a batch of only one sequence failed
    BROKEN = auto()  # the engine fails for every input; no lane takes a batch until `Lanes.resume`
    CRASHED = auto()  # a bug ended a lane for good
    FAILED_PROBE = auto()  # the engine failed for the probe, a sequence that every working engine can compute


# Called on the event loop, in the order of the events.
Deliver = Callable[[Outcome, Batch, BaseException | None], None]


@dataclass(slots=True)
class _Lane:
    """One thread. Only the thread writes the state.

    Attributes:
        number: The number of the lane, from 0.
        jobs: The work of the thread, in order; None ends the thread.
        batch: The running batch, or None. If a part of a batch runs again after a failure, this is the whole batch.
        started_at: The start of the run in awake time; None if nothing runs.
    """

    number: int
    jobs: "SimpleQueue[Callable[[_Lane], None] | None]" = field(default_factory=SimpleQueue)
    batch: Batch | None = None
    started_at: float | None = None


class Lanes:
    """The lanes of one engine, and the queue that they share. There are `engine.max_parallel_runs` lanes.

    A lane works only while sequences wait. `wake` starts a lane. A lane that leaves sequences in the queue starts the
    next lane. The idle lane that ran last starts first, because the caches of its CPU still hold its data.

    `lock` guards the queue and the choice of a batch. No lane holds the lock while the engine runs.

    Attributes:
        pending: The queue.
        lock: The lock.
        busy_seconds: The total time in which at least one run was in progress, until the last start or end of a run.
            Any thread may read this number.
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
        """Prepare the lanes. `probe` is a sequence that every working engine can compute."""
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
        self._idle = self._lanes[::-1]  # the last lane in the list ran last
        self._waking = False  # whether a started lane has not taken a batch yet
        self._alone = False  # whether the running batch uses all threads
        self._stopped = False  # closed or crashed: no lane takes a batch again
        self._broken = False  # the engine fails for every input: no lane takes a batch until `resume`
        self._probing = False  # whether a lane probes the engine
        self._probe_ended = threading.Condition(self.lock)
        self._failures = 0  # failed runs since the last success
        self._busy_lanes = 0
        self._busy_counted_at = 0.0  # the time of the last update of `busy_seconds`
        self.busy_seconds = 0.0

    def start(self) -> None:
        """Start the threads. Call this once, on the event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._ended = [self._event_loop.create_future() for _ in self._lanes]
        for i, (lane, ended) in enumerate(zip(self._lanes, self._ended, strict=True)):
            # A daemon thread, because a stuck engine must not keep the process alive.
            name = f"encserve-engine-{i}"
            threading.Thread(target=self._live, args=(lane, ended), name=name, daemon=True).start()

    def wake(self) -> None:
        """Start an idle lane if a lane may take a batch. The caller must hold the lock."""
        if self._idle and not (self._stopped or self._broken or self._waking or self._alone):
            self._waking = True
            self._idle.pop().jobs.put(self._work)

    def resume(self) -> None:
        """Let the lanes take batches again after the engine was broken."""
        with self.lock:
            self._broken = False
            self.wake()

    def running(self) -> list[TokenSequence]:
        """Return the sequences that run."""
        batches = [lane.batch for lane in self._lanes]  # read only once, because the lane's thread may clear it
        return [sequence for batch in batches if batch is not None for sequence in batch.sequences]

    def oldest_start(self) -> float | None:
        """Return the start of the longest run, in awake time; None if nothing runs."""
        oldest = None
        for lane in self._lanes:
            started_at = lane.started_at  # read only once, because the lane's thread may clear it
            if started_at is not None and (oldest is None or started_at < oldest):
                oldest = started_at
        return oldest

    async def probe(self) -> bool:
        """Test the engine in an idle lane. Return whether the engine works; False also if no lane is idle."""
        answer: asyncio.Future[bool] = self._event_loop.create_future()

        def run(lane: _Lane) -> None:
            try:
                self._probe(lane)
            except EngineUnhealthy:
                self._tell(_set_result, answer, False)
            else:
                self._tell(_set_result, answer, True)

        with self.lock:
            if not self._idle:  # a busy lane may be stuck, so the probe does not wait for a lane
                return False
            self._idle[-1].jobs.put(run)
        return await answer

    def stop(self) -> None:
        """Let no lane take a further batch."""
        with self.lock:
            self._stopped = True

    async def ended(self) -> None:
        """End the threads, and wait for their runs."""
        for lane in self._lanes:
            lane.jobs.put(None)
        await asyncio.wait(self._ended)

    # In the lanes' threads

    def _live(self, lane: _Lane, ended: "asyncio.Future[None]") -> None:
        """Run the jobs of a lane until a job is None."""
        lower_thread_priority()
        start_thread()
        while (job := lane.jobs.get()) is not None:
            try:
                job(lane)
            except BaseException as error:  # a bug: callers must not wait forever
                self.stop()
                self._tell(self._deliver, Outcome.CRASHED, lane.batch or Batch([]), error)
                lane.batch = None
        self._tell(_set_result, ended, None)

    def _work(self, lane: _Lane) -> None:
        """Run batches until the queue is empty. The lane does not wait for the event loop between batches."""
        lane.batch = batch = self._take(lane, first=True)
        while batch is not None:
            try:
                in_halves(batch, partial(self._run_part, lane, batch), partial(self._on_failure, lane))
            except EngineUnhealthy as error:
                self._tell(self._deliver, Outcome.BROKEN, batch, error)
            lane.batch = batch = self._take(lane, first=False)

    def _take(self, lane: _Lane, *, first: bool) -> Batch | None:
        """Take the next batch. Without a next batch, the lane becomes idle."""
        with self.lock:
            if first:
                self._waking = False
            self._alone = False  # if a batch ran alone, this lane has just finished it
            # If the queue is empty, this method does not call the slow `take`. A slow `take` would hold the GIL and
            # delay the event loop's deliveries.
            only = len(self._idle) == len(self._lanes) - 1  # all other lanes are idle
            may_take = self.pending.sequences and not (self._stopped or self._broken)
            taken = self.pending.take(self._policy, self._clock.now()) if may_take else None
            batch = None if taken is None else taken.batch
            if batch is None:
                self._idle.append(lane)
            else:
                left = self.pending.sequences
                batch.lane = lane.number
                batch.alone = self._alone = self._engine.has_wide_session and only and not left
                if left:
                    self.wake()
        if taken is not None and taken.expired:
            self._tell(self._deliver, Outcome.EXPIRED, Batch(taken.expired), None)
        return batch

    def _count_busy(self, change: int) -> float:
        """Add the busy time since the last call, change the number of busy lanes, and return the current time.

        Batches that run at the same time count once. The caller must hold the lock.
        """
        now = self._clock.now()
        if self._busy_lanes:
            self.busy_seconds += now - self._busy_counted_at
        self._busy_counted_at = now
        self._busy_lanes += change
        return now

    def _run_part(self, lane: _Lane, batch: Batch, part: Batch) -> None:
        """Run a batch, or a half of a batch that failed. Deliver the outputs."""
        if part is not batch:  # calls may have ended during the failed run
            part.sequences = [it for it in part.sequences if not it.ticket.done.done()]
            if not part.sequences:
                return
        self._run(lane, part)
        is_finite = part.outputs.count(None) < len(part.outputs)
        self._tell(self._deliver, Outcome.RAN, part, None)  # after this, only the event loop may use the part
        if is_finite:
            self._failures = 0
        else:
            self._count_failure(lane, part, ArithmeticError("no sequence had finite numbers"))

    def _on_failure(self, lane: _Lane, part: Batch, error: BaseException | None) -> None:
        self._count_failure(lane, part, error)
        if len(part.sequences) == 1:
            self._tell(self._deliver, Outcome.CULPRIT, part, error)

    def _run(self, lane: _Lane, batch: Batch) -> None:
        """Run a batch. The start of the run is stored for other threads. The duration counts as busy time.

        Raises:
            BatchFailed: See `run_batch`.
        """
        with self.lock:
            batch.began_at = self._count_busy(1)
        lane.started_at = self._awake.now()
        try:
            run_batch(self._engine, self._compute_outputs, batch)
        finally:
            lane.started_at = None
            with self.lock:
                batch.ended_at = self._count_busy(-1)

    def _count_failure(self, lane: _Lane, batch: Batch, error: BaseException | None) -> None:
        """Count a failed run. After several failed runs, probe the engine.

        If another lane is probing the engine, wait for the result. If the engine is broken, no sequence counts as a
        culprit.

        Raises:
            EngineUnhealthy: The engine is broken.
        """
        self._tell(self._deliver, Outcome.FAILED, batch, error)
        with self.lock:
            self._probe_ended.wait_for(lambda: not self._probing)
            if self._broken:
                raise EngineUnhealthy("the engine failed a probe in another lane")
            self._failures += 1
            if self._failures < self._failures_before_probe:
                return
            self._failures = 0
            self._probing = True
        is_broken = True
        try:
            self._probe(lane)
            is_broken = False
        finally:
            with self.lock:
                self._probing, self._broken = False, is_broken
                self._probe_ended.notify_all()

    def _probe(self, lane: _Lane) -> None:
        """Probe the engine.

        Raises:
            EngineUnhealthy: The engine is broken.
        """
        try:
            probe(partial(self._run, lane), self._probe_input)
        except EngineUnhealthy as error:
            self._tell(self._deliver, Outcome.FAILED_PROBE, Batch([]), error)
            raise

    def _tell(self, call: Callable[..., Any], *args: Any) -> None:
        """Call a function on the event loop, unless the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(call, *args)


def _set_result(future: "asyncio.Future[Any]", result: object) -> None:
    """Set a result, unless the future is done or cancelled."""
    if not future.done():
        future.set_result(result)
