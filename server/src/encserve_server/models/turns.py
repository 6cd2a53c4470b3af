"""Threads that callers share in turn."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from encserve_server.scheduling.queue import BULK_TURN
from encserve_server.types.callers import Caller, Priority, Sender

Done = TypeVar("Done")


@dataclass(slots=True, eq=False)
class _Flow:
    """What waits of one caller, of one priority.

    Attributes:
        weight: Its caller's.
        next_turn: Where its turns have come to.
        waiting: What each piece of work costs, the oldest first, by what tells it to begin.
    """

    weight: float
    next_turn: float = 0.0
    waiting: "dict[asyncio.Future[None], float]" = field(default_factory=dict)


class _Line:
    """What waits of one priority."""

    def __init__(self) -> None:
        self.flows: dict[str, _Flow] = {}  # by name, of all callers so far: as many as have names
        self.active: dict[_Flow, None] = {}  # those with something that waits
        self._clock = 0.0  # the turn of what was begun last

    def add(self, caller: Caller, waiter: "asyncio.Future[None]", cost: float) -> None:
        flow = self.flows.setdefault(caller.name, _Flow(caller.weight))
        flow.weight = caller.weight
        if not flow.waiting:
            flow.next_turn = max(flow.next_turn, self._clock)
            self.active[flow] = None
        flow.waiting[waiter] = cost

    def remove(self, flow: _Flow, waiter: "asyncio.Future[None]") -> None:
        if flow.waiting.pop(waiter, None) is not None and not flow.waiting:
            del self.active[flow]

    def next_cost(self) -> float:
        """The cost of what has the next turn."""
        return next(iter(self._next_flow().waiting.values()))

    def begin(self) -> bool:
        """Has the oldest work of the caller begin whose turn it is; False if that has been given up."""
        flow = self._next_flow()
        waiter, cost = next(iter(flow.waiting.items()))
        self.remove(flow, waiter)
        if waiter.done():
            return False
        self._clock = flow.next_turn
        flow.next_turn += cost / flow.weight
        waiter.set_result(None)
        return True

    def _next_flow(self) -> _Flow:
        return min(self.active, key=lambda flow: flow.next_turn)


class TurnPool:
    """Threads; owned by the event loop.

    Callers share them as they share the queue (see `scheduling.queue`): what is begun next is the oldest work of the
    caller whose turns have come least far. Each piece of work that is begun moves its caller's turns by cost / weight,
    and the turns of a caller that was away begin at the turn of what was begun last. Interactive work goes before bulk,
    but bulk is begun once `BULK_TURN - 1` times its cost has been begun before it while it waited.
    """

    def __init__(self, threads: int, name: str = "") -> None:
        """Starts threads when they are needed; `name` is the beginning of theirs."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        # One more than threads is handed over, so that no thread waits for the event loop.
        self._free = threads + 1
        self._lines = {priority: _Line() for priority in Priority}
        self._bulk_passed_over = 0.0  # cost of what was begun since the last bulk work, or since bulk began to wait

    async def run(self, sender: Sender, cost: float, work: Callable[[], Done]) -> Done:
        """What `work` returns, which is done in a thread when the sender's turn comes; `cost` is in any unit.

        Raises:
            Exception: Whatever `work` raises.
        """
        line = self._lines[sender.priority]
        waiter = asyncio.get_running_loop().create_future()
        line.add(sender.caller, waiter, cost)
        if self._free:
            self._free -= 1
            self._begin_next()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                line.remove(line.flows[sender.caller.name], waiter)
            else:
                self._begin_next()
            raise
        try:
            running = self._executor.submit(work)
        except RuntimeError:  # there is no thread for it
            self._begin_next()
            raise
        place = asyncio.wrap_future(running)
        place.add_done_callback(lambda _: self._begin_next())
        try:
            return await asyncio.shield(place)
        except asyncio.CancelledError:
            running.cancel()  # but what a thread has begun goes on, and keeps its place
            raise

    def close(self) -> None:
        """Ends the threads; work that waits is dropped."""
        for line in self._lines.values():
            for flow in line.active:
                for waiter in flow.waiting:
                    waiter.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin_next(self) -> None:
        """Hands over what has the next turn, in the place of what has been done."""
        interactive, bulk = self._lines[Priority.INTERACTIVE], self._lines[Priority.BULK]
        while interactive.active or bulk.active:
            enough = (BULK_TURN - 1) * bulk.next_cost() if bulk.active else math.inf
            line = bulk if not interactive.active or self._bulk_passed_over >= enough else interactive
            cost = line.next_cost()
            if line.begin():
                self._bulk_passed_over = self._bulk_passed_over + cost if line is interactive and bulk.active else 0.0
                return
        self._free += 1
