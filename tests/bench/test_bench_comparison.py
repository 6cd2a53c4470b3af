"""What the benchmarks share, and that bench/compare.py runs; its figures are not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare
import numpy as np
import pytest
from harness import load
from harness.agreement import check_agreement, lowest_cosine, some_places, worst_difference
from harness.load import LARGE, MANY, ONE, ONE_POOLED, POOLED, Served
from harness.machine import OtherWork, cpu_seconds, process_tree
from harness.report import AGAINST, check_targets, ratios_to_against, warnings
from harness.rounds import (
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
from harness.sides import BARE, CEILING, NAIVE, TORCH, TORCH_BATCHED
from harness.workload import Sequence64, choose_lengths, random_workload, sorted_batches, windows
from hypothesis import given
from hypothesis import strategies as st
from real_server import COMMAND
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from encserve_export.cli import main as export

ROOT = Path(__file__).parent.parent.parent


def some(lengths: list[int]) -> list[Sequence64]:
    return [np.full(length, place) for place, length in enumerate(lengths)]


def rates(*tokens: int) -> list[Measurement]:
    return [Measurement(it, 1.0) for it in tokens]


# What is asked.


def test_lengths_are_those_of_real_texts_or_those_given_in_turn() -> None:
    drawn = choose_lengths(100, seed=3, longest=64)
    assert (len(drawn), max(drawn)) == (100, 64)
    assert drawn == choose_lengths(100, seed=3, longest=64) != choose_lengths(100, seed=4, longest=64)
    assert choose_lengths(5, seed=3, longest=64, given=(10, 90)) == [10, 64, 10, 64, 10]


def test_random_ids_depend_on_the_seed_alone() -> None:
    first, again, other = (random_workload([5, 9], vocab_size=50, seed=seed) for seed in (7, 7, 8))
    assert [it.tolist() for it in first.sequences] == [it.tolist() for it in again.sequences]
    assert [it.tolist() for it in first.sequences] != [it.tolist() for it in other.sequences]
    assert (first.lengths, first.tokens, first.texts) == ([5, 9], 14, [])
    assert all(it.min() >= 0 and it.max() < 50 for it in first.sequences)


def test_a_vocabulary_without_words_is_asked_with_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, texts in ((["7", "8"], []), (["cat", "8"], ["cat cat cat"])):
        tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="8"))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        bundle: Any = SimpleNamespace(tokenizer_file=tmp_path / "tokenizer.json", vocab_size=2)
        found = compare.read_workload(bundle, [3], seed=0)
        assert (found.lengths, found.texts) == ([3], texts)
    assert (
        capsys.readouterr().out == "random ids in place of texts: no word of the vocabulary is one token of its own\n"
    )


def test_windows_keep_the_order_of_arrival() -> None:
    assert [[len(it) for it in window] for window in windows(some([3, 1, 2, 5, 4]), 2)] == [[3, 1], [2, 5], [4]]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 120))
def test_sorted_batches_hold_everything_once_and_keep_the_budget(lengths: list[int], budget: int) -> None:
    batches = sorted_batches(some(lengths), budget)
    assert sorted(int(it[0]) for batch in batches for it in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(map(len, batch)) * len(batch) <= budget


# Whether all compute the same.


def test_the_compared_sequences_reach_from_the_shortest_to_the_longest() -> None:
    lengths = [9, 3, 200, 40, 41, 42, 43, 44, 45, 46, 47]
    places = some_places(lengths)
    assert len(set(places)) == 8
    assert {1, 2} <= set(places)
    assert some_places([5, 3]) == [1, 0]


def test_differences_are_of_the_worst_row() -> None:
    ours, theirs = [np.array([[1.0, 0.0], [0.0, 2.0]])], [np.array([[1.0, 0.0], [2.0, 0.0]])]
    assert worst_difference(ours, ours) == 0
    assert worst_difference(ours, theirs) == pytest.approx(2**0.5)
    assert lowest_cosine(ours, ours) == 1
    assert lowest_cosine(ours, theirs) == 0
    assert check_agreement({"it": ours}, ours) == {"it": 0}
    with pytest.raises(SystemExit, match=r"^it does not compute the same: a row differs by 1.4e\+00 of its norm$"):
        check_agreement({"it": ours}, theirs)


# In which order, and what is made of it.


def test_every_round_has_every_side_once_in_an_order_of_its_own() -> None:
    names = [str(it) for it in range(6)]
    found = list(orders(names, 20, seed=0))
    assert all(sorted(order) == names for order in found)
    assert len({tuple(order) for order in found}) > 10
    assert found == list(orders(names, 20, seed=0))


def test_rounds_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.rounds.PAUSE_SECONDS", 0)
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
    monkeypatch.setattr("harness.rounds.PAUSE_SECONDS", 0)
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
        MANY: rates(88, 80, 92),
        LARGE: rates(94, 94, 99),
        NAIVE: rates(10, 10, 10),
        BARE: timed(0.004, 0.020),
        ONE: timed(0.0055, 0.022),
    }
    assert [(round(it.measured.median, 3), it.met) for it in check_targets(found)] == [
        (0.88, True),
        (0.94, False),
        (8.8, True),
        (1.5, False),
        (1.1, True),
    ]


def test_a_target_whose_sides_were_not_run_is_left_out() -> None:
    assert check_targets({CEILING: rates(1), NAIVE: rates(1)}) == []


def test_a_noisy_machine_is_said_to_be_noisy() -> None:
    assert warnings(0.1, {CEILING: rates(100, 101, 99)}) == []
    disturbed = [Measurement(1, 1.0, others=it) for it in (0.01, 0.3, None)]
    assert len(warnings(1.2, {CEILING: rates(100, 150, 60), MANY: disturbed})) == 3


# encserve, and the same of another checkout.


def test_another_checkout_is_compared_round_by_round() -> None:
    def round_of(tokens: int, p50: float, cpu_ms: float | None) -> Measurement:
        return Measurement(tokens, 1.0, [(0, p50)], cpu_ms)

    found = {
        CEILING: rates(100, 10),
        MANY: [round_of(110, 0.2, 3.0), round_of(22, 1.0, 9.0)],
        MANY + AGAINST: [round_of(100, 0.4, 2.0), round_of(20, 2.0, 6.0)],
        ONE: [round_of(1, 0.1, None)] * 2,
        ONE + AGAINST: [round_of(2, 0.1, 5.0)] * 2,
    }
    table = ratios_to_against(found)
    assert set(table) == {MANY, ONE}
    assert {figure: it and it["median"] for figure, it in table[MANY].items()} == {
        "tokens_per_second": pytest.approx(1.1),
        "p50_seconds": 0.5,
        "server_cpu_ms": 1.5,
    }
    assert table[ONE]["server_cpu_ms"] is None


def test_a_checkout_without_a_server_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.read_arguments([str(tmp_path), "--against", str(tmp_path / "before")])
    assert "before has no .venv/bin/encserve-server; run `make install` there" in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> tuple[Served, dict[str, Any]]:
    """A server that nobody runs, and the answer to every load, which may be changed."""
    view = SimpleNamespace(tokens=700, sequences=40, seconds=0.7, cpu_seconds=0.2)
    answer = {"tokens": 120, "seconds": 0.5, "errors": {}, "error_examples": {}, "server": view, "server_missing": ""}
    answer["latency_seconds"] = np.array([0.1, 0.2, 0.3])
    info = SimpleNamespace(pooling=None)
    client = SimpleNamespace(__enter__=lambda self: self, __exit__=lambda *_: None, model=lambda self: info)
    monkeypatch.setattr(load, "EncoderClient", type("Client", (), vars(client) | {"__init__": lambda *_: None}))
    monkeypatch.setattr(load, "make_calls", lambda lengths, *_, **__: [SimpleNamespace(tokens=it) for it in lengths])
    monkeypatch.setattr(load, "closed_loop", lambda *_, **__: SimpleNamespace(**answer))
    server: Any = SimpleNamespace(target="it", metrics_port=1)
    return Served(server, random_workload([5, 70], vocab_size=9, seed=0), seconds=0.5), answer


def measured(server: Served, name: str) -> Measurement:
    return next(it for it in server.sides() if it.name == name).run()


def test_one_callers_latencies_are_known_by_length(asked: tuple[Served, dict[str, Any]]) -> None:
    assert measured(asked[0], ONE) == Measurement(120, 0.5, [(5, 0.1), (70, 0.2), (5, 0.3)], 5.0)
    assert measured(asked[0], MANY) == Measurement(120, 0.5, [(0, 0.1), (0, 0.2), (0, 0.3)], 5.0)


def test_calls_that_take_seconds_count_by_the_servers_batches(asked: tuple[Served, dict[str, Any]]) -> None:
    large = measured(asked[0], LARGE)
    assert (large.tokens, large.seconds) == (700, 0.7)


def test_a_load_with_errors_or_without_answers_measures_nothing(asked: tuple[Served, dict[str, Any]]) -> None:
    server, answer = asked
    for change, text in (
        ({"tokens": 0}, r"^64 callers: no call was answered in 0.5 s; give --seconds more$"),
        ({"errors": {"UNAVAILABLE": 3}}, r"^64 callers: \{'UNAVAILABLE': 3\}"),
        ({"server": None, "server_missing": "no page"}, r"^64 callers: no page"),
    ):
        before = dict(answer)
        answer |= change
        with pytest.raises(RuntimeError, match=text):
            measured(server, MANY)
        answer |= before


# Whether others were at work.


def test_what_descends_from_us_is_ours_even_when_it_has_ended() -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = cpu_seconds(os.getpid())
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert process_tree(os.getpid())[0] == os.getpid()
        assert child.pid in process_tree(os.getpid())
        running = cpu_seconds(os.getpid())
        child.communicate(b"\n")
    assert child.pid not in process_tree(os.getpid())
    assert before + 0.25 <= running <= cpu_seconds(os.getpid())


def test_the_share_of_others_is_a_share() -> None:
    others = OtherWork()
    share = others.share()
    assert share is None or 0 <= share <= 1


# That it runs.


@pytest.mark.system
def test_it_runs_and_writes_what_it_found(tmp_path: Path) -> None:
    checkpoint, other = ROOT / "tests/data/hf-bert", tmp_path / "before"
    models = str(tmp_path / "models")
    export(["hf", str(checkpoint), "--ids-only", "--model-repository", models, "--name", "tiny"], standalone_mode=False)
    (other / ".venv/bin").mkdir(parents=True)
    (other / ".venv/bin/encserve-server").symlink_to(COMMAND)
    command = [sys.executable, "bench/compare.py", models, "--json", str(tmp_path / "found.json")]
    command += ["--checkpoint", str(checkpoint), "--against", str(other)]
    command += ["--only", *(it for it in compare.SIDES if it not in {ONE_POOLED, MANY})]
    command += ["--rounds", "1", "--seconds", "1", "--sequences", "70", "--patience", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ratio to ceiling" in done.stdout
    assert "ratio to the server of" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"model", "machine", "load_average", "workload", "sweep", "agreement", "rounds", "warnings"} <= set(found)
    assert found["workload"]["sequences"] == 70
    assert set(found["agreement"]) == {"encserve", f"encserve of {other}", "the graph that pads", "PyTorch"}
    assert max(found["agreement"].values()) < 5e-5
    of_servers = {ONE, LARGE, POOLED}
    others = {CEILING, BARE, NAIVE, TORCH, TORCH_BATCHED}
    assert set(found["sides"]) == {*others, *of_servers, *(name + AGAINST for name in of_servers)}
    for side in found["sides"].values():
        assert len(side["tokens_per_second"]) == 1
        assert set(side["ratio_to_ceiling"]) == {"low", "median", "high"}
    assert found["sides"][CEILING]["ratio_to_ceiling"]["median"] == 1
    assert len(found["targets"]) in (2, 3)  # the one of long sequences needs one to have come within the second
    assert all(set(it) == {"text", "wanted", "measured", "met"} for it in found["targets"])
    assert set(found["ratios_to_against"]) == of_servers
    for ratios_of_side in found["ratios_to_against"].values():
        assert set(ratios_of_side) == {"tokens_per_second", "p50_seconds", "server_cpu_ms"}
        assert ratios_of_side["tokens_per_second"]["median"] > 0
