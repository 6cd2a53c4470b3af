"""The benchmark's pure parts, and that it runs; its figures are not tested."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from comparison.report import warnings
from comparison.rounds import (
    NO_PATIENCE,
    Measurement,
    Patience,
    Side,
    Spread,
    latencies,
    measure,
    orders,
    ratios,
    spread,
)
from comparison.sides import BARE, CEILING, EMPTY, LARGE, MANY, NAIVE, NAIVE_PACKED, ONE, PARALLEL
from comparison.targets import check_targets
from comparison.workload import LENGTHS, Sequence64, cycled, draw_lengths, read_workload, sorted_batches, windows
from hypothesis import given
from hypothesis import strategies as st

from encserve_export.cli import main as export

ROOT = Path(__file__).parent.parent.parent


def some(lengths: list[int]) -> list[Sequence64]:
    return [np.full(length, place) for place, length in enumerate(lengths)]


def rates(*tokens: int) -> list[Measurement]:
    return [Measurement(it, 1.0) for it in tokens]


# What is asked.


def test_drawn_lengths_have_the_shape_of_the_histogram() -> None:
    drawn = draw_lengths({5: 30, 20: 60, 90: 10}, count=100, seed=3, longest=512)
    assert {length: drawn.count(length) for length in (5, 20, 90)} == {5: 30, 20: 60, 90: 10}
    assert drawn != sorted(drawn)


def test_drawn_lengths_depend_on_the_seed_alone() -> None:
    first, again, other = (draw_lengths({5: 1, 9: 2}, count=50, seed=seed, longest=512) for seed in (1, 1, 2))
    assert first == again != other


def test_nothing_is_longer_than_the_model_allows() -> None:
    assert max(draw_lengths({5: 1, 90: 1}, count=10, seed=0, longest=64)) == 64


def test_the_workload_is_the_same_for_the_same_seed() -> None:
    first, again = (read_workload(LENGTHS, count=20, seed=7, vocab_size=50, longest=64) for _ in range(2))
    assert [it.tolist() for it in first.sequences] == [it.tolist() for it in again.sequences]
    assert first.tokens == sum(len(it) for it in first.sequences)
    assert all(it.min() >= 0 and it.max() < 50 for it in first.sequences)


def test_windows_keep_the_order_of_arrival() -> None:
    assert [[len(it) for it in window] for window in windows(some([3, 1, 2, 5, 4]), 2)] == [[3, 1], [2, 5], [4]]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 120))
def test_sorted_batches_hold_everything_once_and_keep_the_budget(lengths: list[int], budget: int) -> None:
    batches = sorted_batches(some(lengths), budget)
    assert sorted(int(it[0]) for batch in batches for it in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(map(len, batch)) * len(batch) <= budget


def test_large_calls_begin_again_where_the_sequences_end() -> None:
    assert [[len(it) for it in call] for call in cycled(some([1, 2, 3]), 2, 3)] == [[1, 2], [3, 1], [2, 3]]


# In which order, and what is made of it.


def test_every_round_has_every_side_once_in_an_order_of_its_own() -> None:
    names = [str(it) for it in range(6)]
    found = list(orders(names, 20, seed=0))
    assert all(sorted(order) == names for order in found)
    assert len({tuple(order) for order in found}) > 10
    assert found == list(orders(names, 20, seed=0))


def test_rounds_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comparison.rounds.PAUSE_SECONDS", 0)
    ran: list[str] = []

    def side(name: str) -> Side:
        def run() -> Measurement:
            ran.append(name)
            return Measurement(1, 1.0)

        return Side(name, name, run)

    told: list[int] = []
    found = measure([side("a"), side("b"), side("c")], 4, 0, lambda number, _: told.append(number), NO_PATIENCE)
    assert [sorted(ran[i : i + 3]) for i in range(0, 12, 3)] == [["a", "b", "c"]] * 4
    assert told == [0, 1, 2, 3]
    assert {name: len(its) for name, its in found.items()} == {"a": 4, "b": 4, "c": 4}


@pytest.mark.parametrize(
    ("shares", "seconds", "kept"),
    [
        ([0.01, 0.9], 60, 1),
        ([0.3, 0.02, 0.9], 60, 2),  # the second was quiet
        ([0.3, 0.2, 0.1, 0.4, 0.0], 60, 3),  # none of four was; the third was the quietest
        ([0.3, 0.02], 0, 1),  # no patience
        ([None, 0.0], 60, 1),  # not known
    ],
)
def test_what_was_disturbed_is_run_again(
    shares: list[float | None], seconds: float, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comparison.rounds.PAUSE_SECONDS", 0)
    told, runs = iter(shares), iter(range(1, 9))
    patience = Patience(seconds, lambda: lambda: next(told))
    assert patience.run(Side("a", "a", lambda: Measurement(next(runs), 1.0))).tokens == kept


def test_ratios_are_taken_round_by_round() -> None:
    """A moment that is slow for all changes no ratio."""
    assert ratios(rates(50, 5, 100), rates(100, 10, 100)) == [0.5, 0.5, 1.0]


def test_the_spread_is_median_and_quartiles() -> None:
    assert spread([5, 1, 3, 2, 4]) == Spread(2, 3, 4)
    assert spread([7]) == Spread(7, 7, 7)


def test_the_median_latency_may_be_of_long_sequences_alone() -> None:
    mine = [Measurement(10, 1.0, [(5, 0.1), (64, 0.3), (70, 0.5)])]
    assert latencies(mine) == [0.3]
    assert latencies(mine, 64) == [0.4]
    assert latencies(mine, 100) == []
    assert latencies(rates(5)) == []


def test_targets_are_checked_against_the_median_over_rounds() -> None:
    def timed(short: float, long: float) -> list[Measurement]:
        return [Measurement(10, 1.0, [(5, short), (5, short), (80, long)])] * 2

    found = {
        CEILING: rates(100, 100, 100),
        MANY: rates(91, 80, 92),
        LARGE: rates(94, 94, 99),
        NAIVE: rates(10, 10, 10),
        BARE: timed(0.004, 0.020),
        ONE: timed(0.0055, 0.022),
    }
    assert [(round(it.measured.median, 3), it.met) for it in check_targets(found)] == [
        (0.91, True),
        (0.94, False),
        (9.1, True),
        (1.5, False),
        (1.1, True),
    ]


def test_a_target_whose_sides_were_not_run_is_left_out() -> None:
    assert check_targets({CEILING: rates(1), NAIVE: rates(1)}) == []


def test_a_noisy_machine_is_said_to_be_noisy() -> None:
    assert warnings(0.1, {CEILING: rates(100, 101, 99)}) == []
    disturbed = [Measurement(1, 1.0, others=it) for it in (0.01, 0.3, None)]
    assert len(warnings(1.2, {CEILING: rates(100, 150, 60), MANY: disturbed})) == 3


# That it runs.


@pytest.mark.bench
def test_it_runs_and_writes_what_it_found(tmp_path: Path) -> None:
    checkpoint = ROOT / "tests/data/hf-bert"
    export(
        ["hf", str(checkpoint), "--model-repository", str(tmp_path / "models"), "--name", "tiny"], standalone_mode=False
    )
    command = [sys.executable, "bench/compare.py", str(tmp_path / "models"), "--json", str(tmp_path / "found.json")]
    command += ["--checkpoint", str(checkpoint), "--rounds", "1", "--sequences", "70", "--patience", "0"]
    command += ["--server-flags=--no-tune-batches"]  # that takes seconds
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ratio to ceiling" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"model", "machine", "load_average", "workload", "sweep", "agreement", "rounds", "warnings"} <= set(found)
    assert found["workload"]["sequences"] == 70
    assert set(found["agreement"]) == {"encserve", "the graph that pads", "PyTorch"}
    assert max(found["agreement"].values()) < 5e-5
    assert {CEILING, PARALLEL, BARE, NAIVE, NAIVE_PACKED, EMPTY, ONE, LARGE, MANY, "torch"} <= set(found["sides"])
    for side in found["sides"].values():
        assert len(side["tokens_per_second"]) == 1
        assert set(side["ratio_to_ceiling"]) == {"low", "median", "high"}
    assert found["sides"][CEILING]["ratio_to_ceiling"]["median"] == 1
    assert len(found["targets"]) == 5
    assert all(set(it) == {"text", "wanted", "measured", "met"} for it in found["targets"])
