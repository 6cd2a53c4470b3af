"""`encserve embed`, `encode` and `score`: their options, the output of jobs on the terminal, and Ctrl-C."""

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from typing import Any

import click

from encserve_cli.files.command import Printing, Sources, column_names
from encserve_cli.files.reading import InputKind, ReadOptions
from encserve_cli.files.rows import MIB
from encserve_cli.interrupts import Interrupts
from encserve_cli.job.api import RayOptions, backend_of
from encserve_cli.job.job import Backend, EmbedJob
from encserve_cli.job.local import EngineOptions
from encserve_cli.job.one_file import deliver
from encserve_cli.job.plan import MakeOptions, json_text
from encserve_cli.job.run import LocalWorker
from encserve_cli.job.showing import plan_record, summary_lines, summary_record
from encserve_cli.job.types import Shard
from encserve_cli.progress import shown_progress
from encserve_cli.shared import STOPPED, errors_in_one_line
from encserve_client import EncoderClient

SOME_REJECTED = 3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's <malloc.h>

_ENGINE = tuple(it.name for it in fields(EngineOptions))
_ACTORS = ("actors", "actor_cpus", "actor_gpus")


def run_embedding(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Run `encserve embed`, `encode` or `score`: a job, or a command that writes one file or prints.

    Args:
        given: The options of `encserve_cli.job_options` that the user gave, by name.
        options: All other options of the command, by name.

    Raises:
        ClickException: The command failed.
        Exit: Some rows of a job were rejected, or the job was stopped.
    """
    context = click.get_current_context()
    sources: Sources = options["sources"]
    printing: Printing = options["printing"]
    is_job = printing.folder is not None
    if is_job:
        _give_memory_back()
        Interrupts.current().describe(lambda: "stopped before the job began; nothing was computed")
    with errors_in_one_line(RuntimeError), ExitStack() as stack:
        client = None
        if "bundle" not in given:
            priority = "bulk" if is_job else None
            client = stack.enter_context(context.obj.client(priority, reads_files=bool(sources.files)))
        backend = backend_of(
            bundle=given.get("bundle"),
            client=client,
            model=options["model"],
            model_version=options["model_version"],
            engine=_engine_options(given),
            ray=_ray_options(given),
            include_token_strings=printing.names_tokens and not sources.ids,
        )
        if is_job:
            with _open(backend, given, options) as job:
                status = _work(job, client, given, as_json=options["as_json"])
        else:
            worker = backend.open(_make_options(options), None)
            stack.callback(worker.close)
            assert isinstance(worker, LocalWorker)  # noqa: S101 - --ray is for jobs
            stop = worker.stop if client is None else client.close
            deliver(worker.encoder, sources, printing, options["as_json"], stop)
            status = 0
    if status:
        context.exit(status)


def _give_memory_back() -> None:
    """Make glibc return freed blocks of at least 1 MiB to the system, unless MALLOC_… variables are set.

    By default, glibc does not return freed blocks of up to 32 MiB: 1,000,000 short texts took 490 MiB instead of 380.
    """
    if not {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        with suppress(OSError, AttributeError):  # other C libraries lack this function
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(_M_TRIM_THRESHOLD, MIB)
            libc.mallopt(_M_MMAP_THRESHOLD, MIB)


def _engine_options(given: Mapping[str, Any]) -> EngineOptions | None:
    if "bundle" not in given:
        return None
    return EngineOptions(**{name: given[name] for name in _ENGINE if name in given})


def _ray_options(given: Mapping[str, Any]) -> RayOptions | None:
    if "ray" not in given:
        return None
    return RayOptions(given["ray"], **{name: given[name] for name in _ACTORS if name in given})


def _make_options(options: Mapping[str, Any]) -> MakeOptions:
    if "columns" in options:  # only `encserve score` has this option
        prompt_name, activation = options["prompt_name"], options["activation"]
        return MakeOptions("scores", prompt_name=prompt_name, truncate=True, activation=activation)
    is_tokens = "exclude_special" in options  # only `encserve encode` has this option
    return MakeOptions(
        "tokens" if is_tokens else options["pooling"] or options["kind"] or "",
        dimensions=options["dimensions"],
        dtype=options["dtype"],
        task=options["task"],
        prompt_name=options["prompt_name"],
        truncate=options["truncate"],
        exclude_special=options.get("exclude_special", False),
    )


def _open(backend: Backend, given: Mapping[str, Any], options: Mapping[str, Any]) -> EmbedJob:
    sources: Sources = options["sources"]
    input_kind: InputKind = "ids" if sources.ids else "vectors" if "vectors" in given else "text"
    read = ReadOptions(input_kind, sources.column, _columns(given.get("keep", ())))
    if "columns" in options:
        query_column, column = options["columns"]
        read = replace(read, input_kind="pairs", column=column, query_column=query_column)
    return EmbedJob(
        sources.files,
        options["printing"].folder,
        backend,
        read=read,
        make=_make_options(options),
        shard=Shard(*given["shard"]) if "shard" in given else None,
        overwrite="overwrite" in given,
        add_inputs="add_inputs" in given,
    )


def _columns(given: Sequence[str]) -> tuple[str, ...]:
    names = (name for its in given for name in column_names("--keep", its))
    return tuple(dict.fromkeys(name for name in names if name))


def _work(job: EmbedJob, client: EncoderClient | None, given: Mapping[str, Any], *, as_json: bool) -> int:
    """Run an open job. Return the exit status."""
    finished = job.finished()  # until `describe` below, Ctrl-C raises KeyboardInterrupt and so ends this search
    if as_json:
        _event("plan", plan_record(job.plan, job.shard, job.store.uri, finished))
    unit = {"text": "texts", "pairs": "pairs"}.get(job.plan.read.input_kind, "inputs")
    interrupts = Interrupts.current()
    interrupts.describe(functools.partial(_stopped, job, given), job.stop, *([] if client is None else [client.close]))
    try:
        with shown_progress(job.total_rows, unit, as_json=as_json) as on_progress:
            summary = job.run(on_progress=on_progress, max_rejected=given.get("max_rejected"))
    except Exception:
        if not interrupts.came:  # a stopped job may raise other errors than Stopped
            raise
        interrupts.show()
        return STOPPED
    if as_json:
        _event("done", summary_record(summary))
    else:
        click.echo("\n".join(summary_lines(summary)))
    return SOME_REJECTED if summary.rejected else 0


def _event(name: str, record: Mapping[str, Any]) -> None:
    click.echo(json_text({"event": name} | dict(record)))


def _stopped(job: EmbedJob, given: Mapping[str, Any]) -> str:
    finished = dict(job.finished())  # a copy, because another thread may add parts
    rows = sum(it.rows for it in finished.values())
    total = "" if job.total_rows is None else f" of {job.total_rows:,}"
    again = "the same command without --overwrite" if "overwrite" in given else "the same command"
    return f"stopped: {rows:,}{total} rows, {len(finished):,} parts, are in {job.store.uri}; {again} goes on from there"
