"""Who is compared. Each side handles the same sequences; what it may know of them beforehand is what differs."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from comparison.load import LoadProcess, make_calls
from comparison.rounds import NO_PATIENCE, Measurement, Side, measure
from comparison.workload import Sequence64, Workload, cycled, sorted_batches, windows
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.engine.onnx import OnnxEngine

BUDGETS = (128, 256, 384, 512, 768, 1024, 2048)  # padded tokens
SWEEP_ROUNDS = 2
WINDOW = 64  # sequences that a batcher without lengths takes together
CALLERS = 64
CALL_SEQUENCES = 256  # in one call of the large ones
LARGE_CALLERS, LARGE_CALLS = 4, 6
# One at a time, and in PyTorch, everything would take minutes; those sides handle the first three windows of it.
SLICE = 3 * WINDOW
PASSES = 2  # times that 64 callers ask for everything: less of it is beginning and end, when fewer of them are busy

# What the other sides are a ratio of.
CEILING, NAIVE = "ceiling", "naive"
BARE, ONE = "bare", "encserve-1"
LARGE, MANY, POOLED = "encserve-4x256", "encserve-64", "encserve-64-pooled"


# ONNX Runtime in this process, with the server's own session options.


def run_batches(engine: OnnxEngine, batches: Sequence[Sequence[Sequence64]]) -> Measurement:
    """Runs batches one after another. Only `session.run` is timed: padding and cutting cost these sides nothing."""
    seconds = sum(engine.run(batch).compute_seconds for batch in batches)
    return Measurement(sum(len(it) for batch in batches for it in batch), seconds)


def run_singly(engine: OnnxEngine, sequences: Sequence[Sequence64]) -> Measurement:
    """Runs each sequence alone, in order of arrival; only `session.run` is timed."""
    latencies = [(len(it), engine.run([it]).compute_seconds) for it in sequences]
    return Measurement(sum(map(len, sequences)), sum(seconds for _, seconds in latencies), latencies)


def sweep_budgets(engine: OnnxEngine, workload: Workload, seed: int) -> dict[int, float]:
    """Tokens/s of sorted batches by their budget of padded tokens, interleaved; of each the best round.

    A machine that is not quiet only ever takes time away, and a ceiling is what is possible.
    """
    sides = [_batches_side(str(it), "", engine, sorted_batches(workload.sequences, it)) for it in BUDGETS]
    run_batches(engine, sorted_batches(workload.sequences, BUDGETS[-1]))  # memory is taken now
    found = measure(sides, SWEEP_ROUNDS, seed, lambda *_: None, NO_PATIENCE)
    return {int(name): max(it.tokens_per_second for it in its) for name, its in found.items()}


def _batches_side(name: str, label: str, engine: OnnxEngine, batches: Sequence[Sequence[Sequence64]]) -> Side:
    return Side(name, label, lambda: run_batches(engine, batches))


def engine_sides(engine: OnnxEngine, workload: Workload, best_budget: int) -> list[Side]:
    """The sides that run ONNX Runtime in this process."""
    in_windows = windows(workload.sequences, WINDOW)
    run_batches(engine, [max(in_windows, key=lambda it: max(map(len, it)))])  # memory for the largest is taken now
    sides = [
        _batches_side(
            CEILING,
            f"ceiling: session.run alone, all sorted, {best_budget} padded tokens",
            engine,
            sorted_batches(workload.sequences, best_budget),
        ),
        Side(BARE, "session.run alone, one sequence at a time", lambda: run_singly(engine, workload.sequences[:SLICE])),
        _batches_side(NAIVE, f"naive batcher: {WINDOW} in order of arrival, ONNX Runtime", engine, in_windows),
    ]
    for budget in (256, 512):
        batches = [batch for window in in_windows for batch in sorted_batches(window, budget)]
        label = f"windows of {WINDOW}, sorted, {budget} padded tokens"
        sides.append(_batches_side(f"windows-{budget}", label, engine, batches))
    return sides


# PyTorch in this process.


def torch_sides(checkpoint: Path, threads: int, workload: Workload) -> tuple[list[Side], Callable[[Sequence64], Any]]:
    """The sides that run the exporter's encoder in PyTorch, eagerly; and what gives the (seq, d_model) rows of one."""
    import torch

    from encserve_export.layouts import hf_bert
    from encserve_export.weights import read_json, read_weights

    torch.set_num_threads(threads)
    layout = hf_bert.read_layout(read_json(checkpoint / "config.json"))
    encoder = layout.load(hf_bert.plain_names(read_weights(checkpoint).tensors)).eval()

    def encode(batch: Sequence[Sequence64]) -> tuple[Any, float]:
        """(batch, seq, d_model) and the encoder's own time in seconds."""
        lengths = torch.tensor([len(it) for it in batch])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()  # (batch, seq)
        ids = torch.zeros_like(mask)  # (batch, seq)
        ids[mask.bool()] = torch.from_numpy(np.concatenate(batch))
        with torch.inference_mode():
            began = time.perf_counter()
            rows = encoder(ids, mask)  # (batch, seq, d_model)
            return rows, time.perf_counter() - began

    def run(batches: Sequence[Sequence[Sequence64]]) -> Measurement:
        timed = [(sum(map(len, batch)), encode(batch)[1]) for batch in batches]
        alone = all(len(batch) == 1 for batch in batches)
        return Measurement(sum(it for it, _ in timed), sum(seconds for _, seconds in timed), timed if alone else [])

    first = workload.sequences[:SLICE]
    run([first[:WINDOW]])  # memory is taken now
    sides = [
        Side("torch", "PyTorch, one sequence at a time", lambda: run([[it] for it in first])),
        Side(
            "torch-batched",
            f"PyTorch, {WINDOW} in order of arrival, padded",
            lambda: run(windows(first, WINDOW)),
        ),
    ]
    return sides, lambda sequence: encode([sequence])[0][0].numpy()


# encserve, asked over loopback by another process.


def calls_of(workload: Workload) -> dict[str, Any]:
    """What encserve is asked, by the name that `LoadProcess.ask` takes."""
    singly = [[sequence] for sequence in workload.sequences]
    large = cycled(workload.sequences, CALL_SEQUENCES, LARGE_CALLS)
    return {
        "tokens": make_calls(singly, pb.OUTPUT_KIND_TOKENS),
        "pooled": make_calls(singly, pb.OUTPUT_KIND_MEAN),
        "large": make_calls(large, pb.OUTPUT_KIND_TOKENS),
    }


def encserve_sides(load: LoadProcess, workload: Workload) -> list[Side]:
    """encserve, asked in four ways."""
    count = len(workload.sequences)
    load.ask("tokens", callers=CALLERS, count=count)  # memory is taken now
    return [
        Side(ONE, "encserve, 1 caller", lambda: load.ask("tokens", callers=1, count=min(SLICE, count))),
        Side(
            LARGE,
            f"encserve, {LARGE_CALLERS} callers, {CALL_SEQUENCES} sequences a call",
            lambda: load.ask("large", callers=LARGE_CALLERS, count=LARGE_CALLS),
        ),
        Side(
            MANY,
            f"encserve, {CALLERS} callers",
            lambda: load.ask("tokens", callers=CALLERS, count=PASSES * count),
        ),
        Side(
            POOLED,
            f"encserve, {CALLERS} callers, pooled",
            lambda: load.ask("pooled", callers=CALLERS, count=PASSES * count),
        ),
    ]
