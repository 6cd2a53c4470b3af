"""Run the code of docs/retrieval.md. Each index must rank the texts like the client's function `rank`."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from real_server import real_server
from retrieval_models import DIRECTORIES
from sentence_models import text_of
from sparse_models import sparse_text, write_bge_m3, write_splade

from encserve_client import rank
from encserve_export.cli import main

pytestmark = pytest.mark.system

PAGE = Path(__file__).parent.parent.parent / "docs" / "retrieval.md"
# Each text has words from every model's vocabulary. The late-interaction model gives no vectors for the second text: it
# skips all tokens of this text.
TEXTS = [f"{text_of(i % 7 + 5, seed=i)} {sparse_text(i + 3)}" for i in range(30)]
TEXTS[1] = "w1 w2"
QUESTION = f"{text_of(4, seed=99)} {sparse_text(4)}"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Run the page's code with small models. Yield the variables of the code while the server still runs."""
    folder = tmp_path_factory.mktemp("search")
    DIRECTORIES["kept-in-documents"](folder / "late")
    write_splade(folder / "splade")
    write_bge_m3(folder / "bge-m3")
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    for name in ("late", "splade", "bge-m3"):
        made = CliRunner().invoke(main, ["hf", str(folder / name), "--model-repository", str(folder / "models")])
        assert made.exit_code == 0, made.output
    page = PAGE.read_text().replace("how warm is the sea?", QUESTION)
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch, real_server(folder / "models") as server:
        patch.chdir(folder)
        for block in re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S):
            exec(block.replace("localhost:50051", server.target), names)  # noqa: S102 - our own page
        yield names
        names["client"].close()
        names["searcher"].close()


def best_ten(ranking: list[tuple[int, float]]) -> tuple[list[int], Any]:
    places, scores = zip(*ranking[:10], strict=True)
    return list(places), pytest.approx(scores, rel=1e-4)


def test_qdrant_ranks_as_rank_does(names: dict[str, Any]) -> None:
    for found, best in (("found", "best"), ("found_by_words", "best_by_words")):
        points = names[found]
        assert ([it.id for it in points], tuple(it.score for it in points)) == best_ten(names[best])


def test_lancedb_ranks_as_rank_does(names: dict[str, Any]) -> None:
    rows = names["rows"]
    scores = tuple(len(names["query"]) - it["_distance"] for it in rows)
    assert ([it["id"] for it in rows], scores) == best_ten(names["best"])


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
