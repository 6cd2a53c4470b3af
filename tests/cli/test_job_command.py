"""Tests of jobs. A job is `encserve embed` or `encserve encode` with a folder as output.

A job writes Parquet files, which are called parts. A part has one row for each input.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from command import TERMINAL, encserve
from fake_clock import FakeClock
from fake_encoder import FakeEncoder

from encserve_cli.commands import cli
from encserve_cli.job import (
    EmbedJob,
    Encoded,
    EngineOptions,
    JobProgress,
    MakeOptions,
    ModelFacts,
    Opened,
    PartLimits,
    RayOptions,
    ServerSource,
    Stopped,
    embed_files,
)
from encserve_cli.job import command as job_command
from encserve_cli.job.command import Interrupts
from encserve_cli.job.plan import Plan
from encserve_cli.job.progress import shown_progress
from encserve_cli.job.run import LocalRunner, PartWorker
from encserve_cli.job.sample import Sample, shared_out, take_sample
from encserve_cli.job.server import _joined, server_facts
from encserve_cli.job.types import BatchProgress, InputFile, Part, ReadOptions, Value
from encserve_client import Block, EncodedOutput, EncoderClient, EncodeResult, SequenceInfo, Timings
from encserve_proto.v1 import encoder_pb2 as pb

TEXTS = [" ".join(["word"] * (i % 7 + 1)) + f" {i}" for i in range(25)]
TOO_LONG = "word " * 70
WIDE_TERMINAL = {**TERMINAL, "COLUMNS": "150"}


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_cli.job.job.PartLimits", partial(PartLimits, max_rows=10))


def write_texts(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    path.write_text("".join(f"{it}\n" for it in texts), encoding="utf-8")
    return path


def table_of(folder: Path) -> pyarrow.Table:
    """Return the rows of all parts in a folder as one table. The parts are sorted by file name."""
    return pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in sorted(folder.glob("part-*.parquet"))])


def files_in(folder: Path) -> dict[str, int]:
    """Map the path of each file inside a folder to the modification time of the file in ns."""
    return {str(it.relative_to(folder)): it.stat().st_mtime_ns for it in folder.rglob("*") if it.is_file()}


def events_of(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with one line for each text of TEXTS."""
    return write_texts(tmp_path / "texts.txt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The path of a job's output folder, which does not exist yet."""
    return tmp_path / "vectors"


@pytest.fixture
def output(folder: Path) -> tuple[str, str]:
    """The flags with which the command runs a job that writes to `folder`."""
    return "--output", f"{folder}/"


async def test_a_folder_as_output_makes_a_job(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], folder: Path
) -> None:
    """Embed two input files. The parts, sorted by name, contain all texts in input order.

    All requests have bulk priority.
    """
    one = write_texts(tmp_path / "one.txt")
    two = tmp_path / "two.csv"
    two.write_text("n,text\n" + "".join(f"{i},more {i}\n" for i in range(12)))
    result = await encserve(service, "embed", one, two, *output)
    assert {it.priority for it in service.requests} == {pb.PRIORITY_BULK}
    want = [*TEXTS, *(f"more {i}" for i in range(12))]
    table = table_of(folder)
    assert table.column_names == ["text", "vector"]
    assert table["text"].to_pylist() == want
    with EncoderClient(service.target) as client:
        vectors = await asyncio.to_thread(client.embed, want)
    np.testing.assert_allclose(np.array(table["vector"].to_pylist(), np.float32), vectors)
    assert "37 rows in 5 parts" in result.stdout
    assert f"model tiny, version 1, fingerprint {'f' * 16}" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("name", ["{}", "file://{}"], ids=["a folder that exists", "a URI"])
async def test_an_output_makes_a_job(service: FakeEncoder, source: Path, folder: Path, name: str) -> None:
    folder.mkdir()  # noqa: ASYNC240
    await encserve(service, "embed", source, "--output", name.format(folder))
    assert table_of(folder)["text"].to_pylist() == TEXTS


async def test_rows_of_tokens_make_a_job_too(service: FakeEncoder, tmp_path: Path) -> None:
    texts = [" ".join(["word"] * (i % 5 + 1)) for i in range(24)]
    source = write_texts(tmp_path / "texts.txt", texts)
    for flags, special in (([], 2), (["--exclude-special"], 0)):
        folder = tmp_path / f"special-{special}"
        await encserve(service, "encode", source, "--output", f"{folder}/", *flags)
        table = table_of(folder)
        counts = [len(text.split()) + special for text in texts]
        assert [len(rows) for rows in table["rows"].to_pylist()] == counts
        assert [len(ids) for ids in table["token_ids"].to_pylist()] == counts
    ids = [[5, 6, 7], [8], [9, 10]]
    source = write_texts(tmp_path / "ids.txt", [",".join(map(str, row)) for row in ids])
    await encserve(service, "encode", source, "--ids", "--output", f"{tmp_path}/rows/")
    assert table_of(tmp_path / "rows")["token_ids"].to_pylist() == ids


async def test_columns_come_along(service: FakeEncoder, tmp_path: Path, output: tuple[str, str], folder: Path) -> None:
    path = tmp_path / "texts.parquet"
    columns = {"body": TEXTS, "id": range(25), "tag": ["x"] * 25, "date": ["y"] * 25}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    flags = ["--column", "body", "--keep", "id,tag", "--keep", "date"]
    await encserve(service, "embed", path, *flags, *output)
    table = table_of(folder)
    assert table.column_names == ["text", "vector", "id", "tag", "date"]
    assert table["id"].to_pylist() == list(range(25))


async def test_a_second_run_makes_missing_parts_only(
    service: FakeEncoder, output: tuple[str, str], source: Path, folder: Path
) -> None:
    """If no part is missing, a second run of the same command sends no request.

    After the test has removed one part, a further run writes only this part.
    """
    command = ("embed", source, *output)
    await encserve(service, *command)
    before, requests = files_in(folder), len(service.requests)
    result = await encserve(service, *command)
    assert "25 rows in 3 parts, 3 of them made before" in result.stdout
    assert files_in(folder) == before
    assert len(service.requests) == requests
    (folder / "part-00000-000001.parquet").unlink()
    await encserve(service, *command)
    after = files_in(folder)
    assert {name for name in after if after[name] != before[name]} == {"part-00000-000001.parquet"}
    assert table_of(folder)["text"].to_pylist() == TEXTS


async def test_another_job_is_refused_with_what_differs(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], source: Path, folder: Path
) -> None:
    other = write_texts(tmp_path / "other.txt")
    await encserve(service, "embed", source, *output)
    before = files_in(folder)
    for arguments, told in (
        ([source, "--dtype", "float16"], "dtype is 'float16'; the job has 'float32'"),
        ([source, "--pooling", "cls"], "kind is 'cls'; the job has 'model'"),
        ([source, other], f"{other} is no input of the job (--add-inputs adds it)"),
        ([other], f"the job has the input {source}, which is not given now"),
    ):
        result = await encserve(service, "embed", *arguments, *output, status=1)
        assert told in result.stderr
        assert "--overwrite" in result.stderr
        assert result.stderr.count("\n") == 1
    assert files_in(folder) == before
    service.fingerprint = "e" * 16
    result = await encserve(service, "embed", source, *output, status=1)
    assert "fingerprint is 'eeeeeeeeeeeeeeee'; the job has 'ffffffffffffffff'" in result.stderr


async def test_inputs_are_added(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], source: Path, folder: Path
) -> None:
    other = write_texts(tmp_path / "other.txt", ["one more"])
    await encserve(service, "embed", source, *output)
    result = await encserve(service, "embed", source, other, *output, "--add-inputs")
    assert "26 rows in 4 parts, 3 of them made before" in result.stdout
    assert table_of(folder)["text"].to_pylist() == [*TEXTS, "one more"]


async def test_another_job_is_overwritten(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], source: Path, folder: Path
) -> None:
    """A second job with other inputs and --overwrite removes the parts of the first job.

    A file that no job wrote stays in the folder.
    """
    other = write_texts(tmp_path / "other.txt", ["one more"])
    await encserve(service, "embed", source, *output)
    (folder / "notes").touch()
    await encserve(service, "embed", other, *output, "--overwrite")
    assert table_of(folder)["text"].to_pylist() == ["one more"]
    assert "notes" in files_in(folder)


async def test_a_dry_run_shows_the_plan_and_writes_nothing(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], source: Path, folder: Path
) -> None:
    """A dry run prints the numbers of rows and parts, and an estimate of the time.

    It also names the CSV file, because only one worker can read such a file.
    """
    table = tmp_path / "table.csv"
    table.write_text("text\none\n")
    command = ("embed", source, table, *output, "--dry-run")
    result = await encserve(service, *command)
    shown = " ".join(result.stdout.split())
    assert "inputs 2 files, 26 rows" in shown
    assert f"in order {table}: one worker reads it" in shown
    assert f"in order {source}" not in shown
    assert "parts 4" in shown
    assert "model tiny, version 1" in shown
    assert "engine server, float32" in shown
    assert "time about 0:00:00, as" in shown
    [plan] = events_of(await encserve(service, *command, "--json"))
    assert (plan["event"], plan["rows"], plan["parts"], plan["parts_before"]) == ("plan", 26, 4, 0)
    assert plan["estimated_seconds"] >= 0
    assert plan["output_bytes"] == 26 * 8 * 4 + plan["text_bytes"]
    assert not folder.exists()  # noqa: ASYNC240


async def test_a_dry_run_with_overwrite_removes_nothing(
    service: FakeEncoder, source: Path, output: tuple[str, str], folder: Path
) -> None:
    await encserve(service, "embed", source, *output)
    before = files_in(folder)
    await encserve(service, "embed", source, *output, "--overwrite", "--dtype", "float16", "--dry-run")
    assert files_in(folder) == before


async def test_rejected_rows_are_counted_and_named(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], folder: Path
) -> None:
    """If the server rejects a row, the command names the row and exits with status 3.

    A second run has nothing to compute, and also exits with status 3.
    """
    source = write_texts(tmp_path / "texts.txt", [*TEXTS, TOO_LONG])
    command = ("embed", source, *output)
    result = await encserve(service, *command, status=3)
    assert f"rejected: 1 row, such as {source}, row 26: has 72 tokens" in result.stdout
    assert f"{folder}/_rejected says which and why" in result.stdout
    assert table_of(folder)["vector"].to_pylist()[-1] is None
    again = await encserve(service, *command, status=3)
    assert "rejected: 1 row\n" in again.stdout


async def test_too_many_rejected_rows_fail_the_job(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str]
) -> None:
    source = write_texts(tmp_path / "texts.txt", [*TEXTS, TOO_LONG])
    await encserve(service, "embed", source, *output, "--max-rejected", "1", status=3)
    result = await encserve(service, "embed", source, *output, "--max-rejected", "0", status=1)
    assert "1 rows were rejected, more than --max-rejected 0" in result.stderr


async def test_a_failure_is_one_line(
    service: FakeEncoder, tmp_path: Path, source: Path, output: tuple[str, str], folder: Path
) -> None:
    for arguments, told in (
        ([source, "--model", "none"], "'none' is not loaded"),
        ([tmp_path / "missing.txt"], "missing.txt"),
        ([source, "--keep", "id"], "--keep is for"),
    ):
        result = await encserve(service, "embed", *arguments, *output, status=1)
        assert result.stderr.startswith("Error: ")
        assert told in result.stderr
        assert result.stderr.count("\n") == 1
    assert not folder.exists()  # noqa: ASYNC240


async def test_programs_read_json_lines(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], folder: Path
) -> None:
    source = write_texts(tmp_path / "texts.txt", [*TEXTS, TOO_LONG])
    result = await encserve(service, "embed", source, *output, "--json", status=3)
    plan, *progress, done = events_of(result)
    assert (plan["event"], plan["rows"], plan["model"]["fingerprint"]) == ("plan", 26, "f" * 16)
    assert {it["event"] for it in progress} == {"progress"}
    assert {"rows", "total_rows", "tokens_per_second", "padding", "seconds_left"} <= progress[0].keys()
    assert (done["event"], done["rows"], done["rejected"], done["parts"]) == ("done", 26, 1, 3)
    assert done["rejected_output"] == f"{folder}/_rejected"
    assert done["first_rejected"].startswith(f"{source}, row 26")
    assert done["tokens"] == sum(len(text.split()) + 2 for text in TEXTS)
    assert result.stderr == ""


async def test_progress_of_a_job_is_shown_on_a_terminal(
    service: FakeEncoder, source: Path, output: tuple[str, str]
) -> None:
    result = await encserve(service, "embed", source, *output, env=WIDE_TERMINAL)
    assert "/25 rows" in result.stderr
    assert "25 rows in 3 parts" in result.stdout


def progress_at(rows: int, seconds: float = 10.0, padding: float | None = 0.125) -> JobProgress:
    return JobProgress(rows, 1000, rows // 10, 100, 2, rows * 50, padding, seconds, 3700.0 if rows else None)


def test_in_a_log_there_is_a_line_every_30_s(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    with shown_progress(1000, as_json=False, clock=clock.now) as told:
        for second in range(95):
            told(progress_at(second * 10))
            clock.advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["300", "600", "900"]
    assert lines[0] == ("300 of 1,000 rows, 30 of 100 parts, 2 rejected, 1,500 tokens/s, 12.5% padding, 1:01:40 left")


def test_programs_are_told_at_most_once_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    with shown_progress(1000, as_json=True, clock=clock.now) as told:
        for step in range(21):
            told(progress_at(step))
            clock.advance(0.125)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [it["rows"] for it in events] == [0, 8, 16]


def test_what_is_not_known_yet_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The progress line leaves out unknown figures.

    Before the first batch, the speed and the remaining time are unknown. If a server encodes, the padding is unknown.
    """
    for name, value in WIDE_TERMINAL.items():
        monkeypatch.setenv(name, value)
    clock = FakeClock()
    with shown_progress(1000, as_json=False, clock=clock.now) as told:
        told(progress_at(0, seconds=0.0, padding=None))
        clock.advance(1)
        told(progress_at(10, padding=None))
    shown = capsys.readouterr().err
    assert "/1000 rows" in shown
    assert "50 tokens/s, 1:01:40 left" in shown
    assert "padding" not in shown


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        *((flags, flags[0]) for flags in (["--vectors"], ["--keep", "id"], ["--overwrite"], ["--add-inputs"])),
        *((flags, flags[0]) for flags in (["--dry-run"], ["--max-rejected", "0"], ["--ray", "auto"])),
        (["--output", "file.npy", "--dry-run"], "--dry-run"),
        (["--device", "cpu"], "--device goes with --bundle"),
        (["--bundle", "b", "--overwrite"], "--overwrite"),
        (["--output", "folder/", "--engine", "openvino"], "--engine goes with --bundle"),
        (["--output", "folder/", "--max-batch-tokens", "512"], "--max-batch-tokens goes with --bundle"),
        (["--output", "folder/", "--cache-dir", "c"], "--cache-dir goes with --bundle"),
        (["--output", "folder/", "--ray", "auto"], "--ray goes with --bundle"),
        (["--output", "folder/", "--bundle", "b", "--actors", "2"], "--actors goes with --ray"),
        (["--output", "folder/", "--bundle", "b", "--model", "m"], "--model is of a server"),
        (["--output", "folder/", "--bundle", "b", "--model-version", "1"], "--model-version is of a server"),
        (["--output", "folder/", "--vectors", "--ids"], "--vectors or --ids"),
        (["--output", "folder/", "--overwrite", "--add-inputs"], "--overwrite or --add-inputs"),
        (["--output", "folder/", "--text"], "--text"),
        (["--output", "folder/", "--pooling", "mean", "--kind", "sparse"], "--pooling"),
        (["--output", "s3://bucket/vectors.npy"], "--output s3://bucket/vectors.npy"),
    ],
)
def test_options_that_do_not_go_together(
    flags: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command exits with status 2, and the error names the option.

    The command sends no request and writes no file.
    """
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["--target", "127.0.0.1:1", "embed", "texts.txt", *flags])
    assert result.exit_code == 2, result.output
    assert named in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_an_output_without_a_suffix_says_how_a_folder_is_named(source: Path, folder: Path) -> None:
    result = CliRunner().invoke(cli, ["embed", str(source), "--pooling", "mean", "--output", str(folder)])
    assert result.exit_code == 1
    assert "End the name of a folder with /" in result.stderr


def test_the_help_of_jobs_is_in_sections() -> None:
    for command in ("embed", "encode"):
        shown = CliRunner().invoke(cli, [command, "--help"]).stdout
        titles = ("\nOptions:", "  --column", "\nJobs (--output FOLDER/):", "  --overwrite", "  --bundle", "  --actors")
        places = [shown.index(title) for title in titles]
        assert places == sorted(places)
        assert "Without a server:" in shown
        assert "\\b" not in shown


FACTS = ModelFacts("words", "1", "f" * 16, "", "mean", 2, 100, "onnxruntime", "float32", 512, 2, 2)


@dataclass
class Words:
    """A fake bundle for jobs, without a model.

    The vector of a text is (number of words, 0). The text "bad" is refused.

    Each call of `encode` first calls `on_encode` with this object.
    """

    on_encode: Callable[["Words"], None] | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    encoded: list[int] = field(default_factory=list)

    def open(self, make: MakeOptions, kind: str | None, before: ModelFacts | None) -> Opened:
        return Opened(
            replace(make, kind=kind or "model"),
            FACTS,
            lambda plan, store: LocalRunner(PartWorker(plan, self, store)),
            lambda: None,
            lambda: self,
        )

    def encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        if self.on_encode is not None:
            self.on_encode(self)
        if self.stopped.is_set():
            raise Stopped
        self.encoded.append(len(values))
        refused = {place: "is bad" for place, it in enumerate(values) if it == "bad"}
        counts = [len(it.split()) for it in values if isinstance(it, str) and it != "bad"]
        rows: npt.NDArray[np.float32] = np.array([[it, 0] for it in counts], np.float32)
        on_batch(len(values), sum(counts), 2 * sum(counts))
        output = EncodedOutput("model", False, (Block(rows, np.ones(len(counts), np.uint32), None),), 0)
        infos = tuple(SequenceInfo(count, count, False, None, None, None, None) for count in counts)
        result = EncodeResult("words", "1", "f" * 16, (output,), infos, Timings(0, 0, 0, 0, 0, 0), "")
        return Encoded(result, refused, sum(counts), 2 * sum(counts))

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        pass


@pytest.fixture
def run_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs a job on TEXTS. The job uses a `Words` object instead of a bundle."""
    source = write_texts(tmp_path / "texts.txt")

    def run(words: Any, *flags: str) -> Result:
        monkeypatch.setattr(job_command, "source_of", lambda **_: words)
        command = ["embed", str(source), "--output", f"{tmp_path}/vectors/", "--bundle", "words", *flags]
        return CliRunner().invoke(cli, command)

    return run


def press_ctrl_c(number: int = signal.SIGINT) -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_after_the_batch_and_says_how_to_go_on(
    run_words: Callable[..., Result], number: int, folder: Path
) -> None:
    """Ctrl-C or SIGTERM ends the job after the current batch. The same command then computes the missing parts."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    once = threading.Lock()  # the job encodes three parts at a time, but only one part sends the signal

    def interrupt(words: Words) -> None:
        if words.encoded and once.acquire(blocking=False):
            press_ctrl_c(number)
            words.stopped.wait(30)

    result = run_words(Words(interrupt))
    assert result.exit_code == 130, result.output
    done = len(list(folder.glob("part-*")))
    assert f"{done} of 3 parts are in {folder}; the same command goes on from there" in result.stderr
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    words = Words()
    assert run_words(words).exit_code == 0
    assert len(words.encoded) == 3 - done
    assert table_of(folder)["text"].to_pylist() == TEXTS


def test_ctrl_c_before_the_job_begins(run_words: Callable[..., Result], folder: Path) -> None:
    class Loading(Words):
        def open(self, *_: Any) -> Opened:
            press_ctrl_c()
            raise AssertionError("Ctrl-C did not end the job")

    result = run_words(Loading())
    assert result.exit_code == 130
    assert "nothing was computed" in result.stderr
    assert not folder.exists()


def test_the_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)

    class Job:
        stops = 0

        def stop(self) -> None:
            self.stops += 1

    with Interrupts() as interrupts:
        interrupts.job = job = Job()  # type: ignore[assignment]
        press_ctrl_c()
        assert job.stops == 1
        with pytest.raises(SystemExit, match="130"):
            press_ctrl_c()
    assert job.stops == 1
    assert "once more ends at once" in capfd.readouterr().err


def test_an_error_while_it_stops_is_not_a_failure(run_words: Callable[..., Result]) -> None:
    once = threading.Lock()

    def interrupt(words: Words) -> None:
        if once.acquire(blocking=False):
            press_ctrl_c()
        words.stopped.wait(30)
        raise RuntimeError("the server has no room")

    assert run_words(Words(interrupt)).exit_code == 130


def test_a_bundle_that_cannot_be_used_is_one_line(run_words: Callable[..., Result]) -> None:
    class Broken(Words):
        def open(self, *_: Any) -> Opened:
            raise RuntimeError("manifest.json: checksum\nis wrong")

    result = run_words(Broken())
    assert result.exit_code == 1
    assert result.stderr == "Error: manifest.json: checksum is wrong\n"


def test_a_dry_run_shows_how_a_bundle_is_run(run_words: Callable[..., Result]) -> None:
    shown = " ".join(run_words(Words(), "--dry-run").stdout.split())
    assert "engine onnxruntime, float32, batches of 512 tokens, 2 threads, 2 batches at once" in shown


def test_a_dry_run_counts_with_all_actors_of_a_cluster(
    run_words: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cluster(Words):
        def open(self, *options: Any) -> Opened:
            return replace(super().open(*options), workers=lambda: 2)

    taken = Sample(rows=8, text_bytes=100, tokens=20, seconds=10.0)
    monkeypatch.setattr(job_command, "take_sample", lambda *_: taken)
    [alone] = events_of(run_words(Words(), "--dry-run", "--json"))
    [shared] = events_of(run_words(Cluster(), "--dry-run", "--json"))
    assert shared["estimated_seconds"] == pytest.approx(alone["estimated_seconds"] / 2, rel=0.3)
    shown = " ".join(run_words(Cluster(), "--dry-run").stdout.split())
    assert "on 2 actors, as 8 rows took 10.00 s on one" in shown


def test_a_dry_run_of_a_job_that_is_done(run_words: Callable[..., Result]) -> None:
    words = Words()
    run_words(words)
    shown = " ".join(run_words(words, "--dry-run").stdout.split())
    assert "parts 3, of which 3 are done" in shown
    assert "time none, as all parts are done" in shown
    [plan] = events_of(run_words(words, "--dry-run", "--json"))
    assert plan["estimated_seconds"] == 0
    assert len(words.encoded) == 3, "the dry run must not encode a sample"


def test_work_is_shared_out_as_far_as_it_can_be_divided() -> None:
    """`shared_out` divides parts among workers, and returns the number of bytes of each worker.

    A file with `in_order` can only be read from its start, so one worker gets all parts of the file. Other parts may
    go to any worker.
    """

    def shares(workers: int, *, in_order: bool = False) -> list[int]:
        files = (InputFile("a", 0, 0, 3, in_order), InputFile("b.txt", 0, 0, 2, False))
        parts = [Part(0, number, 0, 1, 0, 0, 20) for number in range(3)] + [Part(1, i, 0, 1, 0, 0, 15) for i in (0, 1)]
        plan = Plan(ReadOptions(), MakeOptions(), FACTS, files, tuple(parts), {})
        return sorted(shared_out(plan, parts, workers))

    assert shares(1) == [90]
    assert shares(3) == [20, 35, 35]
    assert shares(100) == [15, 15, 20, 20, 20]
    assert shares(2, in_order=True) == [30, 60]
    assert shares(100, in_order=True) == [15, 15, 60]


def test_a_bundle_makes_single_files_and_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path) -> None:
    """`--bundle` also works if the output is a single file or is printed.

    If an input is refused, the error names the line of the input.
    """
    monkeypatch.setattr(job_command, "source_of", lambda **_: Words())
    command = ["embed", str(source), "--bundle", "words"]
    result = CliRunner().invoke(cli, [*command, "--output", str(tmp_path / "vectors.npy")])
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "vectors.npy")[:, 0].tolist() == [len(it.split()) for it in TEXTS]
    assert "model words, version 1" in result.stdout
    printed = CliRunner().invoke(cli, ["embed", "a text", "--bundle", "words", "--json"])
    [sequence] = json.loads(printed.stdout)["sequences"]
    assert (sequence["text"], sequence["vector"]) == ("a text", [2.0, 0.0])
    assert "shape (1, 2)" in CliRunner().invoke(cli, ["embed", "a text", "--bundle", "words"]).stdout
    write_texts(source, ["good", "bad"])
    refused = CliRunner().invoke(cli, [*command, "--output", str(tmp_path / "more.npy")])
    assert refused.exit_code == 1
    assert refused.stderr == f"Error: {source}, line 2: is bad\n"


def test_options_of_bundles_and_clusters_are_handed_on(
    monkeypatch: pytest.MonkeyPatch, source: Path, output: tuple[str, str]
) -> None:
    found: dict[str, Any] = {}

    def source_of(**options: Any) -> Words:
        found.update(options)
        return Words()

    monkeypatch.setattr(job_command, "source_of", source_of)
    flags = ["--engine", "openvino", "--precision", "bfloat16", "--max-batch-tokens", "9", "--tokenizer-threads", "3"]
    flags += ["--ray", "auto", "--actors", "4", "--actor-cpus", "2"]
    command = ["embed", str(source), *output, "--bundle", "b", *flags]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert found["bundle"] == "b"
    assert found["client"] is None
    assert found["engine"] == EngineOptions("openvino", "bfloat16", max_batch_tokens=9, tokenizer_threads=3)
    assert found["ray"] == RayOptions("auto", 4, 2)


def open_words(source: Path, words: Words) -> EmbedJob:
    return EmbedJob(
        [str(source)],
        f"{source.parent}/vectors",
        words,
        read=ReadOptions(),
        make=MakeOptions(),
        limits=PartLimits(),
        save=False,
    )


def test_a_sample_is_taken_until_it_has_taken_a_while(tmp_path: Path) -> None:
    """The first sample has 1 row, and each further sample has twice as many rows, up to 512.

    No further sample starts after 1.5 s. The result has the rows and the time of the last sample.
    """
    with open_words(write_texts(tmp_path / "texts.txt", TEXTS * 40), Words()) as job:
        clock = FakeClock()
        slow = Words(lambda _: clock.advance(0.5))
        sample = take_sample(job.plan, job.plan.parts[0], slow, clock.now)
        assert slow.encoded == [1, 2, 4]
        assert sample is not None
        assert (sample.rows, sample.seconds) == (4, 0.5)
        assert sample.seconds_of(10 * sample.text_bytes) == 5.0
        quick = Words()
        take_sample(job.plan, job.plan.parts[0], quick, FakeClock().now)
        assert quick.encoded == [2**i for i in range(10)]


def test_empty_texts_give_no_sample(tmp_path: Path) -> None:
    words = Words()
    with open_words(write_texts(tmp_path / "texts.txt", ["", ""]), words) as job:
        assert take_sample(job.plan, job.plan.parts[0], words, FakeClock().now) is None


async def test_files_are_embedded_from_python(service: FakeEncoder, source: Path, folder: Path) -> None:
    """The Python function `embed_files` writes the parts, reports progress and returns a summary."""
    told = list[JobProgress]()

    def embed() -> Any:
        with EncoderClient(service.target, priority="bulk") as client:
            return embed_files([source], folder, client=client, on_progress=told.append)

    summary = await asyncio.to_thread(embed)
    assert (summary.rows, summary.rejected, summary.parts, summary.plan.model.model) == (25, 0, 3, "tiny")
    assert (told[-1].rows, told[-1].total_rows, told[-1].parts) == (25, 25, 3)
    assert table_of(folder)["text"].to_pylist() == TEXTS


def test_python_callers_name_a_bundle_or_a_client(source: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="bundle or client: give one of them"):
        embed_files([source], folder)
    with EncoderClient("127.0.0.1:1") as client, pytest.raises(ValueError, match="engine: is for a bundle"):
        embed_files([source], folder, client=client, engine=EngineOptions())
    with pytest.raises(ValueError, match="model, model_version: are for a client"):
        embed_files([source], folder, bundle="b", model="m")


async def test_a_job_goes_on_with_its_version_while_that_is_served(service: FakeEncoder) -> None:
    """A resumed job uses the model version that the user names.

    If the user names no version, the job uses its old version again. If the server no longer has the old version, the
    job uses the server's default version.
    """
    with EncoderClient(service.target) as client:
        old = await asyncio.to_thread(client.model)
    new = replace(old, version="2", fingerprint="e" * 16)

    class Client:
        served = (old, new)

        def model(self, name: str | None, version: str | None) -> Any:
            return new

        def models(self) -> Any:
            return self.served

    fake: Any = Client()
    facts = server_facts(old, MakeOptions())
    assert ServerSource(fake).open(MakeOptions(), None, None).model.version == "2"
    assert ServerSource(fake).open(MakeOptions(), None, facts).model.version == "1"
    assert ServerSource(fake, None, "2").open(MakeOptions(), None, facts).model.version == "2"
    fake.served = (new,)
    assert ServerSource(fake).open(MakeOptions(), None, facts).model.version == "2"


def test_without_ray_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, source: Path, folder: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "encserve_cli.job.ray", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'encserve-cli\[ray\]'"):
        embed_files([source], folder, bundle="b", ray=RayOptions())


@pytest.mark.system
def test_jobs_import_neither_a_server_nor_ray() -> None:
    unwanted = "{'ray', 'encserve_server', 'onnxruntime', 'pandas', 'tokenizers'}"
    code = f"import sys, encserve_cli.job, encserve_cli.job.command; print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_only_files_of_jobs_are_removed_and_inputs_are_no_outputs(
    service: FakeEncoder, source: Path, folder: Path, output: tuple[str, str]
) -> None:
    """--overwrite keeps Parquet files of other programs. The names of Spark's files also begin with part-.

    A file in the output folder is refused as an input.
    """
    folder.mkdir()  # noqa: ASYNC240
    theirs = folder / "part-00000-3f2a-c000.snappy.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), theirs)
    await encserve(service, "embed", source, *output)
    await encserve(service, "embed", source, *output, "--overwrite")
    assert theirs.exists()
    result = await encserve(service, "embed", theirs, *output, "--overwrite", status=1)
    assert "is an input in the folder of the output" in result.stderr


async def test_what_the_model_does_not_have_removes_nothing(
    service: FakeEncoder, source: Path, folder: Path, output: tuple[str, str]
) -> None:
    await encserve(service, "embed", source, *output)
    before = files_in(folder)
    for flags, problem in (
        (["--prompt-name", "nope"], "--prompt-name 'nope': model tiny does not have it"),
        (["--task", "query"], "--task query: model tiny does not know it"),
        (["--dimensions", "9999"], "--dimensions 9999: must be at most 8"),
        (["--kind", "sparse"], "--kind sparse: model tiny does not have it"),
    ):
        result = await encserve(service, "embed", source, *output, "--overwrite", *flags, status=1)
        assert files_in(folder) == before, flags
        assert problem in " ".join(result.stderr.split())


async def test_added_inputs_may_come_before_those_that_are_there(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], folder: Path
) -> None:
    """Add the file b.txt between the old inputs a.txt and c.txt. The rows are then in the order of the file names.

    A later run with the same three files also works without --add-inputs.
    """
    for name in "ac":
        write_texts(tmp_path / f"{name}.txt")
    await encserve(service, "embed", tmp_path / "a.txt", tmp_path / "c.txt", *output)
    write_texts(tmp_path / "b.txt")
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for flags in (["--add-inputs"], ["--add-inputs"], []):
        await encserve(service, "embed", *paths, *output, *flags)
    assert table_of(folder)["text"].to_pylist() == TEXTS * 3


def test_a_message_without_rows_keeps_the_indices_of_others() -> None:
    def result(places: list[int], lengths: list[int]) -> tuple[list[int], EncodeResult]:
        rows = sum(lengths)
        indices = np.arange(rows, dtype=np.uint32) if rows else None
        block = Block(np.ones((rows, 1), np.float32), np.array(lengths), indices)
        info = SequenceInfo(1, 1, False, None, None, None, None)
        output = EncodedOutput("sparse", False, (block,), 10)
        return places, EncodeResult("m", "1", "f", (output,), (info,) * len(lengths), Timings(0, 0, 0, 0, 1, 1))

    vectors = _joined([result([1, 3], [0, 0]), result([2, 0], [2, 1])]).outputs[0].sparse_vectors()
    assert [it.indices.tolist() for it in vectors] == [[2], [], [0, 1], []]
