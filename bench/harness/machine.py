"""What the machine is, and whether it was quiet."""

import os
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from encserve_server.system.cpus import usable_cpus

PACKAGES = ("onnxruntime", "torch", "grpcio", "numpy")
# Instructions that decide how fast a matrix product is.
WIDE = re.compile(r"avx2|fma|avx512(f|_bf16|_fp16|_vnni)|avx_vnni|amx_\w+|asimd\w*|sve\w*|i8mm|bf16")
# Fields of /proc/stat's first line: user, nice, system, and what the host took away. Interrupts are left out, since
# those of a loopback connection are of our own making.
BUSY = (0, 1, 2, 7)


def describe_machine() -> dict[str, Any]:
    """The CPU, how many of them this process may use, what they can do, and the versions of what computes."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        text = ""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text, flags=re.MULTILINE))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    family = [f"{name} {fields[name]}" for name in ("cpu family", "model", "stepping") if name in fields]
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "family": ", ".join(family),
        "cpus": usable_cpus(),
        "flags": [flag for flag in flags if WIDE.fullmatch(flag)],
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def load_average() -> float:
    """How many processes ran or wanted to, over the last minute."""
    return os.getloadavg()[0]


def process_tree(pid: int) -> list[int]:
    """A process and all that descend from it, as far as Linux's books name them."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            children.setdefault(int(_stat(path)[1]), []).append(int(path.parent.name))
    found = [pid]
    for it in found:  # grows while it is read
        found += children.get(it, ())
    return found


def cpu_seconds(pid: int) -> float:
    """What a process and all that descend from it have computed so far, those included that have ended."""
    ticks = 0
    for its in process_tree(pid):
        with suppress(OSError):
            # Its own time and that of its children who have ended, each in user and system mode.
            ticks += sum(map(int, _stat(Path(f"/proc/{its}/stat"))[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(path: Path) -> list[str]:
    """What Linux's books say of a process behind its name, which stands in brackets and may hold spaces."""
    return path.read_text().rpartition(")")[2].split()


class OtherWork:
    """Tells which share of the CPUs others have used, from Linux's own books.

    The load average cannot tell it: after a few minutes of a benchmark it holds the benchmark itself.
    """

    def __init__(self) -> None:
        """Begins."""
        self._began = self._read()

    def share(self) -> float | None:
        """From 0 to 1, of all CPUs since the beginning; None where it cannot be known."""
        began, now = self._began, self._read()
        if began is None or now is None:
            return None
        total, busy, own = (b - a for a, b in zip(began, now, strict=True))
        return min(max(0.0, busy - own) / total, 1.0) if total else 0.0

    def _read(self) -> tuple[float, float, float] | None:
        """CPU seconds so far: of all CPUs in all, busy, and ours."""
        try:
            # user, nice, system, idle, iowait, irq, softirq, steal
            times = [int(it) for it in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        return sum(times) / ticks, sum(times[i] for i in BUSY) / ticks, cpu_seconds(os.getpid())


def peak_bytes(pid: int) -> int:
    """The most memory that a process, and each that descends from it and is alive, ever had resident, summed."""
    peak = 0
    for it in process_tree(pid):
        with suppress(OSError):  # it has ended meanwhile
            found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{it}/status").read_text(), re.MULTILINE)
            peak += 1024 * int(found[1]) if found else 0
    return peak
