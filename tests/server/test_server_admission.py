"""The queue's door: its bound, when it opens again, and that a long call's chances are nearly those of a short one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from encserve_server.admission import Admission

LIMIT = 800
# What happens at the door: a call of so many tokens comes, or (negative) so many leave the queue.
events = st.lists(st.integers(1, LIMIT) | st.integers(-LIMIT, -1), max_size=60)


@given(events=events, limit=st.integers(1, LIMIT))
def test_the_bound_holds_and_nobody_is_turned_away_without_a_reason(events: list[int], limit: int) -> None:
    admission, queued, shut = Admission(limit), 0, False
    for event in events:
        if event < 0:
            queued = max(queued + event, 0)
        elif event <= limit:
            excess = admission.excess(event, queued)
            if excess:
                # Either it does not fit, or the door has been shut since one did not.
                assert queued + event > limit or (shut and queued > limit - limit // 8)
                # So much less, and it is taken.
                assert 0 < excess <= queued
                assert Admission(limit).excess(event, queued - excess) == 0
            else:
                queued += event
                assert queued <= limit
            shut = excess > 0
            assert admission.reopens_at_tokens == (limit - limit // 8 if shut else None)


@given(tokens=st.integers(1, LIMIT))
def test_an_empty_queue_takes_whatever_it_can_hold(tokens: int) -> None:
    admission = Admission(LIMIT)
    assert admission.excess(LIMIT, LIMIT) == LIMIT
    assert admission.excess(tokens, 0) == 0


def test_one_call_that_is_too_large_shuts_nobody_out_of_a_queue_with_room() -> None:
    admission = Admission(LIMIT)
    assert admission.excess(500, 400) == 100
    assert admission.excess(10, 400) == 0


def test_a_long_call_is_hardly_less_likely_to_be_taken_than_a_short_one() -> None:
    """Three times as many tokens come as leave, for long; lengths as of real texts, roughly."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.3, 0.9, 60_000), 4, 256).astype(int)
    leaving = lengths.mean() / 3  # tokens, for each call that comes
    limit = 8192
    admission, queued = Admission(limit), 0.0
    taken = np.zeros(len(lengths), bool)
    for i, length in enumerate(lengths):
        queued = max(queued - leaving, 0.0)
        taken[i] = not admission.excess(int(length), int(queued))
        if taken[i]:
            queued += length
    settled = np.arange(len(lengths)) > 5000
    short, long = settled & (lengths < 32), settled & (lengths >= 200)
    assert 0.25 < taken[short].mean() < 0.42
    assert taken[long].mean() > 0.75 * taken[short].mean()
    assert lengths[settled & taken].sum() / lengths[settled].sum() > 0.32  # nothing that could be computed is refused
