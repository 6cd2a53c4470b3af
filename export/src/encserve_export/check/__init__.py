"""The gates. They refuse an export whose outputs differ from the outputs of the original model.

The hidden states are compared with PyTorch. Token ids and vectors of texts are compared with transformers or
sentence-transformers.
"""
