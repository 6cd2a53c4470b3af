"""Which sequences run together: a pure decision, without asyncio, threads or a clock of its own.

The cost of a batch is its *padded* tokens, longest sequence × number of sequences, so neighbours in length belong
together. But the sequence that waits longest must not wait for a neighbour of its own length. Hence:

1. The oldest live sequence, the *anchor*, is always in the batch. So a sequence that has k live ones before it runs in
   the (k + 1)-th batch from now at the latest, whatever arrives after it: nothing starves.
2. From the anchor the batch grows along the pending lengths, each time by that neighbour, of the same length, the next
   shorter or the next longer one, which adds less padding; of one length the oldest come first.
3. It stops at the budget of padded tokens, at the greatest number of sequences, or where padding would take too great
   a share. The anchor itself runs even if it alone exceeds the budget.

The decision sees only how many sequences wait of each length. So its cost grows with the batch and with the lengths
that it passes, not with the queue.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from encserve_server.types.sequences import ClosedBy


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The bounds of a batch.

    Attributes:
        max_batch_tokens: The most padded tokens (longest × count). More fills the device better, until activations
            leave its cache.
        max_batch_sequences: The most sequences, whatever their length.
        max_padding_fraction: The greatest share of padding among the padded tokens, from 0 (only equal lengths run
            together) to 1 (no bound). Low suits a CPU, where a padded token costs as much as a real one; high suits a
            GPU, where a second run costs more than padding.
    """

    max_batch_tokens: int
    max_batch_sequences: int
    max_padding_fraction: float

    def __post_init__(self) -> None:
        """Raises ValueError for a bound that no batch could meet."""
        for name in ("max_batch_tokens", "max_batch_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1; was {getattr(self, name)}")
        if not 0.0 <= self.max_padding_fraction <= 1.0:
            raise ValueError(f"max_padding_fraction must be from 0 to 1; was {self.max_padding_fraction}")


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch to be made.

    Attributes:
        counts: How many sequences of each length, the anchor among them.
        closed_by: Why it takes no more.
    """

    counts: dict[int, int]
    closed_by: ClosedBy


def plan_batch(anchor: int, lengths: Sequence[int], waiting: Mapping[int, int], policy: BatchPolicy) -> Plan:
    """Decides which lengths run next.

    Args:
        anchor: The length of the oldest sequence.
        lengths: The lengths that wait, the anchor's among them, ascending, each once.
        waiting: How many sequences of each length wait, the anchor among them; at least 1 each.
        policy: The bounds.
    """
    counts = {anchor: 1}
    low = high = bisect_left(lengths, anchor)  # the batch has sequences of lengths[low] to lengths[high]
    real = longest = anchor  # tokens without padding, and the longest sequence
    count = 1
    while True:
        shorter = _next(lengths, waiting, counts, low, -1)
        longer = _next(lengths, waiting, counts, high, 1)
        if shorter < 0 and longer < 0:
            return Plan(counts, ClosedBy.QUEUE_EMPTY)
        # The padding that a candidate adds: its own if it is shorter, that of all others if it is longer.
        add_longer = shorter < 0 or (longer >= 0 and (lengths[longer] - longest) * count < longest - lengths[shorter])
        refusal = None
        for at in (longer, shorter) if add_longer else (shorter,):  # where a longer one does not fit, a shorter may
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
    """The place of the nearest length from `at` on that has sequences left; -1 for no such length."""
    while 0 <= at < len(lengths):
        if counts.get(lengths[at], 0) < waiting[lengths[at]]:
            return at
        at += step
    return -1


def _refusal(longest: int, real: int, count: int, policy: BatchPolicy) -> ClosedBy | None:
    """The bound that a batch of these numbers would break, if any."""
    padded = longest * count
    if count > policy.max_batch_sequences:
        return ClosedBy.SEQUENCES
    if padded > policy.max_batch_tokens:
        return ClosedBy.TOKENS
    if padded - real > policy.max_padding_fraction * padded:
        return ClosedBy.PADDING
    return None
