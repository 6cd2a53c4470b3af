"""Ctrl-C and SIGTERM end a command immediately, with one line on stderr."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import click

from encserve_cli.shared import STOPPED, say

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LONGEST_STOP_SECONDS = 1.0
_META = "encserve_cli.interrupts"
_STDERR = 2
_ERASE_LINE = "\r\x1b[2K"  # also erases the ^C that the terminal shows
_SHOW_CURSOR = "\x1b[?25h"  # because a progress bar hides the cursor


class Interrupts:
    """A context in which Ctrl-C or SIGTERM raises KeyboardInterrupt, or stops a job.

    If the command still runs after a second, the process ends. Without this limit, a running batch could delay the end,
    or gRPC could wait for an interrupted call.

    Python may miss a signal that comes just before the main thread waits for a lock. The handler then never runs. So a
    thread ends the command. Python's C code writes the number of each signal into a pipe. The thread reads this pipe.

    Attributes:
        came: Whether a signal has arrived.
    """

    def __init__(self) -> None:
        """Create a context without a job to stop."""
        self.came = False
        self._is_handled = False
        self._describe: Callable[[], str] = lambda: "stopped"
        self._stops: tuple[Callable[[], object], ...] = ()
        self._cleanups: list[Callable[[], object]] = []
        self._is_shown = threading.Lock()  # locked as soon as the line is written
        self._ended = threading.Event()
        self._before: dict[int, Any] = {}
        self._pipe_end = -1  # C code writes the numbers of signals into this end of a pipe
        self._pipe_before = -1

    @staticmethod
    def current() -> "Interrupts":
        """Return the context of the running command."""
        found: Interrupts = click.get_current_context().meta[_META]
        return found

    def describe(self, describe: Callable[[], str], *stops: Callable[[], object]) -> None:
        """Set `describe`, which returns the line for stderr, and `stops`, which stop a job soon.

        If there are `stops`, a signal calls them and does not raise KeyboardInterrupt.
        """
        self._describe = describe
        self._stops = stops

    @staticmethod
    @contextmanager
    def cleanup(clean: Callable[[], object]) -> Iterator[None]:
        """Keep `clean` registered while the block runs. `clean` removes an unfinished file.

        If a signal ends the process, no `finally` runs, but this function runs. In other Python programs, `clean` is
        never called.
        """
        context = click.get_current_context(silent=True)
        found: Interrupts | None = None if context is None else context.meta.get(_META)
        cleanups = [] if found is None else found._cleanups
        cleanups.append(clean)
        try:
            yield
        finally:
            cleanups.remove(clean)

    def clean(self) -> None:
        """Remove the unfinished files of blocks that still run. The newest file goes first."""
        for clean in reversed([*self._cleanups]):  # a copy: blocks may end meanwhile
            with suppress(OSError):
                clean()

    def show(self) -> None:
        """Write the line to stderr, once."""
        if self._is_shown.acquire(blocking=False):
            say(f"{_ERASE_LINE if sys.stderr.isatty() else ''}{self._describe()}")

    def leave(self) -> None:
        """Restore the signal handlers that were set before the context."""
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}
            signal.set_wakeup_fd(self._pipe_before)
            os.close(self._pipe_end)  # ends the thread

    def __enter__(self) -> "Interrupts":
        click.get_current_context().meta[_META] = self
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only in the main thread
            # A shell script ignores SIGINT for its background commands.
            signals = [it for it in _SIGNALS if signal.getsignal(it) is not signal.SIG_IGN]
            if signals:
                pipe, self._pipe_end = os.pipe()
                os.set_blocking(self._pipe_end, False)
                threading.Thread(target=self._watch, args=(pipe, bytes(signals)), daemon=True).start()
                self._pipe_before = signal.set_wakeup_fd(self._pipe_end, warn_on_full_buffer=False)
                self._before = {it: signal.signal(it, self._handle) for it in signals}
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.leave()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first, self._is_handled = not self._is_handled, True
        if is_first and not self._stops:
            raise KeyboardInterrupt

    def _watch(self, pipe: int, signals: bytes) -> None:
        """Wait for a signal, then end the command."""
        with open(pipe, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number in signals:
                    self._end()
                    return

    def _end(self) -> None:
        self.came = True
        for stop in self._stops:
            stop()
        if not self._ended.wait(_LONGEST_STOP_SECONDS):
            if os.isatty(_STDERR):
                os.write(_STDERR, (_ERASE_LINE + _SHOW_CURSOR).encode())  # otherwise the bar stays
            if self._is_shown.acquire(blocking=False):
                os.write(_STDERR, f"{self._describe()}\n".encode(errors="backslashreplace"))
            self.clean()
            os._exit(STOPPED)
