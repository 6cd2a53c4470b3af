"""Decides which calls the queue admits, and when callers retry. This module has no clock and no queue."""

import math
from dataclasses import dataclass

# A queue that was full accepts calls again when a quarter of the queue is free.
_REOPENS_FREE = 4


class Admission:
    """Decides which calls a queue with a bound in tokens admits.

    A nearly full queue has room for a short call sooner than for a long call. So a steady load of short calls would
    leave no room for a long call. Therefore a queue that has refused a call is closed to all calls until a quarter of
    the queue is free. Then the queue takes calls in their order of arrival, until a call does not fit. Calls that are
    much smaller than a quarter of the queue have nearly equal chances. A call of half the queue has about half this
    chance.

    Attributes:
        limit_tokens: The maximum number of tokens that may wait.
    """

    def __init__(self, limit_tokens: int) -> None:
        """Start open."""
        self.limit_tokens = limit_tokens
        self._free_tokens = limit_tokens // _REOPENS_FREE
        self._closed = False

    @property
    def reopens_at_tokens(self) -> int | None:
        """The queue opens again when at most this number of tokens waits; None while the queue is open."""
        return self.limit_tokens - self._free_tokens if self._closed else None

    def is_closed(self, queued_tokens: int) -> bool:
        """Return whether the queue refuses calls of any size now."""
        return self._closed and queued_tokens + self._free_tokens > self.limit_tokens

    def bulk_excess(self, tokens: int, queued_tokens: int) -> int:
        """Decide about a bulk call. Return the number of tokens that must leave the queue first; 0 admits the call.

        A quarter of the queue is reserved for interactive calls. Nothing is reserved if the bulk call is larger than
        three quarters of the queue. A bulk call never closes the queue.
        """
        reserved = self._free_tokens if tokens + self._free_tokens <= self.limit_tokens else 0
        return max(queued_tokens + tokens + reserved - self.limit_tokens, 0)

    def excess(self, tokens: int, queued_tokens: int) -> int:
        """Decide about an interactive call. The decision may open or close the queue, so ask once for each call.

        Args:
            tokens: The tokens of the call.
            queued_tokens: The tokens that wait now.

        Returns:
            The number of tokens that must leave the queue first; 0 admits the call.
        """
        once_closed = queued_tokens + max(tokens, self._free_tokens) - self.limit_tokens
        self._closed = (once_closed if self._closed else queued_tokens + tokens - self.limit_tokens) > 0
        return once_closed if self._closed else 0


@dataclass(slots=True)
class Throughput:
    """A running estimate of tokens per second, for retry delays."""

    tokens_per_second: float = math.nan

    def add(self, tokens: int, seconds: float) -> None:
        """Count a run."""
        if seconds <= 0:
            return
        rate = tokens / seconds
        known = self.tokens_per_second
        self.tokens_per_second = rate if math.isnan(known) else 0.8 * known + 0.2 * rate

    def seconds_for(self, tokens: int) -> float:
        """Return the estimated seconds for `tokens`, from 10 ms to 5 s. Before the first run, return 100 ms."""
        if math.isnan(self.tokens_per_second):
            return 0.1
        return min(max(tokens / self.tokens_per_second, 0.01), 5.0)
