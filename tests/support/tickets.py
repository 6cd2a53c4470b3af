"""Makes tickets for tests without an event loop. A ticket is a call that waits in the queue."""

import math
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from encserve_server.scheduling.queue import Ticket
from encserve_server.types.callers import ANYONE, Caller, Priority
from encserve_server.types.sequences import TokenSequence


def ticket_of(
    lengths: Sequence[int],
    *,
    deadline: float = math.inf,
    extra_cost: int = 0,
    caller: Caller = ANYONE,
    priority: Priority = Priority.INTERACTIVE,
) -> Ticket:
    """Return the ticket of a call. The call has a sequence of each length in `lengths`.

    `ticket.done.cancel()` cancels the call.

    The cost of a sequence is its length plus `extra_cost`.
    """
    sequences = [TokenSequence(np.ones(it, np.int64), it, cost=it + extra_cost) for it in lengths]
    done: Future[None] = Future()
    ticket = Ticket(
        sequences,
        done,  # type: ignore[arg-type] # the queue calls only methods that both Future classes have
        len(sequences),
        caller=caller,
        priority=priority,
    )
    for i, sequence in enumerate(sequences):
        sequence.ticket, sequence.index, sequence.deadline = ticket, i, deadline
    return ticket
