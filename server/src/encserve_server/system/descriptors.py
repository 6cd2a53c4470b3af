"""Standard input, output and error, for a process that was started without them."""

import os
import sys

_STANDARD_ERROR = 2


def open_standard_descriptors() -> None:
    """Open descriptors 0, 1 and 2 on /dev/null if they are closed.

    Otherwise a socket or a file could get such a number, and a library would write its messages there.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115 - stays open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
