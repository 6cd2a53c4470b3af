"""One vector for each sequence: the poolings, and what a model was trained to make."""

from collections.abc import Mapping, Sequence

import numpy as np

from encserve_server.engine.base import Head
from encserve_server.outputs.kind import Kind, Wanted, all_places
from encserve_server.outputs.rows import BatchRows, Column, finish, lost_in_head, normalized
from encserve_server.outputs.spec import OutputSpec
from encserve_server.types.arrays import Numbers
from encserve_server.types.bundles import ModelPooling
from encserve_server.types.requests import Output, OutputKind, Task

# The poolings that add nothing up, so that what is finite stays so.
_PICKS = (OutputKind.CLS, OutputKind.LAST_TOKEN, OutputKind.MAX)
# NumPy's calls and the reply for one row, measured at 16 outputs of 256 sequences.
_ROW_US = 2.0
# Of each number of each token, for one pooling.
_POOLED_NUMBER_US = 0.0005


class Pooled(Kind):
    """A pooling by its name."""

    def finish_us(self, output: Output, tokens: int) -> float:
        """Of the row, and of one pooling."""
        return _ROW_US + tokens * self.width * _POOLED_NUMBER_US

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """One pooling of the batch."""
        pooled = batch.pooled(self.kind)  # (batch, d_model)
        finite = self.kind in _PICKS or self.kind is batch.finite_pooling
        columns = {}
        for output, places in wanted.items():
            rows = pooled if len(places) == len(pooled) else pooled[places]
            columns[output] = batch.one_row_each(*finish(rows, output, finite=finite), places)
        return columns


class ModelVector(Kind):
    """OutputKind.MODEL: one pooling, or several joined, with a head behind them."""

    def __init__(self, pooling: ModelPooling, d_model: int, head: Head | None) -> None:
        """Takes what the model was trained for, the width of a row, and the head; None if the model has no head."""
        super().__init__(OutputKind.MODEL, pooling.width)
        self._pooling = pooling
        self._d_model = d_model
        self._head = head

    def _output(self, spec: OutputSpec, at: int, task: Task) -> Output:
        """The vector, cut to what is asked for or else to the model's own, then normalised if that is asked for."""
        del at, task
        pooling, dimensions = self._pooling, spec.dimensions or self._pooling.dimensions
        if pooling.is_plain and not (pooling.l2_normalize and dimensions):
            l2_normalize = pooling.l2_normalize or spec.l2_normalize
            return Output(pooling.kinds[0], l2_normalize, spec.data_type, dimensions)
        return Output(OutputKind.MODEL, spec.l2_normalize, spec.data_type, dimensions)

    def gives_unit_vectors(self, output: Output) -> bool:
        """Whether the vectors have length 1 without being asked for that: being cut takes that away."""
        return self._pooling.l2_normalize and output.dimensions in (0, self.width)

    def finish_us(self, output: Output, tokens: int) -> float:
        """Of the row, a head, and the poolings."""
        return 2 * _ROW_US + tokens * len(self._pooling.kinds) * self._d_model * _POOLED_NUMBER_US

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """One run of the head for each number of tokens that are left out."""
        columns = {}
        for skipped in dict.fromkeys(output.skipped_tokens for output in wanted):
            alike = {output: places for output, places in wanted.items() if output.skipped_tokens == skipped}
            places = all_places(alike.values())
            vectors = self._vectors(batch, places, skipped)  # (places, width)
            for output, wanting in alike.items():
                rows = vectors if len(wanting) == len(places) else vectors[np.searchsorted(places, wanting)]
                columns[output] = batch.one_row_each(*finish(rows, output), wanting)
        return columns

    def _vectors(self, batch: BatchRows, places: Sequence[int], skipped: int) -> Numbers:
        """(places, width), before any is cut."""
        pooled = [batch.pooled(kind, skipped) for kind in self._pooling.kinds]
        vectors = np.concatenate(pooled, axis=1) if len(pooled) > 1 else pooled[0]  # (batch, poolings x d_model)
        if len(places) < len(vectors):
            vectors = vectors[places]
        if self._head is not None:
            given, vectors = vectors, self._head.run(vectors)  # (places, width)
            if (lost := lost_in_head(given, vectors)) is not None:
                batch.fail(places, lost)
        if self._pooling.l2_normalize:
            vectors, lost = normalized(vectors)
            if lost is not None:
                batch.fail(places, lost)
        return vectors
