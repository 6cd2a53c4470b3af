"""Where ONNX Runtime's weights are, in the layout of its kernels: in files that every session and process maps.

ONNX Runtime lays weights out for the CPU's kernels when it opens a model, in private memory, for every session. From a
model that it saved with `session.save_external_prepacked_constant_initializers` it maps them instead.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from encserve_server.errors import BundleError
from encserve_server.system.cache import Cache
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
        """Names the cache's folder, the bundle and its folder, and what checks that its files still are those."""
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
        """Opens the prepacked model of one of the bundle's graphs, which is made if there is none.

        Args:
            graph: Its ONNX file.
            options: What else the result depends on: the runtime, and how it writes.
            write_prepacked: Writes the prepacked model of a graph to a path in an empty folder.
            open_prepacked: Opens one.

        Returns:
            What opened it; None where there cannot be one, which the log says once.
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
        except Exception as error:  # of the file system, or whatever the runtime raises
            self._usable = False
            extra = {"graph": str(graph), "cache_dir": str(self._folder), "reason": str(error)}
            logger.warning("every session has its own copy of the weights", extra=extra)
            return None


def open_weights(
    cache_dir: Path | None, fingerprint: str, bundle: Path, is_unchanged: Callable[[], bool]
) -> PrepackedWeights | None:
    """The prepacked graphs of a bundle; None if they are switched off.

    Args:
        cache_dir: The cache's folder; None for the user's own, "off" for none.
        fingerprint: What identifies the bundle.
        bundle: Its folder.
        is_unchanged: Whether its files still are those that have this fingerprint; called when weights were written.
    """
    try:
        folder = Path(cache_dir) if cache_dir else _default_folder()
    except RuntimeError as error:  # the user has no home directory
        logger.warning("every session has its own copy of the weights", extra={"reason": str(error)})
        return None
    return None if folder == _OFF else PrepackedWeights(folder, fingerprint, bundle, is_unchanged)


def _default_folder() -> Path:
    """What the environment says: also for an `Embedder`, which has no flags."""
    if given := os.environ.get("ENCSERVE_CACHE_DIR"):
        return Path(given)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # by the XDG specification a relative path is ignored
    return (base if base.is_absolute() else Path.home() / ".cache") / "encserve"
