"""Tests of `encserve inspect` with a stub client: arguments of the call, printed output and HTML page."""

import dataclasses
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from click.testing import CliRunner, Result
from made_inspections import make_inspection

import encserve_client
from encserve_cli import commands
from encserve_client import EncserveError, InvalidInputError
from encserve_client.results import InspectResult, ModelInfo


class StubClient:
    """A client that returns a fixed result and records the arguments of `inspect`."""

    def __init__(self, result: InspectResult, model: ModelInfo) -> None:
        self.result, self.info = result, model
        self.asked: dict[str, Any] = {}
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def model(self, name: str | None = None, version: str | None = None) -> ModelInfo:
        return self.info

    def inspect(self, input: Any, **options: Any) -> InspectResult:  # noqa: A002 - the client's argument has this name
        self.asked = {"input": input, **options}
        if self.error is not None:
            raise self.error
        return self.result


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubClient:
    """Replace the client by a stub. Its model has 3 layers and 2 heads."""
    client = StubClient(*make_inspection(n_layers=3, n_heads=2, d_model=16, max_sequence_tokens=32))
    monkeypatch.setattr(encserve_client, "EncoderClient", lambda *args, **kwargs: client)
    return client


def inspect(*arguments: str) -> Result:
    """Run the command in a terminal of 80 columns. Only JSON output may be wider."""
    result = CliRunner().invoke(commands.cli, ["inspect", *arguments], env={"COLUMNS": "80"})
    assert max(map(len, result.stdout.splitlines()), default=0) <= 80 or "--json" in arguments
    return result


def test_tables(stub: StubClient) -> None:
    """The command prints a table of the tokens, a table of the layers, and the times."""
    result = inspect("I understand this")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[0] == ["token", "id", "norm", "in", "after", "2", "attends", "to", "(layer", "2)", "weight"]
    [row] = [line for line in lines if line[:1] == ["understand"]]
    assert stub.result.hidden_states is not None
    norms = np.linalg.norm(stub.result.hidden_states[:, 2].astype(np.float64), axis=-1)
    assert row[1:4] == ["295", f"{norms[0]:.3f}", f"{norms[3]:.3f}"]
    assert stub.result.attention is not None
    weights = stub.result.attention[2, :, 2].mean(axis=0, dtype=np.float64)  # of the third token, mean over the heads
    assert [row[4], row[6]] == [str(weights.argmax()), f"{weights.max():.3f}"]
    assert [line[0] for line in lines if line[-1:] == ["bits"] or line[:1] == ["input"]] == ["input", "0", "1", "2"]
    assert "tokenize 0.4 ms, queue 0.1 ms, compute 11.7 ms, total 16.3 ms" in result.stdout
    assert stub.asked["input"] == "I understand this"
    assert stub.asked["positions"] is False


@pytest.mark.parametrize(("option", "values"), [("prompt_name", ["", "query"]), ("task", ["query"])])
def test_the_prompt_and_the_task_are_sent(stub: StubClient, option: str, values: list[str]) -> None:
    inspect("I understand this")
    assert stub.asked[option] is None
    for value in values:
        assert inspect("I understand this", f"--{option.replace('_', '-')}", value).exit_code == 0
        assert stub.asked[option] == value


def test_few_rows(stub: StubClient) -> None:
    result = inspect("I understand this", "--max-rows", "2")
    assert "6 more tokens not shown" in result.stdout


def test_json(stub: StubClient) -> None:
    answer = json.loads(inspect("I understand this", "--json").stdout)
    assert np.array(answer["attention"]).shape == (3, 2, 8, 8)
    assert np.array(answer["entropy_bits"]).shape == (3, 2, 8)
    assert np.array(answer["hidden_states"]).shape == (4, 8, 16)
    assert np.array(answer["norms"]).shape == (4, 8)
    assert np.array(answer["cosine"]).shape == (4, 8, 8)
    assert answer["tokens"][0] == "[CLS]"


def test_page(stub: StubClient, tmp_path: Path) -> None:
    """--html writes the page to the given file. With --html, the command also requests the model's position table."""
    path = tmp_path / "report.page"
    result = inspect("I understand this", "--html", str(path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{path.name}:4.9MB,8tokens" in "".join(result.stdout.split())  # a long path may be printed on two lines
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert stub.asked["positions"] is True


@pytest.mark.parametrize("position", ["none", ""])
def test_a_model_without_positions(stub: StubClient, tmp_path: Path, position: str) -> None:
    stub.info = dataclasses.replace(stub.info, position=position)
    inspect("a text", "--html", str(tmp_path / "report.html"))
    assert stub.asked["positions"] is False


def test_layers(stub: StubClient) -> None:
    """--layers 2,0 requests the attention of layers 0 and 2.

    It also requests the hidden states at the input of layer 0 and at the outputs of layers 0 and 2.
    """
    inspect("a text", "--layers", "2,0", "--model", "m", "--model-version", "7", "--truncate")
    assert (stub.asked["attention"], stub.asked["hidden_states"]) == ([0, 2], [0, 1, 3])
    assert (stub.asked["model"], stub.asked["version"], stub.asked["truncate"]) == ("m", "7", True)


@pytest.mark.parametrize("field", ["attention", "attention[0]", "hidden_states", "hidden_states[1]"])
def test_errors_of_layers_name_the_option(stub: StubClient, field: str) -> None:
    stub.error = InvalidInputError("must be from 0 to 5; was 7", field=field)
    assert inspect("a", "--layers", "1").stderr == "Error: --layers must be from 0 to 5; was 7\n"


def test_ids(stub: StubClient) -> None:
    """If the model has no tokenizer, the command accepts --ids and refuses a text. The error names --ids."""
    stub.info = dataclasses.replace(stub.info, has_tokenizer=False)
    stub.result = dataclasses.replace(stub.result, sequence=dataclasses.replace(stub.result.sequence, tokens=None))
    result = inspect("--ids", "101,2023,102")
    assert result.exit_code == 0
    assert stub.asked["input"] == [101, 2023, 102]
    refused = inspect("a text")
    assert (
        refused.stderr == "Error: model all-MiniLM-L6-v2 has no tokenizer; give token ids instead: --ids 101,2023,102\n"
    )


@pytest.mark.parametrize(
    ("changes", "arguments", "status", "text"),
    [
        ({}, ["a", "b"], 1, "inspect takes one text"),
        ({}, ["--ids", "1,x"], 1, "--ids needs whole numbers, such as 101,2023,102; was '1,x'"),
        ({}, ["a", "--layers", "-1"], 2, "must be whole numbers of at least 0, with commas between them; was '-1'"),
        ({"input_kind": "embeddings"}, ["a"], 1, "takes vectors, and this command takes none; call client.inspect"),
        ({"n_layers": 0, "can_inspect": False}, ["a", "--layers", "3"], 1, "Error: no graph for it"),
    ],
)
def test_errors(stub: StubClient, changes: dict[str, Any], arguments: list[str], status: int, text: str) -> None:
    stub.info = dataclasses.replace(stub.info, **changes)
    if not stub.info.can_inspect:
        stub.error = EncserveError("no graph\nfor it")
    result = inspect(*arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert text in result.stderr
