"""When a failed message is sent again."""

from dataclasses import dataclass

from encserve_client._arguments import as_float, as_int
from encserve_client.exceptions import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and after which waits a message is sent again.

    Sent again are messages that failed with UNAVAILABLE, with RESOURCE_EXHAUSTED where the server said that its queue
    is full, and those that the other side cancelled. Nothing else is: the answer would be the same. Encoding has no
    side effects, so sending twice is always safe. Once the server has answered this client, messages that fail with
    UNAVAILABLE, NOT_READY included, are sent again until their time is over, however often that is: calls outlive a
    restart. The wait before attempt n + 1 is at most
    min(initial_backoff_seconds · backoff_multiplier^(n - 1), max_backoff_seconds) and at least half of that, drawn
    evenly, after the delay that the server asked for. A wait that would end after the message's time, or the
    call's, is not begun: the error is raised at once.

    RetryPolicy(max_attempts=1)  # never try again

    Attributes:
        max_attempts: How often a message is sent at most, the first time included, and an input of a stream that
            breaks. While a server that has answered before is UNAVAILABLE only 1 has a meaning: never try again.
        initial_backoff_seconds: The longest wait before the second attempt.
        backoff_multiplier: How much longer the longest wait gets with every attempt.
        max_backoff_seconds: What it never gets longer than.
    """

    max_attempts: int = 5
    initial_backoff_seconds: float = 0.1
    backoff_multiplier: float = 2.0
    max_backoff_seconds: float = 5.0

    def __post_init__(self) -> None:
        """Raises InvalidInputError with the setting, its bound or type, and the value."""
        as_int("max_attempts", self.max_attempts)
        for name in ("initial_backoff_seconds", "backoff_multiplier", "max_backoff_seconds"):
            as_float(name, getattr(self, name))
        if self.max_attempts < 1:
            raise InvalidInputError(f"max_attempts must be >= 1; was {self.max_attempts}")
        if self.initial_backoff_seconds < 0:
            raise InvalidInputError(f"initial_backoff_seconds must be >= 0; was {self.initial_backoff_seconds}")
        if self.backoff_multiplier < 1:
            raise InvalidInputError(f"backoff_multiplier must be >= 1; was {self.backoff_multiplier}")
        if self.max_backoff_seconds < self.initial_backoff_seconds:
            raise InvalidInputError(
                "max_backoff_seconds must be >= initial_backoff_seconds; "
                f"was {self.max_backoff_seconds} < {self.initial_backoff_seconds}"
            )
