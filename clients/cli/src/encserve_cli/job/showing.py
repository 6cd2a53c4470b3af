"""A job's plan and its summary, for people and for programs."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from encserve_cli.job.output import REJECTED
from encserve_cli.job.plan import Plan, row_bytes
from encserve_cli.job.progress import duration
from encserve_cli.job.run import JobSummary
from encserve_cli.job.sample import Sample, shared_out
from encserve_cli.job.types import MIB, Part


def plan_record(plan: Plan, output: str, missing: list[Part], sample: Sample | None, workers: int) -> dict[str, Any]:
    """A plan as what JSON can hold, with what is expected of it: None where that is not known."""
    seconds = None if missing else 0.0
    if sample is not None:
        seconds = sample.seconds_of(max(shared_out(plan, missing, workers)))
    return {
        "output": output,
        "inputs": [asdict(it) for it in plan.inputs],
        "rows": plan.rows,
        "parts": len(plan.parts),
        "parts_before": len(plan.parts) - len(missing),
        "text_bytes": plan.text_bytes,
        "output_bytes": output_bytes(plan, sample),
        "read": asdict(plan.read),
        "make": asdict(plan.make),
        "model": asdict(plan.model),
        "estimated_seconds": seconds,
    }


def output_bytes(plan: Plan, sample: Sample | None) -> int | None:
    """About how large the output becomes, without the columns that come along; None if unknown."""
    per_row, per_token = row_bytes(plan.make, plan.model.width)
    inputs = 0 if plan.read.input_kind == "vectors" else plan.text_bytes
    if not per_token:
        return plan.rows * per_row + inputs
    if sample is None:
        return None
    return plan.rows * per_row + round(sample.tokens_of(plan.text_bytes) * per_token) + inputs


def plan_lines(plan: Plan, output: str, missing: list[Part], sample: Sample | None, workers: int) -> Iterator[str]:
    """A plan for people."""
    model, done = plan.model, len(plan.parts) - len(missing)
    yield _line("output", output)
    yield _line("inputs", f"{_count(len(plan.inputs), 'file')}, {_count(plan.rows, 'row')}, {_mib(plan.text_bytes)}")
    for it in plan.inputs:
        if it.in_order:
            yield _line("in order", f"{it.uri}: one worker reads it from its beginning")
    yield _line("parts", f"{len(plan.parts):,}" + (f", of which {done:,} are done" if done else ""))
    yield _line("model", f"{model.model}, version {model.version}, fingerprint {model.fingerprint}")
    yield _line("makes", ", ".join(_made(plan)))
    yield _line("engine", ", ".join(_engine(plan)))
    size = output_bytes(plan, sample)
    yield _line("size", "not known" if size is None else f"about {_mib(size)} without compression and --keep")
    if not missing:
        yield _line("time", "none, as all parts are done")
    elif sample is None:
        yield _line("time", "not known")
    else:
        shares = shared_out(plan, missing, workers)
        where, of_one = (f" on {len(shares):,} actors", " on one") if len(shares) > 1 else ("", "")
        seconds = duration(sample.seconds_of(max(shares)))
        took = f"{_count(sample.rows, 'row')} took {sample.seconds:.2f} s"
        yield _line("time", f"about {seconds}{where}, as {took}{of_one}")


def _line(name: str, value: str) -> str:
    return f"{name:<9}{value}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


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
    """A summary as what JSON can hold, without the plan's inputs and parts."""
    plan = summary.plan
    rest = {name: getattr(summary, name) for name in JobSummary.__dataclass_fields__ if name != "plan"}
    return rest | {
        "rejected_output": rejected_folder(summary) if summary.rejected else None,
        "make": asdict(plan.make),
        "model": asdict(plan.model),
    }


def summary_lines(summary: JobSummary) -> Iterator[str]:
    """A summary for people."""
    before = f", {summary.parts_before:,} of them made before" if summary.parts_before else ""
    speed = f", {summary.tokens / summary.seconds:,.0f} tokens/s" if summary.tokens and summary.seconds else ""
    yield f"wrote {summary.output}: {_count(summary.rows, 'row')} in {_count(summary.parts, 'part')}{before}"
    yield f"took {duration(summary.seconds)}{speed}"
    if summary.rejected:
        example = f", such as {summary.first_rejected}" if summary.first_rejected else ""
        yield f"rejected: {_count(summary.rejected, 'row')}{example}"
        yield f"{rejected_folder(summary)} says which and why"
    model = summary.plan.model
    yield f"model {model.model}, version {model.version}, fingerprint {model.fingerprint}"


def rejected_folder(summary: JobSummary) -> str:
    """Where the rejected rows are."""
    return f"{summary.output}/{REJECTED}"
