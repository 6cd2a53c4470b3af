"""Servers with a fake engine, for the tests of this folder."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, StartServer, start_fake_server
from tiny_bundle import write_bundle
from tiny_heads import Serve, loader, words


@pytest.fixture(autouse=True)
def _stop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers stop without a pause in which they refuse new calls."""
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 0.0)


@pytest.fixture
async def start_server(tmp_path: Path) -> AsyncIterator[StartServer]:
    """Starts servers, which stop after the test; keyword arguments are settings."""
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


@pytest.fixture
def serve(start_server: StartServer, tmp_path: Path) -> Serve:
    """Serves a tiny bundle with these files and parts of its manifest; `settings` are server settings."""

    async def start(
        files: Mapping[str, bytes], settings: Mapping[str, Any] | None = None, engine: Any = "onnxruntime", **parts: Any
    ) -> FakeServer:
        bundle = write_bundle(tmp_path / "bundles", tokenizer=words(), files=files, **parts)

        chosen: dict[str, Any] = {"model": ("tiny@1",), "tune_batches": False, **(settings or {})}
        return await start_server(load=loader(bundle, engine), **chosen)

    return start
