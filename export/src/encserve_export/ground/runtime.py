"""ONNX Runtime, told not to report to its makers and not to keep an identifier in the home directory."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it is read once, when the library is loaded

import onnxruntime

__all__ = ["onnxruntime"]
