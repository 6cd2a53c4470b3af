"""Tests of Score with tiny ONNX models: scores, ranks, truncation, similarities, and refused requests."""

from collections.abc import Callable
from typing import Any

import fake_server
import grpc
import numpy as np
import pytest
import tiny_heads
from fake_engine import FakeEngine
from fake_server import Failed, FakeServer, StartServer, refusal
from open_inference import infer, text_tensor
from tiny_bundle import D_MODEL, LONGEST, expected_rows
from tiny_heads import (
    BEGIN,
    END,
    Serve,
    expected_logits,
    expected_vectors,
    expected_weights,
    logits_of,
    multi_vector,
    pair_ids,
    scores,
    scores_file,
    sigmoid,
    softmax,
    sparse,
    text,
)

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.v1 import encoder_pb2 as pb

FILES = {"scores.onnx": scores_file()}
SHARED_BUNDLE = {"files": FILES, "scores": scores()}
QUERY, DOCUMENTS = [5, 6], [[7, 8, 9], [], [10], [7, 8, 9]]


async def score(server: FakeServer, **fields: Any) -> pb.ScoreResponse:
    return pb.ScoreResponse.FromString(await server.call("Score", pb.ScoreRequest(**fields)))


def found(response: pb.ScoreResponse) -> Any:
    """Return the scores in the shape (n, labels)."""
    return np.frombuffer(response.scores, "<f4").reshape(-1, response.label_count)


async def refused(server: FakeServer, **fields: Any) -> Failed:
    failed = await refusal(score(server, **fields))
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    return failed


def asked(documents: list[list[int]] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the fields of a request with the query `QUERY`."""
    return {"query": text(*QUERY), "documents": [text(*it) for it in documents or DOCUMENTS], **fields}


async def test_a_cross_encoder_scores_documents_in_their_order(shared: FakeServer) -> None:
    want = logits_of([pair_ids(QUERY, it) for it in DOCUMENTS])
    response = await score(shared, **asked())
    np.testing.assert_allclose(found(response), sigmoid(want), rtol=1e-5)
    assert list(response.labels) == ["relevant"]
    assert (response.model, response.model_version) == ("tiny", "1")
    assert response.token_count == sum(len(pair_ids(QUERY, it)) for it in DOCUMENTS)
    assert (list(response.truncated), list(response.indices)) == ([], [])
    raw = await score(shared, **asked(activation=pb.ACTIVATION_NONE))
    np.testing.assert_allclose(found(raw), want, rtol=1e-5)
    pairs = [pb.TextPair(query=text(*query), document=text(*it)) for query in (QUERY, [30]) for it in DOCUMENTS]
    response = await score(shared, pairs=pairs, activation=pb.ACTIVATION_NONE)
    more = logits_of([pair_ids([30], it) for it in DOCUMENTS])
    np.testing.assert_allclose(found(response), np.concatenate([want, more]), rtol=1e-5)


async def test_the_largest_scores_come_first(shared: FakeServer) -> None:
    want = sigmoid(logits_of([pair_ids(QUERY, it) for it in DOCUMENTS]))[:, 0]
    order = np.argsort(-want, kind="stable")
    for top_k in (1, 2, 4, 2**31):
        response = await score(shared, **asked(top_k=top_k))
        assert list(response.indices) == order[:top_k].tolist()
        np.testing.assert_allclose(found(response)[:, 0], want[order[:top_k]], rtol=1e-5)


async def test_a_classifier_scores_texts(serve: Serve) -> None:
    labels = scores(labels=["a", "b", "c"], activation=manifest_pb2.ACTIVATION_SOFTMAX)
    server = await serve({"scores.onnx": scores_file(3)}, scores=labels)
    want = logits_of([[BEGIN, *it, END] for it in ([7], [8, 9])], labels=3)
    response = await score(server, texts=[text(7), text(8, 9)])
    np.testing.assert_allclose(found(response), softmax(want), rtol=1e-4)
    assert (response.label_count, list(response.labels)) == (3, ["a", "b", "c"])
    failed = await refused(server, texts=[text(7)], top_k=1)
    assert failed.text == "top_k: must be 0, because model tiny has 3 labels; was 1"
    encoded = await server.encode(
        text(7), options=pb.EncodeOptions(outputs=[pb.OutputSpec(kind=pb.OUTPUT_KIND_SCORES)])
    )
    np.testing.assert_allclose(np.frombuffer(encoded.outputs[0].data, "<f4"), want[0], rtol=1e-5)
    model = pb.GetModelResponse.FromString(await server.call("GetModel", pb.GetModelRequest())).model
    assert (model.score_method, model.activation) == (pb.SCORE_METHOD_LABELS, pb.ACTIVATION_SOFTMAX)
    assert list(model.labels) == ["a", "b", "c"]


async def test_pairs_that_are_too_long_are_cut_or_refused(shared: FakeServer) -> None:
    long = [7] * LONGEST
    want = logits_of([pair_ids(QUERY, it) for it in ([10], [7] * (LONGEST - 5))])
    response = await score(shared, **asked([[10], long], activation=pb.ACTIVATION_NONE))
    np.testing.assert_allclose(found(response), want, rtol=1e-5)
    assert list(response.truncated) == [1]
    failed = await refused(shared, **asked([[10], long], truncation=pb.TRUNCATION_REFUSE))
    assert failed.text.startswith(
        f"documents[1]: must be at most {LONGEST} tokens (max_sequence_tokens of tiny); was 69"
    )
    pair = pb.TextPair(query=text(*QUERY), document=text(*long))
    failed = await refused(shared, pairs=[pair], truncation=pb.TRUNCATION_REFUSE)
    assert failed.text.startswith("pairs[0].document: must be at most")


async def test_documents_are_cut_to_a_number_of_tokens(shared: FakeServer) -> None:
    fields = asked([[10, 11, 12], [7]], activation=pb.ACTIVATION_NONE, max_document_tokens=2)
    response = await score(shared, **fields)
    np.testing.assert_allclose(found(response), logits_of([pair_ids(QUERY, it) for it in ([10, 11], [7])]), rtol=1e-5)
    assert list(response.truncated) == [0]
    long = asked([[10, 11, *[12] * LONGEST], [7]], activation=pb.ACTIVATION_NONE, max_document_tokens=2)
    refusing = await score(shared, **long, truncation=pb.TRUNCATION_REFUSE)
    assert (refusing.scores, list(refusing.truncated)) == (response.scores, [0])


@pytest.mark.parametrize("most", [LONGEST, LONGEST + 1])
async def test_long_documents_of_a_dense_model_are_refused_without_truncation(serve: Serve, most: int) -> None:
    server = await serve({}, similarity="dot")
    long = asked([[7], [7] * LONGEST], max_document_tokens=most)
    failed = await refused(server, **long, truncation=pb.TRUNCATION_REFUSE)
    assert failed.reason == "SEQUENCE_TOO_LONG"
    assert failed.text.startswith(f"documents[1]: must be at most {LONGEST} tokens")
    assert list((await score(server, **long)).truncated) == [1]


async def test_only_the_second_text_is_cut(serve: Serve) -> None:
    server = await serve(FILES, scores=scores(pair_truncation=manifest_pb2.PAIR_TRUNCATION_ONLY_SECOND))
    query, long = [5] * 40, [7] * LONGEST
    response = await score(server, query=text(*query), documents=[text(*long)], activation=pb.ACTIVATION_NONE)
    want = logits_of([pair_ids(query, [7] * (LONGEST - 43))])
    np.testing.assert_allclose(found(response), want, rtol=1e-5)
    failed = await refused(server, query=text(*[5] * LONGEST), documents=[text(7)])
    assert failed.text == (
        f"query: must leave room for the document: a pair has at most {LONGEST} tokens (max_sequence_tokens of tiny), "
        f"with 3 special tokens; the query has {LONGEST}"
    )


async def test_a_template_joins_the_texts(serve: Serve) -> None:
    template = manifest_pb2.TextTemplate(before="w20 ", between=" w21 ", after=" w22", after_tokens=1)
    parts: dict[str, Any] = {"scores": scores(pooling=manifest_pb2.POOLING_LAST_TOKEN), "text__template": template}
    server = await serve(FILES, **parts)
    response = await score(server, **asked([[7, 8, 9]], activation=pb.ACTIVATION_NONE, max_document_tokens=2))
    ids = [BEGIN, 20, *QUERY, 21, 7, 8, 22, END]
    want = expected_logits(expected_rows(ids)[-1:])
    assert list(response.truncated) == [0]
    np.testing.assert_allclose(found(response)[0], want, rtol=1e-5)
    failed = await refused(server, texts=[text(7)])
    assert failed.text == "texts[0]: model tiny takes pairs of texts only: send a query and documents"


async def test_a_long_query_that_is_joined_to_many_documents_is_refused(serve: Serve) -> None:
    template = manifest_pb2.TextTemplate(before="w20 ", between=" w21 ", after=" w22", after_tokens=1)
    parts: dict[str, Any] = {"scores": scores(), "text__template": template}
    server = await serve(FILES, {"max_request_mib": 1}, **parts)
    failed = await refused(server, query="w5 " * 10_000, documents=["w7"] * 100)
    assert failed.reason == "REQUEST_TOO_LARGE"
    assert failed.text.startswith("documents: must have at most 1048576 characters with the query before each of them")
    inputs = {"query": text_tensor("w5 " * 10_000), "text": text_tensor(*["w7"] * 100)}
    failed = await refusal(infer(server, outputs=["scores"], **inputs))
    assert (failed.code, failed.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_TOO_LARGE")
    assert "must have at most 1048576 characters with the query before each of them" in failed.text


async def test_padding_ids_do_not_count_as_the_last_token(serve: Serve) -> None:
    head = scores(pooling=manifest_pb2.POOLING_LAST_TOKEN, not_last_token_id=END)
    server = await serve(FILES, scores=head)
    response = await score(server, **asked([[7, 8], []], activation=pb.ACTIVATION_NONE))
    rows = [expected_rows(pair_ids(QUERY, it)) for it in ([7, 8], [])]
    want = [expected_logits(its[place : place + 1]) for its, place in zip(rows, (5, 2), strict=True)]
    np.testing.assert_allclose(found(response), want, rtol=1e-5)


async def test_a_prompt_comes_before_the_query(serve: Serve) -> None:
    parts: dict[str, Any] = {"scores": scores(), "prompts": {"q": "w30 "}, "default_prompt_name": "q"}
    server = await serve(FILES, **parts)
    with_prompt = await score(server, **asked(activation=pb.ACTIVATION_NONE))
    np.testing.assert_allclose(
        found(with_prompt), logits_of([pair_ids([30, *QUERY], it) for it in DOCUMENTS]), rtol=1e-5
    )
    without = await score(server, **asked(activation=pb.ACTIVATION_NONE, prompt_name=""))
    np.testing.assert_allclose(found(without), logits_of([pair_ids(QUERY, it) for it in DOCUMENTS]), rtol=1e-5)


# Similarities


def pooled(ids: list[int]) -> Any:
    return expected_rows([BEGIN, *ids, END])[0]


SIMILARITIES: dict[str, Callable[[Any, Any], Any]] = {
    "": lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b),
    "dot": lambda a, b: a @ b,
    "euclidean": lambda a, b: -np.linalg.norm(a - b),
    "manhattan": lambda a, b: -np.abs(a - b).sum(),
}


@pytest.mark.parametrize("similarity", SIMILARITIES)
async def test_a_dense_model_ranks_by_its_similarity(serve: Serve, similarity: str) -> None:
    server = await serve({}, similarity=similarity)
    want = [[SIMILARITIES[similarity](pooled(QUERY), pooled(it))] for it in DOCUMENTS]
    response = await score(server, **asked())
    np.testing.assert_allclose(found(response), want, rtol=1e-4, atol=1e-5)
    assert list(response.labels) == []
    pairs = [pb.TextPair(query=text(*it), document=text(*QUERY)) for it in DOCUMENTS]
    swapped = await score(server, pairs=pairs)
    np.testing.assert_allclose(found(swapped), want, rtol=1e-4, atol=1e-5)
    vectors = (await server.encode(*(text(*it) for it in DOCUMENTS), options=_options(pb.OUTPUT_KIND_CLS))).outputs[0]
    response = await score(server, query=text(*QUERY), document_vectors=vectors, top_k=2)
    order = np.argsort(-np.array(want)[:, 0].astype(np.float32).round(4), kind="stable")[:2]
    assert list(response.indices) == order.tolist()


def _options(kind: Any) -> pb.EncodeOptions:
    return pb.EncodeOptions(outputs=[pb.OutputSpec(kind=kind)])


async def test_a_multi_vector_model_ranks_by_maxsim(serve: Serve) -> None:
    late = {"multi_vector.onnx": tiny_heads.multi_vector_file()}
    parts: dict[str, Any] = {"multi_vector": multi_vector(), "pooling": manifest_pb2.POOLING_UNSPECIFIED}
    server = await serve(late, **parts)
    query, *documents = (expected_vectors(expected_rows([BEGIN, *it, END])) for it in (QUERY, *DOCUMENTS))
    want = [[(query @ it.T).max(axis=1).sum()] for it in documents]
    np.testing.assert_allclose(found(await score(server, **asked())), want, rtol=1e-4)
    encoded = await server.encode(*(text(*it) for it in DOCUMENTS), options=_options(pb.OUTPUT_KIND_MULTI_VECTOR))
    response = await score(server, query=text(*QUERY), document_vectors=encoded.outputs[0])
    np.testing.assert_allclose(found(response), want, rtol=1e-4)


async def test_a_sparse_model_ranks_by_dot_product(serve: Serve) -> None:
    splade = {"sparse.onnx": tiny_heads.sparse_file("max")}
    parts: dict[str, Any] = {"sparse": sparse(), "pooling": manifest_pb2.POOLING_UNSPECIFIED}
    server = await serve(splade, **parts)
    query, *documents = (expected_weights(expected_rows([BEGIN, *it, END]), "max") for it in (QUERY, *DOCUMENTS))
    want = [[query @ it] for it in documents]
    np.testing.assert_allclose(found(await score(server, **asked())), want, rtol=1e-4)
    encoded = await server.encode(*(text(*it) for it in DOCUMENTS), options=_options(pb.OUTPUT_KIND_SPARSE))
    response = await score(server, query=text(*QUERY), document_vectors=encoded.outputs[0])
    np.testing.assert_allclose(found(response), want, rtol=1e-4)


# Refused requests and bounds

CROSS_ENCODER: list[tuple[dict[str, Any], str]] = [
    ({"query": "w5"}, "documents: must hold at least 1 sequence; was empty"),
    ({"query": "w5", "documents": ["w6"], "texts": ["w6"]}, "texts: must not be set together with documents"),
    ({"query": "w5", "texts": ["w6"]}, "query: must be empty with texts"),
    ({"texts": ["w6"], "max_document_tokens": 3}, "max_document_tokens: must be 0 with texts"),
    (
        {"query": "w5", "document_vectors": pb.RaggedTensor(), "max_document_tokens": 3},
        "max_document_tokens: must be 0 with document_vectors; it is for documents and pairs; was 3",
    ),
    (asked([[7]] * 2049), "documents: must hold at most 2048 sequences (max_request_sequences); was 2049"),
    (asked(activation=9), "activation: must be a value of Activation, 0 to 3; was 9"),
    (asked(truncation=9), "truncation: must be a value of Truncation, 0 to 2; was 9"),
    (asked(prompt_name="none"), "prompt_name: model tiny has no prompt 'none'; it has none"),
    (asked(activation=pb.ACTIVATION_SOFTMAX), "activation: must not be softmax, because all scores of model"),
    (
        {
            "query": "w5",
            "document_vectors": pb.RaggedTensor(kind="OUTPUT_KIND_MEAN", width=1, lengths=[1], data=b"\0" * 4),
        },
        "document_vectors: must be empty, because model tiny compares texts and not vectors; send documents",
    ),
    ({"query": "w5 " * 400_000, "documents": ["w6"]}, "query: must be at most 262144 bytes (max_text_bytes)"),
    ({"query": "w5", "documents": ["w6", "w7 " * 400_000]}, "documents[1]: must be at most 262144 bytes"),
]
DENSE: list[tuple[dict[str, Any], str]] = [
    ({"texts": ["w5"]}, "texts: model tiny is not a classifier; send a query and documents, or pairs"),
    (asked(activation=pb.ACTIVATION_NONE), "activation: must not be set, because the scores of model tiny are"),
    (asked(prompt_name=""), "prompt_name: must not be set, because model tiny uses the prompts of its tasks"),
    (
        {
            "query": "w5",
            "document_vectors": pb.RaggedTensor(kind="OUTPUT_KIND_MEAN", width=3, lengths=[1], data=b"\0" * 12),
        },
        "document_vectors: must have rows of 8 numbers for model tiny; was 3",
    ),
    (
        {
            "query": "w5",
            "document_vectors": pb.RaggedTensor(kind="OUTPUT_KIND_MULTI_VECTOR", width=8, lengths=[1], data=b"\0" * 32),
        },
        "document_vectors: must have rows of OUTPUT_KIND_MODEL_POOLING for model tiny; was OUTPUT_KIND_MULTI_VECTOR",
    ),
    (
        {
            "query": "w5",
            "document_vectors": pb.RaggedTensor(kind="OUTPUT_KIND_MEAN", width=8, lengths=[1, 1], data=b"\0" * 32),
        },
        "document_vectors.data: must have 64 bytes, for 2 rows of 8 numbers; was 32",
    ),
    (
        {
            "query": "w5",
            "document_vectors": pb.RaggedTensor(kind="OUTPUT_KIND_MEAN", width=8, lengths=[2], data=b"\0" * 64),
        },
        "document_vectors.lengths[0]: must be 1 for this kind; was 2",
    ),
    (
        {
            "query": "w5",
            "document_vectors": pb.RaggedTensor(kind="OUTPUT_KIND_MEAN", width=1, lengths=[1], data=b"\0\0\xc0\x7f"),
        },
        "document_vectors.data: must be finite; was nan in row 0, column 0",
    ),
    (
        {
            "query": "w5",
            "document_vectors": pb.RaggedTensor(
                kind="OUTPUT_KIND_MEAN", width=8, lengths=[1], data=b"", data_type="DATA_TYPE_INT8"
            ),
        },
        "document_vectors.data_type: DATA_TYPE_INT8 is only for outputs of Encode",
    ),
]


async def test_wrong_requests_name_the_field(shared: FakeServer) -> None:
    for fields, message in CROSS_ENCODER:
        assert (await refused(shared, **fields)).text.startswith(message)


async def test_wrong_requests_to_a_dense_model_name_the_field(serve: Serve) -> None:
    server = await serve({})
    for fields, message in DENSE:
        assert (await refused(server, **fields)).text.startswith(message)


@pytest.mark.parametrize("is_dense", [False, True])
async def test_an_error_of_a_query_names_the_query(serve: Serve, *, is_dense: bool) -> None:
    """For a query of a pair, the error has the index of the pair.

    A dense model computes each different query once, so the index of the computed query is not the index of the pair.
    """
    server = await serve({}) if is_dense else await serve(FILES, scores=scores())
    long, problem = "w5 " * 400_000, "query: must be at most 262144 bytes (max_text_bytes)"
    assert (await refused(server, query=long, documents=["w6", "w7"])).text.startswith(problem)
    pairs = [pb.TextPair(query=it, document="w6") for it in ("w5", "w5", "w5", long, long)]
    assert (await refused(server, pairs=pairs)).text.startswith(f"pairs[3].{problem}")


async def test_a_query_whose_vector_is_not_finite_is_named(start_server: StartServer) -> None:
    server = await start_server(FakeEngine(fake_server.D_MODEL, nan_id=5))  # "brave" has the id 5
    problem = "the model's result for this input has NaN or infinity"
    pairs = [pb.TextPair(query=it, document="hello") for it in ("hello", "hello", "brave", "brave")]
    for fields, field in (
        ({"query": "brave", "documents": ["hello"]}, "query"),
        ({"query": "hello", "documents": ["hello", "brave"]}, "documents[1]"),
        ({"pairs": pairs}, "pairs[2].query"),
    ):
        failed = await refusal(score(server, **fields))
        assert (failed.reason, failed.text) == ("INFERENCE_FAILED", f"{field}: {problem}")


async def test_a_long_query_of_a_dense_model_is_refused_without_truncation(serve: Serve) -> None:
    server = await serve({}, similarity="dot")
    long, problem = text(*[5] * LONGEST), f"query: must be at most {LONGEST} tokens"
    refuse = pb.TRUNCATION_REFUSE
    assert (await refused(server, query=long, documents=["w6"], truncation=refuse)).text.startswith(problem)
    vectors = pb.RaggedTensor(kind="OUTPUT_KIND_MEAN", width=8, lengths=[1], data=bytes(32))
    assert (await refused(server, query=long, document_vectors=vectors, truncation=refuse)).text.startswith(problem)
    pairs = [pb.TextPair(query=it, document="w6") for it in ("w5", "w5", long, "w6", long)]
    failed = await refused(server, pairs=pairs, truncation=refuse)
    assert failed.text.startswith(f"pairs[2].{problem}")
    assert f"pairs[4].{problem}" not in failed.text


async def test_a_model_of_unknown_pooling_has_no_scores(serve: Serve) -> None:
    server = await serve({}, pooling=manifest_pb2.POOLING_UNSPECIFIED)
    failed = await refused(server, **asked())
    assert failed.text.startswith(
        "model: tiny cannot compute scores: the model is neither a cross-encoder nor a classifier"
    )


async def test_a_score_that_is_not_finite_fails_alone(serve: Serve) -> None:
    infinite = np.full((D_MODEL, 1), 3e38, np.float32)
    server = await serve({"scores.onnx": scores_file(table=infinite)}, scores=scores())
    failed = await refusal(score(server, **asked([[7]])))
    assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "INFERENCE_FAILED")
    assert failed.text == "documents[0]: the model's result for this input has NaN or infinity"


async def test_ten_thousand_labels(serve: Serve) -> None:
    names = [f"label {i}" for i in range(10_000)]
    server = await serve({"scores.onnx": scores_file(10_000)}, scores=scores(labels=names))
    response = await score(server, texts=[text(7), text(8)])
    assert (found(response).shape, len(response.labels)) == ((2, 10_000), 10_000)
    failed = await refused(server, texts=[text(7)] * 2048)
    assert failed.reason == "RESPONSE_TOO_LARGE"
