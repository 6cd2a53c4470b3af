"""ONNX graphs: read, checked, run, and rewritten in another precision."""
