"""The engine's threads: each takes a batch, runs it, tells what came of it, and takes the next.

A CPU is used best by several batches side by side, each on a thread of its own: threads that share a batch wait for
each other in every layer, most of all when something else takes one of their cores. But a batch that has nobody beside
it is done sooner by all threads together. So a batch that is the only one *widens*: it runs alone, with the whole
device, and whoever comes meanwhile waits for its end. As soon as there are more, each lane runs one.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from encserve_server.engine.base import BatchResult, Engine
from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.scheduling.pending import Entry, PendingQueue
from encserve_server.system.clock import Clock
from encserve_server.system.cpus import step_back
from encserve_server.telemetry.spans import RanBatch
from encserve_server.types import BatchSeconds, ClosedBy, ModelInput, Output, OutputArrays, TokenSpans

# Makes of a batch what each of its sequences is wanted for; called in an engine's thread, where NumPy warns of nothing.
MakeOutputs = Callable[
    [BatchResult, Sequence[ModelInput], Sequence[tuple[Output, ...]], Sequence[TokenSpans | None]], list[OutputArrays]
]


class LaneListener(Protocol):
    """Who is told what the lanes do, always on the event loop, in the order in which it happened."""

    def on_expired(self, entries: list[Entry]) -> None:
        """The deadline of these has passed; they will not run."""

    def on_ran(self, entries: list[Entry], outputs: list[OutputArrays | None], batch: RanBatch) -> None:
        """A batch of these, or a part of one, has run; None is for what has numbers that are not finite."""

    def on_failed(self, error: Exception) -> None:
        """The engine raised, or gave nothing that is finite."""

    def on_failed_probe(self, error: Exception) -> None:
        """The engine raised even for what any model can compute."""

    def on_culprit(self, entry: Entry) -> None:
        """A sequence that cannot be computed even alone."""

    def on_broken(self, entries: list[Entry], error: Exception) -> None:
        """The engine fails for everything; these were to run. No lane takes anything until `Lanes.resume`."""

    def on_crashed(self, entries: list[Entry], error: BaseException) -> None:
        """A bug: a lane has ended for good; these were running."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that has been taken.

    Attributes:
        entries: What runs.
        closed_by: Why it took no more.
        alone: Whether it has the whole device.
    """

    entries: list[Entry]
    closed_by: ClosedBy
    alone: bool


@dataclass(frozen=True, slots=True)
class _Made:
    """What a run gave.

    Attributes:
        outputs: For each sequence what was wanted of it, None where its numbers are not all finite.
        padded_tokens: The tokens that were laid out.
        seconds: Where the time went.
    """

    outputs: list[OutputArrays | None]
    padded_tokens: int
    seconds: BatchSeconds


@dataclass(slots=True)
class _Lane:
    """One thread; its state is written by it alone.

    Attributes:
        number: Which one it is, from 0.
        jobs: What it is to do, one after another; None ends it.
        entries: The batch that runs, whole, even while it is run again in parts; empty while nothing runs, so that no
            result is kept.
        started_at: When that began; None while nothing runs.
    """

    number: int
    jobs: "SimpleQueue[Callable[[_Lane], None] | None]" = field(default_factory=SimpleQueue)
    entries: list[Entry] = field(default_factory=list)
    started_at: float | None = None


class Lanes:
    """As many threads as the engine can run batches at once.

    Threads run only while there is something pending: `wake` sets one going, and one that leaves something behind sets
    the next going. Of several it is the one that ran last, whose data are still in its CPU's caches. `_lock` guards
    every decision of who takes; it is never held while the engine runs.
    """

    def __init__(
        self,
        engine: Engine,
        make_outputs: MakeOutputs,
        pending: PendingQueue,
        policy: BatchPolicy,
        *,
        clock: Clock,
        listener: LaneListener,
        probe: ModelInput,
        failures_before_probe: int,
    ) -> None:
        """Takes what they work with; `probe` is a sequence that the model can compute."""
        self._engine = engine
        self._make_outputs = make_outputs
        self._pending = pending
        self._policy = policy
        self._clock = clock
        self._listener = listener
        self._probe_input = probe
        self._failures_before_probe = failures_before_probe
        self._lanes = [_Lane(number) for number in range(engine.max_parallel_runs)]
        self._busy = BusyTime()
        self._lock = threading.Lock()
        self._idle = self._lanes[::-1]  # those that wait to be set going; the last one ran last
        self._waking = False  # whether a lane is about to take
        self._alone = False  # whether the only active lane has the whole device
        self._stopped = False  # whether this is closed, or a lane has crashed: nobody takes any more, for good
        self._broken = False  # whether the engine fails for everything: nobody takes until `resume`
        self._judging = threading.Lock()  # held while one lane finds out, for all, whether it does
        self._failures = 0  # runs that failed since the last success

    def start(self) -> None:
        """Starts the threads; call once, on the event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._ended = [self._event_loop.create_future() for _ in self._lanes]
        for i, (lane, ended) in enumerate(zip(self._lanes, self._ended, strict=True)):
            # Daemons: a stuck engine must not keep the process from ending.
            name = f"encserve-engine-{i}"
            threading.Thread(target=self._live, args=(lane, ended), name=name, daemon=True).start()

    def wake(self) -> None:
        """Sees to it that what is pending will be taken: by a lane that is free, or by the first that will be."""
        with self._lock:
            self._wake()

    def resume(self) -> None:
        """The engine works again."""
        with self._lock:
            self._broken = False
            self._wake()

    def running(self) -> list[Entry]:
        """What runs."""
        return [entry for lane in self._lanes for entry in lane.entries]

    def oldest_start(self) -> float | None:
        """When the run began that has been going on for longest; None while nothing runs."""
        starts = [lane.started_at for lane in self._lanes]  # each read once: its thread may clear it meanwhile
        return min((it for it in starts if it is not None), default=None)

    def take_busy_seconds(self) -> float:
        """How long at least one batch, or probe, ran since this was last called."""
        return self._busy.take(self._clock.now())

    async def probe(self) -> bool:
        """Whether the engine can compute what any model can, and a thread is free to ask it."""
        answer: asyncio.Future[bool] = self._event_loop.create_future()

        def run(lane: _Lane) -> None:
            self._tell(_answer, answer, self._probe(lane))

        with self._lock:
            if not self._idle:  # not behind a run that may never end
                return False
            self._idle[-1].jobs.put(run)
        return await answer

    def stop(self) -> None:
        """From now on nobody takes any more."""
        with self._lock:
            self._stopped = True

    async def ended(self) -> None:
        """Ends the threads, and waits for what runs in them."""
        for lane in self._lanes:
            lane.jobs.put(None)
        await asyncio.wait(self._ended)

    # In the lanes' threads

    def _live(self, lane: _Lane, ended: "asyncio.Future[None]") -> None:
        """A thread's life: waits for something to do, and does it."""
        step_back()
        np.seterr(all="ignore")  # of this thread: numbers that are not finite are looked for
        while (job := lane.jobs.get()) is not None:
            try:
                job(lane)
            except BaseException as error:  # a bug: whoever waits must not wait for ever
                self.stop()
                self._tell(self._listener.on_crashed, lane.entries, error)
                lane.entries = []
        self._tell(_answer, ended, None)

    def _work(self, lane: _Lane) -> None:
        """Runs batches until nothing is pending; between two of them it does not wait for the event loop."""
        batch = self._take(lane, first=True)
        while batch is not None:
            lane.entries = batch.entries
            self._run_parts(lane, batch)
            lane.entries = []
            batch = self._take(lane, first=False)

    def _take(self, lane: _Lane, *, first: bool) -> _Batch | None:
        """Takes the next batch, or leaves the active lanes."""
        with self._lock:
            if first:
                self._waking = False
            self._alone = False  # only this lane can have had the device to itself
            # Looking is cheaper than taking, and while this thread computes, the event loop cannot deliver.
            only = len(self._idle) == len(self._lanes) - 1  # nobody else runs, or is about to take
            nothing = self._stopped or self._broken or not self._pending.sequences
            taken = None if nothing else self._pending.take(self._policy, self._clock.now())
            if taken is not None and taken.batch:
                self._alone = self._engine.widens and only and not taken.left
                batch = _Batch(taken.batch, taken.closed_by, self._alone)
                if taken.left:
                    self._wake()
            else:
                self._idle.append(lane)
                batch = None
        if taken is not None and taken.expired:
            self._tell(self._listener.on_expired, taken.expired)
        return batch

    def _wake(self) -> None:
        """Sets a lane going unless that is of no use; under the lock."""
        if self._idle and not (self._stopped or self._broken or self._waking or self._alone):
            self._waking = True
            self._idle.pop().jobs.put(self._work)

    def _run_parts(self, lane: _Lane, batch: _Batch) -> None:
        """Runs a batch, and if that fails its halves and theirs, so that only the culprit fails."""
        parts = [batch.entries]
        while parts:
            part = [entry for entry in parts.pop() if not entry.gone]
            if not part:
                continue
            began_at = self._clock.now()
            try:
                made = self._run(lane, part, alone=batch.alone)
            except Exception as error:  # whatever the runtime raises
                if self._is_broken(lane, error):
                    self._tell(self._listener.on_broken, batch.entries, error)
                    return
                if len(part) == 1:
                    self._tell(self._listener.on_culprit, part[0])
                half = len(part) // 2
                parts += [part[half:], part[:half]] if half else []
                continue
            ran = RanBatch(
                began_at,
                self._clock.now(),
                made.seconds,
                len(part),
                sum(entry.length for entry in part),
                made.padded_tokens,
                batch.closed_by,
                lane.number,
                batch.alone,
            )
            self._tell(self._listener.on_ran, part, made.outputs, ran)
            if any(its is not None for its in made.outputs):
                self._failures = 0
            elif self._is_broken(lane, nothing := ArithmeticError("no sequence had finite numbers")):
                self._tell(self._listener.on_broken, batch.entries, nothing)
                return

    def _run(self, lane: _Lane, entries: list[Entry], *, alone: bool) -> _Made:
        """One run, whose beginning others can see; without entries it is of the probe."""
        inputs = [it.input for it in entries] or [self._probe_input]
        wanted = [it.ticket.wanted for it in entries] or [()]
        attended = [it.attended for it in entries]
        token_spans = [it.token_spans for it in entries]
        lane.started_at = began = self._clock.now()
        self._busy.begin(began)
        try:
            result = self._engine.run(inputs, attended=attended if any(attended) else (), alone=alone)
            return _make(result, inputs, wanted, token_spans, self._make_outputs)
        finally:
            self._busy.end(self._clock.now())
            lane.started_at = None

    def _is_broken(self, lane: _Lane, error: Exception) -> bool:
        """Counts a failed run and, after several, finds out whether the input or the engine is to blame.

        Lanes that fail meanwhile wait for the answer: what they hold is no culprit if the engine is broken.
        """
        self._tell(self._listener.on_failed, error)
        with self._judging:
            if self._broken:
                return True
            self._failures += 1
            if self._failures < self._failures_before_probe:
                return False
            self._failures = 0
            if self._probe(lane):
                return False
            with self._lock:
                self._broken = True
            return True

    def _probe(self, lane: _Lane) -> bool:
        try:
            made = self._run(lane, [], alone=False)
        except Exception as error:  # whatever the runtime raises
            self._tell(self._listener.on_failed_probe, error)
            return False
        return made.outputs != [None]

    def _tell(self, what: Callable[..., Any], *args: Any) -> None:
        """Has something called on the event loop; if that has ended, nobody is interested any more."""
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(what, *args)


def _make(
    result: BatchResult,
    inputs: list[ModelInput],
    wanted: list[tuple[Output, ...]],
    token_spans: list[TokenSpans | None],
    make_outputs: MakeOutputs,
) -> _Made:
    """Looks at every number of a run, and makes of it what is wanted.

    Raises:
        RuntimeError: The engine has failed: its rows are not those of the inputs.
    """
    lengths = [len(it) for it in inputs]
    if result.lengths != lengths or result.output.shape[:2] != (len(lengths), max(lengths)):
        raise RuntimeError("the engine gave rows that are not those of the sequences")
    began = time.perf_counter()
    finite = _finite(result)
    made = make_outputs(result, inputs, wanted, token_spans)
    outputs = [its if ok else None for its, ok in zip(made, finite, strict=True)]
    split_seconds = time.perf_counter() - began
    seconds = BatchSeconds(result.collate_seconds, result.compute_seconds, split_seconds)
    return _Made(outputs, result.padded_tokens, seconds)


def _finite(result: BatchResult) -> list[bool]:
    """Whether all numbers of a sequence are finite, for each."""
    if np.isfinite(result.output).all():  # of padding too: one look, where nothing is wrong
        return [True] * len(result.lengths)
    return [bool(np.isfinite(rows).all()) for rows in result.rows]


class BusyTime:
    """The time in which at least one run is under way: runs side by side count once, not each.

    It is exact whenever it is taken, in the middle of a run too. Any thread may call anything.
    """

    def __init__(self) -> None:
        """Nothing runs, and no time has been counted."""
        self._lock = threading.Lock()
        self._running = 0
        self._counted_until = -math.inf
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        """A run begins."""
        with self._lock:
            self._count(now)
            self._running += 1

    def end(self, now: float) -> None:
        """A run has ended, however."""
        with self._lock:
            self._count(now)
            self._running -= 1

    def take(self, now: float) -> float:
        """The seconds counted since this was last called."""
        with self._lock:
            self._count(now)
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def _count(self, now: float) -> None:
        # Who read the clock first may get the lock last: time never goes back here, and no moment counts twice.
        now = max(now, self._counted_until)
        if self._running:
            self._seconds += now - self._counted_until
        self._counted_until = now


def _answer(future: "asyncio.Future[Any]", result: object) -> None:
    """Sets a result, unless whoever wanted it has gone."""
    if not future.done():
        future.set_result(result)
