"""How encserve is to its peers, as numbers and as a table."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from comparison.peers import AS_IT_COMES, INFINITY, TRITON
from comparison.report import sides_table, targets_table
from comparison.rounds import Spread, ratios, spread
from comparison.targets import Found, Target

# What is wanted of encserve in float32 and in bfloat16, 64 callers, as a ratio to a peer.
WANTED = {"float32": {TRITON: 1.6, INFINITY: 4.5}, "bfloat16": {TRITON: 3.0, INFINITY: 8.0}}


def ratios_to_peers(found: Found, ours: Sequence[str], peers: Sequence[str]) -> dict[str, dict[str, Spread]]:
    """Encserve : peer in tokens/s, by peer and by side of ours; round by round, then the median and quartiles."""
    return {peer: {mine: spread(ratios(found[mine], found[peer])) for mine in ours} for peer in peers}


def peer_targets(found: Found, precisions: Mapping[str, str]) -> list[Target]:
    """The targets whose sides were all run; `precisions` are those of our sides that have any, by name.

    Each is told twice, of a peer as it comes and of a peer at its best, where those are two.
    """
    targets = []
    for mine, precision in precisions.items():
        for peer, bound in WANTED[precision].items():
            for side in (peer + AS_IT_COMES, peer):
                if found.get(mine) and found.get(side):
                    measured = spread(ratios(found[mine], found[side]))
                    text = f"{mine} ({precision}), ratio to {side}"
                    targets.append(Target(text, f"≥ {bound:g}", measured, measured.median >= bound))
    return targets


def precision_of(flags: str) -> str:
    """Which targets a server with these flags is held to."""
    return "bfloat16" if "bfloat16" in flags else "float32"


def peers_json(
    found: Found, ours: Sequence[str], peers: Sequence[str], precisions: Mapping[str, str]
) -> dict[str, Any]:
    """The ratios and targets, as JSON can hold them."""
    table = ratios_to_peers(found, ours, peers)
    return {
        "ratios": {peer: {mine: dataclasses.asdict(it) for mine, it in row.items()} for peer, row in table.items()},
        "targets": [dataclasses.asdict(it) for it in peer_targets(found, precisions)],
    }


def print_peers(console: Console, report: dict[str, Any]) -> None:
    """Prints what there is to say: the sides, the ratios, the targets, warnings, and who is missing."""
    console.print(sides_table(report["sides"]))
    if report["ratios"]:
        console.print(_ratios_table(report["ratios"]))
    targets = [Target(**{**it, "measured": Spread(**it["measured"])}) for it in report["targets"]]
    if targets:
        console.print(targets_table(targets))
    for warning in report["warnings"]:
        console.print(f"[bold yellow]Warning:[/] {warning}")
    print_missing(console, report["missing"])


def print_missing(console: Console, missing: Mapping[str, str]) -> None:
    """Says which peers could not take part, and why."""
    for peer, reason in missing.items():
        console.print(f"[bold red]Missing: {peer}[/]", highlight=False)
        console.print(reason, markup=False, highlight=False)


def _ratios_table(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    shown = Table(box=box.SIMPLE, pad_edge=False)
    shown.add_column("tokens/s as a ratio to")
    for mine in next(iter(table.values()), {}):
        shown.add_column(mine, justify="right", no_wrap=True)
    for peer, row in table.items():
        shown.add_row(peer, *(rf"{it['median']:.2f} \[{it['low']:.2f}–{it['high']:.2f}]" for it in row.values()))
    return shown
