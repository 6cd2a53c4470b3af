"""The engine on OpenVINO: the same ONNX file on the CPU, in float32 or in bfloat16."""

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

# Importing openvino reports that to Intel through Google Analytics, and writes into the home directory, unless the
# package that does so cannot be imported.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
import openvino as ov  # noqa: E402

_CPU = "CPU"
# What the CPU must be able to do, as OpenVINO calls it, for each precision that can be asked for.
_CAPABILITIES = {"float32": "FP32", "bfloat16": "BF16"}
# What leaves ids as they are, but elsewhere or in another type.
_MOVES = {"Convert", "Gather", "Reshape", "Squeeze", "Unsqueeze"}
_TYPES = {"float32": ov.Type.f32, "bfloat16": ov.Type.bf16}


class OpenVinoEngine:
    """Runs one model in OpenVINO.

    Where batches run side by side it is compiled twice: *wide*, where all threads share the batch that runs alone, and
    *narrow*, where each of several batches has a part of the threads.
    """

    def __init__(self, graph: Graph, *, precision: str, intra_op_threads: int, parallel_runs: int | None = 1) -> None:
        """Loads the model.

        Args:
            graph: The ONNX file and its interface.
            precision: "float32" or "bfloat16" to compute in that whatever floating-point type the file has, or "model":
                float32 for what the file has in any floating-point type, 8 bit where it has that.
            intra_op_threads: The threads that run batches.
            parallel_runs: How many batches run at once, no more than there are threads; None for what suits the CPU.

        Raises:
            DeviceError: The CPU has no instructions for the precision, or OpenVINO takes another one.
            BundleError: The file is no model that this OpenVINO can run, its inputs and outputs are others, or it is
                quantized and another precision was asked for.
        """
        floating = "float" in graph.precision  # float32, float16 or bfloat16
        if precision != "model" and not floating:
            raise BundleError(f"{graph.path}: --precision {precision} cannot be had from a model of {graph.precision}")
        computed = "float32" if precision == "model" else precision
        self._graph = graph
        model = _read(graph)
        self.max_parallel_runs = cpu_parallel_runs(parallel_runs, intra_op_threads)
        self.widens = self.max_parallel_runs > 1
        self._compiled = _compile(model, graph, computed, intra_op_threads, 1)
        self._wide = self._narrow = _requests(self._compiled, 1)
        if self.widens:
            narrow = _compile(model, graph, computed, intra_op_threads, self.max_parallel_runs)
            self._narrow = _requests(narrow, self.max_parallel_runs)
        self.info = EngineInfo(
            provider="OpenVINO",
            device="cpu",
            precision=computed if floating else graph.precision,
            runtime=f"openvino {ov.__version__.partition('-')[0]}",
        )

    def run(self, sequences: Sequence[ModelInput], *, attended: Sequence[int] = (), alone: bool = True) -> BatchResult:
        """Pads the sequences to the longest, and runs them."""
        began = time.perf_counter()
        feeds, lengths = lay_out(self._graph, sequences, attended)
        collate_seconds = time.perf_counter() - began
        requests = self._wide if alone else self._narrow
        request = requests.get()
        try:
            began = time.perf_counter()
            # The inputs are read where they lie; the output is copied, because the next run writes into its memory.
            output = request.infer(feeds, share_inputs=True, share_outputs=False)[0]  # (batch, seq, d_model)
            ran = time.perf_counter()
        finally:
            requests.put(request)
        check_shape(self._graph, output, lengths)
        return BatchResult(output, lengths, collate_seconds=collate_seconds, compute_seconds=ran - began)

    def close(self) -> None:
        """Frees the model and its memory."""
        del self._wide, self._narrow, self._compiled


class OpenVinoHead:
    """What comes after the encoder or after pooling, in float32."""

    def __init__(self, head: HeadGraph, *, threads: int) -> None:
        """Loads the graph, to run in so many threads.

        Raises:
            BundleError: It is no model that this OpenVINO can run, or its inputs and output are others.
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
        """Runs a batch, in a request of its own."""
        request = self._compiled.create_infer_request()
        feeds = dict(zip(self._head.input_names, inputs, strict=True))
        vectors: Numbers = request.infer(feeds, share_outputs=False)[self._head.output_name]
        return vectors


def _read(graph: Graph) -> Any:
    """Reads the file, checks its interface, and leaves only the output that is wanted."""
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
        # OpenVINO would look up zeros for the ids beyond.
        if rows < graph.vocab_size:
            raise BundleError(
                f"{graph.path}: its table of tokens has {rows} rows; the manifest's encoder.vocab_size is "
                f"{graph.vocab_size}"
            )
    for result in model.get_results():
        if graph.output_name not in result.input(0).get_source_output().get_names():
            model.remove_result(result)
    return model


def _table_rows(ids: Any) -> Iterator[int]:
    """The rows of each table that ids look up, whatever has only moved or converted them before."""
    for target in ids.get_target_inputs():
        node = target.get_node()
        if node.get_type_name() == "Gather" and target.get_index() == 1:
            rows = node.input(0).get_partial_shape()[0]
            if rows.is_static:
                yield rows.get_length()
        elif node.get_type_name() in _MOVES and target.get_index() == 0:
            yield from _table_rows(node.output(0))


def _requests(compiled: Any, count: int) -> SimpleQueue[Any]:
    """As many requests as runs at once; each holds the memory of one, so who runs a batch takes one out meanwhile."""
    requests: SimpleQueue[Any] = SimpleQueue()
    for _ in range(count):
        requests.put(compiled.create_infer_request())
    return requests


def _compile(model: Any, graph: Graph, precision: str, threads: int, parallel_runs: int) -> Any:
    """Compiles for the CPU, and makes sure that it computes in the precision asked for."""
    core = ov.Core()
    if _CAPABILITIES[precision] not in core.get_property(_CPU, "OPTIMIZATION_CAPABILITIES"):
        # OpenVINO would take it all the same: slower than float32, or float32 in silence.
        raise DeviceError(
            f"--precision {precision}: this CPU ({core.get_property(_CPU, 'FULL_DEVICE_NAME')}) has no instructions "
            "for it (AVX512-BF16 or AMX); --precision model or float32 runs"
        )
    config = {
        "INFERENCE_PRECISION_HINT": _TYPES[precision],
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # nothing is rounded to 8 bit that the file does not have so
        "NUM_STREAMS": parallel_runs,
        "INFERENCE_NUM_THREADS": threads,
        # Several models, and other processes, share the CPUs: threads that are tied to one would wait for each other.
        "ENABLE_CPU_PINNING": False,
    }
    try:
        compiled = core.compile_model(model, _CPU, config)
    except Exception as error:  # as above
        raise BundleError(f"{graph.path}: OpenVINO cannot compile it: {_brief(error)}") from error
    used = compiled.get_property("INFERENCE_PRECISION_HINT")
    if used != _TYPES[precision]:
        raise DeviceError(f"--precision {precision}: OpenVINO computes in {used.to_string()} instead")
    return compiled


def _brief(error: Exception) -> str:
    """What an OpenVINO error says, without the places in its sources."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("Exception from", "Check '"))) or "?"
