"""Which sequences run together: a pure decision, without asyncio, threads or a clock of its own.

The cost of a batch is its *padded* tokens, longest sequence × number of sequences, so neighbours in length belong
together. But whoever waits longest must not wait for a neighbour of its own length. Hence:

1. The oldest live entry, the *anchor*, is always in the batch. So an entry that has k live entries before it runs in
   the (k + 1)-th batch from now at the latest, whatever arrives after it: nothing starves.
2. From the anchor the batch grows along the pending entries sorted by length, each time by that neighbour, the next
   shorter or the next longer one, which adds less padding.
3. It stops at the budget of padded tokens, at the greatest number of sequences, or where padding would take too great
   a share. The anchor itself runs even if it alone exceeds the budget.

The cost is O(n log n) in the pending entries, once a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from encserve_server.types import ClosedBy


class Pending(Protocol):
    """What the decision needs to know of a waiting sequence."""

    @property
    def length(self) -> int:
        """Its tokens, at least 1."""

    @property
    def deadline(self) -> float:
        """When its caller stops waiting, in the clock's seconds; infinity for never."""

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it any more."""


E = TypeVar("E", bound=Pending)


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
class Taken(Generic[E]):
    """The decision: every pending entry is in exactly one of the four lists, each in order of arrival.

    Attributes:
        batch: What runs now; empty only if nothing live is pending.
        expired: Whose deadline has passed; to be told so, not run.
        gone: Whom nobody waits for; to be forgotten.
        left: What stays pending.
        closed_by: Why the batch took no more.
    """

    batch: list[E]
    expired: list[E]
    gone: list[E]
    left: list[E]
    closed_by: ClosedBy


def take_batch(pending: Sequence[E], policy: BatchPolicy, now: float) -> Taken[E]:
    """Decides what runs next.

    Args:
        pending: The waiting entries in order of arrival.
        policy: The bounds.
        now: The clock's seconds; an entry with `deadline <= now` has expired.
    """
    live: list[E] = []
    expired: list[E] = []
    gone: list[E] = []
    for entry in pending:
        if entry.gone:
            gone.append(entry)
        elif entry.deadline <= now:
            expired.append(entry)
        else:
            live.append(entry)
    if not live:
        return Taken([], expired, gone, [], ClosedBy.DRAINED)

    chosen, closed_by = _grow([entry.length for entry in live], policy)
    batch = [entry for i, entry in enumerate(live) if i in chosen]
    left = [entry for i, entry in enumerate(live) if i not in chosen]
    return Taken(batch, expired, gone, left, closed_by)


def _grow(lengths: Sequence[int], policy: BatchPolicy) -> tuple[set[int], ClosedBy]:
    """Picks the indices of a batch around index 0, the anchor, and says why it stopped."""
    by_length = sorted(range(len(lengths)), key=lambda i: lengths[i])  # stable: equal lengths in order of arrival
    low = high = by_length.index(0)  # the batch is by_length[low:high + 1]
    real = longest = lengths[0]  # tokens without padding, and the longest sequence
    closed_by = ClosedBy.DRAINED
    while True:
        shorter = lengths[by_length[low - 1]] if low > 0 else None
        longer = lengths[by_length[high + 1]] if high + 1 < len(by_length) else None
        if shorter is None and longer is None:
            break
        count = high - low + 2  # the sequences with the candidate
        # The padding that a candidate adds: its own if it is shorter, everybody else's if it is longer.
        added_by_shorter = longest - shorter if shorter is not None else None
        added_by_longer = (longer - longest) * (count - 1) if longer is not None else None
        take_longer = added_by_shorter is None or (added_by_longer is not None and added_by_longer < added_by_shorter)
        candidate = longer if take_longer else shorter
        assert candidate is not None  # noqa: S101 - one of the two is there
        refusal = _refusal(max(longest, candidate), real + candidate, count, policy)
        if refusal is not None and take_longer and shorter is not None:
            # The longer one does not fit, but the shorter one may: it makes the batch no wider.
            take_longer, candidate = False, shorter
            refusal = _refusal(longest, real + candidate, count, policy)
        if refusal is not None:
            closed_by = refusal
            break
        real += candidate
        longest = max(longest, candidate)
        low, high = (low, high + 1) if take_longer else (low - 1, high)
    return set(by_length[low : high + 1]), closed_by


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
