"""The least p99 that any scheduler can have under open-loop load, whatever it does, even if it knew the future.

    python bench/latency_bound.py [--tokens-per-second 8579] [--saturation 7741] [--load 0.5 0.8] [--lengths FILE]

Requests come at random times (Poisson) with the lengths of real texts. A device that computes at most so many tokens a
second, in whatever batches, side by side or not, cannot finish more work in any span of time than that rate allows. So
whoever is on time on it could also be on time on a machine that takes one request after another at that rate; and for
that machine the least number of late requests is known exactly, as all may take equally long, so that they are due in
the order in which they come (`least_late`). The p99 cannot be below the latency at which 1 % of them are late.

Nothing is charged for batches, padding, gRPC or the cost of attention, which grows with the square: a real server is
above the bound, provided that `--tokens-per-second` is no less than the device can compute, of whatever length. The
default is the best round of all batches known beforehand, side by side (`parallel` of bench/compare.py).
`--saturation` is what callers get at most, of which the load is a share.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from comparison.workload import LENGTHS, draw_lengths, read_histogram
from rich import box
from rich.console import Console
from rich.table import Table

Seconds = npt.NDArray[np.float64]

LATE_SHARE = 0.01  # of a p99
PRECISION_SECONDS = 1e-4


def least_late(arrivals: Seconds, work: Seconds, limit: float) -> int:
    """How many requests must take longer than `limit` on a machine that runs one at a time.

    Takes them in the order in which they are due and, whenever one would be late, gives up the one without which the
    others are done soonest. Kise, Ibaraki & Mine 1978, "A solvable case of the one-machine scheduling problem with
    ready and due times", Operations Research 26(1), for due times in the order of ready times.

    Args:
        arrivals: (n,) when each comes, in seconds, ascending.
        work: (n,) how long each runs, in seconds.
        limit: How long each may take from its arrival to its end, in seconds.
    """
    late = 0
    kept: list[int] = []  # of those that come while the machine is busy, in order
    ends = -np.inf
    for new in range(len(arrivals)):
        if ends <= arrivals[new]:
            kept = []  # idle: who came before has no say in what follows
        kept.append(new)
        ends = max(ends, arrivals[new]) + work[new]
        if ends > arrivals[new] + limit:
            ends, dropped = min((_end(kept, place, arrivals, work), place) for place in range(len(kept)))
            del kept[dropped]
            late += 1
    return late


def _end(kept: Sequence[int], without: int, arrivals: Seconds, work: Seconds) -> float:
    """When the last of them ends if one is left out."""
    ends = -np.inf
    for place, it in enumerate(kept):
        if place != without:
            ends = max(ends, arrivals[it]) + work[it]
    return ends


def least_percentile(arrivals: Seconds, work: Seconds, late_share: float) -> float:
    """The shortest limit, in seconds, that no more than this share must exceed."""
    low, high = 0.0, float(work.sum())
    while high - low > PRECISION_SECONDS:
        middle = (low + high) / 2
        if least_late(arrivals, work, middle) <= late_share * len(arrivals):
            high = middle
        else:
            low = middle
    return high


def draw(
    histogram: dict[int, int], rate: float, tokens_per_second: float, count: int, seed: int
) -> tuple[Seconds, Seconds]:
    """Arrivals of so many tokens a second, and how long each runs."""
    lengths = np.array(draw_lengths(histogram, count=count, seed=seed, longest=max(histogram)), np.float64)  # (count)
    random = np.random.default_rng((seed, 1))  # not the numbers that the lengths' order came from
    gaps = random.exponential(lengths.mean() / rate, count)  # (count)
    return np.cumsum(gaps), lengths / tokens_per_second


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the bound for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-second", type=float, default=8579, help="what the device computes at most")
    parser.add_argument("--saturation", type=float, default=7741, help="tokens/s that callers get at most")
    parser.add_argument("--load", type=float, nargs="+", default=[0.2, 0.5, 0.8, 0.9], help="shares of the saturation")
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="JSON with a histogram: tokens -> texts")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=4, help="how many draws, of which the median counts")
    options = parser.parse_args(arguments)
    histogram, about = read_histogram(options.lengths)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("load", "least p99, ms", "lowest and highest draw"):
        table.add_column(heading, justify="right")
    for load in options.load:
        found = []
        for seed in range(options.seeds):
            drawn = draw(histogram, load * options.saturation, options.tokens_per_second, options.requests, seed)
            found.append(1000 * least_percentile(*drawn, LATE_SHARE))
        table.add_row(f"{load:g}", f"{np.median(found):.0f}", f"{min(found):.0f}–{max(found):.0f}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(about, highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()
