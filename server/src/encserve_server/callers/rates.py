"""Rates of callers, in tokens per second. The functions get the time as an argument."""

# A caller that sends nothing saves up the tokens of at most this time, so that the server accepts a short burst.
BURST_SECONDS = 1.0


class TokenBucket:
    """A token bucket. The level may fall below zero.

    A call is accepted if any token is left, and then all its tokens are counted. So one call may have more tokens than
    the bucket holds. A level below zero is a debt: calls are refused until the rate has paid the debt. So in any `t`
    seconds, the accepted calls have at most `(t + BURST_SECONDS) * tokens_per_second` tokens, plus the last call.
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
        """Return the seconds until the next call is accepted, 0 for now."""
        self._fill(now)
        return 0.0 if self._level > 0 else max(-self._level, 1.0) / self._rate

    def take(self, tokens: float, now: float) -> None:
        """Count a call. A negative number of tokens undoes an earlier count."""
        self._fill(now)
        self._level = min(self._level - tokens, self._rate * BURST_SECONDS)

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at) * self._rate, self._rate * BURST_SECONDS)
        self._at = now
