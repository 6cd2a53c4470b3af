"""The data of a job: what it reads, what a part is, and what comes of one. Plain data, so that a plan file holds it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from encserve_client import EncodeResult

InputKind = Literal["text", "ids", "vectors"]
# A text, (seq,) token ids, or (seq, d_model) vectors.
Value = str | list[int] | npt.NDArray[np.float32]

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How rows of files become inputs.

    Attributes:
        input_kind: What an input is.
        column: The column of files that have several; None for "text", or the only one.
        keep: Other columns that come along, by name.
    """

    input_kind: InputKind = "text"
    column: str | None = None
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartLimits:
    """Where a part ends: before the row that would exceed any of these. A part has at least one row.

    Attributes:
        max_rows: The most rows.
        max_text_bytes: The most bytes of inputs: UTF-8 of texts, 8 for each id, 4 for each number of vectors.
        max_output_bytes: The most bytes of output, at most.
        row_bytes: The output of a row, whatever its length.
        token_bytes: The output of each token of a row.
        max_tokens: The most tokens that a row can have.
    """

    max_rows: int = 20_000
    max_text_bytes: int = 16 * MIB
    max_output_bytes: int = 256 * MIB
    row_bytes: int = 0
    token_bytes: int = 0
    max_tokens: int = 0

    def output_bytes(self, most_tokens: int) -> int:
        """The most output of a row that has at most so many tokens: of a text no more than its bytes and 16."""
        return self.row_bytes + self.token_bytes * min(most_tokens, self.max_tokens)


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file, as the planning pass found it.

    Attributes:
        uri: Its absolute path, or a URI.
        size_bytes: Its size.
        modified_ns: When it was last changed, in ns since 1970; 0 if unknown.
        rows: How many rows it has.
        in_order: Whether it can only be read from its beginning: .csv, .tsv and compressed files.
    """

    uri: str
    size_bytes: int
    modified_ns: int
    rows: int
    in_order: bool


@dataclass(frozen=True, slots=True)
class Part:
    """The unit of work: consecutive rows of one file, which become one file of output.

    Attributes:
        input: Which file, from 0.
        number: Which part of that file, from 0.
        first_row: Its first row in the file, from 0.
        rows: How many rows.
        offset: Where it begins in an uncompressed .txt or .jsonl file, in bytes; 0 otherwise.
        length: How many bytes it has there; 0 otherwise.
        text_bytes: The bytes of its inputs, as `PartLimits.max_text_bytes` counts them.
    """

    input: int
    number: int
    first_row: int
    rows: int
    offset: int
    length: int
    text_bytes: int

    @property
    def name(self) -> str:
        """The name of its output without a suffix; sorted, names are in the order of the rows."""
        return f"part-{self.input:05}-{self.number:06}"


@dataclass(frozen=True, slots=True)
class Scan:
    """What the planning pass found.

    Attributes:
        inputs: The files, in the order of the arguments.
        parts: All parts, in order.
        kept_types: The columns that come along, with their Arrow types as `str(type)` has them.
    """

    inputs: tuple[InputFile, ...]
    parts: tuple[Part, ...]
    kept_types: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Rows:
    """The rows of a part.

    Attributes:
        values: For each row its input; None where it has none.
        problems: Why a row has no input, or one that cannot be used, by its place in the part.
        kept: A pyarrow.Table of the columns that come along, a row each; without columns where there are none.
        numbers: Where each row is in its file, from 1: the line, or the row of Parquet.
    """

    values: list[Value | None]
    problems: dict[int, str]
    kept: Any
    numbers: Sequence[int]


class BatchProgress(Protocol):
    """Is told of each batch as it is done; called from any thread."""

    def __call__(self, rows: int, tokens: int, padded_tokens: int) -> None:
        """So many rows, of so many tokens, in so many with padding; 0 where that is not known."""


@dataclass(slots=True)
class Encoded:
    """What was made of some values.

    Attributes:
        result: What was made of those that were not refused, in their order; None where all were.
        refused: Why the others were refused, by their places.
        tokens: How many tokens were computed, padding excluded.
        padded_tokens: The same with padding; 0 where that is not known.
    """

    result: EncodeResult | None
    refused: dict[int, str]
    tokens: int
    padded_tokens: int


class Stopped(Exception):
    """The job is being stopped, so nothing more is encoded."""


def ignore_batch(rows: int, tokens: int, padded_tokens: int) -> None:
    """A `BatchProgress` for callers that show no progress within a part."""


class Encoder(Protocol):
    """Makes vectors of values: an offline model, or a client. Several threads may use it at a time."""

    def encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        """Encodes values of one part; blocks until all are done.

        Raises:
            Stopped: `stop` was called.
            EncserveError, RuntimeError: Nothing can be encoded any more.
        """

    def stop(self) -> None:
        """Has `encode` raise Stopped after the batches that run now; callable from any thread and from signals."""

    def close(self) -> None:
        """Frees what it holds."""


@dataclass(frozen=True, slots=True)
class PartReport:
    """What became of a part.

    Attributes:
        part: Which one.
        rejected: How many of its rows were rejected.
        tokens: How many tokens were computed, padding excluded.
        padded_tokens: The same with padding; 0 where that is not known.
        output_bytes: The size of its file.
        first_rejected: Where the first rejected row stands, and why; empty without one.
    """

    part: Part
    rejected: int
    tokens: int
    padded_tokens: int
    output_bytes: int
    first_rejected: str = ""
