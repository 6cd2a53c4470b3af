"""Sides that run the model in this process, on ONNX Runtime and on PyTorch.

A side is one way to run the model on all sequences.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from encserve_server.engine.base import Engine
from encserve_server.engine.onnx import OnnxEngine
from encserve_server.types.bundles import Graph
from harness.load import SINGLE_SEQUENCES
from harness.rounds import Measurement, Side, best_rates
from harness.workload import TokenIds, Workload, sorted_batches, windows

# A budget is the largest number of padded tokens in a batch. A sweep measures the speed with each of these budgets.
BUDGETS = (128, 256, 384, 512, 768, 1024, 2048)
SWEEP_ROUNDS = 2
WINDOW = 64  # the number of sequences in a batch of the naive batcher and of PyTorch

CEILING, BARE, NAIVE = "ceiling", "bare", "naive"
TORCH, TORCH_BATCHED = "torch", "torch-batched"


# The next functions make the sides on ONNX Runtime, with the session options of the server.


def run_batches(engine: Engine, batches: Sequence[Sequence[TokenIds]]) -> Measurement:
    """Run batches one after another. Only inference is timed; padding inputs and splitting outputs are not timed."""
    seconds = sum(engine.run(batch).compute_seconds for batch in batches)
    return Measurement(sum(len(sequence) for batch in batches for sequence in batch), seconds)


def run_singly(engine: OnnxEngine, sequences: Sequence[TokenIds]) -> Measurement:
    """Run each sequence alone, in the order of the workload. Only `session.run` is timed."""
    latencies = [(len(sequence), engine.run([sequence]).compute_seconds) for sequence in sequences]
    return Measurement(sum(map(len, sequences)), sum(seconds for _, seconds in latencies), latencies)


def sweep_budgets(engine: Engine, workload: Workload, seed: int) -> dict[int, float]:
    """For each budget, return the tokens/s of the fastest round. The batches are sorted by length."""
    batches = {budget: sorted_batches(workload.sequences, budget) for budget in BUDGETS}
    run_batches(engine, batches[BUDGETS[-1]])  # the first run allocates the engine's memory
    sides = [Side(str(budget), "", partial(run_batches, engine, batches[budget])) for budget in BUDGETS]
    return {int(name): rate for name, rate in best_rates(sides, SWEEP_ROUNDS, seed).items()}


def ceiling_side(engine: Engine, workload: Workload, best_budget: int) -> Side:
    """Return the ceiling: all sequences, sorted by length, in batches of at most `best_budget` padded tokens."""
    return Side(
        CEILING,
        f"ceiling: session.run alone, all sorted, {best_budget} padded tokens",
        partial(run_batches, engine, sorted_batches(workload.sequences, best_budget)),
    )


def bare_side(engine: OnnxEngine, workload: Workload) -> Side:
    """Return the side that runs one sequence at a time, without a server."""
    label = "session.run alone, one sequence at a time"
    return Side(BARE, label, partial(run_singly, engine, workload.sequences[:SINGLE_SEQUENCES]))


def naive_side(engine: OnnxEngine, workload: Workload) -> Side:
    """Return the side that makes batches in order of arrival. Each batch is padded to its longest sequence."""
    batches = windows(workload.sequences, WINDOW)
    run_batches(engine, [max(batches, key=lambda batch: max(map(len, batch)))])  # the largest batch, as warm-up
    label = f"naive batcher: {WINDOW} in order of arrival, everything padded"
    return Side(NAIVE, label, partial(run_batches, engine, batches))


# The next functions make the sides on PyTorch.


def load_transformers(checkpoint: Path) -> Any:
    """Load the transformers model of a checkpoint in Hugging Face's layout, in float32."""
    import torch
    from transformers import AutoModel

    return AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()


def write_padded_onnx(model: Any, path: Path) -> None:
    """Export a transformers model with PyTorch's ONNX exporter. The graph does not skip padding.

    Inputs: input_ids and attention_mask, int64 (batch, seq). Output: last_hidden_state, float32 (batch, seq, d_model).
    """
    import torch

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return rows

    names = ["input_ids", "attention_mask", "last_hidden_state"]
    ids = torch.full((2, 7), 2, dtype=torch.int64)  # (batch, seq)
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that this exporter is deprecated
        torch.onnx.export(
            Rows().eval(),
            (ids, torch.ones_like(ids)),
            str(path),
            input_names=names[:2],
            output_names=names[2:],
            dynamic_axes={name: {0: "batch", 1: "seq"} for name in names},
            opset_version=20,
            dynamo=False,
        )


def padded_graph(model: Any, graph: Graph, path: Path) -> Graph:
    """Write the ONNX file `path` with `write_padded_onnx`. Return a copy of `graph` with this file."""
    write_padded_onnx(model, path)
    return replace(
        graph,
        path=path,
        input_name="input_ids",
        attention_mask_name="attention_mask",
        token_type_ids_name="",
        output_name="last_hidden_state",
    )


def torch_sides(model: Any, threads: int, workload: Workload) -> tuple[list[Side], Callable[[TokenIds], Any]]:
    """Return the sides that run a transformers model, and a function for comparisons.

    The function runs the model on one sequence, and returns the hidden states, (seq, d_model).
    """
    import torch

    torch.set_num_threads(threads)
    pad_id = model.config.pad_token_id or 0

    def encode(batch: Sequence[TokenIds]) -> tuple[Any, float]:
        """Return the hidden states, (batch, seq, d_model), and the seconds of the forward pass."""
        lengths = torch.tensor([len(sequence) for sequence in batch])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()  # (batch, seq)
        ids = torch.full_like(mask, pad_id)  # (batch, seq)
        ids[mask.bool()] = torch.from_numpy(np.concatenate(batch))
        with torch.inference_mode():
            began = time.perf_counter()
            rows = model(input_ids=ids, attention_mask=mask).last_hidden_state  # (batch, seq, d_model)
            return rows, time.perf_counter() - began

    def run(batches: Sequence[Sequence[TokenIds]]) -> Measurement:
        timed = [(sum(map(len, batch)), encode(batch)[1]) for batch in batches]
        alone = all(len(batch) == 1 for batch in batches)
        return Measurement(sum(n for n, _ in timed), sum(seconds for _, seconds in timed), timed if alone else [])

    first = workload.sequences[:SINGLE_SEQUENCES]
    run([first[:WINDOW]])  # the first batch allocates PyTorch's memory
    sides = [
        Side(TORCH, "PyTorch, one sequence at a time", lambda: run([[sequence] for sequence in first])),
        Side(TORCH_BATCHED, f"PyTorch, {WINDOW} in order of arrival, padded", lambda: run(windows(first, WINDOW))),
    ]
    return sides, lambda sequence: encode([sequence])[0][0].numpy()
