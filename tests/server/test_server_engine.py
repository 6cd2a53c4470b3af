"""Tests of the engines of ONNX Runtime and OpenVINO on a small real graph, and of ONNX Runtime itself."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx_files import build, expected_rows_with_types, save
from tiny_bundle import VOCAB_SIZE, byte_products, expected_rows, write_bundle

from encserve_server.engine.base import BatchResult, Engine
from encserve_server.engine.onnx import OnnxEngine, _session_options
from encserve_server.engine.opening import open_engine
from encserve_server.errors import BundleError, DeviceError
from encserve_server.repository.bundle import read_bundle
from encserve_server.repository.loading import warm_up
from encserve_server.types.bundles import Bundle, Graph

SEQUENCES = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40).map(lambda ids: np.array(ids, np.int64)),
    min_size=1,
    max_size=12,
)
ENGINES = ["onnxruntime", "openvino"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return read_bundle(write_bundle(tmp_path_factory.mktemp("models")))


def opened(graph: Graph, engine: str = "onnxruntime", threads: int = 1, parallel: int = 1) -> Engine:
    return open_engine(
        graph, engine=engine, precision="model", device="cpu", intra_op_threads=threads, parallel_runs=parallel
    )


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Engine]:
    with contextlib.closing(opened(bundle.graph, request.param)) as engine:
        yield engine


def assert_rows(result: BatchResult, batch: list[np.ndarray]) -> None:
    for ids, rows in zip(batch, result.rows, strict=True):
        np.testing.assert_allclose(rows, expected_rows(ids), rtol=1e-5, atol=1e-6)


@given(batch=SEQUENCES)
def test_each_sequence_gets_its_own_rows_without_padding(engine: Engine, batch: list[np.ndarray]) -> None:
    result = engine.run(batch)
    assert result.padded_tokens == max(map(len, batch)) * len(batch)
    assert result.compute_seconds > 0
    assert_rows(result, batch)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_token_has_the_type_0(bundle: Bundle, tmp_path: Path, engine: str) -> None:
    model, batch = build(with_types=True), [np.array([3, 4, 5]), np.array([7])]
    graph = replace(
        bundle.graph,
        path=save(model, tmp_path / "typed.onnx"),
        input_name="input_ids",
        attention_mask_name="attention_mask",
        token_type_ids_name="token_type_ids",
    )
    with contextlib.closing(opened(graph, engine)) as its:
        for ids, rows in zip(batch, its.run(batch).rows, strict=True):
            np.testing.assert_allclose(rows, expected_rows_with_types(model, ids), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_parallel_batches_keep_their_own_rows(bundle: Bundle, engine: str) -> None:
    rng = np.random.default_rng(0)
    batches = [[rng.integers(0, VOCAB_SIZE, length) for length in rng.integers(1, 40, 5)] for _ in range(50)]
    with contextlib.closing(opened(bundle.graph, engine, 4, 4)) as opened_, ThreadPoolExecutor(4) as threads:
        assert (opened_.max_parallel_runs, opened_.has_wide_session) == (4, True)
        for batch, result in zip(batches, threads.map(partial(opened_.run, alone=False), batches), strict=True):
            assert_rows(result, batch)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"attention_mask_name": "absent"}, "inputs .*; the manifest names"),
        ({"token_type_ids_name": "absent"}, "inputs .*; the manifest names"),
        ({"takes_vectors": True}, "inputs .*; the manifest names"),
        ({"output_name": "absent"}, "outputs .*; the manifest names absent"),
    ],
)
def test_a_graph_with_another_interface_is_refused(
    bundle: Bundle, engine: str, change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(BundleError, match=problem):
        opened(replace(bundle.graph, **change), engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bad_file_or_width_is_refused(bundle: Bundle, tmp_path: Path, engine: str) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(BundleError, match="model.onnx: "):
        opened(replace(bundle.graph, path=tmp_path / "model.onnx"), engine)
    wrong = replace(bundle, graph=replace(bundle.graph, d_model=9))
    with pytest.raises(BundleError, match=r"\[1\] tokens: .*\(1, 1, 8\)"):
        warm_up(opened(wrong.graph, engine), wrong, 512)


def test_a_very_long_sequence_warms_up_alone(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up batch of several sequences stays within the token budget, like a batch of real calls.

    A sequence alone may exceed the budget.
    """
    engine = opened(bundle.graph)
    run, padded = engine.run, []

    def note(sequences: list[np.ndarray], *, alone: bool) -> BatchResult:
        result = run(sequences, alone=alone)
        padded.append((len(sequences), result.padded_tokens))
        return result

    monkeypatch.setattr(engine, "run", note)
    warm_up(engine, replace(bundle, max_sequence_tokens=8192), 512)
    assert (1, 8192) in padded
    assert max(tokens for count, tokens in padded if count > 1) <= 512


# ONNX Runtime


def test_products_of_8_bits_are_exact() -> None:
    """Matrix products of 8-bit numbers are exact with the session options of the server.

    By default, on x86 CPUs without VNNI, ONNX Runtime cuts the sum of two 8-bit products to the range of 16 bits.
    """
    model, inputs, wanted = byte_products()
    session = ort.InferenceSession(model, _session_options(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"A": inputs})[0], wanted)


@given(batch=SEQUENCES)
def test_a_batch_has_the_same_bits_for_any_number_of_threads(bundle: Bundle, batch: list[np.ndarray]) -> None:
    with contextlib.closing(opened(bundle.graph, threads=2, parallel=2)) as engine:
        wide, narrow = (engine.run(batch, alone=alone).rows for alone in (True, False))
        assert [it.tobytes() for it in wide] == [it.tobytes() for it in narrow]


@pytest.mark.parametrize(
    ("threads", "asked", "parallel", "has_wide_session", "sessions"),
    [
        (1, 4, 1, False, [1]),
        (2, 1, 1, False, [2]),
        (2, 2, 2, True, [2, 1]),
        (16, 8, 8, True, [16, 9]),
        (5, 2, 2, True, [5, 4]),
    ],
)
def test_parallel_batches_use_every_thread_once(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, threads: int, asked: int, parallel: int, *, has_wide_session: bool,
    sessions: list[int],
) -> None:  # fmt: skip
    """Parallel batches together use the chosen number of threads.

    All runs of a session share the session's threads. Each run also uses the calling thread.
    """
    session, opened_with = ort.InferenceSession, []

    def note(path: Path, options: ort.SessionOptions, **rest: object) -> ort.InferenceSession:
        opened_with.append(options.intra_op_num_threads)
        return session(path, options, **rest)

    monkeypatch.setattr(ort, "InferenceSession", note)
    with contextlib.closing(opened(bundle.graph, threads=threads, parallel=asked)) as engine:
        assert (engine.max_parallel_runs, engine.has_wide_session) == (parallel, has_wide_session)
        assert (engine.info.provider, engine.info.device) == ("CPUExecutionProvider", "cpu")
    assert opened_with == sessions


def test_a_missing_cuda_provider_stops_the_start(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(DeviceError, match=r'--device cuda: .* pip install "encserve\[gpu\]"'):
        OnnxEngine(bundle.graph, device="cuda", intra_op_threads=1)


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_cuda_provider_that_does_not_load_is_detected(
    bundle: Bundle, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If CUDA does not load, `--device cuda` fails, and `--device auto` logs a warning and uses the CPU.

    ONNX Runtime lists a CUDA provider that cannot be loaded, and opens a CPU session without an error.
    """
    session = ort.InferenceSession
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "preload_dlls", lambda: None)
    monkeypatch.setattr(
        ort, "InferenceSession", lambda path, options, providers: session(path, options, ["CPUExecutionProvider"])
    )
    if device == "cuda":
        with pytest.raises(DeviceError, match="active: CPUExecutionProvider"):
            OnnxEngine(bundle.graph, device=device, intra_op_threads=1)
        return
    assert OnnxEngine(bundle.graph, device=device, intra_op_threads=1).info.provider == "CPUExecutionProvider"
    (record,) = [record for record in caplog.records if record.message == "running on the CPU"]
    assert record.levelname == "WARNING"
    assert "did not load" in getattr(record, "reason", "")


def test_a_failed_run_writes_nothing_to_the_terminal(bundle: Bundle, capfd: pytest.CaptureFixture[str]) -> None:
    """The server silences ONNX Runtime's own messages, because every line of the log must be JSON."""
    with pytest.raises(Exception, match="idx=99"):
        opened(bundle.graph).run([np.array([99])])
    assert capfd.readouterr() == ("", "")


PROGRAM = """
import os, sys
from pathlib import Path
import numpy as np
from encserve_server.repository.bundle import read_bundle
from encserve_server.engine.onnx import OnnxEngine
engine = OnnxEngine(read_bundle(Path(sys.argv[1])).graph, device="cpu", intra_op_threads=1)
def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
engine.run([np.zeros(1, np.int64)])
before = resident_bytes()
assert engine.run([np.zeros(4_000_000, np.int64)]).padded_tokens == 4_000_000
print(resident_bytes() - before)
"""


@pytest.mark.system  # starts a process
def test_the_runtime_frees_memory_and_sends_no_reports(bundle: Bundle, tmp_path: Path) -> None:
    """After the run of a long sequence, only the hidden states stay in memory. The run needs two tensors of 128 MB.

    The home directory stays empty. By default, ONNX Runtime would write an identifier there and send usage reports.
    """
    names = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")  # without the variables that pytest sets
    environment = {name: os.environ[name] for name in names if name in os.environ} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, str(bundle.graph.path.parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200e6
    assert list(tmp_path.rglob("*")) == []
