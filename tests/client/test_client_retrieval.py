"""Tests of `embed` with tasks and kinds: requests, results of each kind, missing kinds, and scores."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_encoder import Caller, FakeEncoder
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from encserve_client import (
    InvalidInputError,
    InvalidRequestError,
    ModelInfo,
    Output,
    ProtocolError,
    SparseVector,
    maxsim,
    rank,
)
from encserve_client._logic.answers import decode_response, model_info
from encserve_client.options import Options
from encserve_proto.v1 import encoder_pb2 as pb

TEXTS = ["a word or two", "", "longest of them"]
TASKS = [
    pb.TaskInfo(task=pb.TASK_QUERY, prompt_name="q", max_tokens=32, min_tokens=32),
    pb.TaskInfo(task=pb.TASK_DOCUMENT, max_tokens=60),
]
LATE = pb.ModelInfo(multi_vector_width=8, multi_vector_similarity="meanmaxsim", tasks=TASKS)
SPARSE = pb.ModelInfo(sparse_width=100)


@pytest.mark.parametrize("task", ["query", "document"])
async def test_one_vector_per_text(caller: Caller, service: FakeEncoder, task: str) -> None:
    service.model_info = pb.ModelInfo(tasks=TASKS)
    client = caller.connect()
    vectors = await caller(client.embed, TEXTS, task=task, prompt_name="p", dimensions=3, truncate=True)
    assert vectors.shape == (3, 8)
    (request,) = service.requests
    asked = request.options
    assert asked.task == pb.Task.Value(f"TASK_{task.upper()}")
    assert (asked.prompt_name, asked.truncation) == ("p", pb.TRUNCATION_END)
    assert [(it.kind, it.dimensions) for it in asked.outputs] == [(pb.OUTPUT_KIND_MODEL_POOLING, 3)]


async def test_the_vectors_of_maxsim(caller: Caller, service: FakeEncoder) -> None:
    service.model_info = LATE
    client = caller.connect()
    got = await caller(client.embed, TEXTS, kind="multi_vector", pool_factor=2.5)
    assert [its.shape for its in got] == [(4, 8), (0, 8), (3, 8)]
    assert service.requests[0].options.outputs[0].pool_factor == 2.5
    result = await caller(client.run, TEXTS, outputs=["multi_vector", "tokens"], task="document")
    assert [its.tolist() for its in result.outputs[0].token_indices()] == [[1, 2, 3, 4], [], [1, 2, 3]]
    assert result.outputs[1].token_indices() == [None, None, None]


async def test_sparse_vectors(caller: Caller, service: FakeEncoder) -> None:
    service.model_info = SPARSE
    client = caller.connect()
    got = await caller(client.embed, TEXTS, kind="sparse", max_active_dims=5)
    assert [(its.indices.tolist(), its.values.tolist(), its.width) for its in got] == [
        ([3, 4], [1.5, 2.0], 100),
        ([], [], 100),
        ([4, 7], [2.0, 3.5], 100),
    ]
    assert got[2].dense()[[4, 5, 7]].tolist() == [2.0, 0.0, 3.5]
    assert service.requests[0].options.outputs[0].max_active_dims == 5
    assert await caller(client.embed, [], kind="sparse") == []
    (first, *_) = await caller.all_of(client, TEXTS, kind="sparse")
    assert (first.indices.tolist(), first.width) == ([3, 4], 100)


async def test_the_caller_can_choose_a_kind(caller: Caller, service: FakeEncoder) -> None:
    service.model_info = pb.ModelInfo(sparse_width=100, multi_vector_width=8, pooling=pb.OUTPUT_KIND_CLS, tasks=TASKS)
    client = caller.connect()
    assert (await caller(client.embed, TEXTS)).shape == (3, 8)
    assert len(await caller(client.embed, TEXTS, kind="multi_vector")) == 3
    assert isinstance((await caller(client.embed, TEXTS, kind="sparse"))[0], SparseVector)
    info = await caller(client.model)
    assert info.kinds == ("vector", "multi_vector", "sparse")
    tasks = info.tasks
    assert (tasks["query"].prompt_name, tasks["query"].min_tokens, tasks["document"].max_tokens) == ("q", 32, 60)


@pytest.mark.parametrize(
    ("lacking", "options", "problem"),
    [
        ({}, {"kind": "sparse"}, "kind 'sparse': model tiny has the kinds 'vector'"),
        ({}, {"kind": "multi_vector"}, "kind 'multi_vector': model tiny has the kinds 'vector'"),
        (
            {"sparse_width": 9},
            {},
            "kind: model tiny was not trained for single vectors; it has the kinds 'sparse'. Give one of "
            "these kinds, or a pooling such as 'mean'",
        ),
        (
            {"labels": ["good", "bad"]},
            {},
            "kind: model tiny was not trained for single vectors; it computes scores: use rank or score. Or give a "
            "pooling such as 'mean'",
        ),
        ({}, {"prompt_name": "x"}, "prompt_name 'x': model tiny has the prompts 'p', 'q'"),
        ({}, {"task": "query"}, "task 'query': model tiny has no tasks"),
        ({}, {"dimensions": 9}, "dimensions must be at most 8, the width of model tiny; was 9"),
        (
            {"default_dimensions": 4},
            {"dimensions": 9},
            "dimensions must be at most 8, the width of model tiny; was 9",
        ),
        (
            {"vector_width": 12},
            {"pooling": "mean", "dimensions": 9},
            "dimensions must be at most 8, the width of model tiny; was 9",
        ),
        (
            {"multi_vector_width": 4},
            {"kind": "multi_vector", "dimensions": 5},
            "dimensions must be at most 4, the width of model tiny; was 5",
        ),
        (
            {"sparse_width": 9},
            {"kind": "sparse", "dimensions": 2},
            "dimensions must not be given for the kind 'sparse': weights over the vocabulary are not in order",
        ),
        (
            {"sparse_width": 9},
            {"kind": "sparse", "dtype": "int8"},
            "dtype 'int8': 'sparse' has the types 'float32', 'float16'",
        ),
        (
            {"multi_vector_width": 4},
            {"kind": "multi_vector", "dtype": "binary"},
            "dtype 'binary': 'multi_vector' has the types 'float32', 'float16', 'int8'",
        ),
    ],
)
async def test_the_model_lacks_what_the_call_asks_for(
    caller: Caller, service: FakeEncoder, lacking: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    """The error names an argument of `embed`, and lists the allowed values. The client sends no input."""
    service.model_info = pb.ModelInfo(**lacking)
    client = caller.connect()
    with pytest.raises(InvalidRequestError) as caught:
        await caller(client.embed, TEXTS, **options)
    assert str(caught.value) == problem
    with pytest.raises(InvalidRequestError):
        await caller.all_of(client, TEXTS, **{"kind": "vector", **options})
    assert not service.requests


async def test_a_kind_that_the_model_gets_later_is_noticed(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect()
    await caller(client.embed, TEXTS)
    service.model_info = SPARSE
    assert len(await caller(client.embed, TEXTS, kind="sparse")) == 3


@pytest.mark.parametrize("count", [0, 1])
def test_indices_of_the_wrong_length(count: int) -> None:
    tensor = pb.RaggedTensor(
        kind=pb.OUTPUT_KIND_SPARSE,
        data_type=pb.DATA_TYPE_FLOAT32,
        width=1,
        lengths=[2],
        data=bytes(8),
        indices=bytes(4 * count),
    )
    response = pb.EncodeResponse(outputs=[tensor], sequences=[pb.SequenceInfo(token_count=3)])
    with pytest.raises(ProtocolError, match=rf"must have 8 outputs\[0\].indices; had {4 * count}"):
        decode_response(response, Options((Output("sparse"),)), 1, describe=False)


Floats = npt.NDArray[np.float32]
SETS = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(3)), elements=st.integers(-8, 8))


@given(SETS, SETS)
def test_maxsim_equals_the_definition(query: Floats, document: Floats) -> None:
    want = sum(max(float(q @ d) for d in document) for q in query)
    assert maxsim(query, document) == pytest.approx(want)
    assert maxsim(query, document, "meanmaxsim") == pytest.approx(want / len(query))


@given(SETS, st.lists(SETS, min_size=1, max_size=5))
def test_a_ranking_has_all_documents_with_the_best_first(query: Floats, documents: list[Floats]) -> None:
    ranked = rank(query, documents)
    assert sorted(index for index, _ in ranked) == list(range(len(documents)))
    scores = [score for _, score in ranked]
    assert scores == sorted(scores, reverse=True)
    assert all(score == maxsim(query, documents[index]) for index, score in ranked)


def sparse(*weights: float) -> SparseVector:
    """Make a sparse vector. `weights` has the weight of every index, and may contain zeros."""
    dense = np.array(weights, np.float32)
    return SparseVector(np.flatnonzero(dense).astype(np.uint32), dense[dense != 0], dense.size)


def test_each_kind_has_a_default_similarity() -> None:
    """The default is cosine for single vectors, so a vector's length has no effect.

    The default for sparse weights is the dot product.
    """
    assert rank(np.array([3, 4.0]), [np.array([9, 0.0]), np.array([0.3, 0.4])]) == [(1, 1.0), (0, pytest.approx(0.6))]
    assert rank(sparse(2, 0, 1), [sparse(0, 9, 0), sparse(1, 0, 3), sparse(0, 0, 6)]) == [(2, 6.0), (1, 5.0), (0, 0.0)]


ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.just(4)), elements=st.integers(-8, 8))
BY_DEFINITION: dict[Any, Callable[[Floats, Floats], float]] = {
    "cosine": lambda q, d: float(q @ d) / max(float(np.linalg.norm(q) * np.linalg.norm(d)), 1e-9),
    "dot": lambda q, d: float(q @ d),
    "euclidean": lambda q, d: -float(np.linalg.norm(q - d)),
    "manhattan": lambda q, d: -float(np.abs(q - d).sum()),
}


@given(ROWS, st.sampled_from(sorted(BY_DEFINITION)), st.booleans())
def test_similarities_equal_their_definitions(rows: Floats, by: Any, is_sparse: bool) -> None:
    """Row 0 is the query. The documents are an array, a list of arrays, or sparse vectors; the scores are the same."""
    query, want = rows[0], [BY_DEFINITION[by](rows[0], row) for row in rows]
    rankings = [rank(query, rows, by), rank(query, list(rows), by), rank(query.astype(np.float16), rows, by)]
    if is_sparse:
        rankings = [rank(sparse(*query), [sparse(*row) for row in rows], by)]
    for ranked in rankings:
        assert [score for _, score in sorted(ranked)] == pytest.approx(want, rel=1e-5, abs=1e-5)
        assert ranked == sorted(ranked, key=lambda pair: -pair[1])


def test_packed_bits_are_ranked_by_hamming_distance() -> None:
    bits = np.random.default_rng(0).integers(0, 2, (50, 20), np.uint8)
    packed = np.packbits(bits, axis=1)
    want = [-int((bits[0] != row).sum()) for row in bits]
    for documents in (packed, list(packed)):
        ranked = rank(packed[0], documents)
        assert [score for _, score in sorted(ranked)] == want
        assert ranked[0] == (0, 0.0)
    assert rank(packed[0], packed, model(similarity="cosine")) == ranked


def test_int8_rows_do_not_overflow() -> None:
    rows = np.array([[-128] * 64, [127] * 64], np.int8)
    assert rank(rows[0], rows, "dot") == [(0, 128.0 * 128 * 64), (1, -128.0 * 127 * 64)]


def model(**fields: Any) -> ModelInfo:
    return model_info(pb.ModelInfo(d_model=3, **fields))


def test_a_model_selects_the_trained_similarity() -> None:
    """A model's similarity applies only to the kind of vectors that the model was trained for."""
    long, near = np.array([4, 3.0]), np.array([1, 0.0])
    for by, best in (("dot", 0), ("cosine", 1), ("euclidean", 1), ("", 1)):
        info = model(pooling=pb.OUTPUT_KIND_MEAN, similarity=by)
        assert rank(near, [long, near], info)[0][0] == best
    late = model(multi_vector_width=2, multi_vector_similarity="meanmaxsim", similarity="dot")
    assert rank(np.eye(2), [np.eye(2)], late) == [(0, 1.0)]
    assert rank(near, [long, near], late)[0][0] == 1
    weights = model(sparse_width=2, similarity="cosine")
    assert rank(sparse(1, 0), [sparse(4, 3), sparse(1, 0)], weights)[0][0] == 1
    unknown = model(pooling=pb.OUTPUT_KIND_MEAN, similarity="hyperbolic")
    with pytest.raises(InvalidInputError, match="similarity must be 'cosine' or .* for a vector, .*; was 'hyperbolic'"):
        rank(near, [long], unknown)


@pytest.mark.parametrize("documents", [np.ones((5, 3)), [np.ones(3)] * 5, [np.ones((2, 3))] * 5, [sparse(1, 0)] * 5])
def test_top_k_returns_the_best_documents(documents: Any) -> None:
    """If all documents have equal scores, the first documents are returned."""
    query = documents[0]
    assert [index for index, _ in rank(query, documents, top_k=3)] == [0, 1, 2]
    assert len(rank(query, documents, top_k=9)) == 5
    assert rank(query, documents[:0], top_k=3) == []


def test_many_documents_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block size limits the extra memory. The result does not depend on the block size."""
    rng = np.random.default_rng(0)
    rows = rng.integers(-4, 5, (40, 6)).astype(np.float32)
    late = [rows[:n] for n in rng.integers(0, 9, 40)]
    weights = [sparse(*(row * (row > 2))) for row in rows]
    calls: list[Callable[[], Any]] = [
        lambda: rank(rows[0], rows, "dot"),
        lambda: rank(rows[:3], late),
        lambda: rank(weights[0], weights),
    ]
    whole = [call() for call in calls]
    for numbers in (1, 20, 100):
        monkeypatch.setattr("encserve_client.scoring._BLOCK_NUMBERS", numbers)
        assert [call() for call in calls] == whole


def test_a_document_without_vectors_comes_last() -> None:
    query, nothing = np.ones((2, 3), np.float32), np.empty((0, 3), np.float32)
    assert maxsim(query, nothing) == -1e9
    assert rank(query, [nothing, -query])[-1][0] == 0


def test_a_model_without_the_kind_of_the_query_is_refused() -> None:
    late = model_info(pb.ModelInfo(name="late", d_model=3, multi_vector_width=3, multi_vector_similarity="maxsim"))
    weights = SparseVector(np.array([1], np.uint32), np.ones(1, np.float32), 9)
    with pytest.raises(
        InvalidInputError,
        match="similarity must be the model of the query; model late does not return sparse weights",
    ):
        rank(weights, [weights], late)


NO_WEIGHTS = SparseVector(np.empty(0, np.uint32), np.empty(0, np.float32), 9)
BITS = np.ones(3, np.uint8)


@pytest.mark.parametrize(
    ("query", "documents", "options", "problem"),
    [
        (np.ones((2, 3)), [np.ones((2, 4))], {}, r"documents\[0\] must have 3 numbers, as query has; had 4"),
        (np.empty((0, 3)), [np.ones((2, 3))], {}, "query must have at least 1 vector"),
        (np.ones(3), [np.ones((2, 3))], {}, r"documents\[0\] must be a vector, as query is; was vectors for MaxSim"),
        (
            np.ones((1, 3)),
            np.ones((2, 3)),
            {},
            "must be vectors for MaxSim, as query is; was a vector; for one query embed a str, not a list",
        ),
        (np.ones(3), np.ones((2, 4)), {}, "a row of documents must have 3 numbers, as query has; had 4"),
        (np.ones(3), [np.ones(3), np.ones(4)], {}, r"documents\[1\] must have 3 numbers"),
        (NO_WEIGHTS, [np.ones(3)], {}, r"documents\[0\] must be sparse weights, as query is; was a vector"),
        (BITS, [np.ones(3)], {}, r"documents\[0\] must be packed bits, as query is; was a vector"),
        (BITS, [BITS], {"similarity": "cosine"}, "similarity must be 'hamming' for packed bits, .*; was 'cosine'"),
        (np.ones(3), [np.ones(3)], {"similarity": "hamming"}, "'dot' or 'euclidean' or 'manhattan' for a vector"),
        (np.ones(3), [np.ones(3)], {"similarity": "maxsim"}, "was 'maxsim'"),
        (np.ones((2, 3)), [np.ones((2, 3))], {"similarity": "dot"}, "'maxsim' or 'meanmaxsim' for vectors for MaxSim"),
        (np.ones(3), [np.ones(3)], {"similarity": 5}, "was 5"),
        ([1.0], [np.ones(3)], {}, "query must be an array or a SparseVector; was list"),
        (np.array(["a"]), [np.ones(3)], {}, r"query must be a \(width,\) or .* array of numbers; was \(1,\) of <U1"),
        (np.ones((2, 2), np.uint8), [BITS], {}, r"query must be one vector of packed bits, \(bytes,\); was \(2, 2\)"),
        (np.ones(3), "a", {}, "documents must be a list or an array; was str"),
        (np.ones(3), None, {}, "documents must be a list or an array; was NoneType"),
        (np.ones(3), np.ones(3), {}, r"documents must be a list, or a \(documents, width\) array; was \(3,\)"),
        (
            np.ones(3),
            [np.ones(3), InvalidInputError("x")],
            {},
            r"documents\[1\] must be an array .*; was InvalidInputE",
        ),
        (np.ones(3), [np.ones(3)], {"top_k": 0}, "top_k must be >= 1; was 0"),
        (np.ones(3), [np.ones(3)], {"top_k": 1.5}, "top_k must be an int; was float"),
    ],
)
def test_wrong_arguments_of_rank_are_refused(query: Any, documents: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        rank(query, documents, **options)


def test_wrong_arguments_of_maxsim_are_refused() -> None:
    vectors = np.ones((2, 3), np.float32)
    for query, document, problem in (
        (NO_WEIGHTS, NO_WEIGHTS, r"query must be a \(n, width\) array of numbers; was sparse weights"),
        ([[1.0]], vectors, "query must be an array or a SparseVector; was list"),
        (vectors, NO_WEIGHTS, "document must be vectors for MaxSim, as query is; was sparse weights"),
    ):
        with pytest.raises(InvalidInputError, match=problem):
            maxsim(query, document)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="similarity must be 'maxsim' or 'meanmaxsim'; was 'cosine'"):
        maxsim(vectors, vectors, similarity="cosine")  # type: ignore[arg-type]
