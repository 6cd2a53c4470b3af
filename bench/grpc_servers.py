"""What a call costs by whose gRPC server takes it: `--grpc-server encserve` and `grpcio`, asked in turns.

    python bench/grpc_servers.py MODELS [--model NAME] [--rounds 5] [--seconds 5] [--patience SECONDS] [--json FILE]

Both sides are whole servers, the same in everything else. They are asked by the generator that leaves the machine to
them (curves/light_load.py):

    calls       64 callers, an engine that takes no time: calls a second, and the server's CPU time for each
    one caller  the model, single sequences with the lengths of real texts: the median latency
    64 callers  the same: tokens a second
    overload    three times as many calls as that: how much is answered of what 64 callers get, how soon the others are
                refused, whether any failed in another way, and how late the generator itself is

Medians over rounds with their quartiles, and the ratio of the two sides, round by round. What the host takes from a
virtual machine is printed too (steal, in /proc/stat): with more than a few per cent of it times mean little. With
`--patience` a side is then measured again, and the least disturbed try counts.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from comparison.machine import cpu_seconds, cpu_ticks, describe_machine
from comparison.rounds import Patience, spread
from curves.front_end import SEQUENCE_TOKENS, fake_engine_server
from curves.light_load import light_closed_loop, light_open_loop
from curves.measure import CALLERS, OVERLOAD, Bench

from encserve_client import EncoderClient
from encserve_client._bench import Call, make_calls
from encserve_client._bench._samples import percentile

OURS, THEIRS = SIDES = ("encserve", "grpcio")
_WARMUP_SECONDS = 1.0
# Each figure with its unit and what it is multiplied by to have it.
UNITS = {
    "calls_per_second": ("calls/s, no model", 1),
    "cpu_seconds_per_call": ("CPU for a call, no model, µs", 1e6),
    "one_caller_p50_seconds": ("one caller, p50, ms", 1e3),
    "tokens_per_second": ("64 callers, tokens/s", 1),
    "goodput_share": ("overload: tokens/s of that", 1),
    "refused_p50_seconds": ("overload: refusals, p50, ms", 1e3),
    "refused_p99_seconds": ("overload: refusals, p99, ms", 1e3),
    "failed_share": ("overload: other failures", 1),
    "lateness_p99_seconds": ("overload: lateness, p99, ms", 1e3),
}

Figures = dict[str, float]

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def front_end(target: str, pid: int, calls: Sequence[Call], seconds: float) -> Figures:
    """What is left when the engine takes no time."""
    light_closed_loop(target, calls, callers=CALLERS, seconds=_WARMUP_SECONDS, warmup_seconds=0)
    began = cpu_seconds([pid])
    found = light_closed_loop(target, calls, callers=CALLERS, seconds=seconds, warmup_seconds=0)
    used = cpu_seconds([pid]) - began
    return {"calls_per_second": found.calls_per_second, "cpu_seconds_per_call": used / max(found.answered, 1)}


def with_model(target: str, calls: Sequence[Call], seconds: float, seed: int) -> Figures:
    """One caller, 64, and three times as many calls as these get answered."""
    one = light_closed_loop(target, calls, callers=1, seconds=seconds, warmup_seconds=_WARMUP_SECONDS)
    many = light_closed_loop(target, calls, callers=CALLERS, seconds=seconds, warmup_seconds=_WARMUP_SECONDS)
    rate = OVERLOAD * many.calls_per_second
    over = light_open_loop(target, calls, rate_per_second=rate, seconds=2 * seconds, seed=seed)
    found = {
        "one_caller_p50_seconds": percentile(one.latencies, 50),
        "tokens_per_second": many.tokens_per_second,
        "goodput_share": over.tokens_per_second / many.tokens_per_second,
        "refused_p50_seconds": percentile(over.refused, 50),
        "refused_p99_seconds": percentile(over.refused, 99),
        "failed_share": sum(over.errors.values()) / len(over.lateness),
        "lateness_p99_seconds": percentile(over.lateness, 99),
    }
    return {name: math.nan if value is None else value for name, value in found.items()}


def steal_share() -> Callable[[], float]:
    """Begins to watch; tells which share of the CPUs' time the host has taken since."""

    def read() -> tuple[int, int]:
        times = cpu_ticks()
        return times[7], sum(times)

    began = read()

    def share() -> float:
        stolen, total = (b - a for a, b in zip(began, read(), strict=True))
        return stolen / max(total, 1)

    return share


def compare(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Starts both servers twice, with and without a model, runs the rounds, and gives every figure."""
    bench = Bench(options.models, options.model, options.rounds, options.seconds, options.seed, console.print)
    measured: dict[str, Callable[[int], Figures]] = {}
    for side in SIDES:
        target, pid, _ = stack.enter_context(fake_engine_server(side))
        with EncoderClient(target) as client:
            short = make_calls([SEQUENCE_TOKENS] * 1024, client.model())
        server = stack.enter_context(bench.server("--grpc-server", side, "--max-queue-tokens", "8192"))
        usual = bench.calls(server)

        def both(
            seed: int,
            *,
            target: str = target,
            pid: int = pid,
            short: Sequence[Call] = short,
            model: str = server.target,
            usual: Sequence[Call] = usual,
        ) -> Figures:
            found = front_end(target, pid, short, options.seconds)
            return found | with_model(model, usual, options.seconds, seed)

        measured[side] = both
    figures: dict[str, dict[str, list[float]]] = {side: defaultdict(list) for side in SIDES}

    patience = Patience(options.patience, steal_share)

    def measure(side: str, number: int) -> dict[str, Any]:
        found, steal = patience.quietest(lambda: measured[side](options.seed + number))
        for name, value in found.items():
            figures[side][name].append(value)
        return {"side": side, **found, "steal": steal}

    points = bench.interleaved(SIDES, measure)
    return {"machine": describe_machine(), "steal": [it["steal"] for it in points], "sides": figures}


def show(report: Mapping[str, Any]) -> None:
    """Prints the medians with their quartiles, and the ratios by round."""
    table = Table("figure", *SIDES, f"{OURS} : {THEIRS}")
    for name, (text, factor) in UNITS.items():
        ours, theirs = (report["sides"][side][name] for side in SIDES)
        ratio = [a / b if b else math.nan for a, b in zip(ours, theirs, strict=True)]
        table.add_row(text, _shown(ours, factor), _shown(theirs, factor), _shown(ratio, 1))
    console.print(table)
    low, high = min(report["steal"]), max(report["steal"])
    console.print(f"the host took {low:.0%} to {high:.0%} of the CPUs while a side was measured")


def _shown(values: Sequence[float], factor: float) -> str:
    """A median and its quartiles; nothing where nothing was there to be measured, as when nobody was refused."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    found = spread(known)
    return f"{found.median * factor:,.3g} ({found.low * factor:,.3g} … {found.high * factor:,.3g})"


def main() -> None:
    """Runs the comparison, prints it, and writes it down if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="a model repository")
    parser.add_argument("--model", help="NAME or NAME@VERSION; the first one without it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each measurement takes, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how much longer to take, in all, for measuring again what the host disturbed",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all figures there")
    options = parser.parse_args()
    with ExitStack() as stack:
        report = compare(options, stack)
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
