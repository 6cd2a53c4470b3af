"""A batch's rows to the outputs that callers asked for: pooling, normalising, their type. Pure NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.engine.base import BatchResult
from encserve_server.types import Numbers, Output, OutputArrays, OutputKind

# What changes nothing where it stands in place of padding, to the last bit.
_NEUTRAL = {OutputKind.MEAN: -0.0, OutputKind.MAX: -np.inf}
_LEAST_NORM = np.finfo(np.float32).tiny


def make_outputs(result: BatchResult, wanted: Sequence[tuple[Output, ...]]) -> list[OutputArrays]:
    """Makes of a batch what each of its sequences is wanted for.

    What is pooled is pooled once for the whole batch. A sequence gets the same numbers alone and beside others, to the
    last bit, and numbers of it that are not finite touch no other; what NumPy has to say of them is for the caller to
    turn off. It takes few calls of NumPy: after a model has run, its code and ours are in none of the CPU's caches.

    Args:
        result: What the batch gave; its padding may be written to.
        wanted: For each sequence its outputs.

    Returns:
        For each sequence an array of (rows, d_model) for each of its outputs: as many rows as tokens for
        OutputKind.TOKENS, else one. Rows that are wanted as they are refer to the batch's own.
    """
    alike: dict[tuple[Output, ...], list[int]] = {}  # the places of those who want the same, mostly all
    for i, outputs in enumerate(wanted):
        alike.setdefault(outputs, []).append(i)
    made: list[OutputArrays] = [()] * len(wanted)
    for outputs, places in alike.items():
        columns = [_make(result, places, output) for output in outputs]
        for i, *its in zip(places, *columns, strict=True):
            made[i] = tuple(its)
    return made


def output_rows(kind: OutputKind, token_rows: int) -> int:
    """How many rows a sequence with so many token rows has in an output of this kind."""
    return token_rows if kind is OutputKind.TOKENS else 1


def _make(result: BatchResult, places: list[int], output: Output) -> list[Numbers]:
    """One output of the sequences at these places of a batch."""
    if output.kind is OutputKind.TOKENS:
        rows = result.rows
        return [_finish(rows[i], output) for i in places]
    pooled = _finish(_pool(result, output.kind), output)  # (batch, d_model)
    return [pooled[i : i + 1] for i in places]


def _pool(result: BatchResult, kind: OutputKind) -> Numbers:
    """(batch, seq, d_model) to (batch, d_model)."""
    output = result.output
    if kind is OutputKind.CLS:
        return output[:, 0].copy()  # or a caller who does not read would keep the whole batch in memory
    lengths = np.array(result.lengths, np.float32)[:, None]  # (batch, 1)
    if min(result.lengths) < output.shape[1]:
        output[np.arange(output.shape[1]) >= lengths] = _NEUTRAL[kind]
    reduced: Numbers = (np.maximum if kind is OutputKind.MAX else np.add).reduce(output, axis=1)
    return reduced / lengths if kind is OutputKind.MEAN else reduced


def _finish(rows: Numbers, output: Output) -> npt.NDArray[np.floating[Any]]:
    """(rows, d_model) as wanted."""
    if output.l2_normalize:
        norms = np.sqrt(np.add.reduce(rows * rows, axis=1, keepdims=True))  # (rows, 1)
        scale: Numbers = np.maximum(norms, _LEAST_NORM)  # a row of zeros has no length that could be 1, and stays
        rows = rows / scale
    return rows.astype(output.data_type.dtype, copy=False)
