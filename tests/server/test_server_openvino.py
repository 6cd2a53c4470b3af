"""Tests of the OpenVINO engine on tiny graphs, and of engines that are not installed."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import openvino as ov
import pytest
from onnx import TensorProto
from onnx_files import build, node_of, save, save_with_data, value
from tiny_bundle import expected_rows, write_bundle

from encserve_server.engine.onnx import OnnxEngine
from encserve_server.engine.opening import open_engine
from encserve_server.engine.openvino import OpenVinoEngine
from encserve_server.errors import BundleError, DeviceError
from encserve_server.repository.bundle import read_bundle
from encserve_server.types.bundles import Bundle, Graph

FOREIGN = Graph(
    path=Path(),
    input_name="input_ids",
    takes_vectors=False,
    attention_mask_name="attention_mask",
    output_name="rows",
    pad_token_id=0,
    d_model=8,
    precision="float32",
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return read_bundle(write_bundle(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> OpenVinoEngine:
    return OpenVinoEngine(bundle.graph, precision="model", intra_op_threads=1)


def assert_as_in_onnx_runtime(graph: Graph, batch: list[np.ndarray]) -> None:
    """Check that both engines compute the same hidden states from one ONNX file."""
    got = OpenVinoEngine(graph, precision="float32", intra_op_threads=1).run(batch)
    want = OnnxEngine(graph, device="cpu", intra_op_threads=1).run(batch)
    assert got.padded_tokens == want.padded_tokens
    for rows, expected in zip(got.rows, want.rows, strict=True):
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)


def test_rows_stay_valid_after_the_next_run(engine: OpenVinoEngine) -> None:
    """OpenVINO reuses the output buffer. Without a copy, the next run would overwrite the hidden states."""
    first = engine.run([np.array([1, 2, 3])])
    engine.run([np.array([4, 5, 6])])
    np.testing.assert_allclose(first.rows[0], expected_rows(np.array([1, 2, 3])), rtol=1e-5)


def test_the_precision_is_float32_by_default(engine: OpenVinoEngine) -> None:
    """OpenVINO itself would choose bfloat16 on a CPU that supports bfloat16."""
    assert (engine.info.provider, engine.info.device, engine.info.precision) == ("OpenVINO", "cpu", "float32")
    assert engine.info.runtime == f"openvino {ov.__version__.partition('-')[0]}"
    assert engine._compiled.get_property("INFERENCE_PRECISION_HINT") == ov.Type.f32
    assert engine._compiled.get_property("INFERENCE_NUM_THREADS") == 1


def test_weights_in_another_file_and_token_types(tmp_path: Path) -> None:
    batch = [np.array([3, 4, 5]), np.array([7]), np.arange(30)]
    graph = replace(FOREIGN, path=save_with_data(build(), tmp_path / "model.onnx"))
    assert_as_in_onnx_runtime(graph, batch)
    typed = save(build(with_types=True), tmp_path / "typed.onnx")
    assert_as_in_onnx_runtime(replace(graph, path=typed, token_type_ids_name="token_type_ids"), batch)


def test_vectors(tmp_path: Path) -> None:
    model = build()
    del model.graph.node[0]  # remove the embedding lookup; an input of the graph takes its place
    model.graph.node[0].input[0] = "attention_mask"  # the Shape node used the ids; the mask has the same shape
    del model.graph.input[0]
    model.graph.input.append(value("words", TensorProto.FLOAT, ["batch", "seq", 8]))
    graph = replace(FOREIGN, path=save(model, tmp_path / "model.onnx"), input_name="words", takes_vectors=True)
    random = np.random.default_rng(0)
    assert_as_in_onnx_runtime(graph, [random.standard_normal((n, 8)).astype(np.float32) for n in (5, 1, 30)])


def test_other_outputs_are_not_computed(tmp_path: Path) -> None:
    for first in (True, False):
        model = build()
        other = value("mean", TensorProto.FLOAT, ["batch", 1, 8])
        outputs = [other, *model.graph.output] if first else [*model.graph.output, other]
        del model.graph.output[:]
        model.graph.output.extend(outputs)
        graph = replace(FOREIGN, path=save(model, tmp_path / f"{first}.onnx"))
        assert_as_in_onnx_runtime(graph, [np.array([3, 4, 5]), np.array([7])])
        engine = OpenVinoEngine(graph, precision="float32", intra_op_threads=1)
        assert len(engine._compiled.outputs) == 1


def test_an_unknown_operator_is_refused(tmp_path: Path) -> None:
    model = build()
    node_of(model, "mean").domain = "com.example"
    node_of(model, "mean").op_type = "Strange"
    model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    graph = replace(FOREIGN, path=save(model, tmp_path / "model.onnx"))
    with pytest.raises(BundleError, match=r"model.onnx: OpenVINO cannot .*Strange"):
        OpenVinoEngine(graph, precision="model", intra_op_threads=1)


def test_a_cpu_without_bfloat16_refuses_it(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this error, OpenVINO would emulate bfloat16, or compute in float32 without a warning."""
    real = ov.Core.get_property

    def of_an_older_cpu(core: ov.Core, device: str, name: str) -> object:
        return ["FP32", "INT8"] if name == "OPTIMIZATION_CAPABILITIES" else real(core, device, name)

    monkeypatch.setattr(ov.Core, "get_property", of_an_older_cpu)
    with pytest.raises(DeviceError, match=r"--precision bfloat16: this CPU \(.*\) has no instructions for it"):
        OpenVinoEngine(bundle.graph, precision="bfloat16", intra_op_threads=1)
    OpenVinoEngine(bundle.graph, precision="float32", intra_op_threads=1)


def test_a_wrong_precision_of_openvino_is_an_error(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ov.CompiledModel, "get_property", lambda *_: ov.Type.bf16)
    with pytest.raises(DeviceError, match="--precision float32: OpenVINO computes in bf16 instead"):
        OpenVinoEngine(bundle.graph, precision="float32", intra_op_threads=1)


def test_the_precision_of_float16_and_int8_files(bundle: Bundle) -> None:
    """With `--precision model` on the CPU, OpenVINO computes a float16 file in float32, and an int8 file in int8."""
    half, quantized = (replace(bundle.graph, precision=precision) for precision in ("float16", "int8"))
    assert OpenVinoEngine(half, precision="model", intra_op_threads=1).info.precision == "float32"
    assert OpenVinoEngine(quantized, precision="model", intra_op_threads=1).info.precision == "int8"
    with pytest.raises(BundleError, match="--precision float32 .* int8"):
        OpenVinoEngine(quantized, precision="float32", intra_op_threads=1)


def test_onnx_runtime_computes_in_the_precision_of_the_file(bundle: Bundle) -> None:
    def open_it(graph: Graph) -> str:
        return open_engine(
            graph, engine="onnxruntime", precision="float32", device="cpu", intra_op_threads=1
        ).info.precision

    assert open_it(bundle.graph) == "float32"
    with pytest.raises(BundleError, match="--precision float32 .* float16"):
        open_it(replace(bundle.graph, precision="float16"))


def in_a_process(code: str, home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python code in a new process with the given home directory and without ENCSERVE_ variables."""
    environment = {key: text for key, text in os.environ.items() if not key.startswith("ENCSERVE_")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)},
    )


LOAD = """
import sys, threading
from pathlib import Path
from encserve_server.repository.loading import load_model
from encserve_server.settings import Settings
settings = Settings(model_repository=Path(), engine=sys.argv[1], tune_batches=False)
print(load_model(Path(sys.argv[2]), settings, None).engine.info.provider)
print(*sorted({"onnxruntime", "openvino", "openvino_telemetry.main"} & set(sys.modules)))
print([thread.name for thread in threading.enumerate()])
"""


@pytest.mark.system  # starts a process
@pytest.mark.parametrize(
    ("engine", "provider", "module"),
    [("onnxruntime", "CPUExecutionProvider", "onnxruntime"), ("openvino", "OpenVINO", "openvino")],
)
def test_only_the_chosen_engine_is_imported(tmp_path: Path, engine: str, provider: str, module: str) -> None:
    done = in_a_process(LOAD, tmp_path, engine, str(write_bundle(tmp_path / "models")))
    assert done.stdout.splitlines() == [provider, module, "['MainThread']"], done.stderr
    # A plain import of openvino starts a telemetry thread that writes into this folder and sends reports.
    assert not (tmp_path / "intel").exists()


@pytest.mark.system  # starts a process
@pytest.mark.parametrize(("engine", "extra"), [("onnxruntime", "cpu"), ("openvino", "openvino")])
def test_an_engine_that_is_not_installed_is_reported_in_one_line(tmp_path: Path, engine: str, extra: str) -> None:
    write_bundle(tmp_path / "models")
    code = f"import sys; sys.modules[{engine!r}] = None\nfrom encserve_server.__main__ import main\nmain(sys.argv[1:])"
    flags = ["--engine", engine, "--model-repository", str(tmp_path / "models"), "--log-format", "text"]
    done = in_a_process(code, tmp_path, *flags, "--grpc-port", "0", "--metrics-port", "0")
    assert done.returncode == 1
    assert re.search(rf'cannot start: .* needs {engine}: pip install "encserve\[{extra}\]"$', done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
