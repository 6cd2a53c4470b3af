"""Tests of requested outputs: refused outputs, costs in tokens, and bytes in the reply."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from output_models import LABELS, head_graph, plain_bundle, rich_bundle

from encserve_server.engine.base import Head
from encserve_server.errors import (
    BundleError,
    FieldPath,
    InvalidField,
    Naming,
    RequestField,
    ResponseTooLarge,
    TooLongToPool,
    TooManyOutputs,
)
from encserve_server.models.reply_size import ReplySize
from encserve_server.outputs import MAX_OUTPUTS, MAX_POOLED_VECTORS, SPAN_POOLINGS, ModelOutputs, OutputSpec
from encserve_server.types.arrays import IndexedRows, Numbers
from encserve_server.types.bundles import (
    Bundle,
    HeadGraph,
    ModelPooling,
    Sparse,
    SparsePooling,
    StaticSparse,
    TaskSettings,
    TokenPooling,
)
from encserve_server.types.requests import DataType, Output, OutputKind, Task
from encserve_server.types.sequences import TokenSequence

D_MODEL, VOCABULARY, WIDTH = 384, 30_522, 128
K, F = OutputKind, RequestField
PLAIN = plain_bundle(D_MODEL, VOCABULARY)
STATIC = StaticSparse(Path("query.json"), np.ones(VOCABULARY, np.float32), 0)
RICH = rich_bundle(
    D_MODEL,
    VOCABULARY,
    WIDTH,
    pooling=ModelPooling((K.MEAN,), l2_normalize=True, width=D_MODEL),
    tasks={Task.QUERY: TaskSettings("", 64, static_sparse=STATIC), Task.DOCUMENT: TaskSettings("", 8192)},
)
OUTPUTS = ModelOutputs(RICH)


def check(*specs: OutputSpec, task: Task = Task.NEITHER, bundle: Bundle = RICH) -> tuple[Output, ...]:
    return ModelOutputs(bundle).check(specs, task)


# Requested outputs


def test_the_default_is_a_row_for_each_token() -> None:
    assert check() == (Output(K.TOKENS, False),)


@pytest.mark.parametrize(
    ("pooling", "spec", "output"),
    [
        (ModelPooling((K.CLS,), False, 8), OutputSpec(K.MODEL), Output(K.CLS, False)),
        (ModelPooling((K.CLS,), True, 8), OutputSpec(K.MODEL), Output(K.CLS, True)),
        (ModelPooling((K.CLS,), False, 8), OutputSpec(K.MODEL, True, dimensions=4), Output(K.CLS, True, dimensions=4)),
        # The server normalises the vector before it cuts the vector, so the result is not a unit vector.
        (ModelPooling((K.CLS,), True, 8), OutputSpec(K.MODEL, dimensions=4), Output(K.MODEL, False, dimensions=4)),
        (ModelPooling((K.CLS,), True, 8, dimensions=2), OutputSpec(K.MODEL), Output(K.MODEL, False, dimensions=2)),
        (ModelPooling((K.CLS, K.MAX), False, 16), OutputSpec(K.MODEL), Output(K.MODEL, False)),
        (ModelPooling((K.CLS,), False, 8, head=head_graph(8, 8)), OutputSpec(K.MODEL), Output(K.MODEL, False)),
    ],
)
def test_the_models_pooling_becomes_a_plain_one_if_it_can(
    pooling: ModelPooling, spec: OutputSpec, output: Output
) -> None:
    assert check(spec, bundle=replace(PLAIN, pooling=pooling)) == (output,)


def test_outputs_have_the_settings_of_the_model() -> None:
    sparse = Sparse(head_graph(D_MODEL, VOCABULARY, 2), VOCABULARY, SparsePooling.MAX, (), 7)
    bundle = replace(RICH, sparse=sparse, pooling=ModelPooling((K.MEAN,), False, D_MODEL, skips_prompt=True))
    vectors, default, fewer, spans = check(
        OutputSpec(K.MULTI_VECTOR, pool_factor=2),
        OutputSpec(K.SPARSE),
        OutputSpec(K.SPARSE, max_active_dims=3),
        OutputSpec(K.SPANS, span_pooling=K.MAX),
        task=Task.DOCUMENT,
        bundle=bundle,
    )
    assert (vectors.task, vectors.pool_factor, spans.span_pooling) == (Task.DOCUMENT, 2, K.MAX)
    assert (default.max_active_dims, fewer.max_active_dims) == (7, 3)
    of_model, by_name = ModelOutputs(bundle).check([OutputSpec(K.MODEL), OutputSpec(K.MEAN)], skipped_tokens=3)
    assert (of_model.skipped_tokens, by_name.skipped_tokens) == (3, 0)


def test_the_kinds_and_widths_of_a_model() -> None:
    assert list(OUTPUTS.kinds) == list(OutputKind)
    assert set(ModelOutputs(PLAIN).kinds) == {*SPAN_POOLINGS, K.TOKENS, K.SPANS}
    assert {kind for kind, it in OUTPUTS.kinds.items() if it.per_token} == {K.TOKENS, K.MULTI_VECTOR, K.SPARSE}
    assert [OUTPUTS.width(it) for it in check(OutputSpec(K.MULTI_VECTOR), OutputSpec(K.MEAN, dimensions=5))] == [128, 5]


def test_rows_are_reported_as_normalised() -> None:
    outputs = ModelOutputs(replace(PLAIN, pooling=ModelPooling((K.CLS, K.MAX), True, 8)))
    for dimensions, unit in ((0, True), (8, True), (4, False)):
        (output,) = outputs.check([OutputSpec(K.MODEL, dimensions=dimensions)])
        assert outputs.is_l2_normalized(output) == unit
    assert [OUTPUTS.is_l2_normalized(Output(K.TOKENS, unit)) for unit in (True, False)] == [True, False]


# Each row has the specs of refused outputs, the path of the field in the error, and a pattern of the message.
REFUSED: list[tuple[tuple[OutputSpec, ...], FieldPath, str]] = [
    ((OutputSpec(K.MULTI_VECTOR, dimensions=129),), FieldPath(F.OUTPUT_DIMENSIONS, 0), "at most 128, .* was 129"),
    (
        (OutputSpec(K.MEAN, data_type=DataType.BINARY), OutputSpec(K.TOKENS, data_type=DataType.BINARY)),
        FieldPath(F.DATA_TYPE),
        "binary is not available for tokens, see output 1",
    ),
    ((OutputSpec(K.TOKENS, data_type=DataType.INT8),), FieldPath(F.DATA_TYPE), "int8 .* tokens, see output 0"),
    (
        (OutputSpec(K.MEAN, data_type=DataType.INT8), OutputSpec(K.SPARSE, data_type=DataType.INT8)),
        FieldPath(F.DATA_TYPE),
        "int8 .* sparse, see output 1",
    ),
    ((OutputSpec(K.MEAN), OutputSpec(K.CLS), OutputSpec(K.MEAN)), FieldPath(F.OUTPUT, 2), "output 0"),
    *[
        ((OutputSpec(K.MULTI_VECTOR, pool_factor=it),), FieldPath(F.OUTPUT_POOL_FACTOR, 0), f"from 1; was {it}")
        for it in (0.5, math.nan, math.inf)
    ],
    ((OutputSpec(K.SPARSE, pool_factor=2),), FieldPath(F.OUTPUT_POOL_FACTOR, 0), "multi_vector .*was 2"),
    ((OutputSpec(K.MEAN, max_active_dims=9),), FieldPath(F.OUTPUT_MAX_ACTIVE_DIMS, 0), "sparse .*was 9"),
    ((OutputSpec(K.MEAN, span_pooling=K.MAX),), FieldPath(F.OUTPUT_SPAN_POOLING, 0), "spans .*was max"),
    ((OutputSpec(K.SPANS, span_pooling=K.MODEL),), FieldPath(F.OUTPUT_SPAN_POOLING, 0), "mean, .*; was model"),
    ((OutputSpec(K.SPARSE, dimensions=1),), FieldPath(F.OUTPUT_DIMENSIONS, 0), "sparse, .*was 1"),
    ((OutputSpec(K.SPARSE, l2_normalize=True),), FieldPath(F.OUTPUT_NORMALIZE, 0), "sparse, .*was True"),
]


# The names of a test protocol. The name of each field and of each value is in angle brackets.
PROTOCOL = Naming(
    {field: f"<{field.name}>" for field in RequestField},
    {enum: {value: f"<{value.name}>" for value in enum} for enum in (OutputKind, Task, DataType)},
)


@pytest.mark.parametrize(("specs", "field", "text"), REFUSED)
def test_a_refused_output_is_named_by_field_and_number(
    specs: tuple[OutputSpec, ...], field: FieldPath, text: str
) -> None:
    """An error names the refused output. All names in the message come from the protocol's naming."""
    with pytest.raises(InvalidField, match=text) as caught:
        check(*specs)
    assert caught.value.field == field
    message = caught.value.text(PROTOCOL).replace("<OUTPUT_", "<").replace("<DATA_TYPE>", "")
    assert not [it for it in ("OUTPUT_KIND_", "options.", "TASK_", "DATA_TYPE_") if it in message]


@pytest.mark.parametrize(
    ("bundle", "specs", "index", "text"),
    [
        (PLAIN, [OutputSpec(K.MODEL)], 0, "ask for a pooling by its name"),
        (replace(RICH, pooling=None, sparse=None), [OutputSpec(K.MEAN), OutputSpec(K.MODEL)], 1, ".* multi_vector,"),
        (PLAIN, [OutputSpec(K.SPARSE)], 0, "no sparse; it has tokens,"),
    ],
)
def test_a_kind_that_the_model_lacks_is_refused(bundle: Bundle, specs: list[OutputSpec], index: int, text: str) -> None:
    with pytest.raises(InvalidField, match=text) as caught:
        check(*specs, bundle=bundle)
    assert caught.value.field == FieldPath(F.OUTPUT_KIND, index)


def test_the_vectors_of_a_query_are_not_joined() -> None:
    with pytest.raises(InvalidField, match="query.*was 2") as caught:
        check(OutputSpec(K.MULTI_VECTOR, pool_factor=2), task=Task.QUERY)
    assert caught.value.field == FieldPath(F.OUTPUT_POOL_FACTOR, 0)


def test_too_many_outputs_are_refused() -> None:
    specs = [OutputSpec(K.MEAN, dimensions=i + 1) for i in range(MAX_OUTPUTS + 1)]
    assert len(check(*specs[:-1])) == MAX_OUTPUTS
    with pytest.raises(TooManyOutputs, match="at most 16 .* was 17") as caught:
        check(*specs)
    assert caught.value.reason == "TOO_MANY_OUTPUTS"


def test_joining_needs_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SciPy, a call that joins vectors is refused, and a model that joins vectors is not loaded."""
    monkeypatch.setattr("encserve_server.outputs.token_pooling.importlib.util.find_spec", lambda _: None)
    with pytest.raises(InvalidField, match=r'pip install "encserve\[pooling\]"$'):
        check(OutputSpec(K.MULTI_VECTOR, pool_factor=2))
    tasks = {Task.DOCUMENT: TaskSettings("", 64, token_pooling=TokenPooling(2.0))}
    with pytest.raises(BundleError, match=r'^model tiny .*: pip install "encserve\[pooling\]"$'):
        ModelOutputs.load(replace(PLAIN, tasks=tasks), lambda *_, **__: FakeHead(1), max_vocabulary_bytes=1)


OWN = TokenPooling(2.0)


@pytest.mark.parametrize(
    ("own", "spec", "task", "culprit"),
    [
        (None, OutputSpec(K.MULTI_VECTOR, pool_factor=2), Task.DOCUMENT, "output_pool_factor 0"),
        (None, OutputSpec(K.MULTI_VECTOR), Task.DOCUMENT, ""),
        (None, OutputSpec(K.MULTI_VECTOR, pool_factor=1), Task.DOCUMENT, ""),
        (OWN, OutputSpec(K.MULTI_VECTOR), Task.DOCUMENT, "model tiny"),
        (OWN, OutputSpec(K.MULTI_VECTOR), Task.NEITHER, "model tiny"),
        (OWN, OutputSpec(K.MULTI_VECTOR), Task.QUERY, ""),
        (OWN, OutputSpec(K.MEAN), Task.DOCUMENT, ""),
        (TokenPooling(1.0), OutputSpec(K.MULTI_VECTOR), Task.DOCUMENT, ""),
    ],
)
def test_a_text_too_long_to_join_is_refused(
    own: TokenPooling | None, spec: OutputSpec, task: Task, culprit: str
) -> None:
    tasks = {Task.QUERY: TaskSettings("", 8192), Task.DOCUMENT: TaskSettings("", 8192, token_pooling=own)}
    outputs = ModelOutputs(replace(RICH, tasks=tasks))
    wanted = outputs.check([spec], task)
    outputs.check_lengths(wanted, [1, MAX_POOLED_VECTORS])
    if not culprit:
        outputs.check_lengths(wanted, [8192])
        return
    with pytest.raises(TooLongToPool, match=f"2048 tokens for {culprit}.*; was 2049") as caught:
        outputs.check_lengths(wanted, [5, MAX_POOLED_VECTORS + 1])
    assert caught.value.field == FieldPath(F.INPUT, 1)


def test_static_weights_need_texts_and_a_separate_call() -> None:
    sparse, tokens = Output(K.SPARSE, False), Output(K.TOKENS, False)
    assert OUTPUTS.static([sparse], Task.QUERY) is STATIC
    for outputs, task in (([sparse], Task.DOCUMENT), ([sparse], Task.NEITHER), ([tokens], Task.QUERY)):
        assert OUTPUTS.static(outputs, task, 0) is None
    refused: list[tuple[list[Output], int | None, FieldPath]] = [
        ([sparse, tokens], None, FieldPath(F.OUTPUT_KIND, 1)),
        ([sparse], 2, FieldPath(F.INPUT, 2)),
    ]
    for outputs, input_without_text, field in refused:
        with pytest.raises(InvalidField) as caught:
            OUTPUTS.static(outputs, Task.QUERY, input_without_text)
        assert caught.value.field == field


# Bytes of a reply


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
        (OutputSpec(K.SPANS, data_type=DataType.BINARY), 5 * (384 * 4 + 5)),  # counts float32, before packing
        (OutputSpec(K.SPARSE), 0),
    ],
)
def test_the_bytes_of_a_sequence(spec: OutputSpec, size: int) -> None:
    assert OUTPUTS.reply_bytes(check(spec), 9, token_rows=7, spans=5) == size


def sparse_rows(count: int) -> IndexedRows:
    return IndexedRows(np.zeros((count, 1), np.float32), np.zeros(count, np.uint32))


def test_the_bytes_of_weights() -> None:
    specs = [OutputSpec(K.SPARSE), OutputSpec(K.SPARSE, data_type=DataType.FLOAT16, max_active_dims=3)]
    arrays = np.zeros((1, D_MODEL), np.float32), sparse_rows(5), sparse_rows(3)
    assert OUTPUTS.sparse_bytes(check(OutputSpec(K.MEAN), *specs), arrays) == 5 * 8 + 3 * 6


def test_the_bytes_of_weights_include_their_padding() -> None:
    """A padded reply has as many weights for every sequence as for the sequence with the most weights."""
    plan = OUTPUTS.plan((OutputSpec(K.SPARSE),), Task.NEITHER, 0)
    sequences = [TokenSequence(np.ones(1, np.int64), 1, outputs=(sparse_rows(n),)) for n in (100, 1, 1)]
    size = ReplySize(OUTPUTS, None, limit=300 * 8 - 1)
    assert size.check_sparse(0, plan, sequences, padded=False) == 102 * 8
    with pytest.raises(ResponseTooLarge, match="2400 bytes"):
        size.check_sparse(0, plan, sequences, padded=True)


# The cost of a sequence, in tokens

SPECS = [
    *[OutputSpec(kind, dimensions=n) for kind in (K.TOKENS, *SPAN_POOLINGS, K.MULTI_VECTOR) for n in (0, 7)],
    *[OutputSpec(K.SPARSE, max_active_dims=n) for n in (0, 5, 1000, 2**31)],
    *[OutputSpec(K.SPANS, span_pooling=pooling) for pooling in (None, K.MAX)],
    *[OutputSpec(K.MULTI_VECTOR, pool_factor=factor) for factor in (1, 1.5, 3)],
]
SOME_SPECS = st.lists(st.sampled_from(SPECS), min_size=1, max_size=MAX_OUTPUTS - 1, unique=True)
ORDINARY = [
    *[OutputSpec(kind, dimensions=n) for kind in OutputKind if kind not in (K.SPARSE, K.SCORES) for n in (0, 7)],
    *[OutputSpec(K.SPARSE, max_active_dims=n) for n in (0, 5)],
    OutputSpec(K.SCORES),
]


@given(SOME_SPECS, st.integers(1, 2048), st.integers(0, 16384), st.integers(0, 100), st.integers(0, 100))
def test_a_cost_grows_with_the_request(
    specs: list[OutputSpec], tokens: int, spans: int, more_tokens: int, more_spans: int
) -> None:
    outputs = check(*specs)
    cost = OUTPUTS.cost(outputs, tokens, spans)
    assert isinstance(cost, int)
    assert tokens <= cost <= OUTPUTS.cost(outputs, tokens + more_tokens, spans + more_spans)
    assert OUTPUTS.cost(outputs[:-1], tokens, spans) <= cost
    assert OUTPUTS.cost(outputs[::-1], tokens, spans) == cost


@given(st.sampled_from(ORDINARY), st.integers(1, 8192))
def test_one_ordinary_output_costs_its_tokens(spec: OutputSpec, tokens: int) -> None:
    assert OUTPUTS.cost(check(spec), tokens, 0) == tokens


@given(SOME_SPECS, st.sampled_from(SPECS), st.integers(1, 2048), st.integers(0, 2000))
def test_a_split_call_is_not_cheaper(specs: list[OutputSpec], another: OutputSpec, tokens: int, spans: int) -> None:
    """Two calls are not cheaper than one call with all outputs.

    The first of the two calls lacks one output. The second call has this output and the output with the highest
    cost.
    """
    together = OUTPUTS.cost(check(*dict.fromkeys([*specs, another])), tokens, spans)
    second = check(OutputSpec(K.SPARSE, max_active_dims=2**31 - 1), another)
    assert together <= OUTPUTS.cost(check(*specs), tokens, spans) + OUTPUTS.cost(second, tokens, spans)


def test_the_cost_of_expensive_outputs() -> None:
    """Each output after the first costs one token. Each join of the vectors costs all tokens again.

    Each span output costs one token per 100 spans, rounded up.
    """
    sparse = check(*[OutputSpec(K.SPARSE, max_active_dims=100 + i) for i in range(16)])
    assert OUTPUTS.cost(sparse, 9, 0) == 9 + 15
    assert OUTPUTS.cost(check(OutputSpec(K.MULTI_VECTOR, pool_factor=2)), 2048, 0) == 2 * 2048
    own = replace(RICH, tasks={Task.DOCUMENT: TaskSettings("", 64, token_pooling=TokenPooling(2.0))})
    joined_twice = check(OutputSpec(K.MULTI_VECTOR, pool_factor=2), task=Task.DOCUMENT, bundle=own)
    assert ModelOutputs(own).cost(joined_twice, 60, 0) == 3 * 60
    spans = check(OutputSpec(K.SPANS), OutputSpec(K.SPANS, span_pooling=K.MAX))
    assert [OUTPUTS.cost(spans, 512, it) for it in (0, 1, 100, 101)] == [513, 515, 515, 517]


# Loading


class FakeHead:
    """A model head that returns zeros of a given width."""

    def __init__(self, width: int) -> None:
        self.width = width

    def run(self, *inputs: Numbers) -> Numbers:
        return np.zeros((2, self.width), np.float32)


def test_each_head_is_opened_on_its_device() -> None:
    opened: list[tuple[int, bool, bool]] = []

    def open_head(graph: HeadGraph, *, on_device: bool, all_threads: bool) -> Head:
        opened.append((graph.width, on_device, all_threads))
        return FakeHead(graph.width)

    pooling = ModelPooling((K.MEAN,), l2_normalize=False, width=9, head=head_graph(D_MODEL, 9))
    outputs = ModelOutputs.load(replace(RICH, pooling=pooling), open_head, max_vocabulary_bytes=2**20)
    assert opened == [(9, False, False), (WIDTH, True, False), (VOCABULARY, True, True), (len(LABELS), False, False)]
    assert set(outputs.kinds) == set(OutputKind)
