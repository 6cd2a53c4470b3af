"""What everything stands on: errors, names, precisions, and ONNX Runtime."""
