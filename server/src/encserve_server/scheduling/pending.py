"""The pending queue: sequences that wait for a batch, counted against its bound the moment they come and go."""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from encserve_server.errors import EncserveError
from encserve_server.scheduling.batching import BatchPolicy, Taken, take_batch
from encserve_server.telemetry.spans import RequestSpan
from encserve_server.types import EncodedSequence, ModelInput, Output, TokenSpans

# So many entries that are gone are not worth a pass.
_FEW = 64


class QueueObserver(Protocol):
    """Who is told what becomes of the queue."""

    def has_queue(self, requests: Callable[[], int], sequences: Callable[[], int], tokens: Callable[[], int]) -> None:
        """How much is pending can be asked for, by any thread."""

    def expired(self) -> None:
        """A sequence's deadline passed in the queue."""

    def cancelled(self, stage: str) -> None:
        """A sequence's caller went away while it was "queued" or "running"."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One call: its entries fill `results`; `done` fires when all have, or with the first error.

    Attributes:
        wanted: What is to be made of each sequence.
        done: What the caller awaits; once it is done, however, nobody waits for the entries any more.
        results: What was made of each, None where it is missing.
        missing: How many are.
        entries: The call's sequences.
        queued: How many of them are `queued`.
        span: Who is told of its batches, if it is traced.
    """

    wanted: tuple[Output, ...]
    done: "asyncio.Future[None]"
    results: list[EncodedSequence | None]
    missing: int
    entries: "list[Entry]"
    queued: int = 0
    span: RequestSpan | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[ModelInput],
        wanted: tuple[Output, ...],
        now: float,
        deadline: float,
        span: RequestSpan | None = None,
        attended: Sequence[int] = (),
        token_spans: Sequence[TokenSpans | None] = (),
    ) -> "Ticket":
        """A ticket for a call that comes now, on the running event loop."""
        count = len(sequences)
        ticket = cls(wanted, asyncio.get_running_loop().create_future(), [None] * count, count, [], span=span)
        ticket.entries = [Entry(it, i, ticket, now, deadline) for i, it in enumerate(sequences)]
        for entry, count in zip(ticket.entries, attended, strict=False):  # of all, or of none
            entry.attended = count
        for entry, its in zip(ticket.entries, token_spans, strict=False):
            entry.token_spans = its
        return ticket

    def fail(self, error: EncserveError) -> None:
        """Ends the call with an error, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(slots=True, eq=False)
class Entry:
    """One sequence of a call.

    Attributes:
        input: (seq,) int64 ids, or (seq, d_model) float32 vectors.
        index: Its place in the call.
        ticket: The call.
        enqueued_at: When it came, in the clock's seconds.
        deadline: When its caller stops waiting; infinity for never.
        attended: How many of its first tokens all of its tokens see; 0 for all.
        token_spans: What OutputKind.SPANS has rows for, if that is wanted.
        started_at: When its batch started; NaN before.
        queued: Whether it counts against the queue's bound.
    """

    input: ModelInput
    index: int
    ticket: Ticket
    enqueued_at: float
    deadline: float
    attended: int = 0
    token_spans: TokenSpans | None = None
    started_at: float = math.nan
    queued: bool = True

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.input)

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.ticket.done.done()

    def deliver(self, result: EncodedSequence) -> None:
        """Gives the caller its outputs, unless it has gone or another of its sequences failed."""
        ticket = self.ticket
        if ticket.done.done():
            return
        ticket.results[self.index] = result
        ticket.missing -= 1
        if ticket.missing == 0:
            ticket.done.set_result(None)


class PendingQueue:
    """Entries in order of arrival.

    The event loop adds and withdraws, the engine's threads take; a lock is between them, held for as long as one method
    takes. Nothing else here waits.

    An entry that is withdrawn stops counting at once, but stays in the list, as `gone`, until the next `take`, or until
    such entries outnumber the others: so a storm of cancellations costs no more than a few passes in all, and what is
    kept stays bounded while a batch runs.
    """

    def __init__(self, observer: QueueObserver) -> None:
        """Starts empty."""
        self._observer = observer
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self.requests = 0  # with at least one entry that is `queued`
        self.sequences = 0  # of the entries that are `queued`
        self.tokens = 0
        observer.has_queue(lambda: self.requests, lambda: self.sequences, lambda: self.tokens)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, ticket: Ticket) -> None:
        """Appends all sequences of a call."""
        with self._lock:
            self._entries += ticket.entries
            ticket.queued = len(ticket.entries)
            self.requests += 1
            self.sequences += ticket.queued
            self.tokens += sum(entry.length for entry in ticket.entries)

    def withdraw(self, ticket: Ticket) -> None:
        """Frees at once the room of a call that has ended."""
        with self._lock:
            for entry in ticket.entries:
                self._leave(entry)
            if len(self._entries) > 2 * self.sequences + _FEW:
                self._entries = [entry for entry in self._entries if entry.queued]

    def tell_cancelled(self, ticket: Ticket, now: float) -> None:
        """Tells the observer of every sequence whose caller went away before it was delivered."""
        queued = [entry for entry in ticket.entries if entry.queued]
        for entry in queued:
            # gRPC cancels a call whose deadline has passed: that is no caller changing its mind.
            if entry.deadline <= now:
                self._observer.expired()
            else:
                self._observer.cancelled("queued")
        for _ in range(ticket.missing - len(queued)):
            self._observer.cancelled("running")

    def take(self, policy: BatchPolicy, now: float) -> Taken[Entry]:
        """Takes the next batch out, and with it whoever has gone or expired; see `batching`."""
        with self._lock:
            taken = take_batch(self._entries, policy, now)
            self._entries = taken.left
            for entry in (*taken.gone, *taken.expired, *taken.batch):
                self._leave(entry)
            for entry in taken.batch:
                entry.started_at = now
        for _ in taken.expired:
            self._observer.expired()
        return taken

    def fail_all(self, error: EncserveError) -> None:
        """Ends every call that waits with an error."""
        with self._lock:
            entries, self._entries = self._entries, []
            for entry in entries:
                self._leave(entry)
        for entry in entries:
            entry.ticket.fail(error)

    def _leave(self, entry: Entry) -> None:
        if entry.queued:
            entry.queued = False
            self.sequences -= 1
            self.tokens -= entry.length
            entry.ticket.queued -= 1
            self.requests -= not entry.ticket.queued
