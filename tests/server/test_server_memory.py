"""What the garbage collector searches, and what is given back."""

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from encserve_server import app, memory
from encserve_server.errors import StartupError
from encserve_server.settings import Settings


class Node:
    """Something that only the cycle collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def unsettled() -> Iterator[None]:
    """Before a server starts, and again after the test."""
    assert gc.get_freeze_count() == 0
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unsettled")
def test_what_was_there_at_the_start_is_not_searched() -> None:
    memory.settle()
    was_there = gc.get_freeze_count()
    gc.collect()
    assert gc.get_freeze_count() == was_there > 10_000
    assert len(gc.get_objects()) < was_there / 10


@pytest.mark.usefixtures("unsettled")
def test_garbage_of_a_model_that_goes_is_found_all_the_same() -> None:
    """It was there when the server started, and nobody would look at it again."""
    node = Node()
    found = weakref.ref(node)
    memory.settle()
    del node
    gc.collect()
    assert found() is not None
    memory.give_back()
    assert found() is None
    assert gc.get_freeze_count() > 10_000  # and the rest is left alone again


@pytest.mark.usefixtures("unsettled")
def test_before_the_start_nothing_is_set_aside() -> None:
    """So that what a failed load leaves is searched like everything else."""
    memory.give_back()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("error", [None, StartupError("no model")])
async def test_the_server_settles_when_it_has_started(
    error: StartupError | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    happened: list[str] = []

    async def start(_: app.App) -> None:
        happened.append("start")
        if error is not None:
            raise error

    def settle() -> None:
        happened.append("settle")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(app.App, "start", start)
    monkeypatch.setattr(memory, "settle", settle)
    status = await asyncio.wait_for(app.serve(Settings(model_repository=tmp_path)), 60)
    assert (happened, status) == ((["start", "settle"], 0) if error is None else (["start"], 1))
