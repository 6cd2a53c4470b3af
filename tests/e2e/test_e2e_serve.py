"""`encserve serve` with models of a hub: downloads, exports, and serves. The hub is a local server."""

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA, minilm_directory
from fake_hub import Hub, hub_variables, open_hub
from fake_server import write_tokenizer
from serve_command import COMMAND, clean_environment, encserve_serve, without_packages
from tiny_bundle import write_bundle
from waiting import until

TEXT = "one text"
OTHER_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
TORCH = ("torch", "transformers", "onnx")
STAGES = ("downloading", "exporting", "checking")


@dataclass
class Machine:
    """A simulated machine, which has its own caches and uses a fake hub.

    Attributes:
        hub: The hub.
        folder: The folder of both caches.
    """

    hub: Hub
    folder: Path

    def variables(self, *, offline: bool = False, **more: str) -> Mapping[str, str]:
        """Return the environment variables of a process on this machine."""
        caches = hub_variables(self.hub.endpoint, self.folder / "hf", offline=offline)
        return {**caches, "XDG_CACHE_HOME": str(self.folder / "cache"), **more}

    @property
    def bundles(self) -> Path:
        """The folder of the finished bundles."""
        return self.folder / "cache" / "encserve" / "bundles"

    def unfinished(self) -> list[str]:
        """Return the unfinished bundles, and the unfinished downloads."""
        entries = self.bundles.iterdir() if self.bundles.is_dir() else ()
        own = [it.name for it in entries if it.name.endswith((".making", ".lock"))]
        return own + [it.name for it in self.folder.rglob("*.incomplete")]

    def processes(self) -> list[str]:
        """Return the commands of all processes that have this machine's caches in their environment."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if str(self.folder).encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().decode().replace("\0", " "))
            except OSError:
                continue  # the process has ended
        return found


@pytest.fixture(scope="module")
def minilm_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine for the real all-MiniLM-L6-v2. The tests with this fixture run in order, and the first test exports."""
    with open_hub("owner/all-MiniLM-L6-v2") as hub:
        hub.commit(minilm_directory(), "main")
        yield Machine(hub, tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with a tokenizer of eight words."""
    folder = tmp_path_factory.mktemp("checkpoint") / "small"
    shutil.copytree(DATA / "hf-bert", folder)
    write_tokenizer(folder / "tokenizer.json")
    return folder


@pytest.fixture
def machine(tmp_path: Path, small_checkpoint: Path) -> Iterator[Machine]:
    """A machine without caches, and a hub with the small model."""
    with open_hub("owner/small") as hub:
        hub.commit(small_checkpoint, "main")
        yield Machine(hub, tmp_path / "machine")


def vector(reply: str) -> np.ndarray:
    return np.array(json.loads(reply)["data"][0]["embedding"], np.float32)  # (d_model,)


async def test_a_first_start_downloads_exports_and_serves(minilm_machine: Machine, tmp_path: Path) -> None:
    """During the start, /health names the stage. The printed curl line returns sentence-transformers' vector.

    The hub breaks off the connection once. The next download starts at the first missing byte.
    """
    from sentence_transformers import SentenceTransformer

    hub = minilm_machine.hub
    hub.hold_after, hub.cut_after = 61_000_000, 75_000_000
    with encserve_serve("owner/all-MiniLM-L6-v2", variables=minilm_machine.variables(), cwd=tmp_path) as it:
        await it.stage("downloading 5")
        status, body = it.health()
        assert status == 503
        assert re.search(r"the server is still downloading 5\d of 9\d MB", body)
        hub.hold_after = None
        hub.go_on.set()
        for stage in STAGES[1:]:
            await it.stage(stage)
        await it.serving()
        assert it.out[0] == "Serving all-MiniLM-L6-v2"
        assert any(line.strip().startswith("gRPC") and "127.0.0.1:" in line for line in it.out)
        assert it.health()[0] == 200
        expected = SentenceTransformer(str(minilm_directory()), device="cpu").encode(TEXT)
        np.testing.assert_allclose(vector(it.curl()), expected, atol=1e-4)
        assert [name for name, first in hub.sent if first > 50_000_000] == ["model.safetensors"]
        assert any("is not a bundle yet: download 9" in line and "GB of memory" in line for line in it.err)
        assert it.stop() == 0
    assert minilm_machine.unfinished() == []


async def test_a_second_start_needs_no_network_and_no_torch(minilm_machine: Machine, tmp_path: Path) -> None:
    variables = minilm_machine.variables(offline=True, **without_packages(tmp_path / "packages", *TORCH))
    sent = len(minilm_machine.hub.sent)
    for _ in range(2):
        with encserve_serve("owner/all-MiniLM-L6-v2", variables=variables, cwd=tmp_path) as it:
            await it.serving()
            assert vector(it.curl()).shape == (384,)
        assert len(minilm_machine.hub.sent) == sent
        shutil.rmtree(minilm_machine.folder / "hf", ignore_errors=True)  # the bundle alone is enough


async def test_a_revision_is_served_beside_the_main_branch(machine: Machine, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(DATA / "hf-distilbert", other)
    write_tokenizer(other / "tokenizer.json")
    machine.hub.commit(other, "v2", commit=OTHER_COMMIT)
    arguments = ("owner/small", "second=owner/small@v2")
    with encserve_serve(*arguments, variables=machine.variables(), cwd=tmp_path) as it:
        await it.serving()
        assert it.out[0] == "Serving small, second"
        manifests = [json.loads(path.read_text()) for path in sorted(machine.bundles.glob("*/*/1/manifest.json"))]
        assert {its["name"]: its["source"]["revision"] for its in manifests} == {
            "small": machine.hub.commits["main"],
            "second": OTHER_COMMIT,
        }
    with encserve_serve("owner/small@v3", variables=machine.variables(), cwd=tmp_path) as it:
        assert it.error() == "owner/small has no revision 'v3'"


async def test_a_broken_connection_is_opened_again(machine: Machine, tmp_path: Path) -> None:
    machine.hub.cut_after = 64 * 1024
    with encserve_serve("owner/small", variables=machine.variables(), cwd=tmp_path) as it:
        await it.serving()
    assert [name for name, _ in machine.hub.sent].count("model.safetensors") == 2


async def test_an_offline_start_names_the_missing_file(machine: Machine, tmp_path: Path) -> None:
    """The hub's cache is empty at first. Later, the cache has a snapshot without weights. No bundle exists."""
    with encserve_serve("owner/small", variables=machine.variables(offline=True), cwd=tmp_path) as it:
        assert "HF_HUB_OFFLINE=0 encserve pull owner/small --to models" in it.error()
    machine.hub.hold_after = 64 * 1024
    with encserve_serve("owner/small", variables=machine.variables(), cwd=tmp_path) as it:
        await it.stage("downloading")
        it.stop(signal.SIGKILL)
    for path in machine.folder.rglob("model.safetensors"):
        path.unlink()
    with encserve_serve("owner/small", variables=machine.variables(offline=True), cwd=tmp_path) as it:
        error = it.error()
    assert f"is not in {machine.folder / 'hf' / 'hub'}; HF_HUB_OFFLINE forbids a download" in error
    assert "model.safetensors of owner/small@" in error


async def test_a_full_disk_ends_in_one_line_and_leaves_nothing(minilm_machine: Machine, tmp_path: Path) -> None:
    """A limit of 20 MB per file simulates a full disk."""
    machine = Machine(minilm_machine.hub, tmp_path / "machine")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))

    with encserve_serve("owner/all-MiniLM-L6-v2", variables=machine.variables(), cwd=tmp_path, limit=limit) as it:
        error = it.error()
    assert f"its download from the hub to {machine.folder / 'hf' / 'hub'} failed: " in error
    assert "File too large" in error
    assert machine.unfinished() == []


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
async def test_a_start_goes_on_after_a_stop_in_any_stage(
    machine: Machine, tmp_path: Path, stage: str, number: signal.Signals
) -> None:
    """The exporter ends when the command ends. After Ctrl-C, the command removes the unfinished bundle.

    After kill -9, the next start removes the unfinished bundle.

    In the stage "downloading", the hub stops sending. The unfinished download stays for the next start.
    """
    machine.hub.hold_after = 64 * 1024 if stage == "downloading" else None
    with encserve_serve("owner/small", variables=machine.variables(), cwd=tmp_path) as it:
        await it.stage(stage)
        status = it.stop(number)
    machine.hub.hold_after = None
    assert status == (0 if number == signal.SIGINT else -number)
    await until(lambda: not machine.processes())
    if number == signal.SIGINT:
        assert [name for name in machine.unfinished() if not name.endswith(".incomplete")] == []
    machine.hub.go_on.set()
    with encserve_serve("owner/small", variables=machine.variables(), cwd=tmp_path) as it:
        await it.serving()
        assert [name for name in machine.unfinished() if not name.endswith(".incomplete")] == []
        assert len([path for path in machine.bundles.iterdir() if not path.name.startswith(".")]) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_start_that_waits_for_a_silent_hub(
    machine: Machine, tmp_path: Path, number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with encserve_serve("owner/small", variables=machine.variables(HF_ENDPOINT=endpoint), cwd=tmp_path) as it:
            await it.stage("looking for the model")
            assert it.stop(number) == 0
    assert machine.unfinished() == []


async def test_two_starts_at_once_work_once(machine: Machine, tmp_path: Path) -> None:
    machine.hub.hold_after = 64 * 1024
    start: dict[str, Any] = {"variables": machine.variables(), "cwd": tmp_path}
    with encserve_serve("owner/small", **start) as one, encserve_serve("owner/small", **start) as other:
        await until(lambda: any("waiting for another process" in body for its in (one, other) for body in its.seen))
        machine.hub.hold_after = None
        machine.hub.go_on.set()
        await one.serving()
        await other.serving()
    assert [name for name, _ in machine.hub.sent].count("model.safetensors") == 1
    assert sum("is not a bundle yet" in line for its in (one, other) for line in its.err) == 1


async def test_a_broken_bundle_is_made_again(machine: Machine, tmp_path: Path) -> None:
    with encserve_serve("owner/small", variables=machine.variables(), cwd=tmp_path) as it:
        await it.serving()
    (graph,) = machine.bundles.glob("*/small/1/model.onnx")
    os.truncate(graph, 1000)
    with encserve_serve("owner/small", variables=machine.variables(), cwd=tmp_path) as it:
        await it.serving()
        assert any("a bundle is broken and will be made again: " in line and "model.onnx" in line for line in it.err)


async def test_pull_prepares_a_machine_without_network(machine: Machine, tmp_path: Path) -> None:
    """A second pull does nothing, also without a network. The bundle is served without network and torch."""
    command = [*COMMAND, "pull", "owner/small", "--to", "models"]
    for offline in (False, True):
        pull = await asyncio.create_subprocess_exec(
            *command,
            cwd=tmp_path,
            env=clean_environment(machine.variables(offline=offline)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await pull.communicate()
        assert pull.returncode == 0, err.decode()
        assert out.decode() == "models/small/1\n"
        shutil.rmtree(machine.folder, ignore_errors=True)
    variables = machine.variables(offline=True, **without_packages(tmp_path / "packages", *TORCH))
    for given in ("models/small", "models/small/1", "mine=models/small"):
        with encserve_serve(given, variables=variables, cwd=tmp_path) as it:
            await it.serving()
            assert it.out[0] == "Serving small"
            assert it.health()[0] == 200
    assert not (machine.bundles).exists()


async def test_a_start_removes_the_temporary_folders_of_killed_servers(tmp_path: Path) -> None:
    """The start keeps the temporary folders of running servers and of other programs."""
    temporary = tmp_path / "temporary"
    (temporary / "encserve-other").mkdir(parents=True)
    (temporary / "encserve-serve-file").touch()
    variables = {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    models = [write_bundle(tmp_path / name, name).parent for name in ("one", "two")]

    def folders() -> list[Path]:
        return [it for it in temporary.glob("encserve-serve-*") if it.is_dir()]

    for _ in range(3):
        with encserve_serve(*models, variables=variables, cwd=tmp_path) as it:
            await it.serving()
            (folder,) = folders()
            it.stop(signal.SIGKILL)
            assert folders() == [folder]
    with encserve_serve(*models, variables=variables, cwd=tmp_path) as one:
        await one.serving()
        (first,) = folders()
        assert first != folder
        with encserve_serve(*models, variables=variables, cwd=tmp_path) as two:
            await two.serving()
            assert len(folders()) == 2
            assert first.is_dir()
            assert two.stop() == 0
        assert folders() == [first]
        assert one.stop() == 0
    assert sorted(it.name for it in temporary.iterdir()) == ["encserve-other", "encserve-serve-file"]
