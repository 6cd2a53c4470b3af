"""Models of an older exporter keep their embedding-space ids, fingerprints and vectors on a new server."""

import json
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA
from real_server import real_server

from encserve_client import EncoderClient, Kind, SpaceError, Task

# BUNDLES contains the models of tests/support/space_models.py. The exporter of commit 337f60e wrote these models.
# EXPECTED contains the ids and vectors that the server of the same commit returned.
BUNDLES = DATA / "bundles-337f60e.zip"
EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "bundles-337f60e.json").read_text())
TEXTS = ["The cat sat on the warm mat", "query : w1 café", "W1"]
KINDS: dict[str, Kind] = {"model": "vector", "multi_vector": "multi_vector", "sparse": "sparse"}
# The largest allowed error of a vector, relative to its norm. The default is 5e-5. m3 has a larger limit, because CPUs
# round float16 differently.
TOLERANCE = {"m3": 2e-3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    models = tmp_path_factory.mktemp("models")
    with zipfile.ZipFile(BUNDLES) as bundles:
        bundles.extractall(models)
    with real_server(models) as server:
        yield server.target


@pytest.fixture
def client(target: str) -> Iterator[EncoderClient]:
    with EncoderClient(target) as client:
        yield client


def vectors(client: EncoderClient, model: str, kind: Kind) -> list[list[float]]:
    """Return the vectors of TEXTS as lists of numbers, first for queries, then for documents."""
    tasks: tuple[Task, ...] = ("query", "document")
    outputs = [it for task in tasks for it in client.embed(TEXTS, kind=kind, task=task, truncate=True, model=model)]
    return [np.ravel(it if isinstance(it, np.ndarray) else it.dense()).tolist() for it in outputs]


@pytest.mark.parametrize("name", EXPECTED)
def test_older_bundles_keep_their_ids_and_vectors(name: str, client: EncoderClient) -> None:
    want = EXPECTED[name]
    info = client.model(name)
    assert (info.space_id, info.fingerprint) == (want["space_id"], want["fingerprint"])
    for output, kind in KINDS.items():
        if output in want:
            for got, expected in zip(vectors(client, name, kind), want[output], strict=True):
                distance = np.linalg.norm(np.subtract(got, expected))
                assert distance <= TOLERANCE.get(name, 5e-5) * np.linalg.norm(expected)


def test_a_client_can_expect_an_older_space_id(target: str) -> None:
    with EncoderClient(target, expected_space_id=EXPECTED["dense"]["space_id"]) as strict:
        assert len(strict.embed(TEXTS, task="query", model="dense")) == len(TEXTS)
        with pytest.raises(SpaceError, match=f"{EXPECTED['dense']['space_id']}.*{EXPECTED['late']['space_id']}"):
            strict.embed(TEXTS, task="query", kind="multi_vector", model="late")
