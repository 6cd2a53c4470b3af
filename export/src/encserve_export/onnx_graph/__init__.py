"""Reads, checks, runs and converts ONNX graphs."""
