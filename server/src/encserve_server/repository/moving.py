"""Copies and renames bundles. A bundle is verified before and after, and no bundle is overwritten."""

import contextlib
import errno
import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from encserve_server.errors import BundleError
from encserve_server.repository.bundle import MANIFEST_NAME, read_bundle, read_manifest
from encserve_server.repository.scan import check_name, check_repository, newest_version, source_file, tuned_file
from encserve_server.system.files import TEMPORARY_PREFIX, flush, store_whole


def copy_bundle(source: Path, repository: Path, *, name: str = "", version: str = "") -> Path:
    """Copy a bundle into a model repository. Servers see the complete copy or nothing.

    Args:
        source: The folder of a bundle. Or a folder with the versions of a model; then the newest version is copied.
        repository: The model repository of the copy. A missing folder is created.
        name: The name of the copy; empty for the bundle's name.
        version: The version of the copy; empty for the bundle's version.

    Returns:
        The folder of the copy, <name>/<version>/ in the repository.

    Raises:
        BundleError: The bundle is not good, the target exists, a name is not valid, or a file cannot be read or
            written.
    """
    source = _bundle_of(source)
    manifest = read_manifest(source / MANIFEST_NAME)
    key = (name or manifest.name, version or manifest.version)
    check_name("name", key[0])
    check_name("version", key[1])
    target = repository.joinpath(*key)
    check_repository(repository)
    if target.exists():
        raise BundleError(f"{target}: exists; choose another name or version, or remove this folder first")
    read_bundle(source, (manifest.name, manifest.version))
    paths = [file.path for file in manifest.files]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        store_whole(target, lambda draft: _write(source, paths, draft, key))
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and target.is_dir():
            raise BundleError(f"{target}: another program has just created this folder") from error
        raise _write_error(error, target) from error
    finally:
        with contextlib.suppress(OSError):  # the folder is empty only after a failure
            target.parent.rmdir()
    return target


def rename_bundle(source: Path, *, name: str = "", version: str = "") -> Path:
    """Give a bundle another name or version in its model repository: copy the bundle, then remove the old folder.

    If the bundle's folder already has the new name and version, only the manifest is changed.

    Args:
        source: The folder <name>/<version>/ of a bundle. Or the folder <name>/; then the newest version is renamed.
        name: The new name; empty for the same name.
        version: The new version; empty for the same version.

    Returns:
        The new folder of the bundle.

    Raises:
        BundleError: As for `copy_bundle`, or `source` is not in a folder <name>/; the bundle is then unchanged. Or the
            old folder cannot be removed.
    """
    source = _bundle_of(source)
    manifest = read_manifest(source / MANIFEST_NAME)
    old = (manifest.name, manifest.version)
    key = (name or manifest.name, version or manifest.version)
    if key == (source.parent.name, source.name):
        _correct_manifest(source, old, key)
        return source
    if source.parent.name != manifest.name:
        raise BundleError(
            f"{source}: is not in a folder {manifest.name!r}, the name in the manifest, so its model repository is not "
            "known; `encserve bundle promote` copies the bundle into a model repository"
        )
    target = copy_bundle(source, source.parent.parent, name=name, version=version)
    try:
        # After this rename, a server does not see a folder with half of the files.
        removed = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=source.parent))
        source.rename(removed / source.name)
        shutil.rmtree(removed)
        for written in (tuned_file(source), source_file(source)):
            written.unlink(missing_ok=True)
    except OSError as error:
        raise BundleError(f"{source}: cannot be removed: {error.strerror}; {target} is complete") from error
    with contextlib.suppress(OSError):  # the folder has other versions
        source.parent.rmdir()
    return target


def _bundle_of(source: Path) -> Path:
    """Return the folder of a bundle. The path is absolute, so that the parents have names."""
    source = source.absolute()
    return source if (source / MANIFEST_NAME).exists() else newest_version(source)


def _write(source: Path, paths: Iterable[str], draft: Path, key: tuple[str, str]) -> None:
    """Copy a bundle to `draft`, with another name and version in the manifest. Verify the result."""
    draft.mkdir()
    for path in paths:
        (draft / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, draft / path)
    _write_manifest(source / MANIFEST_NAME, draft / MANIFEST_NAME, key)
    for written in (draft, *draft.rglob("*")):
        written.chmod(0o755 if written.is_dir() else 0o644)  # a server may run as another user
        flush(written)
    read_bundle(draft, key)


def _correct_manifest(directory: Path, old: tuple[str, str], key: tuple[str, str]) -> None:
    """Replace the name and the version in the manifest of a good bundle that was copied or renamed by hand."""
    if key == old:
        raise BundleError(f"{directory}: has this name and version already")
    check_name("name", key[0])
    check_name("version", key[1])
    read_bundle(directory, old)
    manifest = directory / MANIFEST_NAME

    def write(draft: Path) -> None:
        _write_manifest(manifest, draft, key)
        draft.chmod(0o644)

    try:
        # A draft that a killed process leaves in the bundle would make the bundle invalid.
        store_whole(manifest, write, draft_folder=directory.parent)
    except OSError as error:
        raise _write_error(error, manifest) from error


def _write_manifest(source: Path, target: Path, key: tuple[str, str]) -> None:
    """Copy a manifest with another name and version."""
    fields = json.loads(source.read_text(encoding="utf-8"))
    fields["name"], fields["version"] = key
    target.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _write_error(error: OSError, target: Path) -> BundleError:
    """Return an error that names the file, or the target of a full disk: `shutil.copyfile` names its source then."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return BundleError(f"{target if is_full else error.filename or target}: {error.strerror or error}")
