"""The limits that Linux sets for this process by control groups: of a container, or of a systemd service."""

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def read_all(file: str, root: Path, controller: str = "") -> Iterator[str]:
    """Yield the text of a file in the process's cgroup and in each cgroup above.

    Files that cannot be read are left out. A container usually sees its own cgroup as the root. A systemd service is in
    a cgroup below the root.

    Args:
        file: The name of the file, such as memory.max.
        root: The folder that holds proc and sys; / outside of tests.
        controller: A controller of cgroup v1, such as memory; empty for cgroup v2.
    """
    own = _own_cgroup(root, controller)
    for cgroup in (own, *own.parents):
        with contextlib.suppress(OSError):
            yield (root / "sys/fs/cgroup" / controller / cgroup / file).read_text()


def _own_cgroup(root: Path, controller: str) -> PurePosixPath:
    """Return the process's cgroup, relative to the root cgroup. Return the root cgroup if the process's is unknown."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return PurePosixPath(path.lstrip("/"))
    return PurePosixPath()
