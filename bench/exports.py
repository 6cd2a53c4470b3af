"""Compares exports of one model: what their graphs take, each as a ratio to the first.

    python bench/exports.py MODEL_REPOSITORY --model NAME --model OTHER ... [--lengths TOKENS ...] [--served]

Batches as the server makes them, of sequences as long as real texts or as --lengths says in turn, go through each graph
in the server's own engine, batch by batch and in random order. What counts is the CPU time of the one thread that
computes, in which others on the machine show little: what the first takes, divided by what the other takes, round by
round.

With --served each has a server of its own, and 64 callers who want one vector of each sequence: what counts is
tokens/s, those of the others divided by those of the first, and beside it the share of padding.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from engines import as_batches

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.load import POOLED, served
from harness.machine import OtherWork
from harness.rounds import Patience, measure, ratios, spread
from harness.workload import Workload, choose_lengths, random_workload, read_newest

from encserve_server.engine.onnx import OnnxEngine
from encserve_server.types.bundles import Bundle

BUDGET = 512  # padded tokens of a batch


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="a model repository")
    parser.add_argument("--model", action="append", required=True, help="NAME or NAME@VERSION; may be repeated")
    parser.add_argument("--lengths", nargs="+", type=int, default=(), metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--served", action="store_true", help="ask servers, in place of engines")
    parser.add_argument("--seconds", type=float, default=2, help="how long each server is asked in a round")
    options = parser.parse_args(arguments)
    bundles = [read_newest(options.model_repository, it) for it in options.model]
    longest, vocab_size = (min(getattr(it, name) for it in bundles) for name in ("max_sequence_tokens", "vocab_size"))
    lengths = choose_lengths(options.sequences, seed=0, longest=longest, given=options.lengths)
    workload = random_workload(lengths, vocab_size=vocab_size, seed=0)
    if options.served:
        compare_served(options, workload)
    else:
        compare_engines(bundles, workload, options.rounds)


def compare_served(options: argparse.Namespace, workload: Workload) -> None:
    """Measures servers of the bundles in turns, and prints."""
    with ExitStack() as stack:
        models, seconds = options.model_repository, options.seconds
        servers = {
            name: stack.enter_context(served(models, ["--model", name, "--tune-batches"], workload, seconds))
            for name in options.model
        }
        sides = [
            dataclasses.replace(side, name=name)
            for name, it in servers.items()
            for side in it.sides()
            if side.name == POOLED
        ]
        found = measure(sides, options.rounds, 0, lambda *_: None, Patience(120, lambda: OtherWork().share))
        for name, it in servers.items():
            ratio = spread(ratios(found[name], found[options.model[0]]))
            tokens, padding = (
                it.server.metric("encserve_tokens_total"),
                it.server.metric("encserve_padding_tokens_total"),
            )
            print(
                f"{name}: {np.median([its.tokens_per_second for its in found[name]]):,.0f} tokens/s, "
                f"ratio {ratio.median:.2f} [{ratio.low:.2f}-{ratio.high:.2f}], "
                f"padding {padding / (tokens + padding):.1%}"
            )


def compare_engines(bundles: Sequence[Bundle], workload: Workload, rounds: int) -> None:
    """Measures graphs in this process, and prints."""
    batches = as_batches(workload.sequences, BUDGET)
    random = np.random.default_rng(0)
    seconds = np.zeros((rounds + 1, len(bundles)))
    with ExitStack() as stack:
        engines = [OnnxEngine(it.graph, device="cpu", intra_op_threads=1) for it in bundles]
        for engine in engines:
            stack.callback(engine.close)
        for round_seconds in seconds:
            for batch in batches:
                for i in random.permutation(len(engines)):
                    began = time.thread_time()
                    engines[i].run(batch)
                    round_seconds[i] += time.thread_time() - began
    for bundle, own in zip(bundles, seconds[1:].T, strict=True):  # the first round warms up
        ratio = spread(list(seconds[1:, 0] / own))
        print(
            f"{bundle.name}@{bundle.version}: {workload.tokens / np.median(own):,.0f} tokens per CPU second, "
            f"ratio {ratio.median:.3f} [{ratio.low:.3f}-{ratio.high:.3f}]"
        )


if __name__ == "__main__":
    main()
