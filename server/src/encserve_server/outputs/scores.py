"""The logits of labels, from the pooled rows of a batch."""

from collections.abc import Mapping

import numpy as np

from encserve_server.engine.base import Head
from encserve_server.outputs.kind import Kind, Wanted, all_places
from encserve_server.outputs.rows import BatchRows, Column, finish
from encserve_server.outputs.spec import FLOAT_TYPES, OutputSpec
from encserve_server.types.arrays import Numbers
from encserve_server.types.bundles import Scores
from encserve_server.types.requests import Output, OutputKind, Task


class LabelScores(Kind):
    """OutputKind.SCORES. The head runs once for all sequences, on one pooled row of each."""

    data_types = FLOAT_TYPES

    def __init__(self, scores: Scores, head: Head) -> None:
        """Set the description of the logits, and the head."""
        super().__init__(OutputKind.SCORES, len(scores.labels))
        self._scores = scores
        self._head = head

    def check(self, spec: OutputSpec, at: int, task: Task) -> Output:
        """See `Kind.check`. Logits cannot be cut or normalized."""
        self._refuse_cut_and_norm(spec, at, "has one number for each label")
        return super().check(spec, at, task)

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """Run the head once for all outputs."""
        places = all_places(wanted.values())
        logits = self._head.run(self._pooled(batch)[places])  # (len(places), labels)
        columns = {}
        for output, output_places in wanted.items():
            rows = logits if len(output_places) == len(places) else logits[np.searchsorted(places, output_places)]
            columns[output] = batch.one_row_each(*finish(rows, output), output_places)
        return columns

    def _pooled(self, batch: BatchRows) -> Numbers:
        """Return the (batch, d_model) pooled rows."""
        skipped_id = self._scores.not_last_token_id
        if skipped_id is None:
            return batch.pooled(self._scores.pooling)
        last = []
        for sequence in batch.sequences:
            counting = np.flatnonzero(sequence.input != skipped_id)
            last.append(counting[-1] if counting.size else 0)
        picked: Numbers = batch.result.output[np.arange(len(last)), last]
        return picked
