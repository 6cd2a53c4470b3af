"""Ranges of a text for `embed_spans`: its sentences, or so many tokens at a time. Pure."""

import re

from encserve_client._arguments import as_int
from encserve_client.exceptions import InvalidInputError
from encserve_client.results import SequenceInfo

# What ends a sentence: marks before white space, with the quotes and brackets that they close; marks of Chinese and
# Japanese anywhere; an empty line.
_END = re.compile(r"[.!?…]+[\"'”’»)\]]*(?=\s|$)|[。！？]+[」』”’）]*|\n\s*\n")


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Cuts a text at sentence ends, by its punctuation alone: "Dr. Smith" is cut too.

    Returns:
        (start, end) of each sentence in code points, without the white space around it; none of white space alone.
    """
    spans: list[tuple[int, int]] = []
    start = 0
    for end in (*(found.end() for found in _END.finditer(text)), len(text)):
        piece = text[start:end]
        if piece.strip():
            spans.append((start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())))
        start = end
    return spans


def token_spans(info: SequenceInfo, size: int) -> list[tuple[int, int]]:
    """Cuts a text every so many tokens; special tokens, and those of a prompt, do not count.

        spans = token_spans(client.tokenize(text), 64)

    Args:
        info: The text's tokens.
        size: How many tokens a range has; the last one has what is left.

    Returns:
        (start, end) of each range, in the unit of `info.offsets`.

    Raises:
        InvalidInputError: `size` is below 1, or `info` has no offsets.
    """
    if as_int("size", size) < 1:
        raise InvalidInputError(f"size must be >= 1; was {size}")
    if info.offsets is None:
        raise InvalidInputError(
            "info must have offsets, as those of a text have from tokenize, or with detail='tokens'"
        )
    offsets = info.offsets[info.offsets[:, 1] > info.offsets[:, 0]].tolist()  # special tokens have (0, 0)
    return [(group[0][0], group[-1][1]) for group in (offsets[at : at + size] for at in range(0, len(offsets), size))]
