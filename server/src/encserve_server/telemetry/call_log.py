"""The access log, with a line for each call, and the log lines that sum up refused and failed calls."""

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

_MAX_WAITING = 50_000  # records of about 20 MB
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


def open_access_log() -> LineWriter[CallRecord]:
    """Return the access log: a JSON object for each call, one a line, on standard output."""
    return LineWriter("access", sys.stdout, line_of, max_waiting=_MAX_WAITING)


def line_of(record: CallRecord) -> str:
    """A record as a line: the time in RFC 3339, UTC, first."""
    fields = record._asdict()
    ended_at = datetime.fromtimestamp(fields.pop("ended_at"), UTC)
    for name in ("seconds", "queue_seconds", "compute_seconds"):
        fields[name] = round(fields[name], 6)
    return json.dumps({"time": ended_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"), **fields})


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
