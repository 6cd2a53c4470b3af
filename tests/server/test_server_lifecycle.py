"""Health, readiness, draining and metrics of a whole server with a fake engine."""

import asyncio
import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
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
from encserve_server.errors import BundleError, StartupError
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.models.turns import TurnPool
from encserve_server.repository.loaded import LoadedModel
from encserve_server.settings import Settings
from encserve_server.telemetry import lag
from encserve_server.telemetry.page import MetricsPage
from encserve_server.types.sequences import TokenSequence

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(server: FakeServer, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(server.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def becomes(server: FakeServer, wanted: int, service: str = "") -> None:
    while await health(server, service) != wanted:
        await asyncio.sleep(0.02)


async def test_health_by_service(server: FakeServer) -> None:
    for service in ("", SERVICE, f"{SERVICE}/tiny"):
        await becomes(server, SERVING, service)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(server, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_follows_the_engine(server: FakeServer) -> None:
    """Broken: NOT_SERVING, UNAVAILABLE at once, and the reason in GetModel. Mended: SERVING by itself."""
    await becomes(server, SERVING)
    server.engine.broken = True
    for _ in range(3):
        with pytest.raises(Failed):
            await server.encode([1])
    await becomes(server, NOT_SERVING)
    with pytest.raises(Failed, match="the model is not available: the engine failed 3 times") as caught:
        await server.encode([1])
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNHEALTHY")
    assert caught.value.pushback_ms is not None
    assert server.sample("encserve_ready", model="tiny", version="2") == 0
    server.engine.broken = False
    await becomes(server, SERVING)
    await server.encode([1])
    assert server.sample("encserve_ready", model="tiny", version="2") == 1


async def test_a_stuck_batch_turns_health(start_server: StartServer) -> None:
    server = await start_server(stall_seconds=0.1)
    await becomes(server, SERVING)
    server.engine.hold()
    call = asyncio.create_task(server.encode([1]))
    await becomes(server, NOT_SERVING)
    server.engine.let_go()
    await call
    await becomes(server, SERVING)


def page_status(server: FakeServer, path: str) -> int:
    """What the metrics port answers, to GET as to HEAD."""
    url = f"http://127.0.0.1:{server.app.metrics_port}{path}"
    with httpx.Client(trust_env=False, verify=False) as client:  # noqa: S501
        got, head = client.get(url), client.head(url)
    assert (head.status_code, head.content) == (got.status_code, b"")
    return got.status_code


async def test_the_metrics_port_has_health_for_probes_that_know_no_grpc(start_server: StartServer) -> None:
    server = await start_server(drain_delay_seconds=0.5)
    await becomes(server, SERVING)
    assert await asyncio.to_thread(page_status, server, "/healthz") == 200
    assert await asyncio.to_thread(page_status, server, "/healthz?verbose") == 200
    assert await asyncio.to_thread(page_status, server, "/metrics") == 200
    for path in ("/", "/health", "/metrics/x", "/favicon.ico"):
        assert await asyncio.to_thread(page_status, server, path) == 404
    stopping = asyncio.create_task(server.app.stop())
    await becomes(server, NOT_SERVING)
    assert await asyncio.to_thread(page_status, server, "/healthz") == 503
    assert await stopping


async def test_an_event_loop_that_stands_still_is_seen_by_probes(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page has threads of its own, and would go on saying what the loop said last."""
    monkeypatch.setattr(lag, "STANDSTILL_SECONDS", 0.3)
    server = await start_server()
    await becomes(server, SERVING)
    statuses: list[int] = []

    url = f"http://127.0.0.1:{server.app.metrics_port}/healthz"

    def status() -> int:  # not of two requests, between which it may change
        return httpx.get(url, trust_env=False, verify=False).status_code  # noqa: S501

    def ask() -> None:
        ends = time.monotonic() + 10
        while 503 not in statuses and time.monotonic() < ends:
            statuses.append(status())

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()  # on the event loop
    assert statuses[-1] == 503
    while await asyncio.to_thread(status) != 200:
        await asyncio.sleep(0.02)


async def test_a_watcher_sees_the_drain_before_calls_are_refused(start_server: StartServer) -> None:
    server = await start_server(drain_delay_seconds=1.5)
    await becomes(server, SERVING)
    stopping = asyncio.create_task(server.app.stop())
    await becomes(server, NOT_SERVING)
    await server.encode([1])  # balancers have not noticed yet: calls still succeed
    assert await stopping


async def test_what_is_in_flight_is_finished(server: FakeServer) -> None:
    server.engine.hold()
    calls = [asyncio.create_task(server.encode([i + 1])) for i in range(20)]
    while server.sample("encserve_in_flight_requests") < 20:
        await asyncio.sleep(0.01)
    stopping = asyncio.create_task(server.app.stop())
    await asyncio.sleep(0.2)
    with pytest.raises(Failed, match="the server is stopping") as caught:
        await server.encode([99])
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    server.engine.let_go()
    assert len(await asyncio.gather(*calls)) == 20
    assert await stopping


async def test_the_grace_period_ends(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is stuck keeps neither callers nor the process waiting for ever, and the stop says so."""
    monkeypatch.setattr("encserve_server.repository.manager._CLOSE_SECONDS", 0.2)
    server = await start_server(grace_seconds=0.2)
    server.engine.hold()
    call = asyncio.create_task(server.encode([1]))
    await asyncio.to_thread(server.engine.started.acquire)
    stopping = asyncio.create_task(server.app.stop())
    with pytest.raises(Failed):
        await call
    assert not await stopping


async def test_a_taken_port_is_said(start_server: StartServer) -> None:
    """By default gRPC would share the port in silence, or take another of the host's addresses."""
    server = await start_server()
    repository = server.app.settings.model_repository
    for host, ports, text in (
        ("127.0.0.1", (server.app.grpc_port, 0), "--grpc-port .*: Address already in use"),
        ("localhost", (server.app.grpc_port, 0), "--grpc-port .*: Address already in use"),
        ("127.0.0.1", (0, server.app.metrics_port), "--metrics-port .*: Address already in use"),
    ):
        second = App(Settings(model_repository=repository, host=host, grpc_port=ports[0], metrics_port=ports[1]))
        with pytest.raises(StartupError, match=text):
            await second.start()
        await second.stop()


async def test_a_model_that_does_not_load_stops_the_start(start_server: StartServer) -> None:
    server = await start_server()
    repository = server.app.settings.model_repository
    app = App(Settings(model_repository=repository, grpc_port=0, metrics_port=0))  # the real loader, empty manifests
    with pytest.raises(BundleError, match=r"tiny/2/manifest.json: not a manifest"):
        await app.start()
    await app.stop()


async def test_metrics_tell_what_happened(server: FakeServer) -> None:
    await asyncio.gather(*(server.encode([1] * (i + 1)) for i in range(10)), server.encode("hello world"))
    with pytest.raises(Failed):
        await server.encode([-1])
    model = {"model": "tiny", "version": "2"}
    method = {"grpc_type": "unary", "grpc_service": SERVICE, "grpc_method": "Encode"}
    assert server.sample("grpc_server_started_total", **method) == 12
    assert server.sample("grpc_server_handled_total", **method, grpc_code="OK") == 11
    assert server.sample("grpc_server_handled_total", **method, grpc_code="InvalidArgument") == 1
    assert server.sample("grpc_server_handling_seconds_count", **method) == 12
    assert server.sample("encserve_tokens_total", **model) == 55 + 4
    computed = sum(max(batch) * len(batch) for batch in server.engine.batches)
    assert server.sample("encserve_padding_tokens_total", **model) == computed - 59
    assert server.sample("encserve_batch_sequences_sum", **model) == 11
    assert server.sample("encserve_stage_seconds_count", **model, stage="queue") == 11
    assert server.sample("encserve_stage_seconds_count", **model, stage="compute") == len(server.engine.batches)
    assert server.sample("encserve_stage_seconds_count", **model, stage="tokenize") == 1
    assert server.sample("encserve_stage_seconds_count", **model, stage="encode") == 11
    assert server.sample("encserve_refused_total", reason="INVALID_FIELD") == 1
    await until(lambda: server.sample("encserve_in_flight_requests") == 0)  # a caller may have its answer before
    assert server.sample("encserve_queue_limit_tokens", **model) == 65536
    info = {
        "fingerprint": "f" * 32,
        "precision": "float32",
        "device": "cpu",
        "requested_device": "auto",
        "runtime": "fake",
    }
    assert server.sample("encserve_model_info", **model, **info, provider="FakeExecutionProvider") == 1


async def test_the_metrics_page_is_whole_before_the_first_request(server: FakeServer) -> None:
    """Every label set is there at zero, so that a rate over the first error is not missed."""
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


async def test_a_flood_ends_in_answers_or_refusals(start_server: StartServer) -> None:
    """Ten times the queue's limit at once; afterwards the server serves as before."""
    server = await start_server(max_queue_tokens=100)
    server.engine.hold()
    calls = [asyncio.create_task(server.encode([1] * 10)) for _ in range(100)]
    while sum(call.done() for call in calls) < 80:
        await asyncio.sleep(0.01)
    assert server.sample("encserve_queue_tokens", model="tiny", version="2") <= 100
    server.engine.let_go()
    results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Failed)]
    assert {result.code for result in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert 10 <= len(results) - len(refused) <= 20
    assert server.sample("encserve_queue_tokens", model="tiny", version="2") == 0
    await server.encode([1] * 10)


async def test_a_stop_right_after_a_change_of_health_ends(start_server: StartServer) -> None:
    """The follower of health is cancelled in the very moment in which it is woken."""
    for _ in range(20):
        server = await start_server()
        server.app._health.changed()
        async with asyncio.timeout(60):
            assert await server.app.stop()


async def test_one_huge_request_holds_nobody_up(start_server: StartServer) -> None:
    """What can be refused by a count is refused before anything is copied."""
    server = await start_server(max_request_mib=64)
    for huge, reason in (
        (pb.EncodeRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=[1] * 2_000_000))]), "SEQUENCE_TOO_LONG"),
        (pb.EncodeRequest(inputs=[pb.Input(text="")] * 200_000), "TOO_MANY_INPUTS"),
    ):
        data = huge.SerializeToString()
        call = asyncio.create_task(server.call("Encode", data))
        with pytest.raises(Failed) as caught:
            await call
        assert caught.value.reason == reason


async def test_a_request_over_the_limit_is_grpcs_to_refuse(server: FakeServer) -> None:
    with pytest.raises(Failed, match="larger than max") as caught:
        await server.call("Encode", b"x" * (4 * 2**20 + 1))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "")


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[int], threading.Event]]:
    """How long each text was, in the order in which their turns began; none ends before the event is set."""
    lengths: list[int] = []
    go_on = threading.Event()
    real = TextTokenizer.tokenize_here

    def tokenize(
        self: TextTokenizer, texts: Sequence[str], max_tokens: int, *, details: bool
    ) -> list[TokenSequence | str]:
        lengths.extend(map(len, texts))
        assert go_on.wait(60)
        return real(self, texts, max_tokens, details=details)

    monkeypatch.setattr(TextTokenizer, "tokenize_here", tokenize)
    yield lengths, go_on
    go_on.set()


def queued_text_bytes(server: FakeServer) -> float:
    return server.sample("encserve_queue_text_bytes", model="tiny", version="2")


CUT = pb.EncodeOptions(truncation=pb.TRUNCATION_END)


async def test_text_that_waits_is_bounded(
    start_server: StartServer, tokenized: tuple[list[int], threading.Event]
) -> None:
    """A tokenizer that is busy refuses further text at once; token ids pass."""
    server = await start_server(max_queue_text_mib=1)
    texts = ["hello " * 40_000] * 4
    first = asyncio.create_task(server.encode(*texts, options=CUT))
    await until(lambda: queued_text_bytes(server) == 4 * 240_000)
    refused = await asyncio.gather(*(server.encode(*texts, options=CUT) for _ in range(5)), return_exceptions=True)
    for failed in refused:
        assert isinstance(failed, Failed)
        assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert "bytes of text" in failed.text
    await server.encode([1])
    tokenized[1].set()
    assert len((await first).sequences) == 4
    await server.encode("hello")


async def test_a_paragraph_does_not_wait_for_a_long_request(
    server: FakeServer, tokenized: tuple[list[int], threading.Event]
) -> None:
    """Long requests take turns with others, and the first text that is too long ends them."""
    lengths, go_on = tokenized
    long = ["hello " * 40_000] * 3
    slow = asyncio.create_task(server.encode(*long, options=CUT))
    await until(lambda: queued_text_bytes(server) == 3 * 240_000)
    paragraph = "hello world " * 50
    quick = asyncio.create_task(server.encode(paragraph, options=CUT))
    await until(lambda: queued_text_bytes(server) > 3 * 240_000)
    go_on.set()
    await asyncio.gather(slow, quick)
    assert lengths == [240_000, len(paragraph), 240_000, 240_000]
    with pytest.raises(Failed) as caught:
        await server.encode(*long)
    assert caught.value.text.startswith("inputs[0].text: must be at most 32 tokens")
    assert len(lengths) == 5


async def test_an_engine_that_gives_nan_for_everything_is_unhealthy(start_server: StartServer) -> None:
    server = await start_server()
    server.engine.nan_id = 0  # the probe's id too
    for _ in range(3):
        with pytest.raises(Failed):
            await server.encode([0])
    await becomes(server, NOT_SERVING)
    assert server.sample("encserve_failed_batches_total", model="tiny", version="2") == 3


async def test_a_stuck_engine_admits_nobody(start_server: StartServer) -> None:
    server = await start_server(stall_seconds=0.1)
    server.engine.hold()
    stuck = asyncio.create_task(server.encode([1]))
    await asyncio.to_thread(server.engine.started.acquire)
    await asyncio.sleep(0.2)
    with pytest.raises(Failed, match="a batch has been running for") as caught:
        await server.encode([2])
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    server.engine.let_go()
    await stuck


async def test_callers_that_keep_calling_are_never_cancelled_by_a_stop(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing in flight at the signal, gRPC must not stop before callers have been told to go elsewhere."""
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 1.5)
    server = await start_server()
    stopping = asyncio.create_task(server.app.stop())
    await asyncio.sleep(0.05)
    for method, request in (("Encode", pb.EncodeRequest()), ("GetModel", pb.GetModelRequest())):
        results = await asyncio.gather(*(server.call(method, request) for _ in range(20)), return_exceptions=True)
        assert {(it.code, it.reason) for it in results if isinstance(it, Failed)} == {
            (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        }
    assert await stopping
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 0.0)  # the second stop, after the test


@pytest.mark.parametrize("host", ["::1", "localhost"])
async def test_other_loopback_addresses(start_server: StartServer, host: str) -> None:
    server = await start_server(host=host)
    assert server.app.grpc_port > 0
    async with grpc.aio.insecure_channel(f"{'[::1]' if ':' in host else host}:{server.app.grpc_port}") as channel:
        rpc: Any = channel.unary_unary(f"/{SERVICE}/ListModels")
        assert await rpc(b"")


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name `both.test` has two addresses, the second of which this machine has too, and one that it has not."""
    of_name = [(socket.AF_INET, address) for address in ("127.0.0.1", "192.0.2.1", "127.0.0.2")]
    look_up = socket.getaddrinfo

    def get(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "both.test":
            return look_up(host, port, *args, **kwargs)
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in of_name]

    monkeypatch.setattr(socket, "getaddrinfo", get)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_the_metrics_page_has_every_address_of_a_name(two_addresses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And asks no name server who it is, which may take a minute."""
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


def test_an_address_that_this_machine_has_not_is_said() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        MetricsPage("192.0.2.1", 0, CollectorRegistry(), lambda: True)


async def test_every_address_is_those_of_ipv4_too(start_server: StartServer) -> None:
    """With --host ::, as in a container that has both; no port less than the others."""
    app = (await start_server(host="::", http_port=0)).app
    for port in (app.grpc_port, app.http_port, app.metrics_port):
        for address in ("127.0.0.1", "::1"):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
            await writer.wait_closed()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows priorities of threads")
async def test_threads_that_compute_leave_the_cpu_to_the_event_loop(start_server: StartServer) -> None:
    """Whatever an engine makes of threads while it is loaded does so too."""
    seen: dict[str, int] = {}

    def look(where: str) -> None:
        seen[where] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    class Engine(FakeEngine):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            look("run")
            return super().run(*args, **kwargs)

    def load(directory: Path, settings: Settings, tokenize_pool: TurnPool, served: str) -> LoadedModel:
        del settings
        maker = threading.Thread(target=look, args=("a thread of the engine",))
        maker.start()
        maker.join()
        return fake_model(directory, tokenize_pool, Engine(D_MODEL))

    server = await start_server(load=load)
    await server.encode([1])
    look("the event loop")
    before = seen.pop("the event loop")
    assert seen == {"run": before + 5, "a thread of the engine": before + 5}
