"""Compares encserve with other programs that run the same model, on the same texts.

    python bench/peers.py MODEL_REPOSITORY --checkpoint DIRECTORY [--model NAME] [--rounds 4]
                          [--server NAME="FLAGS" ...]

The other programs are called peers: Triton (through pytriton), infinity and sentence-transformers. Each peer gets a
virtual environment under .venv-peers at first use. If a peer cannot be installed or started, the report names the peer,
and the exit status is 1.

First, each peer runs in several settings, to find the fastest setting. Then each round runs all servers and peers once,
in random order. All servers and peers start before the first round. See
docs/explanation/benchmark-method.md.
"""

import argparse
import dataclasses
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

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.agreement import TOLERANCE, compare_rows, probe_indices, worst_difference
from harness.command import Comparison, add_server_options, console, make_parser, run_comparison
from harness.load import CALLERS, MANY, POOLED, Served, served
from harness.machine import cpu_seconds
from harness.peers import DEFAULT, INFINITY, PEERS, TRITON, VECTORS, PeerInput, Setting, opened
from harness.programs import PeerUnavailable
from harness.report import Found, Target, ratio_target, ratios_between
from harness.rounds import Side, best_rates
from harness.sides import SWEEP_ROUNDS, ceiling_side, sweep_budgets
from harness.workload import choose_lengths, read_newest, text_workload

from encserve_server.engine.onnx import OnnxEngine
from encserve_server.system.cpus import usable_cpus

# The lowest allowed ratio (encserve's tokens/s with 64 callers) / (peer's tokens/s), for each precision and each peer.
BOUNDS = {"float32": {TRITON: 1.6, INFINITY: 4.5}, "bfloat16": {TRITON: 3.0, INFINITY: 8.0}}
# The lowest allowed cosine between hidden states from ONNX Runtime and from a server that --server adds. The flags of
# such a server may choose a lower precision.
LEAST_COSINE = 0.999
IDLE_SECONDS = 3.0
IDLE_SHARE = 0.05  # warn if all idle servers together use a larger share of one CPU


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, checkpoint_for="the peers", needs_checkpoint=True, rounds=4, patience=120)
    add_server_options(parser)
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=list(PEERS))
    server_help = "also compare an encserve-server with these flags; may be repeated"
    parser.add_argument(
        "--server", action="append", default=[], type=read_server, metavar='NAME="FLAGS"', help=server_help
    )
    return parser.parse_args(arguments)


def read_server(text: str) -> tuple[str, str]:
    """Split NAME=FLAGS into the name and the flags of a server."""
    name, equals, flags = text.partition("=")
    if not name or not equals or f"encserve-{name}" in {MANY, POOLED}:
        raise argparse.ArgumentTypeError(f'must be NAME="FLAGS"; NAME must not be 64 or 64-pooled; was {text!r}')
    return f"encserve-{name}", flags


class Servers:
    """The encserve servers and their callers. A side is one way to call one server.

    Attributes:
        first: The server without the flags of --server.
        sides: The sides of all servers.
        precisions: The precision of each side that has targets. The keys are the names of the sides.
        agreement: For each server, the largest difference and the lowest cosine between the server's hidden states and
            ONNX Runtime's hidden states.
    """

    def __init__(self, comparison: Comparison, indices: Sequence[int], rows: Sequence[Any], stack: ExitStack) -> None:
        """Start the servers. Compare their hidden states with `rows`, for the sequences at `indices`."""
        options, bundle = comparison.options, comparison.bundle
        self.sides: list[Side] = []
        self.precisions: dict[str, str] = {}
        self.agreement: dict[str, dict[str, float]] = {}
        servers: dict[str, Served] = {}
        base = f"--model {bundle.name}@{bundle.version} --device cpu --tune-batches {options.server_flags}"
        for name, flags in ((MANY, ""), *options.server):
            command = shlex.split(f"{base} {flags}")
            server = served(options.model_repository, command, comparison.workload, options.seconds)
            servers[name] = stack.enter_context(server)
            least_cosine = None if name == MANY else LEAST_COSINE
            self.agreement[name] = compare_rows(name, servers[name].rows(indices), rows, least_cosine=least_cosine)
            self.precisions[name] = "bfloat16" if "bfloat16" in flags else "float32"
            sides = {side.name: side for side in servers[name].sides()}
            if name == MANY:
                self.sides += [sides[MANY], sides[POOLED]]
            else:
                label = f"encserve, {CALLERS} callers, {flags}"
                self.sides.append(dataclasses.replace(sides[MANY], name=name, label=label))
        self.first = servers[MANY]


def check_peer(
    peer: str, setting: Setting, indices: Sequence[int], rows: list[Any], vectors: list[Any]
) -> dict[str, float]:
    """Compare a peer's results with the hidden states `rows` or with `vectors`. Return each side's largest difference.

    Raises:
        PeerUnavailable: The shapes differ, or a row differs by more than `TOLERANCE`.
    """
    differences = {}
    for side, (kind, got) in setting.compute(indices).items():
        want = vectors if kind == VECTORS else rows
        if [array.shape for array in got] != [array.shape for array in want]:
            raise PeerUnavailable(peer, f"{side} gives other shapes: the peer truncates or tokenizes differently")
        differences[side] = worst_difference(got, want)
        if differences[side] > TOLERANCE:
            raise PeerUnavailable(
                peer, f"{side} computes other values: a row differs by {differences[side]:.1e} of its norm"
            )
    return differences


def fastest(peer: str, settings: Sequence[Setting], seed: int) -> tuple[Setting, dict[str, float]]:
    """Run a peer in all settings. Then close all settings except the fastest and the default.

    Returns:
        The setting with the fastest round, and the tokens/s of each setting.

    Raises:
        PeerUnavailable: The peer fails under load.
    """
    sides = [Side(setting.name, "", setting.sides[0].run) for setting in settings]
    try:
        for side in sides:
            side.run()  # the first run allocates the peer's memory
        rates = best_rates(sides, SWEEP_ROUNDS, seed)
    except RuntimeError as error:
        raise PeerUnavailable(peer, f"fails under load: {error}") from error
    best = max(settings, key=lambda setting: rates[setting.name])
    for setting in settings:
        if setting is not best and not setting.is_default:
            setting.close()
    console.print(f"{peer}, tokens/s: " + "; ".join(f"{name}: {rate:,.0f}" for name, rate in rates.items()))
    return best, rates


class Peers:
    """The peers that started, and the reasons why other peers are missing.

    Attributes:
        sides: The sides of all peers, in the fastest setting and in the default setting.
        found: For each peer: the versions of its packages, the fastest setting, the tokens/s of each setting, and the
            differences from encserve's results.
        missing: For each peer that did not start or failed: the reason.
    """

    def __init__(self) -> None:
        """Begin without peers."""
        self.sides: list[Side] = []
        self.found: dict[str, Any] = {}
        self.missing: dict[str, str] = {}

    def add(
        self, peer: str, given: PeerInput, indices: Sequence[int], references: tuple[list[Any], list[Any]],
        seed: int, stack: ExitStack,
    ) -> None:  # fmt: skip
        """Start a peer and check its results.

        `references` has the hidden states and the vectors of the sequences at `indices`.
        """
        own = stack.enter_context(ExitStack())
        console.print(f"starting {peer} …")
        try:
            settings = own.enter_context(opened(peer, given))
            best, rates = fastest(peer, settings, seed)
            agreement = check_peer(peer, best, indices, *references)
        except PeerUnavailable as error:
            own.close()
            self.missing[peer] = error.reason
            print_missing({peer: error.reason})
            return
        self.sides += best.sides
        for setting in settings:
            if setting.is_default and setting is not best:
                self.sides += [dataclasses.replace(side, name=side.name + DEFAULT) for side in setting.sides]
        self.found[peer] = {
            "versions": best.versions,
            "setting": best.name,
            "tokens_per_second_by_setting": rates,
            "agreement": agreement,
        }


def idle_share() -> float:
    """Return the share of one CPU that all processes of the benchmark use together without load."""
    time.sleep(1)
    before = cpu_seconds(os.getpid())
    time.sleep(IDLE_SECONDS)
    return (cpu_seconds(os.getpid()) - before) / IDLE_SECONDS


def peer_targets(found: Found, precisions: Mapping[str, str]) -> list[Target]:
    """Return the targets of all sides that ran.

    A peer has a side for its fastest setting. If the default setting is slower, the peer also has a side for the
    default setting.

    Args:
        found: The measurements.
        precisions: The precision of each side of encserve that has targets. The keys are the names of the sides.
    """
    return [
        target
        for side, precision in precisions.items()
        for peer, bound in BOUNDS[precision].items()
        for base in (peer + DEFAULT, peer)
        for target in ratio_target(found, side, base, f"{side} ({precision}), ratio to {base}", bound)
    ]


def print_missing(missing: Mapping[str, str]) -> None:
    """Print the missing peers with the reasons."""
    for peer, reason in missing.items():
        console.print(f"[bold red]Missing: {peer}[/]")
        console.print(reason, markup=False)


def compare(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Start all sides, run the rounds, and return the report."""
    bundle = read_newest(options.model_repository, options.model)
    lengths = choose_lengths(options.sequences, seed=options.seed, longest=bundle.max_sequence_tokens)
    workload = text_workload(bundle, lengths, seed=options.seed)
    comparison = Comparison(options, bundle, workload)
    indices = probe_indices(workload.lengths)
    engine = OnnxEngine(bundle.graph, device="cpu", intra_op_threads=usable_cpus())
    stack.callback(engine.close)
    rows = [engine.run([workload.sequences[index]]).rows[0] for index in indices]
    servers = Servers(comparison, indices, rows, stack)
    references = rows, servers.first.vectors(indices)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    file = folder / "workload.json"
    file.write_text(json.dumps({"texts": workload.texts, "ids": [ids.tolist() for ids in workload.sequences]}))
    checkpoint = options.checkpoint.resolve()
    given = PeerInput(workload, file, bundle.graph, checkpoint, usable_cpus(), options.seconds, folder)
    peers = Peers()
    for peer in options.peers:
        peers.add(peer, given, indices, references, options.seed, stack)
    budgets = sweep_budgets(engine, workload, options.seed)
    ceiling = ceiling_side(engine, workload, max(budgets, key=lambda budget: budgets[budget]))
    idle = idle_share()
    sides = [ceiling, *servers.sides, *peers.sides]
    found = comparison.measure(sides)
    ratios = ratios_between(found, [side.name for side in servers.sides], [side.name for side in peers.sides])
    report = comparison.report(
        sides, found, peer_targets(found, servers.precisions), ratios,
        agreement=servers.agreement, peers=peers.found, missing=peers.missing, idle_share_of_a_cpu=idle,
    )  # fmt: skip
    if idle > IDLE_SHARE:
        report["warnings"].append(f"without load, all servers together used {idle:.0%} of one CPU")
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print the report, and write it to the file of --json. Exit with 1 if a peer is missing."""
    report = run_comparison(compare, read_arguments(arguments))
    print_missing(report["missing"])
    for peer, found in report["peers"].items():
        packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        console.print(f"{peer}: {found['setting']}; {packages}")
    if report["missing"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
