"""Runs a model and its heads with OpenVINO on the CPU. ONNX Runtime and OpenVINO run the same ONNX files."""

import sys
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from encserve_server.engine.base import BatchResult, EngineInfo, cpu_parallel_runs
from encserve_server.engine.padding import check_interface, check_shape, lay_out
from encserve_server.errors import BundleError, DeviceError
from encserve_server.types.arrays import ModelInput, Numbers
from encserve_server.types.bundles import Graph, HeadGraph

# The package openvino_telemetry reports each import of openvino to Intel, and writes to the home directory. This
# line makes the import of openvino_telemetry fail.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
import openvino as ov  # noqa: E402

_CPU = "CPU"
# For each precision, the capability that the CPU must have, by OpenVINO's name.
_CAPABILITIES = {"float32": "FP32", "bfloat16": "BF16"}
# The operators that only move or convert ids.
_MOVES = {"Convert", "Gather", "Reshape", "Squeeze", "Unsqueeze"}
_TYPES = {"float32": ov.Type.f32, "bfloat16": ov.Type.bf16}


class OpenVinoEngine:
    """Runs one model in OpenVINO.

    For parallel batches, the model is compiled twice. In the *wide* model, all threads share one batch. In the *narrow*
    model, each of several batches uses a part of the threads.
    """

    def __init__(self, graph: Graph, *, precision: str, intra_op_threads: int, parallel_runs: int | None = 1) -> None:
        """Load the model.

        See `opening.open_engine` for the arguments. The precision "model" means float32 for a floating-point model. A
        quantized model needs the precision "model", and its 8-bit operators stay at 8 bits.

        Raises:
            DeviceError: The CPU has no instructions for the precision, or OpenVINO uses another precision.
            BundleError: OpenVINO cannot run the file in this precision, or the file's interface differs from the
                manifest.
        """
        floating = "float" in graph.precision  # float32, float16 or bfloat16
        if precision != "model" and not floating:
            raise BundleError(
                f"{graph.path}: --precision {precision} is not possible for a model of {graph.precision}: use "
                "--precision model"
            )
        computed = "float32" if precision == "model" else precision
        self._graph = graph
        model = _read(graph)
        self.max_parallel_runs = cpu_parallel_runs(parallel_runs, intra_op_threads)
        self.has_wide_session = self.max_parallel_runs > 1
        self._compiled = _compile(model, graph, computed, intra_op_threads, 1)
        self._wide = self._narrow = _requests(self._compiled, 1)
        if self.has_wide_session:
            narrow = _compile(model, graph, computed, intra_op_threads, self.max_parallel_runs)
            self._narrow = _requests(narrow, self.max_parallel_runs)
        self.info = EngineInfo(
            provider="OpenVINO",
            device="cpu",
            precision=computed if floating else graph.precision,
            runtime=f"openvino {ov.__version__.partition('-')[0]}",
        )

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
        collate_seconds = time.perf_counter() - began
        requests = self._wide if alone else self._narrow
        request = requests.get()
        try:
            began = time.perf_counter()
            # The inputs are not copied. The output is copied, because the next run overwrites its memory.
            output = request.infer(feeds, share_inputs=True, share_outputs=False)[0]  # (batch, seq, d_model)
            ran = time.perf_counter()
        finally:
            requests.put(request)
        check_shape(self._graph, output, lengths)
        return BatchResult(output, lengths, collate_seconds=collate_seconds, compute_seconds=ran - began)

    def close(self) -> None:
        """See `Engine.close`."""
        del self._wide, self._narrow, self._compiled


class OpenVinoHead:
    """The head of a model, in float32."""

    def __init__(self, head: HeadGraph, *, threads: int) -> None:
        """Load the head.

        Raises:
            BundleError: OpenVINO cannot run the file, or the file's interface differs from the manifest.
        """
        self._head = head
        options = {"INFERENCE_PRECISION_HINT": ov.Type.f32, "INFERENCE_NUM_THREADS": threads}
        try:
            self._compiled = ov.Core().compile_model(head.path, _CPU, options)
            self._compiled.output(head.output_name)
            for name in head.input_names:
                self._compiled.input(name)
        except Exception as error:  # OpenVINO's exceptions are RuntimeErrors of many kinds
            raise BundleError(f"{head.path}: OpenVINO cannot use it: {_brief(error)}") from error

    def run(self, *inputs: Numbers) -> Numbers:
        """See `Head.run`."""
        request = self._compiled.create_infer_request()
        feeds = dict(zip(self._head.input_names, inputs, strict=True))
        vectors: Numbers = request.infer(feeds, share_outputs=False)[self._head.output_name]
        return vectors


def _read(graph: Graph) -> Any:
    """Read the file, check its interface, and remove unused outputs."""
    try:
        model = ov.Core().read_model(graph.path)
    except Exception as error:  # OpenVINO's exceptions are RuntimeErrors of many kinds
        raise BundleError(f"{graph.path}: OpenVINO cannot read it: {_brief(error)}") from error
    inputs, outputs = (
        {name: port.element_type.to_string() for port in ports for name in port.get_names()}
        for ports in (model.inputs, model.outputs)
    )
    check_interface(graph, inputs, outputs, int64="i64", float32="f32")
    for rows in _table_rows(model.input(graph.input_name)):
        # OpenVINO would return zeros for larger ids.
        if rows < graph.vocab_size:
            raise BundleError(
                f"{graph.path}: the embedding table has {rows} rows; the manifest's encoder.vocab_size is "
                f"{graph.vocab_size}"
            )
    for result in model.get_results():
        if graph.output_name not in result.input(0).get_source_output().get_names():
            model.remove_result(result)
    return model


def _table_rows(ids: Any) -> Iterator[int]:
    """Yield the number of rows of each embedding table that is read by token id."""
    for target in ids.get_target_inputs():
        node = target.get_node()
        if node.get_type_name() == "Gather" and target.get_index() == 1:
            rows = node.input(0).get_partial_shape()[0]
            if rows.is_static:
                yield rows.get_length()
        elif node.get_type_name() in _MOVES and target.get_index() == 0:
            yield from _table_rows(node.output(0))


def _requests(compiled: Any, count: int) -> SimpleQueue[Any]:
    """Return a queue of `count` requests. Each request has the memory for one run."""
    requests: SimpleQueue[Any] = SimpleQueue()
    for _ in range(count):
        requests.put(compiled.create_infer_request())
    return requests


def _compile(model: Any, graph: Graph, precision: str, threads: int, parallel_runs: int) -> Any:
    """Compile the model for the CPU, and check that it uses the requested precision."""
    core = ov.Core()
    if _CAPABILITIES[precision] not in core.get_property(_CPU, "OPTIMIZATION_CAPABILITIES"):
        # Without this check, OpenVINO would run slower than in float32, or use float32 without an error.
        raise DeviceError(
            f"--precision {precision}: this CPU ({core.get_property(_CPU, 'FULL_DEVICE_NAME')}) has no instructions "
            "for it (AVX512-BF16 or AMX): use --precision model or float32"
        )
    config = {
        "INFERENCE_PRECISION_HINT": _TYPES[precision],
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # do not quantize floating-point parts to 8 bits
        "NUM_STREAMS": parallel_runs,
        "INFERENCE_NUM_THREADS": threads,
        # Models and other processes share the CPUs. Threads pinned to the same CPU would wait for each other.
        "ENABLE_CPU_PINNING": False,
    }
    try:
        compiled = core.compile_model(model, _CPU, config)
    except Exception as error:  # OpenVINO's exceptions are RuntimeErrors of many kinds
        raise BundleError(f"{graph.path}: OpenVINO cannot compile it: {_brief(error)}") from error
    used = compiled.get_property("INFERENCE_PRECISION_HINT")
    if used != _TYPES[precision]:
        raise DeviceError(f"--precision {precision}: OpenVINO computes in {used.to_string()} instead")
    return compiled


def _brief(error: Exception) -> str:
    """Return the text of an OpenVINO error without its source locations."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("Exception from", "Check '"))) or "?"
