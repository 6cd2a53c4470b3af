"""The encoders: our own, and those of transformers."""
