"""Fixtures that start servers with three models, and fixtures with virtual environments for other projects' clients."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import MODEL, export_minilm, minilm_directory
from judging import python_environment
from real_server import RealServer, real_server
from served_scores import Served, served_scores

from encserve_client import EncoderClient

NAMES_IN_OPENAIS_TESTS = ("text-embedding-3-small", "gpt-6-astra")


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    models = tmp_path_factory.mktemp("models")
    export_minilm(models)
    aliases = [f"--served-model-name={name}={MODEL}" for name in NAMES_IN_OPENAIS_TESTS]
    with real_server(models, "--model", MODEL, "--http-port", "0", *aliases) as server:
        yield server


@pytest.fixture(scope="session")
def client(minilm: RealServer) -> Iterator[EncoderClient]:
    with EncoderClient(minilm.target) as client:
        yield client


@pytest.fixture(scope="session")
def dense(minilm: RealServer) -> Served:
    """A server with all-MiniLM-L6-v2."""
    return Served(MODEL, minilm, minilm_directory())


@pytest.fixture(scope="session")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a cross-encoder. It has the shape of cross-encoder/ms-marco-MiniLM-L6-v2, and random weights."""
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    with served_scores(tmp_path_factory.mktemp("cross_encoder"), "cross-encoder", layout="6", **shape) as served:
        yield served


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a classifier that has three labels."""
    with served_scores(tmp_path_factory.mktemp("classifier"), "classifier", labels=3) as served:
        yield served


@pytest.fixture(scope="session", params=["pinned", pytest.param("newest", marks=pytest.mark.weekly)])
def bin_of(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """A function that takes the name of a virtual environment, and returns the path of its bin folder.

    The environments have pinned versions of packages. The weekly tests also run with the newest versions.
    """
    return functools.partial(python_environment, versions=request.param)
