"""Tests of fair shares of the queue, for sequences of any lengths.

Callers share the queue by weight, and interactive and bulk calls take turns.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tickets import ticket_of

from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.scheduling.fairness import BULK_TURN
from encserve_server.scheduling.queue import MOST_AHEAD_TOKENS, SLACK_TOKENS, PendingQueue
from encserve_server.types.callers import Caller, Priority
from encserve_server.types.sequences import TokenSequence

BUDGET = 64
POLICY = BatchPolicy(BUDGET, 32, 0.25)
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


def take(queue: PendingQueue, policy: BatchPolicy = POLICY) -> list[TokenSequence]:
    """Return the sequences of the next batch."""
    batch = queue.take(policy, 0.0).batch
    assert batch is not None
    return batch.sequences


class Flood:
    """Callers that always have enough waiting sequences in a queue for several batches."""

    def __init__(self, lengths_of: Mapping[Caller, Sequence[int]]) -> None:
        self.queue = PendingQueue()
        self.waiting: Counter[str] = Counter()  # waiting tokens of each caller
        self._count = 0
        self.change(lengths_of)

    def change(self, lengths_of: Mapping[Caller, Sequence[int]]) -> None:
        """Replace the callers, and the lengths of their next sequences."""
        self._lengths_of = lengths_of
        self._refill()

    def run(self, batches: int) -> Counter[str]:
        """Run batches, and return the number of tokens that ran for each caller."""
        served: Counter[str] = Counter()
        for _ in range(batches):
            for it in take(self.queue):
                self.waiting[it.ticket.caller.name] -= it.cost
                served[it.ticket.caller.name] += it.cost
            self._refill()
        return served

    def _refill(self) -> None:
        for caller, lengths in self._lengths_of.items():
            while self.waiting[caller.name] < 6 * BUDGET:
                length = lengths[self._count % len(lengths)]
                self.queue.add(ticket_of([length], caller=caller))
                self.waiting[caller.name] += length
                self._count += 1


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5), LENGTHS)
@settings(max_examples=8)
def test_callers_are_served_in_proportion_to_their_weights(weights: list[float], lengths: list[int]) -> None:
    callers = {Caller(f"{i}", weight): lengths for i, weight in enumerate(weights)}
    flood = Flood(callers)
    flood.run(100)
    served = flood.run(200)
    for caller in callers:
        share = served.total() * caller.weight / sum(weights)
        assert served[caller.name] == pytest.approx(share, rel=0.1, abs=2 * BUDGET)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), LENGTHS)
def test_a_small_call_runs_within_two_batches_during_a_flood(few: list[int], many: list[int]) -> None:
    queue, small, large = PendingQueue(), Caller("small"), Caller("large")
    for round_ in range(20):
        while queue.cost < 8 * BUDGET:
            queue.add(ticket_of([many[round_ % len(many)]] * 64, caller=large))
        call = ticket_of([few[round_ % len(few)]], caller=small)
        queue.add(call)
        assert call.sequences[0] in take(queue) + take(queue)


@given(st.integers(0, 2**32))
@settings(max_examples=2)
def test_short_calls_rarely_wait_for_a_flood_of_many_lengths(seed: int) -> None:
    """If one caller fills the queue, a short call of another caller rarely waits.

    A batch has sequences of similar lengths, so most sequences do not run in order of arrival. But a caller far below
    its share must run first.
    """
    random, policy = Random(seed), BatchPolicy(2048, 256, 0.25)
    queue, flood, search = PendingQueue(), Caller("flood"), Caller("search")
    sent: dict[TokenSequence, int] = {}
    waits: list[int] = []  # for how many batches each call of `search` waited

    def length() -> int:
        return min(int(random.lognormvariate(3.3, 0.8)) + 1, 256)

    for batch in range(200):
        while queue.cost < 16 * policy.max_batch_tokens:
            queue.add(ticket_of([length() for _ in range(64)], caller=flood))
        if batch % 3 == 0:
            call = ticket_of([length()], caller=search)
            queue.add(call)
            sent[call.sequences[0]] = batch
        waits += [batch - sent.pop(it) for it in take(queue, policy) if it in sent]
    assert len(sent) <= 1
    assert np.mean(waits) < 0.2


@given(st.sampled_from([0.5, 1.0, 4.0]), st.integers(1, 5))
@settings(max_examples=10)
def test_a_withdrawn_call_is_not_charged(weight: float, withdrawn: int) -> None:
    withdraws, other = Caller("withdraws", weight), Caller("other")
    flood = Flood({withdraws: [20], other: [20]})
    flood.run(100)
    served: Counter[str] = Counter()
    for _ in range(100):
        for _ in range(withdrawn):
            call = ticket_of([50], caller=withdraws)
            flood.queue.add(call)
            flood.queue.withdraw(call)
        served += flood.run(1)
    assert served["withdraws"] == pytest.approx(served["other"] * weight, rel=0.1, abs=2 * BUDGET)


def test_a_callers_time_alone_or_away_changes_no_share() -> None:
    first, second = Caller("first"), Caller("second")
    flood = Flood({first: [50]})
    for _ in range(2):
        flood.change({first: [50]})
        flood.run(500)
        flood.change({first: [50], second: [50]})
        served = flood.run(200)
        assert served["second"] == pytest.approx(served["first"], abs=2 * BUDGET + SLACK_TOKENS)


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), LENGTHS), min_size=1, max_size=4),
    LENGTHS,
    st.integers(1, 50),
    st.integers(1, 40),
)
@settings(max_examples=12)
def test_the_longest_wait_is_bounded(
    others: list[tuple[float, list[int]]], own: list[int], odd: int, before: int
) -> None:
    """While a sequence waits, each other caller gets a limited number of tokens. See the docstring of Scheduler."""
    caller = Caller("own")
    floods = {Caller(f"{i}", weight): lengths for i, (weight, lengths) in enumerate(others)}
    flood = Flood({**floods, caller: own})
    flood.run(30)
    flood.change(floods)
    for _ in range(before):
        flood.queue.add(ticket_of([own[0]], caller=caller))
    call = ticket_of([odd], caller=caller)
    flood.queue.add(call)
    own_cost = flood.waiting[caller.name] + before * own[0]
    served: Counter[str] = Counter()
    while call.queued:
        served += flood.run(1)
        for other in floods:
            assert served[other.name] <= other.weight * (MOST_AHEAD_TOKENS + own_cost) + BUDGET


@given(st.lists(st.tuples(st.sampled_from(Priority), st.integers(1, 50)), min_size=1, max_size=60))
@example([(Priority.BULK, 50)] + [(Priority.INTERACTIVE, 50)] * 12)
def test_interactive_runs_first_and_bulk_gets_one_batch_in_a_turn(sent: list[tuple[Priority, int]]) -> None:
    queue = PendingQueue()
    for priority, length in sent:
        queue.add(ticket_of([length], priority=priority))
    passed_over = 0
    while queue.sequences:
        interactive, bulk = queue.cost_of(Priority.INTERACTIVE), queue.cost_of(Priority.BULK)
        kinds = {it.ticket.priority for it in take(queue)}
        assert len(kinds) == 1, "a batch has interactive and bulk sequences"
        if kinds == {Priority.BULK}:
            assert not interactive or passed_over == BULK_TURN - 1
            passed_over = 0
        else:
            passed_over = passed_over + 1 if bulk else 0
            assert passed_over < BULK_TURN


def test_a_long_call_runs_although_short_calls_of_its_caller_run() -> None:
    """A caller has a long call and short calls. The short calls run in the batches of another caller.

    The short calls count against the caller's share. Nevertheless, the long call must run.
    """
    neighbour, other = Caller("neighbour"), Caller("other")
    flood = Flood({neighbour: [4]})
    long = ticket_of([60], caller=neighbour)
    for batch in range(1000 + (MOST_AHEAD_TOKENS + 7 * BUDGET) // 5):
        if batch == 1000:
            flood.queue.add(long)
        flood.queue.add(ticket_of([5], caller=other))
        flood.run(1)
    assert not long.queued


def test_a_changed_weight_counts_from_the_next_call() -> None:
    queue = PendingQueue()
    queue.add(ticket_of([10], caller=Caller("search", 1.0)))
    queue.add(ticket_of([10], caller=Caller("search", 4.0)))
    assert queue.share_of(Caller("jobs")) == (0, 4.0)
    assert queue.share_of(Caller("search")) == (20, 0.0)
