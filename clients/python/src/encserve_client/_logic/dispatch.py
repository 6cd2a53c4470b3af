"""The messages of one call: which to send now, and what follows from an answer or a failure. Without I/O.

The driver of the call is `calls.exchange` or `streams.Stream`. The driver takes messages from `Dispatch.take`, sends
them, and reports each end to `answered` or `failed`. The driver also passes the time. Nothing here blocks.
"""

import heapq
import itertools
import random as random_module
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import grpc

from encserve_client._logic.failures import CallInfo, Failure, ServerHistory, seconds_until_retry
from encserve_client._logic.planning import Message
from encserve_client.exceptions import DeadlineError, EncserveError
from encserve_client.retry import RetryPolicy

R = TypeVar("R")
T = TypeVar("T")
_TOO_LATE = grpc.StatusCode.DEADLINE_EXCEEDED


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


class MessageSource(Protocol):
    """The messages of a call that were not sent yet."""

    @property
    def is_ended(self) -> bool:
        """Whether no message will come any more."""

    def take(self, *, idle: bool) -> Message | None:
        """Return the next message, or None if there is none now.

        `idle`: whether the server has nothing of this call to do, so that a partial message is better than none.
        """


class Planned:
    """The messages of a call with a known list of inputs, made as they are taken."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._messages = iter(messages)
        self.is_ended = False

    def take(self, *, idle: bool) -> Message | None:
        """See `MessageSource`."""
        message = next(self._messages, None)
        self.is_ended = message is None
        return message


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

    At most `max_concurrent` messages are out at a time. A message is taken from the source only when there is room. A
    message with a temporary failure is sent again, within the policy and before its deadline. A message that is too
    large is replaced by two halves.

    If `rejected` is given, the failure of one input is recorded there, and the other inputs of the message are sent
    again. The failure of one message is recorded for each of its inputs. Any other failure ends the call.

    Attributes:
        answers: (first_index of the message, answer) of each answered message, in the order of arrival.
        attempts: Number of sent messages, repeated messages included.
        rejected: Index of an input → its error. None if the first error ends the call.
        saw_too_large: Whether a message was refused for its size, so that remembered limits may be out of date.
    """

    def __init__(
        self,
        source: MessageSource,
        policy: RetryPolicy,
        limit: TimeLimit,
        max_concurrent: int,
        random: Callable[[], float] = random_module.random,
        target: str = "",
        rejected: dict[int, EncserveError] | None = None,
        history: ServerHistory | None = None,
    ) -> None:
        self.answers: list[tuple[int, R]] = []
        self.rejected = rejected
        self.attempts = 0
        self.saw_too_large = False
        self._source = source
        self._outbox: Outbox[Message] = Outbox()
        self._policy = policy
        self._limit = limit
        self._max_concurrent = max_concurrent
        self._random = random
        self._call = CallInfo(target, limit.seconds)
        self._history = history or ServerHistory()
        self._out = 0
        self._met_outage: set[int] = set()  # by id, the messages whose last attempt met an outage

    @property
    def done(self) -> bool:
        """Whether every message was answered. True only after a `take` that found nothing more."""
        return self._source.is_ended and not self._out and not self._outbox

    @property
    def is_alone(self) -> bool:
        """Whether the one message that is out is all there is to do until it ends."""
        return self._out == 1 and (self._max_concurrent == 1 or (self._source.is_ended and not self._outbox))

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
                self._give_up(message, partial(self._too_late, message), is_of_message=self._limit.ends is None)
                continue
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
        self._met_outage.discard(id(message))
        self._history.server_seen = True
        self.answers.append((message.first_index, answer))

    def failed(self, message: Message, failure: Failure, now: float) -> None:
        """Books a failure.

        Raises:
            EncserveError: The failure ends the call.
        """
        self._out -= 1
        is_outage = self._history.is_outage(failure)
        (self._met_outage.add if is_outage else self._met_outage.discard)(id(message))
        if failure.too_large:
            self.saw_too_large = True
            if halves := message.halves():
                self._outbox.push_first(halves)
                return
        seconds_left = message.deadline - now
        wait = seconds_until_retry(self._policy, failure, message.attempts, seconds_left, self._random, is_outage)
        if wait is not None:
            self._outbox.push_later(now + wait, message)
            return
        place = failure.input_at_fault(message.n_inputs)
        if self.rejected is not None and place is not None:
            index = message.first_index + place
            self.rejected[index] = failure.to_exception(message.attempts, message.first_index, self._call)
            self._outbox.push_first(message.without(place))
            return
        self._give_up(
            message,
            lambda: failure.to_exception(message.attempts, message.first_index, self._call, message.n_inputs),
            is_of_message=failure.is_of_message and (self._limit.ends is None or failure.code is not _TOO_LATE),
        )

    def _next(self, now: float) -> Message | None:
        message = self._outbox.pop(now)
        # During an outage no new message is taken. Its timeout would begin long before its turn.
        if message is None and not self._met_outage and not self._source.is_ended:
            message = self._source.take(idle=not self._out and not self._outbox)
        return message

    def _too_late(self, message: Message) -> EncserveError:
        target = f" to {self._call.target}" if self._call.target else ""
        return DeadlineError(
            f"{self._call.timeout_seconds:g} s passed before everything was sent{target}",
            code=_TOO_LATE,
            attempts=message.attempts,
        )

    def _give_up(self, message: Message, make_error: Callable[[], EncserveError], *, is_of_message: bool) -> None:
        """Record an error for each input of the message.

        Raises:
            EncserveError: The error ends the call: it concerns other messages too, or `rejected` is None.
        """
        if self.rejected is None or not is_of_message:
            raise make_error()
        for index in range(message.first_index, message.first_index + message.n_inputs):
            self.rejected[index] = error = make_error()
            error.index = index
