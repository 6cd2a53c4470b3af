"""A semaphore and a pool of threads that callers share fairly."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from encserve_server.scheduling.fairness import BulkTurn, FairQueue
from encserve_server.types.callers import Caller, Priority, Sender

Done = TypeVar("Done")


@dataclass(slots=True, eq=False)
class _Waiter:
    """A task that waits for a slot.

    Attributes:
        caller: The caller.
        cost: The cost of the task's work.
        ready: Completes when the task gets a slot.
        virtual_start: See `FairQueue`.
    """

    caller: Caller
    cost: int
    ready: "asyncio.Future[None]"
    virtual_start: float = 0.0


class FairSemaphore:
    """A semaphore that callers share by weight and priority, like the queue of a model; see `scheduling.fairness`.

    Only the event loop uses this class.
    """

    def __init__(self, places: int) -> None:
        """Start with `places` free slots."""
        self._free = places
        self._queues = {priority: FairQueue[_Waiter]() for priority in Priority}
        self._bulk_turn = BulkTurn()

    async def acquire(self, sender: Sender, cost: int) -> None:
        """Wait for a slot. `cost` is the cost of the work, in any unit."""
        queue = self._queues[sender.priority]
        waiter = _Waiter(sender.caller, cost, asyncio.get_running_loop().create_future())
        flow = queue.add([waiter], sender.caller)
        if self._free:
            self._free -= 1
            self.release()
        try:
            await waiter.ready
        except asyncio.CancelledError:
            if not waiter.ready.cancelled():  # the task got a slot just before the cancellation
                self.release()
            elif waiter in flow.items:
                queue.remove(waiter, sender.caller, starts=False)
            raise

    def release(self) -> None:
        """Give a slot to the next task."""
        interactive, bulk = self._queues[Priority.INTERACTIVE], self._queues[Priority.BULK]
        while interactive.active or bulk.active:
            bulk_cost = bulk.first().cost if bulk.active else 0
            is_bulk = self._bulk_turn.is_bulk_next(interactive, bulk, bulk_cost)
            queue = bulk if is_bulk else interactive
            waiter = queue.first()
            is_waiting = not waiter.ready.done()
            queue.remove(waiter, waiter.caller, starts=is_waiting)
            if is_waiting:
                queue.advance(waiter)
                self._bulk_turn.note_start(is_bulk=is_bulk, bulk=bulk, cost=waiter.cost)
                waiter.ready.set_result(None)
                return
        self._free += 1

    def close(self) -> None:
        """Cancel the tasks that wait."""
        for queue in self._queues.values():
            for flow in queue.active:
                for waiter in flow.items:
                    waiter.ready.cancel()


class FairThreadPool:
    """Threads that callers share by weight and priority. Only the event loop uses this class."""

    def __init__(self, threads: int, name: str = "") -> None:
        """Set the maximum number of threads, and the prefix of their names."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._places = FairSemaphore(threads + 1)  # one more slot, so that no thread waits for the event loop

    async def run(self, sender: Sender, cost: int, work: Callable[[], Done]) -> Done:
        """Run `work` in a thread and return its result. `cost` is the cost of the work, in any unit.

        If the caller disconnects, work that a thread has started continues and keeps its slot.
        """
        await self._places.acquire(sender, cost)
        try:
            running = self._executor.submit(work)
        except RuntimeError:  # the pool is closed, or no thread could start
            self._places.release()
            raise
        result = asyncio.wrap_future(running)
        result.add_done_callback(lambda _: self._places.release())
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            running.cancel()
            raise

    def close(self) -> None:
        """End the threads, and cancel waiting work."""
        self._places.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
