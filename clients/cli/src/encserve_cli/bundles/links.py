"""The temporary folder of `encserve serve`, with links to the bundles that the server serves.

A process locks its folder. The system removes the lock when the process ends, also after kill -9. A later start finds
folders without a lock, and removes these folders.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_PREFIX = "encserve-serve-"


@contextmanager
def links_folder() -> Iterator[Path]:
    """Yield a new folder, and remove the folder at the end of the block. First remove the folders of killed processes.

    Raises:
        OSError: The folder of temporary files cannot be written.
    """
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), _locked(old):  # fails if the process lives, or if another user owns the folder
            shutil.rmtree(old)
    with ExitStack() as stack:
        folder = _new_folder(stack)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _new_folder(stack: ExitStack) -> Path:
    """Return a new folder, which is locked until the end of the stack."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            stack.enter_context(_locked(folder))
        except (FileNotFoundError, BlockingIOError):  # another start removes the folder, because it had no lock yet
            continue
        except OSError:  # the file system has no locks for folders, so no start removes this folder
            return folder
        if folder.exists():
            return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder during the block.

    Raises:
        OSError: Another process holds the lock, or the folder cannot be locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
