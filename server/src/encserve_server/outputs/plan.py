"""What a call asks for, checked once: callers ask for the same again and again."""

from collections.abc import Callable
from dataclasses import dataclass

from encserve_server.types.requests import Detail, Output


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The outputs of a call, every default filled in, and what they take of each sequence.

    Attributes:
        outputs: The outputs.
        widths: For each output the numbers of a row.
        unit: For each output whether all rows have length 1, asked for or not.
        detail: How much a reply says of each sequence where a caller does not ask for more or less.
        row_bytes: The bytes of a sequence's rows, where they do not depend on the sequence; None where they do.
        is_ordinary: Whether a sequence costs no more than its tokens.
        has_sparse: Whether there are sparse weights, whose bytes are known only when they are made.
        bounds_length: Whether the outputs can be made of short sequences only.
        cost: Of so many tokens and spans, in tokens; see `ModelOutputs.cost`.
        reply_bytes: Of so many tokens, rows of tokens, and spans; see `ModelOutputs.reply_bytes`.
    """

    outputs: tuple[Output, ...]
    widths: tuple[int, ...]
    unit: tuple[bool, ...]
    detail: Detail
    row_bytes: int | None
    is_ordinary: bool
    has_sparse: bool
    bounds_length: bool
    cost: Callable[[int, int], int]
    reply_bytes: Callable[[int, int, int], int]
