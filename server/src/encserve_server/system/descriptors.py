"""The descriptors of the process: standard input, output and error, and the limit of their number."""

import logging
import os
import resource
import sys

logger = logging.getLogger(__name__)

_STANDARD_ERROR = 2
# gRPC accepts twice `max_connections` for a moment, and HTTP once.
_PER_CONNECTION = 3
# Descriptors for models, logs, callers' files, the metrics page and threads.
_RESERVED = 256
_FEWEST_CONNECTIONS = 16


def open_standard_descriptors() -> None:
    """Open descriptors 0, 1 and 2 on /dev/null if they are closed.

    Otherwise a socket or a file could get such a number, and a library would write its messages there.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115 - stays open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115


def allowed_connections(wanted: int) -> int:
    """Raise the limit of descriptors as far as needed, and return the number of connections per port that fit.

    Without a free descriptor the server could neither accept a health check nor read the callers file.
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
            "the limit of open files allows fewer connections than max_connections: raise it, for example with "
            "`ulimit -n`",
            extra={"max_connections": allowed, "wanted": wanted, "open_files": max(limit, soft), "needed": needed},
        )
    return allowed
