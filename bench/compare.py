"""Compares encserve with what the same model can do at best, and with what one would otherwise do.

    python bench/compare.py MODEL_REPOSITORY [--model NAME] [--checkpoint DIRECTORY] [--rounds 4] [--only SIDE ...]
                            [--lengths TOKENS ...] [--against DIRECTORY] [--json FILE]

All sides are given the same sequences, of lengths that real texts have, on the same CPUs. Rounds are interleaved: in
each every side runs once, in random order, and what is reported are ratios taken round by round. The ceiling is ONNX
Runtime alone with the server's own session options, in the best order and with the best size of batches that a sweep
has found. encserve is a real server process, asked over loopback by the load generator of `encserve bench`.

PyTorch takes part where --checkpoint names a directory in the layout of Hugging Face. With --against the server of
another checkout takes part too, with the same flags: so a change is compared with what was before,

    python bench/compare.py models --only encserve-1-pooled encserve-64-pooled --lengths 10 --against ../before

See docs/performance.md.
"""

import argparse
import dataclasses
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.agreement import check_agreement, some_places
from harness.load import LARGE, MANY, ONE, ONE_POOLED, POOLED, served
from harness.machine import OtherWork, describe_machine, load_average
from harness.report import AGAINST, check_targets, print_report, ratios_table, ratios_to_against, summarise, warnings
from harness.rounds import Measurement, Patience, Side, measure
from harness.sides import (
    BARE,
    CEILING,
    NAIVE,
    TORCH,
    TORCH_BATCHED,
    bare_side,
    ceiling_side,
    naive_side,
    padding_graph,
    read_encoder,
    sweep_budgets,
    torch_sides,
)
from harness.workload import Workload, choose_lengths, open_tokenizer, random_workload, read_newest, text_workload

from encserve_server.engine.onnx import OnnxEngine
from encserve_server.system.cpus import usable_cpus
from encserve_server.types.bundles import Bundle, Graph

SIDES = (CEILING, BARE, NAIVE, TORCH, TORCH_BATCHED, ONE, ONE_POOLED, LARGE, MANY, POOLED)

console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)


def common_parser(description: str | None, checkpoint_for: str, *, needs_checkpoint: bool) -> argparse.ArgumentParser:
    """A parser of what this and bench/peers.py take; `checkpoint_for` says who needs the model's own directory."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="a model repository")
    parser.add_argument("--model", help="NAME or NAME@VERSION; the first one without it")
    checkpoint_help = f"the model's own directory, for {checkpoint_for}"
    parser.add_argument("--checkpoint", type=Path, required=needs_checkpoint, help=checkpoint_help)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5, help="how long each load lasts")
    parser.add_argument("--sequences", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience",
        type=float,
        default=120,
        metavar="SECONDS",
        help="how much longer to take, in all, for running again what others disturbed",
    )
    parser.add_argument("--server-flags", default="", help="further flags of encserve-server, in one string")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all figures there")
    return parser


def stop_servers_on_sigterm() -> None:
    """Whoever ends this must not leave running what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = common_parser(__doc__, "PyTorch and the naive batcher", needs_checkpoint=False)
    only_help = f"some of {', '.join(SIDES)}; the ceiling is always one"
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE", help=only_help)
    lengths_help = "how long the sequences are, in turn; as real texts without it"
    parser.add_argument("--lengths", nargs="+", type=int, default=(), metavar="TOKENS", help=lengths_help)
    against_help = "another checkout, whose .venv/bin/encserve-server is asked the same"
    parser.add_argument("--against", type=Path, metavar="DIRECTORY", help=against_help)
    options = parser.parse_args(arguments)
    if options.against and not (options.against / ".venv/bin/encserve-server").exists():
        parser.error(f"--against: {options.against} has no .venv/bin/encserve-server; run `make install` there")
    if min(options.lengths, default=1) < 1:
        parser.error(f"--lengths: must be at least 1; was {min(options.lengths)}")
    return options


def read_workload(bundle: Bundle, lengths: Sequence[int], seed: int) -> Workload:
    """Texts where the model takes them and its vocabulary has words, else random ids."""
    if bundle.tokenizer_file is not None:
        try:
            return text_workload(lengths, open_tokenizer(bundle.tokenizer_file), seed=seed)
        except ValueError as error:
            console.print(f"random ids in place of texts: {error}")
    return random_workload(lengths, vocab_size=bundle.vocab_size, seed=seed)


def announce(bundle: Bundle, machine: Mapping[str, Any], workload: Workload) -> None:
    """Says what is measured on what."""
    lengths = sorted(workload.lengths)
    console.print(
        f"{bundle.name}@{bundle.version} ({bundle.graph.precision}): {bundle.n_layers} layers, d_model {bundle.d_model}"
    )
    console.print(
        f"{machine['cpu']} ({machine['family']}), {machine['cpus']} CPUs, {' '.join(machine['flags'])}\n"
        + ", ".join(f"{name} {machine[name]}" for name in ("python", "onnxruntime", "torch", "grpcio", "numpy"))
    )
    median, longest = lengths[len(lengths) // 2], lengths[-1]
    console.print(f"{len(lengths)} sequences, {workload.tokens:,} tokens: median {median}, longest {longest}")


class Comparison:
    """Who is compared, and the rows that each computes of a few sequences.

    Attributes:
        sides: All but the ceiling.
        rows: (seq, d_model) arrays, by who computed them.
    """

    def __init__(self, options: argparse.Namespace, workload: Workload, stack: ExitStack) -> None:
        """Opens nothing yet; what must be closed goes onto `stack`."""
        self._options, self._workload, self._stack = options, workload, stack
        self.places = some_places(workload.lengths)
        self.sides: list[Side] = []
        self.rows: dict[str, Sequence[Any]] = {}

    def open_engine(self, graph: Graph) -> OnnxEngine:
        """A graph on ONNX Runtime with the server's own session options."""
        engine = OnnxEngine(graph, device="cpu", intra_op_threads=usable_cpus(), parallel_runs=None)
        self._stack.callback(engine.close)
        return engine

    def add_checkpoint(self, graph: Graph) -> None:
        """PyTorch, and the graph that others would make of it."""
        encoder = read_encoder(self._options.checkpoint)
        first = [self._workload.sequences[it] for it in self.places]
        if NAIVE in self._options.only:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            padding = self.open_engine(padding_graph(encoder, graph, folder))
            self.rows["the graph that pads"] = [padding.run([it]).rows[0] for it in first]
            self.sides.append(naive_side(padding, self._workload))
        of_torch, encode = torch_sides(encoder, usable_cpus(), self._workload)
        self.rows["PyTorch"] = [encode(it) for it in first]
        self.sides += of_torch

    def add_servers(self, bundle: Bundle, best_budget: int) -> None:
        """Ours, and the other checkout's."""
        flags = ["--model", f"{bundle.name}@{bundle.version}", "--device", "cpu"]
        # Two builds are compared, and not what each happens to find by measuring.
        against = self._options.against
        flags += ["--max-batch-tokens", str(best_budget)] if against else ["--tune-batches"]
        flags += shlex.split(self._options.server_flags)
        asked = (self._options.model_repository, flags, self._workload, self._options.seconds)
        ours = self._stack.enter_context(served(*asked))
        self.sides += ours.sides()
        self.rows["encserve"] = ours.rows(self.places)
        if against:
            program = against.absolute() / ".venv/bin/encserve-server"
            theirs = self._stack.enter_context(served(*asked, program=program))
            self.rows[f"encserve of {against}"] = theirs.rows(self.places)
            for side in theirs.sides():
                self.sides.append(
                    dataclasses.replace(side, name=side.name + AGAINST, label=f"{side.label}, of {against}")
                )

    def chosen(self, ceiling: Side) -> list[Side]:
        """The sides that `--only` names, and the ceiling."""
        return [ceiling, *(it for it in self.sides if it.name.removesuffix(AGAINST) in self._options.only)]


def compare(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Opens everything, runs the rounds and gives the report; what must be closed goes onto `stack`."""
    load_before, machine, others = load_average(), describe_machine(), OtherWork()
    bundle = read_newest(options.model_repository, options.model)
    if bundle.graph.takes_vectors:
        raise SystemExit(f"{bundle.name} takes vectors; this compares models that take token ids")
    lengths = choose_lengths(
        options.sequences, seed=options.seed, longest=bundle.max_sequence_tokens, given=options.lengths
    )
    workload = read_workload(bundle, lengths, options.seed)
    announce(bundle, machine, workload)
    comparison = Comparison(options, workload, stack)
    engine = comparison.open_engine(bundle.graph)
    budgets = sweep_budgets(engine, workload, options.seed)
    best = max(budgets, key=lambda it: budgets[it])
    console.print("tokens/s by budget: " + ", ".join(f"{it}: {rate:,.0f}" for it, rate in budgets.items()))
    comparison.sides.append(bare_side(engine, workload))
    if not options.checkpoint:
        console.print("PyTorch and the naive batcher are left out: --checkpoint names no directory")
    elif {NAIVE, TORCH, TORCH_BATCHED} & set(options.only):
        comparison.add_checkpoint(bundle.graph)
    comparison.add_servers(bundle, best)
    wanted = [engine.run([workload.sequences[it]]).rows[0] for it in comparison.places]
    agreement = check_agreement(comparison.rows, wanted)
    sides = comparison.chosen(ceiling_side(engine, workload, best))
    patience = Patience(options.patience, lambda: OtherWork().share)
    found = measure(sides, options.rounds, options.seed, show_round, patience)
    return {
        "model": {"name": bundle.name, "version": bundle.version, "fingerprint": bundle.fingerprint},
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "used_by_others": others.share(),
        "workload": {
            "sequences": len(lengths),
            "tokens": workload.tokens,
            "seed": options.seed,
            "lengths": list(options.lengths) or "those of real texts",
        },
        "sweep": {str(budget): rate for budget, rate in budgets.items()},
        "agreement": agreement,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "warnings": warnings(load_before, found),
        "sides": summarise(sides, found),
        "targets": [dataclasses.asdict(it) for it in check_targets(found)],
        "ratios_to_against": ratios_to_against(found),
    }


def show_round(number: int, found: Mapping[str, Measurement]) -> None:
    """Says how a round went, so that nobody has to wait in the dark."""
    ceiling = found[CEILING].tokens_per_second
    shown = ", ".join(f"{name} {it.tokens_per_second / ceiling:.2f}" for name, it in found.items() if name != CEILING)
    console.print(f"round {number + 1}: ceiling {ceiling:,.0f} tokens/s; {shown}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison, prints it, and writes it down if asked."""
    options = read_arguments(arguments)
    stop_servers_on_sigterm()
    began = time.monotonic()
    with ExitStack() as stack:
        report = compare(options, stack)
    print_report(console, report)
    if report["ratios_to_against"]:
        console.print(ratios_table(f"ratio to the server of {options.against}", report["ratios_to_against"]))
    load = report["load_average"]
    used = "" if report["used_by_others"] is None else f"; others used {report['used_by_others']:.1%} of the CPUs"
    console.print(
        f"{options.rounds} rounds in {time.monotonic() - began:.0f} s; load average {load['before']:.2f} before, "
        f"{load['after']:.2f} after (this run included){used}"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
