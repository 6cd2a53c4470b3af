"""Tests of the `encserve` commands against a fake server: printed tables, JSON, output files and errors."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import click
import command as commands
import numpy as np
import pytest
from click.testing import CliRunner, Result
from command import TERMINAL
from fake_encoder import FakeEncoder
from tiny_bundle import write_bundle

from encserve import __version__
from encserve_cli.commands import cli
from encserve_client import Pooling
from encserve_client.options import TrainedKind
from encserve_proto.v1 import encoder_pb2 as pb

TASKS = [pb.TaskInfo(task=pb.TASK_QUERY, max_tokens=32), pb.TaskInfo(task=pb.TASK_DOCUMENT, max_tokens=60)]
MULTI_VECTOR = pb.ModelInfo(multi_vector_width=8, multi_vector_similarity="meanmaxsim", tasks=TASKS)
SPARSE = pb.ModelInfo(sparse_width=100)
ALL_KINDS = pb.ModelInfo(
    sparse_width=100,
    multi_vector_width=8,
    multi_vector_similarity="maxsim",
    pooling=pb.OUTPUT_KIND_CLS,
    vector_width=9,
)
LONG = "a rather long text " * 15


async def encserve(
    service: FakeEncoder, *arguments: str, status: int = 0, env: Mapping[str, str] = MappingProxyType({})
) -> Result:
    """Run the command in a terminal of 80 columns.

    Check that no table is wider than the terminal. JSON, the output of `models`, and error messages may be wider.
    """
    result = await commands.encserve(service, *arguments, status=status, env={"COLUMNS": "80", **env})
    assert max(map(len, result.output.splitlines()), default=0) <= 80 or {"--json", "models"} & set(arguments) or status
    return result


async def test_encode(service: FakeEncoder) -> None:
    """The command prints a table for each text, the shape of the result, the model and the times."""
    result = await encserve(service, "encode", "two words", "[red]no markup[/red]")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "two words"
    assert "[red]no markup[/red]" in lines
    [line] = [line.split() for line in lines if line.split()[:1] == ["two"] and "words" not in line]
    assert line == ["two", "3", "3.250", "3.266", "3.281", "…", "3.359", "9.348"]
    assert "shape (4, 8)" in lines
    assert f"model tiny, version 1, fingerprint {'f' * 16}" in lines
    assert "tokenize 1.0 ms, queue 2.0 ms, compute 3.0 ms, total " in result.stdout
    assert "\x1b" not in result.stdout


async def test_encode_counts_hidden_rows(service: FakeEncoder) -> None:
    result = await encserve(service, "encode", LONG[:100], "--max-rows", "3", "--exclude-special")
    assert "more rows not shown" in result.stdout
    assert "[FIRST]" not in result.stdout


async def test_encode_json(service: FakeEncoder) -> None:
    result = await encserve(service, "encode", "two words", "--json", "--model", "tiny", "--model-version", "1")
    answer = json.loads(result.stdout)
    assert (answer["model"], answer["version"]) == ("tiny", "1")
    [sequence] = answer["sequences"]
    assert sequence["tokens"] == ["[FIRST]", "two", "words", "[LAST]"]
    assert sequence["token_ids"] == [1, 3, 5, 2]
    assert np.array(sequence["rows"]).shape == tuple(sequence["shape"]) == (4, 8)


async def test_similarity(service: FakeEncoder) -> None:
    """The command prints the cosine similarity of all pairs of texts as a matrix.

    A matrix that is wider than the terminal is printed as several tables.
    """
    result = await encserve(service, "similarity", "one", "one", LONG)
    rows = [line.split() for line in result.stdout.splitlines() if line.lstrip()[:1] in {"1", "2", "3"}]
    assert [row[-3:-1] for row in rows if row[0] == "1"] == [["1.000", "1.000"]]
    assert "…" in result.stdout
    assert "pooling model" in result.stdout
    wide = await encserve(service, "similarity", *(f"text {i}" for i in range(20)))
    assert wide.stdout.count("cosine similarity") > 1


async def test_similarity_json(service: FakeEncoder) -> None:
    result = await encserve(service, "similarity", "one", "two words", "--json", "--pooling", "cls")
    answer = json.loads(result.stdout)
    scores = np.array(answer["scores"])
    assert scores.shape == (2, 2)
    np.testing.assert_allclose(np.diag(scores), 1)
    assert (answer["pooling"], answer["texts"], answer["compared_by"]) == ("cls", ["one", "two words"], "cosine")


async def test_rank(service: FakeEncoder) -> None:
    """The command prints the documents with the largest scores, the best first."""
    result = await encserve(service, "rank", "a query", "two", LONG, "three", "--top-k", "2")
    assert result.stdout.splitlines()[0] == "a query"
    assert re.search(r"1 +a rather long text .*… +285\.0000 *\n +2 +three +5\.0000 *\n", result.stdout)
    assert "two" not in result.stdout
    (request,) = service.score_requests
    assert (request.query, list(request.documents), request.top_k) == ("a query", ["two", LONG, "three"], 2)
    as_json = await encserve(service, "rank", "a query", "two", "three", "--json", "--activation", "none")
    assert json.loads(as_json.stdout) == {
        "query": "a query",
        "documents": [{"text": "three", "index": 1, "score": 5.0}, {"text": "two", "index": 0, "score": 3.0}],
    }
    assert service.score_requests[-1].activation == pb.ACTIVATION_NONE


async def test_the_model_names_the_similarity(service: FakeEncoder) -> None:
    """The model was trained for the dot product, so the command prints dot products. A wide table is split."""
    service.model_info = pb.ModelInfo(similarity="dot")
    answer = json.loads((await encserve(service, "similarity", "one", "two words", "--json")).stdout)
    vectors = service.answer(service.requests[-1]).outputs[0]
    rows = np.frombuffer(vectors.data, np.float32).reshape(2, -1)
    assert answer["compared_by"] == "dot"
    np.testing.assert_allclose(answer["scores"], rows @ rows.T, rtol=1e-6)
    shown = await encserve(service, "similarity", *(f"text {i}" for i in range(20)))
    assert shown.stdout.count("dot similarity") > 1


async def test_embed(service: FakeEncoder) -> None:
    """The table has one line for each text.

    The request has the task, the prompt name and the truncation that the flags set.
    """
    service.model_info = pb.ModelInfo(tasks=TASKS)
    options = ["--task", "query", "--prompt-name", "q", "--truncate"]
    result = await encserve(service, "embed", "two words", "one", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    [line] = [line.split() for line in result.stdout.splitlines() if line.startswith(" two words ")]
    assert line[:4] == ["two", "words", "1", "3.125"]
    assert "shape (2, 8)" in result.stdout
    asked = service.requests[-1].options
    assert (asked.task, asked.prompt_name, asked.truncation) == (pb.TASK_QUERY, "q", pb.TRUNCATION_END)


async def test_embed_vectors_of_maxsim(service: FakeEncoder) -> None:
    """For a multi-vector model each vector is printed with its token. An empty text has no vectors."""
    service.model_info = MULTI_VECTOR
    result = await encserve(service, "embed", "two words", "")
    [line] = [line.split() for line in result.stdout.splitlines() if line.startswith(" words ")]
    assert line[:3] == ["words", "2", "5.500"]
    assert "shape (0, 8)" in result.stdout
    answer = json.loads((await encserve(service, "embed", "two words", "", "--json")).stdout)
    assert answer["kind"] == "multi_vector"
    assert [its["tokens"] for its in answer["sequences"]] == [["two", "words"], []]


async def test_embed_pooled_vectors(service: FakeEncoder) -> None:
    """If a multi-vector model pools its vectors, a vector does not belong to a token.

    The table then shows "(pooled)" instead of a token.
    """
    service.model_info = MULTI_VECTOR

    async def pooled(request: pb.EncodeRequest) -> pb.EncodeResponse:
        response = service.answer(request)
        response.outputs[0].indices = b""
        return response

    service.before = pooled
    assert "(pooled)" in (await encserve(service, "embed", "two words")).stdout
    [sequence] = json.loads((await encserve(service, "embed", "two words", "--json")).stdout)["sequences"]
    assert sequence["token_indices"] is None


async def test_embed_weights(service: FakeEncoder) -> None:
    """For a sparse model the largest weights are printed first, each with its token."""
    service.model_info = SPARSE
    result = await encserve(service, "embed", "the vector with weights", "--max-rows", "2")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line for line in lines if len(line) == 3 and line[0].isdecimal()] == [
        ["7", "weights", "3.500"],
        ["6", "vector", "3.000"],
    ]
    assert "4 weights of 100 are not 0, 2 more rows not shown" in result.stdout
    [sequence] = json.loads((await encserve(service, "embed", "two words", "--json")).stdout)["sequences"]
    assert (sequence["indices"], sequence["values"], sequence["width"]) == ([3, 5], [1.5, 2.5], 100)


COSINE = pb.ModelInfo(sparse_width=100, similarity="cosine")


@pytest.mark.parametrize(
    ("model", "compared_by", "score"),
    [
        (MULTI_VECTOR, "meanmaxsim", 87.378),
        (SPARSE, "dot", 2.25),
        (COSINE, "cosine", 1.0),
        (ALL_KINDS, "dot", 2.25),
    ],
)
async def test_similarity_is_a_ranking(
    service: FakeEncoder, model: pb.ModelInfo, compared_by: str, score: float
) -> None:
    """The first text is the query, and the other texts are documents.

    The table lists the documents by descending score. The requests have a task only if the model has tasks.
    """
    service.model_info = model
    kind = ["--kind", "sparse"] if model is ALL_KINDS else []
    texts = ["one", "four", "two", ""]
    answer = json.loads((await encserve(service, "similarity", *texts, *kind, "--json")).stdout)
    assert (answer["query"], answer["compared_by"]) == ("one", compared_by)
    has_tasks = bool(model.tasks)
    assert [it.options.task for it in service.requests] == (
        [pb.TASK_QUERY, pb.TASK_DOCUMENT] if has_tasks else [pb.TASK_UNSPECIFIED] * 2
    )
    scores = {it["text"]: it["score"] for it in answer["documents"]}
    assert [it["index"] for it in answer["documents"]] == ([0, 1, 2] if model is MULTI_VECTOR else [1, 0, 2])
    assert scores["two"] == pytest.approx(score, rel=0.01)
    assert scores[""] == (None if model is MULTI_VECTOR else 0)
    shown = await encserve(service, "similarity", *texts, *kind)
    lines = [line.split() for line in shown.stdout.splitlines() if line.strip()]
    assert lines[0] == ["one"]
    assert lines[1] == ["document", compared_by]
    assert ("no vectors" in shown.stdout) is (model is MULTI_VECTOR)


@pytest.mark.parametrize("output", ["", "v.npy", "vectors/"], ids=["printed", "a file", "a job"])
async def test_errors_of_kinds_name_options_of_the_command(service: FakeEncoder, tmp_path: Path, output: str) -> None:
    """An error begins with the option of the command, not with the argument of the Python client."""
    service.model_info = pb.ModelInfo(sparse_width=100)
    (tmp_path / "t.txt").write_text("a text")
    command = ["embed", "--input", f"{tmp_path}/t.txt", *(["--output", f"{tmp_path}/{output}"] if output else [])]
    for option in ("--kind", "--pooling"):
        refused = await encserve(service, *command, option, "model", status=1)
        assert refused.stderr.startswith("Error: --kind: model tiny was not trained for single vectors; it has the ")
    refused = await encserve(service, *command, "--kind", "sparse", "--dimensions", "2", status=1)
    assert refused.stderr == (
        "Error: --dimensions must not be given for the kind 'sparse': weights over the vocabulary are not in order\n"
    )


async def test_a_long_document_leaves_its_score_room(service: FakeEncoder) -> None:
    service.model_info = MULTI_VECTOR
    shown = (await encserve(service, "similarity", "one", "three " + 50 * "four", "two", "")).stdout
    heading, _, *rows = [line.split() for line in shown.splitlines()[2:7]]
    assert heading == ["document", "meanmaxsim"]
    assert all(re.fullmatch(r"\d+\.\d{4}", line[-1]) for line in rows[:-1])
    assert rows[-1][-2:] == ["no", "vectors"]


async def test_similarity_of_texts_of_one_task(service: FakeEncoder) -> None:
    service.model_info = MULTI_VECTOR
    await encserve(service, "similarity", "one", "two", "--task", "document", "--prompt-name", "")
    assert [it.options.task for it in service.requests] == [pb.TASK_DOCUMENT] * 2
    assert [it.options.HasField("prompt_name") for it in service.requests] == [True, True]


async def test_the_page_of_maxsim(service: FakeEncoder, tmp_path: Path) -> None:
    """--html writes a page with one figure for each document.

    If the model does not compare texts by MaxSim, the command refuses --html.
    """
    service.model_info, path = MULTI_VECTOR, tmp_path / "met.html"
    result = await encserve(service, "similarity", "two words", "one", "four five", "--html", str(path))
    [data] = re.findall(r'<script type="application/json" id="report">(.*?)</script>', path.read_text(), re.DOTALL)
    matches = json.loads(data)["matches"]
    assert sorted(match["text"] for match in matches) == ["four five", "one"]
    assert all("words" in match["figure"]["rows"] for match in matches)
    service.model_info = ALL_KINDS
    result = await encserve(service, "similarity", "one", "two", "--html", str(tmp_path / "not.html"), status=1)
    assert "--html needs --kind multi_vector; was 'model', from model tiny" in result.stderr
    assert not (tmp_path / "not.html").exists()


async def test_similarity_refuses_texts_and_options(service: FakeEncoder) -> None:
    """The command refuses an empty query, which has no vectors, and refuses --pooling together with --kind sparse."""
    service.model_info = MULTI_VECTOR
    result = await encserve(service, "similarity", "", "two", status=1)
    assert result.stderr == "Error: query must have at least 1 vector; had none\n"
    service.model_info = SPARSE
    result = await encserve(service, "similarity", "one", "two", "--pooling", "mean", "--kind", "sparse", status=2)
    assert "--pooling does not apply to --kind sparse; leave out --pooling" in result.stderr


async def test_tokenize(service: FakeEncoder, tmp_path: Path) -> None:
    """The command prints a table of tokens for each text. Special tokens have no offsets.

    With --json the command prints one line of JSON for each text, even for 1,000 texts.
    """
    service.model_info = pb.ModelInfo(tasks=TASKS)
    result = await encserve(service, "tokenize", "two words", "", "--task", "query", "--offset-unit", "utf8_bytes")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line for line in lines if line[:1] in (["two"], ["words"], ["[FIRST]"])] == [
        ["two", "words"],
        ["[FIRST]", "1"],
        ["two", "3", "0", "3"],
        ["words", "5", "4", "9"],
        ["[FIRST]", "1"],
    ]
    assert "4 tokens" in result.stdout
    [asked] = service.tokenize_requests
    assert (asked.task, asked.offset_unit) == (pb.TASK_QUERY, pb.OFFSET_UNIT_UTF8_BYTES)
    assert asked.truncation == pb.TRUNCATION_UNSPECIFIED
    (tmp_path / "texts.txt").write_text("".join(f"text {i}\n" for i in range(1000)))
    service.tokenize_requests.clear()
    result = await encserve(service, "tokenize", "--input", str(tmp_path / "texts.txt"), "--json", "--truncate")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [it["text"] for it in records] == [f"text {i}" for i in range(1000)]
    assert records[107]["tokens"] == ["[FIRST]", "text", "107", "[LAST]"]
    assert records[107]["offsets"] == [[0, 0], [0, 4], [5, 8], [0, 0]]
    assert records[107]["special"] == [True, False, False, True]
    assert len(service.tokenize_requests) >= 4
    assert {it.truncation for it in service.tokenize_requests} == {pb.TRUNCATION_END}


async def test_requests_for_token_strings(service: FakeEncoder, tmp_path: Path) -> None:
    """A request asks for token strings only if the output contains them, because token strings enlarge the reply."""
    for command, suffix in (("embed", ".npy"), ("embed", ".jsonl"), ("encode", ".npz"), ("encode", ".jsonl")):
        await encserve(service, command, "two words", "--output", str(tmp_path / f"out{suffix}"))
    assert [it.options.include_token_strings for it in service.requests] == [False, False, False, True]


async def printed_model(service: FakeEncoder) -> tuple[str, dict[str, str]]:
    """Return the heading and the fields that `models` prints for a model, on a terminal of 80 columns."""
    shown = click.unstyle((await encserve(service, "models", env={**TERMINAL, "COLUMNS": "80"})).stdout)
    heading, *lines = shown.rstrip().splitlines()
    assert max(map(len, shown.splitlines())) <= 80
    fields = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines)
    return heading.rstrip(), dict(fields)


async def test_models_of_other_kinds(service: FakeEncoder) -> None:
    """`models` lists the width of each kind of output, and the maximum number of tokens for each task."""
    service.model_info.CopyFrom(ALL_KINDS)
    service.model_info.tasks.extend(TASKS)
    _, facts = await printed_model(service)
    assert facts["outputs"] == "cls 9; maxsim 8; sparse 100"
    assert facts["max tokens"] == "64, query 32, document 60"


async def test_models(service: FakeEncoder) -> None:
    """`models` prints everything at 80 columns, even if the name is long. JSON has more fields."""
    name = service.model_info.name = "a-model-with-a-name-of-forty-characters-"
    service.model_info.max_outputs = 16
    heading, facts = await printed_model(service)
    assert heading == f"{name}, the default model"
    assert facts == {
        "version": "1",
        "fingerprint": "f" * 16,
        "space id": "s2-" + "5" * 32,
        "d_model": "8",
        "layers": "2",
        "max tokens": "64",
        "outputs": "mean 8",
        "runs on": "CPU, float32",
        "ready": "yes",
    }
    [model] = json.loads((await encserve(service, "models", "--json")).stdout)
    assert (model["max_request_tokens"], model["max_outputs"]) == (65536, 16)


async def test_models_of_a_server_that_is_loading(service: FakeEncoder) -> None:
    """If the list of models is empty, the command says why on stderr. With --json, it prints only an empty list."""
    service.is_loading = True
    result = await encserve(service, "models")
    assert (result.stdout, result.stderr) == ("", "no models: the server may still be loading; see the server's log\n")
    result = await encserve(service, "models", "--json")
    assert (result.stdout, result.stderr) == ("[]\n", "")


async def test_metadata_of_every_call(service: FakeEncoder) -> None:
    flags = ["--metadata", "x-team=search", "--metadata", "x-empty=", "--api-key", "secret"]
    await encserve(service, *flags, "embed", "one")
    sent = service.metadata[-1]
    assert (sent["x-team"], sent["x-empty"], sent["authorization"]) == ("search", "", "Bearer secret")
    await encserve(service, "embed", "one", env={"ENCSERVE_API_KEY": "key\n"})
    assert service.metadata[-1]["authorization"] == "Bearer key"


async def test_connection_options_after_the_command(service: FakeEncoder) -> None:
    """The connection options may follow the command.

    They override environment variables and the options before the command.
    """
    after = ["--target", service.target, "--metadata", "x-team=search", "--timeout", "20"]
    for before in ([], ["--target", "127.0.0.1:1", "--metadata", "x-team=other", "--api-key", "secret"]):
        call = [*before, "embed", "one", *after]
        done = await asyncio.to_thread(CliRunner().invoke, cli, call, env={"ENCSERVE_TARGET": "127.0.0.1:1"})
        assert done.exit_code == 0, done.output
        sent = service.metadata[-1]
        assert (sent["x-team"], sent.get("authorization")) == ("search", "Bearer secret" if before else None)
    await encserve(service, "models", env={"ENCSERVE_TARGET": "127.0.0.1:1"})
    split = await encserve(service, "--cert", "a.pem", "models", "--tls-key", "b.pem", status=1)
    assert "a.pem" in split.stderr


@pytest.mark.parametrize("command", ["encode", "embed", "tokenize", "similarity", "inspect", "bench", "models"])
def test_the_help_begins_with_at_most_ten_options_and_ends_with_the_connection(command: str) -> None:
    shown = CliRunner().invoke(cli, [command, "--help"]).stdout
    assert CliRunner().invoke(cli, [command, "-h"]).stdout == shown
    first, *_, last = shown.partition("\nOptions:\n")[2].split("\n\n")
    assert len(re.findall(r"^  -", first, re.MULTILINE)) <= 10
    assert last.startswith("Connection:")
    assert re.findall(r"^  (--\S+)", last, re.MULTILINE) == [
        *("--target", "--timeout", "--tls", "--ca", "--cert", "--tls-key", "--server-name", "--api-key", "--metadata")
    ]
    assert "ENCSERVE_TARGET" in last


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line() -> None:
    result = CliRunner().invoke(cli, ["--target", "10.0.0.7", "--api-key", "secret", "--timeout", "0.01", "models"])
    assert result.exit_code == 1
    warning, *_ = result.stderr.splitlines()
    assert warning.startswith("Warning: the key goes to 10.0.0.7:50051 without encryption, so others on the network")


@pytest.mark.system
def test_version() -> None:
    """`python -m encserve_cli --version` and `encserve --version` print the same line."""
    done = subprocess.run(
        [sys.executable, "-m", "encserve_cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == CliRunner().invoke(cli, ["--version"]).stdout == f"encserve, version {__version__}\n"


@pytest.mark.system
def test_help_is_quick() -> None:
    """The help of a command imports no slow package. A command imports slow packages only when the command runs."""
    slow = "{'numpy', 'grpc', 'google', 'pyarrow', 'rich', 'plotly', 'pandas', 'onnxruntime', 'torch', 'tokenizers'}"
    code = f"""
import sys
from click.testing import CliRunner
from encserve_cli.commands import cli
for command in ([], *([name] for name in cli.commands)):
    assert CliRunner().invoke(cli, [*command, "--help"]).exit_code == 0
print(sorted({slow} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("columns", "least", "most"), [(80, 70, 80), (140, 120, 140), (200, 120, 140)])
def test_the_help_is_as_wide_as_the_terminal_up_to_140_columns(
    columns: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in ([], *([name] for name in cli.commands)):
        cli.main([*command, "--help"], prog_name="encserve", standalone_mode=False)
        widest = max(map(len, capsys.readouterr().out.splitlines()))
        assert widest <= most
        assert widest >= least or command != ["embed"]


def test_the_help_shows_the_commands_first_and_whole_sentences() -> None:
    shown = CliRunner().invoke(cli, ["-h"]).stdout
    titles = [shown.index(title) for title in ("\nCommands:", "\nOptions:", "\nConnection:")]
    assert titles == sorted(titles)
    assert "..." not in shown.partition("\nCommands:")[2]


@pytest.mark.parametrize("command", ["embed", "similarity"])
@pytest.mark.parametrize(("flag", "values"), [("kind", get_args(TrainedKind)), ("pooling", get_args(Pooling))])
def test_the_help_lists_all_values_of_the_client(command: str, flag: str, values: tuple[str, ...]) -> None:
    assert f"--{flag} [{'|'.join(values)}]" in CliRunner().invoke(cli, [command, "--help"]).stdout


def test_bundle_promote_and_rename_print_the_new_folder(tmp_path: Path) -> None:
    """The commands need no server. An error is one line that names the folder."""
    source = write_bundle(tmp_path / "staging")
    promoted = CliRunner().invoke(cli, ["bundle", "promote", str(source), "--to", str(tmp_path / "models")])
    assert (promoted.exit_code, promoted.output) == (0, f"{tmp_path}/models/tiny/1\n")
    renamed = CliRunner().invoke(cli, ["bundle", "rename", str(tmp_path / "models" / "tiny"), "--version", "2"])
    assert (renamed.exit_code, renamed.output) == (0, f"{tmp_path}/models/tiny/2\n")
    again = CliRunner().invoke(cli, ["bundle", "rename", str(tmp_path / "models" / "tiny"), "--version", "2"])
    problem = f"Error: {tmp_path}/models/tiny/2: has this name and version already\n"
    assert (again.exit_code, again.output) == (1, problem)
    nothing = CliRunner().invoke(cli, ["bundle", "rename", str(source)])
    assert nothing.exit_code == 2
    assert "Error: give --name, --version or both\n" in nothing.output


@pytest.mark.system
def test_bundles_move_without_the_packages_of_the_server(tmp_path: Path) -> None:
    """`encserve bundle` needs only the packages of the extra `cli`."""
    source = write_bundle(tmp_path / "staging")
    code = """
import sys
for module in ("onnxruntime", "tokenizers", "uvloop", "prometheus_client", "grpc_health", "aiohttp", "torch", "onnx"):
    sys.modules[module] = None
from encserve_cli.commands import cli
cli(prog_name="encserve")
"""
    arguments = ["bundle", "promote", str(source), "--to", str(tmp_path / "models")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{tmp_path}/models/tiny/1\n", "")
