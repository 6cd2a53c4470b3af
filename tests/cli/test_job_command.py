"""Tests of jobs. A job is `encserve embed` or `encserve encode` with a folder as output.

A job writes Parquet files, which are called parts. A part has one row for each input.
"""

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from command import TERMINAL, encserve, inputs, rejected_of, table_of
from fake_clock import FakeClock
from fake_encoder import FakeEncoder, Refused
from waiting import until

from encserve_cli.commands import cli
from encserve_cli.files import encoding, rows
from encserve_cli.files.reading import ReadOptions
from encserve_cli.files.rows import Value
from encserve_cli.job import (
    EmbedJob,
    Encoded,
    EngineOptions,
    JobProgress,
    LocalWorker,
    MakeOptions,
    ModelFacts,
    RayOptions,
    ServerBackend,
    Shard,
    Stopped,
    embed_files,
)
from encserve_cli.job import command as job_command
from encserve_cli.job.server import server_facts
from encserve_cli.job.store import LocalStore
from encserve_cli.job.types import BatchProgress
from encserve_cli.progress import ProgressCounter, shown_progress
from encserve_client import (
    Block,
    EncodedOutput,
    EncoderClient,
    EncodeResult,
    EncserveError,
    InvalidRequestError,
    SequenceInfo,
    ServerError,
    Timings,
)
from encserve_proto.v1 import encoder_pb2 as pb

TEXTS = [" ".join(["word"] * (i % 7 + 1)) + f" {i}" for i in range(25)]
TOO_LONG = "word " * 70
WIDE_TERMINAL = {**TERMINAL, "COLUMNS": "150"}


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VECTOR_ROWS", "RAGGED_ROWS"):
        monkeypatch.setattr(f"encserve_cli.job.plan.{name}", 10)


def write_texts(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    path.write_text("".join(f"{it}\n" for it in texts), encoding="utf-8")
    return path


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
    result = await encserve(service, "embed", *inputs(one, two), *output)
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
    await encserve(service, "embed", *inputs(source), "--output", name.format(folder))
    assert table_of(folder)["text"].to_pylist() == TEXTS


async def test_rows_of_tokens_make_a_job_too(service: FakeEncoder, tmp_path: Path) -> None:
    texts = [" ".join(["word"] * (i % 5 + 1)) for i in range(24)]
    source = write_texts(tmp_path / "texts.txt", texts)
    for flags, special in (([], 2), (["--exclude-special"], 0)):
        folder = tmp_path / f"special-{special}"
        await encserve(service, "encode", *inputs(source), "--output", f"{folder}/", *flags)
        table = table_of(folder)
        counts = [len(text.split()) + special for text in texts]
        assert [len(rows) for rows in table["rows"].to_pylist()] == counts
        assert [len(ids) for ids in table["token_ids"].to_pylist()] == counts
    ids = [[5, 6, 7], [8], [9, 10]]
    source = write_texts(tmp_path / "ids.txt", [",".join(map(str, row)) for row in ids])
    await encserve(service, "encode", *inputs(source), "--ids", "--output", f"{tmp_path}/rows/")
    assert table_of(tmp_path / "rows")["token_ids"].to_pylist() == ids


async def test_kept_columns_are_copied(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], folder: Path
) -> None:
    path = tmp_path / "texts.parquet"
    columns = {"body": TEXTS, "id": range(25), "tag": ["x"] * 25, "date": ["y"] * 25}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    flags = ["--column", "body", "--keep", "id,tag", "--keep", "date"]
    await encserve(service, "embed", *inputs(path), *flags, *output)
    table = table_of(folder)
    assert table.column_names == ["text", "vector", "id", "tag", "date"]
    assert table["id"].to_pylist() == list(range(25))


async def test_a_second_run_makes_missing_parts_only(
    service: FakeEncoder, output: tuple[str, str], source: Path, folder: Path
) -> None:
    """If no part is missing, a second run of the same command sends no request.

    After the test has removed one part, a further run writes only this part.
    """
    command = ("embed", *inputs(source), *output)
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


async def test_the_error_of_another_job_names_the_differences(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], source: Path, folder: Path
) -> None:
    other = write_texts(tmp_path / "other.txt", ["other"])
    await encserve(service, "embed", *inputs(source), *output)
    before = files_in(folder)
    for arguments, told in (
        ([*inputs(source), "--dtype", "float16"], "dtype is 'float16'; the job has 'float32'"),
        ([*inputs(source), "--pooling", "cls"], "kind is 'cls'; the job has 'model'"),
        (inputs(source, other), f"{other} is not an input of the job (--add-inputs adds it)"),
        (inputs(other), f"the job has the input {source}, which is not given now"),
    ):
        result = await encserve(service, "embed", *arguments, *output, status=1)
        assert told in result.stderr
        assert "--overwrite" in result.stderr
        assert result.stderr.count("\n") == 1
    assert files_in(folder) == before
    service.fingerprint = "e" * 16
    result = await encserve(service, "embed", *inputs(source), *output, status=1)
    assert "fingerprint is 'eeeeeeeeeeeeeeee'; the job has 'ffffffffffffffff'" in result.stderr


async def test_another_job_is_overwritten(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], source: Path, folder: Path
) -> None:
    """A second job with other inputs and --overwrite removes the parts of the first job.

    A file that no job wrote stays in the folder. The names of Spark's files also begin with part-.
    """
    other = write_texts(tmp_path / "other.txt", ["one more"])
    folder.mkdir()  # noqa: ASYNC240
    (folder / "part-00000-3f2a-c000.snappy.parquet").touch()
    await encserve(service, "embed", *inputs(source), *output)
    await encserve(service, "embed", *inputs(other), *output, "--overwrite")
    part = "part-00000-000000.parquet"
    assert files_in(folder).keys() == {"_job.json", part, "part-00000-3f2a-c000.snappy.parquet"}
    assert pyarrow.parquet.read_table(folder / part)["text"].to_pylist() == ["one more"]


async def test_rejected_rows_are_counted_and_named(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], folder: Path
) -> None:
    """If the server rejects a row, the command names the row and exits with status 3.

    A second run has nothing to compute, and also exits with status 3. An empty text has a vector.
    """
    source = write_texts(tmp_path / "texts.txt", [*TEXTS, TOO_LONG, ""])
    command = ("embed", *inputs(source), *output)
    result = await encserve(service, *command, status=3)
    assert f"rejected: 1 row, such as {source}, line 26: has 72 tokens" in result.stdout
    assert f"{folder}/_rejected has the reasons" in result.stdout
    assert [it is None for it in table_of(folder)["vector"].to_pylist()[-2:]] == [True, False]
    again = await encserve(service, *command, status=3)
    assert "rejected: 1 row\n" in again.stdout


async def test_too_many_rejected_rows_fail_the_job(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str]
) -> None:
    source = write_texts(tmp_path / "texts.txt", [*TEXTS, TOO_LONG])
    await encserve(service, "embed", *inputs(source), *output, "--max-rejected", "1", status=3)
    result = await encserve(service, "embed", *inputs(source), *output, "--max-rejected", "0", status=1)
    assert "1 rows were rejected, more than --max-rejected 0" in result.stderr


async def test_a_failure_is_one_line(
    service: FakeEncoder, tmp_path: Path, source: Path, output: tuple[str, str], folder: Path
) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"no parquet")
    table = write_texts(tmp_path / "table.csv", ["n,m", "1,2"])
    for arguments, told in (
        ([*inputs(source), "--model", "none"], "'none' is not loaded"),
        (inputs(source, tmp_path / "missing.txt"), "missing.txt"),
        (inputs(source, broken), "broken.parquet: cannot be read as Parquet: "),
        (inputs(source, table), "table.csv, line 1: has no column 'text'; the columns are 'n', 'm'"),
        ([*inputs(source), "--keep", "id"], "--keep is for"),
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
    result = await encserve(service, "embed", *inputs(source), *output, "--json", status=3)
    plan, *progress, done = events_of(result)
    assert (plan["event"], plan["rows"], plan["model"]["fingerprint"]) == ("plan", 26, "f" * 16)
    assert {it["event"] for it in progress} == {"progress"}
    assert {"rows", "total_rows", "parts", "tokens_per_second", "seconds_left"} <= progress[0].keys()
    assert (done["event"], done["rows"], done["rejected"], done["parts"]) == ("done", 26, 1, 3)
    assert done["rejected_output"] == f"{folder}/_rejected"
    assert done["first_rejected"].startswith(f"{source}, line 26")
    assert done["tokens"] == sum(len(text.split()) + 2 for text in TEXTS)
    assert result.stderr == ""


async def test_progress_of_a_job_is_shown_on_a_terminal(
    service: FakeEncoder, source: Path, output: tuple[str, str]
) -> None:
    result = await encserve(service, "embed", *inputs(source), *output, env=WIDE_TERMINAL)
    assert re.search(r" 25 of 25 texts, [\d.,]+ texts/s, 0:00:00 left", result.stderr)
    assert "25 rows in 3 parts" in result.stdout


async def test_progress_moves_with_the_first_reply(
    service: FakeEncoder, source: Path, output: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of texts needs several messages. The job reports each reply at once, before other replies arrive."""
    reported = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def wait_for_report(_: pb.EncodeRequest) -> None:
        if len(service.requests) > 1:
            await asyncio.wait_for(reported.wait(), 50)

    def see(progress: JobProgress) -> None:
        if progress.rows:
            loop.call_soon_threadsafe(reported.set)

    service.before = wait_for_report
    service.max_request_sequences = 4

    def embed() -> None:
        with EncoderClient(service.target) as client:
            embed_files([source], output[1], client=client, on_progress=see)

    await asyncio.to_thread(embed)
    assert reported.is_set()


def progress_at(rows: int, seconds: float = 10.0) -> JobProgress:
    return JobProgress(rows, 1000, rows // 10, 2, rows * 50, seconds)


def test_in_a_log_there_is_a_line_every_30_s(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    with shown_progress(1000, "texts", clock=clock.now) as told:
        for second in range(95):
            told(progress_at(second * 10))
            clock.advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["300", "600", "900"]
    assert lines[0] == "300 of 1,000 texts, 2 rejected, 30 texts/s, 0:00:23 left"


@pytest.mark.parametrize(
    ("before", "facts"),
    [(0, "600 of 1,000 texts, 60 texts/s, 0:00:07 left"), (500, "600 of 1,000 texts, 10 texts/s, 0:00:40 left")],
    ids=["a new job", "a job that goes on"],
)
def test_the_speed_is_that_of_this_run(before: int, facts: str, capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    with shown_progress(1000, "texts", clock=clock.now) as told:
        clock.advance(30)
        told(JobProgress(600, 1000, 0, 0, 0, 10.0, rows_before=before))
    assert capsys.readouterr().err.splitlines() == [facts]


def test_json_progress_comes_at_most_once_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    with shown_progress(1000, "texts", as_json=True, clock=clock.now) as told:
        for step in range(21):
            told(progress_at(step))
            clock.advance(0.125)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [it["rows"] for it in events] == [0, 8, 16]


@pytest.mark.parametrize(
    ("rows", "seconds", "facts"),
    [
        (0, 0.0, "0 of 1,000 texts, 2 rejected"),
        (10, 10.0, "10 of 1,000 texts, 2 rejected, 1.0 texts/s, 0:16:30 left"),
    ],
)
def test_unknown_figures_are_not_shown(
    rows: int, seconds: float, facts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar leaves out unknown figures. Before the first batch, the speed and the remaining time are unknown."""
    for name, value in WIDE_TERMINAL.items():
        monkeypatch.setenv(name, value)
    with shown_progress(1000, "texts") as told:
        told(progress_at(rows, seconds))
    shown = re.split(r"[\r\n]| {2,}", capsys.readouterr().err)
    assert facts in shown


@pytest.mark.parametrize("columns", [80, 140])
def test_the_bar_fits_into_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (TERMINAL | {"COLUMNS": str(columns)}).items():
        monkeypatch.setenv(name, value)
    with shown_progress(5_000_000, "texts") as told:
        told(JobProgress(1_234_567, 5_000_000, 602, 12, 10**9, 100.0))
    lines = [line for line in re.split(r"\x1b\[\S*?[A-Za-z]|\r|\n", capsys.readouterr().err) if line]
    facts = "1,234,567 of 5,000,000 texts, 12 rejected, 12,346 texts/s, 0:05:05 left"
    assert any(line.endswith(facts) and len(line) == columns - 3 for line in lines)


def test_the_bar_follows_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in TERMINAL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("COLUMNS")
    sizes = [os.terminal_size((100, 24))]
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: sizes[-1])
    with shown_progress(1000, "texts") as told:
        sizes.append(os.terminal_size((72, 24)))
        told(progress_at(600))
    lines = re.split(r"\x1b\[\S*?[A-Za-z]|\r|\n", capsys.readouterr().err)
    [line] = [line for line in lines if "600 of" in line]
    assert len(line) == 72 - 3


def test_a_terminal_that_moves_no_cursor_gets_the_lines_of_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (TERMINAL | {"TERM": "dumb"}).items():
        monkeypatch.setenv(name, value)
    clock = FakeClock()
    with shown_progress(1000, "texts", clock=clock.now) as told:
        told(progress_at(10))
        clock.advance(30)
        told(progress_at(300))
    assert [line.split(" ")[0] for line in capsys.readouterr().err.splitlines()] == ["300"]


def test_progress_of_many_threads_never_goes_back() -> None:
    shown = list[JobProgress]()

    def show(progress: JobProgress) -> None:
        os.sched_yield()  # lets other threads run, which also report progress
        shown.append(progress)

    counter = ProgressCounter(None, show)

    def count() -> None:
        for _ in range(500):
            counter.count_batch(1, tokens=2)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                pool.submit(count)
    finally:
        sys.setswitchinterval(before)
    rows, tokens = ([getattr(it, name) for it in shown] for name in ("rows", "tokens"))
    assert (rows, tokens) == (sorted(rows), sorted(tokens))
    assert (rows[-1], tokens[-1]) == (2000, 4000)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        *((flags, flags[0]) for flags in (["--vectors"], ["--keep", "id"], ["--overwrite"], ["--add-inputs"])),
        *((flags, flags[0]) for flags in (["--max-rejected", "0"], ["--ray", "auto"])),
        (["--output", "file.npy", "--max-rejected", "0"], "--max-rejected"),
        (["--device", "cpu"], "--device needs --bundle"),
        (["--bundle", "b", "--overwrite"], "--overwrite"),
        (["--output", "folder/", "--engine", "openvino"], "--engine needs --bundle"),
        (["--output", "folder/", "--max-batch-tokens", "512"], "--max-batch-tokens needs --bundle"),
        (["--output", "folder/", "--cache-dir", "c"], "--cache-dir needs --bundle"),
        (["--output", "folder/", "--ray", "auto"], "--ray needs --bundle"),
        (["--output", "folder/", "--bundle", "b", "--actors", "2"], "--actors needs --ray"),
        (["--output", "folder/", "--bundle", "b", "--model", "m"], "--model is for a server"),
        (["--output", "folder/", "--bundle", "b", "--model-version", "1"], "--model-version is for a server"),
        (["--output", "folder/", "--vectors", "--ids"], "--vectors and --ids do not go together"),
        (["--output", "folder/", "--overwrite", "--add-inputs"], "--overwrite and --add-inputs do not go together"),
        (["--shard", "0/2"], "--shard"),
        (["--output", "folder/", "--shard", "1"], "must be I/N"),
        (["--output", "folder/", "--shard", "0/2", "--overwrite"], "--shard"),
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
    result = CliRunner().invoke(cli, ["--target", "127.0.0.1:1", "embed", "--input", "texts.txt", *flags])
    assert result.exit_code == 2, result.output
    assert named in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


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

    The vector of a text is (number of words, 0). The texts "bad" and "long" are refused.

    Each call of `encode` first calls `on_encode` with this object.
    """

    on_encode: Callable[["Words"], None] | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    encoded: list[int] = field(default_factory=list)

    def open(self, make: MakeOptions, before: ModelFacts | None) -> LocalWorker:
        return LocalWorker(replace(make, kind=make.kind or "model"), FACTS, self)

    def encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        if self.on_encode is not None:
            self.on_encode(self)
        if self.stopped.is_set():
            raise Stopped
        self.encoded.append(len(values))
        refused: dict[int, EncserveError] = {
            place: InvalidRequestError(f"is {it}", reason="SEQUENCE_TOO_LONG" if it == "long" else "")
            for place, it in enumerate(values)
            if it in ("bad", "long")
        }
        counts = [len(it.split()) for it in values if isinstance(it, str) and it not in ("bad", "long")]
        rows: npt.NDArray[np.float32] = np.array([[it, 0] for it in counts], np.float32)
        on_batch(len(values), sum(counts))
        output = EncodedOutput("model", False, (Block(rows, np.ones(len(counts), np.uint32), None),), 0)
        infos = tuple(SequenceInfo(count, count, False, None, None, None, None) for count in counts)
        result = EncodeResult("words", "1", "f" * 16, (output,), infos, Timings(0, 0, 0, 0, 0, 0), "")
        return Encoded(result, refused)

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        pass


@pytest.fixture
def run_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs a job on TEXTS. The job uses a `Words` object instead of a bundle."""
    source = write_texts(tmp_path / "texts.txt")

    def run(words: Any, *flags: str) -> Result:
        monkeypatch.setattr(job_command, "backend_of", lambda **_: words)
        command = ["embed", *inputs(source), "--output", f"{tmp_path}/vectors/", "--bundle", "words", *flags]
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
    once = threading.Lock()  # the job encodes three blocks at a time, but only one block sends the signal

    def interrupt(words: Words) -> None:
        if words.encoded and once.acquire(blocking=False):
            press_ctrl_c(number)
            words.stopped.wait(30)

    result = run_words(Words(interrupt))
    assert result.exit_code == 130, result.output
    done = len(list(folder.glob("part-*")))
    assert result.stderr == (
        f"stopped: {10 * done} of 25 rows, {done} parts, are in {folder}; the same command goes on from there\n"
    )
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    words = Words()
    assert run_words(words).exit_code == 0
    assert len(words.encoded) == 3 - done
    assert table_of(folder)["text"].to_pylist() == TEXTS


def test_ctrl_c_before_the_job_begins(run_words: Callable[..., Result], folder: Path) -> None:
    class Loading(Words):
        def open(self, *_: Any) -> LocalWorker:
            press_ctrl_c()
            raise AssertionError("Ctrl-C did not end the job")

    result = run_words(Loading())
    assert result.exit_code == 130
    assert "nothing was computed" in result.stderr
    assert not folder.exists()


@dataclass
class Exits:
    """A fake of `os._exit`. At each call, the fake also records the hidden files and folders in `folder`."""

    folder: Path
    statuses: list[int] = field(default_factory=list)
    hidden: list[Path] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    once: Any = field(default_factory=threading.Lock)

    def end(self, status: int) -> None:
        self.statuses.append(status)
        self.hidden.extend(self.folder.rglob(".*"))
        self.ended.set()

    def wait_after_ctrl_c(self, words: Words) -> None:
        """Press Ctrl-C once, and wait for the end of the process."""
        if self.once.acquire(blocking=False):
            press_ctrl_c()
            self.ended.wait(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_parent_process_ignores_ends_no_job(run_words: Callable[..., Result], number: int) -> None:
    """A shell script starts `encserve … &` with SIGINT ignored. The job keeps ignoring SIGINT, and does not end."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        result = run_words(Words(lambda _: press_ctrl_c(number)))
        assert (result.exit_code, result.stderr) == (0, "")
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_ctrl_c_leaves_no_part_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path) -> None:
    """A batch does not end. Soon after Ctrl-C, the process ends and leaves no part of the output file."""
    exits = Exits(tmp_path)
    monkeypatch.setattr(os, "_exit", exits.end)
    monkeypatch.setattr("encserve_cli.interrupts._LONGEST_STOP_SECONDS", 0.1)
    monkeypatch.setattr(encoding, "_BLOCK_INPUTS", 4)
    begun, all_threads_begin = itertools.count(), threading.Barrier(3)

    def interrupt(words: Words) -> None:
        if next(begun) < 3:
            all_threads_begin.wait(60)
        else:
            exits.wait_after_ctrl_c(words)

    monkeypatch.setattr(job_command, "backend_of", lambda **_: Words(interrupt))
    CliRunner().invoke(cli, ["embed", *inputs(source), "--bundle", "words", "--output", str(tmp_path / "v.npy")])
    assert exits.statuses == [130]
    assert exits.hidden == []
    assert list(tmp_path.iterdir()) == [source]


def test_ctrl_c_ends_the_search_for_finished_parts(
    run_words: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """A continued job first reads the finished parts. Ctrl-C during these reads ends the job with one line."""
    assert run_words(Words()).exit_code == 0
    opened = list[str]()
    read = LocalStore.open

    def interrupted(store: LocalStore, name: str) -> Any:
        if not opened:
            press_ctrl_c()
        opened.append(name)
        return read(store, name)

    monkeypatch.setattr(LocalStore, "open", interrupted)
    (folder / "part-00000-000002.parquet").unlink()
    words = Words()
    result = run_words(words)
    assert (result.exit_code, result.stderr) == (130, "stopped before the job began; nothing was computed\n")
    assert words.encoded == []


def test_ctrl_c_ends_a_job_whose_batch_takes_long(
    run_words: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A batch does not end. Soon after Ctrl-C, the process prints the usual line and ends with status 130."""
    exits = Exits(folder.parent)
    monkeypatch.setattr(os, "_exit", exits.end)
    monkeypatch.setattr("encserve_cli.interrupts._LONGEST_STOP_SECONDS", 0.1)
    monkeypatch.setattr(rows, "_READ_BYTES", 32)  # so that a part has several batches
    result = run_words(Words(lambda words: exits.wait_after_ctrl_c(words) if words.encoded else None))
    assert exits.statuses == [130]
    assert exits.hidden == []
    line = rf"stopped: \d+ of 25 rows, \d parts, are in {folder}; the same command goes on from there\n"
    assert re.fullmatch(line, capfd.readouterr().err)
    assert result.stderr == ""


def test_an_error_while_a_job_stops_is_not_a_failure(run_words: Callable[..., Result]) -> None:
    once = threading.Lock()

    def interrupt(words: Words) -> None:
        if once.acquire(blocking=False):
            press_ctrl_c()
        words.stopped.wait(30)
        raise RuntimeError("the server has no room")

    assert run_words(Words(interrupt)).exit_code == 130


def test_a_bundle_that_cannot_be_used_is_one_line(run_words: Callable[..., Result]) -> None:
    class Broken(Words):
        def open(self, *_: Any) -> LocalWorker:
            raise RuntimeError("manifest.json: checksum\nis wrong")

    result = run_words(Broken())
    assert result.exit_code == 1
    assert result.stderr == "Error: manifest.json: checksum is wrong\n"


def test_a_bundle_makes_single_files_and_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path) -> None:
    """`--bundle` also works if the output is a single file or is printed.

    If an input is refused, the error names the line of the input.
    """
    monkeypatch.setattr(job_command, "backend_of", lambda **_: Words())
    command = ["embed", *inputs(source), "--bundle", "words"]
    result = CliRunner().invoke(cli, [*command, "--output", str(tmp_path / "vectors.npy")])
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "vectors.npy")[:, 0].tolist() == [len(it.split()) for it in TEXTS]
    assert "model words, version 1" in result.stdout
    printed = CliRunner().invoke(cli, ["embed", "a text", "--bundle", "words", "--json"])
    [sequence] = json.loads(printed.stdout)["sequences"]
    assert (sequence["text"], sequence["vector"]) == ("a text", [2.0, 0.0])
    assert "shape (1, 2)" in CliRunner().invoke(cli, ["embed", "a text", "--bundle", "words"]).stdout
    for text, hint in (("bad", ""), ("long", " (--truncate)")):
        write_texts(source, ["good", text])
        refused = CliRunner().invoke(cli, [*command, "--output", str(tmp_path / "more.npy")])
        assert refused.exit_code == 1
        assert refused.stderr == f"Error: {source}, line 2: is {text}{hint}\n"


def test_options_reach_bundles_and_clusters(
    monkeypatch: pytest.MonkeyPatch, source: Path, output: tuple[str, str]
) -> None:
    found: dict[str, Any] = {}

    def backend_of(**options: Any) -> Words:
        found.update(options)
        return Words()

    monkeypatch.setattr(job_command, "backend_of", backend_of)
    flags = ["--engine", "openvino", "--precision", "bfloat16", "--max-batch-tokens", "9", "--tokenizer-threads", "3"]
    flags += ["--ray", "auto", "--actors", "4", "--actor-cpus", "2"]
    command = ["embed", *inputs(source), *output, "--bundle", "b", *flags]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert found["bundle"] == "b"
    assert found["client"] is None
    assert found["engine"] == EngineOptions("openvino", "bfloat16", max_batch_tokens=9, tokenizer_threads=3)
    assert found["ray"] == RayOptions("auto", 4, 2)


def words_job(source: Path, words: Words, **options: Any) -> EmbedJob:
    output = f"{source.parent}/vectors"
    return EmbedJob([str(source)], output, words, read=ReadOptions(), make=MakeOptions(), **options)


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


async def test_a_job_that_fails_leaves_a_server_that_does_not_answer(
    service: FakeEncoder, source: Path, folder: Path
) -> None:
    """The first of three blocks fails, and the server does not answer the other two blocks for 600 s.

    The job fails soon, and does not wait for the two replies.
    """

    async def fail_first(request: pb.EncodeRequest) -> None:
        if any(item.text == TEXTS[0] for item in request.inputs):
            await until(lambda: service.n_open == 3)
            raise Refused(grpc.StatusCode.INTERNAL, "broken", "INTERNAL")
        await asyncio.sleep(600)

    def embed() -> None:
        with EncoderClient(service.target, timeout_seconds=60) as client, pytest.raises(ServerError, match="broken"):
            embed_files([source], folder, client=client)

    service.before = fail_first
    async with asyncio.timeout(30):
        await asyncio.to_thread(embed)


def test_python_callers_name_a_bundle_or_a_client(source: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="bundle or client: give one of them"):
        embed_files([source], folder)
    with EncoderClient("127.0.0.1:1") as client, pytest.raises(ValueError, match="engine can be used only with bundle"):
        embed_files([source], folder, client=client, engine=EngineOptions())
    with pytest.raises(ValueError, match="model, model_version: are for a client"):
        embed_files([source], folder, bundle="b", model="m")


@pytest.mark.parametrize("kind", ["pairs", "texts"])
def test_python_callers_name_a_kind_of_inputs(source: Path, folder: Path, kind: Any) -> None:
    message = f"input_kind must be 'text', 'ids' or 'vectors'; was {kind!r}"
    with EncoderClient("127.0.0.1:1") as client, pytest.raises(ValueError, match=message):
        embed_files([source], folder, client=client, input_kind=kind)
    assert not folder.exists()


@pytest.mark.parametrize("shard", [(8, 8), (1, 0), (-1, 2), (0, -1)])
def test_a_share_that_does_not_exist_is_refused(shard: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"shard must be \(I, N\) with I from 0 to N-1, as \(0, 8\); was \("):
        Shard(*shard)


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("rows", [0, -1])
def test_the_rows_of_a_part_are_at_least_1(source: Path, folder: Path, rows: int, is_new: bool) -> None:
    if not is_new:
        words_job(source, Words()).close()
    with pytest.raises(ValueError, match=f"part_rows must be at least 1; was {rows}"):
        words_job(source, Words(), part_rows=rows)
    assert folder.exists() != is_new


async def test_a_job_keeps_its_model_version_if_the_server_has_it(service: FakeEncoder) -> None:
    """A resumed job uses the model version that the user names.

    If the user names no version, the job uses its old version again. If the server no longer has the old version, the
    job uses the server's default version.
    """
    with EncoderClient(service.target) as client:
        old = await asyncio.to_thread(client.model)
    new = replace(old, version="2", fingerprint="e" * 16)

    class Client:
        served = (old, new)

        def run(self, *_: Any, **__: Any) -> None:
            """Accept the options of the job."""

        def model(self, name: str | None, version: str | None) -> Any:
            return new

        def models(self) -> Any:
            return self.served

    fake: Any = Client()
    facts = server_facts(old, MakeOptions("model"))
    assert ServerBackend(fake).open(MakeOptions(), None).model.version == "2"
    assert ServerBackend(fake).open(MakeOptions(), facts).model.version == "1"
    assert ServerBackend(fake, None, "2").open(MakeOptions(), facts).model.version == "2"
    fake.served = (new,)
    assert ServerBackend(fake).open(MakeOptions(), facts).model.version == "2"


def test_without_ray_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, source: Path, folder: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "encserve_cli.job.ray", raising=False)
    with pytest.raises(ValueError, match=r'^--ray needs ray: pip install "encserve\[ray\]"$'):
        embed_files([source], folder, bundle="b", ray=RayOptions())


@pytest.mark.system
def test_jobs_import_neither_a_server_nor_ray() -> None:
    unwanted = "{'ray', 'encserve_server', 'onnxruntime', 'pandas', 'tokenizers'}"
    code = f"import sys, encserve_cli.job, encserve_cli.job.command; print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "name", ["link/part-00000-000000.parquet", "to-a-part.parquet", "vectors/_rejected/part.jsonl"]
)
def test_an_input_in_the_output_is_refused_by_any_name(
    run_words: Callable[..., Result], tmp_path: Path, folder: Path, name: str
) -> None:
    """An input is refused if its path is a link to the output folder or to a file there. No file is removed."""
    (folder / "_rejected").mkdir(parents=True)
    (folder / "_rejected/part.jsonl").write_text('"a text"\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), folder / "part-00000-000000.parquet")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "to-a-part.parquet").symlink_to(folder / "part-00000-000000.parquet")
    before = files_in(folder)
    result = run_words(Words(), *inputs(tmp_path / name), "--overwrite")
    assert result.exit_code == 1
    assert f"{tmp_path / name}: is an input in the folder of the output" in result.stderr
    assert files_in(folder) == before


async def test_an_option_that_the_model_lacks_removes_no_part(
    service: FakeEncoder, source: Path, folder: Path, output: tuple[str, str]
) -> None:
    await encserve(service, "embed", *inputs(source), *output)
    before = files_in(folder)
    for flags, problem in (
        (["--prompt-name", "nope"], "--prompt-name 'nope': model tiny has the prompts 'p', 'q'"),
        (["--task", "query"], "--task 'query': model tiny has no tasks"),
        (["--dimensions", "9999"], "--dimensions must be at most 8, the width of model tiny; was 9999"),
        (["--kind", "sparse"], "--kind 'sparse': model tiny has the kinds 'vector'"),
    ):
        result = await encserve(service, "embed", *inputs(source), *output, "--overwrite", *flags, status=1)
        assert files_in(folder) == before, flags
        assert problem in " ".join(result.stderr.split())


async def test_added_inputs_may_come_before_old_inputs(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], folder: Path
) -> None:
    """Add the file b.txt between the old inputs a.txt and c.txt. The rows are then in the order of the file names.

    A later run with the same three files also works without --add-inputs.
    """
    for name in "ac":
        write_texts(tmp_path / f"{name}.txt")
    await encserve(service, "embed", *inputs(tmp_path / "a.txt", tmp_path / "c.txt"), *output)
    write_texts(tmp_path / "b.txt")
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for flags in (["--add-inputs"], ["--add-inputs"], []):
        await encserve(service, "embed", *inputs(*paths), *output, *flags)
    assert table_of(folder)["text"].to_pylist() == TEXTS * 3


@pytest.mark.parametrize("change", ["time", "folder"])
async def test_a_job_accepts_the_same_files_with_another_path_or_time(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], folder: Path, change: str
) -> None:
    """Inputs that were copied or downloaded again are the same inputs if size and checksum are equal."""
    (tmp_path / "old").mkdir()
    sources = [write_texts(tmp_path / "old" / name, TEXTS) for name in ("a.txt", "b.txt")]
    sources.append(write_texts(tmp_path / "old" / "c.txt", TEXTS[:5]))
    await encserve(service, "embed", *inputs(*sources), *output)
    (folder / "part-00001-000001.parquet").unlink()
    if change == "time":
        for it in sources:
            os.utime(it, ns=(0, 1))
    else:
        (tmp_path / "old").rename(tmp_path / "new")
        sources = [tmp_path / "new" / it.name for it in reversed(sources)]
    result = await encserve(service, "embed", *inputs(*sources), *output)
    assert "55 rows in 7 parts, 6 of them made before" in result.stdout
    assert table_of(folder)["text"].to_pylist() == [*TEXTS, *TEXTS, *TEXTS[:5]]
    sources[1].write_text("other\n")
    result = await encserve(service, "embed", *inputs(*sources), *output, status=1)
    assert "b.txt" in result.stderr


async def test_a_new_file_with_the_name_of_a_renamed_file_needs_add_inputs(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], source: Path, folder: Path
) -> None:
    await encserve(service, "embed", *inputs(source), *output)
    renamed = source.rename(tmp_path / "renamed.txt")  # noqa: ASYNC240
    write_texts(source, ["new"])
    result = await encserve(service, "embed", *inputs(source, renamed), *output, status=1)
    assert f"{source} is not an input of the job (--add-inputs adds it)" in result.stderr
    await encserve(service, "embed", *inputs(source, renamed), *output, "--add-inputs")
    assert table_of(folder)["text"].to_pylist() == [*TEXTS, "new"]


async def test_changed_inputs_are_refused(service: FakeEncoder, source: Path, output: tuple[str, str]) -> None:
    await encserve(service, "embed", *inputs(source), *output)
    size = source.stat().st_size  # noqa: ASYNC240
    for text, problem in (("x" * size, "its checksum differs"), ("x", f"{size:,} bytes then, 1 now")):
        source.write_text(text)  # noqa: ASYNC240
        os.utime(source, ns=(0, 1))
        result = await encserve(service, "embed", *inputs(source), *output, status=1)
        assert f"{source} was changed: {problem}" in result.stderr


async def test_a_job_without_parts_blocks_no_folder(
    service: FakeEncoder, tmp_path: Path, source: Path, folder: Path, output: tuple[str, str]
) -> None:
    """A job was stopped before its first part, so only the plan exists. Another job replaces this plan."""

    def stop(words: Words) -> None:
        raise RuntimeError("the power fails")

    with words_job(source, Words(stop)) as job, pytest.raises(RuntimeError, match="the power fails"):
        job.run()
    assert files_in(folder).keys() == {"_job.json"}
    await encserve(service, "embed", *inputs(source), *output, "--dtype", "float16")
    assert table_of(folder)["text"].to_pylist() == TEXTS
    result = await encserve(service, "embed", *inputs(source), *output, status=1)
    assert "dtype is 'float32'; the job has 'float16'" in result.stderr


@pytest.mark.parametrize("change", ["nothing", "dtype", "inputs"])
def test_two_jobs_that_begin_together_must_be_equal(tmp_path: Path, source: Path, folder: Path, change: str) -> None:
    """While a job loads its model, a second job begins in the same output folder.

    The first job then fails if its settings or inputs differ from the second job's.
    """
    other = write_texts(tmp_path / "other.txt", ["other"])
    make = MakeOptions(dtype="float16") if change == "dtype" else MakeOptions()
    files = [str(source), str(other)] if change == "inputs" else [str(source)]

    class Late(Words):
        def open(self, make: MakeOptions, before: ModelFacts | None) -> LocalWorker:
            if before is None:
                words_job(source, Words()).close()
            return super().open(make, before)

    def begin() -> EmbedJob:
        return EmbedJob(files, str(folder), Late(), read=ReadOptions(), make=make, add_inputs=True)

    if change == "nothing":
        with begin() as job:
            assert job.run().rows == 25
    else:
        with pytest.raises(ValueError, match=f"another job has just begun in {folder}"):
            begin()
    plan = json.loads((folder / "_job.json").read_text())
    assert (plan["make"]["dtype"], len(plan["inputs"])) == ("float32", 1)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def half(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).slice(0, 5), path)


def of_another_file(path: Path) -> None:
    path.with_name("part-00001-000000.parquet").replace(path)


def of_the_same_file(path: Path) -> None:
    shutil.copy(path.with_name("part-00000-000000.parquet"), path)


def of_another_program(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[10:20]}), path)


def of_another_model(path: Path) -> None:
    table = pyarrow.parquet.read_table(path)
    metadata = pyarrow.parquet.read_metadata(path).metadata
    kept = {key: b"other" if key == b"fingerprint" else its for key, its in metadata.items() if key != b"ARROW:schema"}
    pyarrow.parquet.write_table(table.replace_schema_metadata(kept), path)


@pytest.mark.parametrize(
    "spoil", [empty, cut_off, half, of_another_file, of_the_same_file, of_another_program, of_another_model]
)
def test_a_damaged_part_or_a_part_of_another_job_is_replaced(
    tmp_path: Path, source: Path, folder: Path, spoil: Callable[[Path], None]
) -> None:
    other = write_texts(tmp_path / "other.txt", [f"{text} too" for text in TEXTS])

    def run() -> tuple[Words, Any]:
        words = Words()
        job = EmbedJob([str(source), str(other)], str(folder), words, read=ReadOptions(), make=MakeOptions())
        with job:
            return words, job.run()

    run()
    whole = table_of(folder)
    spoil(folder / "part-00000-000001.parquet")
    words, summary = run()
    again = 20 if spoil is of_another_file else 10
    assert sum(words.encoded) == again
    assert (summary.rows, summary.parts, summary.parts_before) == (50, 6, 6 - again // 10)
    assert table_of(folder).equals(whole)


def test_a_part_of_another_column_is_replaced(tmp_path: Path) -> None:
    source = tmp_path / "texts.csv"
    source.write_text("a,b\n1,2\n")

    def run(folder: Path, column: str) -> int:
        job = EmbedJob([str(source)], str(folder), Words(), read=ReadOptions(column=column), make=MakeOptions())
        with job:
            return job.run().parts_before

    for name in "ab":
        run(tmp_path / name, name)
    shutil.copy(tmp_path / "b/part-00000-000000.parquet", tmp_path / "a")
    assert run(tmp_path / "a", "a") == 0
    assert table_of(tmp_path / "a")["text"].to_pylist() == ["1"]


@pytest.mark.parametrize("name", ["part-00000-000003.parquet", "part-00001-000000.parquet"])
def test_a_part_after_the_last_part_is_refused(run_words: Callable[..., Result], folder: Path, name: str) -> None:
    """The folder has a file whose name sorts after the last part.

    Readers of the folder would read the rows of this file.
    """
    run_words(Words())
    shutil.copy(folder / "part-00000-000002.parquet", folder / name)
    result = run_words(Words())
    assert result.exit_code == 1
    assert f"{folder}/{name}: is not a part of this job" in result.stderr


def test_a_plan_that_cannot_be_read_is_named(run_words: Callable[..., Result], folder: Path) -> None:
    folder.mkdir()
    for data in (b"\xff", b"{}", b"[]", b'{"format": 1}', b'{"format": 3, "read": 1}'):
        (folder / "_job.json").write_bytes(data)
        result = run_words(Words())
        assert result.exit_code == 1
        assert f"{folder}/_job.json: is not the plan of a job: " in result.stderr
        assert "begin again with --overwrite" in result.stderr
    assert run_words(Words(), "--overwrite").exit_code == 0


async def test_an_empty_line_is_a_text_in_jobs_and_in_files(
    service: FakeEncoder, tmp_path: Path, output: tuple[str, str], folder: Path
) -> None:
    source = write_texts(tmp_path / "texts.txt", ["one", "", "three"])
    await encserve(service, "embed", *inputs(source), *output)
    await encserve(service, "embed", *inputs(source), "--output", tmp_path / "vectors.npy")
    table = table_of(folder)
    assert table["text"].to_pylist() == ["one", "", "three"]
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32), np.load(tmp_path / "vectors.npy"))


@pytest.mark.parametrize("suffix", [".txt", ".csv"])
def test_shards_do_a_job_together(tmp_path: Path, folder: Path, suffix: str) -> None:
    texts = [f"text {i}" for i in range(150)]
    source = write_texts(tmp_path / f"texts{suffix}", ["text", *texts] if suffix == ".csv" else texts)
    rows = 0
    for index in range(3):
        with words_job(source, Words(), shard=Shard(index, 3)) as job:
            summary = job.run()
        rows += summary.rows
        assert summary.parts == 4 + (index == 0) * 3
    assert rows == 150
    words = Words()
    with words_job(source, words) as job:
        assert job.run().parts_before == 15
    assert words.encoded == []
    assert table_of(folder)["text"].to_pylist() == texts


def test_a_shard_does_not_overwrite_the_parts_of_other_shards(tmp_path: Path, folder: Path) -> None:
    source = write_texts(tmp_path / "texts.txt", [f"text {i}" for i in range(80)])
    with words_job(source, Words(), shard=Shard(0, 2)) as job:
        job.run()
    before = files_in(folder)
    with pytest.raises(ValueError, match="overwrite cannot be used with shard: overwrite would remove the parts of"):
        words_job(source, Words(), shard=Shard(1, 2), overwrite=True)
    assert files_in(folder) == before


def test_a_folder_and_a_file_with_names_that_are_not_utf8(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "caf\udce9.txt", [*TEXTS, "bad"])
    output = tmp_path / "out\udce9"
    for _ in range(2):
        job = EmbedJob([str(source)], str(output), Words(), read=ReadOptions(), make=MakeOptions())
        with job:
            assert job.run().rejected == 1
    output = output.rename(tmp_path / "out")
    assert table_of(output)["text"].to_pylist() == [*TEXTS, "bad"]
    assert [it["file"] for it in rejected_of(output)] == [str(source)]
    assert [it.name for it in (output / "_rejected").iterdir()] == ["part-00000-000002.jsonl"]


def test_events_name_files_whose_names_are_not_utf8(run_words: Callable[..., Result], tmp_path: Path) -> None:
    more = write_texts(tmp_path / "caf\udce9.txt")
    result = run_words(Words(), *inputs(more), "--json")
    assert result.exit_code == 0, result.output
    assert events_of(result)[0]["inputs"][1]["uri"] == str(more)


@pytest.mark.parametrize("kind", ["model", "tokens", "multi_vector", "sparse"])
async def test_a_refused_input_changes_no_other_row(
    service: FakeEncoder, tmp_path: Path, folder: Path, kind: str
) -> None:
    """A job has refused inputs. All its other rows equal the rows of a job without the refused inputs."""
    service.max_request_sequences = 3
    if kind in ("multi_vector", "sparse"):
        service.model_info = pb.ModelInfo(multi_vector_width=8, multi_vector_similarity="maxsim", sparse_width=100)
    flags = ["encode"] if kind == "tokens" else ["embed", "--kind", kind]
    bad = {0, 4, 5, 11, 24}
    every = [TOO_LONG if index in bad else text for index, text in enumerate(TEXTS)]
    good = [text for index, text in enumerate(TEXTS) if index not in bad]
    for name, texts, status in (("all", every, 3), ("good", good, 0)):
        source = write_texts(tmp_path / f"{name}.txt", texts)
        await encserve(service, *flags, *inputs(source), "--output", f"{tmp_path}/{name}/", status=status)
    rows = [row for row in table_of(tmp_path / "all").to_pylist() if row["text"] != TOO_LONG]
    assert rows == table_of(tmp_path / "good").to_pylist()
    rejected = rejected_of(tmp_path / "all")
    assert [it["row"] for it in rejected] == [index + 1 for index in sorted(bad)]
    assert {it["reason"] for it in rejected} == {"has 72 tokens; the model takes at most 64"}


async def test_all_rows_of_a_block_may_be_refused(service: FakeEncoder, tmp_path: Path, folder: Path) -> None:
    source = write_texts(tmp_path / "texts.txt", [TOO_LONG] * 10 + TEXTS)
    await encserve(service, "embed", *inputs(source), "--output", f"{folder}/", status=3)
    assert [it is None for it in table_of(folder)["vector"].to_pylist()] == [True] * 10 + [False] * 25


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE])
async def test_an_input_that_crashes_the_server_is_rejected(
    service: FakeEncoder,
    output: tuple[str, str],
    source: Path,
    folder: Path,
    code: grpc.StatusCode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server fails for each message with one of two texts. The job rejects the two texts, and embeds all others."""
    bad = [3, 12]
    crashes = 0

    async def crash(request: pb.EncodeRequest) -> None:
        nonlocal crashes
        if {TEXTS[index] for index in bad} & {item.text for item in request.inputs}:
            crashes += 1
            raise Refused(code, "crashed")

    service.before = crash
    result = await encserve(service, "embed", *inputs(source), *output, "--timeout", "2", status=3)
    assert f"{source}, line 4: makes the server fail each time: crashed" in result.stdout
    assert [it is None for it in table_of(folder)["vector"].to_pylist()] == [index in bad for index in range(25)]
    assert crashes < 60
    assert "the server failed for 10 inputs: " in caplog.text
    assert [it["row"] for it in rejected_of(folder)] == [4, 13]


async def test_a_server_that_crashed_once_rejects_no_row(
    service: FakeEncoder, output: tuple[str, str], source: Path, folder: Path
) -> None:
    once = iter([True])

    async def crash(request: pb.EncodeRequest) -> None:
        if TEXTS[12] in [item.text for item in request.inputs] and next(once, False):
            raise Refused(grpc.StatusCode.INTERNAL, "crashed")

    service.before = crash
    await encserve(service, "embed", *inputs(source), *output)
    assert table_of(folder)["text"].to_pylist() == TEXTS
    assert None not in table_of(folder)["vector"].to_pylist()


async def test_a_server_that_crashes_for_every_input_fails_the_job(
    service: FakeEncoder, output: tuple[str, str], source: Path, folder: Path
) -> None:
    """The job fails after some crashes, and rejects no row. The same command continues the job."""

    async def crash(_: pb.EncodeRequest) -> None:
        raise Refused(grpc.StatusCode.INTERNAL, "crashed")

    service.before = crash
    result = await encserve(service, "embed", *inputs(source), *output, status=1)
    assert result.stderr == "Error: the server fails for at least 5 inputs, each sent alone: crashed\n"
    assert not (folder / "_rejected").exists()
    service.before = None
    await encserve(service, "embed", *inputs(source), *output)
    assert table_of(folder)["text"].to_pylist() == TEXTS


async def test_a_job_can_be_stopped_while_the_server_is_full(service: FakeEncoder, source: Path) -> None:
    """The server refuses every message and asks for a retry after 50 ms. `stop` still ends the job soon."""
    refused = threading.Event()

    async def full(request: pb.EncodeRequest) -> None:
        refused.set()
        raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", "QUEUE_FULL", pushback="50")

    def stop_when_refused(job: EmbedJob) -> None:
        refused.wait()
        job.stop()

    def run() -> None:
        with EncoderClient(service.target, timeout_seconds=1000) as client:
            backend = ServerBackend(client)
            output = f"{source.parent}/vectors"
            with EmbedJob([str(source)], output, backend, read=ReadOptions(), make=MakeOptions()) as job:
                threading.Thread(target=stop_when_refused, args=[job]).start()
                job.run()

    service.before = full
    with pytest.raises(Stopped):
        await asyncio.wait_for(asyncio.to_thread(run), 30)
