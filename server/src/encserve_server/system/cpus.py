"""The CPUs of the machine, and the number of CPUs that this process may use."""

import contextlib
import math
import os
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from encserve_server.system import cgroups

_CPUINFO = Path("/proc/cpuinfo")
# This is added to the niceness of threads that compute. On a busy CPU, such a thread gets a third of another thread's
# time.
_COMPUTE_NICENESS = 5


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs in the affinity mask, or the quota of a container or service if the quota is smaller.

    `root` is the folder that holds proc and sys.

    With a quota, one thread for each CPU of the host would be too many: the system throttles threads, and every batch
    waits for a throttled thread.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min((allowed, *_quotas(root))))


def lower_thread_priority() -> None:
    """Give the calling thread, and threads that it starts, a lower priority than the process's other threads.

    Threads that compute call this function. A refusal, a health check or a small reply takes a fraction of a
    millisecond on the event loop. Without this function, the event loop would wait until threads that compute free a
    CPU. The function does nothing if the system is not Linux.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may forbid the call
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + _COMPUTE_NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, min(niceness, 19))


def cpu_model() -> str:
    """Return the name of the CPU; empty if unknown."""
    return _cpuinfo("model name") or platform.processor()


def cpu_features() -> str:
    """Return the instruction sets of the CPU, by the names in /proc/cpuinfo; empty if unknown."""
    return _cpuinfo("flags") or _cpuinfo("Features")


def _cpuinfo(field: str) -> str:
    """Return a field of the first CPU in /proc/cpuinfo; empty without such a field or file."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _quotas(root: Path) -> Iterator[int]:
    """Yield the quotas of cgroup v2 in whole CPUs, rounded up."""
    for text in cgroups.read_all("cpu.max", root):
        with contextlib.suppress(ValueError):  # the quota is "max"
            quota, period = text.split()
            yield math.ceil(int(quota) / int(period))
