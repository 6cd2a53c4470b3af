"""Where parts end: a pure function of how large rows are, and of the limits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from encserve_cli.job.types import InputKind, Part, PartLimits

Counts = npt.NDArray[np.int64]
_TOKENS_BESIDE_BYTES = 16  # a prompt's, and special ones


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large some consecutive rows of a file are.

    Attributes:
        text_bytes: (rows,) as `PartLimits.max_text_bytes` counts them, or more.
        tokens: (rows,) the most tokens that each can have.
        file_bytes: (rows,) how long each is in a file that is read by offsets; 0 otherwise.
        offset: Where the first of them begins there.
    """

    text_bytes: Counts
    tokens: Counts
    file_bytes: Counts
    offset: int = 0


def sizes_of_text(kind: InputKind, text_bytes: Counts, file_bytes: Counts | None = None, offset: int = 0) -> Sizes:
    """The sizes of rows that are written as text of so many bytes each; two bytes are the least for a number."""
    beside = np.zeros_like(text_bytes) if file_bytes is None else file_bytes
    if kind == "text":
        return Sizes(text_bytes, text_bytes + _TOKENS_BESIDE_BYTES, beside, offset)
    numbers = (text_bytes + 1) // 2
    return Sizes(numbers * (8 if kind == "ids" else 4), numbers, beside, offset)


@dataclass(slots=True)
class _Open:
    """The part that grows."""

    number: int = 0
    first_row: int = 0
    offset: int = 0
    rows: int = 0
    text_bytes: int = 0
    output_bytes: int = 0
    length: int = 0


def cut(chunks: Iterable[Sizes], limits: PartLimits, input_number: int) -> Iterator[Part]:
    """The parts of one file, whose rows come in chunks; where chunks end makes no difference."""
    part = _Open()
    for chunk in chunks:
        output_bytes = limits.row_bytes + limits.token_bytes * np.minimum(chunk.tokens, limits.max_tokens)
        texts, outputs, lengths = (_sums(its) for its in (chunk.text_bytes, output_bytes, chunk.file_bytes))
        rows, begin = len(output_bytes), 0
        while begin < rows:
            if not part.rows:
                part.offset = chunk.offset + int(lengths[begin])
            end = min(
                rows,
                begin + limits.max_rows - part.rows,
                _most(texts, begin, limits.max_text_bytes - part.text_bytes),
                _most(outputs, begin, limits.max_output_bytes - part.output_bytes),
            )
            end = max(end, begin if part.rows else begin + 1)
            part.rows += end - begin
            part.text_bytes += int(texts[end] - texts[begin])
            part.output_bytes += int(outputs[end] - outputs[begin])
            part.length += int(lengths[end] - lengths[begin])
            if end < rows:
                yield _closed(part, input_number)
                part = _Open(part.number + 1, part.first_row + part.rows)
            begin = end
    if part.rows:
        yield _closed(part, input_number)


def _sums(sizes: Counts) -> Counts:
    """(rows + 1,), the sum of those before each."""
    return np.concatenate([[0], np.cumsum(sizes)])


def _most(sums: Counts, begin: int, room: int) -> int:
    """Up to where rows from `begin` on go into the room."""
    return int(np.searchsorted(sums, sums[begin] + room, side="right")) - 1


def _closed(part: _Open, input_number: int) -> Part:
    offset = part.offset if part.length else 0
    return Part(input_number, part.number, part.first_row, part.rows, offset, part.length, part.text_bytes)
