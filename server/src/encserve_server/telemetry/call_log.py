"""The access log, with a line for each call, and the log lines that sum up refused and failed calls."""

import asyncio
import json
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO, NamedTuple

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.2
# About 20 MB. If standard output is not read, further lines are dropped and counted.
_MAX_WAITING = 50_000
# How often it is told that lines cannot be written.
_FAILED_SECONDS = 60.0
_LINE_SECONDS = 1.0


class CallRecord(NamedTuple):
    """What the access log says of a call; the names are those of its fields.

    Attributes:
        ended_at: When it ended, in seconds since 1970.
        caller: Who called; empty where nobody is named.
        peer: The other end of the connection.
        method: The RPC, or the method and the route.
        model: NAME@VERSION; empty where no model was found.
        inputs: How many.
        tokens: How many these have; 0 where they were not counted.
        status: The gRPC status code's name, or the HTTP status.
        reason: Why the call failed; empty where it did not.
        seconds: From its arrival to its answer.
        queue_seconds: The longest wait of its sequences.
        compute_seconds: The longest run of a batch with its sequences.
        trace_id: That of its trace; empty where it is not traced.
    """

    ended_at: float
    caller: str
    peer: str
    method: str
    model: str
    inputs: int
    tokens: int
    status: str | int
    reason: str
    seconds: float
    queue_seconds: float
    compute_seconds: float
    trace_id: str


class AccessLog:
    """Writes one JSON object a line for each call, to standard output; a thread writes, so that no call waits."""

    def __init__(self, file: IO[str] | None = None) -> None:
        """Starts the thread."""
        self._file = file or sys.stdout
        self._waiting: deque[CallRecord] = deque()
        self._dropped = 0
        self._failed = 0  # lines that could not be written since that was told last, and why
        self._error = ""
        self._tell_failed_at = -math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, name="encserve-access-log", daemon=True)
        self._thread.start()

    def add(self, record: CallRecord) -> None:
        """A call has ended; called on the event loop."""
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(record)
        else:
            self._dropped += 1

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Writes what waits, if that can be written."""
        self._over.set()
        self._thread.join(timeout_seconds)

    def _write(self) -> None:
        while not self._over.wait(_FLUSH_SECONDS):
            self._write_waiting()
        self._write_waiting()
        self._tell_failed()

    def _tell_failed(self) -> None:
        if self._failed:
            logger.error("the access log cannot be written: %s", self._error, extra={"count": self._failed})
            self._failed = 0
            self._tell_failed_at = time.monotonic() + _FAILED_SECONDS

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        lines = [line_of(self._waiting.popleft()) for _ in range(len(self._waiting))]
        try:
            self._file.write("".join(lines))
            self._file.flush()
        except (OSError, ValueError) as error:  # the reader has gone; calls go on
            self._error = str(error)
            self._failed += len(lines)
            if time.monotonic() >= self._tell_failed_at:
                self._tell_failed()
        if dropped := self._dropped:
            self._dropped -= dropped
            logger.warning("access log lines were dropped: nobody reads them fast enough", extra={"count": dropped})


def line_of(record: CallRecord) -> str:
    """A record as a line: the time in RFC 3339, UTC, first."""
    fields = record._asdict()
    ended_at = datetime.fromtimestamp(fields.pop("ended_at"), UTC)
    for name in ("seconds", "queue_seconds", "compute_seconds"):
        fields[name] = round(fields[name], 6)
    return json.dumps({"time": ended_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"), **fields}) + "\n"


class RefusalLog:
    """At most one line a second for each caller and reason, with how many calls it stands for.

    What is kept is bounded by callers and reasons. Owned by the event loop.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._counts: dict[tuple[str, str], int] = {}  # since the last line; there for a second after each

    def add(self, caller: str, reason: str, method: str, text: str, *, is_callers_mistake: bool) -> None:
        """A call was refused, or has failed; the first of a kind is logged at once."""
        key = caller, reason
        if key in self._counts:
            self._counts[key] += 1
            return
        level = logging.INFO if is_callers_mistake else logging.WARNING
        _log(level, key, 1, {"method": method, "error": text})
        self._wait(level, key)

    def close(self) -> None:
        """Logs what has not been logged."""
        for key, count in self._counts.items():
            if count:
                _log(logging.WARNING, key, count, {})
        self._counts.clear()

    def _wait(self, level: int, key: tuple[str, str]) -> None:
        self._counts[key] = 0
        asyncio.get_running_loop().call_later(_LINE_SECONDS, self._look, level, key)

    def _look(self, level: int, key: tuple[str, str]) -> None:
        if count := self._counts.pop(key, 0):
            _log(level, key, count, {})
            self._wait(level, key)


def _log(level: int, key: tuple[str, str], count: int, more: Mapping[str, str]) -> None:
    caller, reason = key
    logger.log(
        level, "calls were refused, or failed", extra={"caller": caller, "reason": reason, "count": count, **more}
    )


def now() -> float:
    """Seconds since 1970, as a record has them."""
    return time.time()
