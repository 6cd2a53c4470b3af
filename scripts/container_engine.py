"""Runs docker or podman, and their compose commands, for `test_containers.py`."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# docker-compose.yml reads the published ports from these environment variables.
PORTS = ("GRPC_PORT", "HTTP_PORT", "METRICS_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")


class EngineFailed(Exception):
    """A command of docker, podman or compose failed. The message contains the output of the command."""


class Engine:
    """Docker or podman, its compose command, and one compose project.

    Attributes:
        command: The path of the command docker or podman.
        is_podman: Whether the engine is podman.
        project: The name of the compose project.
        ports: The published port numbers. The keys are grpc, http, metrics, prometheus and grafana.
    """

    def __init__(self, command: str, compose: list[str]) -> None:
        """Choose free ports. `command` is the path of docker or podman; `compose` is the engine's compose command."""
        self.command = command
        self.is_podman = Path(command).name == "podman"
        self.project = f"encserve-test-{os.getpid()}"
        self._compose = [*compose, "--project-name", self.project]
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.ports = {name.removesuffix("_PORT").lower(): port for name, port in ports.items()}
        # Podman builds with chroot isolation. Stronger isolation fails if this script itself runs in a container.
        self._environment = os.environ | {name: str(port) for name, port in ports.items()}
        self._environment |= {"BUILDAH_ISOLATION": "chroot", "COMPOSE_PROFILES": ""}

    @staticmethod
    def find() -> "Engine | None":
        """Find docker with compose, or else podman with podman-compose. If no engine works, return None."""
        for name, composes in (
            ("docker", [["docker", "compose"], ["docker-compose"]]),
            ("podman", [["podman-compose"]]),
        ):
            command = shutil.which(name)
            if command is None or not _succeeds([command, "info"]):
                continue
            for compose in composes:
                if _succeeds([*compose, "version"]):
                    return Engine(command, compose)
        return None

    def run(
        self, *arguments: str | Path, timeout: float = 120, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command of docker or podman.

        Raises:
            EngineFailed: `check` is True, and the exit status is not 0.
            subprocess.TimeoutExpired: The command takes more than `timeout` seconds.
        """
        return self._run([self.command, *map(str, arguments)], timeout, check)

    def compose(self, profile: str, *arguments: str, timeout: float = 300) -> str:
        """Run a compose command with a profile. Return the command's stdout."""
        return self._run([*self._compose, "--profile", profile, *arguments], timeout, check=True).stdout

    def _run(self, command: list[str], timeout: float, check: bool) -> "subprocess.CompletedProcess[str]":
        # The output goes to files, not to a pipe. The command may start processes that keep running. Such a process
        # would keep the pipe open, so a read of the pipe would not end.
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
        """Pull an image if this machine does not have the image. Return whether the machine now has the image."""
        if self.run("image", "inspect", image, check=False).returncode == 0:
            return True
        try:
            return self.run("pull", "--quiet", image, timeout=600, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def container(self, service: str) -> str:
        """The id of a service's container.

        Raises:
            EngineFailed: The service does not have exactly one container.
        """
        labels = (f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}")
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        ids = self.run("ps", "--all", "--quiet", *filters).stdout.split()
        if len(ids) != 1:
            raise EngineFailed(f"the service {service} has {len(ids)} containers instead of one: {ids}")
        return ids[0]

    def inspect(self, service: str) -> Any:
        """The parsed JSON output of `container inspect` for a service's container."""
        return json.loads(self.run("container", "inspect", self.container(service)).stdout)[0]

    def healthy(self, service: str) -> bool:
        """Whether the health check of a service's container passes."""
        if self.is_podman:  # without systemd, podman does not run health checks by itself
            return self.run("healthcheck", "run", self.container(service), check=False).returncode == 0
        return str(self.inspect(service)["State"]["Health"]["Status"]) == "healthy"

    def logs(self) -> str:
        """The last 20 lines of the log of each container in the project."""
        names = self.run("ps", "--all", *self._in_project(), "--format", "{{.Names}}").stdout.split()
        parts = [(name, self.run("logs", "--tail", "20", name, check=False)) for name in names]
        return "\n".join(f"--- {name}\n{done.stdout}{done.stderr}" for name, done in parts)

    def leftovers(self) -> list[str]:
        """The ids of the project's containers, volumes and networks that still exist."""
        kinds = (["ps", "--all"], ["volume", "ls"], ["network", "ls"])
        return [it for kind in kinds for it in self.run(*kind, "--quiet", *self._in_project()).stdout.split()]

    def _in_project(self) -> tuple[str, str]:
        return "--filter", f"label=com.docker.compose.project={self.project}"


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def free_ports(count: int) -> list[int]:
    """Find `count` different free ports on the loopback interface."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [it.getsockname()[1] for it in sockets]
    finally:
        for it in sockets:
            it.close()
