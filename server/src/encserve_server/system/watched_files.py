"""Files that are read again and again: keys, callers, certificates.

A read from a network mount may never return. So each read runs in a daemon thread, with a time limit. The event loop
continues during the read, and the process can end before the thread ends.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from encserve_server.system.clock import Clock
from encserve_server.system.files import FileError, read_files

# The interval at which the owners of watched files call `WatchedFiles.changed`.
POLL_SECONDS = 1.0
# Changed files are used after this time without a further change. Before, a file may be incomplete.
SETTLE_SECONDS = 0.1
READ_SECONDS = 5.0

Contents = tuple[bytes, ...]
Result = TypeVar("Result")


class WatchedFiles:
    """One or several files that change together. Belongs to the event loop."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        """Set the path of each file. The key is the setting that names the file."""
        self._paths = paths
        self._last: Contents | str | None = None  # the contents or the problem after the last change
        self._running: asyncio.Future[Any] | None = None  # the work of the daemon thread

    def read_first(self) -> Contents:
        """Read the files at the start of the server. Blocks for at most READ_SECONDS.

        Raises:
            FileError: A file cannot be read in time.
        """
        try:
            self._last = contents = _start_thread(self._read).result(READ_SECONDS)
        except TimeoutError:
            raise self._timeout() from None
        return contents

    async def changed(self, clock: Clock) -> Contents | None:
        """Return the contents if they have changed since the last call and are complete; otherwise None.

        Args:
            clock: The clock of the pause. The files count as complete if they do not change during the pause.

        Raises:
            FileError: A file cannot be read in time. The same problem is raised only once.
        """
        found = await self._look()
        if found == self._last:
            return None
        await clock.sleep(SETTLE_SECONDS)
        if await self._look() != found or found == self._last:
            return None  # the files still change, so the next call decides; or another call has reported the change
        self._last = found
        if isinstance(found, str):
            raise FileError(found)
        return found

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run work that may read the files, and return its result. The work runs in a daemon thread, one at a time.

        Raises:
            FileError: The work, or an earlier call's unfinished work, takes longer than READ_SECONDS. Exceptions of
                `work` pass through.
        """
        try:
            async with asyncio.timeout(READ_SECONDS):
                if self._running is not None:
                    await asyncio.wait([self._running])
                running = asyncio.wrap_future(_start_thread(work))
                self._running = running
                await asyncio.wait([running])
        except TimeoutError:
            raise self._timeout() from None
        self._running = None
        return running.result()

    async def _look(self) -> Contents | str:
        try:
            return await self.run(self._read)
        except FileError as error:
            return str(error)

    def _read(self) -> Contents:
        return read_files(self._paths)

    def _timeout(self) -> FileError:
        names = ", ".join(f"{setting} {path}" for setting, path in self._paths.items())
        return FileError(f"{names} could not be read in {READ_SECONDS:g} s; look at the file system")


def _start_thread(work: Callable[[], Result]) -> "Future[Result]":
    future: Future[Result] = Future()
    threading.Thread(target=partial(_run, work, future), name="encserve-files", daemon=True).start()
    return future


def _run(work: Callable[[], Result], future: "Future[Result]") -> None:
    future.set_running_or_notify_cancel()  # from now on, no reader can cancel the future
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
