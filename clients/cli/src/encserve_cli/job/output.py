"""Writes the parts of a job's output, and finds the complete parts."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from encserve_cli.files.storage import errors_named_as
from encserve_cli.files.writing import ParquetFile
from encserve_cli.job.inputs import in_threads
from encserve_cli.job.plan import Plan, json_text
from encserve_cli.job.store import Store, write_text, written
from encserve_cli.job.types import Block, Encoded, Part, PartReport

logger = logging.getLogger(__name__)

REJECTED = "_rejected"
_OF_JOB = re.compile(r"part-(\d{5,})-(\d{6,})\.(?:parquet|jsonl)")
# The key of a part's own record in the footer of the file.
_PART_KEY = "encserve_part"


def part_of(name: str) -> Part | None:
    """Return the part of a file by the file's name, or None for other files."""
    found = _OF_JOB.fullmatch(name)
    return None if found is None else Part(int(found[1]), int(found[2]))


def write_part(plan: Plan, store: Store, blocks: Iterator[tuple[Block, Encoded]]) -> PartReport:
    """Write one part: first the file of rejected rows, then the file of the part.

    Args:
        plan: The job.
        store: The output.
        blocks: Blocks with their outputs. The function reads up to the last block of the part. The keys of
            `Encoded.refused` are indices of rows in the block.

    Raises:
        OSError: The part cannot be written. Then no file has the part's name.
        Exception: An error that `blocks` raises.
    """
    block, encoded = next(blocks)
    part = block.part
    name = f"{part.name}.parquet"
    rejected: list[tuple[int, str]] = []
    rows = 0
    uri = f"{store.uri}/{name}"
    with store.new_file(name) as path, ExitStack() as stack:
        with written(uri):
            schema = _schema(plan, block.rows.kept.schema)
            file = stack.enter_context(ParquetFile(path, schema, plan.read.input_kind))
        while True:
            refused = block.rows.problems | {index: it.problem for index, it in encoded.refused.items()}
            missing = np.zeros(len(block.rows.values), np.bool_)  # (rows,)
            missing[list(refused)] = True
            table = file.table(block.rows.values, encoded.result, missing if refused else None, block.rows.kept)
            with written(uri):
                file.write(table)
            rejected += [(block.rows.numbers[index], refused[index]) for index in sorted(refused)]
            rows += len(block.rows.values)
            if block.ends_part:
                break
            block, encoded = next(blocks)
        record = _record(plan, part, rows) | {"rejected": len(rejected), "ends_file": block.ends_file}
        with written(uri):
            file.add_metadata({_PART_KEY: json.dumps(record)})
            stack.close()
        _write_rejected(plan, store, part, rejected)
    first = f"{block.file.place(rejected[0][0])}: {rejected[0][1]}" if rejected else ""
    return PartReport(part, rows, len(rejected), block.ends_file, first)


def _schema(plan: Plan, kept: Any) -> Any:
    return pa.schema([*(pa.field(*it) for it in plan.fields()), *kept], plan.metadata())


def _record(plan: Plan, part: Part, rows: int) -> dict[str, Any]:
    """Return the record that identifies a part: the input file, the column, and the rows."""
    file = plan.inputs[part.input]
    return {
        "input": file.checksum,
        "input_bytes": file.size_bytes,
        "input_kind": plan.read.input_kind,
        "columns": list(plan.read.columns),
        "number": part.number,
        "part_rows": plan.part_rows,
        "kept_types": dict(plan.kept_types),
        "rows": rows,
    }


def _write_rejected(plan: Plan, store: Store, part: Part, rejected: Sequence[tuple[int, str]]) -> None:
    name = f"{REJECTED}/{part.name}.jsonl"
    if not rejected:
        store.delete(name)  # may be left over from a killed run, in which the server rejected other rows
        return
    uri = plan.inputs[part.input].uri
    lines = (json_text({"file": uri, "row": number, "reason": why}) + "\n" for number, why in rejected)
    write_text(store, name, "".join(lines))


def finished_parts(plan: Plan, store: Store, only: Callable[[Part], bool] | None = None) -> dict[Part, PartReport]:
    """Return the complete parts of this job in the output. Log a warning about other parts.

    The footer of a part names the input file, the rows, the model and the options. The job must have the same input
    file, rows, model and options. The part must have as many rows as the footer says. The values are not read.

    Args:
        plan: The job.
        store: The output.
        only: Selects the parts to check; None for all parts.

    Raises:
        ValueError: The output has a part after the last part of the job. Readers would read its rows.
        OSError: A part cannot be read.
    """
    names = [name for name in store.names() if name.endswith(".parquet")]
    parts = sorted(it for it in map(part_of, names) if it is not None and (only is None or only(it)))
    found: dict[Part, PartReport] = {}
    problems: list[str] = []
    for it in in_threads(lambda part: _report_or_problem(plan, store, part), parts):
        if isinstance(it, PartReport):
            found[it.part] = it
        else:
            problems.append(it)
    _check_behind(plan, store, parts, found)
    if problems:
        logger.warning("%d parts in the output will be replaced, for example %s", len(problems), problems[0])
    return found


def _report_or_problem(plan: Plan, store: Store, part: Part) -> PartReport | str:
    name = f"{part.name}.parquet"
    try:
        if part.input >= len(plan.inputs):
            raise ValueError(f"{name}: belongs to an input that the job does not have")
        with errors_named_as(name, " as Parquet", is_local=store.is_local):
            opened = parquet.ParquetFile(store.open(name))
            try:
                return _report(plan, part, opened)
            finally:
                opened.close(force=True)
    except ValueError as error:
        return str(error)


def _report(plan: Plan, part: Part, opened: Any) -> PartReport:
    """Return the report from the footer of a part. Raise ValueError if the part is damaged or of another job."""
    name = f"{part.name}.parquet"
    rows = opened.metadata.num_rows
    metadata = {key.decode(): value.decode() for key, value in (opened.metadata.metadata or {}).items()}
    record = json.loads(metadata.get(_PART_KEY, "null"))
    if not isinstance(record, dict):
        raise ValueError(f"{name}: is not a part of a job")
    if changed := [key for key, value in plan.metadata().items() if metadata.get(key) != value]:
        raise ValueError(f"{name}: {changed[0]} differs from the job: {metadata.get(changed[0])!r}")
    rejected, ends_file = record.pop("rejected", None), record.pop("ends_file", None)
    if record != _record(plan, part, rows):
        raise ValueError(f"{name}: has {rows:,} rows that are not the rows of this part")
    return PartReport(part, rows, rejected, ends_file)


def _check_behind(plan: Plan, store: Store, parts: Sequence[Part], found: Mapping[Part, PartReport]) -> None:
    """Refuse parts after the end of an input file, and parts of files that the job does not have."""
    ends = {part.input: part.number for part, report in found.items() if report.ends_file}
    for index, it in enumerate(plan.inputs):
        if it.rows is not None:
            ends[index] = -(-it.rows // plan.part_rows) - 1
    for part in parts:
        if part.input >= len(plan.inputs) or part.number > ends.get(part.input, part.number):
            raise ValueError(
                f"{store.uri}/{part.name}.parquet: is not a part of this job, but readers of the folder would read "
                "this file too; remove the file, or begin again with --overwrite"
            )
