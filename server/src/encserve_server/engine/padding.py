"""Common parts of the engines: they check the interface of a graph, and pad sequences into one array."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.errors import BundleError
from encserve_server.types.arrays import ModelInput
from encserve_server.types.bundles import Graph

Feeds = dict[str, npt.NDArray[Any]]  # the inputs of a graph, by name


def check_interface(
    graph: Graph, inputs: Mapping[str, str], outputs: Mapping[str, str], *, int64: str, float32: str
) -> None:
    """Compare the names and types of a file's inputs and outputs with the manifest.

    Args:
        graph: The interface in the manifest.
        inputs: The types of the file's inputs, by name.
        outputs: The types of the file's outputs, by name.
        int64: The runtime's name for int64.
        float32: The runtime's name for float32.

    Raises:
        BundleError: The file and the manifest differ.
    """
    wanted = {graph.input_name: float32 if graph.takes_vectors else int64, graph.attention_mask_name: int64}
    if graph.token_type_ids_name:
        wanted[graph.token_type_ids_name] = int64
    if inputs != wanted:
        raise BundleError(f"{graph.path}: the graph's inputs are {inputs}; the manifest names {wanted}")
    if outputs.get(graph.output_name) != float32:
        raise BundleError(
            f"{graph.path}: the graph's outputs are {outputs}; the manifest names {graph.output_name} of type {float32}"
        )


def lay_out(
    graph: Graph, sequences: Sequence[ModelInput], attended: Sequence[int] = (), second_starts: Sequence[int] = ()
) -> tuple[Feeds, list[int]]:
    """Pad sequences to the length of the longest one. See `Engine.run` for the arguments.

    Returns:
        The inputs of the graph, and the lengths of the sequences.
    """
    lengths = [len(it) for it in sequences]
    has_types = bool(graph.token_type_ids_name) and any(second_starts)
    if len(sequences) == 1 and not attended and not has_types:  # faster for a single sequence
        return make_feeds(graph, sequences[0][None], np.ones((1, *lengths), np.int64)), lengths
    is_token = np.arange(max(lengths)) < np.array(lengths)[:, None]  # (batch, seq)
    first = sequences[0]
    fill = 0 if graph.takes_vectors else graph.pad_token_id
    padded = np.full(is_token.shape + first.shape[1:], fill, first.dtype)  # (batch, seq) or (batch, seq, d_model)
    padded[is_token] = np.concatenate(sequences)
    mask = is_token.astype(np.int64)
    if attended:
        counts = np.array([[count or mask.shape[1]] for count in attended])  # (batch, 1)
        mask[is_token & (np.arange(mask.shape[1]) >= counts)] = 2
    types = None
    if has_types:
        starts = np.array([[start or mask.shape[1]] for start in second_starts])  # (batch, 1)
        types = (is_token & (np.arange(mask.shape[1]) >= starts)).astype(np.int64)  # (batch, seq)
    return make_feeds(graph, padded, mask, types), lengths


def make_feeds(
    graph: Graph, padded: ModelInput, mask: npt.NDArray[np.int64], types: npt.NDArray[np.int64] | None = None
) -> Feeds:
    """Return the inputs of a graph.

    Args:
        graph: The graph.
        padded: (batch, seq) ids, or (batch, seq, d_model) vectors.
        mask: (batch, seq).
        types: (batch, seq), the token types; None for zeros.
    """
    feeds = {graph.input_name: padded, graph.attention_mask_name: mask}
    if graph.token_type_ids_name:
        feeds[graph.token_type_ids_name] = np.zeros_like(mask) if types is None else types
    return feeds


def check_shape(graph: Graph, output: npt.NDArray[Any], lengths: Sequence[int]) -> None:
    """Check that the output of a batch has the shape (batch, seq, d_model).

    Raises:
        RuntimeError: The shape is different.
    """
    expected = (len(lengths), max(lengths), graph.d_model)
    if output.shape != expected:
        raise RuntimeError(f"the model returned an output of shape {output.shape}, expected {expected}")
