"""A batch's rows, or the tokens of a text alone, to weights over the vocabulary."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from encserve_server.engine.base import BatchResult, Head
from encserve_server.types import (
    IndexedRows,
    ModelInput,
    Numbers,
    Output,
    Sparse,
    SparsePooling,
    StaticSparse,
)

# What a head holds at a time for every token: its logits, and what is made of them. ONNX Runtime was seen to take that.
_VECTORS_PER_TOKEN = 2
# And for every text: it pooled, once more where it goes through in slices, and the places and weights made of it.
_VECTORS_PER_TEXT = 6
# The share of the memory that is left to the weights of texts that have been made, and to the reply.
_FOR_RESULTS = 1 / 8


class SparseMaker:
    """Makes OutputKind.SPARSE.

    A token has a number for every word of the vocabulary before they are pooled: 120 kB for 30,522 words. So the rows
    go through the head in parts.
    """

    def __init__(self, sparse: Sparse, head: Head, max_bytes: int) -> None:
        """Takes what the model says of its weights, what makes them of its rows, and the memory for one run."""
        self._width = sparse.width
        self._pooling = sparse.pooling
        self._skipped_ids = np.array(sparse.skipped_token_ids, np.int64)
        self._head = head
        # At a time, of the vocabulary's width.
        self._most_vectors = int(max_bytes * (1 - _FOR_RESULTS)) // (sparse.width * 4)

    def make(
        self, result: BatchResult, inputs: Sequence[ModelInput], places: Sequence[int], output: Output
    ) -> list[IndexedRows]:
        """The weights of the sequences at these places of a batch."""
        if self._pooling is SparsePooling.OWN_ID:
            return self._make_of_own_ids(result, inputs, places, output)
        made = []
        for part in _parts(places, result.lengths, self._most_vectors):
            for vector in self._run(result, part):
                indices = vector.nonzero()[0]
                made.append(_largest(indices, vector[indices], output))
        return made

    def _run(self, result: BatchResult, places: list[int]) -> Numbers:
        """(batch, seq, d_model) to (places, width); what is too long for one run goes through in slices."""
        lengths = np.array([[result.lengths[i]] for i in places])  # (places, 1)
        longest = int(lengths.max())
        slice_tokens = max((self._most_vectors // len(places) - _VECTORS_PER_TEXT) // _VECTORS_PER_TOKEN, 1)
        combine = np.maximum if self._pooling is SparsePooling.MAX else np.add
        pooled = None
        for start in range(0, longest, slice_tokens):
            stop = min(start + slice_tokens, longest)
            mask = np.arange(start, stop) < lengths  # (places, seq)
            rows = result.output[places, start:stop]  # (places, seq, d_model), a copy
            rows[~mask] = 0  # what stands there means nothing, and may not even be finite
            part = self._head.run(rows, mask.astype(np.float32))  # (places, width)
            pooled = part if pooled is None else combine(pooled, part, out=pooled)
        assert pooled is not None  # noqa: S101 - a sequence has at least one token
        return pooled

    def _make_of_own_ids(
        self, result: BatchResult, inputs: Sequence[ModelInput], places: Sequence[int], output: Output
    ) -> list[IndexedRows]:
        """Every token's weight under its own id, the largest where an id stands twice."""
        ids = np.concatenate([inputs[i] for i in places])  # (tokens,)
        whose = np.repeat(np.arange(len(places)), [result.lengths[i] for i in places])  # (tokens,)
        weights = self._head.run(result.output[result.tokens_of(places)])[:, 0]  # (tokens,)
        counts = (weights > 0) & ~np.isin(ids, self._skipped_ids)
        keys, where = np.unique((whose * self._width + ids)[counts], return_inverse=True)
        largest = np.zeros(len(keys), np.float32)
        np.maximum.at(largest, where, weights[counts])
        bounds = np.searchsorted(keys, np.arange(len(places) + 1) * self._width)
        return [
            _largest(keys[start:end] % self._width, largest[start:end], output)
            for start, end in itertools.pairwise(bounds)
        ]


def static_weights(static: StaticSparse, ids: ModelInput, output: Output) -> IndexedRows:
    """The weights of the tokens that occur in a text: its (seq,) ids to those that are not 0."""
    present = np.unique(ids).astype(np.int64)
    weights = static.weights[present]
    return _largest(present[weights != 0], weights[weights != 0], output)


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


def _largest(indices: npt.NDArray[np.int64], weights: Numbers, output: Output) -> IndexedRows:
    """(n,) places and weights, cut to the largest weights; of equal ones the first in the vocabulary are kept."""
    most = output.max_active_dims
    if 0 < most < len(indices):
        kept = np.sort(np.argsort(-np.abs(weights), kind="stable")[:most])
        indices, weights = indices[kept], weights[kept]
    return IndexedRows(weights[:, None].astype(output.data_type.dtype), indices.astype("<u4"))
