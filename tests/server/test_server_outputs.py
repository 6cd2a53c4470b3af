"""What is made of a batch: every kind of output, alone and beside others, once, and nothing where it is no number."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_server.engine.base import BatchResult
from encserve_server.outputs import FLOAT_TYPES, SPAN_POOLINGS, ModelOutputs, OutputSpec, static_weights
from encserve_server.outputs.rows import normalized, quantized
from encserve_server.outputs.spans import pool_spans
from encserve_server.outputs.token_pooling import linkage, pool_tokens
from encserve_server.types.arrays import ModelInput, Numbers, OutputArrays, OutputRows, Rows, TokenSpans
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

D_MODEL, VOCABULARY, WIDTH = 3, 40, 4
RNG = np.random.default_rng(0)
PROJECTION = RNG.standard_normal((D_MODEL, WIDTH)).astype(np.float32)
WORDS = RNG.standard_normal((D_MODEL, VOCABULARY)).astype(np.float32)


@dataclass
class Sequenced:
    """A sequence of a batch."""

    input: ModelInput
    wanted: tuple[Output, ...]
    token_spans: TokenSpans | None = None


class Counting:
    """A head that computes a function, and counts its runs."""

    def __init__(self, function: Callable[..., Numbers]) -> None:
        self.function = function
        self.runs = 0

    def run(self, *inputs: Numbers) -> Numbers:
        self.runs += 1
        return self.function(*inputs)


def unit(rows: Numbers) -> Numbers:
    """Rows of length 1, as a MaxSim head makes them."""
    norms: Numbers = np.linalg.norm(rows, axis=-1, keepdims=True).astype(np.float32)
    return np.divide(rows, norms)


def product(rows: Numbers, weights: Numbers) -> Numbers:
    """rows @ weights, added up in the same order whatever is beside a row: BLAS takes other ways for other shapes."""
    return np.asarray(np.add.reduce(rows[..., None] * weights, axis=-2), np.float32)


def weigh(rows: Numbers, mask: Numbers) -> Numbers:
    """Weights over the vocabulary, as a SPLADE head makes them."""
    logits = np.log1p(np.maximum(product(rows, WORDS), 0))
    return np.asarray((logits * mask[:, :, None]).max(axis=1), np.float32)


def graph(width: int, inputs: int = 1) -> HeadGraph:
    return HeadGraph(Path("head.onnx"), ("rows", "mask")[:inputs], "out", D_MODEL, width)


def bundle(**changes: Any) -> Bundle:
    """A model with every kind of output."""
    parts: dict[str, Any] = {
        "name": "m",
        "version": "1",
        "fingerprint": "",
        "d_model": D_MODEL,
        "n_layers": 1,
        "n_heads": 1,
        "vocab_size": VOCABULARY,
        "max_sequence_tokens": 8192,
        "special_token_ids": (),
        "pooling": ModelPooling(SPAN_POOLINGS, l2_normalize=False, width=D_MODEL * len(SPAN_POOLINGS), head=graph(1)),
        "tokenizer_file": None,
        "graph": Graph(Path("model.onnx"), "ids", False, "mask", "rows", 0, D_MODEL, "float32"),
        "inspect_graph": None,
        "position": "",
        "parameters": {},
        "multi_vector": MultiVector(graph(WIDTH), "maxsim", skips_first_token=False),
        "sparse": Sparse(graph(VOCABULARY, 2), VOCABULARY, SparsePooling.MAX, (), 0),
        "tasks": {Task.QUERY: TaskSettings("", 64), Task.DOCUMENT: TaskSettings("", 8192)},
    }
    return Bundle(**parts | changes)


def model(*, heads: dict[OutputKind, Any] | None = None, **changes: Any) -> ModelOutputs:
    """The outputs of that model, whose heads compute."""
    usual = {
        OutputKind.MODEL: Counting(lambda rows: rows * 2),
        OutputKind.MULTI_VECTOR: Counting(lambda rows: unit(product(rows, PROJECTION))),
        OutputKind.SPARSE: Counting(weigh),
    }
    return ModelOutputs(bundle(**changes), usual | (heads or {}))


def batch_of(rows: Sequence[Rows]) -> BatchResult:
    """A batch with these (seq, d_model) rows, and numbers for padding that must show nowhere."""
    lengths = [len(it) for it in rows]
    padded = np.full((len(rows), max(lengths), rows[0].shape[1]), np.nan, np.float32)
    for it, place in zip(rows, padded, strict=True):
        place[: len(it)] = it
    return BatchResult(padded, lengths, 0.0, 0.0)


def compute(
    outputs: ModelOutputs,
    rows: Sequence[Rows],
    wanted: Sequence[tuple[Output, ...]],
    spans: Sequence[TokenSpans | None] | None = None,
) -> list[OutputArrays | None]:
    """What is made of a batch of these rows, whose ids count up."""
    ids = [np.arange(len(it)) % VOCABULARY for it in rows]
    sequences = list(map(Sequenced, ids, wanted, spans or [None] * len(rows)))
    with np.errstate(all="ignore"):
        return outputs.compute(batch_of(rows), sequences)


def one(made: Sequence[OutputArrays | None]) -> OutputArrays:
    """What is made of the only sequence."""
    (arrays,) = made
    assert arrays is not None
    return arrays


def some_rows(lengths: Sequence[int], seed: int = 1) -> list[Rows]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((length, D_MODEL)).astype(np.float32) for length in lengths]


def raw(arrays: OutputArrays | None) -> Any:
    """The bytes and types of what was made of one sequence."""
    if arrays is None:
        return None
    parts = [part for it in arrays for part in (it if isinstance(it, tuple) else (it,))]
    return [None if part is None else (part.tobytes(), part.dtype, part.shape) for part in parts]


BY_NAME = [OutputSpec(kind) for kind in SPAN_POOLINGS]
EVERY_SPEC = [
    *[
        OutputSpec(kind, l2_normalize, data_type, dimensions)
        for kind in (*SPAN_POOLINGS, OutputKind.MODEL, OutputKind.SPANS, OutputKind.TOKENS)
        for l2_normalize in (False, True)
        for data_type in DataType
        for dimensions in (0, 2)
        if kind is not OutputKind.TOKENS or data_type in FLOAT_TYPES
    ],
    *[OutputSpec(OutputKind.MULTI_VECTOR, data_type=DataType.INT8, dimensions=d) for d in (0, 2)],
    *[OutputSpec(OutputKind.SPANS, span_pooling=pooling) for pooling in SPAN_POOLINGS],
    *[OutputSpec(OutputKind.MULTI_VECTOR, pool_factor=factor, dimensions=d) for factor in (0, 1.5, 3) for d in (0, 2)],
    *[OutputSpec(OutputKind.SPARSE, max_active_dims=most) for most in (0, 1, 5)],
]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Rows], list[tuple[OutputSpec, ...]], list[int]]:
    """Rows of several sequences, what each wants, and how long a prompt it leaves out of pooling."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    wanted = st.lists(st.sampled_from(EVERY_SPEC), max_size=5, unique=True).map(tuple)
    different = draw(st.lists(wanted, min_size=1, max_size=2))
    count = len(lengths)
    return (
        some_rows(lengths, draw(st.integers(0, 2**32))),
        draw(st.lists(st.sampled_from(different), min_size=count, max_size=count)),
        draw(st.lists(st.sampled_from([0, 4]), min_size=count, max_size=count)),
    )


@given(batches())
def test_a_sequence_gets_the_same_alone_and_beside_others_to_the_last_bit(
    made: tuple[list[Rows], list[tuple[OutputSpec, ...]], list[int]],
) -> None:
    """Whatever the others want, and though one of them is not finite."""
    rows, specs, skipped = made
    outputs = model()
    wanted = [outputs.check(some, skipped_tokens=n) if some else () for some, n in zip(specs, skipped, strict=True)]
    rows[0][-1] = -0.0
    rows[-1][0, 0] = np.inf
    spans: list[TokenSpans | None] = [np.array([[0, len(it)], [len(it) // 2, len(it)], [0, 0]]) for it in rows]
    together = compute(outputs, rows, wanted, spans)
    for i, found in enumerate(together):
        (alone,) = compute(outputs, rows[i : i + 1], wanted[i : i + 1], spans[i : i + 1])
        assert raw(found) == raw(alone)
    assert together[-1] is None
    for arrays, checked in zip(together[:-1], wanted, strict=False):
        for array, output in zip(arrays or (), checked, strict=arrays is not None):
            assert getattr(array, "rows", array).dtype == output.data_type.dtype


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 2**32))
def test_outputs_are_those_of_the_rows(lengths: list[int], seed: int) -> None:
    rows, outputs = some_rows(lengths, seed), model()
    wanted = outputs.check([OutputSpec(OutputKind.TOKENS), *BY_NAME, OutputSpec(OutputKind.MODEL)])
    for it, arrays in zip(rows, compute(outputs, rows, [wanted] * len(rows)), strict=True):
        assert arrays is not None
        np.testing.assert_array_equal(arrays[0], it)
        pooled = dict(zip(SPAN_POOLINGS, arrays[1:-1], strict=True))
        for kind, found in pooled.items():
            np.testing.assert_allclose(found[0], POOL[kind](it.astype(np.float64)), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(arrays[-1], 2 * np.concatenate(list(pooled.values()), axis=1))


@given(st.integers(1, 20), st.integers(0, 24), st.sampled_from(SPAN_POOLINGS), st.integers(0, 2**32))
def test_a_prompt_is_left_out_of_pooling(length: int, skipped: int, kind: OutputKind, seed: int) -> None:
    """Where nothing else is there the vector is zero, and that is no failure."""
    outputs = model(pooling=ModelPooling((kind,), l2_normalize=True, width=D_MODEL, skips_prompt=True))
    (rows,) = some_rows([length], seed)
    (found,) = one(compute(outputs, [rows], [outputs.check([OutputSpec(OutputKind.MODEL)], skipped_tokens=skipped)]))
    rest = rows[skipped:].astype(np.float64)
    if not skipped or length > skipped:
        if kind is OutputKind.WEIGHTED_MEAN:
            want = np.average(rest, axis=0, weights=np.arange(skipped + 1, length + 1))
        else:
            want = POOL[kind](rest)
        np.testing.assert_allclose(found[0], want / np.linalg.norm(want), rtol=1e-3, atol=1e-4)
    elif kind is not OutputKind.CLS:
        assert not found.any()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 2**32))
def test_rows_that_are_normalised_have_length_1(lengths: list[int], seed: int) -> None:
    outputs, rows = model(), some_rows(lengths, seed)
    kinds = (OutputKind.TOKENS, OutputKind.MEAN, OutputKind.MODEL, OutputKind.MULTI_VECTOR)
    wanted = outputs.check([OutputSpec(kind, l2_normalize=True, dimensions=2) for kind in kinds])
    for arrays in compute(outputs, rows, [wanted] * len(rows)):
        for array in arrays or ():
            numbers: Any = getattr(array, "rows", array)
            np.testing.assert_allclose(np.linalg.norm(numbers, axis=1), 1, rtol=1e-5)


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(SPAN_POOLINGS), st.integers(0, 2**32))
def test_binary_says_which_numbers_are_more_than_0(length: int, width: int, kind: OutputKind, seed: int) -> None:
    rows = [np.random.default_rng(seed).integers(-1, 2, (length, width)).astype(np.float32)]
    outputs = model(d_model=width)
    wanted = outputs.check([OutputSpec(kind), OutputSpec(kind, data_type=DataType.BINARY)])
    numbers, bits = one(compute(outputs, rows, [wanted]))
    np.testing.assert_array_equal(bits, np.packbits(numbers > 0, axis=1))
    assert bits.nbytes == outputs.reply_bytes(wanted[1:], length, token_rows=length, spans=0)


INT8_KINDS = (*SPAN_POOLINGS, OutputKind.MODEL, OutputKind.SPANS, OutputKind.MULTI_VECTOR)


@given(st.integers(1, 20), st.integers(2, 40), st.sampled_from(INT8_KINDS), st.booleans(), st.integers(0, 2**32))
def test_int8_is_the_formula_of_the_normalised_vector(
    length: int, width: int, kind: OutputKind, is_cut: bool, seed: int
) -> None:
    """To the bit, whether or not normalising is asked for."""
    width = D_MODEL if kind is OutputKind.MULTI_VECTOR else width
    rows = [np.random.default_rng(seed).standard_normal((length, width)).astype(np.float32)]
    outputs = model(d_model=width)
    dimensions = outputs.kinds[kind].width // 2 if is_cut else 0
    plain = OutputSpec(kind, dimensions=dimensions)
    unit, int8 = plain._replace(l2_normalize=True), plain._replace(data_type=DataType.INT8)
    wanted = outputs.check([unit, int8, int8._replace(l2_normalize=True)])
    spans = [np.array([[0, length], [length // 2, length], [0, 0]])]
    made: list[Any] = [getattr(it, "rows", it) for it in one(compute(outputs, rows, [wanted], spans))]
    numbers, found, again = made
    factor = np.float32(127 * np.sqrt(numbers.shape[1]) / 4)
    np.testing.assert_array_equal(found, np.clip(np.rint(numbers * factor), -128, 127).astype(np.int8))
    assert found.tobytes() == again.tobytes()
    assert all(outputs.is_l2_normalized(it) for it in wanted)
    if kind in SPAN_POOLINGS:
        assert found.nbytes == outputs.reply_bytes(wanted[1:2], length, token_rows=length, spans=0)


def angles(left: OutputRows, right: OutputRows) -> Any:
    """(n,) between the rows of two (n, width)."""
    products = np.linalg.norm(left.astype(np.float64), axis=1) * np.linalg.norm(right.astype(np.float64), axis=1)
    return np.arccos(np.clip(np.einsum("nw,nw->n", left, right, dtype=np.float64) / products, -1, 1))


@given(st.integers(2, 2048), st.integers(0, 2**32), st.floats(0, 3))
def test_int8_turns_an_angle_by_less_than_2_degrees(width: int, seed: int, nearness: float) -> None:
    """Whatever the width, of vectors without a number beyond the range: each is turned by asin(2 / 127) at most."""
    made = np.random.default_rng(seed).uniform(-1, 1, (2, 20, width)).astype(np.float32)
    made[1] += np.float32(nearness) * made[0]
    left, right = (normalized(it)[0] for it in made)
    fits = np.abs(np.concatenate([left, right], axis=1)).max(axis=1) * np.sqrt(width) < 4
    turned = np.abs(angles(quantized(left), quantized(right)) - angles(left, right))
    assert (turned[fits] <= 2 * np.arcsin(2 / 127) + 1e-6).all()


def test_int8_ranks_as_float32_does_where_cosines_differ_by_a_hundredth() -> None:
    """Of 384 numbers from a normal distribution, some of which are beyond the range."""
    rng = np.random.default_rng(7)
    query = rng.standard_normal((1, 384)).astype(np.float32)
    documents = rng.standard_normal((2000, 384)).astype(np.float32)
    documents = query + rng.uniform(0, 9, (2000, 1)).astype(np.float32) * documents
    one_row, rows = normalized(query)[0].repeat(2000, axis=0), normalized(documents)[0]
    change = np.cos(angles(quantized(one_row), quantized(rows))) - np.cos(angles(one_row, rows))
    assert np.abs(change).max() < 0.005


@given(st.integers(1, 4096), st.integers(0, 2**32))
def test_a_number_of_int8_is_off_by_half_a_step_unless_it_is_beyond_the_range(width: int, seed: int) -> None:
    unit, _ = normalized(np.random.default_rng(seed).standard_normal((1, width)).astype(np.float32))
    found, step = quantized(unit).astype(np.float64), 4 / (127 * np.sqrt(width))
    inside = (unit >= -128 * step) & (unit <= 127 * step)
    assert (np.abs(found * step - unit)[inside] <= step * 0.5001).all()
    assert np.isin(found[~inside], (-128, 127)).all()


def test_sequences_of_a_batch_may_want_different_things() -> None:
    rows = list(np.arange(12, dtype=np.float32).reshape(2, 2, 3))
    wanted = [(Output(OutputKind.MAX, False),), (Output(OutputKind.CLS, False), Output(OutputKind.MEAN, False)), ()]
    made = compute(model(), [*rows, rows[0]], wanted)
    assert [[array.tolist() for array in arrays or ()] for arrays in made] == [
        [[[3, 4, 5]]],
        [[[6, 7, 8]], [[7.5, 8.5, 9.5]]],
        [],
    ]


def test_the_same_may_stand_twice() -> None:
    """As where a model's own pooling is one that is asked for by its name too."""
    outputs = model(pooling=ModelPooling((OutputKind.MEAN,), l2_normalize=False, width=D_MODEL))
    wanted = outputs.check([OutputSpec(OutputKind.MODEL), OutputSpec(OutputKind.MEAN)])
    first, second = one(compute(outputs, some_rows([3]), [wanted]))
    np.testing.assert_array_equal(first, second)


def test_rows_that_are_wanted_as_they_are_are_not_copied() -> None:
    batch = BatchResult(np.ones((2, 5, 3), np.float32), [5, 2], 0.0, 0.0)
    wanted = (Output(OutputKind.TOKENS, False),)
    for arrays in model().compute(batch, [Sequenced(np.zeros(n, np.int64), wanted) for n in (5, 2)]):
        assert arrays is not None
        assert np.shares_memory(arrays[0], batch.output)


@pytest.mark.parametrize("kind", [kind for kind in OutputKind if kind not in (OutputKind.TOKENS, OutputKind.SPANS)])
def test_a_pooled_row_does_not_keep_the_batch_in_memory(kind: OutputKind) -> None:
    outputs, batch = model(), batch_of(some_rows([5, 2]))
    wanted = outputs.check([OutputSpec(kind)])
    with np.errstate(all="ignore"):
        made = outputs.compute(batch, [Sequenced(np.zeros(n, np.int64), wanted) for n in (5, 2)])
    for arrays in made:
        assert arrays is not None
        assert not np.shares_memory(getattr(arrays[0], "rows", arrays[0]), batch.output)


def test_a_row_of_zeros_stays_when_normalised() -> None:
    for kind in (OutputKind.TOKENS, OutputKind.MEAN):
        (rows,) = one(compute(model(), [np.zeros((2, 3), np.float32)], [(Output(kind, True),)]))
        assert not rows.any()


# What is made once


def test_a_pooling_is_made_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many outputs use it, the model's own among them."""
    pooled: Counter[tuple[OutputKind, int]] = Counter()
    from encserve_server.outputs import rows as module

    real = module.pool

    def count(result: BatchResult, kind: OutputKind, skipped: int = 0) -> Numbers:
        pooled[kind, skipped] += 1
        return real(result, kind, skipped)

    monkeypatch.setattr(module, "pool", count)
    outputs = model()
    specs = [OutputSpec(OutputKind.MEAN, dimensions=n) for n in (0, 1, 2)]
    first = outputs.check([*specs, OutputSpec(OutputKind.MEAN, l2_normalize=True), OutputSpec(OutputKind.MODEL)])
    second = outputs.check(specs[::-1])
    compute(outputs, some_rows([3, 5, 2]), [first, second, first[1:]])
    assert pooled == {(kind, 0): 1 for kind in SPAN_POOLINGS}


def test_heads_run_once_for_a_batch() -> None:
    heads = {
        OutputKind.MODEL: Counting(lambda rows: rows),
        OutputKind.MULTI_VECTOR: Counting(lambda rows: unit(rows @ PROJECTION)),
        OutputKind.SPARSE: Counting(weigh),
    }
    outputs = model(heads=heads)
    wanted = []
    for i in range(4):
        specs = [OutputSpec(OutputKind.SPARSE, max_active_dims=2 * i + n + 1) for n in range(5)]
        specs += [OutputSpec(OutputKind.MULTI_VECTOR, dimensions=n) for n in range(i)]
        wanted.append(outputs.check([*specs, OutputSpec(OutputKind.MODEL, dimensions=i)]))
    rows = some_rows([3, 5, 2, 7])
    made = compute(outputs, rows, wanted)
    assert {kind: head.runs for kind, head in heads.items()} == dict.fromkeys(heads, 1)
    for it, arrays, outputs_of in zip(rows, made, wanted, strict=True):
        weights = weigh(it[None], np.ones((1, len(it)), np.float32))[0]
        for array, output in zip(arrays or (), outputs_of, strict=True):
            if output.kind is OutputKind.SPARSE:
                kept = np.sort(np.argsort(-weights, kind="stable")[: output.max_active_dims])
                kept = kept[weights[kept] > 0]
                assert array.indices.tolist() == kept.tolist()
                np.testing.assert_allclose(array.rows[:, 0], weights[kept], rtol=1e-5)
            elif output.kind is OutputKind.MULTI_VECTOR:
                vectors = unit(it @ PROJECTION)[:, : output.dimensions or WIDTH]
                np.testing.assert_allclose(array.rows, vectors, rtol=1e-4, atol=1e-6)
                assert array.indices.tolist() == list(range(len(it)))


def test_the_head_runs_once_for_each_task() -> None:
    head = Counting(lambda rows: unit(rows @ PROJECTION))
    document = TaskSettings("", 8192, skipped_token_ids=(1,))
    outputs = model(
        heads={OutputKind.MULTI_VECTOR: head}, tasks={Task.QUERY: TaskSettings("", 8), Task.DOCUMENT: document}
    )
    specs = [OutputSpec(OutputKind.MULTI_VECTOR)]
    tasks = [Task.QUERY, Task.DOCUMENT, Task.NEITHER, Task.QUERY]
    made = compute(outputs, some_rows([4] * 4), [outputs.check(specs, task) for task in tasks])
    assert head.runs == 3
    assert [arrays[0].indices.tolist() for arrays in made if arrays] == [
        [0, 1, 2, 3],
        [0, 2, 3],
        [0, 2, 3],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize("max_vocabulary_bytes", [2**20, 8_000])
def test_a_vocabulary_goes_through_in_parts(max_vocabulary_bytes: int) -> None:
    """And a long text in slices; each row goes through the head once."""
    head = Counting(weigh)
    outputs = ModelOutputs(bundle(), {OutputKind.SPARSE: head}, max_vocabulary_bytes=max_vocabulary_bytes)
    rows = some_rows([3, 50, 1, 9])
    wanted = outputs.check([OutputSpec(OutputKind.SPARSE), OutputSpec(OutputKind.SPARSE, max_active_dims=3)])
    for it, arrays in zip(rows, compute(outputs, rows, [wanted] * 4), strict=True):
        weights = weigh(it[None], np.ones((1, len(it)), np.float32))[0]
        assert arrays is not None
        assert arrays[0].indices.tolist() == np.flatnonzero(weights).tolist()
        np.testing.assert_allclose(arrays[0].rows[:, 0], weights[weights > 0], rtol=1e-5)
        assert len(arrays[1].rows) == min(3, np.count_nonzero(weights))
    assert (head.runs > 1) == (max_vocabulary_bytes < 2**20)


def test_every_token_may_have_a_weight_under_its_own_id() -> None:
    """The largest of one that stands twice; none below 0, and none of the ids that are skipped."""
    own_id = Sparse(graph(1), VOCABULARY, SparsePooling.OWN_ID, (0,), 0)
    outputs = model(sparse=own_id, heads={OutputKind.SPARSE: Counting(lambda rows: rows[:, :1])})
    rows = some_rows([2, 1])
    rows[0][:, 0], rows[1][:, 0] = [5, 7], -1
    rows.append(np.arange(1, 3 * (VOCABULARY + 2) + 1, dtype=np.float32).reshape(-1, 3))
    wanted = outputs.check([OutputSpec(OutputKind.SPARSE), OutputSpec(OutputKind.SPARSE, max_active_dims=1)])
    found = [
        [(it.indices.tolist(), it.rows[:, 0].tolist()) for it in arrays or ()]
        for arrays in compute(outputs, rows, [wanted] * 3)
    ]
    assert found[:2] == [[([1], [7])] * 2, [([], [])] * 2]
    ids, weights = found[2][0]
    assert ids == list(range(1, VOCABULARY))
    assert weights[0] == 1 + 3 * (VOCABULARY + 1)


def test_static_weights_are_those_of_the_tokens_that_occur() -> None:
    weights = np.linspace(-1, 1, VOCABULARY, dtype=np.float32)
    weights[6] = 0
    outputs = (Output(OutputKind.SPARSE, False), Output(OutputKind.SPARSE, False, max_active_dims=1))
    static = StaticSparse(Path(), weights, 0)
    every, largest = (
        (it.rows[:, 0].tolist(), it.indices) for it in static_weights(static, np.array([5, 39, 5, 6]), outputs)
    )
    np.testing.assert_array_equal(every[1], [5, 39])
    assert every[0] == weights[[5, 39]].tolist()
    np.testing.assert_array_equal(largest[1], [39])


# Numbers that cannot be delivered

LARGE = np.float32(1e30)  # squared it is beyond float32
BAD_ROWS = {"nan": np.float32(np.nan), "infinite": np.float32(np.inf), "negative": np.float32(-np.inf)}


@pytest.mark.parametrize("kind", list(OutputKind))
@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("alike", [True, False])
def test_rows_that_are_not_finite_fail_their_sequence_alone(kind: OutputKind, bad: str, alike: bool) -> None:
    outputs, rows = model(), some_rows([4, 3, 4])
    rows[1][2, 1] = BAD_ROWS[bad]
    wanted = outputs.check([OutputSpec(kind)])
    other = wanted if alike else outputs.check([OutputSpec(OutputKind.MEAN, dimensions=1), OutputSpec(kind)])
    made = compute(outputs, rows, [wanted, wanted, other])
    assert [arrays is None for arrays in made] == [False, True, False]


def numbers_of(kind: OutputKind, made: Callable[[Numbers], Numbers]) -> dict[OutputKind, Any]:
    """A head that makes something else of rows whose first number is 9."""

    def run(rows: Numbers, mask: Numbers | None = None) -> Numbers:
        if kind is OutputKind.SPARSE:
            found = weigh(rows, np.ones(rows.shape[:2], np.float32) if mask is None else mask)
        else:
            found = unit(rows @ PROJECTION) if kind is OutputKind.MULTI_VECTOR else rows.copy()
        marked = (rows[..., 0] == 9).any(axis=tuple(range(1, rows.ndim - 1)))
        found[marked] = made(found[marked])
        return np.asarray(found, np.float32)

    return {kind: Counting(run)}


@pytest.mark.parametrize("kind", [OutputKind.MODEL, OutputKind.MULTI_VECTOR, OutputKind.SPARSE])
@pytest.mark.parametrize("made", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("data_type", DataType)
def test_what_a_head_makes_is_looked_at_too(kind: OutputKind, made: float, data_type: DataType) -> None:
    if data_type not in {OutputKind.MODEL: DataType, OutputKind.SPARSE: FLOAT_TYPES}.get(
        kind, (*FLOAT_TYPES, DataType.INT8)
    ):
        return
    pooling = ModelPooling((OutputKind.CLS,), l2_normalize=False, width=D_MODEL, head=graph(D_MODEL))
    outputs = model(heads=numbers_of(kind, lambda rows: np.full_like(rows, made)), pooling=pooling)
    rows = some_rows([4, 3, 4])
    rows[1][0, 0] = 9
    wanted = outputs.check([OutputSpec(kind, data_type=data_type)])
    assert [arrays is None for arrays in compute(outputs, rows, [wanted] * 3)] == [False, True, False]


def test_an_own_weight_that_is_no_number_is_found() -> None:
    own_id = Sparse(graph(1), VOCABULARY, SparsePooling.OWN_ID, (), 0)
    outputs = model(
        sparse=own_id, heads={OutputKind.SPARSE: Counting(lambda rows: np.where(rows[:, :1] == 9, np.nan, 1))}
    )
    rows = some_rows([4, 3])
    rows[0][2, 0] = 9
    made = compute(outputs, rows, [outputs.check([OutputSpec(OutputKind.SPARSE)])] * 2)
    assert [arrays is None for arrays in made] == [True, False]


@pytest.mark.parametrize("kind", [OutputKind.TOKENS, OutputKind.SPANS, *SPAN_POOLINGS])
@pytest.mark.parametrize("data_type", [DataType.FLOAT32, DataType.FLOAT16])
def test_a_norm_that_overflows_is_found(kind: OutputKind, data_type: DataType) -> None:
    """Where rows are finite, and dividing by their norm would make zeros of them."""
    outputs, rows = model(), some_rows([2, 2, 1])
    rows[1][:] = LARGE
    spans: list[TokenSpans | None] = [np.array([[0, len(it)]]) for it in rows]
    wanted = outputs.check([OutputSpec(kind, l2_normalize=True, data_type=data_type)])
    assert [arrays is None for arrays in compute(outputs, rows, [wanted] * 3, spans)] == [False, True, False]


@pytest.mark.parametrize("kind", [OutputKind.MODEL, OutputKind.MULTI_VECTOR])
def test_a_norm_that_overflows_in_a_head_or_before_it_is_found(kind: OutputKind) -> None:
    pooling = ModelPooling((OutputKind.MEAN,), l2_normalize=True, width=D_MODEL, head=graph(D_MODEL))
    heads: dict[OutputKind, Any] = {
        OutputKind.MODEL: Counting(lambda rows: rows),
        OutputKind.MULTI_VECTOR: Counting(
            lambda rows: rows / np.sqrt(np.square(rows).sum(axis=1, keepdims=True, dtype=np.float32))
        ),
    }
    outputs, rows = model(heads=heads, pooling=pooling), some_rows([2, 2, 1])
    rows[1][1] = LARGE
    wanted = outputs.check([OutputSpec(kind)])
    assert [arrays is None for arrays in compute(outputs, rows, [wanted] * 3)] == [False, True, False]


@pytest.mark.parametrize("kind", [OutputKind.MODEL, OutputKind.MULTI_VECTOR])
@pytest.mark.parametrize("l2_normalize", [False, True])
def test_zeros_that_a_head_makes_of_ordinary_rows_are_delivered(kind: OutputKind, l2_normalize: bool) -> None:
    """As where a ReLU passes nothing; in a batch with a norm that overflows, too."""
    pooling = ModelPooling((OutputKind.CLS,), l2_normalize=l2_normalize, width=D_MODEL, head=graph(D_MODEL))

    def passed(rows: Numbers) -> Numbers:
        norms = np.sqrt(np.square(rows).sum(axis=1, keepdims=True, dtype=np.float32))
        return np.asarray(np.maximum(rows, 0) / norms)

    outputs, rows = model(heads={kind: Counting(passed)}, pooling=pooling), some_rows([2, 2, 1])
    rows[0][:] = -1e6
    rows[1][:] = LARGE
    wanted = outputs.check([OutputSpec(kind, l2_normalize=l2_normalize)])
    first, second, _ = compute(outputs, rows, [wanted] * 3)
    assert first is not None
    assert not np.any(getattr(first[0], "rows", first[0]))
    assert second is None


@pytest.mark.parametrize("kind", [OutputKind.MEAN, OutputKind.WEIGHTED_MEAN, OutputKind.MEAN_SQRT_LENGTH])
@pytest.mark.parametrize("beside", [(), (OutputSpec(OutputKind.CLS),)])
def test_a_sum_that_overflows_is_found(kind: OutputKind, beside: tuple[OutputSpec, ...]) -> None:
    """Also where it would be one bit."""
    outputs, rows = model(), some_rows([2, 3])
    rows[1][:] = 3e38
    wanted = outputs.check([*beside, OutputSpec(kind, data_type=DataType.BINARY)])
    assert [arrays is None for arrays in compute(outputs, rows, [wanted] * 2)] == [False, True]
    (fine,) = compute(outputs, rows[1:], [outputs.check([OutputSpec(OutputKind.MAX)])])
    assert fine is not None


def test_a_sequence_fails_for_what_it_wants_alone() -> None:
    """Not for what others of the batch want."""
    outputs, rows = model(), some_rows([3, 3])
    rows[0][:] = 3e38
    first, second = outputs.check([OutputSpec(OutputKind.CLS)]), outputs.check([OutputSpec(OutputKind.MEAN)])
    assert all(arrays is not None for arrays in compute(outputs, rows, [first, second]))


def test_a_float16_beyond_its_range_is_infinite() -> None:
    outputs = model()
    wanted = outputs.check([OutputSpec(OutputKind.CLS, data_type=DataType.FLOAT16)])
    (found,) = one(compute(outputs, [np.full((1, 3), 1e6, np.float32)], [wanted]))
    assert np.isposinf(found).all()


def test_a_text_of_nothing_that_counts_has_no_vectors() -> None:
    document = TaskSettings("", 8192, kept_token_ids=(5, 6), skipped_token_ids=(6,))
    outputs = model(tasks={Task.DOCUMENT: document})
    wanted = outputs.check([OutputSpec(OutputKind.MULTI_VECTOR)], Task.DOCUMENT)
    made = compute(outputs, some_rows([3, 7]), [wanted] * 2)
    assert [arrays[0].indices.tolist() for arrays in made if arrays] == [[], [5]]
    (empty,) = one(compute(outputs, some_rows([3]), [wanted]))
    assert empty.rows.shape == (0, WIDTH)


# Ranges

POOL: dict[OutputKind, Callable[[Any], Any]] = {
    OutputKind.MEAN: lambda rows: rows.mean(axis=0),
    OutputKind.CLS: lambda rows: rows[0],
    OutputKind.MAX: lambda rows: rows.max(axis=0),
    OutputKind.LAST_TOKEN: lambda rows: rows[-1],
    OutputKind.WEIGHTED_MEAN: lambda rows: np.average(rows, axis=0, weights=np.arange(1, len(rows) + 1)),
    OutputKind.MEAN_SQRT_LENGTH: lambda rows: rows.sum(axis=0) / np.sqrt(len(rows)),
}


@st.composite
def rows_and_ranges(draw: st.DrawFn) -> tuple[Rows, TokenSpans]:
    """Rows, and ranges of them that overlap, are empty, or are all of them."""
    seq = draw(st.integers(1, 70))
    (rows,) = some_rows([seq], draw(st.integers(0, 2**32)))
    bounds = draw(st.lists(st.tuples(st.integers(0, seq), st.integers(0, seq)).map(sorted), max_size=20))
    ranges = np.array(bounds, np.int64).reshape(-1, 2)
    ranges[ranges[:, 0] == ranges[:, 1]] = 0
    return rows, ranges


@given(rows_and_ranges(), st.sampled_from(SPAN_POOLINGS))
def test_pooling_ranges_is_pooling_their_rows(made: tuple[Rows, TokenSpans], pooling: OutputKind) -> None:
    rows, ranges = made
    pooled = pool_spans(rows, ranges, pooling)
    assert pooled.shape == (len(ranges), D_MODEL)
    assert pooled.dtype == np.float32
    for found, (start, end) in zip(pooled, ranges, strict=True):
        expected = POOL[pooling](rows[start:end].astype(np.float64)) if end > start else np.zeros(D_MODEL)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_sequence_without_ranges_has_no_rows() -> None:
    outputs = model()
    wanted = outputs.check([OutputSpec(OutputKind.SPANS)])
    made = compute(outputs, some_rows([3, 2]), [wanted] * 2, [None, np.array([[0, 2]])])
    assert [arrays[0].shape for arrays in made if arrays] == [(0, D_MODEL), (1, D_MODEL)]


# Vectors that are alike


def alike(seed: int, count: int) -> Numbers:
    """(count, 3) vectors of length 1, of which several are equal."""
    vectors = np.random.default_rng(seed).integers(-2, 3, (count, 3)).astype(np.float32)
    vectors[~vectors.any(axis=1), 0] = 1
    return unit(vectors)


@given(st.integers(0, 2**32), st.integers(2, 60))
def test_the_tree_is_that_of_scipy_to_the_last_bit(seed: int, count: int) -> None:
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    squareform = pytest.importorskip("scipy.spatial.distance").squareform
    vectors = alike(seed, count)
    distances = np.clip(1 - vectors @ vectors.T, 0, 2).astype(np.float64)
    theirs = hierarchy.linkage(squareform(distances, checks=False), method="ward")
    np.testing.assert_array_equal(linkage(distances), theirs)


@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(1, 8), st.integers(0, 3), st.booleans())
def test_joining_keeps_what_is_protected_and_as_many_clusters(
    seed: int, count: int, factor: float, protected: int, l2_normalize: bool
) -> None:
    pytest.importorskip("scipy")
    vectors = alike(seed, count)
    found = pool_tokens(vectors, TokenPooling(factor, protected, l2_normalize))
    rest = max(count - protected, 0)
    assert len(found) <= min(count, protected) + max(int(rest // factor), 1 if rest else 0)
    np.testing.assert_allclose(found[:protected], vectors[:protected], atol=1e-6)
    if not l2_normalize and rest and int(rest // factor) <= 1:
        np.testing.assert_allclose(found[-1], vectors[protected:].mean(axis=0), atol=1e-6)


@pytest.mark.system  # importing sentence-transformers takes seconds
@given(st.integers(0, 2**32), st.integers(0, 40), st.floats(1, 8), st.integers(0, 3), st.booleans())
def test_clusters_are_those_of_sentence_transformers(
    seed: int, count: int, factor: float, protected: int, l2_normalize: bool
) -> None:
    """From the same rows; one of them stands twice."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules.token_pooling")
    vectors = np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)
    vectors[-1:] = vectors[:1]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = pool_tokens(vectors, TokenPooling(factor, protected, l2_normalize))
    want = theirs._hierarchical_pool_one(torch.from_numpy(vectors), factor, protected, l2_normalize).numpy()
    assert found.shape == want.shape
    np.testing.assert_allclose(found, want, atol=1e-6)


@pytest.mark.parametrize("own_factor", [0.0, 1.0, 2.0])
def test_vectors_are_joined_by_the_model_and_then_by_the_call(own_factor: float) -> None:
    """Joined vectors come from no one token; several factors share what is alike."""
    pytest.importorskip("scipy")
    own = TokenPooling(own_factor, l2_normalize=False) if own_factor else None
    outputs = model(tasks={Task.DOCUMENT: TaskSettings("", 8192, token_pooling=own)})
    asked = (0.0, 1.0, 1.5, 3.0)
    wanted = outputs.check([OutputSpec(OutputKind.MULTI_VECTOR, pool_factor=it) for it in asked], Task.DOCUMENT)
    rows = some_rows([20, 7])
    for it, arrays in zip(rows, compute(outputs, rows, [wanted] * 2), strict=True):
        for array, factor in zip(arrays or (), asked, strict=True):
            want = unit(np.asarray(it @ PROJECTION, np.float32))
            for pooling in (own, TokenPooling(factor) if factor else None):
                want = want if pooling is None else pool_tokens(want, pooling)
            np.testing.assert_allclose(array.rows, want, atol=1e-5)
            assert (array.indices is None) == (max(own_factor, factor) > 1)


def test_vectors_that_are_no_numbers_are_not_joined() -> None:
    """No chain of nearest neighbours would end."""
    pytest.importorskip("scipy")
    outputs = model(heads=numbers_of(OutputKind.MULTI_VECTOR, lambda rows: np.full_like(rows, np.nan)))
    rows = some_rows([12, 12])
    rows[0][5, 0] = 9
    wanted = outputs.check([OutputSpec(OutputKind.MULTI_VECTOR, pool_factor=2)])
    assert [arrays is None for arrays in compute(outputs, rows, [wanted] * 2)] == [True, False]


@given(st.integers(0, 2**32), st.sampled_from([1e-30, 1e19, 1e30]))
def test_joining_ends_whatever_a_head_makes(seed: int, scale: float) -> None:
    pytest.importorskip("scipy")
    vectors = np.random.default_rng(seed).standard_normal((30, 3)).astype(np.float32) * np.float32(scale)
    with np.errstate(all="ignore"):
        found: npt.NDArray[Any] = pool_tokens(vectors, TokenPooling(2.0))
    assert found.shape[1] == 3
