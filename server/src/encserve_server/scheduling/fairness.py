"""Decides which caller's item starts next. This module uses no clock and no threads.

Callers share a resource by start-time fair queueing (Goyal et al., SIGCOMM '96). The virtual start of an item is the
later of two times: the virtual end of the caller's previous item, and the current virtual time. The virtual end of an
item is its virtual start + cost / weight. The item with the earliest virtual start is next, and the virtual time moves
to this start. An idle caller does not save up turns. A caller that ran alone does not pay for this later. If an item is
removed before it starts, its caller gets the cost back.

Interactive items start before bulk items, but `BulkTurn` gives bulk items a fixed share.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from encserve_server.types.callers import Caller

# While items of both priorities wait, one ninth of the work is bulk.
BULK_TURN = 9


class FairItem(Protocol):
    """Work that waits.

    Attributes:
        cost: The cost of the item, in any unit.
        virtual_start: The virtual start of the item. `FairQueue.add` sets it.
    """

    cost: int
    virtual_start: float


Item = TypeVar("Item", bound=FairItem)


@dataclass(slots=True, eq=False)
class Flow(Generic[Item]):
    """The waiting items of one caller.

    Attributes:
        weight: The caller's weight.
        virtual_end: The virtual end of the newest item.
        cost: The cost of all items.
        items: The items, the oldest first.
    """

    weight: float
    virtual_end: float = 0.0
    cost: int = 0
    items: OrderedDict[Item, None] = field(default_factory=OrderedDict)

    @property
    def oldest(self) -> Item:
        """The item that arrived first."""
        return next(iter(self.items))


class FairQueue(Generic[Item]):
    """The waiting items of one priority.

    Attributes:
        cost: The cost of all items.
        flows: The flow of each caller that ever had an item, by the caller's name. The number of names is limited.
        active: The flows with items.
        virtual_time: The latest virtual start of an item that has started.
    """

    def __init__(self, *, slack: int = 0, max_lead: float = math.inf) -> None:
        """Start empty.

        Args:
            slack: A caller may be ahead of its share by this cost. Beyond this cost, its items get a later virtual
                start.
            max_lead: The virtual start of a new item is at most virtual time + (the caller's waiting cost + `max_lead`)
                / weight. Without this limit, a caller whose items often start out of order could get ever later
                virtual starts.
        """
        self.cost = 0
        self.flows: dict[str, Flow[Item]] = {}
        self.active: dict[Flow[Item], None] = {}
        self.virtual_time = 0.0
        self._slack = slack
        self._max_lead = max_lead

    def add(self, items: Sequence[Item], caller: Caller) -> Flow[Item]:
        """Append items of a caller."""
        flow = self.flows.setdefault(caller.name, Flow(caller.weight))
        weight = flow.weight = caller.weight
        self.active[flow] = None
        now, slack = self.virtual_time, self._slack / weight
        newest = next(reversed(flow.items)).virtual_start if flow.items else now
        for item in items:
            latest = now + (flow.cost + self._max_lead) / weight
            start = max(newest, now, min(flow.virtual_end, latest))
            item.virtual_start = newest = max(newest, now, start - slack)
            flow.virtual_end = start + item.cost / weight
            flow.items[item] = None
            flow.cost += item.cost
            self.cost += item.cost
        return flow

    def remove(self, item: Item, caller: Caller, *, starts: bool) -> Flow[Item]:
        """Remove an item of a caller. If the item does not start, the caller gets the cost back."""
        flow = self.flows[caller.name]
        if not starts:
            flow.virtual_end -= item.cost / flow.weight
        del flow.items[item]
        flow.cost -= item.cost
        self.cost -= item.cost
        if not flow.items:
            del self.active[flow]
        return flow

    def first(self) -> Item:
        """Return the oldest item of the next caller.

        If two callers have the same virtual start, the caller with less waiting cost is next.
        """
        if len(self.active) == 1:
            return next(iter(self.active)).oldest
        return min(self.active, key=lambda flow: (flow.oldest.virtual_start, flow.cost)).oldest

    def advance(self, item: Item) -> None:
        """Move the virtual time to the virtual start of an item."""
        self.virtual_time = max(self.virtual_time, item.virtual_start)


class BulkTurn:
    """Decides between interactive and bulk work.

    Interactive work starts first. While bulk work waits, the cost of the starting interactive work is counted. When
    this cost reaches `BULK_TURN - 1` times the bulk work's cost, bulk work is next.
    """

    def __init__(self) -> None:
        """Start with no interactive work counted."""
        self._passed_over = 0.0  # the cost of interactive work since the last bulk work, counted while bulk waits

    def is_bulk_next(self, interactive: FairQueue[Item], bulk: FairQueue[Item], bulk_cost: float = 1.0) -> bool:
        """Return whether bulk work of this cost starts next. At least one of the queues must have items."""
        if not bulk.active:
            return False
        return not interactive.active or self._passed_over >= (BULK_TURN - 1) * bulk_cost

    def note_start(self, *, is_bulk: bool, bulk: FairQueue[Item], cost: float = 1.0) -> None:
        """Count work that has left its queue."""
        self._passed_over = self._passed_over + cost if bulk.active and not is_bulk else 0.0
