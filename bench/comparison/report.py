"""What was found, as numbers for programs and as tables for people."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from comparison.rounds import QUIET_SHARE, Measurement, Side, Spread, latencies, ratios, spread
from comparison.sides import CEILING, NAIVE
from comparison.targets import Found, Target, check_targets

QUARTILES = r"\[quartiles]"  # a bracket that rich does not read as markup
NOISY_LOAD = 0.5  # processes that ran before we began
NOISY_CEILING = 0.10  # from the first to the third quartile, as a share of the median


def summarise(sides: Sequence[Side], found: Found) -> dict[str, Any]:
    """The figures of each side, by name. Ratios are taken round by round, then their median and quartiles."""
    summary = {}
    for side in sides:
        mine = found[side.name]
        summary[side.name] = {
            "label": side.label,
            "tokens_per_second": [it.tokens_per_second for it in mine],
            "ratio_to_ceiling": _ratio(mine, found.get(CEILING)),
            "ratio_to_naive": _ratio(mine, found.get(NAIVE)),
            "p50_seconds": _spread_of(latencies(mine)),
            "others": [it.others for it in mine],
        }
    return summary


def _ratio(mine: Sequence[Measurement], base: Sequence[Measurement] | None) -> dict[str, float] | None:
    return _spread_of(ratios(mine, base)) if base else None


def _spread_of(values: Sequence[float]) -> dict[str, float] | None:
    return dataclasses.asdict(spread(values)) if values else None


def warnings(load_before: float, found: Found) -> list[str]:
    """Why the figures may be worth little.

    Args:
        load_before: The load average before anything was run.
        found: The measurements.
    """
    texts = []
    if load_before > NOISY_LOAD:
        texts.append(f"the machine was not quiet: its load average was {load_before:.2f} before the run")
    every = [it for its in found.values() for it in its]
    disturbed = [it for it in every if it.others is not None and it.others > QUIET_SHARE]
    if disturbed:
        texts.append(
            f"the machine was not quiet: in {len(disturbed)} of {len(every)} measurements others used more than "
            f"{QUIET_SHARE:.0%} of its CPUs"
        )
    its = spread([it.tokens_per_second for it in found[CEILING]])
    width = (its.high - its.low) / its.median
    if width > NOISY_CEILING:
        texts.append(f"the ceiling's own tokens/s differ by {width:.0%} from the first to the third quartile of rounds")
    return texts


def to_json(sides: Sequence[Side], found: Found, context: dict[str, Any]) -> dict[str, Any]:
    """Everything, as JSON can hold it; `context` is what else there is to say."""
    targets = [dataclasses.asdict(it) for it in check_targets(found)]
    return {**context, "sides": summarise(sides, found), "targets": targets}


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Prints what `to_json` gave."""
    console.print(sides_table(report["sides"]))
    targets = [Target(**{**it, "measured": Spread(**it["measured"])}) for it in report["targets"]]
    if targets:
        console.print(targets_table(targets))
    for warning in report["warnings"]:
        console.print(f"[bold yellow]Warning:[/] {warning}")


def sides_table(sides: dict[str, Any]) -> Table:
    """What each side did, and how that is to the ceiling and to the naive batcher."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("side")
    headings = ["tokens/s", "best round", "ratio to ceiling", QUARTILES, "p50 ms"]
    naive = any(side["ratio_to_naive"] for side in sides.values())
    for heading in [*headings, "ratio to naive"] if naive else headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for side in sides.values():
        rates = side["tokens_per_second"]
        to_ceiling, to_naive, p50 = side["ratio_to_ceiling"], side["ratio_to_naive"], side["p50_seconds"]
        table.add_row(
            side["label"],
            f"{spread(rates).median:,.0f}",
            f"{max(rates):,.0f}",
            f"{to_ceiling['median']:.3f}",
            f"{to_ceiling['low']:.3f}–{to_ceiling['high']:.3f}",
            f"{1000 * p50['median']:.2f}" if p50 else "",
            *([f"{to_naive['median']:.2f}" if to_naive else ""] if naive else ()),
        )
    return table


def targets_table(targets: Sequence[Target]) -> Table:
    """What was wanted and what came of it."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("target")
    for heading in ("wanted", "measured", QUARTILES, "met"):
        table.add_column(heading, justify="right", no_wrap=True)
    for it in targets:
        quartiles = f"{it.measured.low:.3f}–{it.measured.high:.3f}"
        table.add_row(it.text, it.wanted, f"{it.measured.median:.3f}", quartiles, "yes" if it.met else "no")
    return table
