"""Modules that other packages share: errors, names, precisions, array types, and ONNX Runtime."""
