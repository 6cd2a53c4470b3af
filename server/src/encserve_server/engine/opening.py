"""Opens the engine that the settings name. Imports only this engine's package: other packages may be missing."""

from types import ModuleType

from encserve.extras import needs
from encserve_server.engine.base import Engine, Head, Inspector
from encserve_server.engine.prepacked import PrepackedWeights
from encserve_server.errors import BundleError, EngineMissing
from encserve_server.types.bundles import Graph, HeadGraph, InspectGraph


def open_engine(
    graph: Graph,
    *,
    engine: str,
    precision: str,
    device: str,
    intra_op_threads: int,
    parallel_runs: int | None = 1,
    weights: PrepackedWeights | None = None,
) -> Engine:
    """Load a model into an engine.

    Args:
        graph: The ONNX file and its interface.
        engine: "onnxruntime" or "openvino".
        precision: "model" for the precision of the file, "float32", or with OpenVINO "bfloat16".
        device: "cpu", "cuda" or "auto". OpenVINO always uses the CPU.
        intra_op_threads: The number of CPU threads that run batches.
        parallel_runs: The number of parallel batches, on the CPU at most `intra_op_threads`; None for the device's
            default.
        weights: The prepacked weights that ONNX Runtime's sessions on the CPU share; None if each session has a copy.

    Raises:
        EngineMissing: The engine's package is not installed.
        DeviceError: The machine does not support the device or the precision.
        BundleError: The engine cannot run the file, or cannot run the file in this precision.
    """
    opened: Engine
    if engine == "openvino":
        openvino = _module("openvino")
        opened = openvino.OpenVinoEngine(
            graph, precision=precision, intra_op_threads=intra_op_threads, parallel_runs=parallel_runs
        )
    else:
        onnx = _module("onnx")
        if precision not in ("model", graph.precision):
            raise BundleError(
                f"{graph.path}: --precision {precision} is not possible for a model of {graph.precision}, because "
                "ONNX Runtime uses the precision of the file: use --precision model"
            )
        opened = onnx.OnnxEngine(
            graph, device=device, intra_op_threads=intra_op_threads, parallel_runs=parallel_runs, weights=weights
        )
    return opened


def open_head(
    head: HeadGraph,
    *,
    engine: str,
    device: str = "cpu",
    threads: int = 1,
) -> Head:
    """Load a head into an engine.

    Args:
        head: The ONNX file and its interface.
        engine: "onnxruntime" or "openvino".
        device: "cpu" or "cuda".
        threads: The number of CPU threads that run a batch, including the calling thread.

    Raises:
        EngineMissing, DeviceError, BundleError: See `open_engine`.
    """
    if engine == "openvino":
        openvino_head: Head = _module("openvino").OpenVinoHead(head, threads=threads)
        return openvino_head
    onnx_head: Head = _module("onnx").OnnxHead(head, device=device, threads=threads)
    return onnx_head


def open_inspector(inspect: InspectGraph, *, device: str, weights: PrepackedWeights | None = None) -> Inspector:
    """Load the inspector of a model. Inspectors always use ONNX Runtime.

    See `open_engine` for `weights` and for the errors.
    """
    inspector: Inspector = _module("onnx").OnnxInspector(inspect, device=device, weights=weights)
    return inspector


def check_installed(engine: str) -> None:
    """Check that an engine can be imported, before the server reads a bundle.

    Raises:
        EngineMissing: The engine's package is not installed or is broken.
    """
    _module("openvino" if engine == "openvino" else "onnx")


def _module(name: str) -> ModuleType:
    try:
        if name == "openvino":
            with needs("--engine openvino", "openvino", EngineMissing):
                from encserve_server.engine import openvino

                return openvino
        with needs("the engine", "cpu", EngineMissing):
            from encserve_server.engine import onnx

            return onnx
    except ModuleNotFoundError:
        raise
    except ImportError as error:  # for example, a shared library is missing
        package = "openvino" if name == "openvino" else "onnxruntime"
        raise EngineMissing(f"the Python package {package} cannot be imported: {error}") from error
