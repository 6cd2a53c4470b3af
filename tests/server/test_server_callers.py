"""Who may call: keys, the callers file, permissions and rates, over gRPC and HTTP, with real requests."""

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from fake_clock import FakeClock
from fake_server import SERVICE, Failed, FakeServer, StartServer, make_input
from grpc_health.v1 import health_pb2
from http_calls import connect, raw
from open_inference import infer_request, text_tensor
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.callers import registry
from encserve_server.callers.file import CallersError
from encserve_server.errors import QueueFull, Unauthenticated
from encserve_server.http import bodies
from encserve_server.models import parts
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.rpc.guard import _Peer
from encserve_server.rpc.open_inference.service import SERVICE_NAME as INFER_SERVICE
from encserve_server.rpc.open_inference.triton import grpc_service_pb2 as infer_pb
from encserve_server.types.callers import Caller, Priority

RIGHT, OTHER, WRONG = "encserve-right-key", "encserve-other-key", "encserve-wrong-key"
EMBEDDINGS = {"input": "hello", "model": "tiny"}


def sum_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, *keys: str, **fields: Any) -> str:
    """One [[caller]]; the values of fields are TOML."""
    sums = ", ".join(f'"{sum_of(key)}"' for key in keys)
    lines = ["[[caller]]", f'name = "{name}"', f"key_sha256 = [{sums}]"]
    return "\n".join([*lines, *(f"{field} = {value}" for field, value in fields.items())]) + "\n"


class CallersFile:
    """A file that holds one caller, `search`, until a test writes another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(entry("search", RIGHT))

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def remove(self) -> None:
        self.path.unlink()


@pytest.fixture
def callers_file(tmp_path: Path) -> CallersFile:
    return CallersFile(tmp_path / "callers.toml")


@pytest.fixture
def _poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(registry, "_SETTLE_SECONDS", 0.001)


async def refused(server: FakeServer, method: str = "Encode", data: bytes = b"", **options: Any) -> Failed:
    with pytest.raises(Failed) as caught:
        await server.call(method, data, **options)
    return caught.value


def bearer(key: str) -> Any:
    return (("authorization", f"Bearer {key}"),)


def by_caller(server: FakeServer, caller: str, outcome: str) -> float:
    return server.sample("encserve_caller_calls_total", caller=caller, outcome=outcome)


# ---------------------------------------------------------------------------------------------------------------------
# Keys


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", f"Bearer {RIGHT}"),),
        (("authorization", f"bearer  {RIGHT}"),),
        (("api-key", RIGHT),),
        (("x-api-key", RIGHT),),
        (("authorization", "Basic abc"), ("x-api-key", RIGHT)),
        (("authorization", f"Bearer {WRONG}"), ("api-key", RIGHT)),  # OpenAI's client cannot leave its own out
    ],
)
async def test_a_right_key_is_let_in(start_server: StartServer, callers_file: CallersFile, metadata: Any) -> None:
    server = await start_server(callers=callers_file.path, http_port=0)
    await server.encode("hello", metadata=metadata)
    async with connect(server) as client:
        assert (await client.post("/v1/embeddings", json=EMBEDDINGS, headers=dict(metadata))).status_code == 200
    assert by_caller(server, "search", "OK") == 2
    assert server.sample("encserve_caller_tokens_total", caller="search") == 6


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", f"Bearer {WRONG}"),),
        (("authorization", f"Basic {RIGHT}"),),
        (("authorization", RIGHT),),
        (("api-key", sum_of(RIGHT)),),
        (("x-api-key", RIGHT[:-1]),),
        (("api-key", ""),),
        (*(("api-key", f"{WRONG}{i}") for i in range(3)), ("api-key", RIGHT)),  # each is hashed, so few are looked at
    ],
)
async def test_anything_else_is_refused_and_says_nothing_of_the_key(
    start_server: StartServer, callers_file: CallersFile, metadata: Any
) -> None:
    """A body that nobody could parse is not looked at, on either protocol."""
    server = await start_server(callers=callers_file.path, http_port=0)
    error = await refused(server, data=b"\xff no message", metadata=metadata)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    texts = [error.text]
    async with connect(server) as client:
        for path in ("/v1/embeddings", "/embed", "/v2/embed", "/pooling", "/v2/models/tiny/infer"):
            answer = await client.post(path, content=b"{no JSON", headers=list(metadata))
            assert (answer.status_code, answer.headers["encserve-error-reason"]) == (401, "UNAUTHENTICATED")
            assert answer.headers["www-authenticate"] == "Bearer"
            texts.append(answer.text)
    assert not any(RIGHT[:-1] in text or WRONG in text for text in texts)
    assert by_caller(server, "", "UNAUTHENTICATED") == 6


async def test_refusals_have_the_shape_of_each_protocol(start_server: StartServer, callers_file: CallersFile) -> None:
    server = await start_server(callers=callers_file.path, http_port=0)
    async with connect(server) as client:
        of_openai = (await client.post("/v1/embeddings", json=EMBEDDINGS)).json()["error"]
        assert (of_openai["type"], of_openai["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "authorization: Bearer" in of_openai["message"]
        assert set((await client.post("/embed", json={"inputs": "hello"})).json()) == {"error", "error_type"}
        assert set((await client.post("/v2/embed", json={})).json()) == {"id", "message"}
        assert set((await client.post("/v2/models/tiny/infer", json={})).json()) == {"error"}


async def test_a_refused_caller_that_sends_no_body_loses_its_connection(
    start_server: StartServer, callers_file: CallersFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_DISCARD_SECONDS", 0.05)
    server = await start_server(callers=callers_file.path, http_port=0)
    async with raw(server) as (reader, writer):
        writer.write(b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n{")
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 401 ")


async def test_a_large_body_without_a_key_is_not_read(start_server: StartServer, callers_file: CallersFile) -> None:
    server = await start_server(callers=callers_file.path, http_port=0)
    async with connect(server) as client:
        answer = await client.post("/v1/embeddings", content=b"x" * 2**20)
    assert answer.status_code == 401
    assert server.sample("encserve_in_flight_bytes") == 0


@pytest.mark.parametrize("is_together", [True, False])
async def test_a_refused_caller_keeps_its_connection(
    start_server: StartServer, callers_file: CallersFile, is_together: bool
) -> None:
    """It would have to connect again, and with TLS that takes three times what a refusal takes."""
    server = await start_server(callers=callers_file.path, http_port=0)
    body = b'{"input": "hello", "model": "tiny"}'
    async with raw(server) as (reader, writer):
        for key, status in ((WRONG, b"401"), (WRONG, b"401"), (RIGHT, b"200"), (WRONG, b"401"), (RIGHT, b"200")):
            head = f"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\napi-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
            waits = not is_together and key == WRONG  # for the answer, before it sends the body
            writer.write(head.encode() + (b"" if waits else body))
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert answer.split()[1] == status
            assert b"connection: close" not in answer.lower()
            if waits:
                writer.write(body)
            length = int(answer.lower().partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(length)


async def test_a_caller_that_asks_first_reads_the_refusal_before_it_sends_a_body(
    start_server: StartServer, callers_file: CallersFile
) -> None:
    server = await start_server(callers=callers_file.path, http_port=0)
    async with raw(server) as (reader, writer):
        writer.write(b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: 30000000\r\nexpect: 100-continue\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")


async def test_a_single_key(start_server: StartServer) -> None:
    server = await start_server(api_key=RIGHT)
    await server.encode("hello", metadata=bearer(RIGHT))
    assert (await refused(server, metadata=bearer(WRONG))).reason == "UNAUTHENTICATED"


@pytest.mark.usefixtures("_poll_fast")
async def test_a_file_of_keys_is_read_again(start_server: StartServer, callers_file: CallersFile) -> None:
    callers_file.write(f"{RIGHT}\n{OTHER}\n")
    server = await start_server(api_key_file=callers_file.path)
    for key in (RIGHT, OTHER):
        await server.encode("hello", metadata=bearer(key))
    callers_file.write(f"{OTHER}\n")
    await until(lambda: server.sample("encserve_callers_reads_total", outcome="loaded") == 1)
    await server.encode("hello", metadata=bearer(OTHER))
    assert (await refused(server, metadata=bearer(RIGHT))).reason == "UNAUTHENTICATED"


@pytest.mark.usefixtures("_poll_fast")
async def test_a_wrong_file_changes_nothing_and_is_counted_once(
    start_server: StartServer, callers_file: CallersFile, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_server(callers=callers_file.path)
    callers_file.write(entry("search", OTHER) + "[[caller]\n")
    await until(lambda: server.sample("encserve_callers_reads_total", outcome="refused") == 1)
    await asyncio.sleep(0.05)
    callers_file.remove()
    await until(lambda: server.sample("encserve_callers_reads_total", outcome="refused") == 2)
    await server.encode("hello", metadata=bearer(RIGHT))
    assert server.sample("encserve_callers_file_refused") == 1
    callers_file.write(entry("search", RIGHT))
    await until(lambda: server.sample("encserve_callers_file_refused") == 0)
    lines = [it.getMessage() for it in caplog.records if "callers refused" in it.getMessage()]
    assert len(lines) == 2
    assert "is no TOML" in lines[0]
    assert "No such file" in lines[1]


@pytest.mark.usefixtures("_poll_fast")
async def test_a_file_in_the_middle_of_a_change_is_not_read(
    start_server: StartServer, callers_file: CallersFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it may be a whole file of fewer callers, or a cut key."""
    both = entry("search", RIGHT) + entry("jobs", OTHER)
    callers_file.write(both)
    server = await start_server(callers=callers_file.path)
    monkeypatch.setattr(registry, "_SETTLE_SECONDS", 0.1)
    callers_file.write(entry("search", RIGHT))
    await asyncio.sleep(0.05)
    callers_file.write(both + "# changed")
    await until(lambda: server.sample("encserve_callers_reads_total", outcome="loaded") == 1)
    await server.encode("hello", metadata=bearer(OTHER))
    assert server.app._calls.callers is not None
    assert server.app._calls.callers.generation == 2


@pytest.mark.usefixtures("_poll_fast")
async def test_whatever_goes_wrong_with_the_file_a_key_is_revoked_by_the_next_one(
    start_server: StartServer,
    callers_file: CallersFile,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: bytes, where: str) -> Any:
        raise RuntimeError(f"{where}: {WRONG}")

    server = await start_server(callers=callers_file.path)
    with monkeypatch.context() as patched:
        patched.setattr(registry, "read_callers", fail)
        callers_file.write(entry("search", RIGHT, weight=2))
        await until(lambda: server.sample("encserve_callers_reads_total", outcome="refused") == 1)
    assert "those of before are kept: unexpected RuntimeError" in caplog.text
    assert WRONG not in caplog.text
    await server.encode("hello", metadata=bearer(RIGHT))
    callers_file.write(entry("jobs", OTHER))
    await until(lambda: server.sample("encserve_callers_reads_total", outcome="loaded") == 1)
    assert (await refused(server, metadata=bearer(RIGHT))).reason == "UNAUTHENTICATED"


# ---------------------------------------------------------------------------------------------------------------------
# Streams


@pytest.mark.usefixtures("_poll_fast")
@pytest.mark.parametrize("protocol", ["ours", "open inference"])
async def test_a_revoked_key_ends_an_open_stream_at_its_next_message(
    start_server: StartServer, callers_file: CallersFile, protocol: str
) -> None:
    callers_file.write(entry("search", RIGHT) + entry("jobs", OTHER))
    server = await start_server(callers=callers_file.path)
    if protocol == "ours":
        path, request = f"/{SERVICE}/EncodeStream", pb.EncodeStreamRequest(request_id="1").SerializeToString()
    else:
        request = infer_request(text=text_tensor("hello")).SerializeToString()
        path = f"/{INFER_SERVICE}/ModelStreamInfer"
    rpc: Any = server.channel.stream_stream(path)
    revoked, other = rpc(metadata=bearer(RIGHT)), rpc(metadata=bearer(OTHER))
    for stream in (revoked, other):
        await stream.write(request)
        assert await stream.read()
    callers_file.write(entry("jobs", OTHER))
    await until(lambda: server.sample("encserve_callers_reads_total", outcome="loaded") == 1)
    for stream in (revoked, other):
        await stream.write(request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await revoked.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert await other.read()
    other.cancel()


@pytest.mark.usefixtures("_poll_fast")
async def test_a_revoked_key_ends_open_reflection(start_server: StartServer, callers_file: CallersFile) -> None:
    server = await start_server(callers=callers_file.path)
    stream = await open_reflection(server, bearer(RIGHT))
    assert await stream.read()
    callers_file.write(entry("jobs", OTHER))
    await until(lambda: server.sample("encserve_callers_reads_total", outcome="loaded") == 1)
    await stream.write(LIST_SERVICES)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_refused_reflection_is_counted_and_logged(
    start_server: StartServer, callers_file: CallersFile, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_server(callers=callers_file.path)
    assert await reflect(server, bearer(RIGHT))
    with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
        await reflect(server, bearer(WRONG))
    assert server.sample("encserve_refused_total", reason="UNAUTHENTICATED") == 1
    assert by_caller(server, "", "UNAUTHENTICATED") == 1
    assert server.app._calls.in_flight == 0
    await until(lambda: any("ServerReflectionInfo" in str(vars(it)) for it in caplog.records))


async def test_a_stream_without_a_key_is_refused(start_server: StartServer, callers_file: CallersFile) -> None:
    server = await start_server(callers=callers_file.path)
    rpc: Any = server.channel.stream_stream(f"/{SERVICE}/EncodeStream")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rpc(metadata=bearer(WRONG)).read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


# ---------------------------------------------------------------------------------------------------------------------
# What is open

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


async def open_reflection(server: FakeServer, metadata: Any) -> Any:
    rpc: Any = server.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    stream = rpc(metadata=metadata)
    await stream.write(LIST_SERVICES)
    return stream


async def reflect(server: FakeServer, metadata: Any = ()) -> bytes:
    stream = await open_reflection(server, metadata)
    answer: bytes = await stream.read()
    stream.cancel()
    return answer


@pytest.mark.parametrize("is_public", [False, True])
async def test_what_is_served_is_told_to_all_only_if_a_setting_says_so(
    start_server: StartServer, callers_file: CallersFile, is_public: bool
) -> None:
    server = await start_server(callers=callers_file.path, http_port=0, public_listing=is_public)
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
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await reflect(server)
    async with connect(server) as client:
        for path in LISTING_PATHS:
            assert (await client.get(path)).status_code == (200 if is_public else 401), path
            assert (await client.get(path, headers=dict(bearer(RIGHT)))).status_code == 200
        assert (await client.post("/v1/embeddings", json=EMBEDDINGS)).status_code == 401
    assert (await refused(server)).reason == "UNAUTHENTICATED"


async def test_health_is_always_open(start_server: StartServer, callers_file: CallersFile) -> None:
    server = await start_server(callers=callers_file.path, http_port=0)
    assert await server.call("Check", health_pb2.HealthCheckRequest(), HEALTH)
    for method in ("ServerLive", "ServerReady"):
        assert await server.call(method, b"", INFER_SERVICE)
    async with connect(server) as client:
        for path in ("/health", "/ping", "/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready"):
            assert (await client.get(path)).status_code == 200


async def test_health_names_no_model_to_callers_without_a_key(
    start_server: StartServer, callers_file: CallersFile
) -> None:
    server = await start_server(callers=callers_file.path, http_port=0, served_model_name=("alias=tiny",))
    for name in ("nope", f"{SERVICE}/nope"):
        error = await refused(
            server, "Check", health_pb2.HealthCheckRequest(service=name).SerializeToString(), service=HEALTH
        )
        assert error.code is grpc.StatusCode.NOT_FOUND
        assert f"must be one of '', '{SERVICE}', '{INFER_SERVICE}', or SERVICE/MODEL for one model" in error.text
        assert "tiny" not in error.text
    async with connect(server) as client:
        answer = await client.get("/v2/models/alias/ready")
        assert answer.json() == {"name": "alias", "ready": True}
        for path in ("nope", "alias/versions/9", "alias@9"):
            answer = await client.get(f"/v2/models/{path}/ready")
            assert (answer.status_code, answer.json()) == (404, {"error": "model_name: no such model or version"})
        server.app.catalog.resolve("tiny", "2").not_ready_reason = lambda: "stuck"  # type: ignore[method-assign]
        answer = await client.get("/v2/models/alias/ready")
        assert (answer.status_code, answer.json()) == (503, {"error": "the model is not ready"})


async def half_of_a_body(server: FakeServer, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent all of a body but its last byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.app.http_port)
    size = 2**20
    writer.write(f"GET {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {size}\r\n\r\n".encode() + b"x" * (size - 1))
    return reader, writer


async def test_bodies_without_a_key_take_no_room(start_server: StartServer, callers_file: CallersFile) -> None:
    server = await start_server(callers=callers_file.path, http_port=0, public_listing=True)
    for path in ("/health", "/v2/models/tiny/ready", "/v1/models"):
        reader, writer = await half_of_a_body(server, path)
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413 "), path
        assert server.sample("encserve_in_flight_bytes") == 0
        writer.close()
    async with connect(server) as client:
        answer = await client.request("GET", "/health", content=b"x" * 4097)
        assert answer.status_code == 413
        assert "the body must be at most 4096 bytes; was 4097" in answer.text
        assert (await client.request("GET", "/health", content=b"x" * 4096)).status_code == 200


@pytest.mark.parametrize(
    ("service", "method", "message"),
    [
        (HEALTH, "Check", health_pb2.HealthCheckRequest(service="x" * 4096)),
        (INFER_SERVICE, "ModelReady", infer_pb.ModelReadyRequest(name="x" * 4096)),
        (INFER_SERVICE, "ModelMetadata", infer_pb.ModelMetadataRequest(name="x" * 4096)),
    ],
)
async def test_a_message_without_a_key_is_small(
    start_server: StartServer, callers_file: CallersFile, service: str, method: str, message: Any
) -> None:
    server = await start_server(callers=callers_file.path, public_listing=True)
    error = await refused(server, method, message.SerializeToString(), service=service)
    assert error.reason == "REQUEST_TOO_LARGE"
    assert "the request must be at most 4096 bytes; was 4099" in error.text


async def test_slow_calls_without_a_key_leave_room_for_others(
    start_server: StartServer, callers_file: CallersFile
) -> None:
    server = await start_server(callers=callers_file.path)
    rpc: Any = server.channel.stream_unary("/grpc.health.v1.Health/Check")
    slow = [rpc() for _ in range(100)]
    codes = [asyncio.ensure_future(it.code()) for it in slow]
    room = server.app._receiving.places // 8
    await until(lambda: sum(it.done() for it in codes) >= len(slow) - room)
    assert await server.call("Check", health_pb2.HealthCheckRequest(), HEALTH)
    done = [it for it in codes if it.done()]
    assert {it.result() for it in done} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert len(slow) - len(done) == room
    for it in slow:
        it.cancel()
    await asyncio.wait(codes)
    await until(lambda: server.sample("encserve_in_flight_bytes") == 0)


async def test_idle_reflection_without_a_key_makes_room_for_more(
    start_server: StartServer, callers_file: CallersFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(callers=callers_file.path, public_listing=True)
    streams = [await open_reflection(server, ()) for _ in range(server.app._receiving.places // 8)]
    for it in streams:
        assert await it.read()
    with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
        await reflect(server)
    monkeypatch.setattr("encserve_server.rpc.receiving.RECEIVE_SECONDS", 0.0)
    assert await reflect(server)
    with pytest.raises(grpc.aio.AioRpcError, match="another call needs its place"):
        await streams[0].read()
    for it in streams:
        it.cancel()


# ---------------------------------------------------------------------------------------------------------------------
# What callers may do


async def test_a_caller_uses_the_models_that_it_may(start_server: StartServer, callers_file: CallersFile) -> None:
    callers_file.write(entry("search", RIGHT, models='["tiny"]') + entry("other", OTHER, models='["else"]'))
    server = await start_server(callers=callers_file.path, http_port=0, served_model_name=("alias=tiny",))
    await server.encode("hello", metadata=bearer(RIGHT))
    for model in ("", "tiny", "alias"):
        request = pb.EncodeRequest(model=model, inputs=[make_input("hello")])
        error = await refused(server, data=request.SerializeToString(), metadata=bearer(OTHER))
        assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
        named = repr(model) if model else "the default model"
        assert error.text.endswith(f"caller other may not use {named}; it may use else")
    async with connect(server) as client:
        answer = await client.post("/v1/embeddings", json=EMBEDDINGS, headers=dict(bearer(OTHER)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        missing = await client.post("/v1/embeddings", json={"input": "a", "model": "b"}, headers=dict(bearer(OTHER)))
        assert missing.status_code == 404
        assert "tiny" not in missing.text
        for key, count in ((RIGHT, 3), (OTHER, 0)):  # tiny, tiny@1, alias
            assert len((await client.get("/v1/models", headers=dict(bearer(key)))).json()["data"]) == count
        index = await client.post("/v2/repository/index", headers=dict(bearer(OTHER)))
        assert index.json() == []
    listed = pb.ListModelsResponse.FromString(await server.call("ListModels", b"", metadata=bearer(OTHER)))
    assert not listed.models
    assert by_caller(server, "other", "PERMISSION_DENIED") == 4


@pytest.mark.parametrize("accept_any_model", [False, True])
async def test_errors_say_nothing_of_models_that_a_caller_may_not_use(
    start_server: StartServer, callers_file: CallersFile, accept_any_model: bool
) -> None:
    """Not even of one whose name it guesses: neither versions nor ids, nor what stands behind another name."""
    callers_file.write(entry("other", OTHER, models='["else"]'))
    settings = {"served_model_name": ("alias=tiny", "old=tiny@7"), "accept_any_model_name": accept_any_model}
    server = await start_server(callers=callers_file.path, http_port=0, model=("tiny@2",), **settings)
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
        texts.append(error.text.replace("'tiny'", ""))  # which it sent
    texts.append((await refused(server, "GetModel", metadata=metadata)).text)
    async with connect(server) as client:
        for path in ("/info", "/v1/models/alias", "/v1/models/alias@9", "/v2/models/alias/versions/9/config"):
            answer = await client.get(path, headers=dict(metadata))
            assert answer.status_code == 403, path
            texts.append(answer.text)
    for text in texts:
        assert not any(hidden in text for hidden in ("tiny", "2,", "@", "f" * 32, "5" * 32)), text


async def test_inspect_is_a_permission(start_server: StartServer, callers_file: CallersFile) -> None:
    callers_file.write(entry("search", RIGHT) + entry("other", OTHER, inspect="false"))
    server = await start_server(callers=callers_file.path)
    request = pb.InspectRequest(input=make_input("hello"))
    assert await server.inspect(request, metadata=bearer(RIGHT))
    with pytest.raises(Failed, match="caller other may not use Inspect") as caught:
        await server.inspect(b"\xff", metadata=bearer(OTHER))
    assert caught.value.reason == "PERMISSION_DENIED"


async def test_a_caller_over_its_rate_is_told_when(start_server: StartServer, callers_file: CallersFile) -> None:
    callers_file.write(entry("search", RIGHT, tokens_per_second=10) + entry("other", OTHER))
    server = await start_server(callers=callers_file.path, http_port=0)
    await server.encode(*["hello brave new world"] * 5, metadata=bearer(RIGHT))  # 30 tokens: 20 more than a second's
    error = await refused(server, metadata=bearer(RIGHT))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    assert 1000 < int(error.pushback_ms or 0) <= 2000
    assert "caller search has used up its rate of 10 tokens a second" in error.text
    async with connect(server) as client:
        answer = await client.post("/v1/embeddings", json=EMBEDDINGS, headers=dict(bearer(RIGHT)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 2
        assert (await client.get("/v1/models", headers=dict(bearer(RIGHT)))).status_code == 200
    await server.encode("hello", metadata=bearer(OTHER))


async def test_a_rate_counts_calls_in_parts_and_gives_back_what_the_queue_refuses(
    start_server: StartServer, callers_file: CallersFile
) -> None:
    callers_file.write(entry("search", RIGHT, tokens_per_second=100))
    server = await start_server(callers=callers_file.path, http_port=0, max_queue_tokens=64)
    async with connect(server) as client:
        client.headers["api-key"] = RIGHT
        async with asyncio.timeout(10):
            body = {"input": ["hello"] * 300, "model": "tiny"}
            assert (await client.post("/v1/embeddings", json=body)).status_code == 200
        answer = await client.post("/v1/embeddings", json=EMBEDDINGS)
        assert answer.status_code == 429
        assert 6 <= int(answer.headers["retry-after"]) <= 8  # 900 tokens, of which a second's were saved


async def test_a_call_that_fails_midway_costs_the_parts_that_ran(
    start_server: StartServer, callers_file: CallersFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three parts, the third finds the queue full while the first has run and the second runs."""
    monkeypatch.setattr(parts, "_ROOM_SECONDS", 0.0)
    refusals = []

    def refuse(self: QueueFull, *args: Any) -> None:
        refusals.append(args)
        real(self, *args)

    real = QueueFull.__init__
    monkeypatch.setattr(QueueFull, "__init__", refuse)
    callers_file.write(entry("search", RIGHT, tokens_per_second=2) + entry("other", OTHER))
    server = await start_server(callers=callers_file.path, http_port=0, max_queue_tokens=64, max_batch_sequences=1)
    server.engine.hold()
    async with connect(server) as client:
        texts = ["hello brave new world hello brave"] * 2
        body = {"input": [*texts, "hello brave new world hello brave new world"], "model": "tiny"}
        call = asyncio.create_task(client.post("/v1/embeddings", json=body, headers=dict(bearer(RIGHT))))
        await until(lambda: server.sample("encserve_queue_tokens", model="tiny", version="2") == 8)
        filling = asyncio.create_task(server.encode(*[[5] * 4] * 14, metadata=bearer(OTHER)))
        await until(lambda: server.sample("encserve_queue_tokens", model="tiny", version="2") == 64)
        server.engine.let_one_go()
        await until(lambda: len(refusals) == 1)
        server.engine.let_go()
        answer = await call
    await filling
    assert (answer.status_code, answer.headers["encserve-error-reason"]) == (429, "QUEUE_FULL")
    error = await refused(server, metadata=bearer(RIGHT))
    assert error.reason == "RATE_LIMITED"
    assert 5000 < int(error.pushback_ms or 0) <= 7000  # 16 tokens, of which a second's were saved; 24 would take 11 s


@pytest.mark.parametrize(
    "outcome", ["ENGINE_UNHEALTHY", "DEADLINE_EXCEEDED", "CANCELLED", "REQUEST_TOO_LARGE", "QUEUE_FULL"]
)
async def test_a_call_that_ends_before_it_runs_costs_nothing(
    start_server: StartServer, callers_file: CallersFile, outcome: str
) -> None:
    callers_file.write(entry("search", RIGHT, tokens_per_second=1) + entry("other", OTHER))
    stall_seconds = 0.1 if outcome == "ENGINE_UNHEALTHY" else 60
    server = await start_server(callers=callers_file.path, max_queue_tokens=64, stall_seconds=stall_seconds)
    server.engine.hold()
    others = [asyncio.create_task(server.encode([1], metadata=bearer(OTHER)))]
    await asyncio.to_thread(server.engine.started.acquire)
    texts = ["hello"] * (22 if outcome == "REQUEST_TOO_LARGE" else 10)  # of 3 tokens
    if outcome == "QUEUE_FULL":
        others.append(asyncio.create_task(server.encode([5] * 20, [5] * 20, metadata=bearer(OTHER))))
        await until(lambda: server.sample("encserve_queue_tokens", model="tiny", version="2") == 40)
    timeout = 0.1 if outcome == "DEADLINE_EXCEEDED" else None
    call = asyncio.create_task(server.encode(*texts, metadata=bearer(RIGHT), timeout=timeout))
    if outcome == "CANCELLED":
        await until(lambda: server.sample("encserve_queue_tokens", model="tiny", version="2") == 30)
        call.cancel()
    with pytest.raises((Failed, asyncio.CancelledError)):
        await call
    labels = {"caller": "search", "outcome": outcome}
    await until(lambda: server.app.registry.get_sample_value("encserve_caller_calls_total", labels) == 1)
    server.engine.let_go()
    await asyncio.gather(*others)
    await server.encode("hello", metadata=bearer(RIGHT))


@pytest.mark.parametrize("method", ["Tokenize", "Inspect", "/tokenize"])
async def test_what_computes_no_vectors_counts_against_the_rate_too(
    start_server: StartServer, callers_file: CallersFile, method: str
) -> None:
    callers_file.write(entry("search", RIGHT, tokens_per_second=10))
    server = await start_server(callers=callers_file.path, http_port=0)
    text = " ".join(["hello"] * 28)  # 30 tokens with [CLS] and [SEP]: 20 more than a second's
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
    assert 1000 < int(error.pushback_ms or 0) <= 2000


async def test_an_inspection_that_finds_no_room_costs_nothing(
    start_server: StartServer, callers_file: CallersFile
) -> None:
    callers_file.write(entry("search", RIGHT, tokens_per_second=20) + entry("other", OTHER))
    server = await start_server(callers=callers_file.path, max_inspections=1)
    server.inspector.hold()
    request = pb.InspectRequest(input=make_input(" ".join(["hello"] * 28)))
    running = asyncio.create_task(server.inspect(request, metadata=bearer(OTHER)))
    await until(lambda: server.sample("encserve_inspections", model="tiny", version="2") == 1)
    with pytest.raises(Failed) as caught:
        await server.inspect(request, metadata=bearer(RIGHT))
    assert caught.value.reason == "QUEUE_FULL"
    server.inspector.let_go()
    await running
    await server.encode("hello", metadata=bearer(RIGHT))


async def test_tokenize_waits_for_its_callers_turn(
    start_server: StartServer, callers_file: CallersFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One caller sends five texts, then another sends one: the other does not wait for all of the five."""
    callers_file.write(entry("search", RIGHT) + entry("other", OTHER))
    server = await start_server(callers=callers_file.path, tokenizer_threads=1)
    lengths: list[int] = []
    go_on = threading.Event()
    real = TextTokenizer.tokenize_here

    def tokenize(self: TextTokenizer, texts: Sequence[str], *args: Any, details: bool) -> Any:
        lengths.extend(map(len, texts))
        assert go_on.wait(10)
        return real(self, texts, *args, details=details)

    monkeypatch.setattr(TextTokenizer, "tokenize_here", tokenize)
    tasks = []
    for key, text in [(RIGHT, "hello " * 100)] * 5 + [(OTHER, "world " * 99)]:
        request = pb.TokenizeRequest(texts=[text])
        tasks.append(asyncio.create_task(server.call("Tokenize", request, metadata=bearer(key))))
        waiting = sum([600] * len(tasks)) - (6 if key == OTHER else 0)
        await until(lambda: server.sample("encserve_queue_text_bytes", model="tiny", version="2") == waiting)  # noqa: B023
    go_on.set()
    await asyncio.gather(*tasks)
    assert lengths.index(594) == 2  # one ran and one was in the thread's hands


# ---------------------------------------------------------------------------------------------------------------------
# Names that a proxy gives


async def names_counted(server: FakeServer) -> set[str]:
    families = server.app.registry.collect()
    return {it.labels["caller"] for family in families for it in family.samples if "caller" in it.labels}


def named(key: str, name: str) -> Any:
    return (*bearer(key), ("x-gateway-inference-fairness-id", name))


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_a_trusted_proxy_names_the_caller(
    start_server: StartServer, callers_file: CallersFile, is_trusted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    callers_file.write(entry("proxy", RIGHT, proxy="true") + entry("jobs", OTHER))
    server = await start_server(callers=callers_file.path, trust_fairness_id=is_trusted)
    await server.encode("hello", metadata=named(RIGHT, "tenant-1"))
    await server.encode("hello", metadata=named(OTHER, "tenant-2"))
    assert by_caller(server, "tenant-1" if is_trusted else "proxy", "OK") == 1
    assert by_caller(server, "jobs", "OK") == 1
    assert (await refused(server, metadata=named(WRONG, "jobs"))).reason == "UNAUTHENTICATED"
    assert ("proxy = true" in caplog.text) is not is_trusted


async def test_a_file_without_a_proxy_names_nobody_else_and_says_so(
    start_server: StartServer, callers_file: CallersFile, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_server(callers=callers_file.path, trust_fairness_id=True)
    await server.encode("hello", metadata=named(RIGHT, "tenant-1"))
    assert by_caller(server, "search", "OK") == 1
    assert "no caller of the file has proxy = true" in caplog.text


@pytest.mark.parametrize(
    ("proxy", "of_its_own", "expected"),
    [
        ("interactive", "interactive", Priority.INTERACTIVE),
        ("interactive", "bulk", Priority.BULK),
        ("bulk", "interactive", Priority.BULK),
    ],
)
def test_no_name_is_more_urgent_than_its_proxy(
    callers_file: CallersFile, proxy: str, of_its_own: str, expected: Priority
) -> None:
    callers_file.write(
        entry("proxy", RIGHT, proxy="true", priority=f'"{proxy}"')
        + entry("jobs", OTHER, priority=f'"{of_its_own}"', weight=3)
        + entry("gateway", WRONG, proxy="true")
    )
    callers = registry.Callers(registry.open_source(None, None, callers_file.path), FakeClock(), trusts_proxy=True)
    for key in (WRONG, RIGHT, WRONG, RIGHT):  # whoever else has named it before
        metadata = named(key, "jobs")
        caller = callers.caller(callers.known(callers.identify(metadata, tuple)), metadata)
        limit = expected if key == RIGHT else Priority[of_its_own.upper()]
        assert caller == Caller("jobs", 3, limit)
        metadata = named(key, "nobody")
        caller = callers.caller(callers.known(callers.identify(metadata, tuple)), metadata)
        assert caller.priority is Priority[(proxy if key == RIGHT else "interactive").upper()]


@pytest.mark.usefixtures("_poll_fast")
async def test_names_of_proxies_stay_bounded_when_the_file_changes(
    start_server: StartServer, callers_file: CallersFile
) -> None:
    proxy = entry("proxy", RIGHT, proxy="true")
    callers_file.write(proxy)
    server = await start_server(callers=callers_file.path, trust_fairness_id=True)
    for i in range(3):
        for tenant in range(70):
            await refused(server, data=b"", metadata=named(RIGHT, f"tenant-{i}-{tenant}"))
        callers_file.write(proxy + f"# {i}")
        await until(lambda: server.sample("encserve_callers_reads_total", outcome="loaded") == i + 1)  # noqa: B023
    assert len(await names_counted(server)) == 128 + len({"proxy", "other"})


@pytest.mark.usefixtures("_poll_fast")
async def test_a_call_that_outlives_its_caller_makes_no_label(
    start_server: StartServer, callers_file: CallersFile
) -> None:
    callers_file.write(entry("search", RIGHT) + entry("jobs", OTHER))
    server = await start_server(callers=callers_file.path)
    server.engine.hold()
    running = asyncio.create_task(server.encode("hello", metadata=bearer(OTHER)))
    await asyncio.to_thread(server.engine.started.acquire)
    callers_file.write(entry("search", RIGHT))
    await until(lambda: server.sample("encserve_callers_reads_total", outcome="loaded") == 1)
    server.engine.let_go()
    await running
    assert "jobs" not in await names_counted(server)


async def test_what_a_proxy_may_not_do_is_told_as_the_proxys(
    start_server: StartServer, callers_file: CallersFile
) -> None:
    """Rates and permissions are those of its key, whomever it names: who reads the error must know what to change."""
    rules = {"tokens_per_second": 2, "models": '["else", "tiny"]', "inspect": "false"}
    narrow = entry("narrow", OTHER, proxy="true", models='["else"]')
    callers_file.write(entry("gateway", RIGHT, proxy="true", **rules) + narrow)
    server = await start_server(callers=callers_file.path, trust_fairness_id=True)
    header = ("x-gateway-inference-fairness-id", "tenant-1")
    metadata = (*bearer(RIGHT), header)
    with pytest.raises(Failed, match="caller gateway may not use Inspect"):
        await server.inspect(b"", metadata=metadata)
    assert "caller narrow may not use the default" in (await refused(server, metadata=(*bearer(OTHER), header))).text
    await server.encode("hello", metadata=metadata)
    error = await refused(server, metadata=metadata)
    assert error.reason == "RATE_LIMITED"
    assert error.text.startswith("caller gateway has used up its rate of 2 tokens a second")
    assert by_caller(server, "tenant-1", "RATE_LIMITED") == 1


async def test_a_proxy_names_callers_without_keys_and_not_too_many(start_server: StartServer) -> None:
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


# ---------------------------------------------------------------------------------------------------------------------
# Certificates, as TLS will hand them in


CERTIFICATE_ENTRY = '[[caller]]\nname = "search"\ncertificate_names = ["search.example", "spiffe://example/search"]\n'


@pytest.mark.parametrize("names", [["other.example", "search.example"], ["spiffe://example/search"]])
def test_a_certificate_names_the_caller(callers_file: CallersFile, names: Sequence[str]) -> None:
    callers_file.write(CERTIFICATE_ENTRY + entry("other", OTHER))
    callers = registry.Callers(registry.open_source(None, None, callers_file.path), FakeClock())

    def who(metadata: Any) -> str:
        return callers.caller(callers.known(callers.identify(metadata, lambda: names)), metadata).name

    with pytest.raises(Unauthenticated, match="client certificate"):
        callers.identify((), tuple)
    assert who(()) == who(bearer(WRONG)) == "search"
    assert who(bearer(OTHER)) == "other"  # a key says more than the connection


async def test_names_of_certificates_need_certificates(start_server: StartServer, callers_file: CallersFile) -> None:
    callers_file.write(entry("other", OTHER) + CERTIFICATE_ENTRY)
    with pytest.raises(CallersError, match="caller search has certificate_names, and .* needs --tls-client-ca-file"):
        await start_server(callers=callers_file.path)


@pytest.mark.usefixtures("_poll_fast")
async def test_names_of_certificates_that_come_later_are_told(
    start_server: StartServer, callers_file: CallersFile, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_server(callers=callers_file.path)
    callers_file.write(entry("other", OTHER) + CERTIFICATE_ENTRY)
    await until(lambda: server.sample("encserve_callers_reads_total", outcome="loaded") == 1)
    await server.encode("hello", metadata=bearer(OTHER))
    assert "caller search has certificate_names, and" in caplog.text


def test_names_of_a_certificate() -> None:
    certificate = {
        "subject": ((("commonName", "not.this"),),),
        "subjectAltName": (("DNS", "search.example"), ("URI", "spiffe://example/search"), ("IP Address", "10.0.0.1")),
    }
    assert registry.certificate_names(certificate) == ["search.example", "spiffe://example/search"]
    assert registry.certificate_names({}) == []


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:127.0.0.1:5", "127.0.0.1:5"), ("ipv6:%5B::1%5D:5", "[::1]:5"), ("unix:/tmp/socket", "/tmp/socket")],  # noqa: S108
)
def test_what_grpc_says_of_a_peer(peer: str, address: str) -> None:
    """The properties are those that gRPC 1.85 has of a client certificate."""
    properties = {
        "x509_common_name": [b"not.this"],
        "peer_dns": [b"search.example"],
        "peer_uri": [b"spiffe://example/search"],
        "peer_ip": [b"10.0.0.1"],
    }
    context: Any = SimpleNamespace(peer=lambda: peer, auth_context=lambda: properties)
    assert _Peer(context).address() == address
    assert _Peer(context).certificate_names() == ["spiffe://example/search", "search.example"]
