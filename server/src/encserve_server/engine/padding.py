"""Sequences of different lengths as one padded array, for every engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.types import Graph, ModelInput

Feeds = dict[str, npt.NDArray[Any]]  # by the names of the graph's inputs


def lay_out(graph: Graph, sequences: Sequence[ModelInput]) -> tuple[Feeds, list[int]]:
    """Pads to the longest.

    Args:
        graph: Whose inputs they become.
        sequences: One or more (seq,) int64 arrays of ids or (seq, d_model) float32 arrays of vectors.

    Returns:
        What the graph is fed, and the lengths.
    """
    lengths = [len(it) for it in sequences]
    if len(sequences) == 1:  # the fastest way for a caller that waits for nothing else
        return feeds_of(graph, sequences[0][None], np.ones((1, *lengths), np.int64)), lengths
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]  # (batch, seq)
    first = sequences[0]
    fill = 0 if graph.takes_vectors else graph.pad_token_id
    padded = np.full(mask.shape + first.shape[1:], fill, first.dtype)  # (batch, seq) or (batch, seq, d_model)
    padded[mask] = np.concatenate(sequences)
    return feeds_of(graph, padded, mask.astype(np.int64)), lengths


def feeds_of(graph: Graph, padded: ModelInput, mask: npt.NDArray[np.int64]) -> Feeds:
    """What a graph is fed for (batch, seq) ids or (batch, seq, d_model) vectors, and their (batch, seq) mask."""
    feeds = {graph.input_name: padded, graph.attention_mask_name: mask}
    if graph.token_type_ids_name:
        feeds[graph.token_type_ids_name] = np.zeros_like(mask)  # (batch, seq)
    return feeds


def check_shape(graph: Graph, output: npt.NDArray[Any], lengths: Sequence[int]) -> None:
    """Makes sure that a batch of these lengths gave a (batch, seq, d_model) output.

    Raises:
        RuntimeError: It has another shape.
    """
    expected = (len(lengths), max(lengths), graph.d_model)
    if output.shape != expected:
        raise RuntimeError(f"the model gave an output of shape {output.shape} where {expected} was due")
