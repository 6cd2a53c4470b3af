"""Ranges of a sequence as callers send them, to ranges of the tokens that the model sees."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from encserve_server.errors import FieldPath, InvalidField, Part
from encserve_server.models.offsets import utf8_offsets
from encserve_server.types.arrays import TokenSpans
from encserve_server.types.requests import OffsetUnit
from encserve_server.types.sequences import TokenSequence

Places = npt.NDArray[np.int64]  # (spans,)


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


def place_spans(at: int, sent: SentSpans, input_: object, sequence: TokenSequence) -> TokenSpans:
    """The tokens of each range, among those that the model sees; (0, 0) where there are none.

    Args:
        at: Which input of the request it is, for errors.
        sent: The ranges.
        input_: What they are ranges of, as it was sent.
        sequence: The same as the model sees it.

    Raises:
        InvalidField: They are ranges of characters, and the input is no text; or one ends behind the input.
    """
    if sent.unit is OffsetUnit.TOKENS:
        count = sequence.original_token_count
        _check_ends(at, sent, count, "the tokens before truncation")
        kept_after = sequence.kept_after
        kept_before = len(sequence.input) - kept_after
        # A place among what is cut off is that of the cut.
        bounds = np.stack([sent.starts, sent.ends], axis=1)  # (spans, 2)
        spans = np.minimum(bounds, kept_before) + np.maximum(bounds - (count - kept_after), 0)
    else:
        if not isinstance(input_, str):
            raise InvalidField(
                FieldPath(Part.SPAN_UNIT, at),
                "{unit} is for texts; send {tokens}",
                unit=sent.unit,
                tokens=OffsetUnit.TOKENS,
            )
        spans = _tokens_of(*_characters(at, sent, input_), sequence)
    spans[spans[:, 0] >= spans[:, 1]] = 0
    return spans


def _characters(at: int, sent: SentSpans, text: str) -> tuple[Places, Places]:
    """The ranges in code points; one that begins or ends within a code point has all of it."""
    if sent.unit is OffsetUnit.CODE_POINTS or text.isascii():
        what = "bytes" if sent.unit is OffsetUnit.UTF8_BYTES else "code points"
        _check_ends(at, sent, len(text), f"the {what} of the text")
        return sent.starts, sent.ends
    offsets = utf8_offsets(text)
    _check_ends(at, sent, int(offsets[-1]), "the bytes of the text")
    empty = sent.starts == sent.ends
    starts = np.searchsorted(offsets, sent.starts, "right") - 1
    return starts, np.where(empty, starts, np.searchsorted(offsets, sent.ends, "left"))


def _check_ends(at: int, sent: SentSpans, limit: int, what: str) -> None:
    beyond = sent.ends > limit
    if beyond.any():
        i = int(beyond.argmax())
        raise InvalidField(FieldPath(Part.SPAN_ENDS, at, i), f"must be at most {limit}, {what}; was {sent.ends[i]}")


def _tokens_of(starts: Places, ends: Places, sequence: TokenSequence) -> TokenSpans:
    """(spans, 2) from the first token that ends behind a range's start to the last that begins before its end."""
    token_starts = np.array(sequence.char_starts, np.int64)  # (seq,)
    token_ends = np.array(sequence.char_ends, np.int64)  # (seq,)
    special = np.zeros(len(token_ends), np.bool_) if sequence.special is None else sequence.special
    places = np.flatnonzero(~special & (token_ends > token_starts))  # of the tokens that have characters
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
