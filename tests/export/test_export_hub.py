"""A model's id on the hub is as good as its directory: downloaded at one commit, which the manifest keeps."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_hub import COMMIT, fake_hub
from google.protobuf import json_format
from onnx_files import POSITIONS, VOCAB_SIZE, build, save_with_data
from retrieval_models import stanford

from encserve_export.cli import main
from encserve_export.ground.errors import HubError
from encserve_export.source import hub
from encserve_proto.bundle.v1 import manifest_pb2

COMMAND = Path(sys.executable).parent / "encserve-export"


def run(endpoint: str, cache: Path, *arguments: object, offline: bool = False) -> "subprocess.CompletedProcess[str]":
    """The command `hf`."""
    return in_a_process([str(COMMAND), "hf", *map(str, arguments)], endpoint, cache, offline=offline)


def in_a_process(
    command: list[str], endpoint: str, cache: Path, *, offline: bool = False
) -> "subprocess.CompletedProcess[str]":
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1",
                    "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": str(int(offline))}  # fmt: skip
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.system
def test_an_id_is_downloaded(data: Path, models: Path, tmp_path: Path) -> None:
    with fake_hub("somebody/tiny-bert", data / "hf-bert", ("main", "v2")) as endpoint:
        found = run(
            endpoint,
            tmp_path / "hf",
            "somebody/tiny-bert",
            "--revision",
            "v2",
            "--ids-only",
            "--model-repository",
            models,
        )
    assert found.returncode == 0, found.stderr
    manifest = json_format.Parse((models / "tiny-bert" / "1" / "manifest.json").read_text(), manifest_pb2.Manifest())
    assert (manifest.source.repository, manifest.source.revision) == ("somebody/tiny-bert", COMMIT)
    assert (manifest.source.kind, manifest.source.route) == ("hf", "transformers")


@pytest.mark.system
def test_a_multi_vector_model_of_the_hub_is_what_its_directory_is(models: Path, tmp_path: Path) -> None:
    """Stanford's layout has lengths and expansion in a file of a kind of its own."""
    stanford(tmp_path / "colbert")
    with fake_hub("somebody/colbert", tmp_path / "colbert") as endpoint:
        found = run(endpoint, tmp_path / "hf", "somebody/colbert", "--model-repository", models, "--version", "2")
    assert found.returncode == 0, found.stderr
    result = CliRunner().invoke(main, ["hf", str(tmp_path / "colbert"), "--model-repository", str(models)])
    assert result.exit_code == 0, result.output
    here, there = (
        json_format.Parse((models / "colbert" / version / "manifest.json").read_text(), manifest_pb2.Manifest())
        for version in "12"
    )
    assert there.query == here.query
    assert there.query.max_tokens == there.query.expansion.min_tokens == 24
    assert there.space_id == here.space_id


def fetched(cache: Path) -> set[str]:
    """What was downloaded, by its path in the repository."""
    (snapshot,) = cache.glob("hub/models--*/snapshots/*")
    return {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}


def download_files(tmp_path: Path, *names: str) -> set[str]:
    """What is downloaded of a model of these files."""
    for name in names:
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_text("x")
    program = "from encserve_export.source.hub import download; download('somebody/tiny')"
    with fake_hub("somebody/tiny", tmp_path / "files") as endpoint:
        in_a_process([sys.executable, "-c", program], endpoint, tmp_path / "hf").check_returncode()
    return fetched(tmp_path / "hf")


@pytest.mark.system
def test_pickles_are_fetched_for_the_folders_without_safetensors(tmp_path: Path) -> None:
    names = ["config.json", "model.safetensors", "pytorch_model.bin", "2_Dense/pytorch_model.bin"]
    names += ["3_Dense/model.safetensors", "3_Dense/pytorch_model.bin", "1_Pooling/config.json"]
    names += ["chat_template.jinja", "onnx/model.onnx", "modeling.py", "README.md", "tf_model.h5"]
    assert download_files(tmp_path, *names) == {
        "config.json", "model.safetensors", "2_Dense/pytorch_model.bin", "3_Dense/model.safetensors",
        "1_Pooling/config.json", "chat_template.jinja",
    }  # fmt: skip


@pytest.mark.system
def test_the_onnx_file_is_fetched_where_there_are_no_other_weights(tmp_path: Path) -> None:
    names = ["config.json", "onnx/model.onnx", "onnx/model.onnx_data", "onnx/model_quantized.onnx"]
    assert download_files(tmp_path, *names) == {"config.json", "onnx/model.onnx", "onnx/model.onnx_data"}


@pytest.mark.system
def test_an_onnx_file_with_its_weights_in_another(models: Path, tmp_path: Path) -> None:
    """The cache holds both as links to a folder of contents."""
    folder = tmp_path / "files"
    (folder / "onnx").mkdir(parents=True)
    save_with_data(build(), folder / "onnx" / "model.onnx", "model.onnx_data")
    config = {"model_type": "new", "vocab_size": VOCAB_SIZE, "max_position_embeddings": POSITIONS, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with fake_hub("somebody/tiny", folder) as endpoint:
        found = run(
            endpoint, tmp_path / "hf", "somebody/tiny", "--via", "onnx", "--ids-only", "--model-repository", models
        )
    assert found.returncode == 0, found.stderr
    assert (models / "tiny" / "1" / "model.onnx").is_file()


def test_a_typing_error_in_a_directory_is_no_model_of_the_hub(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "right").mkdir(parents=True)
    result = CliRunner().invoke(main, ["hf", "checkpoints/wrong", "--model-repository", str(models)])
    assert result.exit_code == 1
    assert "there is no directory checkpoints/wrong, though there is a directory checkpoints. If you" in result.stderr
    assert "--revision main" in result.stderr


@pytest.mark.system
def test_what_the_hub_does_not_have(data: Path, models: Path, tmp_path: Path) -> None:
    with fake_hub("somebody/tiny-bert", data / "hf-bert") as endpoint:
        for arguments, message in (
            (("somebody/other",), "there is neither a directory somebody/other here nor a model of that name on the"),
            (("somebody/tiny-bert", "--revision", "v9"), "somebody/tiny-bert has no revision 'v9'"),
        ):
            refused = run(endpoint, tmp_path / "hf", *arguments, "--model-repository", models)
            assert refused.returncode == 1
            assert f"Error: {message}" in refused.stderr
            assert "Traceback" not in refused.stderr
        unreached = run(endpoint, tmp_path / "hf", "somebody/other", "--model-repository", models, offline=True)
    assert "Error: somebody/other cannot be had from the hub, and there is no such directory: " in unreached.stderr
    assert not models.exists()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("Data processing error: No space left on device")],
)
def test_a_full_disk_is_named(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub's parts tell of it in their own ways."""

    def fill(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fill)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(HubError, match=rf"the disk of {tmp_path} is full: .*Make room there, or name another.*HF_HUB_"):
        hub.download("somebody/tiny")


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("nowhere", (), "there is no directory nowhere; a model of the hub is named OWNER/NAME"),
        (".", ("--revision", "main"), "--revision is of the hub; . is a directory"),
    ],
)
def test_what_is_no_id(models: Path, source: str, more: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["hf", source, *more, "--model-repository", str(models)])
    assert result.exit_code == 2
    assert message in result.stderr
