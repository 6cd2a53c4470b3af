"""Finds the fastest batch size and the fastest number of simultaneous batches on a GPU.

    python bench/gpu.py MODEL_REPOSITORY [--model NAME[@VERSION] ...] [--device cuda] [--rounds 5] [--json FILE]

The program starts no server. It makes the same batches as the server's scheduler for 1,024 waiting sequences. The
sequences have the lengths of real texts. A lane runs one batch at a time. A setting is a model, a batch size and a
number of lanes. Each round runs all settings in random order. The first part measures several batch sizes with two
lanes. The second part measures several numbers of lanes with the fastest batch size.

First, the program runs the first model on the CPU. The hidden states of every model on the device are compared with
this run. If a setting fails, for example because the device's memory is full, the setting is left out. The program
needs encserve[gpu], or encserve[cpu] for --device cpu.
"""

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.agreement import lowest_cosine
from harness.machine import describe_run, write_report
from harness.rounds import Measurement, Side, measure, ratios
from harness.workload import TokenIds, choose_lengths, random_workload, read_newest, windows
from rich.console import Console
from rich.table import Table

from encserve_server.engine.onnx import OnnxEngine
from encserve_server.scheduling.batching import BatchPolicy, plan_batch
from encserve_server.system.cpus import usable_cpus
from encserve_server.types.bundles import Bundle

WAITING_SEQUENCES = 1024
COMPARED_SEQUENCES = 64
USUAL_LANES = 2

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, a batch size and a number of lanes.

    Attributes:
        model: NAME@VERSION.
        budget: The largest number of padded tokens in a batch.
        lanes: The number of batches that run at the same time.
    """

    model: str
    budget: int
    lanes: int = USUAL_LANES


def scheduler_batches(sequences: Sequence[TokenIds], budget: int, waiting: int) -> list[list[TokenIds]]:
    """Return the batches that the server's scheduler makes if its queue has `waiting` sequences."""
    batches = []
    policy = BatchPolicy(budget, 256, max_padding_fraction=0.5)
    for window in windows(sequences, waiting):
        while window:
            lengths = Counter(map(len, window))
            counts = Counter(plan_batch(len(window[0]), sorted(lengths), lengths, policy).counts)
            batch: list[TokenIds] = []
            rest: list[TokenIds] = []
            for sequence in window:  # among sequences of equal length, the oldest goes first
                (batch if counts[len(sequence)] > 0 else rest).append(sequence)
                counts[len(sequence)] -= 1
            batches.append(sorted(batch, key=len))
            window = rest
    return batches


class Device:
    """The models on a device, and the sequences for the models."""

    def __init__(self, bundles: Sequence[Bundle], device: str, sequences: int, seed: int) -> None:
        """Make random sequences. Each engine opens at its first use."""
        self._device, self._seed = device, seed
        self._engines: dict[tuple[str, int], OnnxEngine] = {}
        self.bundles = {f"{bundle.name}@{bundle.version}": bundle for bundle in bundles}
        longest = min(bundle.max_sequence_tokens for bundle in bundles)
        vocab_size = min(bundle.vocab_size for bundle in bundles)
        lengths = choose_lengths(sequences, seed=seed, longest=longest)
        self.workload = random_workload(lengths, vocab_size=vocab_size, seed=seed)

    def close(self) -> None:
        """Close all engines."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def engine(self, model: str, lanes: int = USUAL_LANES) -> OnnxEngine:
        """Return the engine for a model and a number of lanes. Open the engine at its first use."""
        if (model, lanes) not in self._engines:
            graph = self.bundles[model].graph
            self._engines[model, lanes] = OnnxEngine(
                graph, device=self._device, intra_op_threads=usable_cpus(), parallel_runs=lanes
            )
        return self._engines[model, lanes]

    def compare(self, title: str, settings: Sequence[Setting], rounds: int) -> dict[Setting, list[Measurement]]:
        """Close all engines, which frees the device's memory. Then measure the settings, and print a table."""
        self.close()
        usable: dict[str, Setting] = {}
        for setting in settings:
            try:
                self._run(setting)  # warm-up
                usable[str(setting)] = setting
            except Exception as error:  # ONNX Runtime raises exceptions of several classes
                console.print(f"left out because it failed: {setting}: {error}")
        if not usable:
            raise SystemExit(f"{title}: every setting failed; the errors are above")
        sides = [Side(name, name, partial(self._run, setting)) for name, setting in usable.items()]
        by_name = measure(sides, rounds, self._seed)
        found = {setting: by_name[name] for name, setting in usable.items()}
        first = next(iter(found.values()))
        table = Table("model", "budget", "lanes", "tokens/s", "ratio", title=title)
        for setting, runs in found.items():
            cells = (setting.model, f"{setting.budget:,}", str(setting.lanes), f"{median_rate(runs):,.0f}")
            table.add_row(*cells, f"{np.median(ratios(runs, first)):.2f}")
        console.print(table)
        return found

    def _run(self, setting: Setting) -> Measurement:
        engine = self.engine(setting.model, setting.lanes)
        batches = scheduler_batches(self.workload.sequences, setting.budget, WAITING_SEQUENCES)
        with ThreadPoolExecutor(setting.lanes) as threads:
            began = time.perf_counter()
            list(threads.map(partial(engine.run, alone=False), batches))
            return Measurement(self.workload.tokens, time.perf_counter() - began)

    def print_agreement(self) -> None:
        """Print the lowest cosines between hidden states.

        The device is compared with the CPU, and a batch is compared with single sequences.
        """
        first = next(iter(self.bundles.values()))
        sequences = self.workload.sequences[:COMPARED_SEQUENCES]
        with contextlib.closing(OnnxEngine(first.graph, device="cpu", intra_op_threads=usable_cpus())) as engine:
            reference = [engine.run([sequence]).rows[0] for sequence in sequences]
        table = Table("model", "least cosine: alone vs. CPU", "batch vs. CPU", "batch vs. alone")
        for model in self.bundles:
            alone = [self.engine(model).run([sequence]).rows[0] for sequence in sequences]
            together = self.engine(model).run(sequences).rows
            pairs = ((alone, reference), (together, reference), (together, alone))
            table.add_row(model, *(f"{lowest_cosine(got, want):.6f}" for got, want in pairs))
        console.print(table)


def median_rate(runs: Sequence[Measurement]) -> float:
    """Return the median tokens/s over rounds."""
    return float(np.median([run.tokens_per_second for run in runs]))


def best_budget(found: Mapping[Setting, Sequence[Measurement]], model: str) -> int:
    """Return the budget for which a model has the highest median tokens/s."""
    rates = {setting.budget: median_rate(runs) for setting, runs in found.items() if setting.model == model}
    return max(rates, key=lambda budget: rates[budget])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables, and write the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="the folder of the models")
    parser.add_argument("--model", action="append", help="NAME[@VERSION]; may be repeated; default: the first model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    budgets = [1024, 2048, 4096, 8192, 16384, 32768]
    parser.add_argument("--budgets", type=int, nargs="+", default=budgets, metavar="TOKENS")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    options = parser.parse_args(arguments)
    bundles = [read_newest(options.model_repository, model) for model in options.model or [None]]
    content: dict[str, Any] = describe_run()

    def save(part: str, found: Mapping[Setting, Sequence[Measurement]]) -> None:
        content[part] = [
            asdict(setting) | {"tokens_per_second": [run.tokens_per_second for run in runs]}
            for setting, runs in found.items()
        ]
        if options.json:
            write_report(options.json, content)

    with contextlib.closing(Device(bundles, options.device, options.sequences, options.seed)) as device:
        info = device.engine(next(iter(device.bundles))).info
        content["engine"] = asdict(info)
        console.print(f"{info.provider}, {info.runtime}; {device.workload.tokens:,} tokens")
        device.print_agreement()
        by_budget = [Setting(model, budget) for model in device.bundles for budget in options.budgets]
        found = device.compare("Largest number of padded tokens in a batch (budget)", by_budget, options.rounds)
        save("budget", found)
        best = {model: best_budget(found, model) for model in {setting.model: None for setting in found}}
        by_lanes = [Setting(model, best[model], lanes) for model in best for lanes in options.lanes]
        save("lanes", device.compare("Batches that run at the same time (lanes)", by_lanes, options.rounds))


if __name__ == "__main__":
    main()
