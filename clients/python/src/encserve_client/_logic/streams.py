"""One call of `stream`: inputs are read with a bounded look-ahead, and results are yielded.

`Dispatch` sends the messages, as for every other call. This module adds three things: inputs are read while results
are taken, results are sorted, and the deadlines exclude the time of a slow caller.
"""

import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from encserve_client._logic.dispatch import Dispatch
from encserve_client._logic.planning import Message, MessageBuilder
from encserve_client._logic.wire import Event, InputRead, InputsEnded, Wire
from encserve_client.exceptions import EncserveError, InvalidInputError
from encserve_client.inputs import check_input
from encserve_client.options import Array, Progress
from encserve_client.results import SparseVector
from encserve_proto.v1 import encoder_pb2 as pb

R = TypeVar("R")
Value = Array | SparseVector
Result = Value | EncserveError


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How inputs are read and results are yielded.

    Attributes:
        inputs: The caller's iterator. None for an async iterable, which the wire reads.
        total: Number of inputs, or None if unknown.
        ordered: Whether results come in the order of the inputs.
        max_in_flight: Largest number of inputs that were read but whose results were not yielded yet.
        progress: Called with each result.
    """

    inputs: Iterator[object] | None
    total: int | None
    ordered: bool
    max_in_flight: int
    progress: Progress | None


class StreamMessages:
    """The inputs of a stream that were read but not sent, grouped into messages. A `MessageSource`.

    Attributes:
        full: The full messages that were not taken.
        inputs_ended: Whether no more inputs follow.
        may_send_partial: Whether `take` may return a message that is not full, while no message is in flight.
    """

    def __init__(self, builder: MessageBuilder) -> None:
        self.inputs_ended = False
        self.may_send_partial = True
        self._builder = builder
        self.full: deque[Message] = deque()

    @property
    def is_ended(self) -> bool:
        """See `MessageSource`."""
        return self.inputs_ended and not self.full and self._builder.is_empty

    def add(self, index: int, item: object) -> None:
        """Add the next input.

        Raises:
            InvalidInputError: `item` is not an input.
        """
        checked = item if isinstance(item, str) else check_input(item, f"inputs[{index}]")
        if (full := self._builder.add(index, checked)) is not None:
            self.full.append(full)
        if self._builder.is_full and (full := self._builder.flush()) is not None:
            self.full.append(full)

    def take(self, *, idle: bool) -> Message | None:
        """See `MessageSource`. While messages are in flight, inputs wait until they fill a message."""
        if self.full:
            return self.full.popleft()
        if self.inputs_ended or (idle and self.may_send_partial):
            return self._builder.flush()
        return None


class ResultBuffer(Generic[R]):
    """Results that have not been yielded yet.

    Attributes:
        ready: (index, result) of each result that may be yielded now, the next one first.
    """

    def __init__(self, ordered: bool) -> None:
        self.ready: deque[tuple[int, R]] = deque()
        self._ordered = ordered
        self._early: dict[int, R] = {}  # results that must wait for a result with a lower index
        self._next_index = 0

    def put(self, indices: Sequence[int], results: Sequence[R]) -> None:
        """Add the results of inputs with these indices."""
        if not self._ordered:
            self.ready.extend(zip(indices, results, strict=True))
            return
        early = self._early
        early.update(zip(indices, results, strict=True))
        while self._next_index in early:
            self.ready.append((self._next_index, early.pop(self._next_index)))
            self._next_index += 1


class Stream:
    """Drives one call of `stream`. Only the caller's thread or task uses a `Stream`."""

    def __init__(
        self,
        wire: Wire,
        source: StreamMessages,
        dispatch: Dispatch[Sequence[Value]],
        decode: Callable[[Message, pb.EncodeResponse], Sequence[Value]],
        options: StreamOptions,
    ) -> None:
        self._wire = wire
        self._source = source
        self._dispatch = dispatch
        self._decode = decode
        self._options = options
        self._finished: ResultBuffer[Result] = ResultBuffer(options.ordered)
        self._n_read = 0
        self._n_allowed = 0  # number of inputs that the wire may read from an async iterable
        self._n_yielded = 0

    async def runs(self) -> AsyncGenerator[Iterator[tuple[int, Result]], None]:
        """Yield iterators over the results. The caller must take all results of an iterator before the next one.

        If a result is ready, at most one more input is read before this result is yielded.

        Raises:
            EncserveError: The call as a whole failed.
        """
        while True:
            while (event := await self._wire.wait(0)) is not None:
                self._handle(event)
            self._send()
            if self._finished.ready:
                yield self._ready_results()
            elif self._source.is_ended and self._n_yielded == self._n_read:
                return
            elif self._options.inputs is not None and self._may_read:
                self._read_inputs(self._options.inputs)
            elif (event := await self._wire.wait(self._dispatch.seconds_to_wait(self._wire.now()))) is not None:
                self._handle(event)

    def _ready_results(self) -> Iterator[tuple[int, Result]]:
        """Yield the ready results, and read one input after each result. Stop early if `_has_work` is true."""
        ready, inputs, progress = self._finished.ready, self._options.inputs, self._options.progress
        began, due = self._wire.now(), self._due()
        while ready:
            self._n_yielded += 1
            result = ready.popleft()
            if progress is not None:
                progress(self._n_yielded, self._options.total)
            yield result
            if inputs is None:
                self._allow_reads()
            elif not self._source.inputs_ended:  # the yielded result left room for one input
                self._read_one(inputs)
            if self._has_work(due):
                break
        self._dispatch.paused_seconds += self._wire.now() - began

    def _read_inputs(self, inputs: Iterator[object]) -> None:
        """Read inputs. Stop when a result is ready, a partial message can be sent, or `_has_work` is true."""
        began, due = self._wire.now(), self._due()
        while self._may_read:
            self._read_one(inputs)
            is_idle = self._dispatch.is_idle  # then a partial message can be sent
            if is_idle or self._finished.ready or self._has_work(due):
                break
        self._dispatch.paused_seconds += self._wire.now() - began

    def _has_work(self, due: float) -> bool:
        """Whether a full message can be sent, an event has arrived, or a message is due for a retry."""
        if self._source.full and self._dispatch.has_room:
            return True
        return self._wire.has_event() or (due < math.inf and self._wire.now() >= due)

    def _due(self) -> float:
        """Return the time at which a message that waits for a retry may be sent; infinity if no message waits."""
        seconds = self._dispatch.seconds_to_wait(now := self._wire.now())
        return math.inf if seconds is None else now + seconds

    @property
    def _may_read(self) -> bool:
        return not self._source.inputs_ended and self._n_read - self._n_yielded < self._options.max_in_flight

    def _send(self) -> None:
        # While results are ready, a partial message waits. The caller takes the results, and for each result one more
        # input is read. So the message is full soon.
        self._source.may_send_partial = not self._finished.ready
        self._dispatch.send(self._wire, "Encode", may_block=False)
        self._collect()
        if self._options.inputs is None:
            self._allow_reads()

    def _allow_reads(self) -> None:
        """Allow the wire to read an async iterable up to the limit."""
        count = self._n_yielded + self._options.max_in_flight - self._n_allowed
        if count > 0 and not self._source.inputs_ended:
            self._n_allowed += count
            self._wire.read_inputs(count)

    def _read_one(self, inputs: Iterator[object]) -> None:
        """Read one input, in the caller's thread."""
        try:
            item = next(inputs)
        except StopIteration:
            self._source.inputs_ended = True
        else:
            self._add(item)

    def _handle(self, event: Event) -> None:
        if isinstance(event, InputRead):
            self._add(event.item)
        elif isinstance(event, InputsEnded):
            if event.error is not None:
                raise event.error
            self._source.inputs_ended = True
        else:
            self._dispatch.record(event, self._decode, self._wire.now())

    def _add(self, item: object) -> None:
        index = self._n_read
        self._n_read += 1
        try:
            self._source.add(index, item)
        except InvalidInputError as error:
            error.index = index
            self._finished.put([index], [error])  # yielded in order, like an error of the server

    def _collect(self) -> None:
        """Move the answers and errors from `Dispatch` to the results."""
        for indices, results in self._dispatch.answers:
            self._finished.put(indices, results)
        self._dispatch.answers.clear()
        if rejected := self._dispatch.rejected:
            self._finished.put(list(rejected), list(rejected.values()))
            rejected.clear()
