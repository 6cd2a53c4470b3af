"""The options, measurement and report that the comparisons in bench/ share."""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from encserve_server.types.bundles import Bundle
from harness.machine import PACKAGES, OtherWork, describe_run, load_average, portable, write_report
from harness.report import Found, Ratios, Target, print_report, summarize, warnings
from harness.rounds import Measurement, Patience, Side, measure
from harness.workload import Workload

console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)


def make_parser(
    description: str | None, *, checkpoint_for: str, needs_checkpoint: bool, rounds: int, patience: float
) -> argparse.ArgumentParser:
    """Return a parser with the shared options. `checkpoint_for` names the sides that need the option --checkpoint."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="the folder of the models")
    parser.add_argument("--model", help="NAME or NAME@VERSION; default: the first model")
    checkpoint_help = f"the model in Hugging Face's layout, for {checkpoint_for}"
    parser.add_argument("--checkpoint", type=Path, required=needs_checkpoint, metavar="DIRECTORY", help=checkpoint_help)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=0)
    patience_help = "how long, in total, the program may repeat runs that other processes disturbed"
    parser.add_argument("--patience", type=float, default=patience, metavar="SECONDS", help=patience_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    return parser


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for comparisons that start servers."""
    parser.add_argument("--seconds", type=float, default=5, help="how long each measurement sends calls")
    parser.add_argument("--sequences", type=int, default=600)
    parser.add_argument("--server-flags", default="", help="further flags of encserve-server, in one string")


class Comparison:
    """A comparison of sides. A side is one way to run the model on the workload.

    Attributes:
        options: The parsed command line.
        bundle: The model.
        workload: The sequences.
    """

    def __init__(self, options: argparse.Namespace, bundle: Bundle, workload: Workload) -> None:
        """Read the load of the machine before the sides start. Print the model, the machine and the workload."""
        self.options, self.bundle, self.workload = options, bundle, workload
        self._load_before, self._run, self._other_work = load_average(), describe_run(), OtherWork()
        lengths = sorted(workload.lengths)
        machine = self._run["machine"]
        console.print(
            f"{bundle.name}@{bundle.version} ({bundle.graph.precision}), {bundle.n_layers} × {bundle.d_model}"
        )
        console.print(f"{machine['cpu']} ({machine['family']}), {machine['cpus']} CPUs, {' '.join(machine['flags'])}")
        console.print(", ".join(f"{name} {machine[name]}" for name in ("python", *PACKAGES)))
        console.print(
            f"{len(lengths):,} sequences, {workload.tokens:,} tokens: median {lengths[len(lengths) // 2]}, "
            f"longest {lengths[-1]}"
        )

    def measure(self, sides: Sequence[Side]) -> Found:
        """In each round, run every side once, in random order."""
        patience = Patience(self.options.patience, lambda: OtherWork().share)
        return measure(sides, self.options.rounds, self.options.seed, patience, _print_round)

    def report(
        self, sides: Sequence[Side], found: Found, targets: Sequence[Target], ratios: Ratios, **more: Any
    ) -> dict[str, Any]:
        """Return all numbers, for `print_report` and --json. `more` has the entries that only some programs have."""
        return {
            "model": {name: getattr(self.bundle, name) for name in ("name", "version", "fingerprint")},
            **self._run,
            "load_average": {"before": self._load_before, "after": load_average()},
            "used_by_others": self._other_work.share(),
            "options": {name: portable(value) for name, value in vars(self.options).items()},
            "workload": {"sequences": len(self.workload.sequences), "tokens": self.workload.tokens},
            "warnings": warnings(self._load_before, found),
            "sides": summarize(sides, found),
            "targets": list(targets),
            "ratios": ratios,
            **more,
        }


def _print_round(number: int, found: Mapping[str, Measurement]) -> None:
    rates = ", ".join(f"{name} {run.tokens_per_second:,.0f}" for name, run in found.items())
    console.print(f"round {number + 1}, tokens/s: {rates}")


def run_comparison(
    compare: Callable[[argparse.Namespace, ExitStack], dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    """Compare, print the report, and write it to the file of --json. SIGTERM ends the program and its servers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    with ExitStack() as stack:
        report = compare(options, stack)
    print_report(console, report)
    load, others = report["load_average"], report["used_by_others"]
    console.print(
        f"{options.rounds} rounds, {time.monotonic() - began:.0f} s in all; load average {load['before']:.2f} before, "
        f"{load['after']:.2f} after" + ("" if others is None else f"; other processes used {others:.1%} of the CPUs")
    )
    if options.json:
        write_report(options.json, report)
    return report
