"""Tests of the admission of calls to the queue.

They check the queue's limit, when a full queue admits calls again, and how often long calls are admitted.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_server.scheduling.admission import Admission

LIMIT = 800
LIMITS = st.integers(1, LIMIT)
# A positive event is the tokens of a call that arrives. A negative event is the tokens that leave the queue.
EVENTS = st.lists(st.integers(1, LIMIT) | st.integers(-LIMIT, -1), max_size=60)


@given(events=EVENTS, limit=LIMITS)
def test_a_call_is_refused_only_by_a_full_queue(events: list[int], limit: int) -> None:
    admission, queued = Admission(limit), 0
    for event in events:
        if event < 0:
            queued = max(queued + event, 0)
            continue
        tokens = min(event, limit)
        reopens_at = admission.reopens_at_tokens
        closed = admission.is_closed(queued)
        assert closed == (reopens_at is not None and queued > reopens_at)
        assert admission.reopens_at_tokens == reopens_at, "the check of a call changed the result of the next check"
        excess = admission.excess(tokens, queued)
        if excess:
            assert queued + tokens > limit or (reopens_at is not None and queued > limit - limit // 4)
            assert 0 < excess <= queued
            assert admission.reopens_at_tokens == limit - limit // 4
        else:
            assert not closed
            queued += tokens
            assert queued <= limit
            assert admission.reopens_at_tokens is None


@given(limit=LIMITS, part=st.floats(0, 1), filled=st.floats(0, 1), others=st.lists(LIMITS))
def test_a_refused_call_fits_once_the_excess_has_left(
    limit: int, part: float, filled: float, others: list[int]
) -> None:
    """The excess of a refused call is the number of tokens that must leave the queue first. Then the call fits.

    Other refused calls do not change the excess. The server computes the retry delay from the excess.
    """
    admission, queued, tokens = Admission(limit), round(limit * filled), max(round(limit * part), 1)
    excess = admission.excess(tokens, queued)
    if excess:
        for other in others:
            if queued + other > limit:
                assert admission.excess(other, queued) > 0
        assert admission.excess(tokens, queued - excess + 1) == 1
        assert admission.excess(tokens, queued - excess) == 0


def test_one_large_call_does_not_close_a_queue_with_room() -> None:
    admission = Admission(LIMIT)
    assert admission.excess(500, 400) == 100
    assert admission.excess(10, 400) == 0


@given(tokens=LIMITS, queued=st.integers(0, LIMIT))
def test_bulk_leaves_a_quarter_of_the_queue_free(tokens: int, queued: int) -> None:
    admission = Admission(LIMIT)
    excess = admission.bulk_excess(tokens, queued)
    assert admission.reopens_at_tokens is None, "bulk has closed the queue"
    assert excess == 0 or admission.bulk_excess(tokens, max(queued - excess, 0)) == 0
    if excess == 0:
        assert queued + tokens <= (LIMIT if tokens > LIMIT * 3 // 4 else LIMIT * 3 // 4)


def admitted(lengths: np.ndarray, limit: int, batch: int) -> np.ndarray:
    """Return a boolean mask of the calls that an overloaded queue admits.

    For each token that leaves, three tokens arrive. Tokens leave the queue one batch at a time.
    """
    leaving = lengths.mean() / 3  # for each arriving call, so many tokens leave the queue
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


def test_a_long_text_is_admitted_nearly_as_often_as_a_short_text() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.3, 0.9, 60_000), 4, 256).astype(int)  # similar to the lengths of real texts
    taken = admitted(lengths, limit=8192, batch=256)
    settled = np.arange(len(lengths)) > 5000
    short, long = settled & (lengths < 32), settled & (lengths >= 200)
    assert 0.25 < taken[short].mean() < 0.42
    assert taken[long].mean() > 0.75 * taken[short].mean()
    assert lengths[settled & taken].sum() / lengths[settled].sum() > 0.32, "the queue was not filled"


@pytest.mark.parametrize(("tokens", "chance"), [(1000, 0.85), (11_000, 0.2)])
def test_a_call_of_many_sequences_is_admitted_too(tokens: int, chance: float) -> None:
    """The admitted fraction of long calls is more than `chance` times the admitted fraction of short calls.

    One call in 250 is long, with 1,000 or 11,000 tokens. 256 usual texts have about 11,000 tokens.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 90, 120_000)
    many = rng.random(len(lengths)) < 0.004
    lengths[many] = tokens
    taken = admitted(lengths, limit=65_536, batch=512)
    settled = np.arange(len(lengths)) > 10_000
    assert taken[settled & many].mean() > chance * taken[settled & ~many].mean()
