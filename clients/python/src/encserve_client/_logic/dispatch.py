"""One call's messages: which to send now, and what an answer or a failure means for the rest. Pure.

The driver (`calls.exchange`) asks `take` what to send, does the I/O, and reports each end to `answered` or `failed`;
time comes in as an argument. Nothing here blocks, and only the driver of the call touches it.
"""

import heapq
import itertools
import random as random_module
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from encserve_client._logic.failures import CallInfo, Contact, Failure, seconds_until_retry
from encserve_client._logic.planning import Message
from encserve_client.exceptions import DeadlineError, EncserveError
from encserve_client.retry import RetryPolicy

R = TypeVar("R")
T = TypeVar("T")


class Outbox(Generic[T]):
    """Items waiting to be sent. An item whose wait is over goes before new ones, so that old work finishes first."""

    def __init__(self) -> None:
        self._ready: deque[T] = deque()
        self._later: list[tuple[float, int, T]] = []  # a heap of (due, order of arrival, item)
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._ready) + len(self._later)

    def push(self, item: T) -> None:
        """Adds a new item at the end."""
        self._ready.append(item)

    def push_first(self, items: Iterable[T]) -> None:
        """Adds items before all others that are ready, in this order."""
        self._ready.extendleft(reversed(list(items)))

    def push_later(self, due: float, item: T) -> None:
        """Adds an item that must not be sent before `due`."""
        heapq.heappush(self._later, (due, next(self._arrivals), item))

    def pop(self, now: float) -> T | None:
        """Takes the next item that may be sent at `now`; None if there is none."""
        if self._later and self._later[0][0] <= now:
            return heapq.heappop(self._later)[2]
        return self._ready.popleft() if self._ready else None

    def next_due(self) -> float | None:
        """When the next waiting item may be sent; None if none waits."""
        return self._later[0][0] if self._later else None

    def discard(self, item: T) -> None:
        """Removes an item that is no longer wanted, if it is here."""
        self._ready = deque(it for it in self._ready if it is not item)
        self._later = [entry for entry in self._later if entry[2] is not item]
        heapq.heapify(self._later)


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """How long a call may take.

    Attributes:
        seconds: Of each message, from when it is first sent until it is answered; of the whole call if that has an end.
        ends: When the whole call must be over; None for no such limit.
    """

    seconds: float
    ends: float | None = None

    def deadline(self, now: float) -> float:
        """When the answer to a message that is first sent now must have come."""
        return now + self.seconds if self.ends is None else self.ends


class Dispatch(Generic[R]):
    """The messages of one call.

    At most `max_concurrent` are out at a time, and messages are drawn from their iterator only when there is room. A
    message that failed for a while is sent again within the policy and its deadline; one that is too large is replaced
    by its halves, which are new messages. Where `rejected` is given, a failure of one input is booked there, and the
    message's others are sent without it. Any other failure ends the call.

    Attributes:
        answers: What `answered` was given, each after its message's first_index; in no order.
        attempts: How many messages were sent, those sent again included.
        rejected: The error of each input that failed by itself, by its index; None where that ends the call.
        saw_too_large: Whether a message was refused for its size, so that known limits may be out of date.
    """

    def __init__(
        self,
        messages: Iterable[Message],
        policy: RetryPolicy,
        limit: TimeLimit,
        max_concurrent: int,
        random: Callable[[], float] = random_module.random,
        target: str = "",
        rejected: dict[int, EncserveError] | None = None,
        contact: Contact | None = None,
    ) -> None:
        self.answers: list[tuple[int, R]] = []
        self.rejected = rejected
        self.attempts = 0
        self.saw_too_large = False
        self._messages: Iterator[Message] | None = iter(messages)
        self._outbox: Outbox[Message] = Outbox()
        self._policy = policy
        self._limit = limit
        self._max_concurrent = max_concurrent
        self._random = random
        self._call = CallInfo(target, limit.seconds)
        self._contact = contact or Contact()
        self._out = 0
        self._away: set[int] = set()  # by id, the messages that met a server that was away, until it says something

    @property
    def done(self) -> bool:
        """Whether every message was answered. True only after a `take` that found nothing more."""
        return self._messages is None and not self._out and not self._outbox

    @property
    def is_alone(self) -> bool:
        """Whether the one message that is out is all there is to do until it ends."""
        return self._out == 1 and (self._max_concurrent == 1 or (self._messages is None and not self._outbox))

    def take(self, now: float) -> list[Message]:
        """The messages to send now; they count as out until they are reported back.

        Raises:
            DeadlineError: The time is up and there is something to send.
        """
        taken: list[Message] = []
        while self._out < self._max_concurrent and (message := self._next(now)) is not None:
            if not message.attempts:
                message.deadline = self._limit.deadline(now)
            if now >= message.deadline:
                raise DeadlineError(
                    f"{self._call.timeout_seconds:g} s passed before everything was sent"
                    + (f" to {self._call.target}" if self._call.target else ""),
                    code=grpc.StatusCode.DEADLINE_EXCEEDED,
                    attempts=message.attempts,
                )
            message.attempts += 1
            self.attempts += 1
            self._out += 1
            taken.append(message)
        return taken

    def seconds_to_wait(self, now: float) -> float | None:
        """How long until `take` may have something without an answer coming in; None for never."""
        due = self._outbox.next_due()
        return None if due is None or self._out >= self._max_concurrent else max(due - now, 0.0)

    def answered(self, message: Message, answer: R) -> None:
        """Books an answer."""
        self._out -= 1
        self._away.discard(id(message))
        self._contact.made = True
        self.answers.append((message.first_index, answer))

    def failed(self, message: Message, failure: Failure, now: float) -> None:
        """Books a failure.

        Raises:
            EncserveError: The failure ends the call.
        """
        self._out -= 1
        is_away = self._contact.failed(failure)
        message.away += is_away
        (self._away.add if is_away else self._away.discard)(id(message))
        if failure.too_large:
            self.saw_too_large = True
            if halves := message.halves():
                self._outbox.push_first(halves)
                return
        attempts = message.away if is_away else message.attempts - message.away
        wait = seconds_until_retry(self._policy, failure, attempts, message.deadline - now, self._random, is_away)
        if wait is None:
            error = failure.to_exception(message.attempts, message.first_index, self._call, message.n_inputs)
            place = failure.input_at_fault(message.n_inputs)
            if self.rejected is None or place is None:
                raise error
            self.rejected[message.first_index + place] = error
            self._outbox.push_first(message.without(place))
            return
        self._outbox.push_later(now + wait, message)

    def _next(self, now: float) -> Message | None:
        message = self._outbox.pop(now)
        # While the server is away no further message is drawn: its time would begin, long before its turn comes.
        if message is None and self._messages is not None and not self._away:
            message = next(self._messages, None)
            if message is None:
                self._messages = None
        return message
