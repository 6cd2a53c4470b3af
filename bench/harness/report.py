"""What was found, as numbers for programs and as tables for people, and whether it is what was wanted."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.load import LARGE, MANY, ONE
from harness.rounds import QUIET_SHARE, Figure, Measurement, Side, Spread, latencies, ratios, spread
from harness.sides import BARE, CEILING, NAIVE

QUARTILES = r"\[quartiles]"  # a bracket that rich does not read as markup
NOISY_LOAD = 0.5  # processes that ran before we began
NOISY_CEILING = 0.10  # from the first to the third quartile, as a share of the median
LONG_TOKENS = 64
AGAINST = "-against"  # behind a side's name: the same of another checkout's server

Found = Mapping[str, Sequence[Measurement]]  # by side, by round


@dataclass(frozen=True, slots=True)
class Target:
    """One target.

    Attributes:
        text: What is compared.
        wanted: The bound with its unit.
        measured: The median over rounds and its quartiles, in the bound's unit.
        met: Whether the median keeps the bound.
    """

    text: str
    wanted: str
    measured: Spread
    met: bool


def ratio_target(found: Found, mine: str, base: str, text: str, bound: float) -> list[Target]:
    """That tokens/s are at least so many times another side's; none where one of both was not run."""
    if not (found.get(mine) and found.get(base)):
        return []
    measured = spread(ratios(found[mine], found[base]))
    return [Target(text, f"≥ {bound:g}", measured, measured.median >= bound)]


def check_targets(found: Found) -> list[Target]:
    """The targets whose sides were all run."""
    return [
        *ratio_target(found, MANY, CEILING, "64 callers, ratio to the ceiling", 0.88),
        *ratio_target(found, LARGE, CEILING, "4 callers of 256 sequences, ratio to the ceiling", 0.95),
        *ratio_target(found, MANY, NAIVE, "64 callers, ratio to the naive batcher", 5.5),
        *_latency_targets(found.get(ONE, ()), found.get(BARE, ())),
    ]


def _latency_targets(mine: Sequence[Measurement], bare: Sequence[Measurement]) -> list[Target]:
    """One caller against `session.run` alone, on the same sequences."""
    targets = []
    pairs = list(zip(latencies(mine), latencies(bare), strict=False))
    if pairs:
        added = spread([1000 * (a - b) for a, b in pairs])
        targets.append(Target("1 caller, p50 above session.run alone", "≤ 1 ms", added, added.median <= 1))
    pairs = list(zip(latencies(mine, LONG_TOKENS), latencies(bare, LONG_TOKENS), strict=False))
    if pairs:
        ratio = spread([a / b for a, b in pairs])
        text = f"1 caller, p50 from {LONG_TOKENS} tokens on, ratio to session.run alone"
        targets.append(Target(text, "≤ 1.15", ratio, ratio.median <= 1.15))
    return targets


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
            "server_cpu_ms": _spread_of([it.server_cpu_ms for it in mine if it.server_cpu_ms is not None]),
            "others": [it.others for it in mine],
        }
    return summary


def ratios_to_against(found: Found) -> dict[str, dict[str, dict[str, float] | None]]:
    """This server's figures as ratios to those of the other checkout's, by side."""
    figures: dict[str, Figure] = {
        "tokens_per_second": lambda it: it.tokens_per_second,
        "p50_seconds": lambda it: it.p50_seconds(),
        "server_cpu_ms": lambda it: it.server_cpu_ms,
    }
    return {
        name: {key: _spread_of(ratios(found[name], found[name + AGAINST], it)) for key, it in figures.items()}
        for name in found
        if name + AGAINST in found
    }


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


def print_report(console: Console, report: Mapping[str, Any]) -> None:
    """Prints the sides, the targets and the warnings."""
    console.print(sides_table(report["sides"]))
    targets = [Target(**{**it, "measured": Spread(**it["measured"])}) for it in report["targets"]]
    if targets:
        console.print(targets_table(targets))
    for warning in report["warnings"]:
        console.print(f"[bold yellow]Warning:[/] {warning}")


def sides_table(sides: Mapping[str, Any]) -> Table:
    """What each side did, and how that is to the ceiling and to the naive batcher."""
    columns = ("tokens/s", "best round", "ratio to ceiling", QUARTILES, "ratio to naive", "p50 ms", "server CPU ms")
    table = _table("side", columns)
    for side in sides.values():
        rates = side["tokens_per_second"]
        to_ceiling, to_naive, p50 = side["ratio_to_ceiling"], side["ratio_to_naive"], side["p50_seconds"]
        cpu = side["server_cpu_ms"]
        table.add_row(
            side["label"],
            f"{spread(rates).median:,.0f}",
            f"{max(rates):,.0f}",
            f"{to_ceiling['median']:.3f}",
            f"{to_ceiling['low']:.3f}–{to_ceiling['high']:.3f}",
            f"{to_naive['median']:.2f}" if to_naive else "",
            f"{1000 * p50['median']:.2f}" if p50 else "",
            f"{cpu['median']:.2f}" if cpu else "",
        )
    return table


def targets_table(targets: Sequence[Target]) -> Table:
    """What was wanted and what came of it."""
    table = _table("target", ("wanted", "measured", QUARTILES, "met"))
    for it in targets:
        quartiles = f"{it.measured.low:.3f}–{it.measured.high:.3f}"
        table.add_row(it.text, it.wanted, f"{it.measured.median:.3f}", quartiles, "yes" if it.met else "no")
    return table


def ratios_table(title: str, rows: Mapping[str, Mapping[str, Mapping[str, float] | None]]) -> Table:
    """Ratios with their quartiles, by row and by column."""
    table = _table(title, list(next(iter(rows.values()), {})))
    for name, row in rows.items():
        shown = (rf"{it['median']:.3f} \[{it['low']:.3f}–{it['high']:.3f}]" if it else "" for it in row.values())
        table.add_row(name, *shown)
    return table


def _table(first: str, others: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
