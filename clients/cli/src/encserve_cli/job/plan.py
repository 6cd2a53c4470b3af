"""The settings of a job, which `_job.json` in the output holds.

The settings decide which rows a part has and how they are cut into batches. So a job that is run again writes the
missing parts as the first run would have written them.
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
from encserve_client import DType, Output, Task

PLAN_NAME = "_job.json"
PLAN_FORMAT = 3
# The rows of a part, for outputs of one vector and for outputs of any number of rows. Some seconds to a minute each.
VECTOR_ROWS, RAGGED_ROWS = 2048, 256
_MOST_PART_BYTES = 512 * MIB
_MOST_PIECES = 64  # of a text file that several workers share
# The Arrow types of numbers; one of "binary" holds 8.
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
        kind: The kind of the output, as `Output.kind`.
        dimensions: The numbers that are left of a row; None for all.
        dtype: The type of the numbers; "binary" packs 8 into a byte.
        task: The task of the texts.
        prompt_name: The name of the prompt before every text; None for the default of the model or the task.
        truncate: Whether an input that is too long is cut. Otherwise its row is rejected.
        exclude_special: Whether "tokens" leaves out the rows of special tokens.
    """

    kind: str = "model"
    dimensions: int | None = None
    dtype: DType = "float32"
    task: Task | None = None
    prompt_name: str | None = None
    truncate: bool = False
    exclude_special: bool = False

    @property
    def output(self) -> Output:
        """The output as the client takes it."""
        return Output(self.kind, dimensions=self.dimensions)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model of a job, and the engine that runs the model.

    Attributes:
        model: The name.
        version: The version.
        fingerprint: Identifies the bundle.
        space_id: Identifies the vector space; empty if unknown.
        pooling: The pooling of "model"; empty if unknown.
        width: The numbers of a row of the output; of "binary" the bytes.
        max_tokens: The longest input, in tokens.
        engine: "server", or an engine of this process.
        precision: The type of the engine's numbers.
        max_batch_tokens: The most padded tokens of a batch; 0 for a server.
        threads: The CPU threads that run batches; 0 for a server.
        parallel_batches: The batches that run at a time; 0 for a server.
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
    """Return the number of rows of a part: fewer for long rows of tokens, so that a part has at most 512 MiB."""
    if make.kind not in RAGGED:
        return VECTOR_ROWS
    row_bytes = model.max_tokens * model.width * np.dtype("u1" if make.dtype == "binary" else make.dtype).itemsize
    return RAGGED_ROWS if make.kind == "sparse" else max(1, min(RAGGED_ROWS, _MOST_PART_BYTES // max(row_bytes, 1)))


@dataclass(frozen=True, slots=True)
class Plan:
    """A job.

    Attributes:
        read: The options for reading inputs.
        make: The output of each input.
        model: The model.
        part_rows: The rows of each part but the last of a file.
        kept_types: The columns of --keep with their Arrow types, as `str(type)` gives them.
        inputs: The files.
    """

    read: ReadOptions
    make: MakeOptions
    model: ModelFacts
    part_rows: int
    kept_types: Mapping[str, str]
    inputs: tuple[InputFile, ...]

    def rows_of(self, shard: Shard) -> int | None:
        """Return the number of rows of a share of all inputs; None if it is not known."""
        stripe = STRIPE_PARTS * self.part_rows
        found = 0
        for index, it in enumerate(self.inputs):
            if it.rows is None:
                return None
            firsts = (first for first in range(0, it.rows, stripe) if shard.has(Part(index, first // self.part_rows)))
            found += sum(min(stripe, it.rows - first) for first in firsts)
        return found

    def fields(self) -> list[tuple[str, Any]]:
        """Return the columns of every part that the job adds to --keep, with their Arrow types."""
        inputs = {"text": "text", "ids": "ids"}.get(self.read.input_kind)
        number = _ARROW_TYPES[self.make.dtype]
        return [
            *([(inputs, INPUT_TYPES[inputs])] if inputs else []),
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
            finished: The parts that are done.
            shard: The share.
            divided: Whether files are divided into pieces for several workers, as far as their rows are counted.
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
            # Each piece of a text file is found by reading the lines before it.
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
        """Return the number of parts of a file; None if it is not known yet."""
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
            ValueError: It is not the file of a job, or of another version of encserve; the text names it.
        """
        try:
            found = json.loads(text)
            if found["format"] != PLAN_FORMAT:
                raise ValueError(f"its format is {found['format']}; this version of encserve has {PLAN_FORMAT}")
            return cls(
                ReadOptions(**found["read"] | {"keep": tuple(found["read"]["keep"])}),
                MakeOptions(**found["make"]),
                ModelFacts(**found["model"]),
                int(found["part_rows"]),
                dict(found["kept_types"]),
                tuple(InputFile(**it) for it in found["inputs"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{where}: is not the file of a job: {error}; --overwrite begins again") from error


def json_text(value: Any, indent: int | None = None) -> str:
    """Return JSON. Names of files that are not valid UTF-8 are escaped."""
    return json.dumps(value, ensure_ascii=False, indent=indent).encode(errors="backslashreplace").decode()


def differences(plan: Plan, read: ReadOptions, make: MakeOptions, model: ModelFacts) -> list[str]:
    """Return how settings differ from those of a plan, for people; empty if they do not."""
    return [*_changed("", plan.read, read), *_changed("", plan.make, make), *_changed("model: ", plan.model, model)]


def _changed(prefix: str, was: Any, now: Any) -> Iterator[str]:
    for field in dataclasses.fields(was):
        old, new = getattr(was, field.name), getattr(now, field.name)
        if old != new:
            yield f"{prefix}{field.name} is {new!r}; the job has {old!r}"


def match_inputs(
    before: Sequence[InputFile], now: Sequence[InputFile]
) -> tuple[list[InputFile | None], list[InputFile]]:
    """Find the files of a plan among the files that are given now.

    Files are the same if size and checksum agree, wherever they are and whenever they were written.

    Returns:
        For each file of the plan the file of now, or None; and the files that the plan does not have, in their order.
    """
    given: dict[tuple[int, str], list[InputFile]] = {}
    for it in reversed(now):
        given.setdefault((it.size_bytes, it.checksum), []).append(it)
    found = [same.pop() if (same := given.get((it.size_bytes, it.checksum))) else None for it in before]
    left = {id(it) for its in given.values() for it in its}
    return found, [it for it in now if id(it) in left]
