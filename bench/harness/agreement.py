"""Whether all sides compute the same."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

AGREEING = 8  # sequences whose rows are compared before anything is measured
TOLERANCE = 5e-5  # of a row's norm, as everywhere in this project


def worst_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """The largest ‖got − want‖₂ / ‖want‖₂ of a token's row; both are (seq, d_model) arrays."""
    norm = np.linalg.norm
    pairs = zip(ours, theirs, strict=True)
    return max(float((norm(a - b, axis=1) / norm(b, axis=1)).max()) for a, b in pairs)


def lowest_cosine(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """The lowest cosine of a token's row with the other side's; both are (seq, d_model) arrays."""
    norm = np.linalg.norm
    pairs = zip(ours, theirs, strict=True)
    return min(float(((a * b).sum(axis=1) / (norm(a, axis=1) * norm(b, axis=1))).min()) for a, b in pairs)


def check_agreement(others: Mapping[str, Sequence[Any]], wanted: Sequence[Any]) -> dict[str, float]:
    """Makes sure that all compute the same: a side that is fast and wrong is none. All are (seq, d_model) arrays.

    Raises:
        SystemExit: One of them differs.
    """
    differences = {name: worst_difference(rows, wanted) for name, rows in others.items()}
    for name, difference in differences.items():
        if difference > TOLERANCE:
            raise SystemExit(f"{name} does not compute the same: a row differs by {difference:.1e} of its norm")
    return differences


def some_places(lengths: Sequence[int]) -> list[int]:
    """Where the sequences lie that are compared: evenly spread over the lengths, the shortest and the longest too.

    Whoever cuts off long texts is found out by the longest.
    """
    order = sorted(range(len(lengths)), key=lambda it: lengths[it])
    return [order[round(it)] for it in np.linspace(0, len(order) - 1, min(AGREEING, len(order)))]
