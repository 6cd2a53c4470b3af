"""Multi-vector and sparse models of trained weights in every precision: what is served, against float32."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agreement import least_cosine
from exporting import export_once
from real_server import cpu_has_bfloat16, real_server
from retrieval_models import trained
from sparse_models import write_trained_splade

from encserve_client import EncoderClient, maxsim
from encserve_export import Target, export_hf

QUERIES = ["where do cats sleep", "how long does bread rise", "the fastest train in Japan", "tax on a second flat"]
DOCUMENTS = [
    "The cat sleeps on the warm windowsill while it rains.",
    "Let the dough rise for two hours at room temperature, or overnight in the fridge, before you shape the loaf.",
    "The Shinkansen runs at up to 320 km/h between Tokyo and Shin-Aomori.",
    "Whoever lets a second flat pays tax on the rent, less what repairs and interest cost in that year.",
    "Dogs, unlike cats, rest on the floor.",
    "A train from Kyoto to Osaka takes a quarter of an hour; the slow one costs half as much.",
    "Yes.",
]
# The largest difference of a MaxSim score as a share of its query's best; the least cosine similarity of weights.
BOUNDS = {"float16": (0.01, 0.999), "bfloat16": (0.02, 0.999), "int8": (0.05, 0.98)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both in float32 and in what else they can be had in."""
    folder = tmp_path_factory.mktemp("precisions")
    trained(folder / "late")
    write_trained_splade(folder / "splade")
    for name in ("late", "splade"):
        for precision in ("float32", "float16", "int8"):
            target = Target(model_repository=folder / "models", name=f"{name}-{precision}")
            export_once(export_hf, folder / name, target=target, precision=precision)
    return folder


@pytest.fixture(scope="module")
def client(models: Path) -> Iterator[EncoderClient]:
    with real_server(models / "models") as server, EncoderClient(server.target) as client:
        yield client


def scores(client: EncoderClient, model: str) -> np.ndarray:
    """Of every query with every document: (queries, documents)."""
    documents = client.encode_document(DOCUMENTS, model=model)
    return np.array([[maxsim(query, it) for it in documents] for query in client.encode_query(QUERIES, model=model)])


def weights(client: EncoderClient, model: str) -> list[np.ndarray]:
    return [it.dense()[None] for it in client.encode_document(DOCUMENTS, model=model)]


def check(want: EncoderClient, got: EncoderClient, late: str, splade: str, precision: str) -> None:
    largest, least = BOUNDS[precision]
    due = scores(want, "late-float32")
    assert (np.abs(scores(got, late) - due) <= largest * due.max(axis=1, keepdims=True)).all()
    assert least_cosine(weights(got, splade), weights(want, "splade-float32")) >= least


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_what_is_served_is_as_near_as_its_gate_says(client: EncoderClient, precision: str) -> None:
    check(client, client, f"late-{precision}", f"splade-{precision}", precision)


def test_bfloat16_is_as_near_as_is_promised(client: EncoderClient, models: Path) -> None:
    if not cpu_has_bfloat16():
        pytest.skip("THIS CPU HAS NO BFLOAT16: nothing of MaxSim in --precision bfloat16 is tested here")
    flags = ("--model", "late-float32", "--model", "splade-float32", "--engine", "openvino", "--precision", "bfloat16")
    with real_server(models / "models", *flags) as server, EncoderClient(server.target) as rounded:
        check(client, rounded, "late-float32", "splade-float32", "bfloat16")
