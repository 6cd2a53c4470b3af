"""Measures what a GPU does best: the budget of a batch, batches at once, float32 or float16.

    python bench/gpu.py MODEL_REPOSITORY [--model NAME[@VERSION] ...] [--device cuda] [--rounds 5] [--json FILE]

No server and no gRPC: batches as the scheduler makes them of 1,024 sequences that wait, of lengths that real texts
have, run by the server's own engine in as many threads as it has lanes. Sides take turns within a round, in random
order; medians over rounds. The budget is measured first, and the others at the best one. Every model's rows are
compared with those that the first one gives on the CPU.
Needs encserve-server[gpu], or [cpu] with --device cpu.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from engines import as_batches
from harness.agreement import lowest_cosine
from harness.machine import describe_machine
from harness.workload import Sequence64, choose_lengths, random_workload, read_newest
from rich.console import Console
from rich.table import Table

from encserve_server.engine.onnx import OnnxEngine
from encserve_server.system.cpus import usable_cpus
from encserve_server.types.bundles import Bundle

WAITING = 1024  # sequences
COMPARED = 64  # sequences whose rows are compared
USUAL_LANES = 2

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


@dataclass(frozen=True, slots=True)
class Side:
    """One way to run the workload.

    Attributes:
        model: The bundle's name and version.
        budget: Padded tokens of a batch, at most.
        lanes: Batches at once.
    """

    model: str
    budget: int
    lanes: int = USUAL_LANES


@dataclass(slots=True)
class Found:
    """What a side gave, round by round.

    Attributes:
        tokens_per_second: From the first batch to the last.
        stages: Mean seconds of a batch's laying out, computing (copies included) and cutting.
        batches: How many there were.
    """

    tokens_per_second: list[float] = field(default_factory=list)
    stages: list[tuple[float, float, float]] = field(default_factory=list)
    batches: int = 0


class Gpu:
    """The engines, each opened when it is first needed, and the workload."""

    def __init__(self, bundles: Sequence[Bundle], device: str, sequences: int, seed: int) -> None:
        """Draws the sequences."""
        self._device = device
        self._random = np.random.default_rng(seed)
        self.bundles = {f"{it.name}@{it.version}": it for it in bundles}
        self._made: dict[int, list[list[Sequence64]]] = {}
        self._engines: dict[tuple[str, int], OnnxEngine] = {}
        longest, size = (min(getattr(it, name) for it in bundles) for name in ("max_sequence_tokens", "vocab_size"))
        lengths = choose_lengths(sequences, seed=seed, longest=longest)
        self.work = random_workload(lengths, vocab_size=size, seed=seed)

    def close(self) -> None:
        """Closes the engines."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def engine(self, model: str, lanes: int = USUAL_LANES) -> OnnxEngine:
        """A model on the device."""
        key = (model, lanes)
        if key not in self._engines:
            engine = OnnxEngine(
                self.bundles[model].graph,
                device=self._device,
                intra_op_threads=usable_cpus(),
                parallel_runs=lanes,
            )
            self._engines[key] = engine
        return self._engines[key]

    def compare(self, title: str, sides: Sequence[Side], rounds: int) -> dict[Side, Found]:
        """Runs all sides in turns and prints a table; the first round warms up and does not count.

        What other comparisons have opened is closed first, since a device may not hold everything at once.
        """
        self.close()
        found = {side: Found() for side in sides}
        for number in range(rounds + 1):
            for i in self._random.permutation(len(sides)):
                if (side := sides[i]) in found:
                    try:
                        self._run(side, found[side], counts=number > 0)
                    except Exception as error:  # whatever the runtime raises: the device is full, mostly
                        console.print(f"left out: {side}: {error}")
                        del found[side]
        if not found:
            raise SystemExit(f"{title}: nothing could be measured")
        table = Table("model", "budget", "lanes", "batches", "tokens/s", "ratio", "ms laid out", "run")
        first = next(iter(found.values())).tokens_per_second
        for side, it in found.items():
            ratio = np.median(np.array(it.tokens_per_second) / np.array(first))
            stages = (f"{1000 * seconds:.2f}" for seconds in np.median(it.stages, axis=0))
            speed = f"{np.median(it.tokens_per_second):,.0f}"
            what = (side.model, f"{side.budget:,}", str(side.lanes), f"{it.batches:,}")
            table.add_row(*what, speed, f"{ratio:.2f}", *stages)
        console.print(title)
        console.print(table)
        return found

    def _batches(self, budget: int) -> list[list[Sequence64]]:
        """The batches of a budget, made when they are first needed."""
        if budget not in self._made:
            self._made[budget] = as_batches(self.work.sequences, budget, waiting=WAITING, most_padding=0.5)
        return self._made[budget]

    def _run(self, side: Side, found: Found, *, counts: bool) -> None:
        engine = self.engine(side.model, side.lanes)
        batches = self._batches(side.budget)

        def run(batch: list[Sequence64]) -> tuple[float, float]:
            result = engine.run(batch, alone=False)
            return result.collate_seconds, result.compute_seconds

        with ThreadPoolExecutor(side.lanes) as threads:
            began = time.perf_counter()
            stages = list(threads.map(run, batches))
            seconds = time.perf_counter() - began
        if counts:
            found.tokens_per_second.append(self.work.tokens / seconds)
            found.stages.append(tuple(np.mean(stages, axis=0)))
            found.batches = len(batches)

    def print_agreement(self) -> None:
        """How far each model's rows on the device are from the first one's on the CPU."""
        (_, first), *_ = self.bundles.items()
        texts = self.work.sequences[:COMPARED]
        with contextlib.closing(OnnxEngine(first.graph, device="cpu", intra_op_threads=usable_cpus())) as engine:
            want = [engine.run([it]).rows[0] for it in texts]
        table = Table("model", "least cosine with the CPU, alone", "in batches", "alone with in batches")
        for model in self.bundles:
            alone = [self.engine(model).run([it]).rows[0] for it in texts]
            together = self.engine(model).run(texts).rows
            pairs = ((alone, want), (together, want), (together, alone))
            table.add_row(model, *(f"{lowest_cosine(*it):.6f}" for it in pairs))
        console.print(table)


def best_budget(found: dict[Side, Found], model: str) -> int:
    """The budget that gave a model most tokens/s."""
    speeds = {side.budget: float(np.median(it.tokens_per_second)) for side, it in found.items() if side.model == model}
    return max(speeds, key=lambda budget: speeds[budget])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="a model repository")
    parser.add_argument("--model", action="append", help="may be repeated; without it the first one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    tried = [1024, 2048, 4096, 8192, 16384, 32768]
    parser.add_argument("--budgets", type=int, nargs="+", default=tried, metavar="TOKENS")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all figures there")
    options = parser.parse_args(arguments)
    bundles = [read_newest(options.model_repository, it) for it in options.model or [None]]
    gpu = Gpu(bundles, options.device, options.sequences, options.seed)
    with contextlib.closing(gpu):
        info = gpu.engine(next(iter(gpu.bundles))).info
        console.print(
            f"{info.provider}, {info.runtime}; {len(gpu.work.sequences):,} sequences, {gpu.work.tokens:,} tokens"
        )
        gpu.print_agreement()
        compare: Callable[[str, Sequence[Side]], dict[Side, Found]] = partial(gpu.compare, rounds=options.rounds)
        content: dict[str, Any] = {"machine": describe_machine(), "engine": asdict(info)}

        def keep(section: str, found: dict[Side, Found]) -> dict[Side, Found]:
            """Writes down what there is so far."""
            content[section] = [asdict(side) | asdict(its) for side, its in found.items()]
            if options.json:
                options.json.write_text(json.dumps(content, indent=1) + "\n")
            return found

        budgets = [Side(it, budget) for it in gpu.bundles for budget in options.budgets]
        found = keep("budget", compare("The budget", budgets))
        best = {model: best_budget(found, model) for model in {side.model: None for side in found}}
        keep("lanes", compare("Batches at once", [Side(it, best[it], lanes) for it in best for lanes in options.lanes]))


if __name__ == "__main__":
    main()
