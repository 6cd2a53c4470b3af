"""Compares encserve with other servers of the same model, side by side on the same texts.

    python bench/peers.py MODEL_REPOSITORY --checkpoint DIRECTORY [--model NAME] [--rounds 4]
                          [--server NAME="FLAGS" ...]

The peers are Triton (through pytriton), infinity and sentence-transformers, each in an environment of its own under
.venv-peers, made when it is first needed. Whoever cannot be installed or started is named at the end, and the exit
status is 1 then. Each peer is tried in several settings first, and the fastest takes part. All are started before
anything is measured and asked in interleaved rounds, as in `bench/compare.py`. See docs/performance.md.
"""

import argparse
import dataclasses
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from compare import common_parser, stop_servers_on_sigterm
from harness.agreement import TOLERANCE, lowest_cosine, some_places, worst_difference
from harness.load import CALLERS, MANY, POOLED, Served, served
from harness.machine import OtherWork, cpu_seconds, describe_machine, load_average
from harness.peers import AS_IT_COMES, INFINITY, PEERS_BY_NAME, TRITON, VECTORS, Given, Setting, opened
from harness.programs import PeerUnavailable
from harness.report import Found, Target, print_report, ratio_target, ratios_table, summarise, warnings
from harness.rounds import NO_PATIENCE, Measurement, Patience, Side, Spread, measure, ratios, spread
from harness.sides import ceiling_side, sweep_budgets
from harness.workload import Workload, choose_lengths, open_tokenizer, read_newest, text_workload

from encserve_server.engine.onnx import OnnxEngine
from encserve_server.system.cpus import usable_cpus
from encserve_server.types.bundles import Bundle

# What is wanted of encserve in float32 and in bfloat16, 64 callers, as a ratio to a peer.
WANTED = {"float32": {TRITON: 1.6, INFINITY: 4.5}, "bfloat16": {TRITON: 3.0, INFINITY: 8.0}}
COSINE = 0.999  # of a row, for servers with further flags: a lower precision may be what they are about
SWEEP_ROUNDS = 2
IDLE_SECONDS = 3.0
IDLE_SHARE = 0.05  # of one CPU; a server that takes more while nobody asks disturbs the others

console = Console(width=None if sys.stdout.isatty() else 150)


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = common_parser(__doc__, "the peers", needs_checkpoint=True)
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS_BY_NAME), default=list(PEERS_BY_NAME))
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        type=read_server,
        metavar='NAME="FLAGS"',
        help="one more encserve-server with these flags, as a side of its own; may be repeated",
    )
    return parser.parse_args(arguments)


def read_server(text: str) -> tuple[str, str]:
    """NAME=FLAGS as a side's name and flags."""
    name, equals, flags = text.partition("=")
    if not name or not equals or f"encserve-{name}" in {MANY, POOLED}:
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME="FLAGS"')
    return f"encserve-{name}", flags


def read_texts(bundle: Bundle, options: argparse.Namespace) -> Workload:
    """Texts whose lengths are those of real ones."""
    if bundle.tokenizer_file is None:
        raise SystemExit(f"{bundle.name} has no tokenizer; the peers take texts")
    lengths = choose_lengths(options.sequences, seed=options.seed, longest=bundle.max_sequence_tokens)
    return text_workload(lengths, open_tokenizer(bundle.tokenizer_file), seed=options.seed)


class Servers:
    """The encserve servers, each with its callers.

    Attributes:
        first: The one without further flags.
        sides: What is measured of them.
        precisions: Which targets a side is held to, by its name.
    """

    def __init__(self, options: argparse.Namespace, bundle: Bundle, workload: Workload, stack: ExitStack) -> None:
        """Starts them."""
        self.sides: list[Side] = []
        self.precisions: dict[str, str] = {}
        self._servers: dict[str, Served] = {}
        base = f"--model {bundle.name}@{bundle.version} --device cpu --tune-batches {options.server_flags}"
        for name, flags in ((MANY, ""), *options.server):
            of_server = shlex.split(f"{base} {flags}")
            server = stack.enter_context(served(options.model_repository, of_server, workload, options.seconds))
            self._servers[name] = server
            self.precisions[name] = "bfloat16" if "bfloat16" in flags else "float32"
            sides = {it.name: it for it in server.sides()}
            if name == MANY:
                self.sides += [sides[MANY], sides[POOLED]]
            else:
                label = f"encserve, {CALLERS} callers, {flags}"
                self.sides.append(dataclasses.replace(sides[MANY], name=name, label=label))
        self.first = self._servers[MANY]

    def check(self, places: Sequence[int], rows: Sequence[Any]) -> dict[str, Any]:
        """Compares their rows with the engine's.

        Raises:
            SystemExit: A server computes something else.
        """
        found = {}
        for name, server in self._servers.items():
            its = server.rows(places)
            difference, cosine = worst_difference(its, rows), lowest_cosine(its, rows)
            found[name] = {"difference": difference, "cosine": cosine}
            if cosine < COSINE or (name == MANY and difference > TOLERANCE):
                raise SystemExit(f"{name} does not compute the same: cosine {cosine:.5f}, difference {difference:.1e}")
        return found


def check_peer(
    peer: str, setting: Setting, places: Sequence[int], rows: list[Any], vectors: list[Any]
) -> dict[str, float]:
    """Makes sure that a peer computes what encserve does; gives the differences by side.

    Raises:
        PeerUnavailable: It does not.
    """
    found = {}
    for side, (kind, its) in setting.computed(places).items():
        wanted = vectors if kind == VECTORS else rows
        if [it.shape for it in its] != [it.shape for it in wanted]:
            raise PeerUnavailable(peer, f"{side} gives other shapes: it has cut texts off, or takes other tokens")
        found[side] = worst_difference(its, wanted)
        if found[side] > TOLERANCE:
            raise PeerUnavailable(peer, f"{side} does not compute the same: off by {found[side]:.1e} of the norm")
    return found


def fastest(peer: str, settings: Sequence[Setting], seed: int) -> tuple[Setting, dict[str, float]]:
    """Runs a peer in all its settings, interleaved; gives the one with the best round, and tokens/s by setting.

    Raises:
        PeerUnavailable: It fails under load.
    """
    tried = {setting.name: setting for setting in settings}
    sides = [Side(name, "", setting.sides[0].run) for name, setting in tried.items()]
    try:
        for side in sides:
            side.run()  # memory is taken now
        found = measure(sides, SWEEP_ROUNDS, seed, lambda *_: None, NO_PATIENCE)
    except RuntimeError as error:
        raise PeerUnavailable(peer, f"fails under load: {error}") from error
    rates = {name: max(it.tokens_per_second for it in its) for name, its in found.items()}
    best = max(rates, key=lambda it: rates[it])
    for name, setting in tried.items():
        if name != best and not setting.as_it_comes:
            setting.close()
    console.print(f"{peer}, tokens/s: " + "; ".join(f"{it}: {rate:,.0f}" for it, rate in rates.items()))
    return tried[best], rates


def open_peers(
    options: argparse.Namespace, given: Given, check: Callable[[str, Setting], dict[str, float]], stack: ExitStack
) -> tuple[dict[str, Any], list[Side], dict[str, str]]:
    """Starts the peers: what is known of each, their sides, and why others are missing."""
    opened_peers: dict[str, Any] = {}
    sides: list[Side] = []
    missing: dict[str, str] = {}
    for peer in options.peers:
        own = stack.enter_context(ExitStack())
        console.print(f"starting {peer} …")
        try:
            settings = own.enter_context(opened(peer, given))
            best, rates = fastest(peer, settings, options.seed)
            differences = check(peer, best)
        except PeerUnavailable as error:
            own.close()
            missing[peer] = error.reason
            print_missing({peer: error.reason})
            continue
        sides += best.sides
        for setting in settings:
            if setting.as_it_comes and setting is not best:
                sides += [dataclasses.replace(it, name=it.name + AS_IT_COMES) for it in setting.sides]
        opened_peers[peer] = {
            "versions": best.versions,
            "setting": best.name,
            "tokens_per_second_by_setting": rates,
            "agreement": differences,
        }
    return opened_peers, sides, missing


def idle_share() -> float:
    """How much of one CPU all of the benchmark's processes take while nobody asks."""
    time.sleep(1)
    before = cpu_seconds(os.getpid())
    time.sleep(IDLE_SECONDS)
    return (cpu_seconds(os.getpid()) - before) / IDLE_SECONDS


def ratios_to_peers(found: Found, ours: Sequence[str], peers: Sequence[str]) -> dict[str, dict[str, Spread]]:
    """Encserve : peer in tokens/s, by peer and by side of ours; round by round, then the median and quartiles."""
    return {peer: {mine: spread(ratios(found[mine], found[peer])) for mine in ours} for peer in peers}


def peer_targets(found: Found, precisions: Mapping[str, str]) -> list[Target]:
    """The targets whose sides were all run; `precisions` are those of our sides that have any, by name.

    Each is told twice, of a peer as it comes and of a peer at its best, where those are two.
    """
    return [
        target
        for mine, precision in precisions.items()
        for peer, bound in WANTED[precision].items()
        for side in (peer + AS_IT_COMES, peer)
        for target in ratio_target(found, mine, side, f"{mine} ({precision}), ratio to {side}", bound)
    ]


def print_missing(missing: Mapping[str, str]) -> None:
    """Says which peers could not take part, and why."""
    for peer, reason in missing.items():
        console.print(f"[bold red]Missing: {peer}[/]")
        console.print(reason, markup=False)


def compare(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Opens everything, runs the rounds and gives the report; what must be closed goes onto `stack`."""
    load_before, machine = load_average(), describe_machine()
    bundle = read_newest(options.model_repository, options.model)
    workload = read_texts(bundle, options)
    places = some_places(workload.lengths)
    console.print(f"{bundle.name}@{bundle.version}: {len(workload.texts)} texts, {workload.tokens:,} tokens")
    engine = OnnxEngine(bundle.graph, device="cpu", intra_op_threads=usable_cpus())
    stack.callback(engine.close)
    rows = [engine.run([workload.sequences[it]]).rows[0] for it in places]
    servers = Servers(options, bundle, workload, stack)
    agreement = servers.check(places, rows)
    vectors = servers.first.vectors(places)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    file = folder / "workload.json"
    file.write_text(json.dumps({"texts": workload.texts, "ids": [it.tolist() for it in workload.sequences]}))
    checkpoint = options.checkpoint.resolve()
    given = Given(workload, file, bundle.graph, checkpoint, usable_cpus(), options.seconds, folder)
    peers, peer_sides, missing = open_peers(
        options, given, lambda peer, setting: check_peer(peer, setting, places, rows, vectors), stack
    )
    budgets = sweep_budgets(engine, workload, options.seed)
    ceiling = ceiling_side(engine, workload, max(budgets, key=lambda it: budgets[it]))
    idle = idle_share()
    sides = [ceiling, *servers.sides, *peer_sides]
    patience = Patience(options.patience, lambda: OtherWork().share)
    found = measure(sides, options.rounds, options.seed, show_round, patience)
    texts_of_warning = warnings(load_before, found)
    if idle > IDLE_SHARE:
        texts_of_warning.append(f"while nobody asked, all the servers together took {idle:.0%} of a CPU")
    table = ratios_to_peers(found, [it.name for it in servers.sides], [it.name for it in peer_sides])
    return {
        "model": {"name": bundle.name, "version": bundle.version, "fingerprint": bundle.fingerprint},
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "idle_share_of_a_cpu": idle,
        "workload": {"sequences": len(workload.texts), "tokens": workload.tokens, "seed": options.seed},
        "agreement": agreement,
        "peers": peers,
        "missing": missing,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "warnings": texts_of_warning,
        "sides": summarise(sides, found),
        "ratios": {peer: {mine: dataclasses.asdict(it) for mine, it in row.items()} for peer, row in table.items()},
        "targets": [dataclasses.asdict(it) for it in peer_targets(found, servers.precisions)],
    }


def show_round(number: int, found: Mapping[str, Measurement]) -> None:
    """Says how a round went, so that nobody has to wait in the dark."""
    shown = ", ".join(f"{name} {it.tokens_per_second:,.0f}" for name, it in found.items())
    console.print(f"round {number + 1}, tokens/s: {shown}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison, prints it, and writes it down if asked."""
    options = read_arguments(arguments)
    stop_servers_on_sigterm()
    began = time.monotonic()
    with ExitStack() as stack:
        report = compare(options, stack)
    print_report(console, report)
    if report["ratios"]:
        console.print(ratios_table("tokens/s as a ratio to", report["ratios"]))
    print_missing(report["missing"])
    for peer, its in report["peers"].items():
        packages = ", ".join(f"{name} {version}" for name, version in its["versions"].items())
        console.print(f"{peer}: {its['setting']}; {packages}")
    console.print(
        f"{options.rounds} rounds, {time.monotonic() - began:.0f} s in all; while nobody asked, the servers took "
        f"{report['idle_share_of_a_cpu']:.1%} of a CPU",
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if report["missing"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
