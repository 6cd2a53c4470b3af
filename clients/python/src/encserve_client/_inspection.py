"""What `inspect` returns: what the model did with one input."""

from dataclasses import dataclass, field

from encserve_client._options import Array
from encserve_client._results import SequenceInfo, Timings


@dataclass(frozen=True, eq=False, slots=True)
class InspectResult:
    """What the model did with one input. The arrays are read-only views on the bytes received.

    Attributes:
        model: The name of the model that ran.
        version: Its version.
        fingerprint: Identifies the vector space.
        sequence: What the model saw, with `tokens` where it has a tokenizer.
        attention: (layers, n_heads, seq, seq): how much the token of the row attends to the token of the column; every
            row sums to 1. None if it was not asked for.
        attention_layers: The blocks along the first axis of `attention`, from 0.
        hidden_states: (layers, seq, d_model): the tokens' rows at each depth. None if they were not asked for.
        hidden_state_layers: The depths along the first axis of `hidden_states`: 0 is what enters the first block, i
            what leaves block i - 1; the last, n_layers, is what `encode` returns.
        positions: (max_sequence_tokens, d_model): what the model adds to a token for its place, for every place. None
            if it was not asked for.
        timings: Where the time went.
    """

    model: str
    version: str
    fingerprint: str
    sequence: SequenceInfo
    attention: Array | None = field(repr=False)
    attention_layers: tuple[int, ...]
    hidden_states: Array | None = field(repr=False)
    hidden_state_layers: tuple[int, ...]
    positions: Array | None = field(repr=False)
    timings: Timings
