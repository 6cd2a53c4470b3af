"""ONNX Runtime, told not to report to its makers and not to keep an identifier in the home directory."""

import os
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it is read once, when the library is loaded

import onnxruntime

__all__ = ["onnxruntime", "open_session"]


def open_session(graph: Path | bytes, weights: Path | None = None) -> onnxruntime.InferenceSession:
    """A graph in ONNX Runtime on the CPU, ready to run.

    Args:
        graph: The file, or what would be in it.
        weights: The folder of the file of its weights, where `graph` is no path.

    Raises:
        Exception: ONNX Runtime cannot load it; its exceptions share no public base class.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised as well, and said by us, once
    # Products of 8 bits are exact on x86 CPUs without VNNI too, which otherwise cut off what does not fit 16 bits.
    options.add_session_config_entry("session.x64quantprecision", "1")
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
