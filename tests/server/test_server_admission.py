"""The queue's door: its bound, when it opens again, and that a long call's chances are nearly those of a short one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_server.scheduling.admission import Admission

LIMIT = 800
# What happens at the door: a call of so many tokens comes, or (negative) so many leave the queue.
events = st.lists(st.integers(1, LIMIT) | st.integers(-LIMIT, -1), max_size=60)


@given(events=events, limit=st.integers(1, LIMIT))
def test_the_bound_holds_and_nobody_is_turned_away_without_a_reason(events: list[int], limit: int) -> None:
    admission, queued = Admission(limit), 0
    for event in events:
        if event < 0:
            queued = max(queued + event, 0)
        elif event <= limit:
            shut = admission.reopens_at_tokens is not None
            excess = admission.excess(event, queued)
            if excess:
                # Either it does not fit, or the door has been shut since one did not.
                assert queued + event > limit or (shut and queued > limit - limit // 4)
                assert 0 < excess <= queued
                assert admission.reopens_at_tokens == limit - limit // 4
            else:
                queued += event
                assert queued <= limit
                assert admission.reopens_at_tokens is None


@given(
    limit=st.integers(1, LIMIT), part=st.floats(0, 1), filled=st.floats(0, 1), others=st.lists(st.integers(1, LIMIT))
)
def test_who_comes_back_when_so_much_has_left_is_taken(
    limit: int, part: float, filled: float, others: list[int]
) -> None:
    """It is what callers are told when to try again by; those who are refused meanwhile do not count."""
    admission, queued, tokens = Admission(limit), round(limit * filled), max(round(limit * part), 1)
    excess = admission.excess(tokens, queued)
    for other in others:
        if excess and queued + other > limit:
            assert admission.excess(other, queued) > 0
    if excess:
        assert admission.excess(tokens, queued - excess + 1) == 1
        assert admission.excess(tokens, queued - excess) == 0


@given(events=events, limit=st.integers(1, LIMIT))
def test_shut_to_all_is_shut_to_each(events: list[int], limit: int) -> None:
    """Just while a door that has turned somebody away would turn away the shortest call too; asking changes nothing."""
    admission, queued = Admission(limit), 0
    for event in events:
        if event < 0:
            queued = max(queued + event, 0)
            continue
        reopens_at = admission.reopens_at_tokens
        shut_to_all = admission.shut_to_all(queued)
        assert shut_to_all == (reopens_at is not None and queued > reopens_at)
        assert admission.reopens_at_tokens == reopens_at
        excess = admission.excess(min(event, limit), queued)
        assert excess or not shut_to_all
        queued += 0 if excess else min(event, limit)


@given(tokens=st.integers(1, LIMIT))
def test_an_empty_queue_takes_whatever_it_can_hold(tokens: int) -> None:
    admission = Admission(LIMIT)
    assert admission.excess(LIMIT, LIMIT) == LIMIT
    assert admission.excess(tokens, 0) == 0


def test_one_call_that_is_too_large_shuts_nobody_out_of_a_queue_with_room() -> None:
    admission = Admission(LIMIT)
    assert admission.excess(500, 400) == 100
    assert admission.excess(10, 400) == 0


def overload(lengths: np.ndarray, limit: int, batch: int) -> np.ndarray:
    """Which of the calls are taken while three times as many tokens come as leave, a batch at a time."""
    leaving = lengths.mean() / 3  # tokens, for each call that comes
    admission, queued, ready = Admission(limit), 0, 0.0
    taken = np.zeros(len(lengths), bool)
    for i, length in enumerate(lengths):
        ready += leaving
        if ready >= batch:
            queued, ready = max(queued - batch, 0), ready - batch
        taken[i] = not admission.excess(int(length), queued)
        if taken[i]:
            queued += int(length)
    return taken


def test_a_long_text_is_hardly_less_likely_to_be_taken_than_a_short_one() -> None:
    """Lengths as of real texts, roughly."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.3, 0.9, 60_000), 4, 256).astype(int)
    taken = overload(lengths, limit=8192, batch=256)
    settled = np.arange(len(lengths)) > 5000
    short, long = settled & (lengths < 32), settled & (lengths >= 200)
    assert 0.25 < taken[short].mean() < 0.42
    assert taken[long].mean() > 0.75 * taken[short].mean()
    assert lengths[settled & taken].sum() / lengths[settled].sum() > 0.32  # nothing that could be computed is refused


@pytest.mark.parametrize(("tokens", "chance"), [(1000, 0.85), (4000, 0.6), (8000, 0.35), (11_000, 0.2)])
def test_a_call_of_many_sequences_gets_its_turn_too(tokens: int, chance: float) -> None:
    """A few among short ones; 11,000 tokens are 256 usual texts. Chances are told beside a short call's."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 90, 300_000)
    many = rng.random(len(lengths)) < 0.002
    lengths[many] = tokens
    taken = overload(lengths, limit=65_536, batch=512)
    settled = np.arange(len(lengths)) > 10_000
    assert taken[settled & many].mean() > chance * taken[settled & ~many].mean()


@given(tokens=st.integers(1, LIMIT), queued=st.integers(0, LIMIT))
def test_bulk_leaves_a_quarter_free_unless_it_is_larger_than_the_rest(tokens: int, queued: int) -> None:
    door = Admission(LIMIT)
    excess = door.bulk_excess(tokens, queued)
    assert door.reopens_at_tokens is None, "bulk has shut the door"
    assert excess == 0 or door.bulk_excess(tokens, max(queued - excess, 0)) == 0
    if excess == 0:
        assert queued + tokens <= (LIMIT if tokens > LIMIT * 3 // 4 else LIMIT * 3 // 4)
