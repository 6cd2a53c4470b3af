"""Runs the programs of clients/examples/python against real servers, and checks the output."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import make_certificates
from checkpoints import MODEL
from real_server import RealServer, real_server
from tiny_bundle import write_bundle
from tiny_heads import words
from zoo import Zoo

from encserve_server.callers.keys import make_key

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "clients/examples/python"
# Runs a program, and then prints the largest resident memory of the process, in KiB. `resource.getrusage` would include
# the memory of the parent process.
MEASURE = """
import pathlib, re, runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
print(*re.findall(r"VmHWM:\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text()))
"""
MIB_IN_KIB = 1024
pytestmark = pytest.mark.system


def environment(target: str = "") -> dict[str, str]:
    """Return the environment of a program. ENCSERVE_TARGET is its only variable for encserve."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ENCSERVE_")}
    return kept | ({"ENCSERVE_TARGET": target} if target else {})


def printed(folder: Path, target: str, *command: str | Path) -> list[str]:
    """Run Python in `folder` with the arguments `command`. Return the lines of stdout. Check that stderr is empty."""
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment(target), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server with three models: all-MiniLM-L6-v2, and `late` and `splade`, which are made from all-MiniLM-L6-v2."""
    folder = tmp_path_factory.mktemp("trained")
    zoo, models = Zoo(folder), folder / "served"
    zoo.export(MODEL, models)
    zoo.export("trained-late", models, "late")
    zoo.export("trained-splade", models, "splade")
    with real_server(models, f"--model={MODEL}", "--model=late", "--model=splade") as server:
        yield server


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with one tiny model, which takes text and returns vectors of 8 numbers."""
    models = tmp_path_factory.mktemp("tiny") / "models"
    write_bundle(models, tokenizer=words())
    return models


SCORE = r"-?\d+\.\d{3} "
BALTIC, MARKETS = r"The Baltic has 18 degrees in July\.", r"Stock markets fell sharply on Monday\."
OUTPUTS = {  # a regular expression for each line of the output
    "first_call": [r"\(384,\) float32 \[.*\]"],
    "batch": [r"\[\[ 1\. +0\.657 -0\.054\]", r" \[ 0\.657  1\. +0\.016\]", r" \[-0\.054  0\.016  1\. +\]\]"],
    "async_calls": [r"cat \(384,\)", r"kitten \(384,\)", r"market \(384,\)"],
    "query_and_document": [SCORE + BALTIC, SCORE + ".*"],
    "sparse": [
        r"\d+ of 30522 weights are not 0",
        r"token ids \[\d+ \d+ \d+\] weights \[\S+ +\S+ +\S+\]",
        SCORE + BALTIC,
        SCORE + MARKETS,
    ],
    "multi_vector": [
        r"query \(32, 128\) documents \[\(\d+, 128\), \(\d+, 128\)\]",
        SCORE + BALTIC,
        SCORE + MARKETS,
    ],
    "errors": [
        r"0 \(384,\)",
        r"1 error: inputs\[1\]: must be at most 256 tokens .*",
        r"2 \(384,\)",
        r"wrong model: .*no model 'no-such-model'; the models are .*",
        r"no server: localhost:1: no encserve server here: connection refused.*",
    ],
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_output(name: str, trained: RealServer, tmp_path: Path) -> None:
    lines = printed(tmp_path, trained.target, FOLDER / f"{name}.py")
    assert len(lines) == len(OUTPUTS[name]), lines
    for line, pattern in zip(lines, OUTPUTS[name], strict=True):
        assert re.fullmatch(pattern, line), lines


@pytest.mark.parametrize(
    "count", [100_000, pytest.param(1_000_000, marks=[pytest.mark.weekly, pytest.mark.timeout(1800)])]
)
def test_many_texts_take_no_more_memory_than_few(count: int, tiny: Path, tmp_path: Path) -> None:
    """The program must not keep all vectors in memory. Each vector would take more than 100 bytes."""
    peaks = []
    with real_server(tiny) as server:
        for number in (count // 5, count):
            line, peak = printed(tmp_path, server.target, "-c", MEASURE, FOLDER / "million_texts.py", str(number))
            assert line == f"{number:,} vectors, {number * 8 * 2:,} bytes"
            assert (tmp_path / "vectors.f16").stat().st_size == number * 8 * 2
            peaks.append(int(peak))
    assert peaks[1] - peaks[0] < 4 * MIB_IN_KIB


def test_no_call_fails_if_one_of_two_servers_dies(tiny: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(real_server(tiny)) for _ in range(2)]
        program = stack.enter_context(
            subprocess.Popen(
                [sys.executable, FOLDER / "two_servers.py", *(server.target for server in servers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(),
            )
        )
        assert program.stdin is not None
        assert program.stdout is not None

        def call() -> None:
            print("w3 w4", file=program.stdin, flush=True)
            assert program.stdout is not None
            assert program.stdout.readline() == "(8,)\n"

        while not all(server.metric("encserve_answer_seconds_count") for server in servers):
            call()
        servers[0].process.kill()
        servers[0].wait()
        for _ in range(20):
            call()
        program.stdin.close()
        assert program.wait(timeout=60) == 0


def test_tls_and_key(tiny: Path, tmp_path: Path) -> None:
    """The program runs twice, with different keys. The server accepts the first key, and refuses the second key."""
    made = make_certificates(tmp_path)
    assert made.ca == tmp_path / "ca.pem"
    flags = [
        "--tls-cert-file",
        made.server.cert,
        "--tls-key-file",
        made.server.key,
        "--api-key-file",
        tmp_path / "keys",
    ]
    right, wrong = make_key(), make_key()
    (tmp_path / "keys").write_text(right)
    with real_server(tiny, *map(str, flags)) as server:
        for key, output in ((right, "(8,)"), (wrong, "refused: ")):
            (tmp_path / "key.txt").write_text(f"{key}\n")
            (line,) = printed(tmp_path, f"localhost:{server.grpc_port}", FOLDER / "tls_and_key.py")
            assert line.startswith(output)


def test_every_example_is_short_and_has_a_test_and_a_line_in_the_docs() -> None:
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == {*OUTPUTS, "million_texts", "two_servers", "tls_and_key"}
    page = (ROOT / "docs/how-to/call-from-python.md").read_text()
    for name in names:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 20
        assert f"(../../clients/examples/python/{name}.py)" in page


def test_pyright_accepts_the_programs_and_the_interface() -> None:
    """pyright needs Node.js, which .ci/run installs."""
    pyright, interface = Path(sys.executable).with_name("pyright"), ROOT / "tests/client/typing_api.py"
    command = list(map(str, [pyright, "--pythonpath", sys.executable, FOLDER, interface]))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
