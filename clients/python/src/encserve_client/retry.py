"""Settings for retries."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from encserve_client._arguments import as_float, as_int
from encserve_client.exceptions import InvalidInputError

# `longest_wait` is never below this value. Otherwise a backoff of 0 would retry without a pause.
_MIN_LONGEST_WAIT_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Outage:
    """A server that has answered a client before, and is unavailable now.

    Attributes:
        target: The target of the client.
        seconds_left: The seconds until the client gives up. `math.inf` for no limit, 0 if `is_over`.
        is_over: Whether the server answers again.
    """

    target: str
    seconds_left: float
    is_over: bool = False


OnOutage = Callable[[Outage], None]
"""A function that is called when an outage begins and when the outage is over.

Each call reports its own outages, in its own thread.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a failed message is sent again, and for how long.

    The client retries on three kinds of failure: UNAVAILABLE, RESOURCE_EXHAUSTED if the server is full, and CANCELLED
    by the server's side. Encoding has no side effects, so sending twice is safe.

    A message is sent again until the message's time (`timeout_seconds`) is over, so calls survive a restart of the
    server. If a server has never answered this client, the address may be wrong. Then no attempt begins after 2
    seconds. An attempt to connect to a silent port takes 5 seconds.

    The wait before attempt n + 1 is the sum of two parts. The first part is the delay that the server asked for. The
    second part is random: 50 to 100 % of the longest wait. The longest wait is
    min(initial_backoff_seconds · backoff_multiplier^(n - 1), max_backoff_seconds), but at least 0.05 s. If a wait would
    end after the time of the message, the client raises the error immediately.

    RetryPolicy(max_attempts=1)  # never try again

    Attributes:
        max_attempts: The largest number of attempts, the first one included. Default: no limit besides the time of
            the message.
        initial_backoff_seconds: The longest wait before the second attempt.
        backoff_multiplier: The growth of the longest wait with every attempt.
        max_backoff_seconds: The upper bound of the longest wait.
    """

    max_attempts: float = math.inf
    initial_backoff_seconds: float = 0.1
    backoff_multiplier: float = 2.0
    max_backoff_seconds: float = 5.0

    def __post_init__(self) -> None:
        """Check the settings. Raise InvalidInputError if a value is not allowed."""
        if self.max_attempts != math.inf:
            as_int("max_attempts", self.max_attempts)
        for name in ("initial_backoff_seconds", "backoff_multiplier", "max_backoff_seconds"):
            as_float(name, getattr(self, name))
        if self.max_attempts < 1:
            raise InvalidInputError(f"must be >= 1; was {self.max_attempts}", field="max_attempts")
        if self.initial_backoff_seconds < 0:
            raise InvalidInputError(
                f"must be >= 0; was {self.initial_backoff_seconds}",
                field="initial_backoff_seconds",
            )
        if self.backoff_multiplier < 1:
            raise InvalidInputError(f"must be >= 1; was {self.backoff_multiplier}", field="backoff_multiplier")
        if self.max_backoff_seconds < self.initial_backoff_seconds:
            raise InvalidInputError(
                f"must be >= initial_backoff_seconds; was {self.max_backoff_seconds} < {self.initial_backoff_seconds}",
                field="max_backoff_seconds",
            )

    def longest_wait(self, attempts: int) -> float:
        """Return the longest wait after `attempts` attempts (at least 1), in seconds, without the server's delay."""
        # The exponent is capped so that many attempts cannot overflow a float.
        backoff = self.initial_backoff_seconds * self.backoff_multiplier ** min(attempts - 1, 64)
        return max(min(backoff, self.max_backoff_seconds), _MIN_LONGEST_WAIT_SECONDS)
