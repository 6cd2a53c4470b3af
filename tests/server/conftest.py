"""Servers with a fake engine, for the tests of this folder."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, StartServer, start_fake_server


@pytest.fixture(autouse=True)
def _stop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers refuse new calls for a moment before they stop; most tests have nobody to refuse."""
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 0.0)


@pytest.fixture
async def start_server(tmp_path: Path) -> AsyncIterator[StartServer]:
    """Starts servers; keyword arguments are settings. All are stopped at the end."""
    servers: list[FakeServer] = []

    async def start(*args: Any, **settings: Any) -> FakeServer:
        servers.append(await start_fake_server(tmp_path, *args, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.engine.let_go()
        server.inspector.let_go()
        await server.channel.close()
        await server.app.stop()


@pytest.fixture
async def server(start_server: StartServer) -> FakeServer:
    """One server with the default settings."""
    return await start_server()
