"""The descriptors of the process: standard input, output and error, and the limit of open files."""

import contextlib
import logging
import os
import resource
import stat
import sys

logger = logging.getLogger(__name__)

_STANDARD_ERROR = 2
# Descriptors for each of `max_connections`: two for gRPC, which may briefly accept twice as many, and one for HTTP.
_PER_CONNECTION = 3
# Descriptors for models, logs, callers' files, the metrics page and threads.
_RESERVED = 256
_FEWEST_CONNECTIONS = 16


def open_standard_descriptors() -> None:
    """Open descriptors 0, 1 and 2 on /dev/null if they are closed.

    Otherwise a socket or a file could get one of these descriptors, and a library would write its messages to it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115 - stays open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115


def make_messages_of_libraries_nonblocking() -> None:
    """Let libraries lose their messages instead of waiting, if standard error is a pipe without a reader.

    Libraries in C and Rust write to descriptor 2 directly, for example if the tokenizer panics. Python's `sys.stderr`
    gets another descriptor that still waits, because the server's log has a thread that can wait.
    """
    with contextlib.suppress(OSError):  # the pipe has no reader, or the system has no /proc
        if stat.S_ISFIFO(os.fstat(_STANDARD_ERROR).st_mode):
            again = os.open(f"/proc/self/fd/{_STANDARD_ERROR}", os.O_WRONLY | os.O_NONBLOCK)
            sys.stderr = os.fdopen(os.dup(_STANDARD_ERROR), "w", buffering=1, errors="backslashreplace")
            os.dup2(again, _STANDARD_ERROR)
            os.close(again)


def allowed_connections(wanted: int) -> int:
    """Raise the limit of open files if needed. Return the number of connections per port that the limit allows.

    Without a free descriptor, the server could not accept a health check or read the callers file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted * _PER_CONNECTION + _RESERVED
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    allowed = min(wanted, max((max(limit, soft) - _RESERVED) // _PER_CONNECTION, _FEWEST_CONNECTIONS))
    if allowed < wanted:
        logger.warning(
            "the limit of open files allows fewer connections than max_connections: raise the limit, for example with "
            "`ulimit -n`",
            extra={"max_connections": allowed, "wanted": wanted, "open_files": max(limit, soft), "needed": needed},
        )
    return allowed
