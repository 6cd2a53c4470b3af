"""What is waiting to be sent: new items in order, and failed ones until their wait is over. Pure."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Items waiting to be sent. An item whose wait is over goes before new ones, so that old work finishes first."""

    def __init__(self) -> None:
        self._ready: deque[T] = deque()
        self._later: list[tuple[float, int, T]] = []  # a heap of (due, order of arrival, item)
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._ready) + len(self._later)

    def push(self, item: T) -> None:
        """Adds a new item at the end."""
        self._ready.append(item)

    def push_first(self, items: Iterable[T]) -> None:
        """Adds items before all others that are ready, in this order."""
        self._ready.extendleft(reversed(list(items)))

    def push_later(self, due: float, item: T) -> None:
        """Adds an item that must not be sent before `due`."""
        heapq.heappush(self._later, (due, next(self._arrivals), item))

    def pop(self, now: float) -> T | None:
        """Takes the next item that may be sent at `now`; None if there is none."""
        if self._later and self._later[0][0] <= now:
            return heapq.heappop(self._later)[2]
        return self._ready.popleft() if self._ready else None

    def next_due(self) -> float | None:
        """When the next waiting item may be sent; None if none waits."""
        return self._later[0][0] if self._later else None

    def discard(self, item: T) -> None:
        """Removes an item that is no longer wanted, if it is here."""
        self._ready = deque(it for it in self._ready if it is not item)
        self._later = [entry for entry in self._later if entry[2] is not item]
        heapq.heapify(self._later)
