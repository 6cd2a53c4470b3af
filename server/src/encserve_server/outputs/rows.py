"""Pools the rows of a batch, converts them for an output, and finds invalid rows.

A row is invalid if a number is NaN or infinity, or if the row is zero because its norm overflowed float32. The code
makes few NumPy calls, because each call is slow: after a run of the model, NumPy's code is not in the CPU's caches.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from encserve_server.engine.base import BatchResult
from encserve_server.types.arrays import Mask, ModelInput, Numbers, OutputRows, TokenSpans
from encserve_server.types.requests import DataType, Output, OutputKind

# One output of a batch: an OutputRows or IndexedRows for each sequence; None if the sequence has failed, or does not
# need the output.
Column = Sequence[Any]

_LEAST_NORM = np.finfo(np.float32).tiny
# A head can multiply an input by 10,000. The square of a number above 1.8e19 overflows float32. So with inputs above
# 1e15, the square of a result may overflow.
_LARGE = 1e15


class HasOutputs(Protocol):
    """A sequence of a batch."""

    @property
    def input(self) -> ModelInput:
        """The (seq,) ids or (seq, d_model) vectors."""

    @property
    def token_spans(self) -> TokenSpans | None:
        """The spans for OutputKind.SPANS; None without spans."""

    @property
    def wanted(self) -> tuple[Output, ...]:
        """The outputs, from `ModelOutputs.check`."""


class BatchRows:
    """The rows of a batch, and their poolings.

    Attributes:
        result: The rows.
        sequences: The sequences of the batch.
        failed: The indices of the sequences with invalid rows.
    """

    def __init__(self, result: BatchResult, sequences: Sequence[HasOutputs]) -> None:
        """Set the rows. The methods may overwrite the rows of padding."""
        self.result = result
        self.sequences = sequences
        self.failed: set[int] = set()
        self._pooled: dict[tuple[OutputKind, int], Numbers] = {}

    def find_nonfinite(self) -> None:
        """Add the sequences with NaN or infinity to `failed`.

        If the sum of all numbers is finite, all numbers are finite. Otherwise, check the rows of each sequence: the sum
        may have overflowed, or only padding may have NaN or infinity.
        """
        if not math.isfinite(np.add.reduce(self.result.output, axis=None)):
            self.failed = {i for i, rows in enumerate(self.result.rows) if not np.isfinite(rows).all()}

    def pooled(self, kind: OutputKind, skipped: int = 0) -> Numbers:
        """Return the result of `pool` for the batch. The result is cached: do not write to the array."""
        vectors = self._pooled.get((kind, skipped))
        if vectors is None:
            vectors = self._pooled[kind, skipped] = pool(self.result, kind, skipped)
        return vectors

    def fail(self, places: Sequence[int], invalid: Mask) -> None:
        """Add the sequences of invalid rows to `failed`. Row i belongs to the sequence with index `places[i]`."""
        self.failed.update(np.array(places)[invalid].tolist())

    def one_row_each(self, rows: OutputRows, invalid: Mask | None, places: Sequence[int]) -> Column:
        """Return a column of (1, width) arrays from (len(places), width) rows. Add invalid rows to `failed`."""
        if invalid is not None:
            self.fail(places, invalid)
        each = list(rows[:, None])  # (1, width) each
        return each if len(places) == len(self.sequences) else self.column(each, places)

    def column(self, arrays: Iterable[Any], places: Iterable[int]) -> Column:
        """Return a column with `arrays[i]` at index `places[i]`, and None elsewhere."""
        column: list[Any] = [None] * len(self.sequences)
        for i, it in zip(places, arrays, strict=True):
            column[i] = it
        return column


def pool(result: BatchResult, kind: OutputKind, skipped: int = 0) -> Numbers:
    """Pool (batch, seq, d_model) rows into (batch, d_model) vectors, without the first `skipped` tokens.

    If a sequence has no more than `skipped` tokens, OutputKind.CLS gives the row of the first token, and other kinds
    give zeros. The vector of a sequence has the same bits in every batch.
    """
    rows = result.output
    if kind is OutputKind.CLS and not skipped:
        return rows[:, 0].copy()  # a view would keep the whole batch in memory until the reply is sent
    lengths = np.array(result.lengths, np.float32)[:, None]  # (batch, 1)
    if kind in (OutputKind.CLS, OutputKind.LAST_TOKEN):
        return _pick(rows, np.array(result.lengths), kind, skipped)
    # Padding with this number changes no bit of the result.
    neutral = -np.inf if kind is OutputKind.MAX else -0.0
    if min(result.lengths) < rows.shape[1]:
        rows[np.arange(rows.shape[1]) >= lengths] = neutral
    counts: Numbers = lengths
    if skipped:
        rows, counts = rows.copy(), np.maximum(lengths - np.float32(skipped), np.float32(1e-9))
        rows[:, :skipped] = neutral  # in a copy: other outputs need all rows
    if kind is OutputKind.WEIGHTED_MEAN:
        weights = np.arange(1, rows.shape[1] + 1, dtype=np.float32)[:, None]  # (seq, 1)
        rows = rows * weights
        # The sum of the weights of all pooled tokens.
        counts = np.maximum((lengths * (lengths + 1) - skipped * (skipped + 1)) / 2, np.float32(1e-9))
    reduced: Numbers = (np.maximum if kind is OutputKind.MAX else np.add).reduce(rows, axis=1)
    if kind is OutputKind.MAX:
        return np.where(lengths > skipped, reduced, np.float32(0)).astype(np.float32) if skipped else reduced
    divisors: Numbers = np.sqrt(counts) if kind is OutputKind.MEAN_SQRT_LENGTH else counts  # (batch, 1)
    return reduced / divisors


def _pick(rows: Numbers, lengths: npt.NDArray[np.int64], kind: OutputKind, skipped: int) -> Numbers:
    """Copy one row of each sequence: (batch, seq, d_model) to (batch, d_model)."""
    has_tokens = lengths > skipped  # (batch,)
    indices = np.where(has_tokens, skipped, 0) if kind is OutputKind.CLS else lengths - 1
    picked: Numbers = rows[np.arange(len(rows)), indices]
    if kind is OutputKind.LAST_TOKEN:
        picked[~has_tokens] = 0
    return picked


def finish(rows: Numbers, output: Output, *, is_finite: bool = False) -> tuple[OutputRows, Mask | None]:
    """Cut, normalize and convert rows for an output.

    Args:
        rows: (rows, width).
        output: The output. DataType.INT8 needs normalized rows.
        is_finite: Whether the caller knows that all rows are finite.

    Returns:
        Two values. The rows: (rows, dimensions), C-contiguous, in the output's data type. The mask of invalid rows:
        (rows,), or None if all rows are valid. A number that overflows float16 becomes infinite, and its row stays
        valid.
    """
    if output.dimensions:
        rows = np.ascontiguousarray(rows[:, : output.dimensions])
    invalid = None
    if output.l2_normalize:
        rows, invalid = l2_normalized(rows)
    elif not is_finite:
        invalid = nonfinite_rows(rows)
    if output.data_type is DataType.BINARY:
        return np.packbits(rows > 0, axis=1), invalid
    if output.data_type is DataType.INT8:
        return quantized(rows), invalid
    return rows.astype(output.data_type.dtype, copy=False), invalid


def l2_normalized(rows: Numbers) -> tuple[Numbers, Mask | None]:
    """Scale (rows, width) rows to norm 1. Rows of zeros stay zero.

    Returns:
        The rows, and a (rows,) mask of invalid rows, None if all rows are valid.
    """
    norms = np.sqrt(np.add.reduce(rows * rows, axis=1, keepdims=True))  # (rows, 1)
    scale: Numbers = np.maximum(norms, _LEAST_NORM)  # not 0, so that rows of zeros stay zero
    invalid = None if math.isfinite(np.add.reduce(norms, axis=None)) else nonfinite_rows(norms)
    return rows / scale, invalid


def quantized(rows: Numbers) -> npt.NDArray[np.int8]:
    """Quantize (rows, width) rows of norm 1: multiply by 127 · √width / 4, round half to even, clip to -128 … 127.

    A number of a random vector of norm 1 has the standard deviation 1 / √width, and int8 covers ±4 standard
    deviations. All rows have the same factor, so dot products are proportional to cosines. A factor for each row would
    have to be sent with the row. With a factor learned from a corpus, vectors of two corpora could not be compared.
    """
    scaled = rows * np.float32(127 * math.sqrt(rows.shape[1]) / 4)
    return np.clip(np.rint(scaled, out=scaled), -128, 127, out=scaled).astype(np.int8)


def nonfinite_rows(rows: Numbers) -> Mask | None:
    """Return a (rows,) mask of the rows with NaN or infinity; None if all rows are finite."""
    finite = np.isfinite(rows)
    if finite.all():
        return None
    return np.asarray(~finite.all(axis=1))


def invalid_head_rows(inputs: Numbers, outputs: Numbers) -> Mask | None:
    """Return a (rows,) mask of the invalid output rows of a head; None if all rows are valid.

    A row of zeros is invalid if the input is so large that a norm inside the head may overflow. With smaller inputs, a
    row of zeros is a valid result, for example of a ReLU.

    Args:
        inputs: (rows, input width).
        outputs: (rows, width).
    """
    sums = np.add.reduce(np.abs(outputs), axis=1)  # (rows,): few numbers, so the next check is fast
    if np.isfinite(sums).all() and sums.all():
        return None
    overflows = (np.abs(inputs) > _LARGE).any(axis=1) & ~outputs.any(axis=1)
    invalid = np.asarray(~np.isfinite(outputs).all(axis=1) | overflows)
    return invalid if invalid.any() else None
