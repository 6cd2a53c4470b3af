"""The pure parts of the comparison with peers; no peer need be installed."""

import argparse
import asyncio
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peers
import pytest
from harness.load import MANY
from harness.peers import AS_IT_COMES, INFINITY, ROWS, SENTENCES, TRITON, VECTORS, Setting
from harness.programs import PEERS, PeerUnavailable, Program, ensure_environment, free_ports
from harness.rounds import Measurement, Side, Spread
from harness.workload import open_tokenizer, single_words, text_workload
from peers import check_peer, fastest, peer_targets, print_missing, ratios_to_peers, read_server
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

WORDS = ["[UNK]", "[CLS]", "[SEP]", "cat", "mat", "dog", "##s", "don", "t", "é", "x9"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """A small WordPiece tokenizer whose file cuts at 4 tokens and pads to 8."""
    made = Tokenizer(WordPiece({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    made.enable_truncation(4)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    return open_tokenizer(tmp_path / "tokenizer.json")


def rates(*tokens: int) -> list[Measurement]:
    return [Measurement(it, 1.0) for it in tokens]


# What is asked.


def test_texts_have_exactly_the_wanted_numbers_of_tokens(tokenizer: Tokenizer) -> None:
    texts = text_workload([3, 40, 5, 3], tokenizer, seed=1)
    assert texts.lengths == [3, 40, 5, 3]
    assert [tokenizer.encode(it).ids for it in texts.texts] == [it.tolist() for it in texts.sequences]
    assert all(it[0] == 1 and it[-1] == 2 for it in texts.sequences)


def test_texts_depend_on_the_seed_alone(tokenizer: Tokenizer) -> None:
    first, again, other = (text_workload([30], tokenizer, seed=seed).texts for seed in (1, 1, 2))
    assert first == again != other


def test_only_whole_words_of_letters_are_used(tokenizer: Tokenizer) -> None:
    assert single_words(tokenizer) == ["cat", "dog", "don", "mat", "t"]


def test_a_length_without_room_for_a_word_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="a text of 2 tokens has no room for a word beside 2 special ones"):
        text_workload([2], tokenizer, seed=0)


# Whether all compute the same.


def computing(kind: str, *arrays: Any) -> Setting:
    return Setting("it", [], lambda _: {"side": (kind, list(arrays))}, {}, lambda: None)


def test_a_peer_that_computes_something_else_is_unavailable() -> None:
    rows, vectors = [np.array([[1.0, 0.0], [0.0, 2.0]])], [np.array([[0.6, 0.8]])]
    assert check_peer("it", computing(ROWS, rows[0]), [0], rows, vectors) == {"side": 0}
    assert check_peer("it", computing(VECTORS, vectors[0]), [0], rows, vectors) == {"side": 0}
    with pytest.raises(PeerUnavailable, match=r"^it: side does not compute the same: off by 1.0e\+00 of the norm$"):
        check_peer("it", computing(ROWS, 2 * rows[0]), [0], rows, vectors)
    with pytest.raises(PeerUnavailable, match=r"^it: side gives other shapes: it has cut texts off"):
        check_peer("it", computing(ROWS, rows[0][:1]), [0], rows, vectors)


# What is made of it.


def test_ratios_to_peers_are_taken_round_by_round() -> None:
    found = {"mine": rates(60, 10, 40), TRITON: rates(30, 5, 10)}
    assert ratios_to_peers(found, ["mine"], [TRITON]) == {TRITON: {"mine": Spread(2, 2, 3)}}


def test_targets_are_those_of_the_precision() -> None:
    found = {MANY: rates(20), "encserve-bf16": rates(28), TRITON: rates(10), INFINITY: rates(4)}
    targets = peer_targets(found, {MANY: "float32", "encserve-bf16": "bfloat16"})
    assert [(it.wanted, it.measured.median, it.met) for it in targets] == [
        ("≥ 1.6", 2.0, True),
        ("≥ 4.5", 5.0, True),
        ("≥ 3", 2.8, False),
        ("≥ 8", 7.0, False),
    ]


def test_a_peer_is_held_against_us_as_it_comes_and_at_its_best() -> None:
    found = {MANY: rates(20), TRITON: rates(16), TRITON + AS_IT_COMES: rates(10)}
    targets = peer_targets(found, {MANY: "float32"})
    assert [(it.text.rpartition(" ")[2], it.measured.median, it.met) for it in targets] == [
        ("triton-as-it-comes", 2.0, True),
        ("triton", 1.25, False),
    ]


def test_a_target_whose_peer_is_missing_is_left_out() -> None:
    assert [it.wanted for it in peer_targets({MANY: rates(20), TRITON: rates(10)}, {MANY: "float32"})] == ["≥ 1.6"]


def test_who_is_missing_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(record=True, width=100)
    monkeypatch.setattr(peers, "console", console)
    print_missing({TRITON: "no such [wheel]"})
    assert console.export_text() == "Missing: triton\nno such [wheel]\n"


def test_a_further_server_has_a_name_and_flags() -> None:
    assert read_server("bf16=--precision bfloat16 --max-batch-tokens=512") == (
        "encserve-bf16",
        "--precision bfloat16 --max-batch-tokens=512",
    )
    for text in ("bf16", "=--device cpu", "64=--device cpu"):
        with pytest.raises(argparse.ArgumentTypeError):
            read_server(text)


def setting(name: str, rates_in_turn: list[int], closed: list[str]) -> Setting:
    told = iter(rates_in_turn)
    side = Side("it", name, lambda: Measurement(next(told), 1.0))
    return Setting(name, [side], lambda _: {}, {}, lambda: closed.append(name))


def test_the_setting_with_the_best_round_takes_part_and_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.rounds.PAUSE_SECONDS", 0)
    closed: list[str] = []
    # The first run of each takes memory and does not count.
    settings = [setting("a", [99, 5, 7], closed), setting("b", [1, 9, 2], closed), setting("c", [1, 1, 1], closed)]
    best, found = fastest("it", settings, seed=0)
    assert best.name == "b"
    assert found == {"a": 7, "b": 9, "c": 1}
    assert closed == ["a", "c"]


# Environments and programs.


@pytest.mark.system
def test_what_cannot_be_installed_is_said_with_pips_own_words(tmp_path: Path) -> None:
    requirements = tmp_path / "wanted.txt"
    requirements.write_text("./no-such-folder\n")
    with pytest.raises(PeerUnavailable, match=r"(?s)^it: cannot be installed:.*no-such-folder"):
        ensure_environment("it", requirements, tmp_path / "environments")
    assert not (tmp_path / "environments/it/.installed").exists()


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    requirements, environments, python = tmp_path / "wanted.txt", tmp_path / "environments", tmp_path / "python"
    requirements.write_text("")
    # Called as python -m venv FOLDER; what it makes takes every command.
    python.write_text('#!/bin/sh\nmkdir -p "$3/bin" && ln -s /bin/true "$3/bin/python"\n')
    python.chmod(0o755)
    binaries = ensure_environment("it", requirements, environments, str(python))
    assert (binaries / "python").exists()
    assert ensure_environment("it", requirements, environments, python="/no/python") == binaries
    requirements.write_text("# something else")
    with pytest.raises(FileNotFoundError, match="/no/python"):
        ensure_environment("it", requirements, environments, python="/no/python")


@pytest.mark.parametrize("peer", [INFINITY, SENTENCES, TRITON])
def test_every_version_is_pinned(peer: str) -> None:
    lines = (PEERS / f"{peer}.txt").read_text().splitlines()
    wanted = [it for it in lines if it and not it.startswith("#")]
    assert wanted
    assert all(it.count("==") == 1 for it in wanted)
    assert not {it for it in wanted if it.startswith("torch==")} - {"torch==2.13.0"}


ECHO = """
import sys
sys.path.insert(0, sys.argv[1])
from lines import answer_lines

def prepare():
    print("noise", flush=True)
    return {"ready": 1}, {"double": lambda number: {"result": 2 * number}}

answer_lines(prepare)
"""


def test_a_program_answers_and_what_it_prints_goes_to_its_log(tmp_path: Path) -> None:
    program = Program("it", [sys.executable, "-c", ECHO, PEERS], tmp_path / "log")
    try:
        assert program.read(30) == {"ready": 1}
        assert program.ask("double", number=21) == {"result": 42}
        assert (tmp_path / "log").read_text() == "noise\n"
        with pytest.raises(PeerUnavailable, match=r"(?s)^it: has ended; its log ends:.*KeyError: 'triple'"):
            program.ask("triple")
    finally:
        program.stop()
    assert program.process.poll() is not None


def test_a_program_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    program = Program("it", [sys.executable, "-c", "import sys; sys.stdin.read()"], tmp_path / "log")
    with pytest.raises(PeerUnavailable, match="does not answer within 0 s"):
        program.read(0.1)
    program.stop()
    assert program.process.poll() == 0


def test_free_ports_differ() -> None:
    assert len(set(free_ports(3))) == 3


@pytest.fixture
def peer_callers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program that asks peers, which imports what its folder holds."""
    monkeypatch.syspath_prepend(PEERS)
    spec = importlib.util.spec_from_file_location("peer_callers", PEERS / "peer_callers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_callers_count_what_is_answered_after_the_warm_up_and_in_time(
    peer_callers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of their own; a server takes a second for a call."""
    now, out, most_out = 100.0, 0, 0
    sent: list[bytes] = []
    monkeypatch.setattr(peer_callers, "time", SimpleNamespace(perf_counter=lambda: now))

    async def ask(request: bytes) -> bytes:
        nonlocal now, out, most_out
        sent.append(request)
        out += 1
        most_out = max(most_out, out)
        await asyncio.sleep(0)  # the others' turn
        now += 1.0
        out -= 1
        return request

    requests = [b"a", b"b", b"c"]
    found = await peer_callers.closed_loop(ask, requests, callers=1, warmup_seconds=1.5, seconds=3)
    assert sent == [b"a", b"b", b"c", b"a", b"b"]
    assert found == {"answered": [(1, 1.0), (2, 1.0), (0, 1.0)]}
    await peer_callers.closed_loop(ask, requests, callers=3, warmup_seconds=0, seconds=9)
    assert most_out == 3


def test_vectors_come_in_base64(peer_callers: Any) -> None:
    """Which infinity does when it is asked to."""
    assert b'"encoding_format": "base64"' in peer_callers.infinity_request("a cat")
    reply = b'{"data": [{"embedding": "AACAPwAAAEA="}]}'
    assert peer_callers.infinity_rows(reply).tolist() == [[1.0, 2.0]]
