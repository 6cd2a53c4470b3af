"""Caches exports on disk. Several tests and several test runs can share one export.

A change of the exporter's sources or of the installed packages invalidates all cached exports.
"""

import dataclasses
import functools
import hashlib
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from encserve_export import Exported, Target
from encserve_proto.bundle.v1 import manifest_pb2

ROOT = Path(__file__).parent.parent.parent
KEPT = ROOT / ".cache" / "exports"
KEPT_SECONDS = 24 * 3600


def export_once(export: Callable[..., Exported], *source: Any, target: Target, **options: Any) -> Exported:
    """Call `export(*source, target, **options)`, or copy the result of an earlier call from the cache.

    The cache key contains all arguments. For a file or a folder, the key contains the content. Several processes may
    call this function at the same time.
    """
    kept = _kept_by_this_exporter() / _digest(export.__name__, source, target.name, target.version, options)
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            made = Path(folder) / "models"
            export(*source, dataclasses.replace(target, model_repository=made), **options)
            try:
                made.rename(kept)
            except OSError:  # another process has stored the same export
                assert kept.exists()
    path = shutil.copytree(kept, target.model_repository, dirs_exist_ok=True) / target.name / target.version
    manifest = json_format.Parse((path / "manifest.json").read_text(), manifest_pb2.Manifest())
    return Exported(path, manifest)


@functools.cache
def _kept_by_this_exporter() -> Path:
    """Return the cache folder for the current sources, packages and Python version.

    If another cache folder is older than a day, delete that folder.
    """
    sources = [path for part in ("export", "proto") for path in (ROOT / part / "src").rglob("*.py")]
    packages = sorted(f"{it.name} {it.version}" for it in distributions())
    folder = KEPT / _digest(*sorted(sources), *packages, platform.python_version(), platform.processor())
    folder.mkdir(parents=True, exist_ok=True)
    for other in KEPT.iterdir():
        if other != folder and time.time() - other.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in _flat(parts):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


def _flat(parts: Iterable[Any]) -> Iterable[bytes]:
    """Yield all arguments of an export as bytes. For a file, yield the name and the content."""
    for part in parts:
        if isinstance(part, dict):
            yield from _flat(sorted(part.items()))
        elif isinstance(part, tuple):
            yield from _flat(part)
        elif isinstance(part, Path) and part.is_dir():
            yield from _flat(sorted(part.iterdir()))
        elif isinstance(part, Path):
            yield part.name.encode()
            yield part.read_bytes()
        else:
            yield repr(part).encode()
