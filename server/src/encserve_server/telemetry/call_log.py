"""The access log, with one line for each call, and log lines that count refused and failed calls."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from encserve_server.telemetry.lines import LineWriter

logger = logging.getLogger(__name__)

_MAX_WAITING = 50_000  # records, which together take about 20 MB
_LINE_SECONDS = 1.0


class CallRecord(NamedTuple):
    """A call in the access log. The JSON line has the same fields, except that `time` replaces `ended_at`.

    Attributes:
        ended_at: The end of the call, in seconds since 1970.
        caller: The caller's name; empty if callers have no names.
        peer: The address and port from which the caller connected.
        method: The RPC, or the HTTP method and the route.
        model: NAME@VERSION; empty if the call did not name a known model.
        inputs: The number of inputs.
        tokens: The number of tokens; 0 if the tokens were not counted.
        status: The name of the gRPC status code, or the HTTP status.
        reason: The reason of the error; empty without an error.
        seconds: The time from arrival to answer.
        queue_seconds: The longest time that a sequence of the call waited in the queue.
        compute_seconds: The duration of the longest batch with sequences of the call.
        trace_id: The id of the trace; empty if the call is not traced.
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


def open_access_log() -> LineWriter[CallRecord]:
    """Return the access log. For each call, the log writes a line with a JSON object to standard output."""
    return LineWriter("access", sys.stdout, line_of, max_waiting=_MAX_WAITING)


def line_of(record: CallRecord) -> str:
    """Return the JSON line of a record. The first field is the time in UTC, in the format of RFC 3339."""
    fields = record._asdict()
    ended_at = datetime.fromtimestamp(fields.pop("ended_at"), UTC)
    for name in ("seconds", "queue_seconds", "compute_seconds"):
        fields[name] = round(fields[name], 6)
    return json.dumps({"time": ended_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"), **fields})


class RefusalLog:
    """Logs refused and failed calls. A caller and reason have at most one line a second, with the number of calls.

    The number of callers and reasons limits the memory. Use the log only on the event loop.
    """

    def __init__(self) -> None:
        """Start without counts."""
        # The number of calls since the last line. A key is removed after a second without calls.
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, caller: str, reason: str, method: str, text: str, *, is_callers_mistake: bool) -> None:
        """Count a refused or failed call. The first call of a caller and reason is logged immediately."""
        key = caller, reason
        if key in self._counts:
            self._counts[key] += 1
            return
        level = logging.INFO if is_callers_mistake else logging.WARNING
        _log(level, key, 1, {"method": method, "error": text})
        self._wait(level, key)

    def close(self) -> None:
        """Log the remaining counts."""
        for key, count in self._counts.items():
            if count:
                _log(logging.WARNING, key, count, {})
        self._counts.clear()

    def _wait(self, level: int, key: tuple[str, str]) -> None:
        self._counts[key] = 0
        asyncio.get_running_loop().call_later(_LINE_SECONDS, self._log_count, level, key)

    def _log_count(self, level: int, key: tuple[str, str]) -> None:
        if count := self._counts.pop(key, 0):
            _log(level, key, count, {})
            self._wait(level, key)


def _log(level: int, key: tuple[str, str], count: int, more: Mapping[str, str]) -> None:
    caller, reason = key
    logger.log(
        level, "calls were refused, or failed", extra={"caller": caller, "reason": reason, "count": count, **more}
    )


def now() -> float:
    """Return the seconds since 1970."""
    return time.time()
