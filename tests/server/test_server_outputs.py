"""Tests of the outputs of a batch.

They check every kind of output for single sequences and batches, the number of runs of each computation, and numbers
that are not finite.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from output_models import POOL, head_graph, rich_bundle

from encserve_server.engine.base import BatchResult
from encserve_server.outputs import FLOAT_TYPES, SPAN_POOLINGS, ModelOutputs, OutputSpec
from encserve_server.outputs import rows as rows_module
from encserve_server.outputs.rows import l2_normalized, quantized
from encserve_server.outputs.spans import pool_spans
from encserve_server.outputs.token_pooling import linkage, pool_tokens
from encserve_server.types.arrays import ModelInput, Numbers, OutputArrays, OutputRows, Rows, TokenSpans
from encserve_server.types.bundles import ModelPooling, Sparse, SparsePooling, TaskSettings, TokenPooling
from encserve_server.types.requests import DataType, Output, OutputKind, Task

K = OutputKind
D_MODEL, VOCABULARY, WIDTH = 3, 40, 4
RNG = np.random.default_rng(0)
PROJECTION = RNG.standard_normal((D_MODEL, WIDTH)).astype(np.float32)
WORDS = RNG.standard_normal((D_MODEL, VOCABULARY)).astype(np.float32)
TO_LABELS = np.random.default_rng(5).standard_normal((D_MODEL, 3)).astype(np.float32)
SEEDS = st.integers(0, 2**32)
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@dataclass
class Sequenced:
    """A sequence of a batch, with the fields that `ModelOutputs.compute` reads."""

    input: ModelInput
    wanted: tuple[Output, ...]
    token_spans: TokenSpans | None = None


class CountingHead:
    """A model head that computes a function and counts its runs."""

    def __init__(self, function: Callable[..., Numbers]) -> None:
        self.function = function
        self.runs = 0

    def run(self, *inputs: Numbers) -> Numbers:
        self.runs += 1
        return np.asarray(self.function(*inputs), np.float32)


def unit(rows: Numbers) -> Numbers:
    """Divide vectors by their norms, as a MaxSim head does.

    For large float32 vectors, the norm overflows to infinity.
    """
    norms: Numbers = np.sqrt(np.square(rows).sum(axis=-1, keepdims=True, dtype=np.float32))
    return np.divide(rows, norms)


def product(rows: Numbers, weights: Numbers) -> Numbers:
    """Return rows @ weights. Unlike with BLAS, the bits of a row never depend on the other rows."""
    return np.asarray(np.add.reduce(rows[..., None] * weights, axis=-2), np.float32)


def vocabulary_weights(rows: Numbers, mask: Numbers | None = None) -> Numbers:
    """Return weights over the vocabulary, as a SPLADE head does."""
    logits = np.log1p(np.maximum(product(rows, WORDS), 0))
    return np.asarray((logits if mask is None else logits * mask[:, :, None]).max(axis=1), np.float32)


def usual_heads() -> dict[OutputKind, CountingHead]:
    return {
        K.MODEL: CountingHead(lambda rows: rows * 2),
        K.MULTI_VECTOR: CountingHead(lambda rows: unit(product(rows, PROJECTION))),
        K.SPARSE: CountingHead(vocabulary_weights),
        K.SCORES: CountingHead(lambda rows: product(rows, TO_LABELS)),
    }


def model(*, heads: dict[OutputKind, CountingHead] | None = None, **changes: Any) -> ModelOutputs:
    """Return the `ModelOutputs` of a model with every kind of output. `heads` replaces some of the usual heads."""
    d_model = changes.pop("d_model", D_MODEL)
    bundle = rich_bundle(d_model, VOCABULARY, WIDTH, **changes)
    return ModelOutputs(bundle, {**usual_heads(), **(heads or {})})


def compute(
    outputs: ModelOutputs,
    rows: Sequence[Rows],
    wanted: Sequence[tuple[Output, ...]],
    spans: Sequence[TokenSpans | None] | None = None,
) -> list[OutputArrays | None]:
    """Compute the outputs of a batch from (seq, d_model) hidden states.

    The token ids are 0, 1, 2 and so on. The padding is NaN.
    """
    lengths = [len(it) for it in rows]
    padded = np.full((len(rows), max(lengths), rows[0].shape[1]), np.nan, np.float32)
    for it, place in zip(rows, padded, strict=True):
        place[: len(it)] = it
    ids = [np.arange(length) % VOCABULARY for length in lengths]
    sequences = list(map(Sequenced, ids, wanted, spans or [None] * len(rows)))
    with np.errstate(all="ignore"):
        return outputs.compute(BatchResult(padded, lengths, 0.0, 0.0), sequences)


def compute_one(outputs: ModelOutputs, rows: Rows, wanted: tuple[Output, ...], *spans: TokenSpans) -> OutputArrays:
    (arrays,) = compute(outputs, [rows], [wanted], spans or None)
    assert arrays is not None
    return arrays


def failed(
    outputs: ModelOutputs, rows: Sequence[Rows], *specs: OutputSpec, spans: Sequence[TokenSpans | None] | None = None
) -> list[bool]:
    """Return, for each sequence, whether its outputs were refused because they are not finite."""
    return [arrays is None for arrays in compute(outputs, rows, [outputs.check(specs)] * len(rows), spans)]


def random_rows(lengths: Sequence[int], seed: int = 1) -> list[Rows]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((length, D_MODEL)).astype(np.float32) for length in lengths]


def raw(arrays: OutputArrays | None) -> Any:
    """Return the bytes, types and shapes of a sequence's outputs."""
    if arrays is None:
        return None
    parts = [part for it in arrays for part in (it if isinstance(it, tuple) else (it,))]
    return [None if part is None else (part.tobytes(), part.dtype, part.shape) for part in parts]


def numbers(array: Any) -> Any:
    """Return only the vectors or weights of an output, without indices."""
    return getattr(array, "rows", array)


def own_id(*skipped: int) -> Sparse:
    return Sparse(head_graph(D_MODEL, 1), VOCABULARY, SparsePooling.OWN_ID, skipped, 0)


EVERY_SPEC = [
    *[
        OutputSpec(kind, l2_normalize, data_type, dimensions)
        for kind in (*SPAN_POOLINGS, K.MODEL, K.SPANS, K.TOKENS)
        for l2_normalize in (False, True)
        for data_type in DataType
        for dimensions in (0, 2)
        if kind is not K.TOKENS or data_type in FLOAT_TYPES
    ],
    *[OutputSpec(K.MULTI_VECTOR, data_type=DataType.INT8, dimensions=d) for d in (0, 2)],
    *[OutputSpec(K.SPANS, span_pooling=pooling) for pooling in SPAN_POOLINGS],
    *[OutputSpec(K.MULTI_VECTOR, pool_factor=factor, dimensions=d) for factor in (0, 1.5, 3) for d in (0, 2)],
    *[OutputSpec(K.SPARSE, max_active_dims=most) for most in (0, 1, 5)],
]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Rows], list[tuple[OutputSpec, ...]], list[int]]:
    """Draw several sequences: their hidden states, output specs, and numbers of prompt tokens that pooling skips."""
    lengths = draw(LENGTHS)
    wanted = st.lists(st.sampled_from(EVERY_SPEC), max_size=5, unique=True).map(tuple)
    different = draw(st.lists(wanted, min_size=1, max_size=2))
    count = len(lengths)
    return (
        random_rows(lengths, draw(SEEDS)),
        draw(st.lists(st.sampled_from(different), min_size=count, max_size=count)),
        draw(st.lists(st.sampled_from([0, 4]), min_size=count, max_size=count)),
    )


@given(batches())
def test_a_sequence_gets_the_same_bits_alone_and_with_others(
    made: tuple[list[Rows], list[tuple[OutputSpec, ...]], list[int]],
) -> None:
    """The last sequence contains infinity, so it gets no outputs."""
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
            assert numbers(array).dtype == output.data_type.dtype


@given(LENGTHS, SEEDS)
def test_outputs_follow_their_formulas(lengths: list[int], seed: int) -> None:
    rows, outputs = random_rows(lengths, seed), model()
    wanted = outputs.check([OutputSpec(K.TOKENS), *map(OutputSpec, SPAN_POOLINGS), OutputSpec(K.MODEL)])
    for it, arrays in zip(rows, compute(outputs, rows, [wanted] * len(rows)), strict=True):
        assert arrays is not None
        np.testing.assert_array_equal(arrays[0], it)
        pooled = dict(zip(SPAN_POOLINGS, arrays[1:-1], strict=True))
        for kind, found in pooled.items():
            np.testing.assert_allclose(found[0], POOL[kind](it.astype(np.float64)), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(arrays[-1], 2 * np.concatenate(list(pooled.values()), axis=1))


@given(st.integers(1, 20), st.integers(0, 24), st.sampled_from(SPAN_POOLINGS), SEEDS)
@example(5, 2, K.WEIGHTED_MEAN, 0)
@example(5, 2, K.MEAN, 0)
def test_pooling_skips_a_prompt(length: int, skipped: int, kind: OutputKind, seed: int) -> None:
    """A sequence that has only prompt tokens does not fail. Its vector has only zeros, except with CLS pooling."""
    outputs = model(pooling=ModelPooling((kind,), l2_normalize=False, width=D_MODEL, skips_prompt=True))
    (rows,) = random_rows([length], seed)
    (found,) = compute_one(outputs, rows, outputs.check([OutputSpec(K.MODEL)], skipped_tokens=skipped))
    rest = rows[skipped:].astype(np.float64)
    if not skipped or length > skipped:
        if kind is K.WEIGHTED_MEAN:
            want = np.average(rest, axis=0, weights=np.arange(skipped + 1, length + 1))
        else:
            want = POOL[kind](rest)
        np.testing.assert_allclose(found[0], 2 * want, rtol=1e-3, atol=1e-5)  # the head multiplies by 2
    elif kind is not K.CLS:
        assert not found.any()


@given(LENGTHS, SEEDS)
def test_normalised_rows_have_length_1(lengths: list[int], seed: int) -> None:
    outputs, rows = model(), random_rows(lengths, seed)
    kinds = (K.TOKENS, K.MEAN, K.MODEL, K.MULTI_VECTOR)
    wanted = outputs.check([OutputSpec(kind, l2_normalize=True, dimensions=2) for kind in kinds])
    for arrays in compute(outputs, rows, [wanted] * len(rows)):
        for array in arrays or ():
            np.testing.assert_allclose(np.linalg.norm(numbers(array), axis=1), 1, rtol=1e-5)


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(SPAN_POOLINGS), SEEDS)
def test_a_bit_of_binary_is_set_for_a_positive_number(length: int, width: int, kind: OutputKind, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(-1, 2, (length, width)).astype(np.float32)
    outputs = model(d_model=width)
    wanted = outputs.check([OutputSpec(kind), OutputSpec(kind, data_type=DataType.BINARY)])
    floats, bits = compute_one(outputs, rows, wanted)
    np.testing.assert_array_equal(bits, np.packbits(floats > 0, axis=1))
    assert bits.nbytes == outputs.reply_bytes(wanted[1:], length, token_rows=length, spans=0)


INT8_KINDS = (*SPAN_POOLINGS, K.MODEL, K.SPANS, K.MULTI_VECTOR)


@given(st.integers(1, 20), st.integers(2, 40), st.sampled_from(INT8_KINDS), st.booleans(), SEEDS)
def test_int8_is_its_formula_of_the_normalised_vector(
    length: int, width: int, kind: OutputKind, is_cut: bool, seed: int
) -> None:
    """The int8 numbers equal the formula exactly, with and without `l2_normalize`."""
    width = D_MODEL if kind is K.MULTI_VECTOR else width
    rows = np.random.default_rng(seed).standard_normal((length, width)).astype(np.float32)
    outputs = model(d_model=width)
    plain = OutputSpec(kind, dimensions=outputs.kinds[kind].width // 2 if is_cut else 0)
    int8 = plain._replace(data_type=DataType.INT8)
    wanted = outputs.check([plain._replace(l2_normalize=True), int8, int8._replace(l2_normalize=True)])
    spans = np.array([[0, length], [length // 2, length], [0, 0]])
    floats, found, again = map(numbers, compute_one(outputs, rows, wanted, spans))
    factor = np.float32(127 * np.sqrt(floats.shape[1]) / 4)
    np.testing.assert_array_equal(found, np.clip(np.rint(floats * factor), -128, 127).astype(np.int8))
    assert found.tobytes() == again.tobytes()
    assert all(outputs.is_l2_normalized(it) for it in wanted)
    if kind in SPAN_POOLINGS:
        assert found.nbytes == outputs.reply_bytes(wanted[1:2], length, token_rows=length, spans=0)


def angles(left: OutputRows, right: OutputRows) -> Any:
    """Return the (n,) angles, in radians, between the rows of two (n, width) arrays."""
    products = np.linalg.norm(left.astype(np.float64), axis=1) * np.linalg.norm(right.astype(np.float64), axis=1)
    return np.arccos(np.clip(np.einsum("nw,nw->n", left, right, dtype=np.float64) / products, -1, 1))


@given(st.integers(2, 2048), SEEDS, st.floats(0, 3))
def test_int8_changes_an_angle_by_less_than_2_degrees(width: int, seed: int, nearness: float) -> None:
    """If no number is clipped, int8 turns each vector by at most asin(2 / 127), which is about 0.9 degrees.

    So the angle between two vectors changes by at most twice this value.
    """
    made = np.random.default_rng(seed).uniform(-1, 1, (2, 20, width)).astype(np.float32)
    made[1] += np.float32(nearness) * made[0]
    left, right = (l2_normalized(it)[0] for it in made)
    fits = np.abs(np.concatenate([left, right], axis=1)).max(axis=1) * np.sqrt(width) < 4
    turned = np.abs(angles(quantized(left), quantized(right)) - angles(left, right))
    assert (turned[fits] <= 2 * np.arcsin(2 / 127) + 1e-6).all()


@pytest.mark.parametrize("kind", OutputKind)
def test_only_rows_of_tokens_share_memory_with_the_batch(kind: OutputKind) -> None:
    """Token vectors share memory with the batch. All other outputs are copies, so that the batch can be freed."""
    outputs, batch = model(), BatchResult(np.ones((2, 5, D_MODEL), np.float32), [5, 2], 0.0, 0.0)
    wanted, spans = outputs.check([OutputSpec(kind)]), np.array([[0, 2]])
    for arrays in outputs.compute(batch, [Sequenced(np.zeros(n, np.int64), wanted, spans) for n in (5, 2)]):
        assert arrays is not None
        assert np.shares_memory(numbers(arrays[0]), batch.output) == (kind is K.TOKENS)


def test_rows_of_zeros_are_normalised_to_zeros() -> None:
    for kind in (K.TOKENS, K.MEAN):
        (rows,) = compute_one(model(), np.zeros((2, 3), np.float32), (Output(kind, True),))
        assert not rows.any()


# Each computation runs once for a batch


def test_a_pooling_runs_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of a pooling serves all outputs of a batch, including the model's own output."""
    pooled: Counter[tuple[OutputKind, int]] = Counter()
    pool = rows_module.pool

    def count(result: BatchResult, kind: OutputKind, skipped: int = 0) -> Numbers:
        pooled[kind, skipped] += 1
        return pool(result, kind, skipped)

    monkeypatch.setattr(rows_module, "pool", count)
    outputs = model()
    specs = [OutputSpec(K.MEAN, dimensions=n) for n in (0, 1, 2)]
    first = outputs.check([*specs, OutputSpec(K.MEAN, l2_normalize=True), OutputSpec(K.MODEL)])
    compute(outputs, random_rows([3, 5, 2]), [first, outputs.check(specs[::-1]), first[1:]])
    assert pooled == {(kind, 0): 1 for kind in SPAN_POOLINGS}


def test_a_head_runs_once_for_a_batch() -> None:
    heads = usual_heads()
    outputs = model(heads=heads)
    wanted = []
    for i in range(4):
        specs = [OutputSpec(K.SPARSE, max_active_dims=2 * i + n + 1) for n in range(5)]
        specs += [OutputSpec(K.MULTI_VECTOR, dimensions=n) for n in range(i)]
        wanted.append(outputs.check([*specs, OutputSpec(K.MODEL, dimensions=i), OutputSpec(K.SCORES)]))
    rows = random_rows([3, 5, 2, 7])
    made = compute(outputs, rows, wanted)
    assert {kind: head.runs for kind, head in heads.items()} == dict.fromkeys(heads, 1)
    for it, arrays, checked in zip(rows, made, wanted, strict=True):
        weights = vocabulary_weights(it[None])[0]
        for array, output in zip(arrays or (), checked, strict=True):
            if output.kind is K.SPARSE:
                kept = np.sort(np.argsort(-weights, kind="stable")[: output.max_active_dims])
                kept = kept[weights[kept] > 0]
                assert array.indices.tolist() == kept.tolist()
                np.testing.assert_allclose(array.rows[:, 0], weights[kept], rtol=1e-5)
            elif output.kind is K.SCORES:
                np.testing.assert_allclose(array[0], it.mean(axis=0) @ TO_LABELS, rtol=1e-4, atol=1e-6)
            elif output.kind is K.MULTI_VECTOR:
                vectors = unit(it @ PROJECTION)[:, : output.dimensions or WIDTH]
                np.testing.assert_allclose(array.rows, vectors, rtol=1e-4, atol=1e-6)
                assert array.indices.tolist() == list(range(len(it)))


def test_a_head_runs_once_for_each_task() -> None:
    """The batch has two queries, a document, and a call without a task. The head runs three times, once per task.

    The document and the call without a task skip one token. The queries skip no token.
    """
    heads = usual_heads()
    document = TaskSettings("", 8192, skipped_token_ids=(1,))
    outputs = model(heads=heads, tasks={Task.QUERY: TaskSettings("", 8), Task.DOCUMENT: document})
    tasks = [Task.QUERY, Task.DOCUMENT, Task.NEITHER, Task.QUERY]
    wanted = [outputs.check([OutputSpec(K.MULTI_VECTOR)], task) for task in tasks]
    made = compute(outputs, random_rows([4] * 4), wanted)
    assert heads[K.MULTI_VECTOR].runs == 3
    every, fewer = [0, 1, 2, 3], [0, 2, 3]
    assert [arrays[0].indices.tolist() for arrays in made if arrays] == [every, fewer, fewer, every]


@pytest.mark.parametrize("max_vocabulary_bytes", [2**20, 8_000])
def test_little_memory_splits_a_vocabulary_and_long_texts(max_vocabulary_bytes: int) -> None:
    heads = usual_heads()
    outputs = ModelOutputs(rich_bundle(D_MODEL, VOCABULARY, WIDTH), heads, max_vocabulary_bytes=max_vocabulary_bytes)
    rows = random_rows([3, 50, 1, 9])
    wanted = outputs.check([OutputSpec(K.SPARSE), OutputSpec(K.SPARSE, max_active_dims=3)])
    for it, arrays in zip(rows, compute(outputs, rows, [wanted] * 4), strict=True):
        weights = vocabulary_weights(it[None])[0]
        assert arrays is not None
        assert arrays[0].indices.tolist() == np.flatnonzero(weights).tolist()
        np.testing.assert_allclose(arrays[0].rows[:, 0], weights[weights > 0], rtol=1e-5)
        assert len(arrays[1].rows) == min(3, np.count_nonzero(weights))
    assert (heads[K.SPARSE].runs > 1) == (max_vocabulary_bytes < 2**20)


def test_a_token_may_have_a_weight_under_its_own_id() -> None:
    """A repeated token gets its largest weight. Negative weights and skipped ids are left out."""
    outputs = model(sparse=own_id(0), heads={K.SPARSE: CountingHead(lambda rows: rows[:, :1])})
    rows = random_rows([2, 1])
    rows[0][:, 0], rows[1][:, 0] = [5, 7], -1
    rows.append(np.arange(1, 3 * (VOCABULARY + 2) + 1, dtype=np.float32).reshape(-1, 3))
    wanted = outputs.check([OutputSpec(K.SPARSE), OutputSpec(K.SPARSE, max_active_dims=1)])
    found = [
        [(it.indices.tolist(), it.rows[:, 0].tolist()) for it in arrays or ()]
        for arrays in compute(outputs, rows, [wanted] * 3)
    ]
    assert found[:2] == [[([1], [7])] * 2, [([], [])] * 2]
    ids, weights = found[2][0]
    assert ids == list(range(1, VOCABULARY))
    assert weights[0] == 1 + 3 * (VOCABULARY + 1)


# Numbers that are not finite

LARGE = np.float32(1e30)  # the square of this number overflows float32
NOT_FINITE = [np.float32(it) for it in (np.nan, np.inf, -np.inf)]


@pytest.mark.parametrize("kind", OutputKind)
@pytest.mark.parametrize("alike", [True, False])
def test_rows_that_are_not_finite_fail_only_their_sequence(kind: OutputKind, alike: bool) -> None:
    outputs = model()
    wanted = outputs.check([OutputSpec(kind)])
    other = wanted if alike else outputs.check([OutputSpec(K.MEAN, dimensions=1), OutputSpec(kind)])
    for bad in NOT_FINITE:
        rows = random_rows([4, 3, 4])
        rows[1][2, 1] = bad
        made = compute(outputs, rows, [wanted, wanted, other])
        assert [arrays is None for arrays in made] == [False, True, False]


def head_failing_at_9(kind: OutputKind, bad: np.float32) -> dict[OutputKind, CountingHead]:
    """Return a head that returns `bad` for each input with a 9 in the first dimension."""
    usual = usual_heads()[kind].function

    def run(rows: Numbers, *mask: Numbers) -> Numbers:
        found = np.array(usual(rows, *mask))
        found[(rows[..., 0] == 9).any(axis=tuple(range(1, rows.ndim - 1)))] = bad
        return found

    return {kind: CountingHead(run)}


@pytest.mark.parametrize(
    ("kind", "data_types"),
    [(K.MODEL, tuple(DataType)), (K.MULTI_VECTOR, (*FLOAT_TYPES, DataType.INT8)), (K.SPARSE, tuple(FLOAT_TYPES))],
)
def test_a_heads_numbers_that_are_not_finite_fail_only_their_sequence(
    kind: OutputKind, data_types: tuple[DataType, ...]
) -> None:
    pooling = ModelPooling((K.CLS,), l2_normalize=False, width=D_MODEL, head=head_graph(D_MODEL, D_MODEL))
    rows = random_rows([4, 3, 4])
    rows[1][0, 0] = 9
    for bad in NOT_FINITE:
        outputs = model(heads=head_failing_at_9(kind, bad), pooling=pooling)
        for data_type in data_types:
            assert failed(outputs, rows, OutputSpec(kind, data_type=data_type)) == [False, True, False]


def test_a_weight_under_its_own_id_that_is_not_finite_is_found() -> None:
    head = CountingHead(lambda rows: np.where(rows[:, :1] == 9, np.nan, 1))
    rows = random_rows([4, 3])
    rows[0][2, 0] = 9
    assert failed(model(sparse=own_id(), heads={K.SPARSE: head}), rows, OutputSpec(K.SPARSE)) == [True, False]


@pytest.mark.parametrize("kind", [K.TOKENS, K.SPANS, *SPAN_POOLINGS])
@pytest.mark.parametrize("data_type", [DataType.FLOAT32, DataType.FLOAT16])
def test_an_overflow_of_a_norm_is_found(kind: OutputKind, data_type: DataType) -> None:
    """The hidden states are finite, but the norm is infinite. Without an error, the division would return zeros."""
    rows = random_rows([2, 2, 1])
    rows[1][:] = LARGE
    spans: list[TokenSpans | None] = [np.array([[0, len(it)]]) for it in rows]
    spec = OutputSpec(kind, l2_normalize=True, data_type=data_type)
    assert failed(model(), rows, spec, spans=spans) == [False, True, False]


@pytest.mark.parametrize("kind", [K.MODEL, K.MULTI_VECTOR])
def test_an_overflow_of_a_norm_in_or_before_a_head_is_found(kind: OutputKind) -> None:
    pooling = ModelPooling((K.MEAN,), l2_normalize=True, width=D_MODEL, head=head_graph(D_MODEL, D_MODEL))
    heads = {K.MODEL: CountingHead(lambda rows: rows), K.MULTI_VECTOR: CountingHead(unit)}
    rows = random_rows([2, 2, 1])
    rows[1][1] = LARGE
    assert failed(model(heads=heads, pooling=pooling), rows, OutputSpec(kind)) == [False, True, False]


@pytest.mark.parametrize("kind", [K.MODEL, K.MULTI_VECTOR])
@pytest.mark.parametrize("l2_normalize", [False, True])
def test_zeros_from_a_head_are_returned(kind: OutputKind, l2_normalize: bool) -> None:
    """Zeros from a ReLU in a head are valid, even if the norm of another sequence overflows."""
    pooling = ModelPooling((K.CLS,), l2_normalize=l2_normalize, width=D_MODEL, head=head_graph(D_MODEL, D_MODEL))
    head = CountingHead(lambda rows: np.maximum(unit(rows), 0))
    outputs, rows = model(heads={kind: head}, pooling=pooling), random_rows([2, 2, 1])
    rows[0][:] = -1e6
    rows[1][:] = LARGE
    wanted = outputs.check([OutputSpec(kind, l2_normalize=l2_normalize)])
    first, second, _ = compute(outputs, rows, [wanted] * 3)
    assert first is not None
    assert not np.any(numbers(first[0]))
    assert second is None


@pytest.mark.parametrize("kind", [K.MEAN, K.WEIGHTED_MEAN, K.MEAN_SQRT_LENGTH])
@pytest.mark.parametrize("others", [(), (OutputSpec(K.CLS),)])
def test_an_overflow_of_a_sum_fails_the_outputs_that_need_it(kind: OutputKind, others: tuple[OutputSpec, ...]) -> None:
    """After the overflow of a sum, a sequence fails only if one of its outputs needs the sum.

    Binary outputs fail too, although bits are always finite.
    """
    outputs, rows = model(), random_rows([2, 3])
    rows[1][:] = 3e38
    assert failed(outputs, rows, *others, OutputSpec(kind, data_type=DataType.BINARY)) == [False, True]
    no_sum, with_sum = outputs.check([OutputSpec(K.MAX)]), outputs.check([OutputSpec(kind)])
    assert None not in compute(outputs, rows, [with_sum, no_sum])


def test_a_float16_beyond_its_range_is_infinite() -> None:
    outputs = model()
    wanted = outputs.check([OutputSpec(K.CLS, data_type=DataType.FLOAT16)])
    (found,) = compute_one(outputs, np.full((1, 3), 1e6, np.float32), wanted)
    assert np.isposinf(found).all()


def test_a_text_may_have_no_vectors() -> None:
    document = TaskSettings("", 8192, kept_token_ids=(5, 6), skipped_token_ids=(6,))
    outputs = model(tasks={Task.DOCUMENT: document})
    wanted = outputs.check([OutputSpec(K.MULTI_VECTOR)], Task.DOCUMENT)
    made = compute(outputs, random_rows([3, 7]), [wanted] * 2)
    assert [arrays[0].indices.tolist() for arrays in made if arrays] == [[], [5]]
    (empty,) = compute_one(outputs, random_rows([3])[0], wanted)
    assert empty.rows.shape == (0, WIDTH)


# Ranges of tokens


@st.composite
def rows_and_ranges(draw: st.DrawFn) -> tuple[Rows, TokenSpans]:
    """Draw hidden states and ranges of tokens. Ranges may overlap, be empty, or contain all tokens."""
    seq = draw(st.integers(1, 70))
    (rows,) = random_rows([seq], draw(SEEDS))
    bounds = draw(st.lists(st.tuples(st.integers(0, seq), st.integers(0, seq)).map(sorted), max_size=20))
    ranges = np.array(bounds, np.int64).reshape(-1, 2)
    ranges[ranges[:, 0] == ranges[:, 1]] = 0
    return rows, ranges


@given(rows_and_ranges(), st.sampled_from(SPAN_POOLINGS))
def test_a_pooled_range_is_the_pooling_of_its_rows(made: tuple[Rows, TokenSpans], pooling: OutputKind) -> None:
    rows, ranges = made
    pooled = pool_spans(rows, ranges, pooling)
    assert pooled.shape == (len(ranges), D_MODEL)
    assert pooled.dtype == np.float32
    for found, (start, end) in zip(pooled, ranges, strict=True):
        expected = POOL[pooling](rows[start:end].astype(np.float64)) if end > start else np.zeros(D_MODEL)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


# Vectors joined into clusters


def similar_vectors(seed: int, count: int) -> Numbers:
    """Return vectors of length 1, in the shape (count, 3). Some vectors may be equal."""
    vectors = np.random.default_rng(seed).integers(-2, 3, (count, 3)).astype(np.float32)
    vectors[~vectors.any(axis=1), 0] = 1
    return unit(vectors)


@given(SEEDS, st.integers(2, 60))
def test_the_tree_has_the_bits_of_scipys(seed: int, count: int) -> None:
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    squareform = pytest.importorskip("scipy.spatial.distance").squareform
    vectors = similar_vectors(seed, count)
    distances = np.clip(1 - vectors @ vectors.T, 0, 2).astype(np.float64)
    theirs = hierarchy.linkage(squareform(distances, checks=False), method="ward")
    np.testing.assert_array_equal(linkage(distances), theirs)


@given(SEEDS, st.integers(1, 40), st.floats(1, 8), st.integers(0, 3), st.booleans())
def test_token_pooling_keeps_protected_tokens_and_the_number_of_clusters(
    seed: int, count: int, factor: float, protected: int, l2_normalize: bool
) -> None:
    pytest.importorskip("scipy")
    vectors = similar_vectors(seed, count)
    found = pool_tokens(vectors, TokenPooling(factor, protected, l2_normalize))
    rest = max(count - protected, 0)
    assert len(found) <= min(count, protected) + max(int(rest // factor), 1 if rest else 0)
    np.testing.assert_allclose(found[:protected], vectors[:protected], atol=1e-6)
    if not l2_normalize and rest and int(rest // factor) <= 1:
        np.testing.assert_allclose(found[-1], vectors[protected:].mean(axis=0), atol=1e-6)


@pytest.mark.system  # the import of sentence-transformers takes seconds
@given(SEEDS, st.integers(0, 40), st.floats(1, 8), st.integers(0, 3), st.booleans())
def test_clusters_are_those_of_sentence_transformers(
    seed: int, count: int, factor: float, protected: int, l2_normalize: bool
) -> None:
    """The last vector is a copy of the first, so the test includes equal vectors."""
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
    """A document's vectors are joined twice: with the model's factor, then with the call's factor.

    A joined vector has no token index. This model does not join the vectors of queries. A call without a task counts as
    a document.
    """
    pytest.importorskip("scipy")
    own = TokenPooling(own_factor, l2_normalize=False) if own_factor else None
    tasks = {Task.DOCUMENT: TaskSettings("", 8192, token_pooling=own), Task.QUERY: TaskSettings("", 8192)}
    outputs, factors, rows = model(tasks=tasks), (0.0, 1.0, 1.5, 3.0), random_rows([20, 7])
    specs = [OutputSpec(K.MULTI_VECTOR, pool_factor=it) for it in factors]
    for task in (Task.DOCUMENT, Task.NEITHER):
        for it, arrays in zip(rows, compute(outputs, rows, [outputs.check(specs, task)] * 2), strict=True):
            for array, factor in zip(arrays or (), factors, strict=True):
                want = unit(np.asarray(it @ PROJECTION, np.float32))
                for pooling in (own, TokenPooling(factor) if factor else None):
                    want = want if pooling is None else pool_tokens(want, pooling)
                np.testing.assert_allclose(array.rows, want, atol=1e-5)
                assert (array.indices is None) == (max(own_factor, factor) > 1)
    (query,) = compute_one(outputs, rows[0], outputs.check(specs[:1], Task.QUERY))
    np.testing.assert_allclose(query.rows, unit(np.asarray(rows[0] @ PROJECTION, np.float32)), atol=1e-5)


def test_vectors_that_are_not_finite_are_not_joined() -> None:
    """A sequence with NaN fails before its vectors are joined: with NaN, the search for neighbours would never end."""
    pytest.importorskip("scipy")
    outputs = model(heads=head_failing_at_9(K.MULTI_VECTOR, np.float32(np.nan)))
    rows = random_rows([12, 12])
    rows[0][:, 0] = 9
    assert failed(outputs, rows, OutputSpec(K.MULTI_VECTOR, pool_factor=2)) == [True, False]


@given(SEEDS, st.sampled_from([1e-30, 1e19, 1e30]))
def test_joining_ends_for_numbers_of_any_size(seed: int, scale: float) -> None:
    pytest.importorskip("scipy")
    vectors = np.random.default_rng(seed).standard_normal((30, 3)).astype(np.float32) * np.float32(scale)
    with np.errstate(all="ignore"):
        assert pool_tokens(vectors, TokenPooling(2.0)).shape[1] == 3
