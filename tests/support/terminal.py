"""Runs the command `encserve` in a terminal with a given number of columns."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

# The child process takes the terminal as its controlling terminal, so that Ctrl-C becomes SIGINT.
_START = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A running command in a terminal.

    Attributes:
        process: The process.
    """

    def __init__(self, *arguments: object, columns: int, cwd: Path) -> None:
        """Start a command in a terminal of 40 lines."""
        self._written = bytearray()
        self._main, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        command = [sys.executable, "-m", "encserve_cli", *map(str, arguments)]
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *command],
            stdin=child,
            stdout=child,
            stderr=child,
            cwd=cwd,
            env=environment | {"TERM": "xterm", "NO_COLOR": "1"},
            start_new_session=True,
        )
        os.close(child)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # reading fails when the command has closed the terminal
            while data := os.read(self._main, 65536):
                self._written += data

    def press_ctrl_c(self) -> None:
        """Type Ctrl-C."""
        os.write(self._main, b"\x03")

    @property
    def lines(self) -> list[str]:
        """All lines of the output so far, including overwritten lines, without colours."""
        text = _ESCAPES.sub("\n", self._written.decode(errors="replace"))
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    @property
    def hides_cursor(self) -> bool:
        """Whether the cursor is hidden."""
        return self._written.rfind(b"\x1b[?25l") > self._written.rfind(b"\x1b[?25h")

    def wait(self) -> int:
        """Wait until the command ends, and return the exit status."""
        status = self.process.wait(timeout=60)
        self._reader.join(timeout=60)
        return status

    def close(self) -> None:
        """Kill the command if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout=60)
        os.close(self._main)


@contextlib.contextmanager
def terminal(*arguments: object, columns: int = 80, cwd: Path) -> Iterator[Terminal]:
    """Run a command in a terminal. At the end of the block, kill the command if it still runs."""
    with contextlib.closing(Terminal(*arguments, columns=columns, cwd=cwd)) as it:
        yield it
