"""Runs batches through an engine: one batch, the halves of a batch that failed, and the probe of an engine.

The functions block. Two callers use them: the lanes of the server, and the threads of `offline`.
"""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from encserve_server.engine.base import BatchResult, Engine
from encserve_server.errors import EngineUnhealthy
from encserve_server.types.arrays import ModelInput, OutputArrays
from encserve_server.types.sequences import Batch, TokenSequence

# Computes the outputs of each sequence of a batch. A sequence gets None if its result has NaN or infinity.
ComputeOutputs = Callable[[BatchResult, Sequence[TokenSequence]], list[OutputArrays | None]]
RunBatch = Callable[[Batch], None]


class BatchFailed(Exception):
    """The engine or an output failed for a batch. `__cause__` is the original error."""


def start_thread() -> None:
    """Prepare a thread that runs batches: NumPy must not warn about NaN or infinity."""
    np.seterr(all="ignore")


def run_batch(engine: Engine, compute_outputs: ComputeOutputs, batch: Batch) -> None:
    """Run a batch, and set its outputs, tokens and durations.

    Raises:
        BatchFailed: The engine or an output raised an error, or returned the wrong number of rows.
    """
    inputs = [it.input for it in batch.sequences]
    attended = [it.attended for it in batch.sequences]
    second_starts = [it.second_start for it in batch.sequences]
    lengths = list(map(len, inputs))
    padded = len(lengths), max(lengths)
    try:
        result = engine.run(
            inputs,
            attended=attended if any(attended) else (),
            second_starts=second_starts if any(second_starts) else (),
            alone=batch.alone,
        )
        if result.lengths != lengths or result.output.shape[:2] != padded:
            raise RuntimeError(f"the engine returned rows of shape {result.output.shape[:2]}, expected {padded}")
        began = time.perf_counter()
        outputs = compute_outputs(result, batch.sequences)
        if len(outputs) != len(lengths):
            raise RuntimeError(f"the model returned outputs for {len(outputs)} sequences, expected {len(lengths)}")
    except Exception as error:
        raise BatchFailed from error
    batch.outputs = outputs
    batch.split_seconds = time.perf_counter() - began
    batch.tokens, batch.padded_tokens = sum(lengths), math.prod(padded)
    batch.collate_seconds, batch.compute_seconds = result.collate_seconds, result.compute_seconds


def in_halves(batch: Batch, run: RunBatch, on_failure: Callable[[Batch, BaseException | None], None]) -> None:
    """Run a batch. If it fails, run its halves, and so on. So a sequence fails only if it fails alone.

    Args:
        batch: The batch.
        run: Runs a part of the batch. Before this, `run` may remove sequences from the part.
        on_failure: Receives each part that failed, with the error. A part of one sequence is not run again.

    Raises:
        EngineUnhealthy: `run` or `on_failure` found that the engine is broken.
    """
    parts = [batch]
    while parts:
        part = parts.pop()
        try:
            run(part)
        except BatchFailed as failed:
            on_failure(part, failed.__cause__)
            half = len(part.sequences) // 2
            if half:
                halves = part.sequences[half:], part.sequences[:half]
                parts += [Batch(it, part.closed_by, part.lane, part.alone) for it in halves]


def probe(run: RunBatch, sequence: ModelInput) -> None:
    """Run a sequence that every working engine can compute.

    Raises:
        EngineUnhealthy: The engine fails, or its result has NaN or infinity.
    """
    batch = Batch([TokenSequence(sequence, len(sequence))])
    try:
        run(batch)
    except BatchFailed as failed:
        raise EngineUnhealthy(f"the engine fails for every input: {failed.__cause__!r}") from failed.__cause__
    if batch.outputs == [None]:
        raise EngineUnhealthy("the engine fails for every input: the result has NaN or infinity")
