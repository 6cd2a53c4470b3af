"""Tests of the HTTP routes for scores and ranks: /rerank, /v1/rerank, /v2/rerank, /score, /classify and /predict."""

from typing import Any

import numpy as np
import pytest
import tiny_heads
from fake_server import FakeServer
from http_calls import get, post
from tiny_bundle import LONGEST, expected_rows
from tiny_heads import (
    BEGIN,
    END,
    Serve,
    expected_vectors,
    logits_of,
    multi_vector,
    pair_ids,
    scores,
    scores_file,
    sigmoid,
    softmax,
    text,
)

from encserve_proto.bundle.v1 import manifest_pb2

FILES = {"scores.onnx": scores_file()}
HTTP = SHARED_SETTINGS = {"http_port": 0}
SHARED_BUNDLE = {"files": FILES, "scores": scores()}
QUERY, IDS = [5, 6], [[7, 8, 9], [], [10], [7, 8, 9]]
DOCUMENTS = [text(*it) for it in IDS]
TOKENS = sum(3 + len(QUERY) + len(it) for it in IDS)
ASKED = {"query": text(*QUERY), "documents": DOCUMENTS}
LABELS = ["bad", "fair", "good"]
LONG = text(*[7] * LONGEST)
RANKS = ("/rerank", "/v1/rerank", "/v2/rerank")


LOGITS = logits_of([pair_ids(QUERY, it) for it in IDS])[:, 0]
ORDER = np.argsort(-LOGITS, kind="stable").tolist()


async def ask(server: FakeServer, path: str, body: Any) -> Any:
    """Send a request that must succeed, and return the JSON of the reply."""
    response = await post(server, path, body)
    assert response.status_code == 200, response.text
    return response.json()


def check_ranks(results: list[dict[str, Any]], want: Any, name: str = "relevance_score") -> None:
    """Check the scores of the results, the largest first. `want` has the scores of all documents, (documents,)."""
    assert [it["index"] for it in results] == ORDER[: len(results)]
    np.testing.assert_allclose([it[name] for it in results], want[ORDER][: len(results)], rtol=1e-5)


async def serve_raw(serve: Serve) -> FakeServer:
    """Start a server with a cross-encoder that has no activation, so its scores are logits."""
    return await serve(FILES, HTTP, scores=scores(activation=manifest_pb2.ACTIVATION_NONE))


async def serve_classifier(serve: Serve, **changes: Any) -> FakeServer:
    labels = scores(labels=LABELS, activation=manifest_pb2.ACTIVATION_NONE)
    return await serve({"scores.onnx": scores_file(3)}, HTTP, scores=labels, **changes)


# Ranks


async def test_texts_are_ranked_as_text_embeddings_inference_does(serve: Serve) -> None:
    server = await serve_raw(serve)
    body = {"query": text(*QUERY), "texts": DOCUMENTS}
    ranks = await ask(server, "/rerank", body)
    check_ranks(ranks, sigmoid(LOGITS), "score")
    assert all(it.keys() == {"index", "score"} for it in ranks)
    ranks = await ask(server, "/rerank", {**body, "raw_scores": True, "return_text": True})
    check_ranks(ranks, LOGITS, "score")
    assert [it["text"] for it in ranks] == [DOCUMENTS[at] for at in ORDER]


async def test_documents_are_ranked_as_vllm_does(serve: Serve) -> None:
    server = await serve_raw(serve)
    reply = await ask(server, "/rerank", ASKED)
    check_ranks(reply["results"], LOGITS)
    assert [it["document"] for it in reply["results"]] == [{"text": DOCUMENTS[at]} for at in ORDER]
    assert reply["usage"] == {"prompt_tokens": TOKENS, "total_tokens": TOKENS}
    assert reply.keys() == {"id", "model", "usage", "results"}
    assert reply["model"] == "tiny"


async def test_the_scores_of_documents_are_those_of_the_model(shared: FakeServer) -> None:
    check_ranks((await ask(shared, "/rerank", ASKED))["results"], sigmoid(LOGITS))
    for name, value in (("use_activation", False), ("raw_scores", True)):  # vLLM's field and infinity's field
        logits = {**ASKED, name: value, "priority": 1, "user": "a", "max_chunks_per_doc": 2}
        check_ranks((await ask(shared, "/rerank", logits))["results"], LOGITS)


async def test_documents_are_ranked_as_cohere_and_jina_do(serve: Serve) -> None:
    server = await serve_raw(serve)
    tokens = {"input_tokens": TOKENS}
    for path, version in (("/v1/rerank", "1"), ("/v2/rerank", "2")):
        reply = await ask(server, path, ASKED)
        check_ranks(reply["results"], sigmoid(LOGITS))
        assert reply["meta"] == {
            "api_version": {"version": version},
            "billed_units": {"search_units": 1},
            "tokens": tokens,
        }
        assert len(reply["id"]) == 36
        has_documents = ["document" in it for it in reply["results"]]
        assert has_documents == [path == "/v1/rerank"] * 4
    reply = await ask(server, "/v1/rerank", {**ASKED, "model": "tiny@1"})
    assert reply["model"] == "tiny@1"
    assert reply["usage"]["total_tokens"] == TOKENS


@pytest.mark.parametrize("path", RANKS)
async def test_the_number_of_ranks(shared: FakeServer, path: str) -> None:
    for top_n in (1, 3, 4, 5, 2**40):
        results = (await ask(shared, path, {**ASKED, "top_n": top_n}))["results"]
        assert len(results) == min(top_n, 4)
        check_ranks(results, sigmoid(LOGITS))
    refused = await post(shared, path, {**ASKED, "top_n": -1})
    assert "top_n: must be at least" in refused.text
    if path == "/v2/rerank":
        assert "top_n: must be at least 1; was 0" in (await post(shared, path, {**ASKED, "top_n": 0})).text
    else:
        assert len((await ask(shared, path, {**ASKED, "top_n": 0}))["results"]) == 4


@pytest.mark.parametrize("path", RANKS)
async def test_documents_may_be_objects(shared: FakeServer, path: str) -> None:
    objects: list[Any] = [{"text": it, "id": i} for i, it in enumerate(DOCUMENTS)]
    objects[2] = DOCUMENTS[2]
    reply = await ask(shared, path, {**ASKED, "documents": objects, "return_documents": True})
    check_ranks(reply["results"], sigmoid(LOGITS))
    wanted = [{"text": DOCUMENTS[2]} if at == 2 else objects[at] for at in ORDER]
    assert [it["document"] for it in reply["results"]] == wanted
    parts = [{"title": text(*it[:1]), "body": text(*it[1:]), "text": "w40"} for it in IDS]
    body = {**ASKED, "documents": parts, "rank_fields": ["title", "body"], "return_documents": False}
    reply = await ask(shared, path, body)
    check_ranks(reply["results"], sigmoid(LOGITS))
    assert all("document" not in it for it in reply["results"])


@pytest.mark.parametrize("path", RANKS)
async def test_long_documents_are_cut_and_counted(shared: FakeServer, path: str) -> None:
    long = {**ASKED, "documents": [text(*[7] * LONGEST), text(10, 11, 12)], "use_activation": False}
    want = logits_of([pair_ids(QUERY, [7] * (LONGEST - 5)), pair_ids(QUERY, [10, 11, 12])])[:, 0]
    response = await post(shared, path, long)
    found = {it["index"]: it["relevance_score"] for it in response.json()["results"]}
    np.testing.assert_allclose([found[0], found[1]], want, rtol=1e-5)
    assert response.headers["encserve-truncated-inputs"] == "1"
    response = await post(shared, path, {**long, "max_tokens_per_doc": 2})
    found = {it["index"]: it["relevance_score"] for it in response.json()["results"]}
    want = logits_of([pair_ids(QUERY, [7, 7]), pair_ids(QUERY, [10, 11])])[:, 0]
    np.testing.assert_allclose([found[0], found[1]], want, rtol=1e-5)
    assert response.headers["encserve-truncated-inputs"] == "2"
    assert "encserve-truncated-inputs" not in (await post(shared, path, ASKED)).headers
    refused = await post(shared, path, {**long, "truncate": False})
    assert f"documents[0]: must be at most {LONGEST} tokens (max_sequence_tokens of tiny)" in refused.text


async def test_pairs_are_cut_to_a_number_of_tokens(serve: Serve) -> None:
    server = await serve(FILES, HTTP, scores=scores(activation=manifest_pb2.ACTIVATION_NONE))
    body = {"text_1": text(*QUERY), "text_2": [text(7, 8, 9), text(10)], "truncate_prompt_tokens": 7}
    response = await post(server, "/score", body)
    want = logits_of([pair_ids(QUERY, it) for it in ([7, 8], [10])])[:, 0]
    np.testing.assert_allclose([it["score"] for it in response.json()["data"]], want, rtol=1e-5)
    assert response.headers["encserve-truncated-inputs"] == "1"
    refused = await post(server, "/score", {**body, "truncate_prompt_tokens": LONGEST + 1})
    assert f"truncate_prompt_tokens: must be from 1 to {LONGEST}" in refused.text


async def test_texts_of_a_dense_model_are_cut_to_a_number_of_tokens(serve: Serve) -> None:
    server = await serve({}, HTTP, similarity="dot")
    body = {"text_1": text(5), "text_2": text(7, 8, 9)}
    for fields, ids in (
        ({"truncate_prompt_tokens": 4}, [7, 8]),
        ({"max_tokens_per_doc": 3}, [7]),
        ({"truncate_prompt_tokens": 4, "max_tokens_per_doc": 3}, [7]),
        ({"truncate_prompt_tokens": 4, "max_tokens_per_doc": 9}, [7, 8]),
    ):
        reply = await ask(server, "/score", {**body, **fields})
        query, document = (expected_rows([BEGIN, *it, END])[0] for it in ([5], ids))
        np.testing.assert_allclose(reply["data"][0]["score"], query @ document, rtol=1e-4)


async def test_a_dense_model_ranks_by_its_similarity(serve: Serve) -> None:
    server = await serve({}, HTTP, similarity="dot")
    rows = [expected_rows([BEGIN, *it, END]) for it in (QUERY, *IDS)]
    query, *documents = (it[0] for it in rows)
    want = np.array([query @ it for it in documents])
    order = np.argsort(-want.round(4), kind="stable").tolist()
    for path in RANKS:
        results = (await ask(server, path, ASKED))["results"]
        assert [it["index"] for it in results] == order
        np.testing.assert_allclose([it["relevance_score"] for it in results], want[order], rtol=1e-4)
    ranks = await ask(server, "/rerank", {"query": text(*QUERY), "texts": DOCUMENTS, "raw_scores": True})
    np.testing.assert_allclose([it["score"] for it in ranks], want[order], rtol=1e-4)


async def test_a_multi_vector_model_ranks_by_maxsim(serve: Serve) -> None:
    late = {"multi_vector.onnx": tiny_heads.multi_vector_file()}
    server = await serve(late, HTTP, multi_vector=multi_vector(), pooling=manifest_pb2.POOLING_UNSPECIFIED)
    query, *documents = (expected_vectors(expected_rows([BEGIN, *it, END])) for it in (QUERY, *IDS))
    want = [(query @ it.T).max(axis=1).sum() for it in documents]
    reply = await ask(server, "/score", {"text_1": text(*QUERY), "text_2": DOCUMENTS})
    np.testing.assert_allclose([it["score"] for it in reply["data"]], want, rtol=1e-4)


# Fields

TEXTS = {"query": text(*QUERY), "texts": DOCUMENTS}
BODIES: list[tuple[str, dict[str, Any]]] = [  # a path and the inputs of a request; the second input is too long
    ("/rerank", {**TEXTS, "texts": [*DOCUMENTS, LONG]}),
    ("/rerank", {**ASKED, "documents": [*DOCUMENTS, LONG]}),
    ("/v1/rerank", {**ASKED, "documents": [*DOCUMENTS, LONG]}),
    ("/v2/rerank", {**ASKED, "documents": [*DOCUMENTS, LONG]}),
    ("/score", {"text_1": text(*QUERY), "text_2": [*DOCUMENTS, LONG]}),
    ("/v1/score", {"queries": text(*QUERY), "documents": [*DOCUMENTS, LONG]}),
    ("/classify", {"input": [*DOCUMENTS, LONG]}),
    ("/predict", {"inputs": [[it] for it in (*DOCUMENTS, LONG)]}),
]
TEI = {"/rerank", "/predict"}  # these routes answer 422 for a wrong field
INPUTS = {"query", "texts", "documents", "text_1", "text_2", "queries", "input", "inputs"}
# For each field, a value that differs from the default on every route.
VALUES = {
    "max_tokens_per_doc": 1,
    "model": "other",
    "parameters": {"function_to_apply": "none"},
    "priority": "high",
    "prompt_name": "p",
    "rank_fields": ["a"],
    "raw_scores": True,
    "return_text": True,
    "top_n": 1,
    "truncate": False,
    "truncate_prompt_tokens": 7,
    "truncation_direction": "left",
    "truncation_side": "left",
    "use_activation": False,
}
IGNORED = {"user", "max_chunks_per_doc"}


async def fields_of(server: FakeServer) -> dict[str, dict[str, str]]:
    """Return the name and the description of the fields of each route, from the OpenAPI document."""
    document = (await get(server, "/openapi.json")).json()
    found = {}
    for path in dict(BODIES):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        found[path] = {name: it.get("description", "") for name, it in schema["properties"].items()}
    return found


@pytest.mark.parametrize(("path", "inputs"), BODIES, ids=[f"{path} {[*inputs][-1]}" for path, inputs in BODIES])
async def test_every_field_has_an_effect_or_is_refused(shared: FakeServer, path: str, inputs: dict[str, Any]) -> None:
    fields = (await fields_of(shared))[path]
    plain = await post(shared, path, inputs)
    assert plain.status_code == 200, plain.text
    logits = await ask(shared, path, {**inputs, "raw_scores": True})
    assert without_ids(logits) == without_ids(await ask(shared, path, {**inputs, "use_activation": False}))
    for name in fields.keys() - INPUTS - IGNORED:
        other = path == "/v2/rerank"  # for return_documents, whose default differs between the routes
        response = await post(shared, path, {**inputs, name: VALUES.get(name, other)})
        if response.status_code == 200:
            assert without_ids(response.json()) != without_ids(plain.json()), name
        else:
            assert response.status_code in (400, 404, 422), (name, response.text)
    for name in fields.keys() & IGNORED:
        assert fields[name].startswith("Ignored"), name


def without_ids(reply: Any) -> Any:
    """Return a reply without the fields that differ between equal requests."""
    if isinstance(reply, list):
        return reply
    return {name: it for name, it in reply.items() if name not in ("id", "created")}


async def test_texts_and_documents_have_the_same_fields(shared: FakeServer) -> None:
    for fields in (
        {},
        {"top_n": 0},
        {"top_n": 2},
        {"max_tokens_per_doc": 1},
        {"use_activation": False},
        {"use_activation": True},
        {"raw_scores": True},
        {"truncate_prompt_tokens": 7},
        {"top_n": 1, "max_tokens_per_doc": 2, "raw_scores": False},
    ):
        ranks = await ask(shared, "/rerank", {**TEXTS, **fields})
        results = (await ask(shared, "/rerank", {**ASKED, **fields, "return_documents": False}))["results"]
        assert ranks == [{"index": it["index"], "score": it["relevance_score"]} for it in results], fields


# Scores and labels


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(("first", "second"), [("text_1", "text_2"), ("queries", "documents")])
async def test_pairs_are_scored_in_their_order(shared: FakeServer, first: str, second: str, path: str) -> None:
    reply = await ask(shared, path, {first: text(*QUERY), second: DOCUMENTS})
    assert [(it["index"], it["object"]) for it in reply["data"]] == [(i, "score") for i in range(4)]
    np.testing.assert_allclose([it["score"] for it in reply["data"]], sigmoid(LOGITS), rtol=1e-5)
    assert (reply["object"], reply["model"], reply["id"][:6]) == ("list", "tiny", "score-")
    assert reply["usage"] == {"prompt_tokens": TOKENS, "total_tokens": TOKENS}
    firsts = [text(*QUERY), text(30), text(*QUERY), ""]
    reply = await ask(shared, path, {first: firsts, second: DOCUMENTS, "use_activation": False})
    want = logits_of([pair_ids(*it) for it in zip(([5, 6], [30], [5, 6], []), IDS, strict=True)])
    np.testing.assert_allclose([it["score"] for it in reply["data"]], want[:, 0], rtol=1e-5)
    reply = await ask(shared, path, {first: [text(*QUERY)], second: DOCUMENTS[0]})
    np.testing.assert_allclose(reply["data"][0]["score"], sigmoid(LOGITS[0]), rtol=1e-5)


async def test_texts_are_classified_as_vllm_does(serve: Serve) -> None:
    server = await serve_classifier(serve)
    want = logits_of([[BEGIN, *it, END] for it in IDS], labels=3)
    reply = await ask(server, "/classify", {"input": DOCUMENTS})
    assert [it["index"] for it in reply["data"]] == [0, 1, 2, 3]
    np.testing.assert_allclose([it["probs"] for it in reply["data"]], want, rtol=1e-5)
    assert [it["label"] for it in reply["data"]] == [LABELS[at] for at in want.argmax(axis=1)]
    assert {it["num_classes"] for it in reply["data"]} == {3}
    one = await ask(server, "/classify", {"input": DOCUMENTS[0]})
    assert one["data"] == reply["data"][:1]
    assert one["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


async def test_labels_are_predicted_as_text_embeddings_inference_does(serve: Serve) -> None:
    server = await serve_classifier(serve)

    def listed(rows: Any) -> list[list[tuple[str, float]]]:
        return [[(LABELS[at], row[at]) for at in np.argsort(-row)] for row in rows]

    def check(reply: Any, rows: Any) -> None:
        for got, want in zip(reply, listed(rows), strict=True):
            assert [it["label"] for it in got] == [label for label, _ in want]
            np.testing.assert_allclose([it["score"] for it in got], [score for _, score in want], rtol=1e-4)

    want = logits_of([[BEGIN, *it, END] for it in IDS], labels=3)
    check(await ask(server, "/predict", {"inputs": [[it] for it in DOCUMENTS]}), softmax(want))
    check(await ask(server, "/predict", {"inputs": [[it] for it in DOCUMENTS], "raw_scores": True}), want)
    check([await ask(server, "/predict", {"inputs": DOCUMENTS[0]})], softmax(want[:1]))
    check([await ask(server, "/predict", {"inputs": DOCUMENTS[:1]})], softmax(want[:1]))
    want = logits_of([pair_ids(IDS[0], IDS[2]), pair_ids(IDS[2], IDS[0])], labels=3)
    check([await ask(server, "/predict", {"inputs": [DOCUMENTS[0], DOCUMENTS[2]]})], softmax(want[:1]))
    pairs = [[DOCUMENTS[0], DOCUMENTS[2]], [DOCUMENTS[2], DOCUMENTS[0]]]
    check(await ask(server, "/predict", {"inputs": pairs}), softmax(want))


async def test_labels_are_predicted_as_huggingface_hub_reads_them(serve: Serve) -> None:
    """huggingface_hub sends a field `parameters`. With this field, the reply has a list for each text."""
    server = await serve_classifier(serve)
    logits = logits_of([[BEGIN, *IDS[0], END]], labels=3)
    functions = {"softmax": softmax(logits), "sigmoid": sigmoid(logits), "none": logits}
    body = {"inputs": DOCUMENTS[0]}
    wanted = [({}, functions["softmax"]), *(({"function_to_apply": it}, rows) for it, rows in functions.items())]
    for count in (1, 2, 3, 4):
        for parameters, rows in wanted:
            (got,) = await ask(server, "/predict", {**body, "parameters": {**parameters, "top_k": count}})
            order = np.argsort(-rows[0])[:count]
            assert [it["label"] for it in got] == [LABELS[at] for at in order]
            np.testing.assert_allclose([it["score"] for it in got], rows[0][order], rtol=1e-4)
    assert await ask(server, "/predict", {**body, "parameters": {}}) == [await ask(server, "/predict", body)]
    many = await ask(server, "/predict", {"inputs": [[DOCUMENTS[0]], [DOCUMENTS[2]]], "parameters": {"top_k": 1}})
    assert [len(it) for it in many] == [1, 1]
    for name, value, problem in (("top_k", 0, "must be at least 1"), ("function_to_apply", "tanh", "must be one of")):
        refused = await post(server, "/predict", {**body, "parameters": {name: value}})
        assert f"parameters.{name}: {problem}" in refused.text


async def test_one_label_is_predicted(serve: Serve) -> None:
    server = await serve_raw(serve)
    one = await ask(server, "/predict", {"inputs": [text(*QUERY), DOCUMENTS[0]]})
    assert [it["label"] for it in one] == ["relevant"]
    np.testing.assert_allclose(one[0]["score"], sigmoid(LOGITS[0]), rtol=1e-5)


async def test_the_description_of_a_cross_encoder(serve: Serve) -> None:
    server = await serve_raw(serve)
    found = (await get(server, "/info")).json()["model_type"]
    assert found == {"reranker": {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}}
    outputs = (await get(server, "/v1/models")).json()["data"][0]["outputs"]
    assert outputs["scores"] == ["/rerank", "/score"]


async def test_the_description_of_a_classifier(serve: Serve) -> None:
    server = await serve_classifier(serve)
    found = (await get(server, "/info")).json()["model_type"]["classifier"]
    assert found["id2label"] == {f"{i}": label for i, label in enumerate(LABELS)}
    assert found["label2id"] == {label: i for i, label in enumerate(LABELS)}
    outputs = (await get(server, "/v1/models")).json()["data"][0]["outputs"]
    assert outputs["scores"] == ["/classify", "/predict"]


# Open Inference

PATH = "/v2/models/tiny/infer"


def tensor(name: str, texts: list[str]) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": texts}


def infer(*tensors: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    """Return the body of an Open Inference request for the scores."""
    return {"inputs": tensors, "outputs": [{"name": "scores"}], "parameters": parameters}


async def test_pairs_are_scored_over_open_inference(shared: FakeServer) -> None:
    for queries in ([text(*QUERY)], [text(*QUERY)] * 4):
        reply = await ask(shared, PATH, infer(tensor("query", queries), tensor("text", DOCUMENTS)))
        (output,) = reply["outputs"]
        assert (output["name"], output["datatype"], output["shape"]) == ("scores", "FP32", [4, 1])
        np.testing.assert_allclose(output["data"], sigmoid(LOGITS), rtol=1e-5)
    pair = (tensor("query", [text(*QUERY)]), tensor("text", [LONG]))
    cut = (await ask(shared, PATH, infer(*pair, truncate=True)))["outputs"][0]["data"]
    np.testing.assert_allclose(cut, sigmoid(logits_of([pair_ids(QUERY, [7] * (LONGEST - 5))])[0]), rtol=1e-5)
    config = (await get(shared, "/v2/models/tiny")).json()
    assert [it["name"] for it in config["inputs"]] == ["input_ids", "attention_mask", "text", "query"]
    assert {"name": "scores", "datatype": "FP32", "shape": [-1, 1]} in config["outputs"]
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}
    refused: list[tuple[Any, str]] = [
        (infer(*pair), f"text[0]: must be at most {LONGEST} tokens"),
        (infer(tensor("query", ["a"] * 3), tensor("text", ["b"] * 2)), "query.shape: must hold 1 query, or 1 for each"),
        (infer(tensor("query", ["a"]), ids), "query: is only for text; was sent with input_ids"),
        (infer(tensor("query", ["a"])), "inputs: must hold input_ids or text; was query"),
    ]
    for body, problem in refused:
        response = await post(shared, PATH, body)
        assert (response.status_code, response.json()["error"][: len(problem)]) == (400, problem)


async def test_texts_are_classified_over_open_inference(serve: Serve) -> None:
    labels = scores(labels=LABELS, activation=manifest_pb2.ACTIVATION_SOFTMAX)
    server = await serve({"scores.onnx": scores_file(3)}, HTTP, scores=labels)
    output = (await ask(server, PATH, infer(tensor("text", DOCUMENTS))))["outputs"][0]
    want = softmax(logits_of([[BEGIN, *it, END] for it in IDS], labels=3))
    np.testing.assert_allclose(np.reshape(output["data"], output["shape"]), want, rtol=1e-4)


async def test_a_model_without_labels_has_no_query_over_open_inference(serve: Serve) -> None:
    server = await serve({}, HTTP)
    response = await post(server, PATH, {"inputs": [tensor("query", ["a"]), tensor("text", ["b"])]})
    assert "model tiny takes input_ids, attention_mask, text; was 'query'" in response.text


# Refused requests and bounds

REFUSED: list[tuple[str, Any, int, str]] = [  # a path, a body, the status, and the start of the error text
    ("/rerank", {}, 422, "query: is required, and must be a string; was null"),
    ("/rerank", {"query": "a"}, 422, "texts: is required, and must be a list of texts; was null"),
    ("/rerank", {"query": "a", "texts": []}, 400, "texts: must hold at least 1 text; was empty"),
    ("/rerank", {"query": "a", "documents": []}, 400, "documents: must hold at least 1 text; was empty"),
    ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, 422, "texts: must be left out if documents"),
    ("/rerank", {**TEXTS, "return_documents": True}, 422, "return_documents: must be left out if texts is set"),
    ("/rerank", {**TEXTS, "rank_fields": ["a"]}, 422, "rank_fields: must be left out if texts is set"),
    ("/v2/rerank", {**ASKED, "rank_fields": ["a"]}, 400, "rank_fields: must be left out if all documents are strings"),
    ("/v2/rerank", {**ASKED, "rank_fields": []}, 400, "rank_fields: must hold at least 1 name; was empty"),
    ("/rerank", {**ASKED, "return_text": True}, 422, "return_text: must be left out if documents is set"),
    ("/rerank", {**TEXTS, "top_n": -1}, 422, "top_n: must be at least 0; was -1"),
    ("/rerank", {**TEXTS, "max_tokens_per_doc": -1}, 422, "max_tokens_per_doc: must be at least 1; was -1"),
    (
        "/predict",
        {"inputs": "a", "raw_scores": True, "parameters": {"function_to_apply": "none"}},
        422,
        "raw_scores: must be left out if parameters.function_to_apply is set",
    ),
    (
        "/predict",
        {"inputs": "a", "use_activation": True, "parameters": {"function_to_apply": "none"}},
        422,
        "use_activation: must be left out if parameters.function_to_apply is set",
    ),
    (
        "/predict",
        {"inputs": "a", "parameters": {"function_to_apply": "softmax"}},
        422,
        "parameters.function_to_apply: must not be softmax, because all scores of model tiny, with 1 label",
    ),
    *(
        (
            path,
            {**body, "raw_scores": True, "use_activation": False},
            422 if path in TEI else 400,
            "raw_scores: must be",
        )
        for path, body in BODIES
    ),
    (
        "/score",
        {"text_1": "a", "text_2": ["b", LONG], "truncation_side": "left"},
        400,
        "text_2[1]: must be at most 32 tokens, because this server truncates texts only at their end; was",
    ),
    (
        "/v1/rerank",
        {**ASKED, "truncation_side": "left", "truncation_direction": "right"},
        400,
        "truncation_side: must be left out if truncation_direction is set",
    ),
    (
        "/v1/rerank",
        {**ASKED, "truncation_side": "left", "max_tokens_per_doc": 2},
        400,
        "max_tokens_per_doc: must be left out with truncation on the left, because this field cuts the end of",
    ),
    ("/rerank", {"query": "a", "texts": ["b", 3]}, 422, "texts[1]: must be a string; was 3"),
    ("/rerank", {"query": ["a"], "texts": ["b"]}, 422, "query: must be a string; was a list"),
    ("/rerank", {"query": "a", "texts": ["b", LONG], "truncate": False}, 422, "texts[1]: must be at most 32 tokens"),
    (
        "/rerank",
        {"query": "a", "texts": ["b", LONG], "truncation_direction": "Left"},
        422,
        "texts[1]: must be at most 32 tokens, because this server truncates texts only at their end; was",
    ),
    ("/rerank", {"query": "w5 " * 400_000, "texts": ["b"]}, 422, "query: must be at most 262144 bytes"),
    ("/rerank", {"query": "a", "texts": ["b"] * 2049}, 413, "texts: must hold at most 2048 sequences"),
    ("/v1/rerank", {"query": "a", "documents": [3]}, 400, "documents[0]: must be a string or an object; was 3"),
    ("/v1/rerank", {"query": "a", "documents": [{"id": 3}]}, 400, "documents[0]: must have the field text"),
    ("/v1/rerank", {"query": "a", "documents": [{"text": 3}]}, 400, "documents[0].text: must be a string; was int"),
    (
        "/v2/rerank",
        {"query": "a", "documents": [{"text": "b"}], "rank_fields": ["x", "y"]},
        400,
        "documents[0]: must have the field x or y",
    ),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, 400, "max_tokens_per_doc: must be"),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "priority": "high"}, 400, "priority: must be one of"),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "prompt_name": "p"}, 400, "prompt_name: model tiny has no"),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "model": "rerank-v3.5"}, 404, "model: no model 'rerank-v3.5'"),
    ("/score", {"text_1": "a"}, 400, "text_2: is required"),
    ("/score", {"queries": "a", "text_2": "b"}, 400, "text_2: must be left out if queries or documents are set"),
    (
        "/score",
        {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]},
        400,
        "text_2: must hold as many texts as text_1, which has 2; was 3",
    ),
    ("/score", {"text_1": "a", "text_2": ["b", LONG], "truncate": False}, 400, "text_2[1]: must be at most 32"),
    ("/classify", {}, 400, "input: is required"),
    ("/classify", {"input": [[1, 2]]}, 400, "input[0]: must be a string; was a list"),
    ("/predict", {"inputs": []}, 400, "inputs: must hold at least 1 text; was empty"),
    ("/predict", {"inputs": ["a", "b", "c"]}, 422, "inputs: must be a list of 1 or 2 strings; was 3 strings"),
    ("/predict", {"inputs": [["a"], []]}, 422, "inputs[1]: must be a list of 1 or 2 strings; was 0 strings"),
    ("/predict", {"inputs": [["a"], ["b", "c"]]}, 422, "inputs[1]: must be a pair as the first input, or no input"),
    ("/predict", {"inputs": [["a"], "b"]}, 422, "inputs[1]: must be a list of 1 or 2 strings, as the first input"),
    ("/predict", {"inputs": ["a", ["b"]]}, 422, "inputs: must have only lists of 1 or 2 strings"),
    ("/predict", {"inputs": [["a"], [3]]}, 422, "inputs[1]: must be a string, or a list of 1 or 2 strings"),
]


def message_of(body: dict[str, Any]) -> str:
    """Return the text of an error in the form of text-embeddings-inference, Cohere or OpenAI."""
    error = body.get("error", body)
    return error if isinstance(error, str) else error["message"]


async def test_wrong_requests_name_the_field(shared: FakeServer) -> None:
    for path, body, status, message in REFUSED:
        response = await post(shared, path, body)
        wanted = message.replace("32 tokens", f"{LONGEST} tokens").replace("at most 32", f"at most {LONGEST}")
        assert message_of(response.json()).startswith(wanted), (path, response.text[:300])
        assert response.status_code == status, (path, response.text[:300])
    form = (await post(shared, "/v1/rerank", {})).json()
    assert form["detail"] == form["message"]


async def test_errors_show_only_the_start_of_a_large_number(shared: FakeServer) -> None:
    for path, body in BODIES:
        fields = (await fields_of(shared))[path]
        for name in {"top_n", "max_tokens_per_doc", "truncate_prompt_tokens"} & fields.keys():
            for more in ({}, {"truncate": False}, {"truncation_side": "left"}):
                for sign in (1, -1):
                    response = await post(shared, path, {**body, name: sign * 10**4000, **more})
                    if response.status_code != 200:
                        assert len(response.text) < 600, (path, name, more)


async def test_a_model_without_labels_is_named_with_its_routes(serve: Serve) -> None:
    server = await serve({}, HTTP)
    for path, body in (("/classify", {"input": "a"}), ("/predict", {"inputs": "a"})):
        response = await post(server, path, body)
        assert message_of(response.json()).startswith(
            "model: tiny does not compute scores of labels; it computes one vector for each input"
        )


async def test_a_classifier_cannot_rank(serve: Serve) -> None:
    server = await serve_classifier(serve, pooling=manifest_pb2.POOLING_UNSPECIFIED)
    bodies = [(path, ASKED) for path in RANKS] + [("/score", {"text_1": "a", "text_2": "b"})]
    for path, body in bodies:
        response = await post(server, path, body)
        assert "model: tiny has 3 labels, so it cannot rank documents" in response.text
    response = await post(server, "/v1/embeddings", {"input": "a"})
    assert "model: tiny does not compute one vector for each input; it computes scores of labels" in response.text


async def test_many_documents_and_large_documents(serve: Serve) -> None:
    server = await serve(FILES, HTTP | {"max_queue_tokens": 2048}, scores=scores())
    ids = [[3 + i % 40] * (i % 20) for i in range(2048)]
    documents = [text(*it) for it in ids]
    reply = await ask(server, "/rerank", {**ASKED, "documents": documents, "use_activation": False})
    found = np.empty(2048)
    for it in reply["results"]:
        found[it["index"]] = it["relevance_score"]
    np.testing.assert_allclose(found, logits_of([pair_ids(QUERY, it) for it in ids])[:, 0], atol=1e-4)
    large = ["w7 " * 80_000] * 8
    reply = await ask(server, "/v1/rerank", {**ASKED, "documents": large})
    assert [it["document"]["text"] for it in reply["results"]] == large


async def test_replies_with_many_labels_are_bounded(serve: Serve) -> None:
    names = [f"label {i}" for i in range(10_000)]
    server = await serve({"scores.onnx": scores_file(10_000)}, HTTP, scores=scores(labels=names))
    for path, body in (("/predict", {"inputs": [["w7"]]}), ("/classify", {"input": ["w7"]})):
        assert len(str(await ask(server, path, body))) > 10_000
    response = await post(server, "/classify", {"input": ["w7"] * 2048})
    assert "(max_response_bytes). Send fewer than 2048 texts" in response.text
    assert response.headers["encserve-error-reason"] == "RESPONSE_TOO_LARGE"


async def test_a_score_that_is_not_finite_is_an_error(serve: Serve) -> None:
    infinite = np.full((8, 1), 3e38, np.float32)
    server = await serve({"scores.onnx": scores_file(table=infinite)}, HTTP, scores=scores())
    for path in RANKS:
        response = await post(server, path, ASKED)
        assert response.status_code == (424 if path == "/rerank" else 500)
        assert response.headers["encserve-error-reason"] == "INFERENCE_FAILED"
