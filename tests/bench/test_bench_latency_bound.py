"""The bound on p99: the least number of late requests is the least, and the bound is where it says."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latency_bound import draw, least_late, least_percentile, main

REQUESTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=7)


def late_at_least(arrivals: list[int], work: list[int], limit: int) -> int:
    """By trying every choice of who is to be on time, and every order of them."""
    for size in range(len(arrivals), 0, -1):
        for chosen in itertools.combinations(range(len(arrivals)), size):
            for order in itertools.permutations(chosen):
                ends = 0
                for it in order:
                    ends = max(ends, arrivals[it]) + work[it]
                    if ends > arrivals[it] + limit:
                        break
                else:
                    return len(arrivals) - size
    return len(arrivals)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(1, 25))
def test_nobody_can_have_fewer_late(requests: list[tuple[int, int]], limit: int) -> None:
    requests.sort(key=lambda it: it[0])
    arrivals, work = [it[0] for it in requests], [it[1] for it in requests]
    found = least_late(np.array(arrivals, float), np.array(work, float), float(limit))
    assert found == late_at_least(arrivals, work, limit)


def test_requests_that_never_meet_take_their_own_time() -> None:
    """Of 100, the slowest one may be left out of a p99."""
    work = np.array([9.0] + [5.0] + [1.0] * 98)
    assert least_percentile(np.arange(100, dtype=np.float64) * 10, work, 0.01) == pytest.approx(5.0, abs=1e-3)


def test_a_draw_has_the_load_that_was_asked_for() -> None:
    arrivals, work = draw({10: 3, 90: 1}, rate=800, tokens_per_second=1000, count=40_000, seed=1)
    assert work.sum() / arrivals[-1] == pytest.approx(0.8, rel=0.05)
    assert set(work) == {0.01, 0.09}


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--load", "0.1", "0.7", "--requests", "300", "--seeds", "1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    bounds = {row[0]: int(row[1]) for row in rows if row and row[0] in ("0.1", "0.7")}
    assert 10 < bounds["0.1"] < bounds["0.7"] < 200
