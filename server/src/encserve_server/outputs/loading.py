"""Loads and tests the heads of a model: ONNX files that turn rows into vectors, weights or scores."""

from typing import Protocol

import numpy as np

from encserve.extras import install_line
from encserve_server.engine.base import Head
from encserve_server.errors import BundleError
from encserve_server.outputs.token_pooling import can_pool, pool_tokens
from encserve_server.types.arrays import Numbers
from encserve_server.types.bundles import Bundle, HeadGraph, SparsePooling, TokenPooling
from encserve_server.types.requests import OutputKind


class OpenHead(Protocol):
    """Loads a head into an engine."""

    def __call__(self, graph: HeadGraph, *, on_device: bool, all_threads: bool) -> Head:
        """Load a head.

        Args:
            graph: The ONNX file and its interface.
            on_device: Whether the head runs on the model's device instead of the CPU.
            all_threads: Whether the head uses as many CPU threads as the model instead of one thread.

        Raises:
            EncserveError: The head cannot be loaded.
        """


class NotLoaded:
    """A stand-in for a head that has not been loaded."""

    def run(self, *inputs: Numbers) -> Numbers:
        """Raise RuntimeError."""
        raise RuntimeError("this head has not been loaded")


def load_heads(bundle: Bundle, open_head: OpenHead) -> dict[OutputKind, Head]:
    """Load and test the heads of a model.

    Raises:
        BundleError: A head fails, or its width differs from the manifest. Or the model pools token vectors, and SciPy
            is not installed.
    """
    heads = {}
    if bundle.pooling is not None and bundle.pooling.head is not None:
        # On the CPU: one vector for each text is too little work for a GPU.
        heads[OutputKind.MODEL] = _load(open_head, bundle.pooling.head, (2,), on_device=False)
    if bundle.multi_vector is not None:
        heads[OutputKind.MULTI_VECTOR] = _load(open_head, bundle.multi_vector.head, (2,))
        if can_pool():  # import SciPy now: the import takes seconds, and the first call must not wait for it
            pool_tokens(np.eye(3, dtype=np.float32), TokenPooling(2.0))
    if bundle.sparse is not None:
        shape = (2,) if bundle.sparse.pooling is SparsePooling.OWN_ID else (2, 3)
        heads[OutputKind.SPARSE] = _load(open_head, bundle.sparse.head, shape, all_threads=True)
    if bundle.scores is not None:
        heads[OutputKind.SCORES] = _load(open_head, bundle.scores.head, (2,), on_device=False)
    if not can_pool() and any(settings.token_pooling for settings in bundle.tasks.values()):
        raise BundleError(f"model {bundle.name} joins similar vectors, which needs SciPy: {install_line('pooling')}")
    return heads


def _load(
    open_head: OpenHead, graph: HeadGraph, shape: tuple[int, ...], *, on_device: bool = True, all_threads: bool = False
) -> Head:
    """Load a head, and test it with zeros of shape (*shape, width), where `shape` is (batch,) or (batch, seq)."""
    head = open_head(graph, on_device=on_device, all_threads=all_threads)
    zeros = np.zeros((*shape, graph.input_width), np.float32)
    inputs = (zeros, np.ones(shape, np.float32))[: len(graph.input_names)]
    try:
        found = head.run(*inputs).shape
    except Exception as error:  # any error of the runtime
        raise BundleError(f"{graph.path}: the head fails for vectors of width {graph.input_width}: {error}") from error
    if found != (2, graph.width):
        raise BundleError(
            f"{graph.path}: the output for a batch of 2 has shape {found}; the manifest says (2, {graph.width})"
        )
    return head
