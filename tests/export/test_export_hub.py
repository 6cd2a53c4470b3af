"""The exporter downloads one commit of a model from the Hugging Face Hub.

It downloads only the files that an export reads.
"""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from checkpoints import DATA
from fake_hub import COMMIT, fake_hub, hub_variables
from google.protobuf import json_format
from huggingface_hub import DryRunFileInfo
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from encserve import hub
from encserve_proto.bundle.v1 import manifest_pb2

COMMAND = Path(sys.executable).parent / "encserve-export"
MODULES = '[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "3_Dense"}]'


def run(endpoint: str, cache: Path, *arguments: object, offline: bool = False) -> "subprocess.CompletedProcess[str]":
    """Run `encserve-export hf` in a new process.

    A new process is needed because huggingface_hub reads its environment variables only at import.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= hub_variables(endpoint, cache, offline=offline)
    command = [str(COMMAND), "hf", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.system
def test_a_model_is_downloaded_and_found_again_offline(models: Path, tmp_path: Path) -> None:
    arguments = ("owner/tiny-bert", "--revision", "v2", "--ids-only", "--model-repository", models)
    with fake_hub("owner/tiny-bert", DATA / "hf-bert", ("main", "v2")) as endpoint:
        found = run(endpoint, tmp_path / "hf", *arguments)
    assert found.returncode == 0, found.stderr
    manifest = json_format.Parse((models / "tiny-bert" / "1" / "manifest.json").read_text(), manifest_pb2.Manifest())
    assert (manifest.source.repository, manifest.source.revision) == ("owner/tiny-bert", COMMIT)
    assert manifest.source.kind == "hf"
    again = run(endpoint, tmp_path / "hf", *arguments, "--overwrite", offline=True)
    assert again.returncode == 0, again.stderr


@pytest.mark.system
def test_the_error_names_a_model_that_cannot_be_downloaded(models: Path, tmp_path: Path) -> None:
    with fake_hub("owner/tiny-bert", DATA / "hf-bert") as endpoint:
        for arguments, message in (
            (("owner/other",), "no directory owner/other, and no such model on the hub that you can read"),
            (("owner/tiny-bert", "--revision", "v9"), "owner/tiny-bert has no revision 'v9'"),
        ):
            refused = run(endpoint, tmp_path / "hf", *arguments, "--model-repository", models)
            assert refused.returncode == 1
            assert f"Error: {message}" in refused.stderr
            assert "Traceback" not in refused.stderr
        unreached = run(endpoint, tmp_path / "hf", "owner/other", "--model-repository", models, offline=True)
    assert "Error: no directory owner/other, and a file of owner/other is not in " in unreached.stderr
    assert not models.exists()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the hub's repository owner/tiny by an empty folder, and return the folder.

    A download copies files from this folder.
    """
    remote, snapshot = tmp_path / "remote", tmp_path / "snapshots" / COMMIT

    def snapshot_download(
        repository: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str] | None = None,
        dry_run: bool = False,
        **_: object,
    ) -> Any:
        assert (repository, revision) in (("owner/tiny", None), ("owner/tiny", COMMIT))
        names = [path.relative_to(remote).as_posix() for path in remote.rglob("*") if path.is_file()]
        found = list(filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        if dry_run:
            return [
                DryRunFileInfo(COMMIT, (remote / name).stat().st_size, name, str(snapshot / name), False, True)
                for name in found
            ]
        for name in found:
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(remote / name, snapshot / name)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    remote.mkdir()
    return remote


def download(
    repository: Path, *names: str, contents: Mapping[str, str] | None = None, with_onnx: bool = False
) -> set[str]:
    """Put files into the repository, download the repository, and return the names of the downloaded files."""
    for name, content in {**dict.fromkeys(names, "{}"), **(contents or {})}.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(content)
    directory = hub.download("owner/tiny", with_onnx=with_onnx).directory
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_files_in_other_folders_are_not_downloaded(repository: Path) -> None:
    names = ["config.json", "model.safetensors", "chat_template.jinja", "1_Pooling/config.json", "2_Dense/config.json"]
    names += ["2_Dense/model.safetensors", "artifact.metadata", "colbert_linear.pt", "sparse_linear.pt", "vocab.txt"]
    names += ["spiece.model"]
    others = ["checkpoint-500/model.safetensors", "checkpoint-500/config.json", "runs/1/a.json", "openvino/model.json"]
    others += ["2_Dense/old/model.safetensors", "4_Dense/model.safetensors", "modeling.py", "README.md", "tf_model.h5"]
    others += ["onnx/model.onnx", "checkpoint-500/pytorch_model.bin", "fp16/model.safetensors"]
    found = download(repository, *names, *others, contents={"modules.json": MODULES})
    assert found == {*names, "modules.json"}


def test_pickles_are_downloaded_for_folders_without_safetensors(repository: Path) -> None:
    pickles = ["pytorch_model.bin", "2_Dense/pytorch_model.bin", "3_Dense/pytorch_model.bin"]
    safetensors = ["model.safetensors", "3_Dense/model.safetensors"]
    found = download(repository, *pickles, *safetensors, contents={"modules.json": MODULES})
    assert found == {"modules.json", *safetensors, "2_Dense/pytorch_model.bin"}


def test_the_folders_of_a_router_are_downloaded(repository: Path) -> None:
    router = '{"types": {"query_0_Static": "x", "document_0_Transformer": "y"}}'
    weights = ["query_0_Static/model.safetensors", "document_0_Transformer/model.safetensors"]
    contents = {"modules.json": '[{"path": ""}]', "router_config.json": router}
    assert download(repository, *weights, "query_1/model.safetensors", contents=contents) == {*contents, *weights}
    contents = {"modules.json": '[{"path": "0_Router"}]', "0_Router/router_config.json": router}
    inner = {f"0_Router/{name}" for name in weights}
    assert inner < download(repository, *inner, contents=contents)


@pytest.mark.parametrize("modules", ["{", "[]", "{}", "[1]", '[{"path": "../x"}]', '[{"path": "[a"}]'])
def test_a_broken_modules_json_is_downloaded(repository: Path, modules: str) -> None:
    assert download(repository, "model.safetensors", contents={"modules.json": modules}) == {
        "modules.json",
        "model.safetensors",
    }


def test_the_onnx_file_is_downloaded_without_other_weights_or_on_request(repository: Path) -> None:
    onnx = ["onnx/model.onnx", "onnx/model.onnx_data"]
    found = download(repository, "config.json", *onnx, "onnx/model_quantized.onnx")
    assert found == {"config.json", *onnx}
    shutil.rmtree(repository.parent / "snapshots")
    assert download(repository, "model.safetensors") == {"config.json", "model.safetensors"}
    assert download(repository, with_onnx=True) == {"config.json", "model.safetensors", *onnx}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("a\nb")])
def test_a_failed_download_names_the_folder(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(hub.HubError, match=rf"download from the hub to {tmp_path} failed: (.*No space left.*|a b)$"):
        hub.download("owner/tiny")


@pytest.mark.system
def test_a_misspelled_directory_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "right").mkdir(parents=True)
    command = [str(COMMAND), "hf", "checkpoints/wrong", "--model-repository", "models"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 1
    assert "no directory checkpoints/wrong, but a directory checkpoints. " in refused.stderr
    assert refused.stderr.rstrip().endswith("--revision main")
