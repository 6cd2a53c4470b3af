"""One encode_stream call: its books, which are pure, and the loop that reads, sends, books and hands over.

An input is in exactly one of these states: waiting in the outbox, out on a stream, finished and not yet handed over,
handed over. Those not yet handed over are never more than `max_in_flight`; that bounds the memory, whichever answer is
late. Only the driver of the call (`StreamRun`) touches a `StreamBooks`.

`now` is the driver's clock, which stands still while the caller is busy with a result: a slow caller costs no input its
time.
"""

import math
import random as random_module
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from encserve_client._logic.answers import Expected, check_fingerprint, decode_response
from encserve_client._logic.dispatch import Outbox
from encserve_client._logic.failures import CallInfo, Failure, failure_of_stream_error, seconds_until_retry
from encserve_client._logic.wire import Event, InputRead, InputsEnded, StreamAnswered, StreamEnded, Wire
from encserve_client.exceptions import DeadlineError, EncserveError, InvalidInputError, ProtocolError
from encserve_client.inputs import check_input, pack_input
from encserve_client.options import Array, Options
from encserve_client.retry import RetryPolicy
from encserve_proto.v1 import encoder_pb2 as pb

R = TypeVar("R")
Result = Array | EncserveError

_ENDED_EARLY = Failure(grpc.StatusCode.UNAVAILABLE, "the server ended the stream before it had answered everything")


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
    """The books; see the module's text.

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


class StreamRun:
    """One encode_stream call. `next` is called by one task or thread, and `aclose` always at the end."""

    def __init__(self, wire: Wire, books: StreamBooks[Array], template: pb.EncodeRequest, options: Options) -> None:
        self._wire = wire
        self._books = books
        self._template = template
        self._options = options
        self._stream = 0  # the one that new requests go to; 0 for none
        self._is_reading = False
        self._inputs_ended = False
        self._paused_seconds = 0.0  # how long the caller has been busy with results
        self._paused_at = wire.now()
        self._expected = Expected(template.expected_fingerprint, template.expected_space_id)
        self._fingerprint = template.expected_fingerprint

    async def next(self) -> tuple[int, Result] | None:
        """The next result with its index; None when all are handed over.

        At most one input is read while a result is ready, so that neither waits long for the other.

        Raises:
            EncserveError: The call as a whole failed.
        """
        self._paused_seconds += self._wire.now() - self._paused_at
        try:
            return await self._next()
        finally:
            self._paused_at = self._wire.now()

    async def aclose(self) -> None:
        """Cancels what is still going on."""
        await self._wire.aclose()

    async def _next(self) -> tuple[int, Result] | None:
        books, wire = self._books, self._wire
        may_hand_over = False  # only after one chance to read, so that reading keeps up with handing over
        while True:
            while (event := await wire.wait(0)) is not None:
                self._handle(event)
            books.expire(self._now())
            self._send()
            if may_hand_over or not self._wants_input:
                if (result := books.pop()) is not None:
                    return result
                if self._inputs_ended and books.is_empty:
                    return None
            may_hand_over = True
            if self._wants_input:
                self._is_reading = True
                wire.read_input()
            elif (event := await wire.wait(books.seconds_to_wait(self._now()))) is not None:
                self._handle(event)

    @property
    def _wants_input(self) -> bool:
        return self._books.has_room and not self._inputs_ended and not self._is_reading

    def _now(self) -> float:
        """The clock of the books: without the time that the caller was busy."""
        return self._wire.now() - self._paused_seconds

    def _handle(self, event: Event) -> None:
        if isinstance(event, InputRead):
            self._is_reading = False
            self._add(event.item)
        elif isinstance(event, InputsEnded):
            if event.error is not None:
                raise event.error
            self._is_reading, self._inputs_ended = False, True
        elif isinstance(event, StreamAnswered):
            self._answer(event.response, event.stream)
        elif isinstance(event, StreamEnded):
            if event.stream == self._stream:
                self._stream = 0
            self._books.broke(event.stream, event.failure or _ENDED_EARLY, self._now())

    def _add(self, item: object) -> None:
        name = f"inputs[{self._books.next_index}]"
        request = pb.EncodeRequest()
        request.CopyFrom(self._template)
        try:
            request.inputs.append(pack_input(check_input(item, name), name))
        except InvalidInputError as error:
            self._books.reject(error)  # in its turn, like one that the server refuses
            return
        self._books.add(request, self._now())

    def _send(self) -> None:
        for item in self._books.take(self._now()):
            if not self._stream:
                self._stream = self._wire.open_stream()
            self._books.sent(item, self._stream)
            self._wire.send(self._stream, item.request)

    def _answer(self, response: pb.EncodeStreamResponse, stream: int) -> None:
        item = self._books.item_of(response.request_id)
        if item is None:
            return  # given up already
        if response.HasField("response"):
            self._books.answered(item, self._decode(response.response))
        elif response.HasField("error"):
            failure = failure_of_stream_error(response.error)
            self._books.refused(item, failure, self._now())
            if failure.code is grpc.StatusCode.UNAVAILABLE and stream == self._stream:
                # This server is stopping or failing. The next request gets a new stream, perhaps to another one; this
                # stream still brings its answers.
                self._wire.finish(stream)
                self._stream = 0
        else:
            raise ProtocolError(f"the answer to request {response.request_id} has neither a response nor an error")

    def _decode(self, response: pb.EncodeResponse) -> Array:
        """(rows, d_model) for tokens, (d_model,) if pooled."""
        part = decode_response(response, self._options, 1, describe=False)
        self._expected.check(part)
        self._fingerprint = self._fingerprint or part.fingerprint
        check_fingerprint(self._fingerprint, part.fingerprint)
        rows = part.blocks[0].rows
        return rows[0] if self._options.outputs[0].is_pooled else rows
