"""Outputs in float16, int8 and bfloat16 are close to the outputs in float32.

Models are exported in float16 and int8. A server computes in bfloat16 if it has the flag --precision bfloat16.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from agreement import least_cosine
from checkpoints import MODEL, export_minilm
from real_server import RealServer, cpu_has_bfloat16, real_server
from zoo import Zoo

from encserve_client import EncoderClient, maxsim
from encserve_export.core.precision import Precision

# The lowest allowed cosine similarity between a token's hidden state in this precision and in float32. The exporter has
# the same limit for int8.
LEAST: dict[Precision, float] = {"float16": 0.9999, "int8": 0.99}
EACH = pytest.mark.parametrize("precision", LEAST)
# The lowest allowed cosine similarity of two outputs in the same precision. The tests compare a sequence alone with the
# same sequence in a batch, and Encode with Inspect.
ALONE = 0.999
LENGTHS = (1, 2, 5, 9, 17, 33, 64, 128, 150, 200, 256)
QUERIES = ["where do cats sleep", "how long does bread rise", "the fastest train in Japan", "tax on a second flat"]
DOCUMENTS = [
    "The cat sleeps on the warm windowsill while it rains.",
    "Let the dough rise for two hours at room temperature, or overnight in the fridge, before you shape the loaf.",
    "The Shinkansen runs at up to 320 km/h between Tokyo and Shin-Aomori.",
    "Landlords pay tax on the rent of a second flat, less repairs and interest of that year.",
    "Dogs, unlike cats, rest on the floor.",
    "A train from Kyoto to Osaka takes a quarter of an hour; the slow one costs half as much.",
    "Yes.",
]
# Each precision has two limits. The first limit is the largest allowed difference of a MaxSim score, divided by the
# query's best score. The second limit is the lowest allowed cosine similarity of sparse weights.
RETRIEVAL = {"float16": (0.01, 0.999), "bfloat16": (0.02, 0.999), "int8": (0.05, 0.98)}


@pytest.fixture(scope="module")
def rounded_models(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("rounded")
    for precision in LEAST:
        export_minilm(repository, f"{MODEL}-{precision}", precision)
    for name in ("trained-late", "trained-splade"):
        for rounded in ("float32", *LEAST):
            zoo.export(name, repository, f"{name}-{rounded}", precision=rounded)
    return repository


@pytest.fixture(scope="module")
def rounded_server(rounded_models: Path) -> Iterator[RealServer]:
    with real_server(rounded_models) as server:
        yield server


@pytest.fixture(scope="module")
def rounded(rounded_server: RealServer) -> Iterator[EncoderClient]:
    with EncoderClient(rounded_server.target) as client:
        yield client


@EACH
def test_rounded_rows_of_real_text_are_close_to_float32(
    rounded: EncoderClient, client: EncoderClient, real_ids: list[int], precision: Precision
) -> None:
    sequences = [[101, *real_ids[11 * i : 11 * i + length - 2], 102][:length] for i, length in enumerate(LENGTHS)]
    model = f"{MODEL}-{precision}"
    together = rounded.token_vectors(sequences, model=model)
    assert least_cosine(together, client.token_vectors(sequences)) >= LEAST[precision]
    alone = [rounded.token_vectors([ids], model=model)[0] for ids in sequences]
    assert least_cosine(together, alone) >= ALONE


@EACH
def test_the_server_reports_the_precision(
    rounded: EncoderClient, rounded_server: RealServer, precision: Precision
) -> None:
    assert rounded.model(f"{MODEL}-{precision}").precision == precision
    warned = {line["model"] for line in rounded_server.log if "a float16 bundle is for GPUs" in line["message"]}
    assert f"{MODEL}-float16" in warned
    assert f"{MODEL}-int8" not in warned


@EACH
def test_the_last_hidden_state_of_inspect_equals_encode(
    rounded: EncoderClient, client: EncoderClient, precision: Precision
) -> None:
    text, model = "I understand this", f"{MODEL}-{precision}"
    inspected, want = rounded.inspect(text, model=model), client.inspect(text)
    assert inspected.attention is not None
    assert inspected.hidden_states is not None
    assert want.hidden_states is not None
    assert np.abs(inspected.attention.sum(axis=-1) - 1).max() <= 2e-3
    assert least_cosine(list(inspected.hidden_states), list(want.hidden_states)) >= LEAST[precision]
    assert least_cosine([inspected.hidden_states[-1]], [rounded.token_vectors([text], model=model)[0]]) >= ALONE


def scores(client: EncoderClient, model: str) -> np.ndarray:
    """Return the MaxSim score of each query with each document, (queries, documents)."""
    documents = client.embed(DOCUMENTS, task="document", kind="multi_vector", model=model)
    queries = client.embed(QUERIES, task="query", kind="multi_vector", model=model)
    return np.array([[maxsim(query, it) for it in documents] for query in queries])


def weights(client: EncoderClient, model: str) -> list[np.ndarray]:
    return [it.dense()[None] for it in client.embed(DOCUMENTS, task="document", kind="sparse", model=model)]


@pytest.fixture(scope="module")
def compare_retrieval(rounded: EncoderClient) -> Callable[[EncoderClient, str, str], None]:
    """Return a function that compares a client's MaxSim scores and sparse weights with the float32 models."""
    want, want_weights = scores(rounded, "trained-late-float32"), weights(rounded, "trained-splade-float32")

    def compare(client: EncoderClient, served_as: str, precision: str) -> None:
        largest, least = RETRIEVAL[precision]
        differences = np.abs(scores(client, f"trained-late-{served_as}") - want)
        assert (differences <= largest * want.max(axis=1, keepdims=True)).all()
        assert least_cosine(weights(client, f"trained-splade-{served_as}"), want_weights) >= least

    return compare


@EACH
def test_rounded_scores_and_sparse_weights_are_close_to_float32(
    rounded: EncoderClient, compare_retrieval: Callable[[EncoderClient, str, str], None], precision: str
) -> None:
    compare_retrieval(rounded, precision, precision)


def test_bfloat16_scores_and_sparse_weights_are_close_to_float32(
    rounded_models: Path, compare_retrieval: Callable[[EncoderClient, str, str], None]
) -> None:
    if not cpu_has_bfloat16():
        pytest.skip("THIS CPU HAS NO BFLOAT16: MaxSim and sparse weights in --precision bfloat16 are not tested here")
    flags = [flag for name in ("late", "splade") for flag in ("--model", f"trained-{name}-float32")]
    in_bfloat16 = ("--engine", "openvino", "--precision", "bfloat16")
    with real_server(rounded_models, *flags, *in_bfloat16) as server, EncoderClient(server.target) as client:
        compare_retrieval(client, "float32", "bfloat16")
