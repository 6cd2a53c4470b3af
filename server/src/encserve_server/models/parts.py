"""Calls with many inputs run in parts, so that other calls run in between."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from encserve_server.errors import FieldPath, QueueFull, RequestError, RequestField, RequestTooLarge, ResponseTooLarge
from encserve_server.models.inputs import pieces
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.models.treatment import EncodeCall
from encserve_server.system.clock import Clock
from encserve_server.telemetry.spans import RequestSpan
from encserve_server.types.callers import ANY_SENDER, Sender
from encserve_server.types.sequences import TokenSequence

Done = TypeVar("Done")

# Two parts are in the queue at a time, so that the engine does not wait for the next part. Together they cost at most a
# quarter of the queue's bound, and no more than keeps the engine busy, because later calls wait for them.
_PARTS_AT_ONCE, _QUEUE_SHARE_DIVISOR, _BATCHES_PER_PART = 2, 8, 2
# The longest wait of a part for room in the queue, after an earlier part has started.
_ROOM_SECONDS = 30.0


class PartedCall:
    """One call. The event loop owns it.

    The call prepares a piece of its inputs while earlier sequences run. The queue holds two parts at a time. A part is
    at most an eighth of the queue's bound and 2 batches, or one sequence. If the queue has no room for the first part,
    the call fails. Later parts wait for room, because work has been done for the call.
    """

    def __init__(
        self,
        model: ServedModel,
        call: EncodeCall,
        hold: Callable[[int], None],
        *,
        clock: Clock,
        deadline: float = math.inf,
        span: RequestSpan | None = None,
        sender: Sender = ANY_SENDER,
        charge: Callable[[Sequence[TokenSequence]], None] = lambda _: None,
    ) -> None:
        """Prepare nothing yet.

        Args:
            model: The model.
            call: The call, without spans and without details of tokens.
            hold: Called with the estimated bytes of the reply, or of each of its parts.
            clock: The time.
            deadline: The time after which the caller does not wait.
            span: Traces the call.
            sender: The caller and the priority.
            charge: Called with the sequences of each piece before they run.
        """
        self._model = model
        self._call = call
        self._hold = hold
        self._clock = clock
        self._deadline = deadline
        self._span = span
        self._sender = sender
        self._charge = charge
        self._most_cost = model.limits.max_tokens // _QUEUE_SHARE_DIVISOR
        if model.max_batch_tokens:
            self._most_cost = min(self._most_cost, model.max_batch_tokens * _BATCHES_PER_PART)
        self._reply: EncodeReply | None = None
        self._waiting: list[TokenSequence] = []
        self._running: deque[asyncio.Task[int]] = deque()
        self._parts_run = 0

    async def run(self) -> EncodeReply:
        """Prepare and run all inputs.

        Raises:
            QueueFull: The first part found no room in the queue, or a later part found none for 30 s.
            ResponseTooLarge: The reply is over the limit.
            EncserveError: Another error of the first part that fails.
        """
        try:
            for begin, end in pieces(self._call.inputs):
                await self._add(await self._prepare(begin, end))
            assert self._reply is not None  # noqa: S101 - a call has inputs
            if self._parts_run:
                await self._run_waiting()
                while self._running:
                    await self._finish_oldest()
            else:  # the usual call has one part
                await self._run_all(self._reply)
        finally:
            for task in self._running:  # another part has failed, or the caller has gone
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        return self._reply

    async def _prepare(self, begin: int, end: int) -> EncodeReply:
        call = replace(self._call, inputs=self._call.inputs[begin:end], part_of=self._call.inputs)
        try:
            piece = await self._when_there_is_room(
                lambda: self._model.prepare(call, self._span, self._sender), may_wait=begin > 0
            )
        except ResponseTooLarge as error:
            if end - begin == len(self._call.inputs):
                raise
            raise ResponseTooLarge(error.field, f"of inputs {begin} to {end - 1}, {error.problem}") from None
        except RequestError as error:
            error.move(begin)
            raise
        row_bytes = piece.plan.row_bytes
        if row_bytes is not None and end - begin < len(self._call.inputs):
            # The first piece shows the bytes of all inputs. Hold them before any computation.
            piece.estimated_bytes = 0 if begin else self._model.check_rows(row_bytes, len(self._call.inputs))
        for sequence in piece.sequences:
            sequence.index += begin
        self._hold(piece.estimated_bytes)
        self._charge(piece.sequences)
        return piece

    async def _add(self, piece: EncodeReply) -> None:
        """Add a piece to the reply, and run all but the last part."""
        reply = self._reply
        if reply is None:
            self._reply = replace(piece, sequences=list(piece.sequences))
        else:
            reply.sequences += piece.sequences
            reply.tokenize_seconds += piece.tokenize_seconds
            reply.estimated_bytes += piece.estimated_bytes
            self._check_size(reply)
        cost = sum(it.cost for it in self._waiting)
        for sequence in piece.sequences:
            if self._waiting and cost + sequence.cost > self._most_cost:
                await self._run_waiting()
                cost = 0
            self._waiting.append(sequence)
            cost += sequence.cost

    def _check_size(self, reply: EncodeReply) -> None:
        limit = self._model.limits.max_response_bytes
        if reply.estimated_bytes > limit:
            raise ResponseTooLarge(
                FieldPath(RequestField.INPUTS),
                f"the reply for the first {len(reply.sequences)} of {len(self._call.inputs)} inputs would take "
                f"{reply.estimated_bytes} bytes, over the limit of {limit} (max_response_bytes); send fewer inputs",
            )

    async def _run_all(self, reply: EncodeReply) -> None:
        """Run all sequences at once."""
        estimated = reply.estimated_bytes
        await self._model.run(reply, self._deadline, self._span, self._sender)
        if reply.estimated_bytes > estimated:
            self._hold(reply.estimated_bytes - estimated)

    async def _run_waiting(self) -> None:
        """Start to run the waiting sequences. First wait until there is room for another part."""
        if len(self._running) == _PARTS_AT_ONCE:
            await self._finish_oldest()
        assert self._reply is not None  # noqa: S101 - there are waiting sequences
        part, self._waiting = replace(self._reply, sequences=self._waiting), []
        self._running.append(asyncio.create_task(self._run_part(part, may_wait=self._parts_run > 0)))
        self._parts_run += 1

    async def _finish_oldest(self) -> None:
        more_bytes = await self._running[0]
        self._running.popleft()
        if more_bytes and self._reply is not None:
            self._hold(more_bytes)
            self._reply.estimated_bytes += more_bytes
            self._check_size(self._reply)

    async def _run_part(self, part: EncodeReply, *, may_wait: bool) -> int:
        """Run sequences. Return how many bytes more than estimated their outputs take in the reply."""
        estimated = part.estimated_bytes
        run = partial(self._model.run, part, self._deadline, self._span, self._sender)
        try:
            await self._when_there_is_room(run, may_wait=may_wait)
        except RequestTooLarge as error:  # only a part of one sequence can be too large for the queue
            error.field = FieldPath(RequestField.INPUT, part.sequences[0].index)
            raise
        return part.estimated_bytes - estimated

    async def _when_there_is_room(self, work: Callable[[], Awaitable[Done]], *, may_wait: bool) -> Done:
        """Do work that needs room in the queue. With `may_wait`, wait for the room."""
        gives_up_at = self._clock.now() + _ROOM_SECONDS
        while True:
            try:
                return await work()
            except QueueFull as full:
                if not may_wait or self._clock.now() + full.retry_delay_s > gives_up_at:
                    raise
                await self._clock.sleep(full.retry_delay_s)
