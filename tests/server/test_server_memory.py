"""Tests of the limits of cgroups on memory and CPUs, and of the objects that the garbage collector skips."""

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_server import StartServer
from waiting import until

from encserve_server import app
from encserve_server.__main__ import main
from encserve_server.settings import Settings
from encserve_server.system import cpus, memory
from encserve_server.telemetry import logs


class Node:
    """An object that only the cycle collector can free."""

    def __init__(self) -> None:
        self.reference = self


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Run a test without frozen objects. Then freeze the existing objects again, as for all tests."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("unfrozen")
def test_the_collector_skips_the_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`main` freezes the objects of imported libraries before any model is loaded.

    So the garbage collector skips the libraries, but can still free the objects of a model.
    """
    frozen: list[int] = []

    async def serve(_settings: Settings, _log: object) -> int:
        frozen.append(gc.get_freeze_count())
        return 0

    monkeypatch.setattr("encserve_server.__main__.serve", serve)
    monkeypatch.setattr("encserve_server.__main__.exit_process", lambda _: None)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    CliRunner().invoke(main, ["--model-repository", str(tmp_path)], catch_exceptions=False)
    assert frozen[0] > 10_000


@pytest.mark.usefixtures("unfrozen")
def test_later_objects_are_freed() -> None:
    memory.freeze_gc()
    node = Node()
    found = weakref.ref(node)
    del node
    memory.give_back()
    assert found() is None


async def test_a_server_without_calls_returns_memory(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server returns freed memory to the system every few seconds, even without calls.

    gRPC frees the memory of connections, streams and watches some time after their end.
    """
    trims: list[int] = []
    monkeypatch.setattr(app, "_TRIM_SECONDS", 0.01)
    monkeypatch.setattr(memory, "trim", lambda: trims.append(1))
    await start_server()
    await until(lambda: len(trims) > 2)


MACHINE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB_64, MIB_128 = 67108864, 134217728
UNLIMITED = 9223372036854771712  # this number means "no limit" in cgroup v1


@pytest.mark.parametrize(
    ("own", "limits", "wanted"),
    [
        ("0::/", {"memory.max": MIB_128}, MIB_128),
        ("0::/", {"memory.max": "max"}, MACHINE_BYTES),
        ("0::/", {}, MACHINE_BYTES),
        (None, {"memory.max": MIB_128}, MIB_128),
        ("0::/system.slice/encserve.service", {"system.slice/encserve.service/memory.max": MIB_128}, MIB_128),
        (
            "0::/system.slice/encserve.service",
            {"system.slice/encserve.service/memory.max": "max", "system.slice/memory.max": MIB_64},
            MIB_64,
        ),
        ("0::/system.slice/encserve.service", {"system.slice/other.service/memory.max": MIB_64}, MACHINE_BYTES),
        ("0::/../outside", {"memory.max": MIB_128}, MIB_128),
        ("5:cpu,memory:/docker/x\n0::/", {"memory/memory.limit_in_bytes": MIB_128}, MIB_128),
        ("5:cpu,memory:/a.slice\n0::/", {"memory/a.slice/memory.limit_in_bytes": MIB_64}, MIB_64),
        ("5:memory:/\n0::/", {"memory/memory.limit_in_bytes": UNLIMITED}, MACHINE_BYTES),
    ],
)  # fmt: skip
def test_the_limits_of_all_cgroups_bound_the_usable_memory(
    tmp_path: Path, own: str | None, limits: dict[str, int | str], wanted: int
) -> None:
    """The limit of a container is in the top folder that the container sees.

    The limit MemoryMax= of systemd is in the cgroup of the service.

    Without a limit, a file has "max" in cgroup v2, and a huge number in v1.
    """
    write_cgroups(tmp_path, own, limits)
    assert memory.usable_bytes(tmp_path) == min(wanted, MACHINE_BYTES)


@pytest.mark.parametrize(
    ("own", "quotas", "wanted"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/", {"cpu.max": ""}, 64),
        (None, {}, 64),
        ("0::/system.slice/encserve.service", {"system.slice/encserve.service/cpu.max": "300000 100000"}, 3),
        (
            "0::/a.slice/b.service",
            {"a.slice/b.service/cpu.max": "300000 100000", "a.slice/cpu.max": "200000 100000"},
            2,
        ),
    ],
)  # fmt: skip
def test_the_quotas_of_all_cgroups_bound_the_usable_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, quotas: dict[str, int | str], wanted: int
) -> None:
    write_cgroups(tmp_path, own, quotas)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert cpus.usable_cpus(tmp_path) == wanted


def write_cgroups(root: Path, own: str | None, files: dict[str, int | str]) -> None:
    """Write /proc/self/cgroup and files of /sys/fs/cgroup below a folder."""
    if own is not None:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(f"{own}\n")
    for path, text in files.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
