"""Compares the speed of an embed job with the speed of the inference engine alone, and with sentence-transformers.

    python bench/bulk.py MODEL_REPOSITORY --checkpoint DIRECTORY [--model NAME] [--rounds 7] [--texts 3000]
                         [--part-rows 750] [--max-batch-tokens TOKENS] [--json FILE]

A side is one way to compute the vectors of texts. The program compares three sides: a job, a ceiling and
sentence-transformers. All sides get the same texts, with realistic lengths. Each round runs every side once, in random
order.

- The job is `encserve embed --input texts.parquet --output FOLDER/ --bundle MODEL`. The model is loaded once. Each
  round plans a job with a new output folder, and runs the job. The measured time includes reading Parquet, tokenizing,
  computing and writing Parquet. The time does not include loading the model and planning the job.
- The ceiling is the inference engine alone. The engine runs batches of texts, sorted by length, one after another.
  Before the rounds, a sweep measures several batch sizes and chooses the fastest. Only inference is timed.
- sentence-transformers' `encode` gets all texts in one call. Another sweep chooses the batch size. The measured time
  includes tokenizing, but not reading and writing files.

If the CPU has bfloat16, all sides run a second time in bfloat16. The job and the ceiling then use OpenVINO. Before the
rounds, some vectors of every side are compared with the vectors of the ceiling in float32.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.agreement import compare_rows, probe_indices
from harness.command import Comparison, console, make_parser, run_comparison
from harness.report import Found, Target, ratio_target, ratios_between
from harness.rounds import Measurement, Side, best_rates
from harness.sides import CEILING, SWEEP_ROUNDS, ceiling_side, run_batches, sweep_budgets
from harness.workload import Workload, choose_lengths, read_newest, sorted_batches, text_workload

from encserve_cli.files.reading import ReadOptions
from encserve_cli.job import EmbedJob, EngineOptions, LocalBackend, LocalWorker, MakeOptions, ModelFacts
from encserve_server.engine.base import Engine
from encserve_server.engine.opening import open_engine
from encserve_server.errors import DeviceError, EngineMissing
from encserve_server.outputs.rows import pool
from encserve_server.system.cpus import usable_cpus

JOB, SENTENCES = "job", "sentence-transformers"
BFLOAT16 = "-bfloat16"  # the names of sides in bfloat16 end with this suffix
# The lowest allowed ratio (job's tokens/s) / (other side's tokens/s), for each precision and each other side.
BOUNDS = {"": {CEILING: 0.95, SENTENCES: 1.5}, BFLOAT16: {CEILING: 0.90, SENTENCES: 2.5}}
ENGINES = {
    "": EngineOptions("onnxruntime", "float32", "cpu"),
    BFLOAT16: EngineOptions("openvino", "bfloat16", "cpu"),
}
LEAST_COSINE = 0.99  # the lowest allowed cosine between a text's vectors in bfloat16 and in float32
BATCH_SIZES = (8, 16, 32, 64, 128)
SWEEP_TEXTS = 600


class Job:
    """An embed job whose model is loaded once for all rounds.

    `EmbedJob` calls the method `open` of this class to get the model.

    Attributes:
        worker: The loaded model.
        budget: The largest number of padded tokens in a batch.
    """

    def __init__(self, directory: Path, engine: EngineOptions, file: Path, part_rows: int) -> None:
        """Load the model in `directory`. The job embeds the texts of the Parquet file `file`."""
        self.worker = LocalBackend(directory, engine).open(MakeOptions(), None)
        self.budget = self.worker.model.max_batch_tokens
        self._file = file
        self._part_rows = part_rows

    def open(self, make: MakeOptions, before: ModelFacts | None) -> LocalWorker:
        """Return the loaded model. `EmbedJob` calls this method."""
        del make, before
        return OpenWorker(self.worker.make, self.worker.model, self.worker.encoder)

    def run(self, tokens: int) -> tuple[Measurement, Any]:
        """Embed all texts, `tokens` tokens in all. Return the measurement and the written table."""
        with (
            tempfile.TemporaryDirectory() as folder,
            EmbedJob(
                [str(self._file)], folder, self, read=ReadOptions(), make=MakeOptions(), part_rows=self._part_rows
            ) as job,
        ):
            began = time.perf_counter()
            done = job.run()
            seconds = time.perf_counter() - began
            if (done.rejected, done.tokens) != (0, tokens):
                raise RuntimeError(
                    f"the job computed {done.tokens:,} of {tokens:,} tokens; rejected texts: {done.rejected}"
                )
            return Measurement(tokens, seconds), parquet.read_table(folder)


class OpenWorker(LocalWorker):
    """A worker whose model stays open after a job, for the next round."""

    def close(self) -> None:
        """Keep the model open."""


class Sides:
    """The ceiling, the job and sentence-transformers, in one or two precisions.

    Attributes:
        sides: All sides; the first is the ceiling in float32.
        sweeps: The tokens/s for each budget or batch size of a sweep. The keys are the names of the sides.
        agreement: For each side, the largest difference and the lowest cosine between the side's vectors and the
            vectors of the float32 ceiling.
    """

    def __init__(self, comparison: Comparison, stack: ExitStack) -> None:
        """Write the texts to a Parquet file in a temporary folder."""
        self._options, self._bundle, self._workload = comparison.options, comparison.bundle, comparison.workload
        self._stack = stack
        self._sweep_workload = Workload(self._workload.sequences[:SWEEP_TEXTS], self._workload.texts[:SWEEP_TEXTS])
        self._indices = probe_indices(self._workload.lengths)
        self._reference: list[Any] = []
        self._file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "texts.parquet")
        self.sides: list[Side] = []
        self.sweeps: dict[str, dict[str, float]] = {}
        self.agreement: dict[str, dict[str, float]] = {}
        parquet.write_table(pa.table({"text": self._workload.texts}), self._file)

    def add(self, suffix: str) -> None:
        """Add the three sides in one precision; `suffix` is the key of the precision in `ENGINES`.

        Raises:
            DeviceError: This CPU does not support the precision.
            EngineMissing: The engine is not installed.
            SystemExit: This program does not support the model's pooling. Or the texts of the job's output differ from
                the input. Or a side's vectors differ from the float32 ceiling's vectors.
        """
        engine = dataclasses.replace(ENGINES[suffix], max_batch_tokens=self._options.max_batch_tokens)
        self._add_ceiling(suffix, engine)
        directory = self._options.model_repository / self._bundle.name / self._bundle.version
        job = Job(directory, engine, self._file, self._options.part_rows)
        self._stack.callback(job.worker.close)
        table = job.run(self._workload.tokens)[1]
        if table["text"].to_pylist() != self._workload.texts:
            raise SystemExit("the texts of the job's output are not the texts of the input in the same order")
        vectors = [np.array(table["vector"][index].as_py(), np.float32) for index in self._indices]
        label = f"job, Parquet to Parquet, {engine.engine}, {engine.precision}, {job.budget} padded tokens"
        self._add(Side(JOB + suffix, label, lambda: job.run(self._workload.tokens)[0]), vectors)
        self._add_sentences(suffix, engine.precision)

    def _add_ceiling(self, suffix: str, options: EngineOptions) -> None:
        engine: Engine = open_engine(
            self._bundle.graph,
            engine=options.engine,
            precision=options.precision,
            device="cpu",
            intra_op_threads=usable_cpus(),
        )
        self._stack.callback(engine.close)
        rates = sweep_budgets(engine, self._sweep_workload, self._options.seed)
        best = int(self._best(CEILING + suffix, "budget", {str(budget): rate for budget, rate in rates.items()}))
        run_batches(
            engine, sorted_batches(self._workload.sequences, best)
        )  # the warm-up runs batch shapes that the sweep did not run
        vectors = [self._vector(engine, index) for index in self._indices]
        self._reference = self._reference or vectors
        label = f"{options.engine} alone, {options.precision}, all sorted, {best} padded tokens"
        side = dataclasses.replace(ceiling_side(engine, self._workload, best), name=CEILING + suffix, label=label)
        self._add(side, vectors)

    def _vector(self, engine: Engine, index: int) -> Any:
        """Compute a text's hidden states with an engine. Return the pooled vector, (d_model,)."""
        pooling = self._bundle.pooling
        if pooling is None or not pooling.is_plain or pooling.dimensions:
            raise SystemExit(f"{self._bundle.name}: bench/bulk.py needs a model with one pooling over all tokens")
        vector = pool(engine.run([self._workload.sequences[index]]), pooling.kinds[0])[0]  # (d_model,)
        return vector / np.linalg.norm(vector) if pooling.l2_normalize else vector

    def _add_sentences(self, suffix: str, precision: str) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(usable_cpus())
        dtype = {"dtype": getattr(torch, precision)}
        model = SentenceTransformer(str(self._options.checkpoint), device="cpu", model_kwargs=dtype)

        def encode(texts: Sequence[str], size: int) -> Any:
            # The server's tokenizer turns off the threads of all tokenizers in this process. Turn the threads on again.
            with mock.patch.dict(os.environ, TOKENIZERS_PARALLELISM="true"):
                return model.encode(texts, batch_size=size, show_progress_bar=False)

        def run(workload: Workload, size: int) -> Measurement:
            began = time.perf_counter()
            encode(workload.texts, size)
            return Measurement(workload.tokens, time.perf_counter() - began)

        run(self._sweep_workload, max(BATCH_SIZES))  # the first run allocates PyTorch's memory
        sizes = [Side(str(size), "", partial(run, self._sweep_workload, size)) for size in BATCH_SIZES]
        rates = best_rates(sizes, SWEEP_ROUNDS, self._options.seed)
        best = int(self._best(SENTENCES + suffix, "batch size", rates))
        label = f"sentence-transformers' encode, {precision}, batches of {best}"
        vectors = list(encode([self._workload.texts[index] for index in self._indices], 1))
        self._add(Side(SENTENCES + suffix, label, partial(run, self._workload, best)), vectors)

    def _best(self, side: str, setting: str, rates: dict[str, float]) -> str:
        self.sweeps[side] = rates
        console.print(f"{side}, tokens/s by {setting}: " + ", ".join(f"{it}: {rates[it]:,.0f}" for it in rates))
        return max(rates, key=lambda it: rates[it])

    def _add(self, side: Side, vectors: Sequence[Any]) -> None:
        """Add a side. Its vectors, (d_model,) each, must agree with the vectors of the float32 ceiling."""
        least_cosine = LEAST_COSINE if side.name.endswith(BFLOAT16) else None
        got, want = ([vector[None] for vector in its] for its in (vectors, self._reference))  # (1, d_model) each
        self.agreement[side.name] = compare_rows(side.name, got, want, least_cosine=least_cosine)
        self.sides.append(side)


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, checkpoint_for="sentence-transformers", needs_checkpoint=True, rounds=7, patience=300)
    parser.add_argument("--texts", type=int, default=3000)
    parser.add_argument("--part-rows", type=int, default=750, help="the number of rows in a part of the job")
    budget_help = "the largest number of padded tokens in a batch of the job; default: chosen by the job"
    parser.add_argument("--max-batch-tokens", type=int, metavar="TOKENS", help=budget_help)
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Start all sides, run the rounds, and return the report."""
    bundle = read_newest(options.model_repository, options.model)
    lengths = choose_lengths(options.texts, seed=options.seed, longest=bundle.max_sequence_tokens)
    comparison = Comparison(options, bundle, text_workload(bundle, lengths, seed=options.seed))
    sides = Sides(comparison, stack)
    sides.add("")
    try:
        sides.add(BFLOAT16)
    except (DeviceError, EngineMissing) as error:
        console.print(f"bfloat16 is left out: {error}")
    found = comparison.measure(sides.sides)
    jobs = [name for name in found if name.startswith(JOB)]
    ratios = ratios_between(found, jobs, [name for name in found if name not in jobs])
    return comparison.report(
        sides.sides, found, job_targets(found), ratios, agreement=sides.agreement, sweeps=sides.sweeps
    )


def job_targets(found: Found) -> list[Target]:
    """Return the targets of the jobs that ran. A job is compared with the other sides of the same precision."""
    return [
        target
        for suffix, bounds in BOUNDS.items()
        for other, bound in bounds.items()
        for target in ratio_target(
            found, JOB + suffix, other + suffix, f"{JOB}{suffix}, ratio to {other}{suffix}", bound
        )
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the sides, print the report, and write it to the file of --json."""
    run_comparison(compare, read_arguments(arguments))


if __name__ == "__main__":
    main()
