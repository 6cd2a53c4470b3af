"""Reads the sources of a model: files, the hub, weights and tokenizers. Code in a source is never executed."""
