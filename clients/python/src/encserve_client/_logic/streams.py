"""One call of `stream`: inputs are read with a bounded look-ahead, and results are yielded.

`Dispatch` sends the messages, as for every other call. This module adds three things: inputs are read while results
are taken, results are sorted, and the deadlines exclude the time of a slow caller.
"""

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
    """The inputs of a stream that were read but not sent, grouped into messages. A `MessageSource`."""

    def __init__(self, builder: MessageBuilder) -> None:
        self.inputs_ended = False
        self.may_send_partial = True
        self._builder = builder
        self._full: deque[Message] = deque()

    @property
    def is_ended(self) -> bool:
        """See `MessageSource`."""
        return self.inputs_ended and not self._full and self._builder.is_empty

    def add(self, index: int, item: object) -> None:
        """Add the next input.

        Raises:
            InvalidInputError: `item` is not an input.
        """
        if (full := self._builder.add(index, check_input(item, f"inputs[{index}]"))) is not None:
            self._full.append(full)
        if self._builder.is_full and (full := self._builder.flush()) is not None:
            self._full.append(full)

    @property
    def has_message(self) -> bool:
        """Whether a full message has not been taken."""
        return bool(self._full)

    def take(self, *, idle: bool) -> Message | None:
        """See `MessageSource`. While messages are in flight, inputs wait for a full message."""
        if self._full:
            return self._full.popleft()
        if self.inputs_ended or (idle and self.may_send_partial):
            return self._builder.flush()
        return None


class ResultBuffer(Generic[R]):
    """Results that have not been yielded yet."""

    def __init__(self, ordered: bool) -> None:
        self._ordered = ordered
        self._results: dict[int, R] = {}  # in the order of arrival
        self._next_index = 0

    def put(self, index: int, result: R) -> None:
        """Add the result of an input."""
        self._results[index] = result

    @property
    def is_ready(self) -> bool:
        """Whether `pop` returns a result."""
        return bool(self._results) and (not self._ordered or self._next_index in self._results)

    def pop(self) -> tuple[int, R] | None:
        """Remove and return the next result with the index of the input. Return None if the result has not arrived."""
        index = self._next_index if self._ordered else next(iter(self._results), -1)
        if index not in self._results:
            return None
        self._next_index += 1
        return index, self._results.pop(index)


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

    async def results(self) -> AsyncGenerator[tuple[int, Result], None]:
        """Yield each result with the index of the input. Read at most one input while a result is ready.

        Raises:
            EncserveError: The call as a whole failed.
        """
        while (result := await self._next()) is not None:
            self._n_yielded += 1
            if self._options.progress is not None:
                self._options.progress(self._n_yielded, self._options.total)
            began = self._wire.now()
            yield result
            self._dispatch.paused_seconds += self._wire.now() - began

    async def _next(self) -> tuple[int, Result] | None:
        may_yield = False  # becomes True after one read, so that reading keeps up with yielding
        while True:
            while (event := await self._wire.wait(0)) is not None:
                self._handle(event)
            self._send()
            inputs = self._options.inputs if self._may_read else None
            if may_yield or inputs is None:
                if (result := self._finished.pop()) is not None:
                    return result
                if self._source.is_ended and self._n_yielded == self._n_read:
                    return None
            may_yield = True
            if inputs is not None:
                self._read(inputs)
                if not self._source.has_message and (result := self._finished.pop()) is not None:
                    return result
            elif (event := await self._wire.wait(self._dispatch.seconds_to_wait(self._wire.now()))) is not None:
                self._handle(event)

    @property
    def _may_read(self) -> bool:
        return not self._source.inputs_ended and self._n_read - self._n_yielded < self._options.max_in_flight

    def _send(self) -> None:
        # One input is read for each result that the caller takes, so the message is full soon.
        self._source.may_send_partial = not self._finished.is_ready
        self._dispatch.send(self._wire, "Encode", may_block=False)
        self._collect()
        count = self._n_yielded + self._options.max_in_flight - self._n_allowed
        if self._options.inputs is None and count > 0 and not self._source.inputs_ended:
            self._n_allowed += count
            self._wire.read_inputs(count)

    def _read(self, inputs: Iterator[object]) -> None:
        """Read one input, in the caller's thread."""
        began = self._wire.now()
        try:
            item = next(inputs)
        except StopIteration:
            self._source.inputs_ended = True
            return
        finally:
            self._dispatch.paused_seconds += self._wire.now() - began
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
        self._collect()

    def _add(self, item: object) -> None:
        index = self._n_read
        self._n_read += 1
        try:
            self._source.add(index, item)
        except InvalidInputError as error:
            error.index = index
            self._finished.put(index, error)  # yielded in order, like an error of the server

    def _collect(self) -> None:
        """Move the answers and errors from `Dispatch` to the results."""
        for first_index, results in self._dispatch.answers:
            for index, result in enumerate(results, first_index):
                self._finished.put(index, result)
        self._dispatch.answers.clear()
        rejected = self._dispatch.rejected or {}
        for index, error in rejected.items():
            self._finished.put(index, error)
        rejected.clear()
