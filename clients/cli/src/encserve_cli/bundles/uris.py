"""Copies the bundle of a URI. The import of pyarrow is slow, so only the copies import this module."""

from pathlib import Path
from typing import NamedTuple

import pyarrow.fs as arrow_fs

from encserve_cli.bundles.argument import MANIFEST, NAME
from encserve_cli.files.reading import check_no_secret
from encserve_cli.files.storage import filesystem_of


class Listed(NamedTuple):
    """The files of a bundle in an object store.

    Attributes:
        name: The name of the model.
        version: The version of the model.
        facts: The path, the size and the time of each file.
    """

    name: str
    version: str
    facts: list[tuple[str, int, int]]


def list_bundle(uri: str) -> Listed:
    """Return the files of a bundle.

    Raises:
        ValueError: The URI holds a secret, is of an unknown kind, or is not the URI of a bundle.
        OSError: The store does not answer.
    """
    check_no_secret(uri)
    files, path = filesystem_of(uri)
    found = files.get_file_info(arrow_fs.FileSelector(path, recursive=True, allow_not_found=True))
    name, version = Path(path).parent.name, Path(path).name
    if f"{path}/{MANIFEST}" not in {it.path for it in found} or not NAME.fullmatch(name):
        raise ValueError(f"{uri}: has no {MANIFEST}; the URI of a bundle ends in NAME/VERSION")
    files_only = (it for it in found if it.type == arrow_fs.FileType.File)
    return Listed(name, version, sorted((it.path, it.size, it.mtime_ns or 0) for it in files_only))


def copy_bundle(uri: str, target: Path) -> None:
    """Copy the files of a bundle into a folder, which is created.

    Raises:
        OSError: The store does not answer, or the folder cannot be written.
    """
    files, path = filesystem_of(uri)
    target.mkdir(parents=True)
    arrow_fs.copy_files(path, str(target), files, arrow_fs.LocalFileSystem(), use_threads=False)
