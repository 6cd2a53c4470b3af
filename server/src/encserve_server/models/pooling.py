"""A batch's rows to the outputs that callers asked for: pooling, normalising, their type. Pure NumPy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from encserve_server.engine.base import BatchResult, Head
from encserve_server.models.spans import pool_spans
from encserve_server.types import (
    DataType,
    IndexedRows,
    ModelInput,
    ModelPooling,
    Numbers,
    Output,
    OutputArrays,
    OutputKind,
    OutputRows,
    TokenSpans,
)

_LEAST_NORM = np.finfo(np.float32).tiny
_MADE = (OutputKind.MODEL, OutputKind.MULTI_VECTOR, OutputKind.SPARSE)  # not by pooling alone


class Maker(Protocol):
    """Makes outputs of one kind, the way its model was trained to."""

    def make(
        self, result: BatchResult, inputs: Sequence[ModelInput], places: Sequence[int], output: Output
    ) -> Sequence[OutputRows | IndexedRows]:
        """What is wanted of the sequences at these places of a batch, which ascend.

        Args:
            result: What the batch gave.
            inputs: All sequences of the batch.
            places: Those of the sequences that want this.
            output: What they want.
        """


@dataclass(frozen=True, slots=True)
class ModelVector:
    """Makes OutputKind.MODEL.

    Attributes:
        pooling: What the model was trained for.
        head: Runs its head; None where it has none.
    """

    pooling: ModelPooling
    head: Head | None = None

    def make(
        self,
        result: BatchResult,
        inputs: Sequence[ModelInput],
        places: Sequence[int],
        output: Output,
    ) -> list[OutputRows]:
        """(batch, seq, d_model) to (1, width) each, the tokens of the prompt left out of pooling."""
        pooled = [_pool(result, kind, output.skipped_tokens) for kind in self.pooling.kinds]
        vectors = np.concatenate(pooled, axis=1) if len(pooled) > 1 else pooled[0]  # (batch, poolings x d_model)
        if self.head is not None:
            vectors = self.head.run(vectors)  # (batch, width)
        return _each(normalized(vectors) if self.pooling.l2_normalize else vectors, places, output)


def make_outputs(
    result: BatchResult,
    inputs: Sequence[ModelInput],
    wanted: Sequence[tuple[Output, ...]],
    token_spans: Sequence[TokenSpans | None],
    makers: Mapping[OutputKind, Maker] = MappingProxyType({}),
) -> list[OutputArrays]:
    """Makes of a batch what each of its sequences is wanted for.

    What is pooled is pooled once for the whole batch. A sequence gets the same numbers alone and beside others, to the
    last bit, and numbers of it that are not finite touch no other; what NumPy has to say of them is for the caller to
    turn off. It takes few calls of NumPy: after a model has run, its code and ours are in none of the CPU's caches.

    Args:
        result: What the batch gave; its padding may be written to.
        inputs: Its sequences.
        wanted: For each sequence its outputs.
        token_spans: For each what OutputKind.SPANS has rows for; None for nothing.
        makers: What makes the kinds that only some models have.

    Returns:
        For each sequence an array of (rows, width) for each of its outputs: as many rows as tokens for
        OutputKind.TOKENS, as ranges for OutputKind.SPANS, else one; what a maker makes is as its kind has it. Rows that
        are wanted as they are refer to the batch's own.
    """
    alike: dict[tuple[Output, ...], list[int]] = {}  # the places of those who want the same, mostly all
    for i, outputs in enumerate(wanted):
        alike.setdefault(outputs, []).append(i)
    made: list[OutputArrays] = [()] * len(wanted)
    for outputs, places in alike.items():
        columns = [
            _make_spans(result, places, token_spans, output)
            if output.kind is OutputKind.SPANS
            else _make(result, inputs, places, output, makers)
            for output in outputs
        ]
        for i, *its in zip(places, *columns, strict=True):
            made[i] = tuple(its)
    return made


def _make(
    result: BatchResult,
    inputs: Sequence[ModelInput],
    places: list[int],
    output: Output,
    makers: Mapping[OutputKind, Maker],
) -> Sequence[OutputRows | IndexedRows]:
    """One output of the sequences at these places of a batch."""
    if output.kind is OutputKind.TOKENS:
        rows = result.rows
        return [finish(rows[i], output) for i in places]
    if output.kind in _MADE:
        return makers[output.kind].make(result, inputs, places, output)
    return _each(_pool(result, output.kind), places, output)


def _make_spans(
    result: BatchResult, places: list[int], token_spans: Sequence[TokenSpans | None], output: Output
) -> list[OutputRows]:
    """OutputKind.SPANS of the sequences at these places of a batch."""
    rows = result.rows
    nothing = np.empty((0, 2), np.int64)
    made = []
    for i in places:
        its = token_spans[i]
        pooled = pool_spans(rows[i], nothing if its is None else its, output.span_pooling or OutputKind.MEAN)
        made.append(finish(pooled, output))
    return made


def _each(pooled: Numbers, places: Sequence[int], output: Output) -> list[OutputRows]:
    """(batch, width) as wanted, to the (1, width) of each sequence at these places."""
    finished = finish(pooled, output)
    return [finished[i : i + 1] for i in places]


def _pool(result: BatchResult, kind: OutputKind, skipped: int = 0) -> Numbers:
    """(batch, seq, d_model) to (batch, d_model), over the tokens of each sequence from `skipped` on.

    Where that is none of them, the first token's row for OutputKind.CLS, and else a row of zeros.
    """
    rows = result.output
    if kind is OutputKind.CLS and not skipped:
        return rows[:, 0].copy()  # or a caller who does not read would keep the whole batch in memory
    lengths = np.array(result.lengths, np.float32)[:, None]  # (batch, 1)
    if kind in (OutputKind.CLS, OutputKind.LAST_TOKEN):
        return _pick(rows, np.array(result.lengths), kind, skipped)
    # What changes nothing where it stands in place of padding, to the last bit.
    neutral = -np.inf if kind is OutputKind.MAX else -0.0
    if min(result.lengths) < rows.shape[1]:
        rows[np.arange(rows.shape[1]) >= lengths] = neutral
    counts: Numbers = lengths
    if skipped:
        rows, counts = rows.copy(), np.maximum(lengths - np.float32(skipped), np.float32(1e-9))
        rows[:, :skipped] = neutral  # in a copy: other outputs are of all rows
    if kind is OutputKind.WEIGHTED_MEAN:
        weights = np.arange(1, rows.shape[1] + 1, dtype=np.float32)[:, None]  # (seq, 1)
        rows = rows * weights
        # The sum of the weights from the first token that counts to the last.
        counts = np.maximum((lengths * (lengths + 1) - skipped * (skipped + 1)) / 2, np.float32(1e-9))
    reduced: Numbers = (np.maximum if kind is OutputKind.MAX else np.add).reduce(rows, axis=1)
    if kind is OutputKind.MAX:
        return np.where(lengths > skipped, reduced, np.float32(0)).astype(np.float32) if skipped else reduced
    divisors: Numbers = np.sqrt(counts) if kind is OutputKind.MEAN_SQRT_LENGTH else counts  # (batch, 1)
    return reduced / divisors


def _pick(rows: Numbers, lengths: npt.NDArray[np.int64], kind: OutputKind, skipped: int) -> Numbers:
    """One row of each sequence: (batch, seq, d_model) to (batch, d_model), copied."""
    some = lengths > skipped  # (batch,)
    places = np.where(some, skipped, 0) if kind is OutputKind.CLS else lengths - 1
    picked: Numbers = rows[np.arange(len(rows)), places]
    if kind is OutputKind.LAST_TOKEN:
        picked[~some] = 0
    return picked


def finish(rows: Numbers, output: Output) -> OutputRows:
    """(rows, width) as wanted: cut, normalised, of its type, and C-contiguous."""
    if output.dimensions:
        rows = np.ascontiguousarray(rows[:, : output.dimensions])
    if output.l2_normalize:
        rows = normalized(rows)
    if output.data_type is DataType.BINARY:
        return np.packbits(rows > 0, axis=1)
    return rows.astype(output.data_type.dtype, copy=False)


def normalized(rows: Numbers) -> Numbers:
    """(rows, width), each of length 1."""
    norms = np.sqrt(np.add.reduce(rows * rows, axis=1, keepdims=True))  # (rows, 1)
    scale: Numbers = np.maximum(norms, _LEAST_NORM)  # a row of zeros has no length that could be 1, and stays
    return rows / scale
