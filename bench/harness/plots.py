"""Plots the medians over rounds. The error bars go from the lower to the upper quartile."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

Points = Sequence[Mapping[str, Any]]

mpl.use("Agg")
# The figures are in git, so the same numbers must always give the same file.
mpl.rcParams.update({"svg.hashsalt": "encserve", "svg.fonttype": "none", "font.size": 10, "axes.grid": True})
_SIZE_INCHES = (6.4, 3.6)


def spread_by(points: Points, x: str, y: str) -> tuple[list[float], np.ndarray]:
    """Return the distinct values of `x` in ascending order, and the quartiles of `y` for each value, (3, len(x)).

    Skip points whose `y` is None.
    """
    known = [point for point in points if point[y] is not None]
    xs = sorted({point[x] for point in known})
    quartiles = [np.quantile([point[y] for point in known if point[x] == it], (0.25, 0.5, 0.75)) for it in xs]
    return xs, np.array(quartiles).T.reshape(3, len(xs))


def _line(axes: Axes, points: Points, x: str, y: str, *, label: str | None = None, scale: float = 1.0) -> None:
    xs, quartiles = spread_by(points, x, y)
    low, median, high = quartiles * scale
    axes.errorbar(xs, median, yerr=(median - low, high - median), marker="o", markersize=4, capsize=3, label=label)


def _throughput(axes: Axes, points: Points, x: str, label: str) -> None:
    _line(axes, points, x, "tokens_per_second")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({point[x] for point in points}))
    axes.xaxis.set_major_formatter(mpl.ticker.ScalarFormatter())
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(label)
    axes.set_ylabel("tokens/s")


def _load(axes: Axes, points: Points) -> None:
    for y, label in (("p50_seconds", "p50"), ("p99_seconds", "p99")):
        _line(axes, points, "load", y, label=label, scale=1000)
    _line(axes, points, "load", "alone_p50_seconds", label="p50 of one caller", scale=1000)
    axes.set_yscale("log")
    axes.set_xlabel("offered load, relative to the throughput of 64 callers")
    axes.set_ylabel("ms")
    axes.legend()


def draw(found: Mapping[str, Points], folder: Path) -> list[Path]:
    """Draw a figure for each measured part, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, Any] = {
        "sequence_tokens": lambda axes, points: _throughput(axes, points, "sequence_tokens", "tokens of each sequence"),
        "batch_tokens": lambda axes, points: _throughput(axes, points, "max_batch_tokens", "--max-batch-tokens"),
        "callers": lambda axes, points: _throughput(axes, points, "callers", "callers"),
        "threads": lambda axes, points: _throughput(axes, points, "threads", "--intra-op-threads"),
        "load": _load,
    }
    paths = []
    for name, plot in kinds.items():
        if not found.get(name):
            continue
        figure, axes = pyplot.subplots(figsize=_SIZE_INCHES, layout="constrained")
        plot(axes, found[name])
        path = folder / f"performance-{name.replace('_', '-')}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        paths.append(path)
    return paths
