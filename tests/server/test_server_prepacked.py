"""Tests of the cache folder for prepacked weights.

Prepacked weights have the memory layout of ONNX Runtime's kernels. Sessions and processes share these weights. Hidden
states are the same with and without shared weights. Each entry is written once. A folder of another user is not used.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tiny_bundle import D_MODEL, VOCAB_SIZE, inspect_parts, write_bundle

from encserve_server.engine import onnx as onnx_engine
from encserve_server.engine import prepacked
from encserve_server.engine.onnx import OnnxEngine, OnnxInspector
from encserve_server.engine.prepacked import PrepackedWeights, open_weights
from encserve_server.errors import BundleError
from encserve_server.repository.bundle import read_bundle
from encserve_server.system import cache
from encserve_server.system.cache import KEPT_SECONDS, Cache
from encserve_server.types.bundles import Bundle, Graph
from encserve_server.types.inspections import InspectKind

WIDTH = 512
IDS = [np.arange(9)]


def feed_forward() -> bytes:
    """Return a graph with matrix products. ONNX Runtime prepacks the weights of these products.

    The inputs of the graph are `ids` and `mask`. The output `rows` is (batch, seq, d_model).
    """
    rng = np.random.default_rng(0)
    sizes = {"table": (VOCAB_SIZE, 64), "up": (64, WIDTH), "down": (WIDTH, 64), "out": (64, D_MODEL)}
    arrays = {name: rng.standard_normal(size).astype(np.float32) / 8 for name, size in sizes.items()}
    arrays |= {"last": np.array([2]), "scale": np.ones(64, np.float32)}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "up"], ["wide"]),
        helper.make_node("Tanh", ["wide"], ["active"]),
        helper.make_node("MatMul", ["active", "down"], ["narrow"]),
        helper.make_node("Add", ["x", "narrow"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "scale"], ["vectors"]),
        helper.make_node("Cast", ["mask"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["real", "last"], ["column"]),
        helper.make_node("Mul", ["vectors", "column"], ["kept"]),
        helper.make_node("MatMul", ["kept", "out"], ["rows"]),
    ]
    graph = helper.make_graph(
        nodes,
        "feed-forward",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"]) for name in ("ids", "mask")],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", width])
            for name, width in (("rows", D_MODEL), ("vectors", 64), ("column", 1))
        ],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    data: bytes = model.SerializeToString()
    return data


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("models")
    (folder / "parts").mkdir()
    parts = inspect_parts(folder / "parts")
    parts["files"] = {name: feed_forward() for name in ("model.onnx", "inspect.onnx")}
    return read_bundle(write_bundle(folder, **parts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def weights_of(bundle: Bundle, folder: Path, fingerprint: str = "") -> PrepackedWeights:
    return PrepackedWeights(folder, fingerprint or bundle.fingerprint, bundle.graph.path.parent)


def open_engine(graph: Graph, weights: PrepackedWeights | None) -> "contextlib.closing[OnnxEngine]":
    return contextlib.closing(OnnxEngine(graph, device="cpu", intra_op_threads=2, parallel_runs=2, weights=weights))


def test_shared_weights_give_rows_with_the_same_bits(bundle: Bundle, folder: Path) -> None:
    """Inspections have their own graph and their own cache entry."""
    rng = np.random.default_rng(0)
    shared_weights = weights_of(bundle, folder)
    with open_engine(bundle.graph, None) as plain, open_engine(bundle.graph, shared_weights) as shared:
        for lengths in ([1], [7], [33] * 16, [64, 3, 1], [5, 50]):
            batch = [rng.integers(0, VOCAB_SIZE, length) for length in lengths]
            for alone in (True, False):
                want, got = (it.run(batch, alone=alone).rows for it in (plain, shared))
                assert [it.tobytes() for it in want] == [it.tobytes() for it in got]
    assert len(entries(folder)) == 1
    assert bundle.inspect_graph is not None
    found = []
    for weights in (None, shared_weights):
        with contextlib.closing(OnnxInspector(bundle.inspect_graph, device="cpu", weights=weights)) as inspector:
            (tensor,), _ = inspector.run(np.arange(20), [(InspectKind.HIDDEN_STATES, (0, 1))])
            found.append([part.tobytes() for part in tensor.parts])
    assert found[0] == found[1]
    assert len(entries(folder)) == 2


PROGRAM = """
import sys
from pathlib import Path
from encserve_server.engine.onnx import OnnxEngine
from encserve_server.engine.prepacked import PrepackedWeights
from encserve_server.repository.bundle import read_bundle
bundle = read_bundle(Path(sys.argv[1]))
weights = PrepackedWeights(Path(sys.argv[2]), bundle.fingerprint, Path(sys.argv[1]))
print(flush=True)
sys.stdin.readline()
engine = OnnxEngine(bundle.graph, device="cpu", intra_op_threads=1, weights=weights)
mapped = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if sys.argv[2] in line}
print(*mapped)
"""


@pytest.mark.system  # starts processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_processes_that_start_at_once_map_one_file(bundle: Bundle, folder: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(bundle.graph.path.parent), str(folder)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()  # the process writes a line when it is ready
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    (entry,) = entries(folder)
    assert outputs == [str(entry / "model.onnx.data")] * 2


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list of the graphs whose prepacked weights have been written."""
    write, written = onnx_engine._write_prepacked, []

    def watch(graph: Path, path: Path) -> None:
        written.append(graph)
        write(graph, path)

    monkeypatch.setattr(onnx_engine, "_write_prepacked", watch)
    return written


def truncate(entry: Path) -> None:
    os.truncate(entry / "model.onnx.data", 100)


def overwrite(entry: Path) -> None:
    """Overwrite some bytes of an entry's weights, but keep the size and the modification time of the file."""
    path = entry / "model.onnx.data"
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"damage")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def lose(entry: Path) -> None:
    (entry / "model.onnx").unlink()


def link(entry: Path) -> None:
    elsewhere = entry.parent / "elsewhere"
    (entry / "model.onnx").rename(elsewhere)
    (entry / "model.onnx").symlink_to(elsewhere)


def garble(entry: Path) -> None:
    (entry / "entry.json").write_text("[1]")


def link_all(entry: Path) -> None:
    entry.rename(entry.parent / "elsewhere")
    entry.symlink_to(entry.parent / "elsewhere")


@pytest.mark.parametrize("damage", [truncate, overwrite, lose, link, garble, link_all])
def test_an_entry_is_written_once_and_again_if_it_is_damaged(
    bundle: Bundle, folder: Path, writes: list[Path], damage: Callable[[Path], None]
) -> None:
    found = []
    for count in (1, 1, 2, 2):
        if count == 2 and len(writes) == 1:
            damage(entries(folder)[0])
        with open_engine(bundle.graph, weights_of(bundle, folder)) as engine:
            found.append(engine.run(IDS).rows[0].tobytes())
        assert len(writes) == count
    assert len(set(found)) == 1
    assert folder.stat().st_mode & 0o777 == 0o700


# Unusable folders. Each function makes a folder unusable, and returns the expected reason in the log.


def allow_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    folder.chmod(0o777)
    return "other users can write to it"


def allow_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    folder.chmod(0o770)
    return "other users can write to it"


def link_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")
    return "it is a link, not a folder"


def use_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.write_text("")
    return "File exists"


def change_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    return f"it belongs to user {owner}, not to user {owner + 1}"


def forbid_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)  # root can write to a read-only folder
    return "Read-only file system"


def fill_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def fail(_: Path, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(onnx_engine, "_write_prepacked", fail)
    return "No space left on device"


@pytest.mark.parametrize(
    "spoil", [allow_all, allow_group, link_folder, use_its_name, change_owner, forbid_writing, fill_the_disk]
)
def test_an_engine_works_without_an_unusable_folder(
    bundle: Bundle,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path, pytest.MonkeyPatch], str],
) -> None:
    """If the cache folder cannot be used, the engine still works, and the log has one line with the reason.

    Only the lock file may remain in the folder.
    """
    reason = spoil(folder, monkeypatch)
    with caplog.at_level(logging.WARNING), open_engine(bundle.graph, weights_of(bundle, folder)) as engine:
        assert len(engine.run(IDS).rows[0]) == 9
    (line,) = caplog.records
    assert reason in vars(line)["reason"]
    assert not folder.is_dir() or {path.name for path in folder.iterdir()} <= {".lock"}


def test_another_bundle_graph_runtime_or_cpu_has_its_own_entry(
    bundle: Bundle, folder: Path, tmp_path: Path, writes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(fingerprint: str) -> int:
        with open_engine(bundle.graph, weights_of(bundle, folder, fingerprint)):
            return len(entries(folder))

    assert [count("a"), count("a"), count("b")] == [1, 1, 2]
    with monkeypatch.context() as patch:
        patch.setitem(onnx_engine._PREPACKED_FOR, "runtime", f"{ort.__version__}.1")
        assert count("a") == 3
    with monkeypatch.context() as patch:
        patch.setattr(prepacked, "cpu_features", lambda: "other")
        assert count("a") == 4
    writes.clear()
    for name in ("x", "y"):  # two graphs in different folders of one bundle
        path = tmp_path / name / "model.onnx"
        path.parent.mkdir()
        path.write_bytes(feed_forward())
        with open_engine(replace(bundle.graph, path=path), PrepackedWeights(folder, "a", tmp_path)):
            pass
    assert writes == [tmp_path / "x/model.onnx", tmp_path / "y/model.onnx"]
    assert len(entries(folder)) == 6


def test_a_bundle_replaced_during_the_write_leaves_no_entry(bundle: Bundle, folder: Path) -> None:
    """If the bundle is replaced while its weights are written, loading fails and no entry is written.

    Otherwise, the cache would have weights of the new bundle under the old bundle's fingerprint.
    """
    weights = PrepackedWeights(folder, bundle.fingerprint, bundle.graph.path.parent, lambda: False)
    with pytest.raises(BundleError, match="the bundle was replaced"):
        OnnxEngine(bundle.graph, device="cpu", intra_op_threads=1, weights=weights)
    assert not entries(folder)


# The cache


def make(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "file").write_text(content)

    return write


def test_old_unused_entries_are_removed(folder: Path) -> None:
    now = time.time()
    old = Cache(folder).entry({"a": "old"}, make("old"))
    used = Cache(folder).entry({"a": "used"}, make("used"))
    others = {"not-ours", "results-of-my-experiment-2024-01", ".making-do-with-less"}
    for name in others:
        (folder / name).mkdir()
        os.utime(folder / name, (0, 0))
    Cache(folder, lambda: now + KEPT_SECONDS - 60).entry({"a": "used"}, make("used"))
    new = Cache(folder, lambda: now + KEPT_SECONDS + 60).entry({"a": "new"}, make("new"))
    assert not old.exists()
    assert ((used / "file").read_text(), (new / "file").read_text()) == ("used", "new")
    assert {path.name for path in folder.iterdir()} == {".lock", used.name, new.name} | others


@pytest.mark.skipif(os.geteuid() != 0, reason="ONLY ROOT CAN GIVE FILES AWAY: another user's entries are not used")
def test_an_entry_of_another_user_is_not_used(folder: Path) -> None:
    entry = Cache(folder).entry({"a": "b"}, make("planted"))
    os.chown(entry, 12345, 12345)
    assert (Cache(folder).entry({"a": "b"}, make("own")) / "file").read_text() == "own"
    (entry / "file").chmod(0o666)
    assert (Cache(folder).entry({"a": "b"}, make("own again")) / "file").read_text() == "own again"


@pytest.mark.system  # starts a process
def test_a_draft_of_a_killed_process_is_removed_and_never_used(folder: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from encserve_server.system.cache import Cache
def make(folder):
    (folder / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
Cache(Path(sys.argv[1])).entry({"a": "b"}, make)
"""
    assert subprocess.run([sys.executable, "-c", program, str(folder)], check=False).returncode == -9
    assert not entries(folder)
    assert len(list(folder.iterdir())) == 2  # these are the lock file and the unfinished entry
    entry = Cache(folder).entry({"a": "b"}, make("whole"))
    assert (entry / "file").read_text() == "whole"
    assert {path.name for path in folder.iterdir()} == {".lock", entry.name}


def test_a_process_waits_for_an_unfinished_entry(folder: Path) -> None:
    began, go_on, made = threading.Event(), threading.Event(), []

    def slow(_: Path) -> None:
        made.append("first")
        began.set()
        assert go_on.wait(10)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(Cache(folder).entry, {"a": "b"}, slow)
        assert began.wait(10)
        other = threads.submit(Cache(folder).entry, {"a": "b"}, lambda _: made.append("second"))
        go_on.set()
        assert first.result() == other.result()
    assert made == ["first"]


def test_the_wait_for_another_process_has_a_timeout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0.0)

    def make_another(_: Path) -> None:
        Cache(folder).entry({"c": "d"}, make(""))

    with pytest.raises(OSError, match="another process has held the lock"):
        Cache(folder).entry({"a": "b"}, make_another)
    assert not entries(folder)


def test_the_folder_comes_from_the_setting_or_the_environment(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(cache_dir: Path | None) -> list[Path]:
        """Open an engine, and return the cache folders that got a new entry, relative to tmp_path."""
        weights = open_weights(cache_dir, bundle.fingerprint, bundle.graph.path.parent, lambda: True)
        before = set(tmp_path.rglob("entry.json"))
        with open_engine(bundle.graph, weights):
            return [it.parent.parent.relative_to(tmp_path) for it in set(tmp_path.rglob("entry.json")) - before]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ENCSERVE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert used(None) == [Path("home/.cache/encserve")]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert used(None) == [], "the folder already has the entry"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert used(None) == [Path("xdg/encserve")]
    monkeypatch.setenv("ENCSERVE_CACHE_DIR", str(tmp_path / "own"))
    assert used(None) == [Path("own")]
    assert used(tmp_path / "flag") == [Path("flag")]
    assert used(Path("off")) == []
