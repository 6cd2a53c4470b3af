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

from encserve_client import InvalidInputError, InvalidRequestError, Output, ProtocolError, SparseVector, maxsim, rank
from encserve_client._logic.answers import decode_response
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
async def test_one_vector_each(caller: Caller, service: FakeEncoder, task: str) -> None:
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


async def test_a_kind_of_several_can_be_chosen(caller: Caller, service: FakeEncoder) -> None:
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
        ({}, {"kind": "sparse"}, "kind='sparse': model tiny has the kinds 'vector'"),
        ({}, {"kind": "multi_vector"}, "kind='multi_vector': model tiny has the kinds 'vector'"),
        (
            {"sparse_width": 9},
            {},
            "pooling='model': model tiny does not say how it was trained to pool. It has the kinds 'sparse'; name one "
            "of these kinds, or a pooling such as 'mean'",
        ),
        ({}, {"prompt_name": "x"}, "prompt_name='x': model tiny has the prompts 'p', 'q'"),
        ({}, {"task": "query"}, "task='query': model tiny has no tasks"),
    ],
)
async def test_the_model_lacks_what_the_call_asks_for(
    caller: Caller, service: FakeEncoder, lacking: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    """The error is in the words of `embed`, and lists what the model has. No input is sent."""
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


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "dense"}, "kind must be one of 'vector', 'multi_vector', 'sparse'; was 'dense'"),
        ({"kind": "tokens"}, "kind must be one of 'vector', 'multi_vector', 'sparse'; was 'tokens'"),
        ({"kind": "sparse", "pooling": "mean"}, "pooling='mean' is for kind='vector'; leave pooling out with kind='s"),
        ({"max_active_dims": 0}, "max_active_dims must be >= 1; was 0"),
        ({"pool_factor": 0.5}, "pool_factor must be >= 1; was 0.5"),
        ({"dimensions": -1}, "dimensions must be >= 1; was -1"),
    ],
)
async def test_what_no_server_takes(
    caller: Caller, service: FakeEncoder, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        await caller(caller.connect().embed, TEXTS, **options)
    assert not service.requests


def test_a_task_that_there_is_not() -> None:
    with pytest.raises(InvalidInputError, match="task must be one of 'query', 'document'; was 'passage'"):
        Options(task="passage")  # type: ignore[arg-type]


def test_indices_that_do_not_fit() -> None:
    tensor = pb.RaggedTensor(
        kind=pb.OUTPUT_KIND_SPARSE,
        data_type=pb.DATA_TYPE_FLOAT32,
        width=1,
        lengths=[2],
        data=bytes(8),
        indices=bytes(4),
    )
    response = pb.EncodeResponse(outputs=[tensor], sequences=[pb.SequenceInfo(token_count=3)])
    with pytest.raises(ProtocolError, match=r"must have 8 outputs\[0\].indices; had 4"):
        decode_response(response, Options((Output("sparse"),)), 1, describe=False)


Floats = npt.NDArray[np.float32]
SETS = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(3)), elements=st.integers(-8, 8))


@given(SETS, SETS)
def test_maxsim_by_its_definition(query: Floats, document: Floats) -> None:
    want = sum(max(float(q @ d) for d in document) for q in query)
    assert maxsim(query, document) == pytest.approx(want)
    assert maxsim(query, document, "meanmaxsim") == pytest.approx(want / len(query))


@given(SETS, st.lists(SETS, min_size=1, max_size=5))
def test_a_ranking_is_of_all_documents_the_best_first(query: Floats, documents: list[Floats]) -> None:
    ranked = rank(query, documents)
    assert sorted(index for index, _ in ranked) == list(range(len(documents)))
    scores = [score for _, score in ranked]
    assert scores == sorted(scores, reverse=True)
    assert all(score == maxsim(query, documents[index]) for index, score in ranked)


def test_sparse_and_single_vectors_are_ranked_by_their_dot_product() -> None:
    def sparse(**weights: float) -> SparseVector:
        places = [int(name[1:]) for name in weights]
        return SparseVector(np.array(places, np.uint32), np.array(list(weights.values()), np.float32), 10)

    assert rank(sparse(w1=2, w5=1), [sparse(w2=9), sparse(w1=1, w5=3), sparse(w5=6)]) == [(2, 6.0), (1, 5.0), (0, 0.0)]
    assert rank(np.array([1, 2.0]), [np.array([1, 0.0]), np.array([0, 3.0])]) == [(1, 6.0), (0, 1.0)]


def test_a_document_without_vectors_comes_last() -> None:
    query, nothing = np.ones((2, 3), np.float32), np.empty((0, 3), np.float32)
    assert maxsim(query, nothing) == -1e9
    assert rank(query, [nothing, -query])[-1][0] == 0


NO_WEIGHTS = SparseVector(np.empty(0, np.uint32), np.empty(0, np.float32), 9)


@pytest.mark.parametrize(
    ("query", "document", "problem"),
    [
        (np.ones((2, 3)), np.ones((2, 4)), r"were \(2, 3\) and \(2, 4\)"),
        (np.empty((0, 3)), np.ones((2, 3)), "query must have at least 1 vector"),
        (np.ones(3), np.ones((2, 3)), r"must be of one kind; were \(3,\) and \(2, 3\)"),
        (np.ones(3), np.ones(4), "equally wide"),
        (NO_WEIGHTS, np.ones(3), "were sparse and"),
    ],
)
def test_what_cannot_be_compared(query: Any, document: Any, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        rank(query, [document])


def test_maxsim_is_of_several_vectors_and_by_one_of_two_names() -> None:
    vectors = np.ones((2, 3), np.float32)
    for query, document in ((NO_WEIGHTS, NO_WEIGHTS), ([[1.0]], vectors), (vectors, NO_WEIGHTS)):
        with pytest.raises(ValueError, match=r"query and document must be \(n, width\) and \(m, width\) arrays; were"):
            maxsim(query, document)  # type: ignore[arg-type]
    calls: list[tuple[Callable[..., Any], Any]] = [(maxsim, vectors), (rank, [vectors])]
    for compare, compared in calls:
        with pytest.raises(ValueError, match="similarity must be 'maxsim' or 'meanmaxsim'; was 'cosine'"):
            compare(vectors, compared, similarity="cosine")
