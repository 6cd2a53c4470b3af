"""What callers may ask for, and what that costs: in tokens, and in bytes of the reply."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_server.engine.base import Head
from encserve_server.errors import (
    BundleError,
    FieldPath,
    InvalidField,
    Part,
    RequestError,
    ResponseTooLarge,
    TooLongToPool,
    TooManyOutputs,
)
from encserve_server.models.reply_size import ReplySize
from encserve_server.outputs import MAX_OUTPUTS, MAX_POOLED_VECTORS, SPAN_POOLINGS, ModelOutputs, OutputSpec
from encserve_server.types.arrays import IndexedRows, Numbers
from encserve_server.types.bundles import (
    Bundle,
    Graph,
    HeadGraph,
    ModelPooling,
    MultiVector,
    Sparse,
    SparsePooling,
    StaticSparse,
    TaskSettings,
    TokenPooling,
)
from encserve_server.types.requests import DataType, Output, OutputKind, Task
from encserve_server.types.sequences import TokenSequence

D_MODEL, VOCABULARY, WIDTH = 384, 30_522, 128
K = OutputKind


def graph(width: int, inputs: int = 1) -> HeadGraph:
    return HeadGraph(Path("head.onnx"), ("rows", "mask")[:inputs], "out", D_MODEL, width)


PLAIN = Bundle(
    name="tiny",
    version="1",
    fingerprint="",
    d_model=D_MODEL,
    n_layers=6,
    n_heads=12,
    vocab_size=VOCABULARY,
    max_sequence_tokens=8192,
    special_token_ids=(),
    pooling=None,
    tokenizer_file=None,
    graph=Graph(Path("model.onnx"), "ids", False, "mask", "rows", 0, D_MODEL, "float32"),
    inspect_graph=None,
    position="",
    parameters={},
)
STATIC = StaticSparse(Path("query.json"), np.ones(VOCABULARY, np.float32), 0)
RICH = replace(
    PLAIN,
    pooling=ModelPooling((K.MEAN,), l2_normalize=True, width=D_MODEL),
    multi_vector=MultiVector(graph(WIDTH), "maxsim", skips_first_token=False),
    sparse=Sparse(graph(VOCABULARY, 2), VOCABULARY, SparsePooling.MAX, (), 0),
    tasks={Task.QUERY: TaskSettings("", 64, static_sparse=STATIC), Task.DOCUMENT: TaskSettings("", 8192)},
)
OUTPUTS = ModelOutputs(RICH)


def check(*specs: OutputSpec, task: Task = Task.NEITHER, bundle: Bundle = RICH) -> tuple[Output, ...]:
    return ModelOutputs(bundle).check(specs, task)


# What is asked for


def test_nothing_asked_for_is_a_row_for_each_token() -> None:
    assert check() == (Output(K.TOKENS, False),)


@pytest.mark.parametrize(
    ("pooling", "spec", "output"),
    [
        (ModelPooling((K.CLS,), False, 8), OutputSpec(K.MODEL), Output(K.CLS, False)),
        (ModelPooling((K.CLS,), True, 8), OutputSpec(K.MODEL), Output(K.CLS, True)),
        (ModelPooling((K.CLS,), False, 8), OutputSpec(K.MODEL, True, dimensions=4), Output(K.CLS, True, dimensions=4)),
        # Cut after it is normalised, so that it is no unit vector.
        (ModelPooling((K.CLS,), True, 8), OutputSpec(K.MODEL, dimensions=4), Output(K.MODEL, False, dimensions=4)),
        (ModelPooling((K.CLS,), True, 8, dimensions=2), OutputSpec(K.MODEL), Output(K.MODEL, False, dimensions=2)),
        (ModelPooling((K.CLS, K.MAX), False, 16), OutputSpec(K.MODEL), Output(K.MODEL, False)),
        (ModelPooling((K.CLS,), False, 8, head=graph(8)), OutputSpec(K.MODEL), Output(K.MODEL, False)),
    ],
)
def test_a_models_own_pooling_is_a_plain_one_where_it_can_be(
    pooling: ModelPooling, spec: OutputSpec, output: Output
) -> None:
    assert check(spec, bundle=replace(PLAIN, pooling=pooling)) == (output,)


def test_only_the_models_own_pooling_leaves_a_prompt_out() -> None:
    outputs = ModelOutputs(replace(RICH, pooling=ModelPooling((K.MEAN,), False, D_MODEL, skips_prompt=True)))
    found = outputs.check([OutputSpec(K.MODEL), OutputSpec(K.MEAN)], skipped_tokens=3)
    assert [output.skipped_tokens for output in found] == [3, 0]


def test_the_fields_of_one_kind() -> None:
    bundle = replace(RICH, sparse=Sparse(graph(VOCABULARY, 2), VOCABULARY, SparsePooling.MAX, (), 7))
    specs = [OutputSpec(K.MULTI_VECTOR, pool_factor=2), OutputSpec(K.SPARSE), OutputSpec(K.SPARSE, max_active_dims=3)]
    vectors, sparse, fewer = check(*specs, task=Task.DOCUMENT, bundle=bundle)
    assert (vectors.task, vectors.pool_factor) == (Task.DOCUMENT, 2)
    assert (sparse.max_active_dims, fewer.max_active_dims) == (7, 3)
    (spans,) = check(OutputSpec(K.SPANS, span_pooling=K.MAX))
    assert spans.span_pooling is K.MAX


def test_which_rows_have_length_1() -> None:
    for dimensions, unit in ((0, True), (8, True), (4, False)):
        outputs = ModelOutputs(replace(PLAIN, pooling=ModelPooling((K.CLS, K.MAX), True, 8)))
        (output,) = outputs.check([OutputSpec(K.MODEL, dimensions=dimensions)])
        assert outputs.is_l2_normalized(output) == unit
    assert OUTPUTS.is_l2_normalized(Output(K.TOKENS, True))
    assert not OUTPUTS.is_l2_normalized(Output(K.TOKENS, False))


def test_what_a_model_has() -> None:
    assert list(OUTPUTS.kinds) == list(OutputKind)
    assert set(ModelOutputs(PLAIN).kinds) == {*SPAN_POOLINGS, K.TOKENS, K.SPANS}
    assert {kind for kind, it in OUTPUTS.kinds.items() if it.per_token} == {K.TOKENS, K.MULTI_VECTOR, K.SPARSE}
    assert [
        OUTPUTS.width(output) for output in check(OutputSpec(K.MULTI_VECTOR), OutputSpec(K.MEAN, dimensions=5))
    ] == [
        WIDTH,
        5,
    ]


NO_POOLING = replace(RICH, pooling=None, sparse=None)
REFUSED: dict[str, tuple[Bundle, list[OutputSpec], Task, FieldPath, str]] = {
    "no pooling": (
        PLAIN,
        [OutputSpec(K.MODEL)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_KIND, 0),
        "model tiny does not say how it was trained to pool; ask for a pooling by its name",
    ),
    "no pooling, but vectors": (
        NO_POOLING,
        [OutputSpec(K.MEAN), OutputSpec(K.MODEL)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_KIND, 1),
        "model tiny has no model; it has tokens, mean, cls, max, last_token, weighted_mean, mean_sqrt_length, "
        "multi_vector, spans",
    ),
    "no weights": (
        PLAIN,
        [OutputSpec(K.SPARSE)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_KIND, 0),
        "model tiny has no sparse; it has tokens,",
    ),
    "too wide": (
        RICH,
        [OutputSpec(K.MULTI_VECTOR, dimensions=129)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_DIMENSIONS, 0),
        "must be at most 128, the numbers of a row; was 129",
    ),
    "bits of tokens": (
        RICH,
        [OutputSpec(K.MEAN, data_type=DataType.BINARY), OutputSpec(K.TOKENS, data_type=DataType.BINARY)],
        Task.NEITHER,
        FieldPath(Part.DATA_TYPE),
        "binary is not for tokens, see output 1",
    ),
    "int8 of tokens": (
        RICH,
        [OutputSpec(K.TOKENS, data_type=DataType.INT8)],
        Task.NEITHER,
        FieldPath(Part.DATA_TYPE),
        "int8 is not for tokens, see output 0",
    ),
    "int8 of weights": (
        RICH,
        [OutputSpec(K.MEAN, data_type=DataType.INT8), OutputSpec(K.SPARSE, data_type=DataType.INT8)],
        Task.NEITHER,
        FieldPath(Part.DATA_TYPE),
        "int8 is not for sparse, see output 1",
    ),
    "twice": (
        RICH,
        [OutputSpec(K.MEAN), OutputSpec(K.CLS), OutputSpec(K.MEAN)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT, 2),
        "asks for the same as output 0",
    ),
    "too small a factor": (
        RICH,
        [OutputSpec(K.MULTI_VECTOR, pool_factor=0.5)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_POOL_FACTOR, 0),
        "must be a number from 1; was 0.5",
    ),
    "a factor out of range": (
        RICH,
        [OutputSpec(K.MULTI_VECTOR, pool_factor=math.nan)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_POOL_FACTOR, 0),
        "must be a number from 1; was nan",
    ),
    "no end of a factor": (
        RICH,
        [OutputSpec(K.MULTI_VECTOR, pool_factor=math.inf)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_POOL_FACTOR, 0),
        "must be a number from 1; was inf",
    ),
    "queries joined": (
        RICH,
        [OutputSpec(K.MULTI_VECTOR, pool_factor=2)],
        Task.QUERY,
        FieldPath(Part.OUTPUT_POOL_FACTOR, 0),
        "is not for query, which loses by it; was 2",
    ),
    "a factor of another kind": (
        RICH,
        [OutputSpec(K.SPARSE, pool_factor=2)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_POOL_FACTOR, 0),
        "is for multi_vector alone; was 2",
    ),
    "weights of another kind": (
        RICH,
        [OutputSpec(K.MEAN, max_active_dims=9)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_MAX_ACTIVE_DIMS, 0),
        "is for sparse alone; was 9",
    ),
    "a pooling of ranges of another kind": (
        RICH,
        [OutputSpec(K.MEAN, span_pooling=K.MAX)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_SPAN_POOLING, 0),
        "is for spans alone; was max",
    ),
    "ranges pooled by the model": (
        RICH,
        [OutputSpec(K.SPANS, span_pooling=K.MODEL)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_SPAN_POOLING, 0),
        "must be one of mean, cls, max, last_token, weighted_mean, mean_sqrt_length; was model",
    ),
    "weights cut": (
        RICH,
        [OutputSpec(K.SPARSE, dimensions=1)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_DIMENSIONS, 0),
        "is not for sparse, whose rows are single weights; was 1",
    ),
    "weights normalised": (
        RICH,
        [OutputSpec(K.SPARSE, l2_normalize=True)],
        Task.NEITHER,
        FieldPath(Part.OUTPUT_NORMALIZE, 0),
        "is not for sparse, whose rows are single weights; was True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_by_field_and_number(name: str) -> None:
    bundle, specs, task, field, problem = REFUSED[name]
    with pytest.raises(InvalidField) as caught:
        check(*specs, task=task, bundle=bundle)
    assert caught.value.field == field
    assert problem in str(caught.value)


def test_no_more_than_so_many_outputs() -> None:
    specs = [OutputSpec(K.MEAN, dimensions=i + 1) for i in range(MAX_OUTPUTS + 1)]
    assert len(check(*specs[:-1])) == MAX_OUTPUTS
    with pytest.raises(TooManyOutputs, match="outputs: must hold at most 16 outputs; was 17") as caught:
        check(*specs)
    assert caught.value.reason == "TOO_MANY_OUTPUTS"


def test_a_server_that_cannot_join_vectors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.outputs.token_pooling.importlib.util.find_spec", lambda _: None)
    with pytest.raises(InvalidField, match=r"this server cannot pool vectors: it lacks encserve-server\[pooling\]"):
        check(OutputSpec(K.MULTI_VECTOR, pool_factor=2))


# Texts that are too long to be joined

OWN = TokenPooling(2.0)


@pytest.mark.parametrize(
    ("own", "spec", "task", "refused"),
    [
        (
            None,
            OutputSpec(K.MULTI_VECTOR, pool_factor=2),
            Task.DOCUMENT,
            "at most 2048 tokens for output_pool_factor 0",
        ),
        (None, OutputSpec(K.MULTI_VECTOR), Task.DOCUMENT, ""),
        (None, OutputSpec(K.MULTI_VECTOR, pool_factor=1), Task.DOCUMENT, ""),
        (OWN, OutputSpec(K.MULTI_VECTOR), Task.DOCUMENT, "2048 tokens for model tiny, which joins"),
        (OWN, OutputSpec(K.MULTI_VECTOR), Task.NEITHER, "2048 tokens for model tiny, which joins"),
        (OWN, OutputSpec(K.MULTI_VECTOR), Task.QUERY, ""),
        (OWN, OutputSpec(K.MEAN), Task.DOCUMENT, ""),
        (TokenPooling(1.0), OutputSpec(K.MULTI_VECTOR), Task.DOCUMENT, ""),
    ],
)
def test_more_vectors_than_can_be_joined(own: TokenPooling | None, spec: OutputSpec, task: Task, refused: str) -> None:
    tasks = {Task.QUERY: TaskSettings("", 8192), Task.DOCUMENT: TaskSettings("", 8192, token_pooling=own)}
    outputs = ModelOutputs(replace(RICH, tasks=tasks))
    wanted = outputs.check([spec], task)
    outputs.check_lengths(wanted, [1, MAX_POOLED_VECTORS])
    if not refused:
        outputs.check_lengths(wanted, [8192])
        return
    with pytest.raises(TooLongToPool, match=f"{refused}.*; was 2049") as caught:
        outputs.check_lengths(wanted, [5, MAX_POOLED_VECTORS + 1])
    assert caught.value.field == FieldPath(Part.INPUT, 1)


# Weights without a run of the model


def test_what_is_answered_without_a_run() -> None:
    sparse, other = Output(K.SPARSE, False), Output(K.TOKENS, False)
    assert OUTPUTS.static([sparse], Task.QUERY) is STATIC
    for outputs, task in (([sparse], Task.DOCUMENT), ([sparse], Task.NEITHER), ([other], Task.QUERY)):
        assert OUTPUTS.static(outputs, task, 0) is None
    refused: list[tuple[list[Output], int | None, FieldPath, str]] = [
        (
            [sparse, other],
            None,
            FieldPath(Part.OUTPUT_KIND, 1),
            "model tiny makes sparse of this task without a run: ask for tokens in another call",
        ),
        ([sparse], 2, FieldPath(Part.INPUT, 2), "model tiny makes sparse of this task without a run, from texts only"),
    ]
    for outputs, other_input, field, problem in refused:
        with pytest.raises(InvalidField, match=problem) as caught:
            OUTPUTS.static(outputs, Task.QUERY, other_input)
        assert caught.value.field == field


# What a reply takes


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (OutputSpec(K.TOKENS), 7 * 384 * 4),
        (OutputSpec(K.TOKENS, data_type=DataType.FLOAT16, dimensions=10), 7 * 10 * 2),
        (OutputSpec(K.MEAN), 384 * 4),
        (OutputSpec(K.MODEL, data_type=DataType.BINARY, dimensions=9), 2),
        (OutputSpec(K.MODEL, data_type=DataType.INT8, dimensions=9), 9),
        (OutputSpec(K.MULTI_VECTOR), 9 * (128 * 4 + 4)),
        (OutputSpec(K.MULTI_VECTOR, data_type=DataType.INT8), 9 * (128 + 4)),
        (OutputSpec(K.SPANS, data_type=DataType.BINARY), 5 * (384 * 4 + 5)),  # as they are made
        (OutputSpec(K.SPARSE), 0),
    ],
)
def test_the_bytes_of_a_sequence(spec: OutputSpec, size: int) -> None:
    assert OUTPUTS.reply_bytes(check(spec), 9, token_rows=7, spans=5) == size


def test_the_bytes_of_weights() -> None:
    specs = [OutputSpec(K.SPARSE), OutputSpec(K.SPARSE, data_type=DataType.FLOAT16, max_active_dims=3)]
    outputs = check(OutputSpec(K.MEAN), *specs)
    made = [IndexedRows(np.zeros((n, 1), np.float32), np.zeros(n, np.uint32)) for n in (5, 3)]
    assert OUTPUTS.sparse_bytes(outputs, (np.zeros((1, D_MODEL), np.float32), *made)) == 5 * 8 + 3 * 6


def test_weights_are_reckoned_with_their_padding() -> None:
    """A reply of one long vector among short ones would be built before its size is known otherwise."""
    plan = OUTPUTS.plan((OutputSpec(K.SPARSE),), Task.NEITHER, 0)
    sequences = [
        TokenSequence(
            np.ones(1, np.int64), 1, outputs=(IndexedRows(np.zeros((n, 1), np.float32), np.zeros(n, np.uint32)),)
        )
        for n in (100, 1, 1)
    ]
    size = ReplySize(OUTPUTS, None, limit=300 * 8 - 1)
    assert size.check_sparse(0, plan, sequences, padded=False) == 102 * 8
    with pytest.raises(ResponseTooLarge, match="2400 bytes"):
        size.check_sparse(0, plan, sequences, padded=True)


# What a sequence takes in all

SPECS = [
    *[OutputSpec(kind, dimensions=n) for kind in (K.TOKENS, *SPAN_POOLINGS, K.MULTI_VECTOR) for n in (0, 7)],
    *[OutputSpec(K.SPARSE, max_active_dims=n) for n in (0, 5, 1000, 2**31)],
    *[OutputSpec(K.SPANS, span_pooling=pooling) for pooling in (None, K.MAX)],
    *[OutputSpec(K.MULTI_VECTOR, pool_factor=factor) for factor in (1, 1.5, 3)],
]
SOME_SPECS = st.lists(st.sampled_from(SPECS), min_size=1, max_size=MAX_OUTPUTS - 1, unique=True)
ORDINARY = [
    *[OutputSpec(kind, dimensions=n) for kind in OutputKind if kind is not K.SPARSE for n in (0, 7)],
    *[OutputSpec(K.SPARSE, max_active_dims=n) for n in (0, 5)],
]


@given(SOME_SPECS, st.integers(1, 2048), st.integers(0, 16384), st.integers(0, 100), st.integers(0, 100))
def test_a_cost_grows_with_all_that_is_asked_for(
    specs: list[OutputSpec], tokens: int, spans: int, more_tokens: int, more_spans: int
) -> None:
    outputs = check(*specs)
    cost = OUTPUTS.cost(outputs, tokens, spans)
    assert isinstance(cost, int)
    assert tokens <= cost <= OUTPUTS.cost(outputs, tokens + more_tokens, spans + more_spans)
    assert OUTPUTS.cost(outputs[:-1], tokens, spans) <= cost
    assert OUTPUTS.cost(outputs[::-1], tokens, spans) == cost


@given(st.sampled_from(ORDINARY), st.integers(1, 8192))
def test_one_ordinary_output_costs_the_tokens(spec: OutputSpec, tokens: int) -> None:
    for bundle in (RICH, replace(RICH, d_model=D_MODEL, n_layers=0)):
        assert ModelOutputs(bundle).cost(check(spec), tokens, 0) == tokens


@given(SOME_SPECS, st.sampled_from(SPECS), st.integers(1, 2048), st.integers(0, 2000))
def test_one_more_output_costs_no_more_than_in_a_call_beside_the_dearest(
    specs: list[OutputSpec], another: OutputSpec, tokens: int, spans: int
) -> None:
    """So a call in parts is not cheaper than the whole but for the tokens, which are encoded for each part."""
    together = OUTPUTS.cost(check(*dict.fromkeys([*specs, another])), tokens, spans)
    dearest = check(OutputSpec(K.SPARSE, max_active_dims=2**31 - 1), another)
    assert together <= OUTPUTS.cost(check(*specs), tokens, spans) + OUTPUTS.cost(dearest, tokens, spans)


def test_what_is_dear_is_charged() -> None:
    """Of one-token inputs and of long ones, in tokens of a model of 132 µs each; measured: 1 to 3, 1,100, and 110."""
    sparse = check(*[OutputSpec(K.SPARSE, max_active_dims=100 + i) for i in range(16)])
    assert 1 < OUTPUTS.cost(sparse, 1, 0) < 10
    joined = check(OutputSpec(K.MULTI_VECTOR, pool_factor=2))
    assert 600 < OUTPUTS.cost(joined, 2048, 0) - 2048 < 2200
    assert OUTPUTS.cost(joined, 2048, 0) - 2048 > 8 * (OUTPUTS.cost(joined, 512, 0) - 512)
    assert 60 < OUTPUTS.cost(check(OutputSpec(K.SPANS)), 512, 16384) - 512 < 220
    head_and_encoder = OUTPUTS.cost(check(OutputSpec(K.MEAN), OutputSpec(K.SPARSE)), 100, 0)
    assert head_and_encoder == OUTPUTS.cost(check(OutputSpec(K.SPARSE), OutputSpec(K.MEAN)), 100, 0)
    small = ModelOutputs(replace(RICH, n_layers=1))
    assert small.cost(sparse, 1, 0) > OUTPUTS.cost(sparse, 1, 0)


# Loading


class Opened:
    """A head that gives zeros of a width, or fails."""

    def __init__(self, width: int) -> None:
        self.width = width

    def run(self, *inputs: Numbers) -> Numbers:
        if not self.width:
            raise ValueError("no such operator")
        return np.zeros((2, self.width), np.float32)


def test_heads_are_opened_where_they_are_to_run() -> None:
    opened: list[tuple[int, bool, bool]] = []

    def open_head(graph: HeadGraph, *, on_device: bool, all_threads: bool) -> Head:
        opened.append((graph.width, on_device, all_threads))
        return Opened(graph.width)

    pooling = ModelPooling((K.MEAN,), l2_normalize=False, width=9, head=graph(9))
    outputs = ModelOutputs.load(replace(RICH, pooling=pooling), open_head, max_vocabulary_bytes=2**20)
    assert opened == [(9, False, False), (WIDTH, True, False), (VOCABULARY, True, True)]
    assert set(outputs.kinds) == set(OutputKind)


@pytest.mark.parametrize(
    ("width", "problem"),
    [
        (127, r"head.onnx: it gives \(2, 127\) for \(2,\); the manifest says that its width is 128"),
        (0, "head.onnx: it fails for vectors of 384 numbers: no such operator"),
    ],
)
def test_a_head_that_is_another_than_the_manifests(width: int, problem: str) -> None:
    bundle = replace(RICH, sparse=None)
    with pytest.raises(BundleError, match=problem):
        ModelOutputs.load(bundle, lambda *_, **__: Opened(width), max_vocabulary_bytes=2**20)


def test_a_model_that_joins_vectors_needs_what_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.outputs.token_pooling.importlib.util.find_spec", lambda _: None)
    tasks = {Task.DOCUMENT: TaskSettings("", 64, token_pooling=TokenPooling(2.0))}
    with pytest.raises(BundleError, match=r"tiny pools the vectors of tokens, which needs encserve-server\[pooling\]"):
        ModelOutputs.load(replace(PLAIN, tasks=tasks), lambda *_, **__: Opened(1), max_vocabulary_bytes=1)


def test_errors_name_no_protocol() -> None:
    """Whatever is refused; values of enums are rendered by the protocol that the caller speaks."""

    class Loud:
        def field(self, path: FieldPath) -> str:
            return f"<{path.part.name}>"

        def value(self, value: Any) -> str:
            return f"<{value.name}>"

    for bundle, specs, task, _, _ in REFUSED.values():
        with pytest.raises(RequestError) as caught:
            check(*specs, task=task, bundle=bundle)
        for word in ("OUTPUT_KIND_", "options.", "TASK_", "DATA_TYPE_"):
            assert word not in caught.value.text(Loud()).replace("<OUTPUT_", "<").replace("<DATA_TYPE>", "")
