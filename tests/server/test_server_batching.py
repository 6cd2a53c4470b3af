"""The batching decision, as laws over any queue."""

import math
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_server.scheduling.batching import BatchPolicy, Taken, take_batch
from encserve_server.types import ClosedBy


@dataclass(eq=False)
class Waiting:
    """A pending entry for tests; `number` is its place of arrival."""

    number: int
    length: int
    deadline: float = math.inf
    gone: bool = False


NOW = 100.0
policies = st.builds(
    BatchPolicy,
    max_batch_tokens=st.integers(1, 2000),
    max_batch_sequences=st.integers(1, 40),
    max_padding_fraction=st.floats(0, 1),
)
queues = st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from([math.inf, 101.0, 100.0, 99.0]), st.booleans()), max_size=60
).map(lambda items: [Waiting(i, *item) for i, item in enumerate(items)])


def waiting(*lengths: int) -> list[Waiting]:
    return [Waiting(i, length) for i, length in enumerate(lengths)]


def lengths(taken: Taken[Waiting]) -> list[int]:
    return [entry.length for entry in taken.batch]


@given(queues, policies)
def test_every_entry_ends_in_exactly_one_list(queue: list[Waiting], policy: BatchPolicy) -> None:
    """Nothing is lost, nothing is run twice, and each list keeps the order of arrival."""
    taken = take_batch(queue, policy, NOW)
    everything = [*taken.batch, *taken.expired, *taken.gone, *taken.left]
    assert sorted(entry.number for entry in everything) == list(range(len(queue)))
    for group in (taken.batch, taken.expired, taken.gone, taken.left):
        assert [entry.number for entry in group] == sorted(entry.number for entry in group)


@given(queues, policies)
def test_only_the_living_run_or_stay(queue: list[Waiting], policy: BatchPolicy) -> None:
    """Whoever has gone or expired is neither run nor kept."""
    taken = take_batch(queue, policy, NOW)
    assert all(not entry.gone and entry.deadline > NOW for entry in (*taken.batch, *taken.left))
    assert all(entry.gone for entry in taken.gone)
    assert all(entry.deadline <= NOW and not entry.gone for entry in taken.expired)


@given(queues, policies)
def test_a_batch_keeps_its_bounds(queue: list[Waiting], policy: BatchPolicy) -> None:
    """Only the oldest entry, alone, may exceed the budget."""
    batch = lengths(take_batch(queue, policy, NOW))
    if len(batch) <= 1:
        return
    padded = max(batch) * len(batch)
    assert padded <= policy.max_batch_tokens
    assert len(batch) <= policy.max_batch_sequences
    assert padded - sum(batch) <= policy.max_padding_fraction * padded


@given(queues, policies)
def test_the_oldest_living_entry_always_runs(queue: list[Waiting], policy: BatchPolicy) -> None:
    """So whoever has k living entries before it runs in the (k + 1)-th batch at the latest."""
    living = [entry for entry in queue if not entry.gone and entry.deadline > NOW]
    taken = take_batch(queue, policy, NOW)
    assert (taken.batch[:1] or None) == (living[:1] or None)


@given(queues, policies, st.randoms(use_true_random=False))
def test_no_entry_starves_whatever_arrives_later(queue: list[Waiting], policy: BatchPolicy, random: Random) -> None:
    """Simulated time: at each batch more entries arrive; the first queue is served within as many batches."""
    pending = [Waiting(i, entry.length) for i, entry in enumerate(queue)]
    for _ in range(len(pending)):
        taken = take_batch(pending, policy, NOW)
        newcomers = [Waiting(-1, random.randint(1, 300)) for _ in range(3)]
        pending = [*taken.left, *newcomers]
    assert not [entry for entry in pending if entry.number >= 0]


@given(queues, policies)
def test_a_batch_is_a_run_of_neighbours_in_length(queue: list[Waiting], policy: BatchPolicy) -> None:
    """Nobody who stays is strictly between two that run."""
    taken = take_batch(queue, policy, NOW)
    if taken.batch:
        low, high = min(lengths(taken)), max(lengths(taken))
        assert not [entry for entry in taken.left if low < entry.length < high]


@given(queues, policies)
def test_drained_means_that_nothing_was_left(queue: list[Waiting], policy: BatchPolicy) -> None:
    """The reason given is the true one."""
    taken = take_batch(queue, policy, NOW)
    assert (taken.closed_by is ClosedBy.DRAINED) == (not taken.left)


def test_neighbours_join_by_length() -> None:
    """The oldest, of 10 tokens, takes those near it and leaves the long one."""
    taken = take_batch(waiting(10, 200, 11, 9), BatchPolicy(1000, 64, 0.2), NOW)
    assert lengths(taken) == [10, 11, 9]
    assert taken.closed_by is ClosedBy.PADDING


@pytest.mark.parametrize(
    ("policy", "closed_by", "count"),
    [
        (BatchPolicy(30, 64, 1.0), ClosedBy.TOKENS, 3),
        (BatchPolicy(512, 2, 1.0), ClosedBy.SEQUENCES, 2),
        (BatchPolicy(512, 64, 1.0), ClosedBy.DRAINED, 4),
    ],
)
def test_what_closed_the_batch(policy: BatchPolicy, closed_by: ClosedBy, count: int) -> None:
    taken = take_batch(waiting(10, 10, 10, 10), policy, NOW)
    assert (len(taken.batch), taken.closed_by) == (count, closed_by)


def test_a_sequence_over_the_budget_runs_alone() -> None:
    taken = take_batch(waiting(900, 900), BatchPolicy(512, 64, 1.0), NOW)
    assert lengths(taken) == [900]


def test_a_longer_neighbour_that_does_not_fit_does_not_keep_a_shorter_one_out() -> None:
    """40 is nearer to 38 than 30 is, but 3 x 40 is over the budget of 115 and 3 x 38 is not."""
    taken = take_batch(waiting(38, 38, 40, 30), BatchPolicy(115, 64, 1.0), NOW)
    assert lengths(taken) == [38, 38, 30]


def test_nothing_pending_gives_an_empty_batch() -> None:
    assert take_batch([], BatchPolicy(1, 1, 0), NOW).batch == []


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
