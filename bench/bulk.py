"""Compares an embed job in this process with what the model can do at best, and with sentence-transformers.

    python bench/bulk.py MODEL_REPOSITORY --checkpoint DIRECTORY [--model NAME] [--rounds 7] [--texts 3000]
                         [--part-rows 750] [--max-batch-tokens TOKENS] [--json FILE]

Every side is given the same texts, of lengths that real ones have, in interleaved rounds as those of bench/compare.py.

The job is that of `encserve embed texts.parquet --output FOLDER/ --bundle MODEL`. Its model is loaded once, and each
round plans a job into a new folder and runs it: what is timed is reading Parquet, tokenizing, computing, and writing
Parquet; loading and planning are not. The ceiling is one batch at a time, all sorted, with the best budget of a sweep:
only the model's own run is timed. sentence-transformers' `encode` is given all texts at once, which it sorts by length,
in batches of the size that a sweep has found to be best: tokenizing is timed, reading and writing are not.

Where the CPU computes in bfloat16, the same sides take part in bfloat16 too, with OpenVINO as the engine. The vectors
of all sides are compared with those of the first ceiling before anything is measured.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from compare import stop_servers_on_sigterm
from harness.agreement import TOLERANCE, lowest_cosine, some_places, worst_difference
from harness.machine import OtherWork, describe_machine, load_average
from harness.report import Found, Target, print_report, ratio_target, ratios_table, summarise, warnings
from harness.rounds import NO_PATIENCE, Measurement, Patience, Side, measure, ratios, spread
from harness.sides import CEILING, SWEEP_ROUNDS, ceiling_side, run_batches, sweep_budgets
from harness.workload import Workload, choose_lengths, open_tokenizer, read_newest, sorted_batches, text_workload

from encserve_cli.job.job import EmbedJob, Opened
from encserve_cli.job.local import EngineOptions, LocalSource
from encserve_cli.job.plan import MakeOptions, ModelFacts
from encserve_cli.job.run import run_parts
from encserve_cli.job.types import PartLimits, ReadOptions
from encserve_server.engine.base import Engine
from encserve_server.engine.opening import open_engine
from encserve_server.errors import DeviceError, EngineMissing
from encserve_server.outputs.rows import pool
from encserve_server.system.cpus import usable_cpus
from encserve_server.types.bundles import Bundle

JOB, SENTENCES = "job", "sentence-transformers"
BFLOAT16 = "-bfloat16"  # behind the name of a side that computes in it
# What is wanted of the job, as a ratio to another side.
WANTED = {"": {CEILING: 0.95, SENTENCES: 1.5}, BFLOAT16: {CEILING: 0.90, SENTENCES: 2.5}}
ENGINES = {
    "": EngineOptions("onnxruntime", "float32", "cpu"),
    BFLOAT16: EngineOptions("openvino", "bfloat16", "cpu"),
}
COSINE = 0.99  # of a vector in bfloat16 with that in float32
BATCH_SIZES = (8, 16, 32, 64, 128)
SWEPT = 600  # texts, as many as `make bench` sweeps

console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)


class Job:
    """A job whose model is loaded once for all rounds. As a source of vectors it hands that model out.

    Attributes:
        opened: The model.
        budget: The most padded tokens of a batch.
    """

    def __init__(self, directory: Path, engine: EngineOptions, file: Path, part_rows: int) -> None:
        """Loads the bundle in a directory, for texts in a Parquet file."""
        self.opened = LocalSource(directory, engine).open(MakeOptions(), None, None)
        self.budget = self.opened.model.max_batch_tokens
        self._file = file
        self._limits = PartLimits(max_rows=part_rows)

    def open(self, make: MakeOptions, kind: str | None, before: ModelFacts | None) -> Opened:
        """See `Source`."""
        del make, kind, before
        return dataclasses.replace(self.opened, close=lambda: None)  # the next round needs it

    def run(self, tokens: int) -> tuple[Measurement, Any]:
        """Runs a job of so many tokens; gives what it took, and the table that it wrote."""
        with (
            tempfile.TemporaryDirectory() as folder,
            EmbedJob(
                [str(self._file)], folder, self, read=ReadOptions(), make=MakeOptions(), limits=self._limits
            ) as job,
        ):
            runner = self.opened.runner(job.plan, job.store)  # stays open: to close it would close the model
            began = time.perf_counter()
            done = run_parts(job.plan, job.store, runner)
            seconds = time.perf_counter() - began
            if (done.rejected, done.tokens) != (0, tokens):
                raise RuntimeError(f"the job computed {done.tokens:,} of {tokens:,} tokens, {done.rejected:,} rejected")
            return Measurement(tokens, seconds), parquet.read_table(folder)


class Comparison:
    """Who is compared.

    Attributes:
        sides: All of them, the first ceiling first.
        sweeps: Tokens/s by budget or by batch size, by side.
        agreement: How far the vectors of a side are from the first ceiling's, by side.
    """

    def __init__(self, options: argparse.Namespace, bundle: Bundle, workload: Workload, stack: ExitStack) -> None:
        """Writes the texts to a file; what must be closed goes onto `stack`."""
        self._options, self._bundle, self._workload, self._stack = options, bundle, workload, stack
        self._swept = Workload(workload.sequences[:SWEPT], workload.texts[:SWEPT])
        self._places = some_places(workload.lengths)
        self._file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "texts.parquet")
        self._wanted: list[Any] = []
        self.sides: list[Side] = []
        self.sweeps: dict[str, dict[int, float]] = {}
        self.agreement: dict[str, dict[str, float]] = {}
        parquet.write_table(pa.table({"text": workload.texts}), self._file)

    def add(self, suffix: str) -> None:
        """Adds the ceiling, the job and sentence-transformers in one precision.

        Raises:
            DeviceError, EngineMissing: This machine cannot compute so.
            SystemExit: A side computes something else.
        """
        given = dataclasses.replace(ENGINES[suffix], max_batch_tokens=self._options.max_batch_tokens)
        self._add_ceiling(suffix, given)
        directory = self._options.model_repository / self._bundle.name / self._bundle.version
        job = Job(directory, given, self._file, self._options.part_rows)
        self._stack.callback(job.opened.close)
        table = job.run(self._workload.tokens)[1]
        if table["text"].to_pylist() != self._workload.texts:
            raise SystemExit("the job's rows are not the texts, in their order")
        self._check(JOB + suffix, [np.array(table["vector"][it].as_py(), np.float32) for it in self._places])
        label = f"job, Parquet to Parquet, {given.engine}, {given.precision}, {job.budget} padded tokens"
        self.sides.append(Side(JOB + suffix, label, lambda: job.run(self._workload.tokens)[0]))
        self._add_sentences(suffix, given.precision)

    def _add_ceiling(self, suffix: str, given: EngineOptions) -> None:
        opened: Engine = open_engine(
            self._bundle.graph,
            engine=given.engine,
            precision=given.precision,
            device="cpu",
            intra_op_threads=usable_cpus(),
        )
        self._stack.callback(opened.close)
        rates = sweep_budgets(opened, self._swept, self._options.seed)
        self._show_sweep(CEILING + suffix, "budget", rates)
        best = max(rates, key=lambda it: rates[it])
        run_batches(opened, sorted_batches(self._workload.sequences, best))  # shapes that the sweep has not had
        side = ceiling_side(opened, self._workload, best)
        label = f"{given.engine} alone, {given.precision}, all sorted, {best} padded tokens"
        self.sides.append(dataclasses.replace(side, name=CEILING + suffix, label=label))
        vectors = [self._vector(opened, it) for it in self._places]
        self._wanted = self._wanted or vectors
        self._check(CEILING + suffix, vectors)

    def _vector(self, engine: Engine, place: int) -> Any:
        """What the model makes of a text, of an engine's rows: (width,)."""
        pooling = self._bundle.pooling
        if pooling is None or not pooling.is_plain or pooling.dimensions:
            raise SystemExit(f"{self._bundle.name}: this compares models whose vector is one pooling of all tokens")
        vector = pool(engine.run([self._workload.sequences[place]]), pooling.kinds[0])[0]  # (d_model,)
        return vector / np.linalg.norm(vector) if pooling.l2_normalize else vector

    def _add_sentences(self, suffix: str, precision: str) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(usable_cpus())
        dtype = {"dtype": getattr(torch, precision)}
        model = SentenceTransformer(str(self._options.checkpoint), device="cpu", model_kwargs=dtype)

        def encode(texts: Sequence[str], size: int) -> Any:
            # The server's tokenizer turns off the threads of all tokenizers in this process.
            with mock.patch.dict(os.environ, TOKENIZERS_PARALLELISM="true"):
                return model.encode(texts, batch_size=size, show_progress_bar=False)

        def run(workload: Workload, size: int) -> Measurement:
            began = time.perf_counter()
            encode(workload.texts, size)
            return Measurement(workload.tokens, time.perf_counter() - began)

        self._check(SENTENCES + suffix, list(encode([self._workload.texts[it] for it in self._places], 1)))
        tried = [Side(str(size), "", partial(run, self._swept, size)) for size in BATCH_SIZES]
        run(self._swept, max(BATCH_SIZES))  # memory is taken now
        found = measure(tried, SWEEP_ROUNDS, self._options.seed, lambda *_: None, NO_PATIENCE)
        rates = {int(name): max(it.tokens_per_second for it in its) for name, its in found.items()}
        self._show_sweep(SENTENCES + suffix, "batch size", rates)
        best = max(rates, key=lambda it: rates[it])
        label = f"sentence-transformers' encode, {precision}, batches of {best}"
        self.sides.append(Side(SENTENCES + suffix, label, partial(run, self._workload, best)))

    def _show_sweep(self, name: str, what: str, rates: dict[int, float]) -> None:
        self.sweeps[name] = rates
        console.print(f"{name}, tokens/s by {what}: " + ", ".join(f"{it}: {rate:,.0f}" for it, rate in rates.items()))

    def _check(self, name: str, vectors: Sequence[Any]) -> None:
        """Compares (width,) vectors with the first ceiling's.

        Raises:
            SystemExit: They are others.
        """
        got, wanted = ([it[None] for it in its] for its in (vectors, self._wanted))
        difference, cosine = worst_difference(got, wanted), lowest_cosine(got, wanted)
        self.agreement[name] = {"difference": difference, "cosine": cosine}
        if cosine < COSINE or (not name.endswith(BFLOAT16) and difference > TOLERANCE):
            raise SystemExit(f"{name} does not compute the same: cosine {cosine:.5f}, difference {difference:.1e}")


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="a model repository")
    parser.add_argument("--model", help="NAME or NAME@VERSION; the first one without it")
    checkpoint_help = "the model's own directory, for sentence-transformers"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIRECTORY", help=checkpoint_help)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--texts", type=int, default=3000)
    parser.add_argument("--part-rows", type=int, default=750, help="the most rows of a part of the job")
    budget_help = "the budget of the jobs' batches; what they take by themselves without it"
    parser.add_argument("--max-batch-tokens", type=int, metavar="TOKENS", help=budget_help)
    parser.add_argument("--seed", type=int, default=0)
    patience_help = "how much longer to take, in all, for running again what others disturbed"
    parser.add_argument("--patience", type=float, default=300, metavar="SECONDS", help=patience_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all figures there")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Opens everything, runs the rounds and gives the report; what must be closed goes onto `stack`."""
    load_before, machine, others = load_average(), describe_machine(), OtherWork()
    bundle = read_newest(options.model_repository, options.model)
    if bundle.tokenizer_file is None:
        raise SystemExit(f"{bundle.name} has no tokenizer; this compares models that take text")
    lengths = choose_lengths(options.texts, seed=options.seed, longest=bundle.max_sequence_tokens)
    workload = text_workload(lengths, open_tokenizer(bundle.tokenizer_file), seed=options.seed)
    console.print(f"{bundle.name}@{bundle.version}: {len(lengths):,} texts, {workload.tokens:,} tokens")
    console.print(f"{machine['cpu']} ({machine['family']}), {machine['cpus']} CPUs, {' '.join(machine['flags'])}")
    comparison = Comparison(options, bundle, workload, stack)
    comparison.add("")
    try:
        comparison.add(BFLOAT16)
    except (DeviceError, EngineMissing) as error:
        console.print(f"bfloat16 is left out: {error}")
    patience = Patience(options.patience, lambda: OtherWork().share)
    found = measure(comparison.sides, options.rounds, options.seed, show_round, patience)
    return {
        "model": {"name": bundle.name, "version": bundle.version, "fingerprint": bundle.fingerprint},
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "used_by_others": others.share(),
        "workload": {"texts": len(lengths), "tokens": workload.tokens, "seed": options.seed},
        "part_rows": options.part_rows,
        "sweeps": comparison.sweeps,
        "agreement": comparison.agreement,
        "rounds": options.rounds,
        "warnings": warnings(load_before, found),
        "sides": summarise(comparison.sides, found),
        "ratios": ratios_of_jobs(found),
        "targets": [dataclasses.asdict(it) for it in job_targets(found)],
    }


def show_round(number: int, found: Mapping[str, Measurement]) -> None:
    """Says how a round went, so that nobody has to wait in the dark."""
    shown = ", ".join(f"{name} {it.tokens_per_second:,.0f} ({it.seconds:.1f} s)" for name, it in found.items())
    console.print(f"round {number + 1}, tokens/s: {shown}")


def ratios_of_jobs(found: Found) -> dict[str, dict[str, Any]]:
    """Tokens/s of each job as a ratio to each other side's; round by round, then the median and quartiles."""
    jobs = [it for it in found if it.startswith(JOB)]
    return {
        other: {job: dataclasses.asdict(spread(ratios(found[job], found[other]))) for job in jobs}
        for other in found
        if other not in jobs
    }


def job_targets(found: Found) -> list[Target]:
    """The targets whose sides were all run."""
    return [
        target
        for suffix, bounds in WANTED.items()
        for other, bound in bounds.items()
        for target in ratio_target(
            found, JOB + suffix, other + suffix, f"{JOB}{suffix}, ratio to {other}{suffix}", bound
        )
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison, prints it, and writes it down if asked."""
    options = read_arguments(arguments)
    stop_servers_on_sigterm()
    began = time.monotonic()
    with ExitStack() as stack:
        report = compare(options, stack)
    print_report(console, report)
    console.print(ratios_table("tokens/s as a ratio to", report["ratios"]))
    console.print(f"{options.rounds} rounds, {time.monotonic() - began:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
