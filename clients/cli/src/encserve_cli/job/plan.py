"""The plan of a job: all settings, saved as `_job.json` in the output.

The settings decide which rows a part has, and which rows share a batch. So a second run writes the missing parts
exactly as the first run would have written them.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from encserve_cli.files.reading import ReadOptions
from encserve_cli.files.rows import MIB
from encserve_cli.files.writing import INPUT_TYPES, RAGGED, output_types
from encserve_cli.job.types import STRIPE_PARTS, InputFile, Part, PartReport, Shard, Work
from encserve_client import Activation, DType, Output, Task

PLAN_NAME = "_job.json"
PLAN_FORMAT = 3
# The rows of a part: for outputs with one vector per input, and for outputs with several. A part takes some seconds to
# a minute.
VECTOR_ROWS, RAGGED_ROWS = 2048, 256
_MOST_PART_BYTES = 512 * MIB
_MOST_PIECES = 64  # the largest number of pieces of a text file that several workers share
# The Arrow types of numbers. For "binary", one value holds 8 numbers.
_ARROW_TYPES: Mapping[DType, Any] = {
    "float32": pa.float32(),
    "float16": pa.float16(),
    "int8": pa.int8(),
    "binary": pa.uint8(),
}


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """The output of each input.

    Attributes:
        kind: The kind of the output, as `Output.kind`; or "scores" for the scores of pairs. "" means the kind that the
            model was trained for. The job replaces "" when the model is known.
        dimensions: Keep only the first `dimensions` numbers of each vector; None for all.
        dtype: The type of the numbers; "binary" packs 8 numbers into a byte.
        task: The task of the texts.
        prompt_name: The name of the prompt before every text; None for the default of the model or the task.
        truncate: Whether to cut an input that is too long. Otherwise the row is rejected.
        exclude_special: For "tokens": whether to leave out the vectors of special tokens.
        activation: For "scores": the function that turns logits into scores; None for the model's own.
    """

    kind: str = ""
    dimensions: int | None = None
    dtype: DType = "float32"
    task: Task | None = None
    prompt_name: str | None = None
    truncate: bool = False
    exclude_special: bool = False
    activation: Activation | None = None

    @property
    def output(self) -> Output:
        """The output as an argument of the client."""
        return Output(self.kind, dimensions=self.dimensions)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model of a job, and the engine that runs the model.

    Attributes:
        model: The name.
        version: The version.
        fingerprint: Identifies the bundle.
        space_id: Identifies the vector space; empty if unknown.
        pooling: The pooling of the output kind "model"; empty if unknown.
        width: The number of numbers in a vector of the output; for "binary" the number of bytes, and for "scores" the
            number of labels.
        max_tokens: The largest number of tokens of an input.
        engine: "server", or an engine of this process.
        precision: The number type of the engine's computations.
        max_batch_tokens: The largest number of tokens in a batch, padding included; 0 for a server.
        threads: The number of CPU threads that compute batches; 0 for a server.
        parallel_batches: The number of batches that run at the same time; 0 for a server.
    """

    model: str
    version: str
    fingerprint: str
    space_id: str
    pooling: str
    width: int
    max_tokens: int
    engine: str = "server"
    precision: str = ""
    max_batch_tokens: int = 0
    threads: int = 0
    parallel_batches: int = 0


def rows_of_part(make: MakeOptions, model: ModelFacts) -> int:
    """Return the number of rows of a part.

    Parts of token vectors have fewer rows, so that a part has at most 512 MiB.
    """
    if make.kind not in RAGGED:
        return VECTOR_ROWS
    row_bytes = model.max_tokens * model.width * np.dtype("u1" if make.dtype == "binary" else make.dtype).itemsize
    return RAGGED_ROWS if make.kind == "sparse" else max(1, min(RAGGED_ROWS, _MOST_PART_BYTES // max(row_bytes, 1)))


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a job.

    Attributes:
        read: The options for reading inputs.
        make: The options of the output.
        model: The model.
        part_rows: The rows of each part. The last part of a file may have fewer.
        kept_types: The Arrow type of each column of --keep, as `str(type)`.
        inputs: The files.
    """

    read: ReadOptions
    make: MakeOptions
    model: ModelFacts
    part_rows: int
    kept_types: Mapping[str, str]
    inputs: tuple[InputFile, ...]

    def rows_of(self, shard: Shard) -> int | None:
        """Return the number of rows of a share of all inputs; None if unknown."""
        stripe = STRIPE_PARTS * self.part_rows
        found = 0
        for index, it in enumerate(self.inputs):
            if it.rows is None:
                return None
            firsts = (first for first in range(0, it.rows, stripe) if shard.has(Part(index, first // self.part_rows)))
            found += sum(min(stripe, it.rows - first) for first in firsts)
        return found

    def fields(self) -> list[tuple[str, Any]]:
        """Return (name, Arrow type) of the columns of a part, without the columns of --keep."""
        number = _ARROW_TYPES[self.make.dtype]
        return [
            *INPUT_TYPES[self.read.input_kind].items(),
            *output_types(self.make.kind, number, self.model.width).items(),
        ]

    def metadata(self) -> dict[str, str]:
        """Return the metadata of every part's schema."""
        make, model = self.make, self.model
        return {
            "model": model.model,
            "version": model.version,
            "fingerprint": model.fingerprint,
            "space_id": model.space_id,
            "kind": make.kind,
            "pooling": model.pooling if make.kind == "model" else "",
            "engine": model.engine,
            "precision": model.precision,
            "options": json.dumps(dataclasses.asdict(make), ensure_ascii=False),
        }

    def work(self, finished: Mapping[Part, PartReport], shard: Shard, *, divided: bool) -> list[Work]:
        """Return the missing parts of a share, in order.

        Args:
            finished: The finished parts.
            shard: The share.
            divided: Whether to divide files with a known number of rows into pieces for several workers.
        """
        found = []
        by_input: list[dict[int, PartReport]] = [{} for _ in self.inputs]
        for part, report in finished.items():
            by_input[part.input][part.number] = report
        for index, (it, done) in enumerate(zip(self.inputs, by_input, strict=True)):
            end = self._end_of(it, done)
            if end is None or not divided:
                found.append(Work(index, 0, end, frozenset(done), shard))
                continue
            # A worker finds its piece of a text file by reading all lines before the piece, so there are few pieces.
            most = 10**6 if it.uri.lower().endswith(".parquet") else _MOST_PIECES
            piece = max(STRIPE_PARTS, -(-end // most))
            for first in range(0, end, piece):
                last = min(first + piece, end)
                found.append(Work(index, first, last, frozenset(done).intersection(range(first, last)), shard))
        return [
            it
            for it in found
            if it.end is None or any(it.has(Part(it.input, number)) for number in range(it.first, it.end))
        ]

    def _end_of(self, file: InputFile, done: Mapping[int, PartReport]) -> int | None:
        """Return the number of parts of a file; None if unknown."""
        if file.rows is not None:
            return -(-file.rows // self.part_rows)
        return next((number + 1 for number, report in done.items() if report.ends_file), None)

    def to_json(self) -> str:
        """Return the text of `_job.json`."""
        return json_text({"format": PLAN_FORMAT} | dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: bytes, where: str) -> "Plan":
        """Read a `_job.json`.

        Raises:
            ValueError: The text is not the plan of a job, or is from another version of encserve.
        """
        try:
            found = json.loads(text)
            if found["format"] != PLAN_FORMAT:
                raise ValueError(f"format must be {PLAN_FORMAT} in this version of encserve; was {found['format']}")
            return cls(
                ReadOptions(**found["read"] | {"keep": tuple(found["read"]["keep"])}),
                MakeOptions(**found["make"]),
                ModelFacts(**found["model"]),
                int(found["part_rows"]),
                dict(found["kept_types"]),
                tuple(InputFile(**it) for it in found["inputs"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{where}: is not the plan of a job: {error}; begin again with --overwrite") from error


def json_text(value: Any, indent: int | None = None) -> str:
    """Return JSON. Bytes of file names that are not valid UTF-8 are escaped."""
    return json.dumps(value, ensure_ascii=False, indent=indent).encode(errors="backslashreplace").decode()


def differences(plan: Plan, read: ReadOptions, make: MakeOptions, model: ModelFacts) -> list[str]:
    """Return a message for each setting that differs from the plan."""
    return [*_changed("", plan.read, read), *_changed("", plan.make, make), *_changed("model: ", plan.model, model)]


def _changed(prefix: str, was: Any, now: Any) -> Iterator[str]:
    for field in dataclasses.fields(was):
        old, new = getattr(was, field.name), getattr(now, field.name)
        if old != new:
            yield f"{prefix}{field.name} is {new!r}; the job has {old!r}"


def match_inputs(
    before: Sequence[InputFile], now: Sequence[InputFile]
) -> tuple[list[InputFile | None], list[InputFile]]:
    """Find the files of a plan among the current files.

    Two files are the same if size and checksum are equal. The path and the time do not matter.

    Returns:
        For each file of the plan, the current file or None. Then the current files that are not in the plan, in order.
    """
    given: dict[tuple[int, str], list[InputFile]] = {}
    for it in reversed(now):
        given.setdefault((it.size_bytes, it.checksum), []).append(it)
    found = [same.pop() if (same := given.get((it.size_bytes, it.checksum))) else None for it in before]
    left = {id(it) for its in given.values() for it in its}
    return found, [it for it in now if id(it) in left]
