"""Copies the bundle of a URI. Importing pyarrow is slow, so import this module only for a URI."""

from pathlib import Path, PurePosixPath

import pyarrow.fs as arrow_fs

from encserve_cli.bundles.argument import MANIFEST, NAME
from encserve_cli.bundles.work import Work
from encserve_cli.files.reading import check_no_secret
from encserve_cli.files.storage import filesystem_of

_MB = 1_000_000
_CHUNK_BYTES = 4 * 1024 * 1024

# A file: the path in the store, the size in bytes, and the time of the last change in ns since 1970 (0 if unknown).
RemoteFile = tuple[str, int, int]


def list_bundle(uri: str) -> list[RemoteFile]:
    """Return the files of a bundle, sorted.

    Raises:
        ValueError: The URI holds a secret, is of an unknown kind, or is not the URI of a bundle. Or the path of a
            file has '..'.
        OSError: The store does not answer.
    """
    check_no_secret(uri)
    files, path = filesystem_of(uri)
    found = files.get_file_info(arrow_fs.FileSelector(path, recursive=True, allow_not_found=True))
    if f"{path}/{MANIFEST}" not in {it.path for it in found} or not NAME.fullmatch(PurePosixPath(path).parent.name):
        raise ValueError(f"{uri}: has no {MANIFEST}; the URI of a bundle ends in NAME/VERSION")
    for it in found:
        if ".." in PurePosixPath(it.path).parts:
            raise ValueError(f"{uri}: holds the file {it.path!r}; a path in a bundle has no '..'")
    files_only = (it for it in found if it.type == arrow_fs.FileType.File)
    return sorted((it.path, it.size, it.mtime_ns or 0) for it in files_only)


def copy_bundle(uri: str, listed: list[RemoteFile], target: Path, work: Work) -> None:
    """Copy the files of a bundle into a folder, which is created.

    Args:
        uri: The URI of the bundle.
        listed: The files, from `list_bundle`.
        target: The folder.
        work: Takes the number of copied bytes.

    Raises:
        OSError: The store does not answer, or the folder cannot be written.
        Stopped: `work` stopped the copy.
    """
    files, path = filesystem_of(uri)
    done, total = 0, sum(size for _, size, _ in listed)
    for name, _, _ in listed:
        local = target / PurePosixPath(name).relative_to(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        with files.open_input_stream(name) as source, local.open("wb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                copy.write(chunk)
                done += len(chunk)
                work.stage(f"copying {done / _MB:,.0f} of {total / _MB:,.0f} MB", done / total)
