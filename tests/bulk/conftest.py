"""Bundles that jobs run."""

from pathlib import Path

import pytest
from embed_jobs import export_small_encoder
from tiny_bundle import write_bundle
from tiny_heads import every_kind, words


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a real Encoder, small, with a tokenizer."""
    return export_small_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a few nodes that makes every kind of output."""
    return write_bundle(tmp_path_factory.mktemp("tiny"), tokenizer=words(), **every_kind())
