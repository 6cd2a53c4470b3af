"""ONNX Runtime, told not to report to its makers and not to keep an identifier in the home directory."""

import os
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it is read once, when the library is loaded

import onnxruntime

__all__ = ["onnxruntime", "open_session"]


def open_session(graph: Path | bytes, weights: Path | None = None) -> onnxruntime.InferenceSession:
    """A graph in ONNX Runtime on the CPU, ready to run.

    Args:
        graph: The path of an ONNX file, or the bytes of one.
        weights: The folder of the external weights, for `graph` as bytes.

    Raises:
        Exception: ONNX Runtime cannot load it; its exceptions share no public base class.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised too, and we report each once
    # On x86 CPUs without VNNI, sums of two products of 8 bits are saturated at 16 bits, but for this option.
    options.add_session_config_entry("session.x64quantprecision", "1")
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
