"""Weights over the vocabulary, of a batch's rows or of the tokens of a text alone."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.engine.base import Head
from encserve_server.errors import FieldPath, InvalidField, Part
from encserve_server.outputs.kind import FLOP_PER_US, Kind, Wanted, by_place
from encserve_server.outputs.rows import BatchRows, Column
from encserve_server.outputs.spec import FLOAT_TYPES, OutputSpec
from encserve_server.types.arrays import IndexedRows, ModelInput, Numbers
from encserve_server.types.bundles import Sparse, SparsePooling, StaticSparse
from encserve_server.types.requests import Output, OutputKind, Task

Weights = tuple[int, npt.NDArray[np.int64], Numbers]  # the place of a sequence; (n,) places in the vocabulary; (n,)

# What a head holds at a time for every token: its logits, and what is made of them. ONNX Runtime was seen to take that.
_VECTORS_PER_TOKEN = 2
# And for every text: it pooled, once more where it goes through in slices, and the places and weights made of it.
_VECTORS_PER_TEXT = 6
# The share of the memory that is left to the weights of texts that have been made, and to the reply.
_FOR_RESULTS = 1 / 8
_INDEX_BYTES = 4
# NumPy's calls for one sequence, and of each weight that may be kept the sorting, cutting and writing.
_SEQUENCE_US = 10.0
_WEIGHT_US = 0.02


class SparseWeights(Kind):
    """OutputKind.SPARSE.

    A token has a number for every word of the vocabulary before they are pooled: 120 kB for 30,522 words. So the rows
    go through the head in parts, each of them once, however many outputs are made of the weights.
    """

    per_token = True
    data_types = FLOAT_TYPES

    def __init__(self, sparse: Sparse, head: Head, max_bytes: int) -> None:
        """Takes what the model says of its weights, what makes them of its rows, and the memory for one run."""
        super().__init__(OutputKind.SPARSE, 1)
        self._sparse = sparse
        self._own_id = sparse.pooling is SparsePooling.OWN_ID
        self._skipped_ids = np.array(sparse.skipped_token_ids, np.int64)
        self._head = head
        # At a time, of the vocabulary's width.
        self._most_vectors = int(max_bytes * (1 - _FOR_RESULTS)) // (sparse.width * 4)

    def check(self, spec: OutputSpec, at: int, task: Task) -> Output:
        """See the base class; a row is a single weight."""
        for part, value in (
            (Part.OUTPUT_NORMALIZE, spec.l2_normalize),
            (Part.OUTPUT_DIMENSIONS, spec.dimensions),
        ):
            if value:
                problem = "is not for {kind}, whose rows are single weights; was {was}"
                raise InvalidField(FieldPath(part, at), problem, kind=self.kind, was=value)
        return super().check(spec, at, task)

    def _output(self, spec: OutputSpec, at: int, task: Task) -> Output:
        output = super()._output(spec, at, task)
        return output._replace(max_active_dims=spec.max_active_dims or self._sparse.max_active_dims)

    def most_weights(self, output: Output, tokens: int) -> int:
        """The most weights that a sequence can have."""
        most = output.max_active_dims or self._sparse.width
        return min(most, self._sparse.width, tokens if self._own_id else most)

    def weight_bytes(self, output: Output) -> int:
        """The bytes of one weight and its place in the vocabulary."""
        return self.row_bytes(output) + _INDEX_BYTES

    def reply_bytes(self, output: Output, tokens: int, token_rows: int, spans: int) -> int:
        """Nothing: how many weights there are is known only when they are there."""
        return 0

    def head_us(self, tokens: int) -> float:
        """A product with every word of the vocabulary for each token."""
        return 2.0 * tokens * self._sparse.head.input_width * self._sparse.head.width / FLOP_PER_US

    def finish_us(self, output: Output, tokens: int) -> float:
        """Of each weight that may be kept."""
        return _SEQUENCE_US + self.most_weights(output, tokens) * _WEIGHT_US

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """One run of the head for each part of the batch; the largest weights are found after it."""
        outputs_at = by_place(wanted)
        columns: dict[Output, list[Any]] = {output: [None] * len(batch.sequences) for output in wanted}
        weigh = self._weigh_own_ids if self._own_id else self._weigh
        for i, indices, weights in weigh(batch, list(outputs_at)):
            if not np.isfinite(weights).all():
                batch.failed.add(i)
                continue
            for output, rows in zip(outputs_at[i], _largest(indices, weights, outputs_at[i]), strict=True):
                columns[output][i] = rows
        return columns

    def _weigh(self, batch: BatchRows, places: list[int]) -> Iterator[Weights]:
        """The weights that are not 0."""
        for part in _parts(places, batch.result.lengths, self._most_vectors):
            for i, vector in zip(part, self._run(batch, part), strict=True):
                indices = vector.nonzero()[0]
                yield i, indices, vector[indices]

    def _run(self, batch: BatchRows, places: list[int]) -> Numbers:
        """(batch, seq, d_model) to (places, width); what is too long for one run goes through in slices."""
        lengths = np.array([[batch.result.lengths[i]] for i in places])  # (places, 1)
        longest = int(lengths.max())
        slice_tokens = max((self._most_vectors // len(places) - _VECTORS_PER_TEXT) // _VECTORS_PER_TOKEN, 1)
        combine = np.maximum if self._sparse.pooling is SparsePooling.MAX else np.add
        pooled = None
        for start in range(0, longest, slice_tokens):
            stop = min(start + slice_tokens, longest)
            mask = np.arange(start, stop) < lengths  # (places, seq)
            rows = batch.result.output[places, start:stop]  # (places, seq, d_model), a copy
            rows[~mask] = 0  # what stands there means nothing, and may not even be finite
            part = self._head.run(rows, mask.astype(np.float32))  # (places, width)
            pooled = part if pooled is None else combine(pooled, part, out=pooled)
        assert pooled is not None  # noqa: S101 - a sequence has at least one token
        return pooled

    def _weigh_own_ids(self, batch: BatchRows, places: list[int]) -> Iterator[Weights]:
        """Every token's weight under its own id, the largest where an id stands twice."""
        result, width = batch.result, self._sparse.width
        ids = np.concatenate([batch.sequences[i].input for i in places])  # (tokens,)
        whose = np.repeat(np.arange(len(places)), [result.lengths[i] for i in places])  # (tokens,)
        weights = self._head.run(result.output[result.tokens_of(places)])[:, 0]  # (tokens,)
        counts = ~(weights <= 0) & ~np.isin(ids, self._skipped_ids)  # NaN counts, to be found
        keys, where = np.unique((whose * width + ids)[counts], return_inverse=True)
        largest = np.zeros(len(keys), np.float32)
        np.maximum.at(largest, where, weights[counts])
        bounds = np.searchsorted(keys, np.arange(len(places) + 1) * width)
        for i, (start, end) in zip(places, itertools.pairwise(bounds), strict=True):
            yield i, keys[start:end] % width, largest[start:end]


def static_weights(static: StaticSparse, ids: ModelInput, outputs: Sequence[Output]) -> tuple[IndexedRows, ...]:
    """The weights of the tokens that occur in a text: of (seq,) ids those that are not 0, for each output."""
    present = np.unique(ids).astype(np.int64)
    weights = static.weights[present]
    return tuple(_largest(present[weights != 0], weights[weights != 0], outputs))


def _parts(places: Sequence[int], lengths: Sequence[int], most_vectors: int) -> Iterator[list[int]]:
    """Neighbours that go through the head at once, or one sequence that may have to be sliced."""
    part: list[int] = []
    longest = 0
    for i in places:
        longest = max(longest, lengths[i])
        if part and (longest * _VECTORS_PER_TOKEN + _VECTORS_PER_TEXT) * (len(part) + 1) > most_vectors:
            yield part
            part, longest = [], lengths[i]
        part.append(i)
    if part:
        yield part


def _largest(indices: npt.NDArray[np.int64], weights: Numbers, outputs: Iterable[Output]) -> Iterator[IndexedRows]:
    """(n,) places and weights, cut to the largest weights of each output; of equal ones the first are kept."""
    order = None  # from the largest weight to the smallest, sorted once
    for output in outputs:
        kept: Any = slice(None)
        if 0 < output.max_active_dims < len(indices):
            order = np.argsort(-np.abs(weights), kind="stable") if order is None else order
            kept = np.sort(order[: output.max_active_dims])
        yield IndexedRows(weights[kept, None].astype(output.data_type.dtype), indices[kept].astype("<u4"))
