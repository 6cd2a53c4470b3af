"""Tests of `encserve embed` and `encserve encode` with input and output files.

The results are in input order. If an input fails, no output file is written.
"""

import asyncio
import csv
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import scipy.sparse
from command import TERMINAL, encserve, inputs
from fake_encoder import FakeEncoder, Refused

from encserve_cli.files import encoding, writing
from encserve_cli.files.reading import Sent, read_inputs
from encserve_client import DType, EncoderClient
from encserve_proto.v1 import encoder_pb2 as pb

LATE = pb.ModelInfo(multi_vector_width=8, multi_vector_similarity="maxsim")
SPARSE = pb.ModelInfo(sparse_width=100)
TEXTS = ["two words", "", 'a "quoted", text', *(" ".join(["word"] * (i % 7)) + f" {i}" for i in range(60))]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_BLOCK_INPUTS", 4)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with one line for each text of TEXTS."""
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{it}\n" for it in TEXTS))
    return path


async def vectors_of(service: FakeEncoder, texts: list[str], dtype: DType = "float32") -> Any:
    def ask() -> Any:
        with EncoderClient(service.target) as client:
            return client.embed(texts, dtype=dtype)

    return await asyncio.to_thread(ask)


async def test_progress_is_shown_on_a_terminal(service: FakeEncoder, tmp_path: Path, source: Path) -> None:
    """On a terminal, a bar shows the number of finished texts. If the number of all texts is known, the bar shows both.

    In a pipe there is no bar.
    """
    table = tmp_path / "texts.csv"
    table.write_text("n,text\n" + "1,word\n" * 63)
    for path, done in ((source, " 63 of 63 texts, "), (table, " 63 texts, ")):
        command = ("embed", *inputs(path), "--output", tmp_path / "vectors.npy")
        result = await encserve(service, *command, env=TERMINAL)
        assert done in result.stderr
        assert (await encserve(service, *command)).stderr == ""


@pytest.mark.parametrize("dtype", ["float32", "int8"])
async def test_one_vector_per_text_in_every_output_format(
    service: FakeEncoder, tmp_path: Path, source: Path, dtype: DType
) -> None:
    """The output has one vector for each text, in input order. An empty text also gets a vector."""
    want = await vectors_of(service, TEXTS, dtype)
    suffixes = (".npy", ".NPZ", ".jsonl", ".csv", ".parquet")
    for suffix in suffixes:
        output = ("--output", tmp_path / f"v{suffix}")
        result = await encserve(service, "embed", *inputs(source), "--dtype", dtype, *output)
        assert "63 texts, 63 rows of 8" in " ".join(result.stdout.split())
    made = {it.name for it in tmp_path.iterdir()}  # noqa: ASYNC240
    assert made == {source.name, *(f"v{suffix}" for suffix in suffixes)}
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy", allow_pickle=False), want)
    with np.load(tmp_path / "v.NPZ", allow_pickle=False) as file:
        np.testing.assert_array_equal(file["rows"], want)
        assert file["rows"].dtype == dtype
        assert (str(file["fingerprint"]), str(file["space_id"])) == ("f" * 16, "s2-" + "5" * 32)
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [it["text"] for it in lines] == TEXTS
    np.testing.assert_array_equal(np.array([it["vector"] for it in lines], np.float32), want)
    with (tmp_path / "v.csv").open(newline="") as file_of_rows:
        names, *rows = csv.reader(file_of_rows)
    assert names == ["text", *map(str, range(8))]
    assert [it[0] for it in rows] == TEXTS
    np.testing.assert_array_equal(np.array([it[1:] for it in rows], np.float32), want)
    table = pyarrow.parquet.read_table(tmp_path / "v.parquet")
    assert table["text"].to_pylist() == TEXTS
    assert table["vector"].type == pyarrow.list_(pyarrow.from_numpy_dtype(dtype), 8)
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32), want)
    assert table.schema.metadata[b"fingerprint"] == b"f" * 16


async def test_standard_output_gets_the_lines_of_a_jsonl_file(
    service: FakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--output -` prints the vectors and nothing else, and takes more inputs than a table or --json."""
    monkeypatch.setattr(encoding, "_BLOCK_INPUTS", 100)
    texts = [f"text {i}" for i in range(1001)]
    for command in ("embed", "encode"):
        for output in ("-", tmp_path / "v.jsonl"):
            done = await encserve(service, command, *inputs("-"), "--output", output, stdin="\n".join(texts))
            assert done.stderr == ""
            if output == "-":
                printed = done.stdout
        assert printed == (tmp_path / "v.jsonl").read_text()
        assert [json.loads(line)["text"] for line in printed.splitlines()] == texts


async def test_rows_of_every_token(service: FakeEncoder, tmp_path: Path, source: Path) -> None:
    """`encode` writes hidden states and token ids to .npz, .jsonl and .parquet files.

    It refuses .npy and .csv files.
    """
    for suffix in (".npz", ".jsonl", ".parquet"):
        result = await encserve(service, "encode", *inputs(source), "--output", tmp_path / f"v{suffix}")
    with EncoderClient(service.target) as client:
        want = await asyncio.to_thread(client.token_vectors, TEXTS)
    with np.load(tmp_path / "v.npz", allow_pickle=False) as file:
        np.testing.assert_array_equal(file["rows"], np.concatenate(want))
        assert file["lengths"].tolist() == [len(it) for it in want]
        assert file["token_ids"][:7].tolist() == [1, 3, 5, 2, 1, 2, 1]
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert lines[0]["tokens"] == ["[FIRST]", "two", "words", "[LAST]"]
    rows = pyarrow.parquet.read_table(tmp_path / "v.parquet").to_pylist()
    for line, row, its in zip(lines, rows, want, strict=True):
        np.testing.assert_array_equal(np.array(line["rows"], np.float32), its)
        np.testing.assert_array_equal(np.array(row["rows"], np.float32), its)
        assert line["token_ids"] == row["token_ids"]
    for suffix in (".npy", ".csv"):
        result = await encserve(service, "encode", *inputs(source), "--output", tmp_path / f"not{suffix}", status=1)
        assert f"a {suffix} file holds one vector for each input" in result.stderr
        assert not (tmp_path / f"not{suffix}").exists()


async def test_row_groups_of_parquet_are_cut_by_size(
    service: FakeEncoder, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group of a Parquet file ends when its size exceeds a limit. A smaller limit gives more row groups."""
    output = tmp_path / "v.parquet"
    for row_group_bytes, n_groups in ((1, 16), (2**20, 1)):
        monkeypatch.setattr(writing, "_ROW_GROUP_BYTES", row_group_bytes)
        await encserve(service, "encode", *inputs(source), "--output", output)
        assert pyarrow.parquet.read_metadata(output).num_row_groups == n_groups
        assert pyarrow.parquet.read_table(output)["text"].to_pylist() == TEXTS


async def test_vectors_of_maxsim_and_weights(service: FakeEncoder, tmp_path: Path, source: Path) -> None:
    service.model_info = LATE
    for suffix in (".npz", ".parquet"):
        await encserve(service, "embed", *inputs(source), "--output", tmp_path / f"late{suffix}")
    with np.load(tmp_path / "late.npz", allow_pickle=False) as file:
        lengths, places = file["lengths"], file["token_indices"]
        assert len(file["rows"]) == lengths.sum() == len(places)
        assert (lengths[1], places[:2].tolist()) == (0, [1, 2])
    rows = pyarrow.parquet.read_table(tmp_path / "late.parquet").to_pylist()
    assert [len(it["rows"]) for it in rows] == [len(it["token_indices"]) for it in rows] == lengths.tolist()
    service.model_info = SPARSE
    for suffix in (".npz", ".parquet"):
        await encserve(service, "embed", *inputs(source), "--output", tmp_path / f"sparse{suffix}")
    matrix = scipy.sparse.load_npz(tmp_path / "sparse.npz")
    assert matrix.shape == (len(TEXTS), 100)
    rows = pyarrow.parquet.read_table(tmp_path / "sparse.parquet").to_pylist()
    for i, row in enumerate(rows):
        assert dict(zip(row["indices"], row["values"], strict=True)) == {
            int(place): float(matrix[i, place]) for place in matrix[i].nonzero()[1]
        }


async def test_arguments_files_and_standard_input_together(service: FakeEncoder, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one\n")
    output = tmp_path / "v.jsonl"
    await encserve(service, "embed", *inputs(tmp_path / "one.txt", "-"), "zero", "--output", output, stdin="two\nfour")
    assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == ["zero", "one", "two", "four"]
    for stdin in ("two\r\nfour", "\ufefftwo\nfour\n"):
        printed = await encserve(service, "embed", *inputs("-"), "--json", "--column", "of other files", stdin=stdin)
        assert [it["text"] for it in json.loads(printed.stdout)["sequences"]] == ["two", "four"]


async def test_a_text_that_looks_like_a_file_is_refused(
    service: FakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names --input and --text. With --text the command takes every argument as a text."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.dat").write_text("text")
    monkeypatch.chdir(tmp_path)
    texts = ["x.dat", "folder", "y.tsv", "y.jsonl.gz", "s3://bucket/folder", "-"]
    for text in texts:
        for command in ("embed", "encode", "tokenize", "similarity", "inspect"):
            result = await encserve(service, command, "first", text, status=2)
            problem = f"{text!r} looks like a file: read it with --input {text}, or send the text itself with --text"
            assert problem in " ".join(result.stderr.split())
            assert result.stdout == ""
    assert not service.requests
    await encserve(service, "embed", "--text", "--output", tmp_path / "v.jsonl", "--", *texts)
    assert [json.loads(line)["text"] for line in (tmp_path / "v.jsonl").read_text().splitlines()] == texts
    others = ["", "a text of some.words", "see s3://bucket/folder", "https://example.org/a", "x" * 5000, "a\0b"]
    await encserve(service, "embed", *others, "--truncate", "--output", tmp_path / "v.jsonl")
    assert [json.loads(line)["text"] for line in (tmp_path / "v.jsonl").read_text().splitlines()] == others
    secret = await encserve(service, "embed", "s3://key:secret@bucket/a.csv", status=2)
    assert "s3://…: must not contain a secret" in secret.stderr


async def test_the_name_of_an_input_has_no_secret(service: FakeEncoder) -> None:
    result = await encserve(service, "embed", "first", *inputs("s3://key:secret@bucket/a.csv"), status=1)
    assert "s3://…: must not contain a secret" in result.stderr
    assert not service.requests


async def test_a_pattern_names_files_in_order(service: FakeEncoder, tmp_path: Path) -> None:
    """A pattern selects all matching files, sorted by name. If the pattern is a file's name, only this file is read."""
    for name in ("b.txt", "a.txt", "[ab].txt"):
        (tmp_path / name).write_text(f"{name}\n")
    for pattern, want in (("?.txt", ["a.txt", "b.txt"]), ("[ab].txt", ["[ab].txt"])):
        printed = await encserve(service, "embed", *inputs(tmp_path / pattern), "--json")
        assert [it["text"] for it in json.loads(printed.stdout)["sequences"]] == want


async def test_similarity_and_inspect_read_files(service: FakeEncoder, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one\ntwo words\n")
    printed = await encserve(service, "similarity", "zero", *inputs(tmp_path / "t.txt"), "--json")
    assert json.loads(printed.stdout)["texts"] == ["zero", "one", "two words"]
    refused = await encserve(service, "inspect", *inputs(tmp_path / "t.txt"), status=1)
    assert "more than 1 inputs: inspect takes one text" in refused.stderr


def test_a_long_field_and_a_carriage_return_in_a_csv_file(tmp_path: Path) -> None:
    """A field may be longer than 128 KiB, the default limit of Python's csv module.

    A carriage return alone may end a line.
    """
    path = tmp_path / "t.csv"
    path.write_bytes(b"text\r" + b"x" * 200_000 + b"\rtwo\r")
    assert [len(it.value) for it in read_inputs([], [str(path)], None, ids=False)] == [200_000, 3]


async def test_token_ids(service: FakeEncoder, tmp_path: Path) -> None:
    """With --ids the command reads token ids from arguments, .txt lines and JSON lists.

    The output file has the token ids and the hidden states.
    """
    (tmp_path / "ids.txt").write_text("1 3 2\n")
    (tmp_path / "ids.jsonl").write_text('[1, 4, 2]\n{"text": [1, 5, 2]}\n')
    sources = ["1,2", *inputs(tmp_path / "ids.txt", tmp_path / "ids.jsonl")]
    await encserve(service, "encode", *sources, "--ids", "--output", tmp_path / "v.npz")
    with np.load(tmp_path / "v.npz", allow_pickle=False) as file:
        assert file["token_ids"].tolist() == [1, 2, 1, 3, 2, 1, 4, 2, 1, 5, 2]


async def test_options_reach_the_server(service: FakeEncoder, tmp_path: Path) -> None:
    options = ["--pooling", "max", "--dimensions", "3", "--dtype", "float16", "--truncate", "--prompt-name", "q"]
    await encserve(service, "embed", "one", *options, "--output", tmp_path / "v.npy")
    asked = service.requests[-1].options
    assert (asked.outputs[0].kind, asked.outputs[0].dimensions) == (pb.OUTPUT_KIND_MAX, 3)
    assert (asked.data_type, asked.truncation) == (pb.DATA_TYPE_FLOAT16, pb.TRUNCATION_END)
    assert asked.prompt_name == "q"
    assert np.load(tmp_path / "v.npy").dtype == np.float16


@pytest.mark.parametrize(
    ("name", "text", "flags", "problem"),
    [
        ("a.txt", "one", ["--column", "x"], "--column is for .jsonl, .csv, .tsv and .parquet"),
        ("a.jsonl", '{"text": "a"}\n{', [], "a.jsonl, line 2: must be JSON"),
        ("a.csv", "text,n\none,1\ntwo\n", [], "a.csv, line 3: must have 2 fields, like the first line; had 1"),
        ("a.parquet.gz", "", [], "a.parquet.gz: is a file of an unknown kind; known kinds: .txt, .jsonl"),
    ],
)
async def test_an_input_that_cannot_be_read(
    service: FakeEncoder, tmp_path: Path, name: str, text: str, flags: list[str], problem: str
) -> None:
    """If the input cannot be read, the error is a single line. An existing output file stays unchanged."""
    path, output = tmp_path / name, tmp_path / "v.npz"
    output.write_text("before")
    path.write_text(text)
    result = await encserve(service, "embed", *inputs(path), "--output", output, *flags, status=1)
    assert problem in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert output.read_text() == "before"
    assert {it.name for it in tmp_path.iterdir()} <= {name, "v.npz"}  # noqa: ASYNC240


@pytest.mark.parametrize("env", [{}, TERMINAL], ids=["pipe", "terminal"])
async def test_a_named_pipe_is_read_once(service: FakeEncoder, tmp_path: Path, env: dict[str, str]) -> None:
    path, output = tmp_path / "t.txt", tmp_path / "v.npy"
    os.mkfifo(path)
    command = asyncio.create_task(encserve(service, "embed", *inputs(path), "--output", output, env=env))
    await asyncio.to_thread(path.write_text, "one\ntwo\n")
    await asyncio.wait_for(command, 30)
    assert len(np.load(output)) == 2


async def test_an_unknown_suffix_and_too_many_inputs_to_print(service: FakeEncoder, tmp_path: Path) -> None:
    result = await encserve(service, "embed", "one", "--output", tmp_path / "v.out", status=1)
    assert "must end in .npy, .npz, .jsonl, .csv, .parquet; was .out. End the name of a folder with /" in result.stderr
    assert not service.requests, "the command must fail before the first request"
    for name in ("v.out", "missing/v.npy"):
        command = ("embed", "--input", tmp_path / "missing.txt", "--output", tmp_path / name)
        assert "--output " in (await encserve(service, *command, status=1)).stderr, (
            "--output must be checked before the inputs"
        )
    (tmp_path / "t.txt").write_text("a\n" * 1001)
    result = await encserve(service, "embed", *inputs(tmp_path / "t.txt"), status=1)
    assert "more than 1,000 inputs: --output FILE takes any number" in result.stderr


@pytest.mark.parametrize(("timeout", "status"), [([], 0), (["--timeout", "30"], 1)], ids=["300 s", "--timeout 30"])
async def test_files_wait_for_a_full_server(
    service: FakeEncoder, tmp_path: Path, timeout: list[str], status: int
) -> None:
    """The server is full. The command retries after the server's delay. If --timeout is shorter, the command fails."""
    pushback = "40000" if timeout else "10"
    full = 3

    async def refuse(request: pb.EncodeRequest) -> None:
        nonlocal full
        if full:
            full -= 1
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", "QUEUE_FULL", pushback=pushback)

    service.before = refuse
    (tmp_path / "t.txt").write_text("one\n")
    output = ("--output", tmp_path / "v.npy")
    await encserve(service, "embed", *inputs(tmp_path / "t.txt"), *output, *timeout, status=status)


async def test_a_failed_input_ends_the_retries_of_other_blocks(service: FakeEncoder, tmp_path: Path) -> None:
    """The command sends its inputs in blocks. One block has a refused input while the next block waits for a retry.

    The command fails at once, and does not wait 100 s for the retry.
    """
    others_wait = asyncio.Event()

    async def refuse(request: pb.EncodeRequest) -> None:
        texts = [it.text for it in request.inputs]
        if "other" in texts:
            others_wait.set()
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", "QUEUE_FULL", pushback="100000")
        await others_wait.wait()
        if "bad" in texts:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"inputs[{texts.index('bad')}]: is bad")

    service.before = refuse
    (tmp_path / "t.txt").write_text("bad\n" + "first block\n" * 3 + "other\n" * 8)
    call = encserve(service, "embed", *inputs(tmp_path / "t.txt"), "--output", tmp_path / "v.npy", status=1)
    assert f"{tmp_path}/t.txt, line 1: is bad" in (await asyncio.wait_for(call, 50)).stderr


@pytest.mark.system
@pytest.mark.parametrize("output", [[], ["--output", "-"]], ids=["table", "lines"])
async def test_ctrl_c_ends_the_command_with_one_line(service: FakeEncoder, tmp_path: Path, output: list[str]) -> None:
    """The server does not reply. The command does not wait for its running calls, and leaves no file."""
    asked = asyncio.Event()

    async def wait(_: pb.EncodeRequest) -> None:
        asked.set()
        await asyncio.Event().wait()

    service.before = wait
    call = ("--target", service.target, "--timeout", "1000", "embed", *(f"text {i}" for i in range(20)), *output)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "encserve_cli", *call),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    await asyncio.wait_for(asked.wait(), 50)
    process.send_signal(signal.SIGINT)
    printed, errors = await asyncio.wait_for(process.communicate(), 50)
    assert (process.returncode, printed, errors) == (130, b"", b"stopped\n")
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240 - a test's own folder


# A command whose main thread waits for a lock and never runs the handler of the signal.
WAITS = """
import signal, threading
from encserve_cli.commands import cli

@cli.command()
def wait():
    lock = threading.Lock()
    lock.acquire()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # another thread gets the signal
    print("waiting", flush=True)
    lock.acquire()

cli(["wait"])
"""


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_that_python_misses_ends_the_command(number: signal.Signals) -> None:
    """Python misses a signal that comes just before the main thread waits for a lock. The command still ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WAITS), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 50) == b"waiting\n"
    process.send_signal(number)
    try:
        _, errors = await asyncio.wait_for(process.communicate(), 20)
    finally:
        if process.returncode is None:
            process.kill()
    assert (process.returncode, errors) == (130, b"stopped\n")


async def test_a_refused_text_of_the_command_line_is_named_by_its_number(service: FakeEncoder) -> None:
    result = await encserve(service, "embed", "one", "word " * 80, status=1)
    assert result.stderr == "Error: argument 2: has 82 tokens; the model takes at most 64 (--truncate)\n"


@pytest.mark.parametrize(
    "text", ["inputs[{}]: has 7 tokens", "inputs[{}].token_ids.ids[3]: has 7 tokens"], ids=["input", "field"]
)
@pytest.mark.parametrize("line", [1, 5, 9])
async def test_the_line_of_a_refused_input_is_right_in_every_message(
    service: FakeEncoder, tmp_path: Path, text: str, line: int
) -> None:
    """The command reads blocks of 4 texts, and sends messages of up to 3 texts.

    The refused text itself contains "inputs[0]". The error shows this part of the text unchanged.
    """
    lines = [f"text {i}" for i in range(9)]
    lines[line - 1] = "bad inputs[0]"
    service.max_request_sequences = 3

    async def refuse(request: pb.EncodeRequest) -> None:
        for index, item in enumerate(request.inputs):
            if item.text.startswith("bad"):
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{text.format(index)} in {item.text!r}", "INVALID")

    service.before = refuse
    (tmp_path / "t.txt").write_text("\n".join(lines))
    result = await encserve(service, "embed", *inputs(tmp_path / "t.txt"), "--output", tmp_path / "v.npy", status=1)
    assert result.stderr.startswith(f"Error: {tmp_path}/t.txt, line {line}: has 7 tokens in 'bad inputs[")


@pytest.mark.parametrize("line", [1, 4, 6])
async def test_a_text_that_crashes_the_server_is_named_by_its_line(
    service: FakeEncoder, tmp_path: Path, line: int
) -> None:
    """The command reads blocks of 4 texts, and sends messages of up to 3 texts."""
    service.max_request_sequences = 3

    async def crash(request: pb.EncodeRequest) -> None:
        if any(item.text == str(line) for item in request.inputs):
            raise Refused(grpc.StatusCode.INTERNAL, "crashed")

    service.before = crash
    (tmp_path / "t.txt").write_text("\n".join(map(str, range(1, 20))))
    result = await encserve(service, "embed", *inputs(tmp_path / "t.txt"), "--output", tmp_path / "v.npy", status=1)
    assert result.stderr == f"Error: {tmp_path}/t.txt, line {line}: makes the server fail each time: crashed\n"
    assert not (tmp_path / "v.npy").exists()


@pytest.mark.parametrize("model_info", [pb.ModelInfo(), LATE, SPARSE], ids=["one vector each", "MaxSim", "weights"])
@pytest.mark.parametrize("line", [1, 2, 3])
async def test_similarity_names_the_line_of_a_refused_text(
    service: FakeEncoder, tmp_path: Path, model_info: pb.ModelInfo, line: int
) -> None:
    service.model_info = model_info
    texts = ["a", "b", "c"]
    texts[line - 1] = "word " * 80
    (tmp_path / "t.txt").write_text("\n".join(texts))
    result = await encserve(service, "similarity", *inputs(tmp_path / "t.txt"), status=1)
    assert result.stderr.endswith(f"t.txt, line {line}: has 82 tokens; the model takes at most 64 (--truncate)\n")


def test_reading_is_only_a_few_blocks_ahead_of_writing() -> None:
    """At any time, the command has read only a few blocks of inputs that are not yet written.

    Its memory use therefore does not grow with the size of the input file.
    """
    read: list[int] = []

    def inputs() -> Iterator[Sent]:
        for i in range(2000):
            read.append(i)
            yield Sent(f"line {i + 1}", str(i))

    written: list[str] = []
    blocks = encoding.blocks_of(inputs())
    for block, made in encoding.encode_in_order(lambda its: [f"of {it.value}" for it in its], blocks, lambda: None):
        assert made == [f"of {it.value}" for it in block]
        assert len(read) - len(written) <= 4 * 3 + 1
        written += made
    assert written == [f"of {i}" for i in range(2000)]


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    """The file is read line by line. The reader returns line 1 although line 2 is not valid JSON."""
    (tmp_path / "t.jsonl").write_text('"one"\n{')
    found = read_inputs([], [str(tmp_path / "t.jsonl")], None, ids=False)
    assert next(found).value == "one"
