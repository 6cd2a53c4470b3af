"""The checked outputs of a call. Plans are cached, because callers ask for the same outputs again and again."""

from collections.abc import Callable
from dataclasses import dataclass

from encserve_server.types.requests import Detail, Output


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The outputs of a call, with all defaults filled in, and their size and cost for each sequence.

    Attributes:
        outputs: The outputs.
        widths: The number of components of a row, for each output.
        unit: For each output, whether all rows have norm 1, because the call or the model normalizes them.
        detail: The default detail of the reply.
        row_bytes: The size of a sequence's rows in bytes; None if the size depends on the sequence.
        is_ordinary: Whether the cost of a sequence is its number of tokens.
        has_sparse: Whether an output has sparse weights. The number of weights is known only after the run.
        bounds_length: Whether an output has a limit on the length of a sequence.
        cost: Returns the cost of a sequence in tokens. Arguments: the number of tokens, and of spans.
        reply_bytes: Returns the size of a sequence's rows in bytes. Arguments: the number of tokens, of token rows, and
            of spans; see `ModelOutputs.reply_bytes`.
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
