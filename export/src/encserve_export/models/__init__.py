"""Builds PyTorch models and writes them as ONNX: our own encoder, encoders of transformers, and users' modules."""
