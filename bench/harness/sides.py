"""Who encserve is compared with: the same model in this process, on ONNX Runtime and on PyTorch."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from encserve_server.engine.base import Engine
from encserve_server.engine.onnx import OnnxEngine
from encserve_server.types.bundles import Graph
from harness.load import SLICE
from harness.rounds import NO_PATIENCE, Measurement, Side, measure
from harness.workload import Sequence64, Workload, sorted_batches, windows

BUDGETS = (128, 256, 384, 512, 768, 1024, 2048)  # padded tokens
SWEEP_ROUNDS = 2
WINDOW = 64  # sequences that a batcher without lengths takes together

CEILING, BARE, NAIVE = "ceiling", "bare", "naive"
TORCH, TORCH_BATCHED = "torch", "torch-batched"


# ONNX Runtime, with the server's own session options.


def run_batches(engine: Engine, batches: Sequence[Sequence[Sequence64]]) -> Measurement:
    """Runs batches one after another. Only `session.run` is timed: padding and cutting cost these sides nothing."""
    seconds = sum(engine.run(batch).compute_seconds for batch in batches)
    return Measurement(sum(len(it) for batch in batches for it in batch), seconds)


def run_singly(engine: OnnxEngine, sequences: Sequence[Sequence64]) -> Measurement:
    """Runs each sequence alone, in order of arrival; only `session.run` is timed."""
    latencies = [(len(it), engine.run([it]).compute_seconds) for it in sequences]
    return Measurement(sum(map(len, sequences)), sum(seconds for _, seconds in latencies), latencies)


def sweep_budgets(engine: Engine, workload: Workload, seed: int) -> dict[int, float]:
    """Tokens/s of sorted batches by their budget of padded tokens, interleaved; of each the best round.

    A machine that is not quiet only ever takes time away, and a ceiling is what is possible.
    """
    batches = {budget: sorted_batches(workload.sequences, budget) for budget in BUDGETS}
    sides = [Side(str(budget), "", partial(run_batches, engine, its)) for budget, its in batches.items()]
    run_batches(engine, batches[BUDGETS[-1]])  # memory is taken now
    found = measure(sides, SWEEP_ROUNDS, seed, lambda *_: None, NO_PATIENCE)
    return {int(name): max(it.tokens_per_second for it in its) for name, its in found.items()}


def ceiling_side(engine: Engine, workload: Workload, best_budget: int) -> Side:
    """Everything known beforehand, one run at a time."""
    return Side(
        CEILING,
        f"ceiling: session.run alone, all sorted, {best_budget} padded tokens",
        partial(run_batches, engine, sorted_batches(workload.sequences, best_budget)),
    )


def bare_side(engine: OnnxEngine, workload: Workload) -> Side:
    """What one caller would wait for if nothing were between the model and him."""
    label = "session.run alone, one sequence at a time"
    return Side(BARE, label, partial(run_singly, engine, workload.sequences[:SLICE]))


def naive_side(engine: OnnxEngine, workload: Workload) -> Side:
    """Batches in order of arrival, each padded to its longest."""
    batches = windows(workload.sequences, WINDOW)
    run_batches(engine, [max(batches, key=lambda it: max(map(len, it)))])  # memory for the largest is taken now
    label = f"naive batcher: {WINDOW} in order of arrival, everything padded"
    return Side(NAIVE, label, partial(run_batches, engine, batches))


# PyTorch.


def read_encoder(checkpoint: Path) -> Any:
    """The exporter's `Encoder` with the weights of a checkpoint in the layout of Hugging Face."""
    from encserve_export.models.own.layouts import hf_bert
    from encserve_export.source.weights import read_json, read_weights

    layout = hf_bert.read_layout(read_json(checkpoint / "config.json"))
    return layout.load(hf_bert.plain_names(read_weights(checkpoint).tensors)).eval()


def padding_graph(encoder: Any, graph: Graph, folder: Path) -> Graph:
    """The same encoder as other exporters write it: every layer runs on (batch, seq, n), padding included."""
    import torch

    from encserve_export.ground import names
    from encserve_export.models.own.encoder import Padding

    def keep(padding: Any, x: Any) -> Any:
        return x.reshape(padding.bias.shape[0], padding.bias.shape[3], -1)  # (batch, seq, n)

    path = folder / "padded.onnx"
    inputs_and_output = [names.INPUT_IDS, names.ATTENTION_MASK, names.OUTPUT]
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
            opset_version=names.OPSET,
            input_names=inputs_and_output[:2],
            output_names=inputs_and_output[2:],
            dynamic_axes={name: {0: "batch", 1: "seq"} for name in inputs_and_output},
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
        Side(TORCH, "PyTorch, one sequence at a time", lambda: run([[it] for it in first])),
        Side(
            TORCH_BATCHED,
            f"PyTorch, {WINDOW} in order of arrival, padded",
            lambda: run(windows(first, WINDOW)),
        ),
    ]
    return sides, lambda sequence: encode([sequence])[0][0].numpy()
