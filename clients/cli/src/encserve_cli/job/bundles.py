"""Finds the bundle of --bundle. Exports of checkpoints and copies of URIs go into the user's cache."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pyarrow.fs as arrow_fs

from encserve import __version__
from encserve.extras import install_line
from encserve_cli.files.reading import check_no_secret
from encserve_cli.files.storage import filesystem_of
from encserve_cli.interrupts import Interrupts

MANIFEST = "manifest.json"
_EXPORTER = "encserve-export"
_CHECKPOINT = ("config.json", "modules.json")  # a directory that has one of these is a checkpoint
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find_bundle(given: str) -> Path:
    """Return the folder of the bundle of --bundle.

    Args:
        given: The argument has one of these forms:
            - NAME/VERSION, the folder of a bundle. This folder has a manifest.json.
            - NAME, a folder with versions of a bundle. The newest version is used.
            - The URI of a bundle.
            - A directory with a checkpoint.
            - OWNER/NAME, the name of a checkpoint on the hub.

    Raises:
        ValueError: The argument has none of these forms. Or the argument is a checkpoint, and encserve-export is not
            installed.
        RuntimeError: The export failed.
        OSError: A file cannot be read, or the cache cannot be written.
    """
    if "://" in given:
        return _copied(given)
    path = Path(given).expanduser()
    if path.is_dir():
        return _in_directory(path)
    if path.exists():
        raise ValueError(f"--bundle {given}: is a file; a bundle is a folder with {MANIFEST}")
    if _looks_like_path(given):
        raise ValueError(f"--bundle {given}: there is no such folder; a model of the hub is named OWNER/NAME")
    return _exported(given, given.partition("/")[2], [])


def _looks_like_path(given: str) -> bool:
    """Whether the user meant a path, not a hub name. models/NAME is a path if the folder models exists."""
    return _HUB_ID.fullmatch(given) is None or Path(given).parent.is_dir()


def _in_directory(path: Path) -> Path:
    """Return the bundle of an existing directory."""
    if (path / MANIFEST).is_file():
        return path
    if versions := _with_manifest(path.iterdir()):
        return max(versions, key=lambda it: _version_key(it.name))
    if any((path / name).is_file() for name in _CHECKPOINT):
        files = sorted(it for it in path.rglob("*") if it.is_file())
        facts = [(str(it.relative_to(path)), it.stat().st_size, it.stat().st_mtime_ns) for it in files]
        return _exported(str(path.resolve()), path.resolve().name, facts)
    models = sorted({it.parent.name for it in _with_manifest(path.glob("*/*"))})
    if models:
        raise ValueError(f"--bundle {path}: holds the models {', '.join(models)}; name one, as {path / models[0]}")
    raise ValueError(
        f"--bundle {path}: is not a bundle (has no {MANIFEST}), not a folder with versions of a bundle, and not a "
        f"checkpoint (has no {' or '.join(_CHECKPOINT)})"
    )


def _with_manifest(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that are bundles. A folder with a leading "." is still being written."""
    return [it for it in folders if not it.name.startswith(".") and (it / MANIFEST).is_file()]


def _version_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key for the name of a version. Versions sort as in encserve-server: 9 < 10 and 1.0-rc1 < 1.0."""
    parts = [(2, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"\d+|[^\d.]+", name)]
    return [*parts, (1, 0, name)]


def _exported(source: str, own_name: str, facts: object) -> Path:
    """Export a checkpoint with encserve-export, or find the export in the cache. Return the bundle."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", own_name).lstrip("._-")[:64] or "model"
    where = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    exporter = shutil.which(_EXPORTER, path=where)

    def export(folder: Path) -> None:
        arguments = ["hf", source, "--model-repository", str(folder), "--name", name]
        if exporter is None:
            raise ValueError(
                f"--bundle {source}: is a checkpoint. To export a checkpoint, install {_EXPORTER}: "
                f"`{install_line('export')}`. Or export on another machine with "
                f"`{_EXPORTER} hf {source} --model-repository models --name {name}`, and give --bundle models/{name}"
            )
        # Standard output is for vectors, so the exporter writes to stderr.
        done = subprocess.run([exporter, *arguments], stdin=subprocess.DEVNULL, stdout=2, check=False)
        if done.returncode:
            raise RuntimeError(f"--bundle {source}: {_EXPORTER} failed with exit status {done.returncode}; see above")

    return _in_directory(_cached(name, (source, facts), export) / name)


def _copied(uri: str) -> Path:
    """Copy the bundle of a URI, or find the copy in the cache. Return the copy."""
    check_no_secret(uri)
    files, path = filesystem_of(uri)
    found = files.get_file_info(arrow_fs.FileSelector(path, recursive=True, allow_not_found=True))
    if f"{path}/{MANIFEST}" not in {it.path for it in found}:
        raise ValueError(f"--bundle {uri}: has no {MANIFEST}; the URI of a bundle ends in NAME/VERSION")
    facts = sorted((it.path, it.size, it.mtime_ns) for it in found if it.type == arrow_fs.FileType.File)

    def copy(folder: Path) -> None:
        arrow_fs.copy_files(path, str(folder), files, arrow_fs.LocalFileSystem(), use_threads=False)

    return _cached(Path(path).parent.name, (uri, facts), copy)


def _cached(name: str, facts: object, make: Callable[[Path], None]) -> Path:
    """Return the cache folder for a source. `facts` identify the source, and the source's version if known.

    `make` fills a missing folder, in one process at a time.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    own = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "encserve"
    # ONNX Runtime's cache of weights is in this folder too. The server refuses a cache that other users can write.
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache = own / "bundles"
    key = hashlib.sha256(repr((__version__, facts)).encode()).hexdigest()[:16]
    final = cache / f"{name}-{key}"
    cache.mkdir(exist_ok=True)
    with (cache / f".{final.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.is_dir():
            with (
                tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=cache) as folder,
                Interrupts.cleanup(partial(shutil.rmtree, folder, ignore_errors=True)),
            ):
                made = Path(folder, name)
                made.mkdir()
                make(made)
                made.rename(final)
    return final
