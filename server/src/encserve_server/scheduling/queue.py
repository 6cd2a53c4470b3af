"""The queue: sequences that wait for a batch, in buckets by length, counted against its bound as they come and go."""

import asyncio
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from encserve_server.errors import EncserveError
from encserve_server.scheduling.batching import BatchPolicy, plan_batch
from encserve_server.telemetry.spans import RequestSpan
from encserve_server.types.sequences import Batch, ClosedBy, TokenSequence


class QueueObserver(Protocol):
    """Hears what becomes of the queue."""

    def register_queue_gauges(
        self, requests: Callable[[], int], sequences: Callable[[], int], tokens: Callable[[], int]
    ) -> None:
        """Takes functions, callable from any thread, that say how much waits; `tokens` is what it costs."""

    def expired(self) -> None:
        """A sequence's deadline passed in the queue."""

    def cancelled(self, stage: str) -> None:
        """A sequence's caller went away while it was "queued" or "running"."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One call in the scheduler; owned by the event loop, but for `queued`, which the queue's lock guards.

    Attributes:
        sequences: The sequences of the call; empty once the call has ended.
        done: Fires when all sequences have their outputs, or at the first error.
        missing: How many sequences have no outputs yet.
        queued: How many sequences count against the queue's bound.
        span: Traces the call; None where nothing does.
        error: Why the call failed, until it is raised. `done` would keep it, and an error refers to the frames that it
            passed, and these to the sequences: the memory of a failed call would wait for the cycle collector.
    """

    sequences: list[TokenSequence]
    done: "asyncio.Future[None]"
    missing: int
    queued: int = 0
    span: RequestSpan | None = None
    error: EncserveError | None = None

    def fail(self, error: EncserveError) -> None:
        """Ends the call with an error, unless it has ended."""
        if not self.done.done():
            self.error = error
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class Taken:
    """What left the queue.

    Attributes:
        batch: What runs now; None if nothing live waits.
        expired: Sequences whose deadline has passed.
    """

    batch: Batch | None
    expired: list[TokenSequence]


class PendingQueue:
    """Sequences that wait. It has no lock: the caller of each method holds the scheduler's.

    A sequence that is withdrawn leaves at once. Deadlines are looked at when a sequence is to be taken.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.requests = 0  # with at least one sequence that waits
        self.cost = 0  # in tokens
        self._arrivals: OrderedDict[TokenSequence, None] = OrderedDict()  # the oldest first
        self._buckets: dict[int, OrderedDict[TokenSequence, None]] = {}  # by length, the oldest first; never empty
        self._waiting: dict[int, int] = {}  # how many there are of each length
        self._lengths: list[int] = []  # of the buckets, ascending

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, ticket: Ticket) -> None:
        """Appends all sequences of a call."""
        self.requests += 1
        ticket.queued = len(ticket.sequences)
        for sequence in ticket.sequences:
            length = len(sequence.input)
            if length not in self._buckets:
                self._buckets[length] = OrderedDict()
                self._waiting[length] = 0
                insort(self._lengths, length)
            self._buckets[length][sequence] = None
            self._arrivals[sequence] = None
            self._waiting[length] += 1
            self.cost += sequence.cost

    def withdraw(self, ticket: Ticket) -> None:
        """Frees the room of a call that has ended."""
        for sequence in ticket.sequences:
            if sequence in self._arrivals:
                self._remove(sequence)

    def take(self, policy: BatchPolicy, now: float) -> Taken:
        """Takes the next batch out; see `batching`. A sequence with `deadline <= now` has expired."""
        expired: list[TokenSequence] = []
        while self._arrivals:
            oldest = next(iter(self._arrivals))
            if not self._is_live(oldest, now, expired):
                continue
            plan = plan_batch(len(oldest.input), self._lengths, self._waiting, policy)
            planned = [it for length, count in plan.counts.items() for it in islice(self._buckets[length], count)]
            live = [it for it in planned if self._is_live(it, now, expired)]
            if len(live) == len(planned):  # else what is left is planned again, so that the bounds hold
                return Taken(self._take_planned(planned, plan.closed_by, policy.max_batch_tokens, now), expired)
        return Taken(None, expired)

    def _take_planned(
        self, planned: list[TokenSequence], closed_by: ClosedBy, max_extra_tokens: int, now: float
    ) -> Batch:
        """Takes sequences out, in the order in which a batch grew, as far as their outputs are not too much for it.

        What outputs cost beside the tokens is in tokens too, and a batch has at most as much of it as of tokens. The
        first sequence runs whatever its outputs cost.
        """
        batch = Batch([], closed_by)
        extra = 0
        for sequence in planned:
            extra += sequence.cost - len(sequence.input)
            if extra > max_extra_tokens and batch.sequences:
                batch.closed_by = ClosedBy.TOKENS
                break
            self._remove(sequence)
            sequence.started_at = now
            batch.sequences.append(sequence)
        return batch

    def take_all(self) -> list[TokenSequence]:
        """Takes everything out."""
        sequences = list(self._arrivals)
        for sequence in sequences:
            self._remove(sequence)
        return sequences

    def _is_live(self, sequence: TokenSequence, now: float, expired: list[TokenSequence]) -> bool:
        """Whether a caller waits for a sequence; otherwise the sequence leaves."""
        if not sequence.ticket.done.done():
            if sequence.deadline > now:
                return True
            expired.append(sequence)
        self._remove(sequence)
        return False

    def _remove(self, sequence: TokenSequence) -> None:
        length = len(sequence.input)
        del self._arrivals[sequence]
        bucket = self._buckets[length]
        del bucket[sequence]
        self._waiting[length] -= 1
        if not bucket:
            del self._buckets[length], self._waiting[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self.cost -= sequence.cost
        ticket = sequence.ticket
        ticket.queued -= 1
        self.requests -= not ticket.queued
