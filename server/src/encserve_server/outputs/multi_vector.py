"""The vectors that MaxSim compares: one for each token, except skipped tokens. A call or a model can join vectors."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from encserve.extras import install_line
from encserve_server.engine.base import Head
from encserve_server.errors import FieldPath, InvalidField, RequestField, TooLongToPool
from encserve_server.outputs.kind import Kind, Wanted, all_places
from encserve_server.outputs.rows import BatchRows, Column, finish, invalid_head_rows
from encserve_server.outputs.spec import FLOAT_TYPES, MAX_POOLED_VECTORS, OutputSpec
from encserve_server.outputs.token_pooling import TokenPooler, can_pool
from encserve_server.types.arrays import IndexedRows, Mask, Numbers
from encserve_server.types.bundles import Bundle, MultiVector, TaskSettings, TokenPooling
from encserve_server.types.requests import DataType, Output, OutputKind, Task

_INDEX_BYTES = 4


class MultiVectors(Kind):
    """OutputKind.MULTI_VECTOR. The head runs once for all sequences of a task, on the tokens that have a vector."""

    per_token = True
    data_types = (*FLOAT_TYPES, DataType.INT8)

    def __init__(self, bundle: Bundle, multi_vector: MultiVector, head: Head) -> None:
        """Set the bundle, its description of the vectors, and the head."""
        super().__init__(OutputKind.MULTI_VECTOR, multi_vector.head.width)
        self._model = bundle.name
        self._head = head
        self._skips_first = multi_vector.skips_first_token
        tasks = {task: bundle.treatment(task) for task in (Task.NEITHER, *bundle.tasks)}
        self._counting = {task: _counting_ids(settings, bundle.vocab_size) for task, settings in tasks.items()}
        self._pooling = {task: settings.token_pooling for task, settings in tasks.items()}

    def _output(self, spec: OutputSpec, at: int, task: Task) -> Output:
        if spec.pool_factor:
            _check_pool_factor(FieldPath(RequestField.OUTPUT_POOL_FACTOR, at), spec.pool_factor, task)
        return super()._output(spec, at, task)._replace(task=task, pool_factor=spec.pool_factor)

    def check_length(self, output: Output, at: int, tokens: int, input_at: int) -> None:
        """Refuse a sequence with more vectors than can be joined.

        Args:
            output: The output.
            at: The index of the output in the call.
            tokens: The number of tokens of the sequence.
            input_at: The index of the sequence in the call.

        Raises:
            TooLongToPool: The call or the model joins vectors, and the sequence has too many tokens.
        """
        if tokens <= MAX_POOLED_VECTORS or not any(pooling.factor > 1 for pooling in self._poolings(output)):
            return
        field, limit = FieldPath(RequestField.INPUT, input_at), "must be at most {most} tokens"
        numbers = {"most": MAX_POOLED_VECTORS, "tokens": tokens}
        if output.pool_factor > 1:
            raise TooLongToPool(
                field,
                f"{limit} for {{factor}}; was {{tokens}}: split the text, or remove {{factor}}",
                factor=FieldPath(RequestField.OUTPUT_POOL_FACTOR, at),
                **numbers,
            )
        raise TooLongToPool(
            field,
            f"{limit} for model {{model}}, which joins similar vectors; was {{tokens}}: split the text",
            model=self._model,
            **numbers,
        )

    def reply_bytes(self, output: Output, tokens: int, token_rows: int, spans: int) -> int:
        """Return the size in bytes of one vector and one index for each token."""
        return tokens * (self.row_bytes(output) + _INDEX_BYTES)

    def extra_cost(self, output: Output, tokens: int, spans: int) -> int:
        """Return the cost of joining vectors: the number of tokens for each pooling with a factor above 1."""
        return tokens * sum(pooling.factor > 1 for pooling in self._poolings(output))

    def _poolings(self, output: Output) -> list[TokenPooling]:
        """Return the pooling of the model, then the pooling of the call. Each may be missing."""
        requested = TokenPooling(output.pool_factor) if output.pool_factor else None
        return [pooling for pooling in (self._pooling[output.task], requested) if pooling is not None]

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """Run the head once for each task, and join the vectors of each sequence."""
        columns: dict[Output, Column] = {}
        for task in dict.fromkeys(output.task for output in wanted):
            alike = {output: places for output, places in wanted.items() if output.task is task}
            vectors = self._vectors(batch, task, all_places(alike.values()))
            for output, places in alike.items():
                columns[output] = vectors.column(batch, output, self._poolings(output), places)
        return columns

    def _vectors(self, batch: BatchRows, task: Task, places: list[int]) -> "_TaskVectors":
        """Run the head for the sequences of one task."""
        counts = batch.result.token_mask(places)  # (batch, seq)
        ids = self._counting[task]
        if ids is not None:
            counts[counts] = ids[np.concatenate([batch.sequences[i].input for i in places])]
        if self._skips_first:
            counts[:, 0] = False
        rows = batch.result.output[counts]  # (vectors, d_model)
        vectors = self._head.run(rows) if len(rows) else np.empty((0, self.width), np.float32)  # (vectors, width)
        owners, tokens = counts.nonzero()  # (vectors,) each
        invalid = invalid_head_rows(rows, vectors) if len(rows) else None
        if invalid is not None:
            batch.failed.update(owners[invalid].tolist())
        ends = np.cumsum(counts.sum(axis=1)).tolist()
        slices = [slice(*bounds) for bounds in zip([0, *ends], ends, strict=False)]
        return _TaskVectors(vectors, tokens.astype("<u4"), slices)


class _TaskVectors:
    """The vectors of the sequences of one task in a batch."""

    def __init__(self, vectors: Numbers, indices: Any, slices: list[slice]) -> None:
        """Set the (vectors, width) vectors, their (vectors,) token indices, and the slice of each sequence."""
        self._vectors = vectors
        self._indices = indices
        self._slices = slices
        self._poolers: dict[tuple[int, TokenPooling | None], TokenPooler] = {}

    def column(self, batch: BatchRows, output: Output, poolings: list[TokenPooling], places: Iterable[int]) -> Column:
        """Return one output of the sequences with the indices `places`; None for failed sequences."""
        places = [i for i in places if i not in batch.failed]
        parts = [self._pooled(i, poolings) for i in places]
        ends = np.cumsum([len(part) for part in parts]).tolist()
        needs_all = not poolings and sum(ends[-1:]) == len(self._vectors)
        vectors = self._vectors if needs_all else np.concatenate([self._vectors[:0], *parts])
        finished, invalid = finish(vectors, output, is_finite=not poolings)
        column: list[Any] = [None] * len(self._slices)
        joined = any(pooling.factor > 1 for pooling in poolings)
        for i, start, end in zip(places, [0, *ends], ends, strict=False):
            if invalid is not None and invalid[start:end].any():
                batch.failed.add(i)
            column[i] = IndexedRows(finished[start:end], None if joined else self._indices[self._slices[i]])
        return column

    def _pooled(self, place: int, poolings: list[TokenPooling]) -> Numbers:
        """Return the vectors of one sequence after all poolings, in this order."""
        vectors = self._vectors[self._slices[place]]
        previous: TokenPooling | None = None
        for pooling in poolings:
            key = (place, previous)
            if key not in self._poolers:  # outputs with different factors share the pooler
                self._poolers[key] = TokenPooler(vectors)
            vectors, previous = self._poolers[key].pool(pooling), pooling
        return vectors


def _counting_ids(settings: TaskSettings, vocab_size: int) -> Mask | None:
    """Return a (vocab_size,) mask of the token ids with a vector; None if all token ids have a vector."""
    kept, skipped = list(settings.kept_token_ids), list(settings.skipped_token_ids)
    if not (kept or skipped):
        return None
    counting = np.full(vocab_size, not kept)
    counting[kept] = True
    counting[skipped] = False
    return counting


def _check_pool_factor(field: FieldPath, factor: float, task: Task) -> None:
    """Refuse a pool factor if the factor is out of range, the task is a query, or SciPy is missing."""
    was = f"{factor:g}"
    if not 1 <= factor < math.inf:
        raise InvalidField(field, "must be a number from 1; was {was}", was=was)
    if task is Task.QUERY:
        raise InvalidField(
            field, "is not available for {task}, because it makes results worse; was {was}", task=task, was=was
        )
    if not can_pool():
        raise InvalidField(field, f"this server cannot join vectors: {install_line('pooling')}")
