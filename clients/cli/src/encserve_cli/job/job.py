"""One job from its settings to its summary: the plan is made or found again, then its missing parts are done."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from encserve_cli.job.inputs import find_inputs, scan
from encserve_cli.job.output import REJECTED, is_of_job
from encserve_cli.job.plan import MakeOptions, ModelFacts, Plan, differences, row_bytes
from encserve_cli.job.run import PLAN_NAME, JobSummary, OnProgress, Runner, run_parts
from encserve_cli.job.store import Store, open_store, write_text
from encserve_cli.job.types import Encoder, InputFile, PartLimits, ReadOptions


@dataclass(frozen=True, slots=True)
class Opened:
    """What makes vectors, ready to do parts.

    Attributes:
        make: What is made, with every default filled in.
        model: What makes it.
        runner: Makes what does the parts of a plan, whose output goes to a store.
        close: Frees it.
        encoder: Makes what encodes values that this process has, such as a sample. On a cluster only counts come back:
            `Encoded.result` is None.
        workers: Counts the encoders that do parts at the same time.
    """

    make: MakeOptions
    model: ModelFacts
    runner: Callable[[Plan, Store], Runner]
    close: Callable[[], None]
    encoder: Callable[[], Encoder]
    workers: Callable[[], int] = lambda: 1


class Source(Protocol):
    """Where vectors come from: a server, this process, or a cluster."""

    def open(self, make: MakeOptions, kind: str | None, before: ModelFacts | None) -> Opened:
        """Loads or finds the model.

        Args:
            make: What is to be made; its kind is not set yet.
            kind: The output's kind; None for what the model was trained for.
            before: The model of the job's plan, if there is a plan: what settings leave open is as it says.

        Raises:
            EncserveError, RuntimeError, ValueError, OSError: The model cannot be had; the text says why.
        """


class EmbedJob:
    """A job. Use it as a context manager: `plan` is there at once, and `run` does what is missing."""

    def __init__(
        self,
        inputs: Sequence[str],
        output: str,
        source: Source,
        *,
        read: ReadOptions,
        make: MakeOptions,
        kind: str | None = None,
        limits: PartLimits | None = None,
        overwrite: bool = False,
        add_inputs: bool = False,
        save: bool = True,
    ) -> None:
        """Opens the model, and finds the plan of the output or makes one.

        Args:
            inputs: Files, as paths or URIs.
            output: The folder of the output, a path or a URI.
            source: Where vectors come from.
            read: How rows become inputs.
            make: What is made of each input.
            kind: The kind of output; None for what the model was trained for.
            limits: Where parts end; None for the usual limits.
            overwrite: Whether to remove the output of another job first.
            add_inputs: Whether inputs that the plan lacks are added to it.
            save: Whether the plan is written, so that `run` can be called.

        Raises:
            ValueError: The folder has the output of another job, an input cannot be used, or the settings contradict
                each other.
            OSError: A file cannot be read or written.
            Exception: Whatever `Source.open` raises.
        """
        self._source = source
        self._read = read
        self._limits = limits or PartLimits()
        self._stack = ExitStack()
        self._runner: Runner | None = None
        self._stopped = False
        with self._stack:
            self.store = open_store(output)
            before = None if overwrite else self._plan_before()
            found = find_inputs(inputs)
            self._check_apart(found)
            self.opened = source.open(make, kind, before.model if before else None)
            self._stack.callback(self.opened.close)
            if before is None:
                self.plan = self._new_plan(inputs)
                if overwrite and save:  # not before all is known to be good
                    clear(self.store)
                if save and not self.store.create(PLAN_NAME, self.plan.to_json()):
                    before = self._plan_before()  # another run was faster, and what it measured holds for this one
                    self._stack.close()
                    self.opened = source.open(make, kind, before.model if before else None)
                    self._stack.callback(self.opened.close)
            if before is not None:
                self.plan = self._known_plan(before, inputs, found, add_inputs=add_inputs, save=save)
            self._stack = self._stack.pop_all()

    def _plan_before(self) -> Plan | None:
        text = self.store.read(PLAN_NAME)
        if text is not None:
            return Plan.from_json(text, f"{self.store.uri}/{PLAN_NAME}")
        others = [name for name in self.store.names() if is_of_job(name)]
        if others:
            raise ValueError(
                f"{self.store.uri} has {len(others):,} parts, such as {others[0]}, and no {PLAN_NAME} that says what "
                "they are; name another folder, or remove them with --overwrite"
            )
        return None

    def _check_apart(self, found: Sequence[InputFile]) -> None:
        """Refuses inputs that lie among the outputs, where they would be read or removed as such."""
        for it in found:
            if it.uri.rpartition("/")[0] == self.store.uri:
                raise ValueError(
                    f"{it.uri}: is an input in the folder of the output; name another folder for the output"
                )

    def _new_plan(self, inputs: Sequence[str]) -> Plan:
        per_row, per_token = row_bytes(self.opened.make, self.opened.model.width)
        limits = dataclasses.replace(
            self._limits, row_bytes=per_row, token_bytes=per_token, max_tokens=self.opened.model.max_tokens
        )
        return Plan.of(scan(inputs, self._read, limits), self._read, self.opened.make, self.opened.model)

    def _known_plan(
        self, before: Plan, inputs: Sequence[str], found: Sequence[InputFile], *, add_inputs: bool, save: bool
    ) -> Plan:
        known = {it.uri for it in before.inputs}
        new = [argument for argument, its in zip(inputs, found, strict=True) if its.uri not in known]
        compared = [it for it in found if it.uri in known] if add_inputs else found
        if problems := differences(before, self._read, self.opened.make, self.opened.model, compared):
            raise ValueError(
                f"{self.store.uri} has the output of another job: {'; '.join(problems)}. Name another folder, or begin "
                "again with --overwrite"
            )
        if not (add_inputs and new):
            return before
        plan = before.extended(self._new_plan(new))
        if save:
            write_text(self.store, PLAN_NAME, plan.to_json())
        return plan

    def run(self, *, on_progress: OnProgress | None = None, max_rejected: int | None = None) -> JobSummary:
        """Does the parts that are missing; to be called once, since the model is freed at the end.

        Raises:
            Stopped: `stop` was called; what is done stays done.
            TooManyRejected: More rows than `max_rejected` were rejected.
            Exception: Whatever keeps the job from going on, of the model, the inputs or the output.
        """
        with ExitStack() as stack:
            self._runner = self.opened.runner(self.plan, self.store)
            stack.callback(self._runner.close)
            if self._stopped:
                self._runner.stop()
            return run_parts(self.plan, self.store, self._runner, on_progress=on_progress, max_rejected=max_rejected)

    def stop(self) -> None:
        """Has `run` raise Stopped after the batches that run now; callable from any thread and from signals."""
        self._stopped = True
        if self._runner is not None:
            self._runner.stop()

    def close(self) -> None:
        """Frees the model."""
        self._stack.close()

    def __enter__(self) -> "EmbedJob":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def clear(store: Store) -> None:
    """Removes the output of a job: the plan last, so that a folder without one has nothing left."""
    for name in store.names():
        if is_of_job(name):
            store.delete(name)
    for name in store.names(REJECTED):
        if is_of_job(name):
            store.delete(f"{REJECTED}/{name}")
    store.delete(PLAN_NAME)
