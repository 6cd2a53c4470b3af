"""Tests of bench/: workloads, comparisons of vectors, rounds, ratios, targets and processes."""

import asyncio
import contextlib
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bulk
import gpu
import numpy as np
import peers
import pytest
from compare import read_workload
from harness import load, programs
from harness.agreement import compare_rows, probe_indices
from harness.load import LARGE, MANY, ONE, Served
from harness.machine import OtherWork, cpu_seconds, process_tree
from harness.meter import percentile_between
from harness.peers import DEFAULT, INFINITY, SENTENCES, TRITON, Setting
from harness.programs import FOLDER, PeerUnavailable, Program, ensure_environment
from harness.report import check_targets, warnings
from harness.rounds import Measurement, Patience, Side, Spread, measure, ratios, spread
from harness.sides import BARE, CEILING, NAIVE
from harness.workload import choose_lengths, random_workload, sorted_batches, text_workload
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

WORDS = ["[UNK]", "[CLS]", "[SEP]", "cat", "mat", "dog", "##s", "don", "t", "é", "x9"]


def rates(*tokens: int) -> list[Measurement]:
    return [Measurement(it, 1.0) for it in tokens]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.rounds.PAUSE_SECONDS", 0)


# Tests of workloads.


def bundle_with(words: list[str], folder: Path) -> Any:
    """Return a bundle with a WordPiece tokenizer.

    The tokenizer's file asks for truncation to 4 tokens and padding to 8 tokens, which a workload must ignore.
    """
    tokenizer = Tokenizer(WordPiece({word: token for token, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    return SimpleNamespace(name="tiny", tokenizer_file=folder / "tokenizer.json", vocab_size=len(words))


def test_texts_have_the_given_lengths_and_depend_on_the_seed(tmp_path: Path) -> None:
    bundle = bundle_with(WORDS, tmp_path)
    workload = text_workload(bundle, [3, 40, 5], seed=1)
    assert workload.lengths == [3, 40, 5]
    assert all(ids[0] == 1 and ids[-1] == 2 for ids in workload.sequences)
    assert {word for text in workload.texts for word in text.split()} <= {"cat", "dog", "don", "mat", "t"}
    assert workload.texts == text_workload(bundle, [3, 40, 5], seed=1).texts
    assert workload.texts != text_workload(bundle, [3, 40, 5], seed=2).texts
    with pytest.raises(ValueError, match="each length must be more than 2, the number of special tokens; was 2"):
        text_workload(bundle, [2], seed=0)


def test_a_vocabulary_without_words_gives_random_ids(tmp_path: Path) -> None:
    workload = read_workload(bundle_with(["[UNK]", "[CLS]", "[SEP]", "7"], tmp_path), [3, 9], seed=0)
    assert (workload.lengths, workload.texts) == ([3, 9], [])
    assert choose_lengths(5, seed=3, longest=64, given=(10, 90)) == [10, 64, 10, 64, 10]
    assert max(choose_lengths(100, seed=3, longest=64)) == 64


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 120))
def test_batches_contain_every_sequence_once_and_keep_the_budget(lengths: list[int], budget: int) -> None:
    sequences = [np.full(length, index) for index, length in enumerate(lengths)]
    for batches in (sorted_batches(sequences, budget), gpu.scheduler_batches(sequences, budget, waiting=16)):
        assert sorted(int(ids[0]) for batch in batches for ids in batch) == list(range(len(lengths)))
        assert all(max(map(len, batch)) * len(batch) <= budget for batch in batches)


# Tests that compare vectors. A side is one way to run the model, for example a server or PyTorch.


def test_a_side_that_computes_something_else_is_refused() -> None:
    one, other = [np.array([[1.0, 0.0], [0.0, 2.0]])], [np.array([[1.0, 0.0], [2.0, 0.0]])]
    assert compare_rows("side", one, one) == {"difference": 0, "cosine": 1}
    assert compare_rows("side", [2 * one[0]], one, least_cosine=0.99)["cosine"] == 1
    for got, least_cosine, message in (
        (other, None, r"^side: a row differs by 1.4e\+00 of the norm; at most 5e-05 is allowed$"),
        (other, 0.99, r"^side: a row has the cosine 0.00000; at least 0.99 is required$"),
        ([one[0][:1]], None, r"^side: the arrays have the shapes \[\(1, 2\)\]; the reference has \[\(2, 2\)\]$"),
    ):
        with pytest.raises(SystemExit, match=message):
            compare_rows("side", got, one, least_cosine=least_cosine)
    indices = probe_indices([9, 3, 200, 40, 41, 42, 43, 44, 45, 46, 47])
    assert len(set(indices)) == 8
    assert {1, 2} <= set(indices)


def test_a_peer_that_computes_something_else_is_unavailable() -> None:
    def setting(array: Any) -> Setting:
        return Setting("s", [], lambda _: {"side": ("rows", [array])}, {}, lambda: None)

    rows = np.array([[1.0, 0.0], [0.0, 2.0]])
    assert peers.check_peer("peer", setting(rows), [0], [rows], []) == {"side": 0}
    for array, message in ((2 * rows, "computes other values: a row differs by"), (rows[:1], "gives other shapes")):
        with pytest.raises(PeerUnavailable, match=f"^peer: side {message}"):
            peers.check_peer("peer", setting(array), [0], [rows], [])


# Tests of rounds, ratios and targets.


def test_each_round_runs_every_side_once_in_another_order() -> None:
    ran: list[str] = []

    def side(name: str) -> Side:
        return Side(name, name, lambda: ran.append(name) or Measurement(1, 1.0))  # type: ignore[func-returns-value]

    found = measure([side(name) for name in "abcdef"], 20, seed=0)
    rounds = [tuple(ran[i : i + 6]) for i in range(0, 120, 6)]
    assert all(sorted(order) == list("abcdef") for order in rounds)
    assert len(set(rounds)) > 10
    assert {len(runs) for runs in found.values()} == {20}


@pytest.mark.parametrize(
    ("shares", "seconds", "chosen"),
    [
        ([0.01, 0.9], 60, 1),
        ([0.3, 0.02, 0.9], 60, 2),  # other processes hardly disturb the second run: 2 % of the CPU time
        ([0.3, 0.2, 0.1, 0.4, 0.0], 60, 3),  # four runs are the limit; the third run is disturbed least
        ([0.3, 0.02], 0, 1),  # 0 s are allowed for repeated runs
        ([None, 0.0], 60, 1),  # None: the share of other processes is unknown
    ],
)
def test_a_disturbed_run_is_repeated(shares: list[float | None], seconds: float, chosen: int) -> None:
    next_share, runs = iter(shares), iter(range(1, 9))
    patience = Patience(seconds, lambda: lambda: next(next_share))
    assert patience.run(Side("a", "a", lambda: Measurement(next(runs), 1.0))).tokens == chosen


def test_ratios_are_taken_within_a_round() -> None:
    assert ratios(rates(50, 5, 100), rates(100, 10, 100)) == [0.5, 0.5, 1.0]
    assert spread([5, 1, 3, 2, 4]) == Spread(2, 3, 4)


def test_targets_compare_medians_of_ratios_and_latencies() -> None:
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
    results = [(round(target.measured.median, 3), target.met) for target in check_targets(found)]
    assert results == [(0.88, True), (0.94, False), (8.8, True), (1.5, False), (1.1, True)]
    assert check_targets({CEILING: rates(1), NAIVE: rates(1)}) == []


def test_targets_of_jobs_and_peers_depend_on_the_precision() -> None:
    found = {"ceiling": rates(100), "job": rates(96), "ceiling-bfloat16": rates(200), "job-bfloat16": rates(179)}
    assert [target.met for target in bulk.job_targets(found)] == [True, False]
    found = {MANY: rates(20), "encserve-bf16": rates(28), TRITON: rates(16), TRITON + DEFAULT: rates(10)}
    targets = peers.peer_targets(found, {MANY: "float32", "encserve-bf16": "bfloat16"})
    assert [(target.bound, target.measured.median, target.met) for target in targets] == [
        ("≥ 1.6", 2.0, True),
        ("≥ 1.6", 1.25, False),
        ("≥ 3", 2.8, False),
        ("≥ 3", 1.75, False),
    ]


def test_a_busy_machine_gives_warnings() -> None:
    assert warnings(0.1, {CEILING: rates(100, 101, 99)}) == []
    disturbed = [Measurement(1, 1.0, others=share) for share in (0.01, 0.3, None)]
    assert len(warnings(1.2, {CEILING: rates(100, 150, 60), MANY: disturbed})) == 3


def test_the_fastest_setting_takes_part_and_the_others_are_closed() -> None:
    closed: list[str] = []

    def setting(name: str, *tokens: int) -> Setting:
        runs = iter(rates(*tokens))
        side = Side("peer", name, lambda: next(runs))
        return Setting(name, [side], lambda _: {}, {}, lambda: closed.append(name), is_default=name == "c")

    # The first run of each setting is a warm-up, so its number does not count.
    settings = [setting("a", 99, 5, 7), setting("b", 1, 9, 2), setting("c", 1, 1, 1)]
    best, found = peers.fastest("peer", settings, seed=0)
    assert (best.name, found, closed) == ("b", {"a": 7, "b": 9, "c": 1}, ["a"])


def test_a_load_with_errors_or_without_replies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = SimpleNamespace(read=None, tokens=700, sequences=40, seconds=0.7, cpu_seconds=0.2)
    answer = {"tokens": 120, "seconds": 0.5, "errors": {}, "error_examples": {}, "interrupted": False}
    answer["latency_seconds"] = np.array([0.1, 0.2, 0.3])
    client = SimpleNamespace(model=lambda: SimpleNamespace(pooling=None))
    monkeypatch.setattr(load, "EncoderClient", lambda _: contextlib.nullcontext(client))
    monkeypatch.setattr(load, "Meter", lambda port: meter)
    monkeypatch.setattr(load, "random_calls", lambda lengths, *_: [SimpleNamespace(tokens=it) for it in lengths])
    monkeypatch.setattr(load, "run_load", lambda *_, **__: SimpleNamespace(**answer))
    server: Any = SimpleNamespace(target="localhost:1", metrics_port=1)
    served = Served(server, random_workload([5, 70], vocab_size=9, seed=0), seconds=0.5)
    sides = {side.name: side for side in served.sides()}
    assert sides[ONE].run() == Measurement(120, 0.5, [(5, 0.1), (70, 0.2), (5, 0.3)], 5.0)
    assert sides[LARGE].run().tokens == 700  # the tokens that the server counted
    for key, value, error, message in (
        ("tokens", 0, RuntimeError, r"^64 callers: no call was answered in 0.5 s; raise --seconds$"),
        ("errors", {"UNAVAILABLE": 3}, RuntimeError, r"^64 callers: \{'UNAVAILABLE': 3\}"),
        ("interrupted", True, KeyboardInterrupt, "^$"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(answer, key, value)
            with pytest.raises(error, match=message):
                sides[MANY].run()


# Tests of processes.


def test_cpu_time_includes_children_that_have_ended() -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = cpu_seconds(os.getpid())
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in process_tree(os.getpid())
        running = cpu_seconds(os.getpid())
        child.communicate(b"\n")
    assert child.pid not in process_tree(os.getpid())
    assert before + 0.25 <= running <= cpu_seconds(os.getpid())
    share = OtherWork().share()
    assert share is None or 0 <= share <= 1


ECHO = """
import sys
sys.path.insert(0, sys.argv[1])
from lines import answer_lines

def prepare():
    print("noise", flush=True)
    return {"ready": 1}, {"double": lambda number: {"result": 2 * number}}

answer_lines(prepare)
"""


def test_a_program_answers_and_its_prints_go_to_the_log(tmp_path: Path) -> None:
    program = Program("peer", [sys.executable, "-c", ECHO, FOLDER], tmp_path / "log")
    try:
        assert program.read(30) == {"ready": 1}
        assert program.ask("double", number=21) == {"result": 42}
        assert (tmp_path / "log").read_text() == "noise\n"
        with pytest.raises(PeerUnavailable, match="does not answer within 0 s"):
            program.read(0.1)
        with pytest.raises(PeerUnavailable, match=r"(?s)^peer: has ended; its log ends:.*KeyError: 'triple'"):
            program.ask("triple")
    finally:
        program.stop()
    assert program.process.poll() is not None


def test_an_environment_is_created_again_after_a_change_of_its_requirements(tmp_path: Path) -> None:
    requirements, environments, python = tmp_path / "peer.txt", tmp_path / "environments", tmp_path / "python"
    requirements.write_text("")
    # `ensure_environment` calls this fake Python as `python -m venv FOLDER`. The fake creates an interpreter that
    # accepts every command.
    python.write_text('#!/bin/sh\nmkdir -p "$3/bin" && ln -s /bin/true "$3/bin/python"\n')
    python.chmod(0o755)
    binaries = ensure_environment("peer", requirements, environments, str(python))
    assert ensure_environment("peer", requirements, environments, python="/no/python") == binaries
    requirements.write_text("# changed")
    with pytest.raises(FileNotFoundError, match="/no/python"):
        ensure_environment("peer", requirements, environments, python="/no/python")


@pytest.mark.parametrize("peer", [INFINITY, SENTENCES, TRITON])
def test_requirements_of_peers_pin_every_version(peer: str) -> None:
    lines = (programs.FOLDER / f"{peer}.txt").read_text().splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert requirements
    assert all(requirement.count("==") == 1 for requirement in requirements)


async def test_callers_of_peers_count_replies_between_warmup_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("peer_callers", FOLDER / "peer_callers.py")
    assert spec is not None
    assert spec.loader is not None
    peer_callers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer_callers)
    now = 100.0
    monkeypatch.setattr(peer_callers, "time", SimpleNamespace(perf_counter=lambda: now))

    async def ask(request: bytes) -> bytes:
        nonlocal now
        await asyncio.sleep(0)
        now += 1.0
        return request

    found = await peer_callers.closed_loop(ask, [b"a", b"b", b"c"], callers=1, warmup_seconds=1.5, seconds=3)
    assert found == {"answered": [(1, 1.0), (2, 1.0), (0, 1.0)]}


def test_a_percentile_is_interpolated_between_the_bounds_of_a_bucket() -> None:
    before = {0.1: 5.0, 0.2: 5.0, math.inf: 5.0}
    after = {0.1: 15.0, 0.2: 25.0, math.inf: 25.0}  # the server added 10 values up to 0.1, and 10 from 0.1 to 0.2
    assert percentile_between(before, after, 75) == pytest.approx(0.15)
    assert percentile_between(before, after, 50) == pytest.approx(0.1)
    assert percentile_between({}, {0.1: 0.0, math.inf: 4.0}, 95) == 0.1
