"""The command line of `encserve serve` and `encserve pull`, without a server."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tiny_bundle import write_bundle

from encserve_cli.commands import cli
from encserve_server.__main__ import main as server


def flags(command: click.Command) -> dict[str, object]:
    """Return the default of each flag of a command."""
    options = [it for it in command.params if isinstance(it, click.Option)]
    return {flag: it.default for it in options for flag in it.opts}


def test_every_flag_of_the_server_works_with_serve() -> None:
    of_serve, of_server = flags(cli.commands["serve"]), flags(server)
    assert of_server.keys() <= of_serve.keys() | {"--version"}
    changed = {flag for flag in of_server.keys() & of_serve.keys() if of_serve[flag] != of_server[flag]}
    assert changed <= {"--http-port", "--log-format", "--log-level"}
    assert (of_serve["--http-port"], of_serve["--log-format"]) == (8080, "text")


def test_the_precision_of_an_export_is_not_the_precision_of_the_server() -> None:
    assert flags(cli.commands["serve"])["--export-precision"] == flags(cli.commands["pull"])["--precision"] == "float32"
    assert flags(cli.commands["serve"])["--precision"] == "model"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give MODEL, such as sentence-transformers/all-MiniLM-L6-v2, or --model-repository"),
        (["tiny", "--model-repository", "."], "give MODEL, such as"),
        (
            ["one/tiny", "--model", "tiny"],
            "--model needs --model-repository; without --model-repository, give the models as MODEL",
        ),
        (["one/tiny", "two/tiny/1"], "rename one with `encserve bundle rename two/tiny/1 --name NAME`"),
        (["one/tiny/1", "one/tiny/1"], "two models are named tiny; rename one with `encserve bundle rename"),
        (["one/tiny/1", "one/tiny/2", "--max-queue-tokens", "0"], "max_queue_tokens must be >= 1"),
        (["one/tiny", "one/tiny/1"], "two models are named tiny; rename one with `encserve bundle rename"),
        (
            ["one/tiny", "tiny=owner/other"],
            "tiny; give the checkpoint another name, as NAME=MODEL",
        ),
        (["s3://a/tiny/1", "s3://b/tiny/1"], "copy one with `encserve pull URI --to DIR`, and rename the copy with"),
        (
            ["nowhere"],
            "nowhere: there is no such folder; a model of the hub is named OWNER/NAME or OWNER/NAME@REVISION",
        ),
        (["one"], "one: holds the models tiny; name one, as one/tiny"),
        (["one/tiny", "--max-queue-tokens", "0"], "max_queue_tokens must be >= 1; was 0 (set by --max-queue-tokens)"),
        (["one/tiny", "--export-precision", "bfloat16"], "'bfloat16' is not one of 'float32', 'float16', 'int8'"),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    arguments: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for repository, version in (("one", "1"), ("one", "2"), ("two", "1")):
        write_bundle(tmp_path / repository, "tiny", version)
    result = CliRunner().invoke(cli, ["serve", *arguments])
    assert result.exit_code in (1, 2)
    assert problem in result.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["owner/tiny", "--version", ""], "--version must be 1 to 64 letters, digits, '.', '_' and '-'"),
        (["owner/tiny", "--version", "../1"], "--version must be 1 to 64 letters"),
        (["s3://models/tiny/1", "--version", "2"], "--version: a URI names a finished bundle"),
        (["mine=s3://models/tiny/1"], "mine=: a URI names a finished bundle"),
        (["s3://models/tiny/1", "--precision", "float32", "--ids-only"], "--precision, --ids-only: a URI names"),
    ],
)
def test_pull_refuses_a_wrong_command_line(
    arguments: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["pull", *arguments, "--to", "models"])
    assert result.exit_code in (1, 2)
    assert problem in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_model_wins_over_the_variables_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_bundle(tmp_path / "one")
    monkeypatch.setenv("ENCSERVE_MODEL_REPOSITORY", str(tmp_path / "other"))
    monkeypatch.setenv("ENCSERVE_MODEL", "other")
    result = CliRunner().invoke(cli, ["serve", "one/tiny", "--max-queue-tokens", "0"])
    assert "max_queue_tokens must be >= 1; was 0 (set by --max-queue-tokens)" in result.stderr
