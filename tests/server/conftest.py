"""Servers with a fake engine, for the tests of this folder."""

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fake_server import FakeServer, StartServer, start_fake_server
from tiny_bundle import write_bundle
from tiny_heads import Serve, loader, words


def pytest_itemcollected(item: pytest.Item) -> None:
    """Runs tests with a fixture `shared…`, a server of the whole file, in the event loop of that server."""
    if any(name.startswith("shared") for name in getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest.fixture(scope="module", autouse=True)
def _stop_at_once() -> Iterator[None]:
    """A server refuses new calls for some seconds before it stops; most tests do not need this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("encserve_server.app._REFUSING_SECONDS", 0.0)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeServer]:
    """One server for the tests of a file that do not change it. `SHARED_SETTINGS` of the file are its settings."""
    settings = getattr(request.module, "SHARED_SETTINGS", {})
    server = await start_fake_server(tmp_path_factory.mktemp("shared"), **settings)
    yield server
    await server.stop()


@pytest.fixture
async def start_server(tmp_path: Path) -> AsyncIterator[StartServer]:
    """Starts servers; keyword arguments are settings. All are stopped at the end."""
    servers: list[FakeServer] = []

    async def start(*args: Any, **settings: Any) -> FakeServer:
        servers.append(await start_fake_server(tmp_path, *args, **settings))
        return servers[-1]

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def server(start_server: StartServer) -> FakeServer:
    """One server with the default settings."""
    return await start_server()


@pytest.fixture
def serve(start_server: StartServer, tmp_path: Path) -> Serve:
    """Serves a tiny bundle; takes its files, the parts of its manifest, and the settings of the server."""

    async def start(
        files: Mapping[str, bytes], settings: Mapping[str, Any] | None = None, engine: Any = "onnxruntime", **parts: Any
    ) -> FakeServer:
        bundle = write_bundle(tmp_path / "bundles", tokenizer=words(), files=files, **parts)

        chosen: dict[str, Any] = {"model": ("tiny@1",), "tune_batches": False, **(settings or {})}
        return await start_server(load=loader(bundle, engine), **chosen)

    return start
