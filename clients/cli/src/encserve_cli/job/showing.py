"""A job's plan and summary, for people and for programs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from encserve_cli.job.output import REJECTED
from encserve_cli.job.plan import Plan
from encserve_cli.job.run import JobSummary
from encserve_cli.job.types import Part, PartReport, Shard
from encserve_cli.progress import duration

Finished = Mapping[Part, PartReport]


def plan_record(plan: Plan, shard: Shard, output: str, finished: Finished) -> dict[str, Any]:
    """Return a plan as JSON values. Unknown values are None. The number of rows is that of this share."""
    return {
        "output": output,
        "inputs": [asdict(it) for it in plan.inputs],
        "rows": plan.rows_of(shard),
        "part_rows": plan.part_rows,
        "parts_before": len(finished),
        "rows_before": sum(it.rows for it in finished.values()),
        "read": asdict(plan.read),
        "make": asdict(plan.make),
        "model": asdict(plan.model),
    }


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


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
