"""Who is compared. Each side handles the same sequences; what it may know of them beforehand is what differs."""

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from comparison.load import LoadProcess, make_calls
from comparison.rounds import NO_PATIENCE, Measurement, Side, measure
from comparison.workload import Sequence64, Workload, cycled, sorted_batches, windows
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.engine.onnx import OnnxEngine
from encserve_server.types import Graph

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
CEILING, NAIVE, NAIVE_PACKED, PARALLEL = "ceiling", "naive", "naive-packed", "parallel"
BARE, ONE, EMPTY, MINIMAL = "bare", "encserve-1", "empty", "minimal"
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


def run_side_by_side(engine: OnnxEngine, batches: Sequence[Sequence[Sequence64]]) -> Measurement:
    """Runs as many batches at once as the engine can. Timed from the first to the last, padding and cutting too."""
    began = time.perf_counter()
    with ThreadPoolExecutor(engine.max_parallel_runs) as threads:
        list(threads.map(partial(engine.run, alone=False), batches))
    return Measurement(sum(len(it) for batch in batches for it in batch), time.perf_counter() - began)


Run = Callable[[OnnxEngine, Sequence[Sequence[Sequence64]]], Measurement]


def sweep_budgets(engine: OnnxEngine, workload: Workload, seed: int, run: Run = run_batches) -> dict[int, float]:
    """Tokens/s of sorted batches by their budget of padded tokens, interleaved; of each the best round.

    A machine that is not quiet only ever takes time away, and a ceiling is what is possible.
    """
    batches = {budget: sorted_batches(workload.sequences, budget) for budget in BUDGETS}
    sides = [Side(str(budget), "", partial(run, engine, its)) for budget, its in batches.items()]
    run(engine, batches[BUDGETS[-1]])  # memory is taken now
    found = measure(sides, SWEEP_ROUNDS, seed, lambda *_: None, NO_PATIENCE)
    return {int(name): max(it.tokens_per_second for it in its) for name, its in found.items()}


def ceiling_side(engine: OnnxEngine, workload: Workload, best_budget: int) -> Side:
    """Everything known beforehand, one run at a time."""
    return Side(
        CEILING,
        f"ceiling: session.run alone, all sorted, {best_budget} padded tokens",
        partial(run_batches, engine, sorted_batches(workload.sequences, best_budget)),
    )


def engine_sides(engine: OnnxEngine, workload: Workload, best_budget: int, best_parallel_budget: int) -> list[Side]:
    """The sides that run the bundle's graph on ONNX Runtime in this process.

    Args:
        engine: The graph.
        workload: What they run.
        best_budget: The best number of padded tokens in a batch for one run at a time.
        best_parallel_budget: The same for several runs at once.
    """
    in_windows = windows(workload.sequences, WINDOW)
    sides = [
        ceiling_side(engine, workload, best_budget),
        Side(
            PARALLEL,
            f"the same, {engine.max_parallel_runs} runs at once, {best_parallel_budget} padded tokens",
            partial(run_side_by_side, engine, sorted_batches(workload.sequences, best_parallel_budget)),
        ),
        Side(BARE, "session.run alone, one sequence at a time", lambda: run_singly(engine, workload.sequences[:SLICE])),
        naive_side(NAIVE_PACKED, f"{WINDOW} in order of arrival, encserve's graph", engine, workload),
    ]
    for budget in (256, 512):
        batches = [batch for window in in_windows for batch in sorted_batches(window, budget)]
        label = f"windows of {WINDOW}, sorted, {budget} padded tokens"
        sides.append(Side(f"windows-{budget}", label, partial(run_batches, engine, batches)))
    return sides


def naive_side(name: str, label: str, engine: OnnxEngine, workload: Workload) -> Side:
    """Batches in order of arrival, each padded to its longest."""
    in_windows = windows(workload.sequences, WINDOW)
    run_batches(engine, [max(in_windows, key=lambda it: max(map(len, it)))])  # memory for the largest is taken now
    return Side(name, label, partial(run_batches, engine, in_windows))


# PyTorch in this process.


def read_encoder(checkpoint: Path) -> Any:
    """The exporter's `Encoder` with the weights of a checkpoint in the layout of Hugging Face."""
    from encserve_export.layouts import hf_bert
    from encserve_export.weights import read_json, read_weights

    layout = hf_bert.read_layout(read_json(checkpoint / "config.json"))
    return layout.load(hf_bert.plain_names(read_weights(checkpoint).tensors)).eval()


def padding_graph(encoder: Any, graph: Graph, folder: Path) -> Graph:
    """The same encoder as other exporters write it: every layer runs on (batch, seq, n), padding included."""
    import torch

    from encserve_export import graph as exported
    from encserve_export.encoder import Padding

    def keep(padding: Any, x: Any) -> Any:
        return x.reshape(padding.bias.shape[0], padding.bias.shape[3], -1)  # (batch, seq, n)

    path = folder / "padded.onnx"
    names = [exported.INPUT_IDS, exported.ATTENTION_MASK, exported.OUTPUT]
    example = (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 1], [1, 1, 0]]))
    with (
        mock.patch.object(Padding, "remove", keep),
        mock.patch.object(Padding, "restore", keep),
        warnings.catch_warnings(action="ignore"),  # the exporter announces what it will change one day
    ):
        torch.onnx.export(
            encoder,
            example,
            path,
            dynamo=False,
            opset_version=exported.OPSET,
            input_names=names[:2],
            output_names=names[2:],
            dynamic_axes={name: {0: "batch", 1: "seq"} for name in names},
        )
    return replace(graph, path=path)


def torch_sides(encoder: Any, threads: int, workload: Workload) -> tuple[list[Side], Callable[[Sequence64], Any]]:
    """The sides that run the exporter's encoder in PyTorch, eagerly; and what gives the (seq, d_model) rows of one."""
    import torch

    torch.set_num_threads(threads)

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


def small_sides(empty: LoadProcess, minimal: LoadProcess, workload: Workload) -> list[Side]:
    """One caller of gRPC servers of a few lines: one that computes nothing, and one that runs the model."""
    count = min(SLICE, len(workload.sequences))
    return [
        Side(EMPTY, "an empty gRPC call of that size, 1 caller", lambda: empty.ask(EMPTY, callers=1, count=count)),
        Side(MINIMAL, "the smallest gRPC server, 1 caller", lambda: minimal.ask(MINIMAL, callers=1, count=count)),
    ]


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
