"""New versions of a model arrive while callers call the server. No call fails.

Each reply has the name and the hidden states of one version.
"""

import asyncio
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import worst_relative_error
from exporting import export_once
from onnxruntime import InferenceSession
from real_server import RealServer, real_server

from encserve_client import AsyncEncoderClient, EncoderClient, FingerprintError
from encserve_export import EncoderConfig, Target, export_init

N_CALLERS, N_SWITCHES, N_MODELS = 32, 20, 3
# The weights take 30 MB, so the memory use shows whether the server frees old versions.
CONFIG = EncoderConfig(vocab_size=10_000, d_model=384, n_heads=12, d_ff=1536, n_layers=2, max_sequence_tokens=128)
INPUTS = [list(range(2, 2 + length)) for length in (1, 7, 30, 100)]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with versions 0 to 20 of one model. Versions n and n mod 3 have the same weights."""
    drafts = tmp_path_factory.mktemp("drafts")
    for number in range(N_MODELS):
        export_once(export_init, CONFIG, number, target=Target(model_repository=drafts, name="m", version=str(number)))
    for number in range(N_MODELS, N_SWITCHES + 1):
        copy = drafts / "m" / str(number)
        shutil.copytree(drafts / "m" / str(number % N_MODELS), copy, copy_function=os.link)
        manifest = json.loads((copy / "manifest.json").read_text())
        (copy / "manifest.json").unlink()
        (copy / "manifest.json").write_text(json.dumps({**manifest, "version": str(number)}))
    return drafts


@pytest.fixture(scope="module")
def wanted(drafts: Path) -> dict[str, list[Any]]:
    """The expected hidden states of `INPUTS` for each version. ONNX Runtime computes one input at a time."""
    rows: dict[str, list[Any]] = {}
    for number in range(N_MODELS):
        session = InferenceSession(drafts / "m" / str(number) / "model.onnx", providers=["CPUExecutionProvider"])
        ids = [np.array([it]) for it in INPUTS]  # each (1, seq)
        feeds = [{"input_ids": it, "attention_mask": np.ones_like(it)} for it in ids]
        rows[str(number)] = [session.run(["last_hidden_state"], feed)[0][0] for feed in feeds]
    return {str(number): rows[str(number % N_MODELS)] for number in range(N_SWITCHES + 1)}


@pytest.fixture
def repository(drafts: Path, tmp_path: Path) -> Path:
    """A model repository with version 0 only."""
    publish(drafts, tmp_path, "0")
    return tmp_path


@pytest.fixture
def server(repository: Path) -> Iterator[RealServer]:
    with real_server(repository, "--model-poll-seconds", "0") as server:
        yield server


def publish(drafts: Path, repository: Path, version: str) -> None:
    """Rename the folder of a version into the repository. The exporter also publishes with a rename."""
    (repository / "m").mkdir(exist_ok=True)
    shutil.copytree(drafts / "m" / version, repository / "m" / f".{version}", copy_function=os.link)
    (repository / "m" / f".{version}").rename(repository / "m" / version)


def served(server: RealServer) -> list[str]:
    """The versions that the server lists."""
    with EncoderClient(server.target) as client:
        return [model.version for model in client.models()]


def only_loaded(server: RealServer, version: str) -> Callable[[], bool]:
    """Return a function that checks whether the server has loaded this version and no other version."""

    def condition() -> bool:
        return (
            server.metric("encserve_model_default", version=version) == 1 and server.metric("encserve_model_info") == 1
        )

    return condition


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.timeout(300)
async def test_twenty_new_versions_under_load(
    server: RealServer, repository: Path, drafts: Path, wanted: dict[str, list[Any]]
) -> None:
    """Publish 20 versions under load. No call fails, and the hidden states are right.

    The server frees the memory of old versions.
    """
    answered: Counter[str] = Counter()
    stop = asyncio.Event()

    async def call(client: AsyncEncoderClient, number: int) -> None:
        while not stop.is_set():
            index = number % len(INPUTS)
            result = await client.run([INPUTS[index]])
            (rows,) = result.outputs[0].arrays()
            assert worst_relative_error(rows, wanted[result.version][index]) <= 1e-5, result.version
            answered[result.version] += 1

    async with AsyncEncoderClient(server.target) as client, asyncio.TaskGroup() as callers:
        for number in range(N_CALLERS):
            callers.create_task(call(client, number))
        while answered["0"] < 10 * N_CALLERS:  # after these calls, threads and caches have allocated their memory
            await asyncio.sleep(0.01)
        memory = [server.resident_bytes()]
        for version in map(str, range(1, N_SWITCHES + 1)):
            publish(drafts, repository, version)
            server.process.send_signal(signal.SIGHUP)
            await asyncio.to_thread(until, only_loaded(server, version))
            while answered[version] < N_CALLERS:
                await asyncio.sleep(0.01)
            memory.append(server.resident_bytes())
        stop.set()
    assert set(answered) == set(wanted)
    assert server.metric("encserve_model_loads_total", outcome="loaded") == N_SWITCHES + 1
    assert server.metric("grpc_server_handled_total") == server.metric("grpc_server_handled_total", grpc_code="OK")
    weights = (drafts / "m" / "0" / "model.onnx.data").stat().st_size
    assert memory[-1] - memory[0] < weights / 2, [f"{it / 2**20:.0f} MiB" for it in memory]


def test_a_damaged_version_is_refused_and_the_old_version_stays(
    server: RealServer, repository: Path, drafts: Path
) -> None:
    publish(drafts, repository, "1")
    path = repository / "m" / "1" / "model.onnx.data"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # the path is a hard link to a file that other tests use
    path.write_bytes(data)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: server.metric("encserve_model_loads_total", outcome="refused") == 1)
    assert served(server) == ["0"]

    def refusals() -> list[str]:
        return [line["error"] for line in server.log if line["message"] == "a model version was refused"]

    until(lambda: bool(refusals()))
    assert "model.onnx.data: its sha256 is" in refusals()[0]
    with EncoderClient(server.target) as client:
        client.token_vectors(INPUTS)


def test_a_stream_never_mixes_versions(server: RealServer, repository: Path, drafts: Path) -> None:
    """Replace the model during a stream. The stream ends with an error."""
    with EncoderClient(server.target) as client:
        results = client.stream(iter(INPUTS * 100), kind="tokens", max_in_flight=4)
        next(results)
        publish(drafts, repository, "1")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: served(server) == ["1"])
        with pytest.raises(FingerprintError, match="the model was replaced in between"):
            list(results)
