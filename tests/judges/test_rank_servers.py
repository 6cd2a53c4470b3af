"""Tests our server with assertions from the tests of vLLM and infinity about /rerank, /score and /classify.

docs/reference/http.md lists the assertions that do not hold for our server. The models have random weights, so
sentence-transformers computes the right scores.
"""

import itertools
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import score_models
from docs_text import first_cells
from judging import ROOT
from served_scores import Served, scores_of_library

Array = npt.NDArray[Any]
QUERIES = ["What is the capital of France?", "What is the capital of Germany?"]
DOCUMENTS = ["The capital of France is Paris.", "The capital of Germany is Berlin.", "Cross-encoder models are neat"]
LONG = f"{DOCUMENTS[0]} " * 50
LONGEST = score_models.LONGEST  # the token limit of the cross-encoder and of the classifier
ASKED = {"query": QUERIES[0], "documents": DOCUMENTS}
MESSAGES = [{"role": "user", "content": "The cat sat on the mat."}]


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{served.server.url}{path}", json={"model": served.name, **body}, trust_env=False, timeout=60)


def ask(served: Served, path: str, body: dict[str, Any]) -> Any:
    """Send a request that must succeed, and return the JSON of the reply."""
    reply = post(served, path, body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert found["model"] == served.name
    assert found["id"]
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0
    return found


def scores_of(served: Served, body: dict[str, Any]) -> list[float]:
    """Return the scores from /rerank, in the order of the documents."""
    results = ask(served, "/rerank", {**ASKED, **body})["results"]
    return [it["relevance_score"] for it in sorted(results, key=lambda it: it["index"])]


@pytest.fixture(scope="module", params=["cross_encoder", "dense"])
def served(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def scores(served: Served) -> Array:
    return scores_of_library(served, QUERIES, DOCUMENTS)


@pytest.mark.parametrize("fields", [("queries", "documents"), ("text_1", "text_2")])
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(served: Served, scores: Array, path: str, fields: tuple[str, str]) -> None:
    first, second = fields
    for queries, documents, want in (
        (QUERIES[0], DOCUMENTS[0], scores[0, :1]),
        (QUERIES[0], DOCUMENTS, scores[0]),
        (QUERIES, DOCUMENTS[:2], scores[:, :2].diagonal()),
    ):
        reply = ask(served, path, {first: queries, second: documents})
        assert reply["object"] == "list"
        assert reply["created"] > 0
        assert [(it["index"], it["object"]) for it in reply["data"]] == [(i, "score") for i in range(len(want))]
        np.testing.assert_allclose([it["score"] for it in reply["data"]], want, rtol=1e-4)


def test_rerank(served: Served, scores: Array) -> None:
    """Rank the documents in every order, for several numbers of results, with and without texts in the results."""
    np.testing.assert_allclose(scores_of(served, {}), scores[0], rtol=1e-4)
    best = DOCUMENTS[int(scores[0].argmax())]
    for documents, top_n, with_documents in itertools.product(
        itertools.permutations(DOCUMENTS), (1, 2, 8000), (True, False)
    ):
        asked = {"documents": documents, "top_n": top_n, "return_documents": with_documents}
        results = ask(served, "/rerank", {**ASKED, **asked})["results"]
        assert len(results) == min(top_n, len(DOCUMENTS))
        assert results[0]["index"] == documents.index(best)
        assert [it.get("document") for it in results[:1]] == [{"text": best} if with_documents else None]
    assert post(served, "/rerank", {**ASKED, "top_n": -1}).status_code == 422


def test_use_activation(cross_encoder: Served) -> None:
    default, activated, logits = (
        np.array(scores_of(cross_encoder, {"use_activation": it})) for it in (None, True, False)
    )
    np.testing.assert_allclose(default, activated)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), activated, rtol=1e-5)
    assert not np.allclose(logits, activated, atol=1e-2)


def test_max_tokens_per_doc(served: Served) -> None:
    tokens = [
        ask(served, "/rerank", {**ASKED, "documents": [LONG], **more})["usage"]["prompt_tokens"]
        for more in ({}, {"max_tokens_per_doc": 15}, {"max_tokens_per_doc": 10})
    ]
    assert tokens == sorted(set(tokens), reverse=True)
    assert post(served, "/rerank", {**ASKED, "max_tokens_per_doc": -5}).status_code == 422


@pytest.mark.parametrize("path", ["/score", "/classify"])
def test_truncate_prompt_tokens(classifier: Served, cross_encoder: Served, path: str) -> None:
    served, body = (
        (cross_encoder, {"queries": QUERIES[0], "documents": LONG})
        if path == "/score"
        else (classifier, {"input": "hello " * 600})
    )
    assert ask(served, path, {**body, "truncate_prompt_tokens": 5})["usage"]["prompt_tokens"] == 5
    reply = post(served, path, {**body, "truncate_prompt_tokens": LONGEST + 1})
    assert reply.status_code == 400
    assert "truncate_prompt_tokens" in reply.json()["error"]["message"]


def test_classify(classifier: Served) -> None:
    logits = score_models.library_scores(classifier.directory, list(DOCUMENTS))
    powers = np.exp(logits)
    want = powers / powers.sum(axis=1, keepdims=True)
    for texts, rows in ((DOCUMENTS[0], want[:1]), (DOCUMENTS, want)):
        reply = ask(classifier, "/classify", {"input": texts})
        assert reply["object"] == "list"
        assert [it["index"] for it in reply["data"]] == list(range(len(rows)))
        assert [it["label"] for it in reply["data"]] == [f"LABEL_{at}" for at in rows.argmax(axis=1)]
        assert all(len(it["probs"]) == it["num_classes"] == 3 for it in reply["data"])
        np.testing.assert_allclose([it["probs"] for it in reply["data"]], rows, rtol=1e-4, atol=1e-6)
    for activated, rows in ((None, want), (True, want), (False, logits)):
        reply = ask(classifier, "/classify", {"input": DOCUMENTS, "use_activation": activated})
        np.testing.assert_allclose([it["probs"] for it in reply["data"]], rows, rtol=1e-4, atol=1e-4)
    empty = post(classifier, "/classify", {"input": []})
    assert empty.status_code == 400
    assert "error" in empty.json()


def test_a_cross_encoder_makes_no_vectors(cross_encoder: Served) -> None:
    for path, body in (("/v1/embeddings", {}), ("/pooling", {"task": "embed"})):
        assert post(cross_encoder, path, {"input": DOCUMENTS, **body}).status_code == 400


Case = tuple[str, str, dict[str, Any], int, str]
# For each row of the table under "Differences in ranks and classes" in docs/reference/http.md: the text of the first
# column, and the cases. A case has the model, the route, the body, the expected status, and a part of the reply.
DIFFERENCES: dict[str, list[Case]] = {
    "a pair or a text that is too long": [
        ("cross-encoder", "/rerank", {"query": LONG, "documents": DOCUMENTS}, 200, '"results":'),
        ("cross-encoder", "/score", {"queries": LONG, "documents": DOCUMENTS}, 200, '"data":'),
        ("classifier", "/classify", {"input": LONG}, 200, f'"total_tokens":{LONGEST}'),
        (
            "classifier",
            "/classify",
            {"input": LONG, "truncate": False},
            400,
            f"input[0]: must be at most {LONGEST} tokens",
        ),
    ],
    "`max_tokens_per_doc` 0": [
        ("cross-encoder", "/rerank", {**ASKED, "max_tokens_per_doc": 0}, 200, '"results":'),
    ],
    "`top_n` 0": [("cross-encoder", "/rerank", {**ASKED, "top_n": 0}, 200, '"index":2')],
    "an empty text": [("classifier", "/classify", {"input": ""}, 200, '"label":')],
    "token ids and `messages` on `/classify`": [
        ("classifier", "/classify", {"input": [2023, 2003]}, 400, "input[0]: must be a string"),
        ("classifier", "/classify", {"messages": MESSAGES}, 400, "input: is required"),
    ],
    "`add_special_tokens` of `/classify`": [
        ("classifier", "/classify", {"input": DOCUMENTS[0], "add_special_tokens": value}, 200, '"label":')
        for value in (True, False)
    ],
    "`/rerank` and `/score` of a classifier": [
        ("classifier", "/rerank", ASKED, 422, "classifier has 3 labels, so it cannot rank documents"),
        ("classifier", "/score", {"queries": "ping", "documents": "pong"}, 400, "has 3 labels"),
    ],
    "`/classify` of a cross-encoder": [("cross-encoder", "/classify", {"input": DOCUMENTS}, 200, '"num_classes":1')],
    "the reply of `/classify`": [("classifier", "/classify", {"input": DOCUMENTS}, 200, '"probs":[')],
    "errors of `/rerank`": [("cross-encoder", "/rerank", {"documents": DOCUMENTS}, 422, '"error_type":"Validation"')],
}


@pytest.mark.parametrize("cases", DIFFERENCES.values(), ids=DIFFERENCES)
def test_the_replies_are_as_documented(cross_encoder: Served, classifier: Served, cases: list[Case]) -> None:
    models = {it.name: it for it in (cross_encoder, classifier)}
    for model, path, body, status, text in cases:
        reply = post(models[model], path, body)
        assert reply.status_code == status, reply.text
        assert text in reply.text


def test_the_table_in_the_docs_has_these_rows() -> None:
    page = (ROOT / "docs/reference/http.md").read_text()
    assert first_cells(page, "Differences in ranks and classes") == list(DIFFERENCES)
