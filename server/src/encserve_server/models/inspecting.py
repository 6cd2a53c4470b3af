"""Looking into a model: a lane of its own, so that it never holds up encoding."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from encserve_server.engine.base import Inspector
from encserve_server.errors import (
    BundleError,
    EngineUnhealthy,
    FieldPath,
    InferenceFailed,
    InspectUnavailable,
    Part,
    QueueFull,
)
from encserve_server.system.cpus import lower_thread_priority
from encserve_server.types.arrays import ModelInput
from encserve_server.types.inspections import InspectKind, InspectTensor

logger = logging.getLogger(__name__)

Wanted = Sequence[tuple[InspectKind, tuple[int, ...]]]

_NOT_LOADABLE = "the model cannot be inspected: its graph for it cannot be loaded any more; the server's log says why"
# Until one has run, when trying again may help.
_TYPICAL_SECONDS = 0.2


class InspectObserver(Protocol):
    """Receives what becomes of inspections; called on the event loop."""

    def inspections_changed(self, pending: int, limit: int) -> None:
        """So many are waiting, running, or being sent now, of at most `limit`."""

    def inspected(self, compute_seconds: float) -> None:
        """One has run for so long."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What an inspection gave.

    Attributes:
        tensors: One for each kind that was wanted.
        queue_seconds: How long it waited for its turn; of the first one the model's second graph was loaded meanwhile.
        compute_seconds: How long the model ran.
    """

    tensors: list[InspectTensor]
    queue_seconds: float
    compute_seconds: float


class InspectLane:
    """Runs inspections of one model, one at a time, in a thread and a session of their own.

    - An inspection is admitted or refused at once: no more than `max_pending` are waiting, running, or being sent to
      their callers, whose memory this bounds too.
    - The graph is loaded when the first one comes; if that fails, so does the inspection, and the next one tries again.
    - A caller that goes while it waits is forgotten at once; a run is never interrupted, and keeps its place.

    Everything here belongs to the event loop but `_inspector`, which only the one thread of `_thread` touches.
    """

    def __init__(self, load: Callable[[], Inspector], max_pending: int, observer: InspectObserver) -> None:
        """`load` loads the graph; it blocks, and is called in the lane's thread."""
        self._load = load
        self._max_pending = max_pending
        self._observer = observer
        self._pending = 0
        self._count(0)
        self._closed = False
        self._last_seconds = _TYPICAL_SECONDS
        self._inspector: Inspector | None = None
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="encserve-inspect", initializer=lower_thread_priority
        )
        # The callers wait here, not in the thread's own queue, which would keep the inputs of those that went.
        self._turn = asyncio.Semaphore(1)

    @contextlib.asynccontextmanager
    async def inspect(
        self, sequence: ModelInput, wanted: Wanted, attended: int = 0, on_start: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[Inspection]:
        """Runs one sequence; its place in the lane is given back when the block ends, and nothing of it runs any more.

        Args:
            sequence: (seq,) int64 ids or (seq, d_model) float32 vectors, checked by the caller.
            wanted: Kinds that the model has, each with its layers.
            attended: How many of its first tokens all of its tokens see; 0 for all.
            on_start: Called when its turn has come.

        Raises:
            QueueFull: Too many are pending.
            InferenceFailed: The model gives numbers that are not finite.
            InspectUnavailable: The graph cannot be loaded: the bundle's files are gone or altered.
            EngineUnhealthy: The lane is closed.
            Exception: Whatever loading or running raises.
        """
        self._check_open()
        if self._pending >= self._max_pending:
            raise QueueFull("inspections", 1, self._pending, self._max_pending, self._last_seconds)
        self._count(1)
        run: asyncio.Future[Inspection] | None = None
        try:
            came_at = time.perf_counter()
            await self._turn.acquire()
            self._check_open()
            on_start()
            run = asyncio.get_running_loop().run_in_executor(
                self._thread, self._run, sequence, wanted, attended, came_at
            )
            run.add_done_callback(lambda _: self._turn.release())
            inspection = await asyncio.shield(run)
            self._last_seconds = min(max(inspection.compute_seconds, 0.01), 5.0)
            self._observer.inspected(inspection.compute_seconds)
            yield inspection
        finally:
            if run is None or run.done():
                self._count(-1)
            else:
                run.add_done_callback(lambda _: self._count(-1))

    async def close(self) -> None:
        """Fails what waits, waits for what runs, but not for a load, and frees the session. Callable again."""
        if self._closed:
            return
        self._closed = True
        for _ in range(self._pending):
            self._turn.release()  # all that wait wake up, and find the lane closed
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
            except BundleError as error:  # its files are gone or altered since the model was loaded
                logger.error("the graph for inspections cannot be loaded", extra={"error": str(error)})
                raise InspectUnavailable(_NOT_LOADABLE) from None
            logger.info("inspector loaded", extra={"load_seconds": round(time.perf_counter() - began, 3)})
        queue_seconds = time.perf_counter() - came_at
        tensors, compute_seconds = self._inspector.run(sequence, wanted, attended=attended)
        _check_finite(tensors)
        return Inspection(tensors, queue_seconds, compute_seconds)

    def _count(self, change: int) -> None:
        self._pending += change
        self._observer.inspections_changed(self._pending, self._max_pending)


def _check_finite(tensors: Sequence[InspectTensor]) -> None:
    """Refuses NaN and infinity, and says of which tensor and layer; in the lane's thread, because it takes time."""
    for tensor in tensors:
        for i, part in enumerate(tensor.parts):
            if not np.isfinite(part).all():
                layer = f" of layer {tensor.layers[i]}" if tensor.layers else ""
                what = tensor.kind.name.lower().replace("_", " ")
                problem = "{input}: the model's numbers for it are not finite: {what}"
                raise InferenceFailed(problem, input=FieldPath(Part.INPUT, 0), what=what + layer)
