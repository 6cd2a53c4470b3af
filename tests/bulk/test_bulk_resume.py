"""`encserve embed` writes one row for each text, even after interruptions.

The memory of a job does not grow with the number of texts.
"""

import contextlib
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import inputs, table_of
from embed_jobs import (
    MOST_SECONDS,
    check_rows,
    digests,
    kill,
    part_names,
    run,
    running,
    said,
    short_texts,
    write_corpus,
)

from encserve_cli.job import EmbedJob, EngineOptions, LocalBackend, LocalWorker, MakeOptions, ModelFacts, ReadOptions

ROWS, MANY_ROWS = 200_000, 1_000_000
FEWER_ROWS = 100_000
PART_ROWS = 2048
KILLS = 5
MIB = 1024 * 1024
SOME_REJECTED = 3

pytestmark = pytest.mark.timeout(2400)


@dataclass(frozen=True)
class Done:
    """The results of an uninterrupted job.

    Attributes:
        output: The output folder.
        seconds: The duration of the job.
        peak_bytes: The peak resident memory of the job's process, in bytes.
    """

    output: Path
    seconds: float
    peak_bytes: int


def command(corpus: Path, output: Path, bundle: Path) -> tuple[object, ...]:
    options = ("--keep", "id", "--output", f"{output}/", "--bundle", bundle, "--max-batch-tokens", 4096)
    return ("embed", *inputs(corpus), *options)


def peak_bytes(process: "subprocess.Popen[str]") -> int:
    """The peak resident memory of a process in bytes, or 0 if the process has ended."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def run_alone(corpus: Path, output: Path, bundle: Path) -> Done:
    began, peak = time.monotonic(), 0
    with running(*command(corpus, output, bundle)) as process:
        while process.poll() is None:
            peak = max(peak, peak_bytes(process))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        assert process.stderr is not None
        assert process.returncode == SOME_REJECTED, process.stderr.read()
    return Done(output, time.monotonic() - began, peak)


@pytest.fixture(scope="module", params=[ROWS, pytest.param(MANY_ROWS, marks=pytest.mark.weekly)])
def rows(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def corpus(rows: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts", rows)[0]


@pytest.fixture(scope="module")
def alone(corpus: Path, encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run_alone(corpus, tmp_path_factory.mktemp("alone") / "vectors", encoder)


def killed_at_random(rows: int, corpus: Path, output: Path, bundle: Path, part_seconds: float) -> Iterator[list[str]]:
    """Start and kill the job KILLS times. After each kill, yield the names of the finished output files."""
    parts = -(-rows // PART_ROWS)
    for begun in sorted(random.sample(range(parts - 3), KILLS)):
        with running(*command(corpus, output, bundle)) as process:
            while len(part_names(output)) < begun and process.poll() is None:
                time.sleep(0.01)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(random.uniform(0, part_seconds))
            assert process.poll() is None, "the job ended before the kill"
            kill(process)
        yield part_names(output)


def test_the_output_has_every_row_once_in_order(rows: int, alone: Done) -> None:
    check_rows(table_of(alone.output), short_texts(rows))


def test_a_job_killed_five_times_gives_the_same_bytes(
    rows: int, corpus: Path, alone: Done, encoder: Path, tmp_path: Path
) -> None:
    """A job that was killed five times writes the same files as an uninterrupted job.

    The last run does not write finished output files again.
    """
    output = tmp_path / "vectors"
    made: dict[str, int] = {}
    for names in killed_at_random(rows, corpus, output, encoder, alone.seconds * PART_ROWS / rows):
        made = {name: (output / name).stat().st_mtime_ns for name in names} | made
    last = run(*command(corpus, output, encoder), seconds=2300)
    assert last.returncode == SOME_REJECTED, last.stderr
    assert f"{len(made):,} of them made before" in last.stdout
    assert digests(output) == digests(alone.output)
    assert {name: (output / name).stat().st_mtime_ns for name in made} == made


def test_memory_does_not_grow_with_the_rows(alone: Done, encoder: Path, tmp_path: Path) -> None:
    fewer = run_alone(write_corpus(tmp_path / "texts", FEWER_ROWS)[0], tmp_path / "vectors", encoder)
    assert alone.peak_bytes <= max(1.1 * fewer.peak_bytes, fewer.peak_bytes + 64 * MIB)


def test_two_simultaneous_runs_of_a_job(encoder: Path, tmp_path: Path) -> None:
    files = write_corpus(tmp_path / "texts", 20_000, files=10)
    both = ("embed", *inputs(*files), "--keep", "id", "--bundle", encoder, "--output", f"{tmp_path}/both/")
    with running(*both) as one, running(*both) as other:
        for process in (one, other):
            _, err = process.communicate(timeout=MOST_SECONDS)
            assert (process.returncode, said(err)) == (SOME_REJECTED, [])
    check_rows(table_of(tmp_path / "both"), short_texts(20_000))


class SlowBackend(LocalBackend):
    """A LocalBackend that calls `other()` before it opens the model of a new job.

    In the test, `other` starts the same job with another backend.
    """

    def __init__(self, bundle: Path, other: Callable[[], None]) -> None:
        super().__init__(bundle, EngineOptions())
        self._other = other

    def open(self, make: MakeOptions, before: ModelFacts | None) -> LocalWorker:
        if before is None:
            self._other()
        return super().open(make, before)


def test_the_slower_of_two_runs_uses_the_plan_of_the_faster(encoder: Path, tmp_path: Path) -> None:
    corpus, output = write_corpus(tmp_path / "texts", 100)[0], str(tmp_path / "vectors")

    def job(backend: LocalBackend) -> EmbedJob:
        return EmbedJob([str(corpus)], output, backend, read=ReadOptions(), make=MakeOptions())

    faster = LocalBackend(encoder, EngineOptions(max_batch_tokens=96))
    with job(SlowBackend(encoder, lambda: job(faster).close())) as it:
        assert it.plan.model.max_batch_tokens == 96
        assert it.run().parts_before == 0
