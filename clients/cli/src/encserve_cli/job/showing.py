"""A job's plan and summary, for people and for programs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from encserve_cli.files.rows import MIB
from encserve_cli.files.writing import RAGGED
from encserve_cli.job.output import REJECTED
from encserve_cli.job.plan import Plan
from encserve_cli.job.run import JobSummary
from encserve_cli.job.sample import Sample
from encserve_cli.job.types import Part, PartReport, Shard
from encserve_cli.progress import duration

Finished = Mapping[Part, PartReport]


def plan_record(plan: Plan, shard: Shard, output: str, finished: Finished, sample: Sample | None) -> dict[str, Any]:
    """Return a plan as JSON values; None if unknown. Rows, size and time count only this share of the job."""
    rows = plan.rows_of(shard)
    return {
        "output": output,
        "inputs": [asdict(it) for it in plan.inputs],
        "rows": rows,
        "part_rows": plan.part_rows,
        "parts_before": len(finished),
        "rows_before": _rows(finished),
        "output_bytes": _output_bytes(plan, rows),
        "read": asdict(plan.read),
        "make": asdict(plan.make),
        "model": asdict(plan.model),
        "estimated_seconds": _seconds(rows, finished, sample),
    }


def _rows(finished: Finished) -> int:
    return sum(it.rows for it in finished.values())


def _seconds(rows: int | None, finished: Finished, sample: Sample | None) -> float | None:
    """Return the time for the missing rows; None if unknown."""
    left = None if rows is None else rows - _rows(finished)
    if left == 0:
        return 0.0
    return None if left is None or sample is None else sample.seconds_of(left)


def _output_bytes(plan: Plan, rows: int | None) -> int | None:
    """Return the size of the vectors of `rows` rows, in bytes; None if the size is not known."""
    if rows is None or plan.make.kind in RAGGED:
        return None
    return rows * plan.model.width * np.dtype("u1" if plan.make.dtype == "binary" else plan.make.dtype).itemsize


def plan_lines(plan: Plan, shard: Shard, output: str, finished: Finished, sample: Sample | None) -> Iterator[str]:
    """Yield the lines of a plan for people. Size and time count only this share of the job."""
    model = plan.model
    rows = plan.rows_of(shard)
    size, seconds = _output_bytes(plan, rows), _seconds(rows, finished, sample)
    yield _line("output", output)
    yield _line("inputs", f"{_count(len(plan.inputs), 'file')}, {_rows_or_unknown(plan.rows_of(Shard()))}")
    if shard.count > 1:
        yield _line("share", f"{shard.index}/{shard.count}, {_rows_or_unknown(rows)}")
    done = f"; {_count(len(finished), 'part')} {'is' if len(finished) == 1 else 'are'} done" if finished else ""
    yield _line("parts", f"{_count(plan.part_rows, 'row')} each{done}")
    yield _line("model", f"{model.model}, version {model.version}, fingerprint {model.fingerprint}")
    yield _line("makes", ", ".join(_made(plan)))
    yield _line("engine", ", ".join(_engine(plan)))
    yield _line("size", "not known" if size is None else f"about {size / MIB:,.1f} MiB of vectors")
    if seconds is None:
        how = f"; {_count(sample.rows, 'row')} took {sample.seconds:.2f} s" if sample is not None else ""
        yield _line("time", f"not known{how}")
    elif sample is None:
        yield _line("time", "none, as all parts are done")
    else:
        yield _line("time", f"about {duration(seconds)} ({_count(sample.rows, 'row')} took {sample.seconds:.2f} s)")


def _line(name: str, value: str) -> str:
    return f"{name:<9}{value}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _rows_or_unknown(rows: int | None) -> str:
    return "rows not counted" if rows is None else _count(rows, "row")


def _made(plan: Plan) -> Iterator[str]:
    make = plan.make
    yield f"{plan.model.pooling} vectors" if make.kind == "model" and plan.model.pooling else make.kind
    if make.kind != "sparse":
        yield f"width {plan.model.width}"
    yield make.dtype
    yield from (f"{name} {value!r}" for name in ("task", "prompt_name") if (value := getattr(make, name)) is not None)
    if make.truncate:
        yield "truncated"


def _engine(plan: Plan) -> Iterator[str]:
    model = plan.model
    yield from filter(None, (model.engine, model.precision))
    if model.max_batch_tokens:
        yield f"batches of {model.max_batch_tokens:,} tokens"
    if model.threads:
        yield f"{model.threads} threads"
    if model.parallel_batches:
        yield f"{model.parallel_batches} batches at once"


def summary_record(summary: JobSummary) -> dict[str, Any]:
    """Return a summary as JSON values, without the inputs of the plan."""
    rest = {field.name: getattr(summary, field.name) for field in fields(summary) if field.name != "plan"}
    return rest | {
        "rejected_output": rejected_folder(summary) if summary.rejected else None,
        "make": asdict(summary.plan.make),
        "model": asdict(summary.plan.model),
    }


def summary_lines(summary: JobSummary) -> Iterator[str]:
    """Yield the lines of a summary for people."""
    before = f", {summary.parts_before:,} of them made before" if summary.parts_before else ""
    speed = f", {summary.tokens / summary.seconds:,.0f} tokens/s" if summary.tokens and summary.seconds else ""
    yield f"wrote {summary.output}: {_count(summary.rows, 'row')} in {_count(summary.parts, 'part')}{before}"
    yield f"took {duration(summary.seconds)}{speed}"
    if summary.rejected:
        example = f", such as {summary.first_rejected}" if summary.first_rejected else ""
        yield f"rejected: {_count(summary.rejected, 'row')}{example}"
        yield f"{rejected_folder(summary)} has the reasons"
    model = summary.plan.model
    yield f"model {model.model}, version {model.version}, fingerprint {model.fingerprint}"


def rejected_folder(summary: JobSummary) -> str:
    """Return the folder of the rejected rows."""
    return f"{summary.output}/{REJECTED}"
