"""The worker of a job: reads blocks of rows in order, encodes several blocks at the same time, and writes parts."""

import itertools
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from encserve_cli.files.encoding import encode_in_order
from encserve_cli.files.rows import Value
from encserve_cli.job.inputs import read_blocks
from encserve_cli.job.output import write_part
from encserve_cli.job.plan import MakeOptions, ModelFacts, Plan
from encserve_cli.job.store import Store
from encserve_cli.job.types import BatchProgress, Block, Encoded, Encoder, PartReport, Stopped, Work


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
    """Makes the parts of jobs with a loaded model: in this process, through a server, or on a cluster."""

    @property
    def make(self) -> MakeOptions:
        """The options of the output, with all defaults filled in."""

    @property
    def model(self) -> ModelFacts:
        """The model."""

    @property
    def divides_files(self) -> bool:
        """Whether several processes make parts of one file at the same time."""

    def run(self, plan: Plan, store: Store, work: Sequence[Work], on_batch: BatchProgress) -> Reports:
        """Make the parts of `work` in any order. Yield the report of each part after the part is written.

        Raises:
            Stopped: `stop` was called.
            EncserveError, RuntimeError, OSError, ValueError: The job cannot go on. Finished parts stay.
        """

    def stop(self) -> None:
        """Make `run` raise Stopped after the running batches. Any thread and any signal handler may call `stop`."""

    def close(self) -> None:
        """Free the model."""


class LocalWorker:
    """Makes parts in threads of this process, so that reading, tokenizing, computing and writing overlap."""

    divides_files = False

    def __init__(self, make: MakeOptions, model: ModelFacts, encoder: Encoder) -> None:
        """`encoder` runs the model. `close` frees the encoder."""
        self.make = make
        self.model = model
        self.encoder = encoder
        self._stopped = False  # not an Event: a signal handler may call `stop`, and must not wait for a lock

    def run(self, plan: Plan, store: Store, work: Sequence[Work], on_batch: BatchProgress) -> Reports:
        """See `Worker`."""
        blocks = itertools.chain.from_iterable(read_blocks(plan, it, self._check_running) for it in work)
        encode = partial(self._encode, on_batch)
        with closing(encode_in_order(encode, blocks, self.stop)) as encoded:
            for first in encoded:
                yield write_part(plan, store, itertools.chain([first], encoded))

    def _encode(self, on_batch: BatchProgress, block: Block) -> Encoded:
        """Encode the usable rows of a block. The keys of `Encoded.refused` are indices of rows in the block."""
        good: list[int] = []
        values: list[Value] = []
        for index, value in enumerate(block.rows.values):
            if value is not None:
                good.append(index)
                values.append(value)
        counts: list[int] = []

        def count(rows: int, tokens: int) -> None:
            counts.append(rows)
            on_batch(rows, tokens)

        self._check_running()
        encoded = self.encoder.encode(values, count) if values else Encoded(None, {})
        on_batch(len(block.rows.values) - sum(counts), 0)  # rows that were in no batch, such as rejected rows
        return Encoded(encoded.result, {good[index]: error for index, error in encoded.refused.items()})

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
