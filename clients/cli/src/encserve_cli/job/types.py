"""The data of a job, and the interface of its encoders. Ray pickles these objects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from encserve_cli.files.reading import DataFile
from encserve_cli.files.rows import Rows, Value
from encserve_client import EncodeResult, EncserveError

# With --shard, so many parts in a row belong to one shard. On Ray they are the work that an actor gets at a time.
STRIPE_PARTS = 4


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a job.

    Attributes:
        uri: The absolute path, or a URI.
        size_bytes: The size.
        modified_ns: The modification time in ns since 1970; 0 if unknown.
        checksum: The checksum of the contents; see `encserve_cli.files.storage.checksum`.
        rows: The number of rows; None if a job finds it only by reading the file.
    """

    uri: str
    size_bytes: int
    modified_ns: int
    checksum: str
    rows: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """The unit of progress: rows `number * part_rows` and later of one file, which become one file of output.

    Attributes:
        input: The index of the file.
        number: The index of the part in that file.
    """

    input: int
    number: int

    @property
    def name(self) -> str:
        """The name of the output without its suffix. Sorted names are in the order of the rows."""
        return f"part-{self.input:05}-{self.number:06}"


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of one of several commands that do a job together.

    Attributes:
        index: The number of the share, from 0.
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
    """Parts of one file that one worker does in order.

    Attributes:
        input: The index of the file.
        first: The number of the first part.
        end: One more than the number of the last part; None for all parts until the end of the file.
        finished: The numbers of parts that need not be done.
        shard: Only parts of this share are done.
    """

    input: int
    first: int
    end: int | None
    finished: frozenset[int]
    shard: Shard

    def has(self, part: Part) -> bool:
        """Whether a part is to be done."""
        is_inside = part.input == self.input and self.first <= part.number < (self.end or part.number + 1)
        return is_inside and part.number not in self.finished and self.shard.has(part)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a part that are encoded together.

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
        first_rejected: The place of the first rejected row, and the reason; empty if there is none.
    """

    part: Part
    rows: int
    rejected: int
    ends_file: bool
    first_rejected: str = ""


class BatchProgress(Protocol):
    """Called for each batch that is done, from any thread."""

    def __call__(self, rows: int, tokens: int, padded_tokens: int) -> None:
        """Take the numbers of rows, of tokens, and of tokens with padding; 0 for an unknown number."""


@dataclass(slots=True)
class Encoded:
    """The outputs of some values.

    Attributes:
        result: The outputs of the accepted values, in their order; None if there are none.
        refused: The errors of refused values, by index.
    """

    result: EncodeResult | None
    refused: dict[int, EncserveError]


class Stopped(Exception):
    """The job was stopped."""


def ignore_batch(rows: int, tokens: int, padded_tokens: int) -> None:
    """A `BatchProgress` that does nothing."""


class Encoder(Protocol):
    """Computes the outputs of values: a loaded model, or a client. Several threads may use an encoder at a time."""

    def encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        """Encode values, and return when all are done.

        Raises:
            Stopped: `stop` was called.
            EncserveError, RuntimeError: The encoder fails for every value.
        """

    def stop(self) -> None:
        """Make `encode` raise Stopped after the running batches. Any thread and any signal handler may call."""

    def close(self) -> None:
        """Free the encoder."""
