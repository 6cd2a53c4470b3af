"""The command line: results on stdout, what goes on and what goes wrong on stderr, no traceback for a user's error."""

import hashlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoints import golden_fields
from click.testing import CliRunner, Result
from google.protobuf import json_format
from safetensors.torch import load_file

from encserve_export.cli import main
from encserve_proto.bundle.v1 import manifest_pb2

if TYPE_CHECKING:
    from tests.export.conftest import Checkpoint

TINY = {"vocab_size": 50, "d_model": 16, "n_heads": 2, "d_ff": 32, "n_layers": 1, "max_sequence_tokens": 20}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def read_manifest(bundle: Path) -> manifest_pb2.Manifest:
    return json_format.Parse((bundle / "manifest.json").read_text(), manifest_pb2.Manifest())


def test_hf(bert: "Checkpoint", models: Path) -> None:
    (bert.path / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    result = run("hf", bert.path, "--ids-only", "--model-repository", models, "--max-sequence-tokens", 20)
    assert result.exit_code == 0, result.output
    manifest = read_manifest(models / "bert" / "1")
    assert manifest.encoder.max_sequence_tokens == 20
    longest = (
        "max_sequence_tokens is 20; the checkpoint's max_seq_length is 40, its positions are 66: for texts of more"
    )
    assert longest in result.stderr
    assert f"longest      {longest}" in result.stdout
    for shown in ("other", "77,888", "100.0 %", "tolerance 5.0e-05", manifest.fingerprint, manifest.space_id):
        assert shown in result.stdout
    assert f"bundle       {models / 'bert' / '1'}\n" in result.stdout, "a path is never folded"
    assert "comparing ONNX Runtime with PyTorch" in result.stderr
    assert "comparing" not in result.stdout


def test_an_older_space_id_is_kept_and_said_to_be(config: Path, models: Path) -> None:
    arguments = ("init", "--config", config, "--model-repository", models, "--name", "m", "--keep-space-id")
    result = run(*arguments, "5" * 32)
    assert result.exit_code == 0, result.output
    assert read_manifest(models / "m" / "1").space_id == "5" * 32
    assert f"space        {'5' * 32}, as --keep-space-id asks and unchecked; the model's own is s2-" in result.stdout
    result = run(*arguments, "5")
    assert result.exit_code == 1
    assert "a space_id is s2- and 32 hex digits, or 32 hex digits in older bundles; was '5'" in result.stderr


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_precision(data: Path, models: Path, precision: str) -> None:
    result = run("hf", data / "hf-bert", "--ids-only", "--model-repository", models, "--precision", precision)
    assert result.exit_code == 0, result.output
    assert read_manifest(models / "hf-bert" / "1").graph.precision == precision
    required = {"float16": 0.999, "int8": 0.99}[precision]
    for shown in (f"MiB, {precision}, opset", f"required {required}\n", "padding      least cosine similarity 1"):
        assert shown in result.stdout
    assert "77,888" in result.stdout, "the model has the same parameters in every precision"


def test_pooling_that_the_directory_does_not_say(bert: "Checkpoint", models: Path) -> None:
    """Nothing is guessed: the report says that it is not known, and the option says it."""
    result = run("hf", bert.path, "--ids-only", "--model-repository", models, "--name", "unknown")
    assert "pooling      not said by the checkpoint" in result.stdout
    result = run(
        "hf", bert.path, "--ids-only", "--model-repository", models, "--name", "known", "--pooling", "last_token"
    )
    assert "not said by the checkpoint" not in result.stdout
    manifest = json.loads((models / "known" / "1" / "manifest.json").read_text())
    assert manifest["pooling"] == "POOLING_LAST_TOKEN"
    (bert.path / "modules.json").write_text(
        json.dumps(
            [
                {"name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            ]
        )
    )
    (bert.path / "1_Pooling").mkdir()
    (bert.path / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 32}')
    result = run("hf", bert.path, "--ids-only", "--model-repository", models, "--name", "said", "--pooling", "cls")
    assert "pooling is for a checkpoint that does not say its own" in result.stderr


@pytest.mark.parametrize(
    ("given", "said"), [("last_token", "LAST_TOKEN"), ("mean_sqrt_len_tokens", "MEAN_SQRT_LENGTH"), ("cls", "CLS")]
)
def test_pooling_of_checkpoint_and_init(data: Path, models: Path, config: Path, given: str, said: str) -> None:
    """By the client's names, and by those of sentence-transformers."""
    golden = data / "fused-qkv"
    fields = config.parent / "fields.json"
    fields.write_text(json.dumps(golden_fields("fused-qkv")))
    for arguments in (
        ("checkpoint", golden / "checkpoint.safetensors", "--config", fields, "--embeddings",
         golden / "embeddings.safetensors", "--max-sequence-tokens", 20, "--name", "checkpoint"),
        ("init", "--config", config, "--name", "init"),
    ):  # fmt: skip
        result = run(*arguments, "--model-repository", models, "--pooling", given, "--l2-normalize")
        assert result.exit_code == 0, result.output
        manifest = read_manifest(models / str(arguments[-1]) / "1")
        assert (manifest_pb2.Pooling.Name(manifest.pooling), manifest.l2_normalize) == (f"POOLING_{said}", True)
    assert ("formula      the heads are concatenated" in run(
        *("checkpoint", golden / "checkpoint.safetensors", "--config", fields, "--embeddings"),
        *(golden / "embeddings.safetensors", "--max-sequence-tokens", 20, "--name", "m", "--model-repository", models),
    ).stdout)  # fmt: skip


def test_poolings_that_are_refused(config: Path, models: Path) -> None:
    arguments = ("init", "--config", config, "--name", "init", "--model-repository", models)
    unknown = run(*arguments, "--pooling", "first")
    assert unknown.exit_code == 2
    assert "'last_token', 'weighted_mean', 'mean_sqrt_length'" in unknown.stderr
    assert "give the pooling too" in run(*arguments, "--l2-normalize").stderr
    assert not models.exists()


def test_a_directory_without_a_tokenizer_is_asked_about(bert: "Checkpoint", models: Path) -> None:
    refused = run("hf", bert.path, "--model-repository", models)
    assert refused.exit_code == 1
    assert "has no tokenizer.json" in refused.stderr
    assert "or give --ids-only, and the model takes token ids and no text" in refused.stderr
    assert not models.exists()


def test_precision_of_checkpoint_and_init(data: Path, models: Path, config: Path) -> None:
    golden = data / "fused-qkv"
    fields = config.parent / "fields.json"
    fields.write_text(json.dumps(golden_fields("fused-qkv")))
    for arguments in (
        ("checkpoint", golden / "checkpoint.safetensors", "--config", fields, "--embeddings",
         golden / "embeddings.safetensors", "--name", "checkpoint"),
        ("init", "--config", config, "--name", "init"),
    ):  # fmt: skip
        result = run(*arguments, "--model-repository", models, "--precision", "int8")
        assert result.exit_code == 0, result.output
        assert read_manifest(models / str(arguments[-1]) / "1").graph.precision == "int8"


def test_a_strangers_onnx_file_keeps_its_precision(data: Path, models: Path) -> None:
    file = data / "hf-bert" / "config.json"
    result = run("onnx", file, "--model-repository", models, "--name", "theirs", "--precision", "int8")
    assert result.exit_code == 2
    assert "--precision" in result.stderr


def test_name_version_and_overwrite(data: Path, models: Path) -> None:
    arguments = (
        "hf",
        data / "hf-distilbert",
        "--ids-only",
        "--model-repository",
        models,
        "--name",
        "d",
        "--version",
        "2024.1",
    )
    assert run(*arguments).exit_code == 0
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1].startswith("Error: ")
    assert "--overwrite" in refused.stderr
    assert run(*arguments, "--overwrite").exit_code == 0
    assert [path.name for path in (models / "d").iterdir()] == ["2024.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--name", "../x"), "name must be 1 to 64 letters"),
        (("--version", ".5"), "version must be 1 to 64 letters"),
        (("--max-sequence-tokens", 67), "max_sequence_tokens must be at most 66 for this model; was 67"),
        (("--max-sequence-tokens", 0), "max_sequence_tokens must be at least 1; was 0"),
    ],
)
def test_errors_of_hf(data: Path, models: Path, arguments: tuple[object, ...], message: str) -> None:
    result = run("hf", data / "hf-bert", "--ids-only", "--model-repository", models, *arguments)
    assert result.exit_code == 1
    assert f"Error: {message}" in result.stderr
    assert isinstance(result.exception, SystemExit), "no traceback"
    assert not models.exists()


def test_a_directory_without_a_checkpoint(tmp_path: Path, models: Path) -> None:
    result = run("hf", tmp_path, "--model-repository", models)
    assert result.exit_code == 1
    assert f"Error: {tmp_path / 'config.json'} is missing" in result.stderr


def test_a_configuration_that_is_no_object(tmp_path: Path, models: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    assert "must hold an object" in run("hf", tmp_path, "--model-repository", models).stderr


def test_init(config: Path, models: Path, tmp_path: Path, write_tokenizer: Callable[..., Path]) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", 50)
    result = run(
        "init",
        "--config",
        config,
        "--seed",
        7,
        "--model-repository",
        models,
        "--name",
        "random",
        "--tokenizer",
        tokenizer,
    )
    assert result.exit_code == 0, result.output
    manifest = read_manifest(models / "random" / "1")
    assert (manifest.source.kind, manifest.source.description) == ("init", "random weights, seed 7")
    assert manifest.source.weights_sha256 == ""
    assert (manifest.encoder.d_model, manifest.encoder.position) == (16, "sinusoidal")
    assert list(manifest.text.special_token_ids) == [0, 2, 3]


def test_the_vocabulary_of_init_is_the_tokenizers(
    config: Path, models: Path, tmp_path: Path, write_tokenizer: Callable[..., Path]
) -> None:
    config.write_text(json.dumps({name: value for name, value in TINY.items() if name != "vocab_size"}))
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", 33)
    run("init", "--config", config, "--model-repository", models, "--name", "random", "--tokenizer", tokenizer)
    assert read_manifest(models / "random" / "1").encoder.vocab_size == 33


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"hidden_size": 3}', "unknown configuration fields: hidden_size; known are vocab_size"),
        ('{"n_heads": 7}', "n_heads must divide d_model; was 7 for 512"),
        ("[]", "must hold an object of configuration fields"),
        ("{", "is not JSON"),
    ],
)
def test_errors_of_init(config: Path, models: Path, content: str, message: str) -> None:
    config.write_text(content)
    result = run("init", "--config", config, "--model-repository", models, "--name", "random")
    assert result.exit_code == 1
    assert message in result.stderr
    assert not models.exists()


@pytest.fixture
def golden_config(tmp_path: Path) -> Path:
    path = tmp_path / "golden.json"
    path.write_text(json.dumps(golden_fields("fused-qkv")))
    return path


def test_checkpoint(
    golden_config: Path, data: Path, models: Path, tmp_path: Path, write_tokenizer: Callable[..., Path]
) -> None:
    folder = data / "fused-qkv"
    state = {f"module.{name}": tensor for name, tensor in load_file(folder / "checkpoint.safetensors").items()}
    torch.save({"epoch": 7, "state_dict": state}, tmp_path / "last.pth")
    arguments = ("checkpoint", tmp_path / "last.pth", "--model-repository", models, "--name", "mine", "--version", "2")
    table = ("--embeddings", folder / "embeddings.safetensors")
    tokenizer = ("--tokenizer", write_tokenizer(tmp_path / "tokenizer.json", 50))
    result = run(*arguments, "--config", golden_config, *table, *tokenizer, "--max-sequence-tokens", 40)
    assert result.exit_code == 0, result.output
    assert "the layout is fused-qkv" in result.stderr
    manifest = read_manifest(models / "mine" / "2")
    assert (manifest.source.kind, manifest.source.description) == ("checkpoint", "fused-qkv")
    content = (tmp_path / "last.pth").read_bytes() + (folder / "embeddings.safetensors").read_bytes()
    assert manifest.source.weights_sha256 == hashlib.sha256(content).hexdigest()
    shape = manifest.encoder
    assert (shape.d_model, shape.n_heads, shape.d_ff, shape.n_layers, shape.vocab_size) == (64, 4, 128, 2, 97)
    assert (shape.activation, shape.norm, shape.position, shape.max_sequence_tokens) == (
        "relu",
        "post",
        "sinusoidal",
        40,
    )
    assert list(manifest.text.special_token_ids) == [0, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "holds no embedding table; give the file that does with --embeddings"),
        (("--embeddings", "cases.safetensors"), "must hold the embedding table and nothing else; was ids.0, "),
        (("--embeddings", "embeddings.safetensors"), "do not tell scale_embedding (true, false); norm (post, pre); "),
        (("--layout", "torch-native"), "no layout is recognised in these names: layers.N.attention.linear_layer.bias"),
    ],
)
def test_errors_of_checkpoint(
    data: Path, models: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(data / "fused-qkv")
    result = run("checkpoint", "checkpoint.safetensors", "--model-repository", models, "--name", "mine", *options)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert message in result.stderr
    assert not models.exists()


def test_a_layout_that_is_none(data: Path, models: Path) -> None:
    result = run(
        "checkpoint",
        data / "fused-qkv" / "checkpoint.safetensors",
        "--model-repository",
        models,
        "--name",
        "mine",
        "--layout",
        "bert",
    )
    assert result.exit_code == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_ended_leaves_nothing(
    config: Path, models: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def end(*_: object, **__: object) -> None:
        assert list(models.glob("tiny/.draft-*"))
        signal.raise_signal(number)

    monkeypatch.setattr("encserve_export.check.agreement.check_rows", end)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        result = run("init", "--config", config, "--name", "tiny", "--model-repository", models)
    finally:
        signal.signal(number, before)
    assert result.exit_code == 128 + number
    assert not models.exists()


def test_the_version_of_the_program() -> None:
    assert "0.1.0" in run("--version").stdout
