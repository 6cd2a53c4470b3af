"""Tests of a server that still prepares its bundles.

The ports are already open. The error of a refused call names the stage, such as a download.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_server import start_fake_server
from grpc_health.v1 import health_pb2
from ports import free_port
from waiting import until

from encserve_server import app as app_module
from encserve_server.errors import StartupError
from encserve_server.settings import Settings

STAGE = "downloading 61 of 90 MB"


async def grpc_status(port: int) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        rpc: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        return health_pb2.HealthCheckResponse.FromString(await rpc(b"")).status


async def test_callers_get_the_stage_until_the_models_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app_module, "_PREPARING_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    go_on = asyncio.Event()

    async def prepare(tell: Callable[[str], None]) -> None:
        await asyncio.to_thread(tell, STAGE)
        await go_on.wait()

    grpc_port, http_port, metrics_port = free_port(), free_port(), free_port()
    ports: dict[str, Any] = {"grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port}
    starting = asyncio.create_task(start_fake_server(tmp_path, prepare=prepare, **ports))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}") as client:
        await until(lambda: [it for it in caplog.records if vars(it).get("stage") == STAGE])
        health = await client.get("/health")
        assert (health.status_code, health.json()["error"]) == (503, f"the server is still {STAGE}")
        embed = await client.post("/v1/embeddings", json={"input": "one text"})
        assert (embed.status_code, embed.json()["error"]["message"]) == (503, f"the server is still {STAGE}")
        assert (await client.get(f"http://127.0.0.1:{metrics_port}/healthz")).status_code == 503
        assert await grpc_status(grpc_port) == health_pb2.HealthCheckResponse.NOT_SERVING
        go_on.set()
        server = await starting
        try:
            assert (await client.get("/health")).status_code == 200
            assert await grpc_status(grpc_port) == health_pb2.HealthCheckResponse.SERVING
        finally:
            await server.stop()


async def test_a_preparation_that_fails_stops_the_start(tmp_path: Path) -> None:
    async def prepare(tell: Callable[[str], None]) -> None:
        raise StartupError("owner/name is gated")

    app = app_module.App(Settings(model_repository=tmp_path, grpc_port=0, metrics_port=0))
    with pytest.raises(StartupError, match="^owner/name is gated$"):
        await app.start(prepare)
    with contextlib.suppress(StartupError):
        await app.stop()
