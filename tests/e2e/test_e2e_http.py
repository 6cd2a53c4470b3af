"""Tests HTTP on a real server with a real model: too many calls, callers that disconnect, and SIGTERM."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from checkpoints import MODEL
from real_server import RealServer, real_server

TEXTS = ["a cat", "The quick brown fox jumps over the lazy dog.", "Überraschung 🌍", "licence " * 40]


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[RealServer]:
    with real_server(models, "--model", MODEL, "--http-port", "0", "--max-queue-tokens", "4000") as server:
        yield server


def connect(server: RealServer) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60, limits=limits)


async def test_too_many_calls_are_answered_or_refused(server: RealServer) -> None:
    """Send too many calls, and cancel every fifth call. All other calls get a reply or status 429.

    At the end, the queue is empty, and no request is in flight.
    """
    body = {"inputs": ["licence " * 100] * 4}
    async with connect(server) as http:
        calls = [asyncio.create_task(http.post("/embed", json=body)) for _ in range(60)]
        await asyncio.sleep(0.2)
        for call in calls[::5]:
            call.cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        seen = Counter(it.status_code if isinstance(it, httpx.Response) else type(it).__name__ for it in done)
        assert set(seen) <= {200, 429, "CancelledError"}
        assert seen[200] > 0
        assert seen[429] > 0
        assert all("retry-after" in it.headers for it in done if isinstance(it, httpx.Response) and it.is_error)
        assert (await http.post("/embed", json={"inputs": TEXTS})).status_code == 200
    assert server.metric("encserve_queue_tokens") == 0
    assert server.metric("encserve_in_flight_requests") == 0


def test_callers_that_disconnect_leave_no_traceback(server: RealServer) -> None:
    """Callers disconnect before they have read all replies. The server logs nothing about these callers."""
    lines = len(server.log)
    body = b'{"inputs": [[101, 102]]}'
    one = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    for i in range(60):
        with socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port or 0)) as caller:
            caller.sendall(one * 3)
            caller.recv(64)  # reads only the start of the three replies
            time.sleep(i % 10 / 2000)
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        assert http.post("/embed", json={"inputs": TEXTS}).status_code == 200
    # The logger call_log writes some seconds after a call. So lines of call_log may be about an earlier test.
    logged = [line for line in server.log[lines:] if line["logger"] != "encserve_server.telemetry.call_log"]
    assert logged == []
    assert server.metric("encserve_in_flight_requests") == 0


async def test_sigterm_loses_no_accepted_request(models: Path) -> None:
    """After SIGTERM, the server answers all accepted requests. Later requests get status 503.

    After a 503 reply, the server closes the connection.
    """
    with real_server(models, "--model", MODEL, "--http-port", "0") as server:
        async with connect(server) as http:

            async def call_until_refused() -> Counter[int]:
                seen: Counter[int] = Counter()
                while 503 not in seen:
                    response = await http.post("/embed", json={"inputs": ["licence " * 100] * 4})
                    seen[response.status_code] += 1
                    if response.status_code == 503:
                        assert response.headers["connection"] == "close"
                return seen

            callers = [asyncio.create_task(call_until_refused()) for _ in range(16)]
            while server.metric("encserve_http_requests_total", route="POST /embed", status="200") < 16:
                await asyncio.sleep(0.05)
            server.terminate()
            for seen in await asyncio.gather(*callers):
                assert set(seen) == {200, 503}
                assert seen[503] == 1
        assert server.wait() == 0
        messages = [line["message"] for line in server.log if line["message"] != "calls were refused, or failed"]
        assert messages[-2:] == ["stopping", "stopped"]
