"""Tests of a whole server with a fake engine: health, readiness, stops, ports and metrics."""

import asyncio
import os
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_engine import FakeEngine
from fake_server import D_MODEL, SERVICE, Failed, FakeServer, StartServer, fake_model
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.app import App
from encserve_server.errors import StartupError
from encserve_server.models.turns import FairThreadPool
from encserve_server.repository.loaded import LoadedModel
from encserve_server.settings import Settings
from encserve_server.telemetry import lag
from encserve_server.telemetry.page import MetricsPage

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MODEL = {"model": "tiny", "version": "2"}


async def health(server: FakeServer, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(server.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def becomes(server: FakeServer, wanted: int, service: str = "") -> None:
    """Wait until the service has the wanted health status."""

    async def is_wanted() -> bool:
        return await health(server, service) == wanted

    await until(is_wanted)


def page_status(server: FakeServer, path: str) -> int:
    """Return the HTTP status of a path on the metrics port, which must be the same for GET and HEAD."""
    url = f"http://127.0.0.1:{server.app.metrics_port}{path}"
    with httpx.Client(trust_env=False, verify=False) as client:  # noqa: S501
        got, head = client.get(url), client.head(url)
    assert (head.status_code, head.content) == (got.status_code, b"")
    return got.status_code


# Health


@pytest.mark.system  # takes more than a second
async def test_health_follows_the_engine(server: FakeServer) -> None:
    """With a broken engine, health is NOT_SERVING and calls fail as UNAVAILABLE.

    When the engine works again, health returns to SERVING without a restart.
    """
    for service in ("", SERVICE, f"{SERVICE}/tiny"):
        await becomes(server, SERVING, service)
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await health(server, "unknown")
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND
    server.engine.broken = True
    for _ in range(3):
        with pytest.raises(Failed):
            await server.encode([1])
    await becomes(server, NOT_SERVING)
    with pytest.raises(Failed, match="3 times") as caught:
        await server.encode([1])
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNHEALTHY")
    assert caught.value.pushback_ms is not None
    assert server.sample("encserve_ready", **MODEL) == 0
    assert server.sample("encserve_failed_batches_total", **MODEL) == 3
    server.engine.broken = False
    await becomes(server, SERVING)
    await server.encode([1])
    assert server.sample("encserve_ready", **MODEL) == 1


async def test_healthz_detects_a_blocked_event_loop(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the event loop is blocked, /healthz returns 503. When the event loop runs again, /healthz returns 200.

    The metrics page has separate threads, so it replies even while the event loop is blocked.
    """
    monkeypatch.setattr(lag, "STANDSTILL_SECONDS", 0.2)
    server = await start_server()
    await becomes(server, SERVING)
    url = f"http://127.0.0.1:{server.app.metrics_port}/healthz"
    statuses: list[int] = []

    def status() -> int:
        return httpx.get(url, trust_env=False, verify=False).status_code  # noqa: S501

    def ask() -> None:
        ends = time.monotonic() + 10
        while 503 not in statuses and time.monotonic() < ends:
            statuses.append(status())

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()  # this line blocks the event loop
    assert statuses[-1] == 503

    async def answers() -> bool:
        return await asyncio.to_thread(status) == 200

    await until(answers)


# Stopping


@pytest.mark.system  # takes more than a second
async def test_calls_succeed_during_the_drain_delay(start_server: StartServer) -> None:
    """At the start of a stop, health is NOT_SERVING, but the server still accepts calls.

    So load balancers stop sending calls before the server refuses calls.
    """
    server = await start_server(drain_delay_seconds=1.5)
    await becomes(server, SERVING)
    for path, status in (("/healthz", 200), ("/healthz?verbose", 200), ("/metrics", 200), ("/", 404), ("/health", 404)):
        assert await asyncio.to_thread(page_status, server, path) == status
    stopping = asyncio.create_task(server.app.stop())
    await becomes(server, NOT_SERVING)
    assert await asyncio.to_thread(page_status, server, "/healthz") == 503
    await server.encode([1])
    assert await stopping


async def test_a_stop_right_after_a_change_of_health_ends(start_server: StartServer) -> None:
    """A stop ends even if it cancels the health task while a change of health wakes the task."""
    for _ in range(5):
        server = await start_server()
        server.app._health.changed()
        async with asyncio.timeout(60):
            assert await server.app.stop()


# Starting


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", "grpc"), ("localhost", "grpc"), ("127.0.0.1", "http"), ("127.0.0.1", "metrics")]
)
async def test_a_port_in_use_stops_the_start(start_server: StartServer, host: str, port: str) -> None:
    """By default, gRPC would share the port, or listen only on addresses with a free port."""
    app = (await start_server(http_port=0)).app
    ports = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, f"{port}_port": getattr(app, f"{port}_port")}
    second = App(Settings(model_repository=app.settings.model_repository, host=host, **ports))
    with pytest.raises(StartupError, match=f"--{port}-port .*: Address already in use"):
        await second.start()
    await second.stop()


LOCALHOST = sorted({str(it[4][0]) for it in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)})


@pytest.mark.parametrize(
    ("host", "addresses"), [("::1", ["::1"]), ("localhost", LOCALHOST), ("::", ["127.0.0.1", "::1"])]
)
async def test_every_port_listens_on_every_address_of_its_host(
    start_server: StartServer, host: str, addresses: list[str]
) -> None:
    app = (await start_server(host=host, http_port=0)).app
    for port in (app.grpc_port, app.http_port, app.metrics_port):
        for address in addresses:
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
            await writer.wait_closed()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_the_metrics_page_listens_on_every_local_address_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page listens on both local addresses of the name, and ignores 192.0.2.1, which belongs to another machine.

    To listen, the page must not call `socket.getfqdn`, which asks a name server and may take a minute.
    """
    look_up = socket.getaddrinfo
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", it) for it in ("127.0.0.1", "192.0.2.1", "127.0.0.2")]

    def get(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "both.test":
            return look_up(host, port, *args, **kwargs)
        return [(*rest, (address, port)) for *rest, address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", get)
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("a name server was asked"))
    page = MetricsPage("both.test", 0, CollectorRegistry(), lambda: True)
    try:
        for address in ("127.0.0.1", "127.0.0.2"):
            with urllib.request.urlopen(f"http://{address}:{page.port}/healthz") as answer:
                assert answer.status == 200
        with pytest.raises(OSError, match="Address already in use"):
            MetricsPage("127.0.0.2", page.port, CollectorRegistry(), lambda: True)
    finally:
        page.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", page.port))
    with pytest.raises(OSError, match="Cannot assign requested address"):
        MetricsPage("192.0.2.1", 0, CollectorRegistry(), lambda: True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
async def test_computing_threads_have_a_lower_priority_than_the_event_loop(start_server: StartServer) -> None:
    """All threads of an engine have a lower priority than the event loop, even threads that start during loading.

    On Linux, 19 is the lowest priority.
    """
    seen: dict[str, int] = {}

    def look(thread: str) -> None:
        seen[thread] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    class Engine(FakeEngine):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            look("run")
            return super().run(*args, **kwargs)

    def load(directory: Path, settings: Settings, tokenize_pool: FairThreadPool, served: str) -> LoadedModel:
        started = threading.Thread(target=look, args=("load",))
        started.start()
        started.join()
        return fake_model(directory, tokenize_pool, Engine(D_MODEL))

    await (await start_server(load=load)).encode([1])
    look("loop")
    lower = min(seen.pop("loop") + 5, 19)
    assert seen == {"run": lower, "load": lower}


# Metrics


async def test_metrics_count_calls_tokens_and_stages(server: FakeServer) -> None:
    replies = await asyncio.gather(*(server.encode([1] * (i + 1)) for i in range(10)), server.encode("hello world"))
    with pytest.raises(Failed):
        await server.encode([-1])
    method = {"grpc_type": "unary", "grpc_service": SERVICE, "grpc_method": "Encode"}
    # A caller may get its reply before the server has counted the call.
    await until(lambda: server.sample("encserve_in_flight_requests") == 0)
    assert server.sample("grpc_server_started_total", **method) == 12
    assert server.sample("grpc_server_handled_total", **method, grpc_code="OK") == 11
    assert server.sample("grpc_server_handled_total", **method, grpc_code="InvalidArgument") == 1
    assert server.sample("grpc_server_handling_seconds_count", **method) == 12
    assert server.sample("encserve_tokens_total", **MODEL) == 55 + 4
    computed = sum(max(batch) * len(batch) for batch in server.engine.batches)
    assert server.sample("encserve_padding_tokens_total", **MODEL) == computed - 59
    assert server.sample("encserve_batch_sequences_sum", **MODEL) == 11
    batches = len(server.engine.batches)
    stages = {"queue": 11, "collate": batches, "compute": batches, "split": batches, "tokenize": 1, "encode": 11}
    for stage, count in stages.items():
        assert server.sample("encserve_stage_seconds_count", **MODEL, stage=stage) == count
        assert server.sample("encserve_stage_seconds_sum", **MODEL, stage=stage) > 0
    assert server.sample("encserve_device_busy_seconds_total", **MODEL) > 0
    assert server.sample("encserve_response_bytes_sum", **MODEL) == sum(len(it.SerializeToString()) for it in replies)
    assert server.sample("encserve_response_bytes_count", **MODEL) == 11
    await until(lambda: server.sample("encserve_event_loop_lag_seconds_count"))
    assert server.sample("encserve_refused_total", reason="INVALID_FIELD") == 1
    assert server.sample("encserve_queue_limit_tokens", **MODEL) == 65536
    info = {
        "fingerprint": "f" * 32,
        "precision": "float32",
        "device": "cpu",
        "requested_device": "auto",
        "runtime": "fake",
        "provider": "FakeExecutionProvider",
    }
    assert server.sample("encserve_model_info", **MODEL, **info) == 1


async def test_the_metrics_page_is_complete_before_the_first_request(server: FakeServer) -> None:
    """From the start, every label set has a series with the value 0.

    So in Prometheus, the rate of errors includes the first error.
    """
    url = f"http://127.0.0.1:{server.app.metrics_port}/metrics"
    page = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read())).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    codes = {
        sample.labels["grpc_code"]
        for sample in families["grpc_server_handled"].samples
        if sample.labels["grpc_method"] == "Encode"
    }
    assert {"OK", "InvalidArgument", "ResourceExhausted", "DeadlineExceeded", "Canceled", "Unavailable"} <= codes
    assert {sample.labels["closed_by"] for sample in families["encserve_batches"].samples} >= {"drained", "tokens"}
    assert "_created" not in page
    assert "process_resident_memory_bytes" in page


# Large requests


async def test_grpc_itself_refuses_a_request_with_too_many_bytes(start_server: StartServer) -> None:
    server = await start_server(max_request_mib=1)
    with pytest.raises(Failed) as caught:
        await server.call("Encode", b"x" * (2**20 + 1))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "")


LONG = "hello " * 40_000
CUT = pb.EncodeOptions(truncation=pb.TRUNCATION_END)


async def test_the_bytes_of_waiting_texts_are_bounded(
    start_server: StartServer, tokenized: tuple[list[int], threading.Event]
) -> None:
    """When the waiting texts reach their limit, the server refuses further texts at once, but accepts token ids."""
    server = await start_server(max_queue_text_mib=1)
    first = asyncio.gather(*[server.encode(LONG, options=CUT) for _ in range(4)])
    await until(lambda: server.queued("text_bytes") == 4 * len(LONG))
    with pytest.raises(Failed, match="bytes of text") as caught:
        await server.encode(LONG, options=CUT)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    with pytest.raises(Failed, match="bytes of text"):
        await server.call("Tokenize", pb.TokenizeRequest(texts=[LONG]))
    await server.encode([1])
    tokenized[1].set()
    assert len(await first) == 4
    await server.encode("hello")


async def test_a_short_request_does_not_wait_for_a_long_request(
    server: FakeServer, tokenized: tuple[list[int], threading.Event]
) -> None:
    """The tokenizer takes one text of the long request, then the short request, then the rest of the long request.

    After a text that is too long, the other texts of the request are not tokenized.
    """
    lengths, go_on = tokenized
    slow = asyncio.create_task(server.encode(*[LONG] * 3, options=CUT))
    await until(lambda: server.queued("text_bytes") == len(LONG))  # only one text of the large request is queued
    paragraph = "hello world " * 50
    quick = asyncio.create_task(server.encode(paragraph, options=CUT))
    await until(lambda: server.queued("text_bytes") > len(LONG))
    go_on.set()
    await asyncio.gather(slow, quick)
    assert lengths == [len(LONG), len(paragraph), len(LONG), len(LONG)]
    with pytest.raises(Failed, match=r"inputs\[0\].text: .* 32 tokens"):
        await server.encode(*[LONG] * 3)
    assert len(lengths) == 5
