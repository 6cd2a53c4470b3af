"""Requests on their way: gRPC keeps what has come of a message and says its size only when it is whole."""

import asyncio
import contextlib
import math
from collections.abc import Collection, Iterator
from typing import Any

from encserve_server.calls import Calls
from encserve_server.errors import BudgetFull, DeadlineExpired, Draining, EncserveError, MalformedRequest
from encserve_server.system.background import repeat

# A request that is not whole after two looks counts as slow: most are there with their call.
_LOOK_SECONDS = 0.1
_PROMPT_LOOKS = 2
# How long a request may take to arrive, and a stream may be idle before another one may have its place.
RECEIVE_SECONDS = 30.0
# A caller that has gone ends its requests first; so much later gRPC has cancelled its call.
_GONE_SECONDS = 0.05
# Room for so many slow requests and open streams, at least.
_LEAST_PLACES = 64
# The share of the places that calls may have which may come without a key.
_OPEN_SHARE = 8
_RETRY_S = 1.0
# What gRPC keeps of a request takes an eighth more than its bytes.
_OVERHEAD = 8

_Task = asyncio.Task[Any]


class Receiving:
    """Reads the requests of calls, and bounds how much of requests that are not whole there can be.

    A slow request, and an open stream, has one of `places`. Each holds as many bytes of the budget as a request may
    have, and together they hold at most half of the budget. A request that finds no place is refused, and so is one
    that takes more than 30 s. gRPC does not tell an idle stream from one whose message does not become whole: a stream
    without progress for 30 s is ended when another call needs its place. Calls that may come without a key have at most
    an eighth of the places.

    Everything here belongs to the event loop.
    """

    def __init__(self, calls: Calls, max_request_bytes: int) -> None:
        """Takes the calls of all protocols, and the largest request."""
        self._calls = calls
        self._clock = calls.clock
        half = calls.max_held_bytes // 2
        kept_bytes = max_request_bytes + max_request_bytes // _OVERHEAD
        self.places = max(half // kept_bytes, _LEAST_PLACES)
        self._place_bytes = min(kept_bytes, half // self.places)
        self._looks = 0
        self._prompt: dict[_Task, int] = {}  # requests on their way, and the look before each; the oldest first
        self._slow: dict[_Task, float] = {}  # those with a place, and when each has to be whole
        self._streams: dict[_Task, float] = {}  # open streams, and since when each is idle; infinity if busy
        self._refused: dict[_Task, EncserveError] = {}  # those that are being ended
        self._open: set[_Task] = set()  # those on their way that may come without a key
        self._open_places: set[_Task] = set()  # those of them, and of streams, that have a place

    async def read(self, context: Any, *, is_open: bool = False) -> bytes:
        """The one request of a call; `is_open` where the call may come without a key.

        Raises:
            BudgetFull: The request is slow, and there is no place for it.
            DeadlineExpired: It does not arrive.
            MalformedRequest: The call has no request.
        """
        task = current_task()
        self._prompt[task] = self._looks
        if is_open:
            self._open.add(task)
        try:
            data = await context.read()
        except asyncio.CancelledError:
            self._raise_refusal(task)
            raise
        finally:
            self._open.discard(task)
            if self._prompt.pop(task, None) is None and self._slow.pop(task, None) is not None:
                self._give_place_back(task)
        if not isinstance(data, bytes):
            await asyncio.sleep(_GONE_SECONDS)
            raise MalformedRequest("", "the call ended without a request")
        return data

    @contextlib.contextmanager
    def stream(self, *, is_open: bool = False) -> Iterator[None]:
        """Within this block the task has an open stream; `is_open` where its call may come without a key.

        Raises:
            BudgetFull: There is no place for it, or another call has needed it while the stream was idle.
        """
        task = current_task()
        if not self._take_place(task, is_open=is_open):
            raise self._no_place()
        self._streams[task] = self._clock.now()
        try:
            yield
        except asyncio.CancelledError:
            self._raise_refusal(task)
            raise
        finally:
            if self._streams.pop(task, None) is not None:
                self._give_place_back(task)

    def progress(self, task: _Task, *, is_idle: bool) -> None:
        """The stream of a task has received a request, or sent an answer; `is_idle` if none is being answered."""
        if task in self._streams:
            self._streams[task] = self._clock.now() if is_idle else math.inf

    async def watch(self) -> None:
        """End requests that arrive too slowly, until cancelled."""
        await repeat(self._look, _LOOK_SECONDS, clock=self._clock)

    def _look(self) -> None:
        self._looks += 1
        now = self._clock.now()
        for task in [it for it, look in self._prompt.items() if self._looks - look > _PROMPT_LOOKS]:
            del self._prompt[task]
            if self._take_place(task, is_open=task in self._open):
                self._slow[task] = now + RECEIVE_SECONDS
            else:
                self._end(task, self._no_place(", and this request has not arrived whole"))
        if self._calls.draining.is_set():  # a stop does not wait for what may never come
            for task in list(self._slow):
                self._end(task, Draining("the server is stopping; send the request to another"))
        for task in [it for it, due in self._slow.items() if due <= now]:
            problem = f"the request did not arrive within {RECEIVE_SECONDS:.0f} s"
            self._end(task, DeadlineExpired(problem))

    def _taken(self) -> int:
        return len(self._slow) + len(self._streams)

    def _no_place(self, why: str = "") -> BudgetFull:
        return BudgetFull(f"{self._taken()} streams and slow requests are open (max_in_flight_mib){why}", _RETRY_S)

    def _take_place(self, task: _Task, *, is_open: bool) -> bool:
        """Takes a place, if need be that of the stream which has been idle for longest."""
        if is_open and len(self._open_places) >= self.places // _OPEN_SHARE and not self._end_idle(self._open_places):
            return False
        if self._taken() >= self.places and not self._end_idle(self._streams):
            return False
        if not self._calls.take(self._place_bytes):
            return False
        if is_open:
            self._open_places.add(task)
        return True

    def _end_idle(self, among: Collection[_Task]) -> bool:
        """Ends the stream of these tasks which has been idle for longest; False where none has been for long enough."""
        streams = ((since, task) for task, since in self._streams.items() if task in among)
        since, task = min(streams, key=lambda it: it[0], default=(0.0, None))
        if task is None or since + RECEIVE_SECONDS > self._clock.now():
            return False
        del self._streams[task]
        self._give_place_back(task)
        problem = f"the stream made no progress for {RECEIVE_SECONDS:.0f} s, and another call needs its place"
        self._end(task, BudgetFull(problem, _RETRY_S))
        return True

    def _give_place_back(self, task: _Task) -> None:
        self._open_places.discard(task)
        self._calls.give_back(self._place_bytes)

    def _end(self, task: _Task, error: EncserveError) -> None:
        self._refused[task] = error
        task.cancel()

    def _raise_refusal(self, task: _Task) -> None:
        """Raises what has ended a task; returns if its caller has gone."""
        if (error := self._refused.pop(task, None)) is not None:
            task.uncancel()
            raise error from None


def current_task() -> _Task:
    """The task of a call: gRPC runs each in one."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - see above
    return task
