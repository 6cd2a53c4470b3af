"""Imports ONNX Runtime with telemetry disabled. Telemetry would store an identifier in the home directory."""

import os
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime reads this variable at import

import onnxruntime

__all__ = ["onnxruntime", "open_session"]


def open_session(graph: Path | bytes, weights: Path | None = None) -> onnxruntime.InferenceSession:
    """Load a graph in ONNX Runtime on the CPU.

    Args:
        graph: The path of an ONNX file, or its content.
        weights: The folder of the external weights, if `graph` is bytes.

    Raises:
        Exception: ONNX Runtime cannot load the graph. Its exceptions have no public base class.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # no logs, because the exporter reports ONNX Runtime's exceptions
    # Without this option, int8 results are wrong on x86 CPUs without VNNI instructions. On these CPUs, sums of two
    # 8-bit products saturate at 16 bits.
    options.add_session_config_entry("session.x64quantprecision", "1")
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
