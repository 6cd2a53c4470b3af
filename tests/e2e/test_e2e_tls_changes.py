"""The certificate of a server changes a hundred times under load. No call fails."""

import asyncio
import contextlib
import itertools
import ssl
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import Certificates, Mount, make_certificates, served
from real_server import RealServer, real_server
from tiny_bundle import write_bundle
from tiny_heads import words

from encserve_client import AsyncEncoderClient, RetryPolicy, Tls

CHANGES, CALLERS = 100, 32
# This program is encserve-server with one change: it looks for new certificates every 0.02 s instead of every second.
PROGRAM = f"""#!{sys.executable}
from encserve_server.__main__ import main
from encserve_server.system import certificates

certificates.POLL_SECONDS = 0.02
main()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "encserve-server"
    path.write_text(PROGRAM)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


async def test_no_call_fails(tmp_path: Path, program: Path) -> None:
    """Change the certificate while callers make calls. Every call succeeds, although the clients do not retry.

    Half of the callers open a new connection for every call. The other callers keep one connection.
    """
    made = make_certificates(tmp_path)
    pairs = [made.authority.issue(f"server-{i}") for i in range(4)]
    mount = Mount(tmp_path / "mount")
    mount.put(pairs[0], made.ca)
    write_bundle(tmp_path / "models", tokenizer=words())
    flags = ["--http-port", "0", "--tls-cert-file", mount.pair.cert, "--tls-key-file", mount.pair.key]
    with real_server(
        tmp_path / "models", *map(str, flags), "--tls-client-ca-file", str(mount.ca), program=program
    ) as server:
        load = Load(server, made)

        async def shown() -> bytes:
            # If the machine is blocked for 10 s, this handshake may fail. The test then makes another handshake.
            with contextlib.suppress(OSError):
                return await asyncio.to_thread(served, server.http_port or 0, load.context)
            return b""

        async def change() -> None:
            for number in range(1, CHANGES + 1):
                pair = pairs[number % len(pairs)]
                mount.put(pair, made.ca)
                async with asyncio.timeout(30):
                    while await shown() != pair.der():
                        await asyncio.sleep(0.01)

        await load.run(change())
        server.tls = load.context
        loaded = server.metric("encserve_tls_reloads_total", outcome="loaded")
    assert min(load.calls.values()) >= CHANGES, load.calls
    assert loaded == CHANGES + 1
    assert not [line for line in server.log if line["level"] in ("ERROR", "CRITICAL")]


class Load:
    """Callers over HTTP and gRPC. Some open a new connection for each call, and the others keep one connection.

    `calls` has the number of calls of each kind.
    """

    def __init__(self, server: RealServer, made: Certificates) -> None:
        self.calls = dict.fromkeys(("HTTP, new", "HTTP, kept", "gRPC, new", "gRPC, kept"), 0)
        self.context = ssl.create_default_context(cafile=made.ca)
        self.context.load_cert_chain(made.client.cert, made.client.key)
        self.tls = Tls(ca=made.ca, cert=made.client.cert, key=made.client.key, server_name="localhost")
        self.over = asyncio.Event()
        self._server = server
        self._numbers = itertools.count()

    async def run(self, change: Coroutine[Any, Any, None]) -> None:
        """Make calls until `change` returns. If a call fails, raise an ExceptionGroup with the exception."""
        async with asyncio.TaskGroup() as group:
            for kind in self.calls:
                for _ in range(CALLERS // len(self.calls)):
                    group.create_task(self._call(kind))
            await change
            self.over.set()

    async def _call(self, kind: str) -> None:
        while not self.over.is_set():
            async with self._http() if kind.startswith("HTTP") else self._grpc() as call:
                while not self.over.is_set():
                    await call()
                    self.calls[kind] += 1
                    if kind.endswith("new"):
                        break

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
        url = f"https://localhost:{self._server.http_port}/v1/embeddings"
        async with httpx.AsyncClient(verify=self.context, trust_env=False, timeout=60) as client:

            async def call() -> None:
                (await client.post(url, json={"input": "w3 w4"})).raise_for_status()

            yield call

    @contextlib.asynccontextmanager
    async def _grpc(self) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
        # Give each channel a different argument, because gRPC channels with the same arguments share a connection.
        own = {"number": next(self._numbers)}
        once = RetryPolicy(max_attempts=1)
        async with AsyncEncoderClient(self._server.target, tls=self.tls, retry=once, channel_arguments=own) as client:
            yield lambda: client.embed(["w3 w4"])
