"""Tests that every line of a JSON log is JSON, after any error."""

import contextlib
import json
import socket
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_server import SERVICE
from real_server import real_server
from tiny_bundle import write_bundle

pytestmark = pytest.mark.system
UNCAUGHT = """
import gc, threading, warnings
from encserve_server.telemetry import logs

class Unraisable:
    def __del__(self):
        raise KeyError("in a destructor")

def fail():
    raise ValueError("in a thread\\nin two lines")

logs.configure("info", "json")
threading.Thread(target=fail).start()
warnings.warn("a warning")
Unraisable()
raise RuntimeError("at last")
"""


def test_an_uncaught_error_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    errors = sorted(
        line.get("exc_info", line["message"]).strip().splitlines()[-1] for line in lines if line["level"] == "CRITICAL"
    )
    assert errors == ["KeyError: 'in a destructor'", "RuntimeError: at last", "in two lines"]
    assert [line["level"] for line in lines if "a warning" in line["message"]] == ["WARNING"]
    assert len(lines) == 4


NONSENSE = [
    b"",
    b"\x16\x03\x01\xff\xff\x00",
    b"\x00" * 70_000,
    b"GET /metrics",
    b"GET /metrics HTTP/1.1\r\n\r\n",
    b"GET //[ HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"GET /metrics?name[]=%ff HTTP/1.1\r\nAccept: application/openmetrics-text;version=x;q=\xff\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnonsense",
]


def test_the_log_is_json_after_nonsense_and_closed_connections(tmp_path: Path) -> None:
    """After clients send nonsense or close their connections, the server still works and its log is JSON.

    `RealServer` parses every log line, so a line that is not JSON fails the test.
    """
    write_bundle(tmp_path)
    with real_server(tmp_path) as server:
        for port in (server.metrics_port, server.grpc_port):
            for data in NONSENSE:
                for abruptly in (False, True):
                    with socket.create_connection(("127.0.0.1", port)) as connection:
                        connection.settimeout(0.1)
                        if abruptly:  # with this option, close() sends a TCP reset
                            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        connection.sendall(data)
                        if not abruptly:
                            with contextlib.suppress(OSError):
                                while connection.recv(65536):
                                    pass
        with grpc.insecure_channel(server.target, compression=grpc.Compression.Gzip) as channel:
            rpc: Any = channel.unary_unary(f"/{SERVICE}/ListModels")
            with pytest.raises(grpc.RpcError):
                rpc(b"0" * 1000)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=60) as page:
            assert page.status == 200
        server.terminate()
        assert server.wait() == 0
    assert server.log[-1]["message"] == "stopped"
