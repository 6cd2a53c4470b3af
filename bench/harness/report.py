"""The report of a comparison: the numbers as data and as tables, the targets, and the warnings."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.load import LARGE, MANY, ONE
from harness.rounds import QUIET_SHARE, Figure, Measurement, Side, Spread, median_latencies, ratios, spread
from harness.sides import BARE, CEILING, NAIVE

QUARTILES = r"\[quartiles]"  # escaped, because rich reads brackets as markup
NOISY_LOAD = 0.5  # warn if the load average before the run is higher
NOISY_CEILING = 0.10  # warn if (upper quartile - lower quartile) / median is larger
LONG_TOKENS = 64
AGAINST = "-against"  # the names of sides that call another checkout's server end with this suffix

Found = Mapping[str, Sequence[Measurement]]  # name of the side → the measurements of all rounds
Ratios = Mapping[str, Mapping[str, Mapping[str, float] | None]]  # row of the table → column → median and quartiles


@dataclass(frozen=True, slots=True)
class Target:
    """A target, and its result in this run.

    Attributes:
        text: The names of the compared numbers.
        bound: The bound with its unit.
        measured: The median and quartiles over rounds, in the unit of the bound.
        met: Whether the median is within the bound.
    """

    text: str
    bound: str
    measured: Spread
    met: bool


def ratio_target(found: Found, side: str, base: str, text: str, bound: float) -> list[Target]:
    """Return the target "the side has at least `bound` times the tokens/s of the base side".

    Return an empty list if one of the two sides did not run.
    """
    if not (found.get(side) and found.get(base)):
        return []
    measured = spread(ratios(found[side], found[base]))
    return [Target(text, f"≥ {bound:g}", measured, measured.median >= bound)]


def check_targets(found: Found) -> list[Target]:
    """Return the targets of bench/compare.py. Leave out a target if one of its sides did not run."""
    return [
        *ratio_target(found, MANY, CEILING, "64 callers, ratio to the ceiling", 0.88),
        *ratio_target(found, LARGE, CEILING, "4 callers of 256 sequences, ratio to the ceiling", 0.95),
        *ratio_target(found, MANY, NAIVE, "64 callers, ratio to the naive batcher", 5.5),
        *_latency_targets(found.get(ONE, ()), found.get(BARE, ())),
    ]


def _latency_targets(one_caller: Sequence[Measurement], bare: Sequence[Measurement]) -> list[Target]:
    """Return the targets for the latency of one caller. The base is `session.run` alone with the same sequences."""
    targets = []
    pairs = list(zip(median_latencies(one_caller), median_latencies(bare), strict=False))
    if pairs:
        added = spread([1000 * (a - b) for a, b in pairs])
        targets.append(Target("1 caller, p50 above session.run alone", "≤ 1 ms", added, added.median <= 1))
    long_latencies = (median_latencies(runs, LONG_TOKENS) for runs in (one_caller, bare))
    pairs = list(zip(*long_latencies, strict=False))
    if pairs:
        ratio = spread([a / b for a, b in pairs])
        text = f"1 caller, p50 from {LONG_TOKENS} tokens on, ratio to session.run alone"
        targets.append(Target(text, "≤ 1.15", ratio, ratio.median <= 1.15))
    return targets


def summarize(sides: Sequence[Side], found: Found) -> dict[str, Any]:
    """Return the numbers of each side. The keys are the names of the sides. Ratios are computed within each round."""
    return {
        side.name: {
            "label": side.label,
            "tokens_per_second": [run.tokens_per_second for run in found[side.name]],
            "ratio_to_ceiling": _ratio(found, side.name, CEILING),
            "ratio_to_naive": _ratio(found, side.name, NAIVE),
            "p50_seconds": _spread_of(median_latencies(found[side.name])),
            "server_cpu_ms": _spread_of([ms for run in found[side.name] if (ms := run.server_cpu_ms) is not None]),
            "others": [run.others for run in found[side.name]],
        }
        for side in sides
    }


def ratios_between(found: Found, sides: Sequence[str], bases: Sequence[str]) -> Ratios:
    """Return the ratio of each side's tokens/s to each base's tokens/s. A row is a base, and a column is a side."""
    return {base: {side: _ratio(found, side, base) for side in sides} for base in bases}


def ratios_to_against(found: Found) -> Ratios:
    """For each side, return this server's numbers divided by the numbers of the other checkout's server."""
    figures: dict[str, Figure] = {
        "tokens_per_second": lambda run: run.tokens_per_second,
        "p50_seconds": lambda run: run.p50_seconds(),
        "server_cpu_ms": lambda run: run.server_cpu_ms,
    }
    return {
        name: {key: _spread_of(ratios(found[name], found[name + AGAINST], it)) for key, it in figures.items()}
        for name in found
        if name + AGAINST in found
    }


def _ratio(found: Found, side: str, base: str) -> dict[str, float] | None:
    return _spread_of(ratios(found[side], found[base])) if base in found else None


def _spread_of(values: Sequence[float]) -> dict[str, float] | None:
    return dataclasses.asdict(spread(values)) if values else None


def warnings(load_before: float, found: Found) -> list[str]:
    """Return the reasons why the numbers may be wrong.

    Args:
        load_before: The load average before the run.
        found: The measurements.
    """
    texts = []
    if load_before > NOISY_LOAD:
        texts.append(f"the machine was busy: its load average was {load_before:.2f} before the run")
    runs = [run for measurements in found.values() for run in measurements]
    disturbed = [run for run in runs if run.others is not None and run.others > QUIET_SHARE]
    if disturbed:
        texts.append(
            f"the machine was busy: in {len(disturbed)} of {len(runs)} measurements, other processes used more than "
            f"{QUIET_SHARE:.0%} of the CPUs"
        )
    ceiling = spread([run.tokens_per_second for run in found[CEILING]])
    width = (ceiling.high - ceiling.low) / ceiling.median
    if width > NOISY_CEILING:
        texts.append(f"the ceiling's tokens/s varied between rounds: the quartiles differ by {width:.0%} of the median")
    return texts


def print_report(console: Console, report: Mapping[str, Any]) -> None:
    """Print the sides, the targets, the ratios and the warnings."""
    console.print(_sides_table(report["sides"]))
    if report["targets"]:
        console.print(_targets_table(report["targets"]))
    if report["ratios"]:
        console.print(_ratios_table(report["ratios"]))
    for warning in report["warnings"]:
        console.print(f"[bold yellow]Warning:[/] {warning}")


def _sides_table(sides: Mapping[str, Any]) -> Table:
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


def _targets_table(targets: Sequence[Target]) -> Table:
    table = _table("target", ("bound", "measured", QUARTILES, "met"))
    for target in targets:
        measured = target.measured
        quartiles = f"{measured.low:.3f}–{measured.high:.3f}"
        table.add_row(target.text, target.bound, f"{measured.median:.3f}", quartiles, "yes" if target.met else "no")
    return table


def _ratios_table(rows: Ratios) -> Table:
    table = _table("ratio to", list(next(iter(rows.values()))))
    for name, row in rows.items():
        cells = (rf"{it['median']:.3f} \[{it['low']:.3f}–{it['high']:.3f}]" if it else "" for it in row.values())
        table.add_row(name, *cells)
    return table


def _table(first: str, others: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
