"""Converts ranges of an input, in characters or tokens, to ranges of the tokens that the model processes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from encserve_server.errors import FieldPath, InvalidField, RequestField
from encserve_server.models.offsets import utf8_offsets
from encserve_server.types.arrays import TokenSpans
from encserve_server.types.requests import OffsetUnit
from encserve_server.types.sequences import TokenSequence

Positions = npt.NDArray[np.int64]  # (spans,)


@dataclass(frozen=True, slots=True)
class SentSpans:
    """Ranges of one input as the caller sent them. No range starts after its end.

    Attributes:
        unit: The unit of the positions.
        starts: (spans,) the start of each range.
        ends: (spans,) the end of each range, exclusive.
    """

    unit: OffsetUnit
    starts: Positions
    ends: Positions


def place_spans(at: int, sent: SentSpans, input_: object, sequence: TokenSequence) -> TokenSpans:
    """Return a (spans, 2) range of model tokens for each range of the input; (0, 0) for a range without tokens.

    Args:
        at: The index of the input, for errors.
        sent: The ranges of the input.
        input_: The input as the caller sent it.
        sequence: The sequence of tokens that the model processes.

    Raises:
        InvalidField: The ranges are in characters and the input is not a text, or a range ends after the input.
    """
    if sent.unit is OffsetUnit.TOKENS:
        count = sequence.original_token_count
        _check_ends(at, sent, count, "the number of tokens before truncation")
        kept_after = sequence.kept_after
        kept_before = len(sequence.input) - kept_after
        # A position in the removed tokens becomes the position where tokens were removed.
        bounds = np.stack([sent.starts, sent.ends], axis=1)  # (spans, 2)
        spans = np.minimum(bounds, kept_before) + np.maximum(bounds - (count - kept_after), 0)
    else:
        if not isinstance(input_, str):
            raise InvalidField(
                FieldPath(RequestField.SPAN_UNIT, at),
                "{unit} is for texts; send {tokens}",
                unit=sent.unit,
                tokens=OffsetUnit.TOKENS,
            )
        spans = _tokens_of(*_characters(at, sent, input_), sequence)
    spans[spans[:, 0] >= spans[:, 1]] = 0
    return spans


def _characters(at: int, sent: SentSpans, text: str) -> tuple[Positions, Positions]:
    """Convert ranges to code points. If a range cuts a code point, the result includes the whole code point."""
    if sent.unit is OffsetUnit.CODE_POINTS or text.isascii():
        unit = "bytes" if sent.unit is OffsetUnit.UTF8_BYTES else "code points"
        _check_ends(at, sent, len(text), f"the number of {unit} in the text")
        return sent.starts, sent.ends
    offsets = utf8_offsets(text)
    _check_ends(at, sent, int(offsets[-1]), "the number of bytes in the text")
    empty = sent.starts == sent.ends
    starts = np.searchsorted(offsets, sent.starts, "right") - 1
    return starts, np.where(empty, starts, np.searchsorted(offsets, sent.ends, "left"))


def _check_ends(at: int, sent: SentSpans, limit: int, limit_name: str) -> None:
    beyond = sent.ends > limit
    if beyond.any():
        i = int(beyond.argmax())
        raise InvalidField(
            FieldPath(RequestField.SPAN_ENDS, at, i), f"must be at most {limit}, {limit_name}; was {sent.ends[i]}"
        )


def _tokens_of(starts: Positions, ends: Positions, sequence: TokenSequence) -> TokenSpans:
    """Return the (spans, 2) token ranges for ranges of characters.

    A token range begins with the first token that ends after the start of the characters. The token range ends with
    the last token that starts before the end of the characters.
    """
    token_starts = np.array(sequence.char_starts, np.int64)  # (seq,)
    token_ends = np.array(sequence.char_ends, np.int64)  # (seq,)
    special = np.zeros(len(token_ends), np.bool_) if sequence.special is None else sequence.special
    places = np.flatnonzero(~special & (token_ends > token_starts))  # the indices of tokens with characters
    # If a normalizer moved characters, tokens are not in the order of the text.
    latest_ends = np.maximum.accumulate(token_ends[places])
    earliest_starts = np.minimum.accumulate(token_starts[places][::-1])[::-1]
    first = np.searchsorted(latest_ends, starts, "right")  # (spans,)
    after = np.searchsorted(earliest_starts, ends, "left")
    after[starts == ends] = 0
    spans = np.zeros((len(starts), 2), np.int64)
    some = first < after
    spans[some] = np.stack([places[first[some]], places[after[some] - 1] + 1], axis=1)
    return spans
