"""The records of a call on its way: a sequence, and the batch that it runs in."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from encserve_server.types.arrays import Mask, ModelInput, OutputArrays, TokenSpans
from encserve_server.types.requests import Output


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One sequence of a call, from its check to its delivery; each stage fills its part in.

    The event loop owns it. While a batch runs, the engine's thread that runs the batch reads it and sets nothing; what
    the batch gave is set on the event loop, at delivery.

    Attributes:
        input: (seq,) int64 ids, or (seq, d_model) float32 vectors, whichever the model takes.
        original_token_count: The tokens before truncation.
        special: (seq,) which tokens are special, or None where nothing asked for it.
        char_starts: (seq,) where each token begins in the text, in code points, 0 for special tokens; None where the
            input is not a text, or nothing asked for it.
        char_ends: (seq,) where each token ends, exclusive.
        kept_behind: How many of the tokens stood behind those that were cut off; 0 where none were.
        attended: How many of its first tokens all of its tokens see; 0 for all.
        token_spans: What OutputKind.SPANS has rows for; None for nothing.
        wanted: What to make of it.
        cost: What it counts against the queue's bound, in tokens: its own, and what its outputs take beside them.
        ticket: The call, while it is scheduled; owned by `scheduling`.
        turn: When its caller's turn comes for it; owned by `scheduling`.
        index: Its place in the call.
        deadline: When its caller stops waiting, in the clock's seconds; infinity for never.
        enqueued_at: When it was queued, in the clock's seconds.
        started_at: When its batch was taken; NaN before.
        outputs: What was made of it: for each of `wanted` (rows, width) of the type that was wanted.
        compute_seconds: How long the model ran on its batch.
    """

    input: ModelInput
    original_token_count: int
    special: Mask | None = None
    char_starts: list[int] | None = None
    char_ends: list[int] | None = None
    kept_behind: int = 0
    attended: int = 0
    token_spans: TokenSpans | None = None
    wanted: tuple[Output, ...] = ()
    cost: int = 0
    ticket: Any = None
    turn: float = 0.0
    index: int = 0
    deadline: float = math.inf
    enqueued_at: float = math.nan
    started_at: float = math.nan
    outputs: OutputArrays = ()
    compute_seconds: float = 0.0

    @property
    def truncated(self) -> bool:
        """Whether anything was cut off."""
        return self.original_token_count > len(self.input)

    @property
    def token_ids(self) -> list[int] | None:
        """The ids, or None for vectors."""
        return self.input.tolist() if self.input.ndim == 1 else None


class ClosedBy(StrEnum):
    """Why a batch took no more sequences."""

    QUEUE_EMPTY = "drained"  # nothing else was pending; the value is a label of encserve_batches
    TOKENS = "tokens"  # one more would exceed max_batch_tokens
    SEQUENCES = "sequences"  # max_batch_sequences reached
    PADDING = "padding"  # one more would exceed max_padding_fraction


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences that run together, with what becomes of them; the engine's thread that runs it owns it until delivery.

    Attributes:
        sequences: The sequences.
        closed_by: Why it took no more.
        lane: Which of the engine's threads runs it, from 0.
        alone: Whether it has the whole device.
        began_at: When the run began, in the clock's seconds.
        ended_at: When its outputs were made.
        tokens: The tokens that were laid out, padding excluded.
        padded_tokens: The same, padding included.
        collate_seconds: Laying out the sequences as one array.
        compute_seconds: Running the model.
        split_seconds: Making of its rows what each sequence is wanted for, and looking whether that is finite.
        outputs: For each sequence what was wanted of it, None where its numbers are not all finite.
    """

    sequences: list[TokenSequence]
    closed_by: ClosedBy = ClosedBy.QUEUE_EMPTY
    lane: int = 0
    alone: bool = False
    began_at: float = math.nan
    ended_at: float = math.nan
    tokens: int = 0
    padded_tokens: int = 0
    collate_seconds: float = 0.0
    compute_seconds: float = 0.0
    split_seconds: float = 0.0
    outputs: list[OutputArrays | None] = field(default_factory=list)
