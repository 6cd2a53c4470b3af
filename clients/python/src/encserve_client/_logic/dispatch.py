"""The state of one call: messages to send, messages in flight, retries, answers and errors.

The driver of the call is `calls.exchange` or `streams.Stream`. The driver calls `Dispatch.send`, waits for an event of
the wire, and passes the event to `Dispatch.record`.
"""

import random as random_module
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import grpc

from encserve_client._logic.failures import Failure, Outages, seconds_until_retry
from encserve_client._logic.planning import Message
from encserve_client._logic.wire import Answered, Event, Failed, Rpc, Wire
from encserve_client.exceptions import DeadlineError, EncserveError
from encserve_client.retry import RetryPolicy

R = TypeVar("R")
_TOO_LATE = grpc.StatusCode.DEADLINE_EXCEEDED
_LONGEST_SECONDS = 1e9  # gRPC fails calls at once if their deadline is over 2**63 ns


class MessageSource(Protocol):
    """The messages of a call that have not been sent yet."""

    @property
    def is_ended(self) -> bool:
        """Whether the source has no more messages."""

    def take(self, *, idle: bool) -> Message | None:
        """Return the next message, or None if the source has no message now.

        `idle`: whether no message of the call is in flight. If true, the source may return a partly filled message and
        not wait for more inputs.
        """


class PlannedMessages:
    """The messages of a call with a known list of inputs. The messages are built when they are taken."""

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
    """The time limit of a call.

    Attributes:
        seconds: The time of each message, from the first attempt until the answer. If `ends` is set, the time of the
            whole call.
        ends: The deadline of the whole call; None for no such limit.
    """

    seconds: float
    ends: float | None = None

    def deadline(self, now: float) -> float:
        """Return the deadline of a message that is first sent now."""
        return now + self.seconds if self.ends is None else self.ends


class Dispatch(Generic[R]):
    """The messages of one call.

    At most `max_concurrent` messages are in flight. A message is taken from the source only below this limit. A message
    with a temporary failure is sent again, within the policy and before the message's deadline. A message that is too
    large is split into two messages.

    If `rejected` is given, the failures of single inputs are recorded in `rejected`, and the other inputs of the
    message are sent again. If a whole message fails, the failure is recorded for each input of the message. Any other
    failure ends the call.

    Attributes:
        answers: (indices of the inputs, answer) of each answered message, in the order of arrival.
        attempts: Number of sent messages, repeated messages included.
        rejected: Index of an input → error of the input. None if the first error ends the call.
        failure: The error of the last message that failed for all its inputs; None without such a message.
        failed_in_a_row: Number of messages that failed for all their inputs, since the last answer.
        saw_too_large: Whether a message was refused for its size, so that remembered limits may be out of date.
        paused_seconds: Time in which the caller was busy. Deadlines do not include this time. Only `Stream` sets it.
    """

    def __init__(
        self,
        source: MessageSource,
        policy: RetryPolicy,
        limit: TimeLimit,
        max_concurrent: int,
        outages: Outages,
        random: Callable[[], float] = random_module.random,
        target: str = "",
        rejected: dict[int, EncserveError] | None = None,
    ) -> None:
        self.answers: list[tuple[Sequence[int], R]] = []
        self.rejected = rejected
        self.failure: EncserveError | None = None
        self.failed_in_a_row = 0
        self.attempts = 0
        self._n_answered = 0
        self.saw_too_large = False
        self.paused_seconds = 0.0
        self._source = source
        self._waiting: list[tuple[float, Message]] = []  # (time at which the message may be sent, message)
        self._policy = policy
        self._limit = limit
        self._max_concurrent = max_concurrent
        self._random = random
        self._target = target
        self._outages = outages
        self._n_in_flight = 0
        self._held_up: set[int] = set()  # ids of messages whose last attempt met an outage or a full server

    @property
    def is_idle(self) -> bool:
        """Whether no message is in flight or waits for a retry."""
        return not self._n_in_flight and not self._waiting

    @property
    def has_room(self) -> bool:
        """Whether another message may be in flight."""
        return self._n_in_flight < self._max_concurrent

    @property
    def is_done(self) -> bool:
        """Whether every message was answered. True only after `send` has reached the end of the source."""
        return self._source.is_ended and self.is_idle

    @property
    def n_finished(self) -> int:
        """Number of inputs with an answer or an error."""
        return self._n_answered + len(self.rejected or ())

    def send(self, wire: Wire, rpc: Rpc, *, may_block: bool) -> None:
        """Send all messages that the limit allows now.

        If `may_block`, and no other message can be sent, the wire may block until the answer.

        Raises:
            DeadlineError: The time of the call is over before all messages were sent.
        """
        now = wire.now()
        for message in self._take(now):
            left = message.deadline - self._deadline_clock(now)
            timeout = max(left, 0.001) if left < _LONGEST_SECONDS else None
            wire.start(rpc, message, timeout, alone=may_block and self._is_alone)

    def record(self, event: Event | None, decode: Callable[[Message, Any], R], now: float) -> None:
        """Record the event if a message was answered or has failed.

        Raises:
            EncserveError: The failure of the message ends the call.
        """
        if isinstance(event, Answered):
            self._record_answer(event.message, decode(event.message, event.response))
        elif isinstance(event, Failed):
            self._record_failure(event.message, event.failure, now)

    @property
    def _is_alone(self) -> bool:
        """Whether one message is in flight and nothing else can be sent before its end."""
        return self._n_in_flight == 1 and (self._max_concurrent == 1 or (self._source.is_ended and not self._waiting))

    def _take(self, now: float) -> list[Message]:
        taken: list[Message] = []
        while self.has_room and (message := self._next(now)) is not None:
            if not message.attempts:
                message.deadline = self._limit.deadline(self._deadline_clock(now))
            if self._deadline_clock(now) >= message.deadline:
                self._held_up.discard(id(message))
                make_error = partial(self._deadline_error, message)
                self._give_up(message, make_error, affects_one_message=self._limit.ends is None)
                continue
            message.attempts += 1
            self.attempts += 1
            self._n_in_flight += 1
            taken.append(message)
        return taken

    def seconds_to_wait(self, now: float) -> float | None:
        """Return the seconds until a waiting message may be sent, or None if `send` is useless before an answer."""
        if not self._waiting or not self.has_room:
            return None
        return max(min(due for due, _ in self._waiting) - now, 0.0)

    def _record_answer(self, message: Message, answer: R) -> None:
        self._n_in_flight -= 1
        self._held_up.discard(id(message))
        self._outages.record_answer()
        self.failed_in_a_row = 0
        self._n_answered += len(message.indices)
        self.answers.append((message.indices, answer))

    def _record_failure(self, message: Message, failure: Failure, now: float) -> None:
        """Split the message, retry, reject inputs, or end the call."""
        self._n_in_flight -= 1
        self._held_up.discard(id(message))
        is_outage = self._outages.is_outage(failure)
        if failure.is_too_large:
            self.saw_too_large = True
            if halves := message.halves():
                self._waiting += [(now, half) for half in halves]
                return
        seconds_left = message.deadline - self._deadline_clock(now)
        wait = seconds_until_retry(self._policy, failure, message.attempts, seconds_left, self._random, is_outage)
        if wait is not None:
            if is_outage or failure.is_full_server:
                self._held_up.add(id(message))
            message.last_failure = failure.message
            if is_outage:
                self._outages.record_retry(now, seconds_left)
            self._waiting.append((now + wait, message))
            return
        if self.rejected is not None and (at_fault := failure.inputs_at_fault(len(message.indices))):
            for position, its_failure in at_fault.items():
                self.rejected[message.indices[position]] = self._exception(message, its_failure)
            rest = message.without(at_fault)
            if rest and not failure.refused:  # several inputs may be at fault: with halves, fewer bytes are sent again
                rest = rest[0].halves() or rest
            self._waiting += [(now, it) for it in rest]
            return
        is_end_of_call = failure.code is _TOO_LATE and self._limit.ends is not None
        self._give_up(
            message,
            lambda: self._exception(message, failure),
            affects_one_message=failure.affects_one_message and not is_end_of_call,
        )

    def _exception(self, message: Message, failure: Failure) -> EncserveError:
        return failure.to_exception(
            message.attempts, message.indices, self._target, self._limit.seconds, message.arguments
        )

    def _deadline_clock(self, now: float) -> float:
        return now - self.paused_seconds

    def _next(self, now: float) -> Message | None:
        if self._waiting:
            soonest = min(range(len(self._waiting)), key=lambda index: self._waiting[index][0])
            if self._waiting[soonest][0] <= now:
                return self._waiting.pop(soonest)[1]
        # While the server is away or full, new messages stay in the source, so that their time does not run.
        if self._held_up or self._source.is_ended:
            return None
        return self._source.take(idle=self.is_idle)

    def _deadline_error(self, message: Message) -> EncserveError:
        target = f" to {self._target}" if self._target else ""
        failure = f"; the last attempt failed: {message.last_failure}" if message.last_failure else ""
        return DeadlineError(
            f"{self._limit.seconds:g} s passed before everything was sent{target}{failure}",
            code=_TOO_LATE,
            attempts=message.attempts,
        )

    def _give_up(self, message: Message, make_error: Callable[[], EncserveError], *, affects_one_message: bool) -> None:
        """Record an error for each input of the message.

        Raises:
            EncserveError: The error affects other messages too, or `rejected` is None.
        """
        if self.rejected is None or not affects_one_message:
            raise make_error()
        self.failure = make_error()
        self.failed_in_a_row += 1
        for index in message.indices:
            self.rejected[index] = error = make_error()
            error.index = index
