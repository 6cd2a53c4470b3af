"""Compares encserve with what the same model can do at best, and with what one would otherwise do.

    python bench/compare.py MODEL_REPOSITORY [--model NAME] [--checkpoint DIRECTORY] [--rounds 4] [--only SIDE ...]
                            [--json FILE]

All sides are given the same sequences, of lengths that real texts have, on the same CPUs. Rounds are interleaved: in
each every side runs once, in random order, and what is reported are ratios taken round by round. The ceiling is ONNX
Runtime alone with the server's own session options, in the best order and with the best size of batches that a sweep
has found. encserve is a real server process, asked over loopback by a third process.

PyTorch takes part where --checkpoint names a directory in the layout of Hugging Face. See docs/performance.md.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from comparison.agreement import AGREEING, check_agreement
from comparison.arguments import common_parser
from comparison.load import load_process
from comparison.machine import OtherWork, describe_machine, load_average, process_tree
from comparison.report import print_report, to_json, warnings
from comparison.rounds import Measurement, Patience, Side, measure
from comparison.sides import (
    CEILING,
    EMPTY,
    MINIMAL,
    NAIVE,
    WINDOW,
    calls_of,
    encserve_sides,
    engine_sides,
    naive_side,
    padding_graph,
    read_encoder,
    run_side_by_side,
    small_sides,
    sweep_budgets,
    torch_sides,
)
from comparison.small_servers import empty_calls, empty_server, minimal_calls, minimal_server
from comparison.workload import LENGTHS, Workload, read_workload
from real_server import real_server

from encserve_client import EncoderClient
from encserve_server.engine.onnx import OnnxEngine
from encserve_server.repository.bundle import read_bundle
from encserve_server.repository.scan import newest_bundle
from encserve_server.system.cpus import usable_cpus
from encserve_server.types import Bundle, Graph

console = Console(width=None if sys.stdout.isatty() else 150)


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = common_parser(__doc__, "PyTorch", needs_checkpoint=False)
    parser.add_argument("--only", nargs="+", metavar="SIDE", help="names of sides; the ceiling is always one")
    return parser.parse_args(arguments)


def announce(bundle: Bundle, machine: Mapping[str, Any], workload: Workload) -> None:
    """Says what is measured on what."""
    lengths = sorted(map(len, workload.sequences))
    console.print(
        f"{bundle.name}@{bundle.version} ({bundle.graph.precision}): {bundle.n_layers} layers, d_model {bundle.d_model}"
    )
    console.print(
        f"{machine['cpu']} ({machine['family']}), {machine['cpus']} CPUs, {' '.join(machine['flags'])}\n"
        + ", ".join(f"{name} {machine[name]}" for name in ("python", "onnxruntime", "torch", "grpcio", "numpy"))
    )
    console.print(
        f"{len(lengths)} sequences, {workload.tokens:,} tokens: median {lengths[len(lengths) // 2]}, "
        f"longest {lengths[-1]}",
        highlight=False,
    )


def compare(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Opens everything, runs the rounds and gives the report; what must be closed goes onto `stack`."""
    load_before, machine = load_average(), describe_machine()
    directory = newest_bundle(options.model_repository, options.model)
    bundle = read_bundle(directory)
    if bundle.graph.takes_vectors:
        raise SystemExit(f"{bundle.name} takes vectors; this compares models that take token ids")
    workload = read_workload(
        LENGTHS,
        count=options.sequences,
        seed=options.seed,
        vocab_size=bundle.vocab_size,
        longest=bundle.max_sequence_tokens,
    )
    announce(bundle, machine, workload)
    engine = _open_engine(bundle.graph, stack)
    flags = ["--model", f"{bundle.name}@{bundle.version}", "--device", "cpu", "--tune-batches"]
    flags += shlex.split(options.server_flags)
    server = stack.enter_context(real_server(options.model_repository, *flags))
    load = stack.enter_context(load_process(server.target, calls_of(workload)))
    first = workload.sequences[:AGREEING]
    nothing = {EMPTY: empty_calls(workload.sequences, bundle.d_model)}
    empty = stack.enter_context(load_process(stack.enter_context(empty_server()), nothing))
    small = stack.enter_context(minimal_server(directory, usable_cpus()))
    minimal = stack.enter_context(load_process(small, {MINIMAL: minimal_calls(workload.sequences)}))
    with EncoderClient(server.target) as client:
        rows = {"encserve": list(client.encode(first))}
    pids = process_tree(os.getpid())
    others, patience = OtherWork(pids), Patience(options.patience, lambda: OtherWork(pids).share)

    budgets = sweep_budgets(engine, workload, options.seed)
    best = max(budgets, key=lambda it: budgets[it])
    console.print("tokens/s by budget: " + ", ".join(f"{it}: {rate:,.0f}" for it, rate in budgets.items()))
    parallel_budgets = sweep_budgets(engine, workload, options.seed, run_side_by_side)
    sides = engine_sides(engine, workload, best, max(parallel_budgets, key=lambda it: parallel_budgets[it]))
    if options.checkpoint:
        encoder = read_encoder(options.checkpoint)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        padding = _open_engine(padding_graph(encoder, bundle.graph, folder), stack)
        rows["the graph that pads"] = [padding.run([it]).rows[0] for it in first]
        sides.append(
            naive_side(NAIVE, f"naive batcher: {WINDOW} in order of arrival, everything padded", padding, workload)
        )
        of_torch, encode = torch_sides(encoder, usable_cpus(), workload)
        rows["PyTorch"] = [encode(it) for it in first]
        sides += of_torch
    else:
        console.print("PyTorch and the naive batcher are left out: --checkpoint names no directory")
    sides += [*small_sides(empty, minimal, workload), *encserve_sides(load, workload)]
    agreement = check_agreement(engine, rows, workload)
    found = measure(chosen(sides, options.only), options.rounds, options.seed, show_round, patience)
    share = others.share()
    context = {
        "model": {"name": bundle.name, "version": bundle.version, "fingerprint": bundle.fingerprint},
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "used_by_others": share,
        "workload": {
            "sequences": len(workload.sequences),
            "tokens": workload.tokens,
            "seed": options.seed,
            "lengths": workload.about,
        },
        "sweep": {str(budget): rate for budget, rate in budgets.items()},
        "agreement": agreement,
        "rounds": options.rounds,
        "warnings": warnings(load_before, found),
    }
    return to_json(chosen(sides, options.only), found, context)


def _open_engine(graph: Graph, stack: ExitStack) -> OnnxEngine:
    engine = OnnxEngine(graph, device="cpu", intra_op_threads=usable_cpus(), parallel_runs=None)
    stack.callback(engine.close)
    return engine


def chosen(sides: Sequence[Side], only: Sequence[str] | None) -> list[Side]:
    """The sides that `--only` names, and the ceiling.

    Raises:
        SystemExit: It names one that is not there.
    """
    names = {side.name for side in sides}
    if only and not set(only) <= names:
        raise SystemExit(
            f"--only: no side {', '.join(sorted(set(only) - names))}; there are {', '.join(sorted(names))}"
        )
    return [side for side in sides if not only or side.name in {CEILING, *only}]


def show_round(number: int, found: Mapping[str, Measurement]) -> None:
    """Says how a round went, so that nobody has to wait in the dark."""
    ceiling = found[CEILING].tokens_per_second
    shown = ", ".join(f"{name} {it.tokens_per_second / ceiling:.2f}" for name, it in found.items() if name != CEILING)
    console.print(f"round {number + 1}: ceiling {ceiling:,.0f} tokens/s; {shown}", highlight=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison, prints it, and writes it down if asked."""
    options = read_arguments(arguments)
    began = time.monotonic()
    with ExitStack() as stack:
        report = compare(options, stack)
    print_report(console, report)
    load = report["load_average"]
    used = "" if report["used_by_others"] is None else f"; others used {report['used_by_others']:.1%} of the CPUs"
    console.print(
        f"{options.rounds} rounds in {time.monotonic() - began:.0f} s; load average {load['before']:.2f} before, "
        f"{load['after']:.2f} after (this run included){used}",
        highlight=False,
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
