"""Docker or podman with compose, as `test_containers.py` uses them."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# What docker-compose.yml publishes.
PORTS = ("GRPC_PORT", "HTTP_PORT", "METRICS_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")


class EngineFailed(Exception):
    """A command of the engine failed; with what it said."""


class Engine:
    """Docker or podman, with its compose, and one project in it."""

    def __init__(self, command: str, compose: list[str]) -> None:
        """The engine's command and that of its compose."""
        self.command = command
        self.is_podman = Path(command).name == "podman"
        self.project = f"encserve-test-{os.getpid()}"
        self._compose = [*compose, "--project-name", self.project]
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.ports = {name.removesuffix("_PORT").lower(): port for name, port in ports.items()}
        # chroot, since a machine that is a container itself may not do more while it builds.
        self._environment = os.environ | {name: str(port) for name, port in ports.items()}
        self._environment |= {"BUILDAH_ISOLATION": "chroot", "COMPOSE_PROFILES": ""}

    @staticmethod
    def find() -> "Engine | None":
        """Docker if its daemon answers, else podman; None if there is neither, or no compose for it."""
        candidates = [
            ("docker", [["docker", "compose"], ["docker-compose"]]),
            ("podman", [["podman-compose"]]),
        ]
        for name, composes in candidates:
            command = shutil.which(name)
            if command is None or not _succeeds([command, "info"]):
                continue
            for compose in composes:
                found = shutil.which(compose[0])
                if found is not None and _succeeds([found, *compose[1:], "version"]):
                    return Engine(command, [found, *compose[1:]])
        return None

    def run(
        self, *arguments: str | Path, timeout: float = 120, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a command of the engine."""
        return self._run([self.command, *map(str, arguments)], timeout, check)

    def compose(self, profile: str, *arguments: str, timeout: float = 300) -> str:
        """Runs a command of compose, with a profile."""
        return self._run([*self._compose, "--profile", profile, *arguments], timeout, check=True).stdout

    def _run(self, command: list[str], timeout: float, check: bool) -> "subprocess.CompletedProcess[str]":
        # Into files: what an engine leaves running would keep a pipe open, and reading it would wait for that.
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            status = subprocess.run(
                command, cwd=ROOT, env=self._environment, stdout=output, stderr=errors, timeout=timeout, check=False
            ).returncode
            output.seek(0)
            errors.seek(0)
            done = subprocess.CompletedProcess(command, status, output.read(), errors.read())
        if check and status:
            raise EngineFailed(f"{' '.join(command)}: exit status {status}\n{(done.stdout + done.stderr)[-6000:]}")
        return done

    def has(self, image: str) -> bool:
        """Whether an image is here, or can be brought."""
        if self.run("image", "inspect", image, check=False).returncode == 0:
            return True
        try:
            return self.run("pull", "--quiet", image, timeout=600, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def container(self, service: str) -> str:
        """The id of a service's container."""
        labels = (f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}")
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        ids = self.run("ps", "--all", "--quiet", *filters).stdout.split()
        if len(ids) != 1:
            raise EngineFailed(f"{service} has {len(ids)} containers: {ids}")
        return ids[0]

    def inspect(self, service: str) -> Any:
        """What the engine knows of a service's container."""
        return json.loads(self.run("container", "inspect", self.container(service)).stdout)[0]

    def healthy(self, service: str) -> bool:
        """Whether the container's own health check passes."""
        if self.is_podman:  # which runs health checks by itself only where there is systemd
            return self.run("healthcheck", "run", self.container(service), check=False).returncode == 0
        return str(self.inspect(service)["State"]["Health"]["Status"]) == "healthy"

    def logs(self) -> str:
        """The last lines of each container's log."""
        label = f"label=com.docker.compose.project={self.project}"
        names = self.run("ps", "--all", "--filter", label, "--format", "{{.Names}}").stdout.split()
        parts = [(name, self.run("logs", "--tail", "20", name, check=False)) for name in names]
        return "\n".join(f"--- {name}\n{done.stdout}{done.stderr}" for name, done in parts)

    def leftovers(self) -> list[str]:
        """Containers, volumes and networks of the project."""
        label = f"label=com.docker.compose.project={self.project}"
        kinds = (["ps", "--all"], ["volume", "ls"], ["network", "ls"])
        return [it for kind in kinds for it in self.run(*kind, "--quiet", "--filter", label).stdout.split()]


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody has."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [it.getsockname()[1] for it in sockets]
    finally:
        for it in sockets:
            it.close()
