"""Tests the command line: the exports of each command, the reports, the options, and the errors."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import DATA, golden_fields
from click.testing import CliRunner, Result
from google.protobuf import json_format

from encserve_export import Exported
from encserve_export.cli import main
from encserve_proto.bundle.v1 import manifest_pb2

TINY = {"vocab_size": 50, "d_model": 16, "n_heads": 2, "d_ff": 32, "n_layers": 1, "max_sequence_tokens": 20}
GOLDEN = DATA / "fused-qkv"
MODULE = """
from __future__ import annotations

import dataclasses
import torch
from sizes import WIDTH

@dataclasses.dataclass
class Sizes:
    width: int = WIDTH

class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(50, WIDTH)

    def forward(self, ids, mask):
        return torch.tanh(self.table(ids))

def make():
    return Mine()

def make_nothing():
    return None
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def run_well(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def read_manifest(bundle: Path) -> manifest_pb2.Manifest:
    return json_format.Parse((bundle / "manifest.json").read_text(), manifest_pb2.Manifest())


def test_hf_reports_the_result_on_stdout_and_progress_on_stderr(models: Path) -> None:
    result = run_well(
        "hf", DATA / "hf-bert", "--ids-only", "--model-repository", models, "--max-sequence-tokens", 20,
        "--version", "2024.1",
    )  # fmt: skip
    manifest = read_manifest(models / "hf-bert" / "2024.1")
    assert manifest.encoder.max_sequence_tokens == 20
    for shown in (
        "other", "77,888", "100.0 %", "tolerance 5.0e-05", manifest.fingerprint, manifest.space_id,
        "pooling      not given by the checkpoint", f"bundle       {models / 'hf-bert' / '2024.1'}\n",
    ):  # fmt: skip
        assert shown in result.stdout
    assert "comparing ONNX Runtime with PyTorch" in result.stderr
    assert "comparing" not in result.stdout


def test_checkpoint(models: Path, tmp_path: Path, write_tokenizer: Callable[..., Path]) -> None:
    fields = tmp_path / "fields.json"
    fields.write_text(json.dumps(golden_fields("fused-qkv")))
    result = run_well(
        "checkpoint", GOLDEN / "checkpoint.safetensors", "--config", fields,
        "--embeddings", GOLDEN / "embeddings.safetensors", "--tokenizer", write_tokenizer(tmp_path / "tokenizer.json"),
        "--max-sequence-tokens", 40, "--precision", "int8", "--pooling", "mean_sqrt_len_tokens", "--l2-normalize",
        "--name", "mine", "--model-repository", models,
    )  # fmt: skip
    assert result.stderr.startswith("reading checkpoint.safetensors …\nthe layout is fused-qkv …\n")
    manifest = read_manifest(models / "mine" / "1")
    assert (manifest.source.kind, manifest.source.description) == ("checkpoint", "fused-qkv")
    assert (manifest.encoder.max_sequence_tokens, manifest.graph.precision) == (40, "int8")
    assert (manifest.pooling, manifest.l2_normalize) == (manifest_pb2.POOLING_MEAN_SQRT_LENGTH, True)
    assert list(manifest.text.special_token_ids) == [0, 2, 3]
    assert "least cosine similarity" in result.stdout
    assert "expected     no rows given" in result.stdout


@pytest.mark.system  # too slow for the fast tests
def test_module(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "sizes.py").write_text("WIDTH = 16")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "settings.json").write_text('{"activation": "tanh"}')
    arguments = ("--name", "mine", "--vocab-size", 50, "--max-sequence-tokens", 12, "--model-repository", models,
                 "--config", tmp_path / "settings.json")  # fmt: skip
    run_well("module", f"{tmp_path / 'mine.py'}:make", *arguments, "--pooling", "mean")
    manifest = read_manifest(models / "mine" / "1")
    assert (manifest.source.kind, manifest.encoder.d_model) == ("module", 16)
    for factory, message in (
        ("mine.py", "give FILE.py:FACTORY"),
        (f"{tmp_path / 'mine.py'}:other", "defines no other"),
        (f"{tmp_path / 'mine.py'}:make_nothing", "must return a torch.nn.Module; was NoneType"),
    ):
        result = run("module", factory, *arguments, "--overwrite")
        assert result.exit_code == 2
        assert message in result.stderr


def test_init_takes_its_vocabulary_from_the_tokenizer(
    config: Path, models: Path, tmp_path: Path, write_tokenizer: Callable[..., Path]
) -> None:
    config.write_text(json.dumps({name: value for name, value in TINY.items() if name != "vocab_size"}))
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", 33)
    arguments = ("--config", config, "--tokenizer", tokenizer, "--name", "random", "--model-repository", models)
    run_well("init", *arguments, "--seed", 7, "--precision", "float16")
    manifest = read_manifest(models / "random" / "1")
    assert (manifest.source.kind, manifest.source.description) == ("init", "random weights, seed 7")
    assert (manifest.source.weights_sha256, manifest.encoder.vocab_size) == ("", 33)
    assert manifest.graph.precision == "float16"


def test_keep_space_id(config: Path, models: Path) -> None:
    arguments = ("init", "--config", config, "--model-repository", models, "--name", "m", "--keep-space-id")
    result = run_well(*arguments, f"s2-{'5' * 32}")
    assert read_manifest(models / "m" / "1").space_id == f"s2-{'5' * 32}"
    assert f"space        s2-{'5' * 32}, from --keep-space-id and not verified; computed: s3-" in result.stdout


def test_an_existing_version_needs_overwrite(config: Path, models: Path) -> None:
    arguments = ("init", "--config", config, "--model-repository", models, "--name", "m")
    run_well(*arguments)
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert "m/1 exists; give another --version, or --overwrite to replace it" in refused.stderr
    assert "creating random weights" not in refused.stderr, "the command created weights before the check"
    run_well(*arguments, "--overwrite")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hf", DATA / "hf-bert", "--name", "../x"), "name must be 1 to 64 letters"),
        (("hf", DATA / "hf-bert", "--version", ".5"), "version must be 1 to 64 letters"),
        (("hf", DATA), f"{DATA / 'config.json'} is missing"),
        (("init", "--name", "m", "--l2-normalize"), "give the pooling too"),
        (("init", "--name", "m", "--config", DATA / "hf-bert" / "model.safetensors"), "is not JSON"),
        (("init", "--name", "m", "--keep-space-id", "5"), "a space_id is s3- and 32 hex digits"),
    ],
)
def test_errors_have_no_traceback_and_write_nothing(arguments: tuple[object, ...], message: str, models: Path) -> None:
    result = run(*arguments, "--model-repository", models)
    assert result.exit_code == 1
    assert message in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert isinstance(result.exception, SystemExit)
    assert not models.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hf", "nowhere"), "no directory nowhere; a model on the hub is OWNER/NAME"),
        (("hf", DATA, "--revision", "main"), "--revision is for a model on the hub"),
        (("checkpoint", GOLDEN / "checkpoint.safetensors", "--name", "m", "--layout", "bert"), "--layout"),
        (("init", "--name", "m", "--pooling", "first"), "'last_token', 'weighted_mean', 'mean_sqrt_length'"),
        (("onnx", GOLDEN / "checkpoint.safetensors", "--name", "m", "--precision", "int8"), "--precision"),
    ],
)
def test_wrong_usage_is_refused(arguments: tuple[object, ...], message: str, models: Path) -> None:
    result = run(*arguments, "--model-repository", models)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_configuration_that_is_not_an_object_is_refused(config: Path, models: Path) -> None:
    config.write_text("[]")
    result = run("init", "--config", config, "--name", "m", "--model-repository", models)
    assert "must hold a JSON object of settings; was list" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_export_leaves_nothing(
    config: Path, models: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def terminate(*_: object, **__: object) -> None:
        assert list(models.glob("tiny/.draft-*"))
        signal.raise_signal(number)

    monkeypatch.setattr("encserve_export.bundle.write.Exported", terminate)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        result = run("init", "--config", config, "--name", "tiny", "--model-repository", models)
    finally:
        signal.signal(number, before)
    assert result.exit_code == 128 + number
    assert not models.exists()


def test_an_export_prints_as_one_line() -> None:
    manifest = manifest_pb2.Manifest(name="m", version="1", space_id="s3-0", parameters=[manifest_pb2.ParameterCount()])
    assert repr(Exported(Path("models/m/1"), manifest)) == "Exported('m', version '1', s3-0, 'models/m/1')"


def test_the_command_prints_its_version() -> None:
    assert "0.1.0" in run("--version").stdout
