"""Fixtures that write bundles for the tests of `encserve embed`. A bundle is an exported model."""

from pathlib import Path

import pytest
from embed_jobs import export_small_encoder
from fake_encoder import service
from tiny_bundle import write_bundle
from tiny_heads import every_kind, words

__all__ = ["encoder", "service", "tiny"]


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a small encoder with a tokenizer, written by the exporter."""
    return export_small_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with every kind of output. The bundle's ONNX graphs have only a few nodes."""
    return write_bundle(tmp_path_factory.mktemp("tiny"), tokenizer=words(), **every_kind())
