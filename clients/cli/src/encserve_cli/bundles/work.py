"""The progress of the preparation of a bundle, and the exception that stops the preparation."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from encserve_cli.shared import say

_LOG_SECONDS = 10.0
_SHOW_SECONDS = 0.1
_BAR_COLUMNS = 24
_ERASE_LINE = "\r\x1b[2K"


class Stopped(Exception):
    """The user stopped the preparation."""


class Work(Protocol):
    """Receives the progress of a preparation. Any thread may call the methods."""

    def stage(self, text: str, fraction: float | None = None) -> None:
        """Receive the current step, several times a second.

        Args:
            text: The step, such as "downloading 61 of 90 MB".
            fraction: The finished part of the step, from 0 to 1; None if unknown.

        Raises:
            Stopped: The user stopped the preparation.
        """

    def note(self, line: str) -> None:
        """Receive a line that the user should read."""

    def detail(self, line: str) -> None:
        """Receive a line of the exporter's report."""


class ShownWork:
    """Shows a preparation on standard error: a line with a bar on a terminal, otherwise a line every 10 s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a display that shows nothing yet. `clock` returns the time in seconds."""
        self._clock = clock
        self._is_terminal = sys.stderr.isatty()
        self._kind = ""
        self._shown_at = float("-inf")

    def stage(self, text: str, fraction: float | None = None) -> None:
        """See `Work`."""
        kind, now = text.partition(" ")[0], self._clock()
        seconds = _SHOW_SECONDS if self._is_terminal else _LOG_SECONDS
        if kind == self._kind and now < self._shown_at + seconds:
            return
        self._kind, self._shown_at = kind, now
        if not self._is_terminal:
            say(text)
            return
        columns = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"{_ERASE_LINE}{_bar(fraction)}{text}"[: columns + len(_ERASE_LINE)])
        sys.stderr.flush()

    def note(self, line: str) -> None:
        """See `Work`."""
        self.erase()
        say(line)

    def detail(self, line: str) -> None:
        """See `Work`."""
        self.note(line)

    def erase(self) -> None:
        """Remove the line with the bar from the terminal."""
        if self._is_terminal and self._kind:
            sys.stderr.write(_ERASE_LINE)
            sys.stderr.flush()
        self._kind = ""


@contextmanager
def shown_work() -> Iterator[ShownWork]:
    """Show a preparation on standard error. At the end of the block, the bar is removed."""
    work = ShownWork()
    try:
        yield work
    finally:
        work.erase()


def _bar(fraction: float | None) -> str:
    """Return a bar of 24 columns; empty if the fraction is unknown."""
    if fraction is None:
        return ""
    full = round(_BAR_COLUMNS * min(max(fraction, 0.0), 1.0))
    return f"{'━' * full}{'╌' * (_BAR_COLUMNS - full)} "
