"""The queue of sequences that wait for a batch, by priority, caller and length.

`fairness` decides which caller is next. As in VTC (Sheng et al., OSDI '24), fairness is measured in tokens: the cost of
a sequence is the number of tokens that admission has counted for it. The first sequence of a batch, the anchor, is the
oldest sequence of the next caller. The other sequences of the batch have similar lengths and come from any caller.
Among sequences with the same length, the sequences with the earliest virtual start run first. A sequence gets its
virtual start and its cost on arrival. So its own caller pays for the sequence, even in a batch that another caller's
anchor started.

No batch has both interactive and bulk sequences.
"""

import asyncio
import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Protocol

from encserve_server.errors import EncserveError
from encserve_server.scheduling.batching import BatchPolicy, plan_batch
from encserve_server.scheduling.fairness import BulkTurn, FairQueue, Flow
from encserve_server.telemetry.spans import RequestSpan
from encserve_server.types.callers import ANYONE, Caller, Priority
from encserve_server.types.sequences import Batch, ClosedBy, TokenSequence

# `max_lead` of `FairQueue`. If a sequence of caller A runs in a batch with caller B's anchor, A's virtual end also
# moves. Suppose that A's short sequences always run in such batches. Without this limit, A's long sequences might never
# run.
MOST_AHEAD_TOKENS = 8192
# `slack` of `FairQueue`. Most sequences of a batch run out of order, so the virtual time does not change for some
# batches and then jumps. Without slack, a caller with a few short texts would wait for the next jump.
SLACK_TOKENS = 512

_virtual_start = attrgetter("virtual_start")


class QueueObserver(Protocol):
    """Receives the events of the queue."""

    def register_queue_gauges(
        self,
        requests: Callable[[], int],
        sequences: Callable[[], int],
        tokens: Callable[[], int],
        bulk_tokens: Callable[[], int],
    ) -> None:
        """Set the functions that return the number of waiting requests and of sequences, and their cost in tokens.

        Any thread may call the functions.
        """

    def expired(self) -> None:
        """The deadline of a sequence passed in the queue."""

    def cancelled(self, stage: str) -> None:
        """The caller of a sequence disconnected while the sequence was "queued" or "running"."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A pending call of the scheduler. The event loop owns it, and the queue's lock guards `queued`.

    Attributes:
        sequences: The sequences of the call; empty once the call has ended.
        done: Set when all sequences have their outputs, or at the first error.
        missing: The number of sequences without outputs.
        queued: The number of sequences in the queue.
        caller: The caller.
        priority: The priority.
        span: Traces the call; None without tracing.
        error: The error of the call; None after the error is raised. `done` does not store the error, because a
            reference cycle would result: error, stack frames, sequences, call. The cycle would keep the memory of a
            failed call until the garbage collector runs.
    """

    sequences: list[TokenSequence]
    done: "asyncio.Future[None]"
    missing: int
    queued: int = 0
    caller: Caller = ANYONE
    priority: Priority = Priority.INTERACTIVE
    span: RequestSpan | None = None
    error: EncserveError | None = None

    def fail(self, error: EncserveError) -> None:
        """End the call with an error, unless it has ended."""
        if not self.done.done():
            self.error = error
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class Taken:
    """Sequences that left the queue.

    Attributes:
        batch: The batch that runs now; None if no live sequence waits.
        expired: Sequences whose deadline has passed.
    """

    batch: Batch | None
    expired: list[TokenSequence]


class _LengthQueue(FairQueue[TokenSequence]):
    """The waiting sequences of one priority, by caller and by length."""

    def __init__(self) -> None:
        super().__init__(slack=SLACK_TOKENS, max_lead=MOST_AHEAD_TOKENS)
        self.lengths: list[int] = []  # the lengths of the waiting sequences, ascending
        self.waiting: dict[int, int] = {}  # the number of sequences of each length
        # The sequences by length and caller, the oldest first. Empty buckets and flows are removed.
        self.buckets: dict[int, dict[Flow[TokenSequence], OrderedDict[TokenSequence, None]]] = {}

    def add(self, items: Sequence[TokenSequence], caller: Caller) -> Flow[TokenSequence]:
        flow = super().add(items, caller)
        for sequence in items:
            length = len(sequence.input)
            if length not in self.buckets:
                self.buckets[length] = {}
                self.waiting[length] = 0
                insort(self.lengths, length)
            self.buckets[length].setdefault(flow, OrderedDict())[sequence] = None
            self.waiting[length] += 1
        return flow

    def remove(self, item: TokenSequence, caller: Caller, *, starts: bool) -> Flow[TokenSequence]:
        flow = super().remove(item, caller, starts=starts)
        length = len(item.input)
        bucket = self.buckets[length]
        del bucket[flow][item]
        self.waiting[length] -= 1
        if not bucket[flow]:
            del bucket[flow]
        if not bucket:
            del self.buckets[length], self.waiting[length]
            del self.lengths[bisect_left(self.lengths, length)]
        return flow

    def members(self, anchor: TokenSequence, counts: Mapping[int, int]) -> list[TokenSequence]:
        """Return the planned number of sequences of each length. The anchor is the first sequence."""
        found: list[TokenSequence] = []
        for length, count in counts.items():
            flows = self.buckets[length].values()
            if len(flows) == 1:
                found += islice(next(iter(flows)), count)
            elif found:
                found += islice(heapq.merge(*flows, key=_virtual_start), count)
            else:
                others = (it for it in heapq.merge(*flows, key=_virtual_start) if it is not anchor)
                found += [anchor, *islice(others, count - 1)]
        return found


class PendingQueue:
    """Waiting sequences. The caller of each method must hold `Lanes.lock`.

    A withdrawn sequence leaves the queue at once. The deadline of a sequence is checked just before the queue takes it.

    Attributes:
        requests: The number of calls with at least one waiting sequence.
        sequences: The number of waiting sequences.
        cost: The cost of all waiting sequences, in tokens.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.requests = 0
        self.sequences = 0
        self.cost = 0
        self._queues = {priority: _LengthQueue() for priority in Priority}
        self._bulk_turn = BulkTurn()

    def cost_of(self, priority: Priority) -> int:
        """Return the cost of the waiting sequences of one priority, in tokens."""
        return self._queues[priority].cost

    def share_of(self, caller: Caller, priorities: Iterable[Priority] = Priority) -> tuple[int, float]:
        """Return a caller's waiting cost, and the total weight of the other callers with waiting sequences.

        Args:
            caller: The caller.
            priorities: Only sequences of these priorities count.
        """
        own, others = 0, {}
        for priority in priorities:
            for name, flow in self._queues[priority].flows.items():
                if name == caller.name:
                    own += flow.cost
                elif flow.items:
                    others[name] = flow.weight
        return own, sum(others.values())

    def add(self, ticket: Ticket) -> None:
        """Append all sequences of a call."""
        self.requests += 1
        ticket.queued = len(ticket.sequences)
        queue = self._queues[ticket.priority]
        self.cost -= queue.cost
        queue.add(ticket.sequences, ticket.caller)
        self.cost += queue.cost
        self.sequences += ticket.queued

    def withdraw(self, ticket: Ticket) -> None:
        """Remove the waiting sequences of a call that has ended."""
        items = self._queues[ticket.priority].flows[ticket.caller.name].items
        for sequence in ticket.sequences:
            if sequence in items:
                self._remove(sequence)

    def take(self, policy: BatchPolicy, now: float) -> Taken:
        """Take the next batch; see `batching`. A sequence with `deadline <= now` has expired."""
        expired: list[TokenSequence] = []
        interactive, bulk = self._queues[Priority.INTERACTIVE], self._queues[Priority.BULK]
        while self.sequences:
            queue = bulk if self._bulk_turn.is_bulk_next(interactive, bulk) else interactive
            anchor = queue.first()
            plan = plan_batch(len(anchor.input), queue.lengths, queue.waiting, policy)
            planned = queue.members(anchor, plan.counts)
            live = [it for it in planned if self._is_live(it, now, expired)]
            if len(live) == len(planned):  # otherwise plan again, without the removed sequences
                queue.advance(anchor)
                return Taken(self._take_planned(queue, planned, plan.closed_by, policy.max_batch_tokens, now), expired)
        return Taken(None, expired)

    def _take_planned(
        self,
        queue: _LengthQueue,
        planned: list[TokenSequence],
        closed_by: ClosedBy,
        max_batch_tokens: int,
        now: float,
    ) -> Batch:
        """Take sequences in the planned order. Stop before the cost of the batch's outputs exceeds `max_batch_tokens`.

        The first sequence is taken even if it costs more.
        """
        batch = Batch([], closed_by)
        extra = 0
        for sequence in planned:
            extra += sequence.cost - len(sequence.input)
            if extra > max_batch_tokens and batch.sequences:
                batch.closed_by = ClosedBy.TOKENS
                break
            self._remove(sequence, starts=True)
            sequence.started_at = now
            batch.sequences.append(sequence)
        bulk = self._queues[Priority.BULK]
        self._bulk_turn.note_start(is_bulk=queue is bulk, bulk=bulk)
        return batch

    def take_all(self) -> list[TokenSequence]:
        """Take all sequences."""
        sequences = [it for queue in self._queues.values() for flow in queue.active for it in flow.items]
        for sequence in sequences:
            self._remove(sequence)
        return sequences

    def _is_live(self, sequence: TokenSequence, now: float, expired: list[TokenSequence]) -> bool:
        """Return whether the caller still waits for a sequence. Otherwise remove the sequence from the queue."""
        if not sequence.ticket.done.done():
            if sequence.deadline > now:
                return True
            expired.append(sequence)
        self._remove(sequence)
        return False

    def _remove(self, sequence: TokenSequence, *, starts: bool = False) -> None:
        ticket = sequence.ticket
        self._queues[ticket.priority].remove(sequence, ticket.caller, starts=starts)
        self.cost -= sequence.cost
        self.sequences -= 1
        ticket.queued -= 1
        self.requests -= not ticket.queued
