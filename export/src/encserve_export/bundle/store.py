"""Writes a bundle to <name>/<version>/ in a model repository. A failed export leaves no incomplete bundle."""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from encserve_export.core.errors import FULL_DISK, BundleError, BundleExistsError, BundleNameError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Prefixes of the temporary folders that an export creates next to the versions. A server ignores folders whose names
# start with ".".
_DRAFT, _OLD = ".draft-", ".old-"


def check_name(field: str, name: str) -> None:
    """Check a model name or a version, which becomes the name of a folder.

    Args:
        field: "name" or "version", for the error.
        name: The name.

    Raises:
        BundleNameError: The name is not 1 to 64 letters, digits, ".", "_" and "-", with a letter or digit first.
    """
    if not _NAME.fullmatch(name):
        raise BundleNameError(
            f"{field} must be 1 to 64 letters, digits, '.', '_' and '-', with a letter or digit first; was {name!r}"
        )


def name_from(directory: Path) -> str:
    """Make a model name from a directory's name. One "-" replaces each run of characters that are not allowed.

    Raises:
        BundleNameError: The directory's name has no letter and no digit.
    """
    directory_name = directory.resolve().name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory_name).lstrip("._-")[:64]
    if not name:
        raise BundleNameError(f"the directory name {directory_name!r} has no letter or digit; give a name with --name")
    return name


def check_target(model_repository: Path, name: str, version: str, *, overwrite: bool) -> Path:
    """Check that a version can be written. Return the version's folder, <name>/<version>/.

    Raises:
        BundleNameError: The name or the version cannot be the name of a folder.
        BundleExistsError: The version exists, and `overwrite` is false.
    """
    check_name("name", name)
    check_name("version", version)
    final = model_repository / name / version
    if final.exists() and not overwrite:
        raise BundleExistsError(f"{final} exists; give another --version, or --overwrite to replace it")
    return final


@contextlib.contextmanager
def draft(model_repository: Path, name: str, version: str, *, overwrite: bool) -> Iterator[Path]:
    """Create an empty draft folder for a bundle, and rename the folder to <name>/<version>/ after the `with` block.

    If the block raises an exception, the draft folder is removed instead. Parent folders that were created for the
    draft folder are removed too. An existing version then does not change.

    Raises:
        BundleNameError: The name or the version cannot be the name of a folder.
        BundleExistsError: The version exists, and `overwrite` is false.
        BundleError: The folder cannot be created or written.
    """
    final = check_target(model_repository, name, version, overwrite=overwrite)
    with _folder_in(final.parent) as folder:
        yield folder
        # Another export may have written this version in the meantime.
        check_target(model_repository, name, version, overwrite=overwrite)
        _publish(folder, final)


@contextlib.contextmanager
def scratch(model_repository: Path, name: str) -> Iterator[Path]:
    """Create a folder for large temporary files, next to a model's versions.

    The folder is removed after the `with` block.

    Raises:
        BundleNameError: The name cannot be the name of a folder.
        BundleError: The folder cannot be created or written.
    """
    check_name("name", name)
    with _folder_in(model_repository / name) as folder:
        yield folder


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder in TMPDIR for small files. The folder is removed after the `with` block.

    Raises:
        BundleError: The folder cannot be created or written.
    """
    with _named_errors(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory(prefix="encserve-export-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _folder_in(parent: Path) -> Iterator[Path]:
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    try:
        with _named_errors(parent):
            parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=parent, ignore_cleanup_errors=True) as folder:
                yield Path(folder)
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):  # the folder is not empty if another export uses it
                path.rmdir()
        raise


@contextlib.contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the file system, such as a full disk, into a `BundleError` that names the folder."""
    try:
        yield
    except OSError as error:
        advice = ". Free some space, or choose a folder on another disk" if error.errno in FULL_DISK else ""
        raise BundleError(f"the export to {folder} failed: {error}{advice}") from error


def _publish(folder: Path, final: Path) -> None:
    """Rename the draft folder to the version's folder.

    An existing version is first renamed to a temporary name, and deleted at the end. If the draft folder cannot be
    renamed, the existing version gets its old name back.
    """
    folder.chmod(0o755)  # only the owner can read a temporary folder, but the server may run as another user
    for path in folder.iterdir():
        path.chmod(0o644)
    old = final.parent / folder.name.replace(_DRAFT, _OLD)
    try:
        if final.exists():
            final.rename(old)
        folder.rename(final)
    finally:
        if old.exists() and not final.exists():
            old.rename(final)
        shutil.rmtree(old, ignore_errors=True)
