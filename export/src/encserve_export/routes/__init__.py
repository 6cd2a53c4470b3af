"""From a checkpoint, a directory, an ONNX file or a configuration to a bundle: one file per way."""
