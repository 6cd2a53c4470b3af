"""Tests of `rank`, `score` and `classify`: requests, results, splitting into messages, and errors."""

from typing import Any

import numpy as np
import pytest
from fake_encoder import Caller, FakeEncoder

from encserve_client import FingerprintError, InvalidInputError, InvalidRequestError, SpaceError, SparseVector
from encserve_proto.v1 import encoder_pb2 as pb

TEXTS = ["three", "a", "longest of them", "", "other"]


async def test_documents_are_ranked(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect()
    options = {"activation": "none", "prompt_name": "p", "truncate": False, "max_document_tokens": 9}
    best = await caller(client.rank, "query", TEXTS, top_k=3, **options)
    assert best == [(2, 15.0), (0, 5.0), (4, 5.0)]
    (request,) = service.score_requests
    assert (request.query, list(request.documents), request.top_k) == ("query", TEXTS, 3)
    assert (request.activation, request.prompt_name) == (pb.ACTIVATION_NONE, "p")
    assert (request.truncation, request.max_document_tokens) == (pb.TRUNCATION_REFUSE, 9)
    assert await caller(client.rank, "query", iter(TEXTS)) == [(2, 15.0), (0, 5.0), (4, 5.0), (1, 1.0), (3, 0.0)]
    assert service.score_requests[-1].truncation == pb.TRUNCATION_END
    assert await caller(client.rank, "query", []) == []
    assert len(service.score_requests) == 2


async def test_pairs_keep_their_order(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect()
    scores = await caller(client.score, [("q", text) for text in TEXTS])
    assert (scores.tolist(), scores.dtype) == ([5.0, 1.0, 15.0, 0.0, 5.0], np.float32)
    assert [(it.query, it.document) for it in service.score_requests[0].pairs] == [("q", text) for text in TEXTS]
    await caller(client.score, [("q", "")], max_document_tokens=2**32 - 1)
    assert service.score_requests[-1].max_document_tokens == 2**32 - 1
    assert (await caller(client.score, [])).shape == (0,)
    service.labels = ("no", "yes")
    assert (await caller(client.score, [("q", "ab")])).tolist() == [[2.0, 4.0]]


async def test_scores_are_of_the_expected_bundle(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect()
    assert (await caller(client.score, [("q", "ab")], expected_fingerprint="f" * 16)).tolist() == [2.0]
    assert service.score_requests[-1].expected_fingerprint == "f" * 16
    await caller(client.score, [("q", "ab")])
    assert service.score_requests[-1].expected_fingerprint == ""
    service.score_fingerprint = "e" * 16
    with pytest.raises(FingerprintError, match="f{16} is expected, but the answer has e{16}"):
        await caller(client.score, [("q", "ab")], expected_fingerprint="f" * 16)
    with pytest.raises(InvalidInputError, match="expected_fingerprint must be a str or None"):
        await caller(client.score, [("q", "ab")], expected_fingerprint=1)


async def test_the_tokens_of_a_call_are_reported(caller: Caller, service: FakeEncoder) -> None:
    """The fake service counts each character of a query and a document as one token."""
    service.max_request_sequences = 2
    client, found = caller.connect(), list[int]()
    await caller(client.score, [("q", text) for text in TEXTS], on_tokens=found.append)
    assert found == [sum(1 + len(text) for text in TEXTS)]
    with pytest.raises(InvalidInputError, match="on_tokens must be a function or None; was int"):
        await caller(client.score, [("q", "ab")], on_tokens=1)


async def test_texts_are_classified(caller: Caller, service: FakeEncoder) -> None:
    service.labels = ("no", "yes")
    client = caller.connect()
    first, second = await caller(client.classify, ["ab", "c"])
    assert (first.label, first.score, first.scores.tolist()) == ("yes", 4.0, [2.0, 4.0])
    assert (second.score, second.labels) == (2.0, ("no", "yes"))
    assert (await caller(client.classify, "ab")).label == "yes"
    assert await caller(client.classify, []) == []


async def test_many_documents_go_in_several_messages(caller: Caller, service: FakeEncoder) -> None:
    service.max_request_sequences = 4
    client = caller.connect()
    texts = ["x" * (i * 7 % 30) for i in range(30)]
    want = sorted(((i, float(len(text))) for i, text in enumerate(texts)), key=lambda it: (-it[1], it[0]))
    assert await caller(client.rank, "q", texts) == want
    assert await caller(client.rank, "q", texts, top_k=6) == want[:6]
    assert (await caller(client.score, [("q", text) for text in texts])).tolist() == [float(len(it)) for it in texts]
    assert max(len(it.documents) for it in service.score_requests) == 4
    assert {it.priority for it in service.score_requests} == {pb.PRIORITY_BULK}


async def test_a_message_that_is_too_large_is_split(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect()
    await caller(client.model)  # the client stores the old limit
    service.max_request_sequences = 3
    assert await caller(client.rank, "q", TEXTS) == [(2, 15.0), (0, 5.0), (4, 5.0), (1, 1.0), (3, 0.0)]


async def test_vectors_are_ranked(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect()
    await caller(client.rank, "q", np.ones((3, 8), np.float32))
    tensor = service.score_requests[-1].document_vectors
    assert (tensor.kind, tensor.width, list(tensor.lengths)) == (pb.OUTPUT_KIND_MODEL_POOLING, 8, [1, 1, 1])
    best = await caller(client.rank, "q", [np.ones((n, 4), np.float16) for n in (2, 3)])
    tensor = service.score_requests[-1].document_vectors
    assert (tensor.kind, tensor.data_type) == (pb.OUTPUT_KIND_MULTI_VECTOR, pb.DATA_TYPE_FLOAT16)
    assert (list(tensor.lengths), len(tensor.data), best) == ([2, 3], 40, [(1, 3.0), (0, 2.0)])
    sparse = [SparseVector(np.array([1, 5], np.uint32), np.array([0.5, 2], np.float32), 100)]
    await caller(client.rank, "q", sparse)
    tensor = service.score_requests[-1].document_vectors
    assert (tensor.kind, tensor.width, list(tensor.lengths)) == (pb.OUTPUT_KIND_SPARSE, 1, [2])
    assert np.frombuffer(tensor.indices, "<u4").tolist() == [1, 5]


def _kinds() -> dict[str, Any]:
    """Return 9 documents of each kind of vectors. Document i has i + 1 rows or values, except for dense vectors."""
    ranges = [np.arange(n, dtype=np.float32) for n in range(1, 10)]
    return {
        "dense": np.arange(9 * 2, dtype=np.float32).reshape(9, 2),
        "late": [np.stack([it] * 2, axis=1).astype(np.float16) for it in ranges],
        "sparse": [SparseVector(it.astype(np.uint32), it, 100) for it in ranges],
    }


def _sorted(arrays: list[Any]) -> list[Any]:
    return sorted(arrays, key=lambda it: (len(it), it.tolist()))


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("kind", ["dense", "late", "sparse"])
async def test_many_vectors_go_in_several_messages(
    caller: Caller, service: FakeEncoder, kind: str, is_known: bool
) -> None:
    """The client splits a call by the server's limit on inputs. If the limit gets smaller, the client splits again."""
    client, documents = caller.connect(), _kinds()[kind]
    if not is_known:
        await caller(client.model)
    service.max_request_sequences = 2
    sizes = [1] * 9 if kind == "dense" else range(1, 10)
    want = sorted(((i, float(size)) for i, size in enumerate(sizes)), key=lambda it: (-it[1], it[0]))
    assert await caller(client.rank, "q", documents) == want
    sent = [it.document_vectors for it in service.score_requests if len(it.document_vectors.lengths) <= 2]
    rows, indices = [], []
    for tensor in sent:
        data = np.frombuffer(tensor.data, "<f2" if kind == "late" else "<f4").reshape(-1, tensor.width)
        ends = np.cumsum(tensor.lengths)
        assert ends[-1] == len(data)
        rows += np.split(data, ends[:-1])
        indices += np.split(np.frombuffer(tensor.indices, "<u4"), ends[:-1])
    assert len(rows) == 9
    want_rows = [it.values[:, None] if kind == "sparse" else np.atleast_2d(it) for it in documents]
    for found, expected in zip(_sorted(rows), _sorted(want_rows), strict=True):
        np.testing.assert_array_equal(found, expected)
    if kind == "sparse":
        for found, expected in zip(_sorted(indices), _sorted([it.indices for it in documents]), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert await caller(client.rank, "q", documents, top_k=3) == want[:3]


@pytest.mark.parametrize("width", [8, 768])
async def test_vectors_over_the_limits_of_a_request_are_split(caller: Caller, service: FakeEncoder, width: int) -> None:
    service.max_request_sequences, service.max_message_bytes = 2048, 4 * 2**20
    client = caller.connect()
    vectors = np.ones((2500, width), np.float32)  # 7.3 MiB with 768 numbers in a row
    assert await caller(client.rank, "q", vectors) == [(i, 1.0) for i in range(2500)]
    assert len(service.score_requests) == 2
    assert max(it.ByteSize() for it in service.score_requests) <= 4 * 2**20
    assert sum(len(it.document_vectors.lengths) for it in service.score_requests) == 2500


async def test_the_width_of_sparse_vectors_is_checked(caller: Caller, service: FakeEncoder) -> None:
    service.model_info = pb.ModelInfo(sparse_width=100)
    client = caller.connect()
    vectors = [SparseVector(np.array([1], np.uint32), np.ones(1, np.float32), width) for width in (100, 101)]
    message = r"documents\[1\] must have the width 100 of model \w+; was 101"
    with pytest.raises(InvalidInputError, match=message):
        await caller(client.rank, "q", vectors)
    assert service.score_requests == []
    assert await caller(client.rank, "q", vectors[:1]) == [(0, 1.0)]


async def test_an_error_has_the_index_of_the_callers_document(caller: Caller, service: FakeEncoder) -> None:
    service.max_request_sequences = 2
    client = caller.connect()
    with pytest.raises(InvalidRequestError, match=r"^documents\[3\]: is too long") as raised:
        await caller(client.rank, "q", [*TEXTS[:3], "refused", "x"])
    assert (raised.value.index, raised.value.field) == (3, "documents[3]")
    with pytest.raises(InvalidRequestError, match=r"^pairs\[1\]\.document: is too long") as raised:
        await caller(client.score, [("q", "a"), ("q", "refused")])
    assert (raised.value.index, raised.value.field) == (1, "pairs[1].document")


WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("rank", (5, ["a"]), {}, "query must be a text; was int"),
    ("rank", ("q", "a"), {}, "documents must be a list of texts, or a list of vectors; was str"),
    (
        "rank",
        ("q", {0: np.ones(2)}.values()),
        {},
        "documents must be a list of texts, or a list of vectors; was dict_values of",
    ),
    ("rank", ("q", ["a", 5]), {}, r"documents\[1\] must be a text; was int"),
    ("rank", ("q", ["a"]), {"top_k": 0}, "top_k must be from 1 to 4,294,967,295; was 0"),
    ("rank", ("q", ["a"]), {"top_k": 2**32}, "top_k must be from 1 to 4,294,967,295; was 4294967296"),
    ("score", ([("q", "a")],), {"max_document_tokens": 0}, "max_document_tokens must be from 1 to 4,294,967,295"),
    ("rank", ("q", ["a"]), {"activation": "tanh"}, "activation must be one of 'none', 'sigmoid', 'softmax'"),
    ("rank", ("q", ["\ud800"]), {}, r"documents\[0\] must be valid Unicode"),
    *(
        (
            "rank",
            ("q", vectors),
            {"max_document_tokens": 9},
            "max_document_tokens must be None for documents that are vectors",
        )
        for vectors in (np.ones((2, 3), np.float32), [np.ones((2, 3), np.float32)])
    ),
    ("rank", ("q", np.ones((2, 3), np.int32)), {}, r"documents\[0\] must be float32 or float16 rows"),
    ("score", (["ab"],), {}, r"pairs\[0\] must be a \(query, document\) pair of texts; was 'ab'"),
    ("score", ("ab",), {}, r"pairs must be a list of \(query, document\) pairs; was str"),
    ("classify", ([5],), {}, r"texts\[0\] must be a text; was int"),
]


@pytest.mark.parametrize(("method", "arguments", "options", "message"), WRONG)
async def test_wrong_arguments(
    caller: Caller, service: FakeEncoder, method: str, arguments: Any, options: Any, message: str
) -> None:
    client = caller.connect()
    with pytest.raises(InvalidInputError, match=message):
        await caller(getattr(client, method), *arguments, **options)
    assert service.score_requests == []


async def test_the_expected_space_is_checked(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect(expected_space_id="s3-" + "0" * 32)
    with pytest.raises(SpaceError):
        await caller(client.rank, "q", TEXTS)
    assert service.score_requests[0].expected_space_id == "s3-" + "0" * 32


async def test_the_description_of_a_model_has_labels(caller: Caller, service: FakeEncoder) -> None:
    service.model_info = pb.ModelInfo(
        score_method=pb.SCORE_METHOD_LABELS, labels=["a", "b"], activation=pb.ACTIVATION_SOFTMAX, takes_pairs_only=True
    )
    info = await caller(caller.connect().model)
    assert (info.score_method, info.labels, info.activation) == ("labels", ("a", "b"), "softmax")
    assert info.takes_pairs_only
