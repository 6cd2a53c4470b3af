"""Compares encserve with ONNX Runtime alone, and with other ways to run the same model.

    python bench/compare.py MODEL_REPOSITORY [--model NAME] [--checkpoint DIRECTORY] [--rounds 4] [--only SIDE ...]
                            [--lengths TOKENS ...] [--against DIRECTORY] [--json FILE]

A side is one way to run the model. All sides get the same sequences on the same CPUs. Each round runs every side once,
in random order. Ratios are computed within a round. The ceiling is ONNX Runtime alone, with the server's session
options. The ceiling's batches are sorted by length, and have the fastest batch size. The load generator of `encserve
bench` calls the servers.

--checkpoint adds three sides: PyTorch with batches, PyTorch without batches, and a naive batcher. The naive batcher
makes batches in order of arrival, and runs a graph that PyTorch exported.

--against measures the effect of a change. The option adds the server of another checkout of encserve, with equal flags:

    python bench/compare.py models --only encserve-1-pooled encserve-64-pooled --lengths 10 --against ../before

See docs/explanation/benchmark-method.md.
"""

import argparse
import dataclasses
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.agreement import compare_rows, probe_indices
from harness.command import Comparison, add_server_options, console, make_parser, run_comparison
from harness.load import LARGE, MANY, ONE, ONE_POOLED, POOLED, served
from harness.report import AGAINST, check_targets, ratios_to_against
from harness.rounds import Side
from harness.sides import (
    BARE,
    CEILING,
    NAIVE,
    TORCH,
    TORCH_BATCHED,
    bare_side,
    ceiling_side,
    load_transformers,
    naive_side,
    padded_graph,
    sweep_budgets,
    torch_sides,
)
from harness.workload import Workload, choose_lengths, random_workload, read_newest, text_workload

from encserve_server.engine.onnx import OnnxEngine
from encserve_server.system.cpus import usable_cpus
from encserve_server.types.bundles import Bundle, Graph

SIDES = (CEILING, BARE, NAIVE, TORCH, TORCH_BATCHED, ONE, ONE_POOLED, LARGE, MANY, POOLED)


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(
        __doc__, checkpoint_for="PyTorch and the naive batcher", needs_checkpoint=False, rounds=4, patience=120
    )
    add_server_options(parser)
    only_help = f"the sides to run, from {', '.join(SIDES)}; the ceiling always runs"
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE", help=only_help)
    lengths_help = "lengths of the sequences, repeated in this order; default: lengths of real texts"
    parser.add_argument("--lengths", nargs="+", type=int, default=(), metavar="TOKENS", help=lengths_help)
    against_help = "the folder of another checkout of encserve; the folder must have .venv/bin/encserve-server"
    parser.add_argument("--against", type=Path, metavar="DIRECTORY", help=against_help)
    options = parser.parse_args(arguments)
    if options.against and not (options.against / ".venv/bin/encserve-server").exists():
        parser.error(f"--against: {options.against} has no .venv/bin/encserve-server; run `make install` there")
    if min(options.lengths, default=1) < 1:
        parser.error(f"--lengths: each length must be at least 1 token; was {min(options.lengths)}")
    return options


def read_workload(bundle: Bundle, lengths: Sequence[int], seed: int) -> Workload:
    """Return texts, if the model has a tokenizer and the vocabulary has words of one token. Else return random ids."""
    try:
        return text_workload(bundle, lengths, seed=seed)
    except ValueError as error:
        console.print(f"the workload has random token ids instead of texts: {error}")
        return random_workload(lengths, vocab_size=bundle.vocab_size, seed=seed)


def open_engine(graph: Graph, stack: ExitStack) -> OnnxEngine:
    """Open a graph on ONNX Runtime with the server's session options. When `stack` ends, the engine is closed."""
    engine = OnnxEngine(graph, device="cpu", intra_op_threads=usable_cpus(), parallel_runs=None)
    stack.callback(engine.close)
    return engine


class Sides:
    """All sides except the ceiling. The sides' hidden states are compared with ONNX Runtime's hidden states.

    Attributes:
        sides: The sides that are added so far.
        agreement: For each program, the largest difference and the lowest cosine between the program's hidden states
            and ONNX Runtime's hidden states.
    """

    def __init__(self, comparison: Comparison, engine: OnnxEngine, stack: ExitStack) -> None:
        """Compute the reference hidden states of some sequences with `engine`, one sequence at a time."""
        self._comparison, self._workload, self._stack = comparison, comparison.workload, stack
        self._indices = probe_indices(self._workload.lengths)
        self._probes = [self._workload.sequences[index] for index in self._indices]
        self._reference = [engine.run([sequence]).rows[0] for sequence in self._probes]
        self.sides: list[Side] = [bare_side(engine, self._workload)]
        self.agreement: dict[str, dict[str, float]] = {}

    def add_checkpoint(self, checkpoint: Path, *, naive: bool) -> None:
        """Add the sides on PyTorch. If `naive` is true, also add the naive batcher."""
        model = load_transformers(checkpoint)
        if naive:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            graph = padded_graph(model, self._comparison.bundle.graph, folder / "padded.onnx")
            engine = open_engine(graph, self._stack)
            self._check("padded graph", [engine.run([sequence]).rows[0] for sequence in self._probes])
            self.sides.append(naive_side(engine, self._workload))
        sides, encode = torch_sides(model, usable_cpus(), self._workload)
        self._check("PyTorch", [encode(sequence) for sequence in self._probes])
        self.sides += sides

    def add_servers(self, best_budget: int) -> None:
        """Add the sides that call this checkout's server. With --against, also call the other checkout's server."""
        options, bundle = self._comparison.options, self._comparison.bundle
        flags = ["--model", f"{bundle.name}@{bundle.version}", "--device", "cpu"]
        # Both servers get the same batch size, so that the servers differ only in their code.
        flags += ["--max-batch-tokens", str(best_budget)] if options.against else ["--tune-batches"]
        flags += shlex.split(options.server_flags)
        settings = (options.model_repository, flags, self._workload, options.seconds)
        ours = self._stack.enter_context(served(*settings))
        self._check("encserve", ours.rows(self._indices))
        self.sides += ours.sides()
        if options.against:
            program = options.against.absolute() / ".venv/bin/encserve-server"
            theirs = self._stack.enter_context(served(*settings, program=program))
            self._check(f"encserve of {options.against}", theirs.rows(self._indices))
            self.sides += [
                dataclasses.replace(side, name=side.name + AGAINST, label=f"{side.label}, of {options.against}")
                for side in theirs.sides()
            ]

    def _check(self, name: str, rows: Sequence[Any]) -> None:
        self.agreement[name] = compare_rows(name, rows, self._reference)


def compare(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Start all sides, run the rounds, and return the report."""
    bundle = read_newest(options.model_repository, options.model)
    if bundle.graph.takes_vectors:
        raise SystemExit(f"{bundle.name} takes vectors; bench/compare.py needs a --model that takes token ids")
    lengths = choose_lengths(
        options.sequences, seed=options.seed, longest=bundle.max_sequence_tokens, given=options.lengths
    )
    workload = read_workload(bundle, lengths, options.seed)
    comparison = Comparison(options, bundle, workload)
    engine = open_engine(bundle.graph, stack)
    budgets = sweep_budgets(engine, workload, options.seed)
    best = max(budgets, key=lambda budget: budgets[budget])
    console.print("tokens/s by budget: " + ", ".join(f"{budget}: {rate:,.0f}" for budget, rate in budgets.items()))
    others = Sides(comparison, engine, stack)
    if not options.checkpoint:
        console.print("without --checkpoint, PyTorch and the naive batcher are left out")
    elif {NAIVE, TORCH, TORCH_BATCHED} & set(options.only):
        others.add_checkpoint(options.checkpoint, naive=NAIVE in options.only)
    others.add_servers(best)
    chosen = [side for side in others.sides if side.name.removesuffix(AGAINST) in options.only]
    sides = [ceiling_side(engine, workload, best), *chosen]
    found = comparison.measure(sides)
    return comparison.report(
        sides, found, check_targets(found), ratios_to_against(found), agreement=others.agreement, sweep=budgets
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the sides, print the report, and write it to the file of --json."""
    run_comparison(compare, read_arguments(arguments))


if __name__ == "__main__":
    main()
