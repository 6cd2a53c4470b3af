"""Which calls the queue takes, and when it makes sense to try again. Pure: no clock, no queue of its own."""

import math
from dataclasses import dataclass

# The part of the queue that must be free before a queue that was full takes calls again.
_REOPENS_FREE = 4  # a quarter


class Admission:
    """The door of a queue that is bounded in tokens.

    A queue that is nearly full has room for a short call sooner than for a long one: if each was taken as soon as it
    fits, the short ones that keep coming would leave no room for a long one, for as long as there is more to do than
    can be done. So a door that has turned a call away stays shut, for everybody, until a quarter of the queue is free.
    What then comes is taken in the order in which it comes, until something does not fit. Chances are nearly the same
    for calls that are small beside that quarter, and for a call of half of it half as good.
    """

    def __init__(self, limit_tokens: int) -> None:
        """Takes the most tokens that may wait."""
        self.limit_tokens = limit_tokens
        self._free_tokens = limit_tokens // _REOPENS_FREE
        self._shut = False

    @property
    def reopens_at_tokens(self) -> int | None:
        """How many tokens may wait, at most, when the door opens again; None while it is open."""
        return self.limit_tokens - self._free_tokens if self._shut else None

    def shut_to_all(self, queued_tokens: int) -> bool:
        """Whether nobody is taken now, however little a call would add."""
        return self._shut and queued_tokens + self._free_tokens > self.limit_tokens

    def bulk_excess(self, tokens: int, queued_tokens: int) -> int:
        """Decides about a bulk call: how many tokens must leave the queue first; 0 if it is taken.

        Bulk leaves a quarter of the queue to interactive calls and never shuts the door. A call that is larger than the
        other three quarters needs room for itself only.
        """
        reserved = self._free_tokens if tokens + self._free_tokens <= self.limit_tokens else 0
        return max(queued_tokens + tokens + reserved - self.limit_tokens, 0)

    def excess(self, tokens: int, queued_tokens: int) -> int:
        """Decides about a call; to be asked once for each.

        Args:
            tokens: What it would add.
            queued_tokens: What waits now.

        Returns:
            How many tokens must leave the queue before it can be taken; 0 if it is.
        """
        once_shut = queued_tokens + max(tokens, self._free_tokens) - self.limit_tokens
        self._shut = (once_shut if self._shut else queued_tokens + tokens - self.limit_tokens) > 0
        return once_shut if self._shut else 0


@dataclass(slots=True)
class Throughput:
    """A running estimate of tokens a second, to say when trying again makes sense."""

    tokens_per_second: float = math.nan

    def add(self, tokens: int, seconds: float) -> None:
        """Counts a run."""
        if seconds <= 0:
            return
        rate = tokens / seconds
        known = self.tokens_per_second
        self.tokens_per_second = rate if math.isnan(known) else 0.8 * known + 0.2 * rate

    def seconds_for(self, tokens: int) -> float:
        """How long `tokens` take, between 10 ms and 5 s; 100 ms while nothing is known."""
        if math.isnan(self.tokens_per_second):
            return 0.1
        return min(max(tokens / self.tokens_per_second, 0.01), 5.0)
