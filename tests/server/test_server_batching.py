"""Tests of the queue, and of the choice of sequences for the next batch, with random queues."""

import gc
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tickets import ticket_of

from encserve_server.scheduling.batching import BatchPolicy, Plan, plan_batch
from encserve_server.scheduling.queue import PendingQueue, Taken, Ticket
from encserve_server.types.callers import Caller, Priority
from encserve_server.types.sequences import ClosedBy, TokenSequence

NOW = 100.0
POLICIES = st.builds(
    BatchPolicy,
    max_batch_tokens=st.integers(1, 2000),
    max_batch_sequences=st.integers(1, 40),
    max_padding_fraction=st.floats(0, 1),
)


class Call(NamedTuple):
    """A call with one sequence."""

    length: int
    deadline: float = math.inf
    cancelled: bool = False
    extra_cost: int = 0


CALLERS = [Caller(), Caller("search", 2.0), Caller("jobs", 0.5)]
QUEUES = st.lists(
    st.builds(
        Call,
        st.integers(1, 300),
        st.sampled_from([math.inf, 101.0, 100.0, 99.0]),
        st.booleans(),
        st.sampled_from([0, 0, 0, 5, 500]),
    ),
    max_size=60,
)


def add(queue: PendingQueue, calls: Sequence[Call]) -> list[TokenSequence]:
    """Add calls to a queue, and return the sequences of the calls in the order of arrival."""
    sequences = []
    for call in calls:
        ticket = ticket_of([call.length], deadline=call.deadline, extra_cost=call.extra_cost)
        queue.add(ticket)
        if call.cancelled:
            ticket.done.cancel()
        sequences += ticket.sequences
    return sequences


def queued(calls: Sequence[Call]) -> tuple[PendingQueue, list[TokenSequence]]:
    """Return a queue with these calls, and the sequences of the calls in the order of arrival."""
    queue = PendingQueue()
    return queue, add(queue, calls)


def is_live(sequence: TokenSequence) -> bool:
    return not sequence.ticket.done.done() and sequence.deadline > NOW


def taken_from(queue: PendingQueue, policy: BatchPolicy) -> tuple[list[TokenSequence], Taken]:
    """Take the next batch. Return its list of sequences, which is empty without a batch, and the `Taken` object."""
    taken = queue.take(policy, NOW)
    return taken.batch.sequences if taken.batch is not None else [], taken


@given(QUEUES, POLICIES)
def test_a_batch_keeps_its_limits(calls: list[Call], policy: BatchPolicy) -> None:
    queue, _ = queued(calls)
    batch, taken = taken_from(queue, policy)
    if taken.batch is not None:
        assert (taken.batch.closed_by is ClosedBy.QUEUE_EMPTY) == (not queue.sequences)
    if len(batch) > 1:  # one sequence alone may exceed the budget
        lengths = [len(it.input) for it in batch]
        padded = max(lengths) * len(lengths)
        assert padded <= policy.max_batch_tokens
        assert len(lengths) <= policy.max_batch_sequences
        assert padded - sum(lengths) <= policy.max_padding_fraction * padded
        assert sum(it.cost - len(it.input) for it in batch) <= policy.max_batch_tokens
        between = range(min(lengths) + 1, max(lengths))
        assert not [it for it in queue.take_all() if is_live(it) and len(it.input) in between], (
            "a waiting length lies between two lengths of the batch"
        )


@given(st.lists(QUEUES, min_size=1, max_size=5), POLICIES)
def test_every_batch_begins_with_the_oldest_live_sequence(arrivals: list[list[Call]], policy: BatchPolicy) -> None:
    """Calls arrive before each batch.

    Nevertheless, a sequence behind k live sequences runs in batch k + 1 or earlier.
    """
    queue = PendingQueue()
    waiting: list[TokenSequence] = []
    while arrivals or queue.sequences:
        waiting += add(queue, arrivals.pop(0) if arrivals else [])
        batch, _ = taken_from(queue, policy)
        assert batch[:1] == [it for it in waiting if is_live(it)][:1]
        waiting = [it for it in waiting if it not in batch]


@given(QUEUES, POLICIES)
def test_no_sequence_is_lost_or_runs_twice(calls: list[Call], policy: BatchPolicy) -> None:
    """Waiting sequences stay in their order of arrival. Sequences of the same length run in their order of arrival."""
    queue, sequences = queued(calls)
    batch, taken = taken_from(queue, policy)
    left = queue.take_all()
    number = {sequence: i for i, sequence in enumerate(sequences)}
    found = [number[it] for it in (*batch, *taken.expired, *left)]
    assert len(set(found)) == len(found)
    assert all(call.cancelled for i, call in enumerate(calls) if i not in found)
    assert left == sorted(left, key=number.__getitem__)
    for length in {len(it.input) for it in batch}:
        alike = [number[it] for it in batch if len(it.input) == length]
        assert alike == sorted(alike)
        assert all(alike[-1] < number[it] for it in left if len(it.input) == length and is_live(it))


@given(QUEUES, POLICIES)
def test_only_live_sequences_run(calls: list[Call], policy: BatchPolicy) -> None:
    queue, sequences = queued(calls)
    ran, expired = [], []
    while queue.sequences:
        batch, taken = taken_from(queue, policy)
        assert all(it.started_at == NOW for it in batch)
        ran += batch
        expired += taken.expired
    assert set(ran) == {it for it in sequences if is_live(it)}
    assert set(expired) == {it for it in sequences if it.deadline <= NOW and not it.ticket.done.done()}


@given(QUEUES, POLICIES)
@settings(max_examples=5)
def test_a_queue_frees_the_inputs_of_sequences_that_left(calls: list[Call], policy: BatchPolicy) -> None:
    queue, sequences = queued(calls)
    inputs = [weakref.ref(it.input) for it in sequences]
    while queue.sequences:
        queue.take(policy, NOW)
    del sequences
    gc.collect()
    assert not [it for it in inputs if it() is not None]


def test_the_extra_costs_of_a_batch_are_limited() -> None:
    """The sum of the extra costs in a batch has the same limit as the tokens.

    In this test the limit is 100, and each sequence has an extra cost of 30. So a batch takes three of five sequences.
    """
    policy = BatchPolicy(100, 64, 1.0)
    queue, _ = queued([Call(10, extra_cost=30)] * 5)
    batch, taken = taken_from(queue, policy)
    assert taken.batch is not None
    assert (len(batch), taken.batch.closed_by) == (3, ClosedBy.TOKENS)
    assert (queue.sequences, queue.cost) == (2, 80)
    queue, sequences = queued([Call(10, extra_cost=500), Call(10), Call(10)])
    assert [taken_from(queue, policy)[0] for _ in range(2)] == [sequences[:1], sequences[1:]]


def test_a_batch_has_no_expired_sequences() -> None:
    queue, sequences = queued([Call(10), *[Call(10, deadline=99.0)] * 3, *[Call(11)] * 3])
    batch, taken = taken_from(queue, BatchPolicy(1000, 3, 1.0))
    assert batch == [sequences[0], *sequences[4:6]]
    assert taken.expired == sequences[1:4]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((0, 1, 0.1), "max_batch_tokens"), ((1, -2, 0.1), "max_batch_sequences"), ((1, 1, 1.5), "max_padding_fraction")],
)
def test_an_impossible_policy_is_refused(arguments: tuple[int, int, float], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        BatchPolicy(*arguments)


# The batching decision


def exceeded_bound(batch: list[int], policy: BatchPolicy) -> ClosedBy | None:
    padded = max(batch) * len(batch)
    if len(batch) > policy.max_batch_sequences:
        return ClosedBy.SEQUENCES
    if padded > policy.max_batch_tokens:
        return ClosedBy.TOKENS
    return ClosedBy.PADDING if padded - sum(batch) > policy.max_padding_fraction * padded else None


def reference_plan(lengths: Sequence[int], policy: BatchPolicy) -> Plan:
    """Plan a batch, in a simple way that follows the rules in the docstring of `batching`.

    `plan_batch` must return the same plan. The lengths are in the order of arrival.
    """
    batch, left = [lengths[0]], sorted(lengths[1:])
    while left:
        longest, count = max(batch), len(batch)
        shorter = [it for it in left if it <= longest][-1:]
        longer = [it for it in left if it > longest][:1]
        if longer and (not shorter or (longer[0] - longest) * count < longest - shorter[0]):
            tried = longer + shorter
        else:
            tried = shorter
        bounds = [exceeded_bound([*batch, it], policy) for it in tried]
        if all(bounds):
            assert bounds[-1] is not None
            return Plan(dict(Counter(batch)), bounds[-1])
        batch.append(tried[bounds.index(None)])
        left.remove(batch[-1])
    return Plan(dict(Counter(batch)), ClosedBy.QUEUE_EMPTY)


@given(st.lists(st.one_of(st.integers(1, 12), st.integers(1, 300)), min_size=1, max_size=60), POLICIES)
@example([10, 200, 11, 9], BatchPolicy(1000, 64, 0.2))
@example([900, 900], BatchPolicy(512, 64, 1.0))
@example([38, 38, 40, 30], BatchPolicy(115, 64, 1.0))  # after 38 and 38, the batch has room for 30, but not for 40
@example([10] * 4, BatchPolicy(512, 2, 1.0))
@example([10] * 4, BatchPolicy(30, 64, 1.0))  # a batch may fill its budget exactly
def test_the_plan_equals_the_reference(lengths: list[int], policy: BatchPolicy) -> None:
    waiting = Counter(lengths)
    plan = plan_batch(lengths[0], sorted(waiting), waiting, policy)
    assert plan == reference_plan(lengths, policy)
    assert next(iter(plan.counts)) == lengths[0]
    assert waiting == Counter(lengths), "the decision has changed the queue"


class CountedLookups(Mapping[int, int]):
    """A mapping that counts lookups, and raises an error if a caller reads its length or all its keys."""

    def __init__(self, items: Mapping[int, int]) -> None:
        self._items = items
        self.lookups = 0

    def __getitem__(self, key: int) -> int:
        self.lookups += 1
        return self._items[key]

    def __len__(self) -> int:
        raise AssertionError("the whole queue is read")

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole queue is read")


def test_the_cost_of_a_decision_does_not_depend_on_the_queue() -> None:
    """A queue with 257 sequences and a queue with 65,536 sequences need the same number of lookups.

    Each sequence has one token, and the batch has 256 sequences.
    """
    lookups = []
    for waiting in (257, 65_536):
        counted = CountedLookups({1: waiting})
        assert plan_batch(1, [1], counted, BatchPolicy(512, 256, 0.25)) == Plan({1: 256}, ClosedBy.SEQUENCES)
        lookups.append(counted.lookups)
    assert lookups[1] == lookups[0] <= 4 * 256


class QueuedCall(NamedTuple):
    """A call in the queue, and its waiting sequences."""

    ticket: Ticket
    waiting: list[TokenSequence]


class QueueMachine(RuleBasedStateMachine):
    """A random test of the queue: calls arrive, end, expire and run in any order.

    After each step, the queue's counts must match its waiting sequences.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = PendingQueue()
        self.calls: list[QueuedCall] = []
        self.now = 0.0

    def remove(self, sequences: Sequence[TokenSequence]) -> None:
        for call in self.calls:
            call.waiting[:] = [it for it in call.waiting if it not in sequences]

    @rule(
        length=st.integers(1, 20),
        count=st.integers(1, 8),
        extra_cost=st.integers(0, 30),
        seconds=st.sampled_from([math.inf, math.inf, 1.0, 2.0]),
        caller=st.sampled_from(CALLERS),
        priority=st.sampled_from(Priority),
    )
    def add(self, length: int, count: int, extra_cost: int, seconds: float, caller: Caller, priority: Priority) -> None:
        """Add a call whose sequences all have the same length.

        After the call's end, the queue may drop any of these sequences. So a test knows only how many sequences wait.
        """
        deadline = self.now + seconds
        lengths = [length] * count
        ticket = ticket_of(lengths, deadline=deadline, extra_cost=extra_cost, caller=caller, priority=priority)
        self.queue.add(ticket)
        self.calls.append(QueuedCall(ticket, list(ticket.sequences)))

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.calls:
            call = data.draw(st.sampled_from(self.calls))
            call.ticket.done.cancel()
            self.queue.withdraw(call.ticket)
            call.waiting.clear()

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a call, but leave its sequences in the queue."""
        if self.calls:
            data.draw(st.sampled_from(self.calls)).ticket.done.cancel()

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(policy=POLICIES)
    def take(self, policy: BatchPolicy) -> None:
        waiting = {it for call in self.calls for it in call.waiting}
        taken = self.queue.take(policy, self.now)
        ran = taken.batch.sequences if taken.batch is not None else []
        assert {*ran, *taken.expired} <= waiting
        assert all(not it.ticket.done.done() and it.deadline > self.now for it in ran)
        assert ran or not self.queue.sequences
        self.remove([*ran, *taken.expired])
        for call in self.calls:  # the queue may have dropped sequences of an ended call
            if call.ticket.done.done():
                assert call.ticket.queued <= len(call.waiting)
                del call.waiting[call.ticket.queued :]

    @rule()
    def take_all(self) -> None:
        left = Counter(it.ticket for it in self.queue.take_all())
        assert left == Counter(call.ticket for call in self.calls for _ in call.waiting)
        self.remove([it for call in self.calls for it in call.waiting])

    @invariant()
    def figures_are_those_of_the_waiting_sequences(self) -> None:
        waiting = [call for call in self.calls if call.waiting]
        assert self.queue.sequences == sum(len(call.waiting) for call in waiting)
        assert self.queue.requests == len(waiting)
        assert all(call.ticket.queued == len(call.waiting) for call in self.calls)
        for priority in Priority:
            calls = [call for call in waiting if call.ticket.priority is priority]
            cost = sum(sum(it.cost for it in call.waiting) for call in calls)
            assert self.queue.cost_of(priority) == cost
        assert self.queue.cost == sum(map(self.queue.cost_of, Priority))


TestQueue = QueueMachine.TestCase
