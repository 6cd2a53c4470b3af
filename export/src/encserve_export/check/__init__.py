"""Refuses an export if the bundle's outputs differ too much from the outputs of the original model.

Hidden states are compared with PyTorch's. For an ONNX file without a PyTorch model, padded batches are compared with
single sequences. Token ids and vectors of texts are compared with the outputs of transformers or sentence-transformers.
"""
