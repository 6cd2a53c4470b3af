"""The rows of a batch: pooled, finished as an output wants them, and looked at for numbers that no caller can use.

A row is lost if a number of it is not finite, or if it is zero because a norm does not fit into float32. Pure NumPy:
few calls of it, since after a model has run its code is in none of the CPU's caches.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from encserve_server.engine.base import BatchResult
from encserve_server.types.arrays import Mask, ModelInput, Numbers, OutputRows, TokenSpans
from encserve_server.types.requests import DataType, Output, OutputKind

Column = Sequence[Any]  # for each sequence of a batch an OutputRows or IndexedRows; None if it wants none or is lost

_LEAST_NORM = np.finfo(np.float32).tiny
# Squares of numbers over 1.8e19 leave float32, and a head's weights may make a number 10,000 times as large.
_LARGE = 1e15
# The poolings by sums: one number that is not finite, in any token, makes the pooled one so.
_SUMS = (OutputKind.MEAN, OutputKind.WEIGHTED_MEAN, OutputKind.MEAN_SQRT_LENGTH)


class HasOutputs(Protocol):
    """A sequence of a batch."""

    @property
    def input(self) -> ModelInput:
        """(seq,) ids or (seq, d_model) vectors."""

    @property
    def token_spans(self) -> TokenSpans | None:
        """The ranges that OutputKind.SPANS has rows for; None for none."""

    @property
    def wanted(self) -> tuple[Output, ...]:
        """The outputs, as `ModelOutputs.check` gives them."""


class BatchRows:
    """What a batch gave.

    Attributes:
        result: The rows.
        sequences: The sequences of the batch.
        failed: The places in the batch of sequences whose numbers cannot be delivered.
        finite_pooling: A pooling whose vectors are all known to be finite.
    """

    def __init__(self, result: BatchResult, sequences: Sequence[HasOutputs]) -> None:
        """Takes the rows; the padding among these may be written to."""
        self.result = result
        self.sequences = sequences
        self.failed: set[int] = set()
        self.finite_pooling: OutputKind | None = None
        self._pooled: dict[tuple[OutputKind, int], Numbers] = {}

    def look(self, first: Output | None) -> None:
        """Finds the sequences with rows that are not finite.

        In the good case that is one look: at all rows, or at the vectors of `first`, an output that all sequences want,
        if these tell as much.
        """
        if first is not None and first.kind in _SUMS:
            if np.isfinite(self.pooled(first.kind)).all():
                self.finite_pooling = first.kind
                return
        elif np.isfinite(self.result.output).all():  # of padding too
            return
        self.failed = {i for i, rows in enumerate(self.result.rows) if not np.isfinite(rows).all()}

    def pooled(self, kind: OutputKind, skipped: int = 0) -> Numbers:
        """(batch, d_model), of each sequence the tokens from `skipped` on; made once, and not to be written to."""
        found = self._pooled.get((kind, skipped))
        if found is None:
            found = self._pooled[kind, skipped] = pool(self.result, kind, skipped)
        return found

    def fail(self, places: Sequence[int], lost: Mask) -> None:
        """Counts the sequences at some places as failed, those that are marked."""
        self.failed.update(np.array(places)[lost].tolist())

    def one_row_each(self, rows: OutputRows, lost: Mask | None, places: Sequence[int]) -> Column:
        """(places, width) to the (1, width) of each sequence."""
        if lost is not None:
            self.fail(places, lost)
        each = list(rows[:, None])  # (1, width) of each
        return each if len(places) == len(self.sequences) else self.column(each, places)

    def column(self, arrays: Iterable[Any], places: Iterable[int]) -> Column:
        """One output of the sequences at some places, each at the place of the sequence."""
        column: list[Any] = [None] * len(self.sequences)
        for i, it in zip(places, arrays, strict=True):
            column[i] = it
        return column


def pool(result: BatchResult, kind: OutputKind, skipped: int = 0) -> Numbers:
    """(batch, seq, d_model) to (batch, d_model), over the tokens of each sequence from `skipped` on.

    If no row is that token's, the first token's row for OutputKind.CLS, and else a row of zeros. A sequence gets the
    same numbers alone and beside others, to the last bit.
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


def finish(rows: Numbers, output: Output, *, finite: bool = False) -> tuple[OutputRows, Mask | None]:
    """Rows as an output wants them.

    Args:
        rows: (rows, width).
        output: The output.
        finite: Whether all of the rows are known to be finite.

    Returns:
        (rows, dimensions), C-contiguous, cut, normalised and of the output's type; and (rows,) which of the rows are
        lost, None for none. A float16 beyond its range is infinite and not lost. DataType.INT8 is for normalised rows.
    """
    if output.dimensions:
        rows = np.ascontiguousarray(rows[:, : output.dimensions])
    lost = None
    if output.l2_normalize:
        rows, lost = normalized(rows)
    elif not finite:
        lost = lost_rows(rows)
    if output.data_type is DataType.BINARY:
        return np.packbits(rows > 0, axis=1), lost
    if output.data_type is DataType.INT8:
        return quantized(rows), lost
    return rows.astype(output.data_type.dtype, copy=False), lost


def normalized(rows: Numbers) -> tuple[Numbers, Mask | None]:
    """(rows, width), each of length 1; and (rows,) which of the rows are lost, None for none."""
    norms = np.sqrt(np.add.reduce(rows * rows, axis=1, keepdims=True))  # (rows, 1)
    scale: Numbers = np.maximum(norms, _LEAST_NORM)  # a row of zeros has no length that could be 1, and stays
    lost = None if math.isfinite(np.add.reduce(norms, axis=None)) else lost_rows(norms)
    return rows / scale, lost


def quantized(rows: Numbers) -> npt.NDArray[np.int8]:
    """(rows, width) of length 1, each number times 127 · √width / 4, rounded half to even, and clipped to -128 … 127.

    A number of a random vector of length 1 has a standard deviation of 1 / √width: 4 of these are the whole range. The
    factor is the same for every row, so that dot products are in proportion to cosines: one of each row would have to
    travel with it, and with one learnt from a corpus vectors of two corpora would differ.
    """
    scaled = rows * np.float32(127 * math.sqrt(rows.shape[1]) / 4)
    return np.clip(np.rint(scaled, out=scaled), -128, 127, out=scaled).astype(np.int8)


def lost_rows(rows: Numbers) -> Mask | None:
    """(rows,) which of the (rows, width) hold a number that is not finite; None for none."""
    finite = np.isfinite(rows)
    if finite.all():
        return None
    return np.asarray(~finite.all(axis=1))


def lost_in_head(given: Numbers, computed: Numbers) -> Mask | None:
    """Which rows a head has lost: (rows,) of (rows, input width) to (rows, width), None for none.

    A row of zeros is lost if it is made of numbers so large that a norm inside the head may overflow; others are what
    the head gives, as where a ReLU passes nothing.
    """
    sums = np.add.reduce(np.abs(computed), axis=1)  # (rows,); one small array to look at where nothing is wrong
    if np.isfinite(sums).all() and sums.all():
        return None
    overflows = (np.abs(given) > _LARGE).any(axis=1) & ~computed.any(axis=1)
    lost = np.asarray(~np.isfinite(computed).all(axis=1) | overflows)
    return lost if lost.any() else None
