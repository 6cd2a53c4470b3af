"""The queue: sequences that wait for a batch, by priority, caller and length, counted against its bound.

Callers share the model by start-time fair queueing (Goyal et al., SIGCOMM '96), with the cost that admission counts
as length, as VTC does for tokens (Sheng et al., OSDI '24). When a sequence arrives, its *turn* is set: where its
caller's turns have come to, each of its sequences adding cost / weight, and never before the clock, which stands at the
turn of the last anchor. So a caller that was away has saved nothing up, and one that was alone owes nothing. The cost
of a sequence that leaves before it runs is given back. The anchor of a batch is the oldest sequence of the caller whose
oldest has the earliest turn. Its neighbours in length come from any caller; among sequences of one length, the earliest
turns go first. No caller is charged twice: the turn of a neighbour was set, and its cost counted, when it arrived.

Interactive sequences go before bulk ones and are in batches of their own, but every `BULK_TURN`-th batch is a bulk one
while both wait.
"""

import asyncio
import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from encserve_server.errors import EncserveError
from encserve_server.scheduling.batching import BatchPolicy, plan_batch
from encserve_server.telemetry.spans import RequestSpan
from encserve_server.types.callers import ANYONE, Caller, Priority
from encserve_server.types.sequences import Batch, ClosedBy, TokenSequence

# While interactive and bulk sequences wait, one batch in so many is a bulk one.
BULK_TURN = 9
# The most by which a caller's next turn may lie behind the cost of what the caller has waiting, in tokens. Sequences
# that run as neighbours move their caller's turns forward too: without this bound, a caller whose short sequences
# always run as neighbours would never have its long ones run.
MOST_AHEAD_TOKENS = 8192
# The most by which a caller is ahead of its share before its sequences wait for that, in tokens. Neighbours run out of
# order, so the clock stands still for some batches and then leaps; without slack, a caller of a few short texts waits.
SLACK_TOKENS = 512


class QueueObserver(Protocol):
    """Hears what becomes of the queue."""

    def register_queue_gauges(
        self,
        requests: Callable[[], int],
        sequences: Callable[[], int],
        tokens: Callable[[], int],
        bulk_tokens: Callable[[], int],
    ) -> None:
        """Takes functions, callable from any thread, that say how much waits; the last two what it costs."""

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
        caller: Whose call it is.
        priority: Whether it goes before others.
        span: Traces the call; None where nothing does.
        error: Why the call failed, until it is raised. `done` would keep it, and an error refers to the frames that it
            passed, and these to the sequences: the memory of a failed call would wait for the cycle collector.
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


@dataclass(slots=True, eq=False)
class _Flow:
    """What waits of one caller, of one priority.

    Attributes:
        weight: Its caller's.
        next_turn: Where its turns have come to.
        cost: What its sequences cost, in tokens.
        arrivals: Its sequences, the oldest first.
    """

    weight: float
    next_turn: float = 0.0
    cost: int = 0
    arrivals: OrderedDict[TokenSequence, None] = field(default_factory=OrderedDict)

    @property
    def oldest(self) -> TokenSequence:
        return next(iter(self.arrivals))


class _Line:
    """What waits of one priority."""

    def __init__(self) -> None:
        self.cost = 0
        self.lengths: list[int] = []  # of the buckets, ascending
        self.waiting: dict[int, int] = {}  # how many there are of each length
        # By length, and by who waits with it, the oldest first; neither is ever empty.
        self.buckets: dict[int, dict[_Flow, OrderedDict[TokenSequence, None]]] = {}
        self.flows: dict[str, _Flow] = {}  # by name, of all callers so far: as many as have names
        self.active: dict[_Flow, None] = {}  # those with something that waits
        self.clock = 0.0  # the turn of the last anchor

    def add(self, sequences: Sequence[TokenSequence], caller: Caller) -> None:
        flow = self.flows.setdefault(caller.name, _Flow(caller.weight))
        flow.weight = caller.weight
        self.active[flow] = None
        for sequence in sequences:
            latest = self.clock + (flow.cost + MOST_AHEAD_TOKENS) / flow.weight
            newest = next(reversed(flow.arrivals)).turn if flow.arrivals else self.clock
            start = max(newest, self.clock, min(flow.next_turn, latest))
            sequence.turn = max(newest, self.clock, start - SLACK_TOKENS / flow.weight)
            flow.next_turn = start + sequence.cost / flow.weight
            length = len(sequence.input)
            if length not in self.buckets:
                self.buckets[length] = {}
                self.waiting[length] = 0
                insort(self.lengths, length)
            self.buckets[length].setdefault(flow, OrderedDict())[sequence] = None
            self.waiting[length] += 1
            flow.arrivals[sequence] = None
            flow.cost += sequence.cost
            self.cost += sequence.cost

    def remove(self, sequence: TokenSequence, caller: Caller, *, to_run: bool) -> None:
        flow = self.flows[caller.name]
        if not to_run:
            flow.next_turn -= sequence.cost / flow.weight
        length = len(sequence.input)
        bucket = self.buckets[length]
        del flow.arrivals[sequence], bucket[flow][sequence]
        self.waiting[length] -= 1
        flow.cost -= sequence.cost
        self.cost -= sequence.cost
        if not flow.arrivals:
            del self.active[flow]
        if not bucket[flow]:
            del bucket[flow]
        if not bucket:
            del self.buckets[length], self.waiting[length]
            del self.lengths[bisect_left(self.lengths, length)]

    def first(self) -> TokenSequence:
        """The oldest sequence of the caller whose turn it is; of equal turns, of the caller with least waiting."""
        if len(self.active) == 1:
            return next(iter(self.active)).oldest
        return min(self.active, key=lambda flow: (flow.oldest.turn, flow.cost)).oldest

    def members(self, anchor: TokenSequence, counts: Mapping[int, int]) -> list[TokenSequence]:
        """As many sequences of each length as planned, the anchor first."""
        found: list[TokenSequence] = []
        for length, count in counts.items():
            flows = self.buckets[length].values()
            if len(flows) == 1:
                found += islice(next(iter(flows)), count)
            elif found:
                found += islice(heapq.merge(*flows, key=_turn), count)
            else:
                others = (it for it in heapq.merge(*flows, key=_turn) if it is not anchor)
                found += [anchor, *islice(others, count - 1)]
        return found


def _turn(sequence: TokenSequence) -> float:
    return sequence.turn


class PendingQueue:
    """Sequences that wait. It has no lock: the caller of each method holds the scheduler's.

    A sequence that is withdrawn leaves at once. Deadlines are looked at when a sequence is to be taken.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.requests = 0  # with at least one sequence that waits
        self.cost = 0  # in tokens
        self._count = 0
        self._lines = {priority: _Line() for priority in Priority}
        self._bulk_passed_over = 0  # batches since the last bulk one, or since bulk began to wait

    def __len__(self) -> int:
        return self._count

    def cost_of(self, priority: Priority) -> int:
        """What waits of one priority, in tokens."""
        return self._lines[priority].cost

    def share_of(self, caller: Caller) -> tuple[int, float]:
        """What waits of a caller, in tokens, and the weight of all others that have something waiting."""
        own, others = 0, {}
        for line in self._lines.values():
            for name, flow in line.flows.items():
                if name == caller.name:
                    own += flow.cost
                elif flow.arrivals:
                    others[name] = flow.weight
        return own, sum(others.values())

    def add(self, ticket: Ticket) -> None:
        """Appends all sequences of a call."""
        self.requests += 1
        ticket.queued = len(ticket.sequences)
        line = self._lines[ticket.priority]
        self.cost -= line.cost
        line.add(ticket.sequences, ticket.caller)
        self.cost += line.cost
        self._count += ticket.queued

    def withdraw(self, ticket: Ticket) -> None:
        """Frees the room of a call that has ended."""
        arrivals = self._lines[ticket.priority].flows[ticket.caller.name].arrivals
        for sequence in ticket.sequences:
            if sequence in arrivals:
                self._remove(sequence)

    def take(self, policy: BatchPolicy, now: float) -> Taken:
        """Takes the next batch out; see `batching`. A sequence with `deadline <= now` has expired."""
        expired: list[TokenSequence] = []
        while self._count:
            line = self._next_line()
            anchor = line.first()
            if not self._is_live(anchor, now, expired):
                continue
            plan = plan_batch(len(anchor.input), line.lengths, line.waiting, policy)
            planned = line.members(anchor, plan.counts)
            live = [it for it in planned if self._is_live(it, now, expired)]
            if len(live) == len(planned):  # else what is left is planned again, so that the bounds hold
                line.clock = max(line.clock, anchor.turn)
                return Taken(self._take_planned(line, planned, plan.closed_by, policy.max_batch_tokens, now), expired)
        return Taken(None, expired)

    def _next_line(self) -> _Line:
        """Interactive before bulk, but for bulk's turn."""
        interactive, bulk = self._lines[Priority.INTERACTIVE], self._lines[Priority.BULK]
        is_bulk = not interactive.active or (bulk.active and self._bulk_passed_over >= BULK_TURN - 1)
        return bulk if is_bulk else interactive

    def _take_planned(
        self,
        line: _Line,
        planned: list[TokenSequence],
        closed_by: ClosedBy,
        max_batch_tokens: int,
        now: float,
    ) -> Batch:
        """Takes sequences out, in the order in which a batch grew, as far as their outputs are not too much for it.

        What outputs cost beside the tokens is in tokens too, and a batch has at most as much of it as of tokens. The
        first sequence runs whatever its outputs cost.
        """
        batch = Batch([], closed_by)
        extra = 0
        for sequence in planned:
            extra += sequence.cost - len(sequence.input)
            if extra > max_batch_tokens and batch.sequences:
                batch.closed_by = ClosedBy.TOKENS
                break
            self._remove(sequence, to_run=True)
            sequence.started_at = now
            batch.sequences.append(sequence)
        bulk = self._lines[Priority.BULK]
        self._bulk_passed_over = self._bulk_passed_over + 1 if bulk.active and line is not bulk else 0
        return batch

    def take_all(self) -> list[TokenSequence]:
        """Takes everything out."""
        sequences = [it for line in self._lines.values() for flow in line.active for it in flow.arrivals]
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

    def _remove(self, sequence: TokenSequence, *, to_run: bool = False) -> None:
        ticket = sequence.ticket
        self._lines[ticket.priority].remove(sequence, ticket.caller, to_run=to_run)
        self.cost -= sequence.cost
        self._count -= 1
        ticket.queued -= 1
        self.requests -= not ticket.queued
