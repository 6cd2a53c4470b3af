"""The server's log on standard error: one JSON object per line, or text for people."""

import logging
import secrets
import sys
import threading
import time

from pythonjsonlogger.json import JsonFormatter

from encserve_server.telemetry import spans
from encserve_server.telemetry.lines import LineWriter

logger = logging.getLogger(__name__)

_FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_MAX_WAITING = 10_000  # lines


class _LineHandler(logging.Handler):
    """Formats a record in the logging thread, and passes the line to a writer."""

    def __init__(self, lines: LineWriter[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put(self.format(record))
        except Exception:  # an error in the log must not stop the program, as in all handlers of `logging`
            self.handleError(record)

    def close(self) -> None:
        self._lines.close()
        super().close()


class _TextFormatter(logging.Formatter):
    """Writes `time level message key=value …`, and a traceback on the following lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = super().formatMessage(record)
        extras = {key: it for key, it in vars(record).items() if key not in _STANDARD and not key.startswith("_")}
        return "  ".join([line, " ".join(f"{key}={_printable(it)}" for key, it in extras.items())]) if extras else line


def _printable(value: object) -> str:
    """Return a value as one line without control characters, because the value may come from a caller."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def _add_ids(record: logging.LogRecord) -> bool:
    """Add the ids of the current request to a log record, if requests are traced."""
    if ids := spans.current_ids():
        record.trace_id, record.span_id = ids
    return True


def configure(level: str, log_format: str) -> LineWriter[str]:
    """Send all log lines of at least `level` to standard error, as "json" or "text". Return the writer of the lines.

    Python's warnings and uncaught exceptions become log lines too. Times are RFC 3339 in UTC.
    """
    formatter: logging.Formatter = _TextFormatter("%(asctime)s %(levelname)-7s %(message)s")
    if log_format == "json":
        formatter = JsonFormatter(_FIELDS, rename_fields={"asctime": "time", "levelname": "level", "name": "logger"})
    formatter.converter = time.gmtime
    formatter.default_time_format, formatter.default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"
    lines = LineWriter[str]("server", sys.stderr, str, max_waiting=_MAX_WAITING)
    handler = _LineHandler(lines)
    handler.setFormatter(formatter)
    handler.addFilter(_add_ids)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    sys.excepthook = lambda kind, error, traceback: _log_uncaught(error, "the main thread")
    threading.excepthook = lambda it: _log_uncaught(it.exc_value, it.thread)
    sys.unraisablehook = lambda it: _log_uncaught(it.exc_value, it.object)
    return lines


def log_unexpected(error: BaseException) -> str:
    """Log an unexpected error. Return a text for the caller. This text does not contain the error."""
    error_id = secrets.token_hex(8)
    logger.error("unexpected error", exc_info=error, extra={"error_id": error_id})
    return f"internal error; see the server's log for the id {error_id}"


def _log_uncaught(error: BaseException | None, where: object) -> None:
    logger.critical("uncaught exception", exc_info=error, extra={"where": str(where)})
