"""Matrices as a page holds them: one base64 run of uint16 for each kind, cut up by the page when it draws."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_cli.report import numbers
from encserve_client import Array, InspectResult

MAX_NUMBERS = 12_000_000  # of one stack: 32 MB of page. 12 layers × 12 heads × 256 tokens are 9.4 million.
MAX_PLACES = 512
MAX_DIMENSIONS = 384


@dataclass(frozen=True, eq=False, slots=True)
class Stack:
    """Matrices of one size.

    Attributes:
        values: (matrices, rows, columns) uint16: 0 stands for low, 65535 for high.
        low: The least number.
        high: The greatest.
        layers: The layer of every matrix, or of every run of heads.
        left_out: The layers for which there was no room.
    """

    values: npt.NDArray[np.uint16]
    low: float
    high: float
    layers: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What the page's script unpacks."""
        return {
            "data": base64.b64encode(self.values.astype("<u2", copy=False).tobytes()).decode("ascii"),
            "rows": self.values.shape[1],
            "columns": self.values.shape[2],
            "low": self.low,
            "step": (self.high - self.low) / numbers.STEPS,
        }


def attention_stack(result: InspectResult) -> Stack | None:
    """The attention of every head: (layers · n_heads, seq, seq). None where there is none."""
    if result.attention is None or not result.attention.size:
        return None
    kept, layers, left_out = _thin(result.attention, result.attention_layers)
    values = numbers.quantise(kept, 0, 1)
    return Stack(values.reshape(-1, *values.shape[2:]), 0, 1, layers, left_out)


def similarity_stack(result: InspectResult) -> Stack | None:
    """The tokens' cosine similarity at every depth: (layers, seq, seq). None where there are no hidden states."""
    if result.hidden_states is None or not result.hidden_states.size:
        return None
    seq = result.hidden_states.shape[1]
    at_most = max(MAX_NUMBERS // seq**2, 1)
    chosen = numbers.spread(len(result.hidden_states), at_most)
    cosines = numbers.cosine_similarity(result.hidden_states[chosen])
    layers = tuple(result.hidden_state_layers[i] for i in chosen)
    left_out = tuple(layer for layer in result.hidden_state_layers if layer not in layers)
    return Stack(numbers.quantise(cosines, -1, 1), -1, 1, layers, left_out)


def positions_stack(positions: Array | None) -> Stack | None:
    """What is added for each place: (1, dimensions, places). None where there is nothing.

    Of many only the first: to leave out every other one would show waves that are not there.
    """
    if positions is None or not positions.size:
        return None
    part = positions[:MAX_PLACES, :MAX_DIMENSIONS].T[None]  # (1, dimensions, places)
    end = numbers.widest(part)
    return Stack(numbers.quantise(part, -end, end), -end, end)


def _thin(attention: Array, layers: tuple[int, ...]) -> tuple[Array, tuple[int, ...], tuple[int, ...]]:
    """As many layers as there is room for, evenly spread; their numbers, and those of the others."""
    chosen = numbers.spread(len(attention), max(MAX_NUMBERS // attention[0].size, 1))
    kept = tuple(layers[i] for i in chosen)
    return attention[chosen], kept, tuple(layer for layer in layers if layer not in kept)
