"""From checkpoint to client: real weights are exported, a real server process serves them, real clients ask."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA, GOLDENS, MODEL, export_golden, export_minilm, minilm_directory
from real_server import RealServer, real_server
from tokenizers import Tokenizer
from zoo import Zoo

from encserve_client import EncoderClient


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of exported models: the real one, and a small one for each layout."""
    repository = tmp_path_factory.mktemp("models")
    export_minilm(repository)
    for name in GOLDENS:
        export_golden(name, repository)
    return repository


@pytest.fixture(scope="session")
def server(models: Path) -> Iterator[RealServer]:
    """One server of all models, for tests that do not change the server."""
    flags = [flag for name in (MODEL, *GOLDENS) for flag in ("--model", name)]
    with real_server(models, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: RealServer) -> Iterator[EncoderClient]:
    with EncoderClient(server.target) as client:
        yield client


@pytest.fixture(scope="session")
def minilm() -> Any:
    """all-MiniLM-L6-v2 in transformers."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(minilm_directory(), add_pooling_layer=False).eval()


@pytest.fixture(scope="session")
def real_ids() -> list[int]:
    """The token ids of a real text of thousands of tokens: the project's licence, special tokens left out."""
    tokenizer = Tokenizer.from_file(str(minilm_directory() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.encode((DATA.parent.parent / "LICENSE").read_text(), add_special_tokens=False).ids
    assert len(ids) > 1600
    return list(ids)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """The tiny models of all kinds, each written and exported when a test first asks for it."""
    return Zoo(tmp_path_factory.mktemp("zoo"))
