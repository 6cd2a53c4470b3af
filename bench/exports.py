"""Compares exports of one model: what their graphs take, each as a ratio to the first.

    python bench/exports.py MODEL_REPOSITORY --model NAME --model OTHER ... [--lengths TOKENS ...] [--rounds 20]

Batches as the server makes them, of sequences as long as real texts or as --lengths says in turn, go through each graph
in the server's own engine, batch by batch and in random order. What counts is the CPU time of the one thread that
computes, in which others on the machine show little: what the first takes, divided by what the other takes, round by
round.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from engines import as_batches
from harness.rounds import spread
from harness.workload import choose_lengths, random_workload, read_newest

from encserve_server.engine.onnx import OnnxEngine

BUDGET = 512  # padded tokens of a batch


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="a model repository")
    parser.add_argument("--model", action="append", required=True, help="NAME or NAME@VERSION; may be repeated")
    parser.add_argument("--lengths", nargs="+", type=int, default=(), metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=24)
    options = parser.parse_args(arguments)
    bundles = [read_newest(options.model_repository, it) for it in options.model]
    longest, vocab_size = (min(getattr(it, name) for it in bundles) for name in ("max_sequence_tokens", "vocab_size"))
    lengths = choose_lengths(options.sequences, seed=0, longest=longest, given=options.lengths)
    batches = as_batches(random_workload(lengths, vocab_size=vocab_size, seed=0).sequences, BUDGET)
    random = np.random.default_rng(0)
    seconds = np.zeros((options.rounds + 1, len(bundles)))
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
            f"{bundle.name}@{bundle.version}: {sum(lengths) / np.median(own):,.0f} tokens per CPU second, "
            f"ratio {ratio.median:.3f} [{ratio.low:.3f}-{ratio.high:.3f}]"
        )


if __name__ == "__main__":
    main()
