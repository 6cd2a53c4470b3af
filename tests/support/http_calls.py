"""Calls of the HTTP routes of a fake server."""

from typing import Any

import httpx
from fake_server import FakeServer


def connect(server: FakeServer) -> httpx.AsyncClient:
    """A client of a server's HTTP port, without proxies and certificates, which take longer to read than an answer."""
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
