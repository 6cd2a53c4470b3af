"""The vectors that MaxSim compares: of the tokens that count, projected, perhaps joined."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from encserve_server.engine.base import Head
from encserve_server.errors import FieldPath, InvalidField, Part, TooLongToPool
from encserve_server.outputs.kind import FLOP_PER_US, Kind, Wanted, all_places
from encserve_server.outputs.rows import BatchRows, Column, finish, lost_in_head
from encserve_server.outputs.spec import FLOAT_TYPES, MAX_POOLED_VECTORS, OutputSpec
from encserve_server.outputs.token_pooling import EXTRA, PooledTokens, can_pool
from encserve_server.types.arrays import IndexedRows, Mask, Numbers
from encserve_server.types.bundles import Bundle, MultiVector, TaskSettings, TokenPooling
from encserve_server.types.requests import DataType, Output, OutputKind, Task

_INDEX_BYTES = 4
# NumPy's calls for one sequence; of each number cut, normalised and written.
_SEQUENCE_US = 5.0
_NUMBER_US = 0.002
# Of n vectors: a linkage takes n steps of so much, and so much for each pair; cutting a tree so much a vector.
_LINKAGE_STEP_US = 15.0
_LINKAGE_PAIR_US = 0.03
_CUT_US = 4.0


class MultiVectors(Kind):
    """OutputKind.MULTI_VECTOR. The head runs once for all sequences of a task, over the tokens that count."""

    per_token = True
    data_types = (*FLOAT_TYPES, DataType.INT8)

    def __init__(self, bundle: Bundle, multi_vector: MultiVector, head: Head) -> None:
        """Takes the model, what it says of its vectors, and what makes them of its rows."""
        super().__init__(OutputKind.MULTI_VECTOR, multi_vector.head.width)
        self._model = bundle.name
        self._head = head
        self._head_numbers = multi_vector.head.input_width * multi_vector.head.width
        self._skips_first = multi_vector.skips_first_token
        tasks = {task: bundle.treatment(task) for task in (Task.NEITHER, *bundle.tasks)}
        self._counting = {task: _counting_ids(settings, bundle.vocab_size) for task, settings in tasks.items()}
        self._pooling = {task: settings.token_pooling for task, settings in tasks.items()}

    def _output(self, spec: OutputSpec, at: int, task: Task) -> Output:
        if spec.pool_factor:
            _check_pool_factor(FieldPath(Part.OUTPUT_POOL_FACTOR, at), spec.pool_factor, task)
        return super()._output(spec, at, task)._replace(task=task, pool_factor=spec.pool_factor)

    def check_length(self, output: Output, at: int, tokens: int, input_at: int) -> None:
        """Refuses a sequence with more vectors than can be joined.

        Raises:
            TooLongToPool: The sequence has too many tokens for the pooling that the call, or the model, asks for.
        """
        if tokens <= MAX_POOLED_VECTORS or not any(pooling.factor > 1 for pooling in self._poolings(output)):
            return
        field, limit = FieldPath(Part.INPUT, input_at), "must be at most {most} tokens"
        numbers = {"most": MAX_POOLED_VECTORS, "tokens": tokens}
        if output.pool_factor > 1:
            raise TooLongToPool(
                field,
                f"{limit} for {{factor}}; was {{tokens}}: send it in parts, or leave {{factor}} out",
                factor=FieldPath(Part.OUTPUT_POOL_FACTOR, at),
                **numbers,
            )
        raise TooLongToPool(
            field,
            f"{limit} for model {{model}}, which joins vectors that are alike; was {{tokens}}: send it in parts",
            model=self._model,
            **numbers,
        )

    def reply_bytes(self, output: Output, tokens: int, token_rows: int, spans: int) -> int:
        """A vector and an index for each token."""
        return tokens * (self.row_bytes(output) + _INDEX_BYTES)

    def head_us(self, tokens: int) -> float:
        """A product for each token."""
        return 2.0 * tokens * self._head_numbers / FLOP_PER_US

    def finish_us(self, output: Output, tokens: int) -> float:
        """Of each vector the same."""
        return _SEQUENCE_US + tokens * self.width * _NUMBER_US

    def extra_us(self, outputs: Sequence[Output], tokens: int, spans: int) -> float:
        """Of vectors that are joined one tree, which is cut for each output."""
        joining = [[pooling for pooling in self._poolings(output) if pooling.factor > 1] for output in outputs]
        trees, cuts = max(map(len, joining)), sum(map(len, joining))
        return tokens * (trees * (_LINKAGE_STEP_US + tokens * _LINKAGE_PAIR_US) + cuts * _CUT_US)

    def _poolings(self, output: Output) -> list[TokenPooling]:
        """What the model joins itself, and then what the call wants joined."""
        asked = TokenPooling(output.pool_factor) if output.pool_factor else None
        return [pooling for pooling in (self._pooling[output.task], asked) if pooling is not None]

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """One run of the head for each task; vectors are joined for each sequence."""
        columns: dict[Output, Column] = {}
        for task in dict.fromkeys(output.task for output in wanted):
            alike = {output: places for output, places in wanted.items() if output.task is task}
            vectors = self._vectors(batch, task, all_places(alike.values()))
            for output, places in alike.items():
                columns[output] = vectors.column(batch, output, self._poolings(output), places)
        return columns

    def _vectors(self, batch: BatchRows, task: Task, places: list[int]) -> "_TaskVectors":
        """The vectors of sequences of one task."""
        counts = batch.result.tokens_of(places)  # (batch, seq)
        ids = self._counting[task]
        if ids is not None:
            counts[counts] = ids[np.concatenate([batch.sequences[i].input for i in places])]
        if self._skips_first:
            counts[:, 0] = False
        rows = batch.result.output[counts]  # (vectors, d_model)
        vectors = self._head.run(rows) if len(rows) else np.empty((0, self.width), np.float32)  # (vectors, width)
        found = counts.nonzero()
        lost = lost_in_head(rows, vectors) if len(rows) else None
        if lost is not None:
            batch.failed.update(found[0][lost].tolist())
        ends = np.cumsum(counts.sum(axis=1)).tolist()
        slices = [slice(*bounds) for bounds in zip([0, *ends], ends, strict=False)]
        return _TaskVectors(vectors, found[1].astype("<u4"), slices)


class _TaskVectors:
    """The vectors of the sequences of one task in a batch."""

    def __init__(self, vectors: Numbers, indices: Any, slices: list[slice]) -> None:
        """Takes (vectors, width), the token of each, and where those of each sequence of the batch are."""
        self._vectors = vectors
        self._indices = indices
        self._slices = slices
        self._joined: dict[tuple[int, TokenPooling | None], PooledTokens] = {}

    def column(self, batch: BatchRows, output: Output, poolings: list[TokenPooling], places: Iterable[int]) -> Column:
        """One output of the sequences at some places, but of those that have failed."""
        places = [i for i in places if i not in batch.failed]
        parts = [self._pooled(i, poolings) for i in places]
        ends = np.cumsum([len(part) for part in parts]).tolist()
        every = not poolings and sum(ends[-1:]) == len(self._vectors)
        whole = self._vectors if every else np.concatenate([self._vectors[:0], *parts])
        finished, lost = finish(whole, output, finite=not poolings)
        column: list[Any] = [None] * len(self._slices)
        joined = any(pooling.factor > 1 for pooling in poolings)
        for i, start, end in zip(places, [0, *ends], ends, strict=False):
            if lost is not None and lost[start:end].any():
                batch.failed.add(i)
            column[i] = IndexedRows(finished[start:end], None if joined else self._indices[self._slices[i]])
        return column

    def _pooled(self, place: int, poolings: list[TokenPooling]) -> Numbers:
        """The vectors of one sequence, joined by one pooling after another; a pooling by one factor is made once."""
        vectors = self._vectors[self._slices[place]]
        before: TokenPooling | None = None
        for pooling in poolings:
            key = (place, before)
            if key not in self._joined:
                self._joined[key] = PooledTokens(vectors)
            vectors, before = self._joined[key].joined(pooling), pooling
        return vectors


def _counting_ids(settings: TaskSettings, vocab_size: int) -> Mask | None:
    """For each id whether its tokens have a vector: (vocab_size,), or None where all have."""
    kept, skipped = list(settings.kept_token_ids), list(settings.skipped_token_ids)
    if not (kept or skipped):
        return None
    counting = np.full(vocab_size, not kept)
    counting[kept] = True
    counting[skipped] = False
    return counting


def _check_pool_factor(field: FieldPath, factor: float, task: Task) -> None:
    """Refuses a factor out of range, and pooling where it has no effect or is not possible.

    Raises:
        InvalidField: The factor cannot be had.
    """
    was = f"{factor:g}"
    if not 1 <= factor < math.inf:
        raise InvalidField(field, "must be a number from 1; was {was}", was=was)
    if task is Task.QUERY:
        raise InvalidField(field, "is not for {task}, which loses by it; was {was}", task=task, was=was)
    if not can_pool():
        raise InvalidField(field, f"this server cannot pool vectors: it lacks {EXTRA}")
