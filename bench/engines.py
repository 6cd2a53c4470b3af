"""Compares the engines and precisions that a CPU has, on one bundle: tokens/s, and how far the rows are from float32.

    python bench/engines.py MODEL_REPOSITORY [--model NAME] [--rounds 6] [--budgets 512 768] [--round-up 1 8]
                            [--text FILE ...]

Lengths are those of real texts, 64 wait at a time, and batches are made as the server makes them. Rounds are
interleaved batch by batch, and each batch counts with its shortest time, because others on the machine can only make it
longer. --round-up pads the longest of each batch to a multiple, which leaves an engine fewer shapes to prepare for.
"first" is the very first round, in which every shape is new. Cosines are the least over all tokens of the text in
--text (this project's licence and documents by default), with the same rows of ONNX Runtime in float32, and between
sequences alone and in batches. Needs encserve-server[openvino].
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness.agreement import lowest_cosine
from harness.machine import describe_machine
from harness.workload import choose_lengths, open_tokenizer, random_workload, read_newest, windows
from rich.console import Console
from rich.table import Table

from encserve_server.engine.base import Engine
from encserve_server.engine.opening import open_engine
from encserve_server.errors import DeviceError
from encserve_server.scheduling.batching import BatchPolicy, plan_batch
from encserve_server.system.cpus import cpu_model, usable_cpus
from encserve_server.types.arrays import ModelInput
from encserve_server.types.bundles import Bundle

ROOT = Path(__file__).parent.parent
WAITING = 64  # as many callers wait
SIDES = (("onnxruntime", "float32"), ("openvino", "float32"), ("openvino", "bfloat16"))
WANTED = 1.9  # times the tokens/s of the first side, by the last one
TEXT_LENGTHS = (6, 9, 14, 22, 31, 47, 70, 110, 180, 256)  # tokens, special ones included

console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True, slots=True)
class Case:
    """One way of running the workload.

    Attributes:
        name: What the table calls it.
        engine: What runs it.
        batches: The sequences of each batch.
        seconds: For each batch the time of every round so far.
    """

    name: tuple[str, str, str, str]
    engine: Engine
    batches: list[list[ModelInput]]
    seconds: list[list[float]]


def as_batches(
    sequences: Sequence[Any], budget: int, multiple: int = 1, *, waiting: int = WAITING, most_padding: float = 0.25
) -> list[list[Any]]:
    """The batches that the server would make, the longest of each extended to a multiple of so many tokens."""
    batches: list[list[Any]] = []
    policy = BatchPolicy(budget, 256, most_padding)
    for window in windows(sequences, waiting):
        pending = list(window)
        while pending:
            lengths = Counter(map(len, pending))
            wanted = Counter(plan_batch(len(pending[0]), sorted(lengths), lengths, policy).counts)
            inputs: list[Any] = []
            left: list[Any] = []
            for it in pending:  # of one length the oldest come first
                (inputs if wanted[len(it)] else left).append(it)
                wanted[len(it)] -= wanted[len(it)] > 0
            inputs.sort(key=len)
            longest = inputs[-1]
            more = -len(longest) % multiple
            if more:
                inputs[-1] = np.concatenate([longest, longest[:1].repeat(more)])
            batches.append(inputs)
            pending = left
    return batches


def measure(cases: Sequence[Case], rounds: int) -> None:
    """Runs every case once a round, a few batches of each in turn, in random order."""
    order = np.random.default_rng(0)
    parts = 16
    for _ in range(rounds):
        for part in range(parts):
            for i in order.permutation(len(cases)):
                case = cases[i]
                for k in range(part, len(case.batches), parts):
                    case.seconds[k].append(case.engine.run(case.batches[k]).compute_seconds)


def real_text(bundle: Bundle, files: Sequence[Path]) -> list[ModelInput]:
    """Pieces of a text of each of `TEXT_LENGTHS`, over and over, with the special tokens that a text has."""
    assert bundle.tokenizer_file is not None  # noqa: S101 - main looked
    tokenizer = open_tokenizer(bundle.tokenizer_file)
    ids: list[int] = []
    for file in files:
        ids += tokenizer.encode(file.read_text(), add_special_tokens=False).ids
    around = tokenizer.encode("").ids
    before, after = around[: (len(around) + 1) // 2], around[(len(around) + 1) // 2 :]
    pieces: list[ModelInput] = []
    for length in itertools.cycle(TEXT_LENGTHS):
        take = min(length, bundle.max_sequence_tokens) - len(around)
        if len(ids) < take:
            return pieces
        pieces.append(np.array([*before, *ids[:take], *after], np.int64))
        ids = ids[take:]
    return pieces


def encode(engine: Engine, texts: Sequence[ModelInput], *, alone: bool) -> list[npt.NDArray[Any]]:
    """The rows of each text, computed one by one or in batches."""
    if alone:
        return [engine.run([it]).rows[0] for it in texts]
    rows: dict[int, npt.NDArray[Any]] = {}
    for batch in as_batches(texts, 512, 1):
        rows |= {id(it): its for it, its in zip(batch, engine.run(batch).rows, strict=True)}
    return [rows[id(it)] for it in texts]


def open_engines(bundle: Bundle) -> dict[tuple[str, str], Engine]:
    """Every engine that this CPU can run."""
    engines = {}
    for engine, precision in SIDES:
        try:
            engines[engine, precision] = open_engine(
                bundle.graph, engine=engine, precision=precision, device="cpu", intra_op_threads=usable_cpus()
            )
        except DeviceError as error:
            console.print(f"left out: {error}", highlight=False)
    return engines


def print_speeds(cases: Sequence[Case], tokens: int) -> None:
    """One row for each case; ratios are to the first."""
    table = Table("engine", "precision", "budget", "multiple of", "tokens/s", "ratio", "ratio, first")
    best, first = ([sum(pick(times) for times in case.seconds) for case in cases] for pick in (min, lambda it: it[0]))
    for case, seconds, at_first in zip(cases, best, first, strict=True):
        table.add_row(*case.name, f"{tokens / seconds:,.0f}", f"{best[0] / seconds:.2f}", f"{first[0] / at_first:.2f}")
    console.print(table)


def check_target(cases: Sequence[Case], cpu_flags: Sequence[str]) -> str:
    """Whether bfloat16 is as much faster than float32 as is wanted where the CPU has AMX; each in its fastest case."""
    text = f"target: bfloat16 ≥ {WANTED:g} × ONNX Runtime's float32"
    if "amx_bf16" not in cpu_flags:
        return f"{text}: not applicable, this CPU has no AMX"
    seconds: dict[tuple[str, str], float] = {}
    for case in cases:
        its = sum(map(min, case.seconds))
        seconds[case.name[:2]] = min(its, seconds.get(case.name[:2], its))
    if not {SIDES[0], SIDES[-1]} <= set(seconds):
        return f"{text}: one of both was left out"
    ratio = seconds[SIDES[0]] / seconds[SIDES[-1]]
    return f"{text}: {ratio:.2f}, {'met' if ratio >= WANTED else 'not met'}"


def print_cosines(engines: Mapping[tuple[str, str], Engine], texts: Sequence[ModelInput]) -> None:
    """How the rows of real text agree."""
    table = Table("engine", "precision", "min. cosine with float32", "in batches", "alone with in batches")
    want: list[npt.NDArray[Any]] = []
    for name, engine in engines.items():
        alone, together = (encode(engine, texts, alone=it) for it in (True, False))
        want = want or alone
        table.add_row(
            *name, *(f"{lowest_cosine(*it):.6f}" for it in ((alone, want), (together, want), (together, alone)))
        )
    console.print(f"{len(texts)} pieces of real text, {sum(map(len, texts)):,} tokens", highlight=False)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="a model repository")
    parser.add_argument("--model", help="NAME or NAME@VERSION; the first one without it")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512], metavar="TOKENS")
    parser.add_argument("--round-up", type=int, nargs="+", default=[1], metavar="TOKENS")
    default = [ROOT / name for name in ("LICENSE", "README.md", "RATIONALE.md", "docs/architecture.md")]
    parser.add_argument("--text", type=Path, nargs="+", default=default, metavar="FILE")
    options = parser.parse_args(arguments)
    bundle = read_newest(options.model_repository, options.model)
    if bundle.tokenizer_file is None:
        raise SystemExit(f"{bundle.name} has no tokenizer; this compares models that take text")
    lengths = choose_lengths(options.sequences, seed=0, longest=bundle.max_sequence_tokens)
    work = random_workload(lengths, vocab_size=bundle.vocab_size, seed=0)
    engines = open_engines(bundle)
    console.print(f"{bundle.name}@{bundle.version} on {cpu_model()}, {usable_cpus()} CPUs", highlight=False)
    console.print(", ".join(sorted({it.info.runtime for it in engines.values()})), highlight=False)
    cases = []
    for (name, precision), engine in engines.items():
        for budget, multiple in itertools.product(options.budgets, options.round_up):
            batches = as_batches(work.sequences, budget, multiple)
            cases.append(Case((name, precision, str(budget), str(multiple)), engine, batches, [[] for _ in batches]))
    measure(cases, options.rounds)
    print_speeds(cases, work.tokens)
    console.print(check_target(cases, describe_machine()["flags"]))
    print_cosines(engines, real_text(bundle, options.text))


if __name__ == "__main__":
    main()
