"""Reads the files of a checkpoint: weights, tokenizers and JSON. Code in a checkpoint is never executed."""
