"""Rates of callers, in tokens a second. No I/O and no clock: callers pass the time."""

# How much of its rate a quiet caller saves: a second's worth, so that an ordinary burst is taken.
BURST_SECONDS = 1.0


class TokenBucket:
    """A token bucket whose level may fall below zero.

    A call is taken whenever there is anything left, and then counted in full, so that a call of more than a second's
    tokens is possible. What was taken too much is a debt, and calls are refused until it has been paid. So in any `t`
    seconds at most `(t + BURST_SECONDS) * tokens_per_second` tokens are taken, and one call.
    """

    def __init__(self, tokens_per_second: float, now: float) -> None:
        """Begins full."""
        self._rate = tokens_per_second
        self._level = tokens_per_second * BURST_SECONDS
        self._at = now

    def change_rate(self, tokens_per_second: float, now: float) -> None:
        """Changes the rate; a debt stays."""
        self._fill(now)
        self._rate = tokens_per_second
        self._level = min(self._level, tokens_per_second * BURST_SECONDS)

    def delay_seconds(self, now: float) -> float:
        """In how many seconds the next call is taken; 0 where that is now."""
        self._fill(now)
        return 0.0 if self._level > 0 else max(-self._level, 1.0) / self._rate

    def take(self, tokens: float, now: float) -> None:
        """Counts a call; negative to take it back."""
        self._fill(now)
        self._level = min(self._level - tokens, self._rate * BURST_SECONDS)

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at) * self._rate, self._rate * BURST_SECONDS)
        self._at = now
