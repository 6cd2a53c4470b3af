"""Runs the code of the tutorials about search. Small models replace the models of the hub, under the same names.

In the tutorial of late interaction and sparse search, each index must rank the texts like the client's function `rank`.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import MODEL, export_minilm
from page_code import reader
from sentence_models import text_of
from sparse_models import sparse_text
from zoo import Zoo

from encserve_client import EncoderClient, SpaceError, rank

pytestmark = pytest.mark.system

# Each text has words from every model's vocabulary. The late-interaction model skips all tokens of
# the second text, and so gives no vectors for this text.
TEXTS = [f"{text_of(i % 7 + 5, seed=i)} {sparse_text(i + 3)}" for i in range(30)]
TEXTS[1] = "w1 w2"
QUESTION = f"{text_of(4, seed=99)} {sparse_text(4)}"
PAGE_TEXTS = "'The Baltic has 18 degrees in July.' 'Stock markets fell sharply on Monday.' 'A kitten is napping.'"
LATE, SPARSE = "answerdotai/answerai-colbert-small-v1", "ibm-granite/granite-embedding-30m-sparse"
SMALL_MODELS = {LATE: "kept-in-documents", SPARSE: "sum-log1p", "BAAI/bge-m3": "bge-m3"}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Run the tutorial of late interaction with small models, and yield its variables while the last server runs.

    The last server on the page has only the model BGE-M3.
    """
    folder = tmp_path_factory.mktemp("search")
    zoo = Zoo(tmp_path_factory.mktemp("zoo"))
    for hub_name, name in SMALL_MODELS.items():
        owner, _, model = hub_name.partition("/")
        zoo.export(name, folder / owner, model)
    changes = {"how warm is the sea?": QUESTION, PAGE_TEXTS: " ".join(f"'{text}'" for text in TEXTS)}
    with reader(folder) as page:
        page.read("tutorials/late-interaction-and-sparse.md", changes)
        yield page.names
        page.names["client"].close()


def best_ten(ranking: list[tuple[int, float]]) -> tuple[list[int], Any]:
    places, scores = zip(*ranking[:10], strict=True)
    return list(places), pytest.approx(scores, rel=1e-4)


def test_qdrant_ranks_as_rank_does(names: dict[str, Any]) -> None:
    for found, best in (("found", "best"), ("found_by_words", "best_by_words")):
        points = names[found]
        assert ([it.id for it in points], tuple(it.score for it in points)) == best_ten(names[best])


def test_lancedb_ranks_as_rank_does(names: dict[str, Any]) -> None:
    assert ([it["id"] for it in names["rows"]], tuple(names["scores"])) == best_ten(names["best"])


def test_a_text_without_vectors_is_last_and_has_sparse_weights(names: dict[str, Any]) -> None:
    assert [i for i, its in enumerate(names["documents"]) if not len(its)] == [1]
    assert rank(names["query"], names["documents"])[-1] == (1, -1e9)
    (point,) = names["qdrant"].retrieve("texts", [1], with_vectors=True)
    assert point.vector.keys() == {"splade"}
    assert names["table"].count_rows() == len(TEXTS)


def test_one_run_has_the_same_outputs_as_three_calls(names: dict[str, Any]) -> None:
    encode = functools.partial(names["client"].embed, TEXTS, task="document", model="bge-m3")
    np.testing.assert_allclose(names["dense"].matrix(), encode(), atol=1e-5)
    for one, its in zip(names["sparse"].sparse_vectors(), encode(kind="sparse"), strict=True):
        np.testing.assert_allclose(one.dense(), its.dense(), atol=1e-5)
    late, sequences = names["late"], names["result"].sequences
    for one, its in zip(late.arrays(), encode(kind="multi_vector"), strict=True):
        np.testing.assert_allclose(one, its, atol=1e-5)
    for places, text in zip(late.token_indices(), sequences, strict=True):
        assert places.tolist() == list(range(1, text.token_count))  # the first token has no vector


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all-MiniLM-L6-v2, named as on the hub."""
    export_minilm(tmp_path / "sentence-transformers")
    assert (tmp_path / "sentence-transformers" / MODEL).is_dir()
    return tmp_path


def test_semantic_search(folder: Path) -> None:
    """The code prints the output that the page shows.

    A client that expects the space id of another index gets an error.
    """
    with reader(folder) as page:
        page.read("tutorials/semantic-search.md")
        made = page.names
        best = rank(made["query"], made["documents"], made["model"])
        found = made["qdrant"].query_points("texts", query=made["query"].tolist(), limit=10).points
        assert ([it.id for it in found], tuple(it.score for it in found)) == best_ten(best)
        np.testing.assert_array_equal(made["again"], made["query"])
        with EncoderClient(page.target, expected_space_id="s3-other") as other, pytest.raises(SpaceError):
            other.embed("a text")
        for client in (made["client"], made["searcher"]):
            client.close()


def test_from_a_corpus_to_duckdb(folder: Path) -> None:
    """The programs print the output that the page shows. The second run of the job writes only the new part."""
    with reader(folder) as page:
        page.read("tutorials/corpus-to-duckdb.md")
    assert sorted(path.name for path in (folder / "vectors").glob("*.parquet")) == [
        "part-00000-000000.parquet",
        "part-00001-000000.parquet",
    ]
