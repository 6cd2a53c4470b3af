"""Structured logs on standard error: one JSON object a line, or text for people."""

import logging
import secrets
import sys
import threading

from pythonjsonlogger.json import JsonFormatter

from encserve_server.telemetry import spans

logger = logging.getLogger(__name__)

_FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _TextFormatter(logging.Formatter):
    """`time level message key=value …`, and on further lines a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = super().formatMessage(record)
        extras = {key: it for key, it in vars(record).items() if key not in _STANDARD and not key.startswith("_")}
        return "  ".join([line, " ".join(f"{key}={_shown(it)}" for key, it in extras.items())]) if extras else line


def _shown(value: object) -> str:
    """A value on one line: some are callers' words."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def _add_ids(record: logging.LogRecord) -> bool:
    """Adds to a line the ids of the request that it is about, where requests are traced."""
    if ids := spans.current_ids():
        record.trace_id, record.span_id = ids
    return True


def configure(level: str, log_format: str) -> None:
    """Sends every logger's lines of at least `level` to standard error, as "json" or "text".

    Python would print warnings, and uncaught exceptions, there by itself: they become lines too.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(
            JsonFormatter(_FIELDS, rename_fields={"asctime": "time", "levelname": "level", "name": "logger"})
        )
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)-7s %(message)s"))
    handler.addFilter(_add_ids)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    sys.excepthook = lambda kind, error, traceback: _log_uncaught(error, "the main thread")
    threading.excepthook = lambda it: _log_uncaught(it.exc_value, it.thread)
    sys.unraisablehook = lambda it: _log_uncaught(it.exc_value, it.object)


def log_unexpected(error: BaseException) -> str:
    """Logs an unexpected error; returns the text for the caller, which is not the error's own."""
    error_id = secrets.token_hex(8)
    logger.error("unexpected error", exc_info=error, extra={"error_id": error_id})
    return f"internal error; the server's log has it under the id {error_id}"


def _log_uncaught(error: BaseException | None, where: object) -> None:
    logger.critical("nobody caught an exception", exc_info=error, extra={"where": str(where)})
