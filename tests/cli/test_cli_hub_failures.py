"""Tests with a hub that does not answer or cuts connections. A finished bundle is found without the hub."""

import contextlib
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_exporter import FakeExporter
from fake_hub import Hub, hub_variables, open_hub
from serve_command import clean_environment, without_packages

from encserve import hub as checkpoints

pytestmark = pytest.mark.system

FIND = "import sys; from encserve_cli.bundles.finding import find_bundle; print(find_bundle(sys.argv[1]))"
NEW_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
MODEL = "owner/my-encoder"


@dataclass
class Machine:
    """The caches of a machine, a hub with a small checkpoint, and a fake exporter.

    Attributes:
        hub: The hub.
        folder: The folder of the caches.
    """

    hub: Hub
    folder: Path

    def find(self, **more: str) -> "subprocess.CompletedProcess[str]":
        """Find or make the bundle of MODEL in a separate process. `more` has additional environment variables."""
        variables = {
            **hub_variables(self.hub.endpoint, self.folder / "hf"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONPATH": str(self.folder / "exporter") + ":" + clean_environment({}).get("PYTHONPATH", ""),
            **more,
        }
        command = [sys.executable, "-c", FIND, MODEL]
        return subprocess.run(
            command, env=clean_environment(variables), capture_output=True, text=True, timeout=60, check=False
        )

    def commit(self, weights: bytes, *revisions: str, commit: str) -> None:
        """Store a checkpoint with some weights."""
        checkpoint = self.folder / "checkpoint"
        shutil.rmtree(checkpoint, ignore_errors=True)
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
        (checkpoint / "model.safetensors").write_bytes(weights)
        self.hub.commit(checkpoint, *revisions, commit=commit)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    FakeExporter(tmp_path / "exporter")
    with open_hub(MODEL) as hub:
        machine = Machine(hub, tmp_path)
        machine.commit(b"0" * 100_000, "main", commit="0" * 40)
        yield machine


@contextlib.contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve a port. Each connection is passed to a function, and stays open until the end of the block."""
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    connections.append(server.accept()[0])
                    answer(connections[-1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in connections:
        connection.close()


def close(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def refuse(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


def wait(_: socket.socket) -> None:
    """Send nothing."""


def endpoint(address: str) -> Mapping[str, str]:
    return {"HF_ENDPOINT": f"http://{address}"}


def proxy(address: str) -> Mapping[str, str]:
    return {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": f"http://{address}", "NO_PROXY": "", "no_proxy": ""}


@pytest.mark.parametrize(
    ("answer", "variables"),
    [(close, endpoint), (reset, endpoint), (refuse, proxy), (wait, endpoint)],
    ids=["closed", "reset", "refusing proxy", "silent"],
)
def test_a_finished_bundle_is_found_without_an_answer_of_the_hub(
    machine: Machine, answer: Callable[[socket.socket], None], variables: Callable[[str], Mapping[str, str]]
) -> None:
    with listener(answer) as address:
        failed = machine.find(**variables(address))
        assert failed.returncode == 1
        assert f"RuntimeError: --bundle no directory {MODEL}, and its download from the hub to " in failed.stderr
        made = machine.find()
        assert made.returncode == 0, made.stderr
        shutil.rmtree(machine.folder / "hf")
        found = machine.find(**variables(address))
    assert found.stdout == made.stdout
    assert f"Continuing with commit {'0' * 40}, which was exported before" in found.stderr


@pytest.mark.parametrize("problem", ["no PyTorch", "a cut download", "a broken export"])
def test_a_new_commit_that_cannot_be_made_leaves_the_finished_bundle(machine: Machine, problem: str) -> None:
    made = machine.find()
    machine.commit(b"1" * 100_000, "main", commit=NEW_COMMIT)
    more: Mapping[str, str] = {}
    if problem == "no PyTorch":
        packages = without_packages(machine.folder / "packages", "torch")
        more = {"PYTHONPATH": f"{machine.folder / 'packages'}:{packages['PYTHONPATH']}"}
    elif problem == "a cut download":
        machine.hub.is_cut = True
    else:
        shutil.rmtree(machine.folder / "exporter" / "ready")
    found = machine.find(**more)
    assert found.stdout == made.stdout, found.stderr
    assert f"Continuing with commit {'0' * 40}, which was exported before" in found.stderr
    assert NEW_COMMIT not in found.stdout


def test_a_download_without_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4_000_000))
    plan = checkpoints.Plan({"model.safetensors": 5_000_000}, ("model.safetensors",))
    with pytest.raises(checkpoints.HubError, match=r"needs 5 MB in .*, but only 4 MB are free. Free some space, or"):
        checkpoints.fetch(checkpoints.Snapshot(tmp_path, MODEL, NEW_COMMIT), plan)
