"""A batch's rows to the vectors that MaxSim compares: those of the tokens that count, projected, perhaps joined."""

from collections.abc import Sequence

import numpy as np

from encserve_server.engine.base import BatchResult, Head
from encserve_server.models.pooling import finish
from encserve_server.models.token_pooling import pool_tokens
from encserve_server.types import (
    Bundle,
    IndexedRows,
    Mask,
    ModelInput,
    MultiVector,
    Numbers,
    Output,
    Task,
    TaskSettings,
    TokenPooling,
)


class MultiVectorMaker:
    """Makes OutputKind.MULTI_VECTOR."""

    def __init__(self, bundle: Bundle, multi_vector: MultiVector, head: Head) -> None:
        """Takes the model, what it says of its vectors, and what makes them of its rows."""
        self._width = multi_vector.head.width
        self._skips_first = multi_vector.skips_first_token
        self._head = head
        tasks = {task: bundle.treatment(task) for task in (Task.NEITHER, *bundle.tasks)}
        self._counting = {task: _counting_ids(its, bundle.vocab_size) for task, its in tasks.items()}
        self._pooling = {task: its.token_pooling for task, its in tasks.items()}

    def make(
        self, result: BatchResult, inputs: Sequence[ModelInput], places: Sequence[int], output: Output
    ) -> list[IndexedRows]:
        """The vectors of the sequences at these places of a batch: the head runs once, over those that count."""
        counts = result.tokens_of(places)  # (batch, seq)
        ids = self._counting[output.task]
        if ids is not None:
            counts[counts] = ids[np.concatenate([inputs[i] for i in places])]
        if self._skips_first:
            counts[:, 0] = False
        rows = result.output[counts]  # (vectors, d_model)
        vectors = self._head.run(rows) if len(rows) else np.empty((0, self._width), np.float32)  # (vectors, width)
        ends = np.cumsum(counts.sum(axis=1)[list(places)]).tolist()
        slices = [slice(*bounds) for bounds in zip([0, *ends], ends, strict=False)]
        poolings = [it for it in (self._pooling[output.task], _asked_for(output)) if it is not None]
        indices = None
        if not any(it.factor > 1 for it in poolings):
            indices = counts.nonzero()[1].astype("<u4")  # (vectors,)
        if poolings:
            pooled = [_pool(vectors[its], poolings) for its in slices]
            finished = [finish(its, output) for its in pooled]
        else:
            all_finished = finish(vectors, output)
            finished = [all_finished[its] for its in slices]
        return [
            IndexedRows(rows, None if indices is None else indices[its])
            for rows, its in zip(finished, slices, strict=True)
        ]


def _counting_ids(settings: TaskSettings, vocab_size: int) -> Mask | None:
    """For each id whether its tokens have a vector: (vocab_size,), or None where all have."""
    kept, skipped = list(settings.kept_token_ids), list(settings.skipped_token_ids)
    if not (kept or skipped):
        return None
    counting = np.full(vocab_size, not kept)
    counting[kept] = True
    counting[skipped] = False
    return counting


def _asked_for(output: Output) -> TokenPooling | None:
    """What a call wants joined, beside what the model joins itself."""
    return TokenPooling(output.pool_factor) if output.pool_factor else None


def _pool(vectors: Numbers, poolings: Sequence[TokenPooling]) -> Numbers:
    for pooling in poolings:
        vectors = pool_tokens(vectors, pooling)
    return vectors
