"""Writes lines to a file in a thread, so that no call waits for a reader of standard error or standard output."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Generic, TypeVar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_FLUSH_SECONDS = 0.02
_REPORT_SECONDS = 60.0


class LineWriter(Generic[Item]):
    """A bounded queue of lines, and a thread that writes them to a file.

    A line is lost if the queue is full or the file cannot be written. The server's log reports the first lost line at
    once. After that, the log reports lost lines at most once a minute, and at the end.

    Attributes:
        on_lost: Takes the number of lost lines. Called in the thread that writes, or in the thread that calls `put`.
    """

    def __init__(self, name: str, file: IO[str], format_item: Callable[[Item], str], *, max_waiting: int) -> None:
        """Start the thread.

        Args:
            name: The name of the log, for reports and for the thread.
            file: The file.
            format_item: Returns the line for an item, without the newline. Called in the thread.
            max_waiting: The maximum number of waiting items.
        """
        self.on_lost: Callable[[int], object] = lambda _: None
        self._name = name
        self._file = file
        self._format = format_item
        self._max_waiting = max_waiting
        self._waiting: deque[Item] = deque()
        self._has_more = threading.Event()
        self._is_over = threading.Event()
        self._losing = threading.Lock()
        self._unreported = 0
        self._reason = ""
        self._report_at = -math.inf
        self._thread = threading.Thread(target=self._run, name=f"encserve-{name}-log", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Add a line, without waiting."""
        if len(self._waiting) >= self._max_waiting:
            self._lose(1, "the reader is too slow")
            return
        self._waiting.append(item)
        if not self._has_more.is_set():
            self._has_more.set()

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Write the waiting lines, if the file takes them within the timeout."""
        self._is_over.set()
        self._has_more.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._has_more.wait()
            self._is_over.wait(_FLUSH_SECONDS)  # so that several lines are written together
            self._has_more.clear()
            self._write()
        self._write()
        self._report(is_last=True)

    def _write(self) -> None:
        items = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            self._file.write("".join(f"{self._format(item)}\n" for item in items))
            self._file.flush()
        except (OSError, ValueError) as error:  # the reader has closed the pipe
            self._lose(len(items), f"{error}")
        self._report()

    def _lose(self, count: int, reason: str) -> None:
        with self._losing:
            self._unreported += count
            self._reason = reason
        self.on_lost(count)

    def _report(self, *, is_last: bool = False) -> None:
        if self._unreported and (is_last or time.monotonic() >= self._report_at):
            with self._losing:
                count, self._unreported = self._unreported, 0
            self._report_at = time.monotonic() + _REPORT_SECONDS
            logger.error("lines of the %s log were lost: %s", self._name, self._reason, extra={"count": count})
