"""Fixtures for tests of the whole path, from export to client: exported models, server processes and clients."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA, MODEL, export_golden, export_minilm, export_small_with_text, minilm_directory
from real_server import RealServer, real_server
from tokenizers import Tokenizer
from zoo import Zoo

from encserve_client import EncoderClient


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with two models: all-MiniLM-L6-v2, and raw-matrices, a small model from tests/data."""
    repository = tmp_path_factory.mktemp("models")
    export_minilm(repository)
    export_golden("raw-matrices", repository)
    return repository


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with one small model, for tests that start many servers. The model takes text."""
    folder = tmp_path_factory.mktemp("small")
    return export_small_with_text(folder / "models", "small", folder / "checkpoint").path.parent.parent


@pytest.fixture(scope="session")
def server(models: Path) -> Iterator[RealServer]:
    """A server with two models: all-MiniLM-L6-v2, which is the default model, and raw-matrices."""
    with real_server(models, f"--model={MODEL}", "--model=raw-matrices") as server:
        yield server


@pytest.fixture(scope="session")
def client(server: RealServer) -> Iterator[EncoderClient]:
    with EncoderClient(server.target) as client:
        yield client


@pytest.fixture(scope="session")
def minilm() -> Any:
    """all-MiniLM-L6-v2 in transformers, without BERT's pooling layer."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(minilm_directory(), add_pooling_layer=False).eval()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tokenizer of all-MiniLM-L6-v2, without truncation and padding."""
    tokenizer = Tokenizer.from_file(str(minilm_directory() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.fixture(scope="session")
def real_ids(tokenizer: Tokenizer) -> list[int]:
    """The token ids of the project's LICENSE file, without special tokens. There are more than 1,600 ids."""
    ids = tokenizer.encode((DATA.parent.parent / "LICENSE").read_text(), add_special_tokens=False).ids
    assert len(ids) > 1600
    return list(ids)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Tiny models of all kinds. Each model is written and exported only when a test needs the model."""
    return Zoo(tmp_path_factory.mktemp("zoo"))
