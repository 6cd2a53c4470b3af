"""How many CPUs this process may really use."""

import math
import os
from pathlib import Path

_CGROUP_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus() -> int:
    """The CPUs of the affinity mask, less where a container's quota allows fewer.

    A thread pool sized by the host's CPUs is throttled in a container with a quota, and every batch waits for the
    throttled thread.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _cgroup_quota()))


def _cgroup_quota() -> int:
    """The cgroup v2 quota in whole CPUs, rounded up; a large number where there is none."""
    try:
        quota, period = _CGROUP_MAX.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return 1_000_000
