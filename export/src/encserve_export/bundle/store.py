"""Puts a bundle into a model repository as <name>/<version>/, complete or not at all."""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from encserve_export.ground.errors import BundleError, BundleExistsError, BundleNameError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(what: str, name: str) -> None:
    """Refuses a name that could be anything but one plain part of a path.

    Args:
        what: What the name is for: "name" or "version".
        name: The name.

    Raises:
        BundleNameError: It is not of the form that the manifest asks for.
    """
    if not _NAME.fullmatch(name):
        raise BundleNameError(
            f"{what} must be 1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit; was {name!r}"
        )


def name_from(directory: Path) -> str:
    """A model name made of a directory's own name, every run of other characters turned into '-'.

    Raises:
        BundleNameError: The directory's name holds no letter or digit.
    """
    own = directory.resolve().name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", own).lstrip("._-")[:64]
    if not name:
        raise BundleNameError(f"no model name can be made of the directory name {own!r}; give one with --name")
    return name


def check_target(model_repository: Path, name: str, version: str, *, overwrite: bool) -> Path:
    """The folder of a version that may be written, <name>/<version>/.

    Raises:
        BundleNameError: The name or the version is no plain name.
        BundleExistsError: The version is there, and `overwrite` is false.
    """
    check_name("name", name)
    check_name("version", version)
    final = model_repository / name / version
    if final.exists() and not overwrite:
        raise BundleExistsError(f"{final} exists; give another version, or --overwrite to replace it")
    return final


@contextlib.contextmanager
def draft(model_repository: Path, name: str, version: str, *, overwrite: bool) -> Iterator[Path]:
    """An empty folder to write a bundle into, which becomes <name>/<version>/ there when the block ends well.

    The folder lies beside the final one under a name that begins with '.', so that the last step is one rename. If the
    block raises, the folder is removed, and with it the parents that were made for it.

    Raises:
        BundleNameError: The name or the version is no plain name.
        BundleExistsError: The version is there, and `overwrite` is false.
        BundleError: The folder cannot be made or written to.
    """
    final = check_target(model_repository, name, version, overwrite=overwrite)
    with _parents(final.parent):
        try:
            folder = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=final.parent))
            try:
                yield folder
                # Another export may have put it there meanwhile.
                check_target(model_repository, name, version, overwrite=overwrite)
                _publish(folder, final)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise BundleError(f"{final} cannot be written: {error}") from error


@contextlib.contextmanager
def _parents(folder: Path) -> Iterator[None]:
    """Makes a folder and its parents; if the block raises, removes those of them that it made."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        yield
    except BaseException:
        for path in missing:
            # Somebody else may have put something there meanwhile.
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _publish(folder: Path, final: Path) -> None:
    """Renames the draft; a version that is replaced is moved aside first, since a rename replaces no full folder."""
    # Temporary files are readable by their owner alone; a server may well run as somebody else.
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
    if not final.exists():
        folder.rename(final)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{final.name}-old-", dir=final.parent))
    final.rename(aside / "old")
    folder.rename(final)
    shutil.rmtree(aside)
