"""The ONNX Runtime engine on a real, tiny graph."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_bundle import VOCAB_SIZE, byte_products, expected_rows, write_bundle

from encserve_server.engine.base import BatchResult
from encserve_server.engine.onnx import OnnxEngine, _session_options
from encserve_server.errors import BundleError, DeviceError
from encserve_server.repository.bundle import read_bundle
from encserve_server.repository.loading import warm_up
from encserve_server.types.bundles import Bundle

sequences = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40).map(lambda ids: np.array(ids, np.int64)),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return read_bundle(write_bundle(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> OnnxEngine:
    return OnnxEngine(bundle.graph, device="cpu", intra_op_threads=1)


def test_products_of_8_bits_are_exact() -> None:
    """On x86 CPUs without VNNI, ONNX Runtime saturates them by default."""
    model, inputs, wanted = byte_products()
    session = ort.InferenceSession(model, _session_options(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"A": inputs})[0], wanted)


@given(batch=sequences)
def test_each_sequence_gets_its_own_rows_without_padding(engine: OnnxEngine, batch: list[np.ndarray]) -> None:
    result = engine.run(batch)
    assert result.padded_tokens == max(map(len, batch)) * len(batch)
    assert result.compute_seconds > 0
    for ids, rows in zip(batch, result.rows, strict=True):
        np.testing.assert_allclose(rows, expected_rows(ids), rtol=1e-5, atol=1e-6)


@given(batch=sequences)
def test_a_batch_gives_the_same_alone_and_beside_others(bundle: Bundle, batch: list[np.ndarray]) -> None:
    """To the last bit: whether a batch has all threads or some must not show."""
    with contextlib.closing(OnnxEngine(bundle.graph, device="cpu", intra_op_threads=2, parallel_runs=2)) as engine:
        for wide, narrow in zip(engine.run(batch, alone=True).rows, engine.run(batch, alone=False).rows, strict=True):
            np.testing.assert_array_equal(wide, narrow)


def test_many_batches_at_once_keep_their_own_rows(bundle: Bundle) -> None:
    rng = np.random.default_rng(0)
    batches = [[rng.integers(0, VOCAB_SIZE, length) for length in rng.integers(1, 40, 5)] for _ in range(200)]
    with (
        contextlib.closing(OnnxEngine(bundle.graph, device="cpu", intra_op_threads=4, parallel_runs=4)) as engine,
        ThreadPoolExecutor(4) as threads,
    ):
        for batch, result in zip(batches, threads.map(partial(engine.run, alone=False), batches), strict=True):
            for ids, rows in zip(batch, result.rows, strict=True):
                np.testing.assert_allclose(rows, expected_rows(ids), rtol=1e-5, atol=1e-6)


@pytest.mark.system
def test_what_a_long_sequence_took_is_given_back(bundle: Bundle) -> None:
    """Its two tensors are 128 MB each; the place of the rows, which leave later, may be kept, and some of others'."""
    program = f"""
{engine_of(bundle)}
import numpy as np
def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
engine.run([np.zeros(1, np.int64)])
before = resident_bytes()
assert engine.run([np.zeros(4_000_000, np.int64)]).padded_tokens == 4_000_000
print(resident_bytes() - before)
"""
    # In a process of its own: what tests before it left to the allocator would count too.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200e6


def engine_of(bundle: Bundle) -> str:
    """The beginning of a program: an `engine` that runs the bundle."""
    return f"""
import os
from pathlib import Path
from encserve_server.repository.bundle import read_bundle
from encserve_server.engine.base import BatchResult
from encserve_server.engine.onnx import OnnxEngine
engine = OnnxEngine(read_bundle(Path({str(bundle.graph.path.parent)!r})).graph, device="cpu", intra_op_threads=1)
"""


@pytest.mark.parametrize(
    ("threads", "asked", "parallel", "widens"), [(1, 4, 1, False), (2, 1, 1, False), (4, 3, 3, True)]
)
def test_no_more_batches_at_once_than_threads(
    bundle: Bundle, threads: int, asked: int, parallel: int, *, widens: bool
) -> None:
    with contextlib.closing(
        OnnxEngine(bundle.graph, device="cpu", intra_op_threads=threads, parallel_runs=asked)
    ) as engine:
        assert (engine.max_parallel_runs, engine.widens) == (parallel, widens)


@pytest.mark.parametrize(("threads", "parallel", "narrow"), [(2, 2, 1), (16, 8, 9), (5, 2, 4)])
def test_batches_side_by_side_use_every_thread(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, threads: int, parallel: int, narrow: int
) -> None:
    """A session's threads beside those of its callers are shared by all its runs."""
    real, opened = ort.InferenceSession, []

    def watch(path: Path, options: ort.SessionOptions, **rest: object) -> ort.InferenceSession:
        opened.append(options.intra_op_num_threads)
        return real(path, options, **rest)

    monkeypatch.setattr(ort, "InferenceSession", watch)
    OnnxEngine(bundle.graph, device="cpu", intra_op_threads=threads, parallel_runs=parallel).close()
    assert opened == [threads, narrow]
    assert parallel + (narrow - 1) == threads


def test_what_it_runs_on_is_what_it_says(engine: OnnxEngine) -> None:
    assert (engine.info.provider, engine.info.device) == ("CPUExecutionProvider", "cpu")


def test_cuda_that_is_not_there_stops_the_start(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(DeviceError, match=r"--device cuda: .* has no CUDA provider; install encserve-server\[gpu\]"):
        OnnxEngine(bundle.graph, device="cuda", intra_op_threads=1)


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_cuda_that_falls_back_in_silence_is_noticed(
    bundle: Bundle, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ONNX Runtime lists the provider, is asked for it, cannot load it, and opens a CPU session without an error."""
    real = ort.InferenceSession
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "preload_dlls", lambda: None)
    monkeypatch.setattr(
        ort, "InferenceSession", lambda path, options, providers: real(path, options, ["CPUExecutionProvider"])
    )
    if device == "cuda":
        with pytest.raises(DeviceError, match=r"the CUDA provider did not load \(active: CPUExecutionProvider\)"):
            OnnxEngine(bundle.graph, device=device, intra_op_threads=1)
        return
    assert OnnxEngine(bundle.graph, device=device, intra_op_threads=1).info.provider == "CPUExecutionProvider"
    (record,) = [record for record in caplog.records if record.message == "running on the CPU"]
    assert record.levelname == "WARNING"
    assert "did not load" in getattr(record, "reason", "")


def test_a_file_that_is_no_model(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(BundleError, match=r"model.onnx: ONNX Runtime cannot load it"):
        OnnxEngine(replace(bundle.graph, path=tmp_path / "model.onnx"), device="cpu", intra_op_threads=1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"attention_mask_name": "absent"}, "the graph's inputs are .*; the manifest names"),
        ({"output_name": "absent"}, "the graph's outputs are .*; the manifest names absent"),
    ],
)
def test_an_interface_that_is_not_the_manifests(bundle: Bundle, change: dict[str, str], problem: str) -> None:
    with pytest.raises(BundleError, match=problem):
        OnnxEngine(replace(bundle.graph, **change), device="cpu", intra_op_threads=1)  # type: ignore[arg-type]


def test_a_width_that_is_not_the_manifests_fails_in_warm_up(bundle: Bundle) -> None:
    wrong = replace(bundle, graph=replace(bundle.graph, d_model=9))
    engine = OnnxEngine(wrong.graph, device="cpu", intra_op_threads=1)
    with pytest.raises(BundleError, match=r"the model fails for sequences of \[1\] tokens: .*shape \(1, 1, 8\)"):
        warm_up(engine, wrong, 512)


def test_a_very_long_sequence_warms_up_alone(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traffic's batches do not hold more padded tokens than the budget either, but for one that is longer alone."""
    engine = OnnxEngine(bundle.graph, device="cpu", intra_op_threads=1)
    real, padded = engine.run, []

    def run(sequences: list[np.ndarray], *, alone: bool) -> BatchResult:
        result = real(sequences, alone=alone)
        padded.append((len(sequences), result.padded_tokens))
        return result

    monkeypatch.setattr(engine, "run", run)
    warm_up(engine, replace(bundle, max_sequence_tokens=8192), 512)
    assert (1, 8192) in padded
    assert max(tokens for count, tokens in padded if count > 1) <= 512


def test_a_run_that_fails_writes_nothing_itself(engine: OnnxEngine, capfd: pytest.CaptureFixture[str]) -> None:
    """What runs models would write past the log, whose every line is JSON."""
    with pytest.raises(Exception, match="idx=99 must be within"):
        engine.run([np.array([99])])
    assert capfd.readouterr() == ("", "")


@pytest.mark.system
def test_nothing_is_reported_to_anybody(bundle: Bundle, tmp_path: Path) -> None:
    """ONNX Runtime by itself would leave an identifier in the home directory and report from this machine."""
    passed_on = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")  # and nothing that makes it believe it is being tested
    environment = {name: os.environ[name] for name in passed_on if name in os.environ} | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", engine_of(bundle)], env=environment, check=True)
    assert list(tmp_path.rglob("*")) == []
