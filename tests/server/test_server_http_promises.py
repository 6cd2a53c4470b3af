"""Tests of HTTP: overload, callers that disconnect, errors, stops of the server, and bytes that are not HTTP."""

import asyncio
import contextlib
import gzip
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from fake_server import D_MODEL, FakeServer, StartServer, fake_model
from http_calls import connect, get, post, raw
from waiting import until

from encserve_server.app import App
from encserve_server.models.turns import FairThreadPool
from encserve_server.repository.loaded import LoadedModel
from encserve_server.settings import Settings

ROUTES = {"/v1/embeddings": "input", "/embed": "inputs", "/embed_all": "inputs"}
BOTH = ("/v1/embeddings", "/embed")


SHARED_SETTINGS = {"http_port": 0}


def body(path: str, inputs: Any) -> dict[str, Any]:
    """Return the JSON body of a request with these inputs.

    For OpenAI's route, `add_special_tokens` is false, so that ids without special tokens are accepted.
    """
    complete = {"add_special_tokens": False} if path == "/v1/embeddings" and not isinstance(inputs, str) else {}
    return {ROUTES[path]: inputs, **complete}


def counted(server: FakeServer, path: str, status: int) -> float:
    """Return the number of replies of a route with this status."""
    return server.sample("encserve_http_requests_total", route=f"POST {path}", status=str(status))


@pytest.mark.parametrize("path", ROUTES)
async def test_a_full_queue(start_server: StartServer, path: str) -> None:
    server = await start_server(http_port=0, max_queue_tokens=32)
    async with server.queue_of(30):
        refused = await post(server, path, body(path, [[1, 2, 3, 4]]))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert 0 < int(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"])
    assert refused.headers["encserve-error-reason"] == "QUEUE_FULL"
    error = refused.json()
    if path == "/v1/embeddings":
        assert (error["error"]["type"], error["error"]["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    else:
        assert error["error_type"] == "Overloaded"
    assert counted(server, path, 429) == server.sample("encserve_refused_total", reason="QUEUE_FULL") == 1
    assert (await post(server, path, body(path, "hello"))).status_code == 200


@pytest.mark.parametrize("path", BOTH)
async def test_a_cancelled_request_leaves_the_queue(server: FakeServer, path: str) -> None:
    running = await server.start_held(post(server, path, body(path, [[1]])))
    waiting = asyncio.create_task(post(server, path, body(path, [[2, 2, 2]])))
    await until(lambda: server.queued() == 3)
    waiting.cancel()
    await until(lambda: server.queued() == 0)
    await until(lambda: counted(server, path, 499) == 1)
    assert server.sample("encserve_cancelled_total", model="tiny", version="2", stage="queued") == 1
    assert server.in_flight() == 1
    server.engine.let_go()
    assert (await running).status_code == 200


async def test_a_caller_that_leaves_while_it_sends(server: FakeServer) -> None:
    async with raw(server) as (_, writer):
        writer.write(b'POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"inputs"')
        await writer.drain()
        await until(lambda: server.in_flight() == 1)
    await until(lambda: counted(server, "/embed", 499) == 1)
    assert server.in_flight() == 0


async def test_a_body_that_does_not_arrive(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.ledger.ARRIVAL_SECONDS", 0.05)
    async with raw(server) as (reader, writer):
        writer.write(b'POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"input"')
        answer = await reader.read()  # `read` returns when the connection ends
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"8 bytes came" in answer
    assert server.held_bytes() == 0


@pytest.mark.system  # takes more than a second
async def test_a_caller_that_does_not_read_loses_its_connection(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(http_port=0, max_request_sequences=4000)
    monkeypatch.setattr("encserve_server.transport.http.app.SEND_SECONDS", 0.05)
    monkeypatch.setattr("encserve_server.transport.http.app.BYTES_PER_SECOND", 2**40)
    assert server.app._http is not None
    connections = server.app._http.connections
    text = json.dumps({"inputs": [[1] * 32] * 4000}).encode()  # a reply of 6 MB, larger than the socket buffers
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(caller, ("127.0.0.1", server.app.http_port))
        await loop.sock_sendall(
            caller, b"POST /embed_all HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text)
        )
        await until(lambda: counted(server, "/embed_all", 200) == 1)
        assert len(connections) == 1
        assert server.held_bytes() > 4_000_000
        await until(lambda: not connections)
    assert server.held_bytes() == server.in_flight() == 0


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
        b"GET /" + b"x" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",  # sent by a gRPC client on the wrong port
    ],
)
async def test_bytes_that_are_not_http(shared: FakeServer, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with raw(shared) as (reader, writer):
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.0 400")
    assert not caplog.records
    assert (await get(shared, "/health")).status_code == 200


async def test_a_head_over_the_limit(shared: FakeServer) -> None:
    head = b"GET /info HTTP/1.1\r\nhost: x\r\n" + b"x: %s\r\n" % (b"y" * 8000)
    async with raw(shared) as (reader, writer):
        writer.write(head + b"\r\n" + head + b"z: y\r\n" * 50 + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write(head + b"x: %s\r\n" % (b"y" * 8000) * 8 + b"\r\n")
        assert b"HTTP/1.1 431" in await reader.read()


TEXT = b'{"inputs": "hello"}'
POST = b"POST /embed HTTP/1.1\r\nhost: x\r\n"
LENGTH = b"content-length: %d\r\n\r\n%s" % (len(TEXT), TEXT)
OFFERING = (
    POST + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n" + LENGTH
)


@pytest.mark.parametrize("parts", [1, 2, 3])
async def test_an_offer_of_http_2_is_answered_with_http_1(shared: FakeServer, parts: int) -> None:
    """Java's HTTP client offers HTTP/2 in its first request."""
    end = len(OFFERING)
    cuts = {1: [end], 2: [end - len(TEXT), end], 3: [40, end - 5, end]}[parts]
    async with raw(shared) as (reader, writer):
        for _ in range(3):
            for begin, stop in zip([0, *cuts], cuts, strict=False):
                writer.write(OFFERING[begin:stop])
                await writer.drain()
                await asyncio.sleep(0.01)  # with this pause, the server receives each part separately
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"\r\n\r\n[[0.5,0.5,0.5,0.5]]")


async def test_a_request_behind_an_offer_of_http_2(shared: FakeServer) -> None:
    """If a second request follows an offer of HTTP/2 immediately, the server answers only the first request.

    Then the server closes the connection, so that the caller can send the second request again.
    """
    async with raw(shared) as (reader, writer):
        writer.write(OFFERING * 2)
        replies = await reader.read()
    assert replies.count(b"HTTP/1.1 200") == 1
    assert b"Connection: close" in replies


async def test_a_reply_to_head_has_no_body(shared: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.transport.http.app.TURN_BYTES", 16)
    async with raw(shared) as (reader, writer):
        for _ in range(2):
            writer.write(b"HEAD /info HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"content-length: 0" not in head.lower()


async def test_an_engine_that_fails(start_server: StartServer) -> None:
    server = await start_server(FakeEngine(D_MODEL, poison=666), http_port=0)
    for path, code, kind in zip(BOTH, (500, 424), ("server_error", "Backend"), strict=True):
        refused = await post(server, path, body(path, [[666]]))
        assert refused.status_code == code
        assert kind in refused.text
        assert f"{ROUTES[path]}[0]: " in refused.text
    server.engine.broken = True
    while (refused := await post(server, "/embed", body("/embed", [[1]]))).status_code == 424:
        pass
    assert (refused.status_code, refused.json()["error_type"]) == (503, "Unhealthy")
    assert refused.headers["retry-after"] == "1"
    refused = await post(server, "/v1/embeddings", body("/v1/embeddings", [[1]]))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unhealthy")
    await until(lambda: not server.app._is_serving())
    assert (await get(server, "/health")).status_code == 503


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "GZIP, identity"])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/v2/models/tiny/infer"])
async def test_a_compressed_body_is_refused(shared: FakeServer, path: str, encoding: str) -> None:
    """A compressed body is refused with the status 415.

    Without this check, the error would be "not valid JSON".
    """
    refused = await post(shared, path, gzip.compress(b'{"input": "hello"}'), headers={"content-encoding": encoding})
    assert (refused.status_code, refused.headers["encserve-error-reason"]) == (415, "UNSUPPORTED_ENCODING")
    assert f"Content-Encoding must be absent or identity; was '{encoding}'" in refused.text
    plain = await post(shared, "/embed", b'{"inputs": "hello"}', headers={"content-encoding": "identity"})
    assert plain.status_code == 200


async def test_an_unexpected_error(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("encserve_server.models.served.ServedModel.prepare", explode)
    for path in BOTH:
        refused = await post(server, path, body(path, "hello"))
        assert refused.status_code == 500
        assert "secret" not in refused.text
        error_id = re.search("id ([0-9a-f]{16})", refused.text)
        assert error_id
        assert error_id[1] in [getattr(it, "error_id", "") for it in caplog.records]
    assert server.sample("encserve_refused_total", reason="INTERNAL") == 2


async def test_requests_before_the_models_are_loaded(tmp_path: Path) -> None:
    loading = asyncio.Event()
    loop = asyncio.get_running_loop()
    (tmp_path / "tiny" / "1").mkdir(parents=True)
    (tmp_path / "tiny" / "1" / "manifest.json").touch()

    def load(directory: Path, settings: Settings, tokenize_pool: FairThreadPool, served: str) -> LoadedModel:
        del settings
        asyncio.run_coroutine_threadsafe(loading.wait(), loop).result()
        return fake_model(directory, tokenize_pool, FakeEngine(D_MODEL))

    app = App(Settings(model_repository=tmp_path, grpc_port=0, metrics_port=0, http_port=0), load)
    server = FakeServer(app, None, None, None)  # type: ignore[arg-type]
    starting = asyncio.create_task(app.start())
    await until(lambda: app.http_port)
    for path in BOTH:
        refused = await post(server, path, body(path, [[1]]))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (await get(server, "/info")).status_code == (await get(server, "/health")).status_code == 503
    loading.set()
    await starting
    await until(app._is_serving)
    assert (await get(server, "/health")).status_code == 200
    await app.stop()


async def test_a_stop_answers_the_requests_in_flight(server: FakeServer) -> None:
    """During a stop, the server answers running requests and refuses new requests. Then the port closes."""
    server.engine.hold()
    calls = [asyncio.create_task(post(server, path, body(path, [[i + 1]]))) for path in ROUTES for i in range(10)]
    await until(lambda: server.in_flight() == 30)
    async with connect(server) as client:
        assert (await client.get("/health")).status_code == (await client.head("/health")).status_code == 200
        stopping = asyncio.create_task(server.app.stop())
        await until(server.app._calls.draining.is_set)
        assert (await client.get("/health")).status_code == (await client.head("/health")).status_code == 503
        for path in BOTH:
            refused = await client.post(path, json=body(path, "hello"))
            assert (refused.status_code, refused.headers["encserve-error-reason"]) == (503, "DRAINING")
            assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
    server.engine.let_go()
    assert [call.status_code for call in await asyncio.gather(*calls)] == [200] * 30
    assert await stopping
    with pytest.raises(OSError, match="refused|Connect"):
        await asyncio.open_connection("127.0.0.1", server.app.http_port)


async def test_requests_at_the_end_of_the_grace_period_are_refused(start_server: StartServer) -> None:
    server = await start_server(http_port=0, grace_seconds=0.2)
    call = await server.start_held(post(server, "/embed", body("/embed", [[1]])))
    async with raw(server) as (reader, writer):
        writer.write(b'POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"inputs"')
        await until(lambda: server.in_flight() == 2)
        stopping = asyncio.create_task(server.app.stop())
        assert (await reader.readline()).startswith(b"HTTP/1.1 503")
    refused = await call
    assert (refused.status_code, refused.headers["encserve-error-reason"]) == (503, "DRAINING")
    server.engine.let_go()
    await stopping


async def test_requests_are_counted_by_route_and_status_only(server: FakeServer) -> None:
    for path in BOTH:
        assert counted(server, path, 200) == counted(server, path, 429) == 0
        await post(server, path, body(path, "hello"))
        assert counted(server, path, 200) == 1
        assert server.sample("encserve_http_request_seconds_count", route=f"POST {path}") == 1
    before = sum(1 for metric in server.app.registry.collect() for _ in metric.samples)
    await get(server, "/made-up")
    await post(server, "/embed", {"inputs": "hello", "model": "made-up"})
    await get(server, "/health")
    assert sum(1 for metric in server.app.registry.collect() for _ in metric.samples) == before
    assert server.sample("encserve_response_bytes_count", model="tiny", version="2") == 2


@pytest.mark.system
@pytest.mark.parametrize("package", ["aiohttp", "msgspec", "orjson"])
def test_a_missing_extra_is_named(package: str) -> None:
    program = f"""
import sys
sys.modules["{package}"] = None
from encserve_server.app import _import_http
try:
    _import_http()
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    wanted = f'StartupError --http-port needs {package}: pip install "encserve[http]"'
    assert done.stdout.strip() == wanted, done
