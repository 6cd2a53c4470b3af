"""Fixtures with checkpoints and bundles for the tests of the exporter.

A golden checkpoint is a small model in tests/data. For each golden checkpoint, tests/data also has hidden states that
the model's original code computed.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA, GOLDENS, export_golden
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn
from zoo import Zoo

from encserve_export import EncoderConfig, Exported
from encserve_export.models import pretrained


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """Copy the golden checkpoint hf-bert. A test may change the copy."""
    return shutil.copytree(DATA / "hf-bert", tmp_path / "bert")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return the path of a model repository. The folder does not exist yet."""
    return tmp_path / "models"


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """Export each golden checkpoint once. Return the bundles by name."""
    folder = tmp_path_factory.mktemp("bundles")
    return {name: export_golden(name, folder) for name in GOLDENS}


@pytest.fixture(params=GOLDENS)
def golden(request: pytest.FixtureRequest) -> str:
    """Return the name of a golden checkpoint. A test with this fixture runs once for each checkpoint."""
    name: str = request.param
    return name


@pytest.fixture
def tiny() -> EncoderConfig:
    return EncoderConfig(vocab_size=50, d_model=16, n_heads=2, d_ff=32, n_layers=2, max_sequence_tokens=24)


@pytest.fixture
def write_tokenizer() -> Callable[..., Path]:
    """Return a function that writes a tokenizer.json with `n_words` words."""

    def write(path: Path, n_words: int = 30, *, fixed_length: int | None = None) -> Path:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{index}" for index in range(n_words - 5))]
        tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        if fixed_length is not None:
            tokenizer.enable_truncation(fixed_length)
            tokenizer.enable_padding(length=fixed_length)
        tokenizer.save(str(path))
        return path

    return write


@pytest.fixture
def _misread_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a wrong eps in each model that the exporter loads with transformers.

    The exporter writes the graph from this model and compares the graph with this model, so they agree. Only the
    comparison with a second library finds the fault.
    """
    load = pretrained.load_model

    def misread(*arguments: Any, **options: Any) -> Any:
        reference = load(*arguments, **options)
        for part in reference.module.modules():
            if isinstance(part, nn.LayerNorm):
                part.eps = 1e-3
        return reference

    monkeypatch.setattr(pretrained, "load_model", misread)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Return the tiny models of all kinds. Each model is written and exported when a test first needs that model."""
    return Zoo(tmp_path_factory.mktemp("zoo"))
