"""The batching decision, and the queue from which batches are taken, as laws over any queue."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tickets import ticket_of

from encserve_server.scheduling.batching import BatchPolicy, Plan, plan_batch
from encserve_server.scheduling.queue import PendingQueue, Taken, Ticket
from encserve_server.types.callers import Caller, Priority
from encserve_server.types.sequences import ClosedBy, TokenSequence

NOW = 100.0
policies = st.builds(
    BatchPolicy,
    max_batch_tokens=st.integers(1, 2000),
    max_batch_sequences=st.integers(1, 40),
    max_padding_fraction=st.floats(0, 1),
)


class Waiting(NamedTuple):
    """A call of one sequence."""

    length: int
    deadline: float = math.inf
    gone: bool = False
    extra_cost: int = 0


CALLERS = [Caller(), Caller("search", 2.0), Caller("jobs", 0.5)]
calls = st.builds(
    Waiting,
    st.integers(1, 300),
    st.sampled_from([math.inf, 101.0, 100.0, 99.0]),
    st.booleans(),
    st.sampled_from([0, 0, 0, 5, 500]),
)
queues = st.lists(calls, max_size=60)


def queued(calls: Sequence[Waiting]) -> tuple[PendingQueue, list[TokenSequence]]:
    """A queue of these calls, and their sequences in the order of arrival."""
    queue, sequences = PendingQueue(), []
    for call in calls:
        ticket = ticket_of([call.length], deadline=call.deadline, extra_cost=call.extra_cost)
        queue.add(ticket)
        if call.gone:
            ticket.done.cancel()
        sequences += ticket.sequences
    return queue, sequences


def is_live(sequence: TokenSequence) -> bool:
    return not sequence.ticket.done.done() and sequence.deadline > NOW


def taken_from(queue: PendingQueue, policy: BatchPolicy) -> tuple[list[TokenSequence], Taken]:
    """The sequences of the next batch; empty if nothing waits."""
    taken = queue.take(policy, NOW)
    return taken.batch.sequences if taken.batch is not None else [], taken


def take_lengths(policy: BatchPolicy, *lengths: int) -> tuple[list[int], ClosedBy]:
    """The lengths in the first batch of these, and what closed it."""
    batch = queued([Waiting(length) for length in lengths])[0].take(policy, NOW).batch
    assert batch is not None
    return [len(it.input) for it in batch.sequences], batch.closed_by


@given(queues, policies)
def test_every_sequence_is_in_one_place(calls: list[Waiting], policy: BatchPolicy) -> None:
    """Nothing is lost, nothing is run twice, and what stays keeps the order of arrival, as do those of one length."""
    queue, sequences = queued(calls)
    batch, taken = taken_from(queue, policy)
    left = queue.take_all()
    number = {sequence: i for i, sequence in enumerate(sequences)}
    found = [number[it] for it in (*batch, *taken.expired, *left)]
    assert len(set(found)) == len(found)
    assert all(call.gone for i, call in enumerate(calls) if i not in found)
    assert left == sorted(left, key=number.__getitem__)
    for length in {len(it.input) for it in batch}:
        alike = [number[it] for it in batch if len(it.input) == length]
        assert alike == sorted(alike)
        assert all(alike[-1] < number[it] for it in left if len(it.input) == length and is_live(it))


@given(queues, policies)
def test_only_the_live_run(calls: list[Waiting], policy: BatchPolicy) -> None:
    """A sequence that has expired, or whose caller has gone, is never run."""
    queue, sequences = queued(calls)
    ran, expired = [], []
    while len(queue):
        batch, taken = taken_from(queue, policy)
        assert all(it.deadline <= NOW and not it.ticket.done.done() for it in taken.expired)
        assert all(it.started_at == NOW for it in batch)
        ran += batch
        expired += taken.expired
    assert set(ran) == {it for it in sequences if is_live(it)}
    assert set(expired) == {it for it in sequences if it.deadline <= NOW and not it.ticket.done.done()}


@given(queues, policies)
def test_a_batch_keeps_its_bounds(calls: list[Waiting], policy: BatchPolicy) -> None:
    """Only the oldest sequence, alone, may exceed the budget."""
    sequences = taken_from(queued(calls)[0], policy)[0]
    if len(sequences) <= 1:
        return
    batch = [len(it.input) for it in sequences]
    padded = max(batch) * len(batch)
    assert padded <= policy.max_batch_tokens
    assert len(batch) <= policy.max_batch_sequences
    assert padded - sum(batch) <= policy.max_padding_fraction * padded
    assert sum(it.cost - len(it.input) for it in sequences) <= policy.max_batch_tokens


@given(queues, policies)
def test_the_oldest_live_sequence_always_runs(calls: list[Waiting], policy: BatchPolicy) -> None:
    """So a sequence that has k live ones before it runs in the (k + 1)-th batch at the latest."""
    queue, sequences = queued(calls)
    live = [it for it in sequences if is_live(it)]
    batch = taken_from(queue, policy)[0]
    assert (batch[:1] or None) == (live[:1] or None)


@given(queues, policies, st.randoms(use_true_random=False))
def test_no_sequence_starves_whatever_arrives_later(calls: list[Waiting], policy: BatchPolicy, random: Random) -> None:
    """Simulated time: at each batch more sequences arrive; the first queue is served within as many batches."""
    queue, sequences = queued([Waiting(call.length, extra_cost=call.extra_cost) for call in calls])
    for _ in sequences:
        queue.take(policy, NOW)
        for _ in range(3):
            queue.add(ticket_of([random.randint(1, 300)]))
    assert not set(sequences) & set(queue.take_all())


@given(queues, policies)
def test_a_batch_is_a_run_of_neighbours_in_length(calls: list[Waiting], policy: BatchPolicy) -> None:
    """No live sequence that stays is strictly between two that run."""
    queue, _ = queued(calls)
    batch = [len(it.input) for it in taken_from(queue, policy)[0]]
    if batch:
        between = range(min(batch) + 1, max(batch))
        assert not [it for it in queue.take_all() if is_live(it) and len(it.input) in between]


@given(queues, policies)
def test_queue_empty_means_that_nothing_was_left(calls: list[Waiting], policy: BatchPolicy) -> None:
    """The reason given is the true one."""
    queue, _ = queued(calls)
    batch = queue.take(policy, NOW).batch
    if batch is not None:
        assert (batch.closed_by is ClosedBy.QUEUE_EMPTY) == (not len(queue))


def test_neighbours_join_by_length() -> None:
    """The oldest, of 10 tokens, takes those near it and leaves the long one."""
    lengths, closed_by = take_lengths(BatchPolicy(1000, 64, 0.2), 10, 200, 11, 9)
    assert sorted(lengths) == [9, 10, 11]
    assert lengths[0] == 10
    assert closed_by is ClosedBy.PADDING


@pytest.mark.parametrize(
    ("policy", "closed_by", "count"),
    [
        (BatchPolicy(30, 64, 1.0), ClosedBy.TOKENS, 3),
        (BatchPolicy(512, 2, 1.0), ClosedBy.SEQUENCES, 2),
        (BatchPolicy(512, 64, 1.0), ClosedBy.QUEUE_EMPTY, 4),
    ],
)
def test_what_closed_the_batch(policy: BatchPolicy, closed_by: ClosedBy, count: int) -> None:
    lengths, closed = take_lengths(policy, 10, 10, 10, 10)
    assert (len(lengths), closed) == (count, closed_by)


def test_a_sequence_over_the_budget_runs_alone() -> None:
    assert take_lengths(BatchPolicy(512, 64, 1.0), 900, 900) == ([900], ClosedBy.TOKENS)


def test_a_longer_neighbour_that_does_not_fit_does_not_keep_a_shorter_one_out() -> None:
    """40 is nearer to 38 than 30 is, but 3 x 40 is over the budget of 115 and 3 x 38 is not."""
    assert take_lengths(BatchPolicy(115, 64, 1.0), 38, 38, 40, 30)[0] == [38, 38, 30]


def test_nothing_pending_gives_no_batch() -> None:
    assert PendingQueue().take(BatchPolicy(1, 1, 0), NOW) == Taken(None, [])


def test_outputs_that_cost_much_close_a_batch() -> None:
    """Each costs 30 tokens beside its own 10, so a batch of 100 tokens has three, not ten."""
    queue, _ = queued([Waiting(10, extra_cost=30)] * 5)
    batch = queue.take(BatchPolicy(100, 64, 1.0), NOW).batch
    assert batch is not None
    assert (len(batch.sequences), batch.closed_by) == (3, ClosedBy.TOKENS)
    assert (len(queue), queue.cost) == (2, 80)


def test_a_sequence_whose_outputs_cost_more_than_a_batch_runs_alone() -> None:
    queue, sequences = queued([Waiting(10, extra_cost=500), Waiting(10), Waiting(10)])
    policy = BatchPolicy(100, 64, 1.0)
    assert [taken_from(queue, policy)[0] for _ in range(2)] == [sequences[:1], sequences[1:]]


def test_what_has_expired_makes_room_for_others_of_the_batch() -> None:
    """A batch has as many as it may, however many of those that were planned have expired."""
    queue, sequences = queued([Waiting(10), *[Waiting(10, deadline=99.0)] * 3, *[Waiting(11)] * 3])
    batch, taken = taken_from(queue, BatchPolicy(1000, 3, 1.0))
    assert batch == [sequences[0], *sequences[4:6]]
    assert taken.expired == sequences[1:4]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1, 0.1), "max_batch_tokens must be >= 1; was 0"),
        ((1, -2, 0.1), "max_batch_sequences must be >= 1; was -2"),
        ((1, 1, 1.5), "max_padding_fraction must be from 0 to 1; was 1.5"),
    ],
)
def test_a_policy_that_no_batch_could_meet_is_refused(arguments: tuple[int, int, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BatchPolicy(*arguments)


def reason_to_stop(batch: list[int], policy: BatchPolicy) -> ClosedBy | None:
    """The bound that these lengths would break."""
    padded = max(batch) * len(batch)
    if len(batch) > policy.max_batch_sequences:
        return ClosedBy.SEQUENCES
    if padded > policy.max_batch_tokens:
        return ClosedBy.TOKENS
    return ClosedBy.PADDING if padded - sum(batch) > policy.max_padding_fraction * padded else None


def reference_plan(lengths: Sequence[int], policy: BatchPolicy) -> Plan:
    """The decision as the module states it, over the lengths in the order of arrival."""
    batch, left = [lengths[0]], sorted(lengths[1:])
    while left:
        longest, count = max(batch), len(batch)
        shorter = [it for it in left if it <= longest][-1:]
        longer = [it for it in left if it > longest][:1]
        if longer and (not shorter or (longer[0] - longest) * count < longest - shorter[0]):
            tried = longer + shorter
        else:
            tried = shorter
        refusals = [reason_to_stop([*batch, it], policy) for it in tried]
        if all(refusals):
            assert refusals[-1] is not None
            return Plan(dict(Counter(batch)), refusals[-1])
        batch.append(tried[refusals.index(None)])
        left.remove(batch[-1])
    return Plan(dict(Counter(batch)), ClosedBy.QUEUE_EMPTY)


# Few lengths that are many, and many lengths that are few.
mixes = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 300)), min_size=1, max_size=60)


@given(mixes, policies)
def test_the_decision_is_the_one_that_is_stated(lengths: list[int], policy: BatchPolicy) -> None:
    waiting = Counter(lengths)
    plan = plan_batch(lengths[0], sorted(waiting), waiting, policy)
    assert plan == reference_plan(lengths, policy)
    assert next(iter(plan.counts)) == lengths[0]
    assert waiting == Counter(lengths), "the decision has changed the queue"


class CountedLookups(Mapping[int, int]):
    """A mapping that counts how often something is looked up; it must not be gone through."""

    def __init__(self, items: Mapping[int, int]) -> None:
        self._items = items
        self.lookups = 0

    def __getitem__(self, key: int) -> int:
        self.lookups += 1
        return self._items[key]

    def __len__(self) -> int:
        raise AssertionError("the whole queue is looked at")

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole queue is looked at")


def test_a_decision_costs_no_more_in_a_long_queue() -> None:
    """65,536 one-token sequences, beside as many as fill one batch."""
    policy = BatchPolicy(512, 256, 0.25)
    lookups = []
    for waiting in (257, 65_536):
        counted = CountedLookups({1: waiting})
        assert plan_batch(1, [1], counted, policy) == Plan({1: 256}, ClosedBy.SEQUENCES)
        lookups.append(counted.lookups)
    assert lookups[1] == lookups[0] <= 4 * 256


class Model(NamedTuple):
    """A call in the queue, and which of its sequences wait."""

    ticket: Ticket
    waiting: list[TokenSequence]


class QueueMachine(RuleBasedStateMachine):
    """Calls come, go, expire and run in any order: what is counted is always what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PendingQueue()
        self.calls: list[Model] = []
        self.now = 0.0

    def left(self, sequences: Sequence[TokenSequence]) -> None:
        for call in self.calls:
            call.waiting[:] = [it for it in call.waiting if it not in sequences]

    @rule(
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
        extra_cost=st.integers(0, 30),
        seconds=st.sampled_from([math.inf, math.inf, 1.0, 2.0]),
        caller=st.sampled_from(CALLERS),
        priority=st.sampled_from(Priority),
    )
    def add(self, lengths: list[int], extra_cost: int, seconds: float, caller: Caller, priority: Priority) -> None:
        deadline = self.now + seconds
        ticket = ticket_of(lengths, deadline=deadline, extra_cost=extra_cost, caller=caller, priority=priority)
        self.queue.add(ticket)
        self.calls.append(Model(ticket, list(ticket.sequences)))

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.calls:
            call = data.draw(st.sampled_from(self.calls))
            call.ticket.done.cancel()
            self.queue.withdraw(call.ticket)
            call.waiting.clear()

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """The call has ended, and the event loop has not come to withdraw it."""
        if self.calls:
            data.draw(st.sampled_from(self.calls)).ticket.done.cancel()

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(policy=policies)
    def take(self, policy: BatchPolicy) -> None:
        waiting = [it for call in self.calls for it in call.waiting]
        taken = self.queue.take(policy, self.now)
        ran = taken.batch.sequences if taken.batch is not None else []
        assert set(ran) | set(taken.expired) <= set(waiting)
        assert all(not it.ticket.done.done() and it.deadline > self.now for it in ran)
        assert ran or not len(self.queue)
        still = {it for line in self.queue._lines.values() for flow in line.flows.values() for it in flow.arrivals}
        self.left([it for it in waiting if it not in still])
        dropped = set(waiting) - still - set(ran) - set(taken.expired)
        assert all(it.ticket.done.done() for it in dropped)

    @rule()
    def take_all(self) -> None:
        waiting = [it for call in self.calls for it in call.waiting]
        assert sorted(map(id, self.queue.take_all())) == sorted(map(id, waiting))
        self.left(waiting)

    @invariant()
    def what_is_counted_waits(self) -> None:
        waiting = [it for call in self.calls for it in call.waiting]
        assert len(self.queue) == len(waiting)
        assert self.queue.cost == sum(it.cost for it in waiting)
        assert self.queue.requests == sum(bool(call.waiting) for call in self.calls)
        assert all(call.ticket.queued == len(call.waiting) for call in self.calls)

    @invariant()
    def nothing_is_kept_of_what_has_left(self) -> None:
        for priority, line in self.queue._lines.items():
            calls = [it for it in self.calls if it.ticket.priority is priority]
            lengths = sorted({len(it.input) for call in calls for it in call.waiting})
            assert line.lengths == lengths
            assert sorted(line.buckets) == sorted(line.waiting) == lengths
            assert line.cost == self.queue.cost_of(priority) == sum(flow.cost for flow in line.active)
            for name, flow in line.flows.items():
                waiting = [it for call in calls if call.ticket.caller.name == name for it in call.waiting]
                assert list(flow.arrivals) == waiting
                assert (flow in line.active) == bool(waiting)
                assert not waiting or flow.next_turn >= line.clock


TestQueue = QueueMachine.TestCase
