"""What a job is: its inputs, what is made of them, and what makes it, written down before anything is computed.

A plan is all that batches depend on, so a job that is run again does what is missing exactly as the first run would
have done it; and a job with another plan is refused.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from encserve_cli.job.types import InputFile, InputKind, Part, ReadOptions, Scan
from encserve_client import DType, Output, Task

PLAN_FORMAT = 1
# What Arrow calls the numbers of each type; of "binary" one holds 8.
_ARROW_TYPES: dict[DType, Any] = {
    "float32": pa.float32(),
    "float16": pa.float16(),
    "int8": pa.int8(),
    "binary": pa.uint8(),
}


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """What is made of each input.

    Attributes:
        kind: The output's kind, as `Output.kind`.
        dimensions: To how many numbers a row is cut; None for the model's own.
        dtype: The type of the numbers; "binary" packs 8 into a byte.
        task: What the texts are.
        prompt_name: What is put before every text; None for what the model, or the task, has.
        truncate: Whether an input that is too long is cut. Otherwise its row is rejected.
        exclude_special: Whether "tokens" has no rows of special tokens.
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
        """The output as the client asks for it."""
        return Output(self.kind, dimensions=self.dimensions)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model that a job runs, and what makes it run.

    Attributes:
        model: Its name.
        version: Its version.
        fingerprint: Identifies the bundle.
        space_id: Identifies the vector space; empty if unknown.
        pooling: How "model" makes one vector; empty where that is not known.
        width: The numbers of a row of the job's output; of "binary" its bytes.
        max_tokens: The longest input, in tokens.
        engine: What runs it: "server", or an engine of this process.
        precision: The type that it computes in.
        max_batch_tokens: The most padded tokens of a batch; 0 through a server.
        threads: The CPU's threads that run batches; 0 through a server.
        parallel_batches: How many batches run at once; 0 through a server.
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


@dataclass(frozen=True, slots=True)
class Plan:
    """A job.

    Attributes:
        read: How rows become inputs.
        make: What is made of each input.
        model: What makes it.
        inputs: The files.
        parts: All parts, in the order of files and rows.
        kept_types: The columns that come along, with their Arrow types.
    """

    read: ReadOptions
    make: MakeOptions
    model: ModelFacts
    inputs: tuple[InputFile, ...]
    parts: tuple[Part, ...]
    kept_types: Mapping[str, str]

    @classmethod
    def of(cls, scan: Scan, read: ReadOptions, make: MakeOptions, model: ModelFacts) -> "Plan":
        """The plan of what was found."""
        return cls(read, make, model, scan.inputs, scan.parts, scan.kept_types)

    @property
    def rows(self) -> int:
        """How many rows all inputs have."""
        return sum(it.rows for it in self.inputs)

    @property
    def text_bytes(self) -> int:
        """The bytes of all inputs."""
        return sum(it.text_bytes for it in self.parts)

    def extended(self, further: "Plan") -> "Plan":
        """The same with the inputs of another plan behind its own.

        Raises:
            ValueError: Their columns that come along are others.
        """
        if dict(further.kept_types) != dict(self.kept_types):
            was, now = _listed(self.kept_types), _listed(further.kept_types)
            raise ValueError(f"--keep: the columns of the job are {was}; those of the new inputs are {now}")
        moved = (dataclasses.replace(it, input=it.input + len(self.inputs)) for it in further.parts)
        return dataclasses.replace(self, inputs=(*self.inputs, *further.inputs), parts=(*self.parts, *moved))

    def to_json(self) -> str:
        """The plan file: one line for each input and each part, so that `diff` shows what changed."""
        head = {
            "format": PLAN_FORMAT,
            "read": dataclasses.asdict(self.read),
            "make": dataclasses.asdict(self.make),
            "model": dataclasses.asdict(self.model),
            "kept_types": dict(self.kept_types),
            "rows": self.rows,
        }
        lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
        for name, values in (("inputs", self.inputs), ("parts", self.parts)):
            rows = ",\n  ".join(json.dumps(list(dataclasses.astuple(it)), ensure_ascii=False) for it in values)
            lines.append(f"{json.dumps(name)}: [\n  {rows}\n]")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> "Plan":
        """Reads a plan file.

        Raises:
            ValueError: It is no plan that this version knows; the text names it.
        """
        try:
            found = json.loads(text)
            if found["format"] != PLAN_FORMAT:
                raise ValueError(f"its format is {found['format']}; this version of encserve has {PLAN_FORMAT}")
            read = found["read"] | {"keep": tuple(found["read"]["keep"])}
            return cls(
                ReadOptions(**read),
                MakeOptions(**found["make"]),
                ModelFacts(**found["model"]),
                tuple(InputFile(*it) for it in found["inputs"]),
                tuple(Part(*it) for it in found["parts"]),
                found["kept_types"],
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{where}: not a plan of encserve embed: {error}; --overwrite begins again") from error


def differences(
    plan: Plan, read: ReadOptions, make: MakeOptions, model: ModelFacts, inputs: Sequence[InputFile]
) -> list[str]:
    """What keeps a job with these settings from being the job of a plan, each for people; empty if nothing does.

    `rows` and `in_order` of the inputs are not compared: what was not changed since has what it had. Nor is the order
    of the inputs, which is the plan's.
    """
    found = [*_changed("", plan.read, read), *_changed("", plan.make, make), *_changed("model: ", plan.model, model)]
    was, now = {it.uri: it for it in plan.inputs}, {it.uri: it for it in inputs}
    found += [f"the job has the input {uri}, which is not given now" for uri in was if uri not in now]
    found += [f"{uri} is no input of the job (--add-inputs adds it)" for uri in now if uri not in was]
    for uri in was.keys() & now.keys():
        if (was[uri].size_bytes, was[uri].modified_ns) != (now[uri].size_bytes, now[uri].modified_ns):
            found.append(f"{uri} was changed: {was[uri].size_bytes:,} bytes then, {now[uri].size_bytes:,} bytes now")
    return found


def _changed(prefix: str, was: Any, now: Any) -> Iterator[str]:
    for field in dataclasses.fields(was):
        old, new = getattr(was, field.name), getattr(now, field.name)
        if old != new:
            yield f"{prefix}{field.name} is {new!r}; the job has {old!r}"


def _listed(types: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({its})" for name, its in types.items()) or "none"


def row_bytes(make: MakeOptions, width: int) -> tuple[int, int]:
    """The bytes of output for each row, and for each token of one, at most.

    Of sparse weights there may be one for every word of the vocabulary; a token is counted with 64 of them, which is
    more than models that were trained to be sparse give.
    """
    number = np.dtype("u1" if make.dtype == "binary" else make.dtype).itemsize
    if make.kind == "sparse":
        return 0, 64 * (4 + number)
    if make.kind in ("tokens", "multi_vector"):
        return 0, width * number + 8
    return width * number, 0


def columns_of(make: MakeOptions, width: int) -> dict[str, Any]:
    """The columns of what is made, with their Arrow types; all parts have the same."""
    number = _ARROW_TYPES[make.dtype]
    row = pa.list_(number, width)
    if make.kind == "sparse":
        return {"indices": pa.list_(pa.uint32()), "values": pa.list_(number)}
    if make.kind == "tokens":
        return {"rows": pa.list_(row), "token_ids": pa.list_(pa.int64())}
    if make.kind == "multi_vector":
        return {"rows": pa.list_(row), "token_indices": pa.list_(pa.uint32())}
    return {"vector": row}


def value_column(kind: InputKind) -> tuple[str, Any] | None:
    """The column of the inputs themselves, with its Arrow type; vectors are not written again."""
    return {"text": ("text", pa.string()), "ids": ("ids", pa.list_(pa.int64())), "vectors": None}[kind]
