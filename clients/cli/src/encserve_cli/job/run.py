"""The loop of a job: reads blocks of rows in order, encodes several blocks at the same time, and writes parts."""

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from encserve_cli.files.rows import Value
from encserve_cli.job.inputs import read_blocks
from encserve_cli.job.output import REJECTED, write_part
from encserve_cli.job.plan import MakeOptions, ModelFacts, Plan
from encserve_cli.job.store import Store
from encserve_cli.job.types import BatchProgress, Block, Encoded, Encoder, Part, PartReport, Stopped, Work
from encserve_cli.progress import OnProgress, ProgressCounter

# One block is computed, one is tokenized or waits, and one is written. Meanwhile a fourth block is read.
_BLOCKS_AT_ONCE = 3


class TooManyRejected(ValueError):
    """More rows were rejected than the job allows."""


Reports = Generator[PartReport, None, None]


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The result of a job, or of a share of a job.

    Attributes:
        output: The folder.
        rows: The number of rows in the output, rejected rows included.
        rejected: The number of rejected rows; `_rejected/` has the reasons.
        first_rejected: The file, line and reason of one rejected row; "" if this run rejected no row.
        parts: The number of files in the output.
        parts_before: The number of files from earlier runs.
        tokens: The number of tokens that this run computed, without padding.
        seconds: The duration of this run.
        plan: The plan of the job.
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


class Worker(Protocol):
    """Does the parts of jobs with a loaded model: in this process, through a server, or on a cluster."""

    @property
    def make(self) -> MakeOptions:
        """The output of each input, with all defaults filled in."""

    @property
    def model(self) -> ModelFacts:
        """The model."""

    @property
    def divides_files(self) -> bool:
        """Whether several processes do parts of one file at the same time."""

    def run(self, plan: Plan, store: Store, work: Sequence[Work], on_batch: BatchProgress) -> Reports:
        """Do all work in any order. Yield the report of each part after the part is written.

        Raises:
            Stopped: `stop` was called.
            EncserveError, RuntimeError, OSError, ValueError: The job cannot go on. Finished parts stay.
        """

    def stop(self) -> None:
        """Make `run` raise Stopped after the running batches. Any thread and any signal handler may call."""

    def close(self) -> None:
        """Free the model."""


class LocalWorker:
    """Does parts in threads of this process, so that reading, tokenizing, computing and writing overlap."""

    divides_files = False

    def __init__(self, make: MakeOptions, model: ModelFacts, encoder: Encoder) -> None:
        """`encoder` runs the model. `close` frees the encoder."""
        self.make = make
        self.model = model
        self.encoder = encoder
        self._stopped = False  # not an Event: a signal handler may call `stop`

    def run(self, plan: Plan, store: Store, work: Sequence[Work], on_batch: BatchProgress) -> Reports:
        """See `Worker`."""
        blocks = itertools.chain.from_iterable(read_blocks(plan, it, self._check_running) for it in work)
        with closing(self._encoded(blocks, on_batch)) as encoded:
            for first in encoded:
                yield write_part(plan, store, itertools.chain([first], encoded))

    def _encoded(
        self, blocks: Iterator[Block], on_batch: BatchProgress
    ) -> Generator[tuple[Block, Encoded], None, None]:
        """Yield blocks with their outputs, in order."""
        waiting: deque[tuple[Block, Future[Encoded]]] = deque()
        failure: list[Exception] = []
        with ThreadPoolExecutor(_BLOCKS_AT_ONCE, thread_name_prefix="encserve-block") as pool:
            try:
                for block in _until_failure(blocks, failure):
                    waiting.append((block, pool.submit(self._encode, block, on_batch)))
                    if len(waiting) == _BLOCKS_AT_ONCE:
                        first, future = waiting.popleft()
                        yield first, future.result()
                for first, future in waiting:
                    yield first, future.result()
                if failure:
                    raise failure[0]
            except BaseException:
                self.stop()
                raise

    def _encode(self, block: Block, on_batch: BatchProgress) -> Encoded:
        """Encode the usable rows of a block. The keys of `Encoded.refused` are indices of rows in the block."""
        good: list[int] = []
        values: list[Value] = []
        for index, value in enumerate(block.rows.values):
            if value is not None:
                good.append(index)
                values.append(value)
        counts: list[int] = []

        def count(rows: int, tokens: int, padded_tokens: int) -> None:
            counts.append(rows)
            on_batch(rows, tokens, padded_tokens)

        self._check_running()
        encoded = self.encoder.encode(values, count) if values else Encoded(None, {})
        on_batch(len(block.rows.values) - sum(counts), 0, 0)  # rows that were in no batch, such as rejected rows
        return Encoded(encoded.result, {good[index]: why for index, why in encoded.refused.items()})

    def _check_running(self) -> None:
        if self._stopped:
            raise Stopped

    def stop(self) -> None:
        """See `Worker`."""
        self._stopped = True
        self.encoder.stop()

    def close(self) -> None:
        """See `Worker`."""
        self.encoder.close()


def _until_failure(blocks: Iterator[Block], failure: list[Exception]) -> Iterator[Block]:
    """Yield blocks. If a file cannot be read, add the error to `failure` and end, so earlier rows are not lost."""
    try:
        yield from blocks
    except (ValueError, OSError) as error:
        failure.append(error)


class JobRun:
    """One run of a job: counts parts, and makes the summary.

    Attributes:
        counter: Counts the rows, and reports the progress.
    """

    def __init__(
        self, plan: Plan, finished: Mapping[Part, PartReport], *, total_rows: int | None, on_progress: OnProgress | None
    ) -> None:
        """Begin a run.

        Args:
            plan: The job.
            finished: The parts from earlier runs.
            total_rows: The number of rows of the complete output; None if unknown.
            on_progress: See `encserve_cli.job.embed_files`.
        """
        self.counter = ProgressCounter(
            total_rows,
            on_progress,
            rows=sum(it.rows for it in finished.values()),
            parts=len(finished),
            rejected=sum(it.rejected for it in finished.values()),
        )
        self._plan = plan
        self._parts_before = len(finished)
        self._first_rejected = ""

    def count_part(self, report: PartReport) -> None:
        """Count a written part."""
        self._first_rejected = self._first_rejected or report.first_rejected
        self.counter.count_part(report.rows, report.rejected)

    def check_rejected(self, most: int | None) -> None:
        """Raise TooManyRejected if more than `most` rows were rejected."""
        if most is not None and self.counter.rejected > most:
            example = f", such as {self._first_rejected}" if self._first_rejected else ""
            raise TooManyRejected(
                f"{self.counter.rejected:,} rows were rejected, more than --max-rejected {most:,}{example}; "
                f"{REJECTED}/ in the output lists all rejected rows"
            )

    def summary(self, output: str) -> JobSummary:
        """Return the result of the job. `output` is the folder."""
        return JobSummary(
            output=output,
            rows=self.counter.rows,
            rejected=self.counter.rejected,
            first_rejected=self._first_rejected,
            parts=self.counter.parts,
            parts_before=self._parts_before,
            tokens=self.counter.tokens,
            seconds=self.counter.seconds,
            plan=self._plan,
        )
