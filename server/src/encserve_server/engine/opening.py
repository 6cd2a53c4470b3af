"""Opens the engine that the settings name. What runs it is imported here, so a server needs only what it uses."""

from types import ModuleType

from encserve_server.engine.base import Engine, Head, Inspector
from encserve_server.engine.prepacked import PrepackedWeights
from encserve_server.errors import BundleError, EngineMissing
from encserve_server.types.bundles import Graph, HeadGraph, InspectGraph

# What each engine needs, by its module: the package, and the extras of this distribution that bring it.
_NEEDS = {
    "onnx": ("onnxruntime", "encserve-server[cpu], or encserve-server[gpu] on a machine with CUDA"),
    "openvino": ("openvino", "encserve-server[openvino]"),
}


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
    """Loads a model into an engine.

    Args:
        graph: The ONNX file and its interface.
        engine: "onnxruntime" or "openvino".
        precision: "model" for what the file has, "float32", or with OpenVINO "bfloat16".
        device: "cpu", "cuda" or "auto"; OpenVINO takes the CPU.
        intra_op_threads: The CPU's threads that run batches.
        parallel_runs: How many batches run at once, on the CPU no more than there are threads; None for what suits the
            device.
        weights: Where sessions of ONNX Runtime on the CPU share the weights; None if each has its own.

    Raises:
        EngineMissing: Its package is not installed.
        DeviceError: The device or the precision cannot be had on this machine.
        BundleError: The file cannot be used, or not in this precision.
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
                f"{graph.path}: --precision {precision} cannot be had from a model of {graph.precision}; ONNX Runtime "
                "computes in what the file has"
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
    """Loads what comes after the encoder or after pooling.

    Args:
        head: The ONNX file and its interface.
        engine: As for `open_engine`.
        device: "cpu" or "cuda".
        threads: On the CPU those that run a batch, the caller's own among them.

    Raises:
        EngineMissing, DeviceError, BundleError: As for `open_engine`.
    """
    if engine == "openvino":
        openvino_head: Head = _module("openvino").OpenVinoHead(head, threads=threads)
        return openvino_head
    onnx_head: Head = _module("onnx").OnnxHead(head, device=device, threads=threads)
    return onnx_head


def open_inspector(inspect: InspectGraph, *, device: str, weights: PrepackedWeights | None = None) -> Inspector:
    """Loads what looks into a model; that is ONNX Runtime, whichever engine runs the model.

    `weights` is as for `open_engine`.

    Raises:
        EngineMissing, DeviceError, BundleError: As for `open_engine`.
    """
    inspector: Inspector = _module("onnx").OnnxInspector(inspect, device=device, weights=weights)
    return inspector


def check_installed(engine: str) -> None:
    """Makes sure that an engine can be imported, before anything is read for it.

    Raises:
        EngineMissing: Its package is not installed, or is broken.
    """
    _module("openvino" if engine == "openvino" else "onnx")


def _module(name: str) -> ModuleType:
    """The engine's module, imported when it is first needed."""
    package, extras = _NEEDS[name]
    try:
        if name == "openvino":
            from encserve_server.engine import openvino

            return openvino
        from encserve_server.engine import onnx

        return onnx
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise EngineMissing(f"the Python package {package} is not installed; install {extras}") from error
    except ImportError as error:  # a library that it links is missing, for one
        raise EngineMissing(f"the Python package {package} cannot be imported: {error}") from error
