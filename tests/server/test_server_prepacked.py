"""Weights that sessions and processes share: the same numbers, made once, never from a folder of somebody else."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from encserve_server.settings import Settings
from encserve_server.system import cache
from encserve_server.system.cache import KEPT_SECONDS, Cache
from encserve_server.types.bundles import Bundle
from encserve_server.types.inspections import InspectKind

WIDTH = 512


def feed_forward() -> bytes:
    """A graph of two products whose weights kernels lay out: ids, mask to rows (batch, seq, d_model)."""
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


def open_engine(bundle: Bundle, folder: Path | None) -> OnnxEngine:
    weights = None if folder is None else PrepackedWeights(folder, bundle.fingerprint, bundle.graph.path.parent)
    return OnnxEngine(bundle.graph, device="cpu", intra_op_threads=2, parallel_runs=2, weights=weights)


@pytest.mark.parametrize("alone", [True, False])
def test_rows_have_the_same_bits_with_shared_weights(bundle: Bundle, folder: Path, *, alone: bool) -> None:
    rng = np.random.default_rng(0)
    with (
        contextlib.closing(open_engine(bundle, None)) as plain,
        contextlib.closing(open_engine(bundle, folder)) as shared,
    ):
        for lengths in ([1], [7], [33] * 16, [64, 3, 1], [5, 50]):
            batch = [rng.integers(0, VOCAB_SIZE, length) for length in lengths]
            for want, got in zip(plain.run(batch, alone=alone).rows, shared.run(batch, alone=alone).rows, strict=True):
                assert want.tobytes() == got.tobytes()
    assert len(entries(folder)) == 1


def test_inspections_have_the_same_bits_with_shared_weights(bundle: Bundle, folder: Path) -> None:
    graph = bundle.inspect_graph
    assert graph is not None
    wanted = [(InspectKind.HIDDEN_STATES, (0, 1))]
    found = []
    for weights in (None, PrepackedWeights(folder, bundle.fingerprint, bundle.graph.path.parent)):
        with contextlib.closing(OnnxInspector(graph, device="cpu", weights=weights)) as inspector:
            (tensor,), _ = inspector.run(np.arange(20), wanted)
            found.append([part.tobytes() for part in tensor.parts])
    assert found[0] == found[1]
    assert len(entries(folder)) == 1


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


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_processes_that_start_at_once_map_one_file(bundle: Bundle, folder: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(bundle.graph.path.parent), str(folder)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()  # ready
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
    """The graphs whose weights were written."""
    real, written = onnx_engine._write_prepacked, []

    def watch(graph: Path, path: Path) -> None:
        written.append(graph)
        real(graph, path)

    monkeypatch.setattr(onnx_engine, "_write_prepacked", watch)
    return written


def test_weights_are_written_once(bundle: Bundle, folder: Path, writes: list[Path]) -> None:
    for _ in range(3):
        open_engine(bundle, folder).close()
    assert writes == [bundle.graph.path]
    assert folder.stat().st_mode & 0o777 == 0o700


def truncate(entry: Path) -> None:
    os.truncate(entry / "model.onnx.data", 100)


def overwrite(entry: Path) -> None:
    """With as many bytes, and the time of before."""
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
def test_a_damaged_entry_is_made_again(
    bundle: Bundle, folder: Path, writes: list[Path], damage: Callable[[Path], None]
) -> None:
    ids = [np.arange(9)]
    with contextlib.closing(open_engine(bundle, folder)) as engine:
        (want,) = engine.run(ids).rows
    (entry,) = entries(folder)
    damage(entry)
    with contextlib.closing(open_engine(bundle, folder)) as engine:
        (got,) = engine.run(ids).rows
    assert want.tobytes() == got.tobytes()
    assert len(writes) == 2
    open_engine(bundle, folder).close()
    assert len(writes) == 2


def allow_all(folder: Path) -> str:
    folder.mkdir()
    folder.chmod(0o777)
    return "other users can write to it"


def allow_group(folder: Path) -> str:
    folder.mkdir()
    folder.chmod(0o770)
    return "other users can write to it"


def link_folder(folder: Path) -> str:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")
    return "it is a link, not a folder"


def take_its_name(folder: Path) -> str:
    folder.write_text("")
    return "File exists"


@pytest.mark.parametrize("spoil", [allow_all, allow_group, link_folder, take_its_name])
def test_a_folder_that_is_not_private_is_not_used(
    bundle: Bundle, folder: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], str]
) -> None:
    reason = spoil(folder)
    check_unused(bundle, folder, caplog, reason)
    assert not folder.is_dir() or not list(folder.iterdir())


def test_a_folder_of_another_user_is_not_used(
    bundle: Bundle, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    own = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: own + 1)
    check_unused(bundle, folder, caplog, f"it belongs to user {own}, not to user {own + 1}")


def test_a_folder_that_cannot_be_written_is_done_without(
    bundle: Bundle, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)  # root can write anywhere
    check_unused(bundle, folder, caplog, "Read-only file system")


def test_weights_that_cannot_be_written_are_done_without(
    bundle: Bundle, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk is full; what was written by then does not stay."""

    def fail(_: Path, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(onnx_engine, "_write_prepacked", fail)
    check_unused(bundle, folder, caplog, "No space left on device")
    assert [path.name for path in folder.iterdir()] == [".lock"]


def check_unused(bundle: Bundle, folder: Path, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """The engine works, and one line of the log says why weights are not shared."""
    with caplog.at_level(logging.WARNING), contextlib.closing(open_engine(bundle, folder)) as engine:
        assert len(engine.run([np.arange(3)]).rows[0]) == 3
    (line,) = caplog.records
    assert reason in vars(line)["reason"]


def test_another_bundle_runtime_or_cpu_has_its_own_entry(
    bundle: Bundle, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_one(fingerprint: str) -> int:
        weights = PrepackedWeights(folder, fingerprint, bundle.graph.path.parent)
        OnnxEngine(bundle.graph, device="cpu", intra_op_threads=1, weights=weights).close()
        return len(entries(folder))

    assert [open_one("a"), open_one("a"), open_one("b")] == [1, 1, 2]
    with monkeypatch.context() as patch:
        patch.setitem(onnx_engine._PREPACKED_FOR, "runtime", f"{ort.__version__}.1")
        assert open_one("a") == 3
    monkeypatch.setattr(prepacked, "cpu_features", lambda: "other")
    assert open_one("a") == 4


def test_graphs_of_one_name_in_two_folders_of_a_bundle_are_two(
    folder: Path, tmp_path: Path, writes: list[Path]
) -> None:
    weights = PrepackedWeights(folder, "a", tmp_path)
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx").write_bytes(feed_forward())
        onnx_engine._open_session(tmp_path / name / "model.onnx", "cpu", 1, weights)
    assert writes == [tmp_path / "x/model.onnx", tmp_path / "y/model.onnx"]
    assert len(entries(folder)) == 2


def test_a_bundle_that_was_replaced_meanwhile_leaves_no_entry(bundle: Bundle, folder: Path) -> None:
    """Its weights would be taken for those of the fingerprint, and for good."""
    weights = PrepackedWeights(folder, bundle.fingerprint, bundle.graph.path.parent, lambda: False)
    with pytest.raises(BundleError, match="the bundle was replaced while its weights were written"):
        OnnxEngine(bundle.graph, device="cpu", intra_op_threads=1, weights=weights)
    assert not entries(folder)


def make(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "file").write_text(text)

    return write


def test_entries_that_nobody_used_for_long_are_removed(folder: Path) -> None:
    now = time.time()
    old = Cache(folder).entry({"a": "old"}, make("old"))
    used = Cache(folder).entry({"a": "used"}, make("used"))
    others = {"not-ours", "results-of-my-experiment-2024-01", ".making-do-with-less"}
    for name in others:
        (folder / name).mkdir()
        os.utime(folder / name, (0, 0))
    later = Cache(folder, lambda: now + KEPT_SECONDS - 60)
    later.entry({"a": "used"}, make("used"))
    new = Cache(folder, lambda: now + KEPT_SECONDS + 60).entry({"a": "new"}, make("new"))
    assert not old.exists()
    assert (used / "file").read_text() == "used"
    assert (new / "file").read_text() == "new"
    assert {path.name for path in folder.iterdir()} == {".lock", used.name, new.name} | others


@pytest.mark.skipif(os.geteuid() != 0, reason="ONLY ROOT CAN GIVE FILES AWAY: that others' entries are not used")
def test_what_another_user_wrote_is_not_used(folder: Path) -> None:
    entry = Cache(folder).entry({"a": "b"}, make("planted"))
    os.chown(entry, 12345, 12345)
    assert (Cache(folder).entry({"a": "b"}, make("own")) / "file").read_text() == "own"
    (entry / "file").chmod(0o666)
    assert (Cache(folder).entry({"a": "b"}, make("own again")) / "file").read_text() == "own again"


@pytest.mark.system
def test_what_a_killed_process_left_is_removed_and_never_used(folder: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from encserve_server.system.cache import Cache
def make(folder):
    (folder / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
Cache(Path(sys.argv[1])).entry({"a": "b"}, make)
"""
    done = subprocess.run([sys.executable, "-c", program, str(folder)], check=False)
    assert done.returncode == -9
    assert not entries(folder)
    assert len(list(folder.iterdir())) == 2  # the lock, and the folder that it wrote into
    entry = Cache(folder).entry({"a": "b"}, make("whole"))
    assert (entry / "file").read_text() == "whole"
    assert {path.name for path in folder.iterdir()} == {".lock", entry.name}


def test_an_entry_that_another_process_makes_is_waited_for(folder: Path) -> None:
    began, go_on, made = threading.Event(), threading.Event(), []

    def slow(its: Path) -> None:
        made.append("first")
        began.set()
        go_on.wait(10)
        (its / "file").write_text("first")

    def second(its: Path) -> None:
        made.append("second")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(Cache(folder).entry, {"a": "b"}, slow)
        began.wait(10)
        other = threads.submit(Cache(folder).entry, {"a": "b"}, second)
        go_on.set()
        assert first.result() == other.result()
    assert made == ["first"]


def test_a_process_that_makes_an_entry_for_ever_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0.0)

    def inner(_: Path) -> None:
        Cache(folder).entry({"c": "d"}, make(""))

    with pytest.raises(OSError, match="another process has held it"):
        Cache(folder).entry({"a": "b"}, inner)
    assert not entries(folder)


def test_the_cache_is_where_the_setting_or_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(cache_dir: Path | None) -> Path | None:
        weights = open_weights(cache_dir, "a", tmp_path, lambda: True)
        return None if weights is None else weights._folder

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("ENCSERVE_CACHE_DIR")
    assert found(None) == tmp_path / "home/.cache/encserve"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert found(None) == tmp_path / "home/.cache/encserve"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert found(None) == tmp_path / "xdg/encserve"
    monkeypatch.setenv("ENCSERVE_CACHE_DIR", str(tmp_path / "own"))
    assert found(None) == tmp_path / "own"
    assert found(tmp_path / "flag") == tmp_path / "flag"
    assert found(Path("off")) is None


def test_an_empty_folder_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache_dir must name a folder, or be off"):
        Settings(model_repository=tmp_path, cache_dir=Path())
