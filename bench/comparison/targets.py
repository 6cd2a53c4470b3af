"""What encserve is meant to reach, and whether it did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from comparison.rounds import Measurement, Spread, latencies, ratios, spread
from comparison.sides import BARE, CEILING, LARGE, MANY, NAIVE, ONE

LONG_TOKENS = 64

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


def check_targets(found: Found) -> list[Target]:
    """The targets whose sides were all run."""
    targets = []
    for mine, base, text, bound in (
        (MANY, CEILING, "64 callers, ratio to the ceiling", 0.90),
        (LARGE, CEILING, "4 callers of 256 sequences, ratio to the ceiling", 0.95),
        (MANY, NAIVE, "64 callers, ratio to the naive batcher", 5.5),
    ):
        if found.get(mine) and found.get(base):
            measured = spread(ratios(found[mine], found[base]))
            targets.append(Target(text, f"≥ {bound:g}", measured, measured.median >= bound))
    return targets + _latency_targets(found.get(ONE, ()), found.get(BARE, ()))


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
