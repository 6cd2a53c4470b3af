"""Calls of the HTTP routes of a fake server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fake_server import FakeServer


def connect(server: FakeServer) -> httpx.AsyncClient:
    """A client of a server's HTTP port. It reads no proxies and no certificates, because that is slow."""
    url = f"http://127.0.0.1:{server.app.http_port}"
    return httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=30)  # noqa: S501


async def post(server: FakeServer, path: str, body: Any) -> httpx.Response:
    """Sends JSON, or raw bytes."""
    async with connect(server) as client:
        if isinstance(body, bytes):
            return await client.post(path, content=body)
        return await client.post(path, json=body)


async def get(server: FakeServer, path: str) -> httpx.Response:
    """Asks for a path."""
    async with connect(server) as client:
        return await client.get(path)


@contextlib.asynccontextmanager
async def raw(server: FakeServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A plain TCP connection, for bytes that no HTTP library sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.app.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
