"""A row for each range of a sequence."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.errors import FieldPath, InvalidField, Part
from encserve_server.outputs.kind import Kind, Wanted, by_place
from encserve_server.outputs.rows import BatchRows, Column, finish
from encserve_server.outputs.spec import SPAN_POOLINGS, OutputSpec
from encserve_server.types.arrays import Numbers, Rows, TokenSpans
from encserve_server.types.requests import Output, OutputKind, Task

Places = npt.NDArray[np.int64]  # (spans,)

# So many ranges are made at a time: what is between fits into a CPU's caches.
_AT_A_TIME = 64
_FLOAT_BYTES = 4
_COUNT_BYTES = 5  # of a range's number of tokens in a reply, at most
_NO_SPANS = np.empty((0, 2), np.int64)
# Measured at 384 numbers a row: the sums before each token; a range pooled from these; a range cut and normalised.
_TOKEN_NUMBER_US = 0.005
_SPAN_NUMBER_US = 0.002
_FINISHED_NUMBER_US = 0.0015
_SEQUENCE_US = 20.0


class Spans(Kind):
    """OutputKind.SPANS."""

    def _output(self, spec: OutputSpec, at: int, task: Task) -> Output:
        pooling = spec.span_pooling
        if pooling is not None and pooling not in SPAN_POOLINGS:
            raise InvalidField(
                FieldPath(Part.OUTPUT_SPAN_POOLING, at),
                "must be one of {there}; was {was}",
                there=SPAN_POOLINGS,
                was=pooling,
            )
        return super()._output(spec, at, task)._replace(span_pooling=pooling)

    def reply_bytes(self, output: Output, tokens: int, token_rows: int, spans: int) -> int:
        """As the rows are made, before they are cut: the number of ranges has no other bound in all."""
        return spans * (self.width * _FLOAT_BYTES + _COUNT_BYTES)

    def finish_us(self, output: Output, tokens: int) -> float:
        """Of the sequence alone: `extra_us` has the ranges."""
        return _SEQUENCE_US

    def extra_us(self, outputs: Sequence[Output], tokens: int, spans: int) -> float:
        """Of every range, and of the tokens below it for each pooling."""
        if not spans:
            return 0.0
        poolings = len({output.span_pooling for output in outputs})
        pooled = tokens * _TOKEN_NUMBER_US + spans * _SPAN_NUMBER_US
        return self.width * (poolings * pooled + len(outputs) * spans * _FINISHED_NUMBER_US)

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """The ranges of each sequence pooled once, however many outputs are made of these."""
        rows = batch.result.rows
        columns: dict[Output, list[Any]] = {output: [None] * len(rows) for output in wanted}
        for i, outputs in by_place(wanted).items():
            spans = batch.sequences[i].token_spans
            pooled: dict[OutputKind, Numbers] = {}
            for output in outputs:
                pooling = output.span_pooling or OutputKind.MEAN
                if pooling not in pooled:
                    pooled[pooling] = pool_spans(rows[i], _NO_SPANS if spans is None else spans, pooling)
                columns[output][i], lost = finish(pooled[pooling], output)
                if lost is not None:
                    batch.failed.add(i)
        return columns


def pool_spans(rows: Rows, spans: TokenSpans, kind: OutputKind) -> Numbers:
    """(seq, d_model) rows and (spans, 2) ranges of them to (spans, d_model) float32; zeros where a range is empty.

    What it takes grows with the rows and the ranges, not with how much these overlap: of sums there is one for all
    rows before each place, in float64, and of maxima one for each run of 2, 4, 8, … rows.
    """
    starts, ends = spans[:, 0], spans[:, 1]
    counts = (ends - starts)[:, None]  # (spans, 1)
    if kind is OutputKind.CLS:
        return np.where(counts > 0, rows[starts], np.float32(0))
    if kind is OutputKind.LAST_TOKEN:
        return np.where(counts > 0, rows[ends - 1], np.float32(0))
    if kind is OutputKind.MAX:
        return _maxima(rows, starts, ends)
    divisors: npt.NDArray[np.float64] = np.maximum(counts, 1.0)
    if kind is OutputKind.MEAN_SQRT_LENGTH:
        divisors = np.sqrt(divisors)
    if kind is OutputKind.WEIGHTED_MEAN:
        divisors = divisors * (divisors + 1) / 2
    return _means(rows, starts, ends, divisors, weighted=kind is OutputKind.WEIGHTED_MEAN)


def _means(rows: Rows, starts: Places, ends: Places, divisors: npt.NDArray[np.float64], *, weighted: bool) -> Numbers:
    """(spans, d_model): of each range the sum of its rows, perhaps weighted by 1, 2, …, by its (spans, 1) divisor."""
    before = _sums_before(rows)
    weighted_before = _sums_before(rows * np.arange(1.0, len(rows) + 1)[:, None]) if weighted else None
    means = np.empty((len(starts), rows.shape[1]), np.float32)
    for i in range(0, len(starts), _AT_A_TIME):
        part = slice(i, i + _AT_A_TIME)
        first, behind = starts[part], ends[part]
        sums = before[behind] - before[first]
        if weighted_before is not None:
            sums = weighted_before[behind] - weighted_before[first] - first[:, None] * sums
        means[part] = sums / divisors[part]
    return means


def _sums_before(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """(seq + 1, d_model): the sum of all rows before each place. Row by row: `cumsum` takes up to ten times as long."""
    before = np.zeros((len(rows) + 1, rows.shape[1]))
    for i, row in enumerate(rows):
        np.add(before[i], row, out=before[i + 1])
    return before


def _maxima(rows: Rows, starts: Places, ends: Places) -> Numbers:
    """(spans, d_model): of each range the larger of two runs that cover it, each of a power of 2 rows."""
    maxima = np.zeros((len(starts), rows.shape[1]), np.float32)
    levels = np.frexp(ends - starts)[1] - 1  # (spans,), log2 of the runs' length; -1 for a range that is empty
    runs = rows  # (seq + 1 - 2**level, d_model), of each run that begins at a place
    for level in range(max(levels, default=-1) + 1):
        if level:
            half = 1 << (level - 1)
            runs = np.maximum(runs[:-half], runs[half:])
        found = np.flatnonzero(levels == level)
        maxima[found] = np.maximum(runs[starts[found]], runs[ends[found] - (1 << level)])
    return maxima
