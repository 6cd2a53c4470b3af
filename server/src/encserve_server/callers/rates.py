"""Rate limits of callers, in tokens per second. The functions get the time as an argument."""

# An idle caller saves the tokens of at most this time for a short burst.
BURST_SECONDS = 1.0


class TokenBucket:
    """A token bucket. The level may fall below zero.

    A call is accepted if the level is above zero. Then the bucket subtracts all tokens of the call. So one call may
    have more tokens than the bucket holds. A level below zero is a debt: calls are refused until the bucket has
    refilled above zero. In any `t` seconds, the accepted calls have at most `(t + BURST_SECONDS) * tokens_per_second`
    tokens, plus the tokens of the last call.
    """

    def __init__(self, tokens_per_second: float, now: float) -> None:
        """Start with a full bucket."""
        self._rate = tokens_per_second
        self._level = tokens_per_second * BURST_SECONDS
        self._at = now

    def change_rate(self, tokens_per_second: float, now: float) -> None:
        """Change the rate. A debt stays."""
        self._fill(now)
        self._rate = tokens_per_second
        self._level = min(self._level, tokens_per_second * BURST_SECONDS)

    def delay_seconds(self, now: float) -> float:
        """Return the seconds until the next call is accepted; 0 if a call is accepted now."""
        self._fill(now)
        return 0.0 if self._level > 0 else max(-self._level, 1.0) / self._rate

    def take(self, tokens: float, now: float) -> None:
        """Subtract the tokens of a call. A negative number gives tokens back."""
        self._fill(now)
        self._level = min(self._level - tokens, self._rate * BURST_SECONDS)

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at) * self._rate, self._rate * BURST_SECONDS)
        self._at = now
