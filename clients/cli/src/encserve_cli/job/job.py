"""Runs one job: reads or makes the plan (`_job.json`), and computes the missing output files (the parts)."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Protocol

import click

from encserve_cli.files.reading import ReadOptions
from encserve_cli.job.inputs import find_inputs, kept_types
from encserve_cli.job.output import REJECTED, finished_parts, part_of
from encserve_cli.job.plan import (
    PLAN_NAME,
    MakeOptions,
    ModelFacts,
    Plan,
    differences,
    match_inputs,
    rows_of_part,
)
from encserve_cli.job.run import JobSummary, TooManyRejected, Worker
from encserve_cli.job.store import Store, open_store, write_text
from encserve_cli.job.types import InputFile, Part, PartReport, Shard
from encserve_cli.progress import OnProgress, ProgressCounter


class Backend(Protocol):
    """The source of vectors: a server, this process, or a cluster."""

    def open(self, make: MakeOptions, before: ModelFacts | None) -> Worker:
        """Load or find the model.

        Args:
            make: The options of the output: kind, dimensions, number type, task and prompt.
            before: The model of the job's plan, if there is a plan. If the user names no model version, batch size or
                number of threads, the values come from `before`.

        Raises:
            EncserveError, RuntimeError, ValueError, OSError: The model cannot be loaded. The message has the reason.
        """


class EmbedJob:
    """A job, as a context manager. The constructor sets `plan`. `run` makes the missing parts.

    Attributes:
        store: The output.
        plan: The plan of the job.
        shard: The share of the job that `run` does.
        worker: The loaded model.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        output: str,
        backend: Backend,
        *,
        read: ReadOptions,
        make: MakeOptions,
        part_rows: int | None = None,
        shard: Shard | None = None,
        overwrite: bool = False,
        add_inputs: bool = False,
    ) -> None:
        """Load the model. Read the plan from the output, or make a new plan.

        Args:
            inputs: Files, as paths or URIs.
            output: The folder of the output, a path or a URI.
            backend: The source of vectors.
            read: The options for reading inputs.
            make: The options of the output: kind, dimensions, number type, task and prompt.
            part_rows: Rows per part of a new job. None: 2,048, or 256 for sparse vectors. For "tokens" and
                "multi_vector" 256 or fewer, so that a part has at most 512 MiB.
            shard: The share to do; None for the whole job.
            overwrite: Whether to remove the output of another job first; not with `shard`.
            add_inputs: Whether to add inputs that the plan does not have.

        Raises:
            ValueError: The folder has parts of another job, an input cannot be used, or settings contradict each other.
            OSError: A file cannot be read or written.
            Exception: An error of `Backend.open`.
        """
        if part_rows is not None and part_rows < 1:  # checked first, because loading the model is slow
            raise ValueError(f"part_rows must be at least 1; was {part_rows}")
        if shard is not None and overwrite:
            raise ValueError(
                "overwrite cannot be used with shard: overwrite would remove the parts of other shards. Remove the "
                "output before the first shard begins, or name another folder"
            )
        self._read = read
        self._part_rows = part_rows
        self._add_inputs = add_inputs
        self.shard = shard or Shard()
        self._finished: dict[Part, PartReport] | None = None
        with ExitStack() as stack:
            self.store: Store = open_store(output)
            before = None if overwrite else self._saved_plan()
            found = find_inputs(inputs, before.inputs if before else ())
            self._check_apart(found)
            self.worker = backend.open(make, before.model if before else None)
            stack.callback(self._close_worker)
            self.plan, is_new = self._continued(before, found) if before else (self._new_plan(found), True)
            if overwrite:  # after the checks of the model and the inputs, so that a mistake removes nothing
                clear(self.store)
            if is_new and not self._save(before):
                self._join(backend, make, found)
            self._stack = stack.pop_all()

    def _saved_plan(self) -> Plan | None:
        text = self.store.read(PLAN_NAME)
        if text is not None:
            return Plan.from_json(text, f"{self.store.uri}/{PLAN_NAME}")
        if others := self._part_names():
            raise ValueError(
                f"{self.store.uri} has {len(others):,} parts of a job, such as {others[0]}, but not the file "
                f"{PLAN_NAME}. Name another folder, or remove the parts with --overwrite"
            )
        return None

    def _part_names(self) -> list[str]:
        return sorted(name for name in self.store.names() if part_of(name))

    def _save(self, before: Plan | None) -> bool:
        """Write the plan. Return False if another run has already written a plan."""
        if before is None:
            return self.store.create(PLAN_NAME, self.plan.to_json())
        write_text(self.store, PLAN_NAME, self.plan.to_json())
        return True

    def _join(self, backend: Backend, make: MakeOptions, found: Sequence[InputFile]) -> None:
        """Use the plan that another run has just written.

        Batch size and threads that this run did not set come from that plan. All other settings and the inputs of both
        runs must be equal.
        """
        begun = self._saved_plan()
        differs = begun is None
        if begun is not None:
            self.worker.close()
            self.worker = backend.open(make, begun.model)
            self.plan, differs = self._continued(begun, found)
        if differs:
            raise ValueError(
                f"another job has just begun in {self.store.uri}, with other settings or inputs. Name another folder, "
                "or stop that job and begin again with --overwrite"
            )

    def _check_apart(self, found: Sequence[InputFile]) -> None:
        """Refuse inputs in the output folder. Readers would read them as parts, and `clear` could delete them."""
        for it in found:
            if any(self.store.holds(it.uri, folder) for folder in ("", REJECTED)):
                raise ValueError(
                    f"{click.format_filename(it.uri)}: is an input in the folder of the output; name another folder "
                    "for the output"
                )

    def _new_plan(self, found: Sequence[InputFile]) -> Plan:
        make, model = self.worker.make, self.worker.model
        types = kept_types(found, self._read)
        return Plan(self._read, make, model, self._part_rows or rows_of_part(make, model), types, tuple(found))

    def _continued(self, before: Plan, found: Sequence[InputFile]) -> tuple[Plan, bool]:
        """Return the plan of a continued job, with the current paths of the inputs.

        Also return whether the plan has changed. If the job has no parts and the new plan differs, the new plan
        replaces the old plan. If an input has no parts and its file has changed, the plan takes the changed file.
        """
        names = self._part_names()
        known, new = match_inputs(before.inputs, found)
        places = {it.uri: it for it in new}
        begun = {part.input for part in map(part_of, names) if part is not None}
        for index, was in enumerate(before.inputs):
            if known[index] is None and index not in begun:
                known[index] = places.pop(was.uri, None)
        new = [it for it in new if it.uri in places]
        problems = differences(before, self._read, self.worker.make, self.worker.model)
        problems += self._input_problems(before, known, places)
        if problems and not names:
            return self._new_plan(found), True
        if problems:
            raise ValueError(
                f"{self.store.uri} has the output of another job: {'; '.join(problems)}. Name another folder, or begin "
                "again with --overwrite"
            )
        plan = dataclasses.replace(before, inputs=tuple(it for it in known if it is not None))
        is_replaced = [it.checksum for it in plan.inputs] != [it.checksum for it in before.inputs]
        if not new:
            return plan, is_replaced
        types = kept_types(new, self._read)
        if types != dict(plan.kept_types):
            raise ValueError(
                f"--keep: the columns of the job are {_listed(plan.kept_types)}; the columns of the new inputs are "
                f"{_listed(types)}"
            )
        return dataclasses.replace(plan, inputs=(*plan.inputs, *new)), True

    def _input_problems(
        self, before: Plan, known: Sequence[InputFile | None], new: Mapping[str, InputFile]
    ) -> list[str]:
        """Return a message for each input that differs from the plan.

        `new` has, by path, the current files that match no input of the plan.
        """
        problems = []
        added = dict(new)
        for index, was in enumerate(before.inputs):
            name = click.format_filename(was.uri)
            if known[index] is None and was.uri in added:
                now = added.pop(was.uri).size_bytes
                how = "its checksum differs" if now == was.size_bytes else f"{was.size_bytes:,} bytes then, {now:,} now"
                problems.append(
                    f"{name} was changed: {how} (to make the parts of this file again, remove part-{index:05}-*)"
                )
            elif known[index] is None:
                problems.append(f"the job has the input {name}, which is not given now")
        names = [] if self._add_inputs else [click.format_filename(uri) for uri in added]
        return problems + [f"{name} is not an input of the job (--add-inputs adds it)" for name in names]

    @property
    def total_rows(self) -> int | None:
        """The number of rows of the share; None if unknown."""
        return self.plan.rows_of(self.shard)

    def finished(self) -> dict[Part, PartReport]:
        """Return the finished parts of the share; see `finished_parts`."""
        if self._finished is None:
            found = finished_parts(self.plan, self.store)
            self._finished = {part: report for part, report in found.items() if self.shard.has(part)}
        return self._finished

    def run(self, *, on_progress: OnProgress | None = None, max_rejected: int | None = None) -> JobSummary:
        """Make the missing parts. Call `run` only once.

        Raises:
            Stopped: `stop` was called. Finished parts stay.
            TooManyRejected: More than `max_rejected` rows were rejected, counting earlier runs.
            Exception: An error of the model, the inputs or the output.
        """
        finished = self._finished = dict(self.finished())
        parts_before, first_rejected = len(finished), ""
        counter = ProgressCounter(
            self.total_rows,
            on_progress,
            rows=sum(it.rows for it in finished.values()),
            parts=parts_before,
            rejected=sum(it.rejected for it in finished.values()),
        )
        progress = counter.report()
        _check_rejected(progress.rejected, max_rejected, first_rejected)
        work = self.plan.work(finished, self.shard, divided=self.worker.divides_files)
        with closing(self.worker.run(self.plan, self.store, work, counter.count_batch)) as reports:
            for report in reports:
                finished[report.part] = report
                first_rejected = first_rejected or report.first_rejected
                progress = counter.count_part(report.rows, report.rejected)
                _check_rejected(progress.rejected, max_rejected, first_rejected)
        return JobSummary(
            output=self.store.uri,
            rows=progress.rows,
            rejected=progress.rejected,
            first_rejected=first_rejected,
            parts=progress.parts,
            parts_before=parts_before,
            tokens=progress.tokens,
            seconds=counter.report().seconds,
            plan=self.plan,
        )

    def stop(self) -> None:
        """Make `run` raise Stopped after the running batches. Any thread and any signal handler may call `stop`.

        Running calls of a client are not cancelled. `EncoderClient.close` ends them at once.
        """
        self.worker.stop()

    def _close_worker(self) -> None:
        self.worker.close()

    def close(self) -> None:
        """Free the model."""
        self._stack.close()

    def __enter__(self) -> "EmbedJob":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_rejected(rejected: int, most: int | None, first_rejected: str) -> None:
    """Raise TooManyRejected if more than `most` rows were rejected."""
    if most is not None and rejected > most:
        example = f", such as {first_rejected}" if first_rejected else ""
        raise TooManyRejected(
            f"{rejected:,} rows were rejected, more than --max-rejected {most:,}{example}; {REJECTED}/ in the output "
            "lists all rejected rows"
        )


def _listed(types: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({its})" for name, its in types.items()) or "none"


def clear(store: Store) -> None:
    """Remove the output of a job. The plan is removed last, so a folder without a plan has no parts."""
    names = [*store.names(), *(f"{REJECTED}/{name}" for name in store.names(REJECTED))]
    for name in names:
        if part_of(name.rpartition("/")[2]):
            store.delete(name)
    store.delete(PLAN_NAME)
