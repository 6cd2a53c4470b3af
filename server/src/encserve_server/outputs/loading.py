"""Opens what a model makes of its rows, and tries it."""

from typing import Protocol

import numpy as np

from encserve_server.engine.base import Head
from encserve_server.errors import BundleError
from encserve_server.outputs.token_pooling import EXTRA, can_pool, pool_tokens
from encserve_server.types.arrays import Numbers
from encserve_server.types.bundles import Bundle, HeadGraph, SparsePooling, TokenPooling
from encserve_server.types.requests import OutputKind


class OpenHead(Protocol):
    """Loads a head into the engine that runs the model."""

    def __call__(self, graph: HeadGraph, *, on_device: bool, all_threads: bool) -> Head:
        """Loads a head.

        Args:
            graph: The ONNX file and its interface.
            on_device: Whether it runs where the model does, or on the CPU.
            all_threads: Whether it has all threads that run a batch, or one.

        Raises:
            EncserveError: The head cannot be loaded.
        """


class NotLoaded:
    """Stands for a head where none has been loaded."""

    def run(self, *inputs: Numbers) -> Numbers:
        """Fails.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("this head has not been loaded")


def load_heads(bundle: Bundle, open_head: OpenHead) -> dict[OutputKind, Head]:
    """Opens the heads of a model.

    Raises:
        BundleError: A head cannot compute, or gives numbers of another width than the manifest says, or what joins
            vectors is needed and not installed.
    """
    heads = {}
    if bundle.pooling is not None and bundle.pooling.head is not None:  # a vector for each text is too little for a GPU
        heads[OutputKind.MODEL] = _opened(open_head, bundle.pooling.head, (2,), on_device=False)
    if bundle.multi_vector is not None:
        heads[OutputKind.MULTI_VECTOR] = _opened(open_head, bundle.multi_vector.head, (2,))
        if can_pool():  # imports SciPy, which takes seconds: the first call must not wait for that
            pool_tokens(np.eye(3, dtype=np.float32), TokenPooling(2.0))
    if bundle.sparse is not None:
        shape = (2,) if bundle.sparse.pooling is SparsePooling.OWN_ID else (2, 3)
        heads[OutputKind.SPARSE] = _opened(open_head, bundle.sparse.head, shape, all_threads=True)
    if not can_pool() and any(settings.token_pooling for settings in bundle.tasks.values()):
        raise BundleError(f"model {bundle.name} pools the vectors of tokens, which needs {EXTRA}")
    return heads


def _opened(
    open_head: OpenHead, graph: HeadGraph, shape: tuple[int, ...], *, on_device: bool = True, all_threads: bool = False
) -> Head:
    """A head that has run zeros of this shape: (batch) or (batch, seq), without the width."""
    head = open_head(graph, on_device=on_device, all_threads=all_threads)
    zeros = np.zeros((*shape, graph.input_width), np.float32)
    inputs = (zeros, np.ones(shape, np.float32))[: len(graph.input_names)]
    try:
        found = head.run(*inputs).shape
    except Exception as error:  # whatever the runtime raises
        raise BundleError(f"{graph.path}: it fails for vectors of {graph.input_width} numbers: {error}") from error
    if found != (2, graph.width):
        raise BundleError(
            f"{graph.path}: it gives {found} for {shape}; the manifest says that its width is {graph.width}"
        )
    return head
