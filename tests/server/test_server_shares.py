"""Fair shares: who is served when several callers, or calls of two priorities, wait; laws over any queue."""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tickets import ticket_of

from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.scheduling.queue import BULK_TURN, MOST_AHEAD_TOKENS, SLACK_TOKENS, PendingQueue
from encserve_server.types.callers import Caller, Priority
from encserve_server.types.sequences import TokenSequence

BUDGET = 64
POLICY = BatchPolicy(BUDGET, 32, 0.25)
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


class Flood:
    """Callers that each always have several batches waiting."""

    def __init__(self, lengths_of: Mapping[Caller, Sequence[int]]) -> None:
        self.queue = PendingQueue()
        self.served: Counter[str] = Counter()
        self.batches: list[list[TokenSequence]] = []
        self._lengths_of = lengths_of
        self._waiting: Counter[str] = Counter()
        self._count = 0
        self._refill()

    def run(self, batches: int, policy: BatchPolicy = POLICY) -> None:
        for _ in range(batches):
            taken = self.queue.take(policy, 0.0).batch
            assert taken is not None
            self.batches.append(taken.sequences)
            for it in taken.sequences:
                name = it.ticket.caller.name
                self._waiting[name] -= it.cost
                self.served[name] += it.cost
            self._refill()

    def _refill(self) -> None:
        for caller, lengths in self._lengths_of.items():
            while self._waiting[caller.name] < 6 * BUDGET:
                length = lengths[self._count % len(lengths)]
                self.queue.add(ticket_of([length], caller=caller))
                self._waiting[caller.name] += length
                self._count += 1


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5), LENGTHS)
@settings(max_examples=50)
def test_callers_that_flood_are_served_as_their_weights(weights: list[float], lengths: list[int]) -> None:
    callers = {Caller(f"{i}", weight): lengths for i, weight in enumerate(weights)}
    flood = Flood(callers)
    flood.run(100)
    flood.served.clear()
    flood.run(200)
    total, served = sum(weights), sum(flood.served.values())
    for caller in callers:
        assert flood.served[caller.name] == pytest.approx(served * caller.weight / total, rel=0.1, abs=2 * BUDGET)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), LENGTHS)
def test_no_caller_of_its_weight_waits_for_another_that_sends_more(few: list[int], many: list[int]) -> None:
    """One sends a sequence at a time, of less than a batch, the other 64: it runs in one of the next two batches."""
    queue, small, large = PendingQueue(), Caller("small"), Caller("large")
    for round_ in range(40):
        while queue.cost < 8 * BUDGET:
            queue.add(ticket_of([many[round_ % len(many)]] * 64, caller=large))
        call = ticket_of([few[round_ % len(few)]], caller=small)
        queue.add(call)
        batches = [queue.take(POLICY, 0.0).batch for _ in range(2)]
        assert any(batch is not None and call.sequences[0] in batch.sequences for batch in batches)


@given(st.integers(0, 2**32))
@settings(max_examples=12)
def test_a_few_short_texts_go_first_whatever_lengths_a_flood_has(seed: int) -> None:
    """Most of a flood runs out of order, as neighbours in length; a caller far below its share waits for none of it."""
    random, policy = Random(seed), BatchPolicy(2048, 256, 0.25)
    queue, flood, search = PendingQueue(), Caller("flood"), Caller("search")
    calls: dict[TokenSequence, int] = {}
    waits: list[int] = []  # of each call of the search, in batches

    def length() -> int:
        return min(int(random.lognormvariate(3.3, 0.8)) + 1, 256)

    for batch in range(200):
        while queue.cost < 16 * policy.max_batch_tokens:
            queue.add(ticket_of([length() for _ in range(64)], caller=flood))
        if batch % 3 == 0:
            call = ticket_of([length()], caller=search)
            queue.add(call)
            calls[call.sequences[0]] = batch
        taken = queue.take(policy, 0.0).batch
        assert taken is not None
        waits += [batch - calls.pop(it) for it in taken.sequences if it in calls]
    assert len(calls) <= 1
    assert np.mean(waits) < 0.2


@given(st.sampled_from([0.5, 1.0, 4.0]), st.integers(1, 5))
def test_what_was_withdrawn_before_it_ran_is_not_charged(weight: float, withdrawn: int) -> None:
    changes_mind, other = Caller("changes its mind", weight), Caller("other")
    flood = Flood({changes_mind: [20], other: [20]})
    flood.run(100)
    flood.served.clear()
    for _ in range(100):
        for _ in range(withdrawn):
            call = ticket_of([50], caller=changes_mind)
            flood.queue.add(call)
            flood.queue.withdraw(call)
        flood.run(1)
    assert flood.served["changes its mind"] == pytest.approx(flood.served["other"] * weight, rel=0.1, abs=2 * BUDGET)


def test_who_was_alone_owes_nothing_and_who_was_away_has_saved_nothing() -> None:
    first, second = Caller("first"), Caller("second")
    flood = Flood({first: [50]})
    flood.run(1000)
    flood._lengths_of = {first: [50], second: [50]}
    flood.served.clear()
    flood._refill()
    flood.run(200)
    assert flood.served["second"] == pytest.approx(flood.served["first"], abs=2 * BUDGET + SLACK_TOKENS)
    flood._lengths_of = {first: [50]}
    flood.run(1000)
    flood._lengths_of = {first: [50], second: [50]}
    flood.served.clear()
    flood._refill()
    flood.run(200)
    assert flood.served["second"] == pytest.approx(flood.served["first"], abs=2 * BUDGET + SLACK_TOKENS)


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), LENGTHS), min_size=1, max_size=4),
    LENGTHS,
    st.integers(1, 50),
    st.integers(1, 40),
)
def test_the_longest_wait_is_bounded_whatever_others_send(
    others: list[tuple[float, list[int]]], own: list[int], odd: int, before: int
) -> None:
    """The bound of the scheduler's docstring: what others are served before a sequence that has k of its caller's."""
    caller = Caller("own")
    flood = Flood({Caller(f"{i}", weight): lengths for i, (weight, lengths) in enumerate(others)})
    flood._lengths_of = {**flood._lengths_of, caller: own}
    flood._refill()
    flood.run(30)
    del flood._lengths_of[caller]
    for _ in range(before):
        flood.queue.add(ticket_of([own[0]], caller=caller))
    call = ticket_of([odd], caller=caller)
    flood.queue.add(call)
    own_cost = flood._waiting[caller.name] + before * own[0]
    flood.served.clear()
    while not any(it is call.sequences[0] for it in flood.batches[-1]):
        flood.run(1)
        for i, (weight, _) in enumerate(others):
            most = weight * (MOST_AHEAD_TOKENS + own_cost) + BUDGET
            assert flood.served[f"{i}"] <= most


@given(st.lists(st.tuples(st.sampled_from(Priority), st.integers(1, 50)), min_size=1, max_size=60))
def test_interactive_runs_first_and_bulk_has_its_turn(sent: list[tuple[Priority, int]]) -> None:
    queue = PendingQueue()
    for priority, length in sent:
        queue.add(ticket_of([length], priority=priority))
    passed_over = 0
    while len(queue):
        interactive, bulk = queue.cost_of(Priority.INTERACTIVE), queue.cost_of(Priority.BULK)
        taken = queue.take(POLICY, 0.0).batch
        assert taken is not None
        kinds = {it.ticket.priority for it in taken.sequences}
        assert len(kinds) == 1, "a batch of both"
        if kinds == {Priority.BULK}:
            assert not interactive or passed_over == BULK_TURN - 1
            passed_over = 0
        else:
            passed_over = passed_over + 1 if bulk else 0
            assert passed_over < BULK_TURN


def test_an_odd_length_of_a_caller_that_others_take_along_is_not_starved() -> None:
    """Its short ones run as neighbours in every batch of another caller, and are charged; its long one still runs."""
    taken_along, other = Caller("taken along"), Caller("other")
    flood = Flood({taken_along: [4]})
    long = ticket_of([60], caller=taken_along)
    for batch in range(1000 + (MOST_AHEAD_TOKENS + 7 * BUDGET) // 5):
        if batch == 1000:
            flood.queue.add(long)
        flood.queue.add(ticket_of([5], caller=other))
        flood.run(1)
    assert any(long.sequences[0] in batch for batch in flood.batches)


def test_a_weight_that_changes_counts_from_the_next_call() -> None:
    queue = PendingQueue()
    queue.add(ticket_of([10], caller=Caller("search", 1.0)))
    queue.add(ticket_of([10], caller=Caller("search", 4.0)))
    assert queue.share_of(Caller("jobs")) == (0, 4.0)
    assert queue.share_of(Caller("search")) == (20, 0.0)
