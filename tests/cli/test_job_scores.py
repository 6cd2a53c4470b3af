"""Tests of `encserve score`, a job over pairs of texts in two columns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from command import encserve, inputs, rejected_of, table_of
from fake_encoder import FakeEncoder
from tiny_bundle import write_bundle
from tiny_heads import logits_of, pair_ids, scores, scores_file, sigmoid, text, words

from encserve_cli.commands import cli
from encserve_proto.v1 import encoder_pb2 as pb

DOCUMENTS = ["x" * (i * 7 % 20 + 1) for i in range(25)]
SCORES = [float(len(it)) for it in DOCUMENTS]  # the fake service returns the length of a document


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_cli.job.plan.VECTOR_ROWS", 10)


def write_pairs(path: Path, documents: list[str | None], queries: list[str | None] | None = None) -> Path:
    """Write a Parquet file with the columns `q`, `id` and `d`."""
    found = queries or ["q"] * len(documents)
    table = pyarrow.table({"q": found, "id": range(len(documents)), "d": documents})
    pyarrow.parquet.write_table(table, path)
    return path


def reasons_of(folder: Path) -> dict[int, str]:
    """Return the reasons of rejected rows, by the number of the row."""
    return {it["row"]: it["reason"] for it in rejected_of(folder)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "pairs.parquet", [*DOCUMENTS])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "scores"


@pytest.fixture
def command(source: Path, folder: Path) -> list[str]:
    return ["score", *inputs(source), "--columns", "q,d", "--output", f"{folder}/"]


async def test_the_scores_of_two_columns(service: FakeEncoder, folder: Path, command: list[str]) -> None:
    result = await encserve(service, *command, "--keep", "id", "--activation", "none", "--prompt-name", "p")
    table = table_of(folder)
    assert table.column_names == ["query", "document", "score", "id"]
    assert table["query"].to_pylist() == ["q"] * 25
    assert (table["document"].to_pylist(), table["score"].to_pylist()) == (DOCUMENTS, SCORES)
    assert table["id"].to_pylist() == [*range(25)]
    assert table.schema.field("score").type == pyarrow.float32()
    assert "25 rows in 3 parts" in result.stdout
    request = service.score_requests[-1]
    assert (request.priority, request.activation, request.prompt_name, request.truncation) == (
        pb.PRIORITY_BULK, pb.ACTIVATION_NONE, "p", pb.TRUNCATION_END,
    )  # fmt: skip


async def test_the_tokens_of_pairs_are_counted(service: FakeEncoder, command: list[str]) -> None:
    """The fake service counts each character as a token."""
    lines = (await encserve(service, *command, "--json")).stdout.splitlines()
    done = json.loads(lines[-1])
    assert (done["event"], done["tokens"]) == ("done", sum(1 + len(it) for it in DOCUMENTS))


async def test_names_of_columns_have_commas(service: FakeEncoder, tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "pairs.parquet"
    names = ("q, a", 'the "d"', "id,1", "id")
    pyarrow.parquet.write_table(pyarrow.table([["q"] * 2, ["ab", "c"], [5, 6], [7, 8]], names=names), source)
    columns = ["--columns", '"q, a", the "d"', "--keep", 'id,"id,1:string"']
    await encserve(service, "score", *inputs(source), *columns, "--output", f"{folder}/")
    found = table_of(folder).to_pydict()
    assert (found["query"], found["document"], found["score"]) == (["q", "q"], ["ab", "c"], [2.0, 1.0])
    assert (found["id"], found["id,1"]) == ([7, 8], ["5", "6"])


async def test_a_second_run_makes_missing_parts_only(service: FakeEncoder, folder: Path, command: list[str]) -> None:
    await encserve(service, *command)
    (folder / "part-00000-000001.parquet").unlink()
    requests = len(service.score_requests)
    result = await encserve(service, *command)
    assert "25 rows in 3 parts, 2 of them made before" in result.stdout
    assert sum(len(it.pairs) for it in service.score_requests[requests:]) == 10 + 1  # the job sends 1 pair as a check
    assert table_of(folder)["score"].to_pylist() == SCORES
    for flags, problem in (
        (["--columns", "d,q"], "column is 'q'; the job has 'd'; query_column is 'd'; the job has 'q'"),
        (["--activation", "none"], "activation is 'none'; the job has None"),
    ):
        result = await encserve(service, *command, *flags, status=1)
        assert problem in result.stderr


async def test_refused_pairs_have_no_score(
    service: FakeEncoder, tmp_path: Path, folder: Path, command: list[str]
) -> None:
    """The server refuses some pairs, and crashes for one pair. Some rows lack a query or a document."""
    documents: list[str | None] = [*DOCUMENTS]
    documents[2] = documents[3] = documents[17] = "refused"
    documents[5], documents[12] = None, "crash"
    queries: list[str | None] = ["q"] * 25
    queries[20] = None
    write_pairs(tmp_path / "pairs.parquet", documents, queries)
    bad = {2, 3, 5, 12, 17, 20}
    result = await encserve(service, *command, "--timeout", "2", status=3)
    assert "rejected: 6 rows" in result.stdout
    table = table_of(folder)
    want = [None if index in bad else score for index, score in enumerate(SCORES)]
    assert table["score"].to_pylist() == want
    assert table["document"][2].as_py() == "refused"
    reasons = reasons_of(folder)
    assert {row - 1 for row in reasons} == bad
    assert (reasons[6], reasons[21]) == ("document is null", "query is null")
    assert reasons[13].startswith("makes the server fail each time: crashed")
    assert reasons[3] == "document is too long"


async def test_all_pairs_may_be_refused(service: FakeEncoder, tmp_path: Path, folder: Path, command: list[str]) -> None:
    write_pairs(tmp_path / "pairs.parquet", ["refused"] * 12)
    await encserve(service, *command, status=3)
    assert table_of(folder)["score"].to_pylist() == [None] * 12


async def test_a_model_that_refuses_empty_texts(
    service: FakeEncoder, tmp_path: Path, folder: Path, command: list[str]
) -> None:
    """If a tokenizer adds no special tokens, the server refuses empty texts. The job rejects rows with empty texts."""
    service.refused_texts = ("",)
    write_pairs(tmp_path / "pairs.parquet", ["abc", "", "ab"])
    result = await encserve(service, *command, status=3)
    assert "rejected: 1 row" in result.stdout
    assert table_of(folder)["score"].to_pylist() == [3.0, None, 2.0]


async def test_several_labels_are_a_list(service: FakeEncoder, folder: Path, command: list[str]) -> None:
    service.labels = ("no", "yes")
    service.model_info = pb.ModelInfo(labels=service.labels)
    await encserve(service, *command)
    table = table_of(folder)
    assert table.column_names == ["query", "document", "scores"]
    assert table["scores"].to_pylist() == [[score, 2 * score] for score in SCORES]


async def test_pairs_in_other_files(service: FakeEncoder, tmp_path: Path, folder: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text(
        '{"query": "q", "n": 1, "document": "abc"}\n{"query": 5, "document": "a"}\n["q", "d"]\n{"query": "q"}\n'
    )
    comma = tmp_path / "b.csv"
    comma.write_text("document,n,query\nabcd,2,q\n")
    result = await encserve(
        service, "score", *inputs(lines, comma), "--output", f"{folder}/", "--keep", "n:string", status=3
    )
    assert f"rejected: 3 rows, such as {lines}, line 2: query must be text; was 5" in result.stdout
    table = table_of(folder)
    assert table["score"].to_pylist() == [3.0, None, None, None, 4.0]
    assert table["n"].to_pylist() == ["1", None, None, None, "2"]
    assert list(reasons_of(folder).values())[1:] == [
        'must be an object with two fields; was ["q", "d"]',
        "has no column 'document'; the columns are 'query': choose two with --columns",
    ]


async def test_scores_of_another_bundle_end_the_job(service: FakeEncoder, command: list[str], folder: Path) -> None:
    """If a reply comes from another bundle, the job ends. Behind a proxy, each server may have a different bundle."""
    service.score_fingerprint = "e" * 16
    result = await encserve(service, *command, status=1)
    assert "ffffffffffffffff is expected, but the answer has eeeeeeeeeeeeeeee" in result.stderr
    assert not list(folder.glob("part-*"))  # noqa: ASYNC240


MISTAKES = [
    (["--columns", "q"], 2, "--columns must be the names of two columns, as query,document; was q"),
    (["--columns", "q,q"], 2, "--columns must be the names of two columns, as query,document; was q,q"),
    (["--columns", '"q,d'], 2, "--columns has a name with a wrong double quote"),
    (["--keep", '"id'], 2, "--keep has a name with a wrong double quote"),
    (["--columns", "q,x"], 1, "has no column 'x'; the columns are 'q', 'id', 'd': choose two with --columns"),
    (["--columns", "id,d"], 1, "column 'id' must be of text; its type is int64"),
    (
        ["--output", "scores.parquet"],
        2,
        "--output scores.parquet: must be a folder that exists, or a name that ends in",
    ),
    (["--keep", "q"], 1, "--keep q: is the column of the inputs"),
    (["--precision", "float32"], 2, "--precision needs --bundle"),
    (["--vectors"], 2, "No such option '--vectors'"),
]


@pytest.mark.parametrize(("flags", "status", "problem"), MISTAKES)
async def test_mistakes(
    service: FakeEncoder, command: list[str], folder: Path, flags: list[str], status: int, problem: str
) -> None:
    result = await encserve(service, *command, *flags, status=status)
    assert problem in " ".join(result.stderr.replace("│", "").split())
    assert not folder.exists()  # noqa: ASYNC240
    assert all(len(it.pairs) == 1 for it in service.score_requests)


async def test_lines_of_text_are_no_pairs(service: FakeEncoder, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    result = await encserve(service, "score", *inputs(tmp_path / "a.txt"), "--output", f"{folder}/", status=1)
    assert "pairs are read from .jsonl, .csv, .tsv and .parquet files" in result.stderr


def in_process(bundle: Path) -> list[str]:
    """Return the flags of a job that runs a bundle without a server.

    The flags set the largest batch. Otherwise the job would measure the best batch size, which takes two seconds.
    """
    return ["--bundle", str(bundle), "--max-batch-tokens", "64"]


@pytest.mark.parametrize(("flags", "activation"), [([], sigmoid), (["--activation", "none"], lambda logits: logits)])
def test_a_bundle_computes_scores(tmp_path: Path, folder: Path, flags: list[str], activation: Any) -> None:
    bundle = write_bundle(
        tmp_path / "models", "tiny", tokenizer=words(), files={"scores.onnx": scores_file()}, scores=scores()
    )
    ids = [([5, 6], [7 + i, 8]) for i in range(12)]
    source = write_pairs(tmp_path / "pairs.parquet", [text(*it) for _, it in ids], [text(*it) for it, _ in ids])
    command = ["score", *inputs(source), "--columns", "q,d", "--output", f"{folder}/", *in_process(bundle), *flags]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    want = activation(logits_of([pair_ids(*it) for it in ids])[:, 0])
    np.testing.assert_allclose(table_of(folder)["score"].to_pylist(), want, rtol=1e-5)


@pytest.mark.parametrize("names", [["relevant"], ["no", "yes"]])
def test_a_bundle_with_one_label_has_no_softmax(tmp_path: Path, command: list[str], names: list[str]) -> None:
    files = {"scores.onnx": scores_file(len(names))}
    bundle = write_bundle(tmp_path / "models", "tiny", tokenizer=words(), files=files, scores=scores(labels=names))
    result = CliRunner().invoke(cli, [*command, *in_process(bundle), "--activation", "softmax"])
    assert result.exit_code == (1 if len(names) == 1 else 0), result.output
    assert ("activation: must not be softmax" in result.stderr) == (len(names) == 1), result.stderr


def test_a_bundle_without_labels_is_refused(tmp_path: Path, command: list[str], folder: Path) -> None:
    bundle = write_bundle(tmp_path / "models", "tiny", tokenizer=words())
    result = CliRunner().invoke(cli, [*command, *in_process(bundle)])
    assert result.exit_code == 1
    assert "scores" in result.stderr
    assert not folder.exists()
