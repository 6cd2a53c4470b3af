"""Small files that an operator gives: certificates, keys, callers."""

import errno
from pathlib import Path

# Chains of certificates take a few KiB, the authorities of a whole system 250.
_MAX_BYTES = 4 * 1024 * 1024


def read_small(path: Path) -> bytes:
    """A file's bytes, at most 4 MiB.

    Raises:
        OSError: It cannot be read, or is larger; `strerror` says which.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise OSError(errno.EFBIG, f"must be at most {_MAX_BYTES} bytes; is larger", str(path))
    return data
