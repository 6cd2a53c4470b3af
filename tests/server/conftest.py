"""Fixtures of servers with a fake engine, for the tests of this folder."""

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fake_server import FakeServer, StartServer, start_fake_server
from tiny_bundle import write_bundle
from tiny_heads import SERVE_TINY, Serve, loader, words

from encserve_server.models.tokenizing import TextTokenizer


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run a test that uses a fixture `shared…` in its module's event loop, because the shared server runs there."""
    if any(name.startswith("shared") for name in getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest.fixture(scope="module", autouse=True)
def _short_waits() -> Iterator[None]:
    """Shorten the pause between two health checks of the engine, and two pauses during a stop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("encserve_server.app._REFUSING_SECONDS", 0.0)
        patch.setattr("encserve_server.app._STOP_SECONDS", 0.1)
        patch.setattr("encserve_server.transport.grpc.health._POLL_SECONDS", 0.05)
        yield


def settings_of(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the `SHARED_SETTINGS` of the test's module, or an empty dictionary if the module has none."""
    settings: dict[str, Any] = getattr(request.module, "SHARED_SETTINGS", {})
    return settings


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeServer]:
    """Start one server with the module's `SHARED_SETTINGS`. All tests that do not change the server share this server.

    The engine is fake, unless the module has a `SHARED_BUNDLE` with the arguments of `write_bundle`.
    """
    directory, settings = tmp_path_factory.mktemp("shared"), settings_of(request)
    parts = getattr(request.module, "SHARED_BUNDLE", None)
    if parts is not None:
        bundle = write_bundle(directory / "bundles", tokenizer=words(), **parts)
        settings = {**SERVE_TINY, **settings, "load": loader(bundle)}
    server = await start_fake_server(directory, **settings)
    yield server
    await server.stop()


@pytest.fixture
async def start_server(tmp_path: Path) -> AsyncIterator[StartServer]:
    """Return a function that starts a server with the given settings. All servers stop at the end of the test."""
    servers: list[FakeServer] = []

    async def start(*args: Any, **settings: Any) -> FakeServer:
        servers.append(await start_fake_server(tmp_path, *args, **settings))
        return servers[-1]

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def server(request: pytest.FixtureRequest, start_server: StartServer) -> FakeServer:
    """Start a server for one test, with the `SHARED_SETTINGS` of the test's module."""
    return await start_server(**settings_of(request))


@pytest.fixture
def serve(start_server: StartServer, tmp_path: Path) -> Serve:
    """Return a function that starts a server with a tiny bundle.

    The function takes the files of the bundle, the settings of the server, the engine, and parts of the manifest.
    """

    async def start(
        files: Mapping[str, bytes], settings: Mapping[str, Any] | None = None, engine: Any = "onnxruntime", **parts: Any
    ) -> FakeServer:
        bundle = write_bundle(tmp_path / "bundles", tokenizer=words(), files=files, **parts)
        return await start_server(load=loader(bundle, engine), **{**SERVE_TINY, **(settings or {})})

    return start


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[int], threading.Event]]:
    """Return a list and an event. The tokenizer adds the length of each text to the list, and waits for the event."""
    lengths: list[int] = []
    go_on = threading.Event()
    real = TextTokenizer.tokenize

    def tokenize(self: TextTokenizer, texts: Sequence[str], max_tokens: int, *, details: bool) -> Any:
        lengths.extend(map(len, texts))
        assert go_on.wait(60)
        return real(self, texts, max_tokens, details=details)

    monkeypatch.setattr(TextTokenizer, "tokenize", tokenize)
    yield lengths, go_on
    go_on.set()
