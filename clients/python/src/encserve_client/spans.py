"""Ranges of a text for `embed_spans`: sentences, or groups of tokens. Without I/O."""

import re

from encserve_client._arguments import as_int
from encserve_client.exceptions import InvalidInputError
from encserve_client.results import SequenceInfo

# A sentence ends with a mark such as "." before white space. Closing quotes and brackets may follow the mark. A Chinese
# or Japanese mark ends a sentence anywhere. An empty line ends a sentence too.
_END = re.compile(r"[.!?…]+[\"'”’»)\]]*(?=\s|$)|[。！？]+[」』”’）]*|\n\s*\n")


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Split a text into sentences by punctuation and empty lines. So "Dr. Smith" is also split.

    Returns:
        (start, end) of each sentence in code points, without the white space around the sentence. No range is empty.
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
    """Split a text into ranges of `size` tokens. Special tokens and tokens of a prompt do not count.

        spans = token_spans(client.tokenize(text), 64)

    Args:
        info: The result of `tokenize`, or of `run` with detail="tokens".
        size: The number of tokens of a range. The last range may have fewer tokens.

    Returns:
        (start, end) of each range, in the unit of `info.offsets`.

    Raises:
        InvalidInputError: `size` is below 1, or `info` has no offsets.
    """
    if as_int("size", size) < 1:
        raise InvalidInputError(f"must be >= 1; was {size}", field="size")
    if info.offsets is None:
        raise InvalidInputError(
            "must have offsets: pass the result of tokenize, or of run with texts and detail='tokens'",
            field="info",
        )
    offsets = info.offsets[info.offsets[:, 1] > info.offsets[:, 0]].tolist()  # special tokens have (0, 0)
    return [(group[0][0], group[-1][1]) for group in (offsets[at : at + size] for at in range(0, len(offsets), size))]
