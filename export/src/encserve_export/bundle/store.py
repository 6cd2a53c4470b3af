"""Puts a bundle into a model repository as <name>/<version>/, complete or not at all."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from encserve_export.ground.errors import BundleError, BundleExistsError, BundleNameError, ParityError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# What lies beside the versions of a model while one is written; a server reads no folder whose name begins with '.'.
_DRAFT, _ASIDE = ".draft-", ".old-"
# A file system with less to give than this is full.
_LEAST_FREE_BYTES = 1 << 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    block raises, the folder is removed, and with it the parents that were made for it. What an export that was killed
    left beside the final folder is put right first.

    Raises:
        BundleNameError: The name or the version is no plain name.
        BundleExistsError: The version is there, and `overwrite` is false.
        BundleError: The folder cannot be made or written to, or a disk is full; the text names the folder.
    """
    final = check_target(model_repository, name, version, overwrite=overwrite)
    with _folder_in(final.parent) as folder:
        # An export that was killed may have left this version moved aside.
        check_target(model_repository, name, version, overwrite=overwrite)
        yield folder
        with _locked(final.parent), held_signals():
            # Another export may have put it there meanwhile.
            check_target(model_repository, name, version, overwrite=overwrite)
            _publish(folder, final)


@contextlib.contextmanager
def scratch(model_repository: Path, name: str) -> Iterator[Path]:
    """An empty folder beside a model's versions for files as large as the model, which is removed afterwards.

    Raises:
        BundleNameError: The name is no plain name.
        BundleError: The folder cannot be made or written to, or a disk is full; the text names the folder.
    """
    check_name("name", name)
    with _folder_in(model_repository / name) as folder:
        yield folder


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """An empty folder for small files where TMPDIR says, which is removed afterwards.

    Raises:
        BundleError: It cannot be made, or its disk is full; the text names it.
    """
    with contextlib.ExitStack() as made:
        try:
            with held_signals():  # a signal in between would leave the folder
                folder = Path(tempfile.mkdtemp(prefix="encserve-export-"))
                made.callback(_remove, folder)
        except OSError as error:
            raise BundleError(
                f"no temporary folder can be made: {error}; make room there, or name another folder with TMPDIR"
            ) from error
        with _explained(folder.parent):
            yield folder


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Holds the signals that end a process until the block has ended.

    Threads of libraries take signals as well, so blocking them in this thread alone would hold none. Python runs
    handlers in its main thread only, so in any other there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    held = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    for number in held:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for ended_by in dict.fromkeys(came):
            signal.raise_signal(ended_by)


@contextlib.contextmanager
def _folder_in(parent: Path) -> Iterator[Path]:
    """An empty folder in a model's folder, locked while it is used; removed at the end, if it is still there."""
    with _parents(parent), contextlib.ExitStack() as made:
        try:
            with _locked(parent), held_signals():  # a signal in between would leave the folder
                _repair(parent)
                folder = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=parent))
                made.callback(_remove, folder, _lock(folder))
        except OSError as error:
            raise BundleError(f"nothing can be written in {parent}: {error}") from error
        with _explained(parent, tempfile.gettempdir()):
            yield folder


def _remove(folder: Path, lock: int | None = None) -> None:
    """Removes a folder, if it is still there, and then its lock."""
    with held_signals():
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def _explained(*folders: str | Path) -> Iterator[None]:
    """Turns errors of writing into one that names the folder, the first that is full if one is.

    Libraries tell of a full disk in many ways, and some as of a broken file, so the disk itself is looked at.
    """
    try:
        yield
    except (BundleError, ParityError):
        raise
    except Exception as error:
        cause = str(error) or type(error).__name__
        free = {folder: shutil.disk_usage(folder).free for folder in folders}
        least = min(free, key=lambda folder: free[folder])
        if free[least] < _LEAST_FREE_BYTES or _is_no_space(error):
            raise BundleError(
                f"the disk of {least} is full: {cause}. Make room there"
                + ("" if least == folders[0] else ", or name another folder with TMPDIR")
            ) from error
        if not isinstance(error, OSError):
            raise
        inside = error.filename is None or Path(str(error.filename)).is_relative_to(folders[0])
        raise BundleError(f"nothing can be written in {folders[0]}: {cause}" if inside else cause) from error


def _is_no_space(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


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


def _lock(folder: Path, how: int = fcntl.LOCK_EX) -> int | None:
    """Locks a folder until the descriptor is closed or the process ends; None where the file system has no locks.

    Raises:
        BlockingIOError: With LOCK_NB, somebody else has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other export makes, repairs or publishes a version in a model's folder meanwhile."""
    descriptor = _lock(folder)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _repair(parent: Path) -> None:
    """Puts right what an export that was killed left: versions moved aside are put back, drafts are removed."""
    for aside in parent.glob(f"{_ASIDE}*"):
        for version in aside.iterdir():
            if not (parent / version.name).exists():
                version.rename(parent / version.name)
        shutil.rmtree(aside)
    for left in parent.glob(f"{_DRAFT}*"):
        try:
            lock = _lock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):  # an export is writing it, or has just ended
            continue
        if lock is not None:
            shutil.rmtree(left)
            os.close(lock)


def _publish(folder: Path, final: Path) -> None:
    """Renames the draft; a version that is replaced is moved aside first, since a rename replaces no full folder."""
    # Temporary files are readable by their owner alone; a server may well run as somebody else.
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
    if not final.exists():
        folder.rename(final)
        return
    # Under its own name, by which the next export puts it back if this one is killed before the second rename.
    aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=final.parent)) / final.name
    try:
        final.rename(aside)
        folder.rename(final)
    except BaseException:
        if aside.exists():
            aside.rename(final)
        aside.parent.rmdir()  # never with a version in it
        raise
    shutil.rmtree(aside.parent, ignore_errors=True)  # the new version is there; the next export takes away what stays
