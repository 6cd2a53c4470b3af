"""Decides which sequences run together. The decision is a pure function: no asyncio, no threads, no clock.

The cost of a batch is its *padded* tokens: longest sequence × number of sequences. So sequences of similar length run
together. But the oldest sequence must not wait for other sequences of its length. The rules:

1. The *anchor* is always in the batch. It is the oldest live sequence of the next caller; see `queue`. With one caller
   and k live sequences ahead, a sequence runs at the latest in the (k + 1)-th batch from now.
2. The batch starts with the length of the anchor. Each step adds a sequence of the same length, or of the next shorter
   or next longer length, whichever adds less padding.
3. The batch is closed before it exceeds a limit of `BatchPolicy`. The anchor runs even if the anchor alone exceeds the
   limit of tokens.

The decision needs only the number of waiting sequences of each length. So its time depends on the size of the batch and
the number of different lengths, but not on the size of the queue.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from encserve_server.types.sequences import ClosedBy


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The limits of a batch.

    Attributes:
        max_batch_tokens: The maximum number of tokens, padding included (longest sequence × number of sequences). A
            larger batch uses the device better, until the activations no longer fit the device's cache.
        max_batch_sequences: The maximum number of sequences, of any length.
        max_padding_fraction: The maximum fraction of padding in a batch, from 0 (only equal lengths run together) to 1
            (no limit). A low value suits a CPU, because a padding token costs as much as a real token. A high value
            suits a GPU, because a second run costs more than padding.
    """

    max_batch_tokens: int
    max_batch_sequences: int
    max_padding_fraction: float

    def __post_init__(self) -> None:
        """Raise ValueError if a limit is out of range."""
        for name in ("max_batch_tokens", "max_batch_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1; was {getattr(self, name)}")
        if not 0.0 <= self.max_padding_fraction <= 1.0:
            raise ValueError(f"max_padding_fraction must be from 0 to 1; was {self.max_padding_fraction}")


@dataclass(frozen=True, slots=True)
class Plan:
    """The contents of a batch.

    Attributes:
        counts: The number of sequences by length, including the anchor.
        closed_by: Why the batch takes no more sequences.
    """

    counts: dict[int, int]
    closed_by: ClosedBy


def plan_batch(anchor: int, lengths: Sequence[int], waiting: Mapping[int, int], policy: BatchPolicy) -> Plan:
    """Decide how many sequences of each length run next.

    Args:
        anchor: The length of the anchor.
        lengths: The lengths of the waiting sequences, including the anchor; ascending and unique.
        waiting: The number of waiting sequences of each length, including the anchor; at least 1 each.
        policy: The limits of the batch.
    """
    counts = {anchor: 1}
    low = high = bisect_left(lengths, anchor)  # the batch has lengths[low] to lengths[high]
    real = longest = anchor  # real: the number of tokens without padding; longest: the longest length
    count = 1
    while True:
        shorter = _next(lengths, waiting, counts, low, -1)
        longer = _next(lengths, waiting, counts, high, 1)
        if shorter < 0 and longer < 0:
            return Plan(counts, ClosedBy.QUEUE_EMPTY)
        # A shorter candidate adds only its own padding. A longer candidate adds padding to each other sequence.
        add_longer = shorter < 0 or (longer >= 0 and (lengths[longer] - longest) * count < longest - lengths[shorter])
        refusal = None
        for at in (longer, shorter) if add_longer else (shorter,):  # if the longer does not fit, try the shorter
            if at < 0:
                continue
            length = lengths[at]
            refusal = _refusal(max(longest, length), real + length, count + 1, policy)
            if refusal is None:
                break
        if refusal is not None:
            return Plan(counts, refusal)
        counts[length] = counts.get(length, 0) + 1
        real += length
        longest = max(longest, length)
        count += 1
        low, high = min(low, at), max(high, at)


def _next(lengths: Sequence[int], waiting: Mapping[int, int], counts: Mapping[int, int], at: int, step: int) -> int:
    """Search from `at` in steps of `step`. Return the index of the first length that has sequences left, or -1."""
    while 0 <= at < len(lengths):
        if counts.get(lengths[at], 0) < waiting[lengths[at]]:
            return at
        at += step
    return -1


def _refusal(longest: int, real: int, count: int, policy: BatchPolicy) -> ClosedBy | None:
    """Return the limit that such a batch would exceed; None if it exceeds no limit."""
    padded = longest * count
    if count > policy.max_batch_sequences:
        return ClosedBy.SEQUENCES
    if padded > policy.max_batch_tokens:
        return ClosedBy.TOKENS
    if padded - real > policy.max_padding_fraction * padded:
        return ClosedBy.PADDING
    return None
