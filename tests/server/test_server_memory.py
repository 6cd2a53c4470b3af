"""Tests of the memory limit of a container, and of the objects that the garbage collector skips."""

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
from encserve_server.system import memory
from encserve_server.telemetry import logs


class Node:
    """An object that only the cycle collector can free."""

    def __init__(self) -> None:
        self.reference = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


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
    """gRPC frees the memory of connections, streams and watches some time after their end."""
    trims: list[int] = []
    monkeypatch.setattr(app, "_TRIM_SECONDS", 0.01)
    monkeypatch.setattr(memory, "trim", lambda: trims.append(1))
    await start_server()
    await until(lambda: len(trims) > 2)


@pytest.mark.parametrize("limit", ["268435456\n", "max\n", "9223372036854771712\n", None])
def test_a_containers_limit_is_the_usable_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    """The usable memory is the container's limit, or the machine's memory without a limit.

    A file of cgroup v2 or v1 has the limit. Without a limit, the file has "max" in v2, and a huge number in v1.
    """
    if limit is not None:
        (tmp_path / "limit").write_text(limit)
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (tmp_path / "nowhere", tmp_path / "limit"))
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.usable_bytes() == (268435456 if limit == "268435456\n" else machine)
