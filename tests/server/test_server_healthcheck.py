"""Tests of the command that checks the health of a server in a container."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from certificates import make_certificates
from fake_server import FakeServer, StartServer, refusal
from real_server import real_server
from tiny_bundle import write_bundle
from waiting import until

from encserve_server import healthcheck


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run the command in the same way as a container. Return the exit status and the output of the command."""
    command = [sys.executable, "-m", "encserve_server.healthcheck", *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert not done.stderr
    return done.returncode, done.stdout.strip()


@pytest.mark.system
def test_the_check_of_a_real_server(tmp_path: Path) -> None:
    """The check reports SERVING for a running server, and UNAVAILABLE after the server has ended.

    The address of the server comes from its environment variables or from an argument.
    """
    write_bundle(tmp_path)
    with real_server(tmp_path) as server:
        own = {"ENCSERVE_HOST": "0.0.0.0", "ENCSERVE_GRPC_PORT": str(server.grpc_port)}  # noqa: S104 - not bound
        assert run(**own) == (0, "SERVING")
        assert run(server.target, ENCSERVE_GRPC_PORT="1") == (0, "SERVING")
    status, output = run(**own)
    assert (status, output.partition(":")[0]) == (1, "UNAVAILABLE")


@pytest.mark.parametrize("with_clients", [False, True])
async def test_the_check_of_a_server_with_tls(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_clients: bool
) -> None:
    """The check of a server with TLS uses the metrics port, where /healthz needs no client certificate.

    The check ignores the name in the certificate of the server.
    """
    made = make_certificates(tmp_path)
    files = {"tls_cert_file": made.other_name.cert, "tls_key_file": made.other_name.key}
    server = await start_server(**files, tls_client_ca_file=made.ca if with_clients else None)
    monkeypatch.setenv("ENCSERVE_TLS_CERT_FILE", str(made.other_name.cert))
    monkeypatch.setenv("ENCSERVE_METRICS_PORT", str(server.app.metrics_port))

    async def is_healthy() -> bool:
        return await asyncio.to_thread(healthcheck.main, []) == 0

    await until(is_healthy)  # on a busy machine the server may not be ready for a moment
    await server.app._health.shut_down()
    assert await asyncio.to_thread(healthcheck.check_page, "localhost", server.app.metrics_port) == "NOT_SERVING"
    assert await asyncio.to_thread(healthcheck.main, []) == 1


async def test_an_unhealthy_engine_is_reported(server: FakeServer) -> None:
    target = f"127.0.0.1:{server.app.grpc_port}"
    server.engine.broken = True
    for _ in range(3):
        await refusal(server.encode([1]))
    while (answer := await asyncio.to_thread(healthcheck.check, target, 60.0)) == "SERVING":
        await asyncio.sleep(0.02)
    assert answer == "NOT_SERVING"
    assert await asyncio.to_thread(healthcheck.main, [target]) == 1


def test_the_deadline_ends_the_wait_for_a_silent_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        answer = healthcheck.check(f"127.0.0.1:{port}", deadline_seconds=0.05)
        assert answer.startswith(("DEADLINE_EXCEEDED", "UNAVAILABLE"))
        assert healthcheck.check_page("127.0.0.1", port, 0.05).startswith("UNAVAILABLE: ")


@pytest.mark.parametrize(
    ("host", "port", "target"),
    [
        ("", "", "127.0.0.1:50051"),
        ("0.0.0.0", "6000", "127.0.0.1:6000"),  # noqa: S104 - not bound
        ("::", "6000", "[::1]:6000"),
        ("10.0.0.7", "6000", "10.0.0.7:6000"),
    ],
)
def test_the_target_comes_from_the_settings_of_the_server(
    monkeypatch: pytest.MonkeyPatch, host: str, port: str, target: str
) -> None:
    monkeypatch.setenv("ENCSERVE_HOST", host)
    monkeypatch.setenv("ENCSERVE_GRPC_PORT", port)
    assert healthcheck.own_target() == target


@pytest.mark.system
def test_the_check_imports_no_large_package() -> None:
    """The check imports no large package: a container runs the check every few seconds, so it must start fast."""
    code = "import sys, encserve_server.healthcheck; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not set(done.stdout.split()) & {"click", "numpy", "onnxruntime", "prometheus_client", "tokenizers", "uvloop"}
