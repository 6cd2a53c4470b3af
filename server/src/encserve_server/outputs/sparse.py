"""Sparse weights over the vocabulary, from the rows of a batch or from a table of token weights."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.engine.base import Head
from encserve_server.outputs.kind import Kind, Wanted, outputs_by_place
from encserve_server.outputs.rows import BatchRows, Column
from encserve_server.outputs.spec import FLOAT_TYPES, OutputSpec
from encserve_server.types.arrays import IndexedRows, ModelInput, Numbers
from encserve_server.types.bundles import Sparse, SparsePooling, StaticSparse
from encserve_server.types.requests import Output, OutputKind, Task

Weights = tuple[int, npt.NDArray[np.int64], Numbers]  # a sequence's index in the batch; (n,) token ids; (n,) weights

# The memory for a run of the head is counted in vectors with one number for each entry of the vocabulary. Each token
# needs a vector of logits and a vector of activations.
_VECTORS_PER_TOKEN = 2
# Each text needs vectors for the pooled weights, for the pooled weights of a slice, for the ids of nonzero weights, and
# for the nonzero weights.
_VECTORS_PER_TEXT = 6
# The share of the memory that is reserved for finished weights and the reply.
_RESULT_SHARE = 1 / 8
_INDEX_BYTES = 4


class SparseWeights(Kind):
    """OutputKind.SPARSE.

    Before pooling, each token of a text has a number for each entry of the vocabulary: 120 kB for 30,522 entries. So
    the head runs on one part of the batch at a time. All outputs share these runs.
    """

    per_token = True
    data_types = FLOAT_TYPES

    def __init__(self, sparse: Sparse, head: Head, max_bytes: int) -> None:
        """Set the description of the sparse weights, the head, and the memory for one run of the head in bytes."""
        super().__init__(OutputKind.SPARSE, 1)
        self._sparse = sparse
        self._own_id = sparse.pooling is SparsePooling.OWN_ID
        self._skipped_ids = np.array(sparse.skipped_token_ids, np.int64)
        self._head = head
        self._max_vectors = int(max_bytes * (1 - _RESULT_SHARE)) // (sparse.width * 4)

    def check(self, spec: OutputSpec, at: int, task: Task) -> Output:
        """See `Kind.check`. A row is a single weight, so rows cannot be cut or normalized."""
        self._refuse_cut_and_norm(spec, at, "has single weights as rows")
        return super().check(spec, at, task)

    def _output(self, spec: OutputSpec, at: int, task: Task) -> Output:
        output = super()._output(spec, at, task)
        return output._replace(max_active_dims=spec.max_active_dims or self._sparse.max_active_dims)

    def weight_bytes(self, output: Output) -> int:
        """Return the size of one weight and its token id in bytes."""
        return self.row_bytes(output) + _INDEX_BYTES

    def reply_bytes(self, output: Output, tokens: int, token_rows: int, spans: int) -> int:
        """Return 0, because the number of weights is known only after the run."""
        return 0

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """Run the head once for each part of the batch, and keep the largest weights for each output."""
        outputs_at = outputs_by_place(wanted)
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
        """Yield the nonzero weights of each sequence, for SparsePooling.MAX and SparsePooling.SUM."""
        for part in _parts(places, batch.result.lengths, self._max_vectors):
            for i, vector in zip(part, self._run(batch, part), strict=True):
                indices = vector.nonzero()[0]
                yield i, indices, vector[indices]

    def _run(self, batch: BatchRows, places: list[int]) -> Numbers:
        """Return the (len(places), width) pooled weights of the sequences with the indices `places`.

        If the sequences are too long for one run of the head, the head runs on one slice of tokens after another.
        """
        lengths = np.array([[batch.result.lengths[i]] for i in places])  # (places, 1)
        longest = int(lengths.max())
        slice_tokens = max((self._max_vectors // len(places) - _VECTORS_PER_TEXT) // _VECTORS_PER_TOKEN, 1)
        combine = np.maximum if self._sparse.pooling is SparsePooling.MAX else np.add
        pooled = None
        for start in range(0, longest, slice_tokens):
            stop = min(start + slice_tokens, longest)
            mask = np.arange(start, stop) < lengths  # (places, seq)
            rows = batch.result.output[places, start:stop]  # (places, seq, d_model), a copy
            rows[~mask] = 0  # padding may contain NaN or infinity
            part = self._head.run(rows, mask.astype(np.float32))  # (places, width)
            pooled = part if pooled is None else combine(pooled, part, out=pooled)
        assert pooled is not None  # noqa: S101 - a sequence has at least one token
        return pooled

    def _weigh_own_ids(self, batch: BatchRows, places: list[int]) -> Iterator[Weights]:
        """Yield the weight of each token id of a sequence. If an id occurs twice, use the larger weight."""
        result, width = batch.result, self._sparse.width
        ids = np.concatenate([batch.sequences[i].input for i in places])  # (tokens,)
        owners = np.repeat(np.arange(len(places)), [result.lengths[i] for i in places])  # (tokens,)
        weights = self._head.run(result.output[result.token_mask(places)])[:, 0]  # (tokens,)
        counts = ~(weights <= 0) & ~np.isin(ids, self._skipped_ids)  # true for NaN, which `compute` must find
        keys, positions = np.unique((owners * width + ids)[counts], return_inverse=True)
        largest = np.zeros(len(keys), np.float32)
        np.maximum.at(largest, positions, weights[counts])
        bounds = np.searchsorted(keys, np.arange(len(places) + 1) * width)
        for i, (start, end) in zip(places, itertools.pairwise(bounds), strict=True):
            yield i, keys[start:end] % width, largest[start:end]


def static_weights(static: StaticSparse, ids: ModelInput, outputs: Sequence[Output]) -> tuple[IndexedRows, ...]:
    """Look up the weights of a text's tokens in a table. Return the weights for each output.

    Args:
        static: The table.
        ids: (seq,) the token ids of the text.
        outputs: The outputs.
    """
    present = np.unique(ids).astype(np.int64)
    weights = static.weights[present]
    return tuple(_largest(present[weights != 0], weights[weights != 0], outputs))


def _parts(places: Sequence[int], lengths: Sequence[int], max_vectors: int) -> Iterator[list[int]]:
    """Yield groups of sequences for one run of the head. A sequence that is too long for a run is a separate group."""
    part: list[int] = []
    longest = 0
    for i in places:
        longest = max(longest, lengths[i])
        if part and (longest * _VECTORS_PER_TOKEN + _VECTORS_PER_TEXT) * (len(part) + 1) > max_vectors:
            yield part
            part, longest = [], lengths[i]
        part.append(i)
    if part:
        yield part


def _largest(indices: npt.NDArray[np.int64], weights: Numbers, outputs: Iterable[Output]) -> Iterator[IndexedRows]:
    """For each output, yield the largest of the (n,) weights. Of equal weights, yield the first ones."""
    order = None  # from the largest weight to the smallest, sorted once
    for output in outputs:
        kept: Any = slice(None)
        if 0 < output.max_active_dims < len(indices):
            order = np.argsort(-np.abs(weights), kind="stable") if order is None else order
            kept = np.sort(order[: output.max_active_dims])
        yield IndexedRows(weights[kept, None].astype(output.data_type.dtype), indices[kept].astype("<u4"))
