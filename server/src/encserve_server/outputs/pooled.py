"""One vector for each sequence: a pooling, or the vector that the model was trained for."""

from collections.abc import Mapping, Sequence

import numpy as np

from encserve_server.engine.base import Head
from encserve_server.outputs.kind import Kind, Wanted, all_places
from encserve_server.outputs.rows import BatchRows, Column, finish, invalid_head_rows, l2_normalized
from encserve_server.outputs.spec import OutputSpec
from encserve_server.types.arrays import Numbers
from encserve_server.types.bundles import ModelPooling
from encserve_server.types.requests import Output, OutputKind, Task


class Pooled(Kind):
    """A pooling that a caller asks for by name."""

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """Pool the batch once for all outputs."""
        pooled = batch.pooled(self.kind)  # (batch, d_model)
        columns = {}
        for output, places in wanted.items():
            rows = pooled if len(places) == len(pooled) else pooled[places]
            columns[output] = batch.one_row_each(*finish(rows, output), places)
        return columns


class ModelVector(Kind):
    """OutputKind.MODEL: one pooling or several concatenated poolings, and then the head, if the model has one."""

    def __init__(self, pooling: ModelPooling, head: Head | None) -> None:
        """Set the pooling that the model was trained for, and the head; None without a head."""
        super().__init__(OutputKind.MODEL, pooling.width)
        self._pooling = pooling
        self._head = head

    def _output(self, spec: OutputSpec, at: int, task: Task) -> Output:
        del at, task
        pooling, dimensions = self._pooling, spec.dimensions or self._pooling.dimensions
        if pooling.is_plain and not (pooling.l2_normalize and dimensions):
            l2_normalize = pooling.l2_normalize or spec.l2_normalize
            return Output(pooling.kinds[0], l2_normalize, spec.data_type, dimensions)
        return Output(OutputKind.MODEL, spec.l2_normalize, spec.data_type, dimensions)

    def gives_unit_vectors(self, output: Output) -> bool:
        """Return whether the vectors have norm 1 without `l2_normalize`. Cut vectors do not have norm 1."""
        return self._pooling.l2_normalize and output.dimensions in (0, self.width)

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """Run the head once for all outputs that skip the same number of tokens."""
        columns = {}
        for skipped in dict.fromkeys(output.skipped_tokens for output in wanted):
            alike = {output: places for output, places in wanted.items() if output.skipped_tokens == skipped}
            places = all_places(alike.values())
            vectors = self._vectors(batch, places, skipped)  # (places, width)
            for output, output_places in alike.items():
                rows = vectors if len(output_places) == len(places) else vectors[np.searchsorted(places, output_places)]
                columns[output] = batch.one_row_each(*finish(rows, output), output_places)
        return columns

    def _vectors(self, batch: BatchRows, places: Sequence[int], skipped: int) -> Numbers:
        """Return the (len(places), width) vectors, not yet cut to `dimensions`."""
        pooled = [batch.pooled(kind, skipped) for kind in self._pooling.kinds]
        vectors = np.concatenate(pooled, axis=1) if len(pooled) > 1 else pooled[0]  # (batch, poolings x d_model)
        if len(places) < len(vectors):
            vectors = vectors[places]
        if self._head is not None:
            pooled_vectors, vectors = vectors, self._head.run(vectors)  # (places, width)
            if (invalid := invalid_head_rows(pooled_vectors, vectors)) is not None:
                batch.fail(places, invalid)
        if self._pooling.l2_normalize:
            vectors, invalid = l2_normalized(vectors)
            if invalid is not None:
                batch.fail(places, invalid)
        return vectors
