"""One encode_stream or embed_stream call: its books, which are pure, and the loop that reads, sends, and hands over.

An input is in exactly one of these states: waiting in the outbox, out on a stream in a `Pack`, finished and not yet
handed over, handed over. Those not yet handed over are never more than `max_in_flight`; that bounds the memory,
whichever answer is late. Only the driver of the call (`StreamRun`) touches a `StreamBooks`.

Few messages are out at a time, and what is read meanwhile waits for the next of them. So short inputs that come fast
share messages, and one that comes alone is sent at once.

`now` is the driver's clock, which stands still while the caller is busy, with a result or with making the next input: a
slow caller costs no input its time.
"""

import math
import random as random_module
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from encserve_client._logic.answers import Expected, check_fingerprint, decode_response
from encserve_client._logic.dispatch import Outbox
from encserve_client._logic.failures import CallInfo, Contact, Failure, failure_of_stream_error, seconds_until_retry
from encserve_client._logic.planning import MOST_TOKENS, request_like, tokens_of
from encserve_client._logic.wire import Event, InputRead, InputsEnded, StreamAnswered, StreamEnded, Wire
from encserve_client.exceptions import DeadlineError, EncserveError, InvalidInputError, ProtocolError
from encserve_client.inputs import check_input, pack_input
from encserve_client.options import Array, Options, Progress
from encserve_client.retry import RetryPolicy
from encserve_proto.v1 import encoder_pb2 as pb

R = TypeVar("R")
Result = Array | EncserveError

_ENDED_EARLY = Failure(grpc.StatusCode.UNAVAILABLE, "the server ended the stream before it had answered everything")
# Inputs of one message; the server takes 256 unless it is told otherwise.
_MOST_INPUTS = 64


@dataclass(slots=True, eq=False)
class Item:
    """One input that has not been answered.

    Attributes:
        index: Its place among the caller's inputs.
        input: The input.
        deadline: When its answer must have come.
        attempts: How often it has been sent, but for messages that failed because of another input.
        away: How often of these the server was away; see `Contact`.
        most_together: The most inputs of a message with it: fewer after one that was too large, or broke its stream.
    """

    index: int
    input: pb.Input
    deadline: float
    attempts: int = 0
    away: int = 0
    most_together: int = _MOST_INPUTS


@dataclass(slots=True, eq=False)
class Pack:
    """Inputs that are out in one message.

    Attributes:
        number: Its request_id, in decimal.
        items: The inputs, in the message's order.
        stream: The stream that it is out on.
    """

    number: int
    items: list[Item]
    stream: int = 0


class Finished(Generic[R]):
    """Results, given out in the order of their indices or in that in which they came."""

    def __init__(self, ordered: bool) -> None:
        self._ordered = ordered
        self._results: dict[int, R] = {}  # a dict remembers the order in which they came
        self._next_index = 0

    def put(self, index: int, result: R) -> None:
        """Adds the result of an input."""
        self._results[index] = result

    @property
    def is_ready(self) -> bool:
        """Whether `pop` has something."""
        return bool(self._results) and (not self._ordered or self._next_index in self._results)

    def pop(self) -> tuple[int, R] | None:
        """Takes the next result with its index; None if it is not there yet."""
        index = self._next_index if self._ordered else next(iter(self._results), -1)
        if index not in self._results:
            return None
        self._next_index += 1
        return index, self._results.pop(index)


class StreamBooks(Generic[R]):
    """The books; see the module's text.

    A message that the server refused for a while is sent again within the policy and its inputs' deadlines. One that it
    refused because of one input is sent again without that one, and one that is too large in halves. A stream that
    broke is replaced, and what it had not answered is sent again, each input by itself, so that one which breaks it is
    found. The call itself fails once a stream has broken `policy.max_attempts` times in a row without one answer in
    between, or has broken in a way that trying again does not mend. If the server has answered before and is
    UNAVAILABLE, the call fails once that has lasted as long as an input may take.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        max_in_flight: int,
        timeout_seconds: float,
        ordered: bool,
        random: Callable[[], float] = random_module.random,
        target: str = "",
        max_packs: int = 4,
        contact: Contact | None = None,
    ) -> None:
        self.finished: Finished[R | EncserveError] = Finished(ordered)
        self._policy = policy
        self._max_in_flight = max_in_flight
        self._max_packs = max_packs
        self._most_inputs = min(max(max_in_flight // max_packs, 1), _MOST_INPUTS)
        self._timeout_seconds = timeout_seconds
        self._call = CallInfo(target, timeout_seconds)
        self._random = random
        self._contact = contact or Contact()
        self._outbox: Outbox[Item] = Outbox()
        self._items: dict[int, Item] = {}  # unanswered, by index, in the order of their deadlines
        self._packs: dict[int, Pack] = {}  # out, by number
        self._next_index = 0
        self._next_number = 0
        self._handed_over = 0
        self._breaks = 0  # streams broken in a row without an answer
        self._away_breaks = 0  # of these the ones whose server was away
        self._broken_since = math.inf  # when the first of them broke
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
    def handed_over(self) -> int:
        """How many inputs' results the caller has."""
        return self._handed_over

    @property
    def is_empty(self) -> bool:
        """Whether every input that was read has been handed over."""
        return self._next_index == self._handed_over

    def add(self, message: pb.Input, now: float) -> None:
        """Books the next input. Its time begins now."""
        self._items[self._next_index] = item = Item(self._next_index, message, now + self._timeout_seconds)
        self._outbox.push(item)
        self._next_index += 1

    def reject(self, error: EncserveError) -> None:
        """Books the next input as one that cannot be sent: its result is the error."""
        error.index = self._next_index
        self.finished.put(self._next_index, error)
        self._next_index += 1

    def take(self, now: float, more_soon: bool = False) -> list[Pack]:
        """What to send now; it counts as out. The driver says on which stream.

        `more_soon`: another input is about to be read, so that what is waiting may wait until it fills a message.
        """
        taken: list[Pack] = []
        while now >= self._closed_until and len(self._packs) < self._max_packs:
            if more_soon and len(self._outbox) < self._most_inputs:
                break
            if not (items := self._gather(now)):
                break
            self._packs[self._next_number] = pack = Pack(self._next_number, items)
            self._next_number += 1
            taken.append(pack)
        return taken

    def seconds_to_wait(self, now: float) -> float | None:
        """How long until there is something to do without an event coming in; None for never."""
        times = [item.deadline for item in self._items.values()][:1]  # the first is the earliest
        if self._outbox and len(self._packs) < self._max_packs:
            times.append(max(self._closed_until, self._outbox.next_due() or self._closed_until))
        earliest = min(times, default=math.inf)
        return None if math.isinf(earliest) else max(earliest - now, 0.0)

    def pack_of(self, request_id: str) -> Pack | None:
        """The message that an answer belongs to; None for one that has been given up.

        Raises:
            ProtocolError: No such message was ever sent.
        """
        is_number = len(request_id) < 20 and request_id.isascii() and request_id.isdigit()
        if not is_number or int(request_id) >= self._next_number:
            raise ProtocolError(f"an answer on the stream names request {request_id[:128]!r}, which was never sent")
        return self._packs.get(int(request_id))

    def answered(self, pack: Pack, results: Iterable[R]) -> None:
        """Books the results of a message's inputs."""
        self._breaks = 0
        self._contact.made = True
        del self._packs[pack.number]
        for item, result in zip(pack.items, results, strict=True):
            self._finish(item, result)

    def refused(self, pack: Pack, failure: Failure, now: float) -> None:
        """Books that the server answered a message with an error."""
        self._breaks = 0
        self._contact.made = True
        del self._packs[pack.number]
        place = failure.input_at_fault(len(pack.items))
        if len(pack.items) > 1 and place is not None:
            culprit = pack.items[place]
            self._finish(culprit, failure.to_exception(culprit.attempts, culprit.index - place, self._call))
            self._send_again(pack.items)
        elif len(pack.items) > 1 and failure.too_large:
            for item in pack.items:
                item.most_together = len(pack.items) // 2
            self._send_again(pack.items)
        else:
            drawn = self._random()  # once, so that they stay together
            for item in pack.items:
                self._retry_or_finish(item, failure, now, drawn)

    def broke(self, stream: int, failure: Failure, now: float) -> None:
        """Books that a stream is over, with what was still out on it.

        Raises:
            EncserveError: The failure ends the call.
        """
        lost = [pack for pack in self._packs.values() if pack.stream == stream]
        if not lost:
            return
        self._breaks += 1
        if self._breaks == 1:
            self._broken_since, self._away_breaks = now, 0
        is_away = self._contact.failed(failure)
        self._away_breaks += is_away
        breaks = self._away_breaks if is_away else self._breaks - self._away_breaks
        remaining = self._broken_since + self._timeout_seconds - now if is_away else math.inf
        wait = seconds_until_retry(self._policy, failure, breaks, remaining, self._random, is_away)
        if wait is None:
            raise failure.to_exception(self._breaks, call=self._call)
        self._closed_until = now + wait
        items = [item for pack in lost for item in pack.items]
        for pack in lost:
            del self._packs[pack.number]
        for item in items:
            if is_away and failure.unreached:
                item.away += 1
                continue
            item.most_together = 1
            # An input that brings down every stream it is on is given up, however well the others fare.
            if item.attempts - item.away >= self._policy.max_attempts:
                self._finish(item, failure.to_exception(item.attempts, item.index, self._call))
        self._outbox.push_first(item for item in items if item.index in self._items)

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
            for pack in [it for it in self._packs.values() if item in it.items]:
                if not any(it.index in self._items for it in pack.items):
                    del self._packs[pack.number]  # nobody waits for it

    def pop(self) -> tuple[int, R | EncserveError] | None:
        """Hands over the next result with its index; None if it is not there yet."""
        result = self.finished.pop()
        if result is not None:
            self._handed_over += 1
        return result

    def _gather(self, now: float) -> list[Item]:
        """Takes what goes into the next message: what waits, in its order, as far as there is room."""
        items: list[Item] = []
        tokens, most = 0, self._most_inputs
        while len(items) < most and (item := self._outbox.pop(now)) is not None:
            tokens += tokens_of(item.input)
            most = min(most, item.most_together)
            if items and (len(items) >= most or tokens > MOST_TOKENS):
                self._outbox.push_first([item])
                break
            item.attempts += 1
            items.append(item)
        return items

    def _send_again(self, items: Sequence[Item]) -> None:
        """What failed only because of its neighbours, or their number."""
        again = [item for item in items if item.index in self._items]
        for item in again:
            item.attempts -= 1
        self._outbox.push_first(again)

    def _retry_or_finish(self, item: Item, failure: Failure, now: float, drawn: float) -> None:
        if item.index not in self._items:
            return
        is_away = self._contact.failed(failure)
        item.away += is_away
        attempts = item.away if is_away else item.attempts - item.away
        wait = seconds_until_retry(self._policy, failure, attempts, item.deadline - now, lambda: drawn, is_away)
        if wait is None:
            self._finish(item, failure.to_exception(item.attempts, item.index, self._call))
        else:
            self._outbox.push_later(now + wait, item)

    def _finish(self, item: Item, result: R | EncserveError) -> None:
        """Books a result, unless the input has been given up."""
        if self._items.pop(item.index, None) is None:
            return
        if isinstance(result, EncserveError):
            result.index = item.index
        self.finished.put(item.index, result)


class StreamRun:
    """One call. `next` is called by one task or thread, and `aclose` always at the end."""

    def __init__(
        self,
        wire: Wire,
        books: StreamBooks[Array],
        template: pb.EncodeRequest,
        options: Options,
        progress: Progress | None = None,
        total: int | None = None,
    ) -> None:
        self._wire = wire
        self._progress = progress
        self._total = total
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
            result = await self._next()
            if result is not None and self._progress is not None:
                self._progress(self._books.handed_over, self._total)
            return result
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
                begun = wire.now()
                wire.read_input()
                self._paused_seconds += wire.now() - begun  # with threads the caller's iterable runs here and now
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
        try:
            message = pack_input(check_input(item, name), name)
        except InvalidInputError as error:
            self._books.reject(error)  # in its turn, like one that the server refuses
            return
        self._books.add(message, self._now())

    def _send(self) -> None:
        more_soon = self._books.finished.is_ready and not self._inputs_ended
        for pack in self._books.take(self._now(), more_soon):
            if not self._stream:
                self._stream = self._wire.open_stream()
            pack.stream = self._stream
            request = request_like(self._template, [item.input for item in pack.items])
            self._wire.send(self._stream, pb.EncodeStreamRequest(request_id=str(pack.number), request=request))

    def _answer(self, response: pb.EncodeStreamResponse, stream: int) -> None:
        pack = self._books.pack_of(response.request_id)
        if pack is None:
            return  # given up already
        if response.HasField("response"):
            self._books.answered(pack, self._decode(response.response, len(pack.items)))
        elif response.HasField("error"):
            failure = failure_of_stream_error(response.error)
            self._books.refused(pack, failure, self._now())
            if failure.code is grpc.StatusCode.UNAVAILABLE and stream == self._stream:
                # This server is stopping or failing. The next request gets a new stream, perhaps to another one; this
                # stream still brings its answers.
                self._wire.finish(stream)
                self._stream = 0
        else:
            raise ProtocolError(f"the answer to request {response.request_id} has neither a response nor an error")

    def _decode(self, response: pb.EncodeResponse, n_inputs: int) -> list[Array]:
        """For each input (rows, d_model) for tokens, (d_model,) if pooled."""
        part = decode_response(response, self._options, n_inputs, describe=False)
        self._expected.check(part)
        self._fingerprint = self._fingerprint or part.fingerprint
        check_fingerprint(self._fingerprint, part.fingerprint)
        block = part.blocks[0]
        return list(block.rows) if self._options.outputs[0].is_pooled else block.split()
