"""The gates: checks that refuse an export if its outputs differ too much from the outputs of the original model.

Hidden states are compared with PyTorch, or, for an ONNX file without a model in PyTorch, between batches. Token ids and
vectors of texts are compared with transformers or sentence-transformers.
"""
