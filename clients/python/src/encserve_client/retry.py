"""When a failed message is sent again."""

import math
from dataclasses import dataclass

from encserve_client._arguments import as_float, as_int
from encserve_client.exceptions import InvalidInputError

# The longest wait is never shorter than this, because the number of attempts has no bound by default.
_LEAST_WAIT_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """After which waits, and until when, a failed message is sent again.

    The client sends a message again after three failures: UNAVAILABLE, RESOURCE_EXHAUSTED if the server has no room at
    the moment, and a call that the other side cancelled. Encoding has no side effects, so sending twice is safe.

    A message is sent again until its time (`timeout_seconds`) is over, so calls outlive a restart. But a server that
    has never answered this client gets 2 seconds, because its address may be wrong.

    The wait before attempt n + 1 is the delay that the server asked for, and a random part of the backoff: between half
    and all of min(initial_backoff_seconds · backoff_multiplier^(n - 1), max_backoff_seconds), of at least 0.05 s. If a
    wait would end after the time of the message, the error is raised at once.

    RetryPolicy(max_attempts=1)  # never try again

    Attributes:
        max_attempts: How often a message is sent at most, the first time included. Default: no bound but its time.
        initial_backoff_seconds: The longest wait before the second attempt.
        backoff_multiplier: The growth of the longest wait with every attempt.
        max_backoff_seconds: The bound of the longest wait.
    """

    max_attempts: float = math.inf
    initial_backoff_seconds: float = 0.1
    backoff_multiplier: float = 2.0
    max_backoff_seconds: float = 5.0

    def __post_init__(self) -> None:
        """Raises InvalidInputError with the setting, its bound or type, and the value."""
        if self.max_attempts != math.inf:
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

    def longest_wait(self, attempts: int) -> float:
        """The longest wait after so many attempts, 1 or more, in seconds; without the server's own delay."""
        # The exponent is capped so that many attempts cannot overflow a float.
        backoff = self.initial_backoff_seconds * self.backoff_multiplier ** min(attempts - 1, 64)
        return max(min(backoff, self.max_backoff_seconds), _LEAST_WAIT_SECONDS)
