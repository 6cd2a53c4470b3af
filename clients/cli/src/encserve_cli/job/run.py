"""The loop of a job: parts are read in order, a few at a time are encoded and written, and each is reported."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Protocol

from encserve_cli.job.inputs import PartReader
from encserve_cli.job.output import REJECTED, PartWriter
from encserve_cli.job.plan import Plan
from encserve_cli.job.store import Store
from encserve_cli.job.types import BatchProgress, Encoded, Encoder, Part, PartReport, Rows, Value

PLAN_NAME = "_plan.json"
# One is computed, one is tokenized or waits, one is written; a fourth is being read.
_PARTS_AT_ONCE = 3


class TooManyRejected(ValueError):
    """More rows were rejected than the job allows."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job is.

    Attributes:
        rows: The rows that are done, those of earlier runs included; of parts that run, those that are computed.
        total_rows: The rows of the job.
        parts: The parts that are done.
        total_parts: The parts of the job.
        rejected: The rows that were rejected.
        tokens: The tokens that this run computed, padding excluded.
        padding: The share of padding in what this run computed, from 0 to 1; None where that is not known.
        seconds: How long this run computes already.
        seconds_left: How long the rest will take at the speed so far; None while it is unknown.
    """

    rows: int
    total_rows: int
    parts: int
    total_parts: int
    rejected: int
    tokens: int
    padding: float | None
    seconds: float
    seconds_left: float | None

    @property
    def tokens_per_second(self) -> float:
        """The speed of this run."""
        return self.tokens / self.seconds if self.seconds else 0.0


OnProgress = Callable[[JobProgress], None]


@dataclass(frozen=True, slots=True)
class JobSummary:
    """What became of a job.

    Attributes:
        output: Its folder.
        rows: The rows that have their place in the output, rejected ones included.
        rejected: Of these the rejected ones; `_rejected/` says which and why.
        first_rejected: Where one of these stands, and why; empty where this run rejected nothing.
        parts: How many files there are.
        parts_before: How many of them an earlier run made.
        tokens: The tokens that this run computed, padding excluded.
        seconds: How long this run took.
        plan: The job.
    """

    output: str
    rows: int
    rejected: int
    first_rejected: str
    parts: int
    parts_before: int
    tokens: int
    seconds: float
    plan: Plan


class Runner(Protocol):
    """Does parts, in this process or elsewhere."""

    def run(self, parts: Sequence[Part], on_batch: BatchProgress) -> Iterator[PartReport]:
        """Does all parts, in any order, and reports each once it is written.

        Raises:
            Stopped: `stop` was called.
            EncserveError, RuntimeError, OSError, ValueError: The job cannot go on; what is done stays done.
        """

    def stop(self) -> None:
        """Has `run` raise Stopped after the batches that run now; callable from any thread and from signals."""

    def close(self) -> None:
        """Frees what it holds."""


class PartWorker:
    """Does one part after another: reads, encodes, writes. Several threads may use it at a time."""

    def __init__(self, plan: Plan, encoder: Encoder, store: Store) -> None:
        """Takes the job, what encodes, and where the output goes."""
        self._encoder = encoder
        self._reader = PartReader(plan.inputs, plan.read, plan.kept_types)
        self._reading = threading.Lock()
        self._writer = PartWriter(plan, store)

    def read(self, part: Part) -> Rows:
        """Reads a part; it costs least if parts are read in order."""
        with self._reading:
            return self._reader.read(part)

    def encode(self, part: Part, rows: Rows, on_batch: BatchProgress) -> PartReport:
        """Encodes and writes the rows of a part."""
        good = [place for place in range(part.rows) if place not in rows.problems]
        values: list[Value] = [value for place in good if (value := rows.values[place]) is not None]
        encoded = self._encoder.encode(values, on_batch) if values else Encoded(None, {}, 0, 0)
        refused = {good[place]: why for place, why in encoded.refused.items()}
        return self._writer.write(part, rows, replace(encoded, refused=refused))

    def do(self, part: Part, on_batch: BatchProgress) -> PartReport:
        """Reads, encodes and writes a part."""
        return self.encode(part, self.read(part), on_batch)

    def stop(self) -> None:
        """Has parts that are being encoded raise Stopped."""
        self._encoder.stop()

    def close(self) -> None:
        """Frees the encoder and the files."""
        self._reader.close()
        self._encoder.close()


class LocalRunner:
    """Does parts in threads of this process, so that reading, tokenizing, computing and writing overlap."""

    def __init__(self, worker: PartWorker) -> None:
        """Takes what does a part."""
        self._worker = worker

    def run(self, parts: Sequence[Part], on_batch: BatchProgress) -> Iterator[PartReport]:
        """See `Runner`."""
        running: set[Future[PartReport]] = set()
        with ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="encserve-part") as pool:
            try:
                for part in parts:
                    rows = self._worker.read(part)
                    running.add(pool.submit(self._worker.encode, part, rows, on_batch))
                    del rows
                    if len(running) >= _PARTS_AT_ONCE:
                        yield from _finished(running)
                while running:
                    yield from _finished(running)
            except BaseException:
                self._worker.stop()
                raise

    def stop(self) -> None:
        """See `Runner`."""
        self._worker.stop()

    def close(self) -> None:
        """See `Runner`."""
        self._worker.close()


def _finished(running: set[Future[PartReport]]) -> Iterator[PartReport]:
    """Waits for a part, and takes those that are done out."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    running -= done
    for future in done:
        yield future.result()


def missing_parts(plan: Plan, store: Store) -> list[Part]:
    """The parts whose files are not there."""
    there = store.names()
    return [part for part in plan.parts if f"{part.name}.parquet" not in there]


def run_parts(
    plan: Plan,
    store: Store,
    runner: Runner,
    *,
    on_progress: OnProgress | None = None,
    max_rejected: int | None = None,
) -> JobSummary:
    """Does what is missing of a job.

    Raises:
        TooManyRejected: More than `max_rejected` rows were rejected, those of earlier runs included.
        Exception: Whatever `Runner.run` raises.
    """
    began = time.monotonic()
    missing = missing_parts(plan, store)
    books = _Books(plan, missing, _rejected_before(plan, store, missing), on_progress)
    books.check(max_rejected)
    for report in runner.run(missing, books.batch) if missing else ():
        books.done(report)
        books.check(max_rejected)
    return JobSummary(
        output=store.uri,
        rows=plan.rows,
        rejected=books.rejected,
        first_rejected=books.first_rejected,
        parts=len(plan.parts),
        parts_before=len(plan.parts) - len(missing),
        tokens=books.tokens,
        seconds=time.monotonic() - began,
        plan=plan,
    )


def _rejected_before(plan: Plan, store: Store, missing: Iterable[Part]) -> int:
    """The rejected rows of the parts that are done."""
    done = {f"{part.name}.jsonl" for part in plan.parts} - {f"{part.name}.jsonl" for part in missing}
    return sum((store.read(f"{REJECTED}/{name}") or "").count("\n") for name in done & store.names(REJECTED).keys())


class _Books:
    """What has been done; batches are counted from any thread."""

    def __init__(self, plan: Plan, missing: Sequence[Part], rejected: int, on_progress: OnProgress | None) -> None:
        self._plan = plan
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._left_rows = sum(part.rows for part in missing)
        self._left_parts = len(missing)
        self._total_rows = self._left_rows
        self._batch_rows = self._batch_tokens = self._batch_padded = 0
        self._done_rows = 0  # of parts that this run has done
        self.rejected = rejected
        self.first_rejected = ""
        self.tokens = 0
        self._padded = 0

    def batch(self, rows: int, tokens: int, padded_tokens: int) -> None:
        """Counts a batch of a part that runs."""
        with self._lock:
            self._batch_rows += rows
            self._batch_tokens += tokens
            self._batch_padded += padded_tokens
        self._report()

    def done(self, report: PartReport) -> None:
        """Counts a part."""
        with self._lock:
            self._left_parts -= 1
            self._left_rows -= report.part.rows
            self._done_rows += report.part.rows
            self.rejected += report.rejected
            self.tokens += report.tokens
            self._padded += report.padded_tokens
            self.first_rejected = self.first_rejected or report.first_rejected
        self._report()

    def check(self, max_rejected: int | None) -> None:
        """Raises TooManyRejected."""
        if max_rejected is not None and self.rejected > max_rejected:
            example = f", such as {self.first_rejected}" if self.first_rejected else ""
            raise TooManyRejected(
                f"{self.rejected:,} rows were rejected, more than --max-rejected {max_rejected:,}{example}; "
                f"{REJECTED}/ in the output names all of them"
            )

    def _report(self) -> None:
        if self._on_progress is None:
            return
        with self._lock:
            seconds = time.monotonic() - self._began
            # A part's rows without a batch of their own, such as rejected ones, count when the part is done.
            rows = min(max(self._done_rows, self._batch_rows), self._total_rows)
            tokens, padded = max(self.tokens, self._batch_tokens), max(self._padded, self._batch_padded)
            progress = JobProgress(
                rows=self._plan.rows - self._total_rows + rows,
                total_rows=self._plan.rows,
                parts=len(self._plan.parts) - self._left_parts,
                total_parts=len(self._plan.parts),
                rejected=self.rejected,
                tokens=tokens,
                padding=1 - tokens / padded if padded else None,
                seconds=seconds,
                seconds_left=seconds * (self._total_rows - rows) / rows if rows else None,
            )
        self._on_progress(progress)
