"""The engine on ONNX Runtime: padded batches; and the inspector, with a session of its own."""

import functools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from encserve_server.engine.aligned import ALIGNMENT_BYTES, align_weights
from encserve_server.engine.base import BatchResult, EngineInfo, cpu_parallel_runs
from encserve_server.engine.padding import check_interface, check_shape, lay_out
from encserve_server.engine.prepacked import PrepackedWeights
from encserve_server.errors import BundleError, DeviceError
from encserve_server.system import memory
from encserve_server.types.arrays import ModelInput, Numbers
from encserve_server.types.bundles import Graph, HeadGraph, InspectGraph
from encserve_server.types.inspections import InspectKind, InspectTensor

# From 1.31 on it reports to its makers, and keeps an identifier in the home directory, unless told not to before that.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
# A batch of more padded tokens on the CPU gives back the memory that its session took for it, which costs little beside
# the run. Else each session would keep for good what the longest text ever needed.
_MOST_KEPT_TOKENS = 2048
# ONNX Runtime on x86 CPUs without VNNI saturates sums of two products of 8 bits at 16 bits, but for this option.
_EXACT_BYTES = {"session.x64quantprecision": "1"}
# Weights of fewer bytes stay in the graph.
_PREPACKED_OPTIONS = {
    "session.optimized_model_external_initializers_file_name": "model.onnx.data",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
    "session.save_external_prepacked_constant_initializers": "1",
}
# What the files depend on, beside the graph and the CPU.
_PREPACKED_FOR = {
    "runtime": f"{ort.__version__} {ort.get_build_info()}",
    "alignment": str(ALIGNMENT_BYTES),
    **_PREPACKED_OPTIONS,
    **_EXACT_BYTES,
}

logger = logging.getLogger(__name__)


class OnnxEngine:
    """Runs one model in ONNX Runtime.

    On the CPU there are two sessions of it where batches run side by side: a *wide* one, whose threads share the batch
    that runs alone, and a *narrow* one, in which each of several batches has a part of the threads. A session cannot
    change its threads from run to run. On CUDA all batches run in one session.
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
        """Loads the model.

        Args:
            graph: The ONNX file and its interface.
            device: "cpu", "cuda", or "auto": CUDA where it really loads, the CPU otherwise, with a warning if CUDA was
                there but would not load.
            intra_op_threads: The CPU's threads that run batches.
            parallel_runs: How many batches run at once, on the CPU no more than there are threads; None for what suits
                the device.
            weights: Where sessions on the CPU share the weights; None if each has its own.

        Raises:
            DeviceError: CUDA was asked for and does not load; ONNX Runtime alone would fall back in silence.
            BundleError: The file is no model that this ONNX Runtime can run, or its inputs and outputs are others.
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
        self.widens = self.info.device == "cpu" and self.max_parallel_runs > 1
        if self.widens:
            # The threads of a session are shared by all its runs: beside one for each run that are the others.
            shared = intra_op_threads - self.max_parallel_runs
            self._narrow = _open_session(graph.path, "cpu", 1 + shared, weights)

    def run(self, sequences: Sequence[ModelInput], *, attended: Sequence[int] = (), alone: bool = True) -> BatchResult:
        """Pads the sequences to the longest, and runs them."""
        began = time.perf_counter()
        feeds, lengths = lay_out(self._graph, sequences, attended)
        laid_out = time.perf_counter()
        session = self._wide if alone else self._narrow
        options = None
        if self.info.device == "cpu" and len(lengths) * max(lengths) > _MOST_KEPT_TOKENS:
            options = ort.RunOptions()
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        (output,) = session.run([self._graph.output_name], feeds, options)  # (batch, seq, d_model)
        ran = time.perf_counter()
        check_shape(self._graph, output, lengths)
        return BatchResult(output, lengths, collate_seconds=laid_out - began, compute_seconds=ran - laid_out)

    def close(self) -> None:
        """Frees the sessions and their memory."""
        del self._wide, self._narrow


class OnnxHead:
    """What comes after the encoder or after pooling, in an ONNX Runtime session of its own."""

    def __init__(self, head: HeadGraph, *, device: str, threads: int) -> None:
        """Loads the graph, to run on "cpu" or "cuda", on the CPU in so many threads.

        Raises:
            BundleError: It is no model that this ONNX Runtime can run, or its inputs and output are others.
            DeviceError: As for `OnnxEngine`.
        """
        self._head = head
        # What it takes is given back after every run: a vocabulary's numbers for each token are hundreds of MiB.
        self._session = _open_session(head.path, device, threads, keeps_memory=False)
        found = sorted((node.name, node.type) for node in (*self._session.get_inputs(), *self._session.get_outputs()))
        wanted = sorted((name, "tensor(float)") for name in (*head.input_names, head.output_name))
        if found != wanted:
            raise BundleError(f"{head.path}: the graph's inputs and output are {found}; the manifest names {wanted}")

    def run(self, *inputs: Numbers) -> Numbers:
        """Runs a batch."""
        feeds = dict(zip(self._head.input_names, inputs, strict=True))
        vectors: Numbers = self._session.run([self._head.output_name], feeds)[0]
        return vectors


class OnnxInspector:
    """Looks into one model, in an ONNX Runtime session of its own."""

    def __init__(self, inspect: InspectGraph, *, device: str, weights: PrepackedWeights | None = None) -> None:
        """Loads the graph, to run on "cpu" or "cuda"; on the CPU in the caller's thread alone, with shared weights.

        Raises:
            DeviceError, BundleError: As for `OnnxEngine`.
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
        """Runs one sequence and keeps what is wanted; what is not is never copied out."""
        names = [_output_names(self._inspect, kind, layers) for kind, layers in wanted]
        feeds, _ = lay_out(self._inspect.graph, [sequence], [attended] if attended else ())
        began = time.perf_counter()
        outputs = self._session.run([name for its in names for name in its], feeds)
        compute_seconds = time.perf_counter() - began
        arrays = iter(outputs)
        tensors = []
        for (kind, layers), its in zip(wanted, names, strict=True):
            parts = tuple(_numbers(next(arrays), kind) for _ in its)
            tensors.append(InspectTensor(kind, layers, parts))
        return tensors, compute_seconds

    def close(self) -> None:
        """Frees the session and its memory."""
        del self._session


def _parallel_runs(asked: int | None, device: str, threads: int) -> int:
    """How many batches run at once."""
    if device == "cuda":
        return asked or 2  # one is laid out and cut while the other runs
    return cpu_parallel_runs(asked, threads)


def _output_names(inspect: InspectGraph, kind: InspectKind, layers: tuple[int, ...]) -> list[str]:
    names = inspect.names[kind]
    return [names[layer] for layer in layers] if layers else list(names)


def _numbers(output: Numbers, kind: InspectKind) -> Numbers:
    """An output without the axis of the batch; positions have none."""
    return output if kind is InspectKind.POSITIONS else output[0]


def _check_interface(session: ort.InferenceSession, graph: Graph) -> None:
    """Compares a graph's inputs and outputs with what the manifest says."""
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
    """Opens a session on the device asked for, and makes sure that it is the one in use.

    On the CPU, `weights` is where it shares them, and `keeps_memory` whether it keeps what its largest run took.
    """
    if device in ("auto", "cuda"):
        session, problem = _try_cuda(path)
        if session is not None:
            return session
        if device == "cuda":
            raise DeviceError(f"--device cuda: {problem}. Nothing runs on the CPU unless asked: --device cpu or auto.")
        # Only worth a warning where somebody meant to have CUDA: with the GPU build of ONNX Runtime.
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
    """Opens a graph whose weights are mapped. It is optimized; a second time would change float16's last bits."""
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=[CPU_PROVIDER])
    memory.trim()  # ONNX Runtime lays every weight out once more, to find it in the file
    return session


def _write_prepacked(graph: Path, path: Path) -> None:
    """Writes a graph as it is after optimization, and its weights beside it, also as the CPU's kernels take them."""
    options = _session_options(threads=1)
    options.optimized_model_filepath = str(path)
    for name, value in _PREPACKED_OPTIONS.items():
        options.add_session_config_entry(name, value)
    ort.InferenceSession(graph, options, providers=[CPU_PROVIDER])
    align_weights(path)
    _open_prepacked(path, _session_options(threads=1))  # what cannot be opened is not kept


def _try_cuda(path: Path) -> tuple[ort.InferenceSession | None, str]:
    """A session that really runs on CUDA, or None and why not."""
    if CUDA_PROVIDER not in ort.get_available_providers():
        return None, f"this ONNX Runtime ({ort.__version__}) has no CUDA provider; install encserve-server[gpu]"
    # The CUDA libraries come as wheels, which the dynamic loader does not search.
    ort.preload_dlls()
    try:
        session = ort.InferenceSession(path, _session_options(), providers=[CUDA_PROVIDER, CPU_PROVIDER])
    except Exception as error:  # as above
        return None, f"the CUDA provider does not start: {error}"
    active = session.get_providers()
    if active[0] != CUDA_PROVIDER:
        # get_providers() tells what was really loaded; asking for CUDA and getting the CPU raises nothing.
        return (
            None,
            f"the CUDA provider did not load (active: {', '.join(active)}); check the driver and CUDA libraries",
        )
    return session, ""


def _session_options(threads: int = 0) -> ort.SessionOptions:
    """What every session has in common, and the threads of one on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.inter_op_num_threads = 1
    # Between runs the threads sleep: spinning, they would take the cores from the event loop and from other models.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    for name, value in _EXACT_BYTES.items():
        options.add_session_config_entry(name, value)
    options.log_severity_level = 4  # what fails is raised as well, and reported by us, once and in a line of our own
    return options
