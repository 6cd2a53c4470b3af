"""Files of prepacked weights, in the layout of ONNX Runtime's kernels. All sessions and processes map the same files.

For a usual model, ONNX Runtime copies the weights into this layout, in private memory of each session. For a model that
was saved with `session.save_external_prepacked_constant_initializers`, ONNX Runtime maps the weights without a copy.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from encserve_server.errors import BundleError
from encserve_server.system.cache import Cache, user_folder
from encserve_server.system.cpus import cpu_features, cpu_model

logger = logging.getLogger(__name__)

Session = TypeVar("Session")

_OFF = Path("off")
_MODEL_NAME = "model.onnx"


class PrepackedWeights:
    """The prepacked graphs of one bundle."""

    def __init__(
        self, folder: Path, fingerprint: str, bundle: Path, is_unchanged: Callable[[], bool] = lambda: True
    ) -> None:
        """See `open_weights`."""
        self._folder = folder
        self._bundle = bundle
        self._key = {"fingerprint": fingerprint, "cpu": cpu_model(), "features": cpu_features()}
        self._is_unchanged = is_unchanged
        self._usable = True

    def open(
        self,
        graph: Path,
        options: Mapping[str, str],
        write_prepacked: Callable[[Path, Path], None],
        open_prepacked: Callable[[Path], Session],
    ) -> Session | None:
        """Open the prepacked model of one of the bundle's graphs. If the cache lacks the model, write the model first.

        Args:
            graph: The ONNX file of the graph.
            options: The version and the options of the runtime. They are a part of the cache key.
            write_prepacked: Writes the prepacked model of a graph to a path in an empty folder.
            open_prepacked: Opens a prepacked model.

        Returns:
            The result of `open_prepacked`; None if the weights cannot be prepacked. The log gives the reason once.
        """
        if not self._usable:
            return None
        key = {**self._key, **options, "graph": str(graph.relative_to(self._bundle))}

        def make(folder: Path) -> None:
            began = time.perf_counter()
            write_prepacked(graph, folder / _MODEL_NAME)
            if not self._is_unchanged():
                raise BundleError(f"{graph}: the bundle was replaced while its weights were written")
            written_mib = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
            seconds = round(time.perf_counter() - began, 3)
            extra = {"graph": str(graph), "cache_dir": str(self._folder), "mib": round(written_mib), "seconds": seconds}
            logger.info("prepacked weights written", extra=extra)

        try:
            return open_prepacked(Cache(self._folder).entry(key, make) / _MODEL_NAME)
        except BundleError:
            raise
        except Exception as error:  # an error of the file system or of the runtime
            self._usable = False
            extra = {"graph": str(graph), "cache_dir": str(self._folder), "reason": str(error)}
            logger.warning("every session has its own copy of the weights", extra=extra)
            return None


def open_weights(
    cache_dir: Path | None, fingerprint: str, bundle: Path, is_unchanged: Callable[[], bool]
) -> PrepackedWeights | None:
    """Return the prepacked graphs of a bundle; None if the cache is off.

    Args:
        cache_dir: The folder of the cache; None for the user's cache folder, "off" for no cache.
        fingerprint: The fingerprint of the bundle.
        bundle: The folder of the bundle.
        is_unchanged: Returns whether the bundle still has this fingerprint. Called after each write of weights.
    """
    try:
        folder = Path(cache_dir) if cache_dir else _default_folder()
    except RuntimeError as error:  # the user has no home directory
        logger.warning("every session has its own copy of the weights", extra={"reason": str(error)})
        return None
    return None if folder == _OFF else PrepackedWeights(folder, fingerprint, bundle, is_unchanged)


def _default_folder() -> Path:
    """Return the default folder of the cache. Read the environment here, because an `Embedder` has no flags."""
    if given := os.environ.get("ENCSERVE_CACHE_DIR"):
        return Path(given)
    return user_folder()
