"""A sequence of a call, and the batch in which the sequence runs."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from encserve_server.types.arrays import Mask, ModelInput, OutputArrays, TokenSpans
from encserve_server.types.requests import Output


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One sequence of a call, from validation to delivery. Each stage sets some of the fields.

    The event loop owns the sequence. The engine thread that runs the sequence's batch only reads fields. At delivery,
    the event loop sets the results.

    Attributes:
        input: (seq,) int64 ids, or (seq, d_model) float32 vectors if the model takes vectors.
        original_token_count: The number of tokens before truncation.
        special: A (seq,) mask of the special tokens; None if the call does not need the mask.
        char_starts: (seq,) the start of each token in the text, in code points; 0 for special tokens. None if the input
            is not a text or the call does not need offsets.
        char_ends: (seq,) the exclusive end of each token; see `char_starts`.
        kept_after: The number of tokens kept at the end, behind the cut; 0 without truncation.
        second_start: The index of the first token with token type 1: the second text of a pair. 0 if all tokens have
            type 0.
        attended: Every token attends only to the first `attended` tokens; 0 for no limit.
        token_spans: The spans for OutputKind.SPANS; None without spans.
        wanted: The outputs to compute.
        cost: The cost in tokens; see `ModelOutputs.cost`.
        ticket: The pending call of the sequence. Only `scheduling` uses this field.
        virtual_start: The virtual time of the queue at which the sequence may start. Only `scheduling` uses this field.
        index: The index in the call.
        deadline: The time at which the caller stops waiting, in the clock's seconds; infinity without a deadline.
        enqueued_at: The time at which the sequence was queued, in the clock's seconds.
        started_at: The time at which the sequence's batch was formed, in the clock's seconds; NaN before.
        outputs: The (rows, width) array of each output in `wanted`.
        compute_seconds: The run time of the model for the sequence's batch.
    """

    input: ModelInput
    original_token_count: int
    special: Mask | None = None
    char_starts: list[int] | None = None
    char_ends: list[int] | None = None
    kept_after: int = 0
    second_start: int = 0
    attended: int = 0
    token_spans: TokenSpans | None = None
    wanted: tuple[Output, ...] = ()
    cost: int = 0
    ticket: Any = None
    virtual_start: float = 0.0
    index: int = 0
    deadline: float = math.inf
    enqueued_at: float = math.nan
    started_at: float = math.nan
    outputs: OutputArrays = ()
    compute_seconds: float = 0.0

    @property
    def truncated(self) -> bool:
        """Whether tokens were removed."""
        return self.original_token_count > len(self.input)

    @property
    def token_ids(self) -> list[int] | None:
        """The token ids; None for vectors."""
        return self.input.tolist() if self.input.ndim == 1 else None


class ClosedBy(StrEnum):
    """The reason why a batch was closed. The values are labels of encserve_batches."""

    QUEUE_EMPTY = "drained"  # no other sequence was in the queue
    TOKENS = "tokens"  # one more sequence would exceed max_batch_tokens
    SEQUENCES = "sequences"  # the batch has max_batch_sequences sequences
    PADDING = "padding"  # one more sequence would exceed max_padding_fraction


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences that run together, and the results. Until delivery, only the engine thread of the run uses the batch.

    Attributes:
        sequences: The sequences.
        closed_by: The reason why the batch was closed.
        lane: The index of the engine thread that runs the batch.
        alone: Whether the batch uses the whole device.
        began_at: The time at which the run began, in the clock's seconds.
        ended_at: The time at which the outputs were complete, in the clock's seconds.
        tokens: The number of tokens, without padding.
        padded_tokens: The number of tokens, including padding.
        collate_seconds: The time for padding the sequences into one array.
        compute_seconds: The time for running the model.
        split_seconds: The time for computing and checking the outputs.
        outputs: The outputs of each sequence; None for a sequence with invalid rows.
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
