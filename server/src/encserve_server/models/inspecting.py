"""Runs inspections of a model in a separate thread, so that inspections never delay encoding."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from encserve_server.engine.base import Inspector
from encserve_server.errors import (
    BundleError,
    EngineUnhealthy,
    InferenceFailed,
    InspectUnavailable,
    QueueFull,
    ShareExceeded,
)
from encserve_server.ledger import Pool
from encserve_server.models.turns import FairSemaphore
from encserve_server.system.cpus import lower_thread_priority
from encserve_server.types.arrays import ModelInput
from encserve_server.types.bundles import Bundle
from encserve_server.types.callers import ANY_SENDER, Sender
from encserve_server.types.inspections import InspectKind, InspectTensor

logger = logging.getLogger(__name__)

Wanted = Sequence[tuple[InspectKind, tuple[int, ...]]]

_NOT_LOADABLE = "the model cannot be inspected: the server cannot load its inspection graph; see the server's log"
# The retry delay before the first inspection. Later, the retry delay is the duration of the last inspection.
_TYPICAL_SECONDS = 0.2
# A named caller may hold as many slots as remain free. So one caller alone may hold half of the slots.
_SHARE = 1


class InspectObserver(Protocol):
    """Receives the events of inspections on the event loop."""

    def inspections_changed(self, pending: int, limit: int) -> None:
        """The number of pending inspections has changed. A pending inspection waits, runs or is being sent."""

    def inspected(self, compute_seconds: float) -> None:
        """An inspection has run."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of an inspection.

    Attributes:
        tensors: One tensor for each wanted kind.
        queue_seconds: The wait for the thread. For the first inspection, this includes the loading of the graph.
        compute_seconds: The run time of the model.
    """

    tensors: list[InspectTensor]
    queue_seconds: float
    compute_seconds: float


def inspection_cost(bundle: Bundle, tokens: int, wanted: Wanted) -> int:
    """Return the cost of an inspection in tokens.

    The run costs the tokens of the sequence. In addition, each `(n_layers + 1) * d_model` numbers of the result cost
    one token. The hidden states of one token in all layers have this many numbers.

    Args:
        bundle: The model.
        tokens: The length of the sequence in tokens.
        wanted: The kinds of tensors, each with layer indices.
    """
    numbers = 0
    for kind, layers in wanted:
        if kind is InspectKind.ATTENTION_WEIGHTS:
            numbers += len(layers) * bundle.n_heads * tokens * tokens
        elif kind is InspectKind.HIDDEN_STATES:
            numbers += len(layers) * tokens * bundle.d_model
        else:
            numbers += bundle.max_sequence_tokens * bundle.d_model
    return tokens + math.ceil(numbers / ((bundle.n_layers + 1) * bundle.d_model))


@dataclass(slots=True, eq=False)
class InspectPlace:
    """A slot of an `InspectLane`.

    Attributes:
        sender: The caller and the priority.
        running: The run; None until the run starts.
    """

    sender: Sender
    running: "asyncio.Future[Inspection] | None" = None


class InspectLane:
    """Runs inspections of one model, one at a time, in a separate thread and session.

    - An inspection holds a slot from its arrival until its reply is sent. There are `max_pending` slots, which also
      limit the memory of replies. A named caller holds at most half of the slots, so that other callers get slots.
    - Callers take turns by weight.
    - The first inspection loads the graph. If the loading fails, the inspection fails. The next inspection tries again.
    - If a caller disconnects before its inspection starts, the slot is free immediately. A running inspection is not
      interrupted, and keeps its slot.

    The event loop owns everything except `_inspector`, which only the one thread of `_thread` uses.
    """

    def __init__(self, load: Callable[[], Inspector], max_pending: int, observer: InspectObserver) -> None:
        """Set the function that loads the graph. The lane's thread calls `load`, because `load` blocks."""
        self._load = load
        self._observer = observer
        self._places = Pool(max_pending)
        self._count("", 0)
        self._closed = False
        self._last_seconds = _TYPICAL_SECONDS
        self._inspector: Inspector | None = None
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="encserve-inspect", initializer=lower_thread_priority
        )
        # Callers wait here. The executor's queue would keep the inputs of callers that have disconnected.
        self._turns = FairSemaphore(1)

    @contextlib.contextmanager
    def place(self, sender: Sender = ANY_SENDER) -> Iterator[InspectPlace]:
        """Hold a slot until the end of the block. If a run is still going on, hold the slot until the end of the run.

        Raises:
            QueueFull: All slots are taken.
            ShareExceeded: The caller holds its share of the slots.
            EngineUnhealthy: The model is being unloaded.
        """
        self._check_open()
        name, places, delay_s = sender.caller.name, self._places, self._last_seconds
        if places.held >= places.limit:
            raise QueueFull("inspections", 1, places.held, places.limit, delay_s)
        if name and not places.has_room(name, 1, _SHARE):
            held = places.held_by(name)
            raise ShareExceeded(f"caller {name}", 1, held, held, delay_s, "inspections")
        place = InspectPlace(sender)
        self._count(name, 1)
        try:
            yield place
        finally:
            if place.running is None or place.running.done():
                self._count(name, -1)
            else:
                place.running.add_done_callback(lambda _: self._count(name, -1))

    async def run(
        self,
        place: InspectPlace,
        sequence: ModelInput,
        wanted: Wanted,
        attended: int = 0,
        *,
        cost: int = 1,
        on_start: Callable[[], None] = lambda: None,
    ) -> Inspection:
        """Wait for the caller's turn, and run one sequence.

        Args:
            place: The slot of the inspection, from `place`.
            sequence: (seq,) int64 ids or (seq, d_model) float32 vectors, already checked.
            wanted: The kinds of tensors, each with layer indices. The model supports these kinds.
            attended: All tokens attend only to this number of tokens at the start; 0 for no limit.
            cost: The cost, see `inspection_cost`.
            on_start: Called when the wait is over.

        Raises:
            InferenceFailed: The model returned NaN or infinity.
            InspectUnavailable: The graph cannot be loaded: the bundle's files are missing or have changed.
            EngineUnhealthy: The model is being unloaded.
        """
        came_at = time.perf_counter()
        await self._turns.acquire(place.sender, cost)
        self._check_open()
        on_start()
        place.running = asyncio.get_running_loop().run_in_executor(
            self._thread, self._run, sequence, wanted, attended, came_at
        )
        place.running.add_done_callback(lambda _: self._turns.release())
        inspection = await asyncio.shield(place.running)
        self._last_seconds = min(max(inspection.compute_seconds, 0.01), 5.0)
        self._observer.inspected(inspection.compute_seconds)
        return inspection

    async def close(self) -> None:
        """End waiting inspections, wait for the running inspection, and free the session.

        If the graph is still being loaded, `close` does not wait for the end. A second `close` does nothing.
        """
        if self._closed:
            return
        self._closed = True
        for _ in range(self._places.held):
            self._turns.release()  # all waiting inspections wake up, and fail because the lane is closed
        freed = None if self._inspector is None else self._thread.submit(self._inspector.close)
        self._thread.shutdown(wait=False)
        if freed is not None:
            await asyncio.wrap_future(freed)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineUnhealthy("the model is being unloaded")

    def _run(self, sequence: ModelInput, wanted: Wanted, attended: int, came_at: float) -> Inspection:
        if self._inspector is None:
            began = time.perf_counter()
            try:
                self._inspector = self._load()
            except BundleError as error:  # the files have changed since the model was loaded
                logger.error("the inspection graph cannot be loaded", extra={"error": str(error)})
                raise InspectUnavailable(_NOT_LOADABLE) from None
            logger.info("inspector loaded", extra={"load_seconds": round(time.perf_counter() - began, 3)})
        queue_seconds = time.perf_counter() - came_at
        tensors, compute_seconds = self._inspector.run(sequence, wanted, attended=attended)
        _check_finite(tensors)
        return Inspection(tensors, queue_seconds, compute_seconds)

    def _count(self, caller: str, change: int) -> None:
        self._places.add(caller, change)
        self._observer.inspections_changed(self._places.held, self._places.limit)


def _check_finite(tensors: Sequence[InspectTensor]) -> None:
    """Raise InferenceFailed for NaN and infinity. Called in the lane's thread, because the check takes time."""
    for tensor in tensors:
        for i, part in enumerate(tensor.parts):
            if not np.isfinite(part).all():
                layer = f" of layer {tensor.layers[i]}" if tensor.layers else ""
                kind = tensor.kind.name.lower().replace("_", " ")
                raise InferenceFailed(0, f"{InferenceFailed.NOT_FINITE}: {kind}{layer}")
