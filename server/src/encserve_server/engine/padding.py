"""What every engine does: a graph's interface is checked, and sequences are laid out as one padded array."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.errors import BundleError
from encserve_server.types.arrays import ModelInput
from encserve_server.types.bundles import Graph

Feeds = dict[str, npt.NDArray[Any]]  # by the names of the graph's inputs


def check_interface(
    graph: Graph, inputs: Mapping[str, str], outputs: Mapping[str, str], *, int64: str, float32: str
) -> None:
    """Compares a file's inputs and outputs, by name and type, with what the manifest says.

    Args:
        graph: What the manifest says.
        inputs: What the file takes.
        outputs: What it gives.
        int64: What the runtime calls that type.
        float32: What it calls that one.

    Raises:
        BundleError: They differ.
    """
    wanted = {graph.input_name: float32 if graph.takes_vectors else int64, graph.attention_mask_name: int64}
    if graph.token_type_ids_name:
        wanted[graph.token_type_ids_name] = int64
    if inputs != wanted:
        raise BundleError(f"{graph.path}: the graph's inputs are {inputs}; the manifest names {wanted}")
    if outputs.get(graph.output_name) != float32:
        raise BundleError(
            f"{graph.path}: the graph's outputs are {outputs}; the manifest names {graph.output_name} of {float32}"
        )


def lay_out(graph: Graph, sequences: Sequence[ModelInput], attended: Sequence[int] = ()) -> tuple[Feeds, list[int]]:
    """Pads to the longest.

    Args:
        graph: Whose inputs they become.
        sequences: One or more (seq,) int64 arrays of ids or (seq, d_model) float32 arrays of vectors.
        attended: As for `Engine.run`.

    Returns:
        What the graph is fed, and the lengths.
    """
    lengths = [len(it) for it in sequences]
    if len(sequences) == 1 and not attended:  # the fastest way for a caller that waits for nothing else
        return feeds_of(graph, sequences[0][None], np.ones((1, *lengths), np.int64)), lengths
    is_token = np.arange(max(lengths)) < np.array(lengths)[:, None]  # (batch, seq)
    first = sequences[0]
    fill = 0 if graph.takes_vectors else graph.pad_token_id
    padded = np.full(is_token.shape + first.shape[1:], fill, first.dtype)  # (batch, seq) or (batch, seq, d_model)
    padded[is_token] = np.concatenate(sequences)
    mask = is_token.astype(np.int64)
    if attended:
        seen = np.array([[count or mask.shape[1]] for count in attended])  # (batch, 1)
        mask[is_token & (np.arange(mask.shape[1]) >= seen)] = 2
    return feeds_of(graph, padded, mask), lengths


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
