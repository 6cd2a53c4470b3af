"""Tests of the longest time that a sequence waits in the queue, with simulated time and random traffic."""

import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from tickets import ticket_of

from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.scheduling.queue import PendingQueue
from encserve_server.types.sequences import TokenSequence


@dataclass(eq=False)
class Entry:
    """A sequence of the simulation.

    Attributes:
        arrives_at: The arrival time, in seconds.
        length: The number of tokens.
        deadline: The time at which the sequence expires.
        leaves_at: The time at which the caller cancels.
        ahead: The number of live entries that wait when this entry arrives.
        running_until: The expected time at which the first lane becomes free, at the arrival of this entry.
        batches_before: The number of batches that begin after the arrival and before the batch of this entry.
        started_at: The start of the batch with this entry, or NaN if the entry did not run.
    """

    arrives_at: float
    length: int
    deadline: float
    leaves_at: float
    ahead: int = 0
    running_until: float = math.nan
    batches_before: int = 0
    started_at: float = math.nan


@dataclass
class Engine:
    """A simulated device. A run takes a fixed time, and more time for each padded token.

    Attributes:
        run_seconds: The fixed time of a run.
        token_seconds: The time for a padded token.
        lanes: The number of batches that can run at once.
        has_wide_session: Whether a batch that runs alone uses all lanes, and is `lanes` times faster.
        longest_run: The longest run so far, in seconds.
    """

    run_seconds: float
    token_seconds: float
    lanes: int = 1
    has_wide_session: bool = False
    longest_run: float = field(default=0.0)

    def run(self, batch: list[Entry], *, alone: bool) -> float:
        padded = max(entry.length for entry in batch) * len(batch)
        seconds = (self.run_seconds + self.token_seconds * padded) / (self.lanes if alone else 1)
        self.longest_run = max(self.longest_run, seconds)
        return seconds


def simulate(entries: list[Entry], policy: BatchPolicy, engine: Engine) -> None:
    """Simulate all entries. If an entry waits and a lane is free, the lane takes a batch at once."""
    queue = PendingQueue()
    pending: dict[TokenSequence, Entry] = {}
    running: list[float] = []  # the end time of each running batch
    alone_until = -math.inf
    coming = sorted(entries, key=lambda entry: entry.arrives_at)
    now = 0.0
    while coming or queue.sequences or running:
        now = _next_event(now, coming, running)
        running = [ends for ends in running if ends > now]
        while coming and coming[0].arrives_at <= now:
            # If all lanes are busy, the next batch begins when the first lane is free.
            busy = len(running) == engine.lanes or alone_until > now
            _arrive(coming.pop(0), queue, pending, running_until=min(running) if busy else now)
        while queue.sequences and len(running) < engine.lanes and alone_until <= now:
            for sequence, entry in pending.items():
                if entry.leaves_at <= now:
                    sequence.ticket.done.cancel()
            taken = queue.take(policy, now).batch
            if taken is None:
                break
            batch = [pending.pop(sequence) for sequence in taken.sequences]
            alone = engine.has_wide_session and not running and not queue.sequences
            running.append(now + engine.run(batch, alone=alone))
            alone_until = running[-1] if alone else -math.inf
            for entry in batch:
                entry.started_at = now
            for entry in pending.values():
                entry.batches_before += 1


def _next_event(now: float, coming: list[Entry], running: list[float]) -> float:
    """Return the time of the next event: an arrival, or the end of a batch."""
    events = [entry.arrives_at for entry in coming[:1]] + running
    return max(now, min(events))


def _arrive(entry: Entry, queue: PendingQueue, pending: dict[TokenSequence, Entry], *, running_until: float) -> None:
    entry.ahead = sum(1 for it in pending.values() if min(it.leaves_at, it.deadline) > entry.arrives_at)
    entry.running_until = max(running_until, entry.arrives_at)
    ticket = ticket_of([entry.length], deadline=entry.deadline)
    queue.add(ticket)
    pending[ticket.sequences[0]] = entry


arrivals = st.lists(
    st.builds(
        lambda at, length, patience, stays: Entry(at, length, at + patience, at + stays),
        st.floats(0, 5),
        st.one_of(st.integers(1, 512), st.sampled_from([1, 16, 512])),
        st.sampled_from([math.inf, math.inf, math.inf, 0.5, 0.01]),
        st.sampled_from([math.inf, math.inf, math.inf, 0.2, 0.0]),
    ),
    min_size=1,
    max_size=80,
)
policies = st.builds(
    BatchPolicy,
    max_batch_tokens=st.integers(1, 2048),
    max_batch_sequences=st.integers(1, 64),
    max_padding_fraction=st.floats(0, 1),
)
engines = st.builds(Engine, st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.integers(1, 4), st.booleans())


@given(arrivals, policies, engines)
def test_a_sequence_behind_k_others_starts_in_the_next_k_plus_1_batches(
    entries: list[Entry], policy: BatchPolicy, engine: Engine
) -> None:
    """An entry behind k waiting entries starts in one of the next k + 1 batches.

    Later entries do not extend the wait. In the code, k is `ahead`.
    """
    simulate(entries, policy, engine)
    for entry in entries:
        if not math.isnan(entry.started_at):
            assert entry.batches_before <= entry.ahead
            wait_after_running = entry.started_at - entry.running_until
            assert wait_after_running <= entry.ahead * engine.longest_run * (1 + 1e-9) + 1e-9


@given(arrivals, policies, engines)
def test_patient_calls_run_and_late_calls_do_not(entries: list[Entry], policy: BatchPolicy, engine: Engine) -> None:
    simulate(entries, policy, engine)
    for entry in entries:
        patient = math.isinf(entry.deadline) and math.isinf(entry.leaves_at)
        started = not math.isnan(entry.started_at)
        assert started or not patient
        if started:
            assert entry.started_at < min(entry.deadline, entry.leaves_at)


@given(st.integers(1, 512), st.lists(st.integers(1, 512), min_size=50, max_size=200), policies)
def test_a_sequence_of_unusual_length_waits_for_one_batch(length: int, flood: list[int], policy: BatchPolicy) -> None:
    """A sequence waits for at most one batch, even if many later sequences have other lengths.

    This is the worst case for batches of sequences with similar lengths.
    """
    engine = Engine(0.01, 1e-5)
    odd = Entry(0.001, length, math.inf, math.inf)
    others = [Entry(0.0 if i == 0 else 0.002 + i * 1e-4, it, math.inf, math.inf) for i, it in enumerate(flood)]
    simulate([odd, *others], policy, engine)
    assert odd.ahead == 0
    assert odd.batches_before == 0
