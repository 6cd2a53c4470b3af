"""Calls with many inputs run in parts, so that other calls run in between."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from encserve_server.errors import FieldPath, QueueFull, RequestField, ResponseTooLarge
from encserve_server.models.inputs import pieces
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.models.treatment import EncodeCall
from encserve_server.system.clock import Clock
from encserve_server.telemetry.spans import RequestSpan
from encserve_server.types.callers import ANY_SENDER, Sender
from encserve_server.types.sequences import TokenSequence

Done = TypeVar("Done")

# Two parts of a call are in the queue at a time, so that the engine does not wait for the next part. Other calls wait
# behind these parts. So each part costs at most an eighth of the queue, and at most as much as two batches.
_PARTS_AT_ONCE, _QUEUE_SHARE_DIVISOR, _BATCHES_PER_PART = 2, 8, 2
# The longest wait of a part for room in the queue, after an earlier part has started.
_ROOM_SECONDS = 30.0


def runs_at_once(model: ServedModel, reply: EncodeReply) -> bool:
    """Return whether a prepared call costs at most as much as two parts, and so runs without parts. Most calls do.

    A call with one input needs no check: an input is never cut into parts.
    """
    return sum([it.cost for it in reply.sequences]) <= _PARTS_AT_ONCE * _most_cost(model)


def _most_cost(model: ServedModel) -> int:
    """Return the largest cost of a part in tokens. A part of one sequence may cost more."""
    most_cost = model.limits.max_tokens // _QUEUE_SHARE_DIVISOR
    return min(most_cost, model.max_batch_tokens * _BATCHES_PER_PART) if model.max_batch_tokens else most_cost


class PartedCall:
    """A call that runs in parts. Only the event loop uses this class.

    The call prepares a piece of its inputs while earlier sequences run. The queue holds two parts of the call at a
    time. If the queue has no room for the first part, the call fails. Later parts wait for room, because a failure
    would waste the earlier work.
    """

    def __init__(
        self,
        model: ServedModel,
        call: EncodeCall,
        reply: EncodeReply,
        hold: Callable[[int], None],
        *,
        clock: Clock,
        deadline: float = math.inf,
        span: RequestSpan | None = None,
        sender: Sender = ANY_SENDER,
        charge: Callable[[Sequence[TokenSequence]], None] = lambda _: None,
    ) -> None:
        """Set the arguments. `run` starts the work.

        Args:
            model: The model.
            call: The call.
            reply: The reply with the first piece of the call (see `pieces`). The bytes and the cost of this piece are
                already counted.
            hold: Called when the estimated size of the reply grows, with the number of added bytes.
            clock: The clock.
            deadline: The clock's time in seconds at which the caller stops waiting.
            span: Traces the call.
            sender: The caller and the priority.
            charge: Called with the sequences of each later piece before they run.
        """
        self._model = model
        self._call = call
        self._reply = reply
        self._hold = hold
        self._clock = clock
        self._deadline = deadline
        self._span = span
        self._sender = sender
        self._charge = charge
        self._most_cost = _most_cost(model)
        self._waiting: list[TokenSequence] = []
        self._running: deque[asyncio.Task[int]] = deque()
        self._parts_run = 0
        self._sparse_bytes = 0  # the size of sparse weights in parts that have run

    async def run(self) -> None:
        """Prepare the other pieces, and run all sequences of the reply.

        Raises:
            QueueFull: The queue has no room for the first part, or had no room for a later part for 30 s.
            ResponseTooLarge: The reply is over the limit.
            EncserveError: Another error of the first part that fails.
        """
        reply = self._reply
        try:
            for begin, end in pieces(self._call.inputs):
                if begin:
                    await self._prepare(begin, end)
                await self._add(reply.sequences[begin:])
            await self._run_waiting()
            while self._running:
                await self._finish_oldest()
        finally:
            await self._cancel_running()  # another part has failed, or the caller has disconnected
        if reply.plan.has_sparse:
            self._count_sparse()

    async def _prepare(self, begin: int, end: int) -> None:
        """Prepare a piece when the tokenizer has room for its texts."""
        reply, estimated = self._reply, self._reply.estimated_bytes
        prepare = partial(self._model.prepare, self._call, self._span, self._sender, reply=reply, end=end)
        await self._when_there_is_room(prepare, may_wait=True)
        self._check_size()
        self._hold(reply.estimated_bytes - estimated)
        self._charge(reply.sequences[begin:])

    async def _add(self, sequences: Sequence[TokenSequence]) -> None:
        """Add sequences to the waiting sequences. Start each part that is full."""
        cost = sum(it.cost for it in self._waiting)
        for sequence in sequences:
            if self._waiting and cost + sequence.cost > self._most_cost:
                await self._run_waiting()
                cost = 0
            self._waiting.append(sequence)
            cost += sequence.cost

    def _check_size(self) -> None:
        """Refuse a reply that is over the limit with the sparse weights so far."""
        size, limit = self._reply.estimated_bytes + self._sparse_bytes, self._model.limits.max_response_bytes
        if size > limit:
            raise ResponseTooLarge(
                FieldPath(RequestField.INPUTS),
                f"the reply for the first {len(self._reply.sequences)} of {len(self._call.inputs)} inputs would take "
                f"{size} bytes, over the limit of {limit} (max_response_bytes); send fewer inputs",
            )

    async def _run_waiting(self) -> None:
        """Start to run the waiting sequences. First wait until there is room for another part."""
        if len(self._running) == _PARTS_AT_ONCE:
            await self._finish_oldest()
        part, self._waiting = replace(self._reply, sequences=self._waiting), []
        self._running.append(asyncio.create_task(self._run_part(part, may_wait=self._parts_run > 0)))
        self._parts_run += 1

    async def _finish_oldest(self) -> None:
        sparse_bytes = await self._running[0]
        self._running.popleft()
        if sparse_bytes:
            self._hold(sparse_bytes)
            self._sparse_bytes += sparse_bytes
            self._check_size()

    async def _cancel_running(self) -> None:
        # A failed task must not stay in `_running`. A reference cycle would result: error, stack frames, this call,
        # task, error. The cycle would keep the memory of a failed call until the garbage collector runs.
        running = list(self._running)
        self._running.clear()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run_part(self, part: EncodeReply, *, may_wait: bool) -> int:
        """Run sequences. Return the size of their sparse weights in the reply, in bytes."""
        estimated = part.estimated_bytes
        run = partial(self._model.run, part, self._deadline, self._span, self._sender)
        await self._when_there_is_room(run, may_wait=may_wait)
        return part.estimated_bytes - estimated

    def _count_sparse(self) -> None:
        """Count the sparse weights of the whole reply. With padding, each sequence has the size of the largest one."""
        reply, counted = self._reply, self._reply.estimated_bytes + self._sparse_bytes
        self._model.count_sparse(reply)
        if reply.estimated_bytes > counted:
            self._hold(reply.estimated_bytes - counted)

    async def _when_there_is_room(self, work: Callable[[], Awaitable[Done]], *, may_wait: bool) -> Done:
        """Do work that needs room in a queue. With `may_wait`, try again until there is room."""
        gives_up_at = self._clock.now() + _ROOM_SECONDS
        while True:
            try:
                return await work()
            except QueueFull as full:
                if not may_wait or self._clock.now() + full.retry_delay_s > gives_up_at:
                    raise
                await self._clock.sleep(full.retry_delay_s)
