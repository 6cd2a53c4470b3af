"""Rows to the outputs a caller asked for: pooling, normalising, and one contiguous buffer. Pure NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from encserve_server.types import DataType, Mask, Output, OutputKind, Rows


@dataclass(frozen=True, slots=True)
class Ragged:
    """The rows of all sequences, back to back.

    Attributes:
        lengths: The rows of each sequence.
        parts: Back to back they are sum(lengths) × width numbers, row-major, little-endian, as single bytes. They refer
            to the rows as long as these have the right type, so that nothing is copied before it must be.
    """

    lengths: list[int]
    parts: list[memoryview]


def build_output(rows: Sequence[Rows], special: Sequence[Mask | None], output: Output, data_type: DataType) -> Ragged:
    """Makes one output of all sequences.

    Args:
        rows: (seq, d_model) float32 for each sequence.
        special: For each sequence which rows to leave out of OutputKind.TOKENS, or None for none.
        output: What to make.
        data_type: The type of the numbers; a float16 beyond its range becomes infinite.
    """
    if output.kind is OutputKind.TOKENS:
        parts = [its if mask is None else its[~mask] for its, mask in zip(rows, special, strict=True)]
    else:
        parts = [_pool(its, output.kind) for its in rows]
    if output.l2_normalize:
        parts = [_normalize(part) for part in parts]
    if data_type is not DataType.FLOAT32:
        with np.errstate(over="ignore"):
            parts = [part.astype(data_type.dtype) for part in parts]
    typed = [np.ascontiguousarray(part, data_type.dtype) for part in parts]  # copies nothing that is right already
    return Ragged([len(part) for part in parts], [part.reshape(-1).view(np.uint8).data for part in typed])


def output_rows(kind: OutputKind, token_rows: int) -> int:
    """How many rows a sequence with so many token rows has in an output of this kind."""
    return token_rows if kind is OutputKind.TOKENS else 1


def _pool(rows: Rows, kind: OutputKind) -> Rows:
    """(seq, d_model) to (1, d_model)."""
    pooled: Rows
    if kind is OutputKind.MEAN:
        pooled = rows.mean(axis=0, keepdims=True, dtype=np.float32)
    elif kind is OutputKind.MAX:
        pooled = rows.max(axis=0, keepdims=True)
    else:
        pooled = rows[:1]
    return pooled


def _normalize(rows: Rows) -> Rows:
    """Scales each row to Euclidean length 1; a row of zeros stays."""
    norms: npt.NDArray[np.float32] = np.linalg.norm(rows, axis=1, keepdims=True)  # (seq, 1)
    norms[norms == 0] = 1
    return rows / norms
