"""Ranges of a sequence: those of a call to ranges of the tokens that the model sees, and their rows to one row each."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from encserve_server.errors import InvalidField
from encserve_server.models.offsets import utf8_offsets
from encserve_server.types import CheckedSequence, Numbers, OffsetUnit, OutputKind, Rows, TokenizedText, TokenSpans

Places = npt.NDArray[np.int64]  # (spans,)
# Of several rows one: by these alone.
POOLINGS = (
    OutputKind.MEAN,
    OutputKind.CLS,
    OutputKind.MAX,
    OutputKind.LAST_TOKEN,
    OutputKind.WEIGHTED_MEAN,
    OutputKind.MEAN_SQRT_LENGTH,
)


# So many ranges are made at a time: what is between fits into a CPU's caches.
_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class SentSpans:
    """Ranges of one input as the caller sent them, none of which starts behind its end.

    Attributes:
        unit: What they are counted in.
        starts: (spans,) where each begins.
        ends: (spans,) where it ends, exclusive.
    """

    unit: OffsetUnit
    starts: Places
    ends: Places


def place_spans(field: str, sent: SentSpans, input_: object, sequence: CheckedSequence) -> TokenSpans:
    """The tokens of each range, among those that the model sees; (0, 0) where there are none.

    Args:
        field: Where the ranges stand in the request, for errors.
        sent: The ranges.
        input_: What they are ranges of, as it was sent.
        sequence: The same as the model sees it.

    Raises:
        InvalidField: They are ranges of characters, and the input is no text; or one ends behind the input.
    """
    if sent.unit is OffsetUnit.TOKENS:
        count = sequence.original_token_count
        _check_ends(field, sent, count, "the tokens before truncation")
        kept_behind = sequence.text.kept_behind if sequence.text is not None else 0
        kept_before = len(sequence.input) - kept_behind
        # A place among what is cut off is that of the cut.
        bounds = np.stack([sent.starts, sent.ends], axis=1)  # (spans, 2)
        spans = np.minimum(bounds, kept_before) + np.maximum(bounds - (count - kept_behind), 0)
    else:
        if not isinstance(input_, str) or sequence.text is None:
            raise InvalidField(f"{field}.unit", f"OFFSET_UNIT_{sent.unit.name} is for texts; send OFFSET_UNIT_TOKENS")
        spans = _tokens_of(*_characters(field, sent, input_), sequence.text)
    spans[spans[:, 0] >= spans[:, 1]] = 0
    return spans


def _characters(field: str, sent: SentSpans, text: str) -> tuple[Places, Places]:
    """The ranges in code points; one that begins or ends within a code point has all of it."""
    if sent.unit is OffsetUnit.CODE_POINTS or text.isascii():
        what = "bytes" if sent.unit is OffsetUnit.UTF8_BYTES else "code points"
        _check_ends(field, sent, len(text), f"the {what} of the text")
        return sent.starts, sent.ends
    offsets = utf8_offsets(text)
    _check_ends(field, sent, int(offsets[-1]), "the bytes of the text")
    empty = sent.starts == sent.ends
    starts = np.searchsorted(offsets, sent.starts, "right") - 1
    return starts, np.where(empty, starts, np.searchsorted(offsets, sent.ends, "left"))


def _check_ends(field: str, sent: SentSpans, limit: int, what: str) -> None:
    beyond = sent.ends > limit
    if beyond.any():
        i = int(beyond.argmax())
        raise InvalidField(f"{field}.ends[{i}]", f"must be at most {limit}, {what}; was {sent.ends[i]}")


def _tokens_of(starts: Places, ends: Places, text: TokenizedText) -> TokenSpans:
    """(spans, 2) from the first token that ends behind a range's start to the last that begins before its end."""
    token_starts, token_ends = np.array(text.char_starts, np.int64), np.array(text.char_ends, np.int64)  # (seq,)
    places = np.flatnonzero(~text.special & (token_ends > token_starts))  # of the tokens that have characters
    # Where a normalizer has moved characters, tokens do not stand in the order of the text.
    latest_ends = np.maximum.accumulate(token_ends[places])
    earliest_starts = np.minimum.accumulate(token_starts[places][::-1])[::-1]
    first = np.searchsorted(latest_ends, starts, "right")  # (spans,)
    behind = np.searchsorted(earliest_starts, ends, "left")
    behind[starts == ends] = 0
    spans = np.zeros((len(starts), 2), np.int64)
    some = first < behind
    spans[some] = np.stack([places[first[some]], places[behind[some] - 1] + 1], axis=1)
    return spans


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
        its = slice(i, i + _AT_A_TIME)
        first, behind = starts[its], ends[its]
        sums = before[behind] - before[first]
        if weighted_before is not None:
            sums = weighted_before[behind] - weighted_before[first] - first[:, None] * sums
        means[its] = sums / divisors[its]
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
        its = np.flatnonzero(levels == level)
        maxima[its] = np.maximum(runs[starts[its]], runs[ends[its] - (1 << level)])
    return maxima
