"""What CPUs there are, and how many of them this process may really use."""

import contextlib
import math
import os
import platform
import sys
import threading
from pathlib import Path

_CGROUP_MAX = Path("/sys/fs/cgroup/cpu.max")
_CPUINFO = Path("/proc/cpuinfo")
# Above that of the process: a third of its weight, where both want a CPU.
_COMPUTING_NICENESS = 5


def usable_cpus() -> int:
    """The CPUs of the affinity mask, less where a container's quota allows fewer.

    A thread pool sized by the host's CPUs is throttled in a container with a quota, and every batch waits for the
    throttled thread.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _cgroup_quota()))


def lower_thread_priority() -> None:
    """Lowers the priority of the calling thread, and of those that it makes, below the process's other threads.

    For threads that compute: a refusal, a health check or a small reply takes the event loop a fraction of a
    millisecond, but without this it waits for its turn behind them. Only Linux knows priorities of threads.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + _COMPUTING_NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, min(niceness, 19))


def cpu_model() -> str:
    """The name of the CPU; empty where the system does not say."""
    return _cpuinfo("model name") or platform.processor()


def cpu_features() -> str:
    """What instructions the CPU has, as the system names them; empty where it does not say."""
    return _cpuinfo("flags") or _cpuinfo("Features")


def _cpuinfo(field: str) -> str:
    """What Linux says of the first CPU; empty where it does not say, or another system runs."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _cgroup_quota() -> int:
    """The cgroup v2 quota in whole CPUs, rounded up; a large number where there is none."""
    try:
        quota, period = _CGROUP_MAX.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return 1_000_000
