"""The books of one encode_stream call: what was read, what is out, what may be handed to the caller. Pure.

An input is in exactly one of these states: waiting in the outbox, out on a stream, finished and not yet handed over,
handed over. Those not yet handed over are never more than `max_in_flight`; that bounds the memory, whichever answer is
late. Only the driver of the call (`_stream_run`) touches a `StreamBooks`.

`now` is the driver's clock, which stands still while the caller is busy with a result: a slow caller costs no input its
time.
"""

import math
import random as random_module
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from encserve_client._exceptions import DeadlineError, EncserveError, ProtocolError
from encserve_client._failure import CallInfo, Failure
from encserve_client._outbox import Outbox
from encserve_client._retry import RetryPolicy, seconds_until_retry
from encserve_proto.v1 import encoder_pb2 as pb

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Item:
    """One input that has not been answered.

    Attributes:
        index: Its place among the caller's inputs; its request_id is the same in decimal.
        request: The request.
        deadline: When its answer must have come.
        attempts: How often it has been sent.
        stream: The stream that it is out on; None while it is waiting.
    """

    index: int
    request: pb.EncodeStreamRequest
    deadline: float
    attempts: int = 0
    stream: int | None = None


class Finished(Generic[R]):
    """Results, given out in the order of their indices or in that in which they came."""

    def __init__(self, ordered: bool) -> None:
        self._ordered = ordered
        self._results: dict[int, R] = {}  # a dict remembers the order in which they came
        self._next_index = 0

    def put(self, index: int, result: R) -> None:
        """Adds the result of an input."""
        self._results[index] = result

    def pop(self) -> tuple[int, R] | None:
        """Takes the next result with its index; None if it is not there yet."""
        index = self._next_index if self._ordered else next(iter(self._results), -1)
        if index not in self._results:
            return None
        self._next_index += 1
        return index, self._results.pop(index)


class StreamBooks(Generic[R]):
    """See the module's text.

    A request that the server refused for a while is sent again within the policy and the input's deadline. A stream
    that broke is replaced, and what it had not answered is sent again. The call itself fails once a stream has broken
    `policy.max_attempts` times in a row without one answer in between, or has broken in a way that trying again does
    not mend.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        max_in_flight: int,
        timeout_seconds: float,
        ordered: bool,
        random: Callable[[], float] = random_module.random,
        target: str = "",
    ) -> None:
        self.finished: Finished[R | EncserveError] = Finished(ordered)
        self._policy = policy
        self._max_in_flight = max_in_flight
        self._timeout_seconds = timeout_seconds
        self._call = CallInfo(target, timeout_seconds)
        self._random = random
        self._outbox: Outbox[Item] = Outbox()
        self._items: dict[int, Item] = {}  # unanswered, in the order of their deadlines
        self._next_index = 0
        self._handed_over = 0
        self._breaks = 0  # streams broken in a row without an answer
        self._closed_until = -math.inf  # nothing is sent before this; set when a stream breaks

    @property
    def has_room(self) -> bool:
        """Whether one more input may be read."""
        return self._next_index - self._handed_over < self._max_in_flight

    @property
    def next_index(self) -> int:
        """The index of the next input to be read."""
        return self._next_index

    @property
    def is_empty(self) -> bool:
        """Whether every input that was read has been handed over."""
        return self._next_index == self._handed_over

    def add(self, request: pb.EncodeRequest, now: float) -> None:
        """Books the next input. Its time begins now."""
        index = self._next_index
        wrapped = pb.EncodeStreamRequest(request_id=str(index), request=request)
        self._items[index] = item = Item(index, wrapped, now + self._timeout_seconds)
        self._outbox.push(item)
        self._next_index += 1

    def reject(self, error: EncserveError) -> None:
        """Books the next input as one that cannot be sent: its result is the error."""
        self.finished.put(self._next_index, error)
        self._next_index += 1

    def take(self, now: float) -> list[Item]:
        """What to send now. The driver says with `sent` on which stream."""
        taken: list[Item] = []
        if now >= self._closed_until:
            while (item := self._outbox.pop(now)) is not None:
                taken.append(item)
        return taken

    def sent(self, item: Item, stream: int) -> None:
        """Books that an item is out on a stream."""
        item.attempts += 1
        item.stream = stream

    def seconds_to_wait(self, now: float) -> float | None:
        """How long until there is something to do without an event coming in; None for never."""
        times = [item.deadline for item in self._items.values()][:1]  # the first is the earliest
        if self._outbox:
            times.append(max(self._closed_until, self._outbox.next_due() or self._closed_until))
        earliest = min(times, default=math.inf)
        return None if math.isinf(earliest) else max(earliest - now, 0.0)

    def item_of(self, request_id: str) -> Item | None:
        """The item that an answer belongs to; None for one that has been given up.

        Raises:
            ProtocolError: No such request was ever sent.
        """
        is_number = len(request_id) < 20 and request_id.isascii() and request_id.isdigit()
        if not is_number or int(request_id) >= self._next_index:
            raise ProtocolError(f"an answer on the stream names request {request_id[:128]!r}, which was never sent")
        item = self._items.get(int(request_id))
        return None if item is None or item.stream is None else item

    def answered(self, item: Item, result: R | EncserveError) -> None:
        """Books the result of an item: what the caller gets, be it an error."""
        self._breaks = 0
        self._finish(item, result)

    def refused(self, item: Item, failure: Failure, now: float) -> None:
        """Books that the server answered an item with an error."""
        self._breaks = 0
        self._retry_or_finish(item, failure, now)

    def broke(self, stream: int, failure: Failure, now: float) -> None:
        """Books that a stream is over, with what was still out on it.

        Raises:
            EncserveError: The failure ends the call.
        """
        lost = [item for item in self._items.values() if item.stream == stream]
        if not lost:
            return
        self._breaks += 1
        wait = seconds_until_retry(self._policy, failure, self._breaks, math.inf, self._random)
        if wait is None:
            raise failure.to_exception(self._breaks, call=self._call)
        self._closed_until = now + wait
        for item in lost:
            # An input that brings down every stream it is on is given up, however well the others fare.
            if item.attempts >= self._policy.max_attempts:
                self._finish(item, failure.to_exception(item.attempts, item.index, self._call))
        self._outbox.push_first(self._reset(item) for item in lost if item.index in self._items)

    def expire(self, now: float) -> None:
        """Gives up what was not answered in time."""
        while (item := next(iter(self._items.values()), None)) is not None and item.deadline <= now:
            self._outbox.discard(item)
            error = DeadlineError(
                f"inputs[{item.index}] was not answered within {self._timeout_seconds:g} s"
                + (f" by {self._call.target}" if self._call.target else ""),
                code=grpc.StatusCode.DEADLINE_EXCEEDED,
                attempts=item.attempts,
            )
            self._finish(item, error)

    def pop(self) -> tuple[int, R | EncserveError] | None:
        """Hands over the next result with its index; None if it is not there yet."""
        result = self.finished.pop()
        if result is not None:
            self._handed_over += 1
        return result

    def _retry_or_finish(self, item: Item, failure: Failure, now: float) -> None:
        wait = seconds_until_retry(self._policy, failure, item.attempts, item.deadline - now, self._random)
        if wait is None:
            self._finish(item, failure.to_exception(item.attempts, item.index, self._call))
        else:
            self._outbox.push_later(now + wait, self._reset(item))

    def _reset(self, item: Item) -> Item:
        item.stream = None
        return item

    def _finish(self, item: Item, result: R | EncserveError) -> None:
        del self._items[item.index]
        self.finished.put(item.index, result)
