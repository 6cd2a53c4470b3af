"""The CPUs of the machine, and the number that this process may use."""

import contextlib
import math
import os
import platform
import sys
import threading
from pathlib import Path

_CGROUP_MAX = Path("/sys/fs/cgroup/cpu.max")
_CPUINFO = Path("/proc/cpuinfo")
# Added to the niceness of threads that compute. On a busy CPU, they get a third of the time of another thread.
_COMPUTE_NICENESS = 5


def usable_cpus() -> int:
    """Return the number of CPUs in the affinity mask, or the container's quota if the quota is smaller.

    A quota throttles a thread pool that has a thread for each CPU of the host. Then every batch waits for the throttled
    thread.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _cgroup_quota()))


def lower_thread_priority() -> None:
    """Give the calling thread, and threads that it starts, a lower priority than the process's other threads.

    Threads that compute call this. A refusal, a health check or a small reply takes a fraction of a millisecond on the
    event loop. Without this function, the event loop would wait for a CPU behind the threads that compute. On other
    systems than Linux, the function does nothing.
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


def _cgroup_quota() -> int:
    """Return the cgroup v2 quota in whole CPUs, rounded up; a large number without a quota."""
    try:
        quota, period = _CGROUP_MAX.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or the quota is "max"
        return 1_000_000
