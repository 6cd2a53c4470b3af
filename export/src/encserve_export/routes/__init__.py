"""Exports models as bundles. Most modules export one type of source, such as a checkpoint or an ONNX file."""
