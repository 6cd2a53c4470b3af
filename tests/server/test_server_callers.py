"""Tests of keys, the callers file, permissions and rate limits, over gRPC and HTTP."""

# ruff: noqa: ASYNC240 - a small local file does not block the event loop

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from callers_file import entry
from fake_clock import FakeClock
from fake_server import (
    D_MODEL,
    INFER_SERVICE,
    N_HEADS,
    N_LAYERS,
    SERVICE,
    Failed,
    FakeServer,
    StartServer,
    make_input,
    refusal,
    start_fake_server,
)
from grpc_health.v1 import health_pb2
from http_calls import connect, raw
from open_inference import infer_request, text_tensor
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.callers import registry
from encserve_server.callers.file import CallersError
from encserve_server.callers.keys import digest_of
from encserve_server.errors import LimitReached, StartupError, Unauthenticated
from encserve_server.models import parts
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.protocols.open_inference.triton import grpc_service_pb2 as infer_pb
from encserve_server.system import watched_files
from encserve_server.transport.grpc.connections import Peer
from encserve_server.transport.http import app, bodies
from encserve_server.types.callers import Caller, Priority

RIGHT, OTHER, WRONG = "encserve-right-key", "encserve-other-key", "encserve-wrong-key"
Serve = Callable[..., Awaitable[FakeServer]]
EMBEDDINGS = {"input": "hello", "model": "tiny"}


SEARCH = entry("search", RIGHT)
BOTH = SEARCH + entry("other", OTHER)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "callers.toml"


@pytest.fixture
def serve(start_server: StartServer, file: Path) -> Serve:
    """Return a function that starts a server with an HTTP port and a callers file with the given text."""

    async def start(text: str = SEARCH, **settings: Any) -> FakeServer:
        file.write_text(text)
        return await start_server(**{"callers": file, "http_port": 0, **settings})

    return start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_callers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeServer]:
    """Start a server whose callers file has the caller `search`. Tests that do not change the server share it."""
    directory = tmp_path_factory.mktemp("callers")
    (directory / "callers.toml").write_text(SEARCH)
    server = await start_fake_server(directory, callers=directory / "callers.toml", http_port=0)
    yield server
    await server.stop()


@pytest.fixture
def _poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(watched_files, "SETTLE_SECONDS", 0.001)


async def refused(server: FakeServer, method: str = "Encode", data: bytes = b"", **options: Any) -> Failed:
    return await refusal(server.call(method, data, **options))


def bearer(key: str) -> Any:
    return (("authorization", f"Bearer {key}"),)


def by_caller(server: FakeServer, caller: str, outcome: str) -> float:
    labels = {"caller": caller, "outcome": outcome}
    return server.app.registry.get_sample_value("encserve_caller_calls_total", labels) or 0


async def change(server: FakeServer, file: Path, text: str, outcome: str = "loaded") -> None:
    """Write the callers file, and wait until the server has counted a read of the file with this outcome."""
    before = server.sample("encserve_callers_reads_total", outcome=outcome)
    file.write_text(text)
    await until(lambda: server.sample("encserve_callers_reads_total", outcome=outcome) == before + 1)


# Keys


@pytest.mark.parametrize(
    "metadata",
    [
        bearer(RIGHT),
        (("authorization", f"bearer  {RIGHT}"),),
        (("api-key", RIGHT),),
        (("x-api-key", RIGHT),),
        (("authorization", "Basic abc"), ("x-api-key", RIGHT)),
        # OpenAI's client always sends an Authorization header, even if the right key is in another header.
        (
            ("authorization", f"Bearer {WRONG}"),
            ("api-key", RIGHT),
        ),
    ],
)
async def test_a_right_key_is_accepted(shared_callers: FakeServer, metadata: Any) -> None:
    calls, tokens = (
        by_caller(shared_callers, "search", "OK"),
        shared_callers.sample("encserve_caller_tokens_total", caller="search"),
    )
    await shared_callers.encode("hello", metadata=metadata)
    async with connect(shared_callers) as client:
        assert (await client.post("/v1/embeddings", json=EMBEDDINGS, headers=dict(metadata))).status_code == 200
    assert by_caller(shared_callers, "search", "OK") == calls + 2
    assert shared_callers.sample("encserve_caller_tokens_total", caller="search") == tokens + 6


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", f"Bearer {WRONG}"),),
        (("authorization", f"Basic {RIGHT}"),),
        (("authorization", RIGHT),),
        (("api-key", digest_of(RIGHT).hex()),),
        (("x-api-key", RIGHT[:-1]),),
        (("api-key", ""),),
        # The server checks only the first three keys of a call. The right key is the fourth.
        (
            *(("api-key", f"{WRONG}{i}") for i in range(3)),
            ("api-key", RIGHT),
        ),
    ],
)
async def test_a_wrong_key_is_refused_before_the_body_is_parsed(shared_callers: FakeServer, metadata: Any) -> None:
    before = by_caller(shared_callers, "", "UNAUTHENTICATED")
    error = await refused(shared_callers, data=b"\xff no message", metadata=metadata)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    texts = [error.text]
    async with connect(shared_callers) as client:
        for path in ("/v1/embeddings", "/embed", "/v2/embed", "/pooling", "/v2/models/tiny/infer"):
            answer = await client.post(path, content=b"{no JSON", headers=list(metadata))
            assert (answer.status_code, answer.headers["encserve-error-reason"]) == (401, "UNAUTHENTICATED")
            assert answer.headers["www-authenticate"] == "Bearer"
            texts.append(answer.text)
    assert not any(RIGHT[:-1] in text or WRONG in text for text in texts)
    assert by_caller(shared_callers, "", "UNAUTHENTICATED") == before + 6


async def test_refusals_have_the_shape_of_each_protocol(shared_callers: FakeServer) -> None:
    async with connect(shared_callers) as client:
        of_openai = (await client.post("/v1/embeddings", json=EMBEDDINGS)).json()["error"]
        assert (of_openai["type"], of_openai["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "authorization: Bearer" in of_openai["message"]
        assert set((await client.post("/embed", json={"inputs": "hello"})).json()) == {"error", "error_type"}
        assert set((await client.post("/v2/embed", json={})).json()) == {"id", "message"}
        assert set((await client.post("/v2/models/tiny/infer", json={})).json()) == {"error"}


async def test_a_refused_caller_that_sends_no_body_loses_its_connection(
    shared_callers: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_DISCARD_SECONDS", 0.05)
    async with raw(shared_callers) as (reader, writer):
        writer.write(b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n{")
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 401 ")


async def test_a_large_body_without_a_key_is_not_read(shared_callers: FakeServer) -> None:
    async with connect(shared_callers) as client:
        answer = await client.post("/v1/embeddings", content=b"x" * 2**20)
    assert answer.status_code == 401
    assert shared_callers.held_bytes() == 0
    async with raw(shared_callers) as (reader, writer), asyncio.timeout(5):
        writer.write(b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: 30000000\r\nexpect: 100-continue\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("is_together", [True, False])
async def test_a_refused_caller_keeps_its_connection(shared_callers: FakeServer, is_together: bool) -> None:
    """After a refusal, the connection stays open: a new TLS connection costs three times as much as a refusal."""
    body = b'{"input": "hello", "model": "tiny"}'
    async with raw(shared_callers) as (reader, writer):
        for key, status in ((WRONG, b"401"), (WRONG, b"401"), (RIGHT, b"200"), (WRONG, b"401"), (RIGHT, b"200")):
            head = f"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\napi-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
            waits = not is_together and key == WRONG  # the caller reads the reply, then sends the body
            writer.write(head.encode() + (b"" if waits else body))
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert answer.split()[1] == status
            assert b"connection: close" not in answer.lower()
            if waits:
                writer.write(body)
            length = int(answer.lower().partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(length)


async def test_a_single_key(start_server: StartServer) -> None:
    server = await start_server(api_key=RIGHT)
    await server.encode("hello", metadata=bearer(RIGHT))
    assert (await refused(server, metadata=bearer(WRONG))).reason == "UNAUTHENTICATED"


@pytest.mark.usefixtures("_poll_fast")
async def test_a_file_of_keys_is_read_again(start_server: StartServer, file: Path) -> None:
    file.write_text(f"{RIGHT}\n{OTHER}\n")
    server = await start_server(api_key_file=file)
    for key in (RIGHT, OTHER):
        await server.encode("hello", metadata=bearer(key))
    await change(server, file, f"{OTHER}\n")
    await server.encode("hello", metadata=bearer(OTHER))
    assert (await refused(server, metadata=bearer(RIGHT))).reason == "UNAUTHENTICATED"


@pytest.mark.usefixtures("_poll_fast")
async def test_a_wrong_file_changes_nothing_and_is_counted_once(
    serve: Serve, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve()
    await change(server, file, entry("search", OTHER) + "[[caller]\n", "refused")
    await asyncio.sleep(0.05)  # in this time the server checks the file several times
    file.unlink()
    await until(lambda: server.sample("encserve_callers_reads_total", outcome="refused") == 2)
    await server.encode("hello", metadata=bearer(RIGHT))
    assert server.sample("encserve_callers_file_refused") == 1
    file.write_text(SEARCH)
    await until(lambda: server.sample("encserve_callers_file_refused") == 0)
    assert len([it for it in caplog.records if "callers not loaded" in it.getMessage()]) == 2


@pytest.mark.usefixtures("_poll_fast")
@pytest.mark.parametrize("setting", ["callers", "api_key_file"])
async def test_a_fifo_in_place_of_the_file_is_refused(
    start_server: StartServer, file: Path, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No process writes to the FIFO. The server keeps the previous callers, and reads the next regular file."""
    texts = {"callers": (BOTH, SEARCH), "api_key_file": (f"{RIGHT}\n{OTHER}\n", f"{RIGHT}\n")}[setting]
    file.write_text(texts[0])
    server = await start_server(**{setting: file})
    file.unlink()
    os.mkfifo(file)
    await until(lambda: server.sample("encserve_callers_reads_total", outcome="refused") == 1)
    await server.encode("hello", metadata=bearer(OTHER))
    problem = f"{file} cannot be read: must be a regular file; is a FIFO"
    assert problem in caplog.text
    with pytest.raises(StartupError, match=problem):
        await start_server(**{setting: file})
    file.unlink()
    await change(server, file, texts[1])
    assert (await refused(server, metadata=bearer(OTHER))).reason == "UNAUTHENTICATED"


@pytest.mark.usefixtures("_poll_fast")
async def test_an_unexpected_error_of_one_read_does_not_stop_the_next(
    serve: Serve, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: bytes, where: str) -> Any:
        raise RuntimeError(f"{where}: {WRONG}")

    server = await serve()
    with monkeypatch.context() as patched:
        patched.setattr(registry, "read_callers", fail)
        await change(server, file, entry("search", RIGHT, weight=2), "refused")
    assert "RuntimeError" in caplog.text
    assert WRONG not in caplog.text
    await server.encode("hello", metadata=bearer(RIGHT))
    await change(server, file, entry("jobs", OTHER))
    assert (await refused(server, metadata=bearer(RIGHT))).reason == "UNAUTHENTICATED"


# Streams


@pytest.mark.usefixtures("_poll_fast")
@pytest.mark.parametrize("protocol", ["ours", "open inference", "reflection"])
async def test_a_revoked_key_ends_an_open_stream_at_its_next_message(serve: Serve, file: Path, protocol: str) -> None:
    server = await serve(BOTH)
    path, request = {
        "ours": (f"/{SERVICE}/EncodeStream", pb.EncodeStreamRequest(request_id="1").SerializeToString()),
        "open inference": (
            f"/{INFER_SERVICE}/ModelStreamInfer",
            infer_request(text=text_tensor("hello")).SerializeToString(),
        ),
        "reflection": (REFLECTION, LIST_SERVICES),
    }[protocol]
    rpc: Any = server.channel.stream_stream(path)
    revoked, other = rpc(metadata=bearer(RIGHT)), rpc(metadata=bearer(OTHER))
    for stream in (revoked, other):
        await stream.write(request)
        assert await stream.read()
    await change(server, file, entry("other", OTHER))
    for stream in (revoked, other):
        await stream.write(request)
    assert (await refusal(revoked.read())).code is grpc.StatusCode.UNAUTHENTICATED
    assert await other.read()
    other.cancel()


async def test_a_stream_without_a_key_is_refused_counted_and_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve()
    assert await reflect(server, bearer(RIGHT))
    assert (await refusal(reflect(server, bearer(WRONG)))).code is grpc.StatusCode.UNAUTHENTICATED
    assert by_caller(server, "", "UNAUTHENTICATED") == 1
    await until(lambda: any("ServerReflectionInfo" in str(vars(it)) for it in caplog.records))
    rpc: Any = server.channel.stream_stream(f"/{SERVICE}/EncodeStream")
    assert (await refusal(rpc(metadata=bearer(WRONG)).read())).code is grpc.StatusCode.UNAUTHENTICATED
    await until(lambda: server.in_flight() == 0)


# Calls without a key

HEALTH = "grpc.health.v1.Health"
LISTING = [
    (SERVICE, "ListModels", b""),
    (SERVICE, "GetModel", b""),
    (INFER_SERVICE, "ServerMetadata", b""),
    (INFER_SERVICE, "RepositoryIndex", b""),
    (INFER_SERVICE, "ModelMetadata", infer_pb.ModelMetadataRequest(name="tiny").SerializeToString()),
]
LISTING_PATHS = ["/v1/models", "/v1/models/tiny", "/info", "/v2", "/v2/models/tiny", "/openapi.json", "/docs"]


LIST_SERVICES = b"\x3a\x00"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


async def open_reflection(server: FakeServer, metadata: Any) -> Any:
    rpc: Any = server.channel.stream_stream(REFLECTION)
    stream = rpc(metadata=metadata)
    await stream.write(LIST_SERVICES)
    return stream


async def reflect(server: FakeServer, metadata: Any = ()) -> bytes:
    stream = await open_reflection(server, metadata)
    answer: bytes = await stream.read()
    stream.cancel()
    return answer


@pytest.mark.parametrize("is_public", [False, True])
async def test_listings_need_a_key_unless_a_setting_makes_them_public(serve: Serve, is_public: bool) -> None:
    server = await serve(public_listing=is_public)
    for service, method, data in LISTING:
        await server.call(method, data, service, metadata=bearer(RIGHT))
        if is_public:
            await server.call(method, data, service)
        else:
            assert (await refused(server, method, data, service=service)).reason == "UNAUTHENTICATED"
    assert await reflect(server, bearer(RIGHT))
    if is_public:
        assert await reflect(server)
    else:
        assert (await refusal(reflect(server))).code is grpc.StatusCode.UNAUTHENTICATED
    async with connect(server) as client:
        for path in LISTING_PATHS:
            assert (await client.get(path)).status_code == (200 if is_public else 401), path
            assert (await client.get(path, headers=dict(bearer(RIGHT)))).status_code == 200
        assert (await client.post("/v1/embeddings", json=EMBEDDINGS)).status_code == 401
    assert (await refused(server)).reason == "UNAUTHENTICATED"


async def test_health_needs_no_key_and_names_no_model(serve: Serve) -> None:
    server = await serve(served_model_name=("alias=tiny",))
    assert await server.call("Check", health_pb2.HealthCheckRequest(), HEALTH)
    for method in ("ServerLive", "ServerReady"):
        assert await server.call(method, b"", INFER_SERVICE)
    for name in ("nope", f"{SERVICE}/nope"):
        data = health_pb2.HealthCheckRequest(service=name).SerializeToString()
        error = await refused(server, "Check", data, service=HEALTH)
        assert error.code is grpc.StatusCode.NOT_FOUND
        assert "tiny" not in error.text
    async with connect(server) as client:
        for path in ("/health", "/ping", "/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready"):
            assert (await client.get(path)).status_code == 200
        answer = await client.get("/v2/models/alias/ready")
        assert answer.json() == {"name": "alias", "ready": True}
        for path in ("nope", "alias/versions/9", "alias@9"):
            answer = await client.get(f"/v2/models/{path}/ready")
            assert (answer.status_code, "tiny" in answer.text) == (404, False)
        server.app.catalog.resolve("tiny", "2").not_ready_reason = lambda: "stuck"  # type: ignore[method-assign]
        answer = await client.get("/v2/models/alias/ready")
        assert (answer.status_code, answer.json()) == (503, {"error": "the model is not ready"})


async def test_requests_without_a_key_are_small(serve: Serve) -> None:
    server = await serve(public_listing=True)
    for path in ("/health", "/v2/models/tiny/ready", "/v1/models"):
        async with raw(server) as (reader, writer), asyncio.timeout(5):
            head = f"GET {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {2**20}\r\n\r\n"
            writer.write(head.encode() + b"x" * (2**20 - 1))  # the last byte of the body is missing
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 "), path
            assert server.held_bytes() == 0
    async with connect(server) as client:
        assert (await client.request("GET", "/health", content=b"x" * 4097)).status_code == 413
        assert (await client.request("GET", "/health", content=b"x" * 4096)).status_code == 200
    messages: list[tuple[str, str, Any]] = [
        (HEALTH, "Check", health_pb2.HealthCheckRequest(service="x" * 4096)),
        (INFER_SERVICE, "ModelReady", infer_pb.ModelReadyRequest(name="x" * 4096)),
        (INFER_SERVICE, "ModelMetadata", infer_pb.ModelMetadataRequest(name="x" * 4096)),
    ]
    for service, method, message in messages:
        error = await refused(server, method, message.SerializeToString(), service=service)
        assert (error.reason, "4099" in error.text) == ("REQUEST_TOO_LARGE", True)


async def test_slow_calls_without_a_key_leave_room_for_others(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.ledger.LOOK_SECONDS", 0.02)
    server = await serve()
    rpc: Any = server.channel.stream_unary("/grpc.health.v1.Health/Check")
    slow = [rpc() for _ in range(100)]
    codes = [asyncio.ensure_future(it.code()) for it in slow]
    room = server.app._calls.places.open_pool.limit
    await until(lambda: sum(it.done() for it in codes) >= len(slow) - room)
    assert await server.call("Check", health_pb2.HealthCheckRequest(), HEALTH)
    done = [it for it in codes if it.done()]
    assert {it.result() for it in done} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert len(slow) - len(done) == room
    for it in slow:
        it.cancel()
    await asyncio.wait(codes)
    await until(lambda: server.held_bytes() == 0)


async def test_idle_reflection_without_a_key_makes_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve(public_listing=True)
    streams = [await open_reflection(server, ()) for _ in range(server.app._calls.places.open_pool.limit)]
    for it in streams:
        assert await it.read()
    assert (await refusal(reflect(server))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    monkeypatch.setattr("encserve_server.ledger.ARRIVAL_SECONDS", 0.0)
    assert await reflect(server)
    assert (await refusal(streams[0].read())).reason == "BUDGET_FULL"
    for it in streams:
        it.cancel()


# Permissions and rates


async def test_a_caller_may_use_its_models_only(serve: Serve) -> None:
    text = entry("search", RIGHT, models='["tiny"]') + entry("other", OTHER, models='["else"]')
    server = await serve(text, served_model_name=("alias=tiny",))
    await server.encode("hello", metadata=bearer(RIGHT))
    for model in ("", "tiny", "alias"):
        request = pb.EncodeRequest(model=model, inputs=[make_input("hello")])
        error = await refused(server, data=request.SerializeToString(), metadata=bearer(OTHER))
        assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
        assert (repr(model) if model else "the default model") in error.text
        assert error.text.endswith(", only else")
    async with connect(server) as client:
        answer = await client.post("/v1/embeddings", json=EMBEDDINGS, headers=dict(bearer(OTHER)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        missing = await client.post("/v1/embeddings", json={"input": "a", "model": "b"}, headers=dict(bearer(OTHER)))
        assert missing.status_code == 404
        assert "tiny" not in missing.text
        for key, count in ((RIGHT, 3), (OTHER, 0)):  # three names: tiny, tiny@1, alias
            assert len((await client.get("/v1/models", headers=dict(bearer(key)))).json()["data"]) == count
        index = await client.post("/v2/repository/index", headers=dict(bearer(OTHER)))
        assert index.json() == []
    listed = pb.ListModelsResponse.FromString(await server.call("ListModels", b"", metadata=bearer(OTHER)))
    assert not listed.models
    assert by_caller(server, "other", "PERMISSION_DENIED") == 4


@pytest.mark.parametrize("accept_any_model", [False, True])
async def test_errors_hide_models_that_a_caller_may_not_use(serve: Serve, accept_any_model: bool) -> None:
    """Errors never show the versions, ids or real name of a forbidden model, even if the caller guesses a name."""
    settings = {"served_model_name": ("alias=tiny", "old=tiny@7"), "accept_any_model_name": accept_any_model}
    server = await serve(entry("other", OTHER, models='["else"]'), model=("tiny@2",), **settings)
    metadata = bearer(OTHER)
    asked = [
        pb.EncodeRequest(model_version="9"),
        pb.EncodeRequest(model="tiny", model_version="9"),
        pb.EncodeRequest(model="alias", model_version="9"),
        pb.EncodeRequest(model="old"),
        pb.EncodeRequest(model="tiny", expected_fingerprint="e" * 32),
        pb.EncodeRequest(expected_space_id="s2-" + "1" * 32),
        pb.EncodeRequest(model="nope"),
    ]
    texts = []
    for request in asked:
        error = await refused(server, data=request.SerializeToString(), metadata=metadata)
        is_unknown = request.model == "nope" and not accept_any_model
        assert error.reason == ("MODEL_NOT_FOUND" if is_unknown else "PERMISSION_DENIED")
        texts.append(error.text.replace("'tiny'", ""))  # the caller itself sent this name
    texts.append((await refused(server, "GetModel", metadata=metadata)).text)
    async with connect(server) as client:
        for path in ("/info", "/v1/models/alias", "/v1/models/alias@9", "/v2/models/alias/versions/9/config"):
            answer = await client.get(path, headers=dict(metadata))
            assert answer.status_code == 403, path
            texts.append(answer.text)
    for text in texts:
        assert not any(hidden in text for hidden in ("tiny", "2,", "@", "f" * 32, "5" * 32)), text


async def test_inspect_is_a_permission(serve: Serve) -> None:
    server = await serve(SEARCH + entry("other", OTHER, inspect="false"))
    request = pb.InspectRequest(input=make_input("hello"))
    assert await server.inspect(request, metadata=bearer(RIGHT))
    failed = await refusal(server.inspect(b"\xff", metadata=bearer(OTHER)))
    assert (failed.reason, "Inspect" in failed.text) == ("PERMISSION_DENIED", True)


async def test_a_caller_over_its_rate_gets_a_delay(serve: Serve) -> None:
    server = await serve(entry("search", RIGHT, tokens_per_second=10) + entry("other", OTHER))
    # The call has 30 tokens, which take 3 s at a rate of 10 tokens/s. The burst covers 1 s, so 2 s remain.
    await server.encode(*["hello brave new world"] * 5, metadata=bearer(RIGHT))
    error = await refused(server, metadata=bearer(RIGHT))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    assert 1000 < int(error.pushback_ms or 0) <= 2000
    assert "10 tokens a second" in error.text
    async with connect(server) as client:
        answer = await client.post("/v1/embeddings", json=EMBEDDINGS, headers=dict(bearer(RIGHT)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 2
        assert (await client.get("/v1/models", headers=dict(bearer(RIGHT)))).status_code == 200
    await server.encode("hello", metadata=bearer(OTHER))


async def test_all_parts_of_a_call_count_against_the_rate(serve: Serve) -> None:
    server = await serve(entry("search", RIGHT, tokens_per_second=100), max_queue_tokens=64)
    async with connect(server) as client:
        client.headers["api-key"] = RIGHT
        async with asyncio.timeout(10):
            body = {"input": ["hello"] * 300, "model": "tiny"}
            assert (await client.post("/v1/embeddings", json=body)).status_code == 200
        answer = await client.post("/v1/embeddings", json=EMBEDDINGS)
        assert answer.status_code == 429
        assert 6 <= int(answer.headers["retry-after"]) <= 8  # (900 tokens - burst of 100) / 100 a second


async def test_a_call_that_fails_midway_costs_the_parts_that_ran(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has three parts. While the second part waits or runs, the queue refuses the third part.

    The third part does not count against the caller's rate.
    """
    monkeypatch.setattr(parts, "_ROOM_SECONDS", 0.0)
    refusals: list[type[LimitReached]] = []
    real = LimitReached.__init__

    def refuse(self: LimitReached, *args: Any) -> None:
        refusals.append(type(self))
        real(self, *args)

    monkeypatch.setattr(LimitReached, "__init__", refuse)
    text = entry("search", RIGHT, tokens_per_second=2) + entry("other", OTHER, priority='"bulk"')
    server = await serve(text, max_queue_tokens=40, max_batch_sequences=1)
    server.engine.hold()
    async with connect(server) as client:
        inputs = [[5] * 8, [5] * 8, [5] * 32]
        body = {"input": inputs, "model": "tiny", "add_special_tokens": False}
        call = asyncio.create_task(client.post("/v1/embeddings", json=body, headers=dict(bearer(RIGHT))))
        await until(lambda: server.engine.batches and server.queued() == 8)
        filling = asyncio.create_task(server.encode([5] * 20, metadata=bearer(OTHER)))
        await until(lambda: server.queued() == 28)
        server.engine.let_one_go()
        await until(lambda: refusals)
        server.engine.let_go()
        answer = await call
    await filling
    assert answer.status_code == 429
    assert answer.headers["encserve-error-reason"] in ("QUEUE_FULL", "SHARE_EXCEEDED")
    error = await refused(server, metadata=bearer(RIGHT))
    assert error.reason == "RATE_LIMITED"
    # One part costs 8 tokens, and two parts cost 16. After the burst of 2 tokens, the delay is 3 s or 7 s. The third
    # part would add 16 s.
    assert 2000 < int(error.pushback_ms or 0) <= 7000


@pytest.mark.parametrize(
    "outcome", ["ENGINE_UNHEALTHY", "DEADLINE_EXCEEDED", "CANCELLED", "REQUEST_TOO_LARGE", "QUEUE_FULL"]
)
async def test_a_call_of_ids_that_ends_before_it_runs_costs_nothing(serve: Serve, outcome: str) -> None:
    text = entry("search", RIGHT, tokens_per_second=1) + entry("other", OTHER)
    stall_seconds = 0.1 if outcome == "ENGINE_UNHEALTHY" else 60
    queue = 24 if outcome == "REQUEST_TOO_LARGE" else 60
    server = await serve(text, max_queue_tokens=queue, stall_seconds=stall_seconds)
    others = [await server.start_held(server.encode([1], metadata=bearer(OTHER)))]
    if outcome == "QUEUE_FULL":
        others.append(asyncio.create_task(server.encode([5] * 32, metadata=bearer(OTHER))))
        await until(lambda: server.queued() == 32)
    timeout = 0.5 if outcome == "DEADLINE_EXCEEDED" else None
    call = asyncio.create_task(server.encode([1, *[4] * 28, 2], metadata=bearer(RIGHT), timeout=timeout))
    if outcome == "CANCELLED":
        await until(lambda: server.queued() == 30)
        call.cancel()
    with pytest.raises((Failed, asyncio.CancelledError)):
        await call
    # The caller's clock may reach the deadline first. Then the caller cancels the call.
    outcomes = ("DEADLINE_EXCEEDED", "CANCELLED") if outcome == "DEADLINE_EXCEEDED" else (outcome,)
    await until(lambda: sum(by_caller(server, "search", it) for it in outcomes) == 1)
    server.engine.let_go()
    await asyncio.gather(*others)
    await server.encode("hello", metadata=bearer(RIGHT))


@pytest.mark.parametrize("method", ["Tokenize", "Inspect", "/tokenize"])
async def test_tokenize_and_inspect_count_against_the_rate(serve: Serve, method: str) -> None:
    """The cost of an inspection is the number of its tokens, plus a cost for the returned numbers."""
    server = await serve(entry("search", RIGHT, tokens_per_second=10))
    text = " ".join(["hello"] * 28)  # with [CLS] and [SEP], 30 tokens
    if method == "Tokenize":
        await server.call(method, pb.TokenizeRequest(texts=[text]), metadata=bearer(RIGHT))
    elif method == "Inspect":
        await server.inspect(pb.InspectRequest(input=make_input(text)), metadata=bearer(RIGHT))
    else:
        async with connect(server) as client:
            answer = await client.post(method, json={"inputs": text}, headers=dict(bearer(RIGHT)))
        assert answer.status_code == 200
    error = await refused(server, metadata=bearer(RIGHT))
    assert error.reason == "RATE_LIMITED"
    cost = 30 if method != "Inspect" else 30 + 30 + -(-N_LAYERS * N_HEADS * 30 * 30 // ((N_LAYERS + 1) * D_MODEL))
    seconds = (cost - 10) / 10
    assert (seconds - 1) * 1000 < int(error.pushback_ms or 0) <= seconds * 1000


async def test_a_refused_inspection_costs_nothing(serve: Serve) -> None:
    text = entry("search", RIGHT, tokens_per_second=20) + entry("other", OTHER)
    server = await serve(text, max_inspections=1)
    server.inspector.hold()
    request = pb.InspectRequest(input=make_input(" ".join(["hello"] * 28)))
    running = asyncio.create_task(server.inspect(request, metadata=bearer(OTHER)))
    await until(lambda: server.sample("encserve_inspections", model="tiny", version="2") == 1)
    assert (await refusal(server.inspect(request, metadata=bearer(RIGHT)))).reason == "QUEUE_FULL"
    server.inspector.let_go()
    await running
    await server.encode("hello", metadata=bearer(RIGHT))


async def test_inspections_take_turns_between_callers(serve: Serve) -> None:
    """A caller may have at most half of the `max_inspections` open inspections.

    The second caller's inspection runs before the waiting inspections of the first caller.
    """
    server = await serve(BOTH, max_inspections=6)
    server.inspector.hold()

    def inspect(key: str, length: int) -> "asyncio.Task[Any]":
        request = pb.InspectRequest(input=make_input([5] * length))
        return asyncio.create_task(server.inspect(request, metadata=bearer(key)))

    tasks = []
    for key, length, waiting in ((RIGHT, 1, 1), (RIGHT, 2, 2), (RIGHT, 3, 3), (OTHER, 4, 4)):
        if length == 4:
            error = await asyncio.wait_for(refusal(inspect(RIGHT, 9)), 30)
            assert (error.reason, "3 inspections" in error.text) == ("SHARE_EXCEEDED", True)
        tasks.append(inspect(key, length))
        await until(lambda: server.sample("encserve_inspections", model="tiny", version="2") == waiting)  # noqa: B023
    server.inspector.let_go()
    await asyncio.gather(*tasks)
    assert server.inspector.lengths.index(4) == 1, "the second caller's inspection did not run second"


@pytest.mark.parametrize(("reason", "status"), [("RESPONSE_TOO_LARGE", 413), ("BUDGET_FULL", 429)])
async def test_tokenize_ends_when_the_tokens_so_far_have_no_room(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, reason: str, status: int
) -> None:
    """The server tokenizes a few texts at a time. Only tokenized texts count against the caller's rate."""
    texts: list[str] = []
    real = TextTokenizer.tokenize

    def tokenize(self: TextTokenizer, some: Sequence[str], *args: Any, details: bool) -> Any:
        texts.extend(some)
        return real(self, some, *args, details=details)

    monkeypatch.setattr(TextTokenizer, "tokenize", tokenize)
    callers = entry("search", RIGHT, tokens_per_second=10_000) + entry("other", OTHER)
    limits = {"max_response_mib": 1} if reason == "RESPONSE_TOO_LARGE" else {"max_in_flight_mib": 100}
    server = await serve(callers, **limits)
    async with server.queue_of(10, metadata=bearer(OTHER)), connect(server) as client:
        client.headers["api-key"] = RIGHT
        answer = await client.post("/tokenize", json={"inputs": ["hello " * 40_000] * 20})
        assert (answer.status_code, answer.headers["encserve-error-reason"]) == (status, reason)
        assert 0 < len(texts) < 15
        answer = await client.post("/tokenize", json={"inputs": "hello"})
        assert (answer.status_code, answer.headers["encserve-error-reason"]) == (429, "RATE_LIMITED")
    await until(lambda: server.held_bytes() == 0)


@pytest.mark.parametrize("reason", ["QUEUE_FULL", "SEQUENCE_TOO_LONG"])
async def test_a_refused_call_costs_the_tokens_of_its_texts(serve: Serve, reason: str) -> None:
    """Tokenizing takes time, so the tokens of a refused call also count against the caller's rate."""
    text = entry("search", RIGHT, tokens_per_second=10) + entry("other", OTHER)
    server = await serve(text, max_queue_tokens=59)
    words = 28 if reason == "QUEUE_FULL" else 31
    request = pb.EncodeRequest(inputs=[make_input([5] * 30), make_input(" ".join(["hello"] * words))])
    async with server.queue_of(30, metadata=bearer(OTHER)):
        error = await refused(server, data=request.SerializeToString(), metadata=bearer(RIGHT))
        assert error.reason == reason
        error = await refused(server, metadata=bearer(RIGHT))
        assert error.reason == "RATE_LIMITED"
        assert 1000 < int(error.pushback_ms or 0) <= 2200


async def test_tokenize_takes_turns_between_callers(serve: Serve, tokenized: tuple[list[int], threading.Event]) -> None:
    """One caller sends five texts, then a second caller sends one text.

    The server tokenizes the second caller's text third.
    """
    server = await serve(BOTH, tokenizer_threads=1)
    lengths, go_on = tokenized
    tasks = []
    for key, text in [(RIGHT, "hello " * 100)] * 5 + [(OTHER, "world " * 99)]:
        request = pb.TokenizeRequest(texts=[text])
        tasks.append(asyncio.create_task(server.call("Tokenize", request, metadata=bearer(key))))
        waiting = sum([600] * len(tasks)) - (6 if key == OTHER else 0)
        await until(lambda: server.queued("text_bytes") == waiting)  # noqa: B023
    go_on.set()
    await asyncio.gather(*tasks)
    assert lengths.index(594) == 2  # after the running text and the first waiting text


# Callers named by a proxy


async def names_counted(server: FakeServer) -> set[str]:
    families = server.app.registry.collect()
    return {it.labels["caller"] for family in families for it in family.samples if "caller" in it.labels}


def named(key: str, name: str) -> Any:
    return (*bearer(key), ("x-gateway-inference-fairness-id", name))


@pytest.mark.parametrize(
    ("is_proxy", "is_trusted", "name"),
    [("true", True, "tenant-1"), ("true", False, "gateway"), ("false", True, "gateway")],
)
async def test_a_trusted_proxy_names_the_caller(
    serve: Serve, is_proxy: str, is_trusted: bool, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy may name callers if the callers file declares the proxy, and `trust_fairness_id` is on.

    With only one of these two conditions, the server logs a warning.
    """
    callers = entry("gateway", RIGHT, proxy=is_proxy) + entry("jobs", OTHER)
    server = await serve(callers, trust_fairness_id=is_trusted)
    await server.encode("hello", metadata=named(RIGHT, "tenant-1"))
    await server.encode("hello", metadata=named(OTHER, "tenant-2"))
    assert by_caller(server, name, "OK") == 1
    assert by_caller(server, "jobs", "OK") == 1
    assert (await refused(server, metadata=named(WRONG, "jobs"))).reason == "UNAUTHENTICATED"
    assert ("proxy = true" in caplog.text) is (name == "gateway")


@pytest.mark.parametrize(
    ("proxy", "own", "expected"),
    [
        ("interactive", "interactive", Priority.INTERACTIVE),
        ("interactive", "bulk", Priority.BULK),
        ("bulk", "interactive", Priority.BULK),
    ],
)
def test_a_named_caller_is_not_more_urgent_than_its_proxy(file: Path, proxy: str, own: str, expected: Priority) -> None:
    file.write_text(
        entry("proxy", RIGHT, proxy="true", priority=f'"{proxy}"')
        + entry("jobs", OTHER, priority=f'"{own}"', weight=3)
        + entry("gateway", WRONG, proxy="true")
    )
    callers = registry.Callers(registry.open_source(None, None, file), FakeClock(), trusts_proxy=True)
    for key in (WRONG, RIGHT, WRONG, RIGHT):  # the order of the calls must not matter
        metadata = named(key, "jobs")
        caller = callers.caller(callers.known(callers.identify(metadata, tuple)), metadata)
        limit = expected if key == RIGHT else Priority[own.upper()]
        assert caller == Caller("jobs", 3, limit)
        metadata = named(key, "stranger")
        caller = callers.caller(callers.known(callers.identify(metadata, tuple)), metadata)
        assert caller.priority is Priority[(proxy if key == RIGHT else "interactive").upper()]


@pytest.mark.usefixtures("_poll_fast")
async def test_names_of_proxies_stay_bounded_when_the_file_changes(
    serve: Serve, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_PROXY_NAMES", 8)
    proxy = entry("proxy", RIGHT, proxy="true")
    server = await serve(proxy, trust_fairness_id=True)
    for i in range(3):
        for tenant in range(6):
            await refused(server, data=b"", metadata=named(RIGHT, f"tenant-{i}-{tenant}"))
        await change(server, file, proxy + f"# {i}")
    assert len(await names_counted(server)) == 8 + len({"proxy", "other"})


@pytest.mark.usefixtures("_poll_fast")
async def test_a_removed_caller_gets_no_label_from_its_last_call(serve: Serve, file: Path) -> None:
    server = await serve(BOTH)
    running = await server.start_held(server.encode("hello", metadata=bearer(OTHER)))
    await change(server, file, SEARCH)
    server.engine.let_go()
    await running
    assert "other" not in await names_counted(server)


async def test_rates_and_permissions_are_those_of_the_proxy(serve: Serve) -> None:
    """The rates and permissions of a proxy apply to the callers that the proxy names.

    Errors name the proxy, because the callers file has an entry for the proxy only.
    """
    rules = {"tokens_per_second": 2, "models": '["else", "tiny"]', "inspect": "false"}
    narrow = entry("narrow", OTHER, proxy="true", models='["else"]')
    server = await serve(entry("gateway", RIGHT, proxy="true", **rules) + narrow, trust_fairness_id=True)
    metadata = named(RIGHT, "tenant-1")
    assert "caller gateway" in (await refusal(server.inspect(b"", metadata=metadata))).text
    assert "caller narrow" in (await refused(server, metadata=named(OTHER, "tenant-1"))).text
    await server.encode("hello", metadata=metadata)
    error = await refused(server, metadata=metadata)
    assert (error.reason, "caller gateway" in error.text) == ("RATE_LIMITED", True)
    assert by_caller(server, "tenant-1", "RATE_LIMITED") == 1


async def test_a_proxy_without_keys_names_a_bounded_number_of_callers(start_server: StartServer) -> None:
    server = await start_server(trust_fairness_id=True, http_port=0)
    async with connect(server) as client:
        for i in [*range(140), 1]:
            headers = {"X-Gateway-Inference-Fairness-Id": f"tenant-{i}"}
            answer: httpx.Response = await client.post("/embed", json={"inputs": ""}, headers=headers)
            assert answer.status_code < 500
        await client.post("/embed", json={"inputs": ""}, headers={"x-gateway-inference-fairness-id": "a b\x7f" * 100})
    names = await names_counted(server)
    assert len(names) == 129
    assert "other" in names


# Certificates

CERTIFICATE_ENTRY = '[[caller]]\nname = "search"\ncertificate_names = ["Search.example", "spiffe://example/search"]\n'
URN = '[[caller]]\nname = "jobs"\ncertificate_names = ["urn:uuid:9f0e"]\n'


class Peers:
    """The names of one client certificate, as gRPC and as Python's ssl report them."""

    def __init__(self, dns: Sequence[str] = (), uri: Sequence[str] = ()) -> None:
        properties = {
            "x509_common_name": [b"search.example"],
            "peer_dns": [it.encode() for it in dns],
            "peer_uri": [it.encode() for it in uri],
            "peer_ip": [b"10.0.0.1"],
        }
        context: Any = SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:5", auth_context=lambda: properties)
        names = [("DNS", it) for it in dns] + [("URI", it) for it in uri] + [("IP Address", "10.0.0.1")]
        certificate = {"subject": ((("commonName", "search.example"),),), "subjectAltName": tuple(names)}
        request: Any = SimpleNamespace(get_extra_info={"peercert": certificate}.get)
        self.names = [Peer(context).certificate_names, app._Peer(request).certificate_names]


@pytest.mark.parametrize(
    ("dns", "uri", "expected"),
    [
        (["other.example", "search.example"], [], "search"),
        (["SEARCH.Example"], [], "search"),
        ([], ["spiffe://example/search"], "search"),
        ([], ["urn:uuid:9f0e"], "jobs"),
        ([], ["search.example"], None),
        ([], ["Search.example"], None),
        (["spiffe://example/search", "urn:uuid:9f0e"], [], None),
        ([], ["spiffe://example/SEARCH"], None),
        ([], [], None),
    ],
)
def test_a_certificate_names_the_caller(
    file: Path, dns: Sequence[str], uri: Sequence[str], expected: str | None
) -> None:
    """A DNS name matches DNS names only, in upper or lower case. A URI matches URIs only. Other names match nothing."""
    file.write_text(CERTIFICATE_ENTRY + URN + entry("other", OTHER))
    callers = registry.Callers(registry.open_source(None, None, file), FakeClock())
    for names in Peers(dns, uri).names:

        def who(metadata: Any, names: Any = names) -> str:
            return callers.caller(callers.known(callers.identify(metadata, names)), metadata).name

        assert who(bearer(OTHER)) == "other"  # a key has precedence over the certificate
        if expected is None:
            with pytest.raises(Unauthenticated, match="client certificate"):
                who(())
        else:
            assert who(()) == who(bearer(WRONG)) == expected


@pytest.mark.usefixtures("_poll_fast")
async def test_certificate_names_need_a_client_ca(serve: Serve, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without --tls-client-ca-file, a callers file with certificate names stops the start.

    A running server that reads such a file logs a warning.
    """
    with pytest.raises(CallersError, match="search .*--tls-client-ca-file"):
        await serve(entry("other", OTHER) + CERTIFICATE_ENTRY)
    server = await serve(SEARCH)
    await change(server, file, entry("other", OTHER) + CERTIFICATE_ENTRY)
    await server.encode("hello", metadata=bearer(OTHER))
    assert "certificate_names" in caplog.text


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:127.0.0.1:5", "127.0.0.1:5"), ("ipv6:%5B::1%5D:5", "[::1]:5"), ("unix:/tmp/socket", "/tmp/socket")],  # noqa: S108
)
def test_addresses_of_a_grpc_peer(peer: str, address: str) -> None:
    context: Any = SimpleNamespace(peer=lambda: peer)
    assert Peer(context).address() == address
