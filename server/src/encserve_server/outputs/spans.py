"""A row for each span of a sequence. A span is a range of tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.errors import FieldPath, InvalidField, RequestField
from encserve_server.outputs.kind import Kind, Wanted, outputs_by_place
from encserve_server.outputs.rows import BatchRows, Column, finish
from encserve_server.outputs.spec import SPAN_POOLINGS, OutputSpec
from encserve_server.types.arrays import Numbers, Rows, TokenSpans
from encserve_server.types.requests import Output, OutputKind, Task

Indices = npt.NDArray[np.int64]  # (spans,)

# The number of spans to pool at a time, so that the intermediate arrays fit into the CPU's caches.
_SPANS_AT_A_TIME = 64
_FLOAT_BYTES = 4
_COUNT_BYTES = 5  # the most bytes in a reply for a span's number of tokens
_NO_SPANS = np.empty((0, 2), np.int64)
# The number of spans that cost as much as one token. On a CPU, a small model needs 132 µs for a token, and 1.4 µs for a
# span.
_SPANS_PER_TOKEN = 100


class Spans(Kind):
    """OutputKind.SPANS."""

    def _output(self, spec: OutputSpec, at: int, task: Task) -> Output:
        pooling = spec.span_pooling
        if pooling is not None and pooling not in SPAN_POOLINGS:
            raise InvalidField(
                FieldPath(RequestField.OUTPUT_SPAN_POOLING, at),
                "must be one of {allowed}; was {was}",
                allowed=SPAN_POOLINGS,
                was=pooling,
            )
        return super()._output(spec, at, task)._replace(span_pooling=pooling)

    def reply_bytes(self, output: Output, tokens: int, token_rows: int, spans: int) -> int:
        """Return the size in bytes of the rows before cutting. So the limit for replies also limits the spans."""
        return spans * (self.width * _FLOAT_BYTES + _COUNT_BYTES)

    def extra_cost(self, output: Output, tokens: int, spans: int) -> int:
        """Return the cost of the spans."""
        return -(-spans // _SPANS_PER_TOKEN)

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """Pool the spans of each sequence once for all outputs with the same pooling."""
        rows = batch.result.rows
        columns: dict[Output, list[Any]] = {output: [None] * len(rows) for output in wanted}
        for i, outputs in outputs_by_place(wanted).items():
            spans = batch.sequences[i].token_spans
            pooled: dict[OutputKind, Numbers] = {}
            for output in outputs:
                pooling = output.span_pooling or OutputKind.MEAN
                if pooling not in pooled:
                    pooled[pooling] = pool_spans(rows[i], _NO_SPANS if spans is None else spans, pooling)
                columns[output][i], invalid = finish(pooled[pooling], output)
                if invalid is not None:
                    batch.failed.add(i)
        return columns


def pool_spans(rows: Rows, spans: TokenSpans, kind: OutputKind) -> Numbers:
    """Pool the (spans, 2) spans of (seq, d_model) rows into (spans, d_model) float32 vectors. Empty spans give zeros.

    The time grows with the number of rows and the number of spans, but not with the overlap of spans. Sums use prefix
    sums in float64. Maxima use the maxima of all runs of 2, 4, 8, … rows.
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


def _means(rows: Rows, starts: Indices, ends: Indices, divisors: npt.NDArray[np.float64], *, weighted: bool) -> Numbers:
    """Sum the rows of each span, with weights 1, 2, … if `weighted`, and divide the sum by the span's divisor.

    Returns:
        (spans, d_model).
    """
    before = _sums_before(rows)
    weighted_before = _sums_before(rows * np.arange(1.0, len(rows) + 1)[:, None]) if weighted else None
    means = np.empty((len(starts), rows.shape[1]), np.float32)
    for i in range(0, len(starts), _SPANS_AT_A_TIME):
        part = slice(i, i + _SPANS_AT_A_TIME)
        start, end = starts[part], ends[part]
        sums = before[end] - before[start]
        if weighted_before is not None:
            sums = weighted_before[end] - weighted_before[start] - start[:, None] * sums
        means[part] = sums / divisors[part]
    return means


def _sums_before(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return the (seq + 1, d_model) prefix sums: row i is the sum of the first i rows.

    `cumsum` can take ten times as long as this loop.
    """
    before = np.zeros((len(rows) + 1, rows.shape[1]))
    for i, row in enumerate(rows):
        np.add(before[i], row, out=before[i + 1])
    return before


def _maxima(rows: Rows, starts: Indices, ends: Indices) -> Numbers:
    """Return the (spans, d_model) maxima. Two runs of 2**level rows cover each span. The two runs may overlap."""
    maxima = np.zeros((len(starts), rows.shape[1]), np.float32)
    levels = np.frexp(ends - starts)[1] - 1  # (spans,): -1 for an empty span
    runs = rows  # (seq + 1 - 2**level, d_model): the maxima of the run that begins at each row
    for level in range(max(levels, default=-1) + 1):
        if level:
            half = 1 << (level - 1)
            runs = np.maximum(runs[:-half], runs[half:])
        found = np.flatnonzero(levels == level)
        maxima[found] = np.maximum(runs[starts[found]], runs[ends[found] - (1 << level)])
    return maxima
