"""Runs the programs and commands of the pages about exports. Small models replace the models of the user."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from docs_text import code_blocks
from real_server import real_server
from sentence_models import write_model
from tiny_bundle import write_bundle
from tiny_heads import words
from torch import Tensor, nn

from encserve_cli.commands import cli as client
from encserve_export.cli import main as exporter
from encserve_export.models.own.encoder import sinusoids

pytestmark = pytest.mark.system

DOCS = Path(__file__).parent.parent.parent / "docs"
COMMANDS = {"encserve": client, "encserve-export": exporter}
VOCAB_SIZE, D_MODEL, N_HEADS = 1000, 32, 8
MAKE = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30522, 32)

    def forward(self, ids, mask):
        return self.embedding(ids) * 2

def make():
    return Scaled()
"""


class Model(nn.Module):
    """An example of a user's encoder. It has the layout torch-native, and the settings of the page's config.json."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB_SIZE, D_MODEL)
        layer = nn.TransformerEncoderLayer(D_MODEL, N_HEADS, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        """Return hidden states, float32 (batch, seq, d_model)."""
        x = self.embedding(ids) + sinusoids(ids.shape[1], D_MODEL).float()
        rows: Tensor = self.encoder(x, src_key_padding_mask=src_key_padding_mask)
        return rows


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in a language."""
    return [code for _, code in code_blocks((DOCS / page).read_text(), language)]


def run(line: str, **replaced: Path | str) -> str:
    """Run a command of a page in the current folder, and return the output.

    Each export replaces an earlier bundle of the same name. `replaced` are the page's placeholders, such as FILE.
    """
    program, *arguments = (str(replaced.get(it, it)) for it in shlex.split(line.replace("\\\n", "")))
    if program == "encserve-export":
        arguments.append("--overwrite")
    done = CliRunner().invoke(COMMANDS[program], arguments)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def _without_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def test_hugging_face(folder: Path) -> None:
    page = "how-to/export-hugging-face.md"
    directory = write_model(folder / "directory")
    on_the_hub, with_pooling = blocks(page, "sh")
    local = on_the_hub.replace("--revision main ", "").replace("sentence-transformers/all-MiniLM-L6-v2", "DIRECTORY")
    run(local, DIRECTORY=directory)
    (directory / "modules.json").unlink()
    assert "pooling      cls" in run(with_pooling, DIRECTORY=directory)
    (in_the_table,) = re.findall(r"`(encserve-export hf DIRECTORY [^`]*)`", (DOCS / page).read_text())
    assert "pooling      not given by the checkpoint" in run(in_the_table, DIRECTORY=directory)


@pytest.mark.usefixtures("_without_the_fast_path")
def test_state_dict(folder: Path) -> None:
    page = "how-to/export-state-dict.md"
    model = Model()
    torch.save(model.state_dict(), "weights.pt")
    (settings,) = blocks(page, "json")
    (compute_rows,) = blocks(page, "python")
    exec(compute_rows, {"model": model})  # noqa: S102 - our own page
    plain, renaming, random = blocks(page, "sh")
    (folder / "config.json").write_text(settings)
    assert "expected     30 rows compared with rows.npz" in run(plain, FILE="weights.pt")

    renamed = {name.replace("layers", "blocks"): it for name, it in model.state_dict().items()}
    torch.save(renamed | {"pos.weight": torch.randn(20, D_MODEL)}, "weights.pt")
    (folder / "config.json").write_text(json.dumps({**json.loads(settings), "position": "learned"}))
    assert "max_sequence_tokens" not in run(renaming, FILE="weights.pt")

    write_sizes, init = random.replace("512", "32").replace("2048", "64").splitlines()
    subprocess.run(["/bin/bash", "-c", write_sizes], check=True)
    run(init)


@pytest.mark.usefixtures("_without_the_fast_path")
def test_module_and_onnx(folder: Path) -> None:
    page = "how-to/export-module-or-onnx.md"
    layer = nn.TransformerEncoderLayer(D_MODEL, N_HEADS, 64, activation="gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    (program,) = blocks(page, "python")
    exec(program, {"embedding": nn.Embedding(30522, D_MODEL), "encoder": encoder})  # noqa: S102 - our own page
    (folder / "models/my-encoder").rename(folder / "wrapped")
    (folder / "my_encoder.py").write_text(MAKE)
    (folder / "settings.json").write_text("{}")
    words().save("tokenizer.json")
    module, onnx = blocks(page, "sh")
    run(module)
    run(onnx, FILE=folder / "wrapped/1/model.onnx")


def test_bundles(folder: Path) -> None:
    write_bundle(folder / "staging", "my-encoder", "3")
    moving, correcting = blocks("reference/bundles.md", "sh")
    promote, rename = moving.splitlines()
    assert run(promote) == "models/my-encoder/3\n"
    assert run(rename) == f"{folder}/models/my-encoder-large/1\n"
    (folder / "models/my-encoder-large/1").rename(folder / "models/my-encoder-large/4")
    run(correcting.replace("my-encoder", "my-encoder-large"))


def test_space_id(folder: Path) -> None:
    write_bundle(folder / "models", space_id="s3-" + 32 * "0")
    (program,) = blocks("reference/space-id.md", "python")
    with real_server(folder / "models") as server:
        names: dict[str, Any] = {}
        exec(program.replace("localhost:50051", server.target), names)  # noqa: S102 - our own page
        with names["searcher"] as searcher:
            assert searcher.embed([[1, 2]]).shape == (1, 8)


def test_exact_int8() -> None:
    (line,) = blocks("how-to/choose-precision.md", "python")
    exec(line, {"options": onnxruntime.SessionOptions()})  # noqa: S102 - our own page
