"""The engine, the heads and the inspector on ONNX Runtime."""

import functools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from encserve.extras import install_line
from encserve_server.engine.aligned import ALIGNMENT_BYTES, align_weights
from encserve_server.engine.base import BatchResult, EngineInfo, cpu_parallel_runs
from encserve_server.engine.padding import check_interface, check_shape, lay_out
from encserve_server.engine.prepacked import PrepackedWeights
from encserve_server.errors import BundleError, DeviceError
from encserve_server.system import memory
from encserve_server.types.arrays import ModelInput, Numbers
from encserve_server.types.bundles import Graph, HeadGraph, InspectGraph
from encserve_server.types.inspections import InspectKind, InspectTensor

# ONNX Runtime 1.31 and later send telemetry and write an identifier to the home directory. This variable, set before
# the import, turns both off.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
# After a batch with more padded tokens than this number, a session on the CPU frees its memory. Otherwise, each session
# would keep the memory of its largest batch. Freeing takes little time.
_MAX_KEPT_TOKENS = 2048
# Without this option, ONNX Runtime clips sums of two 8-bit products to 16 bits on x86 CPUs without VNNI.
_EXACT_BYTES = {"session.x64quantprecision": "1"}
# Weights of less than 1,024 bytes stay in the ONNX file.
_PREPACKED_OPTIONS = {
    "session.optimized_model_external_initializers_file_name": "model.onnx.data",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
    "session.save_external_prepacked_constant_initializers": "1",
}
# The prepacked files depend on these values, on the graph and on the CPU.
_PREPACKED_FOR = {
    "runtime": f"{ort.__version__} {ort.get_build_info()}",
    "alignment": str(ALIGNMENT_BYTES),
    **_PREPACKED_OPTIONS,
    **_EXACT_BYTES,
}

logger = logging.getLogger(__name__)


class OnnxEngine:
    """Runs one model in ONNX Runtime.

    For parallel batches on the CPU, the engine has two sessions, because the number of threads of a session is fixed.
    In the *wide* session, all threads share one batch. In the *narrow* session, each of several batches uses a part of
    the threads. On CUDA, all batches run in one session.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        device: str,
        intra_op_threads: int,
        parallel_runs: int | None = 1,
        weights: PrepackedWeights | None = None,
    ) -> None:
        """Load the model.

        See `opening.open_engine` for the arguments. The device "auto" uses CUDA if CUDA loads, and otherwise the CPU.
        If an ONNX Runtime that was built with CUDA uses the CPU, the log has a warning.

        Raises:
            DeviceError: The device is "cuda", and CUDA does not load. ONNX Runtime would use the CPU without an error.
            BundleError: ONNX Runtime cannot run the file, or the file's interface differs from the manifest.
        """
        self._graph = graph
        self._wide = self._narrow = _open_session(graph.path, device, intra_op_threads, weights)
        provider = self._wide.get_providers()[0]
        self.info = EngineInfo(
            provider=provider,
            device="cuda" if provider == CUDA_PROVIDER else "cpu",
            precision=graph.precision,
            runtime=f"onnxruntime {ort.__version__}",
        )
        _check_interface(self._wide, graph)
        self.max_parallel_runs = _parallel_runs(parallel_runs, self.info.device, intra_op_threads)
        self.has_wide_session = self.info.device == "cpu" and self.max_parallel_runs > 1
        if self.has_wide_session:
            # A run uses its calling thread. All runs of a session share the other threads.
            shared = intra_op_threads - self.max_parallel_runs
            self._narrow = _open_session(graph.path, "cpu", 1 + shared, weights)

    def run(
        self,
        sequences: Sequence[ModelInput],
        *,
        attended: Sequence[int] = (),
        second_starts: Sequence[int] = (),
        alone: bool = True,
    ) -> BatchResult:
        """See `Engine.run`."""
        began = time.perf_counter()
        feeds, lengths = lay_out(self._graph, sequences, attended, second_starts)
        laid_out = time.perf_counter()
        session = self._wide if alone else self._narrow
        options = None
        if self.info.device == "cpu" and len(lengths) * max(lengths) > _MAX_KEPT_TOKENS:
            options = ort.RunOptions()
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        (output,) = session.run([self._graph.output_name], feeds, options)  # (batch, seq, d_model)
        ran = time.perf_counter()
        check_shape(self._graph, output, lengths)
        return BatchResult(output, lengths, collate_seconds=laid_out - began, compute_seconds=ran - laid_out)

    def close(self) -> None:
        """See `Engine.close`."""
        del self._wide, self._narrow


class OnnxHead:
    """The head of a model, in a separate session."""

    def __init__(self, head: HeadGraph, *, device: str, threads: int) -> None:
        """Load the head for the device "cpu" or "cuda". `threads` is used only on the CPU.

        Raises:
            BundleError: ONNX Runtime cannot run the file, or the file's interface differs from the manifest.
            DeviceError: See `OnnxEngine`.
        """
        self._head = head
        # The session frees its memory after every run, because a sparse head needs hundreds of MiB.
        self._session = _open_session(head.path, device, threads, keeps_memory=False)
        found = sorted((node.name, node.type) for node in (*self._session.get_inputs(), *self._session.get_outputs()))
        wanted = sorted((name, "tensor(float)") for name in (*head.input_names, head.output_name))
        if found != wanted:
            raise BundleError(f"{head.path}: the graph's inputs and output are {found}; the manifest names {wanted}")

    def run(self, *inputs: Numbers) -> Numbers:
        """See `Head.run`."""
        feeds = dict(zip(self._head.input_names, inputs, strict=True))
        vectors: Numbers = self._session.run([self._head.output_name], feeds)[0]
        return vectors


class OnnxInspector:
    """The inspector of a model, in a separate session."""

    def __init__(self, inspect: InspectGraph, *, device: str, weights: PrepackedWeights | None = None) -> None:
        """Load the graph for the device "cpu" or "cuda". On the CPU, the graph runs in the calling thread only.

        Raises:
            DeviceError, BundleError: See `OnnxEngine`.
        """
        self._inspect = inspect
        self._session = _open_session(inspect.graph.path, device, 1, weights)
        _check_interface(self._session, inspect.graph)
        found = {node.name for node in self._session.get_outputs()}
        missing = [name for names in inspect.names.values() for name in names if name not in found]
        if missing:
            raise BundleError(f"{inspect.graph.path}: the graph has no outputs {', '.join(missing)}")

    def run(
        self, sequence: ModelInput, wanted: Sequence[tuple[InspectKind, tuple[int, ...]]], *, attended: int = 0
    ) -> tuple[list[InspectTensor], float]:
        """See `Inspector.run`."""
        names = [_output_names(self._inspect, kind, layers) for kind, layers in wanted]
        feeds, _ = lay_out(self._inspect.graph, [sequence], [attended] if attended else ())
        began = time.perf_counter()
        outputs = self._session.run([name for kind_names in names for name in kind_names], feeds)
        compute_seconds = time.perf_counter() - began
        arrays = iter(outputs)
        tensors = []
        for (kind, layers), kind_names in zip(wanted, names, strict=True):
            parts = tuple(_without_batch(next(arrays), kind) for _ in kind_names)
            tensors.append(InspectTensor(kind, layers, parts))
        return tensors, compute_seconds

    def close(self) -> None:
        """See `Inspector.close`."""
        del self._session


def _parallel_runs(requested: int | None, device: str, threads: int) -> int:
    if device == "cuda":
        return requested or 2  # one batch is padded or pooled while the other runs
    return cpu_parallel_runs(requested, threads)


def _output_names(inspect: InspectGraph, kind: InspectKind, layers: tuple[int, ...]) -> list[str]:
    names = inspect.names[kind]
    return [names[layer] for layer in layers] if layers else list(names)


def _without_batch(output: Numbers, kind: InspectKind) -> Numbers:
    """Remove the batch axis of an output. Positions have no batch axis."""
    return output if kind is InspectKind.POSITIONS else output[0]


def _check_interface(session: ort.InferenceSession, graph: Graph) -> None:
    inputs, outputs = ({it.name: it.type for it in nodes} for nodes in (session.get_inputs(), session.get_outputs()))
    check_interface(graph, inputs, outputs, int64="tensor(int64)", float32="tensor(float)")


def _open_session(
    path: Path,
    device: str,
    intra_op_threads: int,
    weights: PrepackedWeights | None = None,
    *,
    keeps_memory: bool = True,
) -> ort.InferenceSession:
    """Open a session, and check that it uses the requested device.

    `weights` and `keeps_memory` are used only on the CPU. `weights` are prepacked weights that sessions share. With
    `keeps_memory`, the session keeps the memory of its largest run.
    """
    if device in ("auto", "cuda"):
        session, problem = _try_cuda(path)
        if session is not None:
            return session
        if device == "cuda":
            raise DeviceError(f"--device cuda: {problem}. To run on the CPU, use --device cpu or auto.")
        # A warning only with the GPU build of ONNX Runtime: users of this build expect CUDA.
        level = logging.WARNING if CUDA_PROVIDER in ort.get_available_providers() else logging.INFO
        logger.log(level, "running on the CPU", extra={"requested_device": device, "reason": problem})
    options = _session_options(intra_op_threads)
    options.enable_cpu_mem_arena = keeps_memory
    if weights is not None:
        shared = weights.open(
            path, _PREPACKED_FOR, _write_prepacked, functools.partial(_open_prepacked, options=options)
        )
        if shared is not None:
            return shared
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    try:
        return ort.InferenceSession(path, options, providers=[CPU_PROVIDER])
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        raise BundleError(f"{path}: ONNX Runtime cannot load it: {error}") from error


def _open_prepacked(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    """Open a prepacked graph. Do not optimize the graph again: that would change the last bits of float16 results."""
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=[CPU_PROVIDER])
    memory.trim()  # ONNX Runtime has packed each weight again, to look up the packed weight in the file
    return session


def _write_prepacked(graph: Path, path: Path) -> None:
    """Write the optimized graph, and a file with the weights in the usual layout and in the prepacked layout."""
    options = _session_options(threads=1)
    options.optimized_model_filepath = str(path)
    for name, value in _PREPACKED_OPTIONS.items():
        options.add_session_config_entry(name, value)
    ort.InferenceSession(graph, options, providers=[CPU_PROVIDER])
    align_weights(path)
    # If the model cannot be opened, raise the error before the cache stores the files.
    _open_prepacked(path, _session_options(threads=1))


def _try_cuda(path: Path) -> tuple[ort.InferenceSession | None, str]:
    """Return a session that runs on CUDA, or None and the reason."""
    if CUDA_PROVIDER not in ort.get_available_providers():
        hint = f"in a new environment, {install_line('gpu')}"  # onnxruntime-gpu does not work beside onnxruntime
        return None, f"this ONNX Runtime ({ort.__version__}) has no CUDA provider: {hint}"
    # The CUDA libraries are in Python packages, and the dynamic loader does not search there.
    ort.preload_dlls()
    try:
        session = ort.InferenceSession(path, _session_options(), providers=[CUDA_PROVIDER, CPU_PROVIDER])
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        return None, f"the CUDA provider does not start: {error}"
    active = session.get_providers()
    if active[0] != CUDA_PROVIDER:
        # Without CUDA, ONNX Runtime uses the CPU and raises no error. Only get_providers() shows the provider in use.
        return (
            None,
            f"the CUDA provider did not load (active: {', '.join(active)}); check the driver and CUDA libraries",
        )
    return session, ""


def _session_options(threads: int = 0) -> ort.SessionOptions:
    """Return the options of a session. `threads` is used only on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.inter_op_num_threads = 1
    # Between runs the threads sleep. Spinning threads would take the CPU from the event loop and from other models.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    for name, value in _EXACT_BYTES.items():
        options.add_session_config_entry(name, value)
    # No log lines of ONNX Runtime: it also raises its errors, and the server logs the raised errors.
    options.log_severity_level = 4
    return options
