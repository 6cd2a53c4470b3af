"""Describes a run of a benchmark and the CPUs of this machine, and measures the CPU use of processes."""

import dataclasses
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from encserve_server.system.cpus import usable_cpus

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("onnxruntime", "torch", "grpcio", "numpy")
# Instruction sets that determine the speed of a matrix product.
MATRIX_FLAGS = re.compile(r"avx2|fma|avx512(f|_bf16|_fp16|_vnni)|avx_vnni|amx_\w+|asimd\w*|sve\w*|i8mm|bf16")
# Indices in the first line of /proc/stat: user, nice, system, steal. The time of interrupts is left out, because the
# benchmark's own loopback connections cause interrupts.
BUSY_FIELDS = (0, 1, 2, 7)


def describe_run() -> dict[str, Any]:
    """Return the commit of this checkout, the date, the command of this process, and the machine.

    The commit ends in "-dirty" if tracked files differ from the commit. It is "unknown" without git.
    """
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *map(portable, sys.argv)]),
        "machine": describe_machine(),
    }


def write_report(file: Path, report: Mapping[str, Any]) -> None:
    """Write the figures of a run as JSON."""
    file.write_text(json.dumps(report, indent=1, default=dataclasses.asdict) + "\n")


def portable(argument: object) -> str:
    """Return an argument without the folders of this machine: an absolute path becomes relative, or only a name."""
    path = Path(str(argument))
    if not path.is_absolute():
        return str(argument)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def describe_machine() -> dict[str, Any]:
    """Describe the CPU, its matrix instructions, the usable CPUs, and the versions of the numerical packages."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # /proc exists only on Linux
        text = ""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text, flags=re.MULTILINE))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    family = [f"{name} {fields[name]}" for name in ("cpu family", "model", "stepping") if name in fields]
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "family": ", ".join(family),
        "cpus": usable_cpus(),
        "flags": [flag for flag in flags if MATRIX_FLAGS.fullmatch(flag)],
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def load_average() -> float:
    """Return the mean number of runnable processes over the last minute."""
    return os.getloadavg()[0]


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and its living descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            children.setdefault(int(_stat(path)[1]), []).append(int(path.parent.name))
    found = [pid]
    for parent in found:  # the loop appends to this list
        found += children.get(parent, ())
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process, its descendants and their ended children have used so far."""
    ticks = 0
    for process in process_tree(pid):
        with suppress(OSError):
            # utime, stime, cutime and cstime
            ticks += sum(map(int, _stat(Path(f"/proc/{process}/stat"))[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(path: Path) -> list[str]:
    """Read the fields of /proc/PID/stat after the program's name. The name is in brackets and may contain spaces."""
    return path.read_text().rpartition(")")[2].split()


class OtherWork:
    """Measures the share of CPU time that processes outside this process tree use. The times come from /proc/stat.

    The load average does not show this share, because the load average includes the benchmark itself.
    """

    def __init__(self) -> None:
        """Read the first CPU times."""
        self._before = self._read()

    def share(self) -> float | None:
        """Return the share since this object was created, from 0 to 1, or None if the system reports no CPU times."""
        before, now = self._before, self._read()
        if before is None or now is None:
            return None
        total, busy, own = (b - a for a, b in zip(before, now, strict=True))
        return min(max(0.0, busy - own) / total, 1.0) if total else 0.0

    def _read(self) -> tuple[float, float, float] | None:
        """Return three times in seconds: all CPU time, busy CPU time, and CPU time of this process tree.

        Return None if /proc/stat does not exist.
        """
        try:
            # user, nice, system, idle, iowait, irq, softirq, steal
            times = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        return sum(times) / ticks, sum(times[i] for i in BUSY_FIELDS) / ticks, cpu_seconds(os.getpid())


def peak_bytes(pid: int) -> int:
    """Return the sum of the peak resident memory of a process and its living descendants, in bytes."""
    peak = 0
    for process in process_tree(pid):
        with suppress(OSError):  # the process has ended
            status = Path(f"/proc/{process}/status").read_text()
            found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
            peak += 1024 * int(found[1]) if found else 0
    return peak
