"""Shared basics: errors, names, precisions, array types, and ONNX Runtime."""
