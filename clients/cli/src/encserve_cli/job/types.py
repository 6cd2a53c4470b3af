"""The data of a job, and the interface of its encoders. Ray pickles these objects."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from encserve_cli.files.reading import DataFile
from encserve_cli.files.rows import Rows, Value
from encserve_client import EncodeResult, EncserveError

# With --shard, this many successive parts belong to one shard. On Ray, an actor gets this many parts at a time.
STRIPE_PARTS = 4


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a job.

    Attributes:
        uri: The absolute path, or a URI.
        size_bytes: The size, in bytes.
        modified_ns: The modification time in ns since 1970; 0 if unknown.
        checksum: The checksum of the contents; see `encserve_cli.files.storage.checksum`.
        rows: The number of rows; None if the number is unknown without reading the whole file.
    """

    uri: str
    size_bytes: int
    modified_ns: int
    checksum: str
    rows: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """The unit of progress: `part_rows` rows of one file, from row `number * part_rows`. A part is one output file.

    Attributes:
        input: The index of the file.
        number: The index of the part in the input file.
    """

    input: int
    number: int

    @property
    def name(self) -> str:
        """The name of the output file, without suffix. Sorted names have the order of the rows."""
        return f"part-{self.input:05}-{self.number:06}"


@dataclass(frozen=True, slots=True)
class Shard:
    """One share of a job that is split between several commands.

    Attributes:
        index: The index of the share, from 0.
        count: The number of shares.

    Raises:
        ValueError: There is no such share.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        """Check the share."""
        if self.index not in range(self.count):
            raise ValueError(f"shard must be (I, N) with I from 0 to N-1, as (0, 8); was ({self.index}, {self.count})")

    def has(self, part: Part) -> bool:
        """Whether a part belongs to this share."""
        return (part.input + part.number // STRIPE_PARTS) % self.count == self.index


@dataclass(frozen=True, slots=True)
class Work:
    """Parts of one file for one worker, in order.

    Attributes:
        input: The index of the file.
        first: The number of the first part.
        end: One more than the number of the last part; None for all parts until the end of the file.
        finished: The numbers of the parts that are already finished.
        shard: The worker makes only parts of this share.
    """

    input: int
    first: int
    end: int | None
    finished: frozenset[int]
    shard: Shard

    def has(self, part: Part) -> bool:
        """Whether the worker must do a part."""
        is_inside = part.input == self.input and self.first <= part.number < (self.end or part.number + 1)
        return is_inside and part.number not in self.finished and self.shard.has(part)

    def without(self, parts: Iterable[Part]) -> "Work":
        """Return this work without these parts, which are finished."""
        return replace(self, finished=self.finished.union(it.number for it in parts))


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one part that are encoded together.

    Attributes:
        part: The part.
        rows: The rows.
        file: The file of the rows.
        ends_part: Whether these are the last rows of the part.
        ends_file: Whether these are the last rows of the file.
    """

    part: Part
    rows: Rows
    file: DataFile
    ends_part: bool
    ends_file: bool


@dataclass(frozen=True, slots=True)
class PartReport:
    """The result of a part.

    Attributes:
        part: The part.
        rows: The number of rows.
        rejected: The number of rejected rows.
        ends_file: Whether the last row of the file is in the part.
        first_rejected: The file, line and reason of the first rejected row; "" without one.
    """

    part: Part
    rows: int
    rejected: int
    ends_file: bool
    first_rejected: str = ""


class BatchProgress(Protocol):
    """A function that is called after each batch, from any thread."""

    def __call__(self, rows: int, tokens: int) -> None:
        """Arguments: the number of rows, and of tokens without padding; 0 if unknown."""


@dataclass(slots=True)
class Encoded:
    """The outputs of some values.

    Attributes:
        result: The outputs of the accepted values, in order; None if no value was accepted.
        refused: The errors of refused values, by index.
    """

    result: EncodeResult | None
    refused: dict[int, EncserveError]


class Stopped(Exception):
    """The job was stopped."""


def ignore_batch(rows: int, tokens: int) -> None:
    """A `BatchProgress` that does nothing."""


class Encoder(Protocol):
    """Computes the outputs of values, with a loaded model or a client. Several threads may use an encoder."""

    def encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        """Encode values. Return when all values are encoded or refused.

        Raises:
            Stopped: `stop` was called.
            EncserveError, RuntimeError: The encoder fails for every value.
        """

    def stop(self) -> None:
        """Make `encode` raise Stopped after the running batches. Any thread and any signal handler may call `stop`."""

    def close(self) -> None:
        """Free the encoder."""
